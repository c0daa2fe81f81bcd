use std::collections::BTreeMap;

use egress_common::abi::{Count, EipCount};

use super::*;
use crate::metrics::facts::NodeFacts;
use egress_datapath::maps::facts::{KernelFacts, PortUse, Use};

const ID: EgressId = EgressId(7);

/// One egress IP with so many ports of a thousand in use, so many refusals, and so many entries of a hundred in `nat`.
fn facts(busiest: u32, refusals: u64, nat: u32) -> Facts {
    let served = Served { address: [172, 18, 0, 100].into(), policy: Some(("web".into(), "u".into())) };
    let (served, entries) = (BTreeMap::from([(ID, served)]), BTreeMap::from([("pods", 5)]));
    let node = NodeFacts { held: Some(Held { served, entries, ..Held::default() }), ..NodeFacts::default() };
    let used = Use { mappings: busiest, busiest, ports: 1_000 };
    let kernel = KernelFacts {
        verdicts: BTreeMap::from([(Verdict::PortsExhausted, Count { packets: refusals, bytes: 0 })]),
        egress_ips: BTreeMap::from([(ID, EipCount { refusals, ..EipCount::default() })]),
        entries: BTreeMap::from([("nat", nat)]),
        limits: BTreeMap::from([("nat", 100), ("pods", 1_000)]),
        ports: Some(PortUse { egress_ips: BTreeMap::from([(ID, used)]), node: Use::default() }),
        ..KernelFacts::default()
    };
    Facts { node: Some(node), kernel: Some(kernel), ..Facts::default() }
}

fn reasons(news: &[Trouble]) -> Vec<&'static str> {
    news.iter().map(|trouble| trouble.reason).collect()
}

#[test]
fn ports_and_maps_are_told_once_until_they_are_well_again() {
    let (mut troubles, now) = (Troubles::default(), Instant::now());
    let mut look = |busiest, nat| reasons(&troubles.look(&facts(busiest, 0, nat), (None, None), now));
    assert_eq!(look(799, 87), [""; 0]);
    assert_eq!(look(800, 88), ["PortsNearlyExhausted", "MapNearlyFull"]);
    assert_eq!(look(990, 99), [""; 0], "it is known");
    assert_eq!(look(710, 76), [""; 0], "a little better is not well");
    assert_eq!(look(810, 88), [""; 0]);
    assert_eq!(look(690, 74), [""; 0]);
    assert_eq!(look(800, 88), ["PortsNearlyExhausted", "MapNearlyFull"], "and begins anew");
    let [ports, map] = &troubles.lines()[..] else { panic!("{:?}", troubles.lines()) };
    assert!(
        map.contains("egress IP 172.18.0.100 has come to use 80 %")
            && ports.contains("map nat")
            && ports.contains("has become seven eighths full")
    );
}

#[test]
fn refusals_for_want_of_a_port_are_told_once_and_others_are_not_taken_for_them() {
    let (mut troubles, start) = (Troubles::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    // What was before this agent looked is the past.
    assert!(troubles.look(&facts(0, 5, 0), (None, None), at(0)).is_empty());
    assert!(troubles.look(&facts(0, 5, 0), (None, None), at(10)).is_empty());
    let news = troubles.look(&facts(0, 6, 0), (None, None), at(20));
    assert_eq!(reasons(&news), ["PortsExhausted"]);
    assert_eq!(news[0].subject, Subject::Policy { policy: "web".into(), uid: "u".into() });
    assert!(troubles.look(&facts(0, 9, 0), (None, None), at(60)).is_empty(), "the same");
    assert_eq!(troubles.lines().len(), 1);
    assert!(troubles.look(&facts(0, 9, 0), (None, None), at(120)).is_empty());
    assert!(troubles.lines().is_empty(), "nothing for a minute");
    let mut full = facts(0, 20, 0);
    if let Some(kernel) = &mut full.kernel {
        kernel.verdicts.insert(Verdict::PortsExhausted, Count { packets: 9, bytes: 0 });
    }
    assert!(troubles.look(&full, (None, None), at(130)).is_empty(), "refused for another reason");
    assert_eq!(reasons(&troubles.look(&facts(0, 21, 0), (None, None), at(140))), ["PortsExhausted"]);
    let mut moved = facts(0, 21, 0);
    moved.node.iter_mut().flat_map(|node| &mut node.held).for_each(|held| held.served.clear());
    assert!(
        troubles.look(&moved, (None, None), at(141)).is_empty() && troubles.lines().is_empty(),
        "it is another node's now"
    );
}

#[test]
fn what_cannot_be_looked_at_for_a_while_is_not_told_again() {
    let (mut troubles, now) = (Troubles::default(), Instant::now());
    assert_eq!(reasons(&troubles.look(&facts(900, 0, 0), (None, None), now)), ["PortsNearlyExhausted"]);
    let mut blind = facts(900, 0, 0);
    blind.node = Some(NodeFacts::default());
    assert!(troubles.look(&blind, (None, None), now).is_empty());
    assert_eq!(troubles.lines().len(), 1, "it lasts");
    assert!(troubles.look(&facts(900, 0, 0), (None, None), now).is_empty(), "it is known");
}

#[test]
fn what_ovn_kubernetes_does_beside_us_is_told_of_the_node() {
    let (mut troubles, now) = (Troubles::default(), Instant::now());
    let node = |shared_gateway, foreign_egress_ips| Node { shared_gateway, foreign_egress_ips, ..Node::default() };
    let mut look = |node: &Node| troubles.look(&Facts::default(), (Some(node), None), now);
    assert!(look(&node(false, false)).is_empty());
    let news = look(&node(true, true));
    assert_eq!(reasons(&news), ["SharedGatewayMode", "OVNKubernetesEgressIP"]);
    assert!(news.iter().all(|trouble| trouble.subject == Subject::Node));
    assert!(look(&node(true, true)).is_empty());
    assert!(look(&node(false, true)).is_empty());
    assert_eq!(reasons(&look(&node(true, true))), ["SharedGatewayMode"]);
}

#[test]
fn policy_that_does_not_hold_is_told_with_whose_it_is() {
    let (mut troubles, now) = (Troubles::default(), Instant::now());
    let mut look = |policy| troubles.look(&Facts::default(), (None, policy), now);
    assert!(look(None).is_empty());
    let news = look(Some("Calico"));
    assert!(news[0].reason == "PolicyInForward" && news[0].message.starts_with("Calico "), "{news:?}");
    assert!(look(Some("Calico")).is_empty() && look(None).is_empty());
}
