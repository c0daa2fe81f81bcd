//! Options of a node's host. Each option is a property of real nodes that has broken a datapath.

/// Reverse path filtering of the host, as in `net.ipv4.conf.*.rp_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReversePath {
    Off,
    Loose,
    /// A packet is dropped unless its source is routed by the interface that it came in by.
    Strict,
}

impl ReversePath {
    /// The value of the setting.
    pub fn value(self) -> u8 {
        match self {
            Self::Off => 0,
            Self::Strict => 1,
            Self::Loose => 2,
        }
    }
}

/// What `eth1` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NicKind {
    Veth,
    /// It filters multicast, as a NIC does.
    Macvlan,
    /// A bridge with the cable as its port, with the kernel's multicast snooping.
    Bridge,
}

/// A node's interface on the second network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecondNic {
    pub kind: NicKind,
    /// In bytes, also of the switch's port.
    pub mtu: u32,
    /// `net.ipv4.conf.eth1.forwarding`, and the same of IPv6. That of IPv6 stops no packet: Linux asks `conf.all` there.
    pub forwards: bool,
}

impl Default for SecondNic {
    fn default() -> Self {
        Self { kind: NicKind::Veth, mtu: 1500, forwards: true }
    }
}

/// How pods are connected, the same on all nodes of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cni {
    /// As in OVN-Kubernetes, made of the kernel's own forwarding: behind a router with the first address of the pod subnet; the
    /// node has the second, on a port of its own, and pods of other nodes are behind an overlay.
    Routed,
    /// The CNI plugin `bridge` with `host-local`: a bridge of the node has the first address of the pod subnet, pods have those
    /// from the second on, and pods of other nodes are behind these (host-gw). No pod's address is announced.
    Bridge,
    /// A real OVN, with the addresses of `Routed`.
    Ovn,
}

impl Cni {
    /// Whether each node has `ovn-k8s-mp0` and OVN-Kubernetes' addresses and annotations.
    pub fn is_ovn_kubernetes(self) -> bool {
        match self {
            Self::Routed | Self::Ovn => true,
            Self::Bridge => false,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostConfig {
    pub cni: Cni,
    /// kube-proxy's rule: drop forwarded packets in conntrack state invalid.
    pub drop_invalid: bool,
    /// A firewall's FORWARD chain: established, what comes new from mp0, what was DNATed, and nothing else.
    pub stateful_forward: bool,
    /// The service proxy: ClusterIPs and the NodePort (external traffic policy Local, so the client address stays).
    pub service_proxy: bool,
    /// `breth0` is a macvlan, which filters multicast as a NIC does, instead of a plain veth.
    pub macvlan_uplink: bool,
    /// The CNI's masquerade leaves packets with mark 0x3f0 alone.
    pub masquerade_spares_mark: bool,
    /// Off: `breth0`, mp0 and the pods compute checksums themselves, so that those on the wire are real.
    pub checksum_offload: bool,
    /// Off: no segment larger than the MTU crosses `breth0`, mp0 and the pods' interfaces in one piece.
    pub segmentation_offload: bool,
    pub reverse_path: ReversePath,
    /// `eth1`, on the second network, which a lab has if one of its nodes is on it.
    pub second: Option<SecondNic>,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            cni: Cni::Routed,
            drop_invalid: false,
            stateful_forward: false,
            service_proxy: true,
            macvlan_uplink: false,
            masquerade_spares_mark: false,
            checksum_offload: true,
            segmentation_offload: true,
            reverse_path: ReversePath::Loose,
            second: None,
        }
    }
}

impl HostConfig {
    /// Mixed options: with three nodes, each option is on for some node and off for another.
    pub fn mixed(index: usize) -> Self {
        let base = Self::default();
        match index % 3 {
            0 => Self { drop_invalid: true, masquerade_spares_mark: true, checksum_offload: false, ..base },
            1 => Self { macvlan_uplink: true, reverse_path: ReversePath::Off, ..base },
            _ => Self {
                stateful_forward: true,
                drop_invalid: true,
                masquerade_spares_mark: true,
                checksum_offload: false,
                segmentation_offload: false,
                ..base
            },
        }
    }

    /// The options that are on, for the terminal.
    pub fn summary(&self) -> String {
        let named = [
            (self.cni == Cni::Bridge, "bridge-cni"),
            (self.cni == Cni::Ovn, "ovn"),
            (self.drop_invalid, "drops-invalid"),
            (self.stateful_forward, "stateful-forward"),
            (self.service_proxy, "service-proxy"),
            (self.macvlan_uplink, "macvlan-uplink"),
            (self.masquerade_spares_mark, "masquerade-spares-mark"),
            (!self.checksum_offload, "checksum-offload-off"),
            (!self.segmentation_offload, "segmentation-offload-off"),
            (self.reverse_path == ReversePath::Loose, "rp-filter-loose"),
            (self.reverse_path == ReversePath::Strict, "rp-filter-strict"),
            (self.second.is_some(), "second-network"),
        ];
        let on: Vec<&str> = named.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        if on.is_empty() { "none".to_owned() } else { on.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_nodes_have_each_option_on_and_off() {
        let nodes: Vec<HostConfig> = (0..3).map(HostConfig::mixed).collect();
        let questions: [fn(&HostConfig) -> bool; 7] = [
            |config| config.drop_invalid,
            |config| config.stateful_forward,
            |config| config.macvlan_uplink,
            |config| config.masquerade_spares_mark,
            |config| config.checksum_offload,
            |config| config.segmentation_offload,
            |config| config.reverse_path == ReversePath::Loose,
        ];
        for question in questions {
            assert!(nodes.iter().any(question));
            assert!(!nodes.iter().all(question));
        }
    }
}
