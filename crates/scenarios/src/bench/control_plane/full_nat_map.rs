//! A gateway whose map of mappings holds a million entries: what a scrape takes, what rest costs, how pod events fare.
//!
//! The entries are written by us, of no object and of no pod of the node, so that no event cuts any.

use crate::prelude::*;
use egress_common::abi::{Addr, Direction, MAX_EGRESS_ID, NatEntry, Origin, Tuple};

use super::events::{self, open};
use super::figures::{ControlPlaneFigure, Figures};
use super::{ControlPlaneEffort, ScaleCluster};

/// In the node's own network namespace.
pub(super) const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9477);
/// So that a million entries are no reason to hurry: two for each mapping, and five sixths of the map.
pub(super) const ROOM: u32 = 600_000;
const SCRAPES: usize = 50;
const TCP: u8 = 6;
const WORLD: Ipv4Addr = Ipv4Addr::new(203, 0, 0, 0);
/// In the cluster's pod network, beyond all nodes of this cluster.
const PODS: Ipv4Addr = Ipv4Addr::new(10, 190, 0, 0);
const EGRESS_IP: Ipv4Addr = Ipv4Addr::new(172, 18, 255, 254);

impl ScaleCluster {
    pub(super) fn bear(
        &mut self,
        effort: &ControlPlaneEffort,
        say: &dyn Fn(&str),
        figures: &mut Figures,
    ) -> Result<()> {
        figures.add(ControlPlaneFigure::Scrape, &self.scrapes()?);
        say(&format!("another leads: {} mappings", effort.mappings));
        self.fill(effort.mappings)?;
        let process = self.process()?;
        let cost = process.cost_of(|| {
            std::thread::sleep(effort.rest);
            Ok(())
        })?;
        figures.add(ControlPlaneFigure::FullCpuAtRest, &[cost.percent_of_a_core]);
        figures.add(ControlPlaneFigure::FullScrape, &self.scrapes()?);
        let arrivals = events::play(self, effort, 2 * effort.scale.own_pods)?;
        figures.add_percentiles(
            [
                ControlPlaneFigure::FullEventMedian,
                ControlPlaneFigure::FullEventTail,
                ControlPlaneFigure::FullEventWorst,
            ],
            &arrivals,
        );
        Ok(())
    }

    /// Milliseconds that each took, as the scraper sees it.
    fn scrapes(&self) -> Result<Vec<f64>> {
        let host = &self.node()?.host;
        let scrape = |_| {
            let begin = Instant::now();
            let page = client::get(host, METRICS, "/metrics", "scraper")?.context("the agent serves no metrics")?;
            ensure!(page.status == 200, "a scrape is answered with {}", page.status);
            Ok(begin.elapsed().as_secs_f64() * 1e3)
        };
        (0..SCRAPES).map(scrape).collect()
    }

    /// Connections that have just begun: nothing of them expires soon.
    fn fill(&self, mappings: u32) -> Result<()> {
        let mut nat = open::<Tuple, NatEntry>(self.node()?, "nat")?;
        let now: std::time::Duration = nix::time::ClockId::CLOCK_MONOTONIC.now()?.into();
        let now = u64::try_from(now.as_nanos())?;
        let address = |base: Ipv4Addr, number: u32| Addr::v4((base.to_bits() + number).to_be_bytes());
        for number in 0..mappings {
            // Each pod has some hundreds, and each place in the world some ten thousands.
            let (pod, world) = (address(PODS, number / 500), address(WORLD, number / 50_000));
            let port = u16::try_from(1_024 + number % 60_000)?;
            let forward = Tuple::new(Direction::Egress, pod, world, port, 443, TCP);
            let reverse = Tuple::new(Direction::Ingress, world, address(EGRESS_IP, 0), 443, port, TCP);
            for (key, other) in [(forward, reverse), (reverse, forward)] {
                let mapping = NatEntry::new(other, Origin::Remote, Addr::UNSPECIFIED, MAX_EGRESS_ID, now);
                nat.insert(key, mapping.sealed(&key), 0).context("fill the map nat")?;
            }
        }
        Ok(())
    }
}
