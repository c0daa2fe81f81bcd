//! Warnings about this node, reported once per change: a log line, an event, and a line of `egress-agent status` while the
//! condition lasts. Pure; the loop around it is [`node_watch`](crate::metrics::node_watch).
//!
//! | reason | about | starts | ends |
//! |---|---|---|---|
//! | `PortsNearlyExhausted` | the object | 80 % of the ports towards one destination are in use | below 70 % |
//! | `PortsExhausted` | the object | new flows are refused because no port is free | none for a minute |
//! | `MapNearlyFull` | the node | a map is seven eighths full | below three quarters |
//! | `QuotaReached` | the node | a pod's or a policy's new flows are refused for its quota | none for a minute |
//! | `PolicyInForward` | the node | a CNI's policy chain exists | it is removed |
//! | `SharedGatewayMode` | the node | OVN-Kubernetes' annotation says so | it no longer does |
//! | `OVNKubernetesEgressIP` | the node | OVN-Kubernetes has egress IPs on its interfaces | none is left |

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use egress_common::abi::Verdict;

use crate::metrics::snapshot::{InKernel, ServedAddress, Snapshot};
use egress_core::model::node::Node;
use egress_core::model::policy::PolicyKey;
use egress_core::model::state::EgressId;

const PORTS_HIGH: f64 = 0.8;
const PORTS_LOW: f64 = 0.7;
const MAP_HIGH: f64 = 0.875;
const MAP_LOW: f64 = 0.75;
/// The reasons that are about an address: on its object, or on the Node while the object is unknown.
const ABOUT_ADDRESSES: [&str; 2] = [NEARLY_EXHAUSTED, EXHAUSTED];
const NEARLY_EXHAUSTED: &str = "PortsNearlyExhausted";
const EXHAUSTED: &str = "PortsExhausted";
/// A refusal counts for this long.
const REFUSED: Duration = Duration::from_secs(60);

const SHARED_GATEWAY: &str = "OVN-Kubernetes runs in shared gateway mode: pods' traffic bypasses the host, so \
                              egress-agent cannot serve this node's pods; use local gateway mode";
const OVN_EGRESS_IP: &str = "OVN-Kubernetes has egress IPs on interfaces of this node: its own EgressIP is still enabled, or \
                             was not cleaned up (--enable-egress-ip=false); two nodes would answer for an address";

const QUOTA: &str = "a pod, or all pods of one egress policy, have reached their quota of this node's flows: their new flows \
                     are dropped (quota_exceeded); `egress-agent nat count` on the node names the pods that hold most";

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Policy { policy: PolicyKey, uid: String },
    Node,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub subject: Subject,
    pub reason: &'static str,
    /// The address or map, if there may be several.
    pub about: String,
    pub message: String,
}

impl Warning {
    /// The field `condition` of the log's lines about its beginning and its end.
    pub fn condition(&self) -> String {
        format!("{}/{}", self.reason, self.about)
    }
}

/// The reason, and the address or map that it is about.
type WarningKey = (&'static str, String);

#[derive(Debug, Default)]
pub struct Warnings {
    open: BTreeMap<WarningKey, Warning>,
    /// Those that have ended since they were last asked for.
    ended: Vec<Warning>,
    /// Counters of the last update: refusals of each egress IP, and packets dropped because no port was free.
    refusals: BTreeMap<EgressId, u64>,
    exhausted: Option<u64>,
    /// Packets refused for a quota as of the last update, and when the counter last grew.
    over_quota: Option<u64>,
    quota_reached: Option<Instant>,
    /// When a flow of an egress IP was last refused because no port was free.
    refused: BTreeMap<EgressId, Instant>,
}

impl Warnings {
    /// Returns the warnings that are new. `policy` names the CNI that enforces policy in FORWARD.
    pub fn update(
        &mut self,
        snapshot: &Snapshot,
        (node, policy): (Option<&Node>, Option<&'static str>),
        now: Instant,
    ) -> Vec<Warning> {
        let mut new = Vec::new();
        // A warning does not end because its cause cannot be read now.
        if let (Some(in_kernel), Some(kernel)) = (snapshot.in_kernel(), &snapshot.kernel) {
            self.note_refusals(snapshot, now);
            for (id, served) in &in_kernel.served {
                let ratio =
                    kernel.ports.as_ref().and_then(|ports| ports.egress_ips.get(id)).map_or(0.0, |of| of.ratio());
                let high = self.is_over((NEARLY_EXHAUSTED, served), ratio, (PORTS_HIGH, PORTS_LOW));
                // Without the current number, so that a restarted agent repeats the same event.
                let nearly = format!(
                    "egress IP {} has used 80 % of its ports towards one destination: at 100 % new connections to it \
                     are dropped",
                    served.address
                );
                self.set(NEARLY_EXHAUSTED, served, high, nearly, &mut new);
                let out = self.refused.get(id).is_some_and(|at| now.duration_since(*at) < REFUSED);
                let none_left = format!(
                    "egress IP {} has no free port towards a destination: new connections to it are dropped until one is \
                     free",
                    served.address
                );
                self.set(EXHAUSTED, served, out, none_left, &mut new);
            }
            for (map, limit) in &kernel.limits {
                let counted = kernel.entries.get(map).copied().map(f64::from);
                let written = in_kernel.entries.get(map).and_then(|count| u32::try_from(*count).ok()).map(f64::from);
                let Some(entries) = counted.or(written).filter(|_| *limit > 0) else { continue };
                let fill = entries / f64::from(*limit);
                let is_open = self.open.contains_key(&("MapNearlyFull", (*map).to_owned()));
                let full = fill >= if is_open { MAP_LOW } else { MAP_HIGH };
                let message = format!(
                    "the map {map} of this node is more than three quarters full: a full map refuses new entries"
                );
                self.of_node("MapNearlyFull", map, full, message, &mut new);
            }
            self.forget_unserved(in_kernel);
            let reached = self.quota_reached.is_some_and(|at| now.duration_since(at) < REFUSED);
            self.of_node("QuotaReached", "", reached, QUOTA.to_owned(), &mut new);
        }
        let message = format!(
            "{} enforces network policy in the host's FORWARD chain, which traffic with an egress IP bypasses: such policy \
             does not apply to it",
            policy.unwrap_or_default()
        );
        self.of_node("PolicyInForward", "", policy.is_some(), message, &mut new);
        if let Some(node) = node {
            self.of_node("SharedGatewayMode", "", node.shared_gateway, SHARED_GATEWAY.to_owned(), &mut new);
            self.of_node("OVNKubernetesEgressIP", "", node.foreign_egress_ips, OVN_EGRESS_IP.to_owned(), &mut new);
        }
        new
    }

    /// The warnings that have ended since the last call.
    pub fn take_ended(&mut self) -> Vec<Warning> {
        std::mem::take(&mut self.ended)
    }

    /// The messages of all open warnings.
    pub fn lines(&self) -> Vec<String> {
        self.open.values().map(|warning| warning.message.clone()).collect()
    }

    /// Compares with `low` if the warning is open, else with `high`.
    fn is_over(&self, (reason, served): (&'static str, &ServedAddress), value: f64, (high, low): (f64, f64)) -> bool {
        let is_open = self.open.contains_key(&(reason, served.address.to_string()));
        value >= if is_open { low } else { high }
    }

    /// Refusals of an egress IP count as lack of ports if such packets were dropped since the last update.
    fn note_refusals(&mut self, snapshot: &Snapshot, now: Instant) {
        let Some(kernel) = &snapshot.kernel else { return };
        let exhausted = kernel.verdicts.get(&Verdict::PortsExhausted).map_or(0, |count| count.packets);
        let has_grown = self.exhausted.replace(exhausted).is_some_and(|before| exhausted > before);
        let over_quota = kernel.verdicts.get(&Verdict::QuotaExceeded).map_or(0, |count| count.packets);
        if self.over_quota.replace(over_quota).is_some_and(|before| over_quota > before) {
            self.quota_reached = Some(now);
        }
        for (id, count) in &kernel.egress_ips {
            // A new egress IP starts at zero, so its first refusal counts.
            let before = self.refusals.insert(*id, count.refusals).unwrap_or_default();
            if has_grown && count.refusals > before {
                self.refused.insert(*id, now);
            }
        }
        self.refusals.retain(|id, _| kernel.egress_ips.contains_key(id));
        self.refused.retain(|id, at| kernel.egress_ips.contains_key(id) && now.duration_since(*at) < REFUSED);
    }

    fn set(&mut self, reason: &'static str, of: &ServedAddress, is: bool, message: String, new: &mut Vec<Warning>) {
        let policy = of.policy.clone();
        let subject = policy.map_or(Subject::Node, |(policy, uid)| Subject::Policy { policy, uid });
        let about = of.address.to_string();
        self.change((reason, about.clone()), is, Warning { subject, reason, about, message }, new);
    }

    fn of_node(&mut self, reason: &'static str, what: &str, is: bool, message: String, new: &mut Vec<Warning>) {
        let warning = Warning { subject: Subject::Node, reason, about: what.to_owned(), message };
        self.change((reason, what.to_owned()), is, warning, new);
    }

    fn change(&mut self, key: WarningKey, is: bool, warning: Warning, new: &mut Vec<Warning>) {
        match is {
            false => self.ended.extend(self.open.remove(&key)),
            true if self.open.contains_key(&key) => {}
            true => {
                new.push(warning.clone());
                self.open.insert(key, warning);
            }
        }
    }

    /// Drops the warnings about addresses that this node no longer serves.
    fn forget_unserved(&mut self, in_kernel: &InKernel) {
        let served: BTreeSet<String> = in_kernel.served.values().map(|served| served.address.to_string()).collect();
        let is_over =
            |(reason, what): &WarningKey, _: &mut Warning| ABOUT_ADDRESSES.contains(reason) && !served.contains(what);
        self.ended.extend(self.open.extract_if(.., is_over).map(|(_, warning)| warning));
    }
}

#[cfg(test)]
mod tests;
