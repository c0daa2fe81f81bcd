//! Structured logs on standard error.

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, reload};

use super::CliError;
use crate::inspect::log::{LogLevel, Troubles};

#[derive(Args, Debug)]
pub(super) struct LogArgs {
    /// Least severity of log lines, in general or by module (info, debug, egress_agent=debug,warn)
    #[arg(long, env = "EGRESS_AGENT_LOG_LEVEL", default_value = "info")]
    log_level: String,
    /// Shape of log lines
    #[arg(long, env = "EGRESS_AGENT_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// The log begins; what comes back changes how much is written, and remembers what was worst.
pub(super) fn start(args: &LogArgs) -> Result<(LogLevel, Troubles), CliError> {
    let filter =
        filter(&args.log_level).map_err(|source| CliError::LogLevel { level: args.log_level.clone(), source })?;
    let (filter, handle) = reload::Layer::new(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let lines = match args.log_format {
        LogFormat::Text => lines.with_ansi(false).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let troubles = Troubles::default();
    tracing_subscriber::registry().with(filter).with(lines).with(troubles.clone()).init();
    let change = move |level: &str| {
        let filter = self::filter(level).map_err(|error| CliError::LogLevel { level: level.to_owned(), source: error });
        filter.map_err(|error| error.to_string()).and_then(|filter| handle.reload(filter).map_err(|e| e.to_string()))
    };
    Ok((LogLevel::new(args.log_level.clone(), change), troubles))
}

/// The API client reports each failed request on its own; we say it once, with the cause and what we do.
fn filter(level: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::try_new(format!("kube_client=off,kube_runtime=off,{level}"))
}
