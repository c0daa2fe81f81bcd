//! What an outage of the API server costs an agent besides traffic: lines in its log, and memory.

use std::fs;

use anyhow::Result;

use egress_lab::agents::Agent;

/// That the server is gone, and of the former leader that it is none any more; one for what chance adds.
const WARNINGS: usize = 3;
/// Whatever an agent keeps for each try in vain would be more, after minutes.
const MEMORY_KIB: u64 = 32 * 1024;

/// Of each agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OutageCost(Vec<One>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct One {
    name: String,
    warnings: usize,
    resident_kib: u64,
}

impl OutageCost {
    pub(super) fn of(agents: &mut [Agent]) -> Result<Self> {
        agents.iter_mut().map(one).collect::<Result<_>>().map(Self)
    }

    /// The most that one agent has paid since, for people.
    pub(super) fn since(&self, before: &Self) -> String {
        let pairs = || self.0.iter().zip(&before.0);
        let warnings = pairs().map(|(now, then)| now.warnings - then.warnings).max().unwrap_or(0);
        let memory = pairs().map(|(now, then)| now.resident_kib.saturating_sub(then.resident_kib)).max().unwrap_or(0);
        format!("{warnings} warnings and {memory} KiB at most for an agent")
    }

    /// What is too much.
    pub(super) fn excess(&self, before: &Self) -> Option<String> {
        self.0.iter().zip(&before.0).find_map(|(now, then)| {
            let warnings = now.warnings - then.warnings;
            let memory = now.resident_kib.saturating_sub(then.resident_kib);
            (warnings > WARNINGS || memory > MEMORY_KIB)
                .then(|| format!("the agent of {} has warned {warnings} times and taken {memory} KiB", now.name))
        })
    }
}

fn one(agent: &mut Agent) -> Result<One> {
    let warnings = fs::read_to_string(agent.log())?.lines().filter(|line| line.contains(" WARN ")).count();
    Ok(One { name: agent.node().name(), warnings, resident_kib: agent.resident_kib()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(warnings: usize, resident_kib: u64) -> OutageCost {
        OutageCost(vec![One { name: "node1".into(), warnings, resident_kib }])
    }

    #[test]
    fn a_line_for_each_try_is_too_much_and_so_is_memory_that_grows() {
        let before = cost(4, 50_000);
        assert_eq!(cost(6, 51_000).excess(&before), None);
        assert_eq!(cost(6, 51_000).since(&before), "2 warnings and 1000 KiB at most for an agent");
        assert!(cost(30, 50_000).excess(&before).is_some());
        assert!(cost(4, 100_000).excess(&before).is_some());
        assert_eq!(cost(4, 10_000).excess(&before), None, "it may shrink");
    }
}
