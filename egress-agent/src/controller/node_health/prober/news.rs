//! What is said of nodes when something about them changes.

use std::net::IpAddr;

use super::*;

/// Of an event on the Node.
const STRANGE: &str = "HealthAnswerNotSigned";

impl Round {
    /// Nodes at whose addresses something else answers are known to all, and told of now and then.
    pub(super) fn look_for_strangers(&mut self, now: Instant) {
        let strange = self.asked.iter().filter_map(|(node, asked)| Some((node.clone(), asked.stranger(now)?)));
        let strange: BTreeMap<String, IpAddr> = strange.collect();
        for (node, address) in &strange {
            if !self.strangers.is_news(node, now) {
                continue;
            }
            let message = format!(
                "something else than its agent answers at {address}, the health address of node {node}, or an agent with \
                 another key: nothing that it says is believed"
            );
            warn!("{message}");
            self.manner.events.iter().for_each(|events| events.warn_of_other_node(node, STRANGE, &message));
        }
        self.reach.send_if_modified(|reach| {
            let strange = strange.into_keys().collect();
            let is_news = reach.strange != strange;
            reach.strange = strange;
            is_news
        });
    }

    /// One line for each change.
    pub(super) fn say(&self, News { node, liveness, treated }: &News, now: Instant) {
        let grace = self.manner.rules.grace.as_secs();
        let asked = self.asked.get(node);
        let why = asked.and_then(|asked| asked.trouble.as_deref()).unwrap_or("no answer");
        let seconds = |until: Instant| until.saturating_duration_since(now).as_secs_f32().ceil();
        match (liveness, treated) {
            (Liveness::Unknown, _) => {}
            (_, Treated::UntilProven(until)) => {
                info!(node, "the node serves again; it counts as reachable in {} s if it goes on", seconds(*until));
            }
            (Liveness::Answers(AgentAnswer::Serving), _) => info!(node, "the node serves"),
            (Liveness::Answers(AgentAnswer::NextHopLost), Treated::AsReachable) => {
                debug!(node, "the node's next hop does not answer");
            }
            (Liveness::Answers(AgentAnswer::OverlayLost), Treated::AsReachable) => warn!(
                node,
                port = asked.and_then(|asked| asked.overlay),
                "the node answers health checks, but nothing through the overlay, and nothing can be moved from it: is that UDP port open between nodes?"
            ),
            (Liveness::Answers(AgentAnswer::OverlayLost), Treated::AsGone) => warn!(
                node,
                port = asked.and_then(|asked| asked.overlay),
                "the node answers health checks, but nothing through the overlay, by which others answer: unreachable"
            ),
            (Liveness::Answers(_), Treated::AsReachable) => {
                warn!(node, "the node says that it cannot carry egress traffic, but no other could");
            }
            (Liveness::Answers(_), Treated::AsGone) => {
                warn!(node, "the node says that it cannot carry egress traffic; its log says why");
            }
            (Liveness::AgentSilent | Liveness::AgentGone, Treated::AsReachable) => warn!(
                node,
                port = self.manner.port,
                why,
                "the node is there, but its agent does not answer health checks: does it run, with this port? It keeps its addresses for {grace} s"
            ),
            (Liveness::AgentSilent | Liveness::AgentGone, Treated::AsGone) => {
                warn!(
                    node,
                    port = self.manner.port,
                    why,
                    "the node's agent does not answer health checks: unreachable"
                );
            }
            (Liveness::Silent, Treated::AsReachable) => {
                warn!(node, "the node is silent, but nothing can be moved from it");
            }
            (Liveness::Silent, Treated::AsGone) => warn!(node, "the node is silent: unreachable"),
        }
    }
}
