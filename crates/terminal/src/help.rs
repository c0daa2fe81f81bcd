//! The environment variables of flags: clap prints each in its flag's paragraph, which doubles the length of a page. Here
//! they are a list after the flags.

use clap::{Arg, Command};

/// The definition with the variables of each command at the end of its long help.
pub fn with_variables(command: Command) -> Command {
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let variables: Vec<String> = arguments.filter_map(variable).collect();
    let command = command.mut_args(|argument| argument.hide_env(true)).mut_subcommands(with_variables);
    if variables.is_empty() {
        return command;
    }
    let list: String = variables.iter().map(|variable| format!("\n  {variable}")).collect();
    let short = "A variable sets each flag: see --help";
    command.after_help(short).after_long_help(format!("Environment variables, named after the flags:{list}"))
}

/// With the flag, if its name is not the end of the variable's.
fn variable(argument: &Arg) -> Option<String> {
    let variable = argument.get_env()?.to_string_lossy().into_owned();
    let flag = argument.get_long().unwrap_or(argument.get_id().as_str());
    let is_named_after = variable.ends_with(&flag.to_uppercase().replace('-', "_"));
    Some(if is_named_after { variable } else { format!("{variable} (--{flag})") })
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    fn definition() -> Command {
        let flag =
            |name: &'static str, variable: &'static str| Arg::new(name).long(name).env(variable).help("Of a node");
        let inner = Command::new("inner").arg(flag("uplink", "TEST_UPLINK")).arg(flag("node-port", "TEST_PORT"));
        let plain = Command::new("plain").arg(Arg::new("all").long("all").action(ArgAction::SetTrue));
        with_variables(Command::new("test").subcommand(inner).subcommand(plain))
    }

    fn long_help(name: &str) -> String {
        let mut definition = definition();
        definition.find_subcommand_mut(name).expect("a command").render_long_help().to_string()
    }

    #[test]
    fn each_variable_is_listed_once_after_the_flags() {
        let help = long_help("inner");
        let end = "\n\nEnvironment variables, named after the flags:\n  TEST_UPLINK\n  TEST_PORT (--node-port)\n";
        assert!(help.ends_with(end), "{help}");
        assert_eq!(help.matches("TEST_").count(), 2, "{help}");
        let mut definition = definition();
        let short = definition.find_subcommand_mut("inner").expect("a command").render_help().to_string();
        assert!(!short.contains("TEST_") && short.contains("see --help"), "{short}");
        assert!(!long_help("plain").contains("variable"), "it has none");
    }

    /// `hide_env` changes the help alone.
    #[test]
    fn a_hidden_variable_is_read() {
        let variable = definition().find_subcommand("inner").and_then(|inner| {
            inner
                .get_arguments()
                .find(|one| one.get_id() == "node-port")
                .and_then(|one| one.get_env().map(ToOwned::to_owned))
        });
        assert_eq!(variable.as_deref(), Some("TEST_PORT".as_ref()));
    }
}
