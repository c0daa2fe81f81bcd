//! The maps as hash maps, for tests of the decisions, the fuzz targets, the oracle of the kernel tests and
//! `egress-agent trace`.
//!
//! As in the kernel, a lookup lends the value while the packet is processed: a lent value does not change with its
//! entry. The program tests of egress-agent prove on real maps each behaviour that decisions rely on (insert-if-absent,
//! refusal when full, copies).

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::vec::Vec;

use self::table::Lent;
use super::snat::blocks::BlockRequest;
use super::snat::{self, PortSearch};
use super::{ClaimOutcome, NatOwner, PortClaim, QuotaKind, Tables, expiry, phase};
use crate::abi::*;
use crate::wire::{PROTO_TCP, Segment};

#[cfg(test)]
mod setup;
mod table;

#[cfg(test)]
pub(crate) use setup::{addr, with_node_ports};
pub use table::Table;

type MapsCallback = Box<dyn FnOnce(&MemoryMaps)>;

/// The port of the forward tuple's NAT entry on another implementation, if it has one.
pub type Adopted = Box<dyn Fn(&Tuple) -> Option<u16>>;

/// The maps of one node.
pub struct MemoryMaps {
    pub config: Cell<Config>,
    pub now: Cell<u64>,
    /// On the same clock as `now`.
    pub lease: Cell<Lease>,
    random: Cell<u32>,
    pub pods: RefCell<HashMap<Addr, PodEntry>>,
    pub nodes: RefCell<HashMap<Addr, NodeEntry>>,
    /// Network, length in bits of the 128, value.
    pub prefixes: RefCell<Vec<(Addr, u32, ClusterPrefix)>>,
    /// Key, length in bits of the 128 of the destination, value.
    pub classes: RefCell<Vec<(PolicyDestination, u32, ClassPolicy)>>,
    pub policies: RefCell<HashMap<PolicyEntryKey, PolicyEntry>>,
    /// Key, length in bits of the 128 of the destination, value.
    pub destinations: RefCell<Vec<(PolicyDestination, u32, Candidates)>>,
    pub owned: RefCell<HashMap<u32, Owned>>,
    pub owned_addr: RefCell<HashMap<Addr, OwnedAddr>>,
    pub interfaces: RefCell<HashMap<u32, InterfaceAddresses>>,
    pub handovers: RefCell<HashMap<u32, HandoverEntry>>,
    pub inbound: Table<Inbound>,
    pub exposed: RefCell<HashMap<ExposedPort, u32>>,
    pub datagrams: RefCell<HashSet<Tuple>>,
    pub flows: Table<Flow>,
    pub nat: Table<NatEntry>,
    pub exhausted: RefCell<HashMap<Tuple, u64>>,
    pub blocks: RefCell<HashMap<PortBlock, BlockOwner>>,
    pub pod_blocks: RefCell<HashMap<BlockHolder, HeldBlocks>>,
    /// Shares of holders that differ from the contents of `flows` and `nat`.
    pub shares: RefCell<HashMap<Holder, Share>>,
    pub frags: RefCell<HashMap<FragKey, FragPorts>>,
    /// Datagrams that wait for their first fragment: since when, and how many later fragments are held.
    pub awaited: RefCell<HashMap<FragKey, (u64, u32)>>,
    /// If set, chooses the port instead of a search; the port must be free here too.
    pub adopt: RefCell<Option<Adopted>>,
    on_nat_full: RefCell<Option<MapsCallback>>,
    nat_entries: Cell<u32>,
    /// The last one that `owned` or `handover` returned.
    used: Cell<Option<Owned>>,
    lent: Box<LentValues>,
}

struct LentValues {
    pods: Lent<PodEntry>,
    nodes: Lent<NodeEntry>,
    prefixes: Lent<ClusterPrefix>,
    classes: Lent<ClassPolicy>,
    policies: Lent<PolicyEntry>,
    candidates: Lent<Candidates>,
    owned: Lent<Owned>,
    owned_addr: Lent<OwnedAddr>,
    interfaces: Lent<InterfaceAddresses>,
    handover: Lent<HandoverEntry>,
    flows: Lent<Flow>,
    nat_entries: Lent<NatEntry>,
    frags: Lent<FragPorts>,
}

/// The value of the longest prefix (network, length in bits of the 128, value) that contains the address.
fn longest<'a, V>(prefixes: impl Iterator<Item = (&'a Addr, u32, &'a V)>, address: &Addr) -> Option<&'a V> {
    let number = |addr: &Addr| u128::from_be_bytes(addr.octets());
    let matching = prefixes.filter(|(net, length, _)| (number(net) ^ number(address)).leading_zeros() >= *length);
    matching.max_by_key(|(_, length, _)| *length).map(|(.., value)| value)
}

impl MemoryMaps {
    /// Empty maps.
    #[must_use]
    pub fn empty(config: Config) -> Self {
        Self {
            config: Cell::new(config),
            now: Cell::new(1_000_000_000_000),
            lease: Cell::new(Lease::ENDLESS),
            random: Cell::new(1),
            pods: RefCell::default(),
            nodes: RefCell::default(),
            prefixes: RefCell::default(),
            classes: RefCell::default(),
            policies: RefCell::default(),
            destinations: RefCell::default(),
            owned: RefCell::default(),
            owned_addr: RefCell::default(),
            interfaces: RefCell::default(),
            handovers: RefCell::default(),
            inbound: Table::new(),
            exposed: RefCell::default(),
            datagrams: RefCell::default(),
            flows: Table::new(),
            nat: Table::new(),
            exhausted: RefCell::default(),
            blocks: RefCell::default(),
            pod_blocks: RefCell::default(),
            shares: RefCell::default(),
            frags: RefCell::default(),
            awaited: RefCell::default(),
            adopt: RefCell::default(),
            on_nat_full: RefCell::default(),
            nat_entries: Cell::new(0),
            used: Cell::new(None),
            lent: Box::new(LentValues {
                pods: Lent::new(),
                nodes: Lent::new(),
                prefixes: Lent::new(),
                classes: Lent::new(),
                policies: Lent::new(),
                candidates: Lent::new(),
                owned: Lent::new(),
                owned_addr: Lent::new(),
                interfaces: Lent::new(),
                handover: Lent::new(),
                flows: Lent::new(),
                nat_entries: Lent::new(),
                frags: Lent::new(),
            }),
        }
    }

    /// Begins the next packet: values lent for the last one are returned.
    pub fn next_packet(&mut self) {
        let lent = &mut *self.lent;
        lent.pods.take_back();
        lent.nodes.take_back();
        lent.prefixes.take_back();
        lent.classes.take_back();
        lent.policies.take_back();
        lent.candidates.take_back();
        lent.owned.take_back();
        lent.owned_addr.take_back();
        lent.interfaces.take_back();
        lent.handover.take_back();
        lent.flows.take_back();
        lent.nat_entries.take_back();
        lent.frags.take_back();
    }

    pub fn configure(&self, change: impl FnOnce(&mut Config)) {
        let mut config = self.config.get();
        change(&mut config);
        self.config.set(config);
    }

    pub fn put_owned(&self, egress_id: u32, owned: Owned) {
        self.owned.borrow_mut().insert(egress_id, owned);
        self.owned_addr.borrow_mut().insert(owned.address, owned.by_address(egress_id));
    }

    /// Removes the policy's address from this node.
    pub fn disown(&self, egress_id: u32) {
        self.owned.borrow_mut().remove(&egress_id);
        self.owned_addr.borrow_mut().retain(|_, owned| owned.egress_id != egress_id);
    }

    pub fn put_policy(&self, key: PolicyEntryKey, policy: PolicyEntry) {
        self.policies.borrow_mut().insert(key, policy);
    }

    /// Runs once, right after a key of `nat` was refused, as another CPU.
    pub fn when_nat_is_full(&self, on_nat_full: impl FnOnce(&Self) + 'static) {
        self.on_nat_full.replace(Some(Box::new(on_nat_full)));
    }

    pub fn mappings_made(&self) -> u32 {
        self.nat_entries.get()
    }

    /// As the program `sweep` without concurrent packets; returns the number of removed entries.
    pub fn sweep(&self, is_pressed: bool) -> usize {
        let (now, timeouts) = (self.now.get(), self.config.get().timeouts);
        let timeouts = if is_pressed { expiry::pressed(timeouts) } else { timeouts };
        let entries = || self.nat.len() + self.flows.len() + self.inbound.len();
        let before = entries();
        for (key, nat_entry) in self.nat.all() {
            let other = self.nat.get(&nat_entry.other).filter(|other| other.other == key);
            let is_idle = |other| expiry::is_nat_entry_idle(&timeouts, &nat_entry, other, now);
            let goes = match (key.direction(), &other) {
                // Both keys are checked at the forward key.
                (Direction::Ingress, Some(_)) => false,
                (Direction::Ingress, None) => is_idle(None),
                (Direction::Egress, None) => true,
                (Direction::Egress, other) => is_idle(other.as_ref()),
            };
            if goes {
                self.nat.remove(&key);
                other.map(|_| self.nat.remove(&nat_entry.other));
            }
        }
        self.flows.retain(|key, flow| !expiry::is_flow_idle(&timeouts, flow, flow.last_seen_ns, key.protocol, now));
        self.inbound.retain(|key, entry| {
            !expiry::is_inbound_idle(&timeouts, is_pressed, entry, entry.last_seen_ns, key.protocol, now)
        });
        for (port, used) in self.exposed.borrow_mut().iter_mut() {
            let here = self.inbound.all().into_iter().filter(|(key, _)| ExposedPort::of(key) == *port);
            *used = here.count() as u32;
        }
        before - entries()
    }

    /// Removes the NAT entry of this key if it is idle, as a packet that finds it does; whether it was.
    fn expire(&self, key: &Tuple) -> bool {
        let (now, timeouts) = (self.now.get(), self.config.get().timeouts);
        let Some(here) = self.nat.get(key) else { return false };
        if !expiry::may_nat_entry_be_idle(&timeouts, key.protocol, here.last_seen_ns, now) {
            return false;
        }
        let other = self.nat.get(&here.other).filter(|other| other.other == *key);
        let is_gone = match (key.direction(), &other) {
            (Direction::Egress, None) => true,
            (Direction::Egress, Some(reverse)) => expiry::is_nat_entry_idle(&timeouts, &here, Some(reverse), now),
            (Direction::Ingress, None) => expiry::is_nat_entry_idle(&timeouts, &here, None, now),
            (Direction::Ingress, Some(forward)) => expiry::is_nat_entry_idle(&timeouts, forward, Some(&here), now),
        };
        if is_gone {
            self.nat.remove(key);
            other.map(|_| self.nat.remove(&here.other));
        }
        is_gone
    }

    fn is_flow_idle(&self, key: &Tuple) -> bool {
        let (now, timeouts) = (self.now.get(), self.config.get().timeouts);
        let flow = self.flows.get(key);
        flow.is_some_and(|flow| expiry::is_flow_idle(&timeouts, &flow, flow.last_seen_ns, key.protocol, now))
    }

    /// Likewise for an inbound connection.
    fn expire_inbound(&self, key: &Tuple) {
        let (now, timeouts) = (self.now.get(), self.config.get().timeouts);
        let is_idle =
            |entry: Inbound| expiry::is_inbound_idle(&timeouts, false, &entry, entry.last_seen_ns, key.protocol, now);
        if self.inbound.get(key).is_some_and(is_idle) {
            self.forget_inbound(key);
        }
    }

    /// Ages all entries by so many seconds.
    pub fn age(&self, seconds: u64) {
        let then = self.now.get() - seconds * 1_000_000_000;
        self.nat.change_all(|nat_entry| nat_entry.last_seen_ns = then);
        self.flows.change_all(|flow| flow.last_seen_ns = then);
        self.inbound.change_all(|inbound| inbound.last_seen_ns = then);
    }

    /// Every key of `nat` has its counterpart of the other direction, and they refer to each other.
    pub fn assert_paired(&self) {
        for (key, nat_entry) in self.nat.all() {
            let other = self.nat.get(&nat_entry.other).unwrap_or_else(|| panic!("{key:?} is alone: {nat_entry:?}"));
            assert_eq!(other.other, key, "they name each other");
            assert_ne!(key.direction(), nat_entry.other.direction());
        }
    }
}

impl Tables for MemoryMaps {
    fn now_ns(&self) -> u64 {
        self.now.get()
    }
    fn random(&self) -> u32 {
        self.random.set(self.random.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
        self.random.get()
    }
    fn pod(&self, addr: &Addr) -> Option<&PodEntry> {
        self.pods.borrow().get(addr).map(|pod| self.lent.pods.lend(*pod))
    }
    fn node(&self, addr: &Addr) -> Option<&NodeEntry> {
        self.nodes.borrow().get(addr).map(|node| self.lent.nodes.lend(*node))
    }
    fn prefix(&self, addr: &Addr) -> Option<&ClusterPrefix> {
        let prefixes = self.prefixes.borrow();
        let found = longest(prefixes.iter().map(|(net, length, prefix)| (net, *length, prefix)), addr);
        found.map(|prefix| self.lent.prefixes.lend(*prefix))
    }
    fn class_policy(&self, class: u32, to: &Addr) -> Option<&ClassPolicy> {
        let classes = self.classes.borrow();
        let of_class = classes.iter().filter(|(key, ..)| key.set == class);
        let found = longest(of_class.map(|(key, length, policy)| (&key.to, *length, policy)), to);
        found.map(|policy| self.lent.classes.lend(*policy))
    }
    fn policy(&self, key: &PolicyEntryKey) -> Option<&PolicyEntry> {
        self.policies.borrow().get(key).map(|policy| self.lent.policies.lend(*policy))
    }
    fn candidates(&self, set: u32, to: &Addr) -> Option<&Candidates> {
        let destinations = self.destinations.borrow();
        let of_set = destinations.iter().filter(|(key, ..)| key.set == set);
        let found = longest(of_set.map(|(key, length, candidates)| (&key.to, *length, candidates)), to);
        found.map(|candidates| self.lent.candidates.lend(*candidates))
    }
    fn owned(&self, egress_id: u32) -> Option<&Owned> {
        self.owned.borrow().get(&egress_id).filter(|owned| owned.is_usable()).map(|owned| {
            self.used.set(Some(*owned));
            self.lent.owned.lend(*owned)
        })
    }
    fn owned_addr(&self, addr: &Addr) -> Option<&OwnedAddr> {
        self.owned_addr.borrow().get(addr).map(|owned| self.lent.owned_addr.lend(*owned))
    }
    fn interface(&self, ifindex: u32) -> Option<&InterfaceAddresses> {
        self.interfaces.borrow().get(&ifindex).map(|addresses| self.lent.interfaces.lend(*addresses))
    }
    fn has_lease(&self) -> bool {
        self.lease.get().left_ns(self.now.get()) > 0
    }
    fn handover(&self, egress_id: u32) -> Option<&HandoverEntry> {
        self.handovers.borrow().get(&egress_id).map(|handover| {
            self.used.set(Some(handover.owned));
            self.lent.handover.lend(*handover)
        })
    }
    fn inbound_answered(&self, tuple: &Tuple, segment: Segment) -> bool {
        self.expire_inbound(tuple);
        let seen = self.inbound.change(tuple, |inbound| {
            if tuple.protocol == PROTO_TCP {
                inbound.last_seen_ns = self.now.get();
                inbound.state = phase::replied(inbound.state, segment.flags);
                inbound.acknowledged = phase::number(inbound.acknowledged, segment, Direction::Egress);
            }
        });
        seen.is_some()
    }
    fn inbound_seen(&self, tuple: &Tuple, segment: Segment) -> bool {
        self.expire_inbound(tuple);
        let seen = self.inbound.change(tuple, |inbound| {
            inbound.last_seen_ns = self.now.get();
            let fits = phase::fits(inbound.acknowledged, inbound.end);
            inbound.state = phase::seen_from_outside(inbound.state, segment.flags, fits);
            inbound.end = phase::number(inbound.end, segment, Direction::Ingress);
        });
        seen.is_some()
    }
    fn inbound_known(&self, tuple: &Tuple) -> bool {
        self.expire_inbound(tuple);
        self.inbound.get(tuple).is_some()
    }
    fn inbound_in_use(&self) -> u32 {
        self.inbound.len() as u32
    }
    fn claim_inbound(&self, tuple: &Tuple) -> ClaimOutcome {
        let claim = self.inbound.claim(tuple, Inbound::new(self.now.get()));
        if claim == ClaimOutcome::Claimed
            && let Some(used) = self.exposed.borrow_mut().get_mut(&ExposedPort::of(tuple))
        {
            *used += 1;
        }
        claim
    }
    fn exposure(&self, port: &ExposedPort) -> Option<u32> {
        self.exposed.borrow().get(port).copied()
    }
    fn is_service_port(&self, address: &Addr, protocol: u8, port: u16) -> bool {
        let is_shared = self.used.get().is_some_and(|owned| owned.address == *address && owned.is_shared());
        is_shared && self.exposed.borrow().contains_key(&ExposedPort::new(*address, protocol, port))
    }
    fn forget_inbound(&self, tuple: &Tuple) {
        if self.inbound.remove(tuple).is_some()
            && let Some(used) = self.exposed.borrow_mut().get_mut(&ExposedPort::of(tuple))
        {
            *used = used.saturating_sub(1);
        }
    }
    fn datagram_seen(&self, tuple: &Tuple) -> bool {
        self.datagrams.borrow().contains(tuple)
    }
    fn note_datagram(&self, tuple: &Tuple) {
        self.datagrams.borrow_mut().insert(*tuple);
    }
    fn flow_seen(&self, tuple: &Tuple, segment: Segment) -> Option<&Flow> {
        if self.is_flow_idle(tuple) {
            self.flows.remove(tuple);
        }
        let seen = self.flows.change(tuple, |flow| {
            flow.last_seen_ns = self.now.get();
            flow.state = phase::own(flow.state, segment.flags, Direction::Egress);
            flow.acknowledged = phase::number(flow.acknowledged, segment, Direction::Egress);
        });
        seen.map(|flow| self.lent.flows.lend(flow))
    }
    fn flow_peek(&self, tuple: &Tuple) -> Option<&Flow> {
        // Without a refresh, nor a removal.
        let flow = self.flows.get(tuple).filter(|_| !self.is_flow_idle(tuple));
        flow.map(|flow| self.lent.flows.lend(flow))
    }
    fn keep_flow(&self, tuple: &Tuple) {
        self.flows.change(tuple, |flow| flow.last_seen_ns = self.now.get());
    }
    fn flow_answered(&self, tuple: &Tuple, segment: Segment) {
        if self.is_flow_idle(tuple) {
            return;
        }
        self.flows.change(tuple, |flow| {
            flow.last_seen_ns = self.now.get();
            flow.state = phase::answered(flow.state, segment.flags, tuple.protocol);
            flow.end = phase::number(flow.end, segment, Direction::Ingress);
        });
    }
    fn claim_flow(&self, tuple: &Tuple, flow: &Flow) -> ClaimOutcome {
        self.flows.claim(tuple, *flow)
    }
    fn has_random_ports(&self) -> bool {
        self.config.get().random_ports != 0
    }
    fn has_quota(&self, pod: &Addr, egress_id: u32, held: QuotaKind) -> bool {
        let config = self.config.get();
        if config.pod_quota == u32::MAX && config.policy_quota == u32::MAX {
            return true;
        }
        let share = |holder: Holder, is_of: &dyn Fn(&Tuple, u32) -> bool| {
            if let Some(known) = self.shares.borrow().get(&holder) {
                return *known;
            }
            let flows = self.flows.all().into_iter().filter(|(key, flow)| is_of(key, flow.egress_id)).count();
            let forward = self.nat.all().into_iter().filter(|(key, _)| key.direction() == Direction::Egress);
            let nat_entries = forward.filter(|(key, nat_entry)| is_of(key, nat_entry.egress_id)).count();
            Share { flows: flows as i32, nat_entries: nat_entries as i32 }
        };
        let of_policy = || share(Holder::policy(egress_id), &|_, id| id == egress_id);
        held.may_grow(&share(Holder::pod(*pod), &|key, _| key.saddr == *pod), config.pod_quota)
            && (egress_id == 0 || held.may_grow(&of_policy(), config.policy_quota))
    }
    fn decisions(&self) -> u32 {
        self.config.get().decisions
    }
    fn settle_flow(&self, tuple: &Tuple, egress_id: u32, slot: &PolicySlot, decisions: u32) {
        let of = Flow::seal_of(tuple, &slot.address, egress_id);
        self.flows.change(tuple, |flow| flow.settle(of, slot, decisions));
    }
    fn set_flow_slot(&self, tuple: &Tuple, slot: u32) {
        self.flows.change(tuple, |flow| flow.slot = slot);
    }
    fn forget_flow(&self, tuple: &Tuple) {
        self.flows.remove(tuple);
    }
    fn put_flow(&self, tuple: &Tuple, flow: &Flow) -> bool {
        self.flows.put(*tuple, *flow);
        true
    }
    fn nat_seen(&self, key: &Tuple, segment: Segment) -> Option<&NatEntry> {
        self.expire(key);
        let before = self.nat.get(key)?.state;
        let seen = self.nat.change(key, |nat_entry| {
            nat_entry.last_seen_ns = self.now.get();
            nat_entry.state = phase::own(before, segment.flags, key.direction());
            nat_entry.number = phase::number(nat_entry.number, segment, key.direction());
        })?;
        self.nat.change(&seen.other, |other| {
            other.state = phase::opposite(before, segment.flags, key.direction(), other.state).unwrap_or(other.state);
        });
        Some(self.lent.nat_entries.lend(seen))
    }
    fn nat_peek(&self, key: &Tuple) -> Option<&NatEntry> {
        self.nat.get(key).map(|nat_entry| self.lent.nat_entries.lend(nat_entry))
    }
    fn claim_nat(&self, key: &Tuple, other: &Tuple, owner: &NatOwner) -> ClaimOutcome {
        let nat_entry = NatEntry::new(*other, owner.origin, owner.source_node, owner.egress_id, self.now.get());
        let claim = self.nat.claim(key, nat_entry);
        if claim == ClaimOutcome::Full
            && let Some(on_nat_full) = self.on_nat_full.take()
        {
            on_nat_full(self);
        }
        claim
    }
    fn count_nat_entry(&self, _pod: &Addr, _egress_id: u32) {
        self.nat_entries.set(self.nat_entries.get() + 1);
    }
    fn claim_any_port(&self, forward: &Tuple, address: &Addr, owner: &NatOwner, search: &PortSearch) -> PortClaim {
        let adopted = self.adopt.borrow().as_ref().and_then(|adopted| adopted(forward));
        let searched = (0..search.span).map(|index| search.at(index));
        let is_free = |port: &u16| !self.is_service_port(address, forward.protocol, *port);
        for port in adopted.into_iter().chain(searched).filter(is_free) {
            match self.claim_nat(&snat::reverse_key(forward, address, port), forward, owner) {
                ClaimOutcome::Claimed => return PortClaim::Claimed(port),
                ClaimOutcome::Taken => {}
                ClaimOutcome::Full => return PortClaim::Full,
            }
        }
        PortClaim::NoneFree
    }
    fn port_block(&self) -> u16 {
        self.config.get().port_block
    }
    fn held_blocks(&self, holder: &BlockHolder) -> HeldBlocks {
        self.pod_blocks.borrow().get(holder).copied().unwrap_or_default()
    }
    fn hold_block(&self, holder: &BlockHolder, old: HeldBlocks, new: HeldBlocks) -> bool {
        let is_old = self.held_blocks(holder) == old;
        if is_old {
            self.pod_blocks.borrow_mut().insert(*holder, new);
        }
        is_old
    }
    fn is_block_of(&self, holder: &BlockHolder, first: u16, size: u16) -> bool {
        let (blocks, at) = (self.blocks.borrow(), PortBlock::new(holder.address, first));
        blocks.get(&at).is_some_and(|owner| owner.pod == holder.pod && owner.size == size && owner.is_open())
    }
    fn claim_any_block(&self, request: &BlockRequest<'_>, walk: &PortSearch) -> PortClaim {
        let mut blocks = self.blocks.borrow_mut();
        for index in 0..walk.span {
            let at = PortBlock::new(request.pool.address, request.block(walk, index));
            if let Entry::Vacant(free) = blocks.entry(at) {
                let mut owner = request.new_owner(self.now.get());
                owner.seal(&at);
                free.insert(owner);
                return PortClaim::Claimed(at.first());
            }
        }
        PortClaim::NoneFree
    }
    fn close_block(&self, block: &PortBlock) {
        if let Some(owner) = self.blocks.borrow_mut().get_mut(block) {
            *owner = owner.closed(block);
        }
    }
    fn expire_nat(&self, key: &Tuple) -> bool {
        self.expire(key)
    }
    fn is_exhausted(&self, destination: &Tuple) -> bool {
        let noted = self.exhausted.borrow().get(destination).copied();
        noted.is_some_and(|noted| self.now.get() - noted <= snat::EXHAUSTED_NS)
    }
    fn note_exhausted(&self, destination: &Tuple) {
        self.exhausted.borrow_mut().insert(*destination, self.now.get());
    }
    fn forget_nat(&self, key: &Tuple) -> bool {
        self.nat.remove(key).is_some()
    }
    fn fragment(&self, key: &FragKey) -> Option<&FragPorts> {
        self.frags.borrow().get(key).map(|ports| self.lent.frags.lend(*ports))
    }
    fn put_fragment(&self, key: &FragKey, ports: &FragPorts) {
        self.frags.borrow_mut().insert(*key, *ports);
    }
    fn is_awaited(&self, key: &FragKey) -> bool {
        self.awaited.borrow().contains_key(key)
    }
}
