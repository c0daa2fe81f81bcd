//! Shared state of the data plane's tasks: state, maps and handles, each with its own lock.
//!
//! Lock order where a thread holds two: policy maps, then state.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use egress_common::abi::Tuple;
use tokio::sync::mpsc::UnboundedSender;

use crate::loader::abi_migration::AbiMigration;
use crate::maps::handles::{FlowMaps, PolicyMaps};
use crate::networks::NetworkRouting;
use crate::node_state::State;
use crate::node_state::leak_guard::LeakGuard;
use crate::node_state::reset_history::{Cut, ResetHistory};
use crate::settings::Settings;
use egress_core::model::lease::SharedLease;

/// Shared by the executor, the watch and the other tasks of the data plane.
pub struct Shared {
    pub(crate) settings: Settings,
    pub(crate) netlink: rtnetlink::Handle,
    pub(crate) state: Mutex<State>,
    pub(crate) policy_maps: Mutex<PolicyMaps>,
    pub(crate) flow_maps: Mutex<FlowMaps>,
    pub(crate) lease: SharedLease,
    /// Cut connections for `conntrack::idle_reset`.
    pub(crate) reset_requests: UnboundedSender<Vec<Tuple>>,
    pub(crate) reset_history: Mutex<ResetHistory>,
    pub(crate) leak_guard: LeakGuard,
    pub(crate) networks: Mutex<NetworkRouting>,
    pub(crate) abi_migration: AbiMigration,
}

impl Shared {
    /// Held over transactions with the kernel's routing and netfilter: only blocking threads take it, and no holder of another
    /// lock.
    pub(crate) fn networks(&self) -> MutexGuard<'_, NetworkRouting> {
        // What was not written counts as unknown.
        self.networks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held for a few map writes at most, never over an await or a walk of a large map: attaching to a new device waits for it.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete in itself, so the value after a panic is valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held for some map writes at most, or a walk of all pods. Never taken by a holder of the state.
    pub(crate) fn policy_maps(&self) -> MutexGuard<'_, PolicyMaps> {
        self.policy_maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held over walks of large maps: only blocking threads take it, and no holder of another lock.
    pub(crate) fn flow_maps(&self) -> MutexGuard<'_, FlowMaps> {
        self.flow_maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues idle resets for these connections; each once, until a change for its pod or policy.
    pub(crate) fn request_resets(&self, cut: Cut) {
        // Fails only while the data plane is dropped.
        let _ends = self.reset_requests.send(self.reset_history().take_new(cut));
    }

    pub(crate) fn reset_history(&self) -> MutexGuard<'_, ResetHistory> {
        self.reset_history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the counters of an egress ID without claim and policy here: IDs are reused, and the map would fill. While either
    /// exists packets are counted.
    pub fn forget_counts(&self, id: u32) -> io::Result<()> {
        // One of the two locks at a time.
        let is_owned = self.state().maps.owned.get(&id)?.is_some();
        if is_owned { Ok(()) } else { self.policy_maps().forget_counts(id) }
    }

    /// Drops the counters of all such IDs: packets in flight, or from a node with an older plan, may have counted
    /// after the removal.
    pub fn forget_all_counts(&self) -> io::Result<()> {
        let counted = self.policy_maps().counted()?;
        counted.into_iter().try_for_each(|id| self.forget_counts(id))
    }
}
