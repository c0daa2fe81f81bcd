//! Lines for administrators: text on standard error, which the runtime puts into its own log, or JSON in a file.

use std::path::Path;
use std::sync::Mutex;

use egress_router::node_files;
use serde_json::Value;
use tracing::level_filters::LevelFilter;

/// Starts logging as the configuration says. One that cannot be read logs as if it said nothing.
pub(crate) fn start(input: &str) {
    let config: Value = serde_json::from_str(input).unwrap_or_default();
    let text = |names: [&str; 2]| names.iter().find_map(|name| config[*name].as_str()).filter(|text| !text.is_empty());
    let named = text(["logLevel", "log_level"]);
    let level = named.map_or(Some(LevelFilter::INFO), level);
    let file = text(["logFile", "log_file"]);
    let opened = file.map(|path| node_files::log(Path::new(path)));
    let filter = level.unwrap_or(LevelFilter::INFO);
    let unopened = match opened {
        Some(Ok(file)) => {
            let lines = tracing_subscriber::fmt().json().with_target(false).with_max_level(filter);
            lines.with_writer(Mutex::new(file)).init();
            None
        }
        other => {
            let lines = tracing_subscriber::fmt().with_target(false).with_ansi(false).with_max_level(filter);
            lines.without_time().with_writer(std::io::stderr).init();
            other.and_then(Result::err)
        }
    };
    if let Some(error) = unopened {
        tracing::warn!(file, %error, "cannot write the log file; logging to standard error");
    }
    if level.is_none() {
        tracing::warn!(level = named, "unknown log level; info is used");
    }
}

/// The names of the published plugin, and the usual ones.
fn level(name: &str) -> Option<LevelFilter> {
    match name.to_ascii_lowercase().as_str() {
        "panic" => Some(LevelFilter::ERROR),
        "verbose" => Some(LevelFilter::INFO),
        name => name.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_known_in_any_case() {
        for (name, expected) in [
            ("Error", Some(LevelFilter::ERROR)),
            ("PANIC", Some(LevelFilter::ERROR)),
            ("VERbose", Some(LevelFilter::INFO)),
            ("debug", Some(LevelFilter::DEBUG)),
            ("warn", Some(LevelFilter::WARN)),
            ("XXXX", None),
        ] {
            assert_eq!(level(name), expected, "{name}");
        }
    }
}
