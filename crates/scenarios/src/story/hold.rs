//! `--hold`: the lab stays up, and here is what to type. An agent that ends is started again, as the kubelet does.

use std::net::{IpAddr, Ipv4Addr};

use super::walkthrough::Walkthrough;
use crate::prelude::*;
use egress_lab::agents::AgentOptions;
use egress_lab::api_objects::{ASSIGNABLE, EGRESS_IPS, NODES, assigned};
use egress_lab::topology::addresses::{self as plan, HTTP_PORT};
use egress_lab::topology::lab::{LabNode, LabPod};
use egress_lab::wait_for_signal;

/// Where an agent's metrics are, in the network namespace of its node.
pub(super) const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9477);

/// How often the agents are looked at.
const INTERVAL: Duration = Duration::from_millis(500);

/// Prints commands and waits for Ctrl-C.
pub(super) fn hold(walkthrough: &mut Walkthrough) {
    println!("\nThe lab stays up. In another shell:");
    for (what, command) in commands(walkthrough) {
        println!("\n  # {what}\n  {command}");
    }
    println!("\nCtrl-C takes it down.");
    let agents = &mut walkthrough.cluster.agents;
    wait_for_signal(INTERVAL, || agents.iter_mut().for_each(start_again));
}

fn start_again(agent: &mut Agent) {
    let name = agent.node().name();
    let started = match agent.pid() {
        Ok(Some(_)) => return,
        Ok(None) => agent.restart(),
        Err(error) => Err(error),
    };
    match started {
        Ok(()) => println!("the agent of {name} has ended and is started again"),
        Err(error) => println!("the agent of {name} has ended and cannot be started: {error:#}"),
    }
}

fn commands(walkthrough: &Walkthrough) -> Vec<(&'static str, String)> {
    let lab = &walkthrough.cluster.lab;
    let mut commands = vec![
        ("Kubernetes", format!("export KUBECONFIG={}", walkthrough.cluster.api.kubeconfig().display())),
        ("what there is", "kubectl get nodes,pods,egressip -A -o wide".to_owned()),
    ];
    if walkthrough.cluster.api.in_memory().is_some() {
        let create = "kubectl create namespace own --dry-run=client -o yaml | kubectl apply -f -";
        commands.push((
            "a namespace of your own: this API server reads no protobuf, which `kubectl create` sends",
            create.to_owned(),
        ));
    }
    let node = serving(&walkthrough.cluster).or_else(|| lab.nodes().first());
    let pod = node.and_then(|node| lab.pods().iter().find(|pod| pod.node == node.number));
    if let Some(node) = node {
        let (name, net, bpffs) = (node.name(), node.host.path(), node.bpffs.display().to_string());
        let example = walkthrough.examples.join("egressip-simpson.yaml");
        commands.extend([
            ("give a node and a namespace an egress IP", format!("kubectl label node {name} {ASSIGNABLE}=")),
            ("(and then)", format!("kubectl apply -f {}", example.display())),
        ]);
        for agent in &walkthrough.cluster.agents {
            commands.push(("egress-agent on a node, as in its agent's pod", function(agent.node(), agent.options())));
        }
        let pod = pod.map(|LabPod { namespace, name, .. }| format!("{namespace}/{name}"));
        commands.extend(questions(&name, pod.as_deref()));
        commands.extend([
            ("its metrics", format!("nsenter --net={} curl -s http://{METRICS}/metrics", net.display())),
            ("restart its agent: the programs stay, and the lab starts another one", restart(node)),
            ("a node's maps", format!("find {bpffs} -type f")),
            ("one of them", format!("bpftool map dump pinned $(find {bpffs} -name pods | head -n1)")),
            // Not `bpftool net`: one that is older than TCX shows nothing there.
            ("a node's hooks", format!("for link in {bpffs}/v*/links/*; do bpftool link show pinned $link; done")),
            ("a node's interfaces", format!("nsenter --net={} ip -br addr", net.display())),
            ("the agent's log", format!("tail -f {}", lab.logs().join(format!("agent-{name}.log")).display())),
        ]);
    }
    if let Some(pod) = pod {
        let (name, server) = (pod.netns.name(), plan::SERVER);
        commands.extend([
            ("a request from a pod", format!("ip netns exec {name} curl -s http://{}:{HTTP_PORT}/", server.v4)),
            ("over IPv6", format!("ip netns exec {name} curl -s 'http://[{}]:{HTTP_PORT}/'", server.v6)),
            ("what the server saw", format!("tail {}", lab.logs().join("access_log").display())),
        ]);
    }
    commands
}

/// The node that has an egress IP now, else one that can host it. A server that does not answer names none.
fn serving(cluster: &TestCluster) -> Option<&LabNode> {
    let items = |path: &str| {
        let list = cluster.api.get(path).ok().flatten().unwrap_or_default();
        list["items"].as_array().cloned().unwrap_or_default()
    };
    let has = items(EGRESS_IPS).iter().flat_map(assigned).map(|(_, node)| node).next();
    let can = || items(&format!("{NODES}?labelSelector={ASSIGNABLE}")).iter().find_map(name_of);
    let name = has.or_else(can)?;
    cluster.lab.nodes().iter().find(|node| node.name() == name)
}

fn name_of(object: &Value) -> Option<String> {
    object["metadata"]["name"].as_str().map(str::to_owned)
}

/// A function of the shell that is named as the node and takes the arguments of `egress-agent`.
fn function(node: &LabNode, options: &AgentOptions) -> String {
    format!(
        "{}() {{ nsenter --net={} env EGRESS_AGENT_SOCKET={} EGRESS_AGENT_BPFFS={} EGRESS_AGENT_KUBECONFIG={} {} \"$@\"; }}",
        node.name(),
        node.host.path().display(),
        node.socket.display(),
        node.bpffs.display(),
        options.kubeconfig.display(),
        options.binary.display(),
    )
}

/// What an administrator asks a node, by the function of its name; `pod` is one of its pods.
fn questions(node: &str, pod: Option<&str>) -> Vec<(&'static str, String)> {
    let mut questions = vec![
        ("the state of the node", format!("{node} status")),
        ("(again and again, until Ctrl-C)", format!("{node} status --watch")),
        ("its NAT entries", format!("{node} nat list")),
        ("(who has most)", format!("{node} nat count")),
        ("dropped packets, until Ctrl-C", format!("{node} drops --follow")),
        ("all flags", format!("{node} help")),
    ];
    if let Some(pod) = pod {
        let trace = format!("{node} trace --pod {pod} --to {}:{HTTP_PORT}", plan::SERVER.v4);
        questions.insert(2, ("what becomes of a pod's packet", trace));
    }
    questions
}

/// Found by its socket, which no other lab has. The brackets keep the pattern from matching the shell that it is typed in.
fn restart(node: &LabNode) -> String {
    format!("kill $(pgrep -f -- '[-]-socket {}')", node.socket.display())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn every_question_is_shown_and_can_be_pasted() {
        let questions = questions("node1", Some("red/one"));
        let trace = "trace --pod red/one --to 198.51.100.10:8080";
        for command in ["status", "status --watch", trace, "nat list", "nat count", "drops --follow"] {
            assert!(questions.iter().any(|(_, line)| *line == format!("node1 {command}")), "{command}: {questions:?}");
        }
        for (_, line) in questions {
            let parsed = Command::new("sh").args(["-n", "-c", &line]).status().expect("a shell");
            assert!(parsed.success(), "{line}");
        }
    }
}
