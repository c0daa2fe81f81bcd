//! A dropped packet with the names that are known of it, as `egress-agent drops` and `kubectl egress drops` print it.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedPacket {
    /// RFC 3339, in milliseconds.
    pub time: String,
    /// Label of the verdict.
    pub reason: String,
    pub protocol: String,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// `namespace/name`, as are those of destinations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_pod: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination_pod: Option<String>,
    /// As its user wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// Zero if it is unknown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub egress_id: u32,
    pub bytes: u32,
    pub interface: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl DroppedPacket {
    pub fn line(&self) -> String {
        let end = |end: &SocketAddr, pod: &Option<String>| match pod {
            Some(pod) => format!("{end} ({pod})"),
            None => end.to_string(),
        };
        let object = match (&self.object, self.egress_id) {
            (Some(object), _) => format!(", {object}"),
            (None, 0) => String::new(),
            (None, id) => format!(", egress ID {id}"),
        };
        format!(
            "{} {:<18} {} {} -> {}, {} bytes, {}{object}",
            self.time,
            self.reason,
            self.protocol,
            end(&self.source, &self.source_pod),
            end(&self.destination, &self.destination_pod),
            self.bytes,
            self.interface,
        )
    }
}
