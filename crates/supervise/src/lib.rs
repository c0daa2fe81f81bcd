//! Supervision of long-lived tasks: one that panics, or ends early, ends the process at once with one line that names it.
//!
//! An agent without one of its tasks looks alive and is not: without its lease keeper it would hold addresses for ever. The
//! programs stay pinned and the next agent adopts them, so the end of the process costs only the time until the restart.
//!
//! Every long-lived task runs inside [`until`] or [`forever`], wherever it is spawned or joined. Short-lived tasks (a
//! connection, an announcement) are spawned bare with the reason in a comment; a test looks for missing reasons.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::{JoinError, JoinSet, block_in_place};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::error;

/// Long-lived tasks, by what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    Acknowledgements,
    ApiWatches,
    PodCounts,
    Certificates,
    Controller,
    DeviceWatch,
    EgressRouters,
    EgressServices,
    Antrea,
    Cilium,
    DropEvents,
    EventWriter,
    HealthServer,
    IdleReset,
    KeyReader,
    LeaderElection,
    LeaderKnocks,
    LeaseKeeper,
    MetricsServer,
    MetricsToken,
    NatLog,
    Netlink,
    NextHop,
    NodePublisher,
    NodeReconciler,
    NodeTroubles,
    Orders,
    OverlayEcho,
    PacketLog,
    PortCounter,
    Prober,
    Rollback,
    Signals,
    StatusSocket,
    Sweep,
}

impl Task {
    /// As the log has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Acknowledgements => "acknowledgements",
            Self::ApiWatches => "API watches",
            Self::PodCounts => "census",
            Self::Certificates => "certificates",
            Self::Controller => "controller",
            Self::DeviceWatch => "device watch",
            Self::EgressRouters => "EgressRouters",
            Self::EgressServices => "EgressServices",
            Self::Antrea => "Antrea",
            Self::Cilium => "Cilium",
            Self::DropEvents => "drop events",
            Self::EventWriter => "event writer",
            Self::HealthServer => "health server",
            Self::IdleReset => "idle reset",
            Self::KeyReader => "key reader",
            Self::LeaderElection => "leader election",
            Self::LeaderKnocks => "leader knocks",
            Self::LeaseKeeper => "lease keeper",
            Self::MetricsServer => "metrics server",
            Self::MetricsToken => "metrics token",
            Self::NatLog => "nat log",
            Self::Netlink => "netlink",
            Self::NextHop => "next hop",
            Self::NodePublisher => "node publisher",
            Self::NodeReconciler => "node reconciler",
            Self::NodeTroubles => "node troubles",
            Self::Orders => "orders",
            Self::OverlayEcho => "overlay echo",
            Self::PacketLog => "packet log",
            Self::PortCounter => "port counter",
            Self::Prober => "prober",
            Self::Rollback => "rollback watch",
            Self::Signals => "signals",
            Self::StatusSocket => "status socket",
            Self::Sweep => "sweep",
        }
    }
}

/// Time by which a panic is reported before its consequences.
const PANICS_FIRST: Duration = Duration::from_millis(100);

/// Runs a task that may end only after `stop`.
pub async fn until(stop: CancellationToken, task: Task, run: impl Future<Output = ()>) {
    match outcome(task, run).await {
        Ok(()) if stop.is_cancelled() => {}
        Ok(()) => {
            // A task that ends because another one panicked must not be the one that is reported.
            tokio::time::sleep(PANICS_FIRST).await;
            end_process(task, "has ended")
        }
        Err(panic) => end_process(task, &format!("has panicked: {panic}")),
    }
}

/// Runs a task that ends only when it is dropped.
pub async fn forever(task: Task, run: impl Future<Output = ()>) {
    until(CancellationToken::new(), task, run).await;
}

/// The tasks of a process, started together once all are registered, so that none misses what another publishes first. Separate
/// tasks, because in a large cluster a plan takes longer than a Lease renewal may. They end when this is dropped.
pub struct Tasks {
    waiting: Vec<BoxFuture<'static, ()>>,
    stop: CancellationToken,
}

impl Tasks {
    pub fn new(stop: &CancellationToken) -> Self {
        Self { waiting: Vec::new(), stop: stop.clone() }
    }

    pub fn spawn(&mut self, task: Task, run: impl Future<Output = ()> + Send + 'static) {
        // Supervised: `supervise::until`.
        self.waiting.push(until(self.stop.clone(), task, run).boxed());
    }

    /// Starts all tasks and waits until they end, after the stop.
    pub async fn ended(self) {
        // Supervised: `spawn` has wrapped each.
        let mut all: JoinSet<()> = self.waiting.into_iter().collect();
        while all.join_next().await.is_some() {}
    }
}

/// Runs work that may block on kernel locks or a disk, on this thread, without blocking other tasks where the runtime has
/// threads for them. It is complete on return, so the order of operations stays.
pub fn blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => block_in_place(work),
        _ => work(),
    }
}

/// Result of a blocking thread. Its panic continues in the task that waited for it.
pub fn joined<T>(outcome: Result<io::Result<T>, JoinError>) -> io::Result<T> {
    match outcome.map_err(JoinError::try_into_panic) {
        Ok(outcome) => outcome,
        Err(Ok(panic)) => resume_unwind(panic),
        Err(Err(ended)) => Err(io::Error::other(ended)),
    }
}

/// The message of a panic.
async fn outcome(task: Task, run: impl Future<Output = ()>) -> Result<(), String> {
    // After a panic nothing of the task is looked at any more.
    AssertUnwindSafe(injected(task, run)).catch_unwind().await.map_err(|panic| text(&*panic))
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").lines().collect::<Vec<_>>().join(" ")
}

/// Not by unwinding: what blocks a thread, or another task, could keep the process from ending.
fn end_process(task: Task, why: &str) -> ! {
    error!(task = task.name(), "a task {why}: the process ends, the programs stay at work");
    std::process::exit(1)
}

/// Tests name a task in this variable: it panics a moment after its start. Builds for release do not read it.
#[cfg(debug_assertions)]
const PANIC_IN: &str = "EGRESS_AGENT_TEST_PANIC_IN";

#[cfg(debug_assertions)]
async fn injected(task: Task, run: impl Future<Output = ()>) {
    if !std::env::var(PANIC_IN).is_ok_and(|name| name == task.name()) {
        return run.await;
    }
    let panics = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        panic!("injected by a test");
    };
    // Not a `select!` arm, which would run after the end of the other.
    futures::future::select(std::pin::pin!(run), std::pin::pin!(panics)).await;
}

#[cfg(not(debug_assertions))]
async fn injected(_task: Task, run: impl Future<Output = ()>) {
    run.await;
}

/// When a loop was last seen.
#[derive(Clone, Debug)]
pub struct Heartbeat(Arc<Mutex<Instant>>);

impl Default for Heartbeat {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Heartbeat {
    pub fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub fn at(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn age(&self) -> Duration {
        self.at().elapsed()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    #[tokio::test]
    async fn a_task_that_is_stopped_ends_and_a_panic_is_one_line() {
        let stop = CancellationToken::new();
        stop.cancel();
        until(stop.clone(), Task::Sweep, stop.cancelled()).await;
        assert_eq!(outcome(Task::Sweep, async { panic!("two\nlines") }).await, Err("two lines".to_owned()));
        let number = 7;
        assert_eq!(outcome(Task::Sweep, async { panic!("a {number}") }).await, Err("a 7".to_owned()));
        assert_eq!(outcome(Task::Sweep, async {}).await, Ok(()));
    }

    /// One that ends too soon ends this process: the test runs it in another.
    #[test]
    fn a_task_that_ends_too_soon_ends_the_process() {
        const CHILD: &str = "EGRESS_AGENT_TEST_ENDS";
        if let Ok(how) = std::env::var(CHILD) {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let panics = how == "panics";
                tokio::spawn(forever(Task::LeaseKeeper, async move { assert!(!panics, "for a test") }));
                std::future::pending::<()>().await;
            });
        }
        for how in ["panics", "returns"] {
            let own = std::env::current_exe().expect("this program");
            let name = "tests::a_task_that_ends_too_soon_ends_the_process";
            let mut child = std::process::Command::new(own);
            let output = child.args(["--exact", name]).env(CHILD, how).output().expect("it runs");
            assert_eq!(output.status.code(), Some(1), "{how}: {output:?}");
        }
    }

    /// Files of the agent, without those of tests.
    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            match (path.is_dir(), name.as_str()) {
                (_, "tests" | "tests.rs" | "stub.rs" | "schedule") => {}
                (true, _) => sources(&path, found),
                (false, name) if name.ends_with(".rs") => found.push(path),
                (false, _) => {}
            }
        }
    }

    #[test]
    fn nothing_is_spawned_bare_without_a_reason() {
        let (root, mut files) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."), Vec::new());
        for folder in ["crates/datapath/src", "crates/kube/src", "crates/supervise/src", "egress-agent/src"] {
            sources(&root.join(folder), &mut files);
        }
        let (mut bare, mut seen) = (Vec::new(), 0);
        for file in files {
            let text = fs::read_to_string(&file).expect("a source");
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let is_spawn = |line: &str| [".spawn(", "tokio::spawn("].iter().any(|what| line.contains(what));
            for (number, line) in lines.iter().enumerate().filter(|(_, line)| is_spawn(line)) {
                seen += 1;
                let around = &lines[number.saturating_sub(3)..(number + 3).min(lines.len())];
                let is_supervised = |line: &&str| line.contains("supervise::") || line.contains("Short-lived: ");
                // Names its task to the set that supervises it.
                let is_named = line.contains("Task::") || line.contains("tasks.spawn(");
                if !around.iter().any(is_supervised) && !is_named {
                    bare.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
                }
            }
        }
        assert!(seen > 10, "{seen}: the search finds nothing");
        assert_eq!(bare, [] as [String; 0], "run it by supervise::until, or say `Short-lived: ` and why");
    }
}
