//! Keeping the nftables table (`nft`) in step with the map `pods`.
//!
//! Everything here is done while the tables are held, so that a table made anew misses no pod. A failure is never one of
//! the action that it belongs to: programs and maps are the first line and go on; the next check makes the table anew.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use egress_common::abi::PodEntry;
use tracing::{debug, info, warn};

use crate::maps::tables::Tables;
use crate::nftables::{Nft, Rules};
use crate::node_state::shared::Shared;
use crate::settings::Settings;
use egress_core::model::state::{Action, PodState};

/// What is known of the table.
#[derive(Default)]
pub struct LeakGuard {
    /// It lacks something that it should have.
    is_stale: AtomicBool,
    /// It was made without the second line.
    is_disabled: AtomicBool,
    /// That it cannot be made has been is_reported.
    is_reported: AtomicBool,
    /// Held for one question; who holds it asks for nothing else.
    nft: Mutex<Nft>,
}

impl LeakGuard {
    /// Makes the table, or makes it anew. Not while what is there knows more pods than the maps.
    pub fn install(&self, shared: &Shared) {
        if shared.abi_migration.is_open() {
            return;
        }
        let disabled = shared.state().facts().mgmt_filters_ports;
        if disabled && !self.is_disabled.swap(disabled, Ordering::Relaxed) {
            // As on every node with kube-proxy: nothing is wrong.
            info!(
                interface = shared.settings.mgmt_port,
                "netfilter is called for what comes in by the ports of the bridge (net.bridge.bridge-nf-call-iptables): should \
                 the bridge be made anew, nothing keeps selected pods' packets back until programs are on it again"
            );
        }
        self.is_disabled.store(disabled, Ordering::Relaxed);
        let made = self.make(shared, disabled);
        // One that cannot be looked for may be there.
        let is_there = made.is_ok() || self.nft().is_installed().unwrap_or(true);
        self.is_stale.store(made.is_err(), Ordering::Relaxed);
        // Without the rules nobody takes the word off again.
        let is_unchecked = !is_there || (disabled && made.is_ok());
        let updated = if is_unchecked { shared.state().disable_leak_guard() } else { Ok(()) };
        match made.and(updated) {
            Ok(()) => self.is_reported.store(false, Ordering::Relaxed),
            Err(error) if self.is_reported.swap(true, Ordering::Relaxed) => debug!(%error, "still no nftables table"),
            Err(error) => warn!(
                %error,
                "cannot make the nftables table: connection tracking tracks the overlay, and selected pods have no second \
                 line while the management port is made anew"
            ),
        }
    }

    /// The maps know the pods again: the table of the former programs has done its work.
    pub fn finish_migration(&self, shared: &Shared) {
        if shared.abi_migration.finish() {
            self.install(shared);
        }
    }

    /// Makes it anew where another hand has taken it, a change did not reach it, or the management port is another kind of
    /// device.
    pub fn check(&self, shared: &Shared) {
        if shared.abi_migration.is_open() {
            return;
        }
        let is_missing = match self.nft().is_installed() {
            Ok(is_there) => !is_there,
            Err(error) => return debug!(%error, "cannot look for the nftables table"),
        };
        let is_other = shared.state().facts().mgmt_filters_ports != self.is_disabled.load(Ordering::Relaxed);
        if is_missing || is_other || self.is_stale.load(Ordering::Relaxed) {
            self.install(shared);
            if !self.is_stale.load(Ordering::Relaxed) {
                info!("the nftables table was made anew");
            }
        }
    }

    /// Ahead of the map's write.
    pub fn before_map_write(&self, action: &Action) {
        if let Action::PutPod(pod, PodState::Selected(_)) = action {
            self.note(*pod, self.nft().guard_pod(*pod));
        }
    }

    /// Behind it, where the map had the pod as selected. Of others the table has nothing, and to be asked for that takes the
    /// kernel as long as many changes.
    pub fn after_map_write(&self, action: &Action) {
        if let Action::PutPod(pod, PodState::Known) | Action::RemovePod(pod) = action {
            self.note(*pod, self.nft().leave_pod(*pod));
        }
    }

    /// The map did not take what the table was told ahead of it.
    pub fn mark_stale(&self) {
        self.is_stale.store(true, Ordering::Relaxed);
    }

    fn nft(&self) -> MutexGuard<'_, Nft> {
        // A question is asked as a whole or not at all.
        self.nft.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, shared: &Shared, disabled: bool) -> io::Result<()> {
        // The word first: a table that asks for what nobody writes would hold up what is left to the stack.
        let seen = if disabled { None } else { Some(shared.state().enable_leak_guard()?) };
        let tables = shared.tables();
        let pods = selected(&tables)?;
        let Settings { tunnel_port, mgmt_port, .. } = &shared.settings;
        self.nft().install(&Rules { tunnel_port: *tunnel_port, mgmt_port, seen, pods: &pods })
    }

    fn note(&self, pod: IpAddr, done: io::Result<()>) {
        if let Err(error) = done {
            self.is_stale.store(true, Ordering::Relaxed);
            debug!(%error, %pod, "the nftables table did not take a change; it will be made anew");
        }
    }
}

fn selected(tables: &Tables) -> io::Result<Vec<IpAddr>> {
    let mut pods = Vec::new();
    tables.pods.for_each(|pod, entry: &PodEntry| pods.extend(entry.egress_id().map(|_| pod.to_ip())))?;
    Ok(pods)
}
