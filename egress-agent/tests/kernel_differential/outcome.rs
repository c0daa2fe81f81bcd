//! The result of a case in comparable form: the output packets of each step, reassembled, each as a list of fields.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::decode::{ValueNames, describe};
use crate::endpoints::CaseAddresses;
use crate::layout::View;
use crate::packets::{FRAGMENT, fix_ipv4_header, word};
use crate::runner::{Caught, Played, Side};
use crate::sockets::ReceivedFrame;

/// Packets by step and side, in order of output.
pub(crate) type CaseOutcome = BTreeMap<(usize, Side), Vec<Vec<String>>>;

pub(crate) fn outcome(played: &Played) -> CaseOutcome {
    let mut names = CaseNames { cast: played.cast, known: Known::of(&played.put_in), chosen: Vec::new() };
    let mut outcome = CaseOutcome::new();
    for caught in made_whole(&played.caught) {
        outcome.entry((caught.step, caught.side)).or_default().push(describe(&caught.frame, &mut names));
    }
    outcome
}

struct CaseNames {
    cast: CaseAddresses,
    known: Known,
    /// In order of appearance.
    chosen: Vec<(u8, (IpAddr, u16), u16)>,
}

impl ValueNames for CaseNames {
    fn address(&self, address: IpAddr) -> String {
        self.cast.name(address)
    }

    fn chosen(&mut self, protocol: u8, peer: (IpAddr, u16), port: u16) -> String {
        let one = (protocol, peer, port);
        let place = self.chosen.iter().position(|chosen| *chosen == one).unwrap_or_else(|| {
            self.chosen.push(one);
            self.chosen.len() - 1
        });
        format!("chosen, number {}", place + 1)
    }

    fn is_egress(&self, address: IpAddr) -> bool {
        address == self.cast.egress()
    }

    fn knows_id(&self, id: u32) -> bool {
        self.known.ids.contains(&id)
    }

    fn knows_label(&self, label: u32) -> bool {
        self.known.labels.contains(&label)
    }

    fn knows_port(&self, port: u16) -> bool {
        self.known.ports.contains(&port)
    }
}

/// Values in input packets, and in the packets that they quote.
#[derive(Default)]
struct Known {
    ids: BTreeSet<u32>,
    labels: BTreeSet<u32>,
    ports: BTreeSet<u16>,
}

impl Known {
    fn of(packets: &[Vec<u8>]) -> Self {
        let mut known = Self::default();
        for packet in packets {
            let mut next = View::of(packet);
            while let Some(view) = next {
                let bytes = view.bytes;
                if view.v6 {
                    known.labels.insert(u32::from_be_bytes([0, bytes[1] & 0x0f, bytes[2], bytes[3]]));
                } else {
                    known.ids.insert(u16::from_be_bytes([bytes[4], bytes[5]]).into());
                }
                known.ids.extend(view.fragment.map(|fragment| fragment.id));
                known.ports.extend(view.ports().into_iter().flat_map(|(sport, dport)| [sport, dport]));
                next = view.quote();
            }
        }
        known
    }
}

/// Common key of a datagram's fragments.
type DatagramKey = (Side, IpAddr, IpAddr, u32);

/// Reassembles fragments, in the step in which the datagram is complete.
fn made_whole(caught: &[Caught]) -> Vec<Caught> {
    let mut whole = Vec::new();
    let mut parts: Vec<(DatagramKey, Vec<&Caught>)> = Vec::new();
    for caught in caught {
        let view = View::of(&caught.frame.packet);
        let Some((view, fragment)) = view.and_then(|view| view.fragment.map(|fragment| (view, fragment))) else {
            whole.push(caught.clone());
            continue;
        };
        let key = (caught.side, view.from, view.to, fragment.id);
        let place = parts.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
            parts.push((key, Vec::new()));
            parts.len() - 1
        });
        parts[place].1.push(caught);
        if let Some(packet) = joined(&parts[place].1) {
            // An offloaded checksum is completed for the whole datagram, and still shown as offloaded.
            let unfinished = parts[place].1.iter().find(|part| part.frame.offload.checksum.is_some());
            let offload = unfinished.map_or(caught.frame.offload, |part| part.frame.offload);
            let frame =
                ReceivedFrame { packet, offload, unfinished_parts: unfinished.is_some(), ..caught.frame.clone() };
            whole.push(Caught { frame, ..caught.clone() });
            parts.remove(place);
        }
    }
    // Incomplete datagrams are shown as fragments.
    whole.extend(parts.into_iter().flat_map(|(_, parts)| parts).cloned());
    whole.sort_by_key(|caught| caught.step);
    whole
}

/// The reassembled datagram; `None` while a fragment is missing.
fn joined(parts: &[&Caught]) -> Option<Vec<u8>> {
    let mut pieces = BTreeMap::new();
    for part in parts {
        let view = View::of(&part.frame.packet)?;
        let fragment = view.fragment?;
        pieces.insert(fragment.offset, (view, fragment));
    }
    let mut data = Vec::new();
    for (offset, (view, fragment)) in &pieces {
        if *offset != data.len() {
            return None;
        }
        data.extend(view.payload);
        if !fragment.more {
            let (first, fragment) = pieces.get(&0)?;
            return Some(without_fragment(first, fragment.header, &data));
        }
    }
    None
}

fn without_fragment(first: &View<'_>, header: Option<(usize, usize)>, data: &[u8]) -> Vec<u8> {
    let mut bytes = first.bytes[..first.payload_at].to_vec();
    match header {
        Some((at, named_at)) => {
            bytes[named_at] = bytes[at];
            bytes.drain(at..at + 8);
            let between = bytes.len() - 40;
            bytes[4..6].copy_from_slice(&word(between + data.len()));
            debug_assert_ne!(bytes[named_at], FRAGMENT);
        }
        None => {
            bytes[6] &= 0x40;
            bytes[7] = 0;
            bytes[2..4].copy_from_slice(&word(first.payload_at + data.len()));
            fix_ipv4_header(&mut bytes);
        }
    }
    bytes.extend(data);
    bytes
}

/// Differences between two outcomes, for messages; empty if they are equal.
pub(crate) fn difference(netfilter: &CaseOutcome, ours: &CaseOutcome) -> Option<(String, String)> {
    let (mut theirs, mut our) = (Vec::new(), Vec::new());
    let keys: BTreeSet<_> = netfilter.keys().chain(ours.keys()).collect();
    for key in keys {
        let empty = Vec::new();
        let (left, right) = (netfilter.get(key).unwrap_or(&empty), ours.get(key).unwrap_or(&empty));
        if left == right {
            continue;
        }
        let place = place(*key);
        if left.len() == right.len() {
            for (left, right) in left.iter().zip(right).filter(|(left, right)| left != right) {
                theirs.push(format!("{place}: {}", lines_beside(left, right)));
                our.push(format!("{place}: {}", lines_beside(right, left)));
            }
        } else {
            theirs.push(format!("{place}: {}", headlines(left)));
            our.push(format!("{place}: {}", headlines(right)));
        }
    }
    (!theirs.is_empty()).then(|| (theirs.join("; "), our.join("; ")))
}

fn place((step, side): (usize, Side)) -> String {
    format!("step {}, {}", step + 1, if side == Side::Pods { "to the pod" } else { "to the world" })
}

/// The packet's name, and the lines that the other one lacks; data and checksums without the case number.
fn lines_beside(lines: &[String], other: &[String]) -> String {
    let coarse = |line: &'_ String| match line.split_once(", ") {
        Some((known, _)) if line.contains(" bytes, ") || line.contains("cut short") => known.to_owned(),
        _ => line.split_once(": off by").map_or_else(|| line.clone(), |(name, _)| format!("{name}: wrong")),
    };
    let own: Vec<String> = lines.iter().skip(1).filter(|line| !other.contains(line)).map(coarse).collect();
    let name = &lines[0];
    if own.is_empty() { name.clone() } else { format!("{name}: {}", own.join(", ")) }
}

fn headlines(packets: &[Vec<String>]) -> String {
    if packets.is_empty() {
        return "nothing".to_owned();
    }
    packets.iter().map(|lines| lines[0].as_str()).collect::<Vec<_>>().join(" and ")
}
