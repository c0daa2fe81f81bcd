//! Release orders in probes, for agents that the leader reaches and that do not reach the API server.
//!
//! A probe names the open hand-overs from its node as in the ledger, each by address and number; an answer names those for
//! which the address is released. The number in one message is limited, so that its header stays small. The rest follows
//! when these are done, or ends with the node's lease.

use std::net::IpAddr;

use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use egress_core::model::ledger::Acknowledgements;

/// In a probe: addresses to release.
const ORDERS: &str = "egress-agent-let-go";
/// In an answer: released addresses.
const RELEASED: &str = "egress-agent-released";
/// At most three kilobytes with the longest addresses.
const MOST: usize = 48;

pub fn orders(metadata: &MetadataMap) -> Acknowledgements {
    read(metadata, ORDERS)
}

pub fn set_orders(metadata: &mut MetadataMap, orders: &Acknowledgements) {
    write(metadata, ORDERS, orders);
}

pub fn released(metadata: &MetadataMap) -> Acknowledgements {
    read(metadata, RELEASED)
}

pub fn set_released(metadata: &mut MetadataMap, released: &Acknowledgements) {
    write(metadata, RELEASED, released);
}

/// Skips entries that cannot be parsed: the next message repeats them.
fn read(metadata: &MetadataMap, key: &'static str) -> Acknowledgements {
    let text = metadata.get(key).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let entry = |entry: &str| {
        let (address, number) = entry.split_once('=')?;
        Some((address.parse::<IpAddr>().ok()?, number.parse().ok()?))
    };
    text.split(' ').filter_map(entry).take(MOST).collect()
}

fn write(metadata: &mut MetadataMap, key: &'static str, acknowledgements: &Acknowledgements) {
    if acknowledgements.is_empty() {
        return;
    }
    // The oldest first, so that both sides name the same ones.
    let mut oldest: Vec<(&IpAddr, &u64)> = acknowledgements.iter().collect();
    oldest.sort_unstable_by_key(|(address, number)| (**number, **address));
    let entries: Vec<String> =
        oldest.iter().take(MOST).map(|(address, number)| format!("{address}={number}")).collect();
    // Digits, letters, dots, colons and spaces are ASCII.
    if let Ok(value) = AsciiMetadataValue::try_from(entries.join(" ")) {
        metadata.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_a_round_trip_oldest_first_and_invalid_ones_are_skipped() {
        let acknowledgements: Acknowledgements =
            (0..100_u8).map(|i| (IpAddr::from([10, 0, 0, i]), 200 - u64::from(i))).collect();
        let mut metadata = MetadataMap::new();
        assert_eq!((orders(&metadata), released(&metadata)), (Acknowledgements::new(), Acknowledgements::new()));
        set_orders(&mut metadata, &Acknowledgements::new());
        assert!(metadata.is_empty());
        set_orders(&mut metadata, &acknowledgements);
        let read = orders(&metadata);
        assert_eq!((read.len(), read.values().min(), read.values().max()), (MOST, Some(&101), Some(&148)));
        assert!(read.iter().all(|one| acknowledgements.get(one.0) == Some(one.1)) && released(&metadata).is_empty());
        let one = Acknowledgements::from([("fd00:172:18::64".parse().expect("a literal"), 7)]);
        set_released(&mut metadata, &one);
        assert_eq!(released(&metadata), one);
        for invalid in ["", " ", "=", "1", "10.0.0.1", "10.0.0.1=", "10.0.0.1=-1", "x=1", "10.0.0.1=1=2"] {
            metadata.insert(RELEASED, invalid.parse().expect("ASCII"));
            assert_eq!(released(&metadata), Acknowledgements::new(), "{invalid:?}");
        }
    }
}
