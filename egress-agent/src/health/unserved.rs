//! Assigned addresses that a node does not serve, in its answers to probes: `172.18.0.100=in-use/02:00:00:00:00:09`,
//! separated by spaces. The number in one answer is limited, so that its header stays small; the rest follows later.

use std::net::IpAddr;

use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use egress_core::model::node::{Unserved, UnservedAddresses};

/// In an answer.
const UNSERVED: &str = "egress-agent-unserved";
/// At most four kilobytes with the longest addresses.
const MOST: usize = 32;
/// Longest link address that is kept.
const MOST_OF_MAC: usize = 32;

/// Skips entries that cannot be parsed: the next answer repeats them.
pub fn read(metadata: &MetadataMap) -> UnservedAddresses {
    let text = metadata.get(UNSERVED).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let entry = |entry: &str| {
        let (address, why) = entry.split_once('=')?;
        let (code, of) = why.split_once('/').unwrap_or((why, ""));
        let why = match code {
            "in-use" => Unserved::InUse(of.chars().take(MOST_OF_MAC).collect()),
            "held-by-node" => Unserved::HeldByNode(of.parse().ok()?),
            "reserved" => Unserved::Reserved,
            "refused" => Unserved::Refused,
            _ => return None,
        };
        Some((address.parse::<IpAddr>().ok()?, why))
    };
    text.split(' ').filter_map(entry).take(MOST).collect()
}

pub fn write(metadata: &mut MetadataMap, unserved: &UnservedAddresses) {
    if unserved.is_empty() {
        return;
    }
    let entry = |(address, why): (&IpAddr, &Unserved)| match why {
        Unserved::InUse(mac) => Some(format!("{address}=in-use/{mac}")),
        Unserved::HeldByNode(node) => Some(format!("{address}=held-by-node/{node}")),
        Unserved::Reserved => Some(format!("{address}=reserved")),
        Unserved::Refused => Some(format!("{address}=refused")),
        // The node's EgressNode object says it.
        Unserved::Interface { .. } => None,
    };
    let entries: Vec<String> = unserved.iter().filter_map(entry).take(MOST).collect();
    // Digits, letters, dots, colons and spaces are ASCII.
    if let Ok(value) = AsciiMetadataValue::try_from(entries.join(" ")) {
        metadata.insert(UNSERVED, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("a literal")
    }

    #[test]
    fn values_survive_a_round_trip_and_invalid_ones_are_skipped() {
        let mut metadata = MetadataMap::new();
        write(&mut metadata, &UnservedAddresses::new());
        assert!(metadata.is_empty() && read(&metadata).is_empty());
        let all = UnservedAddresses::from([
            (ip("172.18.0.100"), Unserved::InUse("02:00:00:00:00:09".into())),
            (ip("172.18.0.101"), Unserved::HeldByNode(ip("fd00::3"))),
            (ip("fd00:172:18::100"), Unserved::Reserved),
            (ip("fd00:172:18::101"), Unserved::Refused),
        ]);
        write(&mut metadata, &all);
        assert_eq!(read(&metadata), all);
        for invalid in ["", " ", "=", "1=refused", "10.0.0.1", "10.0.0.1=", "10.0.0.1=gone", "10.0.0.1=held-by-node/x"]
        {
            metadata.insert(UNSERVED, invalid.parse().expect("ASCII"));
            assert_eq!(read(&metadata), UnservedAddresses::new(), "{invalid:?}");
        }
        let many = (0..100_u8).map(|last| (IpAddr::from([10, 0, 0, last]), Unserved::Refused)).collect();
        write(&mut metadata, &many);
        assert_eq!(read(&metadata).len(), MOST);
    }
}
