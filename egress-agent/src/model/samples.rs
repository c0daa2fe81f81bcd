//! What the tests of the model and of what drives it begin with.

use std::net::IpAddr;

use ipnet::IpNet;

use super::desired::{OnUnassigned, Settings, UnknownPods};

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

pub(crate) fn net(text: &str) -> IpNet {
    text.parse().expect("a literal")
}

/// Of node `n1`.
pub(crate) fn settings() -> Settings {
    Settings {
        node_name: "n1".into(),
        cluster_subnets: vec![net("10.244.0.0/16")],
        service_cidrs: vec![net("10.96.0.0/16")],
        excluded_cidrs: vec![net("198.51.100.0/24")],
        unknown_pods: UnknownPods::Auto,
        on_unassigned: OnUnassigned::NodeAddress,
    }
}
