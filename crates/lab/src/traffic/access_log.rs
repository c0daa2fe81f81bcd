//! The access log of a lab server: lines in the combined log format, as an Apache httpd writes them, in a file and
//! in memory. The client's source address is what the whole product is about, so it stands first, as ever.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use jiff::Timestamp;

/// One request; or one connection to the TCP echo, or the first datagram of a source at the UDP echo.
#[derive(Debug, Clone)]
pub struct AccessLogEntry {
    pub at: Timestamp,
    pub client: SocketAddr,
    /// `GET / HTTP/1.1`, `TCP echo`, `UDP echo`.
    pub request: String,
    pub status: u16,
    pub bytes: u64,
    pub user_agent: String,
}

impl fmt::Display for AccessLogEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, request, status, user_agent, .. } = self;
        let time = self.at.strftime("%d/%b/%Y:%H:%M:%S +0000");
        let bytes = if self.bytes == 0 { "-".to_owned() } else { self.bytes.to_string() };
        write!(f, "{} - - [{time}] \"{request}\" {status} {bytes} \"-\" \"{user_agent}\"", client.ip())
    }
}

pub struct AccessLog {
    state: Mutex<AccessLogState>,
}

struct AccessLogState {
    entries: Vec<AccessLogEntry>,
    file: File,
}

impl AccessLog {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { state: Mutex::new(AccessLogState { entries: Vec::new(), file }) })
    }

    fn lock(&self) -> MutexGuard<'_, AccessLogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, entry: AccessLogEntry) {
        let mut state = self.lock();
        if let Err(error) = writeln!(state.file, "{entry}") {
            eprintln!("lab: cannot write the access log: {error}");
        }
        state.entries.push(entry);
    }

    /// The end of the log now: what comes later is [`AccessLog::since`] it.
    pub fn mark(&self) -> usize {
        self.lock().entries.len()
    }

    pub fn since(&self, mark: usize) -> Vec<AccessLogEntry> {
        self.lock().entries.get(mark..).unwrap_or_default().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_in_the_combined_format() {
        let entry = AccessLogEntry {
            at: Timestamp::from_second(1_637_931_193).expect("a time"),
            client: "172.18.0.100:40000".parse().expect("address"),
            request: "GET / HTTP/1.1".to_owned(),
            status: 200,
            bytes: 14,
            user_agent: "homer".to_owned(),
        };
        let line = "172.18.0.100 - - [26/Nov/2021:12:53:13 +0000] \"GET / HTTP/1.1\" 200 14 \"-\" \"homer\"";
        assert_eq!(entry.to_string(), line);
    }
}
