//! `egress-agent controller`: flags to settings, then the controller.

use std::path::Path;
use std::sync::Arc;

use clap::Args;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{info, warn};

use crate::cmd::stop_on_signal;
use crate::cmd::{CliError, logging};
use crate::config::reachability::ReachabilityArgs;
use crate::config::shared::{ApiArgs, MetricsArgs, NetworkArgs, TunnelArgs, UnassignedArgs};
use crate::config::tls::TlsArgs;
use crate::controller::run::{self, ControllerSettings};
use crate::health::tls;
use crate::metrics::catalogue::Process;
use crate::metrics::{self, HealthPage};
use egress_core::model::reserved::ClusterNetworks;
use egress_kube::{client, metrics_token};
use egress_supervise::{self, Task};

#[derive(Args, Debug)]
pub(super) struct ControllerArgs {
    #[command(flatten)]
    api: ApiArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
    /// Create the Secret egress-agent-metrics with a random `token` if there is none: the file of --metrics-token-file, where the
    /// manifests mount it
    #[arg(long, env = "EGRESS_AGENT_CREATE_METRICS_TOKEN", help_heading = "On this node")]
    create_metrics_token: bool,
    #[command(flatten)]
    networks: NetworkArgs,
    #[command(flatten)]
    tunnel: TunnelArgs,
    #[command(flatten)]
    unassigned: UnassignedArgs,
    #[command(flatten)]
    reachability: ReachabilityArgs,
    /// Serve Antrea's Egress and ExternalIPPool objects (crd.antrea.io/v1beta1). Their definitions must be installed
    /// (deploy/antrea), and Antrea must not serve them itself
    #[arg(long, env = "EGRESS_AGENT_ANTREA")]
    antrea: bool,
    /// Serve Cilium's CiliumEgressGatewayPolicy objects (cilium.io/v2). Their definition must be installed (deploy/cilium), and
    /// Cilium must not serve them itself
    #[arg(long, env = "EGRESS_AGENT_CILIUM")]
    cilium: bool,
    /// Serve OpenShift's EgressRouter objects (network.operator.openshift.io/v1), with pods of this image. The definition and the rights
    /// must be installed (deploy/egress-router/controller), and OpenShift's operator must not serve them itself
    #[arg(long, env = "EGRESS_AGENT_EGRESS_ROUTER_IMAGE", value_name = "IMAGE")]
    egress_router_image: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    log: logging::LogArgs,
}

impl ControllerArgs {
    pub(super) fn config_file(&self) -> Option<&Path> {
        self.api.config_file()
    }
}

/// `ignored` are warnings about ignored parts of the configuration file.
pub(super) fn run(args: &ControllerArgs, ignored: &[String]) -> Result<(), CliError> {
    let _log = logging::start(&args.log)?;
    ignored.iter().for_each(|line| warn!("{line}"));
    raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run_async(args))
}

/// A controller holds a session for each address of an egress node. The usual 1,024 are for programs that use `select`.
fn raise_open_files() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        warn!(%error, "cannot raise the limit of open files: a controller may not reach all of many egress nodes");
    }
}

async fn run_async(args: &ControllerArgs) -> Result<(), CliError> {
    let tls = args.tls.files(args.reachability.port())?.map(tls::read).transpose()?;
    let (client, outages) = client::connect(args.api.kubeconfig.as_deref()).await?;
    let stop = stop_on_signal()?;
    let health_page = Arc::new(HealthPage::new(Process::Controller, outages.clone()));
    if let Some(listen) = args.metrics.metrics_bind_address {
        let serve = metrics::serve(listen, args.metrics.token_file(), Arc::clone(&health_page), stop.clone());
        tokio::spawn(egress_supervise::until(stop.clone(), Task::MetricsServer, serve));
    }
    let tls = tls.map(|(tls, keeper)| {
        let keep = keeper.run(tls::INTERVAL, stop.clone());
        tokio::spawn(egress_supervise::until(stop.clone(), Task::Certificates, keep));
        tls
    });
    let networks = ClusterNetworks {
        pods: args.networks.cluster_subnets.clone(),
        services: args.networks.service_cidrs.clone(),
        api_servers: client::server_addresses(&outages).await,
    };
    let probing = args.reachability.manner(tls);
    if !probing.asks_agents() {
        warn!(
            "--egressip-node-healthcheck-port is 0: egress nodes stop serving egress IPs when the API server is away for \
             longer than the total timeout; set a port, the same for agents and controllers"
        );
    }
    let settings = ControllerSettings {
        node_name: args.api.node_name.clone(),
        namespace: args.api.namespace.clone(),
        networks,
        on_unassigned: args.unassigned.on_unassigned(),
        serves_antrea: args.antrea,
        serves_cilium: args.cilium,
        metrics_token_interval: args.create_metrics_token.then_some(metrics_token::INTERVAL),
        router_image: args.egress_router_image.clone(),
        probing,
        overlay: Some(args.tunnel.tunnel_port),
        outages,
        health_page: Some(health_page),
    };
    info!(node = args.api.node_name, "the controller is running");
    run::run(client, settings, stop).await;
    info!("stopped; agents keep their egress IPs");
    Ok(())
}
