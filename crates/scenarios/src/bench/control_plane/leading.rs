//! What the controller does: all objects of a cluster without assignments, then the loss of one node.

use super::figures::{ControlPlaneFigure, Figures};
use super::large_cluster::{self, Scale};
use super::{PATIENCE, ScaleCluster, text};
use crate::prelude::*;
use egress_lab::apiserver::ApiServer;

/// The kinds that have nodes in their status, and are assigned.
const ASSIGNED: [&str; 2] = ["egressips.k8s.ovn.org", "egressassignments.egress-agent.io"];
/// Other kinds that the controller writes to: addresses, and what has become of each object.
const OTHERS: [&str; 4] = [
    "egresses.crd.antrea.io",
    "externalippools.crd.antrea.io",
    "egressservices.k8s.ovn.org",
    "egressgatewaypolicystatuses.egress-agent.io",
];
/// Between two looks at the API server's store.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

impl ScaleCluster {
    pub(super) fn lead(&mut self, scale: &Scale, say: &dyn Fn(&str), figures: &mut Figures) -> Result<()> {
        say("the controller: all objects");
        let before = written(self.server()?);
        let begin = Instant::now();
        self.start_agent()?;
        let took = self.wait_for(begin, say, |items| items.len() == scale.assigned())?;
        figures.add(ControlPlaneFigure::AllAssigned, &[took.as_secs_f64()]);
        figures.add(ControlPlaneFigure::AllAssignedWrites, &[(written(self.server()?) - before) as f64]);
        self.settle()?;

        // Not the real node: the controller is there.
        let lost = large_cluster::node_name(2);
        let theirs: BTreeSet<String> =
            holders(self.server()?).into_iter().filter(|(_, node)| *node == lost).map(|(object, _)| object).collect();
        ensure!(!theirs.is_empty(), "{lost} has no address to lose");
        say(&format!("the controller: {lost} goes, with {} addresses", theirs.len()));
        let before = written(self.server()?);
        let cpu = self.controller()?;
        let begin = Instant::now();
        self.base.api.delete(&format!("/api/v1/nodes/{lost}"))?;
        let mut took = Duration::ZERO;
        let cost = cpu.cost_of(|| {
            took = self.wait_for(begin, say, |items| {
                items.len() == scale.assigned() && items.iter().all(|(_, node)| *node != lost)
            })?;
            Ok(())
        })?;
        let writes = written(self.server()?) - before;
        figures.add(ControlPlaneFigure::LossAddresses, &[theirs.len() as f64]);
        figures.add(ControlPlaneFigure::Loss, &[took.as_secs_f64()]);
        figures.add(ControlPlaneFigure::LossCpu, &[cost.percent_of_a_core / 100.0 * took.as_secs_f64()]);
        figures.add(ControlPlaneFigure::LossWrites, &[writes as f64]);
        self.settle()?;
        let process = self.controller()?;
        figures.add(ControlPlaneFigure::LeaderMemory, &[process.memory()?.resident_mib]);
        Ok(())
    }

    /// How long after `begin` all objects were as wanted.
    fn wait_for(
        &self,
        begin: Instant,
        say: &dyn Fn(&str),
        wanted: impl Fn(&[(String, String)]) -> bool,
    ) -> Result<Duration> {
        let mut reported = Instant::now();
        loop {
            let items = holders(self.server()?);
            if wanted(&items) {
                return Ok(begin.elapsed());
            }
            ensure!(begin.elapsed() < PATIENCE, "{} objects have a node after {PATIENCE:?}", items.len());
            if reported.elapsed() > Duration::from_secs(10) {
                say(&format!("{} objects have a node", items.len()));
                reported = Instant::now();
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until nothing is written any more.
    fn settle(&self) -> Result<()> {
        let begin = Instant::now();
        loop {
            let before = written(self.server()?);
            std::thread::sleep(Duration::from_secs(3));
            if written(self.server()?) == before {
                return Ok(());
            }
            ensure!(begin.elapsed() < PATIENCE, "the leader never stops writing");
        }
    }
}

/// Objects whose status names a node, with the node.
fn holders(server: &ApiServer) -> Vec<(String, String)> {
    let holder = |object: &Value| {
        let node = object.pointer("/status/items/0/node")?.as_str()?;
        Some((text(object, "/metadata/name").to_owned(), node.to_owned()))
    };
    ASSIGNED.iter().flat_map(|kind| server.survey(kind, holder)).flatten().collect()
}

/// How often objects of these kinds have been written, those that the cluster was filled with included.
fn written(server: &ApiServer) -> u64 {
    ASSIGNED.iter().chain(&OTHERS).map(|kind| server.written(kind)).sum()
}
