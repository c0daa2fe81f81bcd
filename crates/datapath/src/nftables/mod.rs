//! Our nftables tables. One of them ([`networks`]) is for routing tables; the other for two functions that no TC program can have:
//!
//! ```text
//! table inet egress-agent {
//!     set pods4 { type ipv4_addr; }
//!     set pods6 { type ipv6_addr; }
//!     chain prerouting { type filter hook prerouting priority raw;
//!         iifname != MGMT udp dport PORT notrack
//!         iifname != MGMT accept
//!         meta priority SEEN meta priority set 0 accept
//!         ip saddr @pods4 counter drop
//!         ip6 saddr @pods6 counter drop
//!     }
//!     chain output { type filter hook output priority raw; udp dport PORT notrack }
//! }
//! ```
//!
//! - **The leak guard after `from_pod`**: without the program (a replaced device, a detached link) the CNI's masquerade
//!   would send selected pods' packets with the node's address. `from_pod` sets the priority `SEEN` on packets that it
//!   leaves to the stack; packets of selected pods without it are dropped. Not if the management port is a bridge whose
//!   port traffic passes netfilter, where these rules would run before the program.
//! - **No connection tracking of the overlay**, whose flows would fill its table. Pods' packets to that port of outside
//!   hosts stay tracked.
//!
//! The sets are updated before a pod's entry is added to map `pods`, and after it is removed. The table stays in the
//! kernel, is replaced in one transaction, and `cleanup` deletes it. Without nf_tables in the kernel the agent warns.

pub mod forward_policy;
pub mod message;
pub mod networks;
pub mod xtables;

use std::io;
use std::net::IpAddr;

use rtnetlink::packet_core::NLM_F_CREATE;

use crate::names::NFT_TABLE;
use crate::nftables::message::{
    Base, ChainHook, Comparison, DELETE_ELEMENT, DELETE_TABLE, GET_TABLE, MetaKey, NEW_ELEMENT, NEW_TABLE, NftBatch,
    NftSocket, PRIORITY_RAW, RuleVerdict, SetType,
};

const UDP: u8 = 17;
/// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
const FAMILIES: [Guarded; 2] = [
    Guarded { set: "pods4", number: 1, kind: SetType { shown_as: 7, length: 4 }, protocol: 2, source: 12 },
    Guarded { set: "pods6", number: 2, kind: SetType { shown_as: 8, length: 16 }, protocol: 10, source: 8 },
];
/// An attribute has a length of 16 bits.
pub(crate) const ELEMENTS_AT_ONCE: usize = 1024;

/// One family's half of the leak guard.
struct Guarded {
    set: &'static str,
    /// Number of the set within a transaction.
    number: u32,
    kind: SetType,
    protocol: u8,
    /// Offset of the source address in the IP header.
    source: u32,
}

/// Inputs of the table.
pub struct TableSpec<'a> {
    pub tunnel_port: u16,
    pub mgmt_port: &'a str,
    /// The priority that `from_pod` sets on packets that it leaves to the stack; `None` without a leak guard.
    pub seen: Option<u32>,
    /// Selected pods of this node.
    pub pods: &'a [IpAddr],
}

/// The connection to the kernel's tables.
#[derive(Default)]
pub struct Nft(Option<NftSocket>);

impl Nft {
    /// Creates or replaces the table.
    pub fn install(&mut self, rules: &TableSpec<'_>) -> io::Result<()> {
        self.ask(&table(rules))
    }

    /// Adds a selected pod to the leak guard.
    pub fn add_pod(&mut self, pod: IpAddr) -> io::Result<()> {
        self.change(NEW_ELEMENT, pod)
    }

    /// Removes a pod from the leak guard. A missing one is no error, but costs the kernel some time.
    pub fn remove_pod(&mut self, pod: IpAddr) -> io::Result<()> {
        absent_is_false(self.change(DELETE_ELEMENT, pod)).map(drop)
    }

    fn change(&mut self, kind: u16, pod: IpAddr) -> io::Result<()> {
        let key = key(pod);
        let Some(family) = FAMILIES.iter().find(|family| family.length() == key.len()) else { return Ok(()) };
        let mut batch = NftBatch::begin(NFT_TABLE);
        batch.elements(kind, family.set, std::iter::once(key.as_slice()));
        batch.end();
        self.ask(&batch)
    }

    /// Whether our table exists; other software may have flushed the rule set.
    pub fn is_installed(&mut self) -> io::Result<bool> {
        let mut question = NftBatch::outside(NFT_TABLE);
        question.table(GET_TABLE, 0);
        absent_is_false(self.ask(&question))
    }

    /// Whether it was there.
    pub fn remove(&mut self) -> io::Result<bool> {
        self.remove_table(NFT_TABLE.to_owned())
    }

    /// Removes any table. Whether it was there.
    pub fn remove_table(&mut self, table: String) -> io::Result<bool> {
        let mut batch = NftBatch::begin(table);
        batch.table(DELETE_TABLE, 0);
        batch.end();
        absent_is_false(self.ask(&batch))
    }

    /// Performs a transaction.
    pub fn ask(&mut self, batch: &NftBatch) -> io::Result<()> {
        let socket = self.0.take().map_or_else(NftSocket::open, Ok)?;
        let outcome = socket.ask(batch)?;
        self.0 = Some(socket);
        outcome
    }
}

/// The messages that create or replace the table.
fn table(rules: &TableSpec<'_>) -> NftBatch {
    let mut batch = NftBatch::begin(NFT_TABLE);
    // The deletion needs an existing table.
    batch.table(NEW_TABLE, NLM_F_CREATE);
    batch.table(DELETE_TABLE, 0);
    batch.table(NEW_TABLE, NLM_F_CREATE);
    for family in &FAMILIES {
        batch.set(family.set, family.number, family.kind);
        let keys: Vec<_> = rules.pods.iter().map(|pod| key(*pod)).filter(|key| key.len() == family.length()).collect();
        for some in keys.chunks(ELEMENTS_AT_ONCE) {
            batch.elements(NEW_ELEMENT, family.set, some.iter().map(Vec::as_slice));
        }
    }
    batch.chain("prerouting", ChainHook::Prerouting, PRIORITY_RAW);
    untracked(&mut batch, "prerouting", rules.tunnel_port, Some(rules.mgmt_port));
    if let Some(seen) = rules.seen {
        guard(&mut batch, "prerouting", rules.mgmt_port, seen);
    }
    batch.chain("output", ChainHook::Output, PRIORITY_RAW);
    untracked(&mut batch, "output", rules.tunnel_port, None);
    batch.end();
    batch
}

/// `[iifname != NAME] udp dport PORT notrack`
fn untracked(batch: &mut NftBatch, chain: &str, port: u16, not_from: Option<&str>) {
    batch.rule(chain, |rule| {
        if let Some(name) = not_from {
            rule.interface(Comparison::NotEqual, name);
        }
        rule.meta(MetaKey::TransportProtocol, Comparison::Equal, &[UDP]);
        // The destination port.
        rule.load(Base::Transport, 2, 2);
        rule.compare(Comparison::Equal, &port.to_be_bytes());
        rule.plain("notrack");
    });
}

fn guard(batch: &mut NftBatch, chain: &str, mgmt_port: &str, seen: u32) {
    batch.rule(chain, |rule| {
        rule.interface(Comparison::NotEqual, mgmt_port);
        rule.verdict(RuleVerdict::Accept);
    });
    batch.rule(chain, |rule| {
        rule.meta(MetaKey::Priority, Comparison::Equal, &seen.to_ne_bytes());
        rule.set_meta(MetaKey::Priority, &0_u32.to_ne_bytes());
        rule.verdict(RuleVerdict::Accept);
    });
    for family in &FAMILIES {
        batch.rule(chain, |rule| {
            rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
            rule.load(Base::Network, family.source, family.kind.length);
            rule.is_in(family.set, family.number);
            rule.plain("counter");
            rule.verdict(RuleVerdict::Drop);
        });
    }
}

pub fn key(pod: IpAddr) -> Vec<u8> {
    match pod {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

impl Guarded {
    const fn length(&self) -> usize {
        self.kind.length as usize
    }
}

pub(crate) fn absent_is_false(outcome: io::Result<()>) -> io::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        // A kernel without nf_tables has no table either.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(error),
    }
}
