pub(super) mod background_flush;
pub(super) mod handover;
pub(super) mod metered;
pub(super) mod refused;

use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;

use super::ownership::FreshRead;
use super::*;
use egress_core::model::ledger::Ledger;
use egress_core::model::policy::{PolicyPart, Published, Selects};
use egress_core::model::samples::{self, equals, ip, net, settings};
use egress_core::model::services::{Service, ServiceKey};
use egress_core::model::state::family_of;
use egress_core::model::state::{
    EgressIds, Family, LostFlows, OnUnknownPod, PodOwner, PodState, Policy, Prefix, PrefixKind, WhenEmpty,
};
use egress_core::model::view::{Attach, Labels, Pod, PodKey};
use egress_core::networks::{NetworkUse, RoutedNetworks};
use egress_core::ownership::lease::{LeaseDemand, LeaseState};

/// Records actions; refuses to claim an address that another host has.
#[derive(Clone, Default)]
struct Recorder {
    /// A walk of the maps never ends.
    is_walked: Arc<std::sync::atomic::AtomicBool>,
    log: Arc<Mutex<Vec<Action>>>,
    state: Arc<Mutex<KernelState>>,
    observed: Arc<Mutex<u32>>,
    in_use: Option<IpAddr>,
    /// Fails once.
    fails: Arc<Mutex<Option<Action>>>,
    /// Fails always.
    never: Option<Action>,
    /// Refused, as by a full map.
    full: Arc<Mutex<Vec<Action>>>,
    /// The heartbeat's time as of each action.
    noted: Arc<Mutex<Vec<Instant>>>,
    heartbeat: Heartbeat,
    /// The cuts of each walk, and what a test holds to keep them from ending.
    walks: Arc<Mutex<Vec<Vec<Action>>>>,
    walking: Arc<tokio::sync::Mutex<()>>,
    /// How often networks were routed, of which no table exists.
    routed: Arc<Mutex<u32>>,
}

impl Executor for Recorder {
    async fn held(&mut self) -> Result<KernelState, DataplaneError> {
        let KernelState { owned, handovers, .. } = self.state.lock().expect("not poisoned").clone();
        Ok(KernelState { owned, handovers, ..KernelState::default() })
    }

    async fn route(&mut self, networks: &RoutedNetworks) -> BTreeMap<String, String> {
        *self.routed.lock().expect("not poisoned") += 1;
        networks.tables.keys().map(|table| (table.clone(), "no such table".to_owned())).collect()
    }

    async fn observe(&mut self) -> Result<KernelState, DataplaneError> {
        if self.is_walked.load(std::sync::atomic::Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        *self.observed.lock().expect("not poisoned") += 1;
        Ok(self.state.lock().expect("not poisoned").clone())
    }

    fn cut(&mut self, cuts: Vec<Action>) -> BoxFuture<'static, Result<(), DataplaneError>> {
        let mut recorder = self.clone();
        Box::pin(async move {
            recorder.walks.lock().expect("not poisoned").push(cuts.clone());
            let _may_walk = recorder.walking.clone().lock_owned().await;
            for cut in &cuts {
                recorder.apply(cut).await?;
            }
            Ok(())
        })
    }

    async fn apply(&mut self, action: &Action) -> Result<(), DataplaneError> {
        self.noted.lock().expect("not poisoned").push(self.heartbeat.at());
        if let Action::Own(_, address) = action
            && Some(*address) == self.in_use
        {
            return Err(DataplaneError::AddressInUse { address: *address, mac: "02:00:00:00:00:01".into() });
        }
        if self.fails.lock().expect("not poisoned").take_if(|fails| fails == action).is_some() {
            return Err(failure());
        }
        if self.never.as_ref() == Some(action) {
            return Err(failure());
        }
        if self.full.lock().expect("not poisoned").contains(action) {
            return Err(DataplaneError::Full { map: "of a test", limit: 0 });
        }
        self.state.lock().expect("not poisoned").apply(action);
        self.log.lock().expect("not poisoned").push(action.clone());
        Ok(())
    }
}

/// An error of the kernel that is not about an entry.
fn failure() -> DataplaneError {
    DataplaneError::Kernel { what: "a test", source: std::io::Error::from_raw_os_error(libc::EPERM) }
}

fn node(i: u8) -> (String, Arc<Node>) {
    let name = format!("n{i}");
    let node = Node {
        name: name.clone(),
        primary: vec![net(&format!("172.18.0.{i}/16"))],
        pod_subnets: vec![net(&format!("10.244.{i}.0/24"))],
        ..Node::default()
    };
    (name, Arc::new(node))
}

fn policy(name: &str, id: u32, created: i64, assigned: &[(&str, &str)]) -> (PolicyKey, Arc<EgressPolicy>) {
    let items = samples::items(assigned);
    let published = Published {
        ids: EgressIds::both(EgressId(id)),
        has_annotations: true,
        has_status: true,
        ..Published::default()
    };
    let origin = samples::origin(name, created);
    let selects = Selects { pods: equals("app", "web"), ..Selects::default() };
    let policy = EgressPolicy {
        listed: vec!["172.18.0.100".into(), "172.18.0.101".into()],
        rules: Some(vec![EgressPolicy::own_rule(&origin, selects)]),
        published: Published { has_items: true, items, ..published },
        ..EgressPolicy::new(origin)
    };
    (name.into(), Arc::new(policy))
}

fn key(name: &str) -> PodKey {
    PodKey { namespace: "default".into(), name: name.into() }
}

fn pod(address: &str, app: &str) -> Pod {
    Pod {
        uid: address.into(),
        created: 1,
        labels: Labels::from([("app".into(), app.into())]),
        reported: BTreeSet::from([ip(address)]),
        announced: BTreeSet::new(),
        surplus: 0,
        terminating: false,
        host_network: false,
        attached: BTreeSet::new(),
        starting: false,
        completed: false,
        ports: Vec::new(),
    }
}

/// Everything but the pods.
fn world(items: &[(&str, &str)]) -> Vec<Change> {
    vec![
        Change::Nodes(Update::Replaced([node(1), node(2)].into())),
        Change::Namespaces(Update::Replaced([("default".to_owned(), Labels::new())].into())),
        Change::Policies(Update::Replaced([policy("a", 1, 1, items)].into())),
        Change::Services(Update::Replaced(BTreeMap::new())),
        Change::Ledger(Arc::default()),
    ]
}

/// Applies the changes one after another, and returns the actions for each.
async fn play(recorder: &Recorder, changes: Vec<Change>) -> Vec<Vec<Action>> {
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let mut done = Vec::new();
    for change in changes {
        reconciler.apply(change);
        if reconciler.synced.all() {
            reconciler.reconcile().await.expect("the recorder does not fail");
            reconciler.cut_all().await.expect("the recorder does not fail");
        }
        done.push(std::mem::take(&mut *recorder.log.lock().expect("not poisoned")));
    }
    done
}

/// After the answer the pod may send.
#[tokio::test]
async fn the_cni_is_answered_when_the_maps_have_the_pod() {
    let recorder = Recorder::default();
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let bare = Pod { reported: BTreeSet::new(), starting: true, ..pod("10.244.1.10", "web") };
    let pods = Change::Pods(Update::Replaced([(key("p"), bare.clone())].into()));
    world(&[("n1", "172.18.0.100")]).into_iter().chain([pods]).for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("the recorder does not fail");
    let refused = Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(1)));
    recorder.full.lock().expect("not poisoned").push(refused);
    let (reply, mut answer) = tokio::sync::oneshot::channel();
    let attach = Attach { pod: key("p"), uid: bare.uid, addresses: BTreeSet::from([ip("10.244.1.10")]) };
    reconciler.attach(attach, reply);
    reconciler.settle_attached();
    reconciler.reconcile().await.expect("a refused entry is not a failure");
    reconciler.settle_attached();
    assert!(answer.try_recv().is_err(), "the kernel has no such entry yet");
    recorder.full.lock().expect("not poisoned").clear();
    reconciler.incomplete = true;
    reconciler.reconcile().await.expect("the recorder does not fail");
    reconciler.settle_attached();
    assert_eq!(answer.try_recv(), Ok(None));
}

#[tokio::test]
async fn nothing_is_written_before_every_watch_has_synced() {
    let recorder = Recorder::default();
    let mut changes = world(&[("n1", "172.18.0.100"), ("n2", "172.18.0.101")]);
    changes.push(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let done = play(&recorder, changes).await;
    assert!(done[..5].iter().all(Vec::is_empty));
    let state = recorder.state.lock().expect("not poisoned").clone();
    assert_eq!(state.owned[&EgressId(1)], ip("172.18.0.100"));
    assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(EgressId(1)));
    assert_eq!(state.on_unknown_pod, Some(OnUnknownPod::PassWhileFollowed));
    assert_eq!(state.policy.len(), 2);
}

#[tokio::test]
async fn a_pod_event_is_the_pods_writes_and_the_kernel_is_observed_once() {
    let recorder = Recorder::default();
    let mut changes = world(&[("n1", "172.18.0.100")]);
    changes.push(Change::Pods(Update::Replaced(BTreeMap::new())));
    changes.push(Change::Pods(Update::Changed(key("p"), pod("10.244.1.10", "web"))));
    changes.push(Change::Pods(Update::Changed(key("p"), pod("10.244.1.10", "db"))));
    changes.push(Change::Pods(Update::Removed(key("p"))));
    let done = play(&recorder, changes).await;
    let address = ip("10.244.1.10");
    let owner = PodOwner::of("10.244.1.10");
    assert_eq!(done[6], [Action::PutPod(address, PodState::Selected(EgressId(1))), Action::PutOwner(address, owner)]);
    assert_eq!(
        done[7],
        [Action::PutPod(address, PodState::Known), Action::CutPodFlows(address, LostFlows::of_policy(EgressId(1)))]
    );
    assert_eq!(done[8], [Action::CutPod(address), Action::RemovePod(address)]);
    assert_eq!(*recorder.observed.lock().expect("not poisoned"), 1);
}

#[tokio::test]
async fn the_cuts_of_a_failed_action_come_first_in_the_next_attempt() {
    let address = ip("10.244.1.10");
    let fails = Action::CutPodFlows(address, LostFlows::of_policy(EgressId(1)));
    let recorder = Recorder { fails: Arc::new(Mutex::new(Some(fails))), ..Recorder::default() };
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let selected = Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into()));
    world(&[("n1", "172.18.0.100")]).into_iter().chain([selected]).for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("the first reconcile");
    let done = || std::mem::take(&mut *recorder.log.lock().expect("not poisoned"));
    assert_eq!(done().first(), Some(&Action::CutOrphans), "a new agent does not know which cuts are due");

    reconciler.apply(Change::Pods(Update::Changed(key("p"), pod("10.244.1.10", "db"))));
    reconciler.reconcile().await.expect("the pod's write");
    assert_eq!(done(), [Action::PutPod(address, PodState::Known)]);
    reconciler.cut_all().await.expect_err("the cut fails");
    reconciler.actual = None;
    reconciler.reconcile().await.expect("the next attempt");
    assert_eq!(done(), [Action::CutOrphans], "no difference of the state shows that it is due");
}

#[tokio::test]
async fn a_restart_keeps_the_pods_of_an_object_that_has_become_unreadable() {
    let recorder = Recorder::default();
    let pods = || Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into()));
    let mut changes = world(&[("n1", "172.18.0.100")]);
    changes.push(pods());
    play(&recorder, changes).await;
    let before = recorder.state.lock().expect("not poisoned").clone();
    assert_eq!(before.pods[&ip("10.244.1.10")], PodState::Selected(EgressId(1)));

    let mut changes = world(&[("n1", "172.18.0.100")]);
    let (name, readable) = policy("a", 1, 1, &[("n1", "172.18.0.100")]);
    let unreadable = vec![Unreadable { part: PolicyPart::Selectors, why: "invalid".into(), is_known: false }];
    let object = EgressPolicy { rules: None, unreadable, ..(*readable).clone() };
    changes[2] = Change::Policies(Update::Replaced([(name, Arc::new(object))].into()));
    changes.push(pods());
    let done = play(&recorder, changes).await;
    assert_eq!(done.concat(), [Action::CutOrphans]);
    assert_eq!(*recorder.state.lock().expect("not poisoned"), before);
}

#[tokio::test]
async fn a_service_with_its_own_address_is_one_write() {
    let recorder = Recorder::default();
    let mut changes = world(&[("n1", "172.18.0.100")]);
    changes.push(Change::Pods(Update::Replaced(BTreeMap::new())));
    let service = |name: &str| ServiceKey { namespace: "default".into(), name: name.into() };
    let put = |name: &str, addresses: &[&str]| {
        let addresses = addresses.iter().map(|address| ip(address)).collect();
        Change::Services(Update::Changed(service(name), Service { addresses, ..Service::default() }))
    };
    changes.push(put("plain", &[]));
    changes.push(put("front", &["192.0.2.7"]));
    changes.push(put("second", &["192.0.2.7"]));
    changes.push(Change::Services(Update::Removed(service("front"))));
    changes.push(Change::Services(Update::Removed(service("second"))));
    // Addresses that are known otherwise stay as they are: an egress IP, nodes, pods, services, excluded networks.
    changes.push(put("odd", &["172.18.0.100", "172.18.0.1", "172.18.0.2", "10.244.2.9", "10.96.0.1", "198.51.100.1"]));
    let done = play(&recorder, changes).await;
    let prefix = Prefix { kind: PrefixKind::Service, node: None };
    assert_eq!(done[6], []);
    assert_eq!(done[7], [Action::PutPrefix(net("192.0.2.7/32"), prefix)]);
    assert_eq!((&done[8], &done[9]), (&vec![], &vec![]));
    assert_eq!(done[10], [Action::RemovePrefix(net("192.0.2.7/32"))]);
    assert_eq!(done[11], []);
}

#[tokio::test]
async fn an_address_in_use_elsewhere_does_not_block_other_actions() {
    let recorder = Recorder { in_use: Some(ip("172.18.0.100")), ..Recorder::default() };
    let mut changes = world(&[("n1", "172.18.0.100"), ("n2", "172.18.0.101")]);
    changes.push(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    play(&recorder, changes).await;
    let state = recorder.state.lock().expect("not poisoned").clone();
    assert!(state.owned.is_empty());
    let slots = &state.policy[&(EgressId(1), family_of(ip("172.18.0.101")))].slots;
    assert_eq!(slots.iter().map(|slot| slot.address).collect::<Vec<_>>(), [ip("172.18.0.101")]);
    assert_eq!(state.pods.len(), 1);
}

#[tokio::test]
async fn a_reserved_address_is_not_claimed_even_if_it_is_assigned() {
    for held_before in [false, true] {
        let recorder = Recorder::default();
        let reserved = ip("172.18.255.255");
        if held_before {
            recorder.state.lock().expect("not poisoned").owned.insert(EgressId(1), reserved);
        }
        let mut changes = world(&[]);
        let (name, assigned) = policy("a", 1, 1, &[("n1", "172.18.255.255")]);
        let listed = vec!["172.18.255.255".into()];
        let assigned = Arc::new(EgressPolicy { listed, ..Arc::unwrap_or_clone(assigned) });
        changes[2] = Change::Policies(Update::Replaced([(name, assigned)].into()));
        changes.push(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
        play(&recorder, changes).await;
        let state = recorder.state.lock().expect("not poisoned").clone();
        assert!(state.owned.is_empty(), "held before: {held_before}");
        let policy = &state.policy[&(EgressId(1), Family::V4)];
        assert_eq!((&policy.slots, &policy.pending, policy.when_empty), (&vec![], &vec![reserved], WhenEmpty::Drop));
        assert_eq!(state.pods[&ip("10.244.1.10")], PodState::Selected(EgressId(1)));
    }
}

#[tokio::test]
async fn connections_wait_for_an_address_that_cannot_be_claimed_yet() {
    let recorder = Recorder { in_use: Some(ip("172.18.0.100")), ..Recorder::default() };
    let mut changes = world(&[("n2", "172.18.0.100")]);
    changes.push(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let (name, moved) = policy("a", 1, 1, &[("n1", "172.18.0.100")]);
    changes.push(Change::Policies(Update::Changed(name, moved)));
    let done = play(&recorder, changes).await;
    let pending = ["172.18.0.100", "172.18.0.101"].map(ip).to_vec();
    let waits = Policy::new(Vec::new(), pending, WhenEmpty::Drop);
    assert_eq!(done[6], [Action::PutPolicy(EgressId(1), Family::V4, waits)], "nothing is cut");
}

#[tokio::test]
async fn the_oldest_object_serves_and_the_other_takes_over_when_it_is_gone() {
    let recorder = Recorder::default();
    let mut changes = world(&[("n2", "172.18.0.100")]);
    changes.push(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let (name, older) = policy("z", 2, 0, &[("n2", "172.18.0.101")]);
    changes.push(Change::Policies(Update::Changed(name.clone(), older)));
    changes.push(Change::Policies(Update::Removed(name)));
    let done = play(&recorder, changes).await;
    let selected = |id| Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(id)));
    assert!(done[6].contains(&selected(2)), "{:?}", done[6]);
    assert!(done[7].contains(&selected(1)), "{:?}", done[7]);
}

/// One object with an address on this node, and a pod.
fn held() -> Vec<Change> {
    let mut changes = world(&[("n1", "172.18.0.100")]);
    changes.push(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    changes
}

fn hand_over(number: u64, from: &str, to: Option<&str>) -> Change {
    let record = egress_core::model::ledger::HandOver { number, from: from.into(), to: to.map(str::to_owned) };
    let mut ledger = Ledger::default();
    ledger.records.open.insert(ip("172.18.0.100"), record);
    Change::Ledger(Arc::new(ledger))
}

#[tokio::test]
async fn an_address_for_another_node_is_released_first_and_served_again_after_a_fresh_read() {
    let recorder = Recorder::default();
    let (released, acknowledged) = watch::channel(BTreeMap::new());
    let is_ours = Arc::new(Mutex::new(false));
    let answer = is_ours.clone();
    let fresh_read: FreshRead = Box::new(move |questions| {
        let yes = *answer.lock().expect("not poisoned");
        Box::pin(async move { questions.into_iter().filter(|_| yes).map(|(_, address)| address).collect() })
    });
    let (orders, orders_seen) = watch::channel(BTreeMap::new());
    let follows = (watch::channel(Default::default()).1, orders_seen);
    let coordination = Coordination::new("n1", follows, (watch::channel(Default::default()).0, released), fresh_read);
    let ready = watch::channel(Ready::default()).0;
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready).with_coordination(coordination);
    held().into_iter().for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("the recorder does not fail");
    let done = || std::mem::take(&mut *recorder.log.lock().expect("not poisoned"));
    assert!(done().contains(&Action::Own(EgressId(1), ip("172.18.0.100"))));

    reconciler.apply(hand_over(7, "n1", None));
    reconciler.reconcile().await.expect("the recorder does not fail");
    let done_now = done();
    let waits = |action: &Action| matches!(action, Action::PutPolicy(_, _, policy) if policy.slots.is_empty() && policy.pending == [ip("172.18.0.100"), ip("172.18.0.101")]);
    assert_eq!(done_now[0], Action::Disown(EgressId(1), ip("172.18.0.100")));
    assert!(waits(&done_now[1]) && done_now.len() == 2, "nothing is cut, since another node gets it: {done_now:?}");
    assert_eq!(*acknowledged.borrow(), BTreeMap::from([(ip("172.18.0.100"), 7)]));

    // The record is removed. By the status that this node knows, the address is its own.
    reconciler.apply(Change::Ledger(Arc::default()));
    reconciler.reconcile().await.expect("the recorder does not fail");
    assert_eq!(done(), []);
    assert!(acknowledged.borrow().is_empty() && reconciler.incomplete);
    *is_ours.lock().expect("not poisoned") = true;
    reconciler.reconcile().await.expect("the recorder does not fail");
    assert!(done().contains(&Action::Own(EgressId(1), ip("172.18.0.100"))));
    assert!(!reconciler.incomplete);

    // The same by an order in a probe.
    *is_ours.lock().expect("not poisoned") = false;
    orders.send_replace(BTreeMap::from([(ip("172.18.0.100"), 8)]));
    reconciler.coordination.next().await;
    reconciler.reconcile().await.expect("the recorder does not fail");
    assert!(done().contains(&Action::Disown(EgressId(1), ip("172.18.0.100"))));
    assert_eq!(*acknowledged.borrow(), BTreeMap::from([(ip("172.18.0.100"), 8)]));
    // The order has ended, and the API server does not answer.
    orders.send_replace(BTreeMap::new());
    reconciler.coordination.next().await;
    reconciler.incomplete = true;
    reconciler.reconcile().await.expect("the recorder does not fail");
    assert_eq!((done(), acknowledged.borrow().len()), (vec![], 0));
    *is_ours.lock().expect("not poisoned") = true;
    reconciler.incomplete = true;
    reconciler.reconcile().await.expect("the recorder does not fail");
    assert!(done().contains(&Action::Own(EgressId(1), ip("172.18.0.100"))));
}

#[tokio::test]
async fn an_expired_lease_interrupts_slow_work_and_releases_everything_also_without_a_node_object() {
    let recorder = Recorder::default();
    let (lease_state, lease_state_seen) = watch::channel(LeaseState::Holds);
    let no_answer: FreshRead = Box::new(|_| Box::pin(std::future::pending()));
    let (orders, orders_seen) = watch::channel(BTreeMap::new());
    let (released, mut acknowledged) = watch::channel(BTreeMap::new());
    let reports = (watch::channel(Default::default()).0, released);
    let coordination = Coordination::new("n1", (lease_state_seen, orders_seen), reports, no_answer);
    let ready = watch::channel(Ready::default());
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, ready.0).with_coordination(coordination);
    let (sender, receiver) = crate::change_queue::inbox();
    held().into_iter().for_each(|change| sender.put(change));
    let stop = CancellationToken::new();
    let running = tokio::spawn(reconciler.run(receiver, stop.clone()));
    let owned = || recorder.state.lock().expect("not poisoned").owned.len();
    let until = async |count: usize| {
        while owned() != count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    until(1).await;
    // One address by an order. It is not served again, since fresh reads get no answer.
    orders.send_replace(BTreeMap::from([(ip("172.18.0.100"), 7)]));
    until(0).await;
    orders.send_replace(BTreeMap::from([(ip("172.18.0.100"), 7), (ip("172.18.0.101"), 8)]));
    let released = async { acknowledged.wait_for(|all| all.len() == 2).await.map(drop) };
    let released = tokio::time::timeout(Duration::from_secs(5), released).await;
    assert!(matches!(released, Ok(Ok(()))), "an order does not wait for a fresh read");
    sender.put(Change::Nodes(Update::Replaced([node(2)].into())));
    lease_state.send_replace(LeaseState::Expired(1));
    until(0).await;
    // The lease is renewed. The fresh read gets no answer, and the next expiry does not wait for it.
    sender.put(Change::Nodes(Update::Replaced([node(1), node(2)].into())));
    lease_state.send_replace(LeaseState::Holds);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(owned(), 0);
    lease_state.send_replace(LeaseState::Expired(1));
    tokio::time::sleep(Duration::from_millis(20)).await;
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(5), running).await.expect("nothing hangs").expect("no panic");
}

#[tokio::test]
async fn an_expired_lease_does_not_wait_for_a_walk_of_the_maps() {
    let recorder = Recorder::default();
    let (lease_state, lease_state_seen) = watch::channel(LeaseState::Holds);
    let no_answer: FreshRead = Box::new(|_| Box::pin(std::future::pending()));
    let reports = (watch::channel(Default::default()).0, watch::channel(BTreeMap::new()).0);
    let coordination =
        Coordination::new("n1", (lease_state_seen, watch::channel(BTreeMap::new()).1), reports, no_answer);
    let ready = watch::channel(Ready::default());
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready.0).with_coordination(coordination);
    held().into_iter().for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("the recorder does not fail");
    let done = || std::mem::take(&mut *recorder.log.lock().expect("not poisoned"));
    assert!(done().contains(&Action::Own(EgressId(1), ip("172.18.0.100"))));
    // The last reconcile was interrupted.
    reconciler.actual = None;
    recorder.is_walked.store(true, std::sync::atomic::Ordering::Relaxed);
    lease_state.send_replace(LeaseState::Expired(1));
    let walk = tokio::time::timeout(Duration::from_millis(20), reconciler.reconcile()).await;
    assert!(walk.is_err());
    assert_eq!(done(), [Action::Disown(EgressId(1), ip("172.18.0.100"))]);
    // The rest follows after the walk.
    recorder.is_walked.store(false, std::sync::atomic::Ordering::Relaxed);
    reconciler.reconcile().await.expect("the recorder does not fail");
    assert!(matches!(&done()[..], [Action::CutOrphans, Action::PutPolicy(_, _, policy)] if policy.slots.is_empty()));
}

/// A failed release is still first after the lease is renewed.
#[tokio::test]
async fn a_repeated_release_does_not_wait_for_a_walk_of_the_maps_either() {
    let recorder = Recorder::default();
    let (lease_state, lease_state_seen) = watch::channel(LeaseState::Holds);
    let no_answer: FreshRead = Box::new(|_| Box::pin(std::future::pending()));
    let reports = (watch::channel(Default::default()).0, watch::channel(BTreeMap::new()).0);
    let coordination =
        Coordination::new("n1", (lease_state_seen, watch::channel(BTreeMap::new()).1), reports, no_answer);
    let ready = watch::channel(Ready::default());
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready.0).with_coordination(coordination);
    held().into_iter().for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("the recorder does not fail");
    let disown = Action::Disown(EgressId(1), ip("172.18.0.100"));
    *recorder.fails.lock().expect("not poisoned") = Some(disown.clone());
    reconciler.actual = None;
    lease_state.send_replace(LeaseState::Expired(1));
    reconciler.reconcile().await.expect_err("it fails once");
    recorder.log.lock().expect("not poisoned").clear();
    lease_state.send_replace(LeaseState::Holds);
    recorder.is_walked.store(true, std::sync::atomic::Ordering::Relaxed);
    let walk = tokio::time::timeout(Duration::from_millis(20), reconciler.reconcile()).await;
    assert!(walk.is_err());
    assert_eq!(*recorder.log.lock().expect("not poisoned"), [disown]);
}

/// During an API outage a node is cut off for a while: the leader reaches it again before it can read anything.
#[tokio::test]
async fn released_addresses_are_served_again_only_after_a_fresh_read() {
    let recorder = Recorder::default();
    let (lease_state, lease_state_seen) = watch::channel(LeaseState::Holds);
    let is_back = Arc::new(Mutex::new(false));
    let answers = is_back.clone();
    let fresh_read: FreshRead = Box::new(move |questions| {
        let answers = *answers.lock().expect("not poisoned");
        Box::pin(async move { questions.into_iter().filter(|_| answers).map(|(_, address)| address).collect() })
    });
    let reports = (watch::channel(Default::default()).0, watch::channel(BTreeMap::new()).0);
    let coordination =
        Coordination::new("n1", (lease_state_seen, watch::channel(BTreeMap::new()).1), reports, fresh_read);
    let ready = watch::channel(Ready::default()).0;
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready).with_coordination(coordination);
    held().into_iter().for_each(|change| reconciler.apply(change));
    let mut reconcile = async || {
        reconciler.incomplete = true;
        reconciler.reconcile().await.expect("the recorder does not fail");
        (recorder.state.lock().expect("not poisoned").owned.len(), reconciler.coordination.has_released)
    };
    assert_eq!(reconcile().await, (1, false));
    lease_state.send_replace(LeaseState::Expired(1));
    assert_eq!(reconcile().await, (0, true));
    lease_state.send_replace(LeaseState::Holds);
    assert_eq!([reconcile().await, reconcile().await], [(0, true); 2], "the lease is renewed, and nothing can be read");
    *is_back.lock().expect("not poisoned") = true;
    assert_eq!(reconcile().await, (1, false));
}

/// The agent started during an API outage: some lists never arrive.
#[tokio::test]
async fn a_lease_that_expires_before_all_lists_have_arrived_is_released() {
    let recorder = Recorder::default();
    recorder.state.lock().expect("not poisoned").owned.insert(EgressId(1), ip("172.18.0.100"));
    let (lease_state, lease_state_seen) = watch::channel(LeaseState::Holds);
    let no_answer: FreshRead = Box::new(|_| Box::pin(std::future::pending()));
    let reports = (watch::channel(Default::default()).0, watch::channel(BTreeMap::new()).0);
    let coordination =
        Coordination::new("n1", (lease_state_seen, watch::channel(BTreeMap::new()).1), reports, no_answer);
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0)
        .with_coordination(coordination);
    let (sender, receiver) = crate::change_queue::inbox();
    let stop = CancellationToken::new();
    tokio::spawn(reconciler.run(receiver, stop.clone()));
    sender.put(Change::Ledger(Arc::default()));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let owned = || recorder.state.lock().expect("not poisoned").owned.len();
    assert_eq!(owned(), 1, "the lease has not expired yet");
    lease_state.send_replace(LeaseState::Expired(1));
    let gone = async {
        while owned() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), gone).await.expect("in time");
    stop.cancel();
}

#[tokio::test]
async fn an_expiry_during_a_reconcile_is_handled_after_it() {
    use futures::FutureExt;
    let (lease_state, lease_state_seen) = watch::channel(LeaseState::Expired(1));
    let no_answer: FreshRead = Box::new(|_| Box::pin(std::future::pending()));
    let reports = (watch::channel(Default::default()).0, watch::channel(BTreeMap::new()).0);
    let mut coordination =
        Coordination::new("n1", (lease_state_seen, watch::channel(BTreeMap::new()).1), reports, no_answer);
    let held = BTreeMap::from([(EgressId(1), ip("172.18.0.100"))]);
    assert_eq!(coordination.barred(&held), held);
    lease_state.send_replace(LeaseState::Holds);
    assert_eq!(coordination.barred(&held), held, "a fresh read is needed");
    assert!(coordination.next().now_or_never().is_some(), "another reconcile follows");
}

#[tokio::test]
async fn a_node_that_keeps_failing_is_not_ready_until_it_succeeds() {
    let (ready, is_ready) = watch::channel(Ready::default());
    let mut reconciler = Reconciler::new(settings(), Recorder::default(), None, ready);
    let mut changes = world(&[]);
    changes.push(Change::Pods(Update::Replaced(BTreeMap::new())));
    changes.into_iter().for_each(|change| reconciler.apply(change));
    let outcome = async |reconciler: &mut Reconciler<Recorder>| {
        reconciler.reconcile().await.expect("nothing fails");
        reconciler.note_outcome(true);
        is_ready.borrow().serving
    };
    assert!(outcome(&mut reconciler).await);
    reconciler.note_outcome(false);
    assert!(is_ready.borrow().serving, "the first failure");
    reconciler.failing_since = Instant::now().checked_sub(NOT_READY_AFTER);
    reconciler.note_outcome(false);
    assert!(!is_ready.borrow().serving);
    assert!(outcome(&mut reconciler).await);
}

/// Users name tables: one that a node does not have costs changes of pods nothing, and is found when it comes.
#[tokio::test]
async fn a_table_that_does_not_exist_is_looked_for_from_time_to_time() {
    let (mut recorder, mut routing) = (Recorder::default(), super::routing::Routing::default());
    let of = |table: &str| RoutedNetworks {
        tables: [(table.to_owned(), NetworkUse::default())].into(),
        ..RoutedNetworks::default()
    };
    let routed = |recorder: &Recorder| *recorder.routed.lock().expect("not poisoned");
    assert!(routing.follow(&mut recorder, of("blue")).await, "its addresses are not served");
    for _ in 0..5 {
        assert!(!routing.follow(&mut recorder, of("blue")).await);
    }
    assert_eq!(routed(&recorder), 1);
    // Its time has come.
    *routing.retry_at.as_mut().expect("it is looked for again") = tokio::time::Instant::now();
    assert!(!routing.follow(&mut recorder, of("blue")).await, "still not there");
    assert_eq!(routed(&recorder), 2);
    assert!(routing.follow(&mut recorder, of("red")).await, "another one, at once");
    assert!(routing.follow(&mut recorder, RoutedNetworks::default()).await);
    assert_eq!((routed(&recorder), routing.retry_at), (4, None));
}
