//! A node that is asked, and how what is found of it is handed on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::controller::node_health::confirmation::{Confirmation, Others};
use crate::controller::node_health::prober::Found;
use crate::controller::node_health::session::{Finding, Road};
use egress_core::model::ledger::Acknowledgements;
use egress_core::model::view::Node;
use egress_core::node_health::NodeHealth;
use egress_core::node_health::liveness::Signal;

/// Hands on what is found of a node.
pub(super) struct Teller {
    pub(super) node: Arc<str>,
    pub(super) reach: watch::Sender<NodeHealth>,
    pub(super) found: mpsc::Sender<Found>,
    /// Where this is one of them.
    pub(super) others: Option<Arc<Others>>,
    /// It is an egress node still.
    pub(super) is_host: Arc<AtomicBool>,
}

impl Teller {
    /// Whether it was taken.
    pub(super) fn tell(&self, finding: Finding) -> bool {
        // Of signs, those that end with a newer term: a kernel knows of none, and a node that is no egress node any more is not
        // asked by the next leader.
        if let (Finding::Signal(Signal::AgentAnswer(_), at), Some(others)) = (&finding, &self.others)
            && self.is_host.load(Ordering::Relaxed)
        {
            others.note(*at);
        }
        // Not by the queue: the agent will count on it that this is known.
        if let Finding::Heard(at) = finding {
            self.reach.send_if_modified(|reach| {
                match reach.heard.get_mut(&*self.node) {
                    Some(heard) => *heard = at.max(*heard),
                    None => drop(reach.heard.insert(self.node.to_string(), at)),
                }
                if !reach.followed.contains_key(&*self.node) {
                    reach.followed.insert(self.node.to_string(), at);
                }
                false
            });
            return true;
        }
        // Where findings pile up one is missed, and comes again with one of the next answers.
        self.found.try_send((self.node.clone(), finding)).is_ok()
    }
}

pub(super) struct Asked {
    pub(super) roads: Vec<Road>,
    /// Where overlay packets to it go.
    pub(super) endpoint: Option<IpAddr>,
    /// The port of its overlay, where it answers there.
    pub(super) overlay: Option<u16>,
    pub(super) task: AbortHandle,
    pub(super) vouch: Confirmation,
    pub(super) orders: watch::Sender<Acknowledgements>,
    pub(super) is_host: Arc<AtomicBool>,
    /// Of one that is no egress node any more.
    pub(super) until: Option<Instant>,
    pub(super) trouble: Option<String>,
    /// Addresses where something else answers, since when.
    pub(super) strange: BTreeMap<IpAddr, Instant>,
    /// It goes by another total timeout, which has been said.
    pub(super) differs: bool,
}

/// An agent that has just started, or has another key already, is no stranger yet.
const STRANGE_BEHIND: Duration = Duration::from_secs(2);

impl Asked {
    /// Where something else has answered for long enough.
    pub(super) fn stranger(&self, now: Instant) -> Option<IpAddr> {
        self.strange.iter().find(|(_, since)| now >= **since + STRANGE_BEHIND).map(|(address, _)| *address)
    }
}

/// How often is told of a node that something else answers there: whoever does can come and go.
const TOLD_AGAIN: Duration = Duration::from_secs(600);

/// Nodes of which that was told, and when.
#[derive(Default)]
pub(super) struct UnexpectedResponders(BTreeMap<String, Instant>);

impl UnexpectedResponders {
    pub(super) fn is_news(&mut self, node: &str, now: Instant) -> bool {
        self.0.retain(|_, told| now < *told + TOLD_AGAIN);
        let is_news = !self.0.contains_key(node);
        if is_news {
            self.0.insert(node.to_owned(), now);
        }
        is_news
    }
}

/// By which addresses a node is asked.
pub(super) fn roads(node: &Node) -> Vec<Road> {
    let own: BTreeSet<IpAddr> = node.primary.iter().map(IpNet::addr).chain(node.internal.iter().copied()).collect();
    let road = |address: IpAddr| {
        let knock_at = own.iter().copied().filter(|own| own.is_ipv4() == address.is_ipv4()).collect();
        Road { address, knock_at }
    };
    node.health_addresses().into_iter().map(road).collect()
}

/// What makes nodes stand in for each other: IPv4 first, as where overlay packets are sent to.
pub(super) fn network(node: &Node) -> Option<IpNet> {
    let networks = node.primary_networks();
    let first = networks.iter().find(|network| network.addr().is_ipv4()).or(networks.first());
    first.map(IpNet::trunc)
}
