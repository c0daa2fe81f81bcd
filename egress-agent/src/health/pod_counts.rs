//! How many pods of the node each object serves: `17=3 20=1`, egress IDs and numbers. It is in the answer to a signed request
//! that is not a probe; [`crate::controller::pod_counts`] sends these.

use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use egress_core::model::state::{EgressId, SelectedPods};

/// In an answer.
const SELECTED: &str = "egress-agent-selected";
/// At most six kilobytes. A node has a few hundred pods; of more objects, those with the lowest IDs are sent.
const MOST: usize = 512;

/// `None` from an agent of an older version.
pub fn read(metadata: &MetadataMap) -> Option<SelectedPods> {
    let text = metadata.get(SELECTED)?.to_str().ok()?;
    let entry = |entry: &str| {
        let (id, count) = entry.split_once('=')?;
        Some((EgressId(id.parse().ok()?), count.parse().ok()?))
    };
    Some(text.split(' ').filter_map(entry).take(MOST).collect())
}

pub fn write(metadata: &mut MetadataMap, selected: &SelectedPods) {
    let entries: Vec<String> = selected.iter().take(MOST).map(|(id, count)| format!("{}={count}", id.0)).collect();
    // Digits, signs and spaces are ASCII.
    if let Ok(value) = AsciiMetadataValue::try_from(entries.join(" ")) {
        metadata.insert(SELECTED, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_a_round_trip_and_invalid_ones_are_skipped() {
        let mut metadata = MetadataMap::new();
        assert_eq!(read(&metadata), None);
        for counts in [SelectedPods::new(), SelectedPods::from([(EgressId(17), 3), (EgressId(16_777_215), 250)])] {
            write(&mut metadata, &counts);
            assert_eq!(read(&metadata), Some(counts));
        }
        for invalid in ["=", "1", "1=", "a=1", "1=-1", "1=99999999999"] {
            metadata.insert(SELECTED, invalid.parse().expect("ASCII"));
            assert_eq!(read(&metadata), Some(SelectedPods::new()), "{invalid:?}");
        }
        write(&mut metadata, &(1..1000).map(|id| (EgressId(id), 1)).collect());
        assert_eq!(read(&metadata).map(|read| read.len()), Some(MOST));
    }
}
