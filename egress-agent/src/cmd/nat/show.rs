//! How mappings are printed.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::IpAddr;

use egress_common::abi::Share;
use serde::Serialize;

use crate::cmd::nat::{MappingState, Wanted};
use crate::cmd::page::Output;
use egress_core::display_names::Names;
use egress_datapath::maps::nat_entries::{Entry, Shares};
use egress_datapath::trace::questions::protocol;

/// A mapping as it is printed.
#[derive(Debug, Serialize)]
struct MappingRow {
    egress_ip: IpAddr,
    egress_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    egress_id: u32,
    protocol: String,
    pod_ip: IpAddr,
    pod_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    node: String,
    to: IpAddr,
    to_port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<MappingState>,
    age_seconds: u64,
    /// Since the last packet from the pod, and towards it.
    egress_idle_seconds: u64,
    ingress_idle_seconds: u64,
    timeout_seconds: u64,
    expires_in_seconds: u64,
}

impl MappingRow {
    fn of(entry: &Entry, names: &Names) -> Self {
        let Entry { egress, ingress, source_node, egress_id, .. } = *entry;
        let pod_ip = egress.saddr.to_ip();
        let here = || names.node.clone().unwrap_or_else(|| "here".to_owned());
        let node = source_node.map_or_else(here, |node| names.nodes.get(&node).cloned().unwrap_or(node.to_string()));
        Self {
            egress_ip: ingress.daddr.to_ip(),
            egress_port: ingress.dport(),
            object: names.objects.get(&egress_id).cloned(),
            egress_id,
            protocol: protocol(egress.protocol),
            pod_ip,
            pod_port: egress.sport(),
            pod: names.pods.get(&pod_ip).filter(|_| source_node.is_none()).cloned(),
            node,
            to: egress.daddr.to_ip(),
            to_port: egress.dport(),
            state: entry.phase.map(MappingState::of),
            age_seconds: entry.age.as_secs(),
            egress_idle_seconds: entry.egress_idle.as_secs(),
            ingress_idle_seconds: entry.ingress_idle.as_secs(),
            timeout_seconds: entry.timeout.as_secs(),
            expires_in_seconds: entry.timeout.saturating_sub(entry.idle()).as_secs(),
        }
    }

    /// The first line has columns of fixed widths, since mappings are printed as they are found. The others have the ends and
    /// the names, as many on a line as fit.
    fn lines(&self) -> String {
        let end = |ip: IpAddr, port: u16| std::net::SocketAddr::new(ip, port).to_string();
        let (from, to) = (end(self.pod_ip, self.pod_port), end(self.to, self.to_port));
        let mut text = format!(
            "{:<6} {:<11} {:>8} {:>8} {:>8}  {}",
            self.protocol,
            self.state.map_or("-", MappingState::name),
            self.age_seconds,
            self.egress_idle_seconds.min(self.ingress_idle_seconds),
            self.expires_in_seconds,
            end(self.egress_ip, self.egress_port),
        );
        let object = self.object.as_deref().unwrap_or("-");
        let pod = self.pod.as_ref().map_or_else(|| self.node.clone(), |pod| format!("{pod} on {}", self.node));
        let mut width = WIDTH;
        for part in [format!("{from} -> {to}"), object.to_owned(), pod] {
            let needed = part.chars().count() + 2;
            let begin = if width + needed > WIDTH { "\n  " } else { "  " };
            width = if width + needed > WIDTH { needed } else { width + needed };
            text.push_str(begin);
            text.push_str(&part);
        }
        text
    }
}

/// What a list is printed for (columns): two IPv6 addresses with ports on one line, and an indent.
const WIDTH: usize = 100;

fn headline() -> String {
    format!(
        "{:<6} {:<11} {:>8} {:>8} {:>8}  EGRESS IP\n  POD'S END -> TO  OBJECT  POD, NODE",
        "PROTO", "STATE", "AGE", "IDLE", "EXPIRES"
    )
}

/// The output; distinguishes errors of writing from errors of reading.
pub(super) struct Out<W> {
    pub(super) to: W,
    pub(super) has_failed: bool,
}

impl<W: Write> Write for Out<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes);
        // `write_all` turns a write of zero bytes into an error.
        self.has_failed |= !matches!(written, Ok(1..));
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush().inspect_err(|_| self.has_failed = true)
    }
}

pub(super) type EntryVisitor<'v> = dyn FnMut(&Entry) -> io::Result<()> + 'v;

pub(super) fn list(
    wanted: &Wanted<'_>,
    names: &Names,
    out: &mut Out<impl Write>,
    walk: impl FnOnce(&mut EntryVisitor<'_>) -> io::Result<Option<u32>>,
) -> io::Result<Option<()>> {
    let is_json = wanted.filters.page.output == Output::Json;
    let mut started = false;
    let walked = walk(&mut |entry| {
        if !wanted.is_in_state(entry) {
            return Ok(());
        }
        let row = MappingRow::of(entry, names);
        let first = !std::mem::replace(&mut started, true);
        if is_json {
            out.write_all(if first { b"[\n" } else { b",\n" })?;
            return out.write_all(&serde_json::to_vec(&row)?);
        }
        if first {
            writeln!(out, "{}", headline())?;
        }
        writeln!(out, "{}", row.lines())
    });
    // An incomplete list is still valid JSON; the exit code shows that it is incomplete.
    if is_json && started && walked.is_err() && !out.has_failed {
        out.write_all(b"\n]\n")?;
        out.flush()?;
    }
    if walked?.is_none() {
        return Ok(None);
    }
    match (is_json, started) {
        (true, true) => out.write_all(b"\n]\n")?,
        (true, false) => out.write_all(b"[]\n")?,
        (false, true) => {}
        (false, false) => writeln!(out, "no mappings")?,
    }
    out.flush()?;
    Ok(Some(()))
}

/// What `count` prints.
#[derive(Debug, Serialize)]
struct Counted {
    mappings: usize,
    /// Capacity of the node.
    limit: u32,
    egress_ips: BTreeMap<IpAddr, usize>,
    /// Who holds how many flows and mappings, largest first; none with a filter.
    #[serde(skip_serializing_if = "Option::is_none")]
    holders: Option<Holders>,
}

#[derive(Debug, Serialize)]
pub(super) struct Holders {
    /// Limit of one pod address for each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_quota: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy_quota: Option<u32>,
    pods: Vec<HolderRow>,
    policies: Vec<HolderRow>,
}

#[derive(Debug, Serialize)]
struct HolderRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_ip: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress_id: Option<u32>,
    /// Name of the pod, if it is on this node, or of the object; needs a running agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    flows: u32,
    mappings: u32,
}

/// Lines of a table of holders; a flood has few sources.
const TOP: usize = 10;

impl Holders {
    pub(super) fn of(shares: Shares, names: &Names) -> Self {
        let Shares { pod_quota, policy_quota, pods, policies } = shares;
        // Less than nothing only while a removed entry is not counted yet.
        let number = |entries: i32| u32::try_from(entries).unwrap_or_default();
        let by_size = |mut holders: Vec<HolderRow>| {
            let size = |holder: &HolderRow| (holder.flows.max(holder.mappings), holder.flows.min(holder.mappings));
            holders.sort_by_key(|holder| std::cmp::Reverse(size(holder)));
            holders
        };
        let pod = |(pod_ip, share): (IpAddr, Share)| HolderRow {
            pod_ip: Some(pod_ip),
            egress_id: None,
            name: names.pods.get(&pod_ip).cloned(),
            flows: number(share.flows),
            mappings: number(share.nat_entries),
        };
        let policy = |(id, share): (u32, Share)| HolderRow {
            pod_ip: None,
            egress_id: Some(id),
            name: names.objects.get(&id).cloned(),
            flows: number(share.flows),
            mappings: number(share.nat_entries),
        };
        Self {
            pod_quota,
            policy_quota,
            pods: by_size(pods.into_iter().map(pod).collect()),
            policies: by_size(policies.into_iter().map(policy).collect()),
        }
    }

    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let tables = [("POD", &self.pods, self.pod_quota), ("EGRESSIP", &self.policies, self.policy_quota)];
        for (what, holders, quota) in tables.into_iter().filter(|(_, holders, _)| !holders.is_empty()) {
            let quota = quota.map_or_else(|| "no quota".to_owned(), |quota| format!("quota {quota} each"));
            writeln!(out, "\n{:>8}  {:>8}  {what} ({quota})", "FLOWS", "MAPPINGS")?;
            for holder in holders.iter().take(TOP) {
                let name = holder.name.as_deref().unwrap_or("-");
                let number = holder.pod_ip.map_or_else(
                    || holder.egress_id.map(|id| format!("ID {id}")).unwrap_or_default(),
                    |pod_ip| pod_ip.to_string(),
                );
                writeln!(out, "{:>8}  {:>8}  {number:<40} {name}", holder.flows, holder.mappings)?;
            }
            if let Some(more) = holders.len().checked_sub(TOP).filter(|more| *more > 0) {
                writeln!(out, "{:>18}  and {more} more (-o json lists all)", "")?;
            }
        }
        Ok(())
    }
}

pub(super) fn count(
    wanted: &Wanted<'_>,
    names: &Names,
    out: &mut Out<impl Write>,
    walk: impl FnOnce(&mut EntryVisitor<'_>) -> io::Result<Option<u32>>,
    holders: Option<Holders>,
) -> io::Result<Option<()>> {
    let (mut egress_ips, mut objects) = (BTreeMap::<IpAddr, usize>::new(), BTreeMap::new());
    let walked = walk(&mut |entry| {
        if wanted.is_in_state(entry) {
            let address = entry.ingress.daddr.to_ip();
            *egress_ips.entry(address).or_default() += 1;
            objects.insert(address, entry.egress_id);
        }
        Ok(())
    })?;
    let Some(limit) = walked else { return Ok(None) };
    let counted = Counted { mappings: egress_ips.values().sum(), limit, egress_ips, holders };
    if wanted.filters.page.output == Output::Json {
        writeln!(out, "{}", serde_json::to_string_pretty(&counted)?)?;
    } else {
        for (address, mappings) in &counted.egress_ips {
            let object = objects.get(address).and_then(|id| names.objects.get(id)).map_or("-", String::as_str);
            writeln!(out, "{:>8}  {address:<40} {object}", mappings)?;
        }
        writeln!(out, "{:>8}  in total; the node's limit is {}", counted.mappings, counted.limit)?;
        if let Some(holders) = &counted.holders {
            holders.print(out)?;
        }
    }
    out.flush()?;
    Ok(Some(()))
}

#[cfg(test)]
mod tests {
    use egress_common::decide::phase::Phase;

    use super::*;
    use crate::cmd::nat::tests::{filters, mapping, names};

    fn entry() -> Entry {
        let (egress, mapping) = mapping();
        let second = std::time::Duration::from_secs(1);
        Entry {
            egress,
            ingress: mapping.other,
            origin: mapping.origin(),
            source_node: Some(mapping.source_node.to_ip()),
            egress_id: 7,
            phase: Some(Phase::Established),
            age: second * 40,
            egress_idle: second * 10,
            ingress_idle: second * 20,
            timeout: second * 7440,
        }
    }

    #[test]
    fn an_incomplete_list_is_valid_json_and_an_error() {
        let filters = filters("-o json");
        let wanted = Wanted::new(&filters, &names()).expect("known");
        let mut out = Out { to: Vec::new(), has_failed: false };
        let listed = list(&wanted, &names(), &mut out, |visit| {
            visit(&entry())?;
            visit(&entry())?;
            Err(io::Error::from_raw_os_error(libc::EPERM))
        });
        assert_eq!(listed.map_err(|error| error.raw_os_error()), Err(Some(libc::EPERM)));
        assert!(!out.has_failed, "the pins cannot be read");
        let rows: serde_json::Value = serde_json::from_slice(&out.to).expect("whole JSON");
        assert_eq!(rows.as_array().map(Vec::len), Some(2));
        // A failed write is not an error of the pins.
        let mut buffer = [0; 8];
        let mut out = Out { to: &mut buffer[..], has_failed: false };
        let listed = list(&wanted, &names(), &mut out, |visit| visit(&entry()).map(|()| Some(1)));
        assert!(listed.is_err() && out.has_failed);
    }

    #[test]
    fn a_row_has_the_known_names() {
        let entry = entry();
        let row = MappingRow::of(&entry, &names());
        assert_eq!((row.node.as_str(), row.object.as_deref(), row.expires_in_seconds), ("node2", Some("first"), 7430));
        let expected = "tcp    established       40       10     7430  172.18.0.100:4001\n  10.244.2.10:4000 -> 198.51.100.10:80  first  node2";
        assert_eq!(row.lines(), expected);
        assert_eq!(MappingRow::of(&Entry { source_node: None, ..entry }, &Names::default()).node, "here");
    }

    #[test]
    fn a_list_fits_a_hundred_columns_with_the_longest_addresses() {
        let [pod, to, egress_ip] =
            [1, 2, 3].map(|last| IpAddr::from([0x2001, 0x1db8, 0xaaaa, 0xbbbb, 0xcccc, 0xdddd, 0xeeee, 0xfff0 + last]));
        let long = "a".repeat(63);
        let mut row = MappingRow {
            egress_ip,
            egress_port: u16::MAX,
            object: Some(long.clone()),
            egress_id: u32::MAX,
            protocol: "icmpv6".to_owned(),
            pod_ip: pod,
            pod_port: u16::MAX,
            pod: Some(format!("kube-system/{}", "b".repeat(50))),
            node: "node-of-a-rack-17".to_owned(),
            to,
            to_port: u16::MAX,
            state: Some(MappingState::Established),
            age_seconds: 99_999_999,
            egress_idle_seconds: 99_999_999,
            ingress_idle_seconds: 99_999_999,
            timeout_seconds: 99_999_999,
            expires_in_seconds: 99_999_999,
        };
        let check = |row: &MappingRow| {
            let lines = row.lines();
            for line in headline().lines().chain(lines.lines()) {
                assert!(line.chars().count() <= WIDTH, "{} columns: {line}", line.chars().count());
            }
            lines.lines().count()
        };
        assert_eq!(check(&row), 4, "{}", row.lines());
        (row.object, row.pod) = (Some("simpson".to_owned()), Some("springfield/homer".to_owned()));
        assert_eq!(check(&row), 3, "{}", row.lines());
        let widest = row.lines().lines().map(|line| line.chars().count()).max();
        assert_eq!(widest, Some(WIDTH), "the ends alone: {}", row.lines());
    }
}
