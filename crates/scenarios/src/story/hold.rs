//! `--hold`: the lab stays up, and here is what to type.

use super::walkthrough::Walkthrough;
use egress_lab::api_objects::ASSIGNABLE;
use egress_lab::topology::addresses::{self as plan, HTTP_PORT};
use egress_lab::wait_for_signal;

/// Prints commands and waits for Ctrl-C.
pub(super) fn hold(walkthrough: &Walkthrough) {
    println!("\nThe lab stays up. In another shell:");
    for (what, command) in commands(walkthrough) {
        println!("\n  # {what}\n  {command}");
    }
    println!("\nCtrl-C takes it down.");
    wait_for_signal();
}

fn commands(walkthrough: &Walkthrough) -> Vec<(&'static str, String)> {
    let lab = &walkthrough.cluster.lab;
    let mut commands = vec![
        ("Kubernetes", format!("export KUBECONFIG={}", walkthrough.cluster.api.kubeconfig().display())),
        ("what there is", "kubectl get nodes,pods,egressip -A -o wide".to_owned()),
    ];
    if let Some(node) = lab.nodes().first() {
        let (name, net, bpffs) = (node.name(), node.host.path(), node.bpffs.display().to_string());
        let example = walkthrough.examples.join("egressip-simpson.yaml");
        commands.extend([
            ("give a node and a namespace an egress IP", format!("kubectl label node {name} {ASSIGNABLE}=")),
            ("(and then)", format!("kubectl apply -f {}", example.display())),
            ("a node's maps", format!("find {bpffs} -type f")),
            ("one of them", format!("bpftool map dump pinned $(find {bpffs} -name pods | head -n1)")),
            // Not `bpftool net`: one that is older than TCX shows nothing there.
            ("a node's hooks", format!("for link in {bpffs}/v*/links/*; do bpftool link show pinned $link; done")),
            ("a node's interfaces", format!("nsenter --net={} ip -br addr", net.display())),
            ("the agent's log", format!("tail -f {}", lab.logs().join(format!("agent-{name}.log")).display())),
        ]);
    }
    if let Some(pod) = lab.pods().first() {
        let (name, server) = (pod.netns.name(), plan::SERVER);
        commands.extend([
            ("a request from a pod", format!("ip netns exec {name} curl -s http://{}:{HTTP_PORT}/", server.v4)),
            ("over IPv6", format!("ip netns exec {name} curl -s 'http://[{}]:{HTTP_PORT}/'", server.v6)),
            ("what the server saw", format!("tail {}", lab.logs().join("access_log").display())),
        ]);
    }
    commands
}
