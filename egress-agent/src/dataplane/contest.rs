//! An egress IP that is assigned to this node while another node still answers for it.
//!
//! Programs outlive their agent, so a node whose agent is dead goes on answering for what it held. To a probe that looks
//! like any other address in use, and a stranger's address is never claimed. A node of ours is told from a stranger by its
//! link address, which every node publishes (its EgressNode object). It is given time to let
//! go, as a living agent does within moments of hearing of the assignment; then the address is taken over and defended (see
//! `claim`).
//!
//! Both answer from then on until the other node's agent runs again or its programs are gone. What would end it there by
//! itself, a deadline in the programs' own entries, does not exist yet (docs/adr/0011-hand-over-from-a-dead-agent.md).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long a node of ours has to let go of an address. An agent that hears of it needs milliseconds.
const TIME_TO_LET_GO: Duration = Duration::from_secs(5);
/// A claim that was not tried for longer than this was given up meanwhile: its next try begins anew. Longer than the
/// longest pause between tries.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);

/// Addresses that other nodes hold although they are this node's.
#[derive(Debug, Default)]
pub(super) struct Contests {
    open: BTreeMap<IpAddr, Contest>,
}

#[derive(Clone, Copy, Debug)]
struct Contest {
    node: IpAddr,
    since: Instant,
    seen: Instant,
}

impl Contests {
    /// The node was heard answering for the address now; whether it has had time enough.
    pub(super) fn is_over(&mut self, address: IpAddr, node: IpAddr, now: Instant) -> bool {
        let known = self.open.get(&address);
        let known = known.filter(|known| known.node == node && now.duration_since(known.seen) < FORGOTTEN_AFTER);
        let since = known.map_or(now, |known| known.since);
        self.open.insert(address, Contest { node, since, seen: now });
        now.duration_since(since) >= TIME_TO_LET_GO
    }

    /// Nobody, or a stranger, answers for it.
    pub(super) fn end(&mut self, address: IpAddr) {
        self.open.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_its_time_to_let_go() {
        let (address, node, other) = ([172, 18, 0, 100].into(), [172, 18, 0, 3].into(), [172, 18, 0, 4].into());
        let mut contests = Contests::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!contests.is_over(address, node, at(0)));
        assert!(!contests.is_over(address, node, at(4)));
        assert!(contests.is_over(address, node, at(5)));
        assert!(!contests.is_over(address, other, at(6)), "another node, another time");
        assert!(contests.is_over(address, other, at(11)));
        contests.end(address);
        assert!(!contests.is_over(address, other, at(12)), "it had let go in between");
        assert!(!contests.is_over(address, other, at(200)), "nobody had wanted it for long");
        assert!(contests.is_over(address, other, at(205)));
    }
}
