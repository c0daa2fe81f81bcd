//! What the agent knows of its kernel side, and how it follows the node: one value behind one lock.

pub mod config;
pub mod leak_guard;
pub mod owned;
pub mod reset_history;
pub mod shared;
pub mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use egress_common::abi::{Addr, Config, Cover, Family, OnUnknownPod, PortRange};
use ipnet::IpNet;
use tokio::sync::watch::{Receiver, Sender, channel};
use tracing::{info, warn};

use crate::announce::Claims;
use crate::attach::missing_devices;
use crate::clock::now_ns;
use crate::devices::interfaces::NodeFacts;
use crate::devices::node_ports::{HostPorts, Seen};
use crate::error::{StartError, map_io};
use crate::loader::programs::{AttachError, Programs};
use crate::maps::convert;
use crate::maps::facts::HookFacts;
use crate::maps::tables::{FlowTables, NodeTables, Tables};
use crate::names::{Device, Hook};
use crate::settings::{Quotas, Settings};
use egress_core::model::lease::SharedLease;
use egress_core::plan::executor::Expected;

pub struct State {
    programs: Programs,
    pub tables: NodeTables,
    pub claims: Claims,
    /// What the claims of the present plan may count on.
    pub expected: Expected,
    facts: NodeFacts,
    /// What is owned may not have been written for this uplink yet.
    owned_elsewhere: bool,
    /// As last written.
    config: Config,
    decisions: config::Decisions,
    /// Which ports the host takes for itself.
    host_ports: HostPorts,
    /// Family of the overlay's outer packets.
    underlay: Family,
    /// How many entries the map `inbound` may have.
    inbound_limit: u32,
    /// Whether it was said that the uplink is too narrow for IPv6 in the overlay.
    said_narrow: bool,
    /// Devices whose absence has been reported.
    missing: BTreeSet<Device>,
    /// The cluster has not been heard of: what stands in for it follows the node (`foreknown`).
    in_initial_state: bool,
    /// Addresses that nobody answered for, and when.
    probed: BTreeMap<IpAddr, Instant>,
    /// Early probes. The channel of one is closed when it has ended.
    probes: BTreeMap<IpAddr, Receiver<()>>,
}

/// How long packets of pods that are not known pass after the last time that they were said to be followed: an agent that is
/// killed leaves little time in which a selected pod could start unseen.
const PASS_FOR_SECS: u64 = 3;
/// How long a probe ahead of a claim is believed.
const PROBE_HOLDS: Duration = Duration::from_secs(5);

impl State {
    pub fn new(
        programs: Programs,
        tables: NodeTables,
        (others, of_flows): (&Tables, &FlowTables),
        lease: SharedLease,
    ) -> Result<Self, StartError> {
        let wrap = |error| StartError::kernel("read map config", map_io(error));
        let mut config = tables.config.get(&0, 0).map_err(wrap)?;
        let named = own_names(others).map_err(|error| StartError::kernel("read map nodes", error))?;
        // A former agent may have been killed between the two writes.
        let underlay = match name_among(&named, &config) {
            Some(name) => {
                config.self_node = Addr::from(name);
                family(name)
            }
            None => Family::V4,
        };
        Ok(Self {
            programs,
            tables,
            claims: Claims::under(lease),
            expected: Expected::default(),
            facts: NodeFacts::default(),
            owned_elsewhere: false,
            decisions: config::Decisions::after(config.decisions),
            config,
            host_ports: HostPorts::new(),
            underlay,
            inbound_limit: of_flows.inbound.limit(),
            said_narrow: false,
            missing: BTreeSet::new(),
            in_initial_state: false,
            probed: BTreeMap::new(),
            probes: BTreeMap::new(),
        })
    }

    pub fn in_initial_state(&self) -> bool {
        self.in_initial_state
    }

    /// The model looks: what it finds it keeps or replaces.
    pub fn end_initial_state(&mut self) {
        self.in_initial_state = false;
    }

    pub fn facts(&self) -> &NodeFacts {
        &self.facts
    }

    /// `None` before the model has said it: the programs leave everything alone until then.
    pub fn on_unknown_pod(&self) -> Option<OnUnknownPod> {
        (self.config.generation != 0).then(|| self.config.on_unknown_pod())
    }

    /// First look at the node: configuration and owned addresses. `succeeds` where the programs take the place of others before
    /// the model has said anything.
    pub fn begin(
        &mut self,
        settings: &Settings,
        facts: NodeFacts,
        others: &Tables,
        succeeds: bool,
    ) -> Result<(), StartError> {
        let mut config = config::with_facts(self.config, &facts, self.underlay);
        // From the first packet on: until the model says it, nobody can tell whose traffic it is.
        self.in_initial_state = settings.initial_state.is_some() && config.generation == 0;
        if settings.initial_state.is_some() || (succeeds && config.generation == 0) {
            config = config.with_on_unknown_pod(OnUnknownPod::Drop);
            config.generation = config::next_generation(config.generation);
        }
        config.tunnel_port = settings.tunnel_port.into();
        config.node_ports = self.node_ports(settings, config::host_ports());
        config::warn_of_few(config.node_ports);
        config.timeouts = settings.timeouts;
        config.inbound_size = self.inbound_limit;
        config.pod_quota = Quotas::entries(settings.quotas.pod, settings.nat_entries);
        config.policy_quota = Quotas::entries(settings.quotas.policy, settings.nat_entries);
        config.direct_routing = settings.direct_routing.into();
        // Kept over restarts: the maps are too, so nothing is missed in between.
        if config.following_since_secs == 0 {
            let now_ns = now_ns().map_err(|error| StartError::kernel("read the clock", error))?;
            config.following_since_secs = u32::try_from(now_ns / 1_000_000_000).unwrap_or(u32::MAX);
        }
        config.overlay_secret = config::overlay_secret(&config, settings.overlay_in_program)
            .map_err(|error| StartError::kernel("read random bytes", error))?;
        config.redirected =
            config::redirected(&config).map_err(|error| StartError::kernel("read random bytes", error))?;
        config = covered(config, others).map_err(|error| StartError::kernel("read the maps of pods", error))?;
        config.owned =
            owned::bloom_filter(&self.tables).map_err(|error| StartError::kernel("read the owned addresses", error))?;
        // Routes may have changed while no agent was looking.
        config.route_generation = config::next_generation(config.route_generation);
        self.facts = facts;
        self.write_config(config).map_err(|error| StartError::kernel("write map config", error))?;
        // Flows are asked about anew behind it, whatever an earlier run left undone.
        self.adopt_owned(settings).map_err(|error| StartError::kernel("write the owned addresses", error))
    }

    /// Puts all programs on their hooks. What cannot be is an error here.
    pub fn attach(&mut self, settings: &Settings) -> Result<(), StartError> {
        for hook in Hook::ALL {
            let Some(device) = self.facts.device(hook.device()) else {
                self.note_missing(settings, hook.device());
                continue;
            };
            self.programs
                .attach(hook, settings.device(hook.device()), device.index)
                .map_err(|error| StartError::Attach { hook: hook.name(), reason: error.to_string() })?;
        }
        for (what, outcome) in self.programs.retire_elsewhere() {
            match outcome {
                Ok(true) => info!("{what} of a former run removed"),
                Ok(false) => {}
                Err(error) => warn!(%error, "cannot remove what a former run has left: {what}"),
            }
        }
        Ok(())
    }

    /// The node looks like this now. `verify` also asks the kernel whether the programs are still on their hooks.
    pub fn follow(&mut self, settings: &Settings, facts: NodeFacts, verify: bool) -> io::Result<()> {
        let mut config = config::with_facts(self.config, &facts, self.underlay);
        self.owned_elsewhere |= facts.uplink != self.facts.uplink;
        let carrier_back = facts.carrier && !self.facts.carrier;
        self.facts = facts;
        let written = if config == self.config {
            Ok(())
        } else {
            config.route_generation = config::next_generation(config.route_generation);
            self.write_config(config)
        };
        // Whatever else fails, and before anything that takes time: a device without its program is open.
        for hook in Hook::RETURN_ORDER {
            self.follow_hook(settings, hook, verify);
        }
        written?;
        if self.owned_elsewhere {
            self.move_owned(settings)?;
            self.owned_elsewhere = false;
        }
        if let (true, Some(uplink)) = (carrier_back, self.facts.uplink) {
            self.claims.announce_all(uplink);
        }
        Ok(())
    }

    /// Nobody asks for the word by which `from_pod` says that it has seen a packet.
    pub fn disable_leak_guard(&mut self) -> io::Result<()> {
        let mut config = self.config;
        config.seen = 0;
        self.write_config(config)
    }

    /// Somebody is going to ask for it: the priority that bears it.
    pub fn enable_leak_guard(&mut self) -> io::Result<u32> {
        let config = config::with_leak_guard(self.config)?;
        if config != self.config {
            self.write_config(config)?;
        }
        config.seen_priority().ok_or_else(|| io::Error::other("a random number is zero"))
    }

    /// The host's settings say this of its ports now. Those of NAT on the node's own address, where they are others than
    /// before.
    pub fn follow_ports(&mut self, settings: &Settings, seen: Seen) -> io::Result<Option<PortRange>> {
        let node_ports = self.node_ports(settings, seen);
        if self.config.node_ports == node_ports {
            return Ok(None);
        }
        let mut config = self.config;
        config.node_ports = node_ports;
        self.write_config(config)?;
        Ok(Some(node_ports))
    }

    fn node_ports(&mut self, settings: &Settings, seen: Seen) -> PortRange {
        config::warn_of_unreadable(&self.host_ports.follow(seen));
        config::node_ports(settings, &self.host_ports)
    }

    fn follow_hook(&mut self, settings: &Settings, hook: Hook, verify: bool) {
        let name = settings.device(hook.device());
        let Some(device) = self.facts.device(hook.device()) else {
            self.programs.forget(hook);
            self.note_missing(settings, hook.device());
            return;
        };
        if self.programs.ifindex(hook) == Some(device.index)
            && (!verify || self.programs.is_alive(hook, name, device.index))
        {
            return;
        }
        match self.programs.attach(hook, name, device.index) {
            Ok(is_new) => {
                self.missing.remove(&hook.device());
                if is_new {
                    info!(interface = name, hook = hook.name(), "attached again");
                }
            }
            // The device may be gone again; its next event, or the next check, tries anew.
            Err(error) => warn_attach(name, hook, &error),
        }
    }

    fn note_missing(&mut self, settings: &Settings, device: Device) {
        if self.missing.insert(device) {
            warn!("{}", missing_devices::line(device, settings.device(device)));
        }
    }

    /// Of the hook's program, and of its statistics where the kernel keeps them.
    pub fn hook_facts(&mut self, settings: &Settings, hook: Hook, has_statistics: bool) -> HookFacts {
        let (attached, device) = (self.programs.ifindex(hook).is_some(), hook.device());
        let awaits = self.missing.contains(&device).then(|| missing_devices::line(device, settings.device(device)));
        HookFacts { attached, awaits, runs: has_statistics.then(|| self.programs.runs(hook)).flatten() }
    }

    /// The overlay device, where it is down although its program is there.
    pub fn overlay_to_bring_up(&self) -> Option<u32> {
        let index = self.facts.overlay?.index;
        (!self.facts.overlay_up && self.programs.ifindex(Hook::FromOverlay) == Some(index)).then_some(index)
    }

    /// An early probe for the address begins; it has ended when this is dropped.
    pub fn begin_probe(&mut self, address: IpAddr) -> Sender<()> {
        let (sender, ended) = channel(());
        self.probes.retain(|_, ended| ended.has_changed().is_ok());
        self.probes.insert(address, ended);
        sender
    }

    /// The end of the early probe for the address, where there was one of late.
    pub fn probe_end(&self, address: IpAddr) -> Option<Receiver<()>> {
        self.probes.get(&address).cloned()
    }

    /// Nobody answered for the address just now, or nobody need be asked.
    pub fn note_probed(&mut self, address: IpAddr) {
        self.probed.retain(|_, when| when.elapsed() < PROBE_HOLDS);
        self.probed.insert(address, Instant::now());
    }

    pub fn is_probed(&self, address: IpAddr) -> bool {
        self.probed.get(&address).is_some_and(|when| when.elapsed() < PROBE_HOLDS)
    }

    /// Whether the address was probed for just now; believed once.
    pub fn take_probed(&mut self, address: IpAddr) -> bool {
        self.probed.remove(&address).is_some_and(|when| when.elapsed() < PROBE_HOLDS)
    }

    /// Pods may have addresses of this prefix from now on.
    pub fn cover(&mut self, net: &IpNet) -> io::Result<()> {
        let config = config::covering(self.config, net);
        if config == self.config { Ok(()) } else { self.write_config(config) }
    }

    /// Flows are asked about anew.
    pub fn raise_decisions(&mut self) -> io::Result<()> {
        let mut config = self.config;
        config.decisions = self.decisions.next(now_ns()?);
        self.write_config(config)
    }

    pub fn set_on_unknown_pod(&mut self, on: OnUnknownPod) -> io::Result<()> {
        let mut config = self.config.with_on_unknown_pod(on);
        config.generation = config::next_generation(config.generation);
        self.write_config(config)?;
        self.follows(true)
    }

    /// Packets of pods that are not known may pass for some time from now on, or no more, where it depends on that.
    pub fn follows(&mut self, is_so: bool) -> io::Result<()> {
        if self.config.on_unknown_pod() != OnUnknownPod::PassWhileFollowed {
            return Ok(());
        }
        let until = now_ns()? / 1_000_000_000 + PASS_FOR_SECS;
        let pass_until_secs = if is_so { u32::try_from(until).unwrap_or(u32::MAX) } else { 0 };
        let mut config = self.config;
        config.pass_until_secs = pass_until_secs;
        self.write_config(config)
    }

    /// Cached next hops are looked up again.
    pub fn raise_route_generation(&mut self) -> io::Result<()> {
        let mut config = self.config;
        config.route_generation = config::next_generation(config.route_generation);
        self.write_config(config)
    }

    /// The node's own tunnel endpoint names it in the maps and tells the family of the overlay's outer packets.
    pub fn set_underlay(&mut self, endpoint: IpAddr) -> io::Result<()> {
        self.underlay = family(endpoint);
        let mut config = config::with_facts(self.config, &self.facts, self.underlay);
        config.self_node = Addr::from(endpoint);
        if config == self.config { Ok(()) } else { self.write_config(config) }
    }

    /// An address of this node has gone, and these are the names that the others give it: where the one in use is none of
    /// them it went with that address.
    pub fn follow_names(&mut self, named: &BTreeSet<IpAddr>) -> io::Result<()> {
        name_among(named, &self.config).map_or(Ok(()), |name| self.set_underlay(name))
    }

    fn write_config(&mut self, config: Config) -> io::Result<()> {
        self.tables.config.set(0, config, 0).map_err(map_io)?;
        self.config = config;
        let is_narrow = config::is_too_narrow(&config, self.underlay);
        if is_narrow && !self.said_narrow {
            config::warn_of_narrow(&config);
        }
        self.said_narrow = is_narrow;
        Ok(())
    }
}

/// Covers for what the maps hold.
fn covered(config: Config, tables: &Tables) -> io::Result<Config> {
    let mut config = config;
    (config.pods_v4, config.pods_v6) = (Cover::NONE, Cover::NONE);
    let see = |address: &Addr, _: &_| config = config::covering(config, &IpNet::from(address.to_ip()));
    tables.pods.for_each(see)?;
    tables.cluster.for_each(|key, value| {
        if let (Some(net), Some(prefix)) = (convert::cluster_net(key), convert::prefix(value))
            && convert::holds_pods(prefix)
        {
            config = config::covering(config, &net);
        }
    })?;
    Ok(config)
}

/// The tunnel endpoints that entries of this node's own addresses name: while it changes, two of them.
pub fn own_names(tables: &Tables) -> io::Result<BTreeSet<IpAddr>> {
    let mut named = BTreeSet::new();
    tables.nodes.for_each(|_, entry| {
        let seen = convert::node(entry);
        if seen.own {
            named.insert(seen.node.0);
        }
    })?;
    Ok(named)
}

/// The one in use as long as any entry names it: of two, nobody can say here which is the newer.
fn name_among(named: &BTreeSet<IpAddr>, config: &Config) -> Option<IpAddr> {
    named.iter().find(|name| Addr::from(**name) == config.self_node).or(named.first()).copied()
}

fn family(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

fn warn_attach(name: &str, hook: Hook, error: &AttachError) {
    warn!(%error, interface = name, hook = hook.name(), "cannot attach; trying again");
}
