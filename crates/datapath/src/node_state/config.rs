//! The value of map `config`: the configuration of the programs. Pure, except for reading port settings and random bytes.
//!
//! Three sources change it: the node's facts ([`with_facts`]), the plan (unknown pods), and the route generation, which makes
//! the programs look up cached next hops again. All changes go through one value in the state.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use egress_common::abi::{Addr, Config, Family, InterfaceAddresses, PortRange};
use ipnet::IpNet;
use tracing::warn;

use crate::devices::interfaces::NodeFacts;
use crate::devices::node_ports;
use crate::devices::node_ports::{HostPorts, PortSettings};
use crate::settings::Settings;

/// VXLAN overhead of an inner IP packet: inner Ethernet, VXLAN, UDP, outer IP.
const fn overhead(underlay: Family) -> u32 {
    let outer_ip = match underlay {
        Family::V4 => 20,
        Family::V6 => 40,
    };
    14 + 8 + 8 + outer_ip
}

/// The configuration with these facts. A missing device has index zero, to which no packet can be redirected.
pub fn with_facts(config: Config, facts: &NodeFacts, underlay: Family) -> Config {
    let mut config = config;
    let uplink = facts.uplink;
    let mgmt = facts.mgmt;
    config.uplink_ifindex = uplink.map_or(0, |device| device.index);
    config.mgmt_ifindex = mgmt.map_or(0, |device| device.index);
    config.overlay_ifindex = facts.overlay.map_or(0, |device| device.index);
    // The last known values stay while a device is missing: no packet reads them.
    if let Some(uplink) = uplink {
        config.uplink_mac = uplink.mac;
        config.uplink_mtu = uplink.mtu;
        config.paced_uplink = facts.uplink_is_paced.into();
        config.overlay_mtu = uplink.mtu.saturating_sub(overhead(underlay));
        (config.node_v4, config.node_v6) = addrs((facts.v4, facts.v6));
    }
    if let Some(mgmt) = mgmt {
        config.mgmt_mac = mgmt.mac;
        config.pod_mtu = mgmt.mtu;
    }
    config
}

/// The wanted content of map `interfaces`.
pub fn interface_addresses(facts: &NodeFacts) -> BTreeMap<u32, InterfaceAddresses> {
    let entry = |(index, addresses): (&u32, &(Option<Ipv4Addr>, Option<Ipv6Addr>))| {
        let (v4, v6) = addrs(*addresses);
        (*index, InterfaceAddresses { v4, v6 })
    };
    facts.further_addresses.iter().map(entry).collect()
}

fn addrs((v4, v6): (Option<Ipv4Addr>, Option<Ipv6Addr>)) -> (Addr, Addr) {
    let v4 = v4.map_or(Addr::UNSPECIFIED, |address| Addr::v4(address.octets()));
    (v4, v6.map_or(Addr::UNSPECIFIED, |address| Addr::v6(address.octets())))
}

/// Whether the overlay MTU is below the IPv6 minimum of 1280 bytes, where outer packets are not fragmented.
pub fn is_too_narrow(config: &Config, underlay: Family) -> bool {
    const LEAST: u32 = 1280;
    underlay == Family::V6 && config.uplink_ifindex != 0 && config.overlay_mtu < LEAST
}

pub fn warn_of_narrow(config: &Config) {
    warn!(
        mtu = config.uplink_mtu,
        "the uplink is too narrow: IPv6 packets of up to 1280 bytes must fit into the overlay, which over IPv6 takes 1350, \
         and are dropped between nodes (overlay_too_narrow)"
    );
}

/// The value by which the programs recognise their own redirected packets. An earlier run's value stays, since packets with it
/// may be in flight.
pub fn redirected(config: &Config) -> io::Result<u16> {
    if config.redirected != 0 { Ok(config.redirected) } else { random_word() }
}

/// Source link address of overlay packets that the programs build; zero where they build none. An earlier run's value stays.
pub fn overlay_secret(config: &Config, in_program: bool) -> io::Result<[u8; 6]> {
    if !in_program {
        return Ok([0; 6]);
    }
    if config.is_overlay_in_program() {
        return Ok(config.overlay_secret);
    }
    let mut secret = [0; 6];
    random(&mut secret)?;
    // A unicast, locally administered link address.
    secret[0] = secret[0] & 0xfc | 0x02;
    Ok(secret)
}

/// The configuration with a leak guard. An earlier run's priority stays, since packets with it may be in flight.
pub fn with_leak_guard(config: Config) -> io::Result<Config> {
    if config.seen != 0 {
        return Ok(config);
    }
    let mut config = config;
    config.seen = random_word()?;
    Ok(config)
}

/// Never zero.
fn random_word() -> io::Result<u16> {
    let mut word = [0; 2];
    random(&mut word)?;
    Ok(u16::from_ne_bytes(word).max(1))
}

fn random(bytes: &mut [u8]) -> io::Result<()> {
    fs::File::open("/dev/urandom")?.read_exact(bytes)
}

/// The configuration with covers that also hold this prefix of pod addresses.
pub fn covering(config: Config, net: &IpNet) -> Config {
    let mut config = config;
    let bits = usize::from(net.prefix_len());
    match net.network() {
        IpAddr::V4(ip) => config.pods_v4 = config.pods_v4.widened(ip.octets(), bits),
        IpAddr::V6(ip) => {
            let [a, b, c, d, e, f, g, h, ..] = ip.octets();
            config.pods_v6 = config.pods_v6.widened([a, b, c, d, e, f, g, h], bits);
        }
    }
    config
}

/// Next value of a generation; zero means "never written".
pub const fn next_generation(generation: u32) -> u32 {
    match generation.checked_add(1) {
        Some(next) => next,
        None => 1,
    }
}

/// Numbers of the decisions that flows keep. No number is used twice: a failed write may still have been read.
pub struct DecisionNumbers(u32);

impl DecisionNumbers {
    /// The map has zero before the first start, during a change, and after a failed one.
    pub const fn after(decisions: u32) -> Self {
        Self(decisions)
    }

    pub fn next(&mut self, now_ns: u64) -> u32 {
        self.0 = match self.0 {
            // The last number is unknown: use one that no flow can have.
            0 => u32::try_from(now_ns / 1_000_000_000).unwrap_or(u32::MAX).rotate_left(12).max(1),
            last => next_generation(last),
        };
        self.0
    }
}

/// The ports that the host's settings reserve.
pub fn host_ports() -> PortSettings {
    let read = |name| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok();
    PortSettings {
        ephemeral: read(node_ports::EPHEMERAL).as_deref().and_then(node_ports::parse_range),
        reserved: read(node_ports::RESERVED).as_deref().and_then(node_ports::parse_list),
    }
}

/// Ports for NAT on the node's own address, without those of the host; an empty range if none is left.
pub fn node_ports(settings: &Settings, host: &HostPorts) -> PortRange {
    let ours = [settings.node_port_range.clone(), settings.tunnel_port..=settings.tunnel_port];
    let excluded: Vec<_> = ours.into_iter().chain(host.ranges()).collect();
    node_ports::choose(&excluded).unwrap_or(PortRange { first: 0, last: 0 })
}

pub fn warn_of_unreadable(settings: &[&str]) {
    for setting in settings {
        warn!(
            setting,
            "cannot read which ports the host takes: what was read last holds, at first the kernel's default"
        );
    }
}

/// Warns if the range is small.
pub fn warn_of_few(range: PortRange) {
    const ADVICE: &str = "narrow net.ipv4.ip_local_port_range or ip_local_reserved_ports";
    let count = if range.first == 0 { 0 } else { usize::from(range.last - range.first) + 1 };
    if count == 0 {
        warn!("no ports for pods' traffic to other nodes, which is dropped (no_node_address): {ADVICE}");
    } else if count < node_ports::COMFORTABLE {
        warn!(count, "few ports for pods' traffic to other nodes: {ADVICE}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::interfaces::Interface;

    /// The program keeps a flow's decision under the number that stands in the configuration; zero keeps none.
    #[test]
    fn a_failed_number_is_not_used_again_and_an_unknown_one_starts_from_the_clock() {
        // Flows keep 2. A change writes zero, and fails to write the next number, 3.
        let mut decisions = DecisionNumbers::after(1);
        assert_eq!((decisions.next(0), decisions.next(0), decisions.next(0)), (2, 3, 4));
        // The agent ends. The next one does not know which numbers flows keep.
        let mut successor = DecisionNumbers::after(0);
        let first = successor.next(7_000_000_000);
        assert_eq!((first, successor.next(7_000_000_000)), (7 << 12, (7 << 12) + 1));
        assert_eq!(DecisionNumbers::after(0).next(0), 1, "zero is none");
        assert_eq!(DecisionNumbers(u32::MAX).next(0), 1);
    }

    fn facts() -> NodeFacts {
        NodeFacts {
            uplink: Some(Interface { index: 2, mac: [2; 6], mtu: 1500 }),
            uplink_is_paced: false,
            mgmt: Some(Interface { index: 3, mac: [3; 6], mtu: 1400 }),
            pod_interface: None,
            mgmt_filters_ports: false,
            overlay: Some(Interface { index: 4, mac: [4; 6], mtu: 65535 }),
            overlay_up: true,
            v4: Some([172, 18, 0, 2].into()),
            v6: None,
            further_addresses: BTreeMap::new(),
            pool_vlans: BTreeMap::new(),
            routes: BTreeMap::new(),
            neighbours: BTreeMap::new(),
            interfaces: Vec::new(),
            addresses: std::collections::BTreeSet::new(),
        }
    }

    #[test]
    fn an_uplink_below_1350_is_too_narrow_for_ipv6_over_ipv6() {
        let of = |mtu, underlay| {
            let uplink = Some(Interface { index: 2, mac: [2; 6], mtu });
            is_too_narrow(&with_facts(Config::EMPTY, &NodeFacts { uplink, ..facts() }, underlay), underlay)
        };
        assert_eq!([of(1350, Family::V6), of(1349, Family::V6), of(1300, Family::V4)], [false, true, false]);
    }

    #[test]
    fn the_overlay_takes_what_the_underlay_leaves() {
        assert_eq!(with_facts(Config::EMPTY, &facts(), Family::V4).overlay_mtu, 1450);
        assert_eq!(with_facts(Config::EMPTY, &facts(), Family::V6).overlay_mtu, 1430);
    }

    #[test]
    fn a_missing_device_is_no_redirect_target() {
        let there = with_facts(Config::EMPTY, &facts(), Family::V4);
        let away = with_facts(there, &NodeFacts { uplink: None, ..facts() }, Family::V4);
        assert_eq!((away.uplink_ifindex, away.mgmt_ifindex), (0, 3));
        assert_eq!(away.node_v4, there.node_v4);
        assert_eq!(with_facts(away, &facts(), Family::V4), there, "and back again");
    }

    #[test]
    fn a_cover_contains_its_prefixes_and_few_others() {
        use egress_common::abi::Cover;

        let may = |config: &Config, ip: &str| config.may_be_pod(&Addr::from(ip.parse::<IpAddr>().expect("an address")));
        let put = |config, net: &str| covering(config, &net.parse().expect("a prefix"));
        assert!(may(&Config::EMPTY, "172.18.0.2"), "before anything is known every address may be a pod's");
        let mut none = Config::EMPTY;
        (none.pods_v4, none.pods_v6) = (Cover::NONE, Cover::NONE);
        assert!(!may(&none, "10.244.1.10") && !may(&none, "fd00::1"));
        let one = put(put(none, "10.244.1.0/24"), "fd00:10:244:1::/64");
        let wide = put(put(one, "10.244.2.17/32"), "fd00:10:244:8000::9/128");
        for (ip, in_one, in_wide) in [
            ("10.244.1.10", true, true),
            ("10.244.2.17", false, true),
            ("10.245.1.10", false, false),
            ("172.18.0.2", false, false),
            ("fd00:10:244:1::10", true, true),
            ("fd00:10:244:8000::9", false, true),
            ("fd00:10:245::9", false, false),
        ] {
            assert_eq!((may(&one, ip), may(&wide, ip)), (in_one, in_wide), "{ip}");
        }
        assert!(may(&put(wide, "0.0.0.0/0"), "172.18.0.2"));
    }

    #[test]
    fn the_overlay_secret_is_kept_and_follows_the_setting() {
        let secret = overlay_secret(&Config::EMPTY, true).expect("random bytes");
        let mut config = Config::EMPTY;
        config.overlay_secret = secret;
        assert!(config.is_overlay_in_program());
        assert_eq!(secret[0] & 3, 2, "a single host's address, given by hand");
        assert_eq!(overlay_secret(&config, true).expect("kept"), secret);
        assert_eq!(overlay_secret(&config, false).expect("none"), [0; 6]);
    }

    #[test]
    fn generations_never_return_to_zero() {
        assert_eq!(next_generation(0), 1);
        assert_eq!(next_generation(u32::MAX), 1);
    }
}
