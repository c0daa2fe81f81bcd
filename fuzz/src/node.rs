//! A node: the decisions, combined as in the programs (egress-ebpf/src, a file for each hook), and the invariants after
//! each packet.
//!
//! The fuzz targets check this model, and the oracle tests compare the programs on the kernel with it
//! (egress-agent/tests/kernel_programs/oracle): one packet at a time, bytes in, verdict and bytes out, state kept.

mod from_netdev;
mod from_overlay;
mod from_pod;
mod handover;
mod invariants;
mod to_netdev;

use std::collections::HashMap;

use egress_common::abi::{Addr, Class, Config, Direction, Family, NODE_MARK, NatEntry, PortRange, Tuple, Verdict};
use egress_common::decide::expiry::FRAGMENT_NS;
use egress_common::decide::from_overlay::Outer;
use egress_common::decide::memory_maps::MemoryMaps;
use egress_common::decide::to_netdev::Meta;
use egress_common::decide::{Rewrite, fragments, mtu, to_pod};
use egress_common::wire::{ETH_LEN, Headers, L4, Quote};

use crate::addresses;
use crate::frame;
use crate::rewrite;

/// Marks of incoming packets, also with bits of other programs.
pub(crate) const MARKS: [u32; 3] = [0, NODE_MARK, 0x0001_4000 | NODE_MARK];

/// The hook of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketHook {
    /// Management port, ingress and egress.
    FromPod,
    ToPod,
    /// Overlay, ingress.
    FromOverlay(Outer),
    /// The interface with this index, ingress.
    FromNetdev(u32),
    /// An interface, egress.
    ToNetdev(Meta),
}

/// A packet with its metadata.
#[derive(Clone, Copy, Debug)]
pub struct Skb<'a> {
    pub frame: &'a [u8],
    /// GSO size; zero for a single packet.
    pub gso_size: u32,
    /// For another host, by its link address.
    pub foreign: bool,
}

impl<'a> Skb<'a> {
    #[must_use]
    pub const fn plain(frame: &'a [u8]) -> Self {
        Self { frame, gso_size: 0, foreign: false }
    }
}

/// Outcome of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PacketOutcome {
    /// Passed to the stack, perhaps rewritten, with this mark.
    Passed(Verdict, Vec<u8>, u32),
    /// Leaves by another device, with any link addresses. Overlay packets are without outer headers.
    Sent(Verdict, Vec<u8>),
    /// The same, in two fragments that are not modelled.
    Split(Verdict),
    /// Turned into the answer.
    Answered(Verdict, Vec<u8>),
    Dropped(Verdict),
}

impl PacketOutcome {
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        match self {
            Self::Passed(verdict, ..)
            | Self::Sent(verdict, _)
            | Self::Split(verdict)
            | Self::Answered(verdict, _)
            | Self::Dropped(verdict) => *verdict,
        }
    }

    fn done(verdict: Verdict, frame: &[u8], mark: u32) -> Self {
        match verdict.class() {
            Class::Pass => Self::Passed(verdict, frame.to_vec(), mark),
            Class::Drop | Class::Hold => Self::Dropped(verdict),
            Class::Redirect | Class::Answer => panic!("{verdict:?} is no end of a decision"),
        }
    }

    fn changed(verdict: Verdict, changed: Option<Vec<u8>>) -> Self {
        match changed {
            Some(frame) => Self::Sent(verdict, frame),
            None => Self::Dropped(Verdict::RewriteFailed),
        }
    }

    /// `mtu` of the path.
    fn answered(verdict: Verdict, answer: Option<Vec<u8>>, otherwise: Verdict) -> Self {
        match answer {
            Some(frame) => Self::Answered(verdict, frame),
            None => Self::Dropped(otherwise),
        }
    }
}

/// The path MTU that the unchanged packet exceeds.
struct TooBig(u32);

pub struct ModelNode {
    pub maps: MemoryMaps,
    /// Destinations with a route by the uplink.
    pub routed: fn(&Addr) -> bool,
    /// Pods whose link address is known.
    pub resolved: fn(&Addr) -> bool,
    /// The flow of each reverse key, by the last packet that was translated.
    asked: HashMap<Tuple, Tuple>,
}

impl ModelNode {
    #[must_use]
    pub fn new(maps: MemoryMaps) -> Self {
        Self { maps, routed: |_| true, resolved: |_| true, asked: HashMap::new() }
    }

    /// As the agent does after every change of the maps that `from_pod` reads.
    pub fn renew_decision_number(&self) {
        self.maps.configure(|config| config.decisions += 1);
    }

    fn config(&self) -> Config {
        self.maps.config.get()
    }

    /// The headers as the programs read them, or the outcome of an unreadable packet.
    fn headers(frame: &[u8], direction: Direction) -> Result<Headers, Verdict> {
        let mut headers = Headers::NONE;
        match headers.read(frame, direction) {
            Some(()) => Ok(headers),
            None => Err(headers.why_unread()),
        }
    }

    fn wire_length(skb: &Skb<'_>, headers: &Headers) -> u32 {
        mtu::wire_length(u32::try_from(skb.frame.len()).unwrap_or(u32::MAX), skb.gso_size, headers)
    }

    pub fn run(&mut self, hook: &PacketHook, skb: &Skb<'_>) -> PacketOutcome {
        self.maps.next_packet();
        let outcome = match hook {
            PacketHook::FromPod => self.run_from_pod(skb),
            PacketHook::ToPod => self.run_to_pod(skb),
            PacketHook::FromOverlay(outer) => self.run_from_overlay(outer, skb),
            PacketHook::FromNetdev(ifindex) => self.run_from_netdev(*ifindex, skb),
            PacketHook::ToNetdev(meta) => self.run_to_netdev(skb, meta),
        };
        self.maps.assert_paired();
        outcome
    }

    pub fn from_pod(&mut self, frame: &[u8]) -> PacketOutcome {
        self.run(&PacketHook::FromPod, &Skb::plain(frame))
    }

    pub fn from_overlay(&mut self, outer: &Outer, frame: &[u8]) -> PacketOutcome {
        self.run(&PacketHook::FromOverlay(*outer), &Skb::plain(frame))
    }

    pub fn from_netdev(&mut self, frame: &[u8]) -> PacketOutcome {
        self.run(&PacketHook::FromNetdev(addresses::UPLINK), &Skb::plain(frame))
    }

    pub fn to_netdev(&mut self, frame: &[u8], meta: &Meta) -> PacketOutcome {
        self.run(&PacketHook::ToNetdev(*meta), &Skb::plain(frame))
    }

    /// Only records inbound connections.
    pub fn to_pod(&mut self, frame: &[u8]) -> PacketOutcome {
        self.run(&PacketHook::ToPod, &Skb::plain(frame))
    }

    /// As egress-ebpf/src/fragment.rs, without running reinjected fragments.
    fn kept(&self, skb: &Skb<'_>, headers: &Headers, outcome: PacketOutcome) -> PacketOutcome {
        const MOST: u32 = 64;
        const FRAME: usize = 1992;
        let (key, now, mut awaited) = (fragments::key(headers), self.maps.now.get(), self.maps.awaited.borrow_mut());
        match outcome.verdict() {
            Verdict::FragmentUnknown if skb.gso_size == 0 && skb.frame.len() <= FRAME => {
                let entry = awaited.entry(key).or_insert((now, 0));
                if now - entry.0 > FRAGMENT_NS {
                    *entry = (now, 0);
                }
                entry.1 += 1;
                if entry.1 > MOST { outcome } else { PacketOutcome::Dropped(Verdict::FragmentHeld) }
            }
            Verdict::FragmentsReleased => {
                awaited.remove(&key);
                outcome
            }
            _ => outcome,
        }
    }

    fn run_to_pod(&mut self, skb: &Skb<'_>) -> PacketOutcome {
        let headers = match Self::headers(skb.frame, Direction::Ingress) {
            Ok(headers) => headers,
            Err(verdict) => return PacketOutcome::done(verdict, skb.frame, 0),
        };
        let verdict = to_pod::decide(&headers, &self.maps, &self.config());
        let is_refused = verdict == Verdict::InboundFull;
        assert!(is_refused || verdict.class() == Class::Pass, "it guards nothing else: {verdict:?}");
        PacketOutcome::done(verdict, skb.frame, 0)
    }

    /// A packet has found or created this entry, whether it is sent or answered; asserts that no other flow has the same.
    fn note_flow(&mut self, headers: &Headers, nat_entry: &NatEntry) {
        let reverse = &nat_entry.other;
        if headers.l4 != L4::IcmpError
            && let Some(old) = self.asked.insert(*reverse, headers.tuple).filter(|old| *old != headers.tuple)
        {
            let holds = self.maps.nat.get(&old).is_some_and(|nat_entry| nat_entry.other == *reverse);
            assert!(!holds, "two flows show the same: {old:?} and {:?}", headers.tuple);
        }
    }

    /// Writes the translated source.
    fn translated(
        headers: &Headers,
        quote: &Quote,
        frame: Vec<u8>,
        ports: PortRange,
        nat_entry: &NatEntry,
    ) -> Result<Vec<u8>, Verdict> {
        let reverse = &nat_entry.other;
        let keeps_port = matches!(headers.l4, L4::Other | L4::IcmpError);
        assert!(keeps_port || (ports.first..=ports.last).contains(&reverse.dport()), "not one of them: {reverse:?}");
        let out = rewritten(headers, quote, frame, &Rewrite::snat(nat_entry))?;
        let after = Self::headers(&out, Direction::Egress).expect("still IP");
        assert_eq!((after.tuple.saddr, after.tuple.daddr), (reverse.daddr, headers.tuple.daddr));
        Ok(out)
    }
}

/// Rewrites one end; asserts that valid checksums stay valid.
fn rewritten(headers: &Headers, quote: &Quote, frame: Vec<u8>, rewrite: &Rewrite) -> Result<Vec<u8>, Verdict> {
    let mut out = frame.clone();
    let written = match headers.l4 {
        L4::IcmpError => rewrite::rewrite_error(&mut out, headers, quote, rewrite),
        _ => rewrite.check(headers).map(|()| rewrite::rewrite(&mut out, headers, rewrite))?,
    };
    written.ok_or(Verdict::RewriteFailed)?;
    if frame::is_summed_right(&frame) == Some(true) {
        assert_eq!(frame::is_summed_right(&out), Some(true), "{frame:02x?} became {out:02x?}");
    }
    if headers.l4 == L4::IcmpError {
        let (before, after) = (frame::is_quote_summed_right(&frame, quote), frame::is_quote_summed_right(&out, quote));
        for (before, after) in before.into_iter().zip(after) {
            assert!(before != Some(true) || after == Some(true), "{frame:02x?} became {out:02x?}");
        }
    }
    Ok(out)
}

/// As egress-ebpf/src/fragment.rs checks it.
fn fits_in_two(skb: &Skb<'_>, headers: &Headers, mtu: u32) -> bool {
    let header = u32::from(headers.l4_offset) - u32::try_from(ETH_LEN).unwrap_or_default();
    let first = mtu.saturating_sub(header) & !7;
    let rest = ModelNode::wire_length(skb, headers).saturating_sub(header + first);
    headers.family == Family::V4
        && headers.may_be_fragmented()
        && skb.gso_size == 0
        && first > 0
        && rest <= 2048
        && rest + header <= mtu
}

/// The quote of an ICMP error; empty for any other packet.
fn quoted(frame: &[u8], headers: &Headers) -> Quote {
    let mut quote = Quote::NONE;
    if headers.l4 == L4::IcmpError && quote.read(frame, headers).is_none() {
        quote = Quote::NONE;
    }
    quote
}
