//! New connections without end: every ten milliseconds a datagram from a new socket of a pod to the echo outside, with
//! the time at which it was sent, and that of the answer if there was one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::net::UdpSocket;
use tokio::time::{MissedTickBehavior, interval, timeout};

use egress_lab::Netns;
use egress_lab::background::Background;

pub(crate) const EVERY: Duration = Duration::from_millis(10);
/// What has not been answered by then is lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// One new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectionSample {
    pub(crate) sent: Instant,
    /// When the answer came, and the address that the world saw.
    pub(crate) answered: Option<(Instant, IpAddr)>,
}

/// A pod that samples until it is finished.
pub(crate) struct Sampler {
    samples: Arc<Mutex<Vec<ConnectionSample>>>,
    work: Background<()>,
}

impl Sampler {
    pub(crate) fn start(from: &Netns, to: SocketAddr) -> Result<Self> {
        let samples = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&samples);
        let work = Background::start_in(from, move |stop| {
            // On this thread alone: it is what is in the pod's namespace.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(sample_until(to, &into, stop));
            Ok(())
        })?;
        Ok(Self { samples, work })
    }

    /// What is known so far and was not taken before, in the order in which it became known.
    pub(crate) fn take(&self) -> Vec<ConnectionSample> {
        std::mem::take(&mut *lock(&self.samples))
    }

    pub(crate) fn finish(self) -> Result<()> {
        self.work.finish()
    }
}

fn lock(samples: &Mutex<Vec<ConnectionSample>>) -> MutexGuard<'_, Vec<ConnectionSample>> {
    samples.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn sample_until(to: SocketAddr, into: &Arc<Mutex<Vec<ConnectionSample>>>, stop: &AtomicBool) {
    let mut ticks = interval(EVERY);
    // A machine that is late is late; a burst afterwards would say nothing about the time in between.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        let into = Arc::clone(into);
        tokio::spawn(async move {
            let sent = Instant::now();
            let seen = timeout(PATIENCE, ask(to)).await.ok().flatten();
            let answered = seen.map(|seen| (Instant::now(), seen));
            lock(&into).push(ConnectionSample { sent, answered });
        });
    }
}

/// An ICMP error about a datagram (refused, unreachable) is a loss like any other.
async fn ask(to: SocketAddr) -> Option<IpAddr> {
    let any = match to {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0)).await.ok()?;
    socket.connect(to).await.ok()?;
    socket.send(b"?").await.ok()?;
    let mut buffer = [0; 64];
    let length = socket.recv(&mut buffer).await.ok()?;
    std::str::from_utf8(&buffer[..length]).ok()?.parse().ok()
}
