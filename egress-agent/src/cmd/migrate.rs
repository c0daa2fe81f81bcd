//! `egress-agent migrate`: prints what the objects of another system become, as a manifest with the differences as comments; writes
//! it with `--apply`.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kube::Client;
use kube::api::DynamicObject;
use serde::Deserialize;
use serde_json::Value;

use crate::cmd::CliError;
use egress_kube::admin::RequestError;
use egress_kube::client;
use egress_kube::migrate::{EgressSystem, Migration, MigrationTarget, cluster, migrate};

#[derive(Args, Debug)]
pub(super) struct MigrateArgs {
    /// Whose objects are read
    #[arg(long, value_enum, default_value_t = SystemName::OvnKubernetes, env = "EGRESS_AGENT_MIGRATE_FROM")]
    from: SystemName,
    /// Whose kinds they become [default: kinds that egress-agent serves stay what they are, others become EgressIPs]
    #[arg(long, value_enum, env = "EGRESS_AGENT_MIGRATE_TO")]
    to: Option<TargetName>,
    /// Manifests to read, YAML or JSON; - for standard input [default: the objects of the cluster]
    #[arg(value_name = "FILE", env = "EGRESS_AGENT_MIGRATE_FILES")]
    files: Vec<PathBuf>,
    /// Write the objects into the cluster
    #[arg(long, env = "EGRESS_AGENT_MIGRATE_APPLY")]
    apply: bool,
    /// With --apply: write also where objects lose something
    #[arg(long, requires = "apply", env = "EGRESS_AGENT_MIGRATE_ACCEPT_LOSSES")]
    accept_losses: bool,
    /// Kubeconfig for the API server [default: kubectl's rules, else that of a pod of the cluster]
    #[arg(long, env = "EGRESS_AGENT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SystemName {
    /// Egress and ExternalIPPool
    Antrea,
    /// CiliumEgressGatewayPolicy
    Cilium,
    /// NetNamespace and HostSubnet
    OpenshiftSdn,
    /// EgressIP and EgressService
    OvnKubernetes,
}

impl SystemName {
    const fn system(self) -> EgressSystem {
        match self {
            Self::Antrea => EgressSystem::Antrea,
            Self::Cilium => EgressSystem::Cilium,
            Self::OpenshiftSdn => EgressSystem::OpenShiftSdn,
            Self::OvnKubernetes => EgressSystem::OvnKubernetes,
        }
    }
}

/// OpenShift SDN is retired: nothing becomes its kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TargetName {
    /// Egress and ExternalIPPool
    Antrea,
    /// CiliumEgressGatewayPolicy
    Cilium,
    /// EgressIP
    OvnKubernetes,
}

impl TargetName {
    const fn system(self) -> EgressSystem {
        match self {
            Self::Antrea => EgressSystem::Antrea,
            Self::Cilium => EgressSystem::Cilium,
            Self::OvnKubernetes => EgressSystem::OvnKubernetes,
        }
    }
}

/// Why nothing, or not everything, was migrated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MigrateError {
    #[error("cannot read {file}: {why}")]
    Unreadable { file: String, why: String },
    #[error(
        "not all of {all} objects keep everything ({losing} do not, see above), so nothing was written: --accept-losses writes them"
    )]
    Losses { losing: usize, all: usize },
    #[error(transparent)]
    Refused(#[from] RequestError),
    #[error("{what}: {source}; {written} objects were written before, and can be written again")]
    Interrupted { what: String, written: usize, source: RequestError },
}

pub(super) fn run(args: &MigrateArgs) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run_async(args))
}

async fn run_async(args: &MigrateArgs) -> Result<(), CliError> {
    let client = match args.files.is_empty() || args.apply {
        true => Some(client::connect_as_user(args.kubeconfig.as_deref()).await?),
        false => None,
    };
    let from = args.from.system();
    let objects = match &client {
        Some(client) if args.files.is_empty() => cluster::objects(client, from).await.map_err(MigrateError::from)?,
        _ => read_all(&args.files)?,
    };
    let to = args.to.map_or(MigrationTarget::Here, |to| MigrationTarget::System(to.system()));
    let migration = migrate(&objects, from, to);
    print!("{}", manifest(&migration, from));
    match client.filter(|_| args.apply) {
        Some(client) => write(&client, &migration, args.accept_losses).await.map_err(CliError::from),
        None => Ok(()),
    }
}

fn read_all(files: &[PathBuf]) -> Result<Vec<DynamicObject>, MigrateError> {
    let mut objects = Vec::new();
    for file in files {
        let name = file.display().to_string();
        let unreadable = |why: String| MigrateError::Unreadable { file: name.clone(), why };
        let text = if file == Path::new("-") {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map(|_| text)
        } else {
            std::fs::read_to_string(file)
        };
        let text = text.map_err(|error| unreadable(error.to_string()))?;
        objects.extend(parse(&text).map_err(unreadable)?);
    }
    Ok(objects)
}

/// The objects of a manifest, those of lists included.
fn parse(text: &str) -> Result<Vec<DynamicObject>, String> {
    let mut objects = Vec::new();
    for document in serde_yaml::Deserializer::from_str(text) {
        let value = Value::deserialize(document).map_err(|error| error.to_string())?;
        let items = match value["items"].as_array() {
            Some(items) if value["kind"].as_str().is_some_and(|kind| kind.ends_with("List")) => items.clone(),
            _ if value.is_null() => continue,
            _ => vec![value],
        };
        for item in items {
            let object: DynamicObject = serde_json::from_value(item).map_err(|error| error.to_string())?;
            if object.types.is_none() || object.metadata.name.is_none() {
                return Err("a document without apiVersion, kind or metadata.name".to_owned());
            }
            objects.push(object);
        }
    }
    Ok(objects)
}

/// The objects, each after what it was and what differs.
fn manifest(migration: &Migration, from: EgressSystem) -> String {
    let mut text = String::new();
    // What authors wrote ends no comment.
    let comment = |text: &mut String, line: &str| {
        text.push_str("# ");
        text.extend(line.chars().map(|one| if one.is_control() { ' ' } else { one }));
        text.push('\n');
    };
    let Migration { general, objects, others } = migration;
    let losing = objects.iter().filter(|one| one.loses()).count();
    let lost = if losing == 0 { "none loses anything".to_owned() } else { format!("with losses: {losing}") };
    comment(&mut text, &format!("Objects of {from}: {}, {lost}.", objects.len()));
    if !objects.is_empty() {
        comment(&mut text, "For all of them:");
        general.iter().for_each(|line| comment(&mut text, &format!("- {line}")));
    }
    if !others.is_empty() {
        let others: Vec<String> = others.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        comment(&mut text, &format!("Left aside, of other kinds: {}.", others.join(", ")));
    }
    for one in objects {
        text.push_str("---\n");
        comment(&mut text, &one.from);
        one.notes.iter().for_each(|note| comment(&mut text, &format!("- {note}")));
        for (at, object) in one.becomes.iter().enumerate() {
            if at > 0 {
                text.push_str("---\n");
            }
            text.push_str(&serde_yaml::to_string(object).unwrap_or_default());
        }
    }
    text
}

async fn write(client: &Client, migration: &Migration, accept_losses: bool) -> Result<(), MigrateError> {
    let losing = migration.objects.iter().filter(|one| one.loses()).count();
    if losing > 0 && !accept_losses {
        return Err(MigrateError::Losses { losing, all: migration.objects.len() });
    }
    for (written, object) in migration.objects.iter().flat_map(|one| &one.becomes).enumerate() {
        let text = |field: &str| object.pointer(field).and_then(Value::as_str).unwrap_or_default();
        let what = format!("{} {}", text("/kind"), text("/metadata/name"));
        if let Err(source) = cluster::apply(client, object).await {
            return Err(MigrateError::Interrupted { what, written, source });
        }
        eprintln!("{what}: written");
    }
    Ok(())
}
