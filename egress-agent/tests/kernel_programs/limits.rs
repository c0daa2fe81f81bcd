//! What is full, empty or not there yet.

use egress_common::abi::{NODE_MARK, Verdict};

use crate::cast::{V4, V6, addr};
use crate::frames::{Body, SYN, packet};
use crate::stage::{ENTER, LEAVE, NOTICE, Run, STEER, both, on_stage, on_stage_with};

#[test]
fn without_a_configuration_everything_passes() {
    on_stage(|mut stage| {
        stage.configure(|config| config.generation = 0);
        for cast in [V4, V6] {
            let sent = packet(cast.pod, cast.world, 1, 2);
            for run in [STEER, NOTICE, ENTER, LEAVE] {
                stage.passes(&run, &sent, Verdict::NotConfigured);
            }
        }
    });
}

#[test]
fn a_full_map_of_mappings_is_a_drop_without_remains() {
    on_stage_with(&[("nat", 3)], |mut stage| {
        let sent = |port| packet(V4.pod, V4.world, port, 80);
        stage.run_frame(&STEER, &sent(4000).frame(), Verdict::SnatHere);
        stage.drops(&STEER, &sent(4001), Verdict::MapFull);
        assert_eq!(stage.mappings().len(), 2);
        // Its own port is no port of ours, so one is searched for.
        stage.drops(&STEER, &sent(53), Verdict::MapFull);
        assert_eq!(stage.mappings().len(), 2);
        let refusals = stage.eip_counters.get(&V4.here, 0).expect("a counter");
        assert_eq!(refusals.iter().map(|count| count.refusals).sum::<u64>(), 2);
    });
}

#[test]
fn a_search_in_a_full_map_says_so() {
    on_stage_with(&[("nat", 2)], |mut stage| {
        let sent = |port| packet(V6.pod, V6.world, port, 80);
        stage.run_frame(&STEER, &sent(4000).frame(), Verdict::SnatHere);
        stage.drops(&STEER, &sent(53), Verdict::MapFull);
        assert_eq!(stage.mappings().len(), 2);
    });
}

#[test]
fn a_full_map_of_flows_is_a_drop() {
    on_stage_with(&[("flows", 1)], |mut stage| {
        stage.run_frame(&STEER, &packet(V4.away_pod, V4.world, 4000, 80).frame(), Verdict::Steered);
        stage.drops(&STEER, &packet(V4.away_pod, V4.world, 4001, 80), Verdict::MapFull);
        stage.run_frame(&STEER, &packet(V4.away_pod, V4.world, 4000, 80).frame(), Verdict::Steered);
    });
}

#[test]
fn a_full_map_of_connections_from_outside_lets_them_by() {
    on_stage_with(&[("inbound", 1)], |mut stage| {
        let syn = |port| packet(V4.world, V4.pod, port, 4000).tcp(SYN);
        stage.passes(&NOTICE, &syn(1), Verdict::InboundRemembered);
        stage.passes(&NOTICE, &syn(2), Verdict::InboundRefused);
        stage.passes(&NOTICE, &syn(1), Verdict::NotOurs);
    });
}

#[test]
fn every_port_is_given_before_one_is_refused() {
    both(|stage, cast| {
        stage.configure(|config| (config.node_ports.first, config.node_ports.last) = (61000, 61004));
        let marked = Run { mark: NODE_MARK, ..LEAVE };
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
