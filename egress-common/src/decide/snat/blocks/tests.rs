use std::collections::BTreeSet;
use std::vec::Vec;

use super::super::tests::OWNER;
use super::super::{EGRESS_PORTS, EXHAUSTED_NS, translate};
use super::*;
use crate::abi::{Addr, Origin, PortRange, Verdict};
use crate::decide::cast::{V4, both};
use crate::decide::memory_maps::{MemoryMaps, addr};
use crate::decide::packets::packet;
use crate::wire::{Quote, tcp};

const SIZE: u16 = 64;

fn with_blocks(maps: &MemoryMaps) -> SnatSource {
    maps.configure(|config| config.port_block = SIZE);
    SnatSource::egress_only(addr(V4.egress))
}

/// The port of a flow to this port of the world.
fn port(maps: &MemoryMaps, pool: &SnatSource, pod: &str, own: u16, to: u16) -> Result<u16, Verdict> {
    let headers = packet(pod, V4.world, own, to).headers();
    translate(&headers, &Quote::NONE, maps, pool, &OWNER).map(|nat_entry| nat_entry.other.dport())
}

/// First ports of the pod's blocks.
fn blocks_of(maps: &MemoryMaps, pod: &str) -> Vec<u16> {
    let blocks = maps.blocks.borrow();
    let mut firsts: Vec<u16> =
        blocks.iter().filter(|(_, owner)| owner.pod == addr(pod)).map(|(block, _)| block.first()).collect();
    firsts.sort_unstable();
    firsts
}

#[test]
fn a_pods_ports_are_of_its_own_block() {
    both(|cast, maps| {
        maps.configure(|config| config.port_block = SIZE);
        let pool = SnatSource::egress_only(addr(cast.egress));
        let asked = |pod: &str, own, to| {
            let headers = packet(pod, cast.world, own, to).headers();
            translate(&headers, &Quote::NONE, maps, &pool, &OWNER).map(|nat_entry| nat_entry.other.dport())
        };
        let block = |port: Result<u16, Verdict>| port.map(|port| (port - EGRESS_PORTS.first) / SIZE);
        let own = block(asked(cast.pod, 4000, 80)).expect("a port");
        for flow in 0..200 {
            assert_eq!(block(asked(cast.pod, 4000 + flow, 80 + flow % 4)), Ok(own), "all of one block");
        }
        let other = block(asked(cast.known_pod, 4000, 80)).expect("a port");
        assert_ne!(own, other, "another pod has another block");
        assert_eq!(maps.blocks.borrow().len(), 2);
        for (at, owner) in maps.blocks.borrow().iter() {
            assert!(owner.is_of(at) && at.address == addr(cast.egress));
            assert_eq!((owner.egress_id, owner.size, owner.source_node), (7, SIZE, Addr::UNSPECIFIED));
        }
        maps.assert_paired();
    });
}

#[test]
fn a_pod_that_uses_up_its_blocks_uses_up_no_others() {
    let maps = MemoryMaps::new();
    let pool = with_blocks(&maps);
    let four = MOST_BLOCKS as u16 * SIZE;
    let ports: BTreeSet<u16> =
        (0..four).map(|flow| port(&maps, &pool, V4.pod, 4000 + flow, 80).expect("a port")).collect();
    assert_eq!(ports.len(), usize::from(four), "each port of four blocks");
    let blocks = blocks_of(&maps, V4.pod);
    assert_eq!(blocks.len(), MOST_BLOCKS);
    assert!(ports.iter().all(|port| blocks.iter().any(|first| (*first..*first + SIZE).contains(port))));
    assert_eq!(port(&maps, &pool, V4.pod, 9000, 80), Err(Verdict::PortsExhausted));
    assert!(port(&maps, &pool, V4.pod, 9000, 81).is_ok(), "another destination");
    assert!(port(&maps, &pool, V4.known_pod, 9000, 80).is_ok(), "another pod, to the same destination at once");
    assert_eq!(blocks_of(&maps, V4.pod), blocks);
}

#[test]
fn without_a_free_block_a_new_pod_is_refused_for_a_while() {
    let maps = MemoryMaps::new();
    let pool = SnatSource { ports: PortRange { first: 2000, last: 2048 + 2 * SIZE + 10 }, ..with_blocks(&maps) };
    for pod in ["10.244.1.11", "10.244.1.12"] {
        assert!(port(&maps, &pool, pod, 4000, 80).is_ok());
    }
    assert_eq!(port(&maps, &pool, "10.244.1.13", 4000, 80), Err(Verdict::PortsExhausted));
    assert_eq!(port(&maps, &pool, "10.244.1.13", 4000, 81), Err(Verdict::PortsExhausted), "whatever its destination");
    // The agent takes one back.
    let first = blocks_of(&maps, "10.244.1.11");
    maps.blocks.borrow_mut().remove(&PortBlock::new(pool.address, first[0]));
    assert_eq!(port(&maps, &pool, "10.244.1.13", 4000, 82), Err(Verdict::PortsExhausted), "it has just been searched");
    maps.now.set(maps.now.get() + EXHAUSTED_NS + 1);
    assert!(port(&maps, &pool, "10.244.1.13", 4000, 82).is_ok());
    assert_eq!(blocks_of(&maps, "10.244.1.13"), first);
    // The list of the other pod still names its former block.
    assert_eq!(port(&maps, &pool, "10.244.1.11", 4001, 82), Err(Verdict::PortsExhausted));
}

#[test]
fn a_closed_block_and_one_of_another_size_give_no_ports() {
    let maps = MemoryMaps::new();
    let pool = with_blocks(&maps);
    let before = port(&maps, &pool, V4.pod, 4000, 80).expect("a port");
    let first = blocks_of(&maps, V4.pod)[0];
    let at = PortBlock::new(pool.address, first);
    let open = maps.blocks.borrow()[&at];
    maps.blocks.borrow_mut().insert(at, open.closed(&at));
    assert_eq!(port(&maps, &pool, V4.pod, 4000, 80), Ok(before), "what has a port keeps it");
    assert!(!(first..first + SIZE).contains(&port(&maps, &pool, V4.pod, 4001, 80).expect("a port")));
    assert_eq!(blocks_of(&maps, V4.pod).len(), 2);
    maps.configure(|config| config.port_block = 128);
    let other = port(&maps, &pool, V4.pod, 4002, 80).expect("a port");
    let sizes: Vec<u16> = maps.blocks.borrow().values().map(|owner| owner.size).collect();
    assert_eq!(sizes.iter().filter(|size| **size == 128).count(), 1, "{sizes:?}");
    assert_eq!(
        (other - EGRESS_PORTS.first) / 128,
        (blocks_of(&maps, V4.pod).iter().find(|first| **first <= other && other - **first < 128).expect("its block")
            - EGRESS_PORTS.first)
            / 128
    );
}

#[test]
fn a_connection_under_way_and_traffic_to_nodes_get_no_block() {
    let maps = MemoryMaps::new();
    let pool = with_blocks(&maps);
    let under_way = packet(V4.pod, V4.world, 4000, 80).tcp(tcp::ACK).headers();
    let asked = translate(&under_way, &Quote::NONE, &maps, &pool, &OWNER).copied();
    assert_eq!(asked, Err(Verdict::PortTaken), "its peer knows a port of another gateway's block");
    let stack = NatOwner { origin: Origin::Stack, egress_id: 0, ..OWNER };
    let headers = packet(V4.pod, V4.world, 4000, 80).headers();
    assert!(translate(&headers, &Quote::NONE, &maps, &pool, &stack).is_ok());
    assert!(maps.blocks.borrow().is_empty());
}

#[test]
fn a_pod_finds_the_same_block_again_and_pods_differ() {
    let pool = SnatSource::egress_only(addr(V4.egress));
    let walk = |pod: &str, pool: &SnatSource| -> Vec<u16> {
        let forward = packet(pod, V4.world, 4000, 80).headers().tuple;
        let request = BlockRequest { forward: &forward, pool, owner: &OWNER, size: SIZE };
        let walk = request.walk();
        (0..walk.span).map(|index| request.block(&walk, index)).collect()
    };
    assert_eq!(walk(V4.pod, &pool), walk(V4.pod, &pool));
    let begins: BTreeSet<u16> = (1..=250).map(|host| walk(&std::format!("10.244.1.{host}"), &pool)[0]).collect();
    assert!(begins.len() > 200, "{}: hardly two begin at the same block", begins.len());
    let all: BTreeSet<u16> = walk(V4.pod, &pool).into_iter().collect();
    assert_eq!((all.len(), all.first(), all.last()), (1008, Some(&1024), Some(&(65_535 - 63))), "every block once");
    let few = SnatSource { ports: PortRange { first: 2000, last: 2062 }, ..pool };
    assert!(walk(V4.pod, &few).is_empty());
}

/// Of an address that the node has itself: the host may take ports while pods have blocks of them.
#[test]
fn blocks_that_the_host_has_taken_give_no_ports_and_others_do_not_overlap() {
    let maps = MemoryMaps::new();
    let of = |first, last| SnatSource { ports: PortRange { first, last }, ..with_blocks(&maps) };
    let before = port(&maps, &of(40_000, 49_999), V4.pod, 4000, 80).expect("a port");
    assert!((40_000..50_000).contains(&before));
    let after = port(&maps, &of(50_010, 59_999), V4.pod, 4001, 80).expect("a port");
    assert!((50_010..60_000).contains(&after), "{after}");
    let firsts = blocks_of(&maps, V4.pod);
    assert!(firsts.len() == 2 && firsts.iter().all(|first| first % SIZE == 0), "{firsts:?}");
}
