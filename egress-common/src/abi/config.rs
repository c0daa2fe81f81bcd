//! Map `config`: one value, the configuration of the programs on this node.

use super::{Addr, Family, abi};

/// What to do with a packet from a pod subnet's address that the agent does not know (yet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OnUnknownPod {
    Pass = 1,
    Drop = 2,
    /// Pass until [`Config::pass_until_secs`], which an agent that watches the pods extends.
    PassWhileFollowed = 3,
}

/// Ports that NAT may use on the node's own address: outside the host's ephemeral, reserved and NodePort ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PortRange {
    pub first: u16,
    pub last: u16,
}
abi!(PortRange, 4);

/// How long an entry may be idle, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Timeouts {
    pub tcp_established: u32,
    /// Until both sides have spoken.
    pub tcp_opening: u32,
    /// After both sides have finished, or one has reset.
    pub tcp_closing: u32,
    /// After an answer.
    pub udp: u32,
    /// ICMP and ICMPv6 echo, after an answer.
    pub icmp: u32,
    /// Every other protocol.
    pub other: u32,
    /// What is not TCP, until the first answer; where the protocol's own timeout is not shorter.
    pub unreplied: u32,
}
abi!(Timeouts, 28);

impl Timeouts {
    /// RFC 5382 section 5 and RFC 7857 section 2 (TCP), RFC 4787 section 4.3 (UDP: two minutes at least, five
    /// recommended), RFC 5508 section 3.2 (ICMP); unreplied as Linux has it (`nf_conntrack_udp_timeout`).
    pub const DEFAULT: Self = Self {
        tcp_established: 7_440,
        tcp_opening: 240,
        tcp_closing: 240,
        udp: 300,
        icmp: 60,
        other: 300,
        unreplied: 30,
    };
}

/// Size of the map `inbound` where nothing else is asked for.
pub const DEFAULT_INBOUND: u32 = 65_536;

/// Where the kernel's `struct sk_buff` has what the programs read of it (bytes), from the kernel's description of its types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PacketLayout {
    /// `csum_start`, and `csum_offset` after it.
    pub checksum: u16,
    /// `head`, and `data` after it.
    pub head: u16,
}
abi!(PacketLayout, 4);

/// The value of `config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Config {
    /// Non-zero once written.
    pub generation: u32,
    /// Raised by the agent on any change of routes or neighbours: cached next hops of another value are looked up again.
    pub route_generation: u32,
    pub uplink_ifindex: u32,
    pub mgmt_ifindex: u32,
    /// The VXLAN device in external mode.
    pub overlay_ifindex: u32,
    /// UDP port of the overlay.
    pub tunnel_port: u32,
    pub uplink_mtu: u32,
    /// MTU of the management port: what fits to a pod.
    pub pod_mtu: u32,
    /// Largest inner IP packet that the overlay takes.
    pub overlay_mtu: u32,
    on_unknown_pod: u32,
    /// NAT on the node's own address (mark 1008).
    pub node_ports: PortRange,
    /// Address of the node for mark 1008; unspecified where it has none of that family.
    pub node_v4: Addr,
    pub node_v6: Addr,
    /// Tunnel endpoint of this node: its name in `cluster` and `nodes`.
    pub self_node: Addr,
    pub uplink_mac: [u8; 6],
    pub mgmt_mac: [u8; 6],
    /// CLOCK_MONOTONIC (s) since when the programs have tracked the pods' datagrams. Shortly after, the programs cannot
    /// tell whether an inbound datagram answers an older one.
    pub following_since_secs: u32,
    pub timeouts: Timeouts,
    /// Size of the map `inbound`; `decide::to_pod` distributes its entries.
    pub inbound_size: u32,
    /// CLOCK_MONOTONIC (s) until when [`OnUnknownPod::PassWhileFollowed`] passes: without an agent, the programs do not
    /// learn that a selected pod starts.
    pub pass_until_secs: u32,
    /// Most entries of one pod address, in `flows` and (as NAT entries) in `nat`; and of one egress policy.
    pub pod_quota: u32,
    pub policy_quota: u32,
    /// Inner source link address of overlay packets that the programs of this node make. Zero: the overlay device
    /// encapsulates.
    pub overlay_secret: [u8; 6],
    /// Lower half of the priority that `from_pod` sets on packets that it leaves to the stack. The leak guard in
    /// nftables drops packets of selected pods without it. Random, so that no pod can guess it. Zero: no leak guard.
    pub seen: u16,
    /// Lower half of the priority that the programs set on packets that they redirect, by which `to_netdev` and `to_pod`
    /// leave them alone. Random. A pod cannot have it set there: a veth pair resets the priority to zero, `from_pod`
    /// overwrites it, and `to_netdev` requires an input device, which a socket's packet lacks.
    pub redirected: u16,
    /// Not zero where hosts outside reach pods by the pods' own addresses: every port counts as exposed then.
    pub direct_routing: u16,
    /// The running kernel's `struct sk_buff`.
    pub packet_layout: PacketLayout,
    /// Not zero where flows to egress IPs get a random port, and never keep the pod's (RFC 6056 section 3.3.1).
    pub random_ports: u16,
    /// Not zero where the uplink's queueing discipline keeps packets until their departure time (`fq`): limited packets wait
    /// there.
    pub paced_uplink: u16,
    /// Ports of a block, of which each pod has its own on every egress IP; zero: pods share the ports.
    pub port_block: u16,
    pub reserved: u16,
    /// Raised by the agent after every change of the maps that `from_pod` reads (pods, policy, nodes, cluster, owned).
    /// A flow reuses its decision while this number is unchanged. Zero: no decision is reused.
    pub decisions: u32,
    /// Prefixes that contain every pod address and every pod subnet in the maps. Other addresses need no lookup.
    pub pods_v4: Cover<4>,
    pub pods_v6: Cover<8>,
    /// Addresses that may be in the map `owned_addr`. Other addresses need no lookup.
    pub owned: BloomFilter,
}
abi!(Config, 44 + 48 + 16 + 28 + 16 + 8 + 4 + 4 + 4 + 4 + 8 + 16 + 32 + 4);

/// Value of `interfaces`: the node's own addresses on a further egress interface, for packets with the mark 1008; unspecified
/// where it has none of that family. The key is the interface's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct InterfaceAddresses {
    pub v4: Addr,
    pub v6: Addr,
}
abi!(InterfaceAddresses, 32);

impl InterfaceAddresses {
    #[inline(always)]
    pub const fn of(&self, family: Family) -> Addr {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }
}

/// A Bloom filter of 256 bits, one for each address: it may report addresses that were not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct BloomFilter {
    bits: [u32; 8],
}
abi!(BloomFilter, 32);

impl BloomFilter {
    /// Every address.
    pub const ALL: Self = Self { bits: [u32::MAX; 8] };
    /// No address.
    pub const NONE: Self = Self { bits: [0; 8] };

    /// The same with this address.
    #[must_use]
    pub const fn with(mut self, addr: &Addr) -> Self {
        let (word, bit) = Self::place(addr);
        self.bits[word] |= bit;
        self
    }

    /// False only for an address that was not added.
    #[inline(always)]
    pub const fn may_contain(&self, addr: &Addr) -> bool {
        let (word, bit) = Self::place(addr);
        self.bits[word] & bit != 0
    }

    #[inline(always)]
    const fn place(addr: &Addr) -> (usize, u32) {
        let [_, _, c, d] = addr.words();
        // The upper bits of a product depend on all bits of the factor.
        let mixed = (c ^ d).wrapping_mul(0x9e37_79b1) >> 24;
        ((mixed >> 5) as usize & 7, 1 << (mixed & 31))
    }
}

/// A prefix, over all four bytes of IPv4 and the first eight of IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Cover<const N: usize> {
    pub net: [u8; N],
    pub mask: [u8; N],
}

impl<const N: usize> Cover<N> {
    /// Every address.
    pub const ALL: Self = Self { net: [0; N], mask: [0; N] };
    /// No pod's address.
    pub const NONE: Self = Self { net: [0xff; N], mask: [0xff; N] };

    /// The narrowest prefix that contains this one and the first `bits` bits of `bytes`.
    #[must_use]
    pub fn widened(self, bytes: [u8; N], bits: usize) -> Self {
        let none = self == Self::NONE;
        let mut wide = Self::ALL;
        let mut same = true;
        for index in 0..N * 8 {
            let (byte, bit) = (index / 8, 0x80 >> (index % 8));
            let held = none || self.mask[byte] & bit != 0 && self.net[byte] & bit == bytes[byte] & bit;
            same = same && index < bits && held;
            if same {
                wide.mask[byte] |= bit;
                wide.net[byte] |= bytes[byte] & bit;
            }
        }
        wide
    }
}

impl Config {
    pub const EMPTY: Self = Self {
        generation: 0,
        route_generation: 0,
        uplink_ifindex: 0,
        mgmt_ifindex: 0,
        overlay_ifindex: 0,
        tunnel_port: 0,
        uplink_mtu: 0,
        pod_mtu: 0,
        overlay_mtu: 0,
        on_unknown_pod: OnUnknownPod::Drop as u32,
        node_ports: PortRange { first: 0, last: 0 },
        node_v4: Addr::UNSPECIFIED,
        node_v6: Addr::UNSPECIFIED,
        self_node: Addr::UNSPECIFIED,
        uplink_mac: [0; 6],
        mgmt_mac: [0; 6],
        following_since_secs: 0,
        timeouts: Timeouts::DEFAULT,
        inbound_size: DEFAULT_INBOUND,
        pass_until_secs: 0,
        pod_quota: u32::MAX,
        policy_quota: u32::MAX,
        overlay_secret: [0; 6],
        seen: 0,
        redirected: 0,
        direct_routing: 0,
        packet_layout: PacketLayout { checksum: 0, head: 0 },
        random_ports: 0,
        paced_uplink: 0,
        port_block: 0,
        reserved: 0,
        decisions: 0,
        pods_v4: Cover::ALL,
        pods_v6: Cover::ALL,
        owned: BloomFilter::ALL,
    };

    /// Whether the programs encapsulate and decapsulate.
    #[inline(always)]
    pub const fn is_overlay_in_program(&self) -> bool {
        let s = &self.overlay_secret;
        s[0] | s[1] | s[2] | s[3] | s[4] | s[5] != 0
    }

    /// The priority of packets that `from_pod` has seen; `None` without a leak guard.
    #[inline(always)]
    pub const fn seen_priority(&self) -> Option<u32> {
        // The upper half is no traffic class in use.
        if self.seen == 0 { None } else { Some(0xe67e_0000 | self.seen as u32) }
    }

    /// The priority of packets that a program of this node has redirected. The upper half is no traffic class in use,
    /// and differs from that of [`seen_priority`](Self::seen_priority).
    #[inline(always)]
    pub const fn redirected_priority(&self) -> u32 {
        0xe67f_0000 | self.redirected as u32
    }

    /// The same for a packet with an egress IP that may wait for its neighbour: `to_netdev` checks again that this node
    /// owns the address.
    #[inline(always)]
    pub const fn waiting_priority(&self) -> u32 {
        0xe67d_0000 | self.redirected as u32
    }

    /// False if no pod has this address and no pod subnet contains it.
    #[inline(always)]
    pub const fn may_be_pod(&self, addr: &Addr) -> bool {
        const fn word(bytes: &[u8], at: usize) -> u32 {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        }
        let words = addr.words();
        match addr.family() {
            Family::V4 => (words[3] ^ word(&self.pods_v4.net, 0)) & word(&self.pods_v4.mask, 0) == 0,
            Family::V6 => {
                (words[0] ^ word(&self.pods_v6.net, 0)) & word(&self.pods_v6.mask, 0) == 0
                    && (words[1] ^ word(&self.pods_v6.net, 4)) & word(&self.pods_v6.mask, 4) == 0
            }
        }
    }

    #[must_use]
    pub const fn with_on_unknown_pod(self, on: OnUnknownPod) -> Self {
        Self { on_unknown_pod: on as u32, ..self }
    }

    #[cfg(test)]
    pub(crate) const fn of_another_version(self) -> Self {
        Self { on_unknown_pod: 99, ..self }
    }

    #[inline(always)]
    pub const fn on_unknown_pod(&self) -> OnUnknownPod {
        match self.on_unknown_pod {
            1 => OnUnknownPod::Pass,
            3 => OnUnknownPod::PassWhileFollowed,
            _ => OnUnknownPod::Drop,
        }
    }

    /// Whether packets of unknown pods pass at this time (CLOCK_MONOTONIC, ns).
    #[inline(always)]
    pub const fn passes_unknown_pods(&self, now_ns: u64) -> bool {
        match self.on_unknown_pod() {
            OnUnknownPod::Pass => true,
            OnUnknownPod::PassWhileFollowed => now_ns < self.pass_until_secs as u64 * 1_000_000_000,
            OnUnknownPod::Drop => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bloom_filter_contains_its_entries_and_few_others() {
        let owned: [Addr; 20] = core::array::from_fn(|last| Addr::v4([172, 18, 0, 100 + last as u8]));
        let filter = owned.iter().fold(BloomFilter::NONE, |filter, addr| filter.with(addr));
        assert!(owned.iter().all(|addr| filter.may_contain(addr)));
        let others = (0..10_000_u32).map(|number| Addr::v4((0x0a00_0000 + number * 7).to_be_bytes()));
        let let_through = others.filter(|addr| filter.may_contain(addr)).count();
        assert!((400..1200).contains(&let_through), "20 bits of 256 are 781 of 10,000: {let_through}");
        assert!(owned.iter().all(|addr| BloomFilter::ALL.may_contain(addr) && !BloomFilter::NONE.may_contain(addr)));
    }
}
