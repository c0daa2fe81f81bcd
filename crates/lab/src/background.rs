//! Work on a thread of its own until it is finished or dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow};

use crate::topology::netns::Netns;

pub struct Background<T> {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<T>>>,
}

impl<T: Send + 'static> Background<T> {
    /// Starts `work`, which ends when its argument becomes true. A socket keeps its namespace, so the thread needs none.
    pub fn start(name: &str, work: impl FnOnce(&AtomicBool) -> Result<T> + Send + 'static) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || work(&until))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// The same inside a namespace.
    pub fn start_in(netns: &Netns, work: impl FnOnce(&AtomicBool) -> Result<T> + Send + 'static) -> Result<Self> {
        let own = netns.clone();
        Self::start(netns.name(), move |stop| {
            own.enter()?;
            work(stop)
        })
    }

    /// Whether the work has ended by itself.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the work.
    pub fn finish(mut self) -> Result<T> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("background work is finished once")?;
        let name = thread.thread().name().unwrap_or_default().to_owned();
        thread.join().map_err(|_panic| anyhow!("{name} panicked"))?
    }

    /// Ends all at the same time.
    pub fn finish_all(all: Vec<Self>) -> Result<()> {
        all.iter().for_each(|one| one.stop.store(true, Ordering::Relaxed));
        all.into_iter().try_for_each(|one| one.finish().map(drop))
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("lab: background work panicked");
        }
    }
}
