//! `egress-router explain`: the plan of ADD, by the code that ADD runs. `reconcile`: a changed configuration for a router that is
//! there.

use std::fs::File;
use std::path::PathBuf;

use crate::call::{self, Attachment, plan_of, resolved};
use crate::config::{Addressing, RouterConfig};
use crate::setup::steps;
use crate::{namespace, node_files};
use clap::Args;
use egress_cni::NetworkConfiguration;
use serde_json::json;

use super::{ConfigArgs, said};

#[derive(Args)]
pub(super) struct ExplainArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The network namespace of the pod
    #[arg(long, value_name = "PATH")]
    netns: PathBuf,
    /// The name of the interface, which a runtime chooses
    #[arg(long, value_name = "NAME", default_value = "net1")]
    interface: String,
}

/// A configuration, where it is for, and everything that it says.
pub(super) struct Explained {
    pub(super) config: RouterConfig,
    pub(super) addressing: Addressing,
    pub(super) name: String,
    pub(super) node: File,
    pub(super) netns: File,
}

impl ExplainArgs {
    /// Reads it, and says what has no effect.
    pub(super) fn read(&self) -> Result<Explained, String> {
        let (mut fields, pod) = (self.config.fields()?, self.config.pod()?);
        fields.entry("name").or_insert_with(|| json!("explained"));
        fields.entry("cniVersion").or_insert_with(|| json!("1.1.0"));
        let text = serde_json::Value::Object(fields).to_string();
        let configuration = NetworkConfiguration::of(&text).map_err(|error| said(&error))?;
        let fields = node_files::with_defaults(&configuration.fields).map_err(|error| said(&error))?;
        let config = RouterConfig::of(&fields, pod).map_err(|error| said(&error))?;
        let (addressing, removed) = resolved(&config, pod).map_err(|error| said(&error))?;
        let node = namespace::own().map_err(|error| format!("cannot open the node's namespace: {error}"))?;
        let netns = namespace::of_container(&self.netns, &node).map_err(|error| said(&error))?;
        let name = config.interface.clone().unwrap_or_else(|| self.interface.clone());
        config.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
        removed.iter().for_each(|what| eprintln!("warning: the overrides do not allow {what}"));
        Ok(Explained { config, addressing, name, node, netns })
    }
}

/// Gives a router the rules of a changed configuration.
pub(super) fn reconcile(args: &ExplainArgs) -> Result<(), String> {
    let Explained { config, addressing, name, node, netns } = args.read()?;
    let attachment = Attachment { config: &config, addressing: &addressing, name: &name };
    let changed = call::reconcile(&attachment, (&node, &netns)).map_err(|error| said(&error))?;
    match changed.is_empty() {
        true => println!("the rules are as the configuration says"),
        false => changed.iter().for_each(|what| println!("replaced: {what}")),
    }
    Ok(())
}

pub(super) fn run(args: &ExplainArgs) -> Result<(), String> {
    let Explained { config, addressing, name, node, netns } = args.read()?;
    let attachment = Attachment { config: &config, addressing: &addressing, name: &name };
    let plan = plan_of(&attachment, (&node, &netns)).map_err(|error| said(&error))?;
    plan.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    println!("interface   {} ({}, MTU {})", plan.name, plan.kind, plan.mtu);
    println!("master      {}: {}", plan.master.name, plan.why_master);
    for (family, gateway) in &plan.gateways {
        println!("gateway     {gateway} ({family:?})");
    }
    match &plan.primary {
        Some(primary) => println!("clients by  {}", primary.name),
        None => println!("clients by  no interface"),
    }
    for ((_, protocol, port), to) in &addressing.redirects.ports {
        println!("redirect    port {port} {protocol} to {to}");
    }
    for address in addressing.redirects.fallback.values() {
        println!("redirect    everything else to {address}");
    }
    if !addressing.redirects.is_empty() {
        println!("clients     get what is redirected, and nothing else");
    }
    match &addressing.allowed {
        None => println!("allow       everything"),
        Some(allowed) if allowed.is_empty() => println!("allow       nothing"),
        Some(allowed) => allowed.iter().for_each(|one| println!("allow       {one}")),
    }
    println!("steps");
    for (at, step) in steps(&plan).iter().enumerate() {
        println!("  {:>2}. {step}", at + 1);
    }
    Ok(())
}
