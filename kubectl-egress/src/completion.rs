//! Completion on kubectl's command line. The completion of kubectl 1.26 and later runs `kubectl_complete-egress` with the words
//! after `egress`, of which the last is being typed, and reads one candidate a line and a directive (the protocol of Cobra's
//! `__complete`). That program is this binary by another name.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;

use clap::builder::ValueHint;
use clap::{Arg, Command};

/// The name that kubectl looks for.
const PROGRAM: &str = "kubectl_complete-egress";

/// Cobra's `ShellCompDirectiveDefault` and `ShellCompDirectiveNoFileComp`.
const FILES_TOO: u8 = 0;
const NO_FILES: u8 = 4;

/// What can stand in the place of a word.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Completion {
    /// With a description, which may be empty.
    candidates: Vec<(String, String)>,
    has_files: bool,
}

pub(crate) fn is_asked_for(program: &OsStr) -> bool {
    Path::new(program).file_name() == Some(OsStr::new(PROGRAM))
}

impl Completion {
    /// For the last of these words. `definition` is built ([`Command::build`]), so that each command has the flags of all.
    pub(crate) fn of(definition: &Command, words: &[String]) -> Self {
        let (typed, before) = words.split_last().map_or(("", &[][..]), |(typed, before)| (typed.as_str(), before));
        let (mut command, mut flag) = (definition, None);
        for word in before {
            if flag.take().is_some() {
                continue;
            }
            if word == "--" {
                // Arguments of the agent's own command.
                return Self::default();
            }
            flag = value_flag(command, word);
            command = command.find_subcommand(word).unwrap_or(command);
        }
        match flag {
            Some(flag) => Self::value(flag, typed),
            None if typed.starts_with('-') => Self { candidates: flags(command, typed), has_files: false },
            None => Self { candidates: words_of(command, typed), has_files: false },
        }
    }

    fn value(flag: &Arg, typed: &str) -> Self {
        let hint = flag.get_value_hint();
        let has_files = matches!(hint, ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath);
        Self { candidates: values(flag, typed), has_files }
    }

    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        for (candidate, description) in &self.candidates {
            match description.as_str() {
                "" => writeln!(out, "{candidate}")?,
                description => writeln!(out, "{candidate}\t{description}")?,
            }
        }
        writeln!(out, ":{}", if self.has_files { FILES_TOO } else { NO_FILES })
    }
}

/// The flag whose value is the next word.
fn value_flag<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let is_named = |arg: &&Arg| match word.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => arg.get_short().is_some_and(|short| word.strip_prefix('-') == Some(short.to_string().as_str())),
    };
    command.get_arguments().find(is_named).filter(|arg| arg.get_action().takes_values())
}

fn flags(command: &Command, typed: &str) -> Vec<(String, String)> {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let named = shown.filter_map(|arg| Some((format!("--{}", arg.get_long()?), first_line(arg.get_help()))));
    named.filter(|(name, _)| name.starts_with(typed)).collect()
}

/// Commands, and values of arguments without a flag.
fn words_of(command: &Command, typed: &str) -> Vec<(String, String)> {
    let commands = command.get_subcommands().filter(|one| !one.is_hide_set() && one.get_name().starts_with(typed));
    let commands = commands.map(|one| (one.get_name().to_owned(), first_line(one.get_about())));
    commands
        .chain(command.get_positionals().filter(|arg| !arg.is_last_set()).flat_map(|arg| values(arg, typed)))
        .collect()
}

fn values(arg: &Arg, typed: &str) -> Vec<(String, String)> {
    let possible = arg.get_possible_values().into_iter().filter(|one| !one.is_hide_set());
    let named = possible.map(|one| (one.get_name().to_owned(), first_line(one.get_help())));
    named.filter(|(name, _)| name.starts_with(typed)).collect()
}

fn first_line(text: Option<&clap::builder::StyledStr>) -> String {
    text.and_then(|text| text.to_string().lines().next().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::arguments::Cli;

    fn names(words: &[&str]) -> (Vec<String>, bool) {
        let mut definition = Cli::command();
        definition.build();
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let Completion { candidates, has_files } = Completion::of(&definition, &words);
        (candidates.into_iter().map(|(name, _)| name).collect(), has_files)
    }

    #[test]
    fn commands_flags_and_values_are_completed() {
        let every = names(&[""]).0;
        assert!(["status", "nat", "who", "bundle"].iter().all(|name| every.iter().any(|one| one == name)), "{every:?}");
        assert_eq!(names(&["st"]), (vec!["status".to_owned()], false));
        assert_eq!(names(&["status", "--no"]), (vec!["--node".to_owned()], false));
        // A flag of all commands, and its value, before the command.
        assert_eq!(names(&["-n", "who", "who", "--agent"]), (vec!["--agent-namespace".to_owned()], false));
        assert_eq!(names(&["nat", "co"]), (vec!["count".to_owned()], false));
    }

    #[test]
    fn only_files_are_files() {
        assert_eq!(names(&["--kubeconfig", ""]), (Vec::new(), true));
        assert_eq!(names(&["--context", ""]), (Vec::new(), false));
        assert_eq!(names(&["status", "--node", "node1", "--", "--o"]), (Vec::new(), false), "the agent's arguments");
    }

    #[test]
    fn a_directive_ends_the_answer() {
        let mut written = Vec::new();
        let completion = Completion { candidates: vec![("who".to_owned(), "Names".to_owned())], has_files: false };
        completion.write(&mut written).expect("memory");
        assert_eq!(String::from_utf8(written).expect("text"), "who\tNames\n:4\n");
    }

    #[test]
    fn the_name_of_the_program_decides() {
        assert!(is_asked_for(OsStr::new("/usr/local/bin/kubectl_complete-egress")));
        assert!(!is_asked_for(OsStr::new("/usr/local/bin/kubectl-egress")) && !is_asked_for(OsStr::new("")));
    }
}
