//! Flags of both agent and controller, which need the same settings.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use ipnet::IpNet;

use crate::metrics::Listen;
use egress_core::model::settings;
use egress_datapath::names::DEFAULT_TUNNEL_PORT;

#[derive(Args, Debug)]
#[command(next_help_heading = "Kubernetes")]
pub struct ApiArgs {
    /// Name of the Node object of the node that this runs on, as `kubectl get nodes` shows it
    #[arg(long, env = "EGRESS_AGENT_NODE_NAME", value_name = "NAME")]
    pub node_name: String,
    /// File of settings as OVN-Kubernetes has it, read at start; flags and their variables override it
    #[arg(long, env = "EGRESS_AGENT_CONFIG_FILE", value_name = "FILE")]
    config_file: Option<PathBuf>,
    /// Kubeconfig for the API server [default: that of a pod of the cluster]
    #[arg(long, env = "EGRESS_AGENT_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the controllers' Lease, of the ConfigMap of hand-overs and of the Secret with the key, the same for agents
    /// and controllers
    #[arg(long, env = "EGRESS_AGENT_NAMESPACE", value_name = "NAMESPACE", default_value = "kube-system")]
    pub namespace: String,
}

impl ApiArgs {
    pub fn config_file(&self) -> Option<&Path> {
        self.config_file.as_deref()
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "On this node")]
pub struct MetricsArgs {
    /// Address of /metrics, /healthz and /readyz, in plaintext: ADDRESS:PORT, or :PORT for all addresses of the node
    /// [default: not served]
    #[arg(long, env = "EGRESS_AGENT_METRICS_BIND_ADDRESS", value_name = "ADDRESS:PORT")]
    pub metrics_bind_address: Option<Listen>,
    /// File with the token that other hosts must send to read these pages (`Authorization: Bearer TOKEN`), read for each request
    /// of theirs: without the file, or if it is empty, they read nothing [default: no token is needed]
    #[arg(long, env = "EGRESS_AGENT_METRICS_TOKEN_FILE", value_name = "FILE")]
    pub metrics_token_file: Option<PathBuf>,
}

impl MetricsArgs {
    pub fn token_file(&self) -> Option<Arc<Path>> {
        self.metrics_token_file.as_deref().map(Arc::from)
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "The cluster's networks")]
pub struct NetworkArgs {
    /// The cluster's pod networks: packets of selected pods to them keep the pods' addresses [default: those that nodes publish]
    #[arg(long, env = "EGRESS_AGENT_CLUSTER_SUBNETS", value_name = "CIDR,...", value_delimiter = ',')]
    pub cluster_subnets: Vec<IpNet>,
    /// The cluster's service networks, left to the service proxy [default: the addresses of known Services]
    #[arg(long, env = "EGRESS_AGENT_SERVICE_CIDRS", value_name = "CIDR,...", value_delimiter = ',')]
    pub service_cidrs: Vec<IpNet>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "The overlay")]
pub struct TunnelArgs {
    /// UDP port of the overlay between nodes, the same on all nodes and open between them (1 to 65535)
    #[arg(long, env = "EGRESS_AGENT_TUNNEL_PORT", value_name = "PORT", default_value_t = DEFAULT_TUNNEL_PORT,
          value_parser = clap::value_parser!(u16).range(1..))]
    pub tunnel_port: u16,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "When there is no egress IP")]
pub struct UnassignedArgs {
    /// Treatment of selected pods' packets if no node can host any address of their object; an annotation sets `drop` for one
    /// object
    #[arg(
        long,
        env = "EGRESS_AGENT_ON_UNASSIGNED",
        value_name = "ACTION",
        value_enum,
        default_value_t = OnUnassignedFlag::NodeAddress
    )]
    on_unassigned: OnUnassignedFlag,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OnUnassignedFlag {
    /// They leave with their node's address, as in OVN-Kubernetes
    NodeAddress,
    /// They are dropped
    Drop,
}

impl UnassignedArgs {
    pub fn on_unassigned(&self) -> settings::OnUnassigned {
        match self.on_unassigned {
            OnUnassignedFlag::NodeAddress => settings::OnUnassigned::NodeAddress,
            OnUnassignedFlag::Drop => settings::OnUnassigned::Drop,
        }
    }
}
