//! `egress-router import`: other routers' objects, as objects for this one.

use std::path::PathBuf;

use crate::import::{of_text, routers};
use crate::manifests::IMAGE;
use clap::Args;
use serde::Deserialize;
use serde_json::Value;

use super::{read, said, shown};

#[derive(Args)]
pub(super) struct ImportArgs {
    /// YAML or JSON with pods of the OpenShift SDN's egress router, or what makes them, their ConfigMaps, and EgressRouter objects;
    /// with --source the text of EGRESS_DESTINATION. - is standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// The value of EGRESS_SOURCE
    #[arg(long, value_name = "ADDRESS")]
    source: Option<String>,
    /// The value of EGRESS_GATEWAY
    #[arg(long, value_name = "ADDRESS", requires = "source")]
    gateway: Option<String>,
    /// The name of the objects
    #[arg(long, value_name = "NAME", requires = "source", default_value = "egress-router")]
    name: String,
    /// The image of the pods
    #[arg(long, value_name = "IMAGE", default_value = IMAGE)]
    image: String,
}

/// Prints the objects of all routers that can be imported, and ends with an error if there is one that cannot.
pub(super) fn run(args: &ImportArgs) -> Result<(), String> {
    let text = read(&args.file)?;
    let found = match &args.source {
        Some(source) => vec![of_text(&args.name, source, args.gateway.as_deref(), &text)],
        None => {
            let documents: Result<Vec<Value>, _> =
                serde_yaml::Deserializer::from_str(&text).map(Value::deserialize).collect();
            routers(&documents.map_err(|error| format!("{} is no YAML: {error}", shown(&args.file)))?)
        }
    };
    if found.is_empty() {
        let place = shown(&args.file);
        return Err(format!(
            "{place} has neither a pod with EGRESS_SOURCE nor an EgressRouter; of a pod that a Deployment or the like has made, that \
             must be in it"
        ));
    }
    let mut failures = Vec::new();
    for one in found {
        let outcome = one.and_then(|one| {
            let objects = one.router.objects(&args.image);
            Ok((objects.map_err(|error| format!("{}: {}", one.what, said(&error)))?, one))
        });
        match outcome {
            Err(why) => failures.push(why),
            Ok((objects, one)) => {
                one.warnings.iter().for_each(|warning| eprintln!("warning: {}: {warning}", one.what));
                for object in objects {
                    let yaml = serde_yaml::to_string(&object).map_err(|error| error.to_string())?;
                    print!("---\n{yaml}");
                }
            }
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}
