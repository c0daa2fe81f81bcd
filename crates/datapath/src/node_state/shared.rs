//! What the tasks of the data plane share: the state, the maps and the handles, each behind its own lock.
//!
//! A thread holds one of the three locks at a time, in this order where it must hold two: tables, then state.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aya::programs::SchedClassifier;
use egress_common::abi::Tuple;
use tokio::sync::mpsc::UnboundedSender;

use crate::loader::abi_migration::AbiMigration;
use crate::maps::tables::{FlowTables, Tables};
use crate::node_state::State;
use crate::node_state::leak_guard::LeakGuard;
use crate::node_state::reset_history::{Cut, ResetHistory};
use crate::settings::Settings;
use egress_core::model::lease::SharedLease;

/// What the executor and the watch have in common.
pub struct Shared {
    pub(crate) settings: Settings,
    pub(crate) netlink: rtnetlink::Handle,
    pub(crate) state: Mutex<State>,
    pub(crate) tables: Mutex<Tables>,
    pub(crate) flow_tables: Mutex<FlowTables>,
    pub(crate) lease: SharedLease,
    pub(crate) sweep: Mutex<Option<SchedClassifier>>,
    /// Connections that were cut, to `nudge`.
    pub(crate) reset_requests: UnboundedSender<Vec<Tuple>>,
    pub(crate) reset_history: Mutex<ResetHistory>,
    pub(crate) leak_guard: LeakGuard,
    pub(crate) abi_migration: AbiMigration,
}

impl Shared {
    /// Held for a few map writes at most, never over an await or over a walk of a large map: a device that is made anew
    /// waits for it.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete in itself, so what a panicking holder left is still good.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held for some map writes at most, or a look at all pods; nobody asks for it who holds the state.
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held over walks of large maps: only threads that may be kept ask for it, and nobody does who holds another lock.
    pub(crate) fn flow_tables(&self) -> MutexGuard<'_, FlowTables> {
        self.flow_tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the pods of these connections reset_history that they were cut, as time permits; each once, until something changes.
    pub(crate) fn request_resets(&self, cut: Cut) {
        // Refused only when the data plane is being dropped.
        let _ends = self.reset_requests.send(self.reset_history().take_new(cut));
    }

    pub(crate) fn reset_history(&self) -> MutexGuard<'_, ResetHistory> {
        self.reset_history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what was counted of an egress ID that has neither a claim nor a policy here any more: the numbers are given out
    /// again, and the map would fill. As long as one of them stands packets count.
    pub fn forget_counts(&self, id: u32) -> io::Result<()> {
        // One of the two locks at a time.
        let is_owned = self.state().tables.owned.get(&id)?.is_some();
        if is_owned { Ok(()) } else { self.tables().forget_counts(id) }
    }

    /// Of all of them: what was under way when an object went, or comes from a node that has yet to hear of it, has counted
    /// anew.
    pub fn forget_all_counts(&self) -> io::Result<()> {
        let counted = self.tables().counted()?;
        counted.into_iter().try_for_each(|id| self.forget_counts(id))
    }
}
