//! What calls in the lab: HTTP requests and pings from any namespace.
//!
//! Two layers of outcome: the outer `Result` is the lab's (no such namespace, no such program), the inner one is the
//! network's, and its [`std::io::ErrorKind`] is what tests ask about: refused, reset, timed out.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::topology::netns::Netns;

/// How long a connection, and each read from it, may take.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// An HTTP answer, and the address that the connection had on this side.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub body: Vec<u8>,
    pub local: SocketAddr,
}

impl Reply {
    /// The body of a lab server's usual answer: the client's address as seen there.
    pub fn seen_as(&self) -> Result<IpAddr> {
        ensure!(self.status == 200, "the server answered {}", self.status);
        let text = String::from_utf8_lossy(&self.body);
        text.trim().parse().with_context(|| format!("the server did not answer with an address but {text:?}"))
    }
}

/// One GET on its own connection; `caller` is what the access log shows as user agent.
pub fn get(from: &Netns, to: SocketAddr, path: &str, caller: &str) -> Result<io::Result<Reply>> {
    get_within(from, to, path, caller, PATIENCE)
}

/// The same with another patience than usual.
pub fn get_within(
    from: &Netns,
    to: SocketAddr,
    path: &str,
    caller: &str,
    patience: Duration,
) -> Result<io::Result<Reply>> {
    from.run(|| Ok(request(to, &head("GET", to, path, caller, 0), &[], patience)))
}

/// One POST on its own connection; the lab's server answers with the number of bytes that arrived.
pub fn post(from: &Netns, to: SocketAddr, body: &[u8], caller: &str) -> Result<io::Result<Reply>> {
    from.run(|| Ok(request(to, &head("POST", to, "/", caller, body.len()), body, PATIENCE)))
}

fn head(method: &str, to: SocketAddr, path: &str, caller: &str, length: usize) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: {caller}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
    )
}

/// Sends a request from the namespace that this thread is in.
fn request(to: SocketAddr, head: &str, body: &[u8], patience: Duration) -> io::Result<Reply> {
    let mut stream = TcpStream::connect_timeout(&to, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let local = stream.local_addr()?;
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    parse(&answer, local).ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the answer is not whole"))
}

/// Takes an answer apart; `None` when it is not HTTP or shorter than it says.
fn parse(answer: &[u8], local: SocketAddr) -> Option<Reply> {
    const END: &[u8] = b"\r\n\r\n";
    let end = answer.windows(END.len()).position(|window| window == END)?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    let body = answer[end + END.len()..].to_vec();
    let whole = length.is_none_or(|length| length == body.len());
    whole.then_some(Reply { status, body, local })
}

/// How to ping; the default is one plain echo.
#[derive(Debug, Clone, Copy)]
pub struct Ping {
    pub count: u32,
    /// Bytes after the ICMP header.
    pub size: u32,
    pub ttl: Option<u8>,
    /// Forbid fragmentation, also by the sender.
    pub whole: bool,
}

impl Default for Ping {
    fn default() -> Self {
        Self { count: 1, size: 56, ttl: None, whole: false }
    }
}

/// What `ping` saw.
#[derive(Debug, Clone)]
pub struct Pong {
    pub received: u32,
    /// Everything it printed, with the ICMP errors that it got.
    pub text: String,
}

/// Pings with the `ping` program, which also shows ICMP errors.
pub fn ping(from: &Netns, to: IpAddr, how: Ping) -> Result<Pong> {
    let mut args = vec!["-n".to_owned(), "-W1".to_owned(), "-i0.2".to_owned()];
    args.extend([format!("-c{}", how.count), format!("-s{}", how.size)]);
    args.extend(how.ttl.map(|ttl| format!("-t{ttl}")));
    if how.whole {
        args.push("-Mdo".to_owned());
    }
    args.push(to.to_string());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = from.output("ping", &args)?;
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    let received = received(&text).with_context(|| format!("cannot read what ping said: {text}"))?;
    Ok(Pong { received, text })
}

/// The count in `3 packets transmitted, 2 received, ...`.
fn received(text: &str) -> Option<u32> {
    let line = text.lines().find(|line| line.contains("packets transmitted"))?;
    line.split(", ").find_map(|part| part.strip_suffix(" received"))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);

    #[test]
    fn an_answer_is_taken_apart() {
        let reply = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n172.18.0.2\n", LOCAL).expect("an answer");
        assert_eq!(reply.status, 200);
        assert_eq!(reply.seen_as().expect("an address").to_string(), "172.18.0.2");
    }

    #[test]
    fn half_an_answer_is_none() {
        assert!(parse(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n172", LOCAL).is_none());
        assert!(parse(b"HTTP/1.1 200", LOCAL).is_none());
    }

    #[test]
    fn the_count_is_read_from_pings_summary() {
        let text = "--- 10.0.0.1 ping statistics ---\n3 packets transmitted, 2 received, 33% packet loss, time 40ms\n";
        assert_eq!(received(text), Some(2));
    }
}
