//! What an administrator runs. Each command ends with 0, or with 1 and what is wrong on standard error.

mod check_host;
mod explain;

use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use egress_cni::CniError;
use egress_router::config::source::{Place, Source};
use egress_router::config::{PodName, RouterConfig};
use egress_router::neighbours::{REPEAT, repeat};
use serde_json::{Map, Value};

#[derive(Parser)]
#[command(
    name = "egress-router",
    version,
    about = "CNI plugin that makes a pod an egress router",
    long_about = "CNI plugin that makes a pod an egress router. A container runtime calls it with CNI_COMMAND in its \
                  environment; these commands are for administrators."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: SubCommand,
}

#[derive(Subcommand)]
enum SubCommand {
    /// Say everything that is wrong with a configuration
    Validate(ConfigArgs),
    /// Print what ADD would do, without doing anything
    Explain(explain::ExplainArgs),
    /// Say whether this node has what routers need
    CheckHost,
    #[command(hide = true, name = REPEAT)]
    Repeat { index: u32, mac: String, addresses: Vec<IpAddr> },
}

#[derive(Args)]
struct ConfigArgs {
    /// The configuration, as in `spec.config` of a NetworkAttachmentDefinition; - is standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// The pod that it is for, which `podIP` and `ipConfig` choose by
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod: Option<String>,
}

impl Cli {
    pub(crate) fn run(self) -> ExitCode {
        let outcome = match self.command {
            SubCommand::Validate(args) => validate(&args),
            SubCommand::Explain(args) => explain::run(&args),
            SubCommand::CheckHost => check_host::run(),
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
        let text = if self.file == Path::new("-") {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map(|_| text)
        } else {
            std::fs::read_to_string(&self.file)
        };
        let text = text.map_err(|error| format!("cannot read {}: {error}", self.file.display()))?;
        serde_json::from_str(&text).map_err(|error| format!("{} is no JSON object: {error}", self.file.display()))
    }

    fn pod(&self) -> Result<PodName<'_>, String> {
        match self.pod.as_deref().map(|pod| pod.split_once('/').ok_or(pod)) {
            None => Ok(PodName::default()),
            Some(Ok((namespace, name))) => Ok(PodName { namespace: Some(namespace), name: Some(name) }),
            Some(Err(pod)) => Err(format!("--pod {pod}: not NAMESPACE/NAME")),
        }
    }
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
