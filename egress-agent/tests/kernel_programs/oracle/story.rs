//! Steps of a story. A step refers to others symbolically, so that a story works without some of them: an answer or
//! error names its packet, and is skipped if that packet never left.

use egress_common::abi::HandoverStage;
use egress_common::random::Random;

use crate::cast::{FamilyAddresses, V4, V6};
use crate::frames::{ACK, Body, FIN, RST, SYN};

const STEPS: usize = 60;

/// Source or destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    Pod,
    SecondPod,
    AwayPod,
    EarlyPod,
    KnownPod,
    UnknownPod,
    RemotePod,
    Node,
    OtherNode,
    Service,
    World,
    World2,
    Nowhere,
    Egress,
    AwayEgress,
}

impl Who {
    pub(super) fn of(self, cast: &FamilyAddresses) -> &'static str {
        let v4 = cast.node == V4.node;
        match self {
            Self::Pod => cast.pod,
            Self::SecondPod => cast.pending_pod,
            Self::AwayPod => cast.away_pod,
            Self::EarlyPod => cast.early_pod,
            Self::KnownPod => cast.known_pod,
            Self::UnknownPod => cast.unknown_pod,
            Self::RemotePod => cast.remote_pod,
            Self::Node => cast.node,
            Self::OtherNode => cast.other_node,
            Self::Service => cast.service,
            Self::World => cast.world,
            Self::World2 if v4 => "198.51.100.20",
            Self::World2 => "2001:db8::20",
            Self::Nowhere => cast.nowhere,
            Self::Egress => cast.egress,
            Self::AwayEgress => cast.away_egress,
        }
    }
}

/// The hook of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    FromPod,
    Notice,
    FromNetdev,
    ToNetdev {
        marked: bool,
        forwarded: bool,
        returning: bool,
    },
    /// `FromNetdev`, in the overlay, from this sender and with this egress ID.
    Overlay {
        from: Who,
        egress_id: u32,
    },
}

impl By {
    /// A packet to the other node of a hand-over, as that node passes it on.
    pub(super) fn passed(self, cast: &FamilyAddresses) -> Self {
        match self {
            Self::FromNetdev => Self::Overlay { from: Who::OtherNode, egress_id: cast.here },
            other => other,
        }
    }
}

/// Modification of a frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bent {
    /// Changed bytes: offset after the link addresses, and the new value.
    pub(super) bytes: Vec<(usize, u8)>,
    /// Truncated length.
    pub(super) cut: Option<usize>,
    /// A VLAN tag in the frame.
    pub(super) tagged: bool,
    /// The link address is another host's.
    pub(super) foreign: bool,
    /// By another interface than the uplink.
    pub(super) elsewhere: bool,
    pub(super) gso_size: u32,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    Send {
        v6: bool,
        by: By,
        from: Who,
        to: Who,
        ports: (u16, u16),
        body: Body,
        ttl: u8,
        data: usize,
        options: u8,
        fragment: (u16, bool),
        dont_fragment: bool,
        bent: Bent,
    },
    /// The receiver of what a step sent answers; `passed`: to the other node of a hand-over, which passes it on.
    Answer {
        of: usize,
        flags: u8,
        passed: bool,
        bent: Bent,
    },
    /// A packet that a step left to the stack leaves by the uplink.
    GoOn {
        of: usize,
        bent: Bent,
    },
    /// An ICMP error about the packet of a step.
    Complain {
        of: usize,
        kind: [u8; 2],
        quoted: usize,
        by_receiver: bool,
        passed: bool,
        bent: Bent,
    },
    /// The same frame to the same program again.
    Again {
        of: usize,
        bent: Bent,
    },
    Age(u64),
    Sweep {
        pressed: bool,
    },
    /// The pod is selected by the policy here, the one elsewhere, by both depending on the destination in one of two ways, by
    /// another one, or by none.
    Select {
        v6: bool,
        pod: Who,
        object: Option<u32>,
    },
    Forget {
        v6: bool,
        pod: Who,
    },
    /// The policy's slots: here, elsewhere.
    Slots {
        v6: bool,
        here: bool,
        away: bool,
    },
    /// `shared`: with a Service.
    Own {
        v6: bool,
        own: bool,
        shared: bool,
    },
    /// Hand-over to or from the other node, or none. `sent`: all entries were sent since it began, or none. `held`:
    /// whether this node owns the address meanwhile. `shared`: with a Service.
    HandOver {
        v6: bool,
        course: Option<HandoverStage>,
        sent: bool,
        held: bool,
        shared: bool,
    },
    PassUnknown(bool),
}

struct Maker(Random);

impl Maker {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.0.below(from.len())]
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.0.below(of) == 0
    }

    fn flags(&mut self) -> u8 {
        if self.one_in(12) {
            return u8::try_from(self.0.below(256)).expect("a byte");
        }
        self.pick(&[SYN, SYN, SYN | ACK, ACK, ACK, ACK, FIN | ACK, RST, RST | ACK])
    }

    fn bent(&mut self) -> Bent {
        let mut bent = Bent::default();
        match self.0.below(40) {
            0..=5 => {
                for _ in 0..=self.0.below(3) {
                    let value = u8::try_from(self.0.below(256)).expect("a byte");
                    bent.bytes.push((self.0.below(80), value));
                }
            }
            6 | 7 => bent.cut = Some(self.0.below(80)),
            8 => bent.tagged = true,
            9 => bent.foreign = true,
            10 => bent.gso_size = self.pick(&[500, 1300, 1448]),
            11 => bent.elsewhere = true,
            _ => {}
        }
        bent
    }

    fn body(&mut self) -> Body {
        match self.0.below(18) {
            0..=4 => Body::Udp,
            5 => Body::UdpUnsummed,
            6..=10 => Body::Tcp(self.flags()),
            11..=13 => Body::EchoRequest,
            14 => Body::EchoReply,
            15 => {
                let chunk = self.pick(&[1, 1, 1, 0, 3]);
                self.pick(&[Body::Sctp(chunk), Body::Sctp(chunk), Body::Sctp(chunk), Body::SctpUnsummed(chunk)])
            }
            16 => Body::Other(self.pick(&[47, 50, 51, 4, 135, 2, 33, 136])),
            _ => Body::Icmp(self.pick(&[[5, 0], [13, 0], [14, 0], [137, 0], [3, 1], [1, 0]]), [0, 7, 0, 9]),
        }
    }

    fn send(&mut self) -> Step {
        use Who::*;
        let (by, from, to) = match self.0.below(20) {
            0..=7 => (By::FromPod, self.pick(&[Pod, Pod, SecondPod, SecondPod, AwayPod]), self.pick(&[World, World2])),
            8 | 9 => {
                let from = self.pick(&[Pod, SecondPod, AwayPod, EarlyPod, KnownPod, UnknownPod, RemotePod, Node]);
                let to = [World, OtherNode, Egress, AwayEgress, Service, Node, Nowhere, RemotePod];
                (By::FromPod, from, self.pick(&to))
            }
            10 => (By::FromPod, self.pick(&[Pod, SecondPod]), OtherNode),
            11 | 12 => {
                let by = By::ToNetdev { marked: true, forwarded: true, returning: false };
                (by, self.pick(&[Pod, SecondPod, AwayPod, KnownPod]), OtherNode)
            }
            13 => {
                let (marked, forwarded, returning) = (self.one_in(3), !self.one_in(3), self.one_in(4));
                let from = self.pick(&[Pod, AwayPod, KnownPod, UnknownPod, RemotePod, Node, Egress]);
                (By::ToNetdev { marked, forwarded, returning }, from, self.pick(&[World, OtherNode, Egress, Service]))
            }
            14 => (By::FromNetdev, self.pick(&[World, World2, OtherNode]), self.pick(&[Egress, AwayEgress, Node])),
            15 | 16 => (
                By::Notice,
                self.pick(&[World, World2, OtherNode, Node, RemotePod]),
                self.pick(&[Pod, SecondPod, KnownPod]),
            ),
            _ => {
                let egress_id = self.pick(&[7, 7, 17, 17, 8, 99]);
                let from = if self.one_in(8) { World } else { OtherNode };
                let inner = if self.one_in(8) { Pod } else { RemotePod };
                let (inner, to) = match self.one_in(6) {
                    true => (World, Egress),
                    false => (inner, self.pick(&[World, World, World, World2, Pod])),
                };
                (By::Overlay { from, egress_id }, inner, to)
            }
        };
        let fragment = match self.0.below(10) {
            0 => (0, true),
            1 => (self.pick(&[1, 3, 185]), self.one_in(2)),
            _ => (0, false),
        };
        Step::Send {
            v6: self.one_in(2),
            by,
            from,
            to,
            ports: (self.pick(&[4000, 4000, 4001, 80, 61_001, 0]), self.pick(&[80, 80, 443, TUNNEL])),
            body: self.body(),
            ttl: self.pick(&[64, 64, 64, 64, 2, 1]),
            data: self.pick(&[0, 5, 33, 33, 100, 1290, 1340, 1372, 1400, 1460, 1600]),
            options: if self.one_in(8) { self.pick(&[1, 2, 5]) } else { 0 },
            fragment,
            dont_fragment: !self.one_in(4),
            bent: self.bent(),
        }
    }

    /// A random earlier step, mostly a recent one.
    fn earlier(&mut self, id: usize) -> usize {
        let back = if self.one_in(3) { self.0.below(id.max(1)) } else { self.0.below(4) };
        id.saturating_sub(1 + back)
    }

    fn step(&mut self, id: usize) -> Step {
        let (of, bent, v6) = (self.earlier(id), self.bent(), self.one_in(2));
        match self.0.below(40) {
            0..=16 => self.send(),
            17..=25 => Step::Answer { of, flags: self.flags(), passed: self.one_in(4), bent },
            26 | 27 => Step::GoOn { of, bent },
            28..=31 => {
                let kind = [self.pick(&[3, 3, 11, 12, 4, 1, 2]), self.pick(&[0, 1, 4])];
                let quoted = self.pick(&[28, 28, 36, 40, 48, 60, 1500, 1500]);
                Step::Complain { of, kind, quoted, by_receiver: self.one_in(2), passed: self.one_in(4), bent }
            }
            32 | 33 => Step::Again { of, bent },
            34 => Step::Age(self.pick(&[5, 40, 100, 270, 500, 1000, 8000])),
            35 => Step::Sweep { pressed: self.one_in(2) },
            36 | 37 if self.one_in(2) => {
                let object = self.pick(&[None, Some(0), Some(0), Some(1), Some(2), Some(2), Some(3), Some(82)]);
                Step::Select { v6, pod: self.pick(&[Who::Pod, Who::SecondPod, Who::KnownPod]), object }
            }
            36 | 37 => Step::Slots { v6, here: !self.one_in(3), away: self.one_in(2) },
            38 if self.one_in(2) => Step::Own { v6, own: self.one_in(2), shared: id.is_multiple_of(2) },
            38 => {
                let course = self.pick(&[
                    Some(HandoverStage::Leaving),
                    Some(HandoverStage::Arriving),
                    Some(HandoverStage::Open),
                    None,
                ]);
                let (sent, held) = (self.one_in(2), self.one_in(3));
                Step::HandOver { v6, course, sent, held, shared: id.is_multiple_of(3) }
            }
            _ if self.one_in(2) => Step::Forget { v6, pod: Who::KnownPod },
            _ => Step::PassUnknown(self.one_in(2)),
        }
    }
}

const TUNNEL: u16 = super::derived_frames::TUNNEL_PORT;

/// The steps of a story with their numbers.
pub(super) fn story(seed: u64) -> Vec<(usize, Step)> {
    let mut maker = Maker(Random::new(seed));
    (0..STEPS).map(|id| (id, maker.step(id))).collect()
}

pub(super) const fn cast(v6: bool) -> FamilyAddresses {
    if v6 { V6 } else { V4 }
}
