//! Letting go of addresses by the way of probes, for agents that the leader hears and that cannot hear the API server.
//!
//! A probe names the open hand-overs from its node as they stand in the ledger, each by address and number; an answer names
//! those that the agent has obeyed. One message carries at most this many, so that its header stays small. The others follow
//! when these are done, or end with the node's lease.

use std::net::IpAddr;

use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use egress_core::model::ledger::Acknowledgements;

/// Of a probe: let go of these.
const LET_GO: &str = "egress-agent-let-go";
/// Of an answer: these are not held any more.
const RELEASED: &str = "egress-agent-released";
/// At most three kilobytes with the longest addresses.
const MOST: usize = 48;

pub fn orders(metadata: &MetadataMap) -> Acknowledgements {
    read(metadata, LET_GO)
}

pub fn set_orders(metadata: &mut MetadataMap, orders: &Acknowledgements) {
    write(metadata, LET_GO, orders);
}

pub fn released(metadata: &MetadataMap) -> Acknowledgements {
    read(metadata, RELEASED)
}

pub fn set_released(metadata: &mut MetadataMap, released: &Acknowledgements) {
    write(metadata, RELEASED, released);
}

/// What cannot be read is nothing: whoever meant something by it says it again.
fn read(metadata: &MetadataMap, key: &'static str) -> Acknowledgements {
    let text = metadata.get(key).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let word = |word: &str| {
        let (address, number) = word.split_once('=')?;
        Some((address.parse::<IpAddr>().ok()?, number.parse().ok()?))
    };
    text.split(' ').filter_map(word).take(MOST).collect()
}

fn write(metadata: &mut MetadataMap, key: &'static str, words: &Acknowledgements) {
    if words.is_empty() {
        return;
    }
    // The oldest first: both sides then speak of the same ones.
    let mut words: Vec<(&IpAddr, &u64)> = words.iter().collect();
    words.sort_unstable_by_key(|(address, number)| (**number, **address));
    let words: Vec<String> = words.iter().take(MOST).map(|(address, number)| format!("{address}={number}")).collect();
    // Digits, letters, dots, colons and spaces are ASCII.
    if let Ok(value) = AsciiMetadataValue::try_from(words.join(" ")) {
        metadata.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_the_oldest_first_and_nonsense_is_nothing() {
        let words: Acknowledgements = (0..100_u8).map(|i| (IpAddr::from([10, 0, 0, i]), 200 - u64::from(i))).collect();
        let mut metadata = MetadataMap::new();
        assert_eq!((orders(&metadata), released(&metadata)), (Acknowledgements::new(), Acknowledgements::new()));
        set_orders(&mut metadata, &Acknowledgements::new());
        assert!(metadata.is_empty());
        set_orders(&mut metadata, &words);
        let read = orders(&metadata);
        assert_eq!((read.len(), read.values().min(), read.values().max()), (MOST, Some(&101), Some(&148)));
        assert!(read.iter().all(|word| words.get(word.0) == Some(word.1)) && released(&metadata).is_empty());
        let one = Acknowledgements::from([("fd00:172:18::64".parse().expect("a literal"), 7)]);
        set_released(&mut metadata, &one);
        assert_eq!(released(&metadata), one);
        for nonsense in ["", " ", "=", "1", "10.0.0.1", "10.0.0.1=", "10.0.0.1=-1", "x=1", "10.0.0.1=1=2"] {
            metadata.insert(RELEASED, nonsense.parse().expect("ASCII"));
            assert_eq!(released(&metadata), Acknowledgements::new(), "{nonsense:?}");
        }
    }
}
