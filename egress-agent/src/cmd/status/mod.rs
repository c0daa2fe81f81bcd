//! `egress-agent status`: the state of this node's agent, as a table or as JSON, once or again and again.

pub mod kernel;
pub mod watch;

use std::process::ExitCode;

use clap::Args;
use egress_terminal::page::{Page, Severity, complain};

use crate::cmd::page::{Output, PageArgs};
use crate::cmd::{CliError, NO_AGENT};
use crate::debug::pins::{self, PinsError};
use crate::debug::socket::{AskError, ask};
use crate::debug::{Address, AgentState, Answer, ClusterState, PodCount, Request, Status};
use egress_datapath::survey::report::Kernel;

#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    /// Show it again every so many seconds (1 to 3600), or every 2 without a number, until Ctrl-C. On a terminal it stays in
    /// place; elsewhere one page follows the other, and JSON is one object per line
    #[arg(
        short,
        long,
        env = "EGRESS_AGENT_STATUS_WATCH",
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    watch: Option<u64>,
    /// With --watch: end when standard input ends. `kubectl exec --stdin` closes it when its connection is gone, and ends nothing
    /// else
    #[arg(long, env = "EGRESS_AGENT_STATUS_END_WITH_STDIN", requires = "watch")]
    end_with_stdin: bool,
    #[command(flatten)]
    page: PageArgs,
}

/// Neither an agent nor pins exist.
#[derive(Debug, thiserror::Error)]
#[error("{ask}; {pins}")]
pub(crate) struct NothingHere {
    pub(super) ask: AskError,
    pins: PinsError,
}

/// A status, and why it is not the agent's.
struct Answered {
    status: Status,
    silence: Option<AskError>,
}

pub(super) fn run(args: &StatusArgs) -> Result<ExitCode, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(seconds) = args.watch {
        return runtime.block_on(watch::run(args, seconds));
    }
    let answered = runtime.block_on(answered(&args.page))?;
    if let Some(line) = answered.silence() {
        complain(Severity::Error, &format!("error: {line}"));
    }
    match args.page.output {
        Output::Table => table(&answered.status).print()?,
        Output::Json => {
            let status = serde_json::to_string_pretty(&answered.complete()).map_err(std::io::Error::other)?;
            println!("{status}");
            return Ok(ExitCode::from(answered.code()));
        }
    }
    Ok(ExitCode::from(answered.code()))
}

/// The agent's status, else that of its programs.
async fn answered(page: &PageArgs) -> Result<Answered, NothingHere> {
    let silence = match ask(&page.socket, Request::Status).await {
        Ok(Answer::Status(status)) => return Ok(Answered { status: *status, silence: None }),
        Ok(Answer::Error(text)) => AskError::Answered(text),
        Ok(_) => AskError::Answered("the agent sends an unexpected answer".to_owned()),
        Err(error) => error,
    };
    match pins::status(&page.bpffs) {
        Ok(status) => Ok(Answered { status, silence: Some(silence) }),
        Err(pins) => Err(NothingHere { ask: silence, pins }),
    }
}

impl Answered {
    /// The line that comes before all others.
    fn silence(&self) -> Option<String> {
        let silence = self.silence.as_ref()?;
        Some(format!("{silence}; the rest is the state of its programs, which continue"))
    }

    /// With that line among the problems, for programs.
    fn complete(&self) -> Status {
        let mut status = self.status.clone();
        status.problems.splice(0..0, self.silence());
        status
    }

    const fn code(&self) -> u8 {
        if self.silence.is_some() { NO_AGENT } else { 0 }
    }
}

fn table(status: &Status) -> Page {
    let mut page = Page::default();
    let Status { agent, cluster, addresses, problems, .. } = status;
    let mut line = |severity: Option<Severity>, name: &str, value: String| {
        page.push(severity, format!("{name:<13}{value}"));
    };
    if let Some(cluster) = cluster {
        line(None, "node", node(cluster));
    }
    line((!agent.running).then_some(Severity::Error), "agent", running(agent));
    if let Some(serves) = agent.serves {
        let reason = agent.reason.as_deref().unwrap_or("not known");
        let value = if serves { "yes".to_owned() } else { format!("no: {reason}") };
        line((!serves).then_some(Severity::Error), "serves", value);
    }
    if let Some(seconds) = agent.api_server_away_seconds {
        let served = match agent.lease.as_deref() {
            Some("expired") => "released egress IPs wait for it",
            _ => "traffic, connections and egress IPs continue",
        };
        let waiting = "new pods, edits and moves wait for it";
        let value = format!("has not answered for {}: {served}; {waiting}", lasting(seconds));
        line(Some(Severity::Warning), "API server", value);
    }
    // A node that has no egress IPs and gets none needs no lease.
    if let (Some(lease), Some(cluster)) = (&agent.lease, cluster)
        && (cluster.egress_node || !addresses.is_empty())
    {
        let (severity, effect) = match lease.as_str() {
            "expired" => (Some(Severity::Error), ": no egress IP is served"),
            _ => (None, ""),
        };
        line(severity, "lease", format!("{lease}{effect}"));
    }
    // A node without egress IPs emits none.
    if let Some(Kernel { lease_seconds, .. }) = &status.kernel
        && !addresses.is_empty()
    {
        let (severity, lasts) = match lease_seconds {
            Some(0) => (Some(Severity::Error), "expired: no egress IP is emitted".to_owned()),
            Some(seconds) => (None, format!("{} more without the agent", lasting(*seconds))),
            None => (None, "without a limit".to_owned()),
        };
        line(severity, "programs", lasts);
    }
    if let Some(cluster) = cluster {
        // It probes egress nodes four times a second, and all others every few seconds.
        let node =
            agent.controller.as_ref().map_or("has not probed this agent yet".to_owned(), |on| format!("on {on}"));
        line(None, "controller", node);
        if !cluster.suspects.is_empty() {
            line(Some(Severity::Warning), "suspects", cluster.suspects.join(", "));
        }
    }
    line(None, "pods", pods(status));
    page.push(None, "");
    page.append(egress_ips(addresses));
    if let Some(cluster) = cluster {
        page.append(of_cluster(cluster));
    }
    page.append(kernel::tables(status));
    for problem in problems {
        page.push(Severity::Warning, format!("! {problem}"));
    }
    page
}

/// Without an agent, addresses have no pods.
fn pods(Status { pods, pod_addresses, selected_pod_addresses, .. }: &Status) -> String {
    match pods {
        Some(PodCount { known, selected }) => {
            format!("{known} known, {selected} selected, by {pod_addresses} addresses")
        }
        None => format!("{pod_addresses} addresses known, {selected_pod_addresses} selected"),
    }
}

fn node(cluster: &ClusterState) -> String {
    let kind = match (cluster.egress_node, cluster.drained) {
        (false, _) => "no egress node",
        (true, false) => "egress node",
        (true, true) => "egress node, drained",
    };
    format!("{} ({kind})", cluster.node)
}

fn running(agent: &AgentState) -> String {
    if !agent.running {
        return "does not answer".to_owned();
    }
    let up = lasting(agent.uptime_seconds.unwrap_or_default());
    format!("running for {up}, version {}", agent.version.as_deref().unwrap_or("not known"))
}

fn lasting(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

fn egress_ips(addresses: &[Address]) -> Page {
    if addresses.is_empty() {
        return Page::plain("no egress IPs here");
    }
    let mut rows = vec![(None, ["EGRESS IP", "ID", "OBJECT", "ON", "STATE"].map(str::to_owned))];
    for one in addresses {
        let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let (object, interface) = (known(&one.object), known(&one.interface));
        let is_awaited = one.wanted == Some(true) && !one.owned;
        let row = [one.address.to_string(), one.egress_id.to_string(), object, interface, one.state.clone()];
        rows.push((is_awaited.then_some(Severity::Warning), row));
    }
    columns(&rows)
}

fn of_cluster(cluster: &ClusterState) -> Page {
    let mut page = Page::default();
    if !cluster.hand_overs.is_empty() {
        let mut rows = vec![(None, ["HAND-OVER", "NUMBER", "FROM", "TO"].map(str::to_owned))];
        for one in &cluster.hand_overs {
            let to = one.to.clone().unwrap_or_else(|| "no node yet".to_owned());
            rows.push((None, [one.address.to_string(), one.number.to_string(), one.from.clone(), to]));
        }
        page.push(None, "");
        page.append(columns(&rows));
    }
    if !cluster.standby.is_empty() {
        let mut rows = vec![(None, ["STANDBY OBJECT", "POD", "SERVED BY"].map(str::to_owned))];
        let standby = cluster.standby.iter();
        rows.extend(standby.map(|one| (None, [one.object.clone(), one.pod.clone(), one.served_by.clone()])));
        page.push(None, "");
        page.append(columns(&rows));
    }
    page
}

/// Columns as wide as their content, separated by two spaces.
fn columns<const N: usize>(rows: &[(Option<Severity>, [String; N])]) -> Page {
    let mut widths = [0; N];
    for (_, row) in rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
    }
    let mut page = Page::default();
    for (severity, row) in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        page.push(*severity, cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debug::{OpenHandOver, StandbyPod};

    #[test]
    fn the_table_has_all_parts() {
        let address = "172.18.0.100".parse().expect("a literal");
        let one = Address {
            address,
            egress_id: 3,
            object: Some("simpson".into()),
            interface: Some("eth1".into()),
            owned: true,
            wanted: Some(true),
            state: "served".into(),
        };
        let (from, to) = ("node1".to_owned(), None);
        let cluster = ClusterState {
            node: "node1".into(),
            egress_node: true,
            drained: true,
            hand_overs: vec![OpenHandOver { address, number: 7, from, to }],
            suspects: vec!["node3".into()],
            standby: vec![StandbyPod { object: "late".into(), pod: "a/b".into(), served_by: "simpson".into() }],
        };
        let agent = AgentState {
            running: true,
            version: Some("1".into()),
            uptime_seconds: Some(7_300),
            serves: Some(false),
            reason: Some("no-carrier".into()),
            lease: Some("held".into()),
            controller: Some("node2".to_owned()),
            api_server_away_seconds: Some(240),
        };
        let problems = vec!["look".to_owned()];
        let mut status = Status {
            agent,
            cluster: Some(cluster),
            addresses: vec![one],
            pod_addresses: 5,
            selected_pod_addresses: 2,
            pods: Some(PodCount { known: 3, selected: 1 }),
            problems,
            ..Status::default()
        };
        let expected = "\
node         node1 (egress node, drained)
agent        running for 2 h, version 1
serves       no: no-carrier
API server   has not answered for 4 min: traffic, connections and egress IPs continue; new pods, edits and moves wait for it
lease        held
controller   on node2
suspects     node3
pods         3 known, 1 selected, by 5 addresses

EGRESS IP     ID  OBJECT   ON    STATE
172.18.0.100  3   simpson  eth1  served

HAND-OVER     NUMBER  FROM   TO
172.18.0.100  7       node1  no node yet

STANDBY OBJECT  POD  SERVED BY
late            a/b  simpson
! look
";
        assert_eq!(table(&status).text(), expected);
        let json = serde_json::to_string(&status).expect("JSON");
        assert_eq!(serde_json::from_str::<Status>(&json).expect("the same"), status);
        (status.cluster, status.agent, status.pods) = (None, AgentState::default(), None);
        let text = table(&status).text();
        let begin = "agent        does not answer\npods         5 addresses known, 2 selected\n";
        assert!(text.starts_with(begin), "{text}");
    }

    #[test]
    fn a_silent_agent_is_the_first_problem_and_has_its_own_code() {
        let problems = vec!["look".to_owned()];
        let status = Status { problems, ..Status::default() };
        let alive = Answered { status: status.clone(), silence: None };
        assert_eq!((alive.silence(), alive.code(), alive.complete()), (None, 0, status.clone()));
        let dead = Answered { status, silence: Some(AskError::Silent) };
        let line = dead.silence().expect("a line");
        assert!(line.starts_with("an agent runs here and does not answer") && dead.code() == 3, "{line}");
        assert_eq!(dead.complete().problems, [line, "look".to_owned()], "programs read it too");
        assert!(!table(&dead.status).text().contains("does not answer:"), "the table does not repeat it");
    }
}
