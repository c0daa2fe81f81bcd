//! `egress-agent status`: the state of this node's agent, as a table or as JSON.

pub mod kernel;

use std::fmt::Write as _;

use clap::Args;

use crate::cmd::CliError;
use crate::cmd::page::{Output, PageArgs};
use crate::debug::pins::{self, PinsError};
use crate::debug::socket::{AskError, ask};
use crate::debug::{Address, AgentState, Answer, ClusterState, Request, Status};
use egress_datapath::survey::report::Kernel;

#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    page: PageArgs,
}

/// Neither an agent nor pins exist.
#[derive(Debug, thiserror::Error)]
#[error("{ask}; {pins}")]
pub(crate) struct NothingHere {
    ask: AskError,
    pins: PinsError,
}

pub(super) fn run(args: &StatusArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let status = match runtime.block_on(ask(&args.page.socket, Request::Status)) {
        Ok(Answer::Status(status)) => *status,
        Ok(Answer::Error(text)) => from_pins(args, AskError::Answered(text))?,
        Ok(_) => from_pins(args, AskError::Answered("the agent sends an unexpected answer".to_owned()))?,
        Err(error) => from_pins(args, error)?,
    };
    match args.page.output {
        Output::Table => print!("{}", table(&status)),
        Output::Json => println!("{}", serde_json::to_string_pretty(&status).map_err(std::io::Error::other)?),
    }
    Ok(())
}

fn from_pins(args: &StatusArgs, ask: AskError) -> Result<Status, NothingHere> {
    pins::status(&args.page.bpffs, ask.to_string()).map_err(|pins| NothingHere { ask, pins })
}

fn table(status: &Status) -> String {
    let mut text = String::new();
    let Status { agent, cluster, addresses, pod_addresses, selected_pod_addresses, problems, .. } = status;
    let mut line = |name: &str, value: String| {
        // Writing to a string does not fail.
        let _written = writeln!(text, "{name:<13}{value}");
    };
    if let Some(cluster) = cluster {
        line("node", node(cluster));
    }
    line("agent", running(agent));
    if let Some(serves) = agent.serves {
        let reason = agent.reason.as_deref().unwrap_or("not known");
        line("serves", if serves { "yes".to_owned() } else { format!("no: {reason}") });
    }
    if let Some(seconds) = agent.api_server_away_seconds {
        let served = match agent.lease.as_deref() {
            Some("expired") => "released egress IPs wait for it",
            _ => "traffic, connections and egress IPs continue",
        };
        let waiting = "new pods, edits and moves wait for it";
        line("API server", format!("has not answered for {}: {served}; {waiting}", lasting(seconds)));
    }
    // A node that has no egress IPs and gets none needs no lease.
    if let (Some(lease), Some(cluster)) = (&agent.lease, cluster)
        && (cluster.egress_node || !addresses.is_empty())
    {
        let effect = if lease == "expired" { ": no egress IP is served" } else { "" };
        line("lease", format!("{lease}{effect}"));
    }
    // A node without egress IPs emits none.
    if let Some(Kernel { lease_seconds, .. }) = &status.kernel
        && !addresses.is_empty()
    {
        let lasts = match lease_seconds {
            Some(0) => "expired: no egress IP is emitted".to_owned(),
            Some(seconds) => format!("{} more without the agent", lasting(*seconds)),
            None => "without a limit".to_owned(),
        };
        line("programs", lasts);
    }
    if let Some(cluster) = cluster {
        // It probes egress nodes four times a second, and all others every few seconds.
        let node =
            agent.controller.as_ref().map_or("has not probed this agent yet".to_owned(), |on| format!("on {on}"));
        line("controller", node);
        if !cluster.suspects.is_empty() {
            line("suspects", cluster.suspects.join(", "));
        }
    }
    line("pods", format!("{pod_addresses} addresses known, {selected_pod_addresses} selected"));
    text.push('\n');
    text.push_str(&egress_ips(addresses));
    if let Some(cluster) = cluster {
        text.push_str(&of_cluster(cluster));
    }
    text.push_str(&kernel::tables(status));
    for problem in problems {
        let _written = writeln!(text, "! {problem}");
    }
    text
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

fn egress_ips(addresses: &[Address]) -> String {
    if addresses.is_empty() {
        return "no egress IPs here\n".to_owned();
    }
    let mut rows = vec![["EGRESS IP", "ID", "OBJECT", "ON", "STATE"].map(str::to_owned)];
    for one in addresses {
        let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let (object, interface) = (known(&one.object), known(&one.interface));
        rows.push([one.address.to_string(), one.egress_id.to_string(), object, interface, one.state.clone()]);
    }
    columns(&rows)
}

fn of_cluster(cluster: &ClusterState) -> String {
    let mut text = String::new();
    if !cluster.hand_overs.is_empty() {
        let mut rows = vec![["HAND-OVER", "NUMBER", "FROM", "TO"].map(str::to_owned)];
        for one in &cluster.hand_overs {
            let to = one.to.clone().unwrap_or_else(|| "no node yet".to_owned());
            rows.push([one.address.to_string(), one.number.to_string(), one.from.clone(), to]);
        }
        text = format!("{text}\n{}", columns(&rows));
    }
    if !cluster.standby.is_empty() {
        let mut rows = vec![["STANDBY OBJECT", "POD", "SERVED BY"].map(str::to_owned)];
        rows.extend(cluster.standby.iter().map(|one| [one.object.clone(), one.pod.clone(), one.served_by.clone()]));
        text = format!("{text}\n{}", columns(&rows));
    }
    text
}

/// Columns as wide as their content, separated by two spaces.
fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
    }
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
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
pods         5 addresses known, 2 selected

EGRESS IP     ID  OBJECT   ON    STATE
172.18.0.100  3   simpson  eth1  served

HAND-OVER     NUMBER  FROM   TO
172.18.0.100  7       node1  no node yet

STANDBY OBJECT  POD  SERVED BY
late            a/b  simpson
! look
";
        assert_eq!(table(&status), expected);
        let json = serde_json::to_string(&status).expect("JSON");
        assert_eq!(serde_json::from_str::<Status>(&json).expect("the same"), status);
        (status.cluster, status.agent) = (None, AgentState::default());
        assert!(table(&status).starts_with("agent        does not answer\npods         5"), "{}", table(&status));
    }
}
