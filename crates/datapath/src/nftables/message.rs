//! The messages of linux/netfilter/nf_tables.h that our tables need, and one socket for them. Written by hand, because the
//! netlink libraries that this crate uses have no nf_tables messages.

use std::borrow::Cow;
use std::io;

use bytes::{BufMut, BytesMut};
use rtnetlink::packet_core::{NLA_F_NESTED, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_REQUEST, NLMSG_ERROR};
use rtnetlink::sys::{Socket, SocketAddr};

use crate::netlink::{self, NETLINK_NETFILTER};

const FAMILY_INET: u8 = 1;
const SUBSYSTEM: u16 = 10;
pub const NEW_TABLE: u16 = 0;
pub const GET_TABLE: u16 = 1;
pub const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const NEW_SET: u16 = 9;
const NEW_FLOWTABLE: u16 = 22;
pub const NEW_ELEMENT: u16 = 12;
pub const DELETE_ELEMENT: u16 = 14;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// Before connection tracking.
pub const PRIORITY_RAW: i32 = -300;
pub const PRIORITY_DESTINATION_NAT: i32 = -100;
/// After destination NAT, before routing.
pub const PRIORITY_AFTER_NAT: i32 = -90;
pub const PRIORITY_FILTER: i32 = 0;
pub const PRIORITY_SOURCE_NAT: i32 = 100;
const SET_INTERVAL: u32 = 4;
const SET_MAP: u32 = 8;
/// `NF_NETDEV_INGRESS`.
const NETDEV_INGRESS: u32 = 0;
const ELEMENT_INTERVAL_END: u32 = 1;
/// Directions of a connection.
pub const ORIGINAL: u8 = 0;
pub const REPLY: u8 = 1;
const VERDICT_REGISTER: u32 = 0;
/// Of 16 bytes each, and each of four registers of 4 bytes, which have numbers of their own.
const REGISTER: u32 = 1;
const SECOND_REGISTER: u32 = 2;
const FIRST_SHORT_REGISTER: u32 = 8;
const SHORT_REGISTERS: u32 = 4;
/// `IFNAMSIZ`: names are compared with their padding.
const INTERFACE_NAME: usize = 16;

/// Hook of a chain.
#[derive(Clone, Copy)]
pub enum ChainHook {
    Prerouting = 0,
    Input = 1,
    Forward = 2,
    Output = 3,
    Postrouting = 4,
}

/// Type of a chain.
#[derive(Clone, Copy)]
pub enum ChainType {
    Filter,
    /// Sees the first packet of each connection.
    Nat,
}

/// Properties of a packet that `meta` loads.
#[derive(Clone, Copy)]
pub enum MetaKey {
    /// `skb->mark`.
    Mark = 3,
    /// `skb->priority`.
    Priority = 2,
    InterfaceName = 6,
    OutgoingInterfaceName = 7,
    NetworkProtocol = 15,
    TransportProtocol = 16,
}

/// Properties of a tracked connection.
#[derive(Clone, Copy)]
pub enum ConnectionKey {
    /// Of this packet: bits.
    State = 0,
    /// Of this packet.
    Direction = 1,
    /// Bits (`IPS_*`).
    Status = 2,
    Mark = 3,
    /// The destination of the first packet, before translation.
    OriginalV4 = 20,
    OriginalV6 = 22,
}

/// Base of a `payload` offset.
#[derive(Clone, Copy)]
pub enum Base {
    Network = 1,
    Transport = 2,
}

/// States of a packet's connection (`NF_CT_STATE_BIT`).
pub const ESTABLISHED: u32 = 1 << 1;
pub const RELATED: u32 = 1 << 2;
pub const UNTRACKED: u32 = 1 << 6;
/// The destination is translated (`IPS_DST_NAT`).
pub const DESTINATION_NAT: u32 = 1 << 5;

/// Which address is translated.
#[derive(Clone, Copy)]
pub enum NatType {
    Source = 0,
    Destination = 1,
}

/// How a packet is refused.
#[derive(Clone, Copy)]
pub enum RejectWith {
    TcpReset,
    /// An ICMP or ICMPv6 error: administratively prohibited.
    Prohibited,
}

#[derive(Clone, Copy)]
pub enum Comparison {
    Equal = 0,
    NotEqual = 1,
    AtMost = 3,
    AtLeast = 5,
}

/// Verdict of a rule.
#[derive(Clone, Copy)]
pub enum RuleVerdict {
    Drop = 0,
    Accept = 1,
}

/// Type of an address set: how `nft` shows its keys, and their length.
#[derive(Clone, Copy)]
pub struct SetType {
    pub shown_as: u32,
    pub length: u32,
}

/// A socket for many transactions. It stays open, because closing one that has had a transaction waits for an RCU grace period
/// (some ten milliseconds).
pub struct NftSocket(Socket);

impl NftSocket {
    pub fn open() -> io::Result<Self> {
        Socket::new(NETLINK_NETFILTER).map(Self)
    }

    /// Sends the batch and reads every answer. The inner result is the first error among them; the outer error means that the
    /// socket can no longer be used. The kernel has answered before the send returns, so that no answer is left for the next
    /// batch.
    pub fn ask(&self, batch: &NftBatch) -> io::Result<io::Result<()>> {
        self.0.send_to(&batch.bytes, &SocketAddr::new(0, 0), 0)?;
        // An error carries the message that it answers, whose elements take up to 32 KiB.
        let mut answer = Vec::with_capacity(64 << 10);
        let mut outcome = Ok(());
        loop {
            answer.clear();
            match self.0.recv(&mut answer, libc::MSG_DONTWAIT) {
                Ok(_) => outcome = outcome.and(errors(&answer)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(outcome),
                Err(error) => return Err(error),
            }
        }
    }
}

/// The first error in a datagram.
fn errors(datagram: &[u8]) -> io::Result<()> {
    for message in netlink::messages(datagram) {
        let message = message?;
        if message.message_type() == NLMSG_ERROR {
            netlink::error(&message).map_or(Ok(()), Err)?;
        }
    }
    Ok(())
}

/// Messages of one transaction.
pub struct NftBatch {
    /// The table that all of them are about.
    table: Cow<'static, str>,
    bytes: BytesMut,
    sequence: u32,
}

impl NftBatch {
    pub fn begin(table: impl Into<Cow<'static, str>>) -> Self {
        let mut batch = Self::outside(table);
        batch.message(BATCH_BEGIN, 0, 0, SUBSYSTEM, |_| {});
        batch
    }

    /// For requests outside a transaction.
    pub fn outside(table: impl Into<Cow<'static, str>>) -> Self {
        Self { table: table.into(), bytes: BytesMut::new(), sequence: 0 }
    }

    /// The same, for a transaction in one expression.
    pub fn ended(mut self) -> Self {
        self.end();
        self
    }

    pub fn end(&mut self) {
        self.message(BATCH_END, 0, 0, SUBSYSTEM, |_| {});
    }

    pub fn table(&mut self, kind: u16, flags: u16) {
        self.nft(kind, flags, |_| {});
    }

    pub fn chain(&mut self, name: &str, hook: ChainHook, priority: i32) {
        self.chain_of(ChainType::Filter, name, hook, priority);
    }

    pub fn chain_of(&mut self, kind: ChainType, name: &str, hook: ChainHook, priority: i32) {
        self.nft(NEW_CHAIN, NLM_F_CREATE, |bytes| {
            text(bytes, 3, name);
            nest(bytes, 4, |bytes| {
                number(bytes, 1, hook as u32);
                attribute(bytes, 2, &priority.to_be_bytes());
            });
            text(
                bytes,
                7,
                match kind {
                    ChainType::Filter => "filter",
                    ChainType::Nat => "nat",
                },
            );
        });
    }

    /// Flows that are forwarded from device to device, past the chains.
    pub fn flowtable(&mut self, name: &str, devices: &[&str]) {
        self.nft(NEW_FLOWTABLE, NLM_F_CREATE, |bytes| {
            text(bytes, 2, name);
            nest(bytes, 3, |bytes| {
                number(bytes, 1, NETDEV_INGRESS);
                attribute(bytes, 2, &PRIORITY_FILTER.to_be_bytes());
                nest(bytes, 3, |bytes| devices.iter().for_each(|device| text(bytes, 1, device)));
            });
        });
    }

    /// A set, also identified by its number in this transaction.
    pub fn set(&mut self, name: &str, number_here: u32, kind: SetType) {
        self.new_set(name, number_here, kind, 0, None);
    }

    /// A set whose keys have values.
    pub fn map(&mut self, name: &str, number_here: u32, key: SetType, value: SetType) {
        self.new_set(name, number_here, key, SET_MAP, Some(value));
    }

    /// The same of ranges.
    pub fn range_set(&mut self, name: &str, number_here: u32, kind: SetType) {
        self.new_set(name, number_here, kind, SET_INTERVAL, None);
    }

    fn new_set(&mut self, name: &str, number_here: u32, kind: SetType, flags: u32, value: Option<SetType>) {
        self.nft(NEW_SET, NLM_F_CREATE, |bytes| {
            text(bytes, 2, name);
            number(bytes, 3, flags);
            number(bytes, 4, kind.shown_as);
            number(bytes, 5, kind.length);
            if let Some(value) = value {
                number(bytes, 6, value.shown_as);
                number(bytes, 7, value.length);
            }
            number(bytes, 10, number_here);
        });
    }

    /// Adds keys with their values to a map.
    pub fn pairs<'a>(&mut self, map: &str, pairs: impl Iterator<Item = (&'a [u8], &'a [u8])>) {
        self.nft(NEW_ELEMENT, NLM_F_CREATE, |bytes| {
            text(bytes, 2, map);
            nest(bytes, 3, |bytes| {
                for (key, value) in pairs {
                    nest(bytes, 1, |bytes| {
                        nest(bytes, 1, |bytes| attribute(bytes, 1, key));
                        nest(bytes, 2, |bytes| attribute(bytes, 1, value));
                    });
                }
            });
        });
    }

    /// Adds keys to a set, or removes them.
    pub fn elements<'a>(&mut self, kind: u16, set: &str, keys: impl Iterator<Item = &'a [u8]>) {
        let flags = if kind == NEW_ELEMENT { NLM_F_CREATE } else { 0 };
        self.nft(kind, flags, |bytes| {
            text(bytes, 2, set);
            nest(bytes, 3, |bytes| {
                for key in keys {
                    nest(bytes, 1, |bytes| nest(bytes, 1, |bytes| attribute(bytes, 1, key)));
                }
            });
        });
    }

    /// Adds ranges to a set of ranges: the first key of each, and the key after its last one, if there is one.
    pub fn ranges<'a>(&mut self, set: &str, ranges: impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)>) {
        let element = |bytes: &mut BytesMut, key: &[u8], flags: u32| {
            nest(bytes, 1, |bytes| {
                nest(bytes, 1, |bytes| attribute(bytes, 1, key));
                number(bytes, 3, flags);
            });
        };
        self.nft(NEW_ELEMENT, NLM_F_CREATE, |bytes| {
            text(bytes, 2, set);
            nest(bytes, 3, |bytes| {
                for (first, end) in ranges {
                    element(bytes, first, 0);
                    if let Some(end) = end {
                        element(bytes, end, ELEMENT_INTERVAL_END);
                    }
                }
            });
        });
    }

    /// A rule at the end of the chain; its expressions are written by `content`.
    pub fn rule(&mut self, chain: &str, content: impl FnOnce(&mut RuleBuilder<'_>)) {
        self.nft(NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, |bytes| {
            text(bytes, 2, chain);
            nest(bytes, 4, |bytes| content(&mut RuleBuilder(bytes)));
        });
    }

    fn nft(&mut self, kind: u16, flags: u16, content: impl FnOnce(&mut BytesMut)) {
        let table = self.table.clone();
        self.message((SUBSYSTEM << 8) | kind, flags | NLM_F_ACK, FAMILY_INET, 0, |bytes| {
            text(bytes, 1, &table);
            content(bytes);
        });
    }

    fn message(&mut self, kind: u16, flags: u16, family: u8, resource: u16, content: impl FnOnce(&mut BytesMut)) {
        let start = self.bytes.len();
        self.bytes.put_u32_ne(0);
        self.bytes.put_u16_ne(kind);
        self.bytes.put_u16_ne(NLM_F_REQUEST | flags);
        self.bytes.put_u32_ne(self.sequence);
        self.bytes.put_u32_ne(0);
        self.bytes.put_u8(family);
        self.bytes.put_u8(0);
        self.bytes.put_u16(resource);
        content(&mut self.bytes);
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.sequence += 1;
    }
}

/// The expressions of one rule, in order. The next expression compares or looks up a loaded value.
pub struct RuleBuilder<'a>(&'a mut BytesMut);

impl RuleBuilder<'_> {
    /// Compares a property of the packet.
    pub fn meta(&mut self, key: MetaKey, comparison: Comparison, value: &[u8]) {
        self.load_meta(key);
        self.compare(comparison, value);
    }

    pub fn interface(&mut self, comparison: Comparison, name: &str) {
        self.interface_of(MetaKey::InterfaceName, comparison, name);
    }

    pub fn outgoing_interface(&mut self, comparison: Comparison, name: &str) {
        self.interface_of(MetaKey::OutgoingInterfaceName, comparison, name);
    }

    fn interface_of(&mut self, key: MetaKey, comparison: Comparison, name: &str) {
        let mut padded = [0; INTERFACE_NAME];
        for (to, from) in padded.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        self.meta(key, comparison, &padded);
    }

    /// Sets the property to this.
    pub fn set_meta(&mut self, key: MetaKey, value: &[u8]) {
        self.immediate(value);
        self.expression("meta", |bytes| {
            number(bytes, 2, key as u32);
            number(bytes, 3, REGISTER);
        });
    }

    /// Loads a property of the connection.
    pub fn load_connection(&mut self, key: ConnectionKey) {
        self.expression("ct", |bytes| {
            number(bytes, 1, REGISTER);
            number(bytes, 2, key as u32);
            if matches!(key, ConnectionKey::OriginalV4 | ConnectionKey::OriginalV6) {
                attribute(bytes, 3, &[ORIGINAL]);
            }
        });
    }

    /// The bits of a property of the connection have one of these.
    pub fn connection_has(&mut self, key: ConnectionKey, bits: u32) {
        self.load_connection(key);
        self.mask(&bits.to_ne_bytes());
        self.compare(Comparison::NotEqual, &[0; 4]);
    }

    /// The loaded value has these bits within the mask, such as a network.
    pub fn masked(&mut self, mask: &[u8], value: &[u8]) {
        self.mask(mask);
        self.compare(Comparison::Equal, value);
    }

    fn mask(&mut self, mask: &[u8]) {
        let zeros = vec![0; mask.len()];
        self.expression("bitwise", |bytes| {
            number(bytes, 1, REGISTER);
            number(bytes, 2, REGISTER);
            number(bytes, 3, u32::try_from(mask.len()).unwrap_or_default());
            nest(bytes, 4, |bytes| attribute(bytes, 1, mask));
            nest(bytes, 5, |bytes| attribute(bytes, 1, &zeros));
        });
    }

    pub fn set_connection_mark(&mut self, mark: u32) {
        self.immediate(&mark.to_ne_bytes());
        self.expression("ct", |bytes| {
            number(bytes, 2, ConnectionKey::Mark as u32);
            number(bytes, 4, REGISTER);
        });
    }

    /// Looks up the transport protocol and the destination port in a map of addresses of this length and ports, and translates
    /// the destination to what it finds.
    pub fn destination_by_map(&mut self, map: &str, number_here: u32, (protocol, length): (u8, u32), mark: u32) {
        self.load_meta(MetaKey::TransportProtocol);
        self.expression("payload", |bytes| {
            number(bytes, 1, FIRST_SHORT_REGISTER + 1);
            number(bytes, 2, Base::Transport as u32);
            number(bytes, 3, 2);
            number(bytes, 4, 2);
        });
        self.expression("lookup", |bytes| {
            text(bytes, 1, map);
            number(bytes, 2, REGISTER);
            number(bytes, 3, SECOND_REGISTER);
            number(bytes, 4, number_here);
        });
        self.set_connection_mark(mark);
        let port = FIRST_SHORT_REGISTER + SHORT_REGISTERS + length / 4;
        self.nat(NatType::Destination, protocol, SECOND_REGISTER, Some(port));
    }

    /// Translates to this address.
    pub fn nat_to(&mut self, kind: NatType, protocol: u8, address: &[u8]) {
        self.immediate(address);
        self.nat(kind, protocol, REGISTER, None);
    }

    fn nat(&mut self, kind: NatType, protocol: u8, address: u32, port: Option<u32>) {
        self.expression("nat", |bytes| {
            number(bytes, 1, kind as u32);
            number(bytes, 2, u32::from(protocol));
            number(bytes, 3, address);
            if let Some(port) = port {
                number(bytes, 5, port);
            }
        });
    }

    pub fn reject(&mut self, refusal: RejectWith) {
        self.expression("reject", |bytes| match refusal {
            RejectWith::TcpReset => {
                number(bytes, 1, 1);
                attribute(bytes, 2, &[0]);
            }
            RejectWith::Prohibited => {
                number(bytes, 1, 2);
                attribute(bytes, 2, &[3]);
            }
        });
    }

    /// Has the connection forwarded past the chains from now on.
    pub fn offload(&mut self, flowtable: &str) {
        self.expression("flow_offload", |bytes| text(bytes, 1, flowtable));
    }

    fn immediate(&mut self, value: &[u8]) {
        self.expression("immediate", |bytes| {
            number(bytes, 1, REGISTER);
            nest(bytes, 2, |bytes| attribute(bytes, 1, value));
        });
    }

    /// Loads bytes of the packet.
    pub fn load(&mut self, base: Base, offset: u32, length: u32) {
        self.expression("payload", |bytes| {
            number(bytes, 1, REGISTER);
            number(bytes, 2, base as u32);
            number(bytes, 3, offset);
            number(bytes, 4, length);
        });
    }

    pub fn compare(&mut self, comparison: Comparison, value: &[u8]) {
        self.expression("cmp", |bytes| {
            number(bytes, 1, REGISTER);
            number(bytes, 2, comparison as u32);
            nest(bytes, 3, |bytes| attribute(bytes, 1, value));
        });
    }

    /// The loaded value is in the set with that number in this transaction.
    pub fn is_in(&mut self, set: &str, number_here: u32) {
        self.expression("lookup", |bytes| {
            text(bytes, 1, set);
            number(bytes, 2, REGISTER);
            number(bytes, 4, number_here);
        });
    }

    /// An expression without arguments: `counter`, `notrack`.
    pub fn plain(&mut self, name: &str) {
        self.expression(name, |_| {});
    }

    pub fn verdict(&mut self, verdict: RuleVerdict) {
        self.expression("immediate", |bytes| {
            number(bytes, 1, VERDICT_REGISTER);
            nest(bytes, 2, |bytes| nest(bytes, 2, |bytes| number(bytes, 1, verdict as u32)));
        });
    }

    fn load_meta(&mut self, key: MetaKey) {
        self.expression("meta", |bytes| {
            number(bytes, 1, REGISTER);
            number(bytes, 2, key as u32);
        });
    }

    fn expression(&mut self, name: &str, data: impl FnOnce(&mut BytesMut)) {
        nest(self.0, 1, |bytes| {
            text(bytes, 1, name);
            nest(bytes, 2, data);
        });
    }
}

fn number(bytes: &mut BytesMut, kind: u16, value: u32) {
    attribute(bytes, kind, &value.to_be_bytes());
}

fn text(bytes: &mut BytesMut, kind: u16, value: &str) {
    let mut terminated = value.as_bytes().to_vec();
    terminated.push(0);
    attribute(bytes, kind, &terminated);
}

fn attribute(bytes: &mut BytesMut, kind: u16, value: &[u8]) {
    wrapped(bytes, kind, |bytes| bytes.put_slice(value));
}

fn nest(bytes: &mut BytesMut, kind: u16, content: impl FnOnce(&mut BytesMut)) {
    wrapped(bytes, kind | NLA_F_NESTED, content);
}

/// An attribute: its length, kind, content, and padding to four bytes.
fn wrapped(bytes: &mut BytesMut, kind: u16, content: impl FnOnce(&mut BytesMut)) {
    let start = bytes.len();
    bytes.put_u16_ne(0);
    bytes.put_u16_ne(kind);
    content(bytes);
    let length = bytes.len() - start;
    bytes[start..start + 2].copy_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_ne_bytes());
    bytes.put_bytes(0, length.next_multiple_of(4) - length);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_attributes_have_their_lengths() {
        let mut batch = NftBatch::begin("egress-agent");
        batch.table(NEW_TABLE, NLM_F_CREATE);
        batch.message(BATCH_END, 0, 0, SUBSYSTEM, |_| {});
        let bytes = batch.bytes;
        let lengths: Vec<u32> = {
            let mut rest = &bytes[..];
            let mut lengths = Vec::new();
            while let Some(chunk) = rest.first_chunk::<4>() {
                let length = u32::from_ne_bytes(*chunk);
                lengths.push(length);
                rest = &rest[length as usize..];
            }
            lengths
        };
        // Header 16, family and resource 4; attribute header 4, name 13, padding 3.
        assert_eq!(lengths, [20, 40, 20]);
    }

    #[test]
    fn an_error_is_found_after_an_acknowledgement() {
        let answer = |code: i32| {
            let mut bytes = BytesMut::new();
            bytes.put_u32_ne(20);
            bytes.put_u16_ne(NLMSG_ERROR);
            bytes.put_u16_ne(0);
            bytes.put_u64_ne(0);
            bytes.put_i32_ne(code);
            bytes
        };
        let mut both = answer(0);
        assert!(errors(&both).is_ok());
        both.extend_from_slice(&answer(-libc::ENOENT));
        assert_eq!(errors(&both).map_err(|error| error.kind()), Err(io::ErrorKind::NotFound));
        assert!(errors(&both[..7]).is_err(), "cut short");
    }
}
