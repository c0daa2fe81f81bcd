//! What an administrator runs. Each command ends with 0, or with 1 and what is wrong on standard error.

mod check_host;
mod explain;
mod import;
mod install;

use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::config::source::{Place, Source};
use crate::config::{PodName, RouterConfig};
use crate::neighbours::{REPEAT, repeat};
use crate::{call, namespace, node_files};
use clap::{Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use egress_cni::CniError;
use egress_terminal::completion::{self, Shell};
use egress_terminal::help;
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Parser)]
#[command(
    name = "egress-router",
    version,
    about = "CNI plugin that makes a pod an egress router",
    long_about = "CNI plugin that makes a pod an egress router. A container runtime calls it with CNI_COMMAND in its \
                  environment; these commands are for administrators."
)]
pub struct Cli {
    #[command(subcommand)]
    command: SubCommand,
}

#[derive(Subcommand)]
enum SubCommand {
    /// Say everything that is wrong with a configuration
    Validate(ConfigArgs),
    /// Print what ADD would do, without doing anything
    Explain(explain::ExplainArgs),
    /// Give a router that is there the rules of a changed configuration, all at once
    Reconcile(explain::ExplainArgs),
    /// Announce the addresses of a router once more
    Announce(AnnounceArgs),
    /// Say whether this node has what routers need
    CheckHost,
    /// Print objects for this plugin, made of those of other routers
    Import(import::ImportArgs),
    /// Install the plugin on a node, with defaults for its routers
    Install(install::InstallArgs),
    /// Remove what `install` has written
    Uninstall(install::PlaceArgs),
    /// Print the completion script of a shell, for its folder of such scripts
    Completion {
        /// The shell that reads the script
        #[arg(value_name = "SHELL")]
        shell: Shell,
    },
    /// Wait for a signal: the container of a router pod, whose work the kernel does
    Pause,
    #[command(hide = true, name = REPEAT)]
    Repeat { index: u32, mac: String, addresses: Vec<IpAddr> },
}

#[derive(Args)]
struct ConfigArgs {
    /// A NetworkAttachmentDefinition in YAML, or the configuration in its `spec.config`; - is standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// The pod that it is for, which `podIP` and `ipConfig` choose by
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod: Option<String>,
}

#[derive(Args)]
struct AnnounceArgs {
    /// The network namespace of the pod
    #[arg(long, value_name = "PATH")]
    netns: PathBuf,
    /// The name of the interface
    #[arg(long, value_name = "NAME", default_value = "net1")]
    interface: String,
}

/// The command line as it is parsed and described.
pub fn definition() -> Command {
    help::with_variables(Cli::command())
}

impl Cli {
    /// The command of this process' arguments; wrong usage ends it.
    pub fn of_process() -> Self {
        let matches = definition().get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    pub fn run(self) -> ExitCode {
        let outcome = match self.command {
            SubCommand::Validate(args) => validate(&args),
            SubCommand::Explain(args) => explain::run(&args),
            SubCommand::Reconcile(args) => explain::reconcile(&args),
            SubCommand::Announce(args) => announce(&args),
            SubCommand::CheckHost => check_host::run(),
            SubCommand::Import(args) => import::run(&args),
            SubCommand::Install(args) => install::install(&args),
            SubCommand::Uninstall(args) => install::uninstall(&args),
            SubCommand::Completion { shell } => print_completion(shell),
            SubCommand::Pause => install::pause(),
            SubCommand::Repeat { index, mac, addresses } => {
                announcements(index, &mac, &addresses);
                Ok(())
            }
        };
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(why) => {
                eprintln!("{why}");
                ExitCode::FAILURE
            }
        }
    }
}

fn print_completion(shell: Shell) -> Result<(), String> {
    match completion::write(definition(), shell, &mut io::stdout().lock()) {
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| format!("cannot write the script: {error}")),
    }
}

fn announce(args: &AnnounceArgs) -> Result<(), String> {
    let node = namespace::own().map_err(|error| format!("cannot open the node's namespace: {error}"))?;
    let pod = namespace::of_container(&args.netns, &node).map_err(|error| said(&error))?;
    let sent = call::announce(&args.interface, (&node, &pod)).map_err(|error| said(&error))?;
    sent.iter().for_each(|net| println!("announced {net}"));
    Ok(())
}

/// A router whose interface goes needs no announcements any more.
fn announcements(index: u32, mac: &str, addresses: &[IpAddr]) {
    let bytes = mac.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<Vec<u8>, _>>();
    if let Some(mac) = bytes.ok().and_then(|bytes| bytes.try_into().ok()) {
        drop(repeat(index, mac, addresses));
    }
}

impl ConfigArgs {
    /// The fields of the configuration.
    fn fields(&self) -> Result<Map<String, Value>, String> {
        let (text, place) = (read(&self.file)?, shown(&self.file));
        let documents: Result<Vec<Value>, _> =
            serde_yaml::Deserializer::from_str(&text).map(Value::deserialize).collect();
        let attachment = documents.into_iter().flatten().find(|one| one["kind"] == "NetworkAttachmentDefinition");
        let text = match &attachment {
            Some(attachment) => {
                attachment["spec"]["config"].as_str().ok_or_else(|| format!("{place} has no spec.config"))?
            }
            None => &text,
        };
        serde_json::from_str(text).map_err(|error| format!("the configuration in {place} is no JSON object: {error}"))
    }

    fn pod(&self) -> Result<PodName<'_>, String> {
        match self.pod.as_deref().map(|pod| pod.split_once('/').ok_or(pod)) {
            None => Ok(PodName::default()),
            Some(Ok((namespace, name))) => Ok(PodName { namespace: Some(namespace), name: Some(name) }),
            Some(Err(pod)) => Err(format!("--pod {pod}: not NAMESPACE/NAME")),
        }
    }
}

fn shown(file: &Path) -> String {
    if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() }
}

/// A file, or standard input for `-`.
fn read(file: &Path) -> Result<String, String> {
    let text = if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(file)
    };
    text.map_err(|error| format!("cannot read {}: {error}", file.display()))
}

/// One line for each problem.
fn said(error: &CniError) -> String {
    let mut text = error.message.clone();
    if !error.details.is_empty() {
        text.push('\n');
        text.push_str(&error.details);
    }
    text
}

fn validate(args: &ConfigArgs) -> Result<(), String> {
    let (fields, pod) = (args.fields()?, args.pod()?);
    let fields = node_files::with_defaults(&fields).map_err(|error| said(&error))?;
    let config = RouterConfig::of(&fields, pod).map_err(|error| said(&error))?;
    config.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    match &config.source {
        Source::Given(addressing) => {
            let addresses: Vec<String> = addressing.addresses.iter().map(ToString::to_string).collect();
            println!("valid: {} with {}", config.kind, addresses.join(", "));
        }
        Source::Elsewhere(elsewhere) => match &elsewhere.place {
            place @ Place::ConfigMap { .. } => println!("valid: {} with the addresses of {place}", config.kind),
            place @ Place::File(_) => println!("valid: {} with the addresses in {place}", config.kind),
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of the containers with their variables, each as the flag that it stands for.
    #[test]
    fn this_program_understands_its_manifests() {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/egress-router");
        let read = |path: &str| -> Value {
            let text = std::fs::read_to_string(deploy.join(path)).expect("a manifest");
            serde_yaml::from_str(&text).expect("YAML")
        };
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let settings = |path: &str| -> Vec<(String, String)> {
            let literals = list(&read(path)["configMapGenerator"][0]["literals"]);
            literals
                .iter()
                .filter_map(|one| text(one).split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned())))
                .collect()
        };
        let given = [settings("base/kustomization.yaml"), settings("configmaps/kustomization.yaml")].concat();
        assert_eq!(given.len(), 3);
        let pod = &read("base/daemonset.yaml")["spec"]["template"]["spec"];
        let containers = [list(&pod["initContainers"]), list(&pod["containers"])].concat();
        assert_eq!(containers.len(), 2);
        for container in containers {
            let mut line = vec![text(&container["command"][0])];
            assert_eq!(line, ["/usr/bin/egress-router"]);
            line.extend(list(&container["args"]).iter().map(text));
            let own = list(&container["env"]);
            let own = own.iter().map(|one| (text(&one["name"]), text(&one["value"])));
            let (definition, name) = (Cli::command(), line[1].clone());
            let command = definition.find_subcommand(&name).expect("a subcommand");
            for (variable, value) in own.chain(given.clone()) {
                let argument =
                    command.get_arguments().find(|one| one.get_env().is_some_and(|env| env == variable.as_str()));
                let argument = argument.unwrap_or_else(|| panic!("no flag has the variable {variable}"));
                let long = argument.get_long().expect("a flag");
                line.push(if argument.get_action().takes_values() {
                    format!("--{long}={value}")
                } else {
                    format!("--{long}")
                });
            }
            let matches = Cli::command().try_get_matches_from(line).unwrap_or_else(|error| panic!("{error}"));
            assert!(matches!(Cli::from_arg_matches(&matches).expect("parsed").command, SubCommand::Install(_)));
        }
        for patch in list(&read("cleanup/kustomization.yaml")["patches"]) {
            let patch: Value = serde_yaml::from_str(&text(&patch["patch"])).expect("YAML");
            for operation in list(&patch) {
                let line = list(&operation["value"]);
                let line = [vec!["egress-router".to_owned()], line.iter().map(text).collect()].concat();
                assert!(matches!(Cli::try_parse_from(line).expect("parsed").command, SubCommand::Uninstall(_)));
            }
        }
    }
}
