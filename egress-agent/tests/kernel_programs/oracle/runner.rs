//! Runs a story on the programs and the model side by side.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use egress_common::abi::{
    Direction, HandoverEntry, NODE_MARK, OnUnknownPod, PodEntry, PolicyEntry, PolicyEntryKey, PolicySlot, Verdict,
    WhenEmpty,
};
use egress_common::decide::to_netdev::Meta;
use egress_common::wire::{Fragment, Headers};
use egress_fuzz::node::{ModelNode, PacketHook, Skb};

use super::derived_frames::{bend, enveloped, error_about, frame_of, mirrored};
use super::story::{Bent, By, Step, Who, cast};
use super::{compare, initial_maps};
use crate::cast::{V4, V6, addr};
use crate::encapsulation::setup::takes_out_other_families;
use crate::stage::{
    FROM_NETDEV, FROM_POD, FURTHER, MGMT, MGMT_MAC, Stage, TO_NETDEV, TO_POD, TestRun, UPLINK, UPLINK_MAC, batch,
    now_ns, test_run,
};

/// The packet of a step, and its outcome.
struct Sent {
    v6: bool,
    by: By,
    frame: Vec<u8>,
    verdict: Verdict,
    /// The output, without outer headers.
    out: Option<Vec<u8>>,
}

pub(super) struct OracleRig<'a> {
    stage: &'a mut Stage,
    node: ModelNode,
    sent: HashMap<usize, Sent>,
    /// Expected counters.
    counted: Vec<u64>,
    decisions: u32,
    pub(super) packets: u64,
}

/// Offset in an overlay packet: after link, IPv4, UDP and VXLAN headers and the inner link addresses.
const INNER_ETHERTYPE: Range<usize> = 62..64;
const IPV4: [u8; 2] = [8, 0];

impl<'a> OracleRig<'a> {
    pub(super) fn new(stage: &'a mut Stage) -> Self {
        let pods = [V4, V6].map(|cast| {
            [cast.pending_pod, cast.away_pod, cast.known_pod, cast.early_pod, cast.unknown_pod]
                .map(|pod| format!("neigh replace {pod} lladdr 02:00:00:00:02:10 dev ovn-k8s-mp0 nud permanent\n"))
        });
        batch(&pods.concat().concat());
        let node = initial_maps::begin(stage, 1);
        Self { stage, node, sent: HashMap::new(), counted: Vec::new(), decisions: 1, packets: 0 }
    }

    /// Runs a story from the beginning; returns a difference, if any.
    pub(super) fn tell(&mut self, steps: &[(usize, Step)]) -> Result<(), String> {
        self.decisions = 1;
        self.node = initial_maps::begin(self.stage, self.decisions);
        self.sent.clear();
        self.counted = self.stage.packets();
        for (id, step) in steps {
            self.play(*id, step).map_err(|what| format!("step {id}: {what}"))?;
        }
        let now = self.stage.packets();
        if now != self.counted {
            return Err(format!("counters of packets: {now:?}, not {:?}", self.counted));
        }
        compare::note_late_answers(self.stage, &self.node.maps);
        compare::maps(self.stage, &self.node.maps)
    }

    /// Asserts that each of these verdicts occurred.
    pub(super) fn assert_reached(&self, verdicts: &[Verdict]) {
        let missing: Vec<_> = verdicts.iter().filter(|verdict| self.stage.packets_of(**verdict) == 0).collect();
        assert!(missing.is_empty(), "of {} packets none got {missing:?}", self.packets);
    }

    fn play(&mut self, id: usize, step: &Step) -> Result<(), String> {
        match step {
            Step::Send { v6, by, bent, .. } => {
                let frame = frame_of(step);
                self.send(id, *v6, *by, frame, bent)
            }
            Step::Answer { of, flags, passed, bent } => {
                let Some((v6, by, out)) = self.left(*of, true) else { return Ok(()) };
                let by = if *passed { by.passed(&cast(v6)) } else { by };
                match mirrored(&out, *flags) {
                    Some(frame) => self.send(id, v6, by, frame, bent),
                    None => Ok(()),
                }
            }
            Step::GoOn { of, bent } => {
                let Some(sent) = self.sent.get(of).filter(|sent| sent.by == By::FromPod) else { return Ok(()) };
                let by =
                    By::ToNetdev { marked: sent.verdict == Verdict::MarkedNode, forwarded: true, returning: false };
                match &sent.out {
                    Some(out) if sent.verdict.class() == egress_common::abi::Class::Pass => {
                        self.send(id, sent.v6, by, out.clone(), bent)
                    }
                    _ => Ok(()),
                }
            }
            Step::Complain { of, kind, quoted, by_receiver, passed, bent } => {
                let Some((v6, by, out)) = self.left(*of, false) else { return Ok(()) };
                let cast = cast(v6);
                let by = if *passed { by.passed(&cast) } else { by };
                let from_pod = by == By::FromPod;
                let router = match (from_pod, by_receiver) {
                    (true, _) => cast.pod,
                    (false, true) => cast.world,
                    (false, false) => cast.router,
                };
                match error_about(&out, &cast, router, *kind, *quoted) {
                    Some(frame) => self.send(id, v6, by, frame, bent),
                    None => Ok(()),
                }
            }
            Step::Again { of, bent } => {
                let Some(sent) = self.sent.get(of) else { return Ok(()) };
                self.send(id, sent.v6, sent.by, sent.frame.clone(), bent)
            }
            // No entry can be older than the machine.
            Step::Age(seconds) if now_ns() <= (*seconds + 1) * 1_000_000_000 => {
                static SAID: Once = Once::new();
                SAID.call_once(|| println!("reduced: no entries that are older than this machine"));
                Ok(())
            }
            Step::Age(seconds) => {
                compare::note_late_answers(self.stage, &self.node.maps);
                self.stage.age(*seconds);
                // Entries of the flow cache live for 134 ms.
                self.stage.turn();
                self.node.maps.now.set(now_ns());
                self.node.maps.age(*seconds);
                Ok(())
            }
            Step::Sweep { pressed } => {
                let gone = self.stage.sweep(*pressed);
                self.node.maps.now.set(now_ns());
                let expected = self.node.maps.sweep(*pressed);
                if usize::try_from(gone) == Ok(expected) {
                    Ok(())
                } else {
                    Err(format!("the sweep removed {gone}, not {expected}"))
                }
            }
            _ => {
                self.change(step);
                Ok(())
            }
        }
    }

    /// The output of a step, and the hook of its answer.
    fn left(&self, of: usize, answered: bool) -> Option<(bool, By, Vec<u8>)> {
        let sent = self.sent.get(&of)?;
        let (out, cast) = (sent.out.clone()?, cast(sent.v6));
        let by = match sent.verdict {
            Verdict::SnatHere | Verdict::SnatForNode | Verdict::NodeSnat => By::FromNetdev,
            Verdict::ReplyHere | Verdict::ReplyDelivered => By::FromPod,
            Verdict::ToGateway => By::Overlay { from: Who::OtherNode, egress_id: cast.away },
            Verdict::ReplyToNode => By::Overlay { from: Who::OtherNode, egress_id: cast.here },
            Verdict::NodeReply => By::ToNetdev { marked: true, forwarded: true, returning: false },
            Verdict::InboundRemembered if answered => By::FromPod,
            _ => return None,
        };
        Some((sent.v6, by, out))
    }

    /// A change of the agent's maps, on both sides.
    fn change(&mut self, step: &Step) {
        let (stage, maps) = (&mut *self.stage, &self.node.maps);
        let mut pod = |v6: bool, pod: Who, entry: Option<PodEntry>| {
            let at = addr(pod.of(&cast(v6)));
            match entry {
                Some(entry) => {
                    stage.pods.insert(at, entry.sealed(&at), 0).expect("a pod");
                    maps.pods.borrow_mut().insert(at, entry);
                }
                None => {
                    // Perhaps there is none.
                    let _gone = stage.pods.remove(&at);
                    maps.pods.borrow_mut().remove(&at);
                }
            }
        };
        match step {
            Step::Select { v6, pod: who, object } => {
                let cast = cast(*v6);
                let entry = object.map_or_else(PodEntry::known, |object| match object {
                    0 => PodEntry::selected(cast.here, 0),
                    1 => PodEntry::selected(cast.away, 0),
                    class @ (2 | 3) => PodEntry::by_destination(class, 0),
                    other => PodEntry::selected(other, 0),
                });
                pod(*v6, *who, Some(entry));
            }
            Step::Forget { v6, pod: who } => pod(*v6, *who, None),
            Step::Slots { v6, here, away } => {
                let cast = cast(*v6);
                let at_home = here.then(|| PolicySlot::here(addr(cast.egress)));
                let elsewhere = away.then(|| PolicySlot::remote(addr(cast.away_egress), addr(V4.other_node)));
                let slots: Vec<PolicySlot> = at_home.into_iter().chain(elsewhere).collect();
                let policy = PolicyEntry::with_slots(WhenEmpty::Drop, &slots).expect("few slots");
                let key = PolicyEntryKey::new(cast.here, cast.family);
                stage.policy.insert(key, policy, 0).expect("a policy");
                maps.put_policy(key, policy);
            }
            Step::Own { v6, own, shared } => {
                let cast = cast(*v6);
                match (*own, *shared) {
                    (true, false) => stage.own(cast.here, cast.egress),
                    (true, true) => stage.share(cast.here, cast.egress),
                    // Perhaps it has none.
                    (false, _) => {
                        let _gone = (stage.owned.remove(&cast.here), stage.owned_addr.remove(&addr(cast.egress)));
                    }
                }
                maps.disown(cast.here);
                if let Ok(owned) = stage.owned.get(&cast.here, 0) {
                    maps.put_owned(cast.here, owned);
                }
            }
            Step::HandOver { v6, course, sent, held, shared } => {
                let cast = cast(*v6);
                if *shared {
                    stage.share(cast.here, cast.egress);
                } else {
                    stage.own(cast.here, cast.egress);
                }
                let owned = stage.owned.get(&cast.here, 0).expect("just now");
                maps.put_owned(cast.here, owned);
                // These times differ more than those of programs and model.
                let since = if *sent { 1 } else { u64::MAX };
                match course {
                    Some(course) => {
                        let moving = HandoverEntry::new(cast.here, *course, since, addr(V4.other_node), owned);
                        stage.handovers.insert(cast.here, moving, 0).expect("a hand-over");
                        maps.handovers.borrow_mut().insert(cast.here, moving);
                    }
                    None => {
                        // Perhaps there is none.
                        let _gone = stage.handovers.remove(&cast.here);
                        maps.handovers.borrow_mut().remove(&cast.here);
                    }
                }
                if !held {
                    stage.owned.remove(&cast.here).expect("just now");
                    maps.owned.borrow_mut().remove(&cast.here);
                }
            }
            Step::PassUnknown(pass) => {
                let on = if *pass { OnUnknownPod::Pass } else { OnUnknownPod::Drop };
                maps.configure(|config| *config = config.with_on_unknown_pod(on));
            }
            other => unreachable!("{other:?} changes nothing"),
        }
        self.decisions += 1;
        maps.configure(|config| config.decisions = self.decisions);
        stage.config.set(0, maps.config.get(), 0).expect("write the configuration");
    }

    fn send(&mut self, id: usize, v6: bool, by: By, mut frame: Vec<u8>, bent: &Bent) -> Result<(), String> {
        let mut bent = bent.clone();
        let mac = match by {
            By::FromPod | By::Notice => MGMT_MAC,
            _ => UPLINK_MAC,
        };
        frame[..6].copy_from_slice(&mac);
        if let By::Overlay { from, egress_id } = by {
            bent.gso_size = 0;
            // Every other one is modified inside.
            if bent.bytes.first().is_none_or(|(place, _)| place % 2 == 0) {
                bend(&mut frame, &bent, true);
                bent = Bent::default();
            }
            frame = enveloped(&frame, from.of(&V4), egress_id);
        }
        bend(&mut frame, &bent, false);
        // The outer packet is IPv4: older kernels leave another inner family to the device, which a test run lacks.
        let is_overlay = matches!(by, By::Overlay { .. });
        if is_overlay && frame.get(INNER_ETHERTYPE) != Some(&IPV4) && !takes_out_other_families() {
            return Ok(());
        }
        // A fragment is never a GSO packet.
        let heads = Headers::parse(frame.as_slice(), Direction::Egress);
        if heads.is_some_and(|heads| heads.fragment != Fragment::Whole) {
            bent.gso_size = 0;
        }
        self.run(id, v6, by, frame, &bent)
    }

    fn run(&mut self, id: usize, v6: bool, by: By, frame: Vec<u8>, bent: &Bent) -> Result<(), String> {
        let ifindex = if bent.elsewhere { FURTHER } else { UPLINK };
        let (mut run, hook) = match by {
            By::FromPod => (FROM_POD, PacketHook::FromPod),
            By::Notice => (TO_POD, PacketHook::ToPod),
            By::FromNetdev | By::Overlay { .. } => {
                (TestRun { ifindex, ..FROM_NETDEV }, PacketHook::FromNetdev(ifindex))
            }
            By::ToNetdev { marked, forwarded, returning } => {
                let ingress_ifindex = if returning { ifindex } else { u32::from(forwarded) * MGMT };
                // Every other one also has a mark bit of the host's rules.
                let others = if id.is_multiple_of(2) { 0x0001_0000 } else { 0 };
                let mark = others | if marked { NODE_MARK } else { 0 };
                let meta = Meta { mark, ifindex, forwarded: ingress_ifindex != 0, returning };
                (TestRun { ifindex, ingress_ifindex, mark, ..TO_NETDEV }, PacketHook::ToNetdev(meta))
            }
        };
        run.gso_size = bent.gso_size;
        let ran = test_run(self.stage.program(run.program), &run, &frame);
        self.packets += 1;
        self.node.maps.now.set(now_ns());
        let skb = Skb {
            frame: &frame,
            gso_size: bent.gso_size,
            foreign: bent.foreign && run.program != TO_NETDEV.program && run.program != TO_POD.program,
        };
        let model = &mut self.node;
        let outcome = catch_unwind(AssertUnwindSafe(|| model.run(&hook, &skb)))
            .map_err(|_| format!("the model says no (above): {by:?} {frame:02x?}"))?;
        let verdict = outcome.verdict();
        let place = usize::try_from(verdict.index()).expect("an index");
        self.counted[place] += 1;
        if self.stage.packets_of(verdict) != self.counted[place] {
            self.counted[place] -= 1;
            let now = self.stage.packets();
            let moved = Verdict::ALL.iter().find(|verdict| {
                let place = usize::try_from(verdict.index()).expect("an index");
                now[place] != self.counted[place]
            });
            return Err(format!("{by:?}: {moved:?}, not {outcome:02x?}\nframe {frame:02x?}\ncame to {ran:02x?}"));
        }
        let out = compare::packet(&ran, &outcome).map_err(|what| {
            format!("{by:?}: {what}\nframe {frame:02x?}\nprograms {ran:02x?}\nmodel    {outcome:02x?}")
        })?;
        self.sent.insert(id, Sent { v6, by, frame, verdict, out });
        Ok(())
    }
}
