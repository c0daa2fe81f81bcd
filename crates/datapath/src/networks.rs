//! Routing tables of EgressServices: rules of the host's routing, and the marks that they look for.
//!
//! ```text
//! 5000: from ADDRESS lookup TABLE          what leaves with an address of a load balancer: the programs look routes up with it
//! 5000: fwmark MARK lookup TABLE           answers to its clients, and pods that leave by their own node (`nftables::networks`)
//! ```
//!
//! What should follow a table that the node does not have is dropped, so that it leaves by no other network.
//!
//! The tables are the administrator's. What has no route there follows the next rule, as with any rule, so a network that must
//! be used alone ends with a route that refuses (`unreachable default`).
//!
//! Rules have a protocol number of their own, so that those of a former agent are found, and no others are removed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::Path;

use egress_core::networks::{NetworkUse, RoutedNetworks};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, Parseable as _};
use rtnetlink::packet_route::route::RouteProtocol;
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::netlink::{self, NETLINK_ROUTE};
use crate::nftables::Nft;
use crate::nftables::networks::{MarkedTable, NetworkSpec};

/// As OVN-Kubernetes has it.
const PRIORITY: u32 = 5000;
/// Of our rules; no number of iproute2's `rt_protos`.
const PROTOCOL: u8 = 101;
/// Marks are this and the number of the table.
const MARK: u32 = 0x3f00_0000;
const LARGEST_TABLE: u32 = 0x00ff_ffff;
/// The kernel's table of its own addresses.
const LOCAL: u32 = 255;

/// Where iproute2 has the names of tables, the first of which counts.
const NAMES: [&str; 3] = ["/etc/iproute2/rt_tables", "/usr/share/iproute2/rt_tables", "/usr/lib/iproute2/rt_tables"];
const FURTHER_NAMES: &str = "/etc/iproute2/rt_tables.d";

/// Why nothing follows a table, by its name in the policy.
pub type Unrouted = BTreeMap<String, String>;

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HostRule {
    is_v4: bool,
    matches: RuleMatch,
    table: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RuleMatch {
    From(IpAddr),
    Mark(u32),
}

/// What was written last.
#[derive(Default)]
pub struct NetworkRouting {
    nft: Nft,
    written: Option<(NetworkSpec, BTreeSet<HostRule>)>,
}

impl NetworkRouting {
    /// Makes the kernel route by these tables, and by no others.
    pub fn route(&mut self, networks: &RoutedNetworks, mgmt_port: &str) -> Unrouted {
        let mut unrouted = Unrouted::new();
        // `None`: what the node does not have, or has no room for.
        let mut tables: BTreeMap<Option<u32>, NetworkUse> = BTreeMap::new();
        for (name, used) in &networks.tables {
            let table = resolve(name).map_err(|why| unrouted.insert(name.clone(), why)).ok();
            tables.entry(table).or_default().extend(used);
        }
        if networks.dropped != NetworkUse::default() {
            tables.entry(None).or_default().extend(&networks.dropped);
        }
        let rules = tables.iter().filter_map(|(table, used)| Some(rules((*table)?, used))).flatten().collect();
        let tables = tables.into_iter().map(|(table, used)| MarkedTable {
            name: table.map_or("none".to_owned(), |table| table.to_string()),
            mark: table.map(|table| MARK | table),
            addresses: used.addresses.into_iter().collect(),
            pods: used.pods.into_iter().collect(),
        });
        let spec = NetworkSpec {
            tables: tables.collect(),
            cluster: networks.cluster.clone(),
            mgmt_port: mgmt_port.to_owned(),
        };
        if let Err(error) = self.write(spec, rules) {
            let names = networks.tables.keys().filter(|name| !unrouted.contains_key(*name));
            let failed: Unrouted = names.map(|name| (name.clone(), error.to_string())).collect();
            unrouted.extend(failed);
        }
        unrouted
    }

    /// Writes again what other software has removed. Whether anything was.
    pub fn repair(&mut self) -> io::Result<bool> {
        let Some((spec, rules)) = self.written.clone().filter(|(spec, _)| !spec.tables.is_empty()) else {
            return Ok(false);
        };
        let is_whole = listed()?.is_superset(&rules) && self.nft.has_networks()?;
        if !is_whole {
            self.written = None;
            self.write(spec, rules)?;
        }
        Ok(!is_whole)
    }

    /// New rules come before the marks that they look for, and old ones go after.
    fn write(&mut self, spec: NetworkSpec, rules: BTreeSet<HostRule>) -> io::Result<()> {
        let is_known = self.written.as_ref().is_some_and(|(written, known)| *written == spec && *known == rules);
        if is_known {
            return Ok(());
        }
        self.written = None;
        let listed = listed()?;
        rules.difference(&listed).try_for_each(add)?;
        if spec.tables.is_empty() {
            self.nft.remove_networks()?;
        } else {
            self.nft.install_networks(&spec)?;
        }
        listed.difference(&rules).try_for_each(delete)?;
        self.written = Some((spec, rules));
        Ok(())
    }
}

/// Removes all rules and marks. Whether there were any.
pub fn remove() -> io::Result<bool> {
    let was_there = Nft::default().remove_networks()?;
    let rules = listed()?;
    rules.iter().try_for_each(delete)?;
    Ok(was_there || !rules.is_empty())
}

fn rules(table: u32, used: &NetworkUse) -> Vec<HostRule> {
    let rule = |is_v4, matches| HostRule { is_v4, matches, table };
    let all = || used.addresses.iter().chain(&used.pods);
    // A host without IPv6 takes no rules of it.
    let marks = [true, false].into_iter().filter(|is_v4| all().any(|address| address.is_ipv4() == *is_v4));
    let marks = marks.map(|is_v4| rule(is_v4, RuleMatch::Mark(MARK | table)));
    marks.chain(used.addresses.iter().map(|one| rule(one.is_ipv4(), RuleMatch::From(*one)))).collect()
}

/// Our rules in the kernel.
fn listed() -> io::Result<BTreeSet<HostRule>> {
    let mut all = BTreeSet::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut ask = RuleMessage::default();
        ask.header.family = family;
        for content in netlink::request(NETLINK_ROUTE, NLM_F_DUMP, RouteNetlinkMessage::GetRule(ask))? {
            let message = RuleMessage::parse(&content);
            // One that the library cannot decode is none of ours.
            all.extend(message.ok().filter(|message| message.header.family == family).and_then(|one| own(&one)));
        }
    }
    Ok(all)
}

fn own(message: &RuleMessage) -> Option<HostRule> {
    let (mut is_own, mut matches, mut table) = (false, None, u32::from(message.header.table));
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Protocol(protocol) => is_own = u8::from(*protocol) == PROTOCOL,
            RuleAttribute::Source(address) => matches = Some(RuleMatch::From(*address)),
            RuleAttribute::FwMark(mark) => matches = Some(RuleMatch::Mark(*mark)),
            RuleAttribute::Table(number) => table = *number,
            _ => {}
        }
    }
    let is_v4 = message.header.family == AddressFamily::Inet;
    matches.filter(|_| is_own).map(|matches| HostRule { is_v4, matches, table })
}

fn add(rule: &HostRule) -> io::Result<()> {
    let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
    netlink::request(NETLINK_ROUTE, flags, RouteNetlinkMessage::NewRule(message(rule))).map(drop)
}

fn delete(rule: &HostRule) -> io::Result<()> {
    match netlink::request(NETLINK_ROUTE, NLM_F_ACK, RouteNetlinkMessage::DelRule(message(rule))) {
        // Another process has removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map(drop),
    }
}

fn message(rule: &HostRule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = if rule.is_v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(PRIORITY),
        RuleAttribute::Table(rule.table),
        RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)),
    ];
    match rule.matches {
        RuleMatch::From(address) => {
            message.header.src_len = if rule.is_v4 { 32 } else { 128 };
            message.attributes.push(RuleAttribute::Source(address));
        }
        RuleMatch::Mark(mark) => {
            message.attributes.extend([RuleAttribute::FwMark(mark), RuleAttribute::FwMask(u32::MAX)]);
        }
    }
    message
}

/// The number of a table.
fn resolve(name: &str) -> Result<u32, String> {
    let known = || {
        named(name).ok_or_else(|| {
            format!("this node has no routing table {name:?}: add it to {}, or use its number", NAMES[0])
        })
    };
    let number = name.parse::<u32>().map_or_else(|_| known(), Ok)?;
    match number {
        0 | LOCAL => Err(format!("routing table {name:?} is the kernel's own")),
        LARGEST_TABLE.. => Err(format!("routing table {name:?} is above {}", LARGEST_TABLE - 1)),
        _ => Ok(number),
    }
}

fn named(name: &str) -> Option<u32> {
    let further = std::fs::read_dir(FURTHER_NAMES).into_iter().flatten().flatten().map(|entry| entry.path());
    let further = further.filter(|path| path.extension().is_some_and(|kind| kind == "conf"));
    let files = NAMES.iter().map(|path| Path::new(path).to_owned()).chain(further);
    let known = files.filter_map(|path| std::fs::read_to_string(path).ok());
    // The kernel's, which need no file.
    let kernels = ["254 main\n253 default\n255 local\n".to_owned()];
    known.chain(kernels).find_map(|text| number_of(name, &text))
}

/// The number of a name in the text of a file of iproute2.
fn number_of(name: &str, text: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let (number, known) = (words.next()?, words.next()?);
        let number = match number.strip_prefix("0x") {
            Some(hexadecimal) => u32::from_str_radix(hexadecimal, 16).ok()?,
            None => number.parse().ok()?,
        };
        (known == name).then_some(number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_iproute2() {
        let text = "# reserved\n255\tlocal\n0x64 blue # comment\n#200 grey\n101 red\n";
        let number = |name| number_of(name, text);
        assert_eq!(
            [number("blue"), number("red"), number("grey"), number("comment")],
            [Some(100), Some(101), None, None]
        );
        assert_eq!(resolve("100"), Ok(100));
        assert_eq!(resolve("main"), Ok(254));
        for bad in ["0", "255", "local", "16777215", "no-such-table", "", "-1"] {
            resolve(bad).expect_err(bad);
        }
    }

    #[test]
    fn rules_are_read_as_they_are_written() {
        let v4 = HostRule { is_v4: true, matches: RuleMatch::From([192, 0, 2, 1].into()), table: 100 };
        let v6 = HostRule { is_v4: false, matches: RuleMatch::Mark(MARK | 1000), table: 1000 };
        for rule in [v4, v6] {
            assert_eq!(own(&message(&rule)), Some(rule));
            let mut other = message(&rule);
            other.attributes.retain(|attribute| !matches!(attribute, RuleAttribute::Protocol(_)));
            assert_eq!(own(&other), None, "another program's");
        }
    }

    #[test]
    fn each_family_has_its_rules() {
        let used = NetworkUse {
            addresses: [IpAddr::from([192, 0, 2, 1])].into(),
            pods: ["2001:db8::1".parse().expect("a literal")].into(),
        };
        let of = |is_v4, matches| HostRule { is_v4, matches, table: 100 };
        let expected = vec![
            of(true, RuleMatch::Mark(MARK | 100)),
            of(false, RuleMatch::Mark(MARK | 100)),
            of(true, RuleMatch::From([192, 0, 2, 1].into())),
        ];
        assert_eq!(rules(100, &used), expected, "a pod needs no rule of its own");
    }
}
