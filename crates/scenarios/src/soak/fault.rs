//! The faults, and which of them comes in which round. Pure: seed and number in, plan out, so that any round can be repeated alone.

use std::time::Duration;

use clap::ValueEnum;
use egress_lab::random::SplitMix64;

use super::loaded_cluster::FAR;

/// What befalls the cluster in one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
pub(super) enum Fault {
    /// No network carries anything of a gateway any more; its links stay up
    Cut,
    /// A gateway without links and without agent
    PowerOff,
    /// The uplink of a gateway has no carrier
    Uplink,
    /// The CNI's network is cut on a gateway
    Management,
    /// The agent of a gateway is killed
    Kill,
    /// The agent of a gateway is stopped (SIGSTOP)
    Stop,
    /// The API server answers no client
    ApiServer,
    /// A gateway loses its label
    Label,
    /// An object gets another address
    Edit,
    /// An object is deleted and recreated
    Recreate,
    /// The controller that leads is killed
    Leader,
    /// All agents and controllers are killed and started at once
    Restart,
    /// A gateway's machine is stopped and resumed
    Pause,
    /// A gateway reaches all but the API server
    NoApi,
    /// A gateway reaches all but the other nodes
    Isolate,
    /// The agent of a gateway is killed again and again while it starts
    CrashLoop,
    /// The Node object of a gateway is deleted and created again
    DeleteNode,
    /// A further interface of a gateway has no carrier
    Nic,
    /// The switch forwards nothing of a further interface of a gateway
    NicSwitch,
}

/// What a fault is expected to do to traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// The address goes to another gateway, and until then connections fail.
    FailsOver,
    /// The address goes to another gateway by a hand-over.
    HandsOver,
    /// Nothing moves and nothing is lost.
    Nothing,
    /// Nothing moves. The gateway's addresses are away for a moment when it is over.
    Interrupts,
    /// The object itself changes: what it served ends.
    Changes,
}

impl Fault {
    pub(super) const ALL: [Self; 19] = [
        Self::Cut,
        Self::PowerOff,
        Self::Uplink,
        Self::Management,
        Self::Kill,
        Self::Stop,
        Self::ApiServer,
        Self::Label,
        Self::Edit,
        Self::Recreate,
        Self::Leader,
        Self::Restart,
        Self::Pause,
        Self::NoApi,
        Self::Isolate,
        Self::CrashLoop,
        Self::DeleteNode,
        Self::Nic,
        Self::NicSwitch,
    ];

    /// As it is typed.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cut => "cut",
            Self::PowerOff => "power-off",
            Self::Uplink => "uplink",
            Self::Management => "management",
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::ApiServer => "api-server",
            Self::Label => "label",
            Self::Edit => "edit",
            Self::Recreate => "recreate",
            Self::Leader => "leader",
            Self::Restart => "restart",
            Self::Pause => "pause",
            Self::NoApi => "no-api",
            Self::Isolate => "isolate",
            Self::CrashLoop => "crash-loop",
            Self::DeleteNode => "delete-node",
            Self::Nic => "nic",
            Self::NicSwitch => "nic-switch",
        }
    }

    pub(super) fn effect(self) -> Effect {
        match self {
            Self::Cut
            | Self::PowerOff
            | Self::Uplink
            | Self::Pause
            | Self::Isolate
            | Self::DeleteNode
            | Self::Nic
            | Self::NicSwitch => Effect::FailsOver,
            Self::Label => Effect::HandsOver,
            Self::Stop => Effect::Interrupts,
            Self::Edit | Self::Recreate => Effect::Changes,
            Self::Management
            | Self::Kill
            | Self::ApiServer
            | Self::Leader
            | Self::Restart
            | Self::NoApi
            | Self::CrashLoop => Effect::Nothing,
        }
    }

    /// Whether it concerns the addresses of one interface that is not the uplink, and no others.
    pub(super) fn is_of_further_interface(self) -> bool {
        matches!(self, Self::Nic | Self::NicSwitch)
    }

    /// Seconds that it may last: long enough to move what moves, and less than the grace of a silent agent, in which an
    /// agent that was killed starts, and one that could not be reached is found, too.
    fn lasts(self, extent: Extent) -> (u64, u64) {
        match (self, extent) {
            (Self::Cut | Self::PowerOff | Self::Uplink | Self::Isolate | Self::Nic | Self::NicSwitch, _) => (7, 9),
            (Self::Pause, _) => (2, 5),
            (Self::DeleteNode, _) => (3, 6),
            (Self::Stop | Self::Kill | Self::Management | Self::NoApi | Self::CrashLoop, Extent::Share) => (2, 6),
            (Self::Stop, Extent::Whole { .. }) => (2, 30),
            (Self::Kill | Self::Management | Self::NoApi, Extent::Whole { .. }) => (2, 20),
            // The last start is in time only where the grace has not passed: less than a start and the grace together.
            (Self::CrashLoop, Extent::Whole { .. }) => (2, 12),
            (Self::ApiServer, Extent::Share) => (3, 7),
            (Self::ApiServer, Extent::Whole { longest_outage }) => (3, longest_outage),
            (Self::Label | Self::Edit | Self::Recreate, _) => (1, 3),
            (Self::Leader, _) => (1, 9),
            (Self::Restart, _) => (0, 1),
        }
    }
}

/// How much time there is for a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// As little as shows what a fault does.
    Share,
    /// All that is promised; seconds for the API server.
    Whole { longest_outage: u64 },
}

/// What one round does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RoundPlan {
    pub(super) round: usize,
    pub(super) fault: Fault,
    /// Which of the addresses the fault is about.
    pub(super) subject: usize,
    pub(super) lasts: Duration,
}

impl RoundPlan {
    /// The plan of a round (from 1). `only` are the faults to choose from, all where there are none.
    pub(super) fn of(seed: u64, round: usize, only: &[Fault], extent: Extent) -> Self {
        let mut random = SplitMix64::of_round(seed, round);
        let faults: &[Fault] = if only.is_empty() { &Fault::ALL } else { only };
        // Fail-overs are what is measured: half of the rounds, where there is a choice.
        let moving: Vec<Fault> = faults.iter().copied().filter(|fault| fault.effect() == Effect::FailsOver).collect();
        let moves = random.below(2) == 0 && !moving.is_empty();
        let choice = if moves { moving.as_slice() } else { faults };
        let fault = choice[random.index(choice.len())];
        let of_uplink = usize::from(random.below(2) == 1);
        let subject = if fault.is_of_further_interface() { FAR } else { of_uplink };
        let (least, most) = fault.lasts(extent);
        let lasts = Duration::from_millis(least * 1000 + random.below(most.saturating_sub(least) * 1000));
        Self { round, fault, subject, lasts }
    }

    /// How often the fault is put on again while it lasts, where it is. A crash loop ends each start at another point.
    pub(super) fn again(&self) -> Option<Duration> {
        let rest = u64::from(self.lasts.subsec_millis());
        (self.fault == Fault::CrashLoop).then(|| Duration::from_millis(300 + 2 * rest))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const WHOLE: Extent = Extent::Whole { longest_outage: 12 };

    #[test]
    fn a_round_is_the_same_whenever_it_is_played() {
        for round in 1..50 {
            assert_eq!(RoundPlan::of(7, round, &[], WHOLE), RoundPlan::of(7, round, &[], WHOLE));
        }
        assert_ne!(
            (1..50).map(|n| RoundPlan::of(7, n, &[], WHOLE)).collect::<Vec<_>>(),
            (1..50).map(|n| RoundPlan::of(8, n, &[], WHOLE)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn every_fault_comes_and_fail_overs_come_most() {
        let plans: Vec<RoundPlan> = (1..=200).map(|round| RoundPlan::of(7, round, &[], WHOLE)).collect();
        let names: BTreeSet<&str> = plans.iter().map(|plan| plan.fault.name()).collect();
        assert_eq!(names.len(), Fault::ALL.len());
        let moving = plans.iter().filter(|plan| plan.fault.effect() == Effect::FailsOver).count();
        assert!((90..=160).contains(&moving), "{moving} of 200");
        assert!(plans.iter().any(|plan| plan.subject == 0) && plans.iter().any(|plan| plan.subject == 1));
    }

    #[test]
    fn a_share_is_short_and_the_whole_has_what_is_promised() {
        let longest = |fault, extent| {
            (1..200).map(|round| RoundPlan::of(7, round, &[fault], extent).lasts.as_secs()).max().unwrap_or_default()
        };
        assert!(Fault::ALL.iter().all(|fault| longest(*fault, Extent::Share) < 10));
        assert_eq!(longest(Fault::Stop, WHOLE), 29);
        assert!((590..600).contains(&longest(Fault::ApiServer, Extent::Whole { longest_outage: 600 })));
    }

    #[test]
    fn a_crash_loop_ends_starts_at_many_points() {
        let plans = (1..50).map(|round| RoundPlan::of(7, round, &[Fault::CrashLoop], WHOLE));
        let times: BTreeSet<Duration> = plans.filter_map(|plan| plan.again()).collect();
        assert!(times.len() > 20 && times.iter().all(|time| (300..2300).contains(&time.as_millis())));
        assert_eq!(RoundPlan::of(7, 1, &[Fault::Kill], WHOLE).again(), None);
    }

    #[test]
    fn one_can_choose() {
        let only = [Fault::Kill, Fault::Label];
        assert!((1..50).all(|round| only.contains(&RoundPlan::of(1, round, &only, WHOLE).fault)));
    }

    #[test]
    fn names_are_as_typed() {
        for fault in Fault::ALL {
            assert_eq!(Fault::from_str(fault.name(), false), Ok(fault));
        }
    }
}
