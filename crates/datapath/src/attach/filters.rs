//! Lists and removes filters of clsact queueing disciplines.
//!
//! By rtnetlink (linux/rtnetlink.h, linux/pkt_sched.h, linux/pkt_cls.h) on a blocking socket: programs are attached in one go.
//! Of foreign and unknown filters only the fields of every message are read.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use aya::programs::TcAttachType;
use bytes::{BufMut, BytesMut};
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket};
use rtnetlink::packet_core::NlasIterator;

const HEADER: usize = 16;
/// `struct tcmsg`.
const TC_HEADER: usize = 20;
/// `NLMSG_ERROR`, also an acknowledgement; `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// How often an answer is asked for that was interrupted by a change.
const ATTEMPTS: u32 = 10;

const CLSACT: u32 = 0xffff_fff1;
const CLSACT_HANDLE: u32 = 0xffff_0000;
const INGRESS: u32 = 0xffff_fff2;
const EGRESS: u32 = 0xffff_fff3;

const KIND: u16 = 1;
const OPTIONS: u16 = 2;
const BPF_NAME: u16 = 7;
const BPF_TAG: u16 = 10;
const BPF_ID: u16 = 11;

/// A filter on one side of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    pub handle: u32,
    /// Priority and protocol.
    info: u32,
    /// As it was given when a BPF program was attached, and the program's number.
    pub name: String,
    pub program: Option<u32>,
    /// The kernel's hash of its instructions.
    pub tag: Option<u64>,
}

impl Filter {
    pub const fn priority(&self) -> u16 {
        (self.info >> 16) as u16
    }

    /// Whether this is the other, or the entry without a handle that the kernel lists before all filters of its priority.
    pub fn comes_with(&self, other: &Self) -> bool {
        self == other || (self.handle == 0 && self.info == other.info)
    }
}

/// All filters there; none where the device, or its discipline, is away.
pub fn on(ifindex: u32, direction: TcAttachType) -> io::Result<Vec<Filter>> {
    let request = message(libc::RTM_GETTFILTER, libc::NLM_F_DUMP, ifindex, 0, side(direction), 0)?;
    let found = match talk(&request) {
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        other => other?,
    };
    Ok(found.iter().map(|found| filter(found)).collect())
}

/// Devices with a clsact discipline.
pub fn devices() -> io::Result<Vec<u32>> {
    let found = talk(&message(libc::RTM_GETQDISC, libc::NLM_F_DUMP, 0, 0, 0, 0)?)?;
    let is_clsact = |found: &&Vec<u8>| attribute(found, TC_HEADER, KIND).is_some_and(|kind| text(&kind) == "clsact");
    let mut devices: Vec<u32> = found.iter().filter(is_clsact).map(|found| word(found, 4)).collect();
    devices.dedup();
    Ok(devices)
}

/// Whether it was there.
pub fn remove(ifindex: u32, direction: TcAttachType, filter: &Filter) -> io::Result<bool> {
    let request = message(libc::RTM_DELTFILTER, libc::NLM_F_ACK, ifindex, filter.handle, side(direction), filter.info)?;
    absent_is_false(talk(&request))
}

/// Removes the discipline with all that may be on it. Whether it was there.
pub fn remove_clsact(ifindex: u32) -> io::Result<bool> {
    absent_is_false(talk(&message(libc::RTM_DELQDISC, libc::NLM_F_ACK, ifindex, CLSACT_HANDLE, CLSACT, 0)?))
}

const fn side(direction: TcAttachType) -> u32 {
    match direction {
        TcAttachType::Egress => EGRESS,
        TcAttachType::Ingress | TcAttachType::Custom(_) => INGRESS,
    }
}

fn absent_is_false(outcome: io::Result<Vec<Vec<u8>>>) -> io::Result<bool> {
    match outcome {
        Ok(_) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// No such device, discipline or filter.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::EINVAL | libc::EOPNOTSUPP))
}

fn filter(message: &[u8]) -> Filter {
    let options = attribute(message, TC_HEADER, OPTIONS).unwrap_or_default();
    Filter {
        handle: word(message, 8),
        info: word(message, 16),
        name: attribute(&options, 0, BPF_NAME).map(|name| text(&name)).unwrap_or_default(),
        program: attribute(&options, 0, BPF_ID).map(|id| word(&id, 0)),
        tag: attribute(&options, 0, BPF_TAG).and_then(|tag| tag.try_into().ok()).map(u64::from_be_bytes),
    }
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()
}

/// Zero where the message is shorter.
fn word(message: &[u8], at: usize) -> u32 {
    message.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// The first attribute of this kind after a header.
pub fn attribute(message: &[u8], header: usize, kind: u16) -> Option<Vec<u8>> {
    let attributes = NlasIterator::new(message.get(header..)?);
    attributes.filter_map(Result::ok).find(|attribute| attribute.kind() == kind).map(|found| found.value().to_vec())
}

fn message(kind: u16, flags: i32, ifindex: u32, handle: u32, parent: u32, info: u32) -> io::Result<BytesMut> {
    let mut message = BytesMut::with_capacity(HEADER + TC_HEADER);
    message.put_u32_ne(u32::try_from(HEADER + TC_HEADER).map_err(io::Error::other)?);
    message.put_u16_ne(kind);
    message.put_u16_ne(u16::try_from(flags | libc::NLM_F_REQUEST).map_err(io::Error::other)?);
    // One request on a socket of its own: no numbers are needed. Nor is a family.
    for word in [0, 0, 0, ifindex, handle, parent, info] {
        message.put_u32_ne(word);
    }
    Ok(message)
}

/// Sends, and reads all of the answer: the messages of a dump without their headers, or none. What changes while the kernel
/// lists it may be missing or be there twice; the kernel says so, and is asked again.
pub fn talk(request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut last = ask(request);
    for _ in 1..ATTEMPTS {
        match &last {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => last = ask(request),
            _ => break,
        }
    }
    last
}

/// As [`talk`], once; `Interrupted` where the answer may not be whole.
fn ask(request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let socket: OwnedFd =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    sendto(socket.as_raw_fd(), request, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut found = Vec::new();
    // The kernel fills as much of a dump into one datagram as a reader has shown that it takes, up to 32 KiB.
    let mut answer = vec![0; 64 << 10];
    loop {
        let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        if !take(answer.get(..length).unwrap_or_default(), &mut found)? {
            return Ok(found);
        }
    }
}

/// The messages of one datagram; whether there is more to come.
fn take(mut messages: &[u8], found: &mut Vec<Vec<u8>>) -> io::Result<bool> {
    while let Some(header) = messages.first_chunk::<HEADER>() {
        let length = word(header, 0) as usize;
        let [_, _, _, _, t0, t1, f0, f1, ..] = *header;
        if i32::from(u16::from_ne_bytes([f0, f1])) & libc::NLM_F_DUMP_INTR != 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let content = messages.get(HEADER..length).unwrap_or_default();
        match u16::from_ne_bytes([t0, t1]) {
            ERROR => {
                let code = word(content, 0).cast_signed();
                return if code < 0 { Err(io::Error::from_raw_os_error(-code)) } else { Ok(false) };
            }
            DONE => return Ok(false),
            _ => found.push(content.to_vec()),
        }
        messages = messages.get(length.next_multiple_of(4).max(HEADER)..).unwrap_or_default();
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: u16, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER + content.len()).expect("short");
        let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10], content].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn a_dump_ends_where_it_says_so() {
        let mut found = Vec::new();
        let two = [answer(44, &[1; 20]), answer(44, &[2; 22])].concat();
        assert!(take(&two, &mut found).expect("no error"), "there is more to come");
        assert!(!take(&answer(DONE, &[0; 4]), &mut found).expect("no error"));
        assert_eq!(found, [vec![1; 20], vec![2; 22]]);
        assert!(!take(&answer(ERROR, &[0; 20]), &mut found).expect("an acknowledgement"));
        let refused = take(&answer(ERROR, &(-libc::EPERM).to_ne_bytes()), &mut found);
        assert_eq!(refused.map_err(|error| error.raw_os_error()), Err(Some(libc::EPERM)));
        assert!(take(&two[..7], &mut found).expect("cut short"));
    }

    #[test]
    fn a_list_that_was_changed_while_it_was_made_is_no_answer() {
        for kind in [44, DONE] {
            let mut message = answer(kind, &[1; 20]);
            message[6..8].copy_from_slice(
                &u16::try_from(libc::NLM_F_MULTI | libc::NLM_F_DUMP_INTR).expect("16 bits").to_ne_bytes(),
            );
            let taken = take(&[answer(44, &[2; 20]), message].concat(), &mut Vec::new());
            assert_eq!(taken.map_err(|error| error.kind()), Err(io::ErrorKind::Interrupted), "{kind}");
        }
    }

    #[test]
    fn a_filter_that_says_nothing_of_itself_has_no_name() {
        assert_eq!(filter(&[]), Filter { handle: 0, info: 0, name: String::new(), program: None, tag: None });
    }
}
