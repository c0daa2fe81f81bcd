//! `egress-router`: called by a container runtime, which sets `CNI_COMMAND`, or by an administrator with a subcommand.

mod log;

use std::io::{self, Read, stdin};
use std::process::ExitCode;
use std::time::Instant;

use egress_cni::{CniCall, CniError, Command, code};
use egress_router::call::answer;
use egress_router::cmd::Cli;
use serde_json::Value;
use tracing::{error, info};

fn main() -> ExitCode {
    if std::env::var_os("CNI_COMMAND").is_some() {
        return called_by_runtime();
    }
    Cli::of_process().run()
}

/// Answers on standard output, in the protocol's format.
fn called_by_runtime() -> ExitCode {
    let (began, mut input) = (Instant::now(), String::new());
    let outcome = read(&mut input).and_then(|()| {
        let call = CniCall::of(|name| std::env::var(name).ok())?;
        log::start(&input);
        let outcome = answer(&call, &input);
        note(&call, &outcome, began);
        outcome
    });
    let config: Option<Value> = serde_json::from_str(&input).ok();
    let version = config.as_ref().and_then(|config| config["cniVersion"].as_str());
    let (answer, code) = match outcome {
        Ok(answer) => (answer, ExitCode::SUCCESS),
        Err(error) => (Some(error.to_json(version)), ExitCode::FAILURE),
    };
    if let Some(answer) = answer {
        println!("{answer}");
    }
    code
}

/// VERSION, STATUS and GC may have no input.
fn read(input: &mut String) -> Result<(), CniError> {
    let read = stdin().read_to_string(input).map(drop);
    read.map_err(|error: io::Error| CniError::new(code::IO, format!("cannot read standard input: {error}")))
}

/// One line for each call that changes or looks at a pod.
fn note(call: &CniCall, outcome: &Result<Option<Value>, CniError>, began: Instant) {
    let pod = call.argument("K8S_POD_NAME").unwrap_or_default();
    let namespace = call.argument("K8S_POD_NAMESPACE").unwrap_or_default();
    let milliseconds = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let (command, container, interface) = (call.command.as_str(), &call.container, &call.interface);
    match outcome {
        Ok(_) if matches!(call.command, Command::Version | Command::Status | Command::Gc) => {}
        Ok(_) => info!(command, container, interface, namespace, pod, milliseconds, "done"),
        Err(error) => {
            error!(command, container, interface, namespace, pod, milliseconds, code = error.code, %error, "failed");
        }
    }
}
