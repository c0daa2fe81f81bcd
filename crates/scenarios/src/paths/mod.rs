//! The roads of a packet, walked with real packets through real agents, programs and interfaces: what must hold beyond
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
//! remade      interfaces that vanish and come back, and what leaks meanwhile
//! flows       which address a flow has, now and later
//! facts       networks, services and the one exception, as the cluster says them
//! underlay    nodes that know one another by IPv6 only
//! told        connections that an edit cuts, and who hears of it
//! matrix      every protocol, family and gateway, with checksums judged on the wire
//! ```

mod cut;
mod evidence;
mod facts;
mod findings;
mod flows;
mod forgery;
mod fragments;
mod ground;
mod hops;
mod kernel;
mod matrix;
mod neighbours;
mod offload;
mod overlay;
mod path;
mod remade;
mod second;
mod sizes;
mod stateful;
mod talk;
mod told;
mod underlay;

use egress_lab::test::LabTest;

pub fn tests() -> Vec<LabTest> {
    let all = [
        forgery::tests(),
        evidence::tests(),
        offload::tests(),
        stateful::tests(),
        neighbours::tests(),
        sizes::tests(),
        fragments::tests(),
        path::tests(),
        hops::tests(),
        remade::tests(),
        flows::tests(),
        told::tests(),
        matrix::tests(),
        facts::tests(),
        underlay::tests(),
    ];
    all.into_iter().flatten().collect()
}
