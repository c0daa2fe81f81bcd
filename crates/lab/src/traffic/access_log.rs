//! The access log of a lab server: lines in the combined log format, as an Apache httpd writes them, in a file and
//! in memory. The client's source address is what the whole product is about, so it stands first, as ever.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

/// One request; or one connection to the TCP echo, or the first datagram of a source at the UDP echo.
#[derive(Debug, Clone)]
pub struct Entry {
    pub at: SystemTime,
    pub client: SocketAddr,
    /// `GET / HTTP/1.1`, `TCP echo`, `UDP echo`.
    pub request: String,
    pub status: u16,
    pub bytes: u64,
    pub user_agent: String,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, request, status, user_agent, .. } = self;
        let time = clf_time(self.at);
        let bytes = if self.bytes == 0 { "-".to_owned() } else { self.bytes.to_string() };
        write!(f, "{} - - [{time}] \"{request}\" {status} {bytes} \"-\" \"{user_agent}\"", client.ip())
    }
}

pub struct AccessLog {
    state: Mutex<State>,
}

struct State {
    entries: Vec<Entry>,
    file: File,
}

impl AccessLog {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { state: Mutex::new(State { entries: Vec::new(), file }) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, entry: Entry) {
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

    pub fn since(&self, mark: usize) -> Vec<Entry> {
        self.lock().entries.get(mark..).unwrap_or_default().to_vec()
    }
}

const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAY: u64 = 24 * 60 * 60;

/// The time as in `26/Nov/2021:12:53:13 +0000`.
fn clf_time(at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (year, month, day) = date(seconds / DAY);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{day:02}/{month}/{year}:{hour:02}:{minute:02}:{second:02} +0000")
}

/// Year, month and day of a day since 1970.
fn date(mut days: u64) -> (u64, &'static str, u64) {
    let mut year = 1970;
    loop {
        let length = if is_leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in MONTHS.iter().zip(lengths) {
        if days < length {
            return (year, month, days + 1);
        }
        days -= length;
    }
    (year, "Dec", 31)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_in_the_combined_format() {
        let entry = Entry {
            at: UNIX_EPOCH + Duration::from_secs(1_637_931_193),
            client: "172.18.0.100:40000".parse().expect("address"),
            request: "GET / HTTP/1.1".to_owned(),
            status: 200,
            bytes: 14,
            user_agent: "homer".to_owned(),
        };
        let line = "172.18.0.100 - - [26/Nov/2021:12:53:13 +0000] \"GET / HTTP/1.1\" 200 14 \"-\" \"homer\"";
        assert_eq!(entry.to_string(), line);
    }

    #[test]
    fn leap_days_exist() {
        assert_eq!(clf_time(UNIX_EPOCH + Duration::from_secs(1_709_164_800)), "29/Feb/2024:00:00:00 +0000");
    }
}
