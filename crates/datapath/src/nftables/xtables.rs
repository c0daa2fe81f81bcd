//! Chains of the host's iptables-legacy filter tables, which nf_tables does not list. Read only.
//!
//! The kernel returns a table as one piece, by two socket options of the family: its size, then its entries, rule after rule
//! (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h, linux/netfilter/x_tables.h). A user-defined chain
//! starts with an entry with the target `ERROR`, whose data is the chain's name. Reading a table creates it, so only tables
//! that the kernel lists are read.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::announce::socket;

/// One family's tables.
struct XtFamily {
    family: AddressFamily,
    /// The existing tables of this thread's network namespace, one per line.
    names: &'static str,
    level: i32,
    /// Offset of the distance to the target in an entry; the distance to the next entry follows. Entries differ in address
    /// length.
    target_offset: usize,
}

const FAMILIES: [XtFamily; 2] = [
    XtFamily {
        family: AddressFamily::Inet,
        names: "/proc/thread-self/net/ip_tables_names",
        level: libc::IPPROTO_IP,
        target_offset: 88,
    },
    XtFamily {
        family: AddressFamily::Inet6,
        names: "/proc/thread-self/net/ip6_tables_names",
        level: libc::IPPROTO_IPV6,
        target_offset: 140,
    },
];

const FILTER: &[u8] = b"filter";
/// `IPT_SO_GET_INFO` and `IPT_SO_GET_ENTRIES`, and the same of `IP6T`.
const GET_INFO: i32 = 64;
const GET_ENTRIES: i32 = 65;
/// Length of a table's name, with which both options begin.
const NAME: usize = 32;
/// `struct ipt_getinfo`: name, hooks, two lists of five, number of entries, size.
const INFO: usize = 84;
const SIZE_IN_INFO: usize = 80;
/// `struct ipt_get_entries` in front of the entries: name, size, padding to their alignment.
const ENTRIES: usize = 40;
/// `struct xt_entry_target`: size, name, revision; then its data.
const TARGET_NAME: std::ops::Range<usize> = 2..31;
const TARGET: usize = 32;
/// `XT_FUNCTION_MAXNAMELEN`.
const CHAIN_NAME: usize = 30;
/// The second request is refused if the table changes in between.
const ATTEMPTS: usize = 3;

/// The first known chain in any filter table.
pub fn find<T>(known: impl Fn(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
    for tables in &FAMILIES {
        if !is_listed(tables.names)? {
            continue;
        }
        let socket = socket(tables.family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        let found = entries(&socket, tables.level)?;
        if let Some(found) = chains(&found, tables.target_offset)?.into_iter().find_map(&known) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// A kernel without such tables has no list of them.
fn is_listed(names: &str) -> io::Result<bool> {
    match fs::read(names) {
        Ok(text) => Ok(text.split(|byte| *byte == b'\n').any(|name| name == FILTER)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn entries(socket: &OwnedFd, level: i32) -> io::Result<Vec<u8>> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let mut info = asking(INFO);
        socket::option(socket, level, GET_INFO, &mut info)?;
        let size = info.get(SIZE_IN_INFO..).and_then(<[u8]>::first_chunk).map_or(0, |size| u32::from_ne_bytes(*size));
        let mut answer = asking(ENTRIES + size as usize);
        answer.get_mut(NAME..NAME + 4).ok_or(io::ErrorKind::InvalidData)?.copy_from_slice(&size.to_ne_bytes());
        match socket::option(socket, level, GET_ENTRIES, &mut answer) {
            Ok(()) => return Ok(answer.split_off(ENTRIES)),
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && attempts < ATTEMPTS => {}
            Err(error) => return Err(error),
        }
    }
}

/// A buffer for the answer, with the table's name.
fn asking(length: usize) -> Vec<u8> {
    let mut value = FILTER.to_vec();
    value.resize(length, 0);
    value
}

/// The names of the chains in these entries.
fn chains(mut entries: &[u8], target_offset: usize) -> io::Result<Vec<&[u8]>> {
    let mut names = Vec::new();
    while !entries.is_empty() {
        let distance = |at: usize| {
            let bytes = entries.get(at..).and_then(<[u8]>::first_chunk).ok_or(io::ErrorKind::InvalidData)?;
            Ok::<_, io::Error>(usize::from(u16::from_ne_bytes(*bytes)))
        };
        let (target, next) = (distance(target_offset)?, distance(target_offset + 2)?);
        let target = entries.get(target..next).ok_or(io::ErrorKind::InvalidData)?;
        if target.get(TARGET_NAME).map(text) == Some(b"ERROR") {
            names.extend(target.get(TARGET..TARGET + CHAIN_NAME).map(text));
        }
        // A zero length would loop forever.
        entries = entries.get(next..).filter(|_| next > 0).ok_or(io::ErrorKind::InvalidData)?;
    }
    Ok(names)
}

/// Up to the first zero.
fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(target_offset: usize, target: &str, data: &str) -> Vec<u8> {
        // Length of an entry before its target: 112 bytes for IPv4, 168 for IPv6.
        let head = if target_offset == 88 { 112 } else { 168 };
        let mut bytes = vec![0xaa; head + TARGET + 32];
        let length = u16::try_from(bytes.len()).expect("short");
        let at = |value: usize| u16::try_from(value).expect("short").to_ne_bytes();
        bytes[target_offset..target_offset + 2].copy_from_slice(&at(head));
        bytes[target_offset + 2..target_offset + 4].copy_from_slice(&length.to_ne_bytes());
        bytes[head..].fill(0);
        bytes[head + 2..head + 2 + target.len()].copy_from_slice(target.as_bytes());
        bytes[head + TARGET..head + TARGET + data.len()].copy_from_slice(data.as_bytes());
        bytes
    }

    #[test]
    fn chains_are_named_where_they_begin() {
        for offset in [88, 140] {
            let table = [
                ("", "cali-INPUT"),
                ("ERROR", "cali-FORWARD"),
                ("LOG", "prefix"),
                ("ERROR", "KUBE"),
                ("ERROR", "ERROR"),
            ]
            .map(|(target, data)| entry(offset, target, data))
            .concat();
            let names = chains(&table, offset).expect("a table");
            assert_eq!(names, [&b"cali-FORWARD"[..], b"KUBE", b"ERROR"]);
            // A truncated table is an error, or has fewer entries.
            let whole = table.len() / 5;
            for cut in 0..table.len() {
                let read = chains(table.get(..cut).expect("a part"), offset);
                assert_eq!(read.is_ok(), cut % whole == 0, "{cut}");
            }
        }
        assert!(chains(&[0; 112], 88).is_err(), "an entry of no length would be met for ever");
        assert!(chains(&[0xff; 112], 88).is_err());
        assert!(chains(&[], 88).expect("an empty table").is_empty());
    }

    #[test]
    fn a_kernel_without_them_has_none() {
        assert!(!is_listed("/proc/nothing/ip_tables_names").expect("no list"));
    }
}
