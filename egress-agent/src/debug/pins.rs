//! The status without a running agent, read from the pinned maps.

use std::io;
use std::path::{Path, PathBuf};

use crate::debug::{Address, AgentState, Status};
use egress_core::display_names::Names;
use egress_core::model::state::{EgressId, HandoverStage, KernelState, TunnelEndpoint};
use egress_datapath::loader::abi_migration;
use egress_datapath::loader::pinned;
use egress_datapath::survey;
use egress_datapath::survey::report::concerning;

#[derive(Debug, thiserror::Error)]
pub enum PinsError {
    #[error("and no programs of an agent are here (no pins below {})", .0.display())]
    Nothing(PathBuf),
    #[error("and the programs pinned below {} are of another version: they continue, and that version can show them", .0.display())]
    OfAnotherVersion(PathBuf),
    #[error("and the pins below {} cannot be read: {source}; root is required", .bpffs.display())]
    Unreadable { bpffs: PathBuf, source: io::Error },
}

pub fn status(bpffs: &Path) -> Result<Status, PinsError> {
    let unreadable = |source| PinsError::Unreadable { bpffs: bpffs.to_owned(), source };
    let nothing = || match abi_migration::has_others(bpffs) {
        true => PinsError::OfAnotherVersion(bpffs.to_owned()),
        false => PinsError::Nothing(bpffs.to_owned()),
    };
    let pinned = pinned::read(bpffs).map_err(unreadable)?.ok_or_else(nothing)?;
    let mut status = Status { agent: AgentState { running: false, ..AgentState::default() }, ..Status::default() };
    fill(&mut status, pinned, &Names::default());
    read_kernel(bpffs, false, &mut status);
    status.note_expired();
    Ok(status)
}

/// Fills in what the programs serve, from the pins alone.
pub fn fill(status: &mut Status, pinned: KernelState, names: &Names) {
    (status.objects, status.gateways) = concerning(&pinned, names);
    let KernelState { owned, handovers, pods, .. } = pinned;
    let one = |id: EgressId, address, owned, state| {
        let object = names.objects.get(&id.0).cloned();
        Address { address, egress_id: id.0, object, interface: None, owned, wanted: None, state }
    };
    let moving = handovers.into_iter().filter(|(id, _)| !owned.contains_key(id)).map(|(id, moving)| {
        let TunnelEndpoint(peer) = moving.peer;
        let peer = names.nodes.get(&peer).cloned().unwrap_or_else(|| peer.to_string());
        let state = match moving.stage {
            HandoverStage::Leaving => format!("handed over to {peer}"),
            HandoverStage::Arriving | HandoverStage::Open => format!("comes from {peer}"),
        };
        one(id, moving.address, false, state)
    });
    let moving: Vec<Address> = moving.collect();
    let served =
        owned.into_iter().map(|(id, address)| one(id, address, true, "served, by the programs alone".to_owned()));
    status.addresses = served.chain(moving).collect();
    status.selected_pod_addresses = pods.values().filter(|pod| pod.is_selected()).count();
    status.pod_addresses = pods.len();
}

/// Reads devices, programs and maps, the interfaces of addresses, and the neighbour state of gateways. An error becomes a problem
/// of the status.
pub fn read_kernel(bpffs: &Path, is_swept: bool, status: &mut Status) {
    match survey::known_neighbours() {
        Ok(known) => status
            .gateways
            .iter_mut()
            .for_each(|gateway| gateway.neighbour = known.get(&gateway.endpoint).map(|state| (*state).to_owned())),
        Err(error) => status.problems.push(format!("the kernel's neighbour table cannot be read: {error}")),
    }
    match survey::survey(bpffs, is_swept) {
        Ok(kernel) => status.kernel = kernel,
        Err(error) => status.problems.push(format!("devices, programs and maps cannot be read: {error}")),
    }
    match survey::interfaces_of_addresses(bpffs) {
        Ok(names) => status.addresses.iter_mut().for_each(|one| one.interface = names.get(&one.address).cloned()),
        Err(error) => status.problems.push(format!("the interfaces of egress IPs cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::samples::ip;
    use egress_core::model::state::{HandoverStage, HandoverState, PodState};

    #[test]
    fn programs_of_another_version_are_named() {
        let bpffs = std::env::temp_dir().join(format!("egress-pins-{}", std::process::id()));
        let error = || status(&bpffs).err().map(|error| error.to_string());
        std::fs::create_dir_all(&bpffs).expect("a folder");
        assert!(error().is_some_and(|line| line.contains("no pins below")), "{:?}", error());
        std::fs::create_dir_all(bpffs.join("v0/maps")).expect("a folder");
        let line = error();
        std::fs::remove_dir_all(&bpffs).expect("it was there");
        assert!(line.as_ref().is_some_and(|line| line.contains("of another version")), "{line:?}");
    }

    #[test]
    fn served_addresses_have_the_known_names() {
        let owned = [(EgressId(1), ip("172.18.0.100"))].into();
        let peer = TunnelEndpoint(ip("172.18.0.2"));
        let moving =
            |address| HandoverState { address: ip(address), peer, stage: HandoverStage::Leaving, shared_with: None };
        let handovers = [(EgressId(1), moving("172.18.0.100")), (EgressId(2), moving("172.18.0.101"))].into();
        let pods = [(ip("10.244.1.10"), PodState::Selected(EgressId(1))), (ip("10.244.1.11"), PodState::Known)].into();
        let pinned = KernelState { owned, handovers, pods, ..KernelState::default() };
        let names =
            Names { objects: [(1, "a".into())].into(), nodes: [(peer.0, "n2".into())].into(), ..Names::default() };
        let mut status = Status::default();
        fill(&mut status, pinned, &names);
        let states: Vec<_> = status.addresses.iter().map(|one| (one.object.as_deref(), one.state.as_str())).collect();
        assert_eq!(states, [(Some("a"), "served, by the programs alone"), (None, "handed over to n2")]);
        assert_eq!((status.pod_addresses, status.selected_pod_addresses), (2, 1));
    }
}
