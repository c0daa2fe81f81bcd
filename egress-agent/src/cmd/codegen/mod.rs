//! `egress-agent codegen`: the generated files of `cargo xtask codegen`.

mod api;
pub mod configuration;
pub(crate) mod limits;
pub mod reasons;

use clap::{Args, CommandFactory, ValueEnum};

use crate::cmd::{Cli, CliError};
use crate::metrics::page;
use egress_kube::{antrea, cilium, crd, egress_router};

#[derive(Args, Debug)]
pub(super) struct CodegenArgs {
    what: GeneratedText,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum GeneratedText {
    /// The CustomResourceDefinition of EgressIP
    Crd,
    /// The one of EgressService
    EgressServices,
    /// The one of EgressAssignment
    EgressAssignments,
    /// The one of Antrea's Egress
    AntreaEgresses,
    /// The one of Antrea's ExternalIPPool
    AntreaPools,
    /// The one of Cilium's CiliumEgressGatewayPolicy
    CiliumPolicies,
    /// The one of EgressGatewayPolicyStatus
    CiliumStatuses,
    /// The one of EgressRouter
    EgressRouters,
    /// The one of EgressNode
    EgressNodes,
    /// The tables of flags, variables and keys
    Configuration,
    /// The tables of metrics
    Metrics,
    /// The tables of verdicts that may need action
    Reasons,
    /// The fields of the kinds that are defined here
    ApiReference,
    /// The table of the kernel's maps and their sizes
    MapSizes,
    /// The table of constants that bound objects and nodes
    Limits,
}

pub(super) fn run(args: &CodegenArgs) -> Result<(), CliError> {
    match args.what {
        GeneratedText::Crd => print!("{}", crd::manifest()?),
        GeneratedText::EgressServices => print!("{}", crd::service_manifest()?),
        GeneratedText::EgressAssignments => print!("{}", crd::assignment_manifest()?),
        GeneratedText::AntreaEgresses => print!("{}", antrea::crd::egress_manifest()?),
        GeneratedText::AntreaPools => print!("{}", antrea::crd::pool_manifest()?),
        GeneratedText::CiliumPolicies => print!("{}", cilium::crd::policy_manifest()?),
        GeneratedText::CiliumStatuses => print!("{}", cilium::crd::status_manifest()?),
        GeneratedText::EgressRouters => print!("{}", egress_router::manifest()?),
        GeneratedText::EgressNodes => print!("{}", crd::node_manifest()?),
        GeneratedText::Configuration => print!("{}", configuration::sections(&Cli::command())),
        GeneratedText::Metrics => print!("{}", page::tables()),
        GeneratedText::ApiReference => print!("{}", api::reference()?),
        GeneratedText::MapSizes => print!("{}", limits::maps()?),
        GeneratedText::Limits => print!("{}", limits::constants()),
        GeneratedText::Reasons => print!("{}", reasons::tables()),
    }
    Ok(())
}
