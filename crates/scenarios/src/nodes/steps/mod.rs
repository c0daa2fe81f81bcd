//! The tests on real nodes, in the order in which they run, and what they stand on. Bounds are three times what the documents
//! publish. Lines that are typed stand in the documents as they stand here, with names in the place of words in capitals; a line
//! that a document marks as run on real nodes must be here (xtask/src/documents/page.rs).

mod breakdown;
mod chart;
mod commands;
mod install;
mod maintenance;
mod monitoring;
mod nat_log;
mod packets;
mod tls;
mod traffic;

use std::fs;

use super::cluster::{KUBERNETES, RealCluster, RealPod, condition};
use super::node::RealNode;
use super::programs::NodePrograms;
use crate::cases::cleanup::{differences, snapshot};
use crate::prelude::*;
use egress_lab::POD_INTERFACE;
use egress_lab::wait::{FAIL_OVER, LEADERS_FAIL_OVER, REPORTED};
use egress_toolchain::Progress;
use install::snapshot_of;
use traffic::{emitted_in_turn, turns_of};

pub(super) struct TestStep {
    pub(super) name: &'static str,
    pub(super) run: fn(&mut NodeTest) -> Result<()>,
    /// Whether the others stand on it.
    pub(super) is_shared: bool,
}

const fn step(name: &'static str, run: fn(&mut NodeTest) -> Result<()>) -> TestStep {
    TestStep { name, run, is_shared: false }
}

const fn shared(name: &'static str, run: fn(&mut NodeTest) -> Result<()>) -> TestStep {
    TestStep { name, run, is_shared: true }
}

pub(super) const STEPS: [TestStep; 22] = [
    shared("nodes_install_as_documented", install::by_kustomize),
    shared("nodes_selected_pods_leave_with_the_egress_ip", install::first_egress_ip),
    step("nodes_agents_run_in_groups_of_version_2", install::in_cgroups_of_version_2),
    step("nodes_new_pods_lose_no_first_packet", packets::first_packets),
    step("nodes_the_kubectl_plugin_answers", commands::plugin),
    step("nodes_a_debug_pod_takes_the_place_of_an_agent", commands::debug_pod),
    step("nodes_break_glass_works_and_can_be_undone", commands::break_glass),
    step("nodes_other_commands_of_the_documents", commands::others),
    step("nodes_prometheus_scrapes_all_and_takes_the_alerts", monitoring::prometheus_scrapes),
    step("nodes_health_checks_by_tls_as_documented", tls::health_checks_by_tls),
    step("nodes_the_log_of_nat_names_a_pod_that_has_gone", nat_log::names_the_pod),
    step("nodes_an_update_loses_no_connection", maintenance::update),
    step("nodes_an_evicted_agent_loses_nothing", maintenance::eviction),
    step("nodes_a_gateway_that_is_cut_off_loses_its_address", breakdown::cut),
    step("nodes_a_drained_gateway_loses_nothing", maintenance::drain),
    step("nodes_an_address_of_another_host_is_not_served", breakdown::conflict),
    step("nodes_uninstall_leaves_nothing", install::uninstall),
    step("nodes_the_chart_installs_updates_and_leaves_nothing", chart::chart),
    step("nodes_without_a_bpf_file_system_one_line_says_so", install::without_bpffs),
    // Pods of these nodes are replaced: the nodes are compared with what they were before.
    step("nodes_a_node_short_of_memory_keeps_its_agent", maintenance::memory_pressure),
    step("nodes_a_gateway_taken_out_of_service_loses_nothing", maintenance::out_of_service),
    step("nodes_a_gateway_without_power_is_replaced_and_returns", breakdown::power_loss),
];

/// Of deploy/examples/egressip-simpson.yaml.
const OBJECT: &str = "egressip-simpson";
const EGRESS_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 100));
/// Pods that stay: house, name, node. The object selects the first house.
const PLACED: [(&str, &str, &str); 4] = [
    ("simpson", "homer", "node1"),
    ("simpson", "marge", "node2"),
    ("bouvier", "patty", "node1"),
    ("bouvier", "selma", "node2"),
];
const SELECTED: &str = "simpson";
/// Addresses of the server for long flows; those below are for single packets.
const FLOWS: u8 = 50;

type NodeSnapshot = BTreeMap<String, BTreeSet<String>>;

/// What the tests stand on.
pub(super) struct NodeTest {
    cluster: RealCluster,
    /// One on each node.
    selected: Vec<RealPod>,
    others: Vec<RealPod>,
    before: Vec<NodeSnapshot>,
}

impl NodeTest {
    /// The cluster, with pods on each node and without the product.
    pub(super) fn start(programs: &NodePrograms, logs: &Path, progress: &Progress) -> Result<Self> {
        let cluster = RealCluster::start(programs, logs, progress)?;
        cluster.add_house("simpson")?;
        cluster.add_house("bouvier")?;
        let mut test = Self { cluster, selected: Vec::new(), others: Vec::new(), before: Vec::new() };
        test.place_pods()?;
        test.nothing_is_selected()?;
        test.before = test.cluster.nodes().iter().map(snapshot_of).collect::<Result<_>>()?;
        Ok(test)
    }

    /// Creates those of the pods that are not there, and waits for all.
    fn place_pods(&mut self) -> Result<()> {
        for (house, name, node) in PLACED {
            self.cluster.add_pods(house, &[(name.to_owned(), node, None)])?;
        }
        self.find_pods()
    }

    /// Deletes pods that have ended, and creates them again.
    fn replace_pods(&mut self) -> Result<()> {
        for (house, ..) in PLACED {
            self.cluster.kubectl(&["-n", house, "delete", "pods", "--field-selector=status.phase=Failed"])?;
        }
        self.place_pods()
    }

    /// Waits until all pods run.
    fn find_pods(&mut self) -> Result<()> {
        let pods = PLACED.map(|(house, name, _)| self.cluster.pod(house, name));
        let pods = pods.into_iter().collect::<Result<Vec<_>>>()?;
        (self.selected, self.others) = pods.into_iter().partition(|pod| pod.house == SELECTED);
        Ok(())
    }

    pub(super) fn tear_down(self) -> Result<()> {
        self.cluster.tear_down()
    }

    /// For a failed test.
    pub(super) fn keep_agents_logs(&self, folder: &Path) {
        let kept = || -> Result<()> {
            fs::create_dir_all(folder)?;
            for node in self.cluster.nodes() {
                let pods = node.path("/var/log/pods");
                let copied =
                    std::process::Command::new("cp").arg("-r").arg(pods).arg(folder.join(node.lab.name())).status()?;
                ensure!(copied.success(), "cp");
            }
            for kind in ["nodes", "pods", "events", "egressip"] {
                let objects = self.cluster.kubectl(&["get", kind, "-A", "-o", "yaml"])?;
                fs::write(folder.join(kind), objects)?;
            }
            Ok(())
        };
        match kept() {
            Ok(()) => println!("what pods said and what the cluster has: {}", folder.display()),
            Err(error) => println!("the pods' logs are not kept: {error:#}"),
        }
    }

    /// Selected pods are seen with the egress IP, the others with their node's address.
    fn all_are_right(&self) -> Result<()> {
        self.selected.iter().try_for_each(|pod| self.cluster.is_seen_as(pod, EGRESS_IP))?;
        self.others.iter().try_for_each(|pod| self.cluster.is_seen_as(pod, pod.node))
    }

    fn nothing_is_selected(&self) -> Result<()> {
        let mut pods = self.selected.iter().chain(&self.others);
        pods.try_for_each(|pod| self.cluster.is_seen_as(pod, pod.node))
    }

    fn gateway(&self) -> Result<String> {
        self.cluster.server_of(OBJECT, EGRESS_IP)?.context("no node serves the address")
    }

    fn selected_on(&self, node: &str) -> Result<&RealPod> {
        let address = self.cluster.node(node)?.lab.number.address().v4;
        self.selected.iter().find(|pod| pod.node == address).with_context(|| format!("no selected pod on {node}"))
    }

    /// Switches a node on that was off, and waits until its agent and its pods are at work again.
    fn boots(&mut self, node: &str) -> Result<()> {
        self.boots_empty(node)?;
        self.find_pods()?;
        self.agent_is_ready(node)
    }

    /// The same of a node without pods of its own network. Its agent runs, and is not ready before the CNI makes the bridge for the
    /// first of them.
    fn boots_empty(&mut self, node: &str) -> Result<()> {
        self.cluster.set_power(node, true)?;
        until_true(&format!("an agent runs on {node}"), KUBERNETES, || {
            Ok(!self.cluster.node(node)?.agents("run")?.is_empty())
        })?;
        self.cluster.nodes_are_ready()
    }

    fn agent_is_ready(&self, node: &str) -> Result<()> {
        until_true(&format!("the agent of {node} is ready"), KUBERNETES, || {
            Ok(condition(&self.cluster.agent_pod(node)?, "Ready") == Some("True"))
        })
    }

    /// The gateway, and the node that takes its place. Both have the label then.
    fn gateway_and_other(&self) -> Result<(String, &'static str)> {
        self.cluster.types("kubectl label node node1 node2 k8s.ovn.org/egress-assignable= --overwrite")?;
        let gateway = self.gateway()?;
        let other = if gateway == "node1" { "node2" } else { "node1" };
        Ok((gateway, other))
    }

    /// The status is the node that this names, with its conditions right.
    fn is_served_by(&self, node: &str, patience: Duration) -> Result<()> {
        until_true(&format!("{EGRESS_IP} is assigned to {node}"), patience, || {
            let object = self.cluster.get(&["egressip", OBJECT])?;
            let right =
                condition(&object, "Assigned") == Some("True") && condition(&object, "Degraded") == Some("False");
            Ok(right && self.cluster.server_of(OBJECT, EGRESS_IP)?.as_deref() == Some(node))
        })
    }

    /// While there was no other gateway its lease had no end, and a node that is cut off before it has acknowledged the end keeps
    /// its addresses.
    fn leases_end(&self) -> Result<()> {
        until_true("the lease of the gateway has an end", EFFECT, || {
            Ok(self.has_none("endless-leases")? && self.has_none("ending-leases")?)
        })
    }

    /// Leaves the object one gateway, whose lease has no end: dozens of pods that start at once may leave its agent without a
    /// processor for longer than a lease lasts.
    fn lease_has_no_end(&self) -> Result<()> {
        self.cluster.types("kubectl label node node2 k8s.ovn.org/egress-assignable-")?;
        until_true("the lease of the gateway has no end", KUBERNETES, || Ok(!self.has_none("endless-leases")?))
    }

    /// Whether this part of the leader's ledger is empty.
    fn has_none(&self, part: &str) -> Result<bool> {
        let ledger = self.cluster.get(&["-n", "egress-agent", "configmap", "egress-agent-hand-overs"])?;
        Ok(ledger["data"][part].as_str().is_none_or(|text| text == "{}"))
    }

    /// How long packets of this gateway may be lost when it fails.
    fn fail_over_of(&self, gateway: &str) -> Result<Duration> {
        let lease = self.cluster.get(&["-n", "egress-agent", "lease", "egress-agent-leader"])?;
        let leader = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        println!("{gateway} serves, {leader} leads");
        Ok(if leader.starts_with(&format!("{gateway}_")) { LEADERS_FAIL_OVER } else { FAIL_OVER })
    }

    /// Another pod than this one of the agent's runs on the node and is Ready.
    fn agent_is_replaced(&self, node: &str, former: &Value) -> Result<()> {
        until_true(&format!("{node} has another agent"), KUBERNETES, || {
            let Ok(pod) = self.cluster.agent_pod(node) else { return Ok(false) };
            Ok(pod["metadata"]["uid"] != former["metadata"]["uid"] && condition(&pod, "Ready") == Some("True"))
        })
    }
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// Waits for a DaemonSet or a Deployment.
fn rolled_out(cluster: &RealCluster, what: &str) -> Result<()> {
    cluster
        .types(&format!("kubectl -n egress-agent rollout status {what} --timeout={}s", KUBERNETES.as_secs()))
        .map(drop)
}

/// The agents and the controllers.
fn all_rolled_out(cluster: &RealCluster) -> Result<()> {
    rolled_out(cluster, "daemonset/egress-agent")?;
    rolled_out(cluster, "deployment/egress-agent-controller")
}

#[cfg(test)]
mod tests {
    use super::super::cluster::SERVER_ADDRESSES;
    use super::*;

    #[test]
    fn names_are_unique_and_doors_suffice() {
        let names: BTreeSet<&str> = STEPS.iter().map(|step| step.name).collect();
        assert_eq!(names.len(), STEPS.len());
        const { assert!(FLOWS + 4 <= SERVER_ADDRESSES) };
    }
}
