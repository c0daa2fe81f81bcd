//! `--config-file`: OVN-Kubernetes' configuration file, of which the agent reads the keys about egress IPs.
//!
//! A key stands for the flag that [`KEYS`] names; a flag or its variable overrides it. Unknown keys and other sections are
//! ignored with a warning. An invalid value is an error with file, line and key, also if a flag overrides it.
//!
//! The syntax is git's, as in OVN-Kubernetes: sections in brackets, `key = value`, names in either case, comments from `#`
//! or `;` to the end of the line, quotes and backslashes inside values; a key alone means `true`. Libraries for INI files
//! do not report the line of a value, so the parser is here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::error::ContextKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

/// Section, key, and the flag that it stands for.
pub const KEYS: [(&str, &str, &str); 7] = [
    ("ovnkubernetesfeature", "egressip-node-healthcheck-port", "egressip-node-healthcheck-port"),
    ("ovnkubernetesfeature", "egressip-reachability-total-timeout", "egressip-reachability-total-timeout"),
    ("egressip-healthcheck-tls", "client-cert", "egressip-healthcheck-client-cert"),
    ("egressip-healthcheck-tls", "client-privkey", "egressip-healthcheck-client-privkey"),
    ("egressip-healthcheck-tls", "client-cacert", "egressip-healthcheck-client-cacert"),
    ("egressip-healthcheck-tls", "cert-common-name", "egressip-healthcheck-cert-common-name"),
    ("egressip-healthcheck-tls", "client-auth", "egressip-healthcheck-client-auth"),
];

/// A key, or the start of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ConfigEntry {
    line: usize,
    /// As in [`KEYS`]: lower case.
    section: String,
    /// `None` at the start of a section.
    key: Option<String>,
    value: String,
}

/// The settings of the file, and warnings about ignored parts.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ConfigFile {
    path: PathBuf,
    settings: Vec<Setting>,
    /// What was ignored, one line each.
    pub warnings: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct Setting {
    line: usize,
    key: String,
    flag: &'static str,
    value: String,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    #[error("cannot read {}: {source}; check --config-file", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}:{line}: {problem}", path.display())]
    Syntax { path: PathBuf, line: usize, problem: Problem },
    #[error("{}:{line}: {key} = {value:?}: {why}", path.display())]
    Value { path: PathBuf, line: usize, key: String, value: String, why: String },
}

/// What is wrong with a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("a section begins as [name]")]
    Section,
    #[error("a key before the first [section]")]
    NoSection,
    #[error("this is no key: letters, digits and dashes, then = and the value")]
    Key,
    #[error("the quotes are not closed")]
    OpenQuote,
    #[error(r#"after a backslash comes one of \ " n t"#)]
    Escape,
}

impl ConfigFile {
    pub fn read(path: &Path) -> Result<Self, ConfigFileError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigFileError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ConfigFileError> {
        let entries = entries(text).map_err(|(line, problem)| {
            let path = path.to_owned();
            ConfigFileError::Syntax { path, line, problem }
        })?;
        let mut file = Self { path: path.to_owned(), ..Self::default() };
        let mut warned = BTreeSet::new();
        for ConfigEntry { line, section, key, value } in entries {
            let name = key.as_deref().unwrap_or_default();
            let known = KEYS.iter().find(|known| (known.0, known.1) == (section.as_str(), name));
            match (known, key) {
                // A template leaves an empty value for an unset setting.
                (Some(_), Some(_)) if value.is_empty() => {}
                (Some((_, _, flag)), Some(key)) => {
                    // The last one counts.
                    file.settings.retain(|other| other.flag != *flag);
                    file.settings.push(Setting { line, key, flag, value });
                }
                (_, None) if is_ours(&section) => {}
                (_, key) => {
                    let what = match &key {
                        Some(key) => format!("{key} in [{section}]"),
                        None => format!("section [{section}]"),
                    };
                    if warned.insert(what.clone()) {
                        file.warnings
                            .push(format!("{}:{line}: {what} is ignored: the agent does not use it", path.display()));
                    }
                }
            }
        }
        Ok(file)
    }

    /// The settings that no flag or variable overrides, as arguments. `command` defines the flags, `given` are their values
    /// without the file.
    pub fn arguments(&self, command: &Command, given: &ArgMatches) -> Result<Vec<String>, ConfigFileError> {
        let mut arguments = Vec::new();
        for Setting { line, key, flag, value } in &self.settings {
            let Some(definition) = command.get_arguments().find(|argument| argument.get_long() == Some(flag)) else {
                continue;
            };
            let argument = format!("--{flag}={value}");
            let alone = Command::new("file").no_binary_name(true).arg(definition.clone());
            if let Err(error) = alone.try_get_matches_from([&argument]) {
                let (path, line, key, value) = (self.path.clone(), *line, key.clone(), value.clone());
                return Err(ConfigFileError::Value { path, line, key, value, why: why(&error) });
            }
            let source = given.value_source(definition.get_id().as_str());
            if !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
                arguments.push(argument);
            }
        }
        Ok(arguments)
    }
}

fn is_ours(section: &str) -> bool {
    KEYS.iter().any(|known| known.0 == section)
}

/// Clap's error about a value, without its advice about the command line.
fn why(error: &clap::Error) -> String {
    if let Some(source) = std::error::Error::source(error) {
        return source.to_string();
    }
    match error.get(ContextKind::ValidValue) {
        Some(values) => format!("it is one of {values}"),
        None => error.kind().to_string(),
    }
}

/// Reads all lines; other sections are skipped.
fn entries(text: &str) -> Result<Vec<ConfigEntry>, (usize, Problem)> {
    let (mut all, mut section) = (Vec::new(), None::<String>);
    for (line, text) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
        let text = text.trim();
        if text.is_empty() || text.starts_with(['#', ';']) {
            continue;
        }
        if let Some(rest) = text.strip_prefix('[') {
            let name = section_name(rest).ok_or((line, Problem::Section))?;
            all.push(ConfigEntry { line, section: name.clone(), key: None, value: String::new() });
            section = Some(name);
            continue;
        }
        let section = section.as_deref().ok_or((line, Problem::NoSection))?;
        if is_ours(section) {
            let (key, value) = key_and_value(text).map_err(|problem| (line, problem))?;
            all.push(ConfigEntry { line, section: section.to_owned(), key: Some(key), value });
        }
    }
    Ok(all)
}

/// The name between the brackets, of which the first is removed.
fn section_name(text: &str) -> Option<String> {
    let (name, rest) = text.split_once(']')?;
    let (name, rest) = (name.trim(), rest.trim());
    let is_end = rest.is_empty() || rest.starts_with(['#', ';']);
    (is_end && !name.is_empty()).then(|| name.to_lowercase())
}

fn key_and_value(text: &str) -> Result<(String, String), Problem> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(text.len());
    let (key, rest) = text.split_at(end);
    if !key.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return Err(Problem::Key);
    }
    let value = match rest.trim_start() {
        rest if rest.is_empty() || rest.starts_with(['#', ';']) => "true".to_owned(),
        rest => value(rest.strip_prefix('=').ok_or(Problem::Key)?)?,
    };
    Ok((key.to_lowercase(), value))
}

fn value(text: &str) -> Result<String, Problem> {
    let (mut value, mut quoted) = (String::new(), false);
    // The end of the value without trailing spaces.
    let mut end = 0;
    let mut rest = text.trim_start().chars();
    while let Some(character) = rest.next() {
        match character {
            '"' => quoted = !quoted,
            '#' | ';' if !quoted => break,
            '\\' => {
                value.push(match rest.next() {
                    Some(escaped @ ('\\' | '"')) => escaped,
                    Some('n') => '\n',
                    Some('t') => '\t',
                    _ => return Err(Problem::Escape),
                });
                end = value.len();
            }
            plain => {
                value.push(plain);
                if quoted || !plain.is_whitespace() {
                    end = value.len();
                }
            }
        }
    }
    if quoted {
        return Err(Problem::OpenQuote);
    }
    value.truncate(end);
    Ok(value)
}

#[cfg(test)]
mod tests;
