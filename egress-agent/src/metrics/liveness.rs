//! Liveness of the main loops. `/healthz` fails if one of them stalls, and the kubelet restarts the process.
//!
//! Each loop notes a heartbeat. The reconciler does so in each cycle, which comes every few seconds, and after each action:
//! it may be busy for minutes, with claims above all, and is live meanwhile. A late answer on a slow machine proves nothing,
//! so answers do not count. The lease keeper runs at least every second.

use std::time::Duration;

/// How long each loop may go without a heartbeat.
#[derive(Clone, Copy, Debug)]
pub struct HeartbeatLimits {
    /// Longer than one action, or one read of the kernel's state, takes.
    pub reconciler: Duration,
    pub lease_keeper: Duration,
    /// The verifier needs its time on a slow machine.
    pub startup: Duration,
    /// Between two looks at the Lease, two requests to the API server may each run into their timeout.
    pub leader_election: Duration,
}

pub const LIMITS: HeartbeatLimits = HeartbeatLimits {
    reconciler: Duration::from_secs(60),
    lease_keeper: Duration::from_secs(10),
    startup: Duration::from_secs(300),
    leader_election: Duration::from_secs(30),
};

/// One line about the stalled loop of an agent, from the age of each heartbeat.
pub fn check_agent(limits: &HeartbeatLimits, reconciler: Duration, lease_keeper: Duration) -> Result<(), String> {
    check("reconciler", reconciler, limits.reconciler)?;
    check("lease keeper", lease_keeper, limits.lease_keeper)
}

/// The same for a controller.
pub fn check_controller(limits: &HeartbeatLimits, leader_election: Duration) -> Result<(), String> {
    check("leader election", leader_election, limits.leader_election)
}

fn check(name: &str, age: Duration, limit: Duration) -> Result<(), String> {
    if age >= limit {
        return Err(format!("the {name} has made no progress for {} s", age.as_secs()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loop_has_its_own_limit() {
        let seconds = Duration::from_secs;
        let check = |reconciler, lease_keeper| check_agent(&LIMITS, reconciler, lease_keeper).err().unwrap_or_default();
        assert_eq!(check(seconds(59), seconds(9)), "", "busy");
        assert_eq!(check(seconds(60), seconds(1)), "the reconciler has made no progress for 60 s");
        assert_eq!(check(seconds(1), seconds(10)), "the lease keeper has made no progress for 10 s");
    }
}
