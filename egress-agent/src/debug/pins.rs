//! What the programs of an agent that does not answer do: from their pinned maps.

use std::io;
use std::path::{Path, PathBuf};

use crate::debug::{Address, AgentState, Status};
use egress_core::display_names::Names;
use egress_core::model::state::{EgressId, HandoverStage, PodState, TunnelEndpoint};
use egress_datapath::loader::abi_migration;
use egress_datapath::loader::pinned::{self, Pinned};
use egress_datapath::survey;
use egress_datapath::survey::report::{Gateway, Kernel, concerning};

#[derive(Debug, thiserror::Error)]
pub enum PinsError {
    #[error("and no programs of an agent are here (no pins below {})", .0.display())]
    Nothing(PathBuf),
    #[error("and the programs pinned below {} are of another version: they go on, and that version can look at them", .0.display())]
    OfAnotherVersion(PathBuf),
    #[error("and the pins below {} cannot be read: {source}; it takes root", .bpffs.display())]
    Unreadable { bpffs: PathBuf, source: io::Error },
}

/// `why` is why no agent has answered.
pub fn status(bpffs: &Path, why: String) -> Result<Status, PinsError> {
    let unreadable = |source| PinsError::Unreadable { bpffs: bpffs.to_owned(), source };
    let nothing = || match abi_migration::has_others(bpffs) {
        true => PinsError::OfAnotherVersion(bpffs.to_owned()),
        false => PinsError::Nothing(bpffs.to_owned()),
    };
    let pinned = pinned::read(bpffs).map_err(unreadable)?.ok_or_else(nothing)?;
    let mut problems = vec![format!("{why}; what follows is what its programs go on to do")];
    let mut status = Status { agent: AgentState { running: false, ..AgentState::default() }, ..Status::default() };
    fill(&mut status, pinned, &Names::default());
    status.kernel = look(bpffs, false, &mut status.gateways, &mut problems);
    status.problems = problems;
    status.note_expired();
    Ok(status)
}

/// Puts in what the programs do, whatever an agent wants of them.
pub fn fill(status: &mut Status, Pinned { owned, handovers, pods, policies }: Pinned, names: &Names) {
    let one = |id: EgressId, address, owned, state| {
        let object = names.objects.get(&id.0).cloned();
        Address { address, egress_id: id.0, object, owned, wanted: None, state }
    };
    let moving = handovers.into_iter().filter(|(id, _)| !owned.contains_key(id)).map(|(id, moving)| {
        let TunnelEndpoint(peer) = moving.peer;
        let peer = names.nodes.get(&peer).cloned().unwrap_or_else(|| peer.to_string());
        let state = match moving.stage {
            HandoverStage::Leaving => format!("passed on to {peer}"),
            HandoverStage::Arriving | HandoverStage::Open => format!("comes from {peer}"),
        };
        one(id, moving.address, false, state)
    });
    let moving: Vec<Address> = moving.collect();
    let served =
        owned.into_iter().map(|(id, address)| one(id, address, true, "served, by the programs alone".to_owned()));
    status.addresses = served.chain(moving).collect();
    status.selected_pod_addresses = pods.iter().filter(|pod| matches!(pod, PodState::Selected(_))).count();
    status.pod_addresses = pods.len();
    (status.objects, status.gateways) = concerning(pods, &policies, names);
}

/// What the kernel has, and what it thinks of gateways. What cannot be read is a problem, and no more.
pub fn look(bpffs: &Path, is_swept: bool, gateways: &mut [Gateway], problems: &mut Vec<String>) -> Option<Kernel> {
    match survey::known_neighbours() {
        Ok(known) => gateways
            .iter_mut()
            .for_each(|gateway| gateway.neighbour = known.get(&gateway.endpoint).map(|state| (*state).to_owned())),
        Err(error) => problems.push(format!("the kernel does not tell of its neighbours: {error}")),
    }
    match survey::survey(bpffs, is_swept) {
        Ok(kernel) => kernel,
        Err(error) => {
            problems.push(format!("devices, programs and maps cannot be read: {error}"));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::samples::ip;
    use egress_core::model::state::{HandoverStage, HandoverState};

    #[test]
    fn programs_of_another_version_are_not_nothing() {
        let bpffs = std::env::temp_dir().join(format!("egress-pins-{}", std::process::id()));
        let said = || status(&bpffs, "no agent runs here".to_owned()).err().map(|error| error.to_string());
        std::fs::create_dir_all(&bpffs).expect("a folder");
        assert!(said().is_some_and(|line| line.contains("no pins below")), "{:?}", said());
        std::fs::create_dir_all(bpffs.join("v0/maps")).expect("a folder");
        let line = said();
        std::fs::remove_dir_all(&bpffs).expect("it was there");
        assert!(line.as_ref().is_some_and(|line| line.contains("of another version")), "{line:?}");
    }

    #[test]
    fn what_programs_serve_is_called_by_what_names_there_are() {
        let owned = [(EgressId(1), ip("172.18.0.100"))].into();
        let peer = TunnelEndpoint(ip("172.18.0.2"));
        let moving = |address| HandoverState { address: ip(address), peer, stage: HandoverStage::Leaving };
        let handovers = [(EgressId(1), moving("172.18.0.100")), (EgressId(2), moving("172.18.0.101"))].into();
        let pods = vec![PodState::Selected(EgressId(1)), PodState::Known];
        let pinned = Pinned { owned, handovers, pods, ..Pinned::default() };
        let names =
            Names { objects: [(1, "a".into())].into(), nodes: [(peer.0, "n2".into())].into(), ..Names::default() };
        let mut status = Status::default();
        fill(&mut status, pinned, &names);
        let said: Vec<_> = status.addresses.iter().map(|one| (one.object.as_deref(), one.state.as_str())).collect();
        assert_eq!(said, [(Some("a"), "served, by the programs alone"), (None, "passed on to n2")]);
        assert_eq!((status.pod_addresses, status.selected_pod_addresses), (2, 1));
    }
}
