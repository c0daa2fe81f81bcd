//! Detects the external interface.

use std::fs;
use std::path::Path;

/// OVN-Kubernetes' external bridge, else OpenShift's, else the interface of the default route.
pub(super) fn detect_uplink() -> Option<String> {
    let bridge = ["breth0", "br-ex"].into_iter().find(|name| Path::new("/sys/class/net").join(name).exists());
    bridge.map(str::to_owned).or_else(|| {
        let v4 = fs::read_to_string("/proc/self/net/route").ok();
        let v6 = fs::read_to_string("/proc/self/net/ipv6_route").ok();
        v4.as_deref().and_then(default_v4).or_else(|| v6.as_deref().and_then(default_v6))
    })
}

/// Columns: interface, destination, gateway, flags, .., metric (6), mask (7).
fn default_v4(table: &str) -> Option<String> {
    let routes = table.lines().skip(1).filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let is_default = columns.get(1) == Some(&"00000000") && columns.get(7) == Some(&"00000000");
        let metric: u32 = columns.get(6)?.parse().ok()?;
        is_default.then(|| (metric, columns[0].to_owned()))
    });
    routes.min().map(|(_, interface)| interface)
}

/// Columns: destination, its length, source, its length, gateway, metric (hexadecimal), .., interface (9).
fn default_v6(table: &str) -> Option<String> {
    let routes = table.lines().filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let is_default = columns.get(1) == Some(&"00") && columns.get(9).is_some_and(|name| *name != "lo");
        let metric = u32::from_str_radix(columns.get(5)?, 16).ok()?;
        is_default.then(|| (metric, columns[9].to_owned()))
    });
    routes.min().map(|(_, interface)| interface)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_default_route_is_taken() {
        let table = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                     eth1\t00000000\t010012AC\t0003\t0\t0\t200\t00000000\t0\t0\t0\n\
                     eth0\t00000000\t010012AC\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
                     eth2\t0000FEA9\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
        assert_eq!(default_v4(table).as_deref(), Some("eth0"));
        let zero = "0".repeat(32);
        let table = format!(
            "{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n\
             {zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo\n"
        );
        assert_eq!(default_v6(&table).as_deref(), Some("eth0"));
        assert_eq!(default_v4(""), None);
    }
}
