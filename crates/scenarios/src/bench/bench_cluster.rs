//! The lab of a benchmark: for each peer a node with two pods of each family and a gateway beside it, all on one switch with
//! one server outside. Ours are served by real agents that follow the lab's API server; objects put one pod on each path.

use super::Effort;
use super::cache_use::{CacheUse, CacheUseMap};
use super::cpu::Cores;
use super::plan::{PacketPath, Peer, Work, of_family};
use super::samples::Results;
use super::{peers, requests};
use crate::prelude::*;
use egress_common::abi::Family;
use egress_lab::ReversePath;
use egress_lab::kube_api::ApiChoice;
use egress_lab::topology::addresses::Dual;
use egress_lab::topology::netns::link_address;
use egress_lab::wait::poll;
use egress_toolchain::Built;

pub(super) const NAMESPACE: &str = "bench";
/// How long agents may take for what they do at once.
const PATIENCE: Duration = Duration::from_secs(60);
/// The far end of the management port.
pub(super) const FAR_END: &str = "mp0";

/// Twice the default: the flows of two paths and several works are in the maps at the same time.
const NAT_ENTRIES: &str = "--nat-entries=524288";

pub(super) struct BenchCluster {
    base: TestCluster,
    cores: Cores,
    caches: BTreeMap<NodeNumber, CacheUseMap>,
}

/// Where a path of ours ends, and the egress IP there.
const PLACES: [(Peer, PacketPath, usize, Dual); 3] = [
    (Peer::Ours, PacketPath::Local, Peer::Ours.source_node(), peers::on_lan(150)),
    (Peer::Ours, PacketPath::Remote, Peer::Ours.gateway_node(), peers::on_lan(151)),
    (Peer::OursByDevice, PacketPath::Remote, Peer::OursByDevice.gateway_node(), peers::on_lan(152)),
];

/// A node never has two addresses of one object, so each family has its own pods and objects.
const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

fn pod_name(peer: Peer, path: PacketPath, family: Family) -> String {
    let family = match family {
        Family::V4 => "v4",
        Family::V6 => "v6",
    };
    format!("{}-{}-{family}", peer.name(), path.name())
}

/// As bare as a host can be: what a host has beside these costs everyone but us.
pub(super) fn bare(_node: usize) -> HostConfig {
    HostConfig { service_proxy: false, reverse_path: ReversePath::Off, ..HostConfig::default() }
}

/// Two nodes with agents. The first one has the pods of each path, which have its name as a label.
pub(super) fn with_pods_of_paths(
    built: &Built,
    prefix: &str,
    names: &dyn Fn(PacketPath) -> Vec<String>,
    flags: &[&str],
) -> Result<TestCluster> {
    let mut builder = LabBuilder::default().readable_prefix(prefix).nodes(2).host_config(bare);
    for path in PacketPath::ALL {
        for name in names(path) {
            builder = builder.pod(pod(&name, NAMESPACE, 1, &[("path", path.name())]));
        }
    }
    let mut cluster = TestCluster::bring_up(builder, Some(0), &ApiChoice::InMemory)?;
    cluster.start_agents(&AgentOptions::new(&built.agent, &cluster.api).with(flags.iter().copied()))?;
    cluster.agents_serve()?;
    Ok(cluster)
}

impl BenchCluster {
    pub(super) fn start(built: &Built, prefix: &str, cores: Cores) -> Result<Self> {
        let mut builder = LabBuilder::default().readable_prefix(prefix).nodes(2 * Peer::ALL.len()).host_config(bare);
        for peer in Peer::ALL {
            for (path, family) in paths_and_families(peer) {
                let name = pod_name(peer, path, family);
                builder = builder.pod(pod(&name, NAMESPACE, peer.source_node(), &[("role", &name)]));
            }
        }
        let base = TestCluster::bring_up(builder, None, &ApiChoice::InMemory)?;
        let mut cluster = Self { base, cores, caches: BTreeMap::new() };
        for peer in [Peer::Plain, Peer::Netfilter] {
            cluster.prepare(peer)?;
        }
        cluster.publish_many()?;
        cluster.switch_to_ours(built)?;
        cluster.sink()?;
        cluster.check()?;
        for peer in Peer::ALL.into_iter().filter(|peer| peer.is_ours()) {
            for number in [peer.source_node(), peer.gateway_node()] {
                let node = cluster.node(number)?;
                let map = CacheUseMap::of(node)?;
                cluster.caches.insert(node.number, map);
            }
        }
        requests::serve(cluster.base.lab.outside(), cores)?;
        Ok(cluster)
    }

    pub(super) fn node(&self, number: usize) -> Result<&LabNode> {
        Ok(self.base.lab.node(NodeNumber::new(number)?))
    }

    pub(super) fn pod(&self, peer: Peer, path: PacketPath, family: Family) -> Result<&LabPod> {
        self.base.lab.pod(&pod_name(peer, path, family))
    }

    /// The nodes on a path of ours; none for other peers.
    pub(super) fn own_nodes(&self, peer: Peer, path: PacketPath) -> Result<Vec<&LabNode>> {
        let numbers = match path {
            PacketPath::Local => &[peer.source_node()][..],
            PacketPath::Remote => &[peer.source_node(), peer.gateway_node()],
        };
        numbers.iter().filter(|_| peer.is_ours()).map(|number| self.node(*number)).collect()
    }

    /// Of these nodes.
    pub(super) fn cache_use(&self, peer: Peer, path: PacketPath) -> Result<CacheUse> {
        let mut sum = CacheUse::default();
        for node in self.own_nodes(peer, path)? {
            let map = self.caches.get(&node.number).context("a node without an agent")?;
            sum += map.read()?;
        }
        Ok(sum)
    }

    pub(super) fn lan(&self) -> &Netns {
        self.base.lab.lan()
    }

    pub(super) fn ext(&self) -> &Netns {
        self.base.lab.ext()
    }

    fn prepare(&self, peer: Peer) -> Result<()> {
        let (source, gateway) = (self.node(peer.source_node())?, self.node(peer.gateway_node())?);
        for family in FAMILIES {
            let pod = |path| Ok::<_, anyhow::Error>(of_family(self.pod(peer, path, family)?.addresses, family));
            let (local, remote) = (pod(PacketPath::Local)?, pod(PacketPath::Remote)?);
            batch(&source.host, family, &peers::source(peer, family, source.number, gateway.number, remote))?;
            batch(&gateway.host, family, &peers::gateway(peer, family, gateway.number, source.number, remote))?;
            match peer {
                Peer::Plain => {
                    let routes = peers::outside(family, (local, source.number), (remote, gateway.number));
                    batch(self.base.lab.ext(), family, &routes)?;
                }
                Peer::Netfilter => {
                    let rules = peers::netfilter_rules(family, source.number, remote);
                    [source, gateway].iter().try_for_each(|node| node.host.feed("nft", &["-f", "-"], &rules))?;
                }
                Peer::Ours | Peer::OursByDevice => {}
            }
        }
        if peer == Peer::Plain {
            for node in [source, gateway] {
                node.host.exec("nft", &["flush", "ruleset"])?;
            }
        }
        Ok(())
    }

    /// Pods that have addresses and no more: neighbours for all peers, API objects for ours.
    fn publish_many(&self) -> Result<()> {
        for peer in Peer::ALL {
            let node = self.node(peer.source_node())?;
            batch(&node.host, Family::V4, &peers::many_neighbours(node.number))?;
            for path in peer.paths().iter().copied().filter(|_| peer.is_ours()) {
                let model = self.pod(peer, path, Family::V4)?;
                for address in peers::many_pods(node.number, path) {
                    let addresses = addresses_of(node, address)?;
                    let name = format!("{}-{}", model.name, address.octets()[3]);
                    self.base.api.publish_pod(&LabPod { name, addresses, ..model.clone() })?;
                }
            }
        }
        Ok(())
    }

    /// Agents on our nodes, and an object for each path.
    fn switch_to_ours(&mut self, built: &Built) -> Result<()> {
        for peer in Peer::ALL.into_iter().filter(|peer| peer.is_ours()) {
            let by_device = (peer == Peer::OursByDevice).then_some("--encapsulation=device");
            let options = AgentOptions::new(&built.agent, &self.base.api).with(by_device).with([NAT_ENTRIES]);
            for number in [peer.source_node(), peer.gateway_node()] {
                let agent = Agent::start(&self.base.lab, self.node(number)?, &options)?;
                self.base.agents.push(agent);
            }
        }
        // One more candidate at a time: an assignment that is there stays, and a new one goes to the node with the fewest.
        for (peer, path, number, addresses) in PLACES {
            self.base.api.label_node(&format!("node{number}"), ASSIGNABLE, Some(""))?;
            for family in FAMILIES {
                let (name, address) = (pod_name(peer, path, family), of_family(addresses, family).to_string());
                let (namespaces, pods) = (labels("house", NAMESPACE), labels("role", &name));
                self.base.api.create(EGRESS_IPS, &egress_ip(&name, &[&address], &namespaces, &pods))?;
                let (path, node) = (format!("{EGRESS_IPS}/{name}"), format!("node{number}"));
                let there =
                    |value: &Value| value.pointer("/status/items/0/node").and_then(Value::as_str) == Some(&node);
                self.base.api.wait_for(&path, PATIENCE, there)?;
            }
        }
        Ok(())
    }

    fn sink(&self) -> Result<()> {
        let ports: Vec<String> = self.base.lab.nodes().iter().map(LabNode::name).collect();
        self.lan().feed("nft", &["-f", "-"], &peers::sink(&ports))?;
        for peer in Peer::ALL {
            let router = &self.node(peer.source_node())?.router;
            router.feed("nft", &["-f", "-"], &peers::sink_of_answers(FAR_END))?;
        }
        Ok(())
    }

    /// The address that the world sees of this pod address.
    pub(super) fn seen_as(&self, peer: Peer, path: PacketPath, pod: IpAddr) -> Result<IpAddr> {
        let node = NodeNumber::new(peer.source_node())?.address();
        Ok(match (peer, path) {
            (Peer::Plain, _) => pod,
            (Peer::Netfilter, PacketPath::Local) => node.towards(pod),
            (Peer::Netfilter, PacketPath::Remote) => peers::NETFILTER_REMOTE.towards(pod),
            (Peer::Ours | Peer::OursByDevice, _) => PLACES
                .iter()
                .find(|place| (place.0, place.1) == (peer, path))
                .map(|place| place.3.towards(pod))
                .context("a path without an address")?,
        })
    }

    /// Each pod is seen outside as its peer and path have it: the figures are those of the named path.
    fn check(&self) -> Result<()> {
        let _server = Server::outside(&self.base.lab)?;
        for peer in Peer::ALL {
            for (path, family) in paths_and_families(peer) {
                let pod = self.pod(peer, path, family)?;
                let expected = self.seen_as(peer, path, of_family(pod.addresses, family))?;
                self.wait_until_seen(pod, expected)?;
            }
        }
        Ok(())
    }

    fn wait_until_seen(&self, pod: &LabPod, expected: IpAddr) -> Result<()> {
        let mut seen = None;
        let server = SocketAddr::new(peers::SERVER.towards(expected), HTTP_PORT);
        let is_expected = poll(PATIENCE, || {
            let reply = client::get(&pod.netns, server, "/", "bench")?;
            seen = reply.ok().map(|reply| reply.seen_as()).transpose()?;
            Ok((seen == Some(expected)).then_some(()))
        })?;
        is_expected.with_context(|| format!("{} is seen as {seen:?}, not as {expected}", pod.name))
    }

    /// One work on all paths by all peers; who begins changes with the round.
    pub(super) fn round(&self, work: Work, round: usize, effort: &Effort, results: &mut Results) -> Result<()> {
        let time = effort.cell;
        match work {
            Work::Cores => return self.cores(self.cores, round, time, results),
            Work::Churn => return self.churn(self.cores, round, time, effort.quick, results),
            _ => {}
        }
        for path in PacketPath::ALL {
            let mut order = Peer::ALL;
            order.rotate_left(round % Peer::ALL.len());
            for peer in order.into_iter().filter(|peer| peer.paths().contains(&path)) {
                if matches!(work, Work::Forwarding | Work::Forwarding6) {
                    self.forwarding(work, peer, path, self.cores.first, time, results)?;
                    continue;
                }
                let pod = self.pod(peer, path, work.family())?;
                let sample = requests::measure(work, &pod.netns, self.cores.first, time)?;
                results.add(work.name(), path.name(), peer.name(), work.unit(), sample);
            }
        }
        Ok(())
    }

    pub(super) fn tear_down(self) -> Result<()> {
        self.base.tear_down()
    }
}

fn paths_and_families(peer: Peer) -> impl Iterator<Item = (PacketPath, Family)> {
    peer.paths().iter().flat_map(|path| FAMILIES.map(|family| (*path, family)))
}

fn batch(netns: &Netns, family: Family, lines: &[String]) -> Result<()> {
    let family = match family {
        Family::V4 => "-4",
        Family::V6 => "-6",
    };
    netns.feed("ip", &[family, "-batch", "-"], &(lines.join("\n") + "\n"))
}

/// Both addresses of the pod with this IPv4 address.
fn addresses_of(node: &LabNode, address: Ipv4Addr) -> Result<Dual> {
    let place = (0..plan::MAX_PODS_PER_NODE).find_map(|place| {
        let addresses = node.number.pod(place, node.config.cni).ok()?;
        (addresses.v4 == address).then_some(addresses)
    });
    place.with_context(|| format!("{address} is no pod address of {}", node.name()))
}

pub(super) fn link_address_of(netns: &Netns, device: &str) -> Result<[u8; 6]> {
    netns.run(|| link_address(device)?.addr().with_context(|| format!("{device} has no link address")))
}
