//! What must hold for packets on both paths, with real agents, programs and interfaces. Each file is one promise, named in its
//! first line. A test asks all questions that do not disturb one another in one lab (`findings`), and prints what it counted.

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
mod ovn;
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
        ovn::tests(),
    ];
    all.into_iter().flatten().collect()
}
