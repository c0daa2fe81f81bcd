//! What must hold for packets on both paths, with real agents, programs and interfaces. Each file is one promise; each test
//! shares one lab among questions that do not disturb one another, and prints what it counted.
//!
//! | file | what |
//! |---|---|
//! | `maps` | what the programs counted and what the pinned maps hold |
//! | `findings` | all questions are asked, then the test fails if one was answered wrongly |
//! | `forged_overlay` | hand-made overlay packets that pods send |
//! | `attacks` | forged datagrams and sources: by a neighbour, and by pods |
//! | `offload` | checksums that a pod leaves to devices |
//! | `stateful` | hosts that drop what conntrack calls invalid; connections from outside |
//! | `other_tc_program` | a second TC program after ours on each hook |
//! | `neighbours` | which node answers for an address, and which neighbours learn of a move |
//! | `oversize` | packets too large for the path (`datagrams`: servers and clients with chosen sizes) |
//! | `fragments` | fragments in every order |
//! | `path_mtu` | a narrow hop after the uplink, which a router there reports |
//! | `hops` | TTL and hop limit |
//! | `recreated_interfaces` | interfaces that vanish and come back, and what leaks in between |
//! | `flows` | which address a flow has, now and later |
//! | `cluster_facts` | networks, Services and the one exception, as the cluster reports them |
//! | `underlay` | nodes whose primary network is IPv6 only |
//! | `idle_reset` | connections that an edit cuts: every pod learns of it |
//! | `matrix` | every protocol, family and gateway, with checksums verified on the wire |

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
