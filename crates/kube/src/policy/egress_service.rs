//! EgressServiceAssignment (`egress-agent.io/v1alpha1`) as an egress policy: what the controller has made of an EgressService.
//!
//! Its objects have the form of EgressIP's, and the list of nodes that may host it. They are cluster-wide and written by the
//! controller alone, since agents believe them: an EgressService is written by users of its namespace, and so are its annotations.

use kube::Client;
use kube::api::{ApiResource, DynamicObject};

use crate::crd;
use crate::policy::egress_ip::{read, write};
use crate::policy::{PolicyApi, StatusWriter};
use egress_core::model::policy::{EgressPolicy, PolicyKind};

pub(super) struct EgressServiceAssignments;

impl PolicyApi for EgressServiceAssignments {
    fn objects(&self) -> &'static str {
        "EgressServiceAssignment objects"
    }

    fn resource(&self) -> ApiResource {
        crd::egress_service_assignment_resource()
    }

    fn read(&self, object: &DynamicObject) -> EgressPolicy {
        read::policy(PolicyKind::EgressService, object)
    }

    fn status_writer(&self, client: Client) -> Box<dyn StatusWriter> {
        Box::new(write::Writer::new(&client, PolicyKind::EgressService))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use egress_core::model::policy::EligibleNodes;
    use egress_core::model::view::Labels;

    #[test]
    fn an_assignment_selects_once_it_has_a_node_and_names_who_may_host_it() {
        let read = |nodes: serde_json::Value, items: serde_json::Value| {
            let object = json!({
                "metadata": {"name": "shop.front"},
                "spec": {"egressIPs": ["192.0.2.1"], "namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}},
                         "nodes": nodes},
                "status": {"items": items},
            });
            EgressServiceAssignments.read(&serde_json::from_value(object).expect("an object"))
        };
        let web = Labels::from([("app".to_owned(), "web".to_owned())]);
        let selects = |policy: &EgressPolicy| policy.selects.as_ref().is_some_and(|selects| selects.pods.matches(&web));
        let there = json!([{"node": "n1", "egressIP": "192.0.2.1"}]);
        let (idle, served) = (read(json!(null), json!([])), read(json!(["n1"]), there));
        assert!(!selects(&idle) && selects(&served));
        assert_eq!(idle.eligible_nodes, EligibleNodes::One(None));
        assert_eq!(served.eligible_nodes, EligibleNodes::One(Some(["n1".to_owned()].into())));
        assert_eq!(served.network, None);
        let none = EligibleNodes::One(Some([].into()));
        assert_eq!(read(json!("n1"), json!([])).eligible_nodes, none, "a list that cannot be read");
    }

    #[test]
    fn a_network_is_followed_by_what_leaves_or_by_each_pod() {
        let read = |by: serde_json::Value| {
            let spec = json!({"egressIPs": ["192.0.2.1", "2001:db8::1"], "namespaceSelector": {}, "nodes": [],
                              "podSelector": {"matchLabels": {"app": "web"}}, "network": "100", "sourceIPBy": by});
            let status = json!({"items": [{"node": "n1", "egressIP": "192.0.2.1"}]});
            let object = json!({"metadata": {"name": "shop.front"}, "spec": spec, "status": status});
            EgressServiceAssignments.read(&serde_json::from_value(object).expect("an object"))
        };
        let by_host = read(json!(null));
        let network = by_host.network.as_ref().expect("a network");
        assert_eq!((network.table.as_str(), network.addresses.len(), network.pods.is_some()), ("100", 2, false));
        assert_eq!((by_host.listed.len(), by_host.is_by_own_nodes()), (2, false));
        let by_nodes = read(json!("Network"));
        assert!(by_nodes.is_by_own_nodes() && by_nodes.listed.is_empty(), "no address is assigned");
        let pods = by_nodes.network.and_then(|network| network.pods).expect("pods");
        let web = Labels::from([("app".to_owned(), "web".to_owned())]);
        assert!(pods.pods.matches(&web) && !pods.pods.matches(&Labels::new()));
    }
}
