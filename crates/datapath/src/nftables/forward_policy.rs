//! Does the CNI enforce network policy in the host's FORWARD chain? Redirected packets bypass that chain, so such a policy
//! does not apply to selected pods' traffic to the outside; docs/security.md says so.
//!
//! Recognised by the names of the chains that such CNIs make: as nf_tables lists them, which iptables fills too on a host of
//! today, and in the tables of the older iptables (`iptables-legacy`, see `xtables`).

use std::io;
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::nftables::xtables;

/// Chains by which a CNI enforces policy on what is forwarded, and whose they are.
const CHAINS: [(&str, &str); 4] = [
    ("cali-FORWARD", "Calico"),
    ("filter-cali-FORWARD", "Calico"),
    ("KUBE-ROUTER-FORWARD", "kube-router"),
    ("WEAVE-NPC", "Weave Net"),
];

const HEADER: usize = 16;
/// Family, version, resource.
const GENERIC: usize = 4;
/// `NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN`, and what an answer to it is.
const GET_CHAIN: u16 = 10 << 8 | 4;
const NEW_CHAIN: u16 = 10 << 8 | 3;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// `NFTA_CHAIN_NAME`.
const NAME: u16 = 3;

/// Whose policy in FORWARD the host of this thread has; `None` where none is known.
pub fn policy() -> io::Result<Option<&'static str>> {
    match in_nf_tables()? {
        None => xtables::find(whose),
        found => Ok(found),
    }
}

/// Whose chain has this name.
fn whose(chain: &[u8]) -> Option<&'static str> {
    CHAINS.into_iter().find(|(name, _)| chain == name.as_bytes()).map(|(_, whose)| whose)
}

fn in_nf_tables() -> io::Result<Option<&'static str>> {
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkNetFilter)?;
    // The kernel answers at once; the timeout is a safeguard.
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(2))?;
    let mut question = Vec::with_capacity(HEADER + GENERIC);
    question.extend(20_u32.to_ne_bytes());
    question.extend(GET_CHAIN.to_ne_bytes());
    question.extend(DUMP.to_ne_bytes());
    question.extend([0; 8 + GENERIC]);
    sendto(socket.as_raw_fd(), &question, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut found = None;
    let mut answer = vec![0; 65_536];
    loop {
        let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        let Read { whose, done } = read(answer.get(..length).unwrap_or_default())?;
        found = found.or(whose);
        if done {
            return Ok(found);
        }
    }
}

/// What a datagram of messages says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Read {
    whose: Option<&'static str>,
    done: bool,
}

fn read(mut messages: &[u8]) -> io::Result<Read> {
    let mut read = Read::default();
    while let Some([l0, l1, l2, l3, t0, t1, ..]) = messages.first_chunk::<HEADER>() {
        let length = u32::from_ne_bytes([*l0, *l1, *l2, *l3]) as usize;
        let body = messages.get(HEADER..length).ok_or(io::ErrorKind::InvalidData)?;
        match u16::from_ne_bytes([*t0, *t1]) {
            DONE => read.done = true,
            ERROR => {
                let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                // A kernel without nf_tables has no chains.
                if code == -libc::EOPNOTSUPP || code == -libc::EINVAL || code == 0 {
                    read.done = true;
                } else {
                    return Err(io::Error::from_raw_os_error(-code));
                }
            }
            NEW_CHAIN => {
                let name = name(body.get(GENERIC..).unwrap_or_default());
                read.whose = read.whose.or(name.and_then(whose));
            }
            _ => {}
        }
        messages = messages.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(read)
}

/// The chain's name among its attributes.
fn name(mut attributes: &[u8]) -> Option<&[u8]> {
    while let Some([l0, l1, t0, t1]) = attributes.first_chunk() {
        let length = usize::from(u16::from_ne_bytes([*l0, *l1]));
        let value = attributes.get(4..length)?;
        if u16::from_ne_bytes([*t0, *t1]) == NAME {
            return value.split(|byte| *byte == 0).next();
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER + body.len()).expect("short");
        let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10], body].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn chain(name: &str) -> Vec<u8> {
        let attribute = |kind: u16, value: &[u8]| {
            let length = u16::try_from(4 + value.len()).expect("short");
            let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let name = [name.as_bytes(), &[0]].concat();
        message(NEW_CHAIN, &[&[2, 0, 0, 0][..], &attribute(1, b"filter\0"), &attribute(NAME, &name)].concat())
    }

    #[test]
    fn a_chain_is_known_by_its_whole_name() {
        let others = [chain("FORWARD"), chain("cali-FORWARD-not"), chain("KUBE-FORWARD")].concat();
        assert_eq!(read(&others).expect("chains"), Read { whose: None, done: false });
        let calico = [others, chain("cali-FORWARD"), message(DONE, &[0; 4])].concat();
        assert_eq!(read(&calico).expect("chains"), Read { whose: Some("Calico"), done: true });
        assert_eq!(
            read(&message(ERROR, &(-libc::EOPNOTSUPP).to_ne_bytes())).expect("none"),
            Read { whose: None, done: true }
        );
        assert!(read(&message(ERROR, &(-libc::EPERM).to_ne_bytes())).is_err());
        // Cut short, wherever.
        for cut in 0..calico.len() {
            let _any = read(calico.get(..cut).expect("a part"));
        }
        assert!(read(&[255; 64]).is_err());
        assert!(read(&[0; 64]).is_err(), "a message shorter than its header would be met for ever");
    }
}
