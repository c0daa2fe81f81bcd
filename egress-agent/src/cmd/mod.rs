//! The command line. Every flag has an environment variable; a flag overrides it, and both override `--config-file`.

pub mod cleanup;
pub mod cni;
pub mod codegen;
pub mod completion;
pub mod connect;
pub mod controller;
#[cfg(test)]
mod documents;
pub mod drain;
pub mod drops;
pub mod interfaces;
pub mod log_level;
pub mod logging;
#[cfg(test)]
mod manifests;
pub mod migrate;
pub mod mount_bpffs;
pub mod nat;
pub mod page;
pub mod run;
pub mod status;
pub mod trace;
pub mod uplink;
pub mod values;

use crate::config::tls;
use egress_supervise::Task;
use egress_terminal::help;
use egress_terminal::page::{Severity, complain};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::config::file::{ConfigFile, ConfigFileError};
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::debug::socket::AskError;
use crate::health::tls::TlsError;
use egress_datapath::bpffs::MountError;
use egress_datapath::names::DEFAULT_BPFFS;
use egress_datapath::{self, StartError};
use egress_kube::client::ClientError;
use egress_kube::drain::DrainError;

#[derive(Parser)]
#[command(name = "egress-agent", version, about = "Gives Kubernetes pods a stable source address")]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve this node: load the programs, and fill their maps from Kubernetes' state
    Run(Box<run::RunArgs>),
    /// Assign egress IPs to nodes, where elected; one of two leads
    Controller(Box<controller::ControllerArgs>),
    /// Show the state of this node's agent
    Status(status::StatusArgs),
    /// Predict the verdict for a packet of a pod of this node, with the reason, without sending one
    Trace(Box<trace::TraceArgs>),
    /// List or count the NAT mappings of this node
    Nat(Box<nat::NatArgs>),
    /// Show a sample of the packets dropped on this node
    Drops(drops::DropsArgs),
    /// Show or change the log filter of this node's agent
    LogLevel(log_level::LogLevelArgs),
    /// Move a node's egress IPs to other nodes, and assign it none
    Drain(drain::DrainArgs),
    /// Make one TCP connection and print what came of it; `kubectl egress check` runs this in a pod
    Connect(connect::ConnectArgs),
    /// Convert the objects of another system, and say what changes
    Migrate(migrate::MigrateArgs),
    /// Remove every trace of the agent from this node's kernel
    Cleanup(cleanup::CleanupArgs),
    /// Mount a BPF file system on this node, if it has none
    MountBpffs(mount_bpffs::MountBpffsArgs),
    /// CNI plugin, called by the container runtime: reports the addresses of a new pod to the agent
    Cni,
    /// Add the plugin to this node's CNI chain, and keep it there
    CniInstall(cni::CniInstallArgs),
    /// Print the completion script of a shell, for its folder of such scripts
    Completion(completion::CompletionArgs),
    /// Print a file that is generated from code
    #[command(hide = true)]
    Codegen(codegen::CodegenArgs),
}

/// The command line as it is parsed and described.
pub fn definition() -> clap::Command {
    help::with_variables(Cli::command())
}

/// Cancelled by SIGTERM and SIGINT.
fn stop_on_signal() -> Result<CancellationToken, CliError> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    let follow = async move {
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM: stopping"),
            _ = interrupt.recv() => info!("SIGINT: stopping"),
        }
        stopping.cancel();
    };
    tokio::spawn(egress_supervise::until(stop.clone(), Task::Signals, follow));
    Ok(stop)
}

/// Flags of the node's devices and pins.
#[derive(Args, Debug)]
#[command(next_help_heading = "On this node")]
struct NodeArgs {
    /// External interface, which announces egress IPs and sends their packets [default: breth0, else br-ex, else that of the
    /// default route]
    #[arg(long, env = "EGRESS_AGENT_UPLINK", value_name = "INTERFACE")]
    uplink: Option<String>,
    /// Interface by which pods' traffic enters the host: OVN-Kubernetes' management port, or the bridge of the CNI, like cni0
    #[arg(long, env = "EGRESS_AGENT_MGMT_PORT", value_name = "INTERFACE", default_value = "ovn-k8s-mp0")]
    mgmt_port: String,
    /// Directory of pinned programs and maps, on a BPF file system; before a change run `egress-agent cleanup` with the
    /// former one
    #[arg(long, env = "EGRESS_AGENT_BPFFS", value_name = "DIRECTORY", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
}

impl NodeArgs {
    /// Cleanup works without an uplink: its name is only needed for filters without a pin.
    fn settings_for_removal(&self, detected: Option<String>) -> egress_datapath::Settings {
        self.settings_for(self.uplink.clone().or(detected).unwrap_or_default())
    }

    fn settings_for(&self, uplink: String) -> egress_datapath::Settings {
        let mut settings = egress_datapath::Settings::new(uplink, self.mgmt_port.clone());
        settings.bpffs.clone_from(&self.bpffs);
        settings
    }
}

/// Why a command failed: one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error(transparent)]
    Usage(#[from] clap::Error),
    #[error("the uplink is now {now}; at the start it was {was}: a restart is enough; --uplink names it for good")]
    AnotherUplink { was: String, now: String },
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("--log-level {level:?} is not understood: {source}; try info, debug, or egress_agent=debug,warn")]
    LogLevel { level: String, source: logging::LevelError },
    #[error(transparent)]
    NothingHere(#[from] status::NothingHere),
    #[error(transparent)]
    NoTrace(#[from] trace::NoTrace),
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error(transparent)]
    NoMappings(#[from] nat::NoMappings),
    #[error(transparent)]
    UnreadableLog(#[from] nat::log::UnreadableLog),
    #[error(transparent)]
    NoDrops(#[from] drops::NoDrops),
    #[error("the programs and the decision differ, see above")]
    Disagree,
    #[error(transparent)]
    Drain(#[from] DrainError),
    #[error("{to}: {why}")]
    NotConnected { to: SocketAddr, why: String },
    #[error(transparent)]
    Migrate(#[from] migrate::MigrateError),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    UnusableTls(#[from] tls::UnusableTls),
    #[error("TLS of health checks: {0}")]
    Tls(#[from] TlsError),
    #[error(transparent)]
    ConfigFile(#[from] ConfigFileError),
    #[error("cannot print the CRD: {0}")]
    Manifest(#[from] serde_yaml::Error),
    #[error("cannot print the sizes of maps: {0}")]
    Limits(#[from] codegen::limits::LimitsError),
    #[error("cannot start: {0}")]
    Runtime(#[from] std::io::Error),
    #[error("{0} items could not be removed, see above; run it again when they are free")]
    NotClean(usize),
}

/// The exit code of a command that no agent has answered.
const NO_AGENT: u8 = 3;

impl CliError {
    const fn code(&self) -> u8 {
        match self {
            Self::Ask(ask) | Self::NothingHere(status::NothingHere { ask, .. }) if ask.is_silence() => NO_AGENT,
            _ => 1,
        }
    }
}

/// Runs the command line. Wrong usage ends the process with code 2, an agent that does not answer with 3, any other failure with
/// 1.
pub fn main() -> ExitCode {
    let line: Vec<OsString> = std::env::args_os().collect();
    if cni::is_plugin(line.first().map(OsString::as_os_str)) {
        return cni::run();
    }
    match perform(line) {
        Ok(code) => code,
        Err(CliError::Usage(error)) => error.exit(),
        Err(error) => {
            complain(Severity::Error, &format!("error: {error}"));
            ExitCode::from(error.code())
        }
    }
}

fn perform(line: Vec<OsString>) -> Result<ExitCode, CliError> {
    let (command, ignored) = read(line)?;
    match command {
        Command::Run(args) => run::run(&args, &ignored)?,
        Command::Controller(args) => controller::run(&args, &ignored)?,
        Command::Status(args) => return status::run(&args),
        Command::Trace(args) => trace::run(&args)?,
        Command::Nat(args) => nat::run(&args)?,
        Command::Drops(args) => drops::run(&args)?,
        Command::LogLevel(args) => log_level::run(&args)?,
        Command::Drain(args) => drain::run(&args)?,
        Command::Connect(args) => connect::run(&args)?,
        Command::Migrate(args) => migrate::run(&args)?,
        Command::Cleanup(args) => cleanup::run(&args)?,
        Command::MountBpffs(args) => mount_bpffs::run(&args)?,
        // A runtime expects errors in the format of its protocol.
        Command::Cni => return Ok(cni::run()),
        Command::CniInstall(args) => cni::install(&args)?,
        Command::Completion(args) => completion::run(&args)?,
        Command::Codegen(args) => codegen::run(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The command, with the settings of the configuration file, and warnings about ignored parts of the file.
fn read(mut line: Vec<OsString>) -> Result<(Command, Vec<String>), CliError> {
    let (command, matches) = matched(&line)?;
    let path = match &command {
        Command::Run(args) => args.config_file(),
        Command::Controller(args) => args.config_file(),
        _ => None,
    };
    let Some(path) = path else { return Ok((command, Vec::new())) };
    let file = ConfigFile::read(path)?;
    let definition = definition();
    if let Some((name, given)) = matches.subcommand()
        && let Some(definition) = definition.find_subcommand(name)
    {
        line.extend(file.arguments(definition, given)?.into_iter().map(OsString::from));
    }
    Ok((matched(&line)?.0, file.warnings))
}

fn matched(line: &[OsString]) -> Result<(Command, ArgMatches), CliError> {
    let matches = definition().try_get_matches_from(line)?;
    Ok((Cli::from_arg_matches(&matches)?.command, matches))
}

#[cfg(test)]
mod tests {
    use egress_datapath::attach::pod_interfaces::UnservedCni;

    use super::*;

    #[test]
    fn every_flag_has_an_environment_variable_and_a_description() {
        let command = Cli::command();
        command.clone().debug_assert();
        for subcommand in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            for argument in subcommand.get_arguments().filter(|argument| argument.get_id() != "help") {
                assert!(argument.get_env().is_some(), "{} has no variable", argument.get_id());
                assert!(argument.get_help().is_some(), "{} has no description", argument.get_id());
            }
        }
    }

    /// A terminal of 80 columns shows the help of every command without breaking a line, and no variable twice.
    #[test]
    fn help_fits_the_terminal_and_lists_each_variable_once() {
        let mut definition = definition().term_width(80);
        definition.build();
        for command in definition.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
            let help = command.render_long_help().to_string();
            let long: Vec<_> = help.lines().filter(|line| line.chars().count() > 80).collect();
            assert_eq!(long, [""; 0], "{}", command.get_name());
            for variable in command.get_arguments().filter_map(|argument| argument.get_env()) {
                let variable = variable.to_string_lossy();
                let lines = help.lines().filter(|line| line.split_whitespace().any(|word| word == variable));
                assert_eq!(lines.count(), 1, "{variable} of {}", command.get_name());
            }
        }
    }

    /// As `cargo xtask man` writes them.
    #[test]
    fn every_command_has_a_manual_page() {
        let folder = std::env::temp_dir().join(format!("egress-agent-man-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        clap_mangen::generate_to(definition(), &folder).expect("pages");
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let file = folder.join(format!("egress-agent-{}.1", command.get_name()));
            let page = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            for argument in command.get_arguments() {
                let long = argument.get_long().unwrap_or_default().replace('-', "\\-");
                let variable = argument.get_env().unwrap_or_default().to_string_lossy();
                assert!(page.contains(&long) && page.contains(&*variable), "{} in {page}", argument.get_id());
            }
        }
        std::fs::remove_dir_all(&folder).expect("it exists");
    }

    #[test]
    fn an_agent_that_does_not_answer_has_an_exit_code_of_its_own() {
        let code = |error: AskError| CliError::from(error).code();
        assert_eq!([code(AskError::NoAgent("/run/a".into())), code(AskError::Silent)], [3, 3]);
        let refused = AskError::Refused { path: "/run/a".into(), source: std::io::ErrorKind::PermissionDenied.into() };
        assert_eq!([code(refused), code(AskError::Answered("busy".into())), CliError::NotClean(1).code()], [1, 1, 1]);
    }

    /// The kubelet starts the container again, and each start looks at the node's interfaces again.
    #[test]
    fn a_cni_that_is_not_served_ends_the_process_with_an_error() {
        let refusal = StartError::PodsPassBy { name: "cilium_host".to_owned(), cni: UnservedCni::Cilium };
        assert_eq!(refusal.event_reason(), Some("CNINotServed"));
        assert_eq!(CliError::from(refusal).code(), 1);
    }

    #[test]
    fn cleanup_needs_no_uplink() {
        let node = NodeArgs { uplink: None, mgmt_port: "cni0".to_owned(), bpffs: "/bpf/a".into() };
        let removal = node.settings_for_removal(None);
        assert_eq!(removal.uplink, "");
        assert_eq!((removal.mgmt_port.as_str(), removal.bpffs), ("cni0", PathBuf::from("/bpf/a")));
    }

    #[test]
    fn the_file_adds_arguments() {
        let file = std::env::temp_dir().join(format!("egress-agent-{}.conf", std::process::id()));
        std::fs::write(&file, "[ovnkubernetesfeature]\negressip-node-healthcheck-port=9107\n[other]\n")
            .expect("a file");
        let line = ["egress-agent", "run", "--node-name=a", &format!("--config-file={}", file.display())];
        let outcome = read(line.map(OsString::from).to_vec());
        std::fs::remove_file(&file).expect("it exists");
        let (Command::Run(args), ignored) = outcome.expect("a line and a file") else { panic!("another command") };
        assert!(format!("{args:?}").contains("egressip_node_healthcheck_port: 9107"), "{args:?}");
        assert_eq!(ignored.len(), 1);
    }
}
