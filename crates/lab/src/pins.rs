//! A node's pinned maps and links as `bpftool` shows them: a second pair of eyes beside the product's own.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, Map, MapData};
use egress_common::abi::Lease;
use serde_json::Value;

use crate::topology::lab::LabNode;
use egress_toolchain::packages;

pub const HOOKS: [&str; 5] = ["to_netdev", "from_netdev", "from_overlay", "to_pod", "from_pod"];

/// The folder of one agent's pins.
pub struct AgentPins {
    root: PathBuf,
}

/// A link, the program that runs there, and when it was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    pub id: u64,
    pub program: u64,
}

impl AgentPins {
    pub fn of(node: &LabNode) -> Self {
        Self { root: node.bpffs.clone() }
    }

    /// The folder of the layout, of which there is one.
    pub fn layout(&self) -> Result<PathBuf> {
        let mut folders = std::fs::read_dir(&self.root)?.collect::<std::io::Result<Vec<_>>>()?;
        let folder = folders.pop().with_context(|| format!("nothing is pinned in {}", self.root.display()))?;
        ensure!(folders.is_empty(), "several layouts are pinned in {}", self.root.display());
        Ok(folder.path())
    }

    pub fn map(&self, name: &str) -> Result<PathBuf> {
        Ok(self.layout()?.join("maps").join(name))
    }

    pub fn link_path(&self, hook: &str) -> Result<PathBuf> {
        Ok(self.layout()?.join("links").join(hook))
    }

    pub fn link(&self, hook: &str) -> Result<Link> {
        let shown = bpftool(&["link", "show", "pinned", &text(&self.link_path(hook)?)])?;
        let number = |key: &str| shown[key].as_u64().with_context(|| format!("the link of {hook} has no {key}"));
        Ok(Link { id: number("id")?, program: number("prog_id")? })
    }

    pub fn links(&self) -> Result<Vec<Link>> {
        HOOKS.iter().map(|hook| self.link(hook)).collect()
    }

    /// The kernel's numbers of all pinned maps.
    pub fn map_ids(&self) -> Result<BTreeSet<u64>> {
        let maps = std::fs::read_dir(self.layout()?.join("maps"))?;
        let id = |path: PathBuf| bpftool(&["map", "show", "pinned", &text(&path)])?["id"].as_u64().context("no id");
        maps.map(|entry| id(entry?.path())).collect()
    }

    /// The keys of a map, as text.
    pub fn keys(&self, map: &str) -> Result<BTreeSet<String>> {
        Ok(self.entries(map)?.into_iter().map(|(key, _)| key).collect())
    }

    /// The keys of the pods that the agent knows, as text: without the addresses that a selected pod has left, which stay
    /// (selected, of no object) until another pod has them.
    pub fn pods(&self) -> Result<BTreeSet<String>> {
        let left = r#"["0x02","0x00","0x00","0x00","0x00","0x00","0x00","0x00","#;
        let of_pods = self.entries("pods")?.into_iter().filter(|(_, value)| !value.starts_with(left));
        Ok(of_pods.map(|(key, _)| key).collect())
    }

    /// For how long this node's programs may emit egress IPs, on the clock that the kernel takes (CLOCK_BOOTTIME).
    pub fn lease_left(&self) -> Result<Duration> {
        let now = std::fs::read_to_string("/proc/uptime")?;
        let now: f64 = now.split(' ').next().unwrap_or_default().parse()?;
        Ok(self.lease_end()?.saturating_sub(Duration::from_secs_f64(now)))
    }

    /// Until when they may.
    pub fn lease_end(&self) -> Result<Duration> {
        let lease: Array<_, Lease> = Map::Array(MapData::from_pin(self.map("lease")?)?).try_into()?;
        Ok(Duration::from_nanos(lease.get(&0, 0)?.until_ns))
    }

    /// The entries of a map, keys and values as text.
    fn entries(&self, map: &str) -> Result<Vec<(String, String)>> {
        let shown = bpftool(&["map", "dump", "pinned", &text(&self.map(map)?)])?;
        let entries = shown.as_array().with_context(|| format!("bpftool shows no list for {map}"))?;
        Ok(entries.iter().map(|entry| (entry["key"].to_string(), entry["value"].to_string())).collect())
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Runs bpftool; nothing where it has nothing to say.
pub fn bpftool(args: &[&str]) -> Result<Value> {
    let program = packages::find("bpftool").context("bpftool is not installed")?;
    let output = Command::new(program).arg("-j").args(args).output().context("cannot start bpftool")?;
    ensure!(output.status.success(), "bpftool {}: {}", args.join(" "), String::from_utf8_lossy(&output.stdout));
    if output.stdout.is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_slice(&output.stdout)?) }
}
