//! `egress-agent cni` and `egress-agent cni-install`.

use std::ffi::OsStr;
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use crate::cmd::CliError;
use crate::cmd::page::DEFAULT_SOCKET;
use crate::cni::chain::{self, ChainError};
use crate::cni::{PLUGIN, plugin};

/// The longest time without the plugin after the CNI has rewritten its file.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Args, Debug)]
pub(super) struct CniInstallArgs {
    /// Directory of the CNI configurations, which the container runtime reads
    #[arg(long, env = "EGRESS_AGENT_CNI_CONF_DIR", value_name = "DIRECTORY", default_value = "/etc/cni/net.d")]
    cni_conf_dir: PathBuf,
    /// Directory of the CNI binaries, which the container runtime calls
    #[arg(long, env = "EGRESS_AGENT_CNI_BIN_DIR", value_name = "DIRECTORY", default_value = "/opt/cni/bin")]
    cni_bin_dir: PathBuf,
    /// Path of the agent's socket on the host, for the plugin
    #[arg(long, env = "EGRESS_AGENT_CNI_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    cni_socket: PathBuf,
}

/// Whether this process is called as a plugin, by a runtime, without arguments.
pub(super) fn is_plugin(name: Option<&OsStr>) -> bool {
    name.map(PathBuf::from).is_some_and(|path| path.file_name() == Some(OsStr::new(PLUGIN)))
}

/// Errors go to standard output in the protocol's format; warnings go to standard error.
pub(super) fn run() -> ExitCode {
    let mut input = String::new();
    let outcome = stdin().read_to_string(&mut input).and_then(|_| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let warn = |line: &str| eprintln!("{PLUGIN}: {line}");
        Ok(runtime.block_on(plugin::run(|name| std::env::var(name).ok(), &input, plugin::AGENT_TIMEOUT, warn)))
    });
    match outcome {
        Ok(Ok(result)) => {
            if let Some(result) = result {
                println!("{result}");
            }
            ExitCode::SUCCESS
        }
        Ok(Err(failure)) => {
            println!("{}", failure.to_json(None));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{PLUGIN}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Keeps the plugin in the node's chain until a signal. It stays there after that, for the time of an agent's update.
pub(super) fn install(args: &CniInstallArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (mut reported, mut is_first) = (String::new(), true);
        loop {
            match keep(args, is_first) {
                Ok(written) => {
                    written.iter().for_each(|path| println!("wrote {}", path.display()));
                    reported.clear();
                    is_first = false;
                }
                // Once for each error, which may repeat every two seconds.
                Err(error) => {
                    let line = error.to_string();
                    if line != reported {
                        eprintln!("{line}; trying again");
                        reported = line;
                    }
                }
            }
            tokio::select! {
                _ = terminate.recv() => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
                () = sleep(CHECK_INTERVAL) => {}
            }
        }
    })
}

/// The program first: a chain must not name a missing one. Its content is compared only once.
fn keep(args: &CniInstallArgs, compare: bool) -> Result<Vec<PathBuf>, ChainError> {
    let CniInstallArgs { cni_conf_dir, cni_bin_dir, cni_socket } = args;
    let mut written = Vec::new();
    if compare || !cni_bin_dir.join(PLUGIN).exists() {
        written.extend(chain::add_program(cni_bin_dir, Path::new("/proc/self/exe"))?);
    }
    written.extend(chain::add(cni_conf_dir, cni_socket)?);
    Ok(written)
}

/// Removes the plugin. Returns what was written or removed.
pub(super) fn remove(conf_dir: &Path, bin_dir: &Path) -> Result<Vec<PathBuf>, ChainError> {
    let mut changed = chain::remove(conf_dir)?;
    changed.extend(chain::remove_program(bin_dir)?);
    Ok(changed)
}
