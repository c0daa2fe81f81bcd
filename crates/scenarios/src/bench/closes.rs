//! Connections of a pod that end all the time: each is opened, answered and closed by both sides, as HTTP/1.0 has it. Every
//! close changes the state of a flow, for which programs and netfilter have work to do.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::cpu::pin;
use super::requests::{CHURN_PORT, connect};
use crate::prelude::*;

/// A second.
pub(super) const RATE: u32 = 1_000;

/// Closes that go on until they are finished.
pub(super) struct Closes {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<f64>>,
}

impl Closes {
    pub(super) fn start(pod: &Netns, server: IpAddr, core: usize) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let thread = pod.spawn(move || {
            pin(core)?;
            let (begin, mut done) = (Instant::now(), 0_u32);
            while !is_over.load(Ordering::Relaxed) {
                close_one(server)?;
                done += 1;
                let due = Duration::from_secs(1) / RATE * done;
                thread::sleep(due.saturating_sub(begin.elapsed()));
            }
            Ok(f64::from(done) / begin.elapsed().as_secs_f64())
        })?;
        Ok(Self { stop, thread })
    }

    /// How many there were in a second.
    pub(super) fn finish(self) -> Result<f64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("the thread that closes has panicked")?
    }
}

fn close_one(server: IpAddr) -> Result<()> {
    let mut byte = [7];
    let mut stream = connect(SocketAddr::new(server, CHURN_PORT))?;
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte)?;
    ensure!(stream.read(&mut byte)? == 0, "the server says more than it was asked");
    Ok(())
}
