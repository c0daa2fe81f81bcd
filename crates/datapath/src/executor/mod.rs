//! Applies plan actions to the kernel, and reads the kernel's state back.
//!
//! One action is one map write, except claims (`announce`) and flushes (`conntrack::flush`). An error leaves the state
//! unchanged.

pub mod handover;
pub mod observe;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use aya::Pod;
use egress_common::abi::{self, Addr, Exposure, MAX_SLOTS, PodEntry, PolicyEntry, PolicyEntryKey, Timeouts};
use futures::FutureExt;
use futures::future::BoxFuture;
use ipnet::IpNet;
use tokio::task::spawn_blocking;
use tracing::info;

use crate::announce;
use crate::clock::now_ns;
use crate::conntrack::flush::{self, Due};
use crate::dataplane::Dataplane;
use crate::devices::host::next_hop;
use crate::devices::interfaces::Interface;
use crate::executor::observe::{held, observe};
use crate::maps::convert;
use crate::maps::handles::{Hash, PolicyMaps};
use crate::networks::Unrouted;
use crate::node_state::shared::Shared;
use crate::node_state::{State, own_names};
use egress_core::model::lease::SharedLease;
use egress_core::model::node::{Mac, mac_text};
use egress_core::model::reserved::Reserved;
use egress_core::model::state::{
    Action, EgressId, HandoverStage, HandoverState, KernelState, PodOwner, PodState, Policy, SharedWith,
};
use egress_core::networks::RoutedNetworks;
use egress_core::plan::executor::{AddressClaim, DataplaneError, Executor, Expected, claim_condition};
use egress_core::vlans::Vlans;
use egress_supervise;

impl Executor for Dataplane {
    /// Walks whole maps in a blocking thread.
    async fn observe(&mut self) -> Result<KernelState, DataplaneError> {
        let shared = Arc::clone(&self.shared);
        let observed = spawn_blocking(move || Ok(observe(&shared))).await;
        egress_supervise::joined(observed).map_err(kernel("observe the kernel"))?
    }

    async fn held(&mut self) -> Result<KernelState, DataplaneError> {
        held(&self.shared.state())
    }

    fn expect(&mut self, expected: Expected) {
        let mut state = self.shared.state();
        expected.handed_over.iter().for_each(|address| state.note_probed(*address));
        if let Err(error) = state.expect(expected) {
            tracing::warn!(%error, "cannot rewrite the owned addresses for the uplink; trying again");
        }
    }

    fn follow_vlans(&mut self, vlans: &Vlans) {
        self.shared.state().follow_vlans(vlans);
    }

    async fn route(&mut self, networks: &RoutedNetworks) -> Unrouted {
        egress_supervise::blocking(|| self.shared.networks().route(networks, &self.shared.settings.mgmt_port))
    }

    async fn prepare(&mut self, plan: &[Action]) {
        self.probe_ahead(plan).await;
    }

    fn follows(&mut self, is_so: bool) {
        if let Err(error) = self.shared.state().follows(is_so) {
            tracing::warn!(%error, "cannot record in the configuration that pods are followed: packets of new ones are dropped");
        }
    }

    /// Announces only now: a former owner must not announce an address that has moved.
    fn confirm(&mut self) {
        egress_supervise::blocking(|| self.shared.leak_guard.finish_migration(&self.shared));
        self.shared.state().claims.announce_all();
    }

    fn lease(&self) -> SharedLease {
        self.shared.lease.clone()
    }

    async fn conflict(&mut self) -> AddressClaim {
        match self.conflicts.recv().await {
            Some(claimant) => claimant,
            None => std::future::pending().await,
        }
    }

    async fn apply(&mut self, action: &Action) -> Result<(), DataplaneError> {
        match action {
            Action::Own(id, address) => own(&self.shared, *id, *address).await,
            Action::Share(id, address, with) => {
                egress_supervise::blocking(|| share(&self.shared, *id, (*address, *with)))
            }
            Action::CutFlows(..) | Action::CutPodFlows(..) | Action::CutPod(_) => self.cut(vec![action.clone()]).await,
            Action::CutOrphans => walk(&self.shared, cut_orphans).await,
            Action::PutHandover(
                _,
                HandoverState { stage: HandoverStage::Arriving, address, shared_with: None, .. },
            ) => {
                probe_early(&self.shared, *address);
                egress_supervise::blocking(|| write(&self.shared, action))
            }
            // A write may include an nftables transaction or a multicast filter of the uplink.
            other => egress_supervise::blocking(|| write(&self.shared, other)),
        }
    }

    fn cut(&mut self, cuts: Vec<Action>) -> BoxFuture<'static, Result<(), DataplaneError>> {
        walk(&self.shared, move |shared| {
            let cut = flush::all(&mut shared.flow_maps(), &Due::of(&cuts)).map_err(kernel("cut flows"))?;
            shared.request_resets(cut);
            Ok(())
        })
    }
}

/// Walks whole maps in a blocking thread, so that this thread can watch the node's devices. Starts when called, not when
/// awaited.
fn walk(
    shared: &Arc<Shared>,
    cut: impl FnOnce(&Shared) -> Result<(), DataplaneError> + Send + 'static,
) -> BoxFuture<'static, Result<(), DataplaneError>> {
    let shared = Arc::clone(shared);
    let walked = spawn_blocking(move || {
        let cut = cut(&shared);
        shared.state().raise_decisions().map_err(kernel("write map config"))?;
        cut
    });
    walked.map(|done| egress_supervise::joined(done.map(Ok)).map_err(kernel("cut flows"))?).boxed()
}

/// Every action except `Own` and cuts. Flows keep their decision until the decision number is raised, after the change, also
/// where it was applied in part.
fn write(shared: &Shared, action: &Action) -> Result<(), DataplaneError> {
    match action {
        Action::PutPod(address, _) => {
            shared.state().cover(&IpNet::from(*address)).map_err(kernel("write map config"))?
        }
        Action::PutPrefix(net, prefix) if convert::holds_pods(*prefix) => {
            shared.state().cover(net).map_err(kernel("write map config"))?;
        }
        _ => {}
    }
    let written = write_maps(shared, action);
    if written.is_ok() {
        shared.reset_history().follow(action);
    }
    shared.state().raise_decisions().map_err(kernel("write map config"))?;
    written
}

fn write_maps(shared: &Shared, action: &Action) -> Result<(), DataplaneError> {
    // One of the two locks at a time.
    match action {
        Action::SetUnknownPods(on) => {
            return shared.state().set_on_unknown_pod(*on).map_err(kernel("write map config"));
        }
        Action::Disown(id, address) => {
            disown(&mut shared.state(), *id, *address)?;
            return shared.forget_counts(id.0).map_err(kernel("remove from map eip_counters"));
        }
        Action::PutHandover(id, handover) => return handover::put(&mut shared.state(), *id, *handover),
        Action::EndHandover(id, address) => return handover::end(&mut shared.state(), *id, *address),
        _ => {}
    }
    let mut guard = shared.policy_maps();
    let maps = &mut *guard;
    shared.leak_guard.before_map_write(action);
    match action {
        // Its probe waits for the network, so it does not run under a lock. Flushes walk other maps.
        Action::Own(..)
        | Action::Share(..)
        | Action::CutPod(_)
        | Action::CutFlows(..)
        | Action::CutPodFlows(..)
        | Action::CutOrphans => Ok(()),
        Action::SetUnknownPods(_) | Action::Disown(..) | Action::PutHandover(..) | Action::EndHandover(..) => Ok(()),
        Action::PutNode(address, node) => {
            put("nodes", &mut maps.nodes, &Addr::from(*address), &convert::node_entry(*node))?;
            drop(guard);
            if node.own { shared.state().set_underlay(node.node.0).map_err(kernel("write map config")) } else { Ok(()) }
        }
        Action::RemoveNode(address) => {
            let key = Addr::from(*address);
            let known = maps.nodes.get(&key).map_err(kernel("read map nodes"))?;
            remove("remove from map nodes", &mut maps.nodes, &key)?;
            if !known.is_some_and(|entry| convert::node(&entry).own) {
                return Ok(());
            }
            let named = own_names(maps).map_err(kernel("read map nodes"))?;
            drop(guard);
            shared.state().follow_names(&named).map_err(kernel("write map config"))
        }
        Action::PutPrefix(net, prefix) => {
            let map = &mut maps.cluster;
            map.put(&convert::cluster_key(net), &convert::prefix_value(*prefix))
                .map_err(|error| refused("cluster", map.limit(), error))
        }
        Action::RemovePrefix(net) => {
            maps.cluster.remove(&convert::cluster_key(net)).map(drop).map_err(kernel("remove from map cluster"))
        }
        Action::PutClass(class, policies) => {
            let (limit, entries) = (maps.classes.limit(), convert::class_entries(policies));
            maps.classes.put(class.0, &entries).map_err(|error| refused("classes", limit, error))
        }
        Action::RemoveClass(class) => maps.classes.remove(class.0).map_err(kernel("remove from map classes")),
        Action::PutPolicy(id, family, policy) => put_policy(maps, &PolicyEntryKey::new(id.0, *family), policy),
        Action::RemovePolicy(id, family) => {
            let key = PolicyEntryKey::new(id.0, *family);
            let former = maps.policy.get(&key).map_err(kernel("read map policy"))?;
            remove("remove from map policy", &mut maps.policy, &key)?;
            remove_destinations(maps, former)?;
            drop(guard);
            shared.forget_counts(id.0).map_err(kernel("remove from map eip_counters"))
        }
        Action::PutPod(address, pod) => {
            let put = put_pod(&mut maps.pods, *address, *pod, &shared.settings.timeouts);
            match &put {
                Ok(true) => shared.leak_guard.after_map_write(action),
                Ok(false) => {}
                Err(_) => shared.leak_guard.mark_stale(),
            }
            put.map(drop)
        }
        Action::RemovePod(address) => {
            let key = Addr::from(*address);
            let before = maps.pods.get(&key).map_err(kernel("read map pods"))?;
            remove("remove from map pods", &mut maps.pods, &key)?;
            if is_selected(before.as_ref()) {
                shared.leak_guard.after_map_write(action);
            }
            Ok(())
        }
        Action::PutOwner(address, owner) => put_owner(&mut maps.pods, *address, *owner),
        Action::Expose(address, port) => {
            let key = convert::exposed_port(*address, *port);
            put("exposed", &mut maps.exposed, &key, &Exposure::default())
        }
        Action::Conceal(address, port) => {
            remove("remove from map exposed", &mut maps.exposed, &convert::exposed_port(*address, *port))
        }
    }
}

/// Cuts all flows that the maps do not permit.
fn cut_orphans(shared: &Shared) -> Result<(), DataplaneError> {
    let seen = observe(shared)?;
    let (cut, forgotten) =
        flush::orphans(&mut shared.flow_maps(), &seen).map_err(kernel("cut what a former plan has left"))?;
    shared.forget_all_counts().map_err(kernel("remove from map eip_counters"))?;
    // Connections stay until they expire, also those whose pods got a reset.
    if forgotten > 0 {
        info!(entries = forgotten, connections = cut.len(), "flows cut that a former plan left");
    }
    shared.request_resets(cut);
    Ok(())
}

/// Whether it was selected before.
fn put_pod(
    pods: &mut Hash<Addr, PodEntry>,
    address: IpAddr,
    pod: PodState,
    timeouts: &Timeouts,
) -> Result<bool, DataplaneError> {
    let key = Addr::from(address);
    let before = pods.get(&key).map_err(kernel("read map pods"))?;
    let now = now_ns().map_err(kernel("read the clock"))?;
    // The peers of its connections may live this long, and the pod may send until then.
    let cut_until = now + u64::from(timeouts.tcp_established) * 1_000_000_000;
    put("pods", pods, &key, &convert::pod_entry(pod, before.as_ref(), now, cut_until).sealed(&key))?;
    Ok(is_selected(before.as_ref()))
}

fn is_selected(pod: Option<&PodEntry>) -> bool {
    pod.is_some_and(PodEntry::is_selected)
}

/// A removed pod has no owner to record.
fn put_owner(pods: &mut Hash<Addr, PodEntry>, address: IpAddr, owner: PodOwner) -> Result<(), DataplaneError> {
    let key = Addr::from(address);
    match pods.get(&key).map_err(kernel("read map pods"))? {
        Some(entry) => put("pods", pods, &key, &entry.with_owner(owner.0)),
        None => Ok(()),
    }
}

fn no_interface() -> DataplaneError {
    kernel("claim an egress IP")(io::Error::from_raw_os_error(libc::ENETDOWN))
}

/// Claims the address for the policy: probe, entries, announcements. An existing entry (after a restart) needs no probe,
/// since this node would answer itself.
async fn own(shared: &Shared, id: EgressId, address: IpAddr) -> Result<(), DataplaneError> {
    let (interface, held) = {
        let state = shared.state();
        (state.interface_of(address), state.maps.owned.get(&id.0).map_err(kernel("read map owned"))?)
    };
    let interface = interface.ok_or_else(no_interface)?;
    let held = held.map(|entry| entry.address.to_ip());
    if held == Some(address) {
        return Ok(());
    }
    // A claim of the next hop would cut this node off.
    if next_hop(&shared.netlink, interface.index, address).await == Some(address) {
        return Err(DataplaneError::Reserved { address, reason: Reserved::NextHop(None) });
    }
    if !shared.state().take_probed(address) {
        let claimed = announce::probe(interface, &[address]).await.map_err(kernel("probe for an egress IP"))?;
        if let Some(mac) = claimed.get(&address) {
            return Err(in_use(&shared.state(), address, *mac));
        }
    }
    egress_supervise::blocking(|| take(shared, id, address, held))
}

/// The rest of a claim, after the probe.
fn take(shared: &Shared, id: EgressId, address: IpAddr, held: Option<IpAddr>) -> Result<(), DataplaneError> {
    let mut state = shared.state();
    // The interface may have been replaced during the probe.
    let interface = state.interface_of(address).ok_or_else(no_interface)?;
    state.claims.join(interface, address);
    if let Err(error) = state.write_owned(id, convert::owned(id, address, interface, None)) {
        state.claims.leave(interface.index, address);
        return Err(refused("owned", state.maps.owned.limit(), error));
    }
    // A policy has one address per node. The old one is removed after the new one is written.
    let ended = held.map_or(Ok(()), |held| disown(&mut state, id, held));
    state.raise_decisions().map_err(kernel("write map config"))?;
    ended?;
    state.claims.announce(address);
    info!(%address, id = id.0, condition = claim_condition(address), "egress IP is served here");
    Ok(())
}

/// Claims an address that a Service or this node has too. Its provider announces it, on this node or elsewhere, or the host
/// does, so a probe would find that announcer.
fn share(shared: &Shared, id: EgressId, (address, with): (IpAddr, SharedWith)) -> Result<(), DataplaneError> {
    let mut state = shared.state();
    let held = state.maps.owned.get(&id.0).map_err(kernel("read map owned"))?;
    let interface = state.interface_of_owned(address, Some(with)).ok_or_else(no_interface)?;
    let owned = convert::owned(id, address, interface, Some(with));
    if held == Some(owned) {
        return Ok(());
    }
    state.write_owned(id, owned).map_err(|error| refused("owned", state.maps.owned.limit(), error))?;
    let former = held.map(|entry| entry.address.to_ip()).filter(|former| *former != address);
    let ended = former.map_or(Ok(()), |former| disown(&mut state, id, former));
    state.raise_decisions().map_err(kernel("write map config"))?;
    ended?;
    let condition = claim_condition(address);
    match with {
        SharedWith::Service => {
            info!(%address, id = id.0, condition, "egress IP is served here, and shared with a Service");
        }
        SharedWith::Host => {
            info!(%address, id = id.0, condition, "egress IP is served here, which the node has itself")
        }
    }
    Ok(())
}

/// Another host answers for the address. If it is a node of the cluster, its programs emit the address, which can be
/// claimed after they stop.
fn in_use(state: &State, address: IpAddr, mac: Mac) -> DataplaneError {
    let node = state.expected.links.get(&mac).copied();
    let mac = mac_text(mac);
    match node {
        Some(node) => DataplaneError::HeldByNode { address, node, mac },
        None => DataplaneError::AddressInUse { address, mac },
    }
}

/// Probes early and concurrently for an address that this node is about to own, so that the claim need not wait. The former
/// owner may still answer: its lease ends before the claim.
fn probe_early(shared: &Arc<Shared>, address: IpAddr) {
    let (interface, under_way) = {
        let mut state = shared.state();
        let Some(interface) = state.interface_of(address) else { return };
        (interface, state.begin_probe(address))
    };
    let shared = Arc::clone(shared);
    // Short-lived: one probe.
    tokio::spawn(async move {
        // Dropped last, after the result is recorded.
        let _under_way = under_way;
        // The claim repeats a failure.
        let Ok(claimed) = announce::probe(interface, &[address]).await else { return };
        let mut state = shared.state();
        if claimed.get(&address).is_none_or(|mac| state.expected.is_holder(address, *mac)) {
            state.note_probed(address);
        }
    });
}

impl Dataplane {
    /// Probes for all addresses that the plan is going to claim, at the same time, so that each `Own` of it that follows
    /// within a few seconds need not wait. A conflict or failure is found again and reported by its `Own`.
    pub async fn probe_ahead(&self, plan: &[Action]) {
        let owns = plan.iter().filter_map(|action| match action {
            Action::Own(_, address) => Some(*address),
            _ => None,
        });
        let owns: Vec<IpAddr> = owns.collect();
        let early: Vec<_> = {
            let state = self.shared.state();
            owns.iter().filter_map(|address| state.probe_end(*address)).collect()
        };
        for mut ended in early {
            while ended.changed().await.is_ok() {}
        }
        let wanted = {
            let state = self.shared.state();
            let held =
                |address: &IpAddr| state.maps.owned_addr.get(&(*address).into()).is_ok_and(|entry| entry.is_some());
            let unknown = owns.into_iter().filter(|address| !held(address) && !state.is_probed(*address));
            let mut wanted = BTreeMap::<Interface, Vec<IpAddr>>::new();
            for address in unknown {
                if let Some(interface) = state.interface_of(address) {
                    wanted.entry(interface).or_default().push(address);
                }
            }
            wanted
        };
        let probe = |(interface, addresses): (Interface, Vec<IpAddr>)| async move {
            (announce::probe(interface, &addresses).await, addresses)
        };
        let probed = futures::future::join_all(wanted.into_iter().map(probe)).await;
        let mut state = self.shared.state();
        for (claimed, addresses) in probed {
            let Ok(claimed) = claimed else { continue };
            addresses
                .into_iter()
                .filter(|address| !claimed.contains_key(address))
                .for_each(|free| state.note_probed(free));
        }
    }
}

/// Ends translation first, including a hand-over, then answers, then the membership.
fn disown(state: &mut State, id: EgressId, address: IpAddr) -> Result<(), DataplaneError> {
    let maps = &mut state.maps;
    let key = Addr::from(address);
    let handover = maps.handovers.get(&id.0).map_err(kernel("read map handovers"))?;
    if handover.is_some_and(|entry| entry.owned.address == key && entry.stage() != Some(abi::HandoverStage::Leaving)) {
        remove("remove from map handovers", &mut maps.handovers, &id.0)?;
    }
    let owned = maps.owned.get(&id.0).map_err(kernel("read map owned"))?;
    if owned.is_some_and(|entry| entry.address == key) {
        remove("remove from map owned", &mut maps.owned, &id.0)?;
    }
    // The address may belong to another policy by now.
    let answers = maps.owned_addr.get(&key).map_err(kernel("read map owned_addr"))?;
    if answers.is_some_and(|entry| entry.egress_id == id.0) {
        remove("remove from map owned_addr", &mut maps.owned_addr, &key)?;
        // Before anything that may fail: a retry finds no entry and would skip it.
        if let Some(entry) = answers.filter(|entry| !entry.is_shared()) {
            state.claims.leave(entry.ifindex, address);
        }
        info!(%address, id = id.0, "egress IP is no longer served here");
        state.rebuild_owned_filter().map_err(kernel("write map config"))?;
    }
    Ok(())
}

/// The entry and its set of destinations change together: the entry names another set.
fn put_policy(maps: &mut PolicyMaps, key: &PolicyEntryKey, policy: &Policy) -> Result<(), DataplaneError> {
    let limit = u32::try_from(MAX_SLOTS).unwrap_or(u32::MAX);
    let beyond = || DataplaneError::Full { map: "a value of map policy", limit };
    let value = convert::policy_value(policy).ok_or_else(beyond)?;
    let destinations = convert::candidates(policy).ok_or_else(beyond)?;
    let former = maps.policy.get(key).map_err(kernel("read map policy"))?;
    let limit = maps.destinations.limit();
    let mut written = maps.destinations.put_new(&destinations);
    if written.is_err() && former.is_some_and(|former| former.destinations().is_some()) {
        // Room for it, where the map is full: meanwhile the policy's new flows are dropped.
        remove_destinations(maps, former)?;
        written = maps.destinations.put_new(&destinations);
    }
    let set = written.map_err(|error| refused("destinations", limit, error))?;
    let written = put("policy", &mut maps.policy, key, &value.with_destinations(set));
    let unused = if written.is_ok() { former } else { Some(value.with_destinations(set)) };
    written.and(remove_destinations(maps, unused))
}

/// Removes the set of a former entry.
fn remove_destinations(maps: &mut PolicyMaps, former: Option<PolicyEntry>) -> Result<(), DataplaneError> {
    let Some(set) = former.and_then(|former| former.destinations()) else { return Ok(()) };
    maps.destinations.remove(set).map_err(kernel("remove from map destinations"))
}

fn kernel(what: &'static str) -> impl Fn(io::Error) -> DataplaneError {
    move |source| DataplaneError::Kernel { what, source }
}

fn put<K: Pod, V: Pod>(name: &'static str, map: &mut Hash<K, V>, key: &K, value: &V) -> Result<(), DataplaneError> {
    map.put(key, value).map_err(|error| refused(name, map.limit(), error))
}

/// Classifies a failed insertion. The kernel reports a full map by three errors; `EINVAL` (key or value) and `EBUSY` (bucket
/// locked) concern the single entry.
fn refused(map: &'static str, limit: u32, source: io::Error) -> DataplaneError {
    match source.raw_os_error() {
        Some(libc::E2BIG | libc::ENOSPC | libc::ENOMEM) => DataplaneError::Full { map, limit },
        Some(libc::EINVAL | libc::EBUSY) => DataplaneError::Refused { map, source },
        _ => DataplaneError::Kernel { what: map, source },
    }
}

/// A missing entry counts as removed.
fn remove<K: Pod, V: Pod>(what: &'static str, map: &mut Hash<K, V>, key: &K) -> Result<(), DataplaneError> {
    map.remove(key).map(drop).map_err(kernel(what))
}
