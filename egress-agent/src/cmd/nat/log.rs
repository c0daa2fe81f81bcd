//! `egress-agent nat log`: who had an egress IP's port, by this node's log of NAT.

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use crate::cmd::page::Output;
use crate::nat_log::history::{BlockSpan, History, PodSpan};
use crate::nat_log::{BlockRecord, LogEvent, LogRecord, file};

/// Where the manifests put it.
const DEFAULT_FILE: &str = "/var/log/egress-agent/nat.log";

#[derive(Args, Debug)]
pub(super) struct LogFilters {
    /// The log, with the earlier files beside it
    #[arg(long, env = "EGRESS_AGENT_NAT_LOG", value_name = "PATH", default_value = DEFAULT_FILE)]
    file: PathBuf,
    /// Only blocks of this egress IP
    #[arg(long, env = "EGRESS_AGENT_NAT_EGRESS_IP", value_name = "ADDRESS")]
    egress_ip: Option<IpAddr>,
    /// Only blocks that have this port
    #[arg(long, env = "EGRESS_AGENT_NAT_PORT", value_name = "PORT")]
    port: Option<u16>,
    /// Only blocks of the pod with this address, and the pods of this node that had it
    #[arg(long, env = "EGRESS_AGENT_NAT_POD_IP", value_name = "ADDRESS")]
    pod_ip: Option<IpAddr>,
    /// Only what was so at this time, to a second, as in 2026-05-01T12:00:00Z
    #[arg(long, env = "EGRESS_AGENT_NAT_AT", value_name = "TIME")]
    at: Option<Timestamp>,
    /// Format of the output
    #[arg(short, long, env = "EGRESS_AGENT_OUTPUT", value_name = "FORMAT", default_value = "table")]
    output: Output,
}

/// What is printed.
#[derive(Debug, Serialize)]
struct LogAnswer {
    blocks: Vec<BlockSpan>,
    /// Pods of this node that had the address.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pods: Vec<PodSpan>,
    /// Lines of the log that cannot be read.
    unread_lines: u64,
}

impl LogFilters {
    fn takes(&self, block: &BlockRecord) -> bool {
        let is = |wanted: Option<IpAddr>, address: IpAddr| wanted.is_none_or(|wanted| wanted == address);
        is(self.egress_ip, block.egress_ip)
            && is(self.pod_ip, block.pod_ip)
            && self.port.is_none_or(|port| (block.first_port..=block.last_port).contains(&port))
    }

    /// Names of pods are for the blocks. A log has very many of these.
    fn concerns(&self, record: &LogRecord) -> bool {
        match &record.event {
            LogEvent::Given(block) | LogEvent::TakenBack(block) => self.takes(block),
            LogEvent::Started | LogEvent::PodHas { .. } | LogEvent::PodHadNoMore { .. } => true,
        }
    }

    fn found(&self, history: History, unread_lines: u64) -> LogAnswer {
        let mut blocks: Vec<BlockSpan> = history.blocks.clone();
        blocks.retain(|block| self.at.is_none_or(|at| block.span.contains(at)));
        for BlockSpan { span, block, pod, .. } in &mut blocks {
            let at = self.at.unwrap_or(span.from);
            *pod = history.pod_at(block.pod_ip, at).map(|one| one.pod.clone());
        }
        blocks.sort_by_key(|block| block.span.from);
        let pods = match (self.pod_ip, self.at) {
            (Some(pod_ip), Some(at)) => history.pod_at(pod_ip, at).cloned().into_iter().collect(),
            (Some(pod_ip), None) => history.pods.iter().filter(|pod| pod.pod_ip == pod_ip).cloned().collect(),
            (None, _) => Vec::new(),
        };
        LogAnswer { blocks, pods, unread_lines }
    }
}

impl LogAnswer {
    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let end = |to: Option<Timestamp>| to.map_or_else(|| "-".to_owned(), |to| format!("{to:.0}"));
        if self.blocks.is_empty() {
            writeln!(out, "no port block")?;
        } else {
            writeln!(out, "{:<20}  {:<20}  {:<11}  EGRESS IP\n  POD IP  OBJECT  POD, NODE", "FROM", "TO", "PORTS")?;
        }
        for BlockSpan { span, block, pod, .. } in &self.blocks {
            let ports = format!("{}-{}", block.first_port, block.last_port);
            writeln!(out, "{:<20.0}  {:<20}  {ports:<11}  {}", span.from, end(span.to), block.egress_ip)?;
            let pod = pod.as_ref().map_or_else(String::new, |pod| format!("{pod} on "));
            let object = block.object.as_deref().unwrap_or("-");
            writeln!(out, "  {}  {object}  {pod}{}", block.pod_ip, block.pod_node)?;
        }
        for PodSpan { span, pod_ip, pod, node } in &self.pods {
            writeln!(out, "{pod_ip} was {pod} on {node} from {:.0} to {}", span.from, end(span.to))?;
        }
        if self.unread_lines > 0 {
            writeln!(out, "{} lines of the log cannot be read", self.unread_lines)?;
        }
        Ok(())
    }
}

/// The log cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}; --nat-log of the agent writes it", .path.display())]
pub(crate) struct UnreadableLog {
    path: PathBuf,
    source: io::Error,
}

pub(super) fn print(filters: &LogFilters, out: &mut impl Write) -> Result<io::Result<()>, UnreadableLog> {
    let mut history = History::default();
    let unread = file::read(&filters.file, |record| {
        if filters.concerns(&record) {
            history.add(record);
        }
    });
    let unread = unread.map_err(|source| UnreadableLog { path: filters.file.clone(), source })?;
    let found = filters.found(history, unread);
    let printed = match filters.output {
        Output::Table => found.print(out),
        Output::Json => {
            serde_json::to_string_pretty(&found).map_err(Into::into).and_then(|text| writeln!(out, "{text}"))
        }
    };
    Ok(printed.and_then(|()| out.flush()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_flags;

    const LOG: &str = r#"{"time":"2026-05-01T10:00:00Z","node":"node1","event":"started"}
{"time":"2026-05-01T10:00:01Z","node":"node1","event":"pod_has","pod_ip":"10.244.1.10","pod":"red/one"}
{"time":"2026-05-01T10:00:02Z","node":"node1","event":"given","egress_ip":"172.18.0.100","first_port":1024,"last_port":1087,"pod_ip":"10.244.1.10","given_ns":1,"pod_node":"node1","object":"prod"}
{"time":"2026-05-01T11:00:00Z","node":"node1","event":"given","egress_ip":"172.18.0.100","first_port":2048,"last_port":2111,"pod_ip":"10.244.2.10","given_ns":2,"pod_node":"node2","object":"prod"}
{"time":"2026-05-01T11:40:00Z","node":"node1","event":"pod_had_no_more","pod_ip":"10.244.1.10","pod":"red/one"}
{"time":"2026-05-01T11:45:00Z","node":"node1","event":"pod_has","pod_ip":"10.244.1.10","pod":"red/three"}
{"time":"2026-05-01T12:00:00Z","node":"node1","event":"taken_back","egress_ip":"172.18.0.100","first_port":1024,"last_port":1087,"pod_ip":"10.244.1.10","given_ns":1,"pod_node":"node1","object":"prod"}
cut of"#;

    fn printed(name: &str, arguments: &str) -> Result<String, UnreadableLog> {
        let file = std::env::temp_dir().join(format!("egress-agent-nat-{name}-{}.log", std::process::id()));
        std::fs::write(&file, LOG).expect("a file");
        let line = format!("--file {} {arguments}", file.display());
        let filters: LogFilters = parse_flags(line.split(' ').filter(|argument| !argument.is_empty())).expect("a line");
        let mut out = Vec::new();
        let printed = print(&filters, &mut out);
        std::fs::remove_file(&file).expect("remove it");
        printed?.expect("written");
        Ok(String::from_utf8(out).expect("text"))
    }

    #[test]
    fn spans_are_printed_with_what_is_known_of_the_pod() {
        let expected = "\
FROM                  TO                    PORTS        EGRESS IP
  POD IP  OBJECT  POD, NODE
2026-05-01T10:00:02Z  2026-05-01T12:00:00Z  1024-1087    172.18.0.100
  10.244.1.10  prod  red/one on node1
2026-05-01T11:00:00Z  -                     2048-2111    172.18.0.100
  10.244.2.10  prod  node2
1 lines of the log cannot be read
";
        assert_eq!(printed("all", "").expect("a log"), expected);
    }

    #[test]
    fn each_filter_matches() {
        for (name, arguments, blocks) in [
            ("port", "--port 1087", 1),
            ("other-port", "--port 1088", 0),
            ("address", "--egress-ip 172.18.0.100", 2),
            ("other-address", "--egress-ip 172.18.0.101", 0),
            ("pod", "--pod-ip 10.244.2.10", 1),
            ("time", "--at 2026-05-01T10:30:00Z", 1),
            ("later", "--at 2026-05-01T13:00:00Z", 1),
            ("both", "--at 2026-05-01T11:30:00Z", 2),
        ] {
            let text = printed(name, &format!("-o json {arguments}")).expect("a log");
            let found: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!(found["blocks"].as_array().map(Vec::len), Some(blocks), "{arguments}: {found}");
        }
        assert!(printed("none", "--port 9").expect("a log").starts_with("no port block\n"));
        let pod = printed("name", "--pod-ip 10.244.1.10 --at 2026-05-01T10:30:00Z").expect("a log");
        assert!(
            pod.contains("10.244.1.10 was red/one on node1 from 2026-05-01T10:00:01Z to 2026-05-01T11:40:00Z\n"),
            "{pod}"
        );
    }

    /// A pod that gets the address of one that has ended also gets its open blocks.
    #[test]
    fn the_pod_is_the_one_that_had_the_address_then() {
        for (at, pod) in [("11:30:00", "red/one"), ("11:50:00", "red/three")] {
            let text = printed("then", &format!("-o json --port 1030 --at 2026-05-01T{at}Z")).expect("a log");
            let found: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!(found["blocks"][0]["pod"], pod, "{at}");
        }
    }

    #[test]
    fn a_missing_log_is_named_with_the_flag_that_makes_one() {
        let filters: LogFilters = parse_flags(["--file", "/nowhere/nat.log"]).expect("a line");
        let error = print(&filters, &mut Vec::new()).expect_err("no log").to_string();
        assert!(error.contains("/nowhere/nat.log") && error.contains("--nat-log of the agent"), "{error}");
    }
}
