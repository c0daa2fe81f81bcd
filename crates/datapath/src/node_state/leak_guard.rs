//! The leak guard: keeps the sets of our nftables table in step with the map `pods`.
//!
//! All of it runs while the policy maps are locked, so that a rebuilt table misses no pod. A failure never fails the action: the
//! programs are the primary protection, and the next check rebuilds the table.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use egress_common::abi::PodEntry;
use tracing::{debug, info, warn};

use crate::maps::handles::PolicyMaps;
use crate::nftables::{Nft, TableSpec};
use crate::node_state::shared::Shared;
use crate::settings::Settings;
use egress_core::model::state::{Action, PodState};

/// State of the table.
#[derive(Default)]
pub struct LeakGuard {
    /// The table lacks a change and must be rebuilt.
    is_stale: AtomicBool,
    /// The table has no leak guard.
    is_disabled: AtomicBool,
    /// The failure to create it has been reported.
    is_reported: AtomicBool,
    /// Held for one transaction; the holder takes no other lock.
    nft: Mutex<Nft>,
}

impl LeakGuard {
    /// Creates or replaces the table. Not during an ABI migration, when the existing table knows more pods than the maps.
    pub fn install(&self, shared: &Shared) {
        if shared.abi_migration.is_open() {
            return;
        }
        let disabled = shared.state().facts().mgmt_filters_ports;
        if disabled && !self.is_disabled.swap(disabled, Ordering::Relaxed) {
            // Expected on every node with kube-proxy.
            info!(
                interface = shared.settings.mgmt_port,
                "netfilter is called for what comes in by the ports of the bridge (net.bridge.bridge-nf-call-iptables): if the \
                 bridge is replaced, nothing stops selected pods' packets until programs are attached again"
            );
        }
        self.is_disabled.store(disabled, Ordering::Relaxed);
        let made = self.make(shared, disabled);
        // A failed check counts as an existing table.
        let is_there = made.is_ok() || self.nft().is_installed().unwrap_or(true);
        self.is_stale.store(made.is_err(), Ordering::Relaxed);
        // Without the rules nothing clears the priority again.
        let is_unchecked = !is_there || (disabled && made.is_ok());
        let updated = if is_unchecked { shared.state().disable_leak_guard() } else { Ok(()) };
        match made.and(updated) {
            Ok(()) => self.is_reported.store(false, Ordering::Relaxed),
            Err(error) if self.is_reported.swap(true, Ordering::Relaxed) => debug!(%error, "still no nftables table"),
            Err(error) => warn!(
                %error,
                "cannot make the nftables table: connection tracking tracks the overlay, and selected pods have no leak \
                 guard while the management port is replaced"
            ),
        }
    }

    /// Ends an ABI migration: the maps hold the pods again, so the former programs' table is replaced.
    pub fn finish_migration(&self, shared: &Shared) {
        if shared.abi_migration.finish() {
            self.install(shared);
        }
    }

    /// Rebuilds the table where it is gone, missed a change, or the management port became another kind of device.
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
                info!("the nftables table was rebuilt");
            }
        }
    }

    /// Called before the map write: adds a selected pod.
    pub fn before_map_write(&self, action: &Action) {
        if let Action::PutPod(pod, state) = action
            && state.is_selected()
        {
            self.note(*pod, self.nft().add_pod(*pod));
        }
    }

    /// Called after the map write of a pod that was selected: removes it. Other pods are not in the table, and a removal that
    /// finds nothing takes the kernel as long as many changes.
    pub fn after_map_write(&self, action: &Action) {
        if let Action::PutPod(pod, PodState::Known) | Action::RemovePod(pod) = action {
            self.note(*pod, self.nft().remove_pod(*pod));
        }
    }

    /// The map write failed after the table was changed.
    pub fn mark_stale(&self) {
        self.is_stale.store(true, Ordering::Relaxed);
    }

    fn nft(&self) -> MutexGuard<'_, Nft> {
        // A transaction is complete or absent.
        self.nft.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, shared: &Shared, disabled: bool) -> io::Result<()> {
        // The priority first: rules that expect an unwritten priority would drop what the program leaves to the stack.
        let seen = if disabled { None } else { Some(shared.state().enable_leak_guard()?) };
        let maps = shared.policy_maps();
        let pods = selected(&maps)?;
        let Settings { tunnel_port, mgmt_port, .. } = &shared.settings;
        self.nft().install(&TableSpec { tunnel_port: *tunnel_port, mgmt_port, seen, pods: &pods })
    }

    fn note(&self, pod: IpAddr, done: io::Result<()>) {
        if let Err(error) = done {
            self.is_stale.store(true, Ordering::Relaxed);
            debug!(%error, %pod, "the nftables table did not take a change; it will be rebuilt");
        }
    }
}

fn selected(maps: &PolicyMaps) -> io::Result<Vec<IpAddr>> {
    let mut pods = Vec::new();
    maps.pods.for_each(|pod, entry: &PodEntry| pods.extend(entry.is_selected().then(|| pod.to_ip())))?;
    Ok(pods)
}
