//! `egress-agent nat blocks`: which ports of an egress IP belong to which pod.

use std::io::{self, Write};
use std::net::IpAddr;

use clap::Args;
use serde::Serialize;

use crate::cmd::page::{Output, PageArgs};
use egress_core::display_names::Names;
use egress_datapath::maps::port_blocks::GivenBlock;

#[derive(Args, Debug)]
pub(super) struct BlockFilters {
    /// Only blocks of this egress IP
    #[arg(long, env = "EGRESS_AGENT_NAT_EGRESS_IP", value_name = "ADDRESS")]
    egress_ip: Option<IpAddr>,
    /// Only the block that has this port
    #[arg(long, env = "EGRESS_AGENT_NAT_PORT", value_name = "PORT")]
    port: Option<u16>,
    /// Only those of the pod with this address
    #[arg(long, env = "EGRESS_AGENT_NAT_POD_IP", value_name = "ADDRESS")]
    pod_ip: Option<IpAddr>,
    #[command(flatten)]
    pub(super) page: PageArgs,
}

impl BlockFilters {
    fn matches(&self, GivenBlock { block, owner, .. }: &GivenBlock) -> bool {
        let ports = owner.ports(block);
        self.egress_ip.is_none_or(|wanted| wanted == block.address.to_ip())
            && self.port.is_none_or(|port| (ports.first..=ports.last).contains(&port))
            && self.pod_ip.is_none_or(|wanted| wanted == owner.pod.to_ip())
    }
}

/// A block as it is printed.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct BlockRow {
    egress_ip: IpAddr,
    first_port: u16,
    last_port: u16,
    pod_ip: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    node: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    egress_id: u32,
    age_seconds: u64,
    /// A block that is not open gives no ports to new connections. It is free once its last mapping has expired.
    open: bool,
}

impl BlockRow {
    fn of(GivenBlock { block, owner, age }: &GivenBlock, names: &Names) -> Self {
        let ports = owner.ports(block);
        let (pod_ip, source) = (owner.pod.to_ip(), owner.source_node.to_ip());
        let is_here = source.is_unspecified();
        let here = || names.node.clone().unwrap_or_else(|| "here".to_owned());
        let there = || names.nodes.get(&source).cloned().unwrap_or_else(|| source.to_string());
        Self {
            egress_ip: block.address.to_ip(),
            first_port: ports.first,
            last_port: ports.last,
            pod_ip,
            pod: names.pods.get(&pod_ip).filter(|_| is_here).cloned(),
            node: if is_here { here() } else { there() },
            object: names.objects.get(&owner.egress_id).cloned(),
            egress_id: owner.egress_id,
            age_seconds: age.as_secs(),
            open: owner.is_open(),
        }
    }

    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let ports = format!("{}-{}", self.first_port, self.last_port);
        let state = if self.open { "open" } else { "closed" };
        writeln!(out, "{ports:<11} {state:<6} {:>8}  {}", self.age_seconds, self.egress_ip)?;
        let pod = self.pod.as_ref().map_or_else(String::new, |pod| format!("{pod} on "));
        writeln!(out, "  {}  {}  {pod}{}", self.pod_ip, self.object.as_deref().unwrap_or("-"), self.node)
    }
}

/// Prints the blocks by address and port.
pub(super) fn print(
    blocks: &[GivenBlock],
    filters: &BlockFilters,
    names: &Names,
    out: &mut impl Write,
) -> io::Result<()> {
    let wanted = blocks.iter().filter(|block| filters.matches(block));
    let mut rows: Vec<BlockRow> = wanted.map(|block| BlockRow::of(block, names)).collect();
    rows.sort_unstable();
    if filters.page.output == Output::Json {
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
    } else if rows.is_empty() {
        let why = match blocks.len() {
            0 => " (--port-block-size of the agent gives pods ports in blocks)".to_owned(),
            others => format!(" that the filters take; the node has {others}"),
        };
        writeln!(out, "no port blocks{why}")?;
    } else {
        writeln!(out, "{:<11} {:<6} {:>8}  EGRESS IP\n  POD IP  OBJECT  POD, NODE", "PORTS", "STATE", "AGE")?;
        rows.iter().try_for_each(|row| row.print(out))?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use egress_common::abi::{Addr, BlockOwner, PortBlock};

    use super::*;
    use crate::cmd::nat::tests::names;
    use crate::config::parse_flags;

    fn blocks() -> Vec<GivenBlock> {
        let addr = |text: &str| Addr::from(text.parse::<IpAddr>().expect("a literal"));
        let [own, remote] = [1024, 2048].map(|first| PortBlock::new(addr("172.18.0.100"), first));
        let of_own = BlockOwner::new(addr("10.244.1.10"), Addr::UNSPECIFIED, 7, 64, 1);
        let of_remote = BlockOwner::new(addr("10.244.2.10"), addr("172.18.0.3"), 7, 64, 1).closed(&remote);
        let aged = |block, owner, seconds| GivenBlock { block, owner, age: Duration::from_secs(seconds) };
        vec![aged(remote, of_remote, 70), aged(own, of_own, 90)]
    }

    fn printed(arguments: &str) -> String {
        let arguments = arguments.split(' ').filter(|argument| !argument.is_empty());
        let filters: BlockFilters = parse_flags(arguments).expect("a line");
        let mut out = Vec::new();
        print(&blocks(), &filters, &names(), &mut out).expect("written");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn blocks_are_printed_by_port_with_their_pods() {
        let expected = "\
PORTS       STATE       AGE  EGRESS IP
  POD IP  OBJECT  POD, NODE
1024-1087   open         90  172.18.0.100
  10.244.1.10  first  red/one on node1
2048-2111   closed       70  172.18.0.100
  10.244.2.10  first  node2
";
        assert_eq!(printed(""), expected);
        let rows: serde_json::Value = serde_json::from_str(&printed("-o json --port 2111")).expect("JSON");
        assert_eq!(rows.as_array().map(Vec::len), Some(1));
        assert_eq!((&rows[0]["pod_ip"], &rows[0]["open"]), (&"10.244.2.10".into(), &false.into()));
    }

    #[test]
    fn each_filter_matches() {
        for (arguments, count) in [
            ("--egress-ip 172.18.0.100", 2),
            ("--egress-ip 172.18.0.101", 0),
            ("--port 1024", 1),
            ("--port 1088", 0),
            ("--pod-ip 10.244.1.10", 1),
        ] {
            let rows: Vec<serde_json::Value> =
                serde_json::from_str(&printed(&format!("-o json {arguments}"))).expect("JSON");
            assert_eq!(rows.len(), count, "{arguments}");
        }
        assert_eq!(printed("--port 9"), "no port blocks that the filters take; the node has 2\n");
    }
}
