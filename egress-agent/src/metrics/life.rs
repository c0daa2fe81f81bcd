//! Do the agent's loops live? `/healthz` fails where one does not, and the process is started anew.
//!
//! Each notes that it moves. The node's half does so with each turn, of which there is one each few seconds at least, and
//! behind each action: it may be busy for minutes, with claims above all, and lives all the while; and an answer that comes
//! late on a slow machine says nothing. The fence looks each second at least.

use std::time::Duration;

/// How long each may be silent.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// One action, and one look at the kernel, takes less.
    pub moves: Duration,
    /// The fence looks again within a second.
    pub beats: Duration,
    /// The verifier has its time on a slow machine.
    pub starts: Duration,
    /// Two requests to the API server may each take their time between two looks at the Lease.
    pub election: Duration,
}

pub const LIMITS: Limits = Limits {
    moves: Duration::from_secs(60),
    beats: Duration::from_secs(10),
    starts: Duration::from_secs(300),
    election: Duration::from_secs(30),
};

/// What does not live, in one line.
pub fn judge(limits: &Limits, node: Duration, fence: Duration) -> Result<(), String> {
    if node >= limits.moves {
        return Err(format!("the node's half has not moved for {} s", node.as_secs()));
    }
    if fence >= limits.beats {
        return Err(format!("the fence has not looked for {} s", fence.as_secs()));
    }
    Ok(())
}

/// The same of a controller.
pub fn judge_election(limits: &Limits, election: Duration) -> Result<(), String> {
    if election >= limits.election {
        return Err(format!("the leader election has not looked for {} s", election.as_secs()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loop_has_its_time() {
        let seconds = Duration::from_secs;
        let said = |node, fence| judge(&LIMITS, node, fence).err().unwrap_or_default();
        assert_eq!(said(seconds(59), seconds(9)), "", "busy");
        assert_eq!(said(seconds(60), seconds(1)), "the node's half has not moved for 60 s");
        assert_eq!(said(seconds(1), seconds(10)), "the fence has not looked for 10 s");
    }
}
