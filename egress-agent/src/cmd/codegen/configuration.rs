//! Generates `docs/configuration.md` from the definitions of flags and file keys: a section for each command, a row for each
//! flag. `cargo xtask codegen --check` fails if the page is outdated.
//!
//! A default that is not a value is at the end of the flag's help, as `[default: ...]`; it goes into the column of defaults.

use std::fmt::Write as _;

use clap::{Arg, Command};

use crate::config::file::KEYS;

/// The sections of all commands, and the table of the configuration file's keys.
pub(super) fn sections(command: &Command) -> String {
    let mut command = command.clone();
    command.build();
    let mut text = keys();
    for one in shown(&command) {
        section(&mut text, one);
    }
    text
}

fn keys() -> String {
    let mut text = String::from(
        "## Keys of the file\n\n| section | key | flag of `egress-agent run` and `egress-agent controller` |\n|---|---|---|\n",
    );
    for (section, key, flag) in KEYS {
        append(&mut text, &format!("| `[{section}]` | `{key}` | `--{flag}` |\n"));
    }
    text
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|one| !one.is_hide_set() && one.get_name() != "help")
}

/// A command, or each of its subcommands.
fn section(text: &mut String, command: &Command) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    let usage = usage.trim_start_matches("Usage: ");
    append(text, &format!("\n## {name}\n\n{about}: `{usage}`\n"));
    let mut previous: Option<(String, String)> = None;
    for one in shown(command) {
        let (name, tables) = (one.get_bin_name().unwrap_or_default().to_owned(), tables(one));
        let about = one.get_about().map(ToString::to_string).unwrap_or_default();
        match &previous {
            Some((other, same)) if *same == tables => {
                append(text, &format!("\n`{name}`: {about}. It has the flags of `{other}`.\n"));
            }
            _ => append(text, &format!("\n`{name}`: {about}.\n{tables}")),
        }
        previous = Some((name, tables));
    }
    if previous.is_none() {
        text.push_str(&tables(command));
    }
}

/// One table for each heading of the command's help, in that order.
fn tables(command: &Command) -> String {
    let mut headings = Vec::new();
    for argument in arguments(command) {
        if !headings.contains(&argument.get_help_heading()) {
            headings.push(argument.get_help_heading());
        }
    }
    // Only these commands read the configuration file.
    let has_file = ["run", "controller"].contains(&command.get_name());
    let mut text = String::new();
    for heading in &headings {
        if let Some(heading) = heading.filter(|_| headings.len() > 1) {
            append(&mut text, &format!("\n### {heading}\n"));
        }
        let (title, line) = if has_file { (" key of the file |", "---|") } else { ("", "") };
        append(&mut text, &format!("\n| flag | value | default | variable |{title} meaning |\n"));
        append(&mut text, &format!("|---|---|---|---|{line}---|\n"));
        for argument in arguments(command).filter(|one| one.get_help_heading() == *heading) {
            text.push_str(&row(argument, has_file));
        }
    }
    text
}

fn arguments(command: &Command) -> impl Iterator<Item = &Arg> {
    let of_clap = ["help", "version"];
    command.get_arguments().filter(move |argument| !of_clap.contains(&argument.get_id().as_str()))
}

fn row(argument: &Arg, has_file: bool) -> String {
    let variable = argument.get_env().unwrap_or_default().to_string_lossy();
    let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let (help, described) = match help.strip_suffix(']').and_then(|help| help.rsplit_once(" [default: ")) {
        Some((help, default)) => (help.to_owned(), Some(default.to_owned())),
        None => (help, None),
    };
    let default = described.or_else(|| default(argument)).unwrap_or_default();
    let key = match KEYS.iter().find(|(_, _, flag)| argument.get_long() == Some(flag)) {
        Some((section, key, _)) => format!(" `[{section}]` `{key}` |"),
        None => " |".to_owned(),
    };
    let key = if has_file { key.as_str() } else { "" };
    let (name, value, values) = (name(argument), value(argument), values(argument));
    format!("| {name} | {value} | {default} | `{variable}` |{key} {help}{values} |\n")
}

fn name(argument: &Arg) -> String {
    match (argument.get_short(), argument.get_long()) {
        (Some(short), Some(long)) => format!("`-{short}`, `--{long}`"),
        (None, Some(long)) => format!("`--{long}`"),
        _ => format!("`{}`, without a flag", value_name(argument)),
    }
}

fn value_name(argument: &Arg) -> String {
    argument.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn value(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return "none; the variable `true` or `false`".to_owned();
    }
    let possible = argument.get_possible_values();
    if possible.is_empty() {
        return format!("`{}`", value_name(argument));
    }
    possible.iter().map(|value| format!("`{}`", value.get_name())).collect::<Vec<_>>().join(", ")
}

fn default(argument: &Arg) -> Option<String> {
    let values: Vec<String> =
        argument.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    match values.is_empty() || argument.is_hide_default_value_set() {
        true if argument.is_required_set() => Some("required".to_owned()),
        true => None,
        false if !argument.get_action().takes_values() => None,
        false => Some(values.join(", ")),
    }
}

/// The meaning of each possible value, if they are a closed list.
fn values(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return String::new();
    }
    let each = argument.get_possible_values();
    let each = each.iter().filter_map(|value| Some(format!("`{}`: {}", value.get_name(), value.get_help()?)));
    let list = each.collect::<Vec<_>>().join("; ");
    if list.is_empty() { list } else { format!(". {list}") }
}

fn append(text: &mut String, more: &str) {
    // Writing to a string does not fail.
    let _written = text.write_str(more);
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cmd::Cli;

    fn all(command: &Command) -> Vec<Command> {
        let mut found = Vec::new();
        for one in shown(command) {
            found.push(one.clone());
            found.extend(all(one));
        }
        found
    }

    /// Commands with their flags, `nat list` and the like among them.
    fn commands() -> Vec<Command> {
        let mut command = Cli::command();
        command.build();
        all(&command)
    }

    #[test]
    fn every_flag_of_every_command_has_a_row() {
        let text = sections(&Cli::command());
        for command in commands() {
            for argument in arguments(&command) {
                let row = format!("| {} | {} | ", name(argument), value(argument));
                assert!(text.contains(&row), "{row} of {:?}", command.get_bin_name());
            }
        }
        let row = "| `--node-name` | `NAME` | required | `EGRESS_AGENT_NODE_NAME` | | Name of the Node object";
        assert!(text.contains(row), "{text}");
        let row = "| `--tunnel-port` | `PORT` | `4794` | `EGRESS_AGENT_TUNNEL_PORT` | | UDP port";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("| `--egressip-healthcheck-client-cert` | `FILE` | plaintext | "), "a described default");
        for (section, key, flag) in KEYS {
            assert!(text.contains(&format!("| `[{section}]` | `{key}` | `--{flag}` |")), "{key}");
            assert!(text.contains(&format!(" | `[{section}]` `{key}` | ")), "{key} in the row of its flag");
        }
    }

    #[test]
    fn every_row_has_all_columns() {
        let mut columns = 0;
        for line in sections(&Cli::command()).lines().filter(|line| line.starts_with('|')) {
            let bars = line.matches('|').count();
            if line.starts_with("| flag |") || line.starts_with("| section |") {
                columns = bars;
            }
            assert_eq!(bars, columns, "{line}");
        }
    }

    /// Allowed names of values, the unit if there is one. Without a name clap repeats the flag's.
    const VALUES: [&str; 22] = [
        "ADDRESS",
        "ADDRESS:PORT",
        "ADDRESS[:PORT]",
        "BYTES",
        "CIDR,...",
        "DIRECTORY",
        "ENTRIES",
        "FILE",
        "FILTER",
        "HOPS",
        "INTERFACE",
        "NAME",
        "NAMESPACE",
        "IMAGE",
        "NAMESPACE/NAME",
        "NODE",
        "NUMBER",
        "PATH",
        "PERCENT",
        "PORT",
        "SECONDS",
        "TIME",
    ];

    #[test]
    fn every_value_has_a_descriptive_name() {
        for command in commands() {
            for argument in arguments(&command).filter(|argument| argument.get_action().takes_values()) {
                let name = value_name(argument);
                let is_listed =
                    !argument.get_possible_values().is_empty() || ["PROTOCOL", "REASON"].contains(&name.as_str());
                assert!(is_listed || VALUES.contains(&name.as_str()), "{}: <{name}>", argument.get_id());
            }
        }
    }

    /// A range in a flag's help, as in `(1 to 65535)`, is the one that the flag accepts.
    #[test]
    fn ranges_are_those_that_flags_accept() {
        let mut seen = 0;
        for command in commands() {
            for argument in arguments(&command) {
                let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
                let numbers = help.split(['(', ')']).find_map(|part| {
                    let (least, most) = part.split_once(" to ")?;
                    Some((least.parse::<i64>().ok()?, most.parse::<i64>().ok()?))
                });
                let Some((least, most)) = numbers else { continue };
                seen += 1;
                let alone = Command::new("alone").no_binary_name(true).arg(argument.clone());
                let takes = |number: i64| {
                    let line = format!("--{}={number}", argument.get_long().unwrap_or_default());
                    alone.clone().try_get_matches_from([line]).is_ok()
                };
                let id = argument.get_id();
                assert!(takes(least) && takes(most), "{id} accepts what its help says: {help}");
                assert!(!takes(least - 1) && !takes(most + 1), "{id} accepts more than its help says: {help}");
            }
        }
        assert!(seen > 10, "only {seen} flags have a range");
    }

    /// As the tables say of flags without a value.
    #[test]
    fn variables_of_switches_are_true_or_false() {
        let strict = clap::builder::ValueParser::bool();
        for command in commands() {
            for switch in arguments(&command).filter(|argument| !argument.get_action().takes_values()) {
                assert_eq!(format!("{:?}", switch.get_value_parser()), format!("{strict:?}"), "{}", switch.get_id());
            }
        }
    }
}
