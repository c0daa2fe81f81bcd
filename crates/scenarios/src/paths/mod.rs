//! The paths of a packet, walked with real packets through real agents, programs and interfaces: what must hold beyond
//! the story that `cargo xtask run` plays. Each file is one promise; each test shares one lab among questions that do
//! not disturb one another, and prints what it counted.
//!
//! ```text
//! ground      a lab with agents, an outside server and Kubernetes; where addresses go; waiting
//! kernel      what the programs counted and what the pinned maps hold
//! findings    every question is asked, then the test fails if one was answered wrongly
//! forgery     hand-made overlay packets that pods send (overlay: how they are made)
//! evidence    datagrams and sources that are made up: by a neighbour, and by pods
//! offload     checksums that a pod leaves to devices
//! stateful    hosts that drop what conntrack calls invalid; connections from outside; the second TC program
//! neighbours  who answers for an address, and who learns of a move
//! sizes       packets too large for the way (talk: servers and clients that say what size they send)
//! fragments   in every order (cut: how they are made)
//! path        a narrow hop behind the uplink, which a router there tells of
//! hops        TTL and hop limit
//! remade      interfaces that vanish and come back, and what leaks in the meantime
//! flows       which address a flow has, now and later
//! facts       networks, services and the one exception, as the cluster says them
//! underlay    nodes that know one another by IPv6 only
//! told        connections that an edit cuts, and who hears of it
//! matrix      every protocol, family and gateway, with checksums judged on the wire
//! ```

mod attacks;
mod cluster_facts;
mod datagrams;
mod findings;
mod flows;
mod forged_overlay;
mod fragments;
mod hops;
mod idle_reset;
mod maps;
mod matrix;
mod neighbours;
mod offload;
mod other_tc_program;
mod oversize;
mod path_mtu;
mod recreated_interfaces;
mod stateful;
mod underlay;

use egress_lab::test::LabTest;

pub fn tests() -> Vec<LabTest> {
    let all = [
        forged_overlay::tests(),
        attacks::tests(),
        offload::tests(),
        stateful::tests(),
        neighbours::tests(),
        oversize::tests(),
        fragments::tests(),
        path_mtu::tests(),
        hops::tests(),
        recreated_interfaces::tests(),
        flows::tests(),
        idle_reset::tests(),
        matrix::tests(),
        cluster_facts::tests(),
        underlay::tests(),
    ];
    all.into_iter().flatten().collect()
}
