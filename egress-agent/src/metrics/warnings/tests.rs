use std::collections::BTreeMap;

use egress_common::abi::{Count, EipCount};

use super::*;
use crate::metrics::snapshot::ReconcilerSnapshot;
use egress_datapath::maps::facts::{KernelFacts, PortUse, Use};

const ID: EgressId = EgressId(7);

/// One egress IP with `busiest` of 1000 ports in use, and `nat` of 100 entries in the map of that name.
fn snapshot(busiest: u32, refusals: u64, nat: u32) -> Snapshot {
    let served = ServedAddress { address: [172, 18, 0, 100].into(), policy: Some(("web".into(), "u".into())) };
    let (served, entries) = (BTreeMap::from([(ID, served)]), BTreeMap::from([("pods", 5)]));
    let reconciler = ReconcilerSnapshot {
        in_kernel: Some(InKernel { served, entries, ..InKernel::default() }),
        ..ReconcilerSnapshot::default()
    };
    let used = Use { mappings: busiest, busiest, ports: 1_000, ..Use::default() };
    let kernel = KernelFacts {
        verdicts: BTreeMap::from([(Verdict::PortsExhausted, Count { packets: refusals, bytes: 0 })]),
        egress_ips: BTreeMap::from([(ID, EipCount { refusals, ..EipCount::default() })]),
        entries: BTreeMap::from([("nat", nat)]),
        limits: BTreeMap::from([("nat", 100), ("pods", 1_000)]),
        ports: Some(PortUse { egress_ips: BTreeMap::from([(ID, used)]), node: Use::default() }),
        ..KernelFacts::default()
    };
    Snapshot { reconciler: Some(reconciler), kernel: Some(kernel), ..Snapshot::default() }
}

fn reasons(new: &[Warning]) -> Vec<&'static str> {
    new.iter().map(|warning| warning.reason).collect()
}

#[test]
fn a_warning_about_ports_or_a_map_is_reported_once_until_use_falls_below_the_low_mark() {
    let (mut warnings, now) = (Warnings::default(), Instant::now());
    let mut update = |busiest, nat| reasons(&warnings.update(&snapshot(busiest, 0, nat), (None, None), now));
    assert_eq!(update(799, 87), [""; 0]);
    assert_eq!(update(800, 88), ["PortsNearlyExhausted", "MapNearlyFull"]);
    assert_eq!(update(990, 99), [""; 0], "reported already");
    assert_eq!(update(710, 76), [""; 0], "not below the low mark");
    assert_eq!(update(810, 88), [""; 0]);
    assert_eq!(update(690, 74), [""; 0]);
    assert_eq!(update(800, 88), ["PortsNearlyExhausted", "MapNearlyFull"], "reported again");
    let ended: Vec<_> = warnings.take_ended().iter().map(Warning::condition).collect();
    assert_eq!(ended, ["PortsNearlyExhausted/172.18.0.100", "MapNearlyFull/nat"], "as many as were resolved");
    let [ports, map] = &warnings.lines()[..] else { panic!("{:?}", warnings.lines()) };
    assert!(
        map.contains("egress IP 172.18.0.100 has used 80 %")
            && ports.contains("map nat")
            && ports.contains("is more than three quarters full")
    );
}

#[test]
fn refusals_without_a_free_port_are_reported_once_and_other_refusals_are_not() {
    let (mut warnings, start) = (Warnings::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    // Refusals before the first update do not count.
    assert!(warnings.update(&snapshot(0, 5, 0), (None, None), at(0)).is_empty());
    assert!(warnings.update(&snapshot(0, 5, 0), (None, None), at(10)).is_empty());
    let new = warnings.update(&snapshot(0, 6, 0), (None, None), at(20));
    assert_eq!(reasons(&new), ["PortsExhausted"]);
    assert_eq!(new[0].subject, Subject::Policy { policy: "web".into(), uid: "u".into() });
    assert!(warnings.update(&snapshot(0, 9, 0), (None, None), at(60)).is_empty(), "the same");
    assert_eq!(warnings.lines().len(), 1);
    assert!(warnings.update(&snapshot(0, 9, 0), (None, None), at(120)).is_empty());
    assert!(warnings.lines().is_empty(), "nothing for a minute");
    let mut full = snapshot(0, 20, 0);
    if let Some(kernel) = &mut full.kernel {
        kernel.verdicts.insert(Verdict::PortsExhausted, Count { packets: 9, bytes: 0 });
    }
    assert!(warnings.update(&full, (None, None), at(130)).is_empty(), "refused for another reason");
    assert_eq!(reasons(&warnings.update(&snapshot(0, 21, 0), (None, None), at(140))), ["PortsExhausted"]);
    let mut moved = snapshot(0, 21, 0);
    moved
        .reconciler
        .iter_mut()
        .flat_map(|reconciler| &mut reconciler.in_kernel)
        .for_each(|in_kernel| in_kernel.served.clear());
    assert!(
        warnings.update(&moved, (None, None), at(141)).is_empty() && warnings.lines().is_empty(),
        "another node has the address"
    );
}

#[test]
fn a_warning_stays_open_while_its_cause_cannot_be_read() {
    let (mut warnings, now) = (Warnings::default(), Instant::now());
    assert_eq!(reasons(&warnings.update(&snapshot(900, 0, 0), (None, None), now)), ["PortsNearlyExhausted"]);
    let mut blind = snapshot(900, 0, 0);
    blind.reconciler = Some(ReconcilerSnapshot::default());
    assert!(warnings.update(&blind, (None, None), now).is_empty());
    assert_eq!(warnings.lines().len(), 1, "still open");
    assert!(warnings.update(&snapshot(900, 0, 0), (None, None), now).is_empty(), "reported already");
}

#[test]
fn conflicting_modes_of_ovn_kubernetes_are_reported_on_the_node() {
    let (mut warnings, now) = (Warnings::default(), Instant::now());
    let node = |shared_gateway, foreign_egress_ips| Node { shared_gateway, foreign_egress_ips, ..Node::default() };
    let mut update = |node: &Node| warnings.update(&Snapshot::default(), (Some(node), None), now);
    assert!(update(&node(false, false)).is_empty());
    let new = update(&node(true, true));
    assert_eq!(reasons(&new), ["SharedGatewayMode", "OVNKubernetesEgressIP"]);
    assert!(new.iter().all(|warning| warning.subject == Subject::Node));
    assert!(update(&node(true, true)).is_empty());
    assert!(update(&node(false, true)).is_empty());
    assert_eq!(reasons(&update(&node(true, true))), ["SharedGatewayMode"]);
}

#[test]
fn bypassed_network_policy_is_reported_with_its_cni() {
    let (mut warnings, now) = (Warnings::default(), Instant::now());
    let mut update = |policy| warnings.update(&Snapshot::default(), (None, policy), now);
    assert!(update(None).is_empty());
    let new = update(Some("Calico"));
    assert!(new[0].reason == "PolicyInForward" && new[0].message.starts_with("Calico "), "{new:?}");
    assert!(update(Some("Calico")).is_empty() && update(None).is_empty());
}

/// The object of an address may be unknown while it is being deleted.
#[test]
fn a_warning_about_an_address_ends_with_the_address_whether_its_policy_is_known_or_not() {
    for is_known in [true, false] {
        let (mut warnings, now) = (Warnings::default(), Instant::now());
        let mut snapshot = snapshot(900, 0, 0);
        let in_kernel =
            snapshot.reconciler.as_mut().and_then(|reconciler| reconciler.in_kernel.as_mut()).expect("it has");
        in_kernel.served.values_mut().filter(|_| !is_known).for_each(|served| served.policy = None);
        assert_eq!(reasons(&warnings.update(&snapshot, (None, None), now)), ["PortsNearlyExhausted"]);
        let in_kernel =
            snapshot.reconciler.as_mut().and_then(|reconciler| reconciler.in_kernel.as_mut()).expect("it has");
        in_kernel.served.clear();
        assert!(warnings.update(&snapshot, (None, None), now).is_empty());
        assert_eq!(warnings.lines(), [""; 0], "its policy is known: {is_known}");
        assert_eq!(reasons(&warnings.take_ended()), ["PortsNearlyExhausted"]);
        assert_eq!(warnings.take_ended(), [], "each once");
    }
}
