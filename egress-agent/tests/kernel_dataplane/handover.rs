//! Entries of hand-overs: their end, and their uplink.

use egress_common::abi;
use egress_core::model::state::{Action, EgressId, HandoverStage, HandoverState, KernelState, SharedWith};
use egress_core::plan::executor::Executor;
use egress_datapath::Dataplane;

use crate::actions::{addr, endpoint};
use crate::node::{TestNode, UPLINK, device, eventually, ip, on_node};

const ID: EgressId = EgressId(9);
const A: &str = "172.18.0.100";

fn moving(stage: HandoverStage, address: &str) -> HandoverState {
    HandoverState { stage, address: addr(address), peer: endpoint("172.18.0.3"), shared_with: None }
}

async fn apply(dataplane: &mut Dataplane, action: Action) {
    dataplane.apply(&action).await.unwrap_or_else(|error| panic!("{action:?}: {error}"));
}

/// Whether the address is owned, and the stage of its hand-over.
async fn held(dataplane: &mut Dataplane) -> (bool, Option<HandoverStage>) {
    let KernelState { owned, handovers: moving, .. } = dataplane.held().await.expect("held");
    (owned.contains_key(&ID), moving.get(&ID).map(|moving| moving.stage))
}

#[test]
fn a_released_address_has_no_arriving_hand_over_either() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        for stage in [HandoverStage::Arriving, HandoverStage::Open] {
            for answers in [true, false] {
                apply(&mut dataplane, Action::PutHandover(ID, moving(stage, A))).await;
                if answers {
                    apply(&mut dataplane, Action::Own(ID, addr(A))).await;
                }
                assert_eq!(held(&mut dataplane).await, (answers, Some(stage)));
                apply(&mut dataplane, Action::Disown(ID, addr("172.18.0.101"))).await;
                assert_eq!(held(&mut dataplane).await, (answers, Some(stage)), "another address");
                apply(&mut dataplane, Action::Disown(ID, addr(A))).await;
                assert_eq!(held(&mut dataplane).await, (false, None));
            }
        }
        // A leaving hand-over still forwards.
        apply(&mut dataplane, Action::Own(ID, addr(A))).await;
        apply(&mut dataplane, Action::PutHandover(ID, moving(HandoverStage::Leaving, A))).await;
        apply(&mut dataplane, Action::Disown(ID, addr(A))).await;
        assert_eq!(held(&mut dataplane).await, (false, Some(HandoverStage::Leaving)));
    });
}

fn written(node: &TestNode) -> (u32, [u8; 6]) {
    let entry = node.map::<u32, abi::HandoverEntry>("handovers").get(&ID.0, 0).expect("its entry");
    (entry.owned.ifindex, entry.owned.mac)
}

#[test]
fn a_hand_over_follows_the_uplink_and_begins_without_one() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        apply(&mut dataplane, Action::PutHandover(ID, moving(HandoverStage::Open, A))).await;
        let before = device(UPLINK);
        assert_eq!(written(&node), before);
        ip(&format!("link del {UPLINK}\n"));
        node.make_uplink();
        eventually("the entry follows", || written(&node) == device(UPLINK)).await;
        assert_ne!(device(UPLINK), before);

        apply(&mut dataplane, Action::Own(ID, addr(A))).await;
        ip(&format!("link del {UPLINK}\n"));
        let gone = Action::PutHandover(EgressId(10), moving(HandoverStage::Arriving, "172.18.0.101"));
        let mut refused = false;
        for _ in 0..500 {
            refused = dataplane.apply(&gone).await.is_err();
            if refused {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        assert!(refused, "the agent knows that there is no uplink");
        apply(&mut dataplane, Action::PutHandover(ID, moving(HandoverStage::Leaving, A))).await;
        assert_eq!(held(&mut dataplane).await, (false, Some(HandoverStage::Leaving)));
    });
}

/// At a shared address the programs leave the Service's ports alone, also after a restart.
#[test]
fn a_shared_address_stays_shared_in_its_hand_over() {
    on_node(|node| async move {
        let mut dataplane = node.start().await;
        let entry = || node.map::<u32, abi::HandoverEntry>("handovers").get(&ID.0, 0).expect("its entry");
        for stage in [HandoverStage::Arriving, HandoverStage::Open, HandoverStage::Leaving] {
            let moving = HandoverState { shared_with: Some(SharedWith::Service), ..moving(stage, A) };
            if stage == HandoverStage::Leaving {
                apply(&mut dataplane, Action::Share(ID, addr(A), SharedWith::Service)).await;
            }
            apply(&mut dataplane, Action::PutHandover(ID, moving)).await;
            assert!(entry().owned.is_shared(), "{stage:?}");
            if stage == HandoverStage::Leaving {
                let answers = node.map::<abi::Addr, abi::OwnedAddr>("owned_addr").get(&addr(A).into(), 0);
                assert!(answers.expect("replies are accepted").is_shared());
            }
            drop(dataplane);
            dataplane = node.start().await;
            let held = dataplane.held().await.expect("held");
            assert_eq!((held.handovers.get(&ID), held.shared.len()), (Some(&moving), 0));
        }
    });
}
