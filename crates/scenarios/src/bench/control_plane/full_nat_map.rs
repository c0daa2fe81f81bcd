//! A gateway whose map of mappings holds a million entries: what a scrape takes, what rest costs, how pod events fare.

use crate::prelude::*;

use super::super::nat_entries;
use super::events;
use super::figures::{ControlPlaneFigure, Figures};
use super::{ControlPlaneEffort, ScaleCluster};

/// In the node's own network namespace.
pub(super) const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9477);
/// So that a million entries are no reason to hurry: two for each mapping, and five sixths of the map.
pub(super) const ROOM: u32 = 600_000;
const SCRAPES: usize = 50;

impl ScaleCluster {
    pub(super) fn bear(
        &mut self,
        effort: &ControlPlaneEffort,
        say: &dyn Fn(&str),
        figures: &mut Figures,
    ) -> Result<()> {
        figures.add(ControlPlaneFigure::Scrape, &self.scrapes()?);
        say(&format!("another leads: {} mappings", effort.mappings));
        nat_entries::fill(self.node()?, 0..effort.mappings)?;
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
}
