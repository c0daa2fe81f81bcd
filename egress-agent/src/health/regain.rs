//! How probes and answers speak of addresses that nodes would have back while the API server is away (`crate::fence::regain`).
//!
//! So many fit into one message that its header stays small, the lowest first; the others wait for the API server.

use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use crate::fence::regain::Addresses;

/// Of an answer: these this node would have back.
const WANTED: &str = "egress-agent-wants-back";
/// Of a probe: promise not to take these.
const PROMISE: &str = "egress-agent-promise";
/// Of an answer: these this node has not, and will not take for a while.
const PROMISED: &str = "egress-agent-promised";
/// Of a probe: these all others had promised when the answer to the probe of this number had come in.
const GIVEN: &str = "egress-agent-given-back";

/// Of one node.
const MOST_WANTED: usize = 64;
/// Of all nodes together: five kilobytes with the longest addresses.
pub const MOST: usize = 128;

pub fn wanted(metadata: &MetadataMap) -> Addresses {
    read(text(metadata, WANTED), MOST_WANTED)
}

pub fn set_wanted(metadata: &mut MetadataMap, addresses: &Addresses) {
    write(metadata, WANTED, String::new(), addresses, MOST_WANTED);
}

pub fn to_promise(metadata: &MetadataMap) -> Addresses {
    read(text(metadata, PROMISE), MOST)
}

pub fn set_to_promise(metadata: &mut MetadataMap, addresses: &Addresses) {
    write(metadata, PROMISE, String::new(), addresses, MOST);
}

pub fn promised(metadata: &MetadataMap) -> Addresses {
    read(text(metadata, PROMISED), MOST)
}

pub fn set_promised(metadata: &mut MetadataMap, addresses: &Addresses) {
    write(metadata, PROMISED, String::new(), addresses, MOST);
}

/// With the number of the probe as of whose arrival they are given.
pub fn given(metadata: &MetadataMap) -> Option<(u64, Addresses)> {
    let (number, addresses) = text(metadata, GIVEN).split_once(' ')?;
    Some((number.parse().ok()?, read(addresses, MOST_WANTED)))
}

pub fn set_given(metadata: &mut MetadataMap, number: u64, addresses: &Addresses) {
    write(metadata, GIVEN, format!("{number} "), addresses, MOST_WANTED);
}

fn text<'a>(metadata: &'a MetadataMap, key: &'static str) -> &'a str {
    metadata.get(key).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// What cannot be read is nothing: nobody has it back by that, and nothing is promised.
fn read(text: &str, most: usize) -> Addresses {
    text.split(' ').filter_map(|word| word.parse().ok()).take(most).collect()
}

fn write(metadata: &mut MetadataMap, key: &'static str, before: String, addresses: &Addresses, most: usize) {
    if addresses.is_empty() {
        return;
    }
    let words: Vec<String> = addresses.iter().take(most).map(ToString::to_string).collect();
    // Digits, letters, dots, colons and spaces are ASCII.
    if let Ok(value) = AsciiMetadataValue::try_from(before + &words.join(" ")) {
        metadata.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn what_is_written_is_read_and_nonsense_is_nothing() {
        let all: Addresses = (0..=255).map(|i| IpAddr::from([10, 0, 0, i])).collect();
        let mut metadata = MetadataMap::new();
        set_wanted(&mut metadata, &Addresses::new());
        assert!(metadata.is_empty() && wanted(&metadata).is_empty() && given(&metadata).is_none());
        set_wanted(&mut metadata, &all);
        set_to_promise(&mut metadata, &all);
        set_promised(&mut metadata, &all);
        set_given(&mut metadata, 7, &all);
        let lowest = |most| all.iter().take(most).copied().collect::<Addresses>();
        assert_eq!((wanted(&metadata), to_promise(&metadata)), (lowest(MOST_WANTED), lowest(MOST)));
        assert_eq!((promised(&metadata), given(&metadata)), (lowest(MOST), Some((7, lowest(MOST_WANTED)))));
        // Not only who reads: what is sent is as short.
        let words = |key| text(&metadata, key).split(' ').count();
        assert_eq!([WANTED, PROMISE, PROMISED].map(words), [MOST_WANTED, MOST, MOST]);
        for nonsense in ["", "7", "x 10.0.0.1", "-7 10.0.0.1", "10.0.0.1"] {
            metadata.insert(GIVEN, nonsense.parse().expect("ASCII"));
            assert_eq!(given(&metadata), None, "{nonsense:?}");
        }
        metadata.insert(PROMISED, "10.0.0.1, x 10.0.0.2 10.0.0".parse().expect("ASCII"));
        assert_eq!(promised(&metadata), Addresses::from([[10, 0, 0, 2].into()]));
    }
}
