//! What a node's kernel holds: the pinned maps, read with bpftool as a person would.

use crate::prelude::*;
use egress_common::abi::{ABI_VERSION, Verdict};

use egress_toolchain::packages;

/// The elements of a pinned map, keys and values as fields.
pub(super) fn dump(node: &LabNode, map: &str) -> Result<Vec<Value>> {
    let bpftool = packages::find("bpftool").context("bpftool is not installed")?;
    let pin = node.bpffs.join(format!("v{ABI_VERSION}/maps/{map}"));
    let args = ["-j", "map", "dump", "pinned"].map(String::from).into_iter().chain([pin.display().to_string()]);
    let output = std::process::Command::new(bpftool).args(args).output().context("cannot start bpftool")?;
    let answer: Value = serde_json::from_slice(&output.stdout).context("bpftool did not answer with JSON")?;
    match answer {
        Value::Array(elements) => Ok(elements),
        other => bail!("{}: {other}", pin.display()),
    }
}

/// How many links are pinned.
pub(super) fn pinned_links(node: &LabNode) -> Result<usize> {
    let folder = node.bpffs.join(format!("v{ABI_VERSION}/links"));
    let entries = std::fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?;
    Ok(entries.count())
}

/// Packets by verdict, all CPUs together.
#[derive(Debug, Clone, Default)]
pub(super) struct VerdictCounts(BTreeMap<Verdict, u64>);

impl VerdictCounts {
    pub(super) fn of(node: &LabNode) -> Result<Self> {
        let mut counts = BTreeMap::new();
        for element in dump(node, "counters")? {
            let element = element.get("formatted").unwrap_or(&element);
            let index = element.get("key").and_then(Value::as_u64).context("a counter without a key")?;
            let Some(verdict) = Verdict::from_index(u32::try_from(index)?) else { continue };
            let values = element.get("values").and_then(Value::as_array).context("a counter without values")?;
            let packets = values.iter().filter_map(|one| one.pointer("/value/packets").and_then(Value::as_u64));
            counts.insert(verdict, packets.sum());
        }
        Ok(Self(counts))
    }

    pub(super) fn get(&self, verdict: Verdict) -> u64 {
        self.0.get(&verdict).copied().unwrap_or(0)
    }

    /// What has been counted since `earlier`, without what stayed the same.
    pub(super) fn since(&self, earlier: &Self) -> BTreeMap<&'static str, u64> {
        let grown = self.0.iter().map(|(verdict, now)| (verdict.label(), now - earlier.get(*verdict)));
        grown.filter(|(_, packets)| *packets > 0).collect()
    }
}
