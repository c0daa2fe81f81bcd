//! `cargo xtask lab`: the network and the outside server alone, for trying things by hand.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use egress_toolchain::{Paths, Progress, ovn};

use crate::topology::addresses::{self as plan, ECHO_PORT, HTTP_PORT};
use crate::topology::builder::{Ground, LabBuilder};
use crate::topology::host_config::{HostConfig, SecondNic};
use crate::topology::lab::Lab;
use crate::traffic::server::Server;

#[derive(Args)]
pub struct LabArgs {
    /// How many nodes
    #[arg(long, default_value_t = 3)]
    nodes: usize,
    /// How many pods on each node
    #[arg(long, default_value_t = 2)]
    pods: usize,
    /// What the namespaces' names begin with
    #[arg(long, default_value = "lab")]
    prefix: String,
    /// What is in the place of OVN-Kubernetes
    #[arg(long, value_enum, default_value_t)]
    ground: Ground,
    /// Add the second network, 10.10.10.0/24
    #[arg(long)]
    second_network: bool,
    /// Stay up until Ctrl-C
    #[arg(long)]
    hold: bool,
}

pub fn run(args: &LabArgs) -> Result<()> {
    let progress = Progress::start();
    if args.ground.is_ovn() {
        ovn::ensure(&Paths::find()?, &progress)?;
    }
    let begin = Instant::now();
    let mut builder = LabBuilder::default()
        .ground(args.ground)
        .readable_prefix(&args.prefix)
        .nodes(args.nodes)
        .pods_per_node(args.pods);
    if args.second_network {
        builder =
            builder.host_config(|index| HostConfig { second: Some(SecondNic::default()), ..HostConfig::mixed(index) });
    }
    let lab = builder.start()?;
    let _server = Server::outside(&lab)?;
    println!("lab {} is up after {:.1} s", lab.prefix(), begin.elapsed().as_secs_f32());
    describe(&lab);
    if args.hold {
        println!("\nCtrl-C takes it down.");
        loop {
            thread::sleep(Duration::from_secs(3600));
        }
    }
    lab.tear_down()
}

/// Prints the addresses and what to type.
fn describe(lab: &Lab) {
    let server = plan::SERVER;
    println!("outside  {:<16} {} {}", lab.outside().name(), server.v4, server.v6);
    println!(
        "         HTTP on port {HTTP_PORT} answers with the caller's address; echo on port {ECHO_PORT}, TCP and UDP"
    );
    println!("         access log: {}", lab.logs().join("access_log").display());
    println!("router   {:<16} {} {}", lab.ext().name(), plan::EXT.v4, plan::EXT.v6);
    println!("switch   {:<16} bridge br0, a port per node", lab.lan().name());
    for node in lab.nodes() {
        let (own, management) = (node.number.address(), node.management());
        println!("node     {:<16} {} {} mp0 {}", node.host.name(), own.v4, own.v6, management.v4);
        println!("         options: {}", node.config.summary());
        println!("         bpffs: {}", node.bpffs.display());
        for pod in lab.pods_on(node.number) {
            println!("pod      {:<16} {} {}", pod.netns.name(), pod.addresses.v4, pod.addresses.v6);
        }
    }
    println!("\nThere are no agents and no API server here: `cargo xtask run --hold` brings up both.");
    if let Some(pod) = lab.pods().first() {
        println!("\nTry: ip netns exec {} curl -s http://{}:{HTTP_PORT}/", pod.netns.name(), server.v4);
    }
    if let Some(node) = lab.nodes().first() {
        let path = node.host.path();
        println!(
            "     nsenter --net={} ip -br addr   (keeps /sys and the bpffs, as agents are started)",
            path.display()
        );
    }
}
