//! Who had an egress IP's port at a time, by the log.

use std::collections::HashMap;
use std::net::IpAddr;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::nat_log::{BlockKey, BlockRecord, LogEvent, LogRecord};

/// Times in other logs have seconds, and other clocks. Between two pods a block rests for seconds at least.
const INEXACT: SignedDuration = SignedDuration::from_secs(1);
/// A pod's address is written some seconds after the pod has it.
const LATE: SignedDuration = SignedDuration::from_secs(10);

/// A time span; without an end it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Span {
    pub from: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Timestamp>,
}

impl Span {
    /// Whether it was so at that time, to a second.
    pub fn contains(&self, time: Timestamp) -> bool {
        self.from.duration_since(time) <= INEXACT && self.to.is_none_or(|to| time.duration_since(to) <= INEXACT)
    }
}

/// A block while it belonged to a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockSpan {
    #[serde(flatten)]
    pub span: Span,
    /// The gateway.
    pub node: String,
    #[serde(flatten)]
    pub block: BlockRecord,
    /// The pod that had the address then, if this node's log names it: the next pod with the address gets open blocks too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

/// An address while it was a pod's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PodSpan {
    #[serde(flatten)]
    pub span: Span,
    pub node: String,
    pub pod_ip: IpAddr,
    pub pod: String,
}

/// The log, put together.
#[derive(Debug, Default)]
pub struct History {
    pub blocks: Vec<BlockSpan>,
    pub pods: Vec<PodSpan>,
    open_blocks: HashMap<BlockKey, usize>,
    open_pods: HashMap<(IpAddr, String), usize>,
    /// What an agent's start has ended unless it is written again.
    before_start: (HashMap<BlockKey, usize>, HashMap<(IpAddr, String), usize>),
}

impl History {
    /// Lines in the order of the log.
    pub fn add(&mut self, record: LogRecord) {
        let LogRecord { time, node, event } = record;
        match event {
            LogEvent::Started => self.start(time),
            LogEvent::Given(block) => {
                let key = block.key();
                if let Some(index) = self.before_start.0.remove(&key) {
                    self.blocks[index].span.to = None;
                    self.open_blocks.insert(key, index);
                } else if !self.open_blocks.contains_key(&key) {
                    self.open_blocks.insert(key, self.blocks.len());
                    self.blocks.push(BlockSpan { span: Span { from: time, to: None }, node, block, pod: None });
                }
            }
            LogEvent::TakenBack(block) => {
                let index = self.open_blocks.remove(&block.key());
                if let Some(span) = index.and_then(|index| self.blocks.get_mut(index)) {
                    span.span.to = Some(time);
                }
            }
            LogEvent::PodHas { pod_ip, pod } => {
                let key = (pod_ip, pod.clone());
                if let Some(index) = self.before_start.1.remove(&key) {
                    self.pods[index].span.to = None;
                    self.open_pods.insert(key, index);
                } else if !self.open_pods.contains_key(&key) {
                    self.open_pods.insert(key, self.pods.len());
                    self.pods.push(PodSpan { span: Span { from: time, to: None }, node, pod_ip, pod });
                }
            }
            LogEvent::PodHadNoMore { pod_ip, pod } => {
                let index = self.open_pods.remove(&(pod_ip, pod));
                if let Some(span) = index.and_then(|index| self.pods.get_mut(index)) {
                    span.span.to = Some(time);
                }
            }
        }
    }

    fn start(&mut self, time: Timestamp) {
        self.before_start = (std::mem::take(&mut self.open_blocks), std::mem::take(&mut self.open_pods));
        for index in self.before_start.0.values() {
            self.blocks[*index].span.to = Some(time);
        }
        for index in self.before_start.1.values() {
            self.pods[*index].span.to = Some(time);
        }
    }

    /// The pod that had this address at that time.
    pub fn pod_at(&self, pod_ip: IpAddr, time: Timestamp) -> Option<&PodSpan> {
        let mut of_address = self.pods.iter().filter(|pod| pod.pod_ip == pod_ip);
        let exact = of_address.clone().rfind(|pod| pod.span.contains(time));
        exact.or_else(|| of_address.find(|pod| pod.span.from > time && pod.span.from.duration_since(time) <= LATE))
    }
}
