//! Policies whose addresses share one node, as those of an EgressService do.

use super::*;
use crate::model::policy::{EligibleNodes, PolicyKind};
use crate::model::services::{Service, ServiceKey};
use crate::model::view::Update;

const V4: &str = "192.0.2.1";
const V6: &str = "2001:db8::1";

fn service_key(name: &str) -> PolicyKey {
    PolicyKey { kind: PolicyKind::Assignment, name: name.into() }
}

/// `names` are the nodes that may host it.
fn service(name: &str, names: Option<&[&str]>, assigned: &[(&str, &str)]) -> (PolicyKey, Arc<EgressPolicy>) {
    let (_, policy) = policy(name, 1, &[V4, V6], assigned);
    let names = names.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    let mut policy = policy.of_service(1);
    policy.eligible_nodes = EligibleNodes::One(names);
    (service_key(name), Arc::new(policy))
}

/// Without the label, in networks that do not contain the addresses.
fn unlabelled(n: u8) -> Nodes {
    let without = |(name, node): (String, Arc<Node>)| (name, Arc::new(Node { assignable: false, ..(*node).clone() }));
    nodes(n).into_iter().map(without).collect()
}

fn hosts(outcomes: &Outcomes, name: &str) -> Vec<String> {
    outcomes[&service_key(name)].items.iter().map(|item| item.node.clone()).collect()
}

#[test]
fn both_addresses_are_on_one_node_that_needs_no_label_and_no_network() {
    let policies = Policies::from([service("s", None, &[])]);
    let found = hosts(&assign(&policies, &unlabelled(3)), "s");
    assert!(found.len() == 2 && found[0] == found[1], "{found:?}");
    assert!(hosts(&assign(&policies, &Nodes::new()), "s").is_empty());
}

#[test]
fn only_a_named_node_hosts_it_and_it_stays_where_it_is() {
    let named = |names: &[&str], assigned: &[(&str, &str)]| {
        let policies = Policies::from([service("s", Some(names), assigned)]);
        let outcomes = assign(&policies, &unlabelled(3));
        (hosts(&outcomes, "s"), status_of(&outcomes, "s"))
    };
    assert_eq!(named(&["n2"], &[]).0, ["n2", "n2"]);
    assert_eq!(named(&["n1", "n3"], &[("n3", V4), ("n3", V6)]).0, ["n3", "n3"]);
    assert_eq!(named(&["n1"], &[("n3", V4), ("n3", V6)]).0, ["n1", "n1"], "an edit moves both");
    assert_eq!(named(&["n1", "n3"], &[("n1", V4), ("n3", V6)]).0, ["n1", "n1"], "in the middle of a move");
    assert_eq!(named(&[], &[("n3", V4)]), (vec![], EntryStatus::NoNode));
}

fn status_of(outcomes: &Outcomes, name: &str) -> EntryStatus {
    outcomes[&service_key(name)].entries[0].1.clone()
}

#[test]
fn nodes_of_services_take_no_egress_ips_without_the_label() {
    let policies = Policies::from([service("s", None, &[]), policy("a", 1, &["172.18.0.100"], &[])]);
    let outcomes = assign(&policies, &unlabelled(3));
    assert_eq!(*status(&outcomes, "a"), EntryStatus::NoNode);
    assert_eq!(hosts(&outcomes, "s").len(), 2);
}

#[test]
fn both_kinds_are_spread_over_the_nodes_together() {
    let kept = policy("a", 1, &["172.18.0.100"], &[("n1", "172.18.0.100")]);
    let outcomes = assign(&Policies::from([service("s", None, &[]), kept]), &nodes(2));
    assert_eq!(hosts(&outcomes, "s"), ["n2", "n2"]);
}

#[test]
fn a_drained_or_silent_node_loses_both() {
    let assigned = [("n1", V4), ("n1", V6)];
    let policies = Policies::from([service("s", None, &assigned)]);
    let mut drained = unlabelled(2);
    Arc::make_mut(drained.get_mut("n1").expect("a node")).drained = true;
    assert_eq!(hosts(&assign(&policies, &drained), "s"), ["n2", "n2"]);
    let silent = BTreeSet::from(["n1".to_owned()]);
    assert_eq!(hosts(&assign_without(&policies, &unlabelled(2), &silent).policies, "s"), ["n2", "n2"]);
    drained.remove("n2");
    assert_eq!(hosts(&assign(&policies, &drained), "s"), ["n1", "n1"], "no other node could take them");
}

#[test]
fn the_address_of_its_service_is_not_reserved_for_it_and_is_for_others() {
    let given = BTreeSet::from([V4.parse().expect("a literal")]);
    let mut services = Services::default();
    let key_of = ServiceKey { namespace: "shop".into(), name: "front".into() };
    let of = Service { addresses: given.clone(), given, ..Service::default() };
    services.apply(Update::Changed(key_of, of));
    let assign = |policies: &Policies| {
        let (networks, none) = (&ClusterNetworks::default(), &BTreeSet::new());
        let inputs = AssignmentInputs {
            policies,
            nodes: &nodes(2),
            unreachable: none,
            absent: none,
            networks,
            services: &services,
            hand_overs: &BTreeMap::new(),
        };
        crate::allocation::assign(&inputs).policies
    };
    let other = policy("a", 1, &[V4], &[]);
    assert_eq!(*status(&assign(&Policies::from([other.clone()])), "a"), EntryStatus::Reserved(Reserved::Service));
    let outcomes = assign(&Policies::from([service("s", None, &[]), other]));
    assert_eq!(hosts(&outcomes, "s").len(), 2);
    assert!(matches!(status(&outcomes, "a"), EntryStatus::Taken { policy, .. } if *policy == service_key("s")));
}

#[test]
fn of_two_with_one_address_the_older_has_it() {
    let mut younger = service("t", None, &[]);
    Arc::make_mut(&mut younger.1).origin.created = 2;
    let outcomes = assign(&Policies::from([service("s", None, &[]), younger]), &nodes(2));
    assert_eq!((hosts(&outcomes, "s").len(), hosts(&outcomes, "t").len()), (2, 0));
}
