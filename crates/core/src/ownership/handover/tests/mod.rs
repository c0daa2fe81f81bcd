pub(super) mod story;

use std::sync::Arc;

use super::*;
use crate::allocation::samples::{node, policy};
use crate::allocation::{AssignmentInputs, Nodes, ObjectAssignment, assign};
use crate::model::policy::EgressPolicy;
use crate::model::reserved::ClusterNetworks;
use crate::model::services::Services;

const LEASE: Duration = Duration::from_secs(5);
const A: &str = "172.18.0.101";

/// A cluster with a leader that writes all it plans at once, and passive nodes.
struct HandOverCluster {
    nodes: Nodes,
    policies: Policies,
    unreachable: BTreeSet<String>,
    released: BTreeSet<(IpAddr, u64)>,
    given: BTreeMap<(IpAddr, u64), Option<String>>,
    prepared: BTreeMap<(IpAddr, u64), BTreeSet<String>>,
    confirmed: BTreeMap<String, Instant>,
    departed: BTreeMap<IpAddr, String>,
    records: Records,
    planner: HandoverPlanner,
    start: Instant,
    /// The beginning of this leader's term.
    since: Instant,
}

impl HandOverCluster {
    fn new(policies: Policies) -> Self {
        let nodes = (1..=3).map(|i| node(&format!("n{i}"), &format!("172.18.0.{i}/16"))).collect();
        let start = Instant::now();
        Self {
            nodes,
            policies,
            unreachable: BTreeSet::new(),
            released: BTreeSet::new(),
            given: BTreeMap::new(),
            prepared: BTreeMap::new(),
            confirmed: BTreeMap::new(),
            departed: BTreeMap::new(),
            records: Records::default(),
            planner: HandoverPlanner::default(),
            start,
            since: start,
        }
    }

    fn plan(&mut self, now: Instant) -> HandoverPlan {
        let (policies, nodes, unreachable) = (&self.policies, &self.nodes, &self.unreachable);
        let (absent, hand_overs) = (&BTreeSet::new(), &self.records.open);
        let (networks, services) = (&ClusterNetworks::default(), &Services::default());
        let assignment =
            assign(&AssignmentInputs { policies, nodes, unreachable, absent, networks, services, hand_overs });
        let end = |node: &String| {
            (node.clone(), self.confirmed.get(node).copied().unwrap_or(self.since).max(self.since) + LEASE)
        };
        let ends = self.unreachable.iter().map(end).collect();
        let Self { released, given, prepared, departed, .. } = self;
        let evidence = Evidence {
            released,
            new_owners: given,
            prepared,
            lease_expiries: &ends,
            deleted_objects_gateways: departed,
        };
        self.planner.plan(policies, &assignment, &self.records, &evidence, now)
    }

    fn record(&mut self, step: &RecordChange) {
        match step {
            RecordChange::Record(address, hand_over) => {
                self.records.last = self.records.last.max(hand_over.number);
                self.records.open.insert(*address, hand_over.clone());
            }
            RecordChange::Remove(address) => {
                self.records.open.remove(address);
            }
        }
    }

    fn write(&mut self, policy: &PolicyKey, items: Vec<Item>) {
        let policy = self.policies.get_mut(policy).expect("the policy");
        *policy = Arc::new(policy.published_as(|published| published.items = items));
    }

    /// Plans at this second and writes everything. Returns where the address is then, and whether a record is open.
    fn pass(&mut self, second: u64) -> (Option<String>, bool) {
        let plan = self.plan(self.start + Duration::from_secs(second));
        plan.record_changes.iter().for_each(|step| self.record(step));
        plan.items.into_iter().for_each(|(name, items)| self.write(&name, items));
        let mut items =
            self.policies.values().flat_map(|policy| &policy.published.items).filter(|item| item.egress_ip == A);
        (items.next().map(|item| item.node.clone()), self.records.open.contains_key(&A.parse().expect("a literal")))
    }

    fn lose(&mut self, name: &str, confirmed: u64) {
        self.unreachable.insert(name.into());
        self.confirmed.insert(name.into(), self.start + Duration::from_secs(confirmed));
    }
}

fn on(node: &str) -> HandOverCluster {
    HandOverCluster::new(Policies::from([policy("a", 1, &[A], &[(node, A)])]))
}

fn at(node: &str, recorded: bool) -> (Option<String>, bool) {
    (Some(node.to_owned()), recorded)
}

#[test]
fn a_silent_node_keeps_its_address_until_its_lease_runs_out() {
    let mut stage = on("n1");
    stage.nodes.remove("n3");
    assert_eq!(stage.pass(0), at("n1", false));
    stage.lose("n1", 10);
    assert_eq!(stage.pass(10), at("n1", true));
    let plan = stage.plan(stage.start + Duration::from_secs(11));
    assert_eq!(plan.requeue_at, Some(stage.start + Duration::from_secs(15)), "when its lease runs out");
    assert!(plan.record_changes.is_empty());
    assert_eq!(stage.pass(14), at("n1", true));
    assert_eq!(stage.pass(15), at("n2", true));
    assert_eq!(stage.pass(15), at("n2", false));
}

#[test]
fn a_nodes_acknowledgement_suffices_if_it_is_of_this_hand_over() {
    let mut stage = on("n1");
    stage.unreachable.insert("n1".into());
    let address = A.parse().expect("a literal");
    stage.records.last = 6;
    stage.released.insert((address, 6));
    assert_eq!(stage.pass(0), at("n1", true));
    stage.released.insert((address, 7));
    let to = stage.records.open[&address].to.clone().expect("a node");
    assert_eq!(stage.pass(0), at(&to, true));
    assert_eq!(stage.pass(0), at(&to, false));
}

#[test]
fn a_reachable_node_is_waited_for_and_one_that_returns_keeps_its_address() {
    let mut stage = on("n1");
    for second in 0..100 {
        stage.lose("n1", second);
        assert_eq!(stage.pass(second), at("n1", true));
    }
    stage.unreachable.clear();
    assert_eq!(stage.pass(100), at("n1", false));
}

#[test]
fn a_new_leader_continues_with_the_record_and_counts_from_its_first_observation() {
    let mut stage = on("n1");
    stage.unreachable.insert("n1".into());
    assert_eq!(stage.pass(0), at("n1", true));
    let to = stage.records.open[&A.parse().expect("a literal")].to.clone().expect("a node");
    stage.planner = HandoverPlanner::default();
    stage.since = stage.start + Duration::from_secs(4);
    assert_eq!(stage.pass(4), at("n1", true));
    assert_eq!(stage.pass(8), at("n1", true));
    assert_eq!(stage.pass(9), at(&to, true));
}

#[test]
fn an_object_that_lists_a_freed_address_waits_for_its_node_too() {
    let mut stage = on("n1");
    stage.policies.extend([policy("b", 2, &[A], &[])]);
    assert_eq!(stage.pass(0), at("n1", false));
    stage.policies.remove(&"a".into());
    // The policy is gone, and with it the status that named the node: the record must exist before.
    let hand_over = HandOver { number: 1, from: "n1".into(), to: None };
    stage.records = Records { last: 1, open: BTreeMap::from([(A.parse().expect("a literal"), hand_over)]) };
    stage.unreachable.insert("n1".into());
    assert_eq!(stage.pass(0), (None, true));
    assert_eq!(stage.pass(4), (None, true));
    assert!(matches!(stage.pass(5), (Some(node), true) if node != "n1"));

    // An edit alone leaves the record; the same node need not release the address first.
    let mut stage = on("n1");
    stage.policies = Policies::from([policy("a", 1, &[], &[("n1", A)])]);
    assert_eq!(stage.pass(0), (None, true));
    stage.policies.extend([policy("b", 2, &[A], &[])]);
    assert_eq!(stage.pass(1), at("n1", true));
    assert_eq!(stage.pass(1), at("n1", false));
}

/// The address of policy `a`, on n2, is listed by policy `b` alone now.
fn changing_policy() -> (HandOverCluster, IpAddr) {
    let policies = Policies::from([policy("a", 1, &[], &[("n2", A)]), policy("b", 2, &[A], &[])]);
    (HandOverCluster::new(policies), A.parse().expect("a literal"))
}

fn stays_on(node: &str, number: u64) -> HandOver {
    HandOver { number, from: node.into(), to: None }
}

#[test]
fn an_address_that_changes_its_policy_stays_on_its_node() {
    let (mut stage, address) = changing_policy();
    let plan = stage.plan(stage.start);
    assert_eq!(plan.record_changes, [RecordChange::Record(address, stays_on("n2", 1))]);
    assert_eq!((plan.items.len(), plan.unreleased.len()), (2, 0), "no release is waited for");
    assert_eq!(stage.pass(0), at("n2", true));
    assert_eq!(stage.pass(0), at("n2", false));
}

/// One policy has lost the address and the leader dies before it writes the other one. n2 has seen nothing of it.
#[test]
fn a_leader_that_dies_while_an_address_changes_its_policy_leaves_a_record() {
    for is_cut_off in [false, true] {
        let (mut stage, address) = changing_policy();
        let plan = stage.plan(stage.start);
        plan.record_changes.iter().for_each(|step| stage.record(step));
        stage.write(&"a".into(), Vec::new());
        stage.planner = HandoverPlanner::default();
        // The next leader prefers another node.
        Arc::make_mut(stage.nodes.get_mut("n2").expect("a node")).assignable = false;
        if is_cut_off {
            stage.lose("n2", 0);
        }
        for second in 1..5 {
            assert_eq!(stage.pass(second), (None, true), "n2 may still hold it");
        }
        if !is_cut_off {
            stage.released.insert((address, 1));
        }
        assert!(matches!(stage.pass(5), (Some(node), true) if node != "n2"));
    }
}

/// The policy that gets the address has another one on the node, which has not left yet.
#[test]
fn an_address_that_its_next_policy_cannot_have_yet_keeps_its_record() {
    let low = "172.18.0.100";
    let (addresses, ends) = ([low, A].map(|text| text.parse::<IpAddr>().expect("a literal")), BTreeMap::new());
    let mut stage = HandOverCluster::new(Policies::from([
        policy("a", 1, &[low, A], &[("n2", low)]),
        policy("b", 2, &[], &[("n2", A)]),
    ]));
    let wanted = [("n3", low), ("n2", A)];
    let plan = |stage: &HandOverCluster| planned(stage, &wanted, &ends, (&stage.records, stage.start));
    let begun = plan(&stage);
    assert_eq!(begun.items, BTreeMap::new(), "n2 has the first one still");
    begun.record_changes.iter().for_each(|step| stage.record(step));
    assert_eq!(stage.records.open[&addresses[1]], stays_on("n2", 2));
    stage.write(&"b".into(), Vec::new());
    let again = HandoverPlan { record_changes: Vec::new(), ..begun };
    assert_eq!(plan(&stage), again, "nor is it removed");
    stage.released.insert((addresses[0], 1));
    let items = plan(&stage).items.remove(&"a".into()).expect("items");
    assert_eq!(items.len(), 2);
    stage.write(&"a".into(), items);
    assert_eq!(plan(&stage).record_changes, addresses.map(RecordChange::Remove));
}

/// The record of the hand-over to n2 does not make n2 release it.
#[test]
fn an_address_that_changes_its_policy_just_after_its_node_has_a_record_of_that_node() {
    let (mut stage, address) = changing_policy();
    stage.record(&RecordChange::Record(address, HandOver { number: 7, from: "n1".into(), to: Some("n2".into()) }));
    assert_eq!(stage.pass(0), at("n2", true));
    assert_eq!(stage.records.open[&address], stays_on("n2", 8));
    assert_eq!(stage.pass(0), at("n2", false));
}

#[test]
fn an_acknowledgement_by_another_node_ends_no_hand_over() {
    let mut stage = on("n1");
    stage.unreachable.insert("n1".into());
    assert_eq!(stage.pass(0), at("n1", true));
    let to = stage.records.open[&A.parse().expect("a literal")].to.clone().expect("a node");
    let other = if to == "n2" { "n3" } else { "n2" };
    stage.write(&"a".into(), vec![Item { node: other.into(), egress_ip: A.into() }]);
    assert_eq!(stage.pass(1), (None, true), "the first node holds it still");
    assert!(matches!(stage.pass(5), (Some(node), true) if node != "n1"));
}

#[test]
fn the_node_of_a_deleted_object_is_waited_for() {
    let mut stage = on("n1");
    stage.policies.remove(&"a".into());
    stage.policies.extend([policy("b", 2, &[A], &[])]);
    let address: IpAddr = A.parse().expect("a literal");
    stage.departed.insert(address, "n1".into());
    stage.unreachable.insert("n1".into());
    assert_eq!(stage.pass(0), (None, true));
    assert_eq!(stage.pass(4), (None, true));
    assert!(matches!(stage.pass(5), (Some(node), true) if node != "n1"));
    // It is not requested twice.
    assert!(matches!(stage.pass(5), (Some(node), false) if node != "n1"));
}

#[test]
fn the_gateway_of_a_deleted_objects_address_is_recorded_although_no_object_wants_it() {
    let mut stage = on("n1");
    stage.policies.remove(&"a".into());
    let address: IpAddr = A.parse().expect("a literal");
    stage.departed.insert(address, "n1".into());
    assert_eq!(stage.pass(0), (None, true));
    let record = stage.records.open[&address].clone();
    assert_eq!((record.from.as_str(), &record.to), ("n1", &None));
    // Another leader, which does not know the policy, and a policy wants the address.
    stage.departed.clear();
    stage.planner = HandoverPlanner::default();
    assert_eq!(stage.pass(3600), (None, true), "its node acknowledges nothing, and is reachable");
    stage.policies.extend([policy("b", 2, &[A], &[])]);
    Arc::make_mut(stage.nodes.get_mut("n1").expect("a node")).assignable = false;
    assert_eq!(stage.pass(3601), (None, true));
    stage.released.insert((address, record.number));
    assert!(matches!(stage.pass(3602), (Some(node), true) if node != "n1"));
    // If no policy wants it, the node's acknowledgement ends the hand-over.
    let mut stage = on("n1");
    stage.policies.clear();
    stage.departed.insert(address, "n1".into());
    stage.pass(0);
    stage.departed.clear();
    stage.released.insert((address, stage.records.open[&address].number));
    assert_eq!(stage.pass(1), (None, false));
}

#[test]
fn a_finished_record_stays_visible_for_a_while() {
    let mut stage = on("n1");
    stage.planner = HandoverPlanner::lingering(Duration::from_secs(2));
    stage.unreachable.insert("n1".into());
    assert_eq!(stage.pass(0), at("n1", true));
    let to = stage.records.open[&A.parse().expect("a literal")].to.clone().expect("a node");
    assert_eq!(stage.pass(5), at(&to, true));
    assert_eq!(stage.pass(6), at(&to, true));
    assert_eq!(stage.plan(stage.start + Duration::from_secs(7)).requeue_at, Some(stage.start + Duration::from_secs(8)));
    assert_eq!(stage.pass(8), at(&to, false));
}

#[test]
fn a_ready_node_that_is_no_longer_wanted_releases_the_address_first() {
    let address: IpAddr = A.parse().expect("a literal");
    for others in [true, false] {
        let mut stage = on("n1");
        stage.unreachable.insert("n1".into());
        assert_eq!(stage.pass(0), at("n1", true));
        let HandOver { number, to, .. } = stage.records.open[&address].clone();
        let new_owner = to.expect("a node");
        stage.prepared.insert((address, number), BTreeSet::from([new_owner.clone()]));
        // Another node is wanted, or none.
        stage.nodes.retain(|name, _| *name != new_owner && (others || name == "n1"));
        stage.pass(1);
        assert_eq!(stage.records.open[&address].from, "n1", "nothing was passed on yet");
        stage.released.insert((address, number));
        assert_eq!(stage.pass(1), (None, true), "no node gets it");
        let record = stage.records.open[&address].clone();
        assert_eq!((&record.from, record.number > number, record.to.is_some()), (&new_owner, true, others));
        assert_eq!(stage.pass(2), (None, true));
        stage.released.insert((address, record.number));
        assert_eq!(stage.pass(2), (record.to, others));
    }
}

/// A record to a node that is ready; the old node has not released the address yet.
fn on_its_way() -> (HandOverCluster, IpAddr, u64, String) {
    let address: IpAddr = A.parse().expect("a literal");
    let mut stage = on("n1");
    Arc::make_mut(stage.nodes.get_mut("n1").expect("a node")).assignable = false;
    assert_eq!(stage.pass(0), at("n1", true));
    let HandOver { number, to, .. } = stage.records.open[&address].clone();
    let new_owner = to.expect("a node");
    stage.prepared.insert((address, number), BTreeSet::from([new_owner.clone()]));
    (stage, address, number, new_owner)
}

#[test]
fn a_hand_over_to_a_ready_node_is_finished_whichever_node_is_wanted() {
    for back in [true, false] {
        let (mut stage, address, number, new_owner) = on_its_way();
        // The old node may get the address again, or the new one may not have it any more.
        Arc::make_mut(stage.nodes.get_mut("n1").expect("a node")).assignable = back;
        Arc::make_mut(stage.nodes.get_mut(&new_owner).expect("a node")).assignable = false;
        assert_eq!(stage.pass(1), at("n1", true));
        let record = stage.records.open[&address].clone();
        assert_eq!((record.number, record.to.as_ref()), (number, Some(&new_owner)), "it may be handed over just now");
        stage.released.insert((address, number));
        stage.given.insert((address, number), Some(new_owner.clone()));
        stage.pass(2);
        let record = stage.records.open[&address].clone();
        assert_eq!(
            (record.from.as_str(), record.number > number),
            (new_owner.as_str(), true),
            "who has it lets go first"
        );
        // The status still names the old node, which must not take that as permission to hold the address.
        assert!(record.to.is_none() || !back, "{record:?}");
        for second in 3..6 {
            assert_eq!(stage.pass(second), (None, true), "no node gets it");
            assert_eq!(stage.records.open[&address].number, record.number);
        }
        stage.released.insert((address, record.number));
        stage.given.insert((address, record.number), None);
        let (to, is_open) = stage.pass(6);
        assert!(is_open && to.is_some() && to != Some(new_owner), "{to:?}");
        assert_eq!(stage.records.open[&address].to, to);
        assert_eq!(stage.pass(6), (to, false));
    }
}

#[test]
fn a_ready_node_that_received_nothing_is_not_waited_for() {
    let (mut stage, address, number, new_owner) = on_its_way();
    stage.released.insert((address, number));
    stage.given.insert((address, number), None);
    Arc::make_mut(stage.nodes.get_mut(&new_owner).expect("a node")).assignable = false;
    let third = if new_owner == "n2" { "n3" } else { "n2" };
    assert_eq!(stage.pass(1), at(third, true));
    assert_eq!(stage.records.open[&address].number, number);
}

/// Of several nodes that were ready under one number, only the named one has anything.
#[test]
fn of_two_ready_nodes_the_named_one_releases_the_address() {
    let (mut stage, address, number, new_owner) = on_its_way();
    let other = if new_owner == "n2" { "n3" } else { "n2" };
    stage.prepared.get_mut(&(address, number)).expect("acknowledgements").insert(other.into());
    stage.released.insert((address, number));
    stage.given.insert((address, number), Some(other.into()));
    stage.pass(1);
    let record = stage.records.open[&address].clone();
    assert_eq!((record.from.as_str(), record.to.as_deref()), (other, Some(new_owner.as_str())));
}

/// Whichever name comes first.
#[test]
fn of_two_ready_nodes_the_recorded_one_continues() {
    for (recorded, former) in [("n2", "n3"), ("n3", "n2")] {
        let (mut stage, address, number, _) = on_its_way();
        stage.records.open.get_mut(&address).expect("a record").to = Some(recorded.into());
        stage.prepared.insert((address, number), [recorded, former].map(str::to_owned).into());
        // The old node is wanted again.
        Arc::make_mut(stage.nodes.get_mut("n1").expect("a node")).assignable = true;
        for node in [recorded, former] {
            Arc::make_mut(stage.nodes.get_mut(node).expect("a node")).assignable = false;
        }
        stage.pass(1);
        let record = &stage.records.open[&address];
        assert_eq!((record.number, record.to.as_deref()), (number, Some(recorded)));
    }
}

#[test]
fn a_ledger_that_is_full_makes_the_others_wait_where_they_are() {
    let many = MAX_OPEN + 10;
    let address = |i: usize| format!("172.18.{}.{}", 1 + i / 200, 1 + i % 200);
    let policies = (0..many).map(|i| policy(&format!("o{i}"), 1, &[&address(i)], &[("n1", &address(i))]));
    let mut stage = HandOverCluster::new(policies.collect());
    stage.unreachable.insert("n1".into());
    let plan = stage.plan(stage.start);
    assert_eq!((plan.record_changes.len(), plan.items.len(), plan.unreleased.len()), (MAX_OPEN, 0, many));
    let everywhere = |stage: &HandOverCluster| {
        stage.policies.values().filter(|policy| policy.published.items[0].node != "n1").count()
    };
    stage.pass(5);
    assert_eq!(everywhere(&stage), MAX_OPEN, "only what is recorded moves");
    stage.pass(5);
    stage.pass(5);
    assert_eq!(everywhere(&stage), many);
}

#[test]
fn an_address_never_has_two_gateways() {
    // The others: a leader died while an address changed its policy, and the next one gave it to another node.
    for seed in (0..300).chain([676, 1719, 2616, 3116]) {
        story::tell(seed, false);
    }
}

/// Nodes become ready and hand over to one another while the wanted node changes all the time.
#[test]
fn an_address_never_has_two_gateways_when_nodes_hand_it_over_to_one_another() {
    for seed in 0..300 {
        story::tell(seed, true);
    }
}

/// The leader's plan for a given assignment and ledger.
fn planned(
    stage: &HandOverCluster,
    assignment: &[(&str, &str)],
    ends: &BTreeMap<String, Instant>,
    (records, now): (&Records, Instant),
) -> HandoverPlan {
    let items = assignment.iter().map(|(node, address)| Item { node: (*node).into(), egress_ip: (*address).into() });
    let outcome = ObjectAssignment { entries: Vec::new(), items: items.collect() };
    let outcomes = BTreeMap::from([("a".into(), outcome)]);
    let assignment = Assignment { policies: outcomes, eligible: 2 };
    let HandOverCluster { released, given, prepared, departed, .. } = stage;
    let evidence =
        Evidence { released, new_owners: given, prepared, lease_expiries: ends, deleted_objects_gateways: departed };
    HandoverPlanner::default().plan(&stage.policies, &assignment, records, &evidence, now)
}

/// A node serves one address of a policy, so another one waits until the first has left.
#[test]
fn a_node_gets_no_second_address_of_an_object_before_the_first_has_left() {
    let low = "172.18.0.100";
    let stage = HandOverCluster::new(Policies::from([policy("a", 1, &[low, A], &[("n1", A)])]));
    let (records, ends) = (Records::default(), BTreeMap::new());
    let plan = planned(&stage, &[("n1", low), ("n2", A)], &ends, (&records, stage.start));
    assert_eq!(plan.unreleased, BTreeMap::from([(A.parse().expect("a literal"), "n1".to_owned())]));
    assert_eq!(plan.items, BTreeMap::new(), "n1 has its first one still");
}

#[test]
fn a_ledger_that_is_full_gets_no_more_records() {
    let (stage, ends) = (on("n1"), BTreeMap::new());
    let record = |number: u32| HandOver { number: number.into(), from: "n3".into(), to: None };
    let of = |count: u32| {
        let open = (1..=count).map(|number| (IpAddr::from((0x0a00_0000 + number).to_be_bytes()), record(number)));
        Records { last: count.into(), open: open.collect() }
    };
    let begun = |records: &Records| {
        let plan = planned(&stage, &[("n2", A)], &ends, (records, stage.start));
        let address: IpAddr = A.parse().expect("a literal");
        assert_eq!(plan.unreleased.get(&address).map(String::as_str), Some("n1"), "whether recorded or not");
        plan.record_changes.iter().any(|step| matches!(step, RecordChange::Record(recorded, _) if *recorded == address))
    };
    let most = u32::try_from(MAX_OPEN).expect("a small number");
    assert!(begun(&of(most - 1)));
    assert!(!begun(&of(most)));
}

#[test]
fn a_hand_over_that_is_open_is_not_new() {
    let address: IpAddr = "172.18.0.100".parse().expect("a literal");
    let record = HandOver { number: 7, from: "n1".into(), to: None };
    let begins = RecordChange::Record(address, record.clone());
    let mut records = Records::default();
    assert!(begins.is_new_to(&records) && !RecordChange::Remove(address).is_new_to(&records));
    records.open.insert(address, record);
    assert!(!begins.is_new_to(&records), "it has to be waited for");
}
