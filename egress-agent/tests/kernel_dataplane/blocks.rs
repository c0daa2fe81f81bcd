//! Port blocks are taken back when no NAT entry uses them.

use egress_common::abi::{Addr, BlockHolder, BlockOwner, Direction, HeldBlocks, NatEntry, Origin, PortBlock, Tuple};
use egress_common::wire::PROTO_UDP;
use egress_datapath::settings::Settings;

use crate::actions::make_mapping;
use crate::node::{TestNode, on_node, start};

const ADDRESS: [u8; 4] = [172, 18, 0, 100];
const POD: [u8; 4] = [10, 244, 1, 10];
const OTHER: [u8; 4] = [10, 244, 1, 11];
const SIZE: u16 = 64;

fn block(first: u16) -> PortBlock {
    PortBlock::new(Addr::v4(ADDRESS), first)
}

/// As a program gives it.
fn give(node: &TestNode, pod: [u8; 4], first: u16) {
    let mut owner = BlockOwner::new(Addr::v4(pod), Addr::UNSPECIFIED, 7, SIZE, 1);
    owner.seal(&block(first));
    node.map::<PortBlock, BlockOwner>("blocks").insert(block(first), owner, 0).expect("a block");
    let holder = BlockHolder { address: Addr::v4(ADDRESS), pod: Addr::v4(pod) };
    let mut lists = node.map::<BlockHolder, HeldBlocks>("pod_blocks");
    let held = lists.get(&holder, 0).unwrap_or_default();
    lists.insert(holder, held.before(first), 0).expect("a list");
}

/// Whether each of these blocks is open; `None` if it is gone.
fn are_open<const N: usize>(node: &TestNode, firsts: [u16; N]) -> [Option<bool>; N] {
    let blocks = node.map::<PortBlock, BlockOwner>("blocks");
    firsts.map(|first| {
        let owner = blocks.get(&block(first), 0).ok()?;
        assert!(owner.is_of(&block(first)), "programs must be able to read it");
        Some(owner.is_open())
    })
}

fn lists(node: &TestNode) -> Vec<Addr> {
    let lists = node.map::<BlockHolder, HeldBlocks>("pod_blocks");
    let mut pods: Vec<Addr> = lists.keys().map(|holder| holder.expect("a list").pod).collect();
    pods.sort_unstable_by_key(|pod| pod.octets());
    pods
}

#[test]
fn unused_blocks_are_closed_and_then_taken_back() {
    on_node(|node| async move {
        let dataplane = start(Settings { port_block: SIZE, ..node.settings() }).await;
        assert_eq!(node.config().port_block, SIZE);
        for (pod, first) in [(POD, 1024), (POD, 2048), (OTHER, 4096)] {
            give(&node, pod, first);
        }
        let meter = dataplane.meter().expect("the pins are there");
        meter.count_ports().expect("a walk");
        let facts = meter.read(std::iter::empty()).expect("readable");
        assert_eq!((facts.entries["blocks"], facts.limits["blocks"] > 1_000), (3, true));
        // The last port of the first block.
        let out = Tuple::new(Direction::Egress, Addr::v4(POD), Addr::v4([198, 51, 100, 10]), 1087, 80, PROTO_UDP);
        make_mapping(&node, Origin::Here, out, 7, Addr::v4(ADDRESS));
        let sweep = || dataplane.sweep().expect("a sweep");
        sweep();
        assert_eq!(are_open(&node, [1024, 2048, 4096]), [Some(true); 3], "the pass may have begun before them");
        sweep();
        assert_eq!(are_open(&node, [1024, 2048, 4096]), [Some(true), Some(false), Some(false)]);
        // A packet that was on its way gets a port of a block that is closed now.
        let late = Tuple::new(Direction::Egress, Addr::v4(OTHER), Addr::v4([198, 51, 100, 10]), 4096, 80, PROTO_UDP);
        make_mapping(&node, Origin::Here, late, 7, Addr::v4(ADDRESS));
        sweep();
        assert_eq!(are_open(&node, [1024, 2048, 4096]), [Some(true), None, Some(false)]);
        assert_eq!(lists(&node), [POD, OTHER].map(Addr::v4), "both have a block");
        for out in [out, late] {
            let reverse = node.map::<Tuple, NatEntry>("nat").get(&out, 0).expect("the mapping").other;
            for key in [out, reverse] {
                node.map::<Tuple, NatEntry>("nat").remove(&key).expect("remove it");
            }
        }
        for _ in 0..3 {
            sweep();
        }
        assert_eq!(are_open(&node, [1024, 4096]), [None, None]);
        assert!(lists(&node).is_empty());
    });
}

/// Another agent, without blocks, takes back what an earlier one has given.
#[test]
fn blocks_go_when_they_are_not_asked_for_any_more() {
    on_node(|node| async move {
        drop(start(Settings { port_block: SIZE, ..node.settings() }).await);
        give(&node, POD, 1024);
        let dataplane = start(node.settings()).await;
        assert_eq!(node.config().port_block, 0);
        assert_eq!(are_open(&node, [1024]), [Some(true)], "it outlives the agent");
        for _ in 0..3 {
            dataplane.sweep().expect("a sweep");
        }
        assert_eq!(are_open(&node, [1024]), [None]);
    });
}

/// Blocks of two sizes would overlap.
#[test]
fn another_size_ends_the_blocks_of_the_former_one() {
    on_node(|node| async move {
        drop(start(Settings { port_block: SIZE, ..node.settings() }).await);
        give(&node, POD, 1024);
        let dataplane = start(Settings { port_block: 2 * SIZE, ..node.settings() }).await;
        assert_eq!((node.config().port_block, are_open(&node, [1024])), (2 * SIZE, [None]));
        dataplane.sweep().expect("a sweep");
        assert!(lists(&node).is_empty(), "a list without a block");
    });
}

/// An entry from before the blocks, or one that another pod has got by a race, does not keep a pod's block.
#[test]
fn an_entry_of_another_pod_keeps_no_block() {
    on_node(|node| async move {
        let dataplane = start(Settings { port_block: SIZE, ..node.settings() }).await;
        give(&node, POD, 1024);
        let out = Tuple::new(Direction::Egress, Addr::v4(OTHER), Addr::v4([198, 51, 100, 10]), 1030, 80, PROTO_UDP);
        make_mapping(&node, Origin::Here, out, 7, Addr::v4(ADDRESS));
        for _ in 0..3 {
            dataplane.sweep().expect("a sweep");
        }
        assert_eq!(are_open(&node, [1024]), [None]);
    });
}
