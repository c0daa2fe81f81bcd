//! The format of the vectors. Other keys are comments.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
pub(crate) struct Vector {
    pub(crate) name: String,
    pub(crate) nodes: Vec<VectorNode>,
    #[serde(default)]
    pub(crate) egressips: Vec<VectorObject>,
    #[serde(default)]
    pub(crate) expect: BTreeMap<String, Expect>,
    /// Objects that are created one after another, in this order; all others exist at the start.
    #[serde(default)]
    pub(crate) sequential: Vec<String>,
    /// Event reasons that must appear, on any object.
    #[serde(default)]
    pub(crate) events: Vec<String>,
    #[serde(default)]
    pub(crate) expect_balance: Vec<Balance>,
    /// Whether the result is the same if all objects exist at the start.
    #[serde(default)]
    pub(crate) holds_at_restart: bool,
    /// If false, another outcome is allowed that follows the rules.
    #[serde(default = "yes")]
    pub(crate) strict: bool,
}

/// Annotations as on a Node: text, or the parsed value; null or absent is none.
#[derive(Debug, Deserialize)]
pub(crate) struct VectorNode {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(default = "yes")]
    pub(crate) ready: bool,
    #[serde(default = "yes")]
    pub(crate) reachable: bool,
    #[serde(default)]
    pub(crate) primary_ifaddr: Value,
    #[serde(default)]
    pub(crate) host_cidrs: Value,
    #[serde(default)]
    pub(crate) egress_ipconfig: Value,
    /// A node without pods of the cluster's network.
    #[serde(default)]
    pub(crate) no_host_subnet: bool,
}

#[derive(Debug, Deserialize)]
pub(crate) struct VectorObject {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) created: Option<String>,
    #[serde(rename = "egressIPs")]
    pub(crate) egress_ips: Vec<String>,
    #[serde(default)]
    pub(crate) existing_status: Vec<VectorStatusItem>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(crate) struct VectorStatusItem {
    pub(crate) node: String,
    #[serde(rename = "egressIP")]
    pub(crate) egress_ip: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Expect {
    pub(crate) count: usize,
    pub(crate) allowed_nodes_per_ip: BTreeMap<String, Vec<String>>,
    #[serde(default = "yes")]
    pub(crate) must_be_on_distinct_nodes: bool,
    #[serde(default)]
    pub(crate) kept: Vec<VectorStatusItem>,
}

/// The largest difference of these nodes' loads.
#[derive(Debug, Deserialize)]
pub(crate) struct Balance {
    pub(crate) nodes: Vec<String>,
    pub(crate) max_spread: usize,
}

fn yes() -> bool {
    true
}

/// The vectors of every JSON file of the folder; a file has a list or a single one.
pub(crate) fn read(folder: &Path) -> Vec<(String, Vec<Vector>)> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        let list = if value.is_array() { value } else { Value::Array(vec![value]) };
        let vectors = serde_json::from_value(list).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, vectors)
    };
    paths.iter().map(read).collect()
}
