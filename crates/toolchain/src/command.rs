//! Running other programs: their output passes through, their failure is one line that names the command.

use std::ffi::OsString;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Progress of something long: one line per step, with the time since the start.
#[derive(Clone, Debug)]
pub struct Progress {
    start: Instant,
}

impl Progress {
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    pub fn step(&self, what: &str) {
        println!("[{:6.1}s] {what}", self.start.elapsed().as_secs_f64());
    }
}

/// Cargo as the user's shell would run it.
///
/// `cargo xtask` is itself run by Cargo, which describes xtask in the environment. Build scripts that watch such
/// variables would run again each time when the user changes between `cargo xtask build` and `cargo build`.
pub fn cargo() -> Command {
    cargo_at(&std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The same with another toolchain's Cargo.
pub(super) fn cargo_at(program: &OsString) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(describes_xtask) {
            command.env_remove(name);
        }
    }
    command
}

fn describes_xtask(name: &str) -> bool {
    const PREFIXES: [&str; 3] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];
    const NAMES: [&str; 4] = ["CARGO_CRATE_NAME", "CARGO_PRIMARY_PACKAGE", "OUT_DIR", "LD_LIBRARY_PATH"];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || NAMES.contains(&name)
}

/// Runs it with its output passed through.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs it and returns what it printed; on failure its error output is part of the message.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("start {}", shown(command)))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("{} failed ({}): {}", shown(command), output.status, message.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} printed no UTF-8", shown(command)))
}

/// The command as one would type it, cut where it becomes too long for a line.
fn shown(command: &Command) -> String {
    const LONGEST: usize = 160;
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    if text.chars().count() > LONGEST {
        text = text.chars().take(LONGEST).chain(" ...".chars()).collect();
    }
    format!("`{text}`")
}

pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}
