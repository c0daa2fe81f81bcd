//! The names of what is measured.

use std::net::IpAddr;

use clap::ValueEnum;
use egress_common::abi::Family;
use egress_lab::topology::addresses::Dual;

pub(super) const fn of_family(addresses: Dual, family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(addresses.v4),
        Family::V6 => IpAddr::V6(addresses.v6),
    }
}

/// Where the gateway is, seen from the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PacketPath {
    /// On the pod's node.
    Local,
    /// On another node: encapsulated in both directions.
    Remote,
}

impl PacketPath {
    pub(super) const ALL: [Self; 2] = [Self::Local, Self::Remote];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Remote => "remote",
        }
    }
}

/// Who carries the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Peer {
    /// No NAT, and no netfilter rule in the namespaces; remote: VXLAN and routes.
    Plain,
    /// Masquerade on the node; remote: policy routing, VXLAN, SNAT on the gateway.
    Netfilter,
    /// Real agents.
    Ours,
    /// Real agents that leave the overlay to its device: a remote path only.
    OursByDevice,
}

impl Peer {
    pub(super) const ALL: [Self; 4] = [Self::Plain, Self::Netfilter, Self::Ours, Self::OursByDevice];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Netfilter => "netfilter",
            Self::Ours => "ours",
            Self::OursByDevice => "ours-device",
        }
    }

    /// Number of the peer's first node; the second, the gateway of its remote path, is the next one.
    pub(super) const fn source_node(self) -> usize {
        match self {
            Self::Ours => 1,
            Self::Netfilter => 3,
            Self::Plain => 5,
            Self::OursByDevice => 7,
        }
    }

    pub(super) const fn paths(self) -> &'static [PacketPath] {
        match self {
            Self::Plain | Self::Netfilter | Self::Ours => &PacketPath::ALL,
            Self::OursByDevice => &[PacketPath::Remote],
        }
    }

    pub(super) const fn is_ours(self) -> bool {
        matches!(self, Self::Ours | Self::OursByDevice)
    }

    pub(super) const fn gateway_node(self) -> usize {
        self.source_node() + 1
    }
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Work {
    /// One byte there and one back, over one connection
    TcpRr,
    /// Connect, one byte there and one back, close
    TcpCrr,
    /// One byte there and one back
    UdpRr,
    /// As much as goes, from the pod to the server
    TcpUp,
    /// As much as goes, from the server to the pod
    TcpDown,
    /// 64-byte UDP packets injected at the management port's far end, dropped after the outside NIC
    Forwarding,
    /// As tcp-rr, over IPv6
    TcpRr6,
    /// As forwarding, over IPv6
    Forwarding6,
    /// Forwarding on one core and on two, of one pod and of many
    Cores,
    /// Forwarding with 1 k to 100 k flows, and with 1,000 closed TCP connections a second beside it
    Churn,
    /// Nanoseconds per packet of single programs
    Programs,
    /// Connections of a pod beside one that opens 5,000 UDP flows a second (five minutes, not in a default run)
    Isolation,
    /// The longest wait of a ping beside full maps and a SYN flood (ten minutes, not in a default run)
    Stalls,
    /// What passes of a pod with a bandwidth limit of 10 Mbit/s to 10 Gbit/s (two minutes, not in a default run)
    Limits,
    /// Packets through an egress router's pod, and its ADD and DEL (two minutes, not in a default run)
    EgressRouter,
    /// The volume of the log of NAT: 1,000 pods with 100 connections a second (eleven minutes, not in a default run)
    NatLog,
}

impl Work {
    pub(super) const ALL: [Self; 16] = [
        Self::TcpRr,
        Self::TcpCrr,
        Self::UdpRr,
        Self::TcpUp,
        Self::TcpDown,
        Self::Forwarding,
        Self::TcpRr6,
        Self::Forwarding6,
        Self::Cores,
        Self::Churn,
        Self::Programs,
        Self::Isolation,
        Self::Stalls,
        Self::Limits,
        Self::EgressRouter,
        Self::NatLog,
    ];

    /// What the names of its rows begin with.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::TcpRr => "TCP request/response",
            Self::TcpCrr => "TCP connect/request/close",
            Self::UdpRr => "UDP request/response",
            Self::TcpUp => "TCP stream to the server",
            Self::TcpDown => "TCP stream to the pod",
            Self::Forwarding => "forwarding, 64-byte UDP",
            Self::TcpRr6 => "TCP request/response, IPv6",
            Self::Forwarding6 => "forwarding, 64-byte UDP, IPv6",
            Self::Cores => "cores",
            Self::Churn => "churn",
            Self::Programs => "programs",
            Self::Isolation => "isolation",
            Self::Stalls => "stalls",
            Self::Limits => "limits",
            Self::EgressRouter => "egress router",
            Self::NatLog => "NAT log",
        }
    }

    pub(super) const fn unit(self) -> &'static str {
        match self {
            Self::TcpRr | Self::TcpCrr | Self::UdpRr | Self::TcpRr6 => "requests/s",
            Self::TcpUp | Self::TcpDown | Self::Limits => "Mbit/s",
            Self::Forwarding | Self::Forwarding6 | Self::Cores | Self::Churn | Self::EgressRouter => "packets/s",
            Self::Programs => "ns",
            Self::Isolation | Self::Stalls => "ms",
            Self::NatLog => "MB",
        }
    }

    /// Whether it is measured where nothing is asked for: what takes minutes has to be.
    pub(super) const fn is_default(self) -> bool {
        !matches!(self, Self::Isolation | Self::Stalls | Self::Limits | Self::EgressRouter | Self::NatLog)
    }

    pub(super) const fn family(self) -> Family {
        match self {
            Self::TcpRr6 | Self::Forwarding6 => Family::V6,
            _ => Family::V4,
        }
    }

    /// Whether packets travel through the lab.
    pub(super) const fn is_traffic(self) -> bool {
        match self {
            Self::TcpRr
            | Self::TcpCrr
            | Self::UdpRr
            | Self::TcpUp
            | Self::TcpDown
            | Self::Forwarding
            | Self::TcpRr6
            | Self::Forwarding6
            | Self::Cores
            | Self::Churn => true,
            Self::Programs | Self::Isolation | Self::Stalls | Self::Limits | Self::EgressRouter | Self::NatLog => false,
        }
    }
}
