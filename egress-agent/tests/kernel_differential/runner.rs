//! Runs the cases step by step, all cases at once.
//!
//! Each step sends the packets of every case, then a marker packet; when the marker arrives at the other end, so have
//! all packets before it. There are no waits.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::endpoints::{CASES, CaseAddresses, case_of};
use crate::layout::View;
use crate::nodes::{FarEnds, POD_MAC, ROUTER_MAC};
use crate::packets::{PacketSpec, Transport};
use crate::sockets::{Offload, Plug, ReceivedFrame};

/// An end of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    Pods,
    World,
}

/// An input frame.
#[derive(Clone, Debug)]
pub(crate) struct Shot {
    pub(crate) side: Side,
    pub(crate) packet: Vec<u8>,
    pub(crate) offload: Offload,
    pub(crate) vlan: Option<u16>,
    /// Destination link address, if not the node's.
    pub(crate) to: Option<[u8; 6]>,
}

/// An output frame and its step.
#[derive(Clone, Debug)]
pub(crate) struct Caught {
    pub(crate) step: usize,
    pub(crate) side: Side,
    pub(crate) frame: ReceivedFrame,
}

/// Input of a step: the addresses of its case, and the output so far.
pub(crate) struct Talk<'a> {
    pub(crate) cast: CaseAddresses,
    pub(crate) caught: &'a [Caught],
}

/// Makes the packet of a step.
pub(crate) type MakePacket = fn(&Talk<'_>) -> PacketSpec;

type CaseStep = Box<dyn Fn(&Talk<'_>) -> Vec<Shot> + Send + Sync>;

/// A named sequence of packets.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) v6: bool,
    pub(crate) narrow: bool,
    pub(crate) steps: Vec<CaseStep>,
}

/// Result of a case.
#[derive(Debug)]
pub(crate) struct Played {
    pub(crate) cast: CaseAddresses,
    pub(crate) put_in: Vec<Vec<u8>>,
    pub(crate) caught: Vec<Caught>,
}

impl Case {
    pub(crate) fn new(name: &str, v6: bool) -> Self {
        let family = if v6 { "IPv6" } else { "IPv4" };
        Self { name: format!("{name} ({family})"), v6, narrow: false, steps: Vec::new() }
    }

    /// The pod sends a packet.
    pub(crate) fn pod(self, make: impl Fn(&Talk<'_>) -> PacketSpec + Send + Sync + 'static) -> Self {
        self.shots(move |talk| vec![shot(Side::Pods, make(talk).bytes())])
    }

    /// The outside sends a packet.
    pub(crate) fn world(self, make: impl Fn(&Talk<'_>) -> PacketSpec + Send + Sync + 'static) -> Self {
        self.shots(move |talk| vec![shot(Side::World, make(talk).bytes())])
    }

    /// The pod sends raw packets.
    pub(crate) fn pod_bytes(self, make: impl Fn(&Talk<'_>) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        self.shots(move |talk| make(talk).into_iter().map(|bytes| shot(Side::Pods, bytes)).collect())
    }

    pub(crate) fn world_bytes(self, make: impl Fn(&Talk<'_>) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        self.shots(move |talk| make(talk).into_iter().map(|bytes| shot(Side::World, bytes)).collect())
    }

    pub(crate) fn shots(mut self, step: impl Fn(&Talk<'_>) -> Vec<Shot> + Send + Sync + 'static) -> Self {
        self.steps.push(Box::new(step));
        self
    }

    /// Over a path with an MTU of 1300 bytes.
    pub(crate) fn narrow(mut self) -> Self {
        self.narrow = true;
        self
    }
}

pub(crate) fn shot(side: Side, packet: Vec<u8>) -> Shot {
    Shot { side, packet, offload: Offload::default(), vlan: None, to: None }
}

impl Talk<'_> {
    /// Outbound packets, from the network header on.
    pub(crate) fn left(&self) -> impl Iterator<Item = &[u8]> {
        self.on(Side::World)
    }

    /// Packets to the pods.
    pub(crate) fn came(&self) -> impl Iterator<Item = &[u8]> {
        self.on(Side::Pods)
    }

    fn on(&self, side: Side) -> impl Iterator<Item = &[u8]> {
        self.caught.iter().filter(move |caught| caught.side == side).map(|caught| caught.frame.packet.as_slice())
    }

    /// Source port or identifier of the `nth` outbound packet; `otherwise` without one.
    pub(crate) fn chosen(&self, nth: usize, otherwise: u16) -> u16 {
        self.left().nth(nth).and_then(View::of).and_then(|view| view.ports()).map_or(otherwise, |(sport, _)| sport)
    }
}

/// Timeout of a marker. It normally takes microseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Cases per batch: far fewer packets than a kernel queue holds.
const AT_ONCE: usize = 50;

/// Runs all cases; returns their results.
pub(crate) fn play(ends: &FarEnds, cases: &[Case]) -> Vec<Played> {
    let mut table = OutcomeTable { ends, played: Vec::new(), step: 0, markers: 0 };
    for (index, case) in cases.iter().enumerate() {
        // The first number belongs to the markers.
        let index = u16::try_from(index + 1).expect("few cases");
        assert!(index < CASES, "too many cases");
        let cast = CaseAddresses { v6: case.v6, index, narrow: case.narrow };
        table.played.push(Played { cast, put_in: Vec::new(), caught: Vec::new() });
    }
    let steps = cases.iter().map(|case| case.steps.len()).max().unwrap_or(0);
    for step in 0..steps {
        table.step = step;
        for places in (0..cases.len()).collect::<Vec<_>>().chunks(AT_ONCE) {
            places.iter().for_each(|place| table.play_step(&cases[*place], *place));
            table.settle();
        }
    }
    table.played
}

/// Sends a frame.
fn fire(ends: &FarEnds, shot: &Shot) {
    let (plug, to, from) = match shot.side {
        Side::Pods => (&ends.pods, ends.mgmt_mac, POD_MAC),
        Side::World => (&ends.world, ends.uplink_mac, ROUTER_MAC),
    };
    let mut frame = [shot.to.unwrap_or(to), from].concat();
    if let Some(tag) = shot.vlan {
        frame.extend([0x81, 0x00]);
        frame.extend(tag.to_be_bytes());
    }
    frame.extend(if shot.packet.first().is_some_and(|first| first >> 4 == 6) { [0x86, 0xdd] } else { [0x08, 0x00] });
    frame.extend(&shot.packet);
    plug.send(&frame, shot.offload);
}

struct OutcomeTable<'a> {
    ends: &'a FarEnds,
    played: Vec<Played>,
    step: usize,
    markers: u32,
}

/// The markers' ports.
const MARKER: (u16, u16) = (30000, 9);

impl OutcomeTable<'_> {
    fn play_step(&mut self, case: &Case, place: usize) {
        let Some(make) = case.steps.get(self.step) else { return };
        let played = &mut self.played[place];
        for shot in make(&Talk { cast: played.cast, caught: &played.caught }) {
            fire(self.ends, &shot);
            played.put_in.push(shot.packet);
        }
    }

    /// Waits until all output of the sent packets has arrived.
    fn settle(&mut self) {
        let cast = CaseAddresses { v6: false, index: 0, narrow: false };
        self.markers += 1;
        let number = self.markers.to_be_bytes().to_vec();
        let udp = |(sport, dport), data| Transport::Udp { sport, dport, summed: true, data };
        let out = PacketSpec::new(cast.pod(), cast.server(), udp(MARKER, number.clone()));
        fire(self.ends, &shot(Side::Pods, out.bytes()));
        let port = self.collect(Side::World, &number).expect("the marker's port");
        let back = PacketSpec::new(cast.server(), cast.egress(), udp((MARKER.1, port), number.clone()));
        fire(self.ends, &shot(Side::World, back.bytes()));
        self.collect(Side::Pods, &number);
        // Output on the other side, before both markers.
        for side in [Side::World, Side::Pods] {
            while let Some(frame) = self.plug(side).receive() {
                self.sort(side, frame);
            }
        }
    }

    fn plug(&self, side: Side) -> &Plug {
        match side {
            Side::Pods => &self.ends.pods,
            Side::World => &self.ends.world,
        }
    }

    /// Collects output up to the marker; returns its source port.
    fn collect(&mut self, side: Side, number: &[u8]) -> Option<u16> {
        let start = Instant::now();
        loop {
            let Some(frame) = self.plug(side).receive() else {
                assert!(start.elapsed() < PATIENCE, "step {}: the marker did not come out: {side:?}", self.step);
                std::thread::yield_now();
                continue;
            };
            if case_of_frame(&frame.packet) == Some(0) {
                let view = View::of(&frame.packet).expect("an IP packet");
                if view.payload.ends_with(number) {
                    return view.ports().map(|(sport, _)| sport);
                }
            }
            self.sort(side, frame);
        }
    }

    fn sort(&mut self, side: Side, frame: ReceivedFrame) {
        let Some(case) = case_of_frame(&frame.packet).filter(|case| *case > 0) else { return };
        let played = self.played.get_mut(usize::from(case) - 1).expect("a case that plays");
        played.caught.push(Caught { step: self.step, side, frame });
    }
}

/// Tag in the data of packets whose addresses do not identify their case.
pub(crate) fn tagged(index: u16, length: usize) -> Vec<u8> {
    let mut data = TAG.to_vec();
    data.extend(index.to_be_bytes());
    data.extend((0..=250).cycle().take(length.saturating_sub(data.len())));
    data
}

const TAG: [u8; 4] = *b"case";

/// The case of a packet: by its addresses, those that it quotes, or the tag in its data.
fn case_of_frame(packet: &[u8]) -> Option<u16> {
    let view = View::of(packet)?;
    let by = |from: IpAddr, to: IpAddr| case_of(from).or_else(|| case_of(to));
    by(view.from, view.to).or_else(|| view.quote().and_then(|quote| by(quote.from, quote.to))).or_else(|| {
        let at = packet.windows(TAG.len()).position(|window| window == TAG)?;
        let number = packet.get(at + TAG.len()..at + TAG.len() + 2)?;
        Some(u16::from_be_bytes([number[0], number[1]]))
    })
}
