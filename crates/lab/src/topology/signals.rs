//! Ctrl-C. A signal tears down every lab of this process from its ledger and ends the process; what runs on other
//! threads in the meantime fails at some point; [`yield_to_signal`] keeps it from telling about that. The handler is installed
//! process-wide, so it does not matter which thread the signal reaches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Mutex, Once, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

use super::ledger;

/// The exit code of a process that SIGINT ended, by the shells' custom.
const INTERRUPTED: i32 = 130;

/// From now on SIGINT, SIGTERM and SIGHUP tear down the labs of this process. A second call changes nothing.
pub fn tear_down_on_signal() -> Result<()> {
    static INSTALLED: Once = Once::new();
    let mut outcome = Ok(());
    INSTALLED.call_once(|| outcome = install());
    outcome
}

fn install() -> Result<()> {
    let (ready, installed) = mpsc::channel();
    let watch = move || {
        let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(ready.send(Err(error))),
        };
        runtime.block_on(async {
            let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
            let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = kinds.map(signal) else {
                return drop(ready.send(Err(std::io::Error::other("cannot watch for signals"))));
            };
            if ready.send(Ok(())).is_err() {
                return;
            }
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
                let waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner).take();
                if waiting.is_none_or(|waiting| waiting.send(()).is_err()) {
                    end();
                }
            }
        });
    };
    thread::Builder::new().name("signals".to_owned()).spawn(watch)?;
    installed.recv().context("the thread that watches for signals ended")?.context("cannot watch for signals")
}

static WAITING: Mutex<Option<mpsc::Sender<()>>> = Mutex::new(None);

/// Waits for a signal, which is then the caller's to obey, by an orderly end. The next one ends the process as usual. Until then
/// `check` is called at this interval.
pub fn wait_for_signal(interval: Duration, mut check: impl FnMut()) {
    let (sender, receiver) = mpsc::channel();
    *WAITING.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
    loop {
        match receiver.recv_timeout(interval) {
            Ok(()) => return,
            Err(RecvTimeoutError::Timeout) => check(),
            // Without a handler nothing is sent, and the signal ends the process anyway.
            Err(RecvTimeoutError::Disconnected) => thread::park(),
        }
    }
}

static INTERRUPTED_BY_SIGNAL: AtomicBool = AtomicBool::new(false);

/// To be called before an error is reported: when a signal is what broke everything, this waits for the process's end.
pub fn yield_to_signal() {
    while INTERRUPTED_BY_SIGNAL.load(Ordering::Relaxed) {
        thread::park();
    }
}

fn end() {
    INTERRUPTED_BY_SIGNAL.store(true, Ordering::Relaxed);
    eprintln!("\nlab: interrupted, tearing down");
    for error in ledger::tear_down_all() {
        eprintln!("lab: {error:#}");
    }
    std::process::exit(INTERRUPTED);
}
