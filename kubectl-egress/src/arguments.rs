//! The command line.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

#[derive(Parser, Debug)]
#[command(name = "kubectl egress", bin_name = "kubectl egress", version, about = "Looks at egress IPs over all nodes")]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    pub(crate) command: PluginCommand,
}

/// As kubectl has them. kubectl passes none of its own flags to a plugin, so they stand after `egress`.
#[derive(Args, Debug, Default)]
pub(crate) struct ConnectionArgs {
    /// Kubeconfig for the API server [default: kubectl's rules]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: the current one]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Namespace of a pod that is named without one [default: that of the context]
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Namespace of the agents [default: the one that has their pods]
    #[arg(long, global = true, value_name = "NAMESPACE")]
    pub(crate) agent_namespace: Option<String>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum PluginCommand {
    /// Show the state of a node's agent
    Status(AgentCommandArgs),
    /// List or count NAT mappings: those on a node, or those of a pod on all gateway nodes
    Nat(NatCommandArgs),
    /// Show a sample of the packets dropped on a node
    Drops(AgentCommandArgs),
    /// Follow a packet of a pod over its node and its gateway node, without sending one
    Trace(PathArgs),
    /// Name the pods that use an egress IP now, or one of its ports; or the pod that had a port at a time
    Who(WhoArgs),
    /// Move a node's egress IPs to other nodes, and assign it none
    Drain(DrainCommandArgs),
    /// Start two pods that connect to a target, say what works, and remove them
    Check(CheckArgs),
    /// Collect status, objects, logs and versions of all nodes into one archive, without secrets
    Bundle(BundleArgs),
}

/// Which agent runs the command.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub(crate) struct PlaceArgs {
    /// Node whose agent runs the command
    #[arg(long, value_name = "NODE")]
    pub(crate) node: Option<String>,
    /// Pod whose node's agent runs the command
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub(crate) pod: Option<PodRef>,
}

#[derive(Args, Debug)]
pub(crate) struct AgentCommandArgs {
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Further arguments of the agent's command, after `--`
    #[arg(last = true, value_name = "ARGUMENT")]
    pub(crate) further: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct NatCommandArgs {
    /// What to print
    #[arg(default_value = "list")]
    pub(crate) what: NatQuestion,
    /// Node whose mappings are printed
    #[arg(long, value_name = "NODE", required_unless_present = "pod", conflicts_with = "pod")]
    pub(crate) node: Option<String>,
    /// Pod whose mappings are printed, from each gateway node
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub(crate) pod: Option<PodRef>,
    /// Further arguments of the agent's command, after `--`
    #[arg(last = true, value_name = "ARGUMENT")]
    pub(crate) further: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NatQuestion {
    /// One line for each mapping
    List,
    /// How many there are, for each egress IP
    Count,
}

impl NatQuestion {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Count => "count",
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct PathArgs {
    /// Pod that sends the packet
    #[arg(value_name = "NAMESPACE/NAME")]
    pub(crate) pod: PodRef,
    /// Destination of the packet; for IPv6 [ADDRESS]:PORT; without a port it is a ping
    #[arg(value_name = "ADDRESS[:PORT]")]
    pub(crate) to: WorldEnd,
    /// tcp, udp, icmp, sctp or a protocol's number [default: tcp with a port, else icmp]
    #[arg(long, value_name = "PROTOCOL")]
    pub(crate) proto: Option<String>,
    /// The pod's port, to follow an existing flow
    #[arg(long, value_name = "PORT")]
    pub(crate) from_port: Option<u16>,
    /// Format of the output
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(crate) output: Format,
}

#[derive(Args, Debug)]
pub(crate) struct WhoArgs {
    /// Source of a packet as a firewall saw it; for IPv6 with a port, [ADDRESS]:PORT
    #[arg(value_name = "ADDRESS[:PORT]")]
    pub(crate) seen: WorldEnd,
    /// Destination of the packet: one port serves several destinations at the same time
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub(crate) to: Option<WorldEnd>,
    /// When the port was seen, as in 2026-05-01T12:00:00Z: the logs of NAT of all nodes are read
    #[arg(long, value_name = "TIME", conflicts_with = "to")]
    pub(crate) at: Option<String>,
    /// Format of the output
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(crate) output: Format,
}

#[derive(Args, Debug)]
pub(crate) struct DrainCommandArgs {
    /// Node whose egress IPs move to other nodes
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    /// Undo the drain: the node may get egress IPs again; moved addresses stay where they are
    #[arg(long)]
    pub(crate) undo: bool,
    /// Seconds to wait until all addresses have moved; the drain continues after that; 0: no limit
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub(crate) timeout: u64,
}

#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// Destination outside of the cluster that accepts TCP connections; for IPv6 [ADDRESS]:PORT
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) target: SocketAddr,
    /// EgressIP that is to select one of the pods
    #[arg(long, value_name = "NAME")]
    pub(crate) object: String,
    /// Labels of the pod that the object selects, with commas between them [default: the matchLabels of its podSelector]
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Ask the target by HTTP; an address in its answer is taken as the source that it sees
    #[arg(long)]
    pub(crate) http: bool,
    /// Image of the pods, with egress-agent in it [default: that of the agents]
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,
    /// Seconds until the pods must have ended (5 to 3600)
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub(crate) timeout: u64,
}

fn label(text: &str) -> Result<(String, String), &'static str> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or("it must be KEY=VALUE")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}

#[derive(Args, Debug)]
pub(crate) struct BundleArgs {
    /// Archive to write; it must not exist
    #[arg(long, value_name = "FILE", default_value = "egress-bundle.tar.gz")]
    pub(crate) file: PathBuf,
    /// Seconds after which nodes that have not answered are left out (1 to 86400)
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// For programs: everything
    Json,
}

/// A pod as typed: the namespace may be left to `--namespace` and the context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodRef {
    pub(crate) namespace: Option<String>,
    pub(crate) name: String,
}

impl FromStr for PodRef {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (namespace, name) = match text.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, text),
        };
        if name.is_empty() || name.contains('/') || namespace.as_deref() == Some("") {
            return Err("a pod is named NAMESPACE/NAME");
        }
        Ok(Self { namespace, name: name.to_owned() })
    }
}

/// An address outside of the cluster, or an egress IP, perhaps with a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorldEnd {
    pub(crate) address: IpAddr,
    pub(crate) port: Option<u16>,
}

impl FromStr for WorldEnd {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(with) = text.parse::<SocketAddr>() {
            return Ok(Self { address: with.ip(), port: Some(with.port()) });
        }
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        let address = bare.parse().map_err(|_| "it must be ADDRESS or ADDRESS:PORT, and of IPv6 [ADDRESS]:PORT")?;
        Ok(Self { address, port: None })
    }
}

impl fmt::Display for WorldEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}", SocketAddr::new(self.address, port)),
            None => write!(f, "{}", self.address),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("kubectl-egress").chain(line.split(' ')))
    }

    #[test]
    fn the_definition_is_sound_and_every_flag_is_described() {
        let command = Cli::command();
        command.clone().debug_assert();
        for one in command.get_subcommands() {
            for argument in one.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", one.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn lines_are_read() {
        let cli = parse("status --node worker --context prod -- -o json").expect("a line");
        assert_eq!(cli.connection.context.as_deref(), Some("prod"));
        let PluginCommand::Status(args) = cli.command else { panic!("another command") };
        assert_eq!((args.place.node.as_deref(), args.further), (Some("worker"), vec!["-o".into(), "json".into()]));
        let PluginCommand::Nat(args) = parse("nat --pod red/one").expect("a line").command else { panic!("another") };
        assert_eq!(args.what, NatQuestion::List);
        let PluginCommand::Trace(args) = parse("trace one [2001:db8::1]:443 -n red").expect("a line").command else {
            panic!("another command")
        };
        assert_eq!((args.pod.namespace, args.to.to_string()), (None, "[2001:db8::1]:443".to_owned()));
    }

    /// Command lines of the documents, in blocks and in text.
    #[test]
    fn lines_of_the_documents_are_read() {
        let pages = [include_str!("../../README.md"), include_str!("../../docs/operations/kubectl-plugin.md")];
        let (mut is_block, mut read) = (false, 0);
        for line in pages.iter().flat_map(|page| page.lines()) {
            is_block ^= line.starts_with("```");
            let shown: Vec<&str> = if is_block { vec![line] } else { line.split('`').skip(1).step_by(2).collect() };
            let commands =
                shown.into_iter().filter_map(|one| one.trim_start_matches("$ ").strip_prefix("kubectl egress "));
            for command in commands.filter(|command| !command.contains('|')) {
                let command = command.split(" #").next().unwrap_or_default().trim();
                let filled = command.replace("ADDRESS", "192.0.2.1").replace("PORT", "80");
                let shows_help = |error: &clap::Error| error.kind() == clap::error::ErrorKind::DisplayHelp;
                let outcome = parse(&filled);
                assert!(outcome.as_ref().err().is_none_or(shows_help), "{command}: {outcome:?}");
                read += 1;
            }
        }
        assert!(read > 10, "only {read} lines were read");
    }

    #[test]
    fn wrong_lines_are_refused() {
        for line in [
            "status",
            "drops",
            "nat count",
            "status --node a --pod b/c",
            "nat --node a --pod b/c",
            "nat all --node a",
            "trace red/one",
            "trace red/one world",
            "trace a/b/c 192.0.2.1:80",
            "trace /one 192.0.2.1:80",
            "who 192.0.2.0/24",
            "drain",
            "bundle --timeout 0",
            "bundle --timeout 86401",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
