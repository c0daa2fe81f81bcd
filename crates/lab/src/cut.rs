//! Parts of the network that are cut while all links keep their carrier: rules on the switches that drop what would be
//! forwarded. A capture still sees what a node sends.

use std::fmt::Write as _;

use anyhow::Result;

use crate::kube_api::API_PORT;
use crate::topology::addresses::{self as plan, NodeNumber};
use crate::topology::lab::Lab;
use crate::topology::port_of;

/// What is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkCut {
    /// A node from everything.
    Everything(NodeNumber),
    /// A node from the API server alone.
    ApiServer(NodeNumber),
    /// A node from all other nodes: on their networks, and on their pods'.
    Nodes(NodeNumber),
    /// These nodes from all else; they reach each other.
    Group(Vec<NodeNumber>),
}

impl NetworkCut {
    /// The name of its table on the switches.
    fn table(&self) -> String {
        match self {
            Self::Everything(node) => format!("cut-all-{}", node.name()),
            Self::ApiServer(node) => format!("cut-api-{}", node.name()),
            Self::Nodes(node) => format!("cut-nodes-{}", node.name()),
            Self::Group(_) => "cut-group".to_owned(),
        }
    }

    /// The rules on each switch. Only that of the nodes' network leads to the API server.
    fn rules(&self) -> Vec<String> {
        match self {
            Self::Everything(node) => vec![format!("iifname {0:?} drop", port_of(*node)), to(&port_of(*node))],
            Self::ApiServer(node) => {
                let (port, server) = (port_of(*node), plan::EXT.v4);
                vec![
                    format!("iifname {port:?} ip daddr {server} tcp dport {API_PORT} drop"),
                    format!("oifname {port:?} ip saddr {server} tcp sport {API_PORT} drop"),
                ]
            }
            Self::Nodes(node) => {
                let port = port_of(*node);
                vec![
                    format!("iifname {port:?} oifname \"node*\" drop"),
                    format!("iifname \"node*\" oifname {port:?} drop"),
                ]
            }
            Self::Group(nodes) => {
                let ports: Vec<String> = nodes.iter().map(|node| format!("{:?}", port_of(*node))).collect();
                let group = format!("{{ {} }}", ports.join(", "));
                vec![
                    format!("iifname {group} oifname != {group} drop"),
                    format!("iifname != {group} oifname {group} drop"),
                ]
            }
        }
    }
}

fn to(port: &str) -> String {
    format!("oifname {port:?} drop")
}

impl Lab {
    pub fn cut(&self, cut: &NetworkCut) -> Result<()> {
        let table = cut.table();
        let mut text = format!("add table bridge {table}\n");
        // Writing to a String cannot fail.
        let _ = writeln!(text, "add chain bridge {table} forward {{ type filter hook forward priority 0; }}");
        for rule in cut.rules() {
            let _ = writeln!(text, "add rule bridge {table} forward {rule}");
        }
        self.hubs().iter().try_for_each(|hub| hub.feed("nft", &["-f", "-"], &text))
    }

    /// Ends a cut.
    pub fn mend(&self, cut: &NetworkCut) -> Result<()> {
        self.hubs().iter().try_for_each(|hub| hub.exec("nft", &["delete", "table", "bridge", &cut.table()]).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_reaches_itself_alone() {
        let group: Vec<NodeNumber> =
            [1, 3].into_iter().map(|number| NodeNumber::new(number).expect("a node")).collect();
        assert_eq!(
            NetworkCut::Group(group).rules(),
            [
                r#"iifname { "node1", "node3" } oifname != { "node1", "node3" } drop"#,
                r#"iifname != { "node1", "node3" } oifname { "node1", "node3" } drop"#
            ]
        );
    }
}
