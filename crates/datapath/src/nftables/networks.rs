//! The table that marks packets which follow a routing table of an EgressService (`spec.network`), for rules of the host's
//! routing (`crate::networks`):
//!
//! ```text
//! table inet egress-agent-networks {
//!     set balancers4-TABLE, balancers6-TABLE      addresses of load balancers, for each routing table
//!     set pods4-TABLE, pods6-TABLE                pods of this node
//!     set cluster4, cluster6 { flags interval; }
//!     chain prerouting { type filter hook prerouting priority -90;
//!         meta mark != 0 accept
//!         ip daddr @cluster4 accept
//!         ct direction reply ct original ip daddr @balancers4-TABLE meta mark set MARK accept
//!         iifname != MGMT accept
//!         ct direction reply accept
//!         ip saddr @pods4-TABLE meta mark set MARK accept
//!     }
//! }
//! ```
//!
//! After destination NAT, so that answers have their final destination and what pods send to a Service that of an endpoint. What
//! should follow a table that the node does not have is dropped instead of marked, in sets named after no table.
//! Connection tracking knows the address that a client used, whatever translations followed. A mark of other software wins.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use rtnetlink::packet_core::NLM_F_CREATE;

use crate::names::NFT_NETWORKS;
use crate::nftables::message::{
    Base, ChainHook, Comparison, ConnectionKey, DELETE_TABLE, GET_TABLE, MetaKey, NEW_ELEMENT, NEW_TABLE, NftBatch,
    PRIORITY_AFTER_NAT, REPLY, RuleBuilder, RuleVerdict, SetType,
};
use crate::nftables::{ELEMENTS_AT_ONCE, Nft, absent_is_false, key};

/// A routing table, and what follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedTable {
    /// As in the names of sets.
    pub name: String,
    /// `None`: the node has no such table, and what should follow it is dropped.
    pub mark: Option<u32>,
    pub addresses: Vec<IpAddr>,
    pub pods: Vec<IpAddr>,
}

/// Inputs of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkSpec {
    pub tables: Vec<MarkedTable>,
    /// Disjoint.
    pub cluster: Vec<IpNet>,
    pub mgmt_port: String,
}

struct FamilyFields {
    suffix: u8,
    kind: SetType,
    /// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
    protocol: u8,
    /// Offsets of the addresses in the IP header.
    source: u32,
    destination: u32,
    original: ConnectionKey,
}

const FAMILIES: [FamilyFields; 2] = [
    FamilyFields {
        suffix: 4,
        kind: SetType { shown_as: 7, length: 4 },
        protocol: 2,
        source: 12,
        destination: 16,
        original: ConnectionKey::OriginalV4,
    },
    FamilyFields {
        suffix: 6,
        kind: SetType { shown_as: 8, length: 16 },
        protocol: 10,
        source: 8,
        destination: 24,
        original: ConnectionKey::OriginalV6,
    },
];

impl FamilyFields {
    fn has(&self, address: IpAddr) -> bool {
        address.is_ipv4() == (self.suffix == 4)
    }

    /// Of packets of this family, the address at this offset of the IP header.
    fn address_is_in(&self, rule: &mut RuleBuilder<'_>, at: u32, (set, number): (&str, u32)) {
        rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[self.protocol]);
        rule.load(Base::Network, at, self.kind.length);
        rule.is_in(set, number);
    }
}

impl Nft {
    /// Creates or replaces the table.
    pub fn install_networks(&mut self, spec: &NetworkSpec) -> io::Result<()> {
        self.ask(&table(spec))
    }

    /// Whether the table exists.
    pub fn has_networks(&mut self) -> io::Result<bool> {
        let mut question = NftBatch::outside(NFT_NETWORKS);
        question.table(GET_TABLE, 0);
        absent_is_false(self.ask(&question))
    }

    /// Whether it was there.
    pub fn remove_networks(&mut self) -> io::Result<bool> {
        let mut batch = NftBatch::begin(NFT_NETWORKS);
        batch.table(DELETE_TABLE, 0);
        batch.end();
        absent_is_false(self.ask(&batch))
    }
}

/// The sets of one transaction, by name, with their numbers in it.
struct Sets<'a> {
    batch: &'a mut NftBatch,
    made: BTreeMap<String, u32>,
    next: u32,
}

impl Sets<'_> {
    fn addresses(&mut self, name: String, kind: SetType, addresses: &[Vec<u8>]) {
        self.next += 1;
        self.batch.set(&name, self.next, kind);
        for some in addresses.chunks(ELEMENTS_AT_ONCE) {
            self.batch.elements(NEW_ELEMENT, &name, some.iter().map(Vec::as_slice));
        }
        self.made.insert(name, self.next);
    }

    fn ranges(&mut self, name: String, kind: SetType, ranges: &[(Vec<u8>, Option<Vec<u8>>)]) {
        self.next += 1;
        self.batch.range_set(&name, self.next, kind);
        for some in ranges.chunks(ELEMENTS_AT_ONCE / 2) {
            let slices = some.iter().map(|(first, end)| (first.as_slice(), end.as_deref()));
            self.batch.ranges(&name, slices);
        }
        self.made.insert(name, self.next);
    }

    fn number(&self, name: &str) -> Option<u32> {
        self.made.get(name).copied()
    }
}

fn table(spec: &NetworkSpec) -> NftBatch {
    const CHAIN: &str = "prerouting";
    let mut batch = NftBatch::begin(NFT_NETWORKS);
    // The deletion needs an existing table.
    batch.table(NEW_TABLE, NLM_F_CREATE);
    batch.table(DELETE_TABLE, 0);
    batch.table(NEW_TABLE, NLM_F_CREATE);
    let mut sets = Sets { batch: &mut batch, made: BTreeMap::new(), next: 0 };
    for family in &FAMILIES {
        for MarkedTable { name, addresses, pods, .. } in &spec.tables {
            for (what, all) in [("balancers", addresses), ("pods", pods)] {
                let keys: Vec<_> = all.iter().filter(|one| family.has(**one)).map(|one| key(*one)).collect();
                if !keys.is_empty() {
                    sets.addresses(format!("{what}{}-{name}", family.suffix), family.kind, &keys);
                }
            }
        }
        let nets = spec.cluster.iter().filter(|net| family.has(net.addr()));
        sets.ranges(format!("cluster{}", family.suffix), family.kind, &nets.map(range).collect::<Vec<_>>());
    }
    sets.batch.chain(CHAIN, ChainHook::Prerouting, PRIORITY_AFTER_NAT);
    sets.batch.rule(CHAIN, |rule| {
        rule.meta(MetaKey::Mark, Comparison::NotEqual, &0_u32.to_ne_bytes());
        rule.verdict(RuleVerdict::Accept);
    });
    for family in &FAMILIES {
        let name = format!("cluster{}", family.suffix);
        let Some(number) = sets.number(&name) else { continue };
        sets.batch.rule(CHAIN, |rule| {
            family.address_is_in(rule, family.destination, (&name, number));
            rule.verdict(RuleVerdict::Accept);
        });
    }
    let follow = |rule: &mut RuleBuilder<'_>, mark: Option<u32>| match mark {
        Some(mark) => {
            rule.set_meta(MetaKey::Mark, &mark.to_ne_bytes());
            rule.verdict(RuleVerdict::Accept);
        }
        None => {
            rule.plain("counter");
            rule.verdict(RuleVerdict::Drop);
        }
    };
    for family in &FAMILIES {
        for MarkedTable { name, mark, .. } in &spec.tables {
            let name = format!("balancers{}-{name}", family.suffix);
            let Some(number) = sets.number(&name) else { continue };
            sets.batch.rule(CHAIN, |rule| {
                rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                is_reply(rule);
                rule.load_connection(family.original);
                rule.is_in(&name, number);
                follow(rule, *mark);
            });
        }
    }
    sets.batch.rule(CHAIN, |rule| {
        rule.interface(Comparison::NotEqual, &spec.mgmt_port);
        rule.verdict(RuleVerdict::Accept);
    });
    sets.batch.rule(CHAIN, |rule| {
        is_reply(rule);
        rule.verdict(RuleVerdict::Accept);
    });
    for family in &FAMILIES {
        for MarkedTable { name, mark, .. } in &spec.tables {
            let name = format!("pods{}-{name}", family.suffix);
            let Some(number) = sets.number(&name) else { continue };
            sets.batch.rule(CHAIN, |rule| {
                family.address_is_in(rule, family.source, (&name, number));
                follow(rule, *mark);
            });
        }
    }
    batch.end();
    batch
}

fn is_reply(rule: &mut RuleBuilder<'_>) {
    rule.load_connection(ConnectionKey::Direction);
    rule.compare(Comparison::Equal, &[REPLY]);
}

/// The first address of a network, and the one after its last.
pub fn range(net: &IpNet) -> (Vec<u8>, Option<Vec<u8>>) {
    let end = match net.broadcast() {
        IpAddr::V4(last) => u32::from(last).checked_add(1).map(|end| end.to_be_bytes().to_vec()),
        IpAddr::V6(last) => u128::from(last).checked_add(1).map(|end| end.to_be_bytes().to_vec()),
    };
    (key(net.network()), end)
}
