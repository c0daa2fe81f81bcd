//! What makes one node's host unlike another's. Real hosts are not bare; each quirk here is one thing that real
//! nodes carry and that a datapath has been seen to trip over.

/// Reverse path filtering of the host, as in `net.ipv4.conf.*.rp_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReversePath {
    Off,
    Loose,
}

/// How pods are connected; one way in all of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cni {
    /// As in OVN-Kubernetes: behind a router with the first address of the pod subnet; the node has the second, on a port of
    /// its own, and pods of other nodes are behind an overlay.
    Ovn,
    /// The CNI plugin `bridge` with `host-local`: a bridge of the node has the first address of the pod subnet, pods have those
    /// from the second on, and pods of other nodes are behind these (host-gw). No pod's address is announced.
    Bridge,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quirks {
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
}

impl Default for Quirks {
    fn default() -> Self {
        Self {
            cni: Cni::Ovn,
            drop_invalid: false,
            stateful_forward: false,
            service_proxy: true,
            macvlan_uplink: false,
            masquerade_spares_mark: false,
            checksum_offload: true,
            segmentation_offload: true,
            reverse_path: ReversePath::Loose,
        }
    }
}

impl Quirks {
    /// A mixture such that a lab of three nodes has every quirk on some node and lacks it on another.
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

    /// For people: which quirks are on.
    pub fn summary(&self) -> String {
        let named = [
            (self.cni == Cni::Bridge, "bridge-cni"),
            (self.drop_invalid, "drops-invalid"),
            (self.stateful_forward, "stateful-forward"),
            (self.service_proxy, "service-proxy"),
            (self.macvlan_uplink, "macvlan-uplink"),
            (self.masquerade_spares_mark, "masquerade-spares-mark"),
            (!self.checksum_offload, "checksum-offload-off"),
            (!self.segmentation_offload, "segmentation-offload-off"),
            (self.reverse_path == ReversePath::Loose, "rp-filter-loose"),
        ];
        let on: Vec<&str> = named.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        if on.is_empty() { "none".to_owned() } else { on.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_nodes_have_each_quirk_and_its_absence() {
        let nodes: Vec<Quirks> = (0..3).map(Quirks::mixed).collect();
        let questions: [fn(&Quirks) -> bool; 7] = [
            |quirks| quirks.drop_invalid,
            |quirks| quirks.stateful_forward,
            |quirks| quirks.macvlan_uplink,
            |quirks| quirks.masquerade_spares_mark,
            |quirks| quirks.checksum_offload,
            |quirks| quirks.segmentation_offload,
            |quirks| quirks.reverse_path == ReversePath::Loose,
        ];
        for question in questions {
            assert!(nodes.iter().any(question));
            assert!(!nodes.iter().all(question));
        }
    }
}
