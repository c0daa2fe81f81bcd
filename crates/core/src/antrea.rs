//! Antrea's Egress and ExternalIPPool (`crd.antrea.io/v1beta1`): which addresses are allocated, and what becomes of each
//! Egress. Pure.
//!
//! - **The objects are the only state.** An address is allocated once `spec.egressIP` has it, so that a controller that ends at
//!   any moment loses and gives away none: addresses that objects have come first, and only then new ones are chosen, the first
//!   free one in the order of the ranges. Of several that name one address, an Egress that is served keeps it, then the oldest
//!   has it: an edit of an older one takes it from no other.
//! - **Who shares.** An address of a pool belongs to one Egress that names the pool. An Egress without a pool that names the same
//!   address shares it. All Egresses with the same addresses become rules of one assignment, so they share the egress ID, the node
//!   and the ports. An address of no pool is one that a node has itself.
//! - A pool's gateway is never allocated. A pool that cannot be read, or overlaps with an older one, gives no addresses; those
//!   that Egresses have stay.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::interface::VlanNetwork;
use crate::model::policy::{EgressPolicy, Selects};
use crate::model::view::CreationTimestamp;
use crate::status::conditions::{ASSIGNED, DesiredCondition};
use crate::text::named_by_address;

/// An Egress as its author wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressObject {
    pub uid: String,
    pub created: CreationTimestamp,
    /// The address that its status says it leaves with.
    pub served: Option<IpAddr>,
    /// Bytes of its selectors as written.
    pub size: usize,
    /// An error is one line for users.
    pub spec: Result<EgressRequest, String>,
}

impl EgressObject {
    /// Whether it leaves with an address that its spec still has.
    fn is_served(&self) -> bool {
        let mut addresses = self.spec.iter().flat_map(|spec| &spec.addresses);
        self.served.is_some() && addresses.any(|one| one.address == self.served)
    }
}

/// What the spec asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressRequest {
    /// No selector at all selects nothing.
    pub applied_to: Option<Selects>,
    /// One, or one for each pool of `externalIPPools`.
    pub addresses: Vec<RequestedAddress>,
    /// Of all its pods together.
    pub bandwidth: Option<Bandwidth>,
}

/// A bandwidth limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bandwidth {
    /// Bits per second.
    pub rate: u64,
    /// Bits that are sent at once after a pause.
    pub burst: u64,
}

/// An address, a pool to take it from, or both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedAddress {
    pub address: Option<IpAddr>,
    pub pool: Option<String>,
}

/// An ExternalIPPool as its author wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolObject {
    pub uid: String,
    pub created: CreationTimestamp,
    /// An error is one line for users.
    pub spec: Result<PoolRequest, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRequest {
    /// In the order of the spec.
    pub ranges: Vec<PoolRange>,
    pub subnet: Option<PoolSubnet>,
    /// Whether only some nodes may have the addresses.
    pub selects_nodes: bool,
}

/// `spec.subnetInfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSubnet {
    pub gateway: IpAddr,
    pub prefix_length: u8,
    /// Zero for none, 4094 at most.
    pub vlan: u16,
}

impl PoolSubnet {
    /// What nodes need for its addresses. `None` without a VLAN, or where the length is none of the gateway's family.
    fn vlan_network(&self) -> Option<VlanNetwork> {
        let gateway = IpNet::new(self.gateway, self.prefix_length).ok()?;
        (self.vlan != 0).then_some(VlanNetwork { vlan: self.vlan, gateway })
    }
}

/// Addresses of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolRange {
    is_v4: bool,
    /// The first and the one after the last.
    first: u128,
    end: u128,
}

impl PoolRange {
    /// Both ends are included. `None` for ends of two families, or in the wrong order.
    pub fn between(start: IpAddr, end: IpAddr) -> Option<Self> {
        let is_v4 = start.is_ipv4();
        let (first, last) = (number(start), number(end));
        (is_v4 == end.is_ipv4() && first <= last).then(|| Self { is_v4, first, end: last.saturating_add(1) })
    }

    /// Without the first address, and, of IPv4, the last one.
    pub fn of_network(net: IpNet) -> Self {
        let is_v4 = net.addr().is_ipv4();
        let (first, last) = (number(net.network()) + 1, number(net.broadcast()));
        let end = if is_v4 { last } else { last.saturating_add(1) };
        Self { is_v4, first, end: end.max(first) }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.is_v4 && (self.first..self.end).contains(&number(address))
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.is_v4 == other.is_v4 && self.first < other.end && other.first < self.end
    }

    fn is_within(&self, net: &IpNet) -> bool {
        let (first, last) = (number(net.network()), number(net.broadcast()));
        self.is_v4 == net.addr().is_ipv4() && (self.first == self.end || (first <= self.first && self.end - 1 <= last))
    }

    /// As long as they are taken one after the other, this costs one step for each taken address.
    fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let is_v4 = self.is_v4;
        (self.first..self.end).filter_map(move |number| match is_v4 {
            true => u32::try_from(number).ok().map(|number| IpAddr::V4(number.into())),
            false => Some(IpAddr::V6(number.into())),
        })
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

impl PoolRequest {
    fn contains(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(address)) && !self.is_gateway(address)
    }

    fn vlan_network(&self) -> Option<VlanNetwork> {
        self.subnet.as_ref().and_then(PoolSubnet::vlan_network)
    }

    fn is_gateway(&self, address: IpAddr) -> bool {
        self.subnet.is_some_and(|subnet| subnet.gateway == address)
    }

    /// How many addresses it has.
    pub fn total(&self) -> u64 {
        let all = self.ranges.iter().map(|range| range.end - range.first).fold(0, u128::saturating_add);
        let gateway = self.subnet.is_some_and(|subnet| self.ranges.iter().any(|range| range.contains(subnet.gateway)));
        u64::try_from(all - u128::from(gateway)).unwrap_or(u64::MAX)
    }

    /// Why it gives no addresses, by itself.
    fn problem(&self) -> Option<PoolProblem> {
        if let Some(PoolSubnet { gateway, prefix_length, .. }) = self.subnet {
            let Ok(net) = IpNet::new(gateway, prefix_length) else { return Some(PoolProblem::PrefixLength) };
            if !self.ranges.iter().all(|range| range.is_within(&net)) {
                return Some(PoolProblem::OutsideSubnet(net.trunc()));
            }
        }
        let pairs = self
            .ranges
            .iter()
            .enumerate()
            .flat_map(|(at, one)| self.ranges[..at].iter().map(move |other| (one, other)));
        let mut pairs = pairs;
        pairs.any(|(one, other)| one.overlaps(other)).then_some(PoolProblem::OverlapsItself)
    }
}

/// Why a pool gives no addresses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoolProblem {
    Unreadable(String),
    PrefixLength,
    OutsideSubnet(IpNet),
    OverlapsItself,
    Overlaps(String),
    /// An older pool has another network in its VLAN, or its network in another VLAN.
    ContradictsVlan(String),
}

impl fmt::Display for PoolProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(why) => f.write_str(why),
            Self::PrefixLength => f.write_str("spec.subnetInfo.prefixLength does not fit the gateway's family"),
            Self::OutsideSubnet(net) => write!(f, "a range is not within its subnet {net}"),
            Self::OverlapsItself => f.write_str("two of its ranges overlap"),
            Self::Overlaps(other) => write!(f, "a range overlaps with one of the older ExternalIPPool {other}"),
            Self::ContradictsVlan(other) => write!(
                f,
                "in the older ExternalIPPool {other} its VLAN has another gateway, or its subnet is in another VLAN"
            ),
        }
    }
}

/// Why an Egress has no address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NotAllocated {
    Unreadable(String),
    NoPool(String),
    Pool(String, PoolProblem),
    NotInPool(IpAddr, String),
    Held(IpAddr, String),
    Exhausted(String),
    /// The controller is about to write it.
    Allocating,
    /// Another set of addresses has one of them.
    PartlyShared(IpAddr, String),
    /// Others with the address leave no room in their assignment.
    Crowded(IpAddr),
}

impl fmt::Display for NotAllocated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(why) => f.write_str(why),
            Self::NoPool(pool) => write!(f, "ExternalIPPool {pool} does not exist"),
            Self::Pool(pool, problem) => write!(f, "ExternalIPPool {pool} gives no addresses: {problem}"),
            Self::NotInPool(address, pool) => {
                write!(f, "IP {address} is not within the IP range of ExternalIPPool {pool}")
            }
            Self::Held(address, by) => write!(f, "IP {address} is allocated to Egress {by} already"),
            Self::Exhausted(pool) => write!(f, "ExternalIPPool {pool} has no free IP"),
            Self::Allocating => f.write_str("the IP is being allocated"),
            Self::PartlyShared(address, by) => {
                write!(f, "IP {address} is also that of Egress {by}, which has other addresses too")
            }
            Self::Crowded(address) => write!(f, "older Egresses with IP {address} leave no room for its selectors"),
        }
    }
}

/// Everything that Egresses follow from.
#[derive(Clone, Debug, Default)]
pub struct AntreaInputs {
    pub egresses: BTreeMap<String, EgressObject>,
    pub pools: BTreeMap<String, PoolObject>,
}

/// What becomes of all Egresses and pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// The addresses of each Egress, or why it has none.
    pub egresses: BTreeMap<String, Result<Vec<IpAddr>, NotAllocated>>,
    /// New addresses to be written into specs, in the order of the spec.
    pub chosen: BTreeMap<String, Vec<IpAddr>>,
    /// By their first address: what is served together.
    pub groups: BTreeMap<IpAddr, AddressGroup>,
    /// Why pools give no addresses.
    pub problems: BTreeMap<String, PoolProblem>,
    /// How many addresses of each pool are in use.
    pub used: BTreeMap<String, u64>,
}

/// Addresses of a pool that no Egress of this run has been given. All before the unseen ones are taken, or returned by an Egress
/// that got none, so that many new Egresses walk over the taken addresses once.
struct FreeAddresses<'a> {
    /// The first one last.
    returned: Vec<IpAddr>,
    unseen: Box<dyn Iterator<Item = IpAddr> + 'a>,
}

impl<'a> FreeAddresses<'a> {
    fn of(pool: &'a PoolRequest) -> Self {
        Self { returned: Vec::new(), unseen: Box::new(pool.ranges.iter().flat_map(PoolRange::addresses)) }
    }

    fn next(&mut self, is_free: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
        self.returned.pop().or_else(|| self.unseen.find(is_free))
    }
}

/// Bytes of the rules of one assignment: the API server takes objects of 1.5 MiB.
const MOST_BYTES: usize = 1 << 20;
/// Bytes of a rule beside its selectors: kind, name, UID and age of the Egress.
const RULE_BYTES: usize = 512;

/// Egresses with the same addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressGroup {
    pub addresses: Vec<IpAddr>,
    /// By age.
    pub egresses: Vec<String>,
    /// The pools that select nodes: only nodes that all of them select may have the addresses.
    pub pools: BTreeSet<String>,
    /// The VLANs that the addresses lie in.
    pub vlans: BTreeSet<VlanNetwork>,
    /// The addresses are of no pool: nodes have them on interfaces.
    pub is_of_hosts: bool,
}

impl AntreaInputs {
    /// What should be.
    pub fn allocate(&self) -> Allocation {
        let mut allocation = Allocation { problems: self.problems(), ..Allocation::default() };
        let mut by_age: Vec<_> = self.egresses.iter().collect();
        by_age.sort_by_key(|(name, egress)| (egress.created, *name));
        // What objects have, before anything new.
        let mut held = BTreeMap::<IpAddr, &String>::new();
        let (served, others): (Vec<_>, Vec<_>) = by_age.iter().partition(|(_, egress)| egress.is_served());
        for (name, egress) in served.into_iter().chain(others) {
            for RequestedAddress { address, pool } in egress.spec.iter().flat_map(|spec| &spec.addresses) {
                let pool = pool.as_deref().and_then(|pool| self.pool(pool));
                // An address that is not of its pool keeps no other Egress from having it.
                if let Some(address) = address.filter(|address| pool.is_some_and(|pool| pool.contains(*address))) {
                    held.entry(address).or_insert(name);
                }
            }
        }
        let mut free = BTreeMap::new();
        for (name, egress) in &by_age {
            let outcome = self.addresses((name, egress), &mut held, &mut free, &mut allocation);
            allocation.egresses.insert((*name).clone(), outcome);
        }
        for (address, holder) in &held {
            let holder = self.egresses.get(*holder).and_then(|egress| egress.spec.as_ref().ok());
            let pools = holder.iter().flat_map(|spec| &spec.addresses).filter_map(|one| one.pool.as_ref());
            let is_of = |pool: &&String| self.pool(pool).is_some_and(|pool| pool.contains(*address));
            if let Some(pool) = pools.into_iter().find(is_of) {
                *allocation.used.entry(pool.clone()).or_default() += 1;
            }
        }
        self.group(&by_age, &mut allocation);
        allocation
    }

    fn pool(&self, name: &str) -> Option<&PoolRequest> {
        self.pools.get(name)?.spec.as_ref().ok()
    }

    /// By age: of two pools that overlap the older one gives addresses.
    fn problems(&self) -> BTreeMap<String, PoolProblem> {
        let mut by_age: Vec<_> = self.pools.iter().collect();
        by_age.sort_by_key(|(name, pool)| (pool.created, *name));
        let (mut problems, mut valid) = (BTreeMap::new(), Vec::<(&String, &PoolRequest)>::new());
        for (name, pool) in by_age {
            let problem = match &pool.spec {
                Err(why) => Some(PoolProblem::Unreadable(why.clone())),
                Ok(spec) => spec.problem().or_else(|| {
                    let overlaps = |other: &PoolRequest| {
                        other.ranges.iter().any(|one| spec.ranges.iter().any(|range| range.overlaps(one)))
                    };
                    let older = valid.iter().find(|(_, other)| overlaps(other));
                    older.map(|(name, _)| PoolProblem::Overlaps((*name).clone())).or_else(|| {
                        let own = spec.vlan_network()?;
                        let contradicts =
                            |other: &PoolRequest| other.vlan_network().is_some_and(|other| own.contradicts(&other));
                        let older = valid.iter().find(|(_, other)| contradicts(other));
                        older.map(|(name, _)| PoolProblem::ContradictsVlan((*name).clone()))
                    })
                }),
            };
            match (problem, &pool.spec) {
                (Some(problem), _) => drop(problems.insert(name.clone(), problem)),
                (None, Ok(spec)) => valid.push((name, spec)),
                (None, Err(_)) => {}
            }
        }
        problems
    }

    /// The addresses of one Egress; chooses those that it lacks, all or none.
    fn addresses<'a>(
        &'a self,
        (name, egress): (&'a String, &'a EgressObject),
        held: &mut BTreeMap<IpAddr, &'a String>,
        free: &mut BTreeMap<&'a String, FreeAddresses<'a>>,
        allocation: &mut Allocation,
    ) -> Result<Vec<IpAddr>, NotAllocated> {
        let mut chosen = Vec::new();
        let outcome = self.given_or_chosen((name, egress), held, free, &mut chosen, &allocation.problems);
        if outcome.is_err() {
            for (pool, address) in chosen.into_iter().rev() {
                held.remove(&address);
                free.get_mut(pool).into_iter().for_each(|free| free.returned.push(address));
            }
            return outcome;
        }
        if chosen.is_empty() {
            return outcome;
        }
        allocation.chosen.insert(name.clone(), outcome?);
        Err(NotAllocated::Allocating)
    }

    /// The addresses of one Egress, and those of them that it lacked, with their pools.
    fn given_or_chosen<'a>(
        &'a self,
        (name, egress): (&'a String, &'a EgressObject),
        held: &mut BTreeMap<IpAddr, &'a String>,
        free: &mut BTreeMap<&'a String, FreeAddresses<'a>>,
        chosen: &mut Vec<(&'a String, IpAddr)>,
        problems: &BTreeMap<String, PoolProblem>,
    ) -> Result<Vec<IpAddr>, NotAllocated> {
        let spec = egress.spec.as_ref().map_err(|why| NotAllocated::Unreadable(why.clone()))?;
        let mut addresses = Vec::new();
        for RequestedAddress { address, pool } in &spec.addresses {
            let Some(pool) = pool else {
                addresses.extend(address);
                continue;
            };
            let known = self.pools.get(pool).ok_or_else(|| NotAllocated::NoPool(pool.clone()))?;
            let ranges = known
                .spec
                .as_ref()
                .map_err(|why| NotAllocated::Pool(pool.clone(), PoolProblem::Unreadable(why.clone())))?;
            // A node can have one of two networks that contradict each other: an Egress that names an address must not bring
            // the younger one there.
            if let Some(problem @ PoolProblem::ContradictsVlan(_)) = problems.get(pool)
                && !egress.is_served()
            {
                return Err(NotAllocated::Pool(pool.clone(), problem.clone()));
            }
            match address {
                Some(address) if !ranges.contains(*address) => {
                    return Err(NotAllocated::NotInPool(*address, pool.clone()));
                }
                Some(address) => match held.get(address) {
                    Some(holder) if *holder != name => return Err(NotAllocated::Held(*address, (*holder).clone())),
                    _ => addresses.push(*address),
                },
                None => {
                    if let Some(problem) = problems.get(pool) {
                        return Err(NotAllocated::Pool(pool.clone(), problem.clone()));
                    }
                    let free = free.entry(pool).or_insert_with(|| FreeAddresses::of(ranges));
                    let is_free = |one: &IpAddr| !held.contains_key(one) && !ranges.is_gateway(*one);
                    let address = free.next(is_free).ok_or_else(|| NotAllocated::Exhausted(pool.clone()))?;
                    held.insert(address, name);
                    addresses.push(address);
                    chosen.push((pool, address));
                }
            }
        }
        Ok(addresses)
    }

    /// Puts Egresses with the same addresses together. Those with pools come first, since others may share theirs.
    fn group(&self, by_age: &[(&String, &EgressObject)], allocation: &mut Allocation) {
        let has_pool = |egress: &EgressObject| {
            egress.spec.as_ref().is_ok_and(|spec| spec.addresses.iter().any(|one| one.pool.is_some()))
        };
        let (backed, bare): (Vec<_>, Vec<_>) = by_age.iter().partition(|(_, egress)| has_pool(egress));
        let mut group_of = BTreeMap::<IpAddr, (IpAddr, String)>::new();
        let mut sizes = BTreeMap::<IpAddr, usize>::new();
        for (name, egress) in backed.into_iter().chain(bare) {
            let Some(Ok(addresses)) = allocation.egresses.get(name.as_str()).cloned() else { continue };
            let Some(first) = addresses.first().copied() else { continue };
            let set: BTreeSet<IpAddr> = addresses.iter().copied().collect();
            let bytes = egress.size + RULE_BYTES;
            let shared =
                addresses.iter().find_map(|address| group_of.get(address).map(|group| (*address, group.clone())));
            let outcome = match &shared {
                None => {
                    sizes.insert(first, bytes);
                    let owner = |address: &IpAddr| (*address, (first, (*name).clone()));
                    group_of.extend(set.iter().map(owner));
                    let named = egress.spec.iter().flat_map(|spec| &spec.addresses).filter_map(|one| one.pool.as_ref());
                    let known: Vec<_> = named.filter_map(|name| Some((name, self.pool(name)?))).collect();
                    let selecting = known.iter().filter(|(_, pool)| pool.selects_nodes);
                    let group = AddressGroup {
                        addresses,
                        egresses: vec![(*name).clone()],
                        pools: selecting.map(|(name, _)| (*name).clone()).collect(),
                        vlans: known.iter().filter_map(|(_, pool)| pool.vlan_network()).collect(),
                        is_of_hosts: !has_pool(egress),
                    };
                    allocation.groups.insert(first, group);
                    continue;
                }
                Some((address, (key, by))) => match allocation.groups.get_mut(key) {
                    Some(group) if group.addresses.iter().copied().collect::<BTreeSet<_>>() == set => {
                        let size = sizes.entry(*key).or_default();
                        if *size + bytes <= MOST_BYTES {
                            *size += bytes;
                            group.egresses.push((*name).clone());
                            continue;
                        }
                        Err(NotAllocated::Crowded(*address))
                    }
                    _ => Err(NotAllocated::PartlyShared(*address, by.clone())),
                },
            };
            allocation.egresses.insert((*name).clone(), outcome);
        }
    }
}

/// What the names of the assignments of groups begin with.
pub const ASSIGNMENT_PREFIX: &str = "egress";

/// The name of the assignment of a group.
pub fn assignment_name(first: IpAddr) -> String {
    named_by_address(ASSIGNMENT_PREFIX, first)
}

/// The status of an Egress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressStatus {
    /// Empty while there is none.
    pub node: String,
    pub address: String,
    /// Type, status, reason, message; of an Egress with a pool.
    pub conditions: Vec<DesiredCondition>,
}

/// The status of an Egress with this outcome, and this policy if there is an assignment.
pub fn status(
    egress: &EgressObject,
    outcome: &Result<Vec<IpAddr>, NotAllocated>,
    policy: Option<&EgressPolicy>,
) -> EgressStatus {
    let items = policy.map(|policy| policy.published.items.as_slice()).unwrap_or_default();
    let item = items.first().filter(|_| outcome.is_ok());
    let mut status = EgressStatus::default();
    if let Some(item) = item {
        (status.node, status.address) = (item.node.clone(), item.egress_ip.clone());
    }
    let has_pool = egress.spec.as_ref().is_ok_and(|spec| spec.addresses.iter().any(|one| one.pool.is_some()));
    if !has_pool {
        return status;
    }
    let allocated = match outcome {
        Ok(_) => (true, "Allocated", "EgressIP is successfully allocated".to_owned()),
        Err(why) => (false, "AllocationError", format!("Cannot allocate EgressIP from ExternalIPPool: {why}")),
    };
    let assigned = policy.filter(|_| outcome.is_ok()).and_then(|policy| policy.published.conditions.get(ASSIGNED));
    let assigned = match (item, assigned) {
        (Some(_), _) => (true, "Assigned", "EgressIP is successfully assigned to EgressNode".to_owned()),
        (None, Some((_, why))) if outcome.is_ok() => (
            false,
            "AssignmentError",
            format!("Failed to assign the IP to EgressNode: no Node available ({})", why.message),
        ),
        (None, _) => (false, "AssignmentError", "Failed to assign the IP to EgressNode: no Node available".to_owned()),
    };
    let condition = |kind, (status, reason, message)| DesiredCondition { kind, status, reason, message };
    status.conditions = vec![condition("IPAllocated", allocated), condition("IPAssigned", assigned)];
    status
}

#[cfg(test)]
mod tests {
    use egress_common::random::Random;

    use super::*;
    use crate::model::samples::{ip, items, net, policy};

    fn egress(created: i64, address: Option<&str>, pool: Option<&str>) -> EgressObject {
        let one = RequestedAddress { address: address.map(ip), pool: pool.map(str::to_owned) };
        let spec = EgressRequest { applied_to: None, addresses: vec![one], bandwidth: None };
        EgressObject { uid: format!("u{created}"), created, served: None, size: 0, spec: Ok(spec) }
    }

    fn range(start: &str, end: &str) -> PoolRange {
        PoolRange::between(ip(start), ip(end)).expect("a range")
    }

    fn pool(created: i64, ranges: &[PoolRange]) -> PoolObject {
        let spec = PoolRequest { ranges: ranges.to_vec(), subnet: None, selects_nodes: false };
        PoolObject { uid: format!("p{created}"), created, spec: Ok(spec) }
    }

    /// One pool of three addresses.
    fn inputs(egresses: &[(&str, EgressObject)]) -> AntreaInputs {
        AntreaInputs {
            egresses: egresses.iter().map(|(name, one)| ((*name).to_owned(), one.clone())).collect(),
            pools: [("p".to_owned(), pool(1, &[range("172.18.0.100", "172.18.0.102")]))].into(),
        }
    }

    fn chosen(inputs: &AntreaInputs) -> Vec<(String, Vec<IpAddr>)> {
        inputs.allocate().chosen.into_iter().collect()
    }

    #[test]
    fn ranges_count_as_in_antrea() {
        let total = |ranges: &[PoolRange]| pool(1, ranges).spec.expect("a spec").total();
        let of = |text: &str| PoolRange::of_network(net(text));
        for (text, count) in [
            ("10.0.0.0/28", 14),
            ("10.0.0.0/30", 2),
            ("10.0.0.0/31", 0),
            ("10.0.0.7/32", 0),
            ("fd00::/124", 15),
            ("fd00::1/128", 0),
        ] {
            assert_eq!(total(&[of(text)]), count, "{text}");
        }
        assert_eq!(total(&[range("10.0.0.2", "10.0.0.10"), of("10.0.1.0/28")]), 23);
        assert_eq!(total(&[of("::/0")]), u64::MAX);
        assert_eq!(total(&[range("255.255.255.255", "255.255.255.255")]), 1);
        assert!(PoolRange::between(ip("10.0.0.2"), ip("10.0.0.1")).is_none());
        assert!(PoolRange::between(ip("10.0.0.2"), ip("fd00::1")).is_none());
        let addresses: Vec<_> = of("10.0.0.0/30").addresses().collect();
        assert_eq!(addresses, [ip("10.0.0.1"), ip("10.0.0.2")]);
    }

    #[test]
    fn what_objects_have_comes_before_anything_new_and_the_first_free_is_next() {
        // The oldest has none yet; a younger one has the first address.
        let all = inputs(&[
            ("old", egress(1, None, Some("p"))),
            ("young", egress(2, Some("172.18.0.100"), Some("p"))),
            ("third", egress(3, None, Some("p"))),
            ("fourth", egress(4, None, Some("p"))),
        ]);
        let expected = [("old", "172.18.0.101"), ("third", "172.18.0.102")];
        let expected: Vec<_> =
            expected.into_iter().map(|(name, address)| (name.to_owned(), vec![ip(address)])).collect();
        assert_eq!(chosen(&all), expected);
        let found = all.allocate();
        assert_eq!(found.egresses["young"], Ok(vec![ip("172.18.0.100")]));
        assert_eq!(found.egresses["old"], Err(NotAllocated::Allocating), "until its object has it");
        assert_eq!(found.egresses["fourth"], Err(NotAllocated::Exhausted("p".into())));
        assert_eq!(found.used, [("p".to_owned(), 3)].into());
        assert_eq!(found.groups.keys().collect::<Vec<_>>(), [&ip("172.18.0.100")]);
    }

    #[test]
    fn an_address_of_a_pool_has_one_holder_and_egresses_without_a_pool_share_it() {
        let all = inputs(&[
            ("a", egress(2, Some("172.18.0.100"), Some("p"))),
            ("b", egress(3, Some("172.18.0.100"), Some("p"))),
            ("c", egress(1, Some("172.18.0.100"), None)),
            ("d", egress(4, Some("172.18.0.9"), None)),
            ("e", egress(5, Some("172.18.0.103"), Some("p"))),
            ("f", egress(6, None, Some("q"))),
        ]);
        let found = all.allocate();
        assert_eq!(found.groups[&ip("172.18.0.100")].egresses, ["a", "c"]);
        assert_eq!(found.egresses["b"], Err(NotAllocated::Held(ip("172.18.0.100"), "a".into())));
        assert_eq!(found.egresses["d"], Ok(vec![ip("172.18.0.9")]), "of no pool: some node has it itself");
        let of_hosts = found.groups.iter().filter(|(_, group)| group.is_of_hosts).map(|(first, _)| *first);
        assert_eq!(of_hosts.collect::<Vec<_>>(), [ip("172.18.0.9")]);
        assert_eq!(found.egresses["e"], Err(NotAllocated::NotInPool(ip("172.18.0.103"), "p".into())));
        assert_eq!(found.egresses["f"], Err(NotAllocated::NoPool("q".into())));
        assert_eq!(found.used, [("p".to_owned(), 1)].into());
    }

    #[test]
    fn an_older_egress_that_is_edited_takes_no_address_from_one_that_is_served() {
        let served = |created, address: &str, by: &str| {
            let object = egress(created, Some(address), Some("p"));
            EgressObject { served: Some(ip(by)), ..object }
        };
        let all = inputs(&[
            ("old", served(1, "172.18.0.101", "172.18.0.100")),
            ("young", served(2, "172.18.0.101", "172.18.0.101")),
        ]);
        let found = all.allocate();
        assert_eq!(found.egresses["young"], Ok(vec![ip("172.18.0.101")]));
        assert_eq!(found.egresses["old"], Err(NotAllocated::Held(ip("172.18.0.101"), "young".into())));
        let neither = inputs(&[
            ("old", egress(1, Some("172.18.0.101"), Some("p"))),
            ("young", served(2, "172.18.0.101", "172.18.0.100")),
        ]);
        assert_eq!(neither.allocate().egresses["old"], Ok(vec![ip("172.18.0.101")]));
    }

    #[test]
    fn a_gateway_is_never_allocated_and_invalid_pools_give_nothing_new() {
        let mut all = inputs(&[("a", egress(1, None, Some("p"))), ("b", egress(2, Some("172.18.0.102"), Some("p")))]);
        let spec = |all: &mut AntreaInputs, subnet: PoolSubnet| {
            let pool = all.pools.get_mut("p").expect("a pool").spec.as_mut().expect("a spec");
            pool.subnet = Some(subnet);
        };
        let subnet = PoolSubnet { gateway: ip("172.18.0.100"), prefix_length: 16, vlan: 0 };
        spec(&mut all, subnet);
        assert_eq!(chosen(&all), [("a".to_owned(), vec![ip("172.18.0.101")])]);
        assert_eq!(all.pools["p"].spec.as_ref().map(PoolRequest::total), Ok(2));
        for (subnet, problem) in [
            (PoolSubnet { prefix_length: 33, ..subnet }, PoolProblem::PrefixLength),
            (PoolSubnet { gateway: ip("172.19.0.1"), ..subnet }, PoolProblem::OutsideSubnet(net("172.19.0.0/16"))),
        ] {
            spec(&mut all, subnet);
            let found = all.allocate();
            assert_eq!(found.egresses["a"], Err(NotAllocated::Pool("p".into(), problem)));
            assert_eq!(found.egresses["b"], Ok(vec![ip("172.18.0.102")]), "it keeps what it has");
        }
        let mut all = inputs(&[("a", egress(1, None, Some("q")))]);
        all.pools.insert("q".into(), pool(2, &[range("172.18.0.102", "172.18.0.110")]));
        assert_eq!(all.allocate().problems, [("q".to_owned(), PoolProblem::Overlaps("p".into()))].into());
        all.pools.insert(
            "q".into(),
            pool(2, &[range("172.18.0.110", "172.18.0.120"), range("172.18.0.115", "172.18.0.116")]),
        );
        assert_eq!(all.allocate().problems, [("q".to_owned(), PoolProblem::OverlapsItself)].into());
    }

    #[test]
    fn pools_in_vlans_contradict_each_other_or_share_a_network() {
        let in_vlan = |created, addresses: [&str; 2], gateway: &str, vlan| {
            let subnet = PoolSubnet { gateway: ip(gateway), prefix_length: 24, vlan };
            let ranges = vec![range(addresses[0], addresses[1])];
            let spec = PoolRequest { ranges, subnet: Some(subnet), selects_nodes: false };
            PoolObject { uid: format!("p{created}"), created, spec: Ok(spec) }
        };
        let old = in_vlan(1, ["10.10.0.8", "10.10.0.9"], "10.10.0.1", 7);
        let with = |young: PoolObject| {
            let egresses =
                [("a", egress(1, Some("10.10.0.8"), Some("old"))), ("b", egress(2, Some("10.10.0.18"), Some("young")))];
            let egresses = egresses.map(|(name, one)| (name.to_owned(), one)).into();
            AntreaInputs { egresses, pools: [("old".to_owned(), old.clone()), ("young".to_owned(), young)].into() }
        };
        let found = with(in_vlan(2, ["10.10.0.18", "10.10.0.19"], "10.10.0.1", 7)).allocate();
        assert!(found.problems.is_empty(), "the same network");
        let network = VlanNetwork { vlan: 7, gateway: net("10.10.0.1/24") };
        assert_eq!(found.groups[&ip("10.10.0.18")].vlans, [network].into());
        for (gateway, vlan, why) in [("10.10.0.2", 7, "another gateway"), ("10.10.0.1", 8, "another VLAN")] {
            let mut all = with(in_vlan(2, ["10.10.0.18", "10.10.0.19"], gateway, vlan));
            let problem = PoolProblem::ContradictsVlan("old".into());
            let found = all.allocate();
            assert_eq!(found.egresses["a"], Ok(vec![ip("10.10.0.8")]), "{why}");
            assert_eq!(found.egresses["b"], Err(NotAllocated::Pool("young".into(), problem)), "{why}, also by name");
            all.egresses.get_mut("b").expect("an Egress").served = Some(ip("10.10.0.18"));
            assert_eq!(all.allocate().egresses["b"], Ok(vec![ip("10.10.0.18")]), "{why}: it keeps what it has");
        }
        let untagged = with(in_vlan(2, ["10.10.0.18", "10.10.0.19"], "10.10.0.2", 0)).allocate();
        assert!(untagged.problems.is_empty() && untagged.groups[&ip("10.10.0.18")].vlans.is_empty());
    }

    #[test]
    fn an_egress_without_room_beside_older_ones_has_no_address() {
        let name = |number: i64| format!("e{number:02}");
        let of = |number: i64| {
            let pool = (number == 0).then_some("p");
            (name(number), EgressObject { size: 100_000, ..egress(number, Some("172.18.0.100"), pool) })
        };
        let inputs = AntreaInputs { egresses: (0..12).map(of).collect(), ..inputs(&[]) };
        let allocation = inputs.allocate();
        let group = &allocation.groups[&ip("172.18.0.100")];
        assert_eq!(group.egresses, (0..10).map(name).collect::<Vec<_>>());
        for number in [10, 11] {
            assert_eq!(allocation.egresses[&name(number)], Err(NotAllocated::Crowded(ip("172.18.0.100"))));
        }
    }

    #[test]
    fn several_addresses_come_from_several_pools_and_are_shared_as_a_set() {
        let mut all = inputs(&[]);
        all.pools.insert("q".into(), pool(2, &[range("fd00:172:18::100", "fd00:172:18::101")]));
        let selecting = |all: &mut AntreaInputs, name: &str, selects: bool| {
            all.pools.get_mut(name).expect("a pool").spec.as_mut().expect("a spec").selects_nodes = selects;
        };
        ["p", "q"].into_iter().for_each(|name| selecting(&mut all, name, true));
        let both = |created, addresses: [Option<&str>; 2]| {
            let pools = ["p", "q"].into_iter().zip(addresses);
            let one = |(pool, address): (&str, Option<&str>)| RequestedAddress {
                address: address.map(ip),
                pool: Some(pool.into()),
            };
            let spec = EgressRequest { applied_to: None, addresses: pools.map(one).collect(), bandwidth: None };
            EgressObject { uid: "u".into(), created, served: None, size: 0, spec: Ok(spec) }
        };
        all.egresses.insert("a".into(), both(1, [Some("172.18.0.101"), None]));
        assert_eq!(chosen(&all), [("a".to_owned(), vec![ip("172.18.0.101"), ip("fd00:172:18::100")])]);
        all.egresses.insert("a".into(), both(1, [Some("172.18.0.101"), Some("fd00:172:18::100")]));
        all.egresses.insert("b".into(), egress(2, Some("172.18.0.101"), None));
        let found = all.allocate();
        let pools = |all: &AntreaInputs| all.allocate().groups[&ip("172.18.0.101")].pools.clone();
        assert_eq!(pools(&all), ["p".to_owned(), "q".to_owned()].into(), "only nodes that both select");
        assert_eq!(found.egresses["b"], Err(NotAllocated::PartlyShared(ip("172.18.0.101"), "a".into())));
        selecting(&mut all, "q", false);
        assert_eq!(pools(&all), ["p".to_owned()].into());
    }

    #[test]
    fn what_cannot_be_allocated_holds_nothing() {
        // An older Egress names an address of another pool, or of none.
        for pool in ["q", "r"] {
            let mut all = inputs(&[
                ("evil", egress(1, Some("172.18.0.100"), Some(pool))),
                ("a", egress(2, Some("172.18.0.100"), Some("p"))),
            ]);
            all.pools.insert("q".into(), self::pool(2, &[range("172.18.1.1", "172.18.1.9")]));
            assert_eq!(all.allocate().egresses["a"], Ok(vec![ip("172.18.0.100")]), "{pool}");
        }
        // The second pool is full: the addresses of the first stay free, in their order.
        let mut all = inputs(&[("used", egress(1, Some("172.18.1.1"), Some("q"))), ("a", egress(9, None, Some("p")))]);
        all.pools.insert("q".into(), pool(2, &[range("172.18.1.1", "172.18.1.1")]));
        for created in 2..5 {
            let one = |pool: &str| RequestedAddress { address: None, pool: Some(pool.into()) };
            let spec =
                EgressRequest { applied_to: None, addresses: vec![one("p"), one("p"), one("q")], bandwidth: None };
            let object = EgressObject { uid: "u".into(), created, served: None, size: 0, spec: Ok(spec) };
            all.egresses.insert(format!("both{created}"), object);
        }
        let found = all.allocate();
        assert_eq!(found.egresses["both2"], Err(NotAllocated::Exhausted("q".into())));
        assert_eq!(found.chosen, [("a".to_owned(), vec![ip("172.18.0.100")])].into());
        assert_eq!(found.used, [("p".to_owned(), 1), ("q".to_owned(), 1)].into());
    }

    /// Random objects, of which the controller writes some and ends, again and again.
    #[test]
    fn a_controller_that_ends_at_any_moment_loses_and_gives_away_nothing() {
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let mut all = inputs(&[]);
            all.pools.insert("q".into(), pool(2, &[range("172.18.1.1", "172.18.1.4")]));
            for created in 0..8 {
                let addresses = (0..=random.below(2)).map(|_| RequestedAddress {
                    address: (random.below(4) == 0)
                        .then(|| ip(random.one_of(&["172.18.0.100", "172.18.1.2", "10.0.0.1"]))),
                    pool: Some(random.one_of(&["p", "q", "q", "none"]).to_owned()),
                });
                let spec = EgressRequest { applied_to: None, addresses: addresses.collect(), bandwidth: None };
                let object = EgressObject {
                    uid: format!("u{created}"),
                    created: created % 3,
                    served: None,
                    size: 0,
                    spec: Ok(spec),
                };
                all.egresses.insert(format!("e{created}"), object);
            }
            let mut given = BTreeMap::<String, Vec<IpAddr>>::new();
            for round in 0..6 {
                let found = all.allocate();
                for (name, addresses) in &given {
                    assert_eq!(found.egresses.get(name), Some(&Ok(addresses.clone())), "seed {seed}, {name}");
                }
                given =
                    found.egresses.iter().filter_map(|(name, one)| Some((name.clone(), one.clone().ok()?))).collect();
                let of_all = given.values().chain(found.chosen.values());
                let of_all: Vec<IpAddr> = of_all.flat_map(|all| all.iter().copied().collect::<BTreeSet<_>>()).collect();
                let held: BTreeSet<_> = of_all.iter().copied().collect();
                assert_eq!(held.len(), of_all.len(), "seed {seed}: {given:?} {:?}", found.chosen);
                for (pool, used) in &found.used {
                    let has = all.pool(pool).expect("a pool").total();
                    assert!(*used <= has, "seed {seed}: {used} of {has}");
                }
                // The last time all of it is written.
                for (name, addresses) in found.chosen.iter().filter(|_| round == 4 || random.below(2) == 0) {
                    let spec = all.egresses.get_mut(name).expect("it is there").spec.as_mut().expect("a spec");
                    spec.addresses.iter_mut().zip(addresses).for_each(|(one, address)| one.address = Some(*address));
                }
                assert!(round < 5 || found.chosen.is_empty(), "seed {seed}: {:?}", found.chosen);
            }
        }
    }

    #[test]
    fn the_status_says_what_is_allocated_and_assigned() {
        let one = egress(1, Some("172.18.0.100"), Some("p"));
        let allocated = Ok(vec![ip("172.18.0.100")]);
        let served = policy("x", &["172.18.0.100"], &[]);
        let served = served.published_as(|published| published.items = items(&[("n1", "172.18.0.100")]));
        let found = status(&one, &allocated, Some(&served));
        assert_eq!((found.node.as_str(), found.address.as_str()), ("n1", "172.18.0.100"));
        let kinds = |status: &EgressStatus| -> Vec<_> {
            status.conditions.iter().map(|one| (one.kind, one.status, one.reason)).collect()
        };
        assert_eq!(kinds(&found), [("IPAllocated", true, "Allocated"), ("IPAssigned", true, "Assigned")]);
        let waiting = status(&one, &allocated, None);
        assert_eq!(kinds(&waiting), [("IPAllocated", true, "Allocated"), ("IPAssigned", false, "AssignmentError")]);
        let without = status(&one, &Err(NotAllocated::Exhausted("p".into())), Some(&served));
        assert_eq!((without.node.as_str(), kinds(&without)[0]), ("", ("IPAllocated", false, "AllocationError")));
        assert!(status(&egress(1, Some("172.18.0.100"), None), &allocated, Some(&served)).conditions.is_empty());
    }

    #[test]
    fn assignments_have_valid_names() {
        assert_eq!(assignment_name(ip("10.10.0.8")), "egress-10.10.0.8");
        assert_eq!(assignment_name(ip("fd00::1")), "egress-fd00-0-0-0-0-0-0-1");
    }
}
