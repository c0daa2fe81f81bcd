//! An address that is shared with a Service leaves by the host's routes and rules, whichever interface these name.

use egress_common::abi::{Family, Verdict};

use crate::cast::{FamilyAddresses, V4, V6};
use crate::devices::batch;
use crate::frames::{FrameSpec, packet};
use crate::stage::{FROM_POD, FURTHER, ROUTER_MAC, Stage, both, on_stage};

const GATEWAY_MAC: [u8; 6] = [2, 0, 0, 0, 9, 1];
const TABLE: u32 = 100;

fn flow(cast: &FamilyAddresses, port: u16) -> FrameSpec {
    packet(cast.pod, cast.world, port, 80)
}

/// Its gateway there.
fn gateway(cast: &FamilyAddresses) -> &'static str {
    match cast.family {
        Family::V4 => "10.10.10.1",
        Family::V6 => "fd00:10::1",
    }
}

/// `ip` of this family.
fn ip(cast: &FamilyAddresses, command: &str) {
    let family = if cast.family == Family::V4 { "-4" } else { "-6" };
    let done = std::process::Command::new("ip").arg(family).args(command.split(' ')).status();
    assert!(done.expect("run ip").success(), "{command}");
}

impl Stage {
    /// A second interface, with a gateway whose neighbour is known.
    fn with_second_network(&mut self, mtu: u32) {
        let mut script = format!(
            "link set eth1 mtu {mtu} up\nlink set far1 up\n\
             addr add 10.10.10.9/24 dev eth1\naddr add fd00:10::9/64 dev eth1 nodad\n"
        );
        for cast in [V4, V6] {
            let entry = format!("neigh replace {} lladdr 02:00:00:00:09:01 dev eth1 nud permanent\n", gateway(&cast));
            script.push_str(&entry);
        }
        batch(&script);
        self.put_interface(FURTHER, "10.10.10.9", "fd00:10::9");
    }

    /// The link address that the second packet of a flow is sent to; the kernel writes that of the first.
    fn next_hop(&mut self, packet: &FrameSpec) -> [u8; 6] {
        let generation = self.config.get(&0, 0).expect("a config").route_generation + 1;
        self.configure(|config| config.route_generation = generation);
        let mut sent = || self.run_frame(&FROM_POD, &packet.frame(), Verdict::SnatHere).frame;
        drop(sent());
        sent()[..6].try_into().expect("a link address")
    }
}

#[test]
fn rules_about_a_shared_address_choose_its_network() {
    on_stage(|stage| {
        stage.with_second_network(1500);
        for cast in [V4, V6] {
            stage.share(cast.here, cast.egress);
            assert_eq!(stage.next_hop(&flow(&cast, 4000)), ROUTER_MAC);
            ip(&cast, &format!("rule add from {} lookup {TABLE} priority 5000", cast.egress));
            assert_eq!(stage.next_hop(&flow(&cast, 4001)), ROUTER_MAC, "the table has no route");
            ip(&cast, &format!("route add default via {} table {TABLE}", gateway(&cast)));
            assert_eq!(stage.next_hop(&flow(&cast, 4002)), GATEWAY_MAC);
            assert_eq!(stage.next_hop(&flow(&cast, 4001)), GATEWAY_MAC, "and that of a running flow");
            ip(&cast, &format!("route replace blackhole default table {TABLE}"));
            stage.drops(&FROM_POD, &flow(&cast, 4003), Verdict::NoRoute);
            ip(&cast, &format!("rule del from {} lookup {TABLE} priority 5000", cast.egress));
            assert_eq!(stage.next_hop(&flow(&cast, 4004)), ROUTER_MAC);
        }
    });
}

/// What is not in a table of its own follows the main one, also by another interface than the uplink.
#[test]
fn the_hosts_routes_choose_the_interface_of_a_shared_address_alone() {
    on_stage(|stage| {
        stage.with_second_network(1500);
        for cast in [V4, V6] {
            ip(&cast, &format!("route add {} via {}", cast.world, gateway(&cast)));
            stage.share(cast.here, cast.egress);
            assert_eq!(stage.next_hop(&flow(&cast, 4000)), GATEWAY_MAC);
            stage.interfaces.remove(&FURTHER).expect("it is there");
            stage.drops(&FROM_POD, &flow(&cast, 4001), Verdict::NoRoute);
            stage.put_interface(FURTHER, "10.10.10.9", "fd00:10::9");
            // Another address stays on its interface.
            stage.own(cast.here, cast.egress);
            let kept = flow(&cast, 4002).snat(cast.egress, 4002).hop();
            match cast.family {
                Family::V4 => stage.redirects(&FROM_POD, &flow(&cast, 4002), Verdict::SnatHere, &kept),
                // The route by the uplink is shorter, and IPv6 looks no further.
                Family::V6 => stage.drops(&FROM_POD, &flow(&cast, 4002), Verdict::NoRoute),
            }
        }
    });
}

#[test]
fn the_mtu_of_the_hosts_route_is_the_longest_packet() {
    on_stage(|stage| {
        stage.with_second_network(1300);
        for cast in [V4, V6] {
            ip(&cast, &format!("route add {} via {}", cast.world, gateway(&cast)));
            stage.share(cast.here, cast.egress);
            assert_eq!(stage.next_hop(&flow(&cast, 4000)), GATEWAY_MAC);
            let header = if cast.family == Family::V4 { 28 } else { 48 };
            let with = |data: usize| flow(&cast, 4000).with(|packet| packet.data = data);
            stage.run_frame(&FROM_POD, &with(1300 - header).frame(), Verdict::SnatHere);
            stage.run_frame(&FROM_POD, &with(1301 - header).frame(), Verdict::MtuAnswered);
            stage.refill_answers();
        }
    });
}

/// Where nothing forwards, no packet leaves past the host's settings.
#[test]
fn a_shared_address_needs_forwarding_on_the_management_port() {
    both(|stage, cast| {
        stage.share(cast.here, cast.egress);
        let switch = if cast.family == Family::V4 { "ipv4" } else { "ipv6" };
        let path = format!("/proc/sys/net/{switch}/conf/ovn-k8s-mp0/forwarding");
        std::fs::write(&path, "0").expect("do not forward");
        stage.drops(&FROM_POD, &flow(cast, 4000), Verdict::NoRoute);
        std::fs::write(&path, "1").expect("forward");
        assert_eq!(stage.next_hop(&flow(cast, 4000)), ROUTER_MAC);
    });
}
