//! `egress-agent connect`: one TCP connection, and what came of it as JSON. `kubectl egress check` runs it in pods that it starts
//! with the agents' image, which has no other program.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::cmd::CliError;

/// Longest part of an answer that is read (bytes).
const ANSWER: u64 = 64 << 10;

#[derive(Args, Debug)]
pub(super) struct ConnectArgs {
    /// Destination; for IPv6 [ADDRESS]:PORT
    #[arg(value_name = "ADDRESS:PORT", env = "EGRESS_AGENT_CONNECT_TO")]
    to: SocketAddr,
    /// Send an HTTP request for /, and print the answer's body
    #[arg(long, env = "EGRESS_AGENT_CONNECT_HTTP")]
    http: bool,
    /// Seconds to wait for the connection, and for each part of the answer (1 to 600)
    #[arg(
        long,
        env = "EGRESS_AGENT_CONNECT_TIMEOUT",
        value_name = "SECONDS",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=600)
    )]
    timeout: u64,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct ConnectOutcome {
    connected: bool,
    /// This end, before any translation.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<SocketAddr>,
    /// The body of the HTTP answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(super) fn run(args: &ConnectArgs) -> Result<(), CliError> {
    let connected = connect(args);
    println!("{}", serde_json::to_string(&connected).map_err(io::Error::other)?);
    connected.error.map_or(Ok(()), |why| Err(CliError::NotConnected { to: args.to, why }))
}

fn connect(args: &ConnectArgs) -> ConnectOutcome {
    let limit = Duration::from_secs(args.timeout);
    let stream = match TcpStream::connect_timeout(&args.to, limit) {
        Ok(stream) => stream,
        Err(error) => return ConnectOutcome { error: Some(error.to_string()), ..ConnectOutcome::default() },
    };
    let connected = ConnectOutcome { connected: true, from: stream.local_addr().ok(), ..ConnectOutcome::default() };
    if !args.http {
        return connected;
    }
    match body(stream, args.to, limit) {
        Ok(body) => ConnectOutcome { body: Some(body), ..connected },
        Err(error) => ConnectOutcome { error: Some(format!("no HTTP answer: {error}")), ..connected },
    }
}

/// HTTP/1.0, so that the body comes as it is. The request is one write: a server that answers and closes after the first of
/// several would reset the connection with the rest unread, and the answer would be lost with it.
fn body(mut stream: TcpStream, to: SocketAddr, limit: Duration) -> io::Result<String> {
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    stream.write_all(format!("GET / HTTP/1.0\r\nHost: {to}\r\nAccept: text/plain\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    stream.take(ANSWER).read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let is_http = answer.starts_with("HTTP/");
    let (_, body) =
        answer.split_once("\r\n\r\n").filter(|_| is_http).ok_or_else(|| io::Error::other("it is not HTTP"))?;
    Ok(body.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn arguments(to: SocketAddr, http: bool) -> ConnectArgs {
        ConnectArgs { to, http, timeout: 5 }
    }

    /// Answers one connection with this text, after the request if one is expected.
    fn server(answer: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut request = [0; 1024];
            let _length = stream.read(&mut request).expect("a request");
            stream.write_all(answer.as_bytes()).expect("an answer");
        });
        address
    }

    #[test]
    fn the_body_is_what_the_server_says() {
        let connected = connect(&arguments(server("HTTP/1.0 200 OK\r\nA: b\r\n\r\n192.0.2.7\n"), true));
        assert_eq!((connected.body.as_deref(), connected.error), (Some("192.0.2.7"), None));
        assert!(connected.from.is_some_and(|from| from.ip().is_loopback()));
    }

    #[test]
    fn a_server_of_another_protocol_is_connected_all_the_same() {
        let connected = connect(&arguments(server("SSH-2.0-x\r\n\r\n"), true));
        assert!(connected.connected && connected.body.is_none());
        assert_eq!(connected.error.as_deref(), Some("no HTTP answer: it is not HTTP"));
    }

    #[test]
    fn a_refused_connection_has_the_reason() {
        // Bound, and closed again.
        let closed = TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr()).expect("a port");
        let connected = connect(&arguments(closed, false));
        assert!(!connected.connected && connected.error.is_some_and(|error| error.contains("refused")));
    }
}
