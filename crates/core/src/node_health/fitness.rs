//! Whether this node can carry egress traffic. Pure.

use std::fmt;
use std::net::IpAddr;

use crate::model::node::UnservedAddresses;
use crate::node_health::liveness::AgentAnswer;

/// The state of the uplink, as far as it is watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UplinkState {
    /// No problem is known.
    #[default]
    Works,
    Missing(String),
    NoCarrier(String),
    /// Next hops that do not answer.
    NextHopLost(Vec<IpAddr>),
}

/// Why a node cannot carry egress traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServingObstacle {
    /// The kernel has not reached the desired state.
    NotInStep,
    UplinkState(UplinkState),
}

impl ServingObstacle {
    pub fn of(in_step: bool, uplink: &UplinkState) -> Option<Self> {
        match uplink {
            _ if !in_step => Some(Self::NotInStep),
            UplinkState::Works => None,
            trouble => Some(Self::UplinkState(trouble.clone())),
        }
    }

    /// The reason code in the health answer.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotInStep | Self::UplinkState(UplinkState::Works) => "not-in-step",
            Self::UplinkState(UplinkState::Missing(_)) => "no-uplink",
            Self::UplinkState(UplinkState::NoCarrier(_)) => "no-carrier",
            Self::UplinkState(UplinkState::NextHopLost(_)) => NEXT_HOP,
        }
    }
}

const NEXT_HOP: &str = "next-hop";

/// The answer of a node that does not serve, by its reason code.
pub fn refusal(code: Option<&str>) -> AgentAnswer {
    if code == Some(NEXT_HOP) { AgentAnswer::NextHopLost } else { AgentAnswer::NotServing }
}

impl fmt::Display for ServingObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInStep | Self::UplinkState(UplinkState::Works) => {
                f.write_str("the kernel does not do what the cluster wants")
            }
            Self::UplinkState(UplinkState::Missing(name)) => write!(f, "there is no interface {name}"),
            Self::UplinkState(UplinkState::NoCarrier(name)) => write!(f, "{name} is down or has no carrier"),
            Self::UplinkState(UplinkState::NextHopLost(hops)) => {
                let hops: Vec<String> = hops.iter().map(IpAddr::to_string).collect();
                write!(f, "the next hop {} does not answer", hops.join(" and "))
            }
        }
    }
}

/// Whether this node has reached the desired state, and where it answers health checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub serving: bool,
    /// Where health checks are answered.
    pub addresses: Vec<IpAddr>,
    /// Assigned addresses that are not served.
    pub unserved: UnservedAddresses,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_obstacle_has_its_reason_and_only_the_next_hop_is_shared_with_others() {
        let hops = vec!["172.18.0.1".parse().expect("a literal"), "fd00::1".parse().expect("a literal")];
        let lost = UplinkState::NextHopLost(hops);
        let cases = [
            (true, UplinkState::Works, None, AgentAnswer::NotServing),
            (false, UplinkState::Works, Some("the kernel"), AgentAnswer::NotServing),
            (false, lost.clone(), Some("the kernel"), AgentAnswer::NotServing),
            (true, UplinkState::Missing("eth0".into()), Some("no interface eth0"), AgentAnswer::NotServing),
            (true, UplinkState::NoCarrier("eth0".into()), Some("eth0 is down"), AgentAnswer::NotServing),
            (true, lost, Some("172.18.0.1 and fd00::1 does not"), AgentAnswer::NextHopLost),
        ];
        for (in_step, uplink, expected, answer) in cases {
            let obstacle = ServingObstacle::of(in_step, &uplink);
            assert_eq!(obstacle.is_some(), expected.is_some(), "{uplink:?}");
            let text = obstacle.as_ref().map(ServingObstacle::to_string).unwrap_or_default();
            assert!(text.contains(expected.unwrap_or_default()), "{text}");
            assert_eq!(refusal(obstacle.as_ref().map(ServingObstacle::code)), answer);
        }
    }
}
