//! Loads the object and attaches each program to its hook. Each program loads in its own thread, because the verifier takes
//! seconds.
//!
//! - **First start**: the link is created after the maps exist, since its program runs at once, and then pinned.
//! - **Restart**: the pinned link gets the new program atomically (`BPF_LINK_UPDATE`).
//! - **Device deleted**: the link is severed, and is replaced.
//! - **Another device** (`--uplink` changed): the link stays on the former device, under the name that it has as a further
//!   egress interface, until the hooks are known that are in use.
//! - **Without TCX**, or by setting: a clsact filter replaces link and pin (`clsact`), also atomically. Attachments of the
//!   other kind, and filters on a former uplink, are removed after the new program runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use aya::programs::links::{FdLink, LinkError, LinkOrder, PinnedLink};
use aya::programs::tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcError};
use aya::programs::{Program, ProgramError, SchedClassifier};
use aya::sys::SyscallError;
use aya::{Ebpf, EbpfLoader};
use nix::net::if_::if_indextoname;
use nix::sys::signal::SigSet;
use tokio::sync::oneshot;
use tracing::{debug, error};

use crate::attach::clsact::{self, FilterSlot, ProgramSet};
use crate::attach::filters;
use crate::attach::listing;
use crate::error::StartError;
use crate::maps::access::tcx_programs;
use crate::names::Attachment;
use crate::names::{AttachPoint, CLSACT_PRIORITY, Hook, PINNED_MAPS, Pins, SWEEP_PROGRAM};
use crate::settings::Settings;

/// The loaded programs and where they run.
pub struct Programs {
    ebpf: Ebpf,
    pins: Pins,
    attachment: Attachment,
    /// Links are open while the agent runs, so that removing a pin by hand detaches nothing. Filters have none.
    attached: BTreeMap<AttachPoint, Option<SchedClassifierLink>>,
}

/// Why a program is not on its hook.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Tc(#[from] TcError),
    #[error("{path}: {source}")]
    Pin { path: PathBuf, source: io::Error },
    #[error("the interface was removed or renamed")]
    NoInterface,
    #[error("the object has no such program")]
    NotInObject,
}

impl Programs {
    /// Loads maps (from their pins, where they exist) and programs; attaches nothing. Dropped early it leaves no new pins;
    /// threads in the verifier run until the process ends.
    pub async fn load(settings: &Settings, pins: &Pins, attachment: Attachment) -> Result<Self, StartError> {
        let new = NewPins::of(pins);
        let ebpf = verified(open(settings, pins)?).await?;
        new.keep();
        Ok(Self { ebpf, pins: pins.clone(), attachment, attached: BTreeMap::new() })
    }

    pub fn ebpf_mut(&mut self) -> &mut Ebpf {
        &mut self.ebpf
    }

    /// Whether the program was attached there, when last seen.
    pub fn is_attached(&self, place: AttachPoint) -> bool {
        self.attached.contains_key(&place)
    }

    /// Whether the hook's program was attached to its own device, when last seen.
    pub fn is_on_own_device(&self, hook: Hook) -> bool {
        self.attached.keys().any(|place| place.hook == hook && !place.is_further)
    }

    /// Run count and run time of the hook's program, if the kernel keeps statistics.
    pub fn runs(&mut self, hook: Hook) -> Option<(u64, Duration)> {
        let info = self.program(hook).ok()?.info().ok()?;
        Some((info.run_count(), info.run_time()))
    }

    /// Whether the kernel runs our program there. Other software may have detached it.
    pub fn is_alive(&mut self, place: AttachPoint) -> bool {
        let attachment = self.attachment;
        let Ok(program) = self.program(place.hook) else { return false };
        match attachment {
            Attachment::Tcx => runs_on(program, place).unwrap_or(false),
            Attachment::Clsact => is_filter(program, place).unwrap_or(false),
        }
    }

    /// Attaches the hook's program, or adopts an existing attachment. True if there was none.
    pub fn attach(&mut self, place: AttachPoint) -> Result<bool, AttachError> {
        // A link of a removed device must be closed before its pin is removed; otherwise it lingers.
        self.attached.remove(&place);
        let device = if_indextoname(place.ifindex).map_err(|_| AttachError::NoInterface)?;
        let device = device.to_str().map_err(|_| AttachError::NoInterface)?;
        let (link, is_new) = match self.attachment {
            Attachment::Tcx => {
                let (link, is_new) = self.attach_tcx(place, device)?;
                (Some(link), is_new)
            }
            Attachment::Clsact => (None, self.attach_filter(place, device)?),
        };
        self.retire_other(place)?;
        self.attached.insert(place, link);
        Ok(is_new)
    }

    fn attach_tcx(&mut self, place: AttachPoint, device: &str) -> Result<(SchedClassifierLink, bool), AttachError> {
        let (path, hook) = (self.pins.link_of(place), place.hook);
        self.take_name(place)?;
        let program = self.program(hook)?;
        if let Some(link) = adopt(program, place, &path)? {
            return Ok((link, false));
        }
        let order = TcAttachOptions::TcxOrder(LinkOrder::first());
        let id = program.attach_with_options(device, hook.direction(), order)?;
        let link = program.take_link(id)?;
        // Another device may have got the name. Drop detaches the link.
        if !runs_on(program, place)? {
            return Err(AttachError::NoInterface);
        }
        let pinned = FdLink::try_from(link)?.pin(&path);
        let pinned = pinned.map_err(|error| AttachError::Pin { path, source: io::Error::other(error) })?;
        Ok((SchedClassifierLink::try_from(FdLink::from(pinned))?, true))
    }

    /// Gives the links the names of their places, where another device has become the uplink.
    fn take_name(&self, place: AttachPoint) -> Result<(), AttachError> {
        let (own, further) = (self.pins.link(place.hook), self.pins.further_link(place.hook, place.ifindex));
        if place.is_further {
            return Ok(());
        }
        let renamed = |from: &Path, to: &Path| {
            fs::rename(from, to).map_err(|source| AttachError::Pin { path: from.to_path_buf(), source })
        };
        if let Some(former) = listing::linked(&own).map_err(TcError::IoError)?
            && former != place.ifindex
        {
            renamed(&own, &self.pins.further_link(place.hook, former))?;
        }
        if further.exists() && !own.exists() { renamed(&further, &own) } else { Ok(()) }
    }

    fn attach_filter(&mut self, place: AttachPoint, device: &str) -> Result<bool, AttachError> {
        let AttachPoint { hook, ifindex, .. } = place;
        let set = self.set().map_err(TcError::IoError)?;
        clsact::ensure(&set, device, ifindex)?;
        let slot = clsact::find_slot(&set, hook, ifindex).map_err(TcError::IoError)?;
        let program = self.program(hook)?;
        set.pin_program(program)?;
        let (id, is_new) = match slot {
            FilterSlot::Ours(handle) => {
                let ours = SchedClassifierLink::attached(device, hook.direction(), CLSACT_PRIORITY, handle, None)
                    .map_err(TcError::IoError)?;
                (program.attach_to_link(ours)?, false)
            }
            FilterSlot::Free(handle) => {
                let options = NlOptions { priority: CLSACT_PRIORITY, handle, classid: None };
                let options = TcAttachOptions::Netlink(options);
                (program.attach_with_options(device, hook.direction(), options)?, true)
            }
        };
        // Drop would remove the filter, which must outlive the agent.
        std::mem::forget(program.take_link(id)?);
        Ok(is_new)
    }

    /// Detaches the programs from all places but these: the interface was removed, or hosts no egress IP any more. The link of
    /// a hook's own device stays pinned until it is replaced. One line for each failure.
    pub fn retain(&mut self, wanted: &[AttachPoint]) -> Vec<(String, io::Error)> {
        let mut unwanted: BTreeSet<AttachPoint> =
            self.attached.keys().filter(|place| !wanted.contains(place)).copied().collect();
        let mut failures = Vec::new();
        if self.attachment == Attachment::Tcx {
            // Also of a former uplink whose name another device has got.
            match listing::further_links(&self.pins) {
                Ok(pinned) => unwanted.extend(pinned.into_iter().filter(|place| !wanted.contains(place))),
                Err(error) => failures.push(("links of further interfaces".to_owned(), error)),
            }
        }
        for place in unwanted {
            self.attached.remove(&place);
            // An interface that was renamed to the uplink's name keeps its program.
            let is_used = wanted.iter().any(|other| (other.hook, other.ifindex) == (place.hook, place.ifindex));
            let is_replaced = || wanted.iter().any(|other| other.hook == place.hook && !other.is_further);
            let is_kept = match self.attachment {
                Attachment::Tcx => !place.is_further,
                Attachment::Clsact => !place.is_further && !is_replaced(),
            };
            if is_used || is_kept {
                continue;
            }
            let removed = match self.attachment {
                Attachment::Tcx => remove_pin(&self.pins.link_of(place)),
                Attachment::Clsact => {
                    self.set().and_then(|set| clsact::remove_filter(&set, place.hook, place.ifindex)).map(drop)
                }
            };
            failures.extend(
                removed.err().map(|error| (format!("{} on interface {}", place.hook.name(), place.ifindex), error)),
            );
        }
        failures
    }

    /// Removes what an earlier run left in other places: links of further interfaces, filters and their disciplines. One line
    /// for each removal or failure.
    pub fn retire_elsewhere(&self) -> Vec<(String, io::Result<bool>)> {
        let filters: Vec<_> = match self.attachment {
            Attachment::Tcx => Vec::new(),
            Attachment::Clsact => self.attached.keys().map(|place| (place.hook, place.ifindex)).collect(),
        };
        let devices: Vec<u32> = filters.iter().map(|(_, ifindex)| *ifindex).collect();
        let set = match self.set() {
            Ok(set) => set,
            Err(error) => return vec![("clsact filters".to_owned(), Err(error))],
        };
        let mut outcomes = self.retire_links();
        outcomes.extend(clsact::remove_elsewhere(&set, &filters));
        outcomes.extend(clsact::drop_stale_markers(&set, &devices));
        let unpinned = self.filter_numbers().and_then(|attached| set.unpin_unused(attached));
        outcomes.push(("programs of filters".to_owned(), unpinned.map(|()| false)));
        outcomes
    }

    fn retire_links(&self) -> Vec<(String, io::Result<bool>)> {
        let used = |place: &AttachPoint| self.attachment == Attachment::Tcx && self.attached.contains_key(place);
        let places = match listing::further_links(&self.pins) {
            Ok(places) => places,
            Err(error) => return vec![("links of further interfaces".to_owned(), Err(error))],
        };
        let unused = places.into_iter().filter(|place| !used(place));
        let remove = |place: AttachPoint| {
            let path = self.pins.link_of(place);
            (format!("link {}", path.display()), remove_pin(&path).map(|()| true))
        };
        unused.map(remove).collect()
    }

    /// Programs that this process has attached as filters.
    fn filter_numbers(&self) -> io::Result<BTreeSet<u32>> {
        if self.attachment != Attachment::Clsact {
            return Ok(BTreeSet::new());
        }
        let programs = self.attached.keys().filter_map(|place| self.ebpf.program(place.hook.name()));
        programs.map(|program| program.info().map(|info| info.id()).map_err(io::Error::other)).collect()
    }

    fn set(&self) -> io::Result<ProgramSet> {
        ProgramSet::of(&self.pins.version())
    }

    /// Removes attachments of an earlier run in the other mode.
    fn retire_other(&self, place: AttachPoint) -> Result<(), AttachError> {
        match self.attachment {
            Attachment::Tcx => {
                let set = self.set().map_err(TcError::IoError)?;
                clsact::remove_filter(&set, place.hook, place.ifindex).map_err(TcError::IoError)?;
                Ok(())
            }
            // No other process has the link open, since one agent runs at a time: it ends with its pin.
            Attachment::Clsact => {
                let path = self.pins.link_of(place);
                remove_pin(&path).map_err(|source| AttachError::Pin { path, source })
            }
        }
    }

    fn program(&mut self, hook: Hook) -> Result<&mut SchedClassifier, AttachError> {
        let program = self.ebpf.program_mut(hook.name()).ok_or(AttachError::NotInObject)?;
        Ok(program.try_into()?)
    }

    /// A second handle to the sweep program; `None` if the object has none. Opened by a short-lived pin, since opening a
    /// program by number takes `CAP_SYS_ADMIN`.
    pub fn sweep(&mut self) -> Result<Option<SchedClassifier>, ProgramError> {
        let path = self.pins.sweep();
        let Some(program) = self.ebpf.program_mut(SWEEP_PROGRAM) else { return Ok(None) };
        match fs::remove_file(&path) {
            // Left by an agent that was killed here.
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
        program.pin(&path).map_err(io::Error::other)?;
        let opened = SchedClassifier::from_pin(&path);
        fs::remove_file(&path)?;
        opened.map(Some)
    }
}

/// Map pins that this attempt creates. Drop removes them, unless they are kept: the next attempt may need other shapes.
struct NewPins(Vec<PathBuf>);

impl NewPins {
    fn of(pins: &Pins) -> Self {
        Self(PINNED_MAPS.into_iter().map(|name| pins.map(name)).filter(|path| !path.exists()).collect())
    }

    fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for NewPins {
    fn drop(&mut self) {
        for path in self.0.iter().filter(|path| path.exists()) {
            if let Err(error) = fs::remove_file(path) {
                error!(%error, path = %path.display(), "cannot remove the pin of a failed start");
            }
        }
    }
}

/// The object with its maps, created or adopted.
fn open(settings: &Settings, pins: &Pins) -> Result<Ebpf, StartError> {
    let paths: Vec<_> = PINNED_MAPS.iter().map(|name| (*name, pins.map(name))).collect();
    let mut loader = EbpfLoader::new();
    for (name, path) in &paths {
        loader.map_pin_path(name, path.as_path());
        if let Some(size) = settings.map_size(name) {
            loader.map_max_entries(name, size);
        }
    }
    loader.load(&settings.object).map_err(|error| StartError::Object(chain(&error)))
}

/// Loads all programs in a separate thread.
async fn verified(mut ebpf: Ebpf) -> Result<Ebpf, StartError> {
    let (done, outcome) = oneshot::channel();
    let load = move || {
        // The verifier aborts when its thread gets a signal.
        let blocked = SigSet::all().thread_block().map_err(|error| StartError::kernel("block signals", error.into()));
        // Fails if the receiver was dropped.
        let _stopped = done.send(blocked.and_then(|()| load_programs(&mut ebpf)).map(|()| ebpf));
    };
    // Short-lived: until the programs are loaded.
    let thread = std::thread::Builder::new().name("verifier".to_owned()).spawn(load);
    thread.map_err(|error| StartError::kernel("start a thread", error))?;
    outcome.await.unwrap_or_else(|_| Err(StartError::Object("a thread that loads the programs has ended".to_owned())))
}

/// Loads all programs in parallel; returns the first error.
fn load_programs(ebpf: &mut Ebpf) -> Result<(), StartError> {
    let mut found: BTreeMap<String, &mut Program> =
        ebpf.programs_mut().map(|(name, program)| (name.to_owned(), program)).collect();
    let mut wanted = Vec::new();
    for name in Hook::ALL.map(Hook::name) {
        let program = found.remove(name).ok_or(StartError::NotInObject { what: "program", name })?;
        wanted.push((name, program));
    }
    wanted.extend(found.remove(SWEEP_PROGRAM).map(|program| (SWEEP_PROGRAM, program)));
    std::thread::scope(|scope| {
        // Short-lived: one program each.
        let load = |(name, program)| scope.spawn(move || load_classifier(program, name));
        let loading: Vec<_> = wanted.into_iter().map(load).collect();
        let outcome = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        loading.into_iter().try_for_each(outcome)
    })
}

/// The verifier returns EAGAIN when any signal arrives during the load.
const LOAD_ATTEMPTS: usize = 5;

pub fn load_classifier(program: &mut Program, name: &'static str) -> Result<(), StartError> {
    let classifier: &mut SchedClassifier =
        program.try_into().map_err(|_| StartError::NotInObject { what: "classifier", name })?;
    let mut loaded = classifier.load();
    for _ in 1..LOAD_ATTEMPTS {
        match &loaded {
            Err(ProgramError::LoadError { io_error, .. }) if io_error.kind() == io::ErrorKind::WouldBlock => {}
            _ => break,
        }
        loaded = classifier.load();
    }
    loaded.map_err(|error| match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            debug!(program = name, %verifier_log, "verifier log");
            StartError::Object(format!("{name}: {io_error}"))
        }
        other => StartError::Object(format!("{name}: {}", chain(&other))),
    })
}

/// A missing pin counts as removed.
fn remove_pin(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Gives the pinned link the new program. `None` when there is no link to adopt: none pinned, or a severed one.
fn adopt(
    program: &mut SchedClassifier,
    place: AttachPoint,
    path: &Path,
) -> Result<Option<SchedClassifierLink>, AttachError> {
    let pinned = match PinnedLink::from_pin(path) {
        Ok(pinned) => pinned,
        Err(LinkError::SyscallError(SyscallError { io_error, .. })) if io_error.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let link = SchedClassifierLink::try_from(FdLink::from(pinned))?;
    match program.attach_to_link(link) {
        Ok(id) => {
            let link = program.take_link(id)?;
            if runs_on(program, place)? {
                return Ok(Some(link));
            }
            debug!(hook = place.hook.name(), "the pinned link was on another device");
        }
        Err(ProgramError::SyscallError(SyscallError { io_error, .. }))
            if io_error.raw_os_error() == Some(libc::ENOLINK) =>
        {
            debug!(hook = place.hook.name(), "the pinned link was severed: its device is gone");
        }
        Err(error) => return Err(error.into()),
    }
    fs::remove_file(path).map_err(|source| AttachError::Pin { path: path.to_path_buf(), source })?;
    Ok(None)
}

fn runs_on(program: &SchedClassifier, place: AttachPoint) -> Result<bool, AttachError> {
    let ours = program.info()?.id();
    let programs = tcx_programs(place.ifindex, place.hook.direction()).map_err(TcError::IoError)?;
    Ok(programs.contains(&ours))
}

fn is_filter(program: &SchedClassifier, place: AttachPoint) -> Result<bool, AttachError> {
    let ours = program.info()?.id();
    let there = filters::list(place.ifindex, place.hook.direction()).map_err(TcError::IoError)?;
    Ok(there.iter().any(|filter| filter.program == Some(ours)))
}

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    line
}
