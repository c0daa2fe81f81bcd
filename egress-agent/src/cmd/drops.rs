//! `egress-agent drops`: dropped packets as the agent samples them, with the names of pods and objects.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use jiff::Timestamp;
use nix::net::if_::if_indextoname;
use serde::Serialize;

use crate::cmd::CliError;
use crate::cmd::page::{DEFAULT_SOCKET, Output};
use crate::debug::socket::{AskError, drops, names};
use egress_core::display_names::Names;
use egress_datapath::events::drops::{DropLine, Sample};
use egress_datapath::trace::questions::protocol;

#[derive(Args, Debug)]
pub(super) struct DropsArgs {
    /// Also show new drops, until Ctrl-C or the agent's end
    #[arg(short, long, env = "EGRESS_AGENT_DROPS_FOLLOW")]
    follow: bool,
    /// Only drops for this reason, by its label. Also a sample: each CPU reports one drop of any reason in ten milliseconds;
    /// /metrics has the counts
    #[arg(long, env = "EGRESS_AGENT_DROPS_REASON", value_name = "REASON", value_parser = reason)]
    reason: Option<String>,
    /// Socket of the agent
    #[arg(long, env = "EGRESS_AGENT_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Format of the output; JSON is one object per line
    #[arg(short, long, env = "EGRESS_AGENT_OUTPUT", value_name = "FORMAT", default_value = "table")]
    output: Output,
}

impl DropsArgs {
    /// An older agent does not know this filter and sends all drops.
    fn is_wanted(&self, sample: &Sample) -> bool {
        self.reason.as_deref().is_none_or(|reason| reason == sample.reason)
    }

    /// Drops that a slow reader misses are counted before the filter.
    fn missed(&self, count: u64) -> String {
        let of = if self.reason.is_some() { ", of any reason" } else { "" };
        format!("... and {count} more{of}")
    }
}

fn reason(text: &str) -> Result<String, String> {
    use egress_common::abi::{Class, Verdict};
    let drops = || Verdict::ALL.iter().filter(|verdict| verdict.class() == Class::Drop).map(|verdict| verdict.label());
    match drops().find(|label| *label == text) {
        Some(label) => Ok(label.to_owned()),
        None => Err(format!("the reasons are {}", drops().collect::<Vec<_>>().join(", "))),
    }
}

/// A drop as it is printed.
#[derive(Debug, Serialize)]
struct DropRow<'s> {
    time: String,
    reason: &'s str,
    protocol: String,
    source: String,
    destination: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_pod: Option<&'s str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination_pod: Option<&'s str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<&'s str>,
    #[serde(skip_serializing_if = "is_zero")]
    egress_id: u32,
    bytes: u32,
    interface: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl<'s> DropRow<'s> {
    fn of(sample: &'s Sample, names: &'s Names) -> Self {
        let pod = |end: &std::net::SocketAddr| names.pods.get(&end.ip()).map(String::as_str);
        let time = Timestamp::try_from(sample.at).unwrap_or_default();
        // An unknown index has an empty name.
        let interface = if_indextoname(sample.ifindex).ok().and_then(|name| name.into_string().ok());
        let interface = interface.filter(|name| !name.is_empty());
        Self {
            time: format!("{time:.3}"),
            reason: &sample.reason,
            protocol: protocol(sample.protocol),
            source: sample.source.to_string(),
            destination: sample.destination.to_string(),
            source_pod: pod(&sample.source),
            destination_pod: pod(&sample.destination),
            object: names.objects.get(&sample.egress_id).map(String::as_str),
            egress_id: sample.egress_id,
            bytes: sample.length,
            interface: interface.unwrap_or_else(|| sample.ifindex.to_string()),
        }
    }

    fn line(&self) -> String {
        let end = |end: &str, pod: Option<&str>| pod.map_or_else(|| end.to_owned(), |pod| format!("{end} ({pod})"));
        let object = match (self.object, self.egress_id) {
            (Some(object), _) => format!(", {object}"),
            (None, 0) => String::new(),
            (None, id) => format!(", egress ID {id}"),
        };
        format!(
            "{} {:<18} {} {} -> {}, {} bytes, {}{object}",
            self.time,
            self.reason,
            self.protocol,
            end(&self.source, self.source_pod),
            end(&self.destination, self.destination_pod),
            self.bytes,
            self.interface,
        )
    }
}

/// The output, with the agent's names.
struct Show<'a> {
    args: &'a DropsArgs,
    names: Names,
    /// When the names were read.
    named: Instant,
}

/// Names are read again if one is missing, but not more often than this.
const NAMES_INTERVAL: Duration = Duration::from_secs(5);

impl Show<'_> {
    async fn line(&mut self, line: DropLine) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let sample = match line {
            DropLine::LeftOut(count) if self.args.output == Output::Json => {
                return writeln!(out, "{{\"left_out\":{count}}}");
            }
            DropLine::LeftOut(count) => return writeln!(out, "{}", self.args.missed(count)),
            DropLine::Drop(sample) if !self.args.is_wanted(&sample) => return Ok(()),
            DropLine::Drop(sample) => sample,
        };
        let knows = |end: &std::net::SocketAddr| self.names.pods.contains_key(&end.ip());
        if !knows(&sample.source) && !knows(&sample.destination) && self.named.elapsed() >= NAMES_INTERVAL {
            drop(out);
            self.read_names(&self.args.socket).await;
            out = io::stdout().lock();
        }
        let row = DropRow::of(&sample, &self.names);
        match self.args.output {
            Output::Table => writeln!(out, "{}", row.line()),
            Output::Json => writeln!(out, "{}", serde_json::to_string(&row)?),
        }
    }

    async fn read_names(&mut self, socket: &Path) {
        self.named = Instant::now();
        // Without an agent there are no drops either, and their request says why.
        if let Ok(names) = names(socket).await {
            self.names = names;
        }
    }
}

pub(super) fn run(args: &DropsArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut show = Show { args, names: Names::default(), named: Instant::now() };
        show.read_names(&args.socket).await;
        let ended = tokio::select! {
            ended = drops(&args.socket, (args.follow, args.reason.clone()), async |line| show.line(line).await) => ended,
            interrupted = tokio::signal::ctrl_c() => return interrupted.map_err(CliError::from),
        };
        match ended {
            Ok(()) if args.follow => eprintln!("the agent has ended"),
            Ok(()) => {}
            // The reader has closed the pipe.
            Err(AskError::Refused { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Sample {
        Sample {
            at: std::time::SystemTime::UNIX_EPOCH + Duration::from_millis(1_500),
            reason: "no_gateway".into(),
            ifindex: u32::MAX,
            egress_id: 3,
            length: 60,
            source: "10.244.1.10:4000".parse().expect("a literal"),
            destination: "198.51.100.10:80".parse().expect("a literal"),
            protocol: 6,
        }
    }

    #[test]
    fn a_line_has_the_names_that_are_known() {
        let sample = sample();
        let mut names = Names::default();
        assert_eq!(
            DropRow::of(&sample, &names).line(),
            "1970-01-01T00:00:01.500Z no_gateway         tcp 10.244.1.10:4000 -> 198.51.100.10:80, 60 bytes, 4294967295, \
             egress ID 3"
        );
        names.pods.insert(sample.source.ip(), "red/one".to_owned());
        names.objects.insert(3, "first".to_owned());
        let row = DropRow::of(&sample, &names);
        assert!(row.line().contains("10.244.1.10:4000 (red/one) -> 198.51.100.10:80, 60 bytes, 4294967295, first"));
        let json = serde_json::to_value(&row).expect("JSON");
        assert_eq!((&json["source_pod"], &json["object"]), (&"red/one".into(), &"first".into()));
    }

    /// An older agent ignores the filter.
    #[test]
    fn other_reasons_are_filtered_whatever_the_agent_sends() {
        let asking = |reason: Option<&str>| DropsArgs {
            follow: false,
            reason: reason.map(str::to_owned),
            socket: PathBuf::new(),
            output: Output::Table,
        };
        let shown = |reason| asking(reason).is_wanted(&sample());
        assert_eq!([None, Some("no_gateway"), Some("map_full")].map(shown), [true, true, false]);
        assert_eq!(asking(None).missed(7), "... and 7 more");
        assert_eq!(
            asking(Some("map_full")).missed(7),
            "... and 7 more, of any reason",
            "the count is from before the filter"
        );
    }

    #[test]
    fn a_reason_is_one_of_the_list() {
        assert_eq!(reason("no_gateway"), Ok("no_gateway".to_owned()));
        assert!(reason("snat_here").expect_err("no drop").contains("no_gateway, "));
    }
}
