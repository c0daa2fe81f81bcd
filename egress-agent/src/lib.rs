//! The binary `egress-agent`: agent, controller and commands, wired from the crates core, kube and datapath.

pub mod change_queue;
pub mod cmd;
pub mod cni;
pub mod config;
pub mod controller;
pub mod debug;
pub mod health;
pub mod metrics;
pub mod nat_log;
pub mod node;
