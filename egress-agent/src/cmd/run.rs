//! `egress-agent run`: flags to settings, then the agent.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use ipnet::IpNet;
use kube::Client;
use tracing::{info, warn};

use crate::cmd::page::DEFAULT_SOCKET;
use crate::cmd::stop_on_signal;
use crate::cmd::{CliError, NodeArgs, logging, uplink};
use crate::config::reachability::HealthArgs;
use crate::config::shared::{ApiArgs, MetricsArgs, NetworkArgs, TunnelArgs, UnassignedArgs};
use crate::config::timeouts::TimeoutArgs;
use crate::config::tls::TlsArgs;
use crate::debug::log::{LogLevel, RecentWarnings};
use crate::debug::{Notes, Questions};
use crate::health;
use crate::health::tls::{self, Tls};
use crate::metrics::catalogue::Process;
use crate::metrics::startup_wait::StartupWait;
use crate::metrics::{self, HealthPage};
use crate::nat_log::NatLogSettings;
use crate::node::run::{self, AgentSettings};
use egress_core::model::settings;
use egress_datapath::devices::host::Host;
use egress_datapath::loader::abi_migration;
use egress_datapath::names::{DEFAULT_INBOUND_ENTRIES, DEFAULT_NAT_ENTRIES};
use egress_datapath::settings::InitialState;
use egress_datapath::{self, Attachment, Dataplane, Quotas, StartError};
use egress_kube::api_outage::ApiOutages;
use egress_kube::{client, events};
use egress_supervise::{self, Task};

#[derive(Args, Debug)]
pub(super) struct RunArgs {
    #[command(flatten)]
    api: ApiArgs,
    #[command(flatten)]
    node: NodeArgs,
    /// Socket for `egress-agent status` and other commands, for root alone
    #[arg(
        long,
        env = "EGRESS_AGENT_SOCKET",
        value_name = "PATH",
        default_value = DEFAULT_SOCKET,
        help_heading = "On this node"
    )]
    socket: PathBuf,
    /// Wait for the management port also where pods seem to enter the host by interfaces of their own, as with a CNI that cannot
    /// be served; otherwise the agent does not start there
    #[arg(long, env = "EGRESS_AGENT_SKIP_CNI_CHECK", help_heading = "On this node")]
    skip_cni_check: bool,
    #[command(flatten)]
    metrics: MetricsArgs,
    /// How the programs are attached to their hooks; a change detaches the former ones
    #[arg(
        long,
        env = "EGRESS_AGENT_ATTACH",
        value_name = "MODE",
        value_enum,
        default_value_t = AttachFlag::Auto,
        help_heading = "On this node"
    )]
    attach: AttachFlag,
    /// Limit of NAT mappings of this node, 512 bytes of memory each (1024 to 268435456); if the map is full, new flows are
    /// dropped (map_full). A change recreates all maps, as with another layout of the maps
    #[arg(long, env = "EGRESS_AGENT_NAT_ENTRIES", value_name = "ENTRIES", default_value_t = DEFAULT_NAT_ENTRIES,
          value_parser = clap::value_parser!(u32).range(1024..=MOST_ENTRIES), help_heading = "On this node")]
    nat_entries: u32,
    /// Share of these that one pod address may hold, in percent (1 to 100); its further flows are dropped (quota_exceeded)
    #[arg(long, env = "EGRESS_AGENT_POD_QUOTA", value_name = "PERCENT", default_value_t = Quotas::DEFAULT.pod,
          value_parser = clap::value_parser!(u32).range(1..=100), help_heading = "On this node")]
    pod_quota: u32,
    /// Share of these that all pods of one egress policy together may hold, in percent (1 to 100)
    #[arg(long, env = "EGRESS_AGENT_POLICY_QUOTA", value_name = "PERCENT", default_value_t = Quotas::DEFAULT.policy,
          value_parser = clap::value_parser!(u32).range(1..=100), help_heading = "On this node")]
    policy_quota: u32,
    /// Limit of tracked connections from outside, 128 bytes of memory each (1024 to 268435456); further ones to selected pods
    /// are dropped (inbound_full). A change recreates all maps, as with another layout of the maps
    #[arg(long, env = "EGRESS_AGENT_INBOUND_ENTRIES", value_name = "ENTRIES", default_value_t = DEFAULT_INBOUND_ENTRIES,
          value_parser = clap::value_parser!(u32).range(1024..=MOST_ENTRIES), help_heading = "On this node")]
    inbound_entries: u32,
    #[command(flatten)]
    networks: NetworkArgs,
    /// External destinations that selected pods reach without their egress IP: their packets are left to the CNI
    #[arg(
        long,
        env = "EGRESS_AGENT_EXCLUDED_CIDRS",
        value_name = "CIDR,...",
        value_delimiter = ',',
        help_heading = "The cluster's networks"
    )]
    excluded_cidrs: Vec<IpNet>,
    /// External hosts reach pods by the pods' own addresses: selected pods answer them on every port, with these addresses.
    /// Any such host can then make a pod send to it without the egress IP; otherwise only externally reachable ports of
    /// Services, and host ports, count
    #[arg(long, env = "EGRESS_AGENT_DIRECT_ROUTING", help_heading = "The cluster's networks")]
    direct_routing: bool,
    /// Connections leave by random ports of their egress IP, on which nothing outside can rely. Otherwise a pod's own port is kept
    /// where it is free
    #[arg(long, env = "EGRESS_AGENT_RANDOM_PORTS", help_heading = "On this node")]
    random_ports: bool,
    /// Each pod gets its own ports of an egress IP, in blocks of so many, four blocks at most. So an address and a port tell the
    /// pod, and no pod uses up another's ports. No pod's own port is kept: connections of TCP and SCTP end when their egress IP
    /// moves, and when this is switched on. Without it pods share the ports
    #[arg(
        long,
        env = "EGRESS_AGENT_PORT_BLOCK_SIZE",
        value_name = "NUMBER",
        value_enum,
        help_heading = "On this node"
    )]
    port_block_size: Option<PortBlockSize>,
    #[command(flatten)]
    nat_log: NatLogArgs,
    #[command(flatten)]
    tunnel: TunnelArgs,
    /// What encapsulates and decapsulates overlay packets; `device` if IPsec policies encrypt between nodes
    #[arg(
        long,
        env = "EGRESS_AGENT_ENCAPSULATION",
        value_name = "MODE",
        value_enum,
        default_value_t = Encapsulation::Program,
        help_heading = "The overlay"
    )]
    encapsulation: Encapsulation,
    /// Treatment of packets of pods that this node does not know yet
    #[arg(
        long,
        env = "EGRESS_AGENT_UNKNOWN_PODS",
        value_name = "ACTION",
        value_enum,
        default_value_t = UnknownPodsFlag::Auto,
        help_heading = "When there is no egress IP"
    )]
    unknown_pods: UnknownPodsFlag,
    #[command(flatten)]
    unassigned: UnassignedArgs,
    #[command(flatten)]
    health: HealthArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    timeouts: TimeoutArgs,
    #[command(flatten)]
    log: logging::LogArgs,
}

/// More would not fit any node's memory.
const MOST_ENTRIES: i64 = 1 << 28;

/// Who had which ports of an egress IP.
#[derive(Args, Debug)]
struct NatLogArgs {
    /// File for the log of NAT: one line for each port block that a pod gets or gives back, and for each selected pod of this node
    #[arg(
        long,
        env = "EGRESS_AGENT_NAT_LOG",
        value_name = "PATH",
        requires = "port_block_size",
        help_heading = "On this node"
    )]
    nat_log: Option<PathBuf>,
    /// Size of that file after which another one begins
    #[arg(long, env = "EGRESS_AGENT_NAT_LOG_SIZE", value_name = "BYTES", default_value_t = 16 << 20,
          value_parser = clap::value_parser!(u64).range(64 << 10..), help_heading = "On this node")]
    nat_log_size: u64,
    /// How many earlier files are kept
    #[arg(
        long,
        env = "EGRESS_AGENT_NAT_LOG_FILES",
        value_name = "NUMBER",
        default_value_t = 7,
        help_heading = "On this node"
    )]
    nat_log_files: u32,
}

impl NatLogArgs {
    fn settings(&self) -> Option<NatLogSettings> {
        let path = self.nat_log.clone()?;
        Some(NatLogSettings { path, size: self.nat_log_size, kept: self.nat_log_files })
    }
}

/// An egress IP has 64,512 ports for pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PortBlockSize {
    /// 1,008 blocks
    #[value(name = "64")]
    Of64,
    /// 504 blocks
    #[value(name = "128")]
    Of128,
    /// 252 blocks
    #[value(name = "256")]
    Of256,
    /// 126 blocks
    #[value(name = "512")]
    Of512,
    /// 63 blocks
    #[value(name = "1024")]
    Of1024,
}

impl PortBlockSize {
    const fn ports(self) -> u16 {
        match self {
            Self::Of64 => 64,
            Self::Of128 => 128,
            Self::Of256 => 256,
            Self::Of512 => 512,
            Self::Of1024 => 1024,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Encapsulation {
    /// The programs for plain packets, the device for the rest
    Program,
    /// The VXLAN device
    Device,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AttachFlag {
    /// Links if the kernel has them, else filters
    Auto,
    /// TCX links (Linux 6.6), before all other programs of the hook
    Tcx,
    /// Filters of the clsact queueing discipline, by priority among other software's filters
    Clsact,
}

impl AttachFlag {
    const fn preferred(self) -> Option<Attachment> {
        match self {
            Self::Auto => None,
            Self::Tcx => Some(Attachment::Tcx),
            Self::Clsact => Some(Attachment::Clsact),
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum UnknownPodsFlag {
    /// Drop if the CNI announces addresses before a pod starts; otherwise only while a selected pod starts here, and while no
    /// agent runs
    Auto,
    /// Always drop: none leaves with a wrong address, but pods that no object selects wait for the agent too
    Drop,
    /// Always pass: a pod's first packets may leave with its node's address
    Pass,
}

impl RunArgs {
    pub(super) fn config_file(&self) -> Option<&Path> {
        self.api.config_file()
    }

    fn model(&self) -> settings::NodeSettings {
        settings::NodeSettings {
            node_name: self.api.node_name.clone(),
            cluster_subnets: self.networks.cluster_subnets.clone(),
            service_cidrs: self.networks.service_cidrs.clone(),
            excluded_cidrs: self.excluded_cidrs.clone(),
            api_servers: BTreeSet::new(),
            unknown_pods: match self.unknown_pods {
                UnknownPodsFlag::Auto => settings::UnknownPods::Auto,
                UnknownPodsFlag::Drop => settings::UnknownPods::Drop,
                UnknownPodsFlag::Pass => settings::UnknownPods::Pass,
            },
            on_unassigned: self.unassigned.on_unassigned(),
        }
    }

    /// The programs' initial state, if unknown pods are dropped before the agent has any list.
    fn initial_state(&self) -> Option<InitialState> {
        matches!(self.unknown_pods, UnknownPodsFlag::Drop).then(|| self.model().foreknown())
    }

    fn agent(
        &self,
        (host, api_servers): (Host, BTreeSet<IpAddr>),
        tls: Option<Tls>,
        (outages, health_page): (ApiOutages, Arc<HealthPage>),
        questions: Questions,
    ) -> AgentSettings {
        AgentSettings {
            model: settings::NodeSettings { api_servers, ..self.model() },
            namespace: self.api.namespace.clone(),
            health: health::HealthSettings {
                port: self.health.port(),
                tls,
                total_timeout: self.health.total_timeout(),
            },
            overlay: Some(self.tunnel.tunnel_port),
            host: Some(host),
            outages,
            questions: Some(questions),
            health_page: Some(health_page),
        }
    }
}

/// `ignored` are warnings about ignored parts of the configuration file.
pub(super) fn run(args: &RunArgs, ignored: &[String]) -> Result<(), CliError> {
    let log = logging::start(&args.log)?;
    ignored.iter().for_each(|line| warn!("{line}"));
    let notes = Notes::default();
    notes.set("--config-file", ignored.to_vec());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run_async(args, notes, log))
}

async fn run_async(args: &RunArgs, notes: Notes, (log, warnings): (LogLevel, RecentWarnings)) -> Result<(), CliError> {
    // Before any change of the kernel: a wrong certificate or kubeconfig must leave everything unchanged.
    let tls = args.tls.files(args.health.port())?.map(tls::read).transpose()?;
    let (client, outages) = client::connect(args.api.kubeconfig.as_deref()).await?;
    let stop = stop_on_signal()?;
    // Before the programs are loaded, which takes time: the health pages report it.
    let health_page = Arc::new(HealthPage::new(Process::Agent, outages.clone()));
    if let Some(listen) = args.metrics.metrics_bind_address {
        let serve = metrics::serve(listen, args.metrics.token_file(), Arc::clone(&health_page), stop.clone());
        tokio::spawn(egress_supervise::until(stop.clone(), Task::MetricsServer, serve));
    }
    let uplink = match &args.node.uplink {
        Some(named) => Some(named.clone()),
        None => stop.run_until_cancelled(uplink::guess(health_page.startup_wait())).await,
    };
    let Some(uplink) = uplink else { return stopped_early() };
    let mut settings = args.node.settings_for(uplink.clone());
    settings.tunnel_port = args.tunnel.tunnel_port;
    settings.timeouts = args.timeouts.checked();
    settings.nat_entries = args.nat_entries;
    settings.quotas = Quotas { pod: args.pod_quota, policy: args.policy_quota };
    settings.inbound_entries = args.inbound_entries;
    settings.direct_routing = args.direct_routing;
    settings.random_ports = args.random_ports;
    settings.port_block = args.port_block_size.map_or(0, PortBlockSize::ports);
    settings.skip_cni_check = args.skip_cni_check;
    settings.attachment = args.attach.preferred();
    settings.overlay_in_program = args.encapsulation == Encapsulation::Program;
    settings.initial_state = args.initial_state();
    let is_early = args.node.uplink.is_none() && uplink::is_early(&args.node.mgmt_port);
    let dataplane = tokio::select! {
        () = stop.cancelled() => return stopped_early(),
        started = start(&client, settings, health_page.startup_wait()) => match started {
            Ok(dataplane) => dataplane,
            Err(error) => {
                if let Some(reason) = error.event_reason() {
                    let why = error.to_string();
                    events::write_node_event(client, &args.api.node_name, &outages, (reason, &why)).await;
                }
                return Err(error.into());
            }
        },
    };
    let names = (uplink.clone(), args.node.mgmt_port.clone());
    let host = Host::new(names, dataplane.interfaces(), dataplane.next_hops())?;
    let meter = dataplane.meter()?;
    tokio::spawn(egress_supervise::forever(Task::PortCounter, meter.clone().follow_ports()));
    health_page.set_meter(meter);
    if args.networks.service_cidrs.is_empty() {
        warn!(
            "no --service-cidrs: each Service's cluster IP gets its own entry, and traffic of selected pods to a Service that \
             this node does not know yet leaves the cluster"
        );
    }
    let tls = tls.map(|(tls, keeper)| {
        let keep = keeper.with_notes(notes.clone()).run(tls::INTERVAL, stop.clone());
        tokio::spawn(egress_supervise::until(stop.clone(), Task::Certificates, keep));
        tls
    });
    let (socket, bpffs, drops) = (args.socket.clone(), args.node.bpffs.clone(), dataplane.drops());
    let questions = Questions { socket, notes, drops, log, warnings, bpffs, nat_log: args.nat_log.settings() };
    let api_servers = client::server_addresses(&outages).await;
    let settings = args.agent((host, api_servers), tls, (outages, health_page), questions);
    let mut agent = std::pin::pin!(run::run(client, settings, dataplane, stop.clone()));
    let changed = tokio::select! {
        () = &mut agent => None,
        other = uplink::another_than(&uplink, &args.node.mgmt_port), if is_early => Some(other),
    };
    if let Some(now) = changed {
        stop.cancel();
        agent.await;
        return Err(CliError::AnotherUplink { was: uplink, now });
    }
    info!("stopped; programs and maps stay in place");
    Ok(())
}

async fn start(
    client: &Client,
    settings: egress_datapath::Settings,
    startup_wait: &StartupWait,
) -> Result<Dataplane, StartError> {
    if abi_migration::is_due(&settings) {
        let waits = || {
            let line =
                "waiting for the API server before taking over from the programs of another version, which continue";
            info!("{line}");
            startup_wait.set(Some(line.to_owned()));
        };
        client::until_answered(client, waits).await;
        startup_wait.set(None);
    }
    Dataplane::start(settings).await
}

fn stopped_early() -> Result<(), CliError> {
    info!("stopped before the programs were loaded; the node is unchanged");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_flags;

    #[test]
    fn sizes_out_of_range_are_refused() {
        let parse = |argument: &str| parse_flags::<RunArgs>(["--node-name=a", argument]);
        let accepted = parse("--inbound-entries=2048").expect("a size");
        assert_eq!((accepted.inbound_entries, accepted.nat_entries), (2048, DEFAULT_NAT_ENTRIES));
        for flag in ["--inbound-entries", "--nat-entries"] {
            for size in ["0", "1023", "268435457", "4294967296", "-1", "many"] {
                let refused = parse(&format!("{flag}={size}")).err().map(|error| error.to_string());
                let line = refused.unwrap_or_else(|| panic!("{flag}={size} was accepted"));
                assert!(line.contains(flag) && line.contains(size), "{line}");
            }
        }
    }
}
