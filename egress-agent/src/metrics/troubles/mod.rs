//! What an administrator must know of this node, told once per change: one line in the log, one event, and a line of
//! `egress-agent status` for as long as it lasts. Pure; the loop around it is [`follow`](crate::metrics::watchdog::follow).
//!
//! | reason | about | begins | ends |
//! |---|---|---|---|
//! | `PortsNearlyExhausted` | the object | 80 % of the ports towards one destination are in use | below 70 % |
//! | `PortsExhausted` | the object | new flows are refused for want of a port | none for a minute |
//! | `MapNearlyFull` | the node | a map is seven eighths full | below three quarters |
//! | `QuotaReached` | the node | a pod's or a policy's new flows are refused for its quota | none for a minute |
//! | `PolicyInForward` | the node | a CNI's chain for policy is there | it is gone |
//! | `SharedGatewayMode` | the node | OVN-Kubernetes says so of it | it says so no more |
//! | `OVNKubernetesEgressIP` | the node | OVN-Kubernetes has egress IPs on its interfaces | none is left |

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use egress_common::abi::Verdict;

use crate::metrics::facts::{Facts, Held, Served};
use egress_core::model::node::Node;
use egress_core::model::policy::PolicyKey;
use egress_core::model::state::EgressId;

const PORTS_HIGH: f64 = 0.8;
const PORTS_LOW: f64 = 0.7;
const MAP_HIGH: f64 = 0.875;
const MAP_LOW: f64 = 0.75;
/// Ports are exhausted, and a quota is reached, until nothing was refused for so long.
const REFUSED: Duration = Duration::from_secs(60);

const SHARED_GATEWAY: &str = "OVN-Kubernetes runs in shared gateway mode: pods' traffic does not pass the host, so that \
                              egress-agent cannot serve this node's pods; use local gateway mode";
const OVN_EGRESS_IP: &str = "OVN-Kubernetes has egress IPs on interfaces of this node: its own EgressIP is still enabled, or \
                             was not cleaned up (--enable-egress-ip=false); two would answer for the addresses";

const QUOTA: &str = "a pod, or all pods of one egress policy, have reached their quota of this node's flows: their new flows \
                     are dropped (quota_exceeded); `egress-agent nat count` on the node names the pods that hold most";

/// Whom an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Policy { policy: PolicyKey, uid: String },
    Node,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    pub subject: Subject,
    pub reason: &'static str,
    pub message: String,
}

/// By the reason, and what it is the reason for.
type Key = (&'static str, String);

#[derive(Debug, Default)]
pub struct Troubles {
    open: BTreeMap<Key, Trouble>,
    /// Refusals of each egress IP when it was looked last, and those for want of a port.
    refusals: BTreeMap<EgressId, u64>,
    exhausted: Option<u64>,
    /// Packets that were refused for a quota, when it was looked last, and when there was last one more.
    over_quota: Option<u64>,
    quota_reached: Option<Instant>,
    /// When a flow of an egress IP was last refused for want of a port.
    refused: BTreeMap<EgressId, Instant>,
}

impl Troubles {
    /// What begins with this look.
    /// `policy` is whose policy the host has in FORWARD.
    pub fn look(
        &mut self,
        facts: &Facts,
        (node, policy): (Option<&Node>, Option<&'static str>),
        now: Instant,
    ) -> Vec<Trouble> {
        let mut news = Vec::new();
        // What is not known now has not ended.
        if let (Some(held), Some(kernel)) = (facts.held(), &facts.kernel) {
            self.note_refusals(facts, now);
            for (id, served) in &held.served {
                let ratio =
                    kernel.ports.as_ref().and_then(|ports| ports.egress_ips.get(id)).map_or(0.0, |of| of.ratio());
                let high = self.is_over(("PortsNearlyExhausted", served), ratio, (PORTS_HIGH, PORTS_LOW));
                // Without the number, which is another each time: an agent that starts anew says the same. And as what has
                // been: it is told until the use is well below.
                let nearly = format!(
                    "egress IP {} has come to use 80 % of its ports towards one destination: at 100 % new connections to it \
                     are dropped",
                    served.address
                );
                self.set("PortsNearlyExhausted", served, high, nearly, &mut news);
                let out = self.refused.get(id).is_some_and(|at| now.duration_since(*at) < REFUSED);
                let none_left = format!(
                    "egress IP {} has run out of ports towards a destination: new connections to it are dropped while none is \
                     free",
                    served.address
                );
                self.set("PortsExhausted", served, out, none_left, &mut news);
            }
            for (map, limit) in &kernel.limits {
                let counted = kernel.entries.get(map).copied().map(f64::from);
                let written = held.entries.get(map).and_then(|count| u32::try_from(*count).ok()).map(f64::from);
                let Some(entries) = counted.or(written).filter(|_| *limit > 0) else { continue };
                let fill = entries / f64::from(*limit);
                let is_open = self.open.contains_key(&("MapNearlyFull", (*map).to_owned()));
                let full = fill >= if is_open { MAP_LOW } else { MAP_HIGH };
                let message = format!(
                    "the map {map} of this node has become seven eighths full: what is new is refused when it is full"
                );
                self.of_node("MapNearlyFull", map, full, message, &mut news);
            }
            self.forget_others(held);
            let reached = self.quota_reached.is_some_and(|at| now.duration_since(at) < REFUSED);
            self.of_node("QuotaReached", "", reached, QUOTA.to_owned(), &mut news);
        }
        let message = format!(
            "{} enforces network policy in the host's FORWARD chain, which traffic to the world with an egress IP does not \
             pass: such policy does not hold for it",
            policy.unwrap_or_default()
        );
        self.of_node("PolicyInForward", "", policy.is_some(), message, &mut news);
        if let Some(node) = node {
            self.of_node("SharedGatewayMode", "", node.shared_gateway, SHARED_GATEWAY.to_owned(), &mut news);
            self.of_node("OVNKubernetesEgressIP", "", node.foreign_egress_ips, OVN_EGRESS_IP.to_owned(), &mut news);
        }
        news
    }

    /// What lasts.
    pub fn lines(&self) -> Vec<String> {
        self.open.values().map(|trouble| trouble.message.clone()).collect()
    }

    /// Whether it is, or still is.
    fn is_over(&self, (reason, served): (&'static str, &Served), value: f64, (high, low): (f64, f64)) -> bool {
        let is_open = self.open.contains_key(&(reason, served.address.to_string()));
        value >= if is_open { low } else { high }
    }

    /// A refusal of an egress IP is one for want of a port where such packets were dropped since the last look.
    fn note_refusals(&mut self, facts: &Facts, now: Instant) {
        let Some(kernel) = &facts.kernel else { return };
        let exhausted = kernel.verdicts.get(&Verdict::PortsExhausted).map_or(0, |count| count.packets);
        let has_grown = self.exhausted.replace(exhausted).is_some_and(|before| exhausted > before);
        let over_quota = kernel.verdicts.get(&Verdict::QuotaExceeded).map_or(0, |count| count.packets);
        if self.over_quota.replace(over_quota).is_some_and(|before| over_quota > before) {
            self.quota_reached = Some(now);
        }
        for (id, count) in &kernel.egress_ips {
            // The first of one that was not there a moment ago counts as well.
            let before = self.refusals.insert(*id, count.refusals).unwrap_or_default();
            if has_grown && count.refusals > before {
                self.refused.insert(*id, now);
            }
        }
        self.refusals.retain(|id, _| kernel.egress_ips.contains_key(id));
        self.refused.retain(|id, at| kernel.egress_ips.contains_key(id) && now.duration_since(*at) < REFUSED);
    }

    fn set(&mut self, reason: &'static str, of: &Served, is: bool, message: String, news: &mut Vec<Trouble>) {
        let policy = of.policy.clone();
        let subject = policy.map_or(Subject::Node, |(policy, uid)| Subject::Policy { policy, uid });
        self.change((reason, of.address.to_string()), is, Trouble { subject, reason, message }, news);
    }

    fn of_node(&mut self, reason: &'static str, what: &str, is: bool, message: String, news: &mut Vec<Trouble>) {
        self.change((reason, what.to_owned()), is, Trouble { subject: Subject::Node, reason, message }, news);
    }

    fn change(&mut self, key: Key, is: bool, trouble: Trouble, news: &mut Vec<Trouble>) {
        match is {
            false => drop(self.open.remove(&key)),
            true if self.open.contains_key(&key) => {}
            true => {
                news.push(trouble.clone());
                self.open.insert(key, trouble);
            }
        }
    }

    /// An address that this node serves no more troubles it no more.
    fn forget_others(&mut self, held: &Held) {
        let served: BTreeSet<String> = held.served.values().map(|served| served.address.to_string()).collect();
        self.open.retain(|(_, what), trouble| trouble.subject == Subject::Node || served.contains(what));
    }
}

#[cfg(test)]
mod tests;
