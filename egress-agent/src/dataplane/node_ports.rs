//! Which ports NAT may use on the node's own address (mark 1008): those that nobody else on the node will take.
//!
//! A socket that binds such a port explicitly takes it all the same: nothing of the kernel's keeps it from that. Both then
//! work side by side but for one case: where it talks to the very address and port that a pod's mapped flow talks to, by the
//! same protocol, the answers are taken for the flow's.
//!
//! Pure: the kernel's settings are arguments. What is excluded: the host's ephemeral ports, its reserved ports, the
//! NodePort range and the tunnel port. Of the contiguous ranges that remain above 1023, the highest that is large enough is
//! taken: services of the node listen in the lower ones. Where none is, the largest.

use std::ops::RangeInclusive;

use egress_common::abi::PortRange;

/// Below this many ports a node that talks much to other nodes runs out; the agent warns.
pub(super) const COMFORTABLE: usize = 1024;

const FIRST: u16 = 1024;

/// A range of 1024..=65535 that meets no excluded range; `None` when nothing is left.
pub(super) fn choose(excluded: &[RangeInclusive<u16>]) -> Option<PortRange> {
    let mut sorted: Vec<_> = excluded.iter().filter(|range| !range.is_empty()).cloned().collect();
    sorted.sort_by_key(|range| *range.start());
    let mut best: Option<RangeInclusive<u16>> = None;
    let mut consider = |candidate: RangeInclusive<u16>| {
        // They come in ascending order, so of equals the later is the higher.
        let worth = |range: &RangeInclusive<u16>| range.len().min(COMFORTABLE);
        if worth(&candidate) > 0 && best.as_ref().is_none_or(|best| worth(&candidate) >= worth(best)) {
            best = Some(candidate);
        }
    };
    // Next port that may be free; `None` past the end.
    let mut next = Some(FIRST);
    for range in sorted {
        let Some(start) = next else { break };
        if let Some(last) = range.start().checked_sub(1) {
            consider(start..=last);
        }
        if *range.end() >= start {
            next = range.end().checked_add(1);
        }
    }
    if let Some(start) = next {
        consider(start..=u16::MAX);
    }
    best.map(|range| PortRange { first: *range.start(), last: *range.end() })
}

/// `ip_local_port_range`: two numbers.
pub(super) fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut numbers = text.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(first)), Some(Ok(last)), None) => Some(first..=last),
        _ => None,
    }
}

/// `ip_local_reserved_ports`: numbers and ranges, separated by commas; empty for none.
pub(super) fn parse_list(text: &str) -> Option<Vec<RangeInclusive<u16>>> {
    let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
    items
        .map(|item| {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u16, last: u16) -> Option<PortRange> {
        Some(PortRange { first, last })
    }

    #[test]
    fn the_usual_node_gets_what_is_above_the_ephemeral_ports() {
        assert_eq!(choose(&[32768..=60999, 30000..=32767, 4794..=4794]), range(61000, 65535));
    }

    #[test]
    fn a_wide_ephemeral_range_leaves_the_low_ports() {
        assert_eq!(choose(&[9000..=65535, 4794..=4794]), range(4795, 8999));
        assert_eq!(choose(&[1024..=65535]), None);
        assert_eq!(choose(&[0..=65535]), None);
        assert_eq!(choose(&[1024..=65000]), range(65001, 65535));
    }

    #[test]
    fn overlapping_and_empty_ranges_do_no_harm() {
        #[expect(clippy::reversed_empty_ranges, reason = "what the kernel may hold")]
        let ranges = [100..=2000, 1500..=1600, 3000..=40000, 9..=8, 65535..=65535];
        assert_eq!(choose(&ranges), range(40001, 65534));
        assert_eq!(choose(&[]), range(1024, 65535));
    }

    #[test]
    fn the_kernels_texts_are_read() {
        assert_eq!(parse_range("32768\t60999\n"), Some(32768..=60999));
        assert_eq!(parse_range("1"), None);
        assert_eq!(parse_list("\n"), Some(vec![]));
        assert_eq!(parse_list("8080,9148-9150\n"), Some(vec![8080..=8080, 9148..=9150]));
        assert_eq!(parse_list("a"), None);
    }
}
