//! Established connections: TCP to the echo outside, each with a message every tenth of a second, for as long as it
//! lives. What is broken stays so until it is renewed.

use crate::prelude::*;
use egress_lab::background::Background;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const EVERY: Duration = Duration::from_millis(100);
/// How many of them a pod keeps.
pub(crate) const COUNT: usize = 2;

/// How one connection is.
#[derive(Debug, Clone, Copy, Default)]
struct Health {
    /// Which connection of this place it is.
    number: u32,
    /// The last echo.
    heard: Option<Instant>,
}

/// A pod's connections.
pub(crate) struct Streams {
    health: Arc<Mutex<[Health; COUNT]>>,
    work: Background<()>,
}

/// The connections at some moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamSnapshot {
    health: [Health; COUNT],
    at: Instant,
}

impl Streams {
    pub(crate) fn start(from: &Netns, to: SocketAddr) -> Result<Self> {
        let health = Arc::new(Mutex::new([Health::default(); COUNT]));
        let all = Arc::clone(&health);
        let work = Background::start_in(from, move |stop| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                for place in 0..COUNT {
                    tokio::spawn(keep(to, place, Arc::clone(&all)));
                }
                while !stop.load(Ordering::Relaxed) {
                    tokio::time::sleep(EVERY).await;
                }
            });
            Ok(())
        })?;
        Ok(Self { health, work })
    }

    pub(crate) fn snapshot(&self) -> StreamSnapshot {
        StreamSnapshot { health: *lock(&self.health), at: Instant::now() }
    }

    /// Of those that were well at the snapshot, how many there were and how many have been heard since `since`.
    pub(crate) fn survivors(&self, snapshot: &StreamSnapshot, since: Instant) -> (u64, u64) {
        let now = *lock(&self.health);
        let (mut asked, mut well) = (0, 0);
        for (before, now) in snapshot.health.iter().zip(&now) {
            let lived = before.heard.is_some_and(|heard| snapshot.at.duration_since(heard) < EVERY * 5);
            asked += u64::from(lived);
            let lives = before.number == now.number && now.heard.is_some_and(|heard| heard > since);
            well += u64::from(lived && lives);
        }
        (asked, well)
    }

    pub(crate) fn finish(self) -> Result<()> {
        self.work.finish()
    }
}

fn lock(health: &Mutex<[Health; COUNT]>) -> MutexGuard<'_, [Health; COUNT]> {
    health.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long a silent connection may try before it is given up: longer than a fault and the recovery after it.
const GIVEN_UP: Duration = Duration::from_secs(30);

async fn keep(to: SocketAddr, place: usize, health: Arc<Mutex<[Health; COUNT]>>) {
    let mut number = 0;
    loop {
        number += 1;
        lock(&health)[place] = Health { number, heard: None };
        // An error ends this connection; the next is another one by its number.
        drop(talk(to, place, &health).await);
        tokio::time::sleep(EVERY).await;
    }
}

async fn talk(to: SocketAddr, place: usize, health: &Mutex<[Health; COUNT]>) -> std::io::Result<()> {
    let mut stream = tokio::time::timeout(Duration::from_secs(2), TcpStream::connect(to)).await??;
    stream.set_nodelay(true)?;
    loop {
        stream.write_all(b"still here").await?;
        let mut echo = [0; 10];
        tokio::time::timeout(GIVEN_UP, stream.read_exact(&mut echo)).await??;
        lock(health)[place].heard = Some(Instant::now());
        tokio::time::sleep(EVERY).await;
    }
}
