//! What a lab has made, written down before it is made, so that nothing is ever left.
//!
//! `/run/egress-lab/` holds per lab a ledger `<prefix>.json` and a folder `<prefix>/` (bpffs, logs, kubeconfigs). The owner holds
//! a lock (`flock`) on its ledger, which the kernel drops with the owner: "the lock is free" means "no owner is left". An entry
//! is on disk before the thing exists, and the ledger is removed last, so after a crash the next lab removes everything.
//! Processes need no entry: each carries the mark ([`super::netns::MARK`]).
//!
//! The folder itself is locked while labs come and go, so that two of them never remove each other's files.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::netns::{self, Netns};
use super::teardown;

/// Where all labs of the machine keep their ledgers.
pub const FOLDER: &str = "/run/egress-lab";

/// One thing that does not vanish with its owner.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Resource {
    /// A namespace under `ip netns`, with all that is inside.
    Namespace(String),
    /// A mount, by its mount point.
    Mount(PathBuf),
    /// A control group of this name in each hierarchy, with all below it.
    Cgroup(String),
}

/// A ledger's content.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LedgerRecord {
    pub prefix: String,
    pub pid: u32,
    pub started: u64,
    pub made: BTreeSet<Resource>,
}

struct OpenLedger {
    record: LedgerRecord,
    file: Flock<File>,
    closed: bool,
}

/// The ledger of a lab that this process owns.
pub struct LabLedger {
    prefix: String,
    open: Mutex<OpenLedger>,
}

impl LabLedger {
    /// Takes a prefix that no living lab uses, after removing what dead labs left.
    pub fn claim(wish: LabPrefix) -> Result<Arc<Self>> {
        let cluster = LedgerFolder::lock()?;
        cluster.recover()?;
        for attempt in 0..1000 {
            let prefix = wish.candidate(attempt);
            let Some(file) = create_locked(&ledger_path(&prefix))? else { continue };
            let pid = std::process::id();
            let record = LedgerRecord { prefix: prefix.clone(), pid, started: start_time(pid), made: BTreeSet::new() };
            let open = Mutex::new(OpenLedger { record, file, closed: false });
            let ledger = Arc::new(Self { prefix, open });
            ledger.lock().save()?;
            fs::create_dir_all(ledger.folder())?;
            remember(&ledger);
            return Ok(ledger);
        }
        bail!("no free prefix for a lab under {FOLDER}");
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The lab's own folder; it goes with the lab.
    pub fn folder(&self) -> PathBuf {
        Path::new(FOLDER).join(&self.prefix)
    }

    /// Writes `things` down, then makes them. Refused once the teardown has begun.
    pub fn make<T>(&self, things: Vec<Resource>, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut open = self.lock();
        if open.closed {
            bail!("the lab {} is being torn down", self.prefix);
        }
        open.record.made.extend(things);
        open.save()?;
        work()
    }

    /// Removes everything that is written down, then the ledger. Errors are collected; a second call does nothing.
    pub fn tear_down(&self) -> Result<()> {
        let mut open = self.lock();
        if open.closed {
            return Ok(());
        }
        open.closed = true;
        let cluster = LedgerFolder::lock()?;
        cluster.remove(&open.record)?;
        teardown::leave_cgroup(Path::new(FOLDER))
    }

    /// Makes namespaces, with the folder locked: the mount that `ip netns` keeps names on is shared with other labs.
    pub fn make_namespaces(&self, namespaces: &[Netns]) -> Result<()> {
        let names = namespaces.iter().map(|namespace| Resource::Namespace(namespace.name().to_owned()));
        self.make(names.collect(), || {
            let _ground = LedgerFolder::lock()?;
            teardown::note_names_mount(Path::new(FOLDER))?;
            let mut command = netns::marked(&self.prefix, "ip");
            command.args(["-batch", "-"]);
            let lines: Vec<String> = namespaces.iter().map(|one| format!("netns add {}\n", one.name())).collect();
            netns::feed(command, &lines.concat()).context("cannot make the lab's namespaces")
        })
    }

    fn lock(&self) -> MutexGuard<'_, OpenLedger> {
        // A panic while the lock was held leaves at worst a thing written down that was not made.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenLedger {
    fn save(&mut self) -> Result<()> {
        // The file is replaced in place: its inode carries the lock. A torn write is read as "unknown content",
        // so the new text goes down in one write, and it only ever grows.
        let text = serde_json::to_vec(&self.record)?;
        let file: &File = &self.file;
        std::os::unix::fs::FileExt::write_all_at(file, &text, 0).context("cannot write the lab's ledger")?;
        Ok(())
    }
}

/// How a lab wants to be called.
#[derive(Debug, Clone)]
pub enum LabPrefix {
    /// This name, or with a number after it while another lab has it: for labs that people type commands for.
    Readable(String),
    /// Unique by the process: for tests, which stand side by side.
    OfProcess,
}

impl LabPrefix {
    fn candidate(&self, attempt: u32) -> String {
        match self {
            Self::Readable(name) if attempt == 0 => name.clone(),
            Self::Readable(name) => format!("{name}{}", attempt + 1),
            Self::OfProcess => format!("t{}-{attempt}", std::process::id()),
        }
    }
}

/// The folder of all ledgers, locked.
struct LedgerFolder {
    _lock: Flock<File>,
}

impl LedgerFolder {
    fn lock() -> Result<Self> {
        loop {
            fs::create_dir_all(FOLDER).with_context(|| format!("cannot make {FOLDER}: a lab needs root"))?;
            let folder = File::open(FOLDER)?;
            let lock = Flock::lock(folder, FlockArg::LockExclusive)
                .map_err(|(_file, errno)| errno)
                .with_context(|| format!("cannot lock {FOLDER}"))?;
            // The last lab to leave removes the folder: a lock on a removed one is worth nothing.
            if fs::metadata(FOLDER).is_ok_and(|now| lock.metadata().is_ok_and(|own| own.ino() == now.ino())) {
                return Ok(Self { _lock: lock });
            }
        }
    }

    /// Removes what dead labs left; living ones hold their lock and stay.
    fn recover(&self) -> Result<()> {
        for entry in fs::read_dir(FOLDER)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let file = OpenOptions::new().read(true).write(true).open(&path)?;
            let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { continue };
            let record = read_record(&path);
            eprintln!("lab: removing what a dead run left (prefix {}, pid {})", record.prefix, record.pid);
            self.remove(&record)?;
            drop(lock);
        }
        Ok(())
    }

    fn remove(&self, record: &LedgerRecord) -> Result<()> {
        teardown::remove(record, &Path::new(FOLDER).join(&record.prefix))?;
        match fs::remove_file(ledger_path(&record.prefix)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Reads a dead lab's ledger. One that was never written yet owns nothing but its mark and its folder.
fn read_record(path: &Path) -> LedgerRecord {
    let written = fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    written.unwrap_or_else(|| LedgerRecord {
        prefix: path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default(),
        pid: 0,
        started: 0,
        made: BTreeSet::new(),
    })
}

fn ledger_path(prefix: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("{prefix}.json"))
}

/// Creates and locks a ledger; `None` when a lab of that name lives.
fn create_locked(path: &Path) -> Result<Option<Flock<File>>> {
    let mut file = match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot make {}", path.display())),
    };
    file.flush()?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_file, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_file, errno)) => Err(errno).context("cannot lock the lab's ledger"),
    }
}

/// The kernel's start time of a process in clock ticks since boot: field 22 of its stat line.
fn start_time(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    after_name.split_whitespace().nth(19).and_then(|ticks| ticks.parse().ok()).unwrap_or(0)
}

fn living() -> &'static Mutex<Vec<Weak<LabLedger>>> {
    static LIVING: OnceLock<Mutex<Vec<Weak<LabLedger>>>> = OnceLock::new();
    LIVING.get_or_init(Mutex::default)
}

fn remember(ledger: &Arc<LabLedger>) {
    let mut living = living().lock().unwrap_or_else(PoisonError::into_inner);
    living.retain(|entry| entry.strong_count() > 0);
    living.push(Arc::downgrade(ledger));
}

/// Tears down every lab of this process: what a signal does.
pub fn tear_down_all() -> Vec<anyhow::Error> {
    let ledgers: Vec<Arc<LabLedger>> = {
        let living = living().lock().unwrap_or_else(PoisonError::into_inner);
        living.iter().filter_map(Weak::upgrade).collect()
    };
    ledgers.iter().filter_map(|ledger| ledger.tear_down().err()).collect()
}
