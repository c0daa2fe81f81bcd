//! State of the node: what the agent knows of its devices, programs and the value of map `config`.
//!
//! One [`State`] behind one lock ([`shared`]). The netlink watch ([`watch`]) and the executor change it.

pub mod config;
pub mod leak_guard;
pub mod owned;
pub mod reset_history;
pub mod shared;
pub mod watch;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use aya::maps::lpm_trie::Key;
use egress_common::abi::{
    Addr, Config, Cover, Family, NeighbourEntry, NeighbourKey, OnUnknownPod, PacketLayout, PortRange,
};
use ipnet::IpNet;
use tokio::sync::watch::{Receiver, Sender, channel};
use tracing::{info, warn};

use crate::announce::Claims;
use crate::attach::missing_devices;
use crate::clock::now_ns;
use crate::devices::interfaces::{FurtherNextHops, Interface, InterfaceGateways, NodeFacts};
use crate::devices::node_ports::{HostPorts, PortSettings};
use crate::devices::vlans::VlanProblems;
use crate::error::{StartError, map_io};
use crate::loader::programs::{AttachError, Programs};
use crate::maps::convert;
use crate::maps::facts::HookFacts;
use crate::maps::handles::{FlowMaps, NodeMaps, PolicyMaps};
use crate::names::{AttachPoint, Device, Hook};
use crate::settings::{Quotas, Settings};
use egress_core::model::interface::{self, EgressInterface};
use egress_core::model::lease::SharedLease;
use egress_core::model::node::Mac;
use egress_core::model::state::SharedWith;
use egress_core::plan::executor::Expected;
use egress_core::vlans::Vlans;

pub struct State {
    programs: Programs,
    pub maps: NodeMaps,
    pub claims: Claims,
    /// What the claims of the current plan may rely on.
    pub expected: Expected,
    facts: NodeFacts,
    /// The interfaces changed and the owned entries may still name the former ones.
    owned_elsewhere: bool,
    /// The records of the egress interfaces, which the agent publishes.
    interfaces: Sender<Vec<EgressInterface>>,
    /// Further interfaces with their gateways, and those of which none answers.
    gateways: Sender<Vec<InterfaceGateways>>,
    lost: Sender<BTreeSet<u32>>,
    /// The VLANs that need a device; `None` before the first plan.
    vlans: Sender<Option<Vlans>>,
    vlan_problems: VlanProblems,
    /// As last written.
    config: Config,
    decisions: config::DecisionNumbers,
    /// The host's own ports.
    host_ports: HostPorts,
    /// Family of the overlay's outer packets.
    underlay: Family,
    /// Size of the map `inbound`.
    inbound_limit: u32,
    /// Whether the log already warns that the uplink is too narrow for IPv6 in the overlay.
    said_narrow: bool,
    /// Devices whose absence has been reported.
    missing: BTreeSet<Device>,
    /// No state from the API server yet: the initial state follows the node (`loader::initial_state`).
    in_initial_state: bool,
    /// Addresses for which no host answered a probe, and when.
    probed: BTreeMap<IpAddr, Instant>,
    /// Early probes. The channel closes when the probe ends.
    probes: BTreeMap<IpAddr, Receiver<()>>,
}

/// How long packets of unknown pods pass after the last report that pods are followed. Short, so that after a kill of the
/// agent a selected pod has little time to start unseen.
const PASS_FOR_SECS: u64 = 3;
/// How long the result of an early probe is valid.
const PROBE_HOLDS: Duration = Duration::from_secs(5);

impl State {
    pub fn new(
        programs: Programs,
        maps: NodeMaps,
        (others, of_flows): (&PolicyMaps, &FlowMaps),
        lease: SharedLease,
    ) -> Result<Self, StartError> {
        let wrap = |error| StartError::kernel("read map config", map_io(error));
        let mut config = maps.config.get(&0, 0).map_err(wrap)?;
        let named = own_names(others).map_err(|error| StartError::kernel("read map nodes", error))?;
        // The former agent may have died between the two writes.
        let underlay = match name_among(&named, &config) {
            Some(name) => {
                config.self_node = Addr::from(name);
                family(name)
            }
            None => Family::V4,
        };
        Ok(Self {
            programs,
            maps,
            claims: Claims::under(lease),
            expected: Expected::default(),
            facts: NodeFacts::default(),
            owned_elsewhere: false,
            interfaces: Sender::default(),
            gateways: Sender::default(),
            lost: Sender::default(),
            vlans: Sender::default(),
            vlan_problems: VlanProblems::new(),
            decisions: config::DecisionNumbers::after(config.decisions),
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

    /// Ends the initial state: the plan observes the maps from here on, and keeps or replaces their entries.
    pub fn end_initial_state(&mut self) {
        self.in_initial_state = false;
    }

    pub fn facts(&self) -> &NodeFacts {
        &self.facts
    }

    /// `None` before the first plan: the programs leave all packets alone until then.
    pub fn on_unknown_pod(&self) -> Option<OnUnknownPod> {
        (self.config.generation != 0).then(|| self.config.on_unknown_pod())
    }

    /// Writes the configuration and adopts the owned addresses. `succeeds` is set if these programs replace those of
    /// another layout, before the first plan.
    pub fn begin(
        &mut self,
        settings: &Settings,
        facts: NodeFacts,
        others: &PolicyMaps,
        packet_layout: PacketLayout,
        succeeds: bool,
    ) -> Result<(), StartError> {
        let mut config = config::with_facts(self.config, &facts, self.underlay);
        // Drop from the first packet on: before the first plan the agent cannot tell which pods are selected.
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
        config.random_ports = settings.random_ports.into();
        config.port_block = settings.port_block;
        config.packet_layout = packet_layout;
        // Kept across restarts, like the maps: no change is missed in between.
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
            owned::bloom_filter(&self.maps).map_err(|error| StartError::kernel("read the owned addresses", error))?;
        // Routes may have changed while no agent ran.
        config.route_generation = config::next_generation(config.route_generation);
        self.facts = facts;
        self.write_config(config).map_err(|error| StartError::kernel("write map config", error))?;
        let written = self.write_interfaces().and_then(|()| self.write_next_hops());
        written.map_err(|error| StartError::kernel("write the maps of further interfaces", error))?;
        // Raises the decision number, so that flows are decided again, whatever the former run left undone.
        self.adopt_owned().map_err(|error| StartError::kernel("write the owned addresses", error))
    }

    /// The interface that hosts an egress IP of this node.
    pub fn interface_of(&self, address: IpAddr) -> Option<Interface> {
        self.facts.interface_of(address, &self.expected.primary_networks)
    }

    /// The same for an address that may be shared. A Service's may be in no network of the node: what leads to it is not the
    /// node's concern, and it leaves by the uplink then. So does an address of the host on an interface without programs; one
    /// that the host lacks is on none.
    pub fn interface_of_owned(&self, address: IpAddr, shared_with: Option<SharedWith>) -> Option<Interface> {
        if shared_with == Some(SharedWith::Host) && !self.facts.addresses.contains(&address) {
            return Some(Interface { index: 0, mac: [0; 6], mtu: 0 });
        }
        self.interface_of(address).or(self.facts.uplink.filter(|_| shared_with.is_some()))
    }

    /// Sets what the next claims may rely on. Other networks of the uplink may change where owned addresses belong.
    pub fn expect(&mut self, expected: Expected) -> io::Result<()> {
        let is_other = self.expected.primary_networks != expected.primary_networks;
        self.expected = expected;
        self.owned_elsewhere |= is_other;
        self.follow_interfaces()
    }

    /// Attaches all programs to their hooks. A failure is an error here, except on a further interface, which then hosts no
    /// egress IP.
    pub fn attach(&mut self, settings: &Settings) -> Result<(), StartError> {
        self.note_missing(settings);
        for place in self.facts.places(Hook::ALL) {
            match self.programs.attach(place) {
                Err(error) if place.is_further => self.warn_attach(settings, place, &error),
                Err(error) => {
                    return Err(StartError::Attach { hook: place.hook.name(), reason: error.to_string() });
                }
                Ok(_) => {}
            }
        }
        self.note_attached();
        for (what, outcome) in self.programs.retire_elsewhere() {
            match outcome {
                Ok(true) => info!("{what} of a former run removed"),
                Ok(false) => {}
                Err(error) => warn!(%error, "cannot remove what a former run has left: {what}"),
            }
        }
        Ok(())
    }

    /// Applies the node's current facts. `verify` also asks the kernel whether the programs are still on their hooks.
    pub fn follow(&mut self, settings: &Settings, facts: NodeFacts, verify: bool) -> io::Result<()> {
        let mut config = config::with_facts(self.config, &facts, self.underlay);
        let former = std::mem::replace(&mut self.facts, facts);
        let addresses = self.write_interfaces().and_then(|()| self.write_next_hops());
        let written = if config == self.config {
            Ok(())
        } else {
            config.route_generation = config::next_generation(config.route_generation);
            self.write_config(config)
        };
        // First, and independent of other failures: packets pass a device without its program.
        self.follow_hooks(settings, verify);
        self.note_attached();
        self.owned_elsewhere |= former.hosts() != self.facts.hosts();
        if former.addresses != self.facts.addresses {
            self.owned_elsewhere |= self.uses_hosts_addresses().unwrap_or(true);
            // So that the node's networks are published.
            self.interfaces.send_modify(|_| {});
        }
        written?;
        addresses?;
        self.follow_interfaces()?;
        let usable = self.facts.usable();
        self.claims.retain_interfaces(&self.facts.interface_indices());
        self.claims.announce_on(&usable.difference(&former.usable()).copied().collect());
        Ok(())
    }

    /// Makes the map `interfaces` equal to the facts.
    fn write_interfaces(&mut self) -> io::Result<()> {
        let wanted = config::interface_addresses(&self.facts);
        let mut there = BTreeMap::new();
        self.maps.interfaces.for_each(|index, addresses| {
            there.insert(*index, *addresses);
        })?;
        for index in there.keys().filter(|index| !wanted.contains_key(index)) {
            self.maps.interfaces.remove(index)?;
        }
        for (index, addresses) in wanted.iter().filter(|(index, addresses)| there.get(index) != Some(addresses)) {
            self.maps.interfaces.put(index, addresses)?;
        }
        Ok(())
    }

    /// Makes the maps `routes` and `neighbours` equal to the facts. What is new comes first: without it a packet would take a
    /// shorter prefix.
    fn write_next_hops(&mut self) -> io::Result<()> {
        let mut there = HashMap::new();
        self.maps.routes.for_each(|key, entry| {
            there.insert((key.prefix_len(), key.data()), *entry);
        })?;
        let mut put = Ok(());
        for ((ifindex, net), entry) in &self.facts.routes {
            let key = convert::route_key(*ifindex, net);
            if there.remove(&(key.prefix_len(), key.data())).as_ref() != Some(entry) {
                put = put.and(self.maps.routes.put(&key, entry));
            }
        }
        for (length, target) in there.into_keys() {
            self.maps.routes.remove(&Key::new(length, target))?;
        }
        put?;
        self.write_neighbours()
    }

    fn write_neighbours(&mut self) -> io::Result<()> {
        // The kernel resolves the others for each packet.
        let limit = usize::try_from(self.maps.neighbours.limit()).unwrap_or(usize::MAX);
        let entry = |((ifindex, address), mac): (&(u32, IpAddr), &Mac)| {
            let key = NeighbourKey { ifindex: *ifindex, address: (*address).into() };
            (key, NeighbourEntry::new(&key, *mac))
        };
        let mut wanted: HashMap<_, _> = self.facts.neighbours.iter().take(limit).map(entry).collect();
        let mut unwanted = Vec::new();
        self.maps.neighbours.for_each(|key, entry| match wanted.get(key) {
            Some(known) if known == entry => drop(wanted.remove(key)),
            Some(_) => {}
            None => unwanted.push(*key),
        })?;
        unwanted.iter().try_for_each(|key| self.maps.neighbours.remove(key).map(drop))?;
        wanted.iter().try_for_each(|(key, entry)| self.maps.neighbours.put(key, entry))
    }

    /// Rewrites the owned entries, if they may name other interfaces. A failure is repeated by the next call.
    fn follow_interfaces(&mut self) -> io::Result<()> {
        if self.owned_elsewhere {
            self.move_owned()?;
            self.owned_elsewhere = false;
        }
        Ok(())
    }

    /// The nftables table has no leak guard: `from_pod` stops writing the priority that marks a packet as seen.
    pub fn disable_leak_guard(&mut self) -> io::Result<()> {
        let mut config = self.config;
        config.seen = 0;
        self.write_config(config)
    }

    /// The nftables table gets a leak guard: the packet priority that `from_pod` writes.
    pub fn enable_leak_guard(&mut self) -> io::Result<u32> {
        let config = config::with_leak_guard(self.config)?;
        if config != self.config {
            self.write_config(config)?;
        }
        config.seen_priority().ok_or_else(|| io::Error::other("a random number is zero"))
    }

    /// Applies the host's port settings. Returns the ports for NAT on the node's own address, where they changed.
    pub fn follow_ports(&mut self, settings: &Settings, seen: PortSettings) -> io::Result<Option<PortRange>> {
        let node_ports = self.node_ports(settings, seen);
        if self.config.node_ports == node_ports {
            return Ok(None);
        }
        let mut config = self.config;
        config.node_ports = node_ports;
        self.write_config(config)?;
        Ok(Some(node_ports))
    }

    fn node_ports(&mut self, settings: &Settings, seen: PortSettings) -> PortRange {
        config::warn_of_unreadable(&self.host_ports.follow(seen));
        config::node_ports(settings, &self.host_ports)
    }

    fn follow_hooks(&mut self, settings: &Settings, verify: bool) {
        let places = self.facts.places(Hook::RETURN_ORDER);
        for (what, error) in self.programs.retain(&places) {
            warn!(%error, "cannot detach {what}");
        }
        self.note_missing(settings);
        for place in places {
            if self.programs.is_attached(place) && (!verify || self.programs.is_alive(place)) {
                continue;
            }
            match self.programs.attach(place) {
                Ok(is_new) => {
                    if !place.is_further {
                        self.missing.remove(&place.hook.device());
                    }
                    if is_new {
                        info!(interface = self.name_of(settings, place), hook = place.hook.name(), "attached");
                    }
                }
                // The device may have been removed again; its next event, or the next check, retries.
                Err(error) => self.warn_attach(settings, place, &error),
            }
        }
    }

    /// Records which egress interfaces have programs; the others host no egress IP.
    fn note_attached(&mut self) {
        let has_all = |index| {
            let on = |hook| AttachPoint { hook, ifindex: index, is_further: true };
            Hook::NETDEV.into_iter().all(|hook| self.programs.is_attached(on(hook)))
        };
        let attached = self.facts.further().map(|one| one.index).filter(|index| has_all(*index)).collect();
        interface::set_attached(&mut self.facts.interfaces, &attached);
        self.note_gateways();
    }

    /// Publishes the records, with the gateways that are lost now.
    pub fn note_gateways(&mut self) {
        let mut records = self.facts.interfaces.clone();
        interface::set_next_hops_lost(&mut records, &self.lost.borrow());
        let gateways = self.facts.gateways();
        self.gateways.send_if_modified(|known| std::mem::replace(known, gateways.clone()) != gateways);
        self.interfaces.send_if_modified(|known| std::mem::replace(known, records.clone()) != records);
    }

    /// The gateways that the watch of next hops asks, and where it says what is lost.
    pub fn next_hops(&self) -> FurtherNextHops {
        FurtherNextHops { asked: self.gateways.subscribe(), lost: self.lost.clone() }
    }

    /// Interfaces without a next hop, as they change.
    pub fn lost_next_hops(&self) -> Receiver<BTreeSet<u32>> {
        self.lost.subscribe()
    }

    /// Sets which VLANs need a device, which the watch makes.
    pub fn follow_vlans(&self, wanted: &Vlans) {
        self.vlans.send_if_modified(|known| {
            let is_same = known.as_ref() == Some(wanted);
            if !is_same {
                *known = Some(wanted.clone());
            }
            !is_same
        });
    }

    pub fn wanted_vlans(&self) -> Receiver<Option<Vlans>> {
        self.vlans.subscribe()
    }

    /// The interfaces that host egress IPs now.
    pub fn hosting(&self) -> io::Result<BTreeSet<u32>> {
        let mut hosting = BTreeSet::new();
        self.maps.owned.for_each(|_, entry| {
            hosting.insert(entry.ifindex);
        })?;
        Ok(hosting)
    }

    /// Logs what is new among the causes for which VLANs have no device.
    pub fn note_vlan_problems(&mut self, problems: VlanProblems) {
        for (vlan, why) in problems.iter().filter(|(vlan, why)| self.vlan_problems.get(vlan) != Some(why)) {
            warn!(vlan, why, "a VLAN that pools of addresses need has no device of its own on this node; trying again");
        }
        self.vlan_problems = problems;
    }

    /// The current records of the egress interfaces.
    pub fn interfaces(&self) -> Receiver<Vec<EgressInterface>> {
        self.interfaces.subscribe()
    }

    fn warn_attach(&self, settings: &Settings, place: AttachPoint, error: &AttachError) {
        let name = self.name_of(settings, place);
        warn!(%error, interface = name, hook = place.hook.name(), "cannot attach; trying again");
    }

    fn name_of<'a>(&'a self, settings: &'a Settings, place: AttachPoint) -> &'a str {
        let further = self.facts.further().find(|one| place.is_further && one.index == place.ifindex);
        further.map_or(settings.device(place.hook.device()), |one| &one.name)
    }

    fn note_missing(&mut self, settings: &Settings) {
        for device in Hook::ALL.map(Hook::device) {
            if self.facts.device(device).is_none() && self.missing.insert(device) {
                warn!("{}", missing_devices::line(device, settings.device(device), self.facts.pod_interface.as_ref()));
            }
        }
    }

    /// Facts of the hook's program, with run statistics where the kernel keeps them.
    pub fn hook_facts(&mut self, settings: &Settings, hook: Hook, has_statistics: bool) -> HookFacts {
        let (attached, device) = (self.programs.is_on_own_device(hook), hook.device());
        let pod = self.facts.pod_interface.as_ref();
        let line = || missing_devices::line(device, settings.device(device), pod);
        let awaits = self.missing.contains(&device).then(line);
        HookFacts { attached, awaits, runs: has_statistics.then(|| self.programs.runs(hook)).flatten() }
    }

    /// The overlay device, where it is down although its program is attached.
    pub fn overlay_to_bring_up(&self) -> Option<u32> {
        let index = self.facts.overlay?.index;
        let place = AttachPoint { hook: Hook::FromOverlay, ifindex: index, is_further: false };
        (!self.facts.overlay_up && self.programs.is_attached(place)).then_some(index)
    }

    /// Registers an early probe for the address. The probe ends when the returned sender is dropped.
    pub fn begin_probe(&mut self, address: IpAddr) -> Sender<()> {
        let (sender, ended) = channel(());
        self.probes.retain(|_, ended| ended.has_changed().is_ok());
        self.probes.insert(address, ended);
        sender
    }

    /// Receiver that closes when the early probe for the address ends; `None` without a recent probe.
    pub fn probe_end(&self, address: IpAddr) -> Option<Receiver<()>> {
        self.probes.get(&address).cloned()
    }

    /// Records that no host answered for the address just now, or that no probe is needed.
    pub fn note_probed(&mut self, address: IpAddr) {
        self.probed.retain(|_, when| when.elapsed() < PROBE_HOLDS);
        self.probed.insert(address, Instant::now());
    }

    pub fn is_probed(&self, address: IpAddr) -> bool {
        self.probed.get(&address).is_some_and(|when| when.elapsed() < PROBE_HOLDS)
    }

    /// Whether the address was probed just now. Consumes the result.
    pub fn take_probed(&mut self, address: IpAddr) -> bool {
        self.probed.remove(&address).is_some_and(|when| when.elapsed() < PROBE_HOLDS)
    }

    /// Adds a prefix of pod addresses to the covers.
    pub fn cover(&mut self, net: &IpNet) -> io::Result<()> {
        let config = config::covering(self.config, net);
        if config == self.config { Ok(()) } else { self.write_config(config) }
    }

    /// Raises the decision number: each flow is decided again with its next packet.
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

    /// With `OnUnknownPod::PassWhileFollowed`, packets of unknown pods pass for some more seconds, or stop passing.
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

    /// Sets the node's own tunnel endpoint, which names it in the maps, and the family of the overlay's outer packets.
    pub fn set_underlay(&mut self, endpoint: IpAddr) -> io::Result<()> {
        self.underlay = family(endpoint);
        let mut config = config::with_facts(self.config, &self.facts, self.underlay);
        config.self_node = Addr::from(endpoint);
        if config == self.config { Ok(()) } else { self.write_config(config) }
    }

    /// Called when one of the node's own addresses is removed; `named` are the tunnel endpoints in the remaining entries. Where
    /// the current endpoint is not among them it is replaced.
    pub fn follow_names(&mut self, named: &BTreeSet<IpAddr>) -> io::Result<()> {
        name_among(named, &self.config).map_or(Ok(()), |name| self.set_underlay(name))
    }

    fn write_config(&mut self, config: Config) -> io::Result<()> {
        self.maps.config.set(0, config, 0).map_err(map_io)?;
        self.config = config;
        let is_narrow = config::is_too_narrow(&config, self.underlay);
        if is_narrow && !self.said_narrow {
            config::warn_of_narrow(&config);
        }
        self.said_narrow = is_narrow;
        Ok(())
    }
}

/// Covers of the pods and prefixes in the maps.
fn covered(config: Config, maps: &PolicyMaps) -> io::Result<Config> {
    let mut config = config;
    (config.pods_v4, config.pods_v6) = (Cover::NONE, Cover::NONE);
    let see = |address: &Addr, _: &_| config = config::covering(config, &IpNet::from(address.to_ip()));
    maps.pods.for_each(see)?;
    maps.cluster.for_each(|key, value| {
        if let (Some(net), Some(prefix)) = (convert::cluster_net(key), convert::prefix(value))
            && convert::holds_pods(prefix)
        {
            config = config::covering(config, &net);
        }
    })?;
    Ok(config)
}

/// The tunnel endpoints that entries of this node's own addresses name: while it changes, two of them.
pub fn own_names(maps: &PolicyMaps) -> io::Result<BTreeSet<IpAddr>> {
    let mut named = BTreeSet::new();
    maps.nodes.for_each(|_, entry| {
        let seen = convert::node(entry);
        if seen.own {
            named.insert(seen.node.0);
        }
    })?;
    Ok(named)
}

/// The current endpoint while any entry names it: of two, the entries do not tell which is newer.
fn name_among(named: &BTreeSet<IpAddr>, config: &Config) -> Option<IpAddr> {
    named.iter().find(|name| Addr::from(**name) == config.self_node).or(named.first()).copied()
}

fn family(address: IpAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}
