//! The ports that NAT may use on the node's own address (mark 1008).
//!
//! A process can still bind such a port explicitly. Both then work, except if it uses the same protocol, peer address and
//! peer port as a pod's translated flow: then the answers go to the flow.
//!
//! Pure: the kernel's settings are arguments. Excluded are the host's ephemeral ports, its reserved ports, the NodePort
//! range and the tunnel port. Of the remaining contiguous ranges above 1023, the highest that is large enough is used,
//! because services of the node listen in the lower ones; otherwise the largest.
//!
//! An unreadable setting keeps its last value, so that a failed read does not give the host's ports to NAT.

use std::ops::RangeInclusive;

use egress_common::abi::PortRange;

/// With fewer ports, a node with much traffic to other nodes runs out; the agent warns.
pub const COMFORTABLE: usize = 1024;

const FIRST: u16 = 1024;

/// The host's settings below /proc/sys/net/ipv4.
pub const EPHEMERAL: &str = "ip_local_port_range";
pub const RESERVED: &str = "ip_local_reserved_ports";

/// The host's settings; `None` for an unreadable one.
#[derive(Clone, Debug, Default)]
pub struct PortSettings {
    pub ephemeral: Option<RangeInclusive<u16>>,
    pub reserved: Option<Vec<RangeInclusive<u16>>>,
}

/// The host's own ports, as last read.
#[derive(Debug)]
pub struct HostPorts {
    ephemeral: PortSetting<RangeInclusive<u16>>,
    reserved: PortSetting<Vec<RangeInclusive<u16>>>,
}

#[derive(Debug)]
struct PortSetting<T> {
    known: T,
    is_readable: bool,
}

impl<T> PortSetting<T> {
    const fn of(default: T) -> Self {
        Self { known: default, is_readable: true }
    }

    /// Whether the read failure was not reported yet.
    fn follow(&mut self, seen: Option<T>) -> bool {
        let was_readable = std::mem::replace(&mut self.is_readable, seen.is_some());
        match seen {
            Some(seen) => self.known = seen,
            None => return was_readable,
        }
        false
    }
}

impl HostPorts {
    /// The kernel's defaults.
    pub(crate) const fn new() -> Self {
        Self { ephemeral: PortSetting::of(32768..=60999), reserved: PortSetting::of(Vec::new()) }
    }

    /// Updates the settings. Returns newly unreadable ones, each once until it is readable again.
    pub fn follow(&mut self, seen: PortSettings) -> Vec<&'static str> {
        let ephemeral = self.ephemeral.follow(seen.ephemeral).then_some(EPHEMERAL);
        let reserved = self.reserved.follow(seen.reserved).then_some(RESERVED);
        ephemeral.into_iter().chain(reserved).collect()
    }

    pub fn ranges(&self) -> impl Iterator<Item = RangeInclusive<u16>> {
        std::iter::once(&self.ephemeral.known).chain(&self.reserved.known).cloned()
    }
}

/// A range of 1024..=65535 without excluded ports; `None` if nothing is left.
pub fn choose(excluded: &[RangeInclusive<u16>]) -> Option<PortRange> {
    let mut sorted: Vec<_> = excluded.iter().filter(|range| !range.is_empty()).cloned().collect();
    sorted.sort_by_key(|range| *range.start());
    let mut best: Option<RangeInclusive<u16>> = None;
    let mut consider = |candidate: RangeInclusive<u16>| {
        // In ascending order, so that of equal ranges the later one is higher.
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
pub fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut numbers = text.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(first)), Some(Ok(last)), None) => Some(first..=last),
        _ => None,
    }
}

/// `ip_local_reserved_ports`: numbers and ranges, separated by commas; empty for none.
pub fn parse_list(text: &str) -> Option<Vec<RangeInclusive<u16>>> {
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
    fn an_unreadable_setting_keeps_its_value_and_is_logged_once() {
        let mut ports = HostPorts::new();
        let seen = |ephemeral, reserved| PortSettings { ephemeral, reserved };
        let known = |ports: &HostPorts| ports.ranges().collect::<Vec<_>>();
        assert_eq!(ports.follow(seen(None, None)), [EPHEMERAL, RESERVED], "not even at start");
        assert_eq!(known(&ports), [32768..=60999], "the kernel's defaults");
        assert!(ports.follow(seen(Some(9000..=65535), Some(vec![8080..=8080]))).is_empty());
        assert_eq!(ports.follow(seen(None, Some(vec![]))), [EPHEMERAL]);
        assert_eq!(known(&ports), [9000..=65535], "and not the default");
        assert!(ports.follow(seen(None, Some(vec![]))).is_empty(), "said already");
        assert_eq!(ports.follow(seen(None, None)), [RESERVED]);
        assert!(ports.follow(seen(Some(5000..=6000), None)).is_empty());
        assert_eq!(known(&ports), [5000..=6000]);
        assert_eq!(ports.follow(seen(None, None)), [EPHEMERAL], "again");
    }

    #[test]
    fn sysctl_values_are_parsed() {
        assert_eq!(parse_range("32768\t60999\n"), Some(32768..=60999));
        assert_eq!(parse_range("1"), None);
        assert_eq!(parse_list("\n"), Some(vec![]));
        assert_eq!(parse_list("8080,9148-9150\n"), Some(vec![8080..=8080, 9148..=9150]));
        assert_eq!(parse_list("a"), None);
    }
}
