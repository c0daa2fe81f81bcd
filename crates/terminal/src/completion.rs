//! Completion scripts, from the same definition as the command line.

use std::io::{self, Write};

use clap::Command;
pub use clap_complete::Shell;

/// Writes the script of `shell` for this program.
pub fn write(mut definition: Command, shell: Shell, out: &mut impl Write) -> io::Result<()> {
    let (name, mut script) = (definition.get_name().to_owned(), Vec::new());
    // It panics on a failed write, such as a closed pipe.
    clap_complete::generate(shell, &mut definition, name, &mut script);
    out.write_all(&script)
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ValueEnum};

    use super::*;

    #[test]
    fn every_shell_gets_the_commands_and_flags() {
        let inner = Command::new("inner").arg(Arg::new("uplink").long("uplink").help("Of a node"));
        for shell in Shell::value_variants() {
            let (mut script, definition) = (Vec::new(), Command::new("test-agent").subcommand(inner.clone()));
            write(definition, *shell, &mut script).expect("written");
            let script = String::from_utf8(script).expect("text");
            assert!(["test-agent", "inner", "uplink"].iter().all(|part| script.contains(part)), "{shell}: {script}");
        }
    }
}
