//! The log of NAT: which pod had which ports of an egress IP, and since when (RFC 6888 section 4, by blocks).
//!
//! A gateway writes a line for each port block that is given and taken back, with the pod's address and node. Each node writes a line
//! when one of its selected pods gets or loses an address. Both together name the pod of an address, a port and a time
//! ([`history`]). Lines are JSON, one object each.
//!
//! The map of blocks is read every second and compared. It is kept by the kernel, so nothing is lost while the agent is away: what
//! it then finds has the time at which it was given. A block is taken back by an agent alone.

pub mod file;
pub mod history;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use crate::debug::Question;
use crate::nat_log::file::LogFile;
use egress_core::display_names::Names;
use egress_datapath::maps::port_blocks::{self, GivenBlock};

/// How often the blocks are compared.
const TICK: Duration = Duration::from_secs(1);
/// Ticks between two looks at the pods' addresses, if no block changes.
const PODS_EVERY: u32 = 5;

/// Where the log is, and how long it gets.
#[derive(Clone, Debug)]
pub struct NatLogSettings {
    pub path: PathBuf,
    /// Bytes after which a new file begins.
    pub size: u64,
    /// Earlier files that are kept.
    pub kept: u32,
}

/// A port block, as long as it belongs to one pod. Its key is all of it but the object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockRecord {
    pub egress_ip: IpAddr,
    pub first_port: u16,
    pub last_port: u16,
    pub pod_ip: IpAddr,
    /// CLOCK_MONOTONIC (ns) of the gateway when it was given: with the address and the port, it names the block.
    pub given_ns: u64,
    /// Node of the pod.
    pub pod_node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
}

impl BlockRecord {
    fn of(GivenBlock { block, owner, .. }: &GivenBlock, names: &Names) -> Self {
        let ports = owner.ports(block);
        let (pod_ip, source) = (owner.pod.to_ip(), owner.source_node.to_ip());
        let is_here = source.is_unspecified();
        let own = || names.node.clone().unwrap_or_default();
        let other = || names.nodes.get(&source).cloned().unwrap_or_else(|| source.to_string());
        Self {
            egress_ip: block.address.to_ip(),
            first_port: ports.first,
            last_port: ports.last,
            pod_ip,
            given_ns: owner.given_ns,
            pod_node: if is_here { own() } else { other() },
            object: names.objects.get(&owner.egress_id).cloned(),
        }
    }

    /// What names a block on its gateway.
    pub(crate) fn key(&self) -> BlockKey {
        (self.egress_ip, self.first_port, self.pod_ip, self.given_ns)
    }
}

pub(crate) type BlockKey = (IpAddr, u16, IpAddr, u64);

fn key_of(GivenBlock { block, owner, .. }: &GivenBlock) -> BlockKey {
    (block.address.to_ip(), block.first(), owner.pod.to_ip(), owner.given_ns)
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum LogEvent {
    /// The agent, or a new file, begins: what goes on is written again after it.
    Started,
    Given(BlockRecord),
    TakenBack(BlockRecord),
    /// A selected pod of this node has this address.
    PodHas {
        pod_ip: IpAddr,
        pod: String,
    },
    /// It has it no more, or is not selected any more.
    PodHadNoMore {
        pod_ip: IpAddr,
        pod: String,
    },
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogRecord {
    /// RFC 3339, UTC.
    pub time: Timestamp,
    /// The node that writes it.
    pub node: String,
    #[serde(flatten)]
    pub event: LogEvent,
}

/// What has been written.
#[derive(Debug, Default)]
pub struct NatRecorder {
    blocks: HashMap<BlockKey, BlockRecord>,
    pods: BTreeMap<IpAddr, String>,
}

impl NatRecorder {
    /// The lines about what has changed, and the state after them.
    fn changes(&self, now: Timestamp, blocks: &[GivenBlock], names: &Names) -> (Vec<LogRecord>, Self) {
        let node = names.node.clone().unwrap_or_default();
        let line = |time, event| LogRecord { time, node: node.clone(), event };
        let mut lines = Vec::new();
        let pods = names.pods.clone();
        for (ip, pod) in self.pods.iter().filter(|(ip, pod)| pods.get(ip) != Some(pod)) {
            lines.push(line(now, LogEvent::PodHadNoMore { pod_ip: *ip, pod: pod.clone() }));
        }
        for (ip, pod) in pods.iter().filter(|(ip, pod)| self.pods.get(ip) != Some(pod)) {
            lines.push(line(now, LogEvent::PodHas { pod_ip: *ip, pod: pod.clone() }));
        }
        let mut kept = HashMap::new();
        let mut given = Vec::new();
        for block in blocks {
            let key = key_of(block);
            match self.blocks.get(&key) {
                Some(known) => drop(kept.insert(key, known.clone())),
                None => {
                    let record = BlockRecord::of(block, names);
                    let ago = jiff::SignedDuration::try_from(block.age).unwrap_or_default();
                    given.push(line(now.checked_sub(ago).unwrap_or(now), LogEvent::Given(record.clone())));
                    kept.insert(key, record);
                }
            }
        }
        // One that has gone to another pod since the last look was taken back before.
        let given_again = |gone: &BlockRecord| {
            let later = given.iter().filter_map(|line| match &line.event {
                LogEvent::Given(new) if (new.egress_ip, new.first_port) == (gone.egress_ip, gone.first_port) => {
                    Some(line.time)
                }
                _ => None,
            });
            later.min().unwrap_or(now)
        };
        let mut gone: Vec<&BlockRecord> =
            self.blocks.iter().filter(|(key, _)| !kept.contains_key(*key)).map(|(_, record)| record).collect();
        gone.sort_unstable_by_key(|record| record.key());
        lines.extend(gone.into_iter().map(|gone| line(given_again(gone), LogEvent::TakenBack(gone.clone()))));
        given.sort_by_key(|line| line.time);
        lines.extend(given);
        (lines, Self { blocks: kept, pods })
    }

    /// All that goes on, for the beginning of a file.
    fn state(&self, now: Timestamp, blocks: &[GivenBlock], names: &Names) -> Vec<LogRecord> {
        let started = LogRecord { time: now, node: names.node.clone().unwrap_or_default(), event: LogEvent::Started };
        let (mut lines, _) = Self::default().changes(now, blocks, names);
        lines.insert(0, started);
        lines
    }
}

/// Writes the log until dropped. `reconciler` knows the names.
pub async fn run(settings: NatLogSettings, bpffs: PathBuf, reconciler: mpsc::Sender<Question>) {
    info!(file = %settings.path.display(), "the log of NAT begins");
    let mut writer = Some(Writer { file: LogFile::new(settings), recorder: NatRecorder::default(), has_begun: false });
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut tick, mut failing) = (0_u32, false);
    loop {
        ticks.tick().await;
        tick = tick.wrapping_add(1);
        let Some(mut own) = writer.take() else { return };
        let bpffs = bpffs.clone();
        let is_due = tick % PODS_EVERY == 1;
        let read = spawn_blocking(move || {
            let blocks = port_blocks::read(&bpffs).map(Option::unwrap_or_default);
            let is_same = blocks.as_ref().is_ok_and(|blocks| own.has_same(blocks));
            (own, blocks, is_same)
        });
        let Ok((own_again, blocks, is_same)) = read.await else { return };
        own = own_again;
        if is_same && !is_due {
            writer = Some(own);
            continue;
        }
        let Some(names) = names(&reconciler).await else { return };
        let written = spawn_blocking(move || {
            let outcome = blocks.and_then(|blocks| own.write(Timestamp::now(), &blocks, &names));
            (own, outcome)
        });
        let Ok((own_again, outcome)) = written.await else { return };
        writer = Some(own_again);
        match outcome {
            Ok(()) if failing => {
                failing = false;
                info!(condition = "nat-log", "the log of NAT is written again");
            }
            Err(error) if !failing => {
                failing = true;
                warn!(condition = "nat-log", %error, "the log of NAT cannot be written; its lines wait, and are lost if the agent ends");
            }
            _ => {}
        }
    }
}

/// `None` if the reconciler has ended.
async fn names(reconciler: &mpsc::Sender<Question>) -> Option<Names> {
    let (answer, names) = oneshot::channel();
    reconciler.send(Question::Names(answer)).await.ok()?;
    names.await.ok()
}

struct Writer {
    file: LogFile,
    recorder: NatRecorder,
    has_begun: bool,
}

impl Writer {
    fn has_same(&self, blocks: &[GivenBlock]) -> bool {
        blocks.len() == self.recorder.blocks.len()
            && blocks.iter().all(|block| self.recorder.blocks.contains_key(&key_of(block)))
    }

    /// Writes what has changed. After an error the next call writes it.
    fn write(&mut self, now: Timestamp, blocks: &[GivenBlock], names: &Names) -> io::Result<()> {
        let (lines, next) = self.recorder.changes(now, blocks, names);
        // Someone may have moved the file away.
        if !self.has_begun || !self.file.is_there() {
            self.file.append(&self.recorder.state(now, blocks, names))?;
            self.has_begun = true;
        } else if !lines.is_empty() {
            self.file.append(&lines)?;
        }
        self.recorder = next;
        if self.file.is_full()? {
            self.file.begin_another(&self.recorder.state(now, blocks, names))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
