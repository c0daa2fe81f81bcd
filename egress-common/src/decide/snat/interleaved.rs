//! Two CPUs that create the NAT entry of one flow concurrently, in every order of their steps.
//!
//! A step is one lookup or change of `nat`. For each step a CPU runs from the start: earlier steps replay their
//! recorded outcome, then it takes the next step and stops.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::vec::Vec;

use super::blocks::BlockRequest;
use super::tests::OWNER;
use super::*;
use crate::abi::{
    BlockHolder, Candidates, ClassPolicy, ClusterPrefix, ExposedPort, Flow, FragKey, FragPorts, HandoverEntry,
    HeldBlocks, InterfaceAddresses, NodeEntry, Owned, OwnedAddr, PodEntry, PolicyEntry, PolicyEntryKey, PolicySlot,
    PortBlock,
};
use crate::decide::cast::V4;
use crate::decide::memory_maps::{MemoryMaps, addr};
use crate::decide::packets::packet;
use crate::wire::Segment;

/// Outcome of a step.
#[derive(Clone, Copy)]
enum StepOutcome<'w> {
    NatEntry(Option<&'w NatEntry>),
    ClaimOutcome(ClaimOutcome),
    Port(PortClaim),
    Forgotten(bool),
    Held(HeldBlocks),
    /// Whether it is so, or was done.
    Is(bool),
}

/// A CPU has taken its step.
struct Pause;

struct Cpu<'w> {
    maps: &'w MemoryMaps,
    number: u32,
    record: RefCell<Vec<StepOutcome<'w>>>,
    /// Number of replayed steps.
    replayed: Cell<usize>,
    ended: Cell<Option<bool>>,
}

impl<'w> Cpu<'w> {
    fn new(maps: &'w MemoryMaps, number: u32) -> Self {
        Self { maps, number, record: RefCell::default(), replayed: Cell::new(0), ended: Cell::new(None) }
    }

    fn step(&self, take: impl FnOnce() -> StepOutcome<'w>) -> StepOutcome<'w> {
        let at = self.replayed.replace(self.replayed.get() + 1);
        let known = self.record.borrow().get(at).copied();
        if let Some(answer) = known {
            return answer;
        }
        let answer = take();
        self.record.borrow_mut().push(answer);
        resume_unwind(std::boxed::Box::new(Pause))
    }

    /// The last step, for display.
    fn last(&self) -> std::string::String {
        let came_to = match self.record.borrow().last() {
            Some(StepOutcome::NatEntry(Some(nat_entry))) => std::format!("saw {:?}", nat_entry.other.daddr),
            Some(StepOutcome::NatEntry(None)) => "saw nothing".into(),
            Some(StepOutcome::ClaimOutcome(claim)) => std::format!("{claim:?}"),
            Some(StepOutcome::Port(claim)) => std::format!("searched: {claim:?}"),
            Some(StepOutcome::Forgotten(was_there)) => std::format!("removed: {was_there}"),
            Some(StepOutcome::Held(held)) => std::format!("list: {held:x?}"),
            Some(StepOutcome::Is(is_so)) => std::format!("block: {is_so}"),
            None => "nothing".into(),
        };
        std::format!("CPU {}: {came_to}, ended: {:?}", self.number, self.ended.get())
    }

    /// Takes the next step of the packet, or ends.
    fn go_on(&self, run: impl FnOnce(&Self) -> bool) {
        self.replayed.set(0);
        match catch_unwind(AssertUnwindSafe(|| run(self))) {
            Ok(done) => self.ended.set(Some(done)),
            Err(payload) if payload.is::<Pause>() => {}
            Err(payload) => resume_unwind(payload),
        }
    }
}

impl Tables for Cpu<'_> {
    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry> {
        match self.step(|| StepOutcome::NatEntry(self.maps.nat_seen(key, segment))) {
            StepOutcome::NatEntry(nat_entry) => nat_entry,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry> {
        match self.step(|| StepOutcome::NatEntry(self.maps.nat_peek(key))) {
            StepOutcome::NatEntry(nat_entry) => nat_entry,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome {
        match self.step(|| StepOutcome::ClaimOutcome(self.maps.claim_nat(key, other, owner))) {
            StepOutcome::ClaimOutcome(claim) => claim,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim {
        match self.step(|| StepOutcome::Port(self.maps.claim_any_port(forward, address, owner, search))) {
            StepOutcome::Port(claim) => claim,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn forget_nat(&self, key: &Tuple) -> bool {
        match self.step(|| StepOutcome::Forgotten(self.maps.forget_nat(key))) {
            StepOutcome::Forgotten(was_there) => was_there,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn port_block(&self) -> u16 {
        self.maps.port_block()
    }
    fn held_blocks(&self, holder: &BlockHolder) -> HeldBlocks {
        match self.step(|| StepOutcome::Held(self.maps.held_blocks(holder))) {
            StepOutcome::Held(held) => held,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn hold_block(&self, holder: &BlockHolder, old: HeldBlocks, new: HeldBlocks) -> bool {
        match self.step(|| StepOutcome::Is(self.maps.hold_block(holder, old, new))) {
            StepOutcome::Is(done) => done,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn is_block_of(&self, holder: &BlockHolder, first: u16, size: u16) -> bool {
        match self.step(|| StepOutcome::Is(self.maps.is_block_of(holder, first, size))) {
            StepOutcome::Is(is_so) => is_so,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn claim_any_block(&self, request: &BlockRequest<'_>, walk: &PortSearch) -> PortClaim {
        match self.step(|| StepOutcome::Port(self.maps.claim_any_block(request, walk))) {
            StepOutcome::Port(claim) => claim,
            _ => unreachable!("the same steps each time"),
        }
    }
    fn close_block(&self, block: &PortBlock) {
        self.step(|| {
            self.maps.close_block(block);
            StepOutcome::Is(true)
        });
    }
    fn has_lease(&self) -> bool {
        true
    }
    fn has_random_ports(&self) -> bool {
        self.maps.has_random_ports()
    }
    fn has_quota(&self, _pod: &Addr, _egress_id: u32, _held: QuotaKind) -> bool {
        true
    }
    fn count_nat_entry(&self, _pod: &Addr, _egress_id: u32) {}
    // No entry is idle.
    fn expire_nat(&self, _: &Tuple) -> bool {
        false
    }
    fn is_exhausted(&self, _destination: &Tuple) -> bool {
        false
    }
    fn note_exhausted(&self, _destination: &Tuple) {}
    fn now_ns(&self) -> u64 {
        self.maps.now_ns()
    }
    /// The search of each CPU begins elsewhere.
    fn random(&self) -> u32 {
        self.number * 1_000
    }

    // Not called during the creation of a NAT entry.
    fn pod(&self, _: &Addr) -> Option<&PodEntry> {
        unreachable!()
    }
    fn node(&self, _: &Addr) -> Option<&NodeEntry> {
        unreachable!()
    }
    fn prefix(&self, _: &Addr) -> Option<&ClusterPrefix> {
        unreachable!()
    }
    fn class_policy(&self, _: u32, _: &Addr) -> Option<&ClassPolicy> {
        unreachable!()
    }
    fn policy(&self, _: &PolicyEntryKey) -> Option<&PolicyEntry> {
        unreachable!()
    }
    fn candidates(&self, _: u32, _: &Addr) -> Option<&Candidates> {
        unreachable!()
    }
    fn interface(&self, _: u32) -> Option<&InterfaceAddresses> {
        unreachable!()
    }
    fn owned(&self, _: u32) -> Option<&Owned> {
        unreachable!()
    }
    fn owned_addr(&self, _: &Addr) -> Option<&OwnedAddr> {
        unreachable!()
    }
    fn handover(&self, _: u32) -> Option<&HandoverEntry> {
        unreachable!()
    }
    fn inbound_answered(&self, _: &Tuple, _: Segment) -> bool {
        unreachable!()
    }
    fn inbound_seen(&self, _: &Tuple, _: Segment) -> bool {
        unreachable!()
    }
    fn inbound_known(&self, _: &Tuple) -> bool {
        unreachable!()
    }
    fn inbound_in_use(&self) -> u32 {
        unreachable!()
    }
    fn claim_inbound(&self, _: &Tuple) -> ClaimOutcome {
        unreachable!()
    }
    fn is_service_port(&self, _: &Addr, _: u8, _: u16) -> bool {
        false
    }
    fn exposure(&self, _: &ExposedPort) -> Option<u32> {
        unreachable!()
    }
    fn forget_inbound(&self, _: &Tuple) {
        unreachable!()
    }
    fn datagram_seen(&self, _: &Tuple) -> bool {
        unreachable!()
    }
    fn note_datagram(&self, _: &Tuple) {
        unreachable!()
    }
    fn flow_seen(&self, _: &Tuple, _: Segment) -> Option<&Flow> {
        unreachable!()
    }
    fn flow_peek(&self, _: &Tuple) -> Option<&Flow> {
        unreachable!()
    }
    fn keep_flow(&self, _: &Tuple) {
        unreachable!()
    }
    fn flow_answered(&self, _: &Tuple, _: Segment) {
        unreachable!()
    }
    fn claim_flow(&self, _: &Tuple, _: &Flow) -> ClaimOutcome {
        unreachable!()
    }
    fn decisions(&self) -> u32 {
        unreachable!()
    }
    fn settle_flow(&self, _: &Tuple, _: u32, _: &PolicySlot, _: u32) {
        unreachable!()
    }
    fn set_flow_slot(&self, _: &Tuple, _: u32) {
        unreachable!()
    }
    fn forget_flow(&self, _: &Tuple) {
        unreachable!()
    }
    fn put_flow(&self, _: &Tuple, _: &Flow) -> bool {
        unreachable!()
    }
    fn fragment(&self, _: &FragKey) -> Option<&FragPorts> {
        unreachable!()
    }
    fn put_fragment(&self, _: &FragKey, _: &FragPorts) {
        unreachable!()
    }
    fn is_awaited(&self, _: &FragKey) -> bool {
        unreachable!()
    }
}

/// All orders of steps, each given as the CPU of every step.
fn every_order(mut run: impl FnMut(&mut dyn FnMut([bool; 2]) -> usize)) -> usize {
    let (mut order, mut count): (Vec<usize>, _) = (Vec::new(), 0);
    loop {
        let mut at = 0;
        let mut taken: Vec<(usize, bool)> = Vec::new();
        run(&mut |may: [bool; 2]| {
            let wanted = order.get(at).copied().unwrap_or(0);
            at += 1;
            let who = if may[wanted] { wanted } else { 1 - wanted };
            taken.push((who, who == 0 && may[1]));
            who
        });
        count += 1;
        let Some(last) = taken.iter().rposition(|(_, may_differ)| *may_differ) else { return count };
        order = taken[..last].iter().map(|(who, _)| *who).collect();
        order.push(1);
    }
}

/// Runs both CPUs to their ends, in the order that `next` says.
fn both_cpus(maps: &MemoryMaps, next: &mut dyn FnMut([bool; 2]) -> usize, run: impl Fn(&Cpu<'_>) -> bool) -> [bool; 2] {
    let mut story = Vec::new();
    let cpus = [Cpu::new(maps, 0), Cpu::new(maps, 1)];
    loop {
        let may = [0, 1].map(|cpu: usize| cpus[cpu].ended.get().is_none());
        if may == [false; 2] {
            break;
        }
        let who = next(may);
        cpus[who].go_on(&run);
        story.push(cpus[who].last());
    }
    let done = cpus.map(|cpu| cpu.ended.get() == Some(true));
    assert!(done.contains(&true), "one of the two packets goes at least: {story:#?}");
    done
}

/// Both CPUs have a packet of one flow, in every order; `begin` prepares the maps. The flow gets its source port if that is
/// free.
fn play(is_free: bool, begin: impl Fn(&MemoryMaps, &Headers)) -> usize {
    let headers = packet(V4.pod, V4.world, 4000, 80).headers();
    let pool = SnatSource::egress_only(addr(V4.egress));
    every_order(|next| {
        let maps = MemoryMaps::new();
        begin(&maps, &headers);
        both_cpus(&maps, next, |cpu| translate(&headers, &Quote::NONE, cpu, &pool, &OWNER).is_ok());
        maps.assert_paired();
        let nat_entry = maps.nat_peek(&headers.tuple).expect("a mapping");
        assert_eq!(nat_entry.other.daddr, pool.address);
        assert_eq!(nat_entry.other.dport() == 4000, is_free);
    })
}

#[test]
fn a_new_flow_gets_one_nat_entry() {
    assert!(play(true, |_, _| ()) > 50);
}

#[test]
fn a_flow_whose_address_has_moved_gets_one_nat_entry() {
    let orders = play(true, |maps, headers| {
        let old = SnatSource::egress_only(addr(V4.foreign_egress));
        translate(headers, &Quote::NONE, maps, &old, &OWNER).expect("a free port");
    });
    assert!(orders > 1000, "{orders}");
}

#[test]
fn a_flow_whose_source_port_is_taken_gets_one_nat_entry() {
    let orders = play(false, |maps, headers| {
        let other =
            Tuple::new(Direction::Egress, addr(V4.known_pod), headers.tuple.daddr, 4000, 80, headers.tuple.protocol);
        let reverse = reverse_key(&other, &addr(V4.egress), 4000);
        assert_eq!(maps.claim_nat(&reverse, &other, &OWNER), ClaimOutcome::Claimed);
        assert_eq!(maps.claim_nat(&other, &reverse, &OWNER), ClaimOutcome::Claimed);
    });
    assert!(orders > 50, "{orders}");
}

#[test]
fn a_flow_that_gets_a_random_port_gets_one_nat_entry() {
    let orders = play(false, |maps, _| maps.configure(|config| config.random_ports = 1));
    assert!(orders > 50, "{orders}");
}

#[test]
fn a_flow_that_gets_a_port_of_a_block_gets_one_nat_entry() {
    let orders = play(false, |maps, _| {
        maps.configure(|config| config.port_block = 64);
        let other = packet(V4.pod, V4.world, 4000, 81).headers();
        let pool = SnatSource::egress_only(addr(V4.egress));
        translate(&other, &Quote::NONE, maps, &pool, &OWNER).expect("a block");
    });
    assert!(orders > 50, "{orders}");
}

/// Two flows of a pod on two CPUs; `begin` prepares the maps. Each flow has a port of a block that is the pod's, open or closed: it stays
/// until the agent finds no port of it in use. The list names one that is open, and no more than `most_open` are.
fn play_blocks(most_open: usize, begin: impl Fn(&MemoryMaps, &BlockHolder)) -> usize {
    let pool = SnatSource::egress_only(addr(V4.egress));
    let holder = BlockHolder { address: pool.address, pod: addr(V4.pod) };
    every_order(|next| {
        let maps = MemoryMaps::new();
        maps.configure(|config| config.port_block = 64);
        begin(&maps, &holder);
        let done = both_cpus(&maps, next, |cpu| {
            let flow = packet(V4.pod, V4.world, 4000 + cpu.number as u16, 80).headers();
            matches!(find_any_port(&flow, cpu, &pool, &OWNER), PortClaim::Claimed(_))
        });
        assert_eq!(done, [true; 2]);
        let blocks = maps.blocks.borrow();
        let open: Vec<u16> =
            blocks.iter().filter(|(_, owner)| owner.is_open()).map(|(block, _)| block.first()).collect();
        assert!((1..=most_open).contains(&open.len()), "{blocks:?}");
        assert!(maps.held_blocks(&holder).at(0).is_some_and(|first| open.contains(&first)), "{blocks:?}");
        let given = maps.nat.all().into_iter().filter(|(key, _)| key.direction() == Direction::Ingress);
        let ports: Vec<u16> = given.map(|(key, _)| key.dport()).collect();
        let is_in_a_block = |port: &u16| blocks.keys().any(|block| (block.first()..block.first() + 64).contains(port));
        assert!(ports.len() == 2 && ports.iter().all(is_in_a_block), "{ports:?}");
    })
}

#[test]
fn a_pod_whose_first_flows_begin_at_once_gets_one_block() {
    assert!(play_blocks(1, |_, _| ()) > 50);
}

/// The agent has taken a block back, and the list still names it. The search finds the same block first. The list that has it again
/// looks like the old one, so that the other CPU may put its own block there: the first one is then open without a list.
#[test]
fn a_block_that_an_old_list_names_is_given_again() {
    let pool = SnatSource::egress_only(addr(V4.egress));
    let first = {
        let maps = MemoryMaps::new();
        maps.configure(|config| config.port_block = 64);
        let flow = packet(V4.pod, V4.world, 3000, 80).headers();
        assert!(matches!(find_any_port(&flow, &maps, &pool, &OWNER), PortClaim::Claimed(_)));
        maps.held_blocks(&BlockHolder { address: pool.address, pod: addr(V4.pod) }).at(0).expect("a block")
    };
    let orders = play_blocks(2, |maps, holder| {
        maps.pod_blocks.borrow_mut().insert(*holder, HeldBlocks::default().before(first));
    });
    assert!(orders > 50, "{orders}");
}
