//! What the two pods of a check have seen, and what follows. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;

/// What `egress-agent connect` prints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct ConnectReport {
    pub(crate) connected: bool,
    pub(crate) from: Option<SocketAddr>,
    pub(crate) body: Option<String>,
    pub(crate) error: Option<String>,
}

impl ConnectReport {
    /// The pod's source as the target sees it, if its answer has one address.
    fn source(&self) -> Option<IpAddr> {
        let body = self.body.as_deref()?;
        let words = body.split(|c: char| !c.is_ascii_hexdigit() && c != '.' && c != ':');
        let found: BTreeSet<IpAddr> = words
            // `::` and single colons of JSON are no addresses of a client.
            .filter_map(|word| word.trim_matches(':').parse().ok())
            .filter(|address: &IpAddr| !address.is_unspecified())
            .collect();
        let mut found = found.into_iter();
        found.next().filter(|_| found.next().is_none())
    }
}

/// One pod, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckedPod {
    pub(crate) name: String,
    pub(crate) node: Option<String>,
    /// Whether the object selects it.
    pub(crate) is_selected: bool,
    /// Why it has no report, otherwise.
    pub(crate) report: Result<ConnectReport, String>,
}

/// What is printed, and whether the egress IP works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckVerdict {
    pub(crate) lines: Vec<String>,
    pub(crate) works: bool,
}

/// The selected pod, the pod beside it, and the addresses of the object that nodes serve.
pub(crate) fn judge(selected: &CheckedPod, beside: &CheckedPod, egress_ips: &BTreeSet<IpAddr>) -> CheckVerdict {
    let mut lines: Vec<String> = [selected, beside].into_iter().map(line).collect();
    let has_connected = |pod: &CheckedPod| pod.report.as_ref().is_ok_and(|report| report.connected);
    let source = selected.report.as_ref().ok().and_then(ConnectReport::source);
    let (works, said) = match (has_connected(selected), has_connected(beside), source) {
        (true, _, Some(source)) if egress_ips.contains(&source) => {
            (true, format!("works: the target sees the egress IP {source}"))
        }
        (true, _, Some(source)) => (
            false,
            format!("the target sees {source}, which is no served egress IP of the object: `kubectl egress trace` says why"),
        ),
        (true, _, None) => (
            true,
            "the target accepts connections of a selected pod; it does not say from which address: see its log, or give --http"
                .to_owned(),
        ),
        (false, ..) if selected.report.is_err() => {
            (false, "nothing is known about the egress IP, since the selected pod did not run".to_owned())
        }
        (false, true, _) if !beside.is_selected => (
            false,
            "only the pod without an egress IP reaches the target: see `kubectl egress drops`, and whether the target accepts the \
             egress IP"
                .to_owned(),
        ),
        (false, true, _) => (false, "one of two selected pods reaches the target: compare their nodes".to_owned()),
        (false, false, _) => (
            false,
            "neither pod reaches the target: does it accept connections, and do network policies allow them?".to_owned(),
        ),
    };
    lines.push(said);
    CheckVerdict { lines, works }
}

fn line(CheckedPod { name, node, is_selected, report }: &CheckedPod) -> String {
    let kind = if *is_selected { "selected" } else { "not selected" };
    let node = node.as_ref().map_or_else(String::new, |node| format!(" on {node}"));
    let seen = match report {
        Err(why) => format!("did not run: {why}"),
        Ok(ConnectReport { connected: false, error, .. }) => {
            format!("no connection: {}", error.as_deref().unwrap_or("no reason is given"))
        }
        Ok(report) => match (report.source(), &report.body, &report.error) {
            (Some(source), ..) => format!("connected, the target sees {source}"),
            (None, Some(_), _) => "connected, and the target's answer has no single address".to_owned(),
            (None, None, Some(error)) => format!("connected; {error}"),
            (None, None, None) => "connected".to_owned(),
        },
    };
    format!("{name}{node} ({kind}): {seen}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(is_selected: bool, report: Result<ConnectReport, String>) -> CheckedPod {
        CheckedPod { name: "one".into(), node: Some("n1".into()), is_selected, report }
    }

    fn seen(body: Option<&str>) -> Result<ConnectReport, String> {
        Ok(ConnectReport { connected: true, body: body.map(str::to_owned), ..ConnectReport::default() })
    }

    fn refused() -> Result<ConnectReport, String> {
        Ok(ConnectReport { error: Some("connection timed out".into()), ..ConnectReport::default() })
    }

    #[test]
    fn an_address_is_found_in_answers_of_usual_services() {
        for (body, address) in [
            ("192.0.2.7", Some("192.0.2.7")),
            ("{\"origin\": \"192.0.2.7\"}", Some("192.0.2.7")),
            ("Your address is 2001:db8::7.", None),
            ("Your address is 2001:db8::7", Some("2001:db8::7")),
            ("192.0.2.7 via 192.0.2.8", None),
            ("<html>no</html>", None),
        ] {
            let report = seen(Some(body)).expect("a report");
            assert_eq!(report.source().map(|ip| ip.to_string()).as_deref(), address, "{body}");
        }
    }

    #[test]
    fn each_outcome_has_its_sentence() {
        let egress_ips = BTreeSet::from(["192.0.2.7".parse().expect("a literal")]);
        for (selected, beside, works, said) in [
            (seen(Some("192.0.2.7")), refused(), true, "works: the target sees the egress IP 192.0.2.7"),
            (seen(Some("192.0.2.9")), seen(Some("192.0.2.9")), false, "the target sees 192.0.2.9, which is no served"),
            (seen(None), seen(None), true, "it does not say from which address"),
            (refused(), seen(None), false, "only the pod without an egress IP"),
            (refused(), refused(), false, "neither pod reaches the target"),
            (Err("ErrImagePull".into()), refused(), false, "nothing is known about the egress IP"),
        ] {
            let verdict = judge(&pod(true, selected.clone()), &pod(false, beside), &egress_ips);
            assert_eq!(verdict.works, works, "{selected:?}");
            assert!(verdict.lines.last().is_some_and(|line| line.contains(said)), "{:?}", verdict.lines);
        }
        let both = judge(&pod(true, refused()), &pod(true, seen(None)), &egress_ips);
        assert!(both.lines.last().is_some_and(|line| line.contains("compare their nodes")), "{:?}", both.lines);
    }
}
