//! Sampled drops for `egress-agent drops`.
//!
//! The programs sample at most one drop in ten milliseconds and CPU. The agent is the only reader of their ring buffer and
//! copies the samples to each follower, at most [`LINES_PER_SECOND`]. A slow follower gets the number of missed samples; the
//! agent does not wait for it. The counters have the exact numbers.
//!
//! Unsolicited packets to an egress IP are dropped in large numbers (`no_nat_entry`). So that they do not hide other drops, the
//! remembered samples are shared among the reasons, and a follower with a filter gets only what it asks for, before the rate limit. The
//! programs sample before that: a rare reason among thousands of others may be missing.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver, Sender};
use tokio::time::Instant;

/// Samples that are kept for later followers. When full, the oldest of the most frequent reason is removed.
const RECENT: usize = 256;
/// Number of samples that a follower may lag behind.
const BACKLOG: usize = 1024;
/// Per follower.
pub const LINES_PER_SECOND: u32 = 50;

/// A dropped packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    pub at: SystemTime,
    /// Label of the verdict.
    pub reason: Cow<'static, str>,
    pub ifindex: u32,
    /// Zero if the source is no selected pod of this node.
    pub egress_id: u32,
    pub length: u32,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub protocol: u8,
}

/// The drops that a follower asks for; by default all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropFilter {
    /// Label of the verdict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of each set, one end of the packet has an address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ends: Vec<BTreeSet<IpAddr>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<ObjectFilter>,
}

/// The packets of an object: of a pod of this node that it selects, or with one of its egress IPs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectFilter {
    pub egress_ids: BTreeSet<u32>,
    pub egress_ips: BTreeSet<IpAddr>,
}

impl DropFilter {
    pub fn takes(&self, sample: &Sample) -> bool {
        let has_end = |addresses: &BTreeSet<IpAddr>| {
            [sample.source, sample.destination].iter().any(|end| addresses.contains(&end.ip()))
        };
        let is_of =
            |object: &ObjectFilter| object.egress_ids.contains(&sample.egress_id) || has_end(&object.egress_ips);
        self.reason.as_deref().is_none_or(|reason| reason == sample.reason)
            && self.ends.iter().all(has_end)
            && self.object.as_ref().is_none_or(is_of)
    }
}

/// A line to a follower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropLine {
    Drop(Sample),
    /// Number of further samples that were left out.
    LeftOut(u64),
}

/// Recent samples, and the channel of new ones.
#[derive(Clone, Debug)]
pub struct Drops {
    recent: Arc<Mutex<VecDeque<Sample>>>,
    coming: Sender<Sample>,
}

impl Default for Drops {
    fn default() -> Self {
        Self { recent: Arc::default(), coming: broadcast::channel(BACKLOG).0 }
    }
}

impl Drops {
    pub fn publish(&self, sample: Sample) {
        let mut recent = self.recent();
        if recent.len() == RECENT {
            evict_oldest(&mut recent);
        }
        recent.push_back(sample.clone());
        // Under the lock, so that each follower gets the sample once. Fails without followers.
        let _listeners = self.coming.send(sample);
    }

    /// Recent samples, and a receiver of those after them.
    fn follow(&self) -> (Vec<Sample>, Receiver<Sample>) {
        let recent = self.recent();
        (recent.iter().cloned().collect(), self.coming.subscribe())
    }

    fn recent(&self) -> MutexGuard<'_, VecDeque<Sample>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a line for each recent sample and, with `follow`, for new ones until the client closes.
    pub async fn stream(
        &self,
        (follow, filter): (bool, &DropFilter),
        mut reader: impl AsyncRead + Unpin,
        mut writer: impl AsyncWrite + Unpin,
    ) -> io::Result<()> {
        let (recent, mut coming) = self.follow();
        for sample in recent.into_iter().filter(|sample| filter.takes(sample)) {
            write(&mut writer, &DropLine::Drop(sample)).await?;
        }
        if !follow {
            return Ok(());
        }
        let (mut limit, mut byte) = (RateLimit::since(Instant::now()), [0]);
        loop {
            let next = tokio::select! {
                next = coming.recv() => next,
                // The client sends nothing, so this is the end of the connection.
                _end = reader.read(&mut byte) => return Ok(()),
                () = limit.is_over() => {
                    let left_out = limit.begin(Instant::now());
                    write(&mut writer, &DropLine::LeftOut(left_out)).await?;
                    continue;
                }
            };
            match next {
                Ok(sample) if !filter.takes(&sample) => {}
                Ok(sample) if limit.takes(Instant::now()) => write(&mut writer, &DropLine::Drop(sample)).await?,
                Ok(_) => limit.left_out += 1,
                // Whether asked for or not.
                Err(RecvError::Lagged(missed)) => limit.left_out += missed,
                Err(RecvError::Closed) => return Ok(()),
            }
        }
    }
}

/// Removes the oldest sample of the most frequent reason.
fn evict_oldest(recent: &mut VecDeque<Sample>) {
    let mut counts = BTreeMap::<&str, usize>::new();
    recent.iter().for_each(|sample| *counts.entry(&sample.reason).or_default() += 1);
    let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(reason, _)| reason);
    let oldest = recent.iter().position(|sample| Some(&*sample.reason) == most);
    recent.remove(oldest.unwrap_or_default());
}

async fn write(writer: &mut (impl AsyncWrite + Unpin), line: &DropLine) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    writer.write_all(&text).await
}

/// Lines that may be written in this second.
struct RateLimit {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl RateLimit {
    const WINDOW: Duration = Duration::from_secs(1);

    const fn since(since: Instant) -> Self {
        Self { since, lines: 0, left_out: 0 }
    }

    fn takes(&mut self, now: Instant) -> bool {
        // A window with omitted samples ends with their number.
        if self.left_out == 0 && now.duration_since(self.since) >= Self::WINDOW {
            *self = Self::since(now);
        }
        let takes = self.left_out == 0 && self.lines < LINES_PER_SECOND;
        self.lines += u32::from(takes);
        takes
    }

    /// Waits for the end of a window with omitted samples.
    async fn is_over(&self) {
        match self.left_out {
            0 => std::future::pending().await,
            _ => tokio::time::sleep_until(self.since + Self::WINDOW).await,
        }
    }

    /// Begins the next window; returns the number of omitted samples of this one.
    fn begin(&mut self, now: Instant) -> u64 {
        std::mem::replace(self, Self::since(now)).left_out
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, BufReader, duplex};

    use super::*;

    fn sample(number: u32) -> Sample {
        Sample {
            at: SystemTime::UNIX_EPOCH,
            reason: "no_gateway".into(),
            ifindex: 12,
            egress_id: 3,
            length: number,
            source: "10.244.1.10:4000".parse().expect("a literal"),
            destination: "198.51.100.10:80".parse().expect("a literal"),
            protocol: 6,
        }
    }

    fn lines(text: &[u8]) -> Vec<DropLine> {
        let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).expect("a line")).collect()
    }

    #[tokio::test]
    async fn recent_samples_are_written_up_to_the_limit() {
        let drops = Drops::default();
        for number in 0..300 {
            drops.publish(sample(number));
        }
        let mut out = Vec::new();
        drops.stream((false, &DropFilter::default()), tokio::io::empty(), &mut out).await.expect("written");
        let lines_read = lines(&out);
        assert_eq!((lines_read.len(), &lines_read[0]), (RECENT, &DropLine::Drop(sample(300 - 256))));
    }

    fn by_reason(reason: &str) -> DropFilter {
        DropFilter { reason: Some(reason.to_owned()), ..DropFilter::default() }
    }

    #[test]
    fn a_filter_takes_what_all_its_parts_take() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("a literal");
        let ends = |sets: &[&[&str]]| {
            let ends = sets.iter().map(|set| set.iter().map(|one| ip(one)).collect()).collect();
            DropFilter { ends, ..DropFilter::default() }
        };
        let object = |id: u32, egress_ip: &str| DropFilter {
            object: Some(ObjectFilter { egress_ids: [id].into(), egress_ips: [ip(egress_ip)].into() }),
            ..DropFilter::default()
        };
        for (filter, takes) in [
            (DropFilter::default(), true),
            (by_reason("map_full"), false),
            (ends(&[&["10.244.1.10", "fd00::10"]]), true),
            (ends(&[&["198.51.100.10"]]), true),
            (ends(&[&["10.244.1.11"]]), false),
            (ends(&[&["10.244.1.10"], &["198.51.100.10"]]), true),
            (ends(&[&["10.244.1.10"], &["198.51.100.11"]]), false),
            (object(3, "172.18.0.100"), true),
            (object(4, "198.51.100.10"), true),
            (object(4, "172.18.0.100"), false),
            (DropFilter { reason: Some("map_full".to_owned()), ..object(3, "172.18.0.100") }, false),
        ] {
            assert_eq!(filter.takes(&sample(1)), takes, "{filter:?}");
        }
    }

    fn of(reason: &'static str, number: u32) -> Sample {
        Sample { reason: reason.into(), ..sample(number) }
    }

    #[tokio::test]
    async fn a_rare_reason_is_kept_among_frequent_ones() {
        let drops = Drops::default();
        drops.publish(of("no_gateway", 1));
        for number in 0..5000 {
            drops.publish(of("no_nat_entry", number));
        }
        drops.publish(of("map_full", 2));
        let recent: Vec<_> = drops.recent().iter().cloned().collect();
        assert_eq!((recent.len(), &recent[0], &recent[1]), (RECENT, &of("no_gateway", 1), &of("no_nat_entry", 4746)));
        let mut out = Vec::new();
        drops.stream((false, &by_reason("no_gateway")), tokio::io::empty(), &mut out).await.expect("written");
        assert_eq!(lines(&out), [DropLine::Drop(of("no_gateway", 1))]);
    }

    #[tokio::test]
    async fn a_follower_of_one_reason_misses_none_of_it() {
        let drops = Drops::default();
        let (client, server) = duplex(1 << 20);
        let (reader, writer) = tokio::io::split(server);
        let followed = drops.clone();
        let task = tokio::spawn(async move { followed.stream((true, &by_reason("no_gateway")), reader, writer).await });
        while drops.coming.receiver_count() == 0 {
            tokio::task::yield_now().await;
        }
        for number in 0..500 {
            drops.publish(of("no_nat_entry", number));
        }
        drops.publish(of("no_gateway", 7));
        let line = BufReader::new(client).lines().next_line().await.expect("no error").expect("not the end");
        assert_eq!(serde_json::from_str::<DropLine>(&line).expect("a line"), DropLine::Drop(of("no_gateway", 7)));
        let _ended = task.await.expect("no panic");
    }

    #[tokio::test]
    async fn a_follower_gets_recent_and_new_samples() {
        let drops = Drops::default();
        drops.publish(sample(0));
        let (client, server) = duplex(1 << 20);
        let (reader, writer) = tokio::io::split(server);
        let followed = drops.clone();
        let task = tokio::spawn(async move { followed.stream((true, &DropFilter::default()), reader, writer).await });
        let mut client = BufReader::new(client).lines();
        for number in 0..3 {
            let line = client.next_line().await.expect("no error").expect("not the end");
            assert_eq!(serde_json::from_str::<DropLine>(&line).expect("a line"), DropLine::Drop(sample(number)));
            drops.publish(sample(number + 1));
        }
        drop(client);
        // By a broken pipe, or by the end that it reads: whichever is seen first.
        let _ended = task.await.expect("no panic");
    }

    #[test]
    fn lines_are_limited_per_second_and_the_rest_is_counted() {
        let begun = Instant::now();
        let mut limit = RateLimit::since(begun);
        assert!((0..LINES_PER_SECOND).all(|_| limit.takes(begun)));
        assert!(!limit.takes(begun), "one too many");
        limit.left_out += 1;
        assert!(!limit.takes(begun + RateLimit::WINDOW), "not before it is said");
        assert_eq!(limit.begin(begun + RateLimit::WINDOW), 1);
        assert!(limit.takes(begun + RateLimit::WINDOW));
        let mut quiet = RateLimit::since(begun);
        assert!((0..LINES_PER_SECOND).all(|_| quiet.takes(begun)));
        assert!(quiet.takes(begun + RateLimit::WINDOW), "another second");
    }

    #[tokio::test]
    async fn a_follower_that_does_not_read_is_not_waited_for() {
        let drops = Drops::default();
        let (client, server) = duplex(64);
        let (reader, writer) = tokio::io::split(server);
        let followed = drops.clone();
        let task = tokio::spawn(async move { followed.stream((true, &DropFilter::default()), reader, writer).await });
        tokio::task::yield_now().await;
        for number in 0..5000 {
            drops.publish(sample(number));
        }
        assert_eq!(drops.recent().len(), RECENT, "bounded, with a follower that hangs");
        drop(client);
        // By a broken pipe, or by the end that it reads: whichever is seen first.
        let _ended = task.await.expect("no panic");
    }
}
