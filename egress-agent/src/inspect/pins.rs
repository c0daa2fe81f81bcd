//! What the programs of an agent that does not answer do: from their pinned maps.

use std::io;
use std::path::{Path, PathBuf};

use super::kernel::{Gateway, Kernel, concerning};
use super::names::Names;
use super::{Address, AgentState, Status};
use crate::dataplane::pinned::{self, Pinned};
use crate::dataplane::survey;
use crate::model::state::{Course, PodState};

#[derive(Debug, thiserror::Error)]
pub enum PinsError {
    #[error("and no programs of an agent are here (no pins below {})", .0.display())]
    Nothing(PathBuf),
    #[error("and the pins below {} cannot be read: {source}; it takes root", .bpffs.display())]
    Unreadable { bpffs: PathBuf, source: io::Error },
}

/// `why` is why no agent has answered.
pub fn status(bpffs: &Path, why: String) -> Result<Status, PinsError> {
    let unreadable = |source| PinsError::Unreadable { bpffs: bpffs.to_owned(), source };
    let Pinned { owned, moving, pods, policies } =
        pinned::read(bpffs).map_err(unreadable)?.ok_or_else(|| PinsError::Nothing(bpffs.to_owned()))?;
    let mut addresses: Vec<Address> = Vec::new();
    for (id, address) in owned {
        let state = "served, by the programs alone".to_owned();
        addresses.push(Address { address, egress_id: id.0, object: None, owned: true, wanted: None, state });
    }
    for (id, moving) in moving {
        if addresses.iter().any(|known| known.egress_id == id.0) {
            continue;
        }
        let state = match moving.course {
            Course::Leaving => format!("passed on to {}", moving.peer.0),
            Course::Arriving | Course::Open => format!("comes from {}", moving.peer.0),
        };
        let address = moving.address;
        addresses.push(Address { address, egress_id: id.0, object: None, owned: false, wanted: None, state });
    }
    let selected_pod_addresses = pods.iter().filter(|pod| matches!(pod, PodState::Selected(_))).count();
    let mut problems = vec![format!("{why}; what follows is what its programs go on to do")];
    let agent = AgentState { running: false, ..AgentState::default() };
    let pod_addresses = pods.len();
    let (objects, mut gateways) = concerning(pods, &policies, &Names::default());
    let kernel = look(bpffs, false, &mut gateways, &mut problems);
    Ok(Status {
        agent,
        addresses,
        objects,
        gateways,
        pod_addresses,
        selected_pod_addresses,
        kernel,
        problems,
        ..Status::default()
    })
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
