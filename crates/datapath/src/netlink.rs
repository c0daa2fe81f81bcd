//! Netlink requests with complete answers.
//!
//! Async code uses the handle of rtnetlink, and [`dump`] for lists. Code on blocking threads, where the programs are attached,
//! removed and listed, makes each [`request`] on its own blocking socket. Its answer is a list of undecoded messages: a dump also has foreign objects, and one that the library cannot decode must not
//! hide the others. Each caller decodes what it needs.

use std::io;
use std::time::Duration;

use futures::{TryStream, TryStreamExt};
use rtnetlink::packet_core::{
    ErrorBuffer, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_ALIGNTO, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use rtnetlink::sys::{Socket, SocketAddr};

use crate::error::netlink_io;

pub use rtnetlink::sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};

/// Attempts at a dump that concurrent changes interrupt.
const ATTEMPTS: u32 = 10;

/// How often, and after which pause, a dump is begun again while the handle's socket is busy with another one.
const BEGINS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// All objects that the request lists. Tasks share a handle, and the kernel refuses a dump (`EBUSY`) while the socket has another
/// one to read (`netlink_dump_start`), so it is begun again.
pub async fn dump<S>(begin: impl Fn() -> S) -> io::Result<Vec<S::Ok>>
where
    S: TryStream<Error = rtnetlink::Error>,
{
    for _ in 1..BEGINS {
        match begin().try_collect().await.map_err(netlink_io) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => tokio::time::sleep(PAUSE).await,
            outcome => return outcome,
        }
    }
    begin().try_collect().await.map_err(netlink_io)
}

/// Sends the message and returns the content of each message of the answer: those of a dump, or none. While the kernel lists
/// objects that change, entries may be missing or duplicate; the kernel flags such an answer, and the request is repeated.
pub fn request<M: NetlinkSerializable>(protocol: isize, flags: u16, message: M) -> io::Result<Vec<Vec<u8>>> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    // One request on a socket of its own needs no sequence number.
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    message.finalize();
    let mut request = vec![0; message.buffer_len()];
    message.serialize(&mut request);
    let mut answer = ask(protocol, &request);
    for _ in 1..ATTEMPTS {
        match &answer {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => answer = ask(protocol, &request),
            _ => break,
        }
    }
    answer
}

/// `Interrupted` if the answer may be incomplete.
fn ask(protocol: isize, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let socket = Socket::new(protocol)?;
    socket.send_to(request, &SocketAddr::new(0, 0), 0)?;
    let mut contents = Vec::new();
    // The kernel fills a datagram of a dump up to the size of the reader's buffer, and up to 32 KiB.
    let mut datagram = Vec::with_capacity(64 << 10);
    loop {
        datagram.clear();
        socket.recv(&mut datagram, 0)?;
        if take(&datagram, &mut contents)? {
            return Ok(contents);
        }
    }
}

/// The contents of the messages of one datagram; whether the answer ends with it.
fn take(datagram: &[u8], contents: &mut Vec<Vec<u8>>) -> io::Result<bool> {
    for message in messages(datagram) {
        let message = message?;
        if message.flags() & NLM_F_DUMP_INTR != 0 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match message.message_type() {
            NLMSG_ERROR => return error(&message).map_or(Ok(true), Err),
            NLMSG_DONE => return Ok(true),
            _ => contents.push(message.payload().to_vec()),
        }
    }
    Ok(false)
}

/// The messages of a datagram, up to the first truncated one.
pub fn messages(mut datagram: &[u8]) -> impl Iterator<Item = io::Result<NetlinkBuffer<&[u8]>>> {
    std::iter::from_fn(move || {
        if datagram.is_empty() {
            return None;
        }
        let message = NetlinkBuffer::new_checked(datagram);
        let length = message.as_ref().map_or(datagram.len(), |message| message.length() as usize);
        datagram = datagram.get(length.next_multiple_of(usize::from(NLMSG_ALIGNTO))..).unwrap_or_default();
        Some(message.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)))
    })
}

/// The error of a message of type `NLMSG_ERROR`; `None` for an acknowledgement.
pub fn error(message: &NetlinkBuffer<&[u8]>) -> Option<io::Error> {
    match ErrorBuffer::new_checked(message.payload()) {
        Ok(content) => content.code().map(|code| io::Error::from_raw_os_error(code.get().saturating_abs())),
        Err(error) => Some(io::Error::new(io::ErrorKind::InvalidData, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: u16, flags: u16, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(16 + content.len()).expect("short");
        let mut bytes =
            [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8], content].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[tokio::test]
    async fn dumps_of_one_handle_wait_for_each_other() {
        let (connection, handle, _) = rtnetlink::new_connection().expect("a connection");
        tokio::spawn(connection);
        let one = || async {
            for _ in 0..100 {
                let links = dump(|| handle.link().get().execute()).await.expect("a list");
                assert!(!links.is_empty(), "lo at least");
            }
        };
        futures::future::join_all([(); 4].map(|()| one())).await;
    }

    #[test]
    fn a_dump_ends_with_done() {
        let mut contents = Vec::new();
        let two = [answer(44, 0, &[1; 20]), answer(44, 0, &[2; 22])].concat();
        assert!(!take(&two, &mut contents).expect("no error"), "more datagrams follow");
        assert!(take(&answer(NLMSG_DONE, 0, &[0; 4]), &mut contents).expect("no error"));
        assert_eq!(contents, [vec![1; 20], vec![2; 22]]);
    }

    #[test]
    fn an_acknowledgement_is_an_error_message_without_an_error() {
        assert!(take(&answer(NLMSG_ERROR, 0, &[0; 20]), &mut Vec::new()).expect("an acknowledgement"));
        let refused = take(&answer(NLMSG_ERROR, 0, &(-libc::EPERM).to_ne_bytes()), &mut Vec::new());
        assert_eq!(refused.map_err(|error| error.raw_os_error()), Err(Some(libc::EPERM)));
    }

    #[test]
    fn an_interrupted_dump_is_an_error() {
        for kind in [44, NLMSG_DONE] {
            let message = answer(kind, NLM_F_DUMP_INTR, &[1; 20]);
            let taken = take(&[answer(44, 0, &[2; 20]), message].concat(), &mut Vec::new());
            assert_eq!(taken.map_err(|error| error.kind()), Err(io::ErrorKind::Interrupted), "{kind}");
        }
    }

    #[test]
    fn a_message_that_is_cut_short_is_an_error() {
        let two = [answer(44, 0, &[1; 20]), answer(44, 0, &[2; 20])].concat();
        for cut in 1..two.len() {
            let taken = take(two.get(..cut).expect("a part"), &mut Vec::new());
            assert_eq!(taken.is_ok(), cut == two.len() / 2, "{cut}");
        }
        for bytes in [[0; 64], [255; 64]] {
            assert!(take(&bytes, &mut Vec::new()).is_err(), "no message has this length");
        }
    }
}
