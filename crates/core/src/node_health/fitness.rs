//! Can this node carry egress traffic? Pure.

use std::fmt;
use std::net::IpAddr;

use crate::model::node::UnservedAddresses;
use crate::node_health::liveness::AgentAnswer;

/// The road from this node to the outside, as far as it is watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Uplink {
    /// Nothing speaks against it.
    #[default]
    Works,
    Missing(String),
    NoCarrier(String),
    /// Next hops that do not answer.
    NextHopLost(Vec<IpAddr>),
}

/// Why a node cannot carry egress traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The kernel does not do what the cluster wants.
    NotInStep,
    Uplink(Uplink),
}

impl Obstacle {
    pub fn of(in_step: bool, uplink: &Uplink) -> Option<Self> {
        match uplink {
            _ if !in_step => Some(Self::NotInStep),
            Uplink::Works => None,
            trouble => Some(Self::Uplink(trouble.clone())),
        }
    }

    /// The reason as the answer bears it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotInStep | Self::Uplink(Uplink::Works) => "not-in-step",
            Self::Uplink(Uplink::Missing(_)) => "no-uplink",
            Self::Uplink(Uplink::NoCarrier(_)) => "no-carrier",
            Self::Uplink(Uplink::NextHopLost(_)) => NEXT_HOP,
        }
    }
}

const NEXT_HOP: &str = "next-hop";

/// What a node says that does not serve, by the reason that it gives.
pub fn refusal(code: Option<&str>) -> AgentAnswer {
    if code == Some(NEXT_HOP) { AgentAnswer::NextHopLost } else { AgentAnswer::NotServing }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInStep | Self::Uplink(Uplink::Works) => {
                f.write_str("the kernel does not do what the cluster wants")
            }
            Self::Uplink(Uplink::Missing(name)) => write!(f, "there is no interface {name}"),
            Self::Uplink(Uplink::NoCarrier(name)) => write!(f, "{name} is down or has no carrier"),
            Self::Uplink(Uplink::NextHopLost(hops)) => {
                let hops: Vec<String> = hops.iter().map(IpAddr::to_string).collect();
                write!(f, "the next hop {} does not answer", hops.join(" and "))
            }
        }
    }
}

/// Whether this node does what the cluster wants, and where it can be asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub serving: bool,
    /// Where health checks are answered.
    pub addresses: Vec<IpAddr>,
    /// What it has been assigned and does not serve.
    pub unserved: UnservedAddresses,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_obstacle_has_its_reason_and_only_the_next_hop_is_shared_with_others() {
        let hops = vec!["172.18.0.1".parse().expect("a literal"), "fd00::1".parse().expect("a literal")];
        let lost = Uplink::NextHopLost(hops);
        let cases = [
            (true, Uplink::Works, None, AgentAnswer::NotServing),
            (false, Uplink::Works, Some("the kernel"), AgentAnswer::NotServing),
            (false, lost.clone(), Some("the kernel"), AgentAnswer::NotServing),
            (true, Uplink::Missing("eth0".into()), Some("no interface eth0"), AgentAnswer::NotServing),
            (true, Uplink::NoCarrier("eth0".into()), Some("eth0 is down"), AgentAnswer::NotServing),
            (true, lost, Some("172.18.0.1 and fd00::1 does not"), AgentAnswer::NextHopLost),
        ];
        for (in_step, uplink, words, answer) in cases {
            let obstacle = Obstacle::of(in_step, &uplink);
            assert_eq!(obstacle.is_some(), words.is_some(), "{uplink:?}");
            let text = obstacle.as_ref().map(Obstacle::to_string).unwrap_or_default();
            assert!(text.contains(words.unwrap_or_default()), "{text}");
            assert_eq!(refusal(obstacle.as_ref().map(Obstacle::code)), answer);
        }
    }
}
