//! Full, empty and missing maps.

use egress_common::abi::{Direction, NODE_MARK, Tuple, Verdict};
use egress_common::decide::snat::EXHAUSTED_NS;

use crate::cast::{V4, V6, addr};
use crate::frames::{Body, SYN, packet};
use crate::races::{has_both_cpus, pin};
use crate::skips::skipped;
use crate::stage::{
    FROM_NETDEV, FROM_POD, REDIRECT, TO_NETDEV, TO_POD, TestRun, both, on_stage, on_stage_with, test_run,
};

#[test]
fn without_a_configuration_everything_passes() {
    on_stage(|stage| {
        stage.configure(|config| config.generation = 0);
        for cast in [V4, V6] {
            let sent = packet(cast.pod, cast.world, 1, 2);
            for run in [FROM_POD, TO_POD, FROM_NETDEV, TO_NETDEV] {
                stage.passes(&run, &sent, Verdict::NotConfigured);
            }
        }
    });
}

#[test]
fn a_full_nat_map_is_a_drop_that_leaves_no_entry() {
    on_stage_with(&[("nat", 3)], |stage| {
        let sent = |port| packet(V4.pod, V4.world, port, 80);
        stage.run_frame(&FROM_POD, &sent(4000).frame(), Verdict::SnatHere);
        stage.drops(&FROM_POD, &sent(4001), Verdict::MapFull);
        assert_eq!(stage.mappings().len(), 2);
        // The source port is outside the range, so another one is searched.
        stage.drops(&FROM_POD, &sent(53), Verdict::MapFull);
        assert_eq!(stage.mappings().len(), 2);
        let refusals = stage.eip_counters.get(&V4.here, 0).expect("a counter");
        assert_eq!(refusals.iter().map(|count| count.refusals).sum::<u64>(), 2);
    });
}

#[test]
fn a_port_search_in_a_full_map_reports_a_full_map() {
    on_stage_with(&[("nat", 2)], |stage| {
        let sent = |port| packet(V6.pod, V6.world, port, 80);
        stage.run_frame(&FROM_POD, &sent(4000).frame(), Verdict::SnatHere);
        stage.drops(&FROM_POD, &sent(53), Verdict::MapFull);
        assert_eq!(stage.mappings().len(), 2);
    });
}

#[test]
fn a_full_map_of_flows_is_a_drop() {
    on_stage_with(&[("flows", 1)], |stage| {
        stage.run_frame(&FROM_POD, &packet(V4.away_pod, V4.world, 4000, 80).frame(), Verdict::ToGateway);
        stage.drops(&FROM_POD, &packet(V4.away_pod, V4.world, 4001, 80), Verdict::MapFull);
        stage.run_frame(&FROM_POD, &packet(V4.away_pod, V4.world, 4000, 80).frame(), Verdict::ToGateway);
    });
}

#[test]
fn a_full_inbound_map_translates_no_answer() {
    on_stage_with(&[("inbound", 1)], |stage| {
        let syn = |port| packet(V4.world, V4.pod, port, 4000).tcp(SYN);
        stage.passes(&TO_POD, &syn(1), Verdict::InboundRemembered);
        stage.drops(&TO_POD, &syn(2), Verdict::InboundFull);
        stage.passes(&TO_POD, &syn(1), Verdict::NotOurs);
    });
}

#[test]
fn every_port_is_used_before_a_search_fails() {
    both(|stage, cast| {
        stage.configure(|config| (config.node_ports.first, config.node_ports.last) = (61000, 61004));
        let marked = TestRun { mark: NODE_MARK, ..TO_NETDEV };
        for body in [Body::Udp, Body::Tcp(SYN), Body::EchoRequest] {
            let sent = |port| packet(cast.pod, cast.other_node, port, 80).body(body);
            for port in 4000..4005 {
                stage.run_frame(&marked, &sent(port).frame(), Verdict::NodeSnat);
            }
            stage.drops(&marked, &sent(4005), Verdict::PortsExhausted);
            stage.run_frame(&marked, &sent(4001).frame(), Verdict::NodeSnat);
            let elsewhere = packet(cast.pod, cast.other_node, 4005, 81).body(body);
            if body != Body::EchoRequest {
                stage.run_frame(&marked, &elsewhere.frame(), Verdict::NodeSnat);
            }
        }
        let shown = stage.mappings().into_values().filter(|(key, _)| key.daddr == addr(cast.node)).count();
        assert_eq!(shown, 17, "no refusal left a key behind");
        stage.configure(|_| ());
    });
}

/// Two pods with the same ports send from two CPUs, so that half of all flows must search, up to the last port.
#[test]
fn the_last_port_is_found_from_two_cpus_at_once() {
    const PORTS: usize = 64_512;
    on_stage(|stage| {
        if !has_both_cpus() {
            return skipped("needs two CPUs");
        }
        let entry = stage.pods.get(&addr(V4.pod), 0).expect("a pod");
        stage.put_pod(V4.known_pod, entry);
        let sent = |pod, port| packet(pod, V4.world, port, 80).with(|packet| packet.data = 0).frame();
        stage.run_frame(&FROM_POD, &sent(V4.pod, 1024), Verdict::SnatHere);
        let program = stage.loaded(FROM_POD.program);
        // Every port in a mixed-up order: 1031 divides no number near it.
        let mixed = |step: u32| u16::try_from(1024 + step * 1031 % 64_512).expect("a port");
        let fill = |cpu: usize, pod: &'static str, steps: std::ops::Range<u32>| {
            pin(cpu);
            let given = steps.filter(|step| test_run(program, &FROM_POD, &sent(pod, mixed(*step))).action == REDIRECT);
            given.count()
        };
        let both = |first: std::ops::Range<u32>| {
            std::thread::scope(|scope| {
                let one = scope.spawn(|| fill(0, V4.pod, first.clone()));
                let other = scope.spawn(|| fill(1, V4.known_pod, first.clone()));
                one.join().expect("one CPU") + other.join().expect("the other")
            })
        };
        // 99 of 100: the first flow is there already.
        assert_eq!(both(0..31_933), 2 * 31_933, "a port is free for each");
        assert!(both(31_933..32_400) <= 2 * 467);
        assert_eq!(stage.nat.keys().count(), 2 * PORTS, "each of the {PORTS} ports was given once");
        let shown: std::collections::HashSet<u16> = stage
            .mappings()
            .into_values()
            .filter(|(key, _)| key.daddr == addr(V4.egress))
            .map(|(key, _)| key.dport())
            .collect();
        assert_eq!(shown.len(), PORTS);
        stage.drops(&FROM_POD, &packet(V4.pod, V4.world, 53, 80), Verdict::PortsExhausted);
        assert_eq!(stage.nat.keys().count(), 2 * PORTS, "a refusal leaves no key");
        // One port becomes free.
        let reverse = Tuple::new(Direction::Ingress, addr(V4.world), addr(V4.egress), 80, 5000, 17);
        let forward = stage.nat.get(&reverse, 0).expect("a mapping").other;
        stage.nat.remove(&reverse).expect("forget");
        stage.nat.remove(&forward).expect("forget");
        // A failed search may hold for a while; after this time the port is found.
        std::thread::sleep(std::time::Duration::from_nanos(EXHAUSTED_NS + 20_000_000));
        stage.run_frame(&FROM_POD, &packet(V4.pod, V4.world, 53, 80).frame(), Verdict::SnatHere);
    });
}
