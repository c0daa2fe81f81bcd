//! User space's side of the kernel.
//!
//! [`Dataplane::start`] goes in an order in which running traffic is touched last: lock, features, shape of the pinned
//! maps, names of devices, no other set of programs, devices that are missing, overlay device, maps and programs, configuration,
//! links. A refusal before the links changes no pin. From then on
//!
//! - the **executor** (`Executor`) turns the model's actions into map writes and claims of addresses;
//! - the **watch** follows the node's devices, addresses, routes and neighbours, and puts programs back on a device that
//!   was made anew;
//! - the **events** reader gives sampled drops to whoever follows them, and to the log.
//!
//! The process may end at any time: programs, links and maps are pinned, and the next start adopts them. [`cleanup()`]
//! removes them. Every name of all this is in [`names`].
//!
//! | file | what |
//! |---|---|
//! | `names`, `error`, `lock` | names, start errors, one agent per node |
//! | `features`, `kernel_types` | what the kernel can do |
//! | `forward`, `xtables` | whether the CNI enforces policy where redirected packets do not pass |
//! | `pins`, `foreign`, `programs` | shape of pinned maps; other sets of programs; load, attach, adopt |
//! | `succession` | pins of another layout: what is taken over from them |
//! | `clsact`, `filters` | our filters among those of others; what the kernel has of them |
//! | `interfaces`, `arrival`, `overlay` | the node's devices; those that are not there yet; the overlay's own |
//! | `foreknown` | what the programs go by before the cluster has been heard of |
//! | `nft`, `second_line` | our nftables table: the overlay untracked, and what stands behind `from_pod` |
//! | `state`, `watch`, `config`, `node_ports` | following the node; the programs' configuration |
//! | `tables`, `map_access`, `convert` | maps: typed handles, whole-map reads, model <-> ABI |
//! | `executor`, `cut`, `told`, `nudge`, `trouble` | actions; cutting flows; telling idle pods of it once, or that it fails |
//! | `claim`, `frames`, `packet` | holding an address on the network |
//! | `next_hop` | whether the road to the outside works |
//! | `counters`, `events`, `packet_log` | reading counters, drops, and a line per packet where the object writes one |
//! | `meter`, `port_use` | reading for scrapes beside all else; ports in use |
//! | `sweep`, `cleanup` | expiry; removing every trace |
//! | `pinned`, `attached`, `mappings`, `neighbours`, `survey`, `trace` | what is there, for who looks from outside; a made packet through the programs |

pub mod announce;
pub mod attach;
pub mod cleanup;
pub mod conntrack;
pub mod devices;
pub mod drops;
pub mod error;
pub mod error_log;
pub mod executor;
pub mod loader;
pub mod maps;
pub mod names;
pub mod nftables;
pub mod overlay;
pub mod packet_log;
pub mod report;
pub mod state;
pub mod survey;
pub mod trace;

use crate::attach::foreign;
use crate::conntrack::flush;
use crate::conntrack::gc;
use crate::conntrack::idle_reset;
use crate::devices::late;
use crate::devices::watch;
use crate::loader::features;
use crate::loader::initial_state;
use crate::loader::pins;
use crate::maps::events;
use crate::maps::lease;
use crate::maps::tables;
use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aya::programs::SchedClassifier;
use egress_common::abi::{Timeouts, Tuple};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::info;

pub use crate::cleanup::{CleanupReport, cleanup};
pub use crate::devices::interfaces::Interface;
pub use crate::error::StartError;
pub use crate::loader::features::{Attachment, Features, probe};
pub use crate::maps::counters::{EgressIpCount, Reader};
pub use crate::maps::lease::boot_ns;

use crate::conntrack::reset_history::CutConnections;
use crate::drops::Drops;
use crate::loader::abi_migration::AbiMigration;
use crate::loader::initial_state::{InitialState, OwnAddresses};
use crate::loader::lock::InstanceLock;
use crate::loader::programs::Programs;
use crate::maps::tables::{FlowTables, NodeTables, Tables};
use crate::names::{Device, Pins, SWEEP_PROGRAM};
use crate::nftables::leak_guard::LeakGuard;
use crate::state::State;
use egress_core::model::lease::SharedLease;
use egress_core::plan::executor::Claimant;
use egress_supervise::{self, Task};

/// Which part of `flows` and `nat` one holder may have, in percent; 100 is no limit but that of the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotas {
    pub pod: u32,
    pub policy: u32,
}

impl Quotas {
    pub const DEFAULT: Self = Self { pod: 25, policy: 75 };

    /// In entries, of maps for so many flows.
    fn entries(percent: u32, flows: u32) -> u32 {
        let part = u64::from(flows) * u64::from(percent) / 100;
        if percent >= 100 { u32::MAX } else { u32::try_from(part).unwrap_or(u32::MAX).max(1) }
    }
}

/// What the data plane must be told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Interface towards the outside.
    pub uplink: String,
    /// Interface by which pod traffic enters the host.
    pub mgmt_port: String,
    /// Directory of pins, on a BPF file system.
    pub bpffs: PathBuf,
    /// UDP port of the overlay, the same on all nodes.
    pub tunnel_port: u16,
    /// The cluster's NodePort range, which NAT on the node's own address leaves alone.
    pub node_port_range: RangeInclusive<u16>,
    /// How long entries may be idle.
    pub timeouts: Timeouts,
    /// How many NAT mappings there may be at once on this node.
    pub nat_entries: u32,
    /// Which part of them, and of `flows`, one pod address or one egress policy may hold (percent).
    pub quotas: Quotas,
    /// How many connections from outside it remembers.
    pub inbound_entries: u32,
    /// Whether hosts outside reach pods by the pods' own addresses.
    pub direct_routing: bool,
    /// Whether the programs put plain packets into the overlay, and take them out, themselves. The device does it for
    /// all others, and for all where this is off.
    pub overlay_in_program: bool,
    /// How programs are attached; `None` asks the kernel.
    pub attachment: Option<Attachment>,
    /// What is known of the cluster before it has been heard of, where pods that are not known are dropped from the first packet
    /// on; `None` where they pass until then.
    pub foreknown: Option<InitialState>,
    /// The eBPF object, an ELF file.
    pub object: Cow<'static, [u8]>,
}

impl Settings {
    /// Defaults for everything but the interfaces.
    pub fn new(uplink: impl Into<String>, mgmt_port: impl Into<String>) -> Self {
        Self {
            uplink: uplink.into(),
            mgmt_port: mgmt_port.into(),
            bpffs: names::DEFAULT_BPFFS.into(),
            tunnel_port: names::DEFAULT_TUNNEL_PORT,
            node_port_range: 30000..=32767,
            timeouts: Timeouts::DEFAULT,
            nat_entries: names::DEFAULT_NAT_ENTRIES,
            quotas: Quotas::DEFAULT,
            inbound_entries: names::DEFAULT_INBOUND_ENTRIES,
            direct_routing: false,
            overlay_in_program: true,
            attachment: None,
            foreknown: None,
            object: Cow::Borrowed(crate::loader::object::embedded().unwrap_or_default()),
        }
    }

    /// Entries of a map where that is not what the object says.
    fn map_size(&self, name: &str) -> Option<u32> {
        match name {
            // A mapping has two keys.
            names::NAT_MAP => Some(self.nat_entries.saturating_mul(2)),
            names::FLOWS_MAP => Some(self.nat_entries),
            names::INBOUND_MAP => Some(self.inbound_entries),
            _ => None,
        }
    }

    /// Name of a device on this node.
    fn device(&self, device: Device) -> &str {
        match device {
            Device::Mgmt => &self.mgmt_port,
            Device::Uplink => &self.uplink,
            Device::Overlay => names::OVERLAY_DEVICE,
        }
    }
}

/// The kernel's side of this node, loaded and attached. Dropping it stops the watching, not the programs.
pub struct Dataplane {
    /// First of all: the tasks whose ends these are must know that they are meant.
    _ends: DropGuard,
    shared: Arc<Shared>,
    features: Features,
    /// Others that answer for what this node holds.
    conflicts: UnboundedReceiver<Claimant>,
    drops: Drops,
    /// Connections, watch and events; they end with us.
    _tasks: JoinSet<()>,
    _lock: InstanceLock,
}

/// What the executor and the watch have in common.
pub struct Shared {
    settings: Settings,
    netlink: rtnetlink::Handle,
    state: Mutex<State>,
    tables: Mutex<Tables>,
    flow_tables: Mutex<FlowTables>,
    lease: SharedLease,
    sweep: Mutex<Option<SchedClassifier>>,
    /// Connections that were cut, to `nudge`.
    cut: UnboundedSender<Vec<Tuple>>,
    told: Mutex<CutConnections>,
    second_line: LeakGuard,
    succession: AbiMigration,
}

impl Shared {
    /// Held for a few map writes at most, never over an await or over a walk of a large map: a device that is made anew
    /// waits for it.
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete in itself, so what a panicking holder left is still good.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held for some map writes at most, or a look at all pods; nobody asks for it who holds the state.
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held over walks of large maps: only threads that may be kept ask for it, and nobody does who holds another lock.
    fn flow_tables(&self) -> MutexGuard<'_, FlowTables> {
        self.flow_tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the pods of these connections told that they were cut, as time permits; each once, until something changes.
    fn tell(&self, cut: flush::Cut) {
        // Refused only when the data plane is being dropped.
        let _ends = self.cut.send(self.told().news(cut));
    }

    fn told(&self) -> MutexGuard<'_, CutConnections> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dataplane {
    /// Loads or adopts everything. On an error nothing that carries traffic has changed, and nor has it where this is
    /// dropped while the programs are being loaded, which is what takes time.
    ///
    /// A device that is not there yet gets its programs when it comes.
    pub async fn start(settings: Settings) -> Result<Self, StartError> {
        if settings.object.is_empty() {
            return Err(StartError::NoObject);
        }
        if settings.uplink == settings.mgmt_port {
            return Err(StartError::SameInterface { name: settings.uplink });
        }
        let pins = Pins::new(&settings.bpffs);
        let lock = InstanceLock::take(&pins)?;
        let features = features::probe()?.attaching(settings.attachment)?;
        let mut tasks = JoinSet::new();
        let ends = CancellationToken::new();
        let connected = rtnetlink::new_connection();
        let (connection, netlink, _) = connected.map_err(|error| StartError::kernel("open a netlink socket", error))?;
        tasks.spawn(egress_supervise::until(ends.clone(), Task::Netlink, connection));
        // Listens before it looks, so that no change falls in between.
        let changes =
            watch::listen(&mut tasks, ends.clone()).map_err(|error| StartError::kernel("listen to netlink", error))?;
        // Behind what it is to be dropped before.
        let guard = ends.clone().drop_guard();
        // What is wrong with these pins is said before what is wrong with others, and a refusal makes no directory. It needs no
        // device.
        let fit = pins::check(&pins, &settings)?;
        let succession = AbiMigration::look(&pins)?;
        late::names(&settings)?;
        foreign::refuse(&settings, &pins, &succession)?;
        let look = |error| StartError::kernel("look at the node's interfaces", error);
        let facts = watch::gather(&netlink, &settings).await.map_err(look)?;
        let versions: Vec<_> = succession.others().iter().cloned().chain([pins.version()]).collect();
        late::elsewhere(&settings, &facts, &versions)?;
        let made = pins::make(&pins, fit)?;
        // What was set aside is another layout by now.
        let succession = AbiMigration::look(&pins)?;
        let overlay = overlay::ensure(&netlink, settings.tunnel_port).await?;

        let mut programs = Programs::load(&settings, &pins, features.attachment).await?;
        packet_log::start(programs.ebpf_mut(), &mut tasks);
        let events = tables::events(programs.ebpf_mut())?;
        let mut tables = Tables::take(programs.ebpf_mut())?;
        let flow_tables = FlowTables::take(programs.ebpf_mut())?;
        let node_tables = NodeTables::take(programs.ebpf_mut())?;
        let sweep = programs.sweep().map_err(|error| StartError::Object(format!("{SWEEP_PROGRAM}: {error}")))?;
        let facts = watch::gather(&netlink, &settings).await.map_err(look)?;
        if let Some(known) = settings.foreknown.as_ref().filter(|_| !node_tables.are_configured()) {
            let own = OwnAddresses::read(&netlink, &facts).await.map_err(look)?;
            initial_state::write(&mut tables, known, &own)
                .map_err(|error| StartError::kernel("write what is known of this node's pods", error))?;
        }
        let lease = lease::take(programs.ebpf_mut())?;
        let mut state = State::new(programs, node_tables, (&tables, &flow_tables), lease.clone())?;
        state.begin(&settings, facts, &tables, succession.is_open())?;
        // What is refused from here on is so by a hook, with programs on others.
        succession.inherit(&pins)?;
        made.keep();
        state.attach(&settings)?;
        let (cut, told) = unbounded_channel();
        let (heard, conflicts) = unbounded_channel();
        state.claims.report_to(heard);
        let shared = Arc::new(Shared {
            settings,
            netlink: netlink.clone(),
            state: Mutex::new(state),
            tables: Mutex::new(tables),
            flow_tables: Mutex::new(flow_tables),
            lease,
            sweep: Mutex::new(sweep),
            cut,
            told: Mutex::new(CutConnections::default()),
            second_line: LeakGuard::default(),
            succession,
        });
        // Before the overlay carries anything that connection tracking would follow.
        shared.second_line.install(&shared);
        overlay::bring_up(&shared.netlink, overlay.index, shared.settings.tunnel_port).await?;
        let mut spawn =
            |task, run: BoxFuture<'static, ()>| tasks.spawn(egress_supervise::until(ends.clone(), task, run));
        let drops = Drops::default();
        spawn(Task::DeviceWatch, watch::run(Arc::clone(&shared), changes).boxed());
        spawn(Task::DropEvents, events::run(events, drops.clone(), Arc::clone(&shared)).boxed());
        spawn(Task::Sweep, gc::run(Arc::clone(&shared)).boxed());
        spawn(Task::IdleReset, idle_reset::run(Arc::clone(&shared), told).boxed());
        info!(attachment = ?features.attachment, "data plane is up");
        Ok(Self { _ends: guard, shared, features, conflicts, drops, _tasks: tasks, _lock: lock })
    }

    /// What the kernel can do.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Sampled drops, as they come.
    pub fn drops(&self) -> Drops {
        self.drops.clone()
    }

    /// The uplink as it is now; `None` while it is away.
    pub fn uplink(&self) -> Option<Interface> {
        self.shared.state().facts().uplink
    }
}
