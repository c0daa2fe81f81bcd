//! Objects and gateways, devices, programs, maps and the last warnings, as tables.

use jiff::Timestamp;

use crate::cmd::status::columns;
use crate::debug::Status;
use crate::debug::log::LogEntry;
use egress_datapath::survey::report::{Fill, Gateway, InterfaceReport, Kernel, PolicyReport, Program};
use egress_terminal::page::{Page, Severity};

/// Other maps are shown from this percentage on.
const SHOWN_FROM: u64 = 50;
/// The percentage at which the agent warns about a map (`MapNearlyFull`, seven eighths).
const WARNED_FROM: u64 = 87;
const ALWAYS: [&str; 3] = ["nat", "flows", "inbound"];

/// Each with an empty line before it.
pub(super) fn tables(status: &Status) -> Page {
    let mut page = Page::default();
    let mut table = |rows: Page| {
        if !rows.is_empty() {
            page.push(None, "");
            page.append(rows);
        }
    };
    table(objects(&status.objects));
    table(gateways(&status.gateways));
    if let Some(Kernel { interfaces, programs, maps, .. }) = &status.kernel {
        table(devices(interfaces));
        table(attached(programs));
        table(fills(maps));
    }
    table(warnings(&status.last_warnings));
    page
}

fn rows<T, const N: usize>(head: [&str; N], of: &[T], row: impl Fn(&T) -> (Option<Severity>, [String; N])) -> Page {
    if of.is_empty() {
        return Page::default();
    }
    let rows: Vec<_> = std::iter::once((None, head.map(str::to_owned))).chain(of.iter().map(row)).collect();
    columns(&rows)
}

fn dash(text: Option<&String>) -> String {
    text.map_or_else(|| "-".to_owned(), Clone::clone)
}

fn objects(of: &[PolicyReport]) -> Page {
    rows(["OBJECT", "ID", "PODS HERE", "EGRESS IPS"], of, |one| {
        let places: Vec<_> = one.egress_ips.iter().map(|ip| format!("{} {}", ip.address, ip.at)).collect();
        let mut places = if places.is_empty() { "none".to_owned() } else { places.join(", ") };
        if let Some(limit) = one.limit {
            places.push_str(&format!(" (at most {})", rate(limit.bits_per_second)));
        }
        let pods = one.pods.map_or_else(|| addresses(one.pod_addresses), |pods| pods.to_string());
        (None, [dash(one.name.as_ref()), one.egress_id.to_string(), pods, places])
    })
}

/// Without an agent, addresses have no pods.
fn addresses(count: usize) -> String {
    format!("{count} address{}", if count == 1 { "" } else { "es" })
}

/// In the largest unit that leaves no fraction.
fn rate(bits_per_second: u64) -> String {
    let units = [(1_000_000_000, "Gbit/s"), (1_000_000, "Mbit/s"), (1_000, "kbit/s")];
    let whole = units.iter().find(|(size, _)| bits_per_second.is_multiple_of(*size));
    whole
        .map_or_else(|| format!("{bits_per_second} bit/s"), |(size, unit)| format!("{} {unit}", bits_per_second / size))
}

fn gateways(of: &[Gateway]) -> Page {
    rows(["GATEWAY", "ADDRESS", "EGRESS IPS", "READY", "BY LEADER", "NEIGHBOUR"], of, |one| {
        let ready = one.ready.map_or("-", |ready| if ready { "yes" } else { "no" });
        let is_away = one.ready == Some(false) || one.leader_says.is_some();
        let row = [
            dash(one.node.as_ref()),
            one.endpoint.to_string(),
            one.egress_ips.to_string(),
            ready.to_owned(),
            dash(one.leader_says.as_ref()),
            dash(one.neighbour.as_ref()),
        ];
        (is_away.then_some(Severity::Warning), row)
    })
}

fn devices(of: &[InterfaceReport]) -> Page {
    rows(["INTERFACE", "NAME", "STATE", "LARGEST PACKET"], of, |one| {
        let (severity, state) = match (&one.name, one.up, one.carrier) {
            (None, ..) => (Some(Severity::Error), "missing"),
            (_, false, _) => (Some(Severity::Error), "down"),
            (_, true, false) => (Some(Severity::Error), "no carrier"),
            (_, true, true) => (None, "up"),
        };
        (severity, [one.role.clone(), dash(one.name.as_ref()), state.to_owned(), one.mtu.to_string()])
    })
}

fn attached(of: &[Program]) -> Page {
    rows(["PROGRAM", "ON", "BY", "SINCE"], of, |one| {
        let on = one.interface.clone().unwrap_or_else(|| "NOT ATTACHED".to_owned());
        let severity = one.interface.is_none().then_some(Severity::Error);
        (severity, [one.name.clone(), on, dash(one.attached.as_ref()), dash(one.since.as_ref())])
    })
}

fn fills(of: &[Fill]) -> Page {
    let shown: Vec<_> =
        of.iter().filter(|one| ALWAYS.contains(&one.map.as_str()) || one.percent() >= SHOWN_FROM).collect();
    rows(["MAP", "ENTRIES", "OF", "FULL"], &shown, |one| {
        let severity = (one.percent() >= WARNED_FROM).then_some(Severity::Warning);
        let row = [one.map.clone(), one.entries.to_string(), one.limit.to_string(), format!("{} %", one.percent())];
        (severity, row)
    })
}

fn warnings(of: &[LogEntry]) -> Page {
    rows(["LAST WARNINGS", "TIMES", "LINE"], of, |one| {
        let at = Timestamp::try_from(one.at).unwrap_or_default();
        let severity = if one.level == "ERROR" { Severity::Error } else { Severity::Warning };
        (Some(severity), [format!("{at:.0} {}", one.level), one.times.to_string(), one.line.clone()])
    })
}

#[cfg(test)]
mod tests {
    use egress_datapath::survey::report::LimitReport;

    use super::*;
    use egress_datapath::survey::report::Served;

    #[test]
    fn objects_count_pods_and_without_an_agent_addresses() {
        let of = |pods, pod_addresses| {
            let one =
                PolicyReport { egress_id: 3, name: None, pod_addresses, pods, egress_ips: Vec::new(), limit: None };
            objects(&[one]).text().lines().last().map(str::to_owned)
        };
        assert_eq!(of(Some(1), 2).as_deref(), Some("-       3   1          none"));
        assert_eq!(of(None, 2).as_deref(), Some("-       3   2 addresses  none"));
        assert_eq!(of(None, 1).as_deref(), Some("-       3   1 address  none"));
    }

    #[test]
    fn present_parts_are_shown_and_missing_ones_omitted() {
        assert!(tables(&Status::default()).is_empty());
        let address = "172.18.0.100".parse().expect("a literal");
        let egress_ips = vec![Served { address, at: "node2".into() }];
        let program = |name: &str, interface: Option<&str>| Program {
            name: name.into(),
            interface: interface.map(str::to_owned),
            attached: interface.map(|_| "tcx".into()),
            since: interface.map(|_| "2026-11-22T07:00:00Z".into()),
            tag: None,
        };
        let fill = |map: &str, entries| Fill { map: map.into(), entries, limit: 100 };
        let kernel = Kernel {
            lease_seconds: Some(31),
            interfaces: vec![InterfaceReport {
                role: "uplink".into(),
                name: Some("breth0".into()),
                index: 2,
                mtu: 1500,
                up: true,
                carrier: false,
            }],
            programs: vec![program("from_pod", Some("ovn-k8s-mp0")), program("to_netdev", None)],
            maps: vec![fill("pods", 1), fill("policy", 60), fill("nat", 2)],
        };
        let status = Status {
            objects: vec![PolicyReport {
                egress_id: 3,
                name: Some("first".into()),
                pod_addresses: 2,
                pods: Some(1),
                egress_ips,
                limit: Some(LimitReport { bits_per_second: 1_500_000_000, burst_ms: 100 }),
            }],
            gateways: vec![Gateway {
                endpoint: "172.18.0.3".parse().expect("a literal"),
                node: Some("node2".into()),
                egress_ips: 1,
                ready: Some(true),
                leader_says: None,
                neighbour: Some("reachable".into()),
            }],
            kernel: Some(kernel),
            last_warnings: vec![LogEntry {
                at: std::time::SystemTime::UNIX_EPOCH,
                level: "WARN".into(),
                line: "worse".into(),
                times: 3,
                condition: None,
            }],
            ..Status::default()
        };
        let expected = "
OBJECT  ID  PODS HERE  EGRESS IPS
first   3   1          172.18.0.100 node2 (at most 1500 Mbit/s)

GATEWAY  ADDRESS     EGRESS IPS  READY  BY LEADER  NEIGHBOUR
node2    172.18.0.3  1           yes    -          reachable

INTERFACE  NAME    STATE       LARGEST PACKET
uplink     breth0  no carrier  1500

PROGRAM    ON            BY   SINCE
from_pod   ovn-k8s-mp0   tcx  2026-11-22T07:00:00Z
to_netdev  NOT ATTACHED  -    -

MAP     ENTRIES  OF   FULL
policy  60       100  60 %
nat     2        100  2 %

LAST WARNINGS              TIMES  LINE
1970-01-01T00:00:00Z WARN  3      worse
";
        assert_eq!(tables(&status).text(), expected);
    }
}
