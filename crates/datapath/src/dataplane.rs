//! Start of the data plane, and the handle to what it started.

use std::io;
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch::Receiver;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::info;

use crate::attach::{foreign, missing_devices};
use crate::conntrack::{gc, idle_reset};
use crate::devices::interfaces::{FurtherNextHops, Interface};
use crate::error::StartError;
use crate::events;
use crate::events::drops::Drops;
use crate::events::packet_log;
use crate::loader::abi_migration::AbiMigration;
use crate::loader::features::{self, Features};
use crate::loader::initial_state::{self, OwnAddresses};
use crate::loader::lock::InstanceLock;
use crate::loader::pins;
use crate::loader::programs::Programs;
use crate::maps::handles::{self, FlowMaps, NodeMaps, PolicyMaps};
use crate::maps::lease;
use crate::names::{Pins, SWEEP_PROGRAM};
use crate::node_state::leak_guard::LeakGuard;
use crate::node_state::reset_history::ResetHistory;
use crate::node_state::shared::Shared;
use crate::node_state::{State, watch};
use crate::overlay;
use crate::settings::Settings;
use egress_core::model::interface::EgressInterface;
use egress_core::plan::executor::AddressClaim;
use egress_supervise::{self, Task};

/// The data plane of this node, loaded and attached. Drop stops its tasks, not the programs.
pub struct Dataplane {
    /// Dropped first, so that the tasks know that their end is intended.
    _ends: DropGuard,
    pub(crate) shared: Arc<Shared>,
    features: Features,
    /// Tasks of the held addresses.
    pub(crate) conflicts: UnboundedReceiver<AddressClaim>,
    drops: Drops,
    /// Connections, watch and events; they end with this value.
    _tasks: JoinSet<()>,
    _lock: InstanceLock,
}

impl Dataplane {
    /// Loads or adopts everything. An error, or a drop while the programs are loading, changes nothing that carries
    /// traffic.
    ///
    /// A missing device gets its programs when it appears.
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
        // Subscribes before the first read, so that no change is missed.
        let changes =
            watch::listen(&mut tasks, ends.clone()).map_err(|error| StartError::kernel("listen to netlink", error))?;
        // Declared after what must outlive it.
        let guard = ends.clone().drop_guard();
        // Errors of these pins are reported before others, and a refusal creates no directory. This needs no device.
        let fit = pins::check(&pins, &settings)?;
        let abi_migration = AbiMigration::look(&pins)?;
        missing_devices::names(&settings)?;
        let look = |error| StartError::kernel("look at the node's interfaces", error);
        let facts = watch::gather(&netlink, &settings).await.map_err(look)?;
        foreign::refuse((&settings, &facts.interfaces), &pins, abi_migration.others())?;
        let versions: Vec<_> = abi_migration.others().iter().cloned().chain([pins.version()]).collect();
        missing_devices::elsewhere(&settings, &facts, &versions)?;
        missing_devices::pods_elsewhere(&settings, &facts)?;
        let made = pins::make(&pins, fit)?;
        // A directory that was set aside counts as another layout now.
        let abi_migration = AbiMigration::look(&pins)?;
        let overlay = overlay::ensure(&netlink, settings.tunnel_port).await?;

        let mut programs = Programs::load(&settings, &pins, features.attachment).await?;
        packet_log::start(programs.ebpf_mut(), &mut tasks);
        let events = handles::events(programs.ebpf_mut())?;
        let mut policy_maps = PolicyMaps::take(programs.ebpf_mut())?;
        let sweep = programs.sweep().map_err(|error| StartError::Object(format!("{SWEEP_PROGRAM}: {error}")))?;
        let sweep = sweep.ok_or(StartError::NotInObject { what: "program", name: SWEEP_PROGRAM })?;
        let mut flow_maps = FlowMaps::take(programs.ebpf_mut(), sweep)?;
        let node_maps = NodeMaps::take(programs.ebpf_mut())?;
        let facts = watch::gather(&netlink, &settings).await.map_err(look)?;
        if let Some(known) = settings.initial_state.as_ref().filter(|_| !node_maps.are_configured()) {
            let own = OwnAddresses::read(&netlink, &facts).await.map_err(look)?;
            initial_state::write(&mut policy_maps, known, &own)
                .map_err(|error| StartError::kernel("write what is known of this node's pods", error))?;
        }
        let lease = lease::take(programs.ebpf_mut())?;
        let mut state = State::new(programs, node_maps, (&policy_maps, &flow_maps), lease.clone())?;
        state.begin(&settings, facts, &policy_maps, features.packet_layout, abi_migration.is_open())?;
        if settings.port_block != 0 {
            let forgotten = flow_maps.blocks.forget_others(settings.port_block);
            forgotten.map_err(|error| StartError::kernel("remove port blocks of another size", error))?;
        }
        // From here on only a hook can refuse, after programs were attached to others.
        abi_migration.take_over(&pins)?;
        made.keep();
        state.attach(&settings)?;
        let (reset_requests, idle_resets) = unbounded_channel();
        let (conflict_reports, conflicts) = unbounded_channel();
        state.claims.report_to(conflict_reports);
        let shared = Arc::new(Shared {
            settings,
            netlink: netlink.clone(),
            state: Mutex::new(state),
            policy_maps: Mutex::new(policy_maps),
            flow_maps: Mutex::new(flow_maps),
            lease,
            reset_requests,
            reset_history: Mutex::new(ResetHistory::default()),
            leak_guard: LeakGuard::default(),
            networks: Mutex::default(),
            abi_migration,
        });
        // Before the overlay carries traffic that connection tracking would record.
        shared.leak_guard.install(&shared);
        overlay::bring_up(&shared.netlink, overlay.index, shared.settings.tunnel_port).await?;
        let mut spawn =
            |task, run: BoxFuture<'static, ()>| tasks.spawn(egress_supervise::until(ends.clone(), task, run));
        let drops = Drops::default();
        spawn(Task::DeviceWatch, watch::run(Arc::clone(&shared), changes).boxed());
        spawn(Task::DropEvents, events::run(events, drops.clone(), Arc::clone(&shared)).boxed());
        spawn(Task::Sweep, gc::run(Arc::clone(&shared)).boxed());
        spawn(Task::IdleReset, idle_reset::run(Arc::clone(&shared), idle_resets).boxed());
        info!(attachment = ?features.attachment, "data plane is up");
        Ok(Self { _ends: guard, shared, features, conflicts, drops, _tasks: tasks, _lock: lock })
    }

    /// What the kernel can do.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Stream of sampled drops.
    pub fn drops(&self) -> Drops {
        self.drops.clone()
    }

    /// The current uplink; `None` while it is missing.
    pub fn uplink(&self) -> Option<Interface> {
        self.shared.state().facts().uplink
    }

    /// The records of the egress interfaces, as they change.
    pub fn interfaces(&self) -> Receiver<Vec<EgressInterface>> {
        self.shared.state().interfaces()
    }

    /// The watch of the further interfaces' gateways.
    pub fn next_hops(&self) -> FurtherNextHops {
        self.shared.state().next_hops()
    }

    /// Removes idle entries at once; returns the number of keys. Also reads the host's port ranges.
    pub fn sweep(&self) -> io::Result<u32> {
        self.shared.follow_ports()?;
        self.shared.sweep()
    }
}
