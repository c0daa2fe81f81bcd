//! The nftables table of one router, in its pod's namespace. Pure.
//!
//! ```text
//! table inet egress-router-net1 {
//!     flowtable fast { hook ingress priority 0; devices = { eth0, net1 }; }
//!     map redirect4 { type inet_proto . inet_service : ipv4_addr . inet_service; }
//!     set allowed4 { type ipv4_addr; flags interval; }
//!     set inside4 { type ipv4_addr; flags interval; }
//!     chain redirect { type nat hook prerouting priority dstnat;
//!         iifname != eth0 accept
//!         meta nfproto ipv4 tcp dport 8080 accept                          # localPorts
//!         meta nfproto ipv4 ct mark set MARK dnat ip to meta l4proto . th dport map @redirect4
//!         meta nfproto ipv4 l4proto != icmp ct mark set MARK dnat ip to 203.0.113.27    # the fallback
//!     }
//!     chain direct { type filter hook prerouting priority -90;
//!         ct mark MARK ct direction original meta mark set MARK
//!         ct mark MARK ct direction reply meta mark set PRIMARY
//!     }
//!     chain forward { type filter hook forward priority filter;
//!         oifname net1 ct state established,related flow add @fast accept
//!         iifname net1 ct state established,related accept
//!         iifname net1 counter drop
//!         iifname eth0 oifname eth0 counter drop
//!         oifname != net1 accept
//!         iifname eth0 ct mark MARK ct status dnat accept
//!         iifname eth0 ip daddr @allowed4 ct mark set MARK accept
//!         counter reject
//!     }
//!     chain input { type filter hook input priority filter; iifname net1: established and ICMP only }
//!     chain output { type filter hook output priority filter;
//!         oifname eth0: established, and @inside4 only
//!         oifname net1: established, untracked, and @allowed4 only
//!     }
//!     chain masquerade { type nat hook postrouting priority srcnat; oifname net1 snat ip to 192.168.12.99 }
//! }
//! ```
//!
//! - **The reverse door is shut**: a host of the external network gets answers of connections that began on this side, and nothing
//!   else, neither through the router nor from its own sockets.
//! - **No process of the pod gets past the router**: one that binds to the first interface, or to its address, reaches what that
//!   interface has routes to, and answers clients.
//! - Redirects cost one lookup, however many they are.
//! - `accept` ends one chain, so that routers of one pod, each with a table, do not decide for each other.
//! - Connections that are established are forwarded from device to device where the kernel has flow tables.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use egress_core::model::state::{Family, family_of};
use egress_datapath::nftables::key;
use egress_datapath::nftables::message::{
    Base, ChainHook, ChainType, Comparison, ConnectionKey, DELETE_TABLE, DESTINATION_NAT, ESTABLISHED, MetaKey,
    NEW_TABLE, NatType, NftBatch, ORIGINAL, PRIORITY_AFTER_NAT, PRIORITY_DESTINATION_NAT, PRIORITY_FILTER,
    PRIORITY_SOURCE_NAT, RELATED, REPLY, RejectWith, RuleBuilder, RuleVerdict, SetType, UNTRACKED,
};
use egress_datapath::nftables::networks::range;
use ipnet::IpNet;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};

use crate::config::destinations::{Allowed, Protocol, Redirects};
use crate::config::{Addressing, RouterConfig};

const TCP: u8 = 6;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const FLOWTABLE: &str = "fast";
/// Elements in one message: an attribute has a length of 16 bits.
const ELEMENTS_AT_ONCE: usize = 512;

/// What differs between the families.
struct OfFamily {
    family: Family,
    /// `NFPROTO_*`.
    protocol: u8,
    redirects: &'static str,
    allowed: &'static str,
    inside: &'static str,
    address: SetType,
    /// Offset of the destination in the IP header.
    destination: u32,
    source: u32,
    /// Of the first of its three sets.
    number: u32,
}

const FAMILIES: [OfFamily; 2] = [
    OfFamily {
        family: Family::V4,
        protocol: 2,
        redirects: "redirect4",
        allowed: "allowed4",
        inside: "inside4",
        address: SetType { shown_as: 7, length: 4 },
        destination: 16,
        source: 12,
        number: 1,
    },
    OfFamily {
        family: Family::V6,
        protocol: 10,
        redirects: "redirect6",
        allowed: "allowed6",
        inside: "inside6",
        address: SetType { shown_as: 8, length: 16 },
        destination: 24,
        source: 8,
        number: 4,
    },
];

/// A protocol and a port, as `nft` shows them (`TYPE_BITS`), padded to four bytes each.
const SERVICE: SetType = SetType { shown_as: 12 << 6 | 13, length: 8 };

/// The rules of one router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset {
    interface: String,
    primary: Option<String>,
    /// Where the pod's processes may connect to by the primary interface.
    inside: Vec<IpNet>,
    addresses: BTreeMap<Family, Vec<IpAddr>>,
    redirects: Redirects,
    /// What may be reached by the pod itself, and by others through it where nothing is redirected; everything if `None`.
    allowed: Option<Vec<Allowed>>,
    local_ports: BTreeSet<u16>,
}

/// What the kernel gave the router.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    /// Of connections through it.
    pub router: u32,
    /// Of their replies.
    pub primary: u32,
}

impl Ruleset {
    pub fn new(
        interface: &str,
        primary: Option<(&str, Vec<IpNet>)>,
        addresses: &[IpNet],
        addressing: &Addressing,
        config: &RouterConfig,
    ) -> Self {
        let mut by_family = BTreeMap::<Family, Vec<IpAddr>>::new();
        for address in addresses {
            by_family.entry(family_of(address.addr())).or_default().push(address.addr());
        }
        Self {
            interface: interface.to_owned(),
            primary: primary.as_ref().map(|(name, _)| (*name).to_owned()),
            inside: primary.map(|(_, inside)| inside).unwrap_or_default(),
            addresses: by_family,
            redirects: addressing.redirects.clone(),
            allowed: addressing.allowed.clone(),
            local_ports: config.local_ports.clone(),
        }
    }

    pub fn table(interface: &str) -> String {
        format!("egress-router-{interface}")
    }

    /// The messages that create the table, or replace it. A transaction that deletes waits for a grace period of RCU.
    pub fn batch(&self, marks: Marks, has_flowtables: bool, replaces: bool) -> NftBatch {
        let mut batch = NftBatch::begin(Self::table(&self.interface));
        if replaces {
            // The deletion needs an existing table.
            batch.table(NEW_TABLE, NLM_F_CREATE);
            batch.table(DELETE_TABLE, 0);
        }
        batch.table(NEW_TABLE, NLM_F_CREATE | NLM_F_EXCL);
        let devices = [Some(self.interface.as_str()), self.primary.as_deref()].map(Option::unwrap_or_default);
        let has_flowtable = has_flowtables && self.primary.is_some();
        if has_flowtable {
            batch.flowtable(FLOWTABLE, &devices);
        }
        let families: Vec<&OfFamily> =
            FAMILIES.iter().filter(|family| self.addresses.contains_key(&family.family)).collect();
        for family in &families {
            self.maps(&mut batch, family);
        }
        for family in FAMILIES.iter().filter(|_| self.primary.is_some()) {
            ranges(&mut batch, family, (family.inside, family.number + 2), self.inside.iter().copied());
        }
        if let Some(primary) = &self.primary {
            batch.chain_of(ChainType::Nat, "redirect", ChainHook::Prerouting, PRIORITY_DESTINATION_NAT);
            self.redirect(&mut batch, primary, &families, marks);
        }
        batch.chain("direct", ChainHook::Prerouting, PRIORITY_AFTER_NAT);
        for (direction, mark) in [(ORIGINAL, marks.router), (REPLY, marks.primary)] {
            batch.rule("direct", |rule| {
                rule.load_connection(ConnectionKey::Mark);
                rule.compare(Comparison::Equal, &marks.router.to_ne_bytes());
                rule.load_connection(ConnectionKey::Direction);
                rule.compare(Comparison::Equal, &[direction]);
                rule.set_meta(MetaKey::Mark, &mark.to_ne_bytes());
            });
        }
        batch.chain("forward", ChainHook::Forward, PRIORITY_FILTER);
        self.forward(&mut batch, &families, marks, has_flowtable);
        batch.chain("input", ChainHook::Input, PRIORITY_FILTER);
        self.input(&mut batch);
        batch.chain("output", ChainHook::Output, PRIORITY_FILTER);
        self.output(&mut batch, &families);
        batch.chain_of(ChainType::Nat, "masquerade", ChainHook::Postrouting, PRIORITY_SOURCE_NAT);
        self.masquerade(&mut batch, &families);
        batch.end();
        batch
    }

    fn maps(&self, batch: &mut NftBatch, family: &OfFamily) {
        let redirects = self.redirects.ports.iter().filter(|((of, ..), _)| *of == family.family);
        let pairs: Vec<(Vec<u8>, Vec<u8>)> = redirects
            .map(|((_, protocol, port), to)| {
                let service = [&[*protocol as u8, 0, 0, 0][..], &port.to_be_bytes(), &[0; 2]].concat();
                (service, [key(to.ip()), to.port().to_be_bytes().to_vec(), vec![0; 2]].concat())
            })
            .collect();
        let value = SetType { shown_as: family.address.shown_as << 6 | 13, length: family.address.length + 4 };
        batch.map(family.redirects, family.number, SERVICE, value);
        for some in pairs.chunks(ELEMENTS_AT_ONCE) {
            batch.pairs(family.redirects, some.iter().map(|(service, to)| (service.as_slice(), to.as_slice())));
        }
        // Those that are allowed as a whole.
        let whole = self.allowed.iter().flatten().filter(|one| one.protocol.is_none()).map(|one| one.network);
        ranges(batch, family, (family.allowed, family.number + 1), whole);
    }

    fn redirect(&self, batch: &mut NftBatch, primary: &str, families: &[&OfFamily], marks: Marks) {
        batch.rule("redirect", |rule| {
            rule.interface(Comparison::NotEqual, primary);
            rule.verdict(RuleVerdict::Accept);
        });
        for port in &self.local_ports {
            batch.rule("redirect", |rule| {
                rule.meta(MetaKey::TransportProtocol, Comparison::Equal, &[TCP]);
                destination_port(rule);
                rule.compare(Comparison::Equal, &port.to_be_bytes());
                rule.verdict(RuleVerdict::Accept);
            });
        }
        for family in families {
            batch.rule("redirect", |rule| {
                rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                let of_family = (family.protocol, family.address.length);
                rule.destination_by_map(family.redirects, family.number, of_family, marks.router);
            });
            let Some(fallback) = self.redirects.fallback.get(&family.family) else { continue };
            // An echo request has no port, and is answered by the pod; what it is sent to elsewhere is not for the router.
            batch.rule("redirect", |rule| {
                rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                rule.meta(MetaKey::TransportProtocol, Comparison::NotEqual, &[ICMP]);
                rule.meta(MetaKey::TransportProtocol, Comparison::NotEqual, &[ICMPV6]);
                rule.set_connection_mark(marks.router);
                rule.nat_to(NatType::Destination, family.protocol, &key(*fallback));
            });
        }
    }

    fn forward(&self, batch: &mut NftBatch, families: &[&OfFamily], marks: Marks, has_flowtable: bool) {
        let (chain, own) = ("forward", self.interface.as_str());
        if has_flowtable {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                batch.rule(chain, |rule| {
                    rule.outgoing_interface(Comparison::Equal, own);
                    rule.meta(MetaKey::TransportProtocol, Comparison::Equal, &[protocol as u8]);
                    rule.connection_has(ConnectionKey::State, ESTABLISHED);
                    rule.offload(FLOWTABLE);
                    rule.verdict(RuleVerdict::Accept);
                });
            }
        }
        batch.rule(chain, |rule| {
            rule.outgoing_interface(Comparison::Equal, own);
            rule.connection_has(ConnectionKey::State, ESTABLISHED | RELATED);
            rule.verdict(RuleVerdict::Accept);
        });
        batch.rule(chain, |rule| {
            rule.interface(Comparison::Equal, own);
            rule.connection_has(ConnectionKey::State, ESTABLISHED | RELATED);
            rule.verdict(RuleVerdict::Accept);
        });
        batch.rule(chain, |rule| {
            rule.interface(Comparison::Equal, own);
            rule.plain("counter");
            rule.verdict(RuleVerdict::Drop);
        });
        if let Some(primary) = &self.primary {
            // The pod forwards now, and is no router within the cluster.
            batch.rule(chain, |rule| {
                rule.interface(Comparison::Equal, primary);
                rule.outgoing_interface(Comparison::Equal, primary);
                rule.plain("counter");
                rule.verdict(RuleVerdict::Drop);
            });
        }
        batch.rule(chain, |rule| {
            rule.outgoing_interface(Comparison::NotEqual, own);
            rule.verdict(RuleVerdict::Accept);
        });
        if let Some(primary) = &self.primary {
            batch.rule(chain, |rule| {
                rule.interface(Comparison::Equal, primary);
                rule.load_connection(ConnectionKey::Mark);
                rule.compare(Comparison::Equal, &marks.router.to_ne_bytes());
                rule.connection_has(ConnectionKey::Status, DESTINATION_NAT);
                rule.verdict(RuleVerdict::Accept);
            });
            if self.redirects.is_empty() {
                self.allow(
                    batch,
                    chain,
                    families,
                    |rule| {
                        rule.interface(Comparison::Equal, primary);
                    },
                    |rule| rule.set_connection_mark(marks.router),
                );
            }
        }
        refuse(batch, chain, |_| {});
    }

    /// Accepts what is allowed.
    fn allow(
        &self,
        batch: &mut NftBatch,
        chain: &str,
        families: &[&OfFamily],
        begin: impl Fn(&mut RuleBuilder<'_>),
        end: impl Fn(&mut RuleBuilder<'_>),
    ) {
        let Some(allowed) = &self.allowed else {
            for family in families {
                batch.rule(chain, |rule| {
                    begin(rule);
                    rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                    end(rule);
                    rule.verdict(RuleVerdict::Accept);
                });
            }
            return;
        };
        for family in families {
            batch.rule(chain, |rule| {
                begin(rule);
                rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                rule.load(Base::Network, family.destination, family.address.length);
                rule.is_in(family.allowed, family.number + 1);
                end(rule);
                rule.verdict(RuleVerdict::Accept);
            });
            let of_family = allowed.iter().filter(|one| family_of(one.network.addr()) == family.family);
            for one in of_family {
                let Some(protocol) = one.protocol else { continue };
                batch.rule(chain, |rule| {
                    begin(rule);
                    rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                    rule.load(Base::Network, family.destination, family.address.length);
                    rule.masked(&key(one.network.netmask()), &key(one.network.network()));
                    rule.meta(MetaKey::TransportProtocol, Comparison::Equal, &[protocol as u8]);
                    if let Some((first, last)) = one.ports {
                        destination_port(rule);
                        rule.compare(Comparison::AtLeast, &first.to_be_bytes());
                        rule.compare(Comparison::AtMost, &last.to_be_bytes());
                    }
                    end(rule);
                    rule.verdict(RuleVerdict::Accept);
                });
            }
        }
    }

    /// The pod's own sockets have no clients on the external network.
    fn input(&self, batch: &mut NftBatch) {
        let (chain, own) = ("input", self.interface.as_str());
        batch.rule(chain, |rule| {
            rule.interface(Comparison::NotEqual, own);
            rule.verdict(RuleVerdict::Accept);
        });
        batch.rule(chain, |rule| {
            rule.connection_has(ConnectionKey::State, ESTABLISHED | RELATED);
            rule.verdict(RuleVerdict::Accept);
        });
        for protocol in [ICMP, ICMPV6] {
            batch.rule(chain, |rule| {
                rule.meta(MetaKey::TransportProtocol, Comparison::Equal, &[protocol]);
                rule.verdict(RuleVerdict::Accept);
            });
        }
        batch.rule(chain, |rule| {
            rule.plain("counter");
            rule.verdict(RuleVerdict::Drop);
        });
    }

    fn output(&self, batch: &mut NftBatch, families: &[&OfFamily]) {
        let (chain, own) = ("output", self.interface.as_str());
        if let Some(primary) = &self.primary {
            batch.rule(chain, |rule| {
                rule.outgoing_interface(Comparison::Equal, primary);
                rule.connection_has(ConnectionKey::State, ESTABLISHED | RELATED);
                rule.verdict(RuleVerdict::Accept);
            });
            // Of both families: one without an address of the router has the same hole.
            for family in &FAMILIES {
                batch.rule(chain, |rule| {
                    rule.outgoing_interface(Comparison::Equal, primary);
                    rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                    rule.load(Base::Network, family.destination, family.address.length);
                    rule.is_in(family.inside, family.number + 2);
                    rule.verdict(RuleVerdict::Accept);
                });
            }
            refuse(batch, chain, |rule| rule.outgoing_interface(Comparison::Equal, primary));
        }
        batch.rule(chain, |rule| {
            rule.outgoing_interface(Comparison::NotEqual, own);
            rule.verdict(RuleVerdict::Accept);
        });
        batch.rule(chain, |rule| {
            rule.connection_has(ConnectionKey::State, ESTABLISHED | RELATED);
            rule.verdict(RuleVerdict::Accept);
        });
        // Neighbour discovery and multicast listener reports, of which conntrack keeps no connection.
        batch.rule(chain, |rule| {
            rule.meta(MetaKey::TransportProtocol, Comparison::Equal, &[ICMPV6]);
            rule.connection_has(ConnectionKey::State, UNTRACKED);
            rule.verdict(RuleVerdict::Accept);
        });
        self.allow(batch, chain, families, |_| {}, |_| {});
        refuse(batch, chain, |_| {});
    }

    /// The address of the router, unless a process has chosen another one of them.
    fn masquerade(&self, batch: &mut NftBatch, families: &[&OfFamily]) {
        let (chain, own) = ("masquerade", self.interface.as_str());
        batch.rule(chain, |rule| {
            rule.outgoing_interface(Comparison::NotEqual, own);
            rule.verdict(RuleVerdict::Accept);
        });
        for family in families {
            let addresses = self.addresses.get(&family.family).map(Vec::as_slice).unwrap_or_default();
            for address in addresses {
                batch.rule(chain, |rule| {
                    rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                    rule.load(Base::Network, family.source, family.address.length);
                    rule.compare(Comparison::Equal, &key(*address));
                    rule.verdict(RuleVerdict::Accept);
                });
            }
            let Some(first) = addresses.first() else { continue };
            batch.rule(chain, |rule| {
                rule.meta(MetaKey::NetworkProtocol, Comparison::Equal, &[family.protocol]);
                rule.nat_to(NatType::Source, family.protocol, &key(*first));
            });
        }
    }
}

fn destination_port(rule: &mut RuleBuilder<'_>) {
    rule.load(Base::Transport, 2, 2);
}

/// A set of the networks of one family; its name and its number.
fn ranges(batch: &mut NftBatch, of: &OfFamily, (name, number): (&str, u32), networks: impl Iterator<Item = IpNet>) {
    let networks: Vec<IpNet> = networks.filter(|net| family_of(net.addr()) == of.family).collect();
    batch.range_set(name, number, of.address);
    let ranges: Vec<(Vec<u8>, Option<Vec<u8>>)> = IpNet::aggregate(&networks).iter().map(range).collect();
    for some in ranges.chunks(ELEMENTS_AT_ONCE) {
        batch.ranges(name, some.iter().map(|(first, end)| (first.as_slice(), end.as_deref())));
    }
}

/// A client learns at once that it may not.
fn refuse(batch: &mut NftBatch, chain: &str, begin: impl Fn(&mut RuleBuilder<'_>)) {
    batch.rule(chain, |rule| {
        begin(rule);
        rule.meta(MetaKey::TransportProtocol, Comparison::Equal, &[TCP]);
        rule.plain("counter");
        rule.reject(RejectWith::TcpReset);
    });
    batch.rule(chain, |rule| {
        begin(rule);
        rule.plain("counter");
        rule.reject(RejectWith::Prohibited);
    });
}
