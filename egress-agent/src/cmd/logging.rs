//! Structured logs on standard error.

use clap::{Args, ValueEnum};
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, reload};

use crate::cmd::CliError;
use crate::debug::log::{LogLevel, RecentWarnings};

#[derive(Args, Debug)]
#[command(next_help_heading = "The log")]
pub(super) struct LogArgs {
    /// Least severity of log lines, in general or by module (info, debug, egress_agent=debug,warn); `egress-agent log-level`
    /// changes it while the agent runs
    #[arg(long, env = "EGRESS_AGENT_LOG_LEVEL", value_name = "FILTER", default_value = "info")]
    log_level: String,
    /// Format of log lines, which go to standard error
    #[arg(
        long,
        env = "EGRESS_AGENT_LOG_FORMAT",
        value_name = "FORMAT",
        value_enum,
        default_value_t = LogFormat::Text
    )]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// For people
    Text,
    /// For programs: one object in each line
    Json,
}

/// Always off. The API client logs each failed request, which the agent logs once, with its cause. HTTP/2 logs each
/// misbehaving connection, and netlink each time that neighbours change faster than they are read: other hosts could fill
/// the log with both.
const QUIET: &str = "kube_client=off,kube_runtime=off,h2=off,netlink_proto=off";

/// Why a filter is invalid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LevelError {
    /// Without this check it would be a module that logs everything, while all others log nothing.
    #[error("{0:?} is neither a level (off, error, warn, info, debug, trace) nor MODULE=LEVEL")]
    NoLevel(String),
    #[error(transparent)]
    Filter(#[from] ParseError),
}

/// Starts the log. Returns the handle of its filter, and the recent warnings.
pub(super) fn start(args: &LogArgs) -> Result<(LogLevel, RecentWarnings), CliError> {
    let (subscriber, level, warnings) = subscriber(args)?;
    subscriber.init();
    Ok((level, warnings))
}

/// The filter applies to written lines; recent warnings are kept regardless of it.
fn subscriber(args: &LogArgs) -> Result<(impl Subscriber + Send + Sync, LogLevel, RecentWarnings), CliError> {
    let filter =
        filter(&args.log_level).map_err(|source| CliError::LogLevel { level: args.log_level.clone(), source })?;
    let (filter, handle) = reload::Layer::new(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let lines = match args.log_format {
        LogFormat::Text => lines.with_ansi(false).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let warnings = RecentWarnings::default();
    // With the lines that say what is over.
    let of_agent = self::filter("info").map_err(|source| CliError::LogLevel { level: "info".to_owned(), source })?;
    let subscriber =
        tracing_subscriber::registry().with(lines.with_filter(filter)).with(warnings.clone().with_filter(of_agent));
    let change = move |level: &str| {
        let filter = self::filter(level).map_err(|error| CliError::LogLevel { level: level.to_owned(), source: error });
        filter.map_err(|error| error.to_string()).and_then(|filter| handle.reload(filter).map_err(|e| e.to_string()))
    };
    Ok((subscriber, LogLevel::new(args.log_level.clone(), change), warnings))
}

fn filter(level: &str) -> Result<EnvFilter, LevelError> {
    for directive in level.split(',') {
        let severity = directive.rsplit_once('=').map_or(directive, |(_, severity)| severity);
        if severity.is_empty() || severity.parse::<LevelFilter>().is_err() {
            return Err(LevelError::NoLevel(directive.to_owned()));
        }
    }
    Ok(EnvFilter::try_new(format!("{QUIET},{level}"))?)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn args(level: &str) -> LogArgs {
        LogArgs { log_level: level.to_owned(), log_format: LogFormat::Text }
    }

    #[test]
    fn an_invalid_filter_is_refused() {
        for level in ["info", "WARN", "off", "debug", "egress_agent=debug,warn", "info,egress_agent::dataplane=debug"] {
            assert!(filter(level).is_ok(), "{level}");
        }
        for level in [
            "",
            "warning",
            "verbose",
            "inf",
            "info,",
            "info, warn",
            "egress_agent",
            "egress_agent=loud",
            "egress_agent=",
        ] {
            let error = filter(level).map(|_| ()).expect_err(level).to_string();
            assert!(error.contains("is neither a level"), "{level}: {error}");
        }
        assert!(subscriber(&args("warning")).is_err(), "an agent without a log does not start");
    }

    /// Other hosts cause each of these lines.
    #[test]
    fn lines_of_libraries_that_other_hosts_cause_are_neither_written_nor_kept() {
        let (subscriber, _level, warnings) = subscriber(&args("off")).expect("a level");
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(target: "h2::proto::streams::recv", "recv_reset; remotely-reset streams reached limit");
            tracing::warn!(target: "netlink_proto::framed", "netlink socket buffer full");
        });
        assert!(warnings.list(SystemTime::now()).is_empty());
        let written = filter("info").expect("a level").to_string();
        assert!(written.contains("h2=off") && written.contains("netlink_proto=off"), "{written}");
    }

    #[test]
    fn recent_warnings_are_kept_regardless_of_the_filter() {
        let (subscriber, level, warnings) = subscriber(&args("off")).expect("a level");
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!("first");
            assert_eq!(level.change("error"), Ok(()));
            tracing::info!("not a warning");
            tracing::warn!("second");
            tracing::error!(target: "kube_client", "logged by the agent, once");
        });
        assert_eq!(
            warnings.list(SystemTime::now()).into_iter().map(|one| one.line).collect::<Vec<_>>(),
            ["first", "second"]
        );
        let refused = level.change("warning").expect_err("no level");
        assert!(refused.contains("\"warning\" is neither a level"), "{refused}");
        assert_eq!(level.now(), "error");
    }
}
