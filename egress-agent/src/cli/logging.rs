//! Structured logs on standard error.

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

use super::CliError;

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

pub(super) fn start(args: &LogArgs) -> Result<(), CliError> {
    // The API client reports each failed request on its own; we say it once, with the cause and what we do.
    let filter = EnvFilter::try_new(format!("kube_client=off,kube_runtime=off,{}", args.log_level))
        .map_err(|source| CliError::LogLevel { level: args.log_level.clone(), source })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    match args.log_format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
