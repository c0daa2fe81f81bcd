//! Datagrams of a chosen size, per direction: a pod sends a datagram of so many bytes and asks in it for an answer of so
//! many bytes. Whether the sender's kernel sets DF is a setting of its namespace (RFC 1191); IPv6 knows nothing else.

use crate::prelude::*;
use egress_lab::background::Background;
use std::io;
use std::net::{Ipv6Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether new sockets of a namespace forbid routers to cut what they send over IPv4.
pub(super) fn forbid_fragments(netns: &Netns, forbid: bool) -> Result<()> {
    let value = if forbid { "0" } else { "1" };
    netns.sysctl(&[("ipv4/ip_no_pmtu_disc".to_owned(), value.to_owned())])
}

/// Answers datagrams until it is dropped: the first four bytes of a question are the length of the answer.
pub(super) struct Answers(#[expect(dead_code, reason = "serves until it is dropped")] Background<()>);

impl Answers {
    pub(super) fn start(netns: &Netns, at: SocketAddr) -> Result<Self> {
        let socket = netns.run(|| {
            let socket = UdpSocket::bind(at)?;
            socket.set_read_timeout(Some(Duration::from_millis(50)))?;
            Ok(socket)
        })?;
        let serve = move |stop: &AtomicBool| {
            let mut buffer = vec![0; 65536];
            while !stop.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
                let Some(wanted) = buffer[..length].first_chunk() else { continue };
                let wanted = usize::try_from(u32::from_be_bytes(*wanted))?;
                // What the kernel refuses for its length is lost, as on any server that does not look.
                if let Err(error) = socket.send_to(&vec![b'.'; wanted], from) {
                    tracing::debug!(%error, "an answer was not sent");
                }
            }
            Ok(())
        };
        Background::start("answers", serve).map(Self)
    }
}

/// What became of one question after another on one socket.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Exchange {
    /// Which try was answered first, from 1.
    pub(super) answered_at: Option<usize>,
    /// How often the socket reported that a datagram is too long for the path.
    pub(super) reported: usize,
    pub(super) errors: Vec<io::ErrorKind>,
}

const TRIES: usize = 4;
const WAIT: Duration = Duration::from_millis(400);

/// Asks with `size` bytes for `answer` bytes, a few times on one socket.
pub(super) fn ask(from: &Netns, to: SocketAddr, size: usize, answer: u32) -> Result<Exchange> {
    from.run(|| {
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(WAIT))?;
        let mut question = vec![b'?'; size];
        question[..4].copy_from_slice(&answer.to_be_bytes());
        let mut talk = Exchange::default();
        let mut buffer = vec![0; 65536];
        for number in 1..=TRIES {
            match socket.send(&question) {
                Ok(_) => {}
                Err(error) if is_too_long(&error) => talk.reported += 1,
                Err(error) => talk.errors.push(error.kind()),
            }
            match socket.recv(&mut buffer) {
                Ok(length) if length == usize::try_from(answer)? => {
                    talk.answered_at = Some(number);
                    break;
                }
                Ok(_) => talk.errors.push(io::ErrorKind::InvalidData),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if is_too_long(&error) => talk.reported += 1,
                Err(error) => talk.errors.push(error.kind()),
            }
        }
        Ok(talk)
    })
}

fn is_too_long(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMSGSIZE)
}

/// What the kernel knows of the path to an address: `... cache expires 598sec mtu 1300`.
pub(super) fn path_mtu(from: &Netns, to: IpAddr) -> Result<Option<u32>> {
    let text = from.exec("ip", &["route", "get", &to.to_string()])?;
    let mut words = text.split_whitespace().skip_while(|word| *word != "mtu");
    Ok(words.nth(1).and_then(|mtu| mtu.parse().ok()))
}

/// Lets a namespace forget what it has learned of paths.
pub(super) fn forget_paths(netns: &Netns) -> Result<()> {
    netns.exec("ip", &["route", "flush", "cache"])?;
    netns.exec("ip", &["-6", "route", "flush", "cache"]).map(drop)
}
