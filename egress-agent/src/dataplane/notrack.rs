//! Keeping the host's connection tracking off the overlay: an entry per flow of every other node would fill its table.
//!
//! One nftables table of ours, replaced as a whole in one transaction, as `nft` would show it:
//!
//! ```text
//! table inet egress-agent {
//!     chain prerouting { type filter hook prerouting priority raw; iifname != MGMT udp dport PORT notrack }
//!     chain output     { type filter hook output     priority raw; udp dport PORT notrack }
//! }
//! ```
//!
//! What pods send to that port of the world stays tracked, or the CNI's masquerade would not see it.
//!
//! It lives in the kernel like links and pins do, and `cleanup` deletes it. A kernel without nf_tables tracks the port;
//! that costs memory, not correctness, so it is a warning. The messages are those of linux/netfilter/nf_tables.h.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use bytes::{BufMut, BytesMut};
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket};

use super::names::NFT_TABLE;

const FAMILY_INET: u8 = 1;
const SUBSYSTEM: u16 = 10;
const NEW_TABLE: u16 = 0;
const GET_TABLE: u16 = 1;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

const NESTED: u16 = 0x8000;
const HEADER: usize = 16;
/// `NLMSG_ERROR`: also the form of an acknowledgement, with error zero.
const ERROR: u16 = 2;

const PREROUTING: u32 = 0;
const OUTPUT: u32 = 3;
/// Before connection tracking.
const PRIORITY_RAW: i32 = -300;
const REGISTER: u32 = 1;
const META_IIFNAME: u32 = 6;
const META_L4PROTO: u32 = 16;
/// `IFNAMSIZ`: names are compared with their padding.
const INTERFACE_NAME: usize = 16;
const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const UDP: u8 = 17;

/// Puts the rules there, in place of those that may be there.
pub(super) fn install(port: u16, mgmt_port: &str) -> io::Result<()> {
    let mut batch = Batch::begin();
    // Deleting wants a table to delete.
    batch.table(NEW_TABLE, CREATE);
    batch.table(DELETE_TABLE, 0);
    batch.table(NEW_TABLE, CREATE);
    for (name, hook, not_from) in [("prerouting", PREROUTING, Some(mgmt_port)), ("output", OUTPUT, None)] {
        batch.chain(name, hook);
        batch.rule(name, port, not_from);
    }
    talk(&batch.end())
}

/// Whether our table is there; another hand may have flushed the whole rule set.
pub(super) fn is_installed() -> io::Result<bool> {
    let mut message = Batch { bytes: BytesMut::new(), sequence: 0 };
    message.table(GET_TABLE, 0);
    absent_is_false(talk(&message.bytes))
}

/// Whether it was there.
pub(super) fn remove() -> io::Result<bool> {
    let mut batch = Batch::begin();
    batch.table(DELETE_TABLE, 0);
    absent_is_false(talk(&batch.end()))
}

fn absent_is_false(outcome: io::Result<()>) -> io::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        // A kernel without nf_tables has no table either.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Sends and reads every answer; the first error is ours. The kernel has answered before the send returns.
fn talk(messages: &[u8]) -> io::Result<()> {
    let socket = open()?;
    sendto(socket.as_raw_fd(), messages, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut answer = vec![0; 8192];
    loop {
        let length = match recv(socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT) {
            Ok(length) => length,
            Err(nix::errno::Errno::EAGAIN) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        errors(answer.get(..length).unwrap_or_default())?;
    }
}

fn open() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkNetFilter)?)
}

/// The first error in a datagram of messages.
fn errors(mut messages: &[u8]) -> io::Result<()> {
    while let Some(header) = messages.first_chunk::<HEADER>() {
        let [l0, l1, l2, l3, t0, t1, ..] = *header;
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let code = messages.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok()).map(i32::from_ne_bytes);
        if let (ERROR, Some(code @ ..0)) = (u16::from_ne_bytes([t0, t1]), code) {
            return Err(io::Error::from_raw_os_error(-code));
        }
        let Some(rest) = messages.get(length.next_multiple_of(4).max(HEADER)..) else { break };
        messages = rest;
    }
    Ok(())
}

/// Messages of one transaction.
struct Batch {
    bytes: BytesMut,
    sequence: u32,
}

impl Batch {
    fn begin() -> Self {
        let mut batch = Self { bytes: BytesMut::new(), sequence: 0 };
        batch.message(BATCH_BEGIN, 0, 0, SUBSYSTEM, |_| {});
        batch
    }

    fn end(mut self) -> BytesMut {
        self.message(BATCH_END, 0, 0, SUBSYSTEM, |_| {});
        self.bytes
    }

    fn table(&mut self, kind: u16, flags: u16) {
        self.nft(kind, flags, |bytes| text(bytes, 1, NFT_TABLE));
    }

    fn chain(&mut self, name: &str, hook: u32) {
        self.nft(NEW_CHAIN, CREATE, |bytes| {
            text(bytes, 1, NFT_TABLE);
            text(bytes, 3, name);
            nest(bytes, 4, |bytes| {
                number(bytes, 1, hook);
                attribute(bytes, 2, &PRIORITY_RAW.to_be_bytes());
            });
            text(bytes, 7, "filter");
        });
    }

    /// `[iifname != NAME] udp dport PORT notrack`
    fn rule(&mut self, chain: &str, port: u16, not_from: Option<&str>) {
        self.nft(NEW_RULE, CREATE | APPEND, |bytes| {
            text(bytes, 1, NFT_TABLE);
            text(bytes, 2, chain);
            nest(bytes, 4, |bytes| {
                if let Some(name) = not_from {
                    meta(bytes, META_IIFNAME);
                    let mut padded = [0; INTERFACE_NAME];
                    for (to, from) in padded.iter_mut().zip(name.bytes()) {
                        *to = from;
                    }
                    compare(bytes, NOT_EQUAL, &padded);
                }
                meta(bytes, META_L4PROTO);
                compare(bytes, EQUAL, &[UDP]);
                expression(bytes, "payload", |bytes| {
                    number(bytes, 1, REGISTER);
                    number(bytes, 2, TRANSPORT_HEADER);
                    // The destination port.
                    number(bytes, 3, 2);
                    number(bytes, 4, 2);
                });
                compare(bytes, EQUAL, &port.to_be_bytes());
                expression(bytes, "notrack", |_| {});
            });
        });
    }

    fn nft(&mut self, kind: u16, flags: u16, content: impl FnOnce(&mut BytesMut)) {
        self.message((SUBSYSTEM << 8) | kind, flags | ACK, FAMILY_INET, 0, content);
    }

    fn message(&mut self, kind: u16, flags: u16, family: u8, resource: u16, content: impl FnOnce(&mut BytesMut)) {
        let start = self.bytes.len();
        self.bytes.put_u32_ne(0);
        self.bytes.put_u16_ne(kind);
        self.bytes.put_u16_ne(REQUEST | flags);
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

/// `meta`: loads a property of the packet.
fn meta(bytes: &mut BytesMut, key: u32) {
    expression(bytes, "meta", |bytes| {
        number(bytes, 1, REGISTER);
        number(bytes, 2, key);
    });
}

/// `cmp`: the register equals these bytes, or does not.
fn compare(bytes: &mut BytesMut, operator: u32, value: &[u8]) {
    expression(bytes, "cmp", |bytes| {
        number(bytes, 1, REGISTER);
        number(bytes, 2, operator);
        nest(bytes, 3, |bytes| attribute(bytes, 1, value));
    });
}

fn expression(bytes: &mut BytesMut, name: &str, data: impl FnOnce(&mut BytesMut)) {
    nest(bytes, 1, |bytes| {
        text(bytes, 1, name);
        nest(bytes, 2, data);
    });
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
    wrapped(bytes, kind | NESTED, content);
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
        let mut batch = Batch::begin();
        batch.table(NEW_TABLE, CREATE);
        let bytes = batch.end();
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
    fn an_error_is_found_behind_an_acknowledgement() {
        let answer = |code: i32| {
            let mut bytes = BytesMut::new();
            bytes.put_u32_ne(20);
            bytes.put_u16_ne(ERROR);
            bytes.put_u16_ne(0);
            bytes.put_u64_ne(0);
            bytes.put_i32_ne(code);
            bytes
        };
        let mut both = answer(0);
        assert!(errors(&both).is_ok());
        both.extend_from_slice(&answer(-libc::ENOENT));
        assert_eq!(errors(&both).map_err(|error| error.kind()), Err(io::ErrorKind::NotFound));
        assert!(errors(&both[..7]).is_ok(), "cut short");
    }
}
