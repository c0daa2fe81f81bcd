//! `kubectl egress status|nat`: the agent's own command, in the right pod.

use std::collections::BTreeSet;
use std::process::ExitCode;

use egress_core::model::policy::Policies;

use crate::agents::on_node;
use crate::arguments::{AgentCommandArgs, NatCommandArgs};
use crate::cluster::ClusterApi;
use crate::error::PluginError;
use crate::exec::{Exec, InputStream, printable};

pub(crate) async fn status(
    args: &AgentCommandArgs,
    cluster: &ClusterApi,
    exec: &impl Exec,
) -> Result<ExitCode, PluginError> {
    let node = cluster.node_of(&args.place).await?;
    let agents = cluster.agents().await?;
    let mut line = [&["status".to_owned()], args.further.as_slice()].concat();
    let is_watched = args.further.iter().any(|argument| argument.starts_with("-w") || argument.starts_with("--watch"));
    let mut input = InputStream::Empty;
    if is_watched {
        line.push("--end-with-stdin".to_owned());
        input = InputStream::Open;
    }
    Ok(exec.streamed(on_node(&agents, &node)?, &line, input).await?.into())
}

/// The mappings of a pod are on the gateway nodes, so each of them is asked. The first code that is not 0 is returned.
pub(crate) async fn nat(
    args: &NatCommandArgs,
    cluster: &ClusterApi,
    exec: &impl Exec,
) -> Result<ExitCode, PluginError> {
    let agents = cluster.agents().await?;
    let mut line = vec!["nat".to_owned(), args.what.word().to_owned()];
    let Some(pod) = &args.pod else {
        line.extend(args.further.iter().cloned());
        // The command line has one of the two.
        let node = args.node.as_deref().unwrap_or_default();
        return Ok(exec.streamed(on_node(&agents, node)?, &line, InputStream::Empty).await?.into());
    };
    let pod = cluster.pod(pod).await?;
    if pod.uses_host_network {
        return Err(PluginError::HostNetwork(pod.full_name));
    }
    if pod.addresses.is_empty() {
        return Err(PluginError::NoPodAddress(pod.full_name));
    }
    let gateways = gateways(&cluster.policies().await?);
    if gateways.is_empty() {
        return Err(PluginError::NoGateways);
    }
    let mut first = 0;
    for node in gateways {
        eprintln!("on {}:", printable(&node));
        let agent = match on_node(&agents, &node) {
            Ok(agent) => agent,
            // The others may have the mappings.
            Err(error) => {
                eprintln!("error: {}", printable(&error.to_string()));
                first = first.max(1);
                continue;
            }
        };
        for address in &pod.addresses {
            let asked = ["--pod-ip".to_owned(), address.to_string()];
            let code =
                exec.streamed(agent, &[&line, asked.as_slice(), &args.further].concat(), InputStream::Empty).await?;
            first = if first == 0 { code } else { first };
        }
    }
    Ok(first.into())
}

/// The nodes that serve an egress IP.
fn gateways(policies: &Policies) -> BTreeSet<String> {
    policies.values().flat_map(|policy| &policy.published.items).map(|item| item.node.clone()).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::{Value, json};

    use super::*;
    use crate::arguments::{Cli, PluginCommand};
    use crate::cluster::testing::{agent, cluster, egress_ip, pod};
    use crate::exec::Finished;
    use crate::exec::testing::PlayedExec;

    async fn play(line: &str, lists: &[(&'static str, Value)], exec: &PlayedExec) -> Result<ExitCode, PluginError> {
        let cluster = cluster(lists);
        let line = std::iter::once("kubectl-egress").chain(line.split(' '));
        match Cli::parse_from(line).command {
            PluginCommand::Status(args) => status(&args, &cluster, exec).await,
            PluginCommand::Nat(args) => nat(&args, &cluster, exec).await,
            other => panic!("{other:?}"),
        }
    }

    fn lists() -> Vec<(&'static str, Value)> {
        let pods = json!([agent("n1"), agent("n2"), pod("one", "n1", "10.244.1.10")]);
        vec![
            ("pods", pods),
            ("egressips", json!([egress_ip("a", "172.18.0.100", "n2"), egress_ip("b", "172.18.0.101", "n3")])),
        ]
    }

    #[tokio::test]
    async fn the_agent_of_the_node_or_of_the_pods_node_runs_the_command_and_its_code_is_returned() {
        for (line, asked) in [
            ("status --node n2 -- -o json", "n2: status -o json"),
            ("status --pod red/one", "n1: status"),
            ("status --pod red/one -- --watch=5", "n1: status --watch=5 --end-with-stdin"),
            ("status --node n2 -- -w", "n2: status -w --end-with-stdin"),
            ("nat count --node n2", "n2: nat count"),
        ] {
            let exec = PlayedExec::new(|_, _| Finished { code: 3, ..Finished::default() });
            let code = play(line, &lists(), &exec).await.expect("it ran");
            assert_eq!(*exec.asked.borrow(), [asked], "{line}");
            assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(3)), "{line}");
        }
    }

    /// A gateway without an agent does not hide the others, and the code says that it is missing.
    #[tokio::test]
    async fn mappings_of_a_pod_come_from_each_gateway() {
        let exec = PlayedExec::new(|_, _| Finished::default());
        let code = play("nat --pod red/one -- --proto tcp", &lists(), &exec).await.expect("it ran");
        assert_eq!(*exec.asked.borrow(), ["n2: nat list --pod-ip 10.244.1.10 --proto tcp"]);
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::FAILURE), "n3 has no agent");
    }

    #[tokio::test]
    async fn without_agents_nothing_is_run() {
        let exec = PlayedExec::new(|_, _| Finished::default());
        let error = play("status --node n1", &[], &exec).await.expect_err("no agents").to_string();
        assert!(error.contains("app.kubernetes.io/component=agent") && exec.asked.borrow().is_empty(), "{error}");
    }
}
