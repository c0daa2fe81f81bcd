//! Policies that select nodes by their labels, as an ExternalIPPool does.

use super::*;
use crate::model::policy::{EligibleNodes, NodeSelectors};
use crate::model::samples::equals;
use crate::model::view::Labels;

const ADDRESS: &str = "172.18.0.100";

/// Three nodes: `n1` and `n2` in rack 1, none of them with the label of egress nodes.
fn racks() -> Nodes {
    let place = |(name, node): (String, Arc<Node>)| {
        let rack = if name == "n3" { "2" } else { "1" };
        let labels = Arc::new(Labels::from([("rack".to_owned(), rack.to_owned()), (name.clone(), "is".to_owned())]));
        (name, Arc::new(Node { labels, assignable: false, ..(*node).clone() }))
    };
    nodes(3).into_iter().map(place).collect()
}

fn on(selectors: NodeSelectors, assigned: &[(&str, &str)]) -> Policies {
    let (key, policy) = policy("a", 1, &[ADDRESS], assigned);
    let policy = EgressPolicy { eligible_nodes: EligibleNodes::Selected(selectors), ..(*policy).clone() };
    [(key, Arc::new(policy))].into()
}

#[test]
fn an_address_is_on_a_node_that_all_selectors_match() {
    let node = |selectors: &[_], assigned: &[_]| {
        let outcomes = assign(&on(selectors.iter().cloned().collect(), assigned), &racks());
        node_of(&outcomes, "a", ADDRESS).map(str::to_owned)
    };
    let (rack1, rack2, n2) = (equals("rack", "1"), equals("rack", "2"), equals("n2", "is"));
    assert!(node(&[], &[]).is_some(), "without a selector all nodes");
    assert_eq!(node(std::slice::from_ref(&rack2), &[]).as_deref(), Some("n3"));
    assert_eq!(node(&[rack1.clone(), n2], &[]).as_deref(), Some("n2"));
    assert_eq!(node(&[rack1.clone(), rack2.clone()], &[]), None);
    assert_eq!(node(&[rack1], &[("n2", ADDRESS)]).as_deref(), Some("n2"), "it stays where it may be");
    assert_eq!(node(&[rack2], &[("n2", ADDRESS)]).as_deref(), Some("n3"), "and leaves a node that it may not");
}
