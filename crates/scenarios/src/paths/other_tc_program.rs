//! A second TC program behind ours on each hook: a u32 filter on clsact (TCX runs before it) that counts the datagrams of
//! one port and continues. It stands for what others attach: a CNI's programs, a shaper, an observer.
//!
//! Filters count in their action; the one that every kernel has, `mirred`, wants a device to copy to, so copies go to a
//! pair of interfaces without addresses.

use anyhow::{Context, Result};

use egress_lab::{MANAGEMENT, Netns, UPLINK};

/// The four hooks that pods' traffic passes.
pub(super) const HOOKS: [(&str, &str); 4] =
    [(MANAGEMENT, "ingress"), (UPLINK, "egress"), (UPLINK, "ingress"), (MANAGEMENT, "egress")];

/// Families, and what their filters' preferences begin with. Each filter of a device needs its own: u32 lists those of
/// one preference together, whatever the direction.
const FAMILIES: [(&str, &str, usize); 2] = [("ip", "ip", 40), ("ipv6", "ip6", 60)];

/// Attaches a filter for UDP of `port` (as source or as destination) to each hook.
pub(super) fn attach(host: &Netns, port: u16) -> Result<()> {
    host.exec("ip", &["link", "add", "sink0", "type", "veth", "peer", "name", "sink1"])?;
    for device in ["sink0", "sink1"] {
        host.sysctl(&[(format!("ipv6/conf/{device}/disable_ipv6"), "1".to_owned())])?;
        host.exec("ip", &["link", "set", device, "up"])?;
    }
    for device in [MANAGEMENT, UPLINK] {
        // It is there already where a kernel without TCX has our own programs on it; the filters will tell.
        host.output("tc", &["qdisc", "add", "dev", device, "clsact"])?;
    }
    let port = port.to_string();
    for (place, (device, direction)) in HOOKS.into_iter().enumerate() {
        // Requests leave by mp0's ingress and the uplink's egress, answers come by the other two.
        let end =
            if matches!((device, direction), (MANAGEMENT, "ingress") | (UPLINK, "egress")) { "dport" } else { "sport" };
        for (protocol, matched, first) in FAMILIES {
            let preference = first + place;
            let words = format!(
                "filter add dev {device} {direction} pref {preference} protocol {protocol} u32 match {matched} {end} \
                 {port} 0xffff action mirred egress mirror dev sink0"
            );
            host.exec("tc", &words.split(' ').collect::<Vec<_>>())?;
        }
    }
    Ok(())
}

/// What the filters have counted, hook by hook, both families together.
pub(super) fn counted(host: &Netns) -> Result<[u64; 4]> {
    let mut counts = [0; 4];
    for (count, (device, direction)) in counts.iter_mut().zip(HOOKS) {
        let text = host.exec("tc", &["-s", "filter", "show", "dev", device, direction])?;
        *count = sum_of_sent(&text).with_context(|| format!("cannot read what tc said: {text}"))?;
    }
    Ok(counts)
}

/// The sum of the packets in lines like ` Sent 84 bytes 1 pkt (dropped 0, ...)`.
fn sum_of_sent(text: &str) -> Option<u64> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("Sent "));
    lines.map(|line| line.split(' ').nth(2)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_from_tcs_words() {
        let text = "filter protocol ip pref 40 u32\n  Sent 84 bytes 1 pkt (dropped 0)\n  Sent 9 bytes 20 pkt (x)\n";
        assert_eq!(sum_of_sent(text), Some(21));
        assert_eq!(sum_of_sent("filter\n"), Some(0));
    }
}
