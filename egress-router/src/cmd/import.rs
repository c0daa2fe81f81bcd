//! `egress-router import`: other routers' objects, as objects for this one.

use std::path::PathBuf;

use clap::Args;
use egress_router::import::routers;
use egress_router::manifests::IMAGE;
use serde::Deserialize;
use serde_json::Value;

use super::{read, said, shown};

#[derive(Args)]
pub(super) struct ImportArgs {
    /// YAML or JSON with pods of the OpenShift SDN's egress router, or what makes them, their ConfigMaps, and EgressRouter objects;
    /// - is standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// The image of the pods
    #[arg(long, value_name = "IMAGE", default_value = IMAGE)]
    image: String,
}

/// Prints the objects of all routers that can be imported, and ends with an error if there is one that cannot.
pub(super) fn run(args: &ImportArgs) -> Result<(), String> {
    let text = read(&args.file)?;
    let documents: Vec<Value> = serde_yaml::Deserializer::from_str(&text)
        .map(Value::deserialize)
        .collect::<Result<_, _>>()
        .map_err(|error| format!("{} is no YAML: {error}", shown(&args.file)))?;
    let found = routers(&documents);
    if found.is_empty() {
        return Err(format!("{} has neither a pod with EGRESS_SOURCE nor an EgressRouter", shown(&args.file)));
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
