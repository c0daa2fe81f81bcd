//! The CNI protocol (<https://www.cni.dev/docs/spec/>, versions 0.3.0 to 1.1.0), as the last plugin of a chain.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout_at};

use crate::debug::socket::ask;
use crate::debug::{Answer, Request};
use egress_cni::CniError;
use egress_cni::code::{INVALID_CONFIGURATION, INVALID_ENVIRONMENT, UNREADABLE};
use egress_core::model::view::{Attach, PodKey};

/// How long a pod's start waits for the agent, which is away for a second or two during an update.
pub const AGENT_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(50);

/// The used fields of what the runtime passes on standard input.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PluginInput {
    socket: PathBuf,
    #[serde(default)]
    prev_result: Option<Value>,
}

/// Runs the command in the environment, and waits for the agent at most for `timeout`. Returns the result to print.
///
/// # Errors
/// Invalid input of the runtime. A missing answer of the agent is no error: it goes to `warn`.
pub async fn run(
    variable: impl Fn(&str) -> Option<String>,
    input: &str,
    timeout: Duration,
    warn: impl Fn(&str),
) -> Result<Option<Value>, CniError> {
    let command = variable("CNI_COMMAND").ok_or_else(|| {
        CniError::new(INVALID_ENVIRONMENT, "CNI_COMMAND is not set: this is called by a container runtime")
    })?;
    match command.as_str() {
        "VERSION" => Ok(Some(egress_cni::versions())),
        "ADD" => {
            let PluginInput { socket, prev_result } =
                serde_json::from_str(input).map_err(|error| CniError::new(UNREADABLE, error.to_string()))?;
            let result = prev_result.ok_or_else(|| {
                CniError::new(
                    INVALID_CONFIGURATION,
                    "no prevResult: the plugin comes after the one that sets up the network",
                )
            })?;
            match attach(&variable("CNI_ARGS").unwrap_or_default(), &result) {
                Ok(attach) => send(&socket, attach, timeout, warn).await,
                Err(why) => warn(&why),
            }
            Ok(Some(result))
        }
        // The agent forgets a pod with its object, and an address when another pod gets it.
        "DEL" | "CHECK" | "GC" | "STATUS" => Ok(None),
        other => Err(CniError::new(INVALID_ENVIRONMENT, format!("CNI_COMMAND={other} is unknown"))),
    }
}

/// The pod and its addresses.
fn attach(arguments: &str, result: &Value) -> Result<Attach, String> {
    let arguments: BTreeMap<&str, &str> = arguments.split(';').filter_map(|one| one.split_once('=')).collect();
    let argument = |name: &str| {
        let value = arguments.get(name).copied().filter(|value| !value.is_empty());
        value
            .map(str::to_owned)
            .ok_or_else(|| format!("the runtime does not pass {name}: the agent does not learn the pod's address"))
    };
    let pod = PodKey { namespace: argument("K8S_POD_NAMESPACE")?, name: argument("K8S_POD_NAME")? };
    let uid = argument("K8S_POD_UID")?;
    let listed = result["ips"].as_array().into_iter().flatten();
    let listed = listed.filter_map(|ip| ip["address"].as_str()?.parse::<IpNet>().ok()).map(|net| net.addr());
    let listed: Vec<IpAddr> = listed.collect();
    // Kubernetes allows one address of each family.
    let first = |is_ipv4| listed.iter().find(|address| address.is_ipv4() == is_ipv4).copied();
    let addresses = [first(true), first(false)].into_iter().flatten().collect();
    Ok(Attach { pod, uid, addresses })
}

/// Returns when the agent's maps have the addresses, or at the timeout.
async fn send(socket: &Path, attach: Attach, timeout: Duration, warn: impl Fn(&str)) {
    let deadline = Instant::now() + timeout;
    loop {
        let why = match timeout_at(deadline, ask(socket, Request::Attach(attach.clone()))).await {
            Ok(Ok(Answer::Attached { refused: None })) => return,
            Ok(Ok(Answer::Attached { refused: Some(why) })) => return warn(&why),
            Ok(Ok(_)) => "the agent answers something else: is it of another version?".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the agent does not know the pod's address yet".to_owned(),
        };
        if Instant::now() + RETRY >= deadline {
            return warn(&format!("{why}; the pod starts, and an egress IP waits until its address is known"));
        }
        sleep(RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ARGUMENTS: &str = "IgnoreUnknown=1;K8S_POD_NAMESPACE=red;K8S_POD_NAME=web;K8S_POD_UID=u-1";

    async fn called(command: Option<&str>, input: &str) -> (Result<Option<Value>, CniError>, Vec<String>) {
        let warnings = std::cell::RefCell::new(Vec::new());
        let variable = |name: &str| match name {
            "CNI_COMMAND" => command.map(str::to_owned),
            "CNI_ARGS" => Some(ARGUMENTS.to_owned()),
            _ => None,
        };
        let outcome =
            run(variable, input, Duration::from_millis(200), |line: &str| warnings.borrow_mut().push(line.to_owned()))
                .await;
        (outcome, warnings.into_inner())
    }

    fn result() -> Value {
        json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}], "ips": [
            {"address": "10.244.1.7/24", "gateway": "10.244.1.1", "interface": 0},
            {"address": "fd00:10:244:1::7/64", "interface": 0}, {"address": "10.9.9.9/24"},
        ]})
    }

    #[test]
    fn one_address_of_each_family_is_sent() {
        let sent = attach(ARGUMENTS, &result()).expect("all is there");
        assert_eq!(sent.pod, PodKey { namespace: "red".into(), name: "web".into() });
        assert_eq!(sent.uid, "u-1");
        let texts: Vec<String> = sent.addresses.iter().map(IpAddr::to_string).collect();
        assert_eq!(texts, ["10.244.1.7", "fd00:10:244:1::7"]);
        assert!(
            attach("K8S_POD_NAMESPACE=red;K8S_POD_NAME=web", &result()).is_err_and(|why| why.contains("K8S_POD_UID"))
        );
        assert_eq!(attach(ARGUMENTS, &json!({})).map(|sent| sent.addresses.len()), Ok(0));
    }

    #[tokio::test]
    async fn invalid_input_is_refused_with_the_codes_of_the_specification() {
        let configuration = |more: Value| {
            let mut all =
                json!({"cniVersion": "1.0.0", "name": "n", "type": "egress-agent-cni", "socket": "/nowhere/s"});
            all.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
            all.to_string()
        };
        for (command, input, code) in [
            (None, String::new(), INVALID_ENVIRONMENT),
            (Some("MAKE"), String::new(), INVALID_ENVIRONMENT),
            (Some("ADD"), "{".into(), UNREADABLE),
            (Some("ADD"), "{}".into(), UNREADABLE),
            (Some("ADD"), configuration(json!({})), INVALID_CONFIGURATION),
        ] {
            let (outcome, warnings) = called(command, &input).await;
            assert_eq!(outcome.map_err(|failure| failure.code), Err(code), "{command:?} {input}");
            assert!(warnings.is_empty());
        }
        for command in ["DEL", "CHECK", "GC", "STATUS"] {
            assert_eq!(called(Some(command), "").await.0, Ok(None));
        }
        let versions = called(Some("VERSION"), "").await.0.expect("an answer").expect("a text");
        assert_eq!(versions["supportedVersions"], json!(egress_cni::VERSIONS));
    }

    /// Without an agent the pod still starts, with the result of the previous plugins.
    #[tokio::test]
    async fn a_pod_starts_without_an_agent() {
        let input = json!({"socket": "/nowhere/agent.sock", "prevResult": result()}).to_string();
        let start = Instant::now();
        let (outcome, warnings) = called(Some("ADD"), &input).await;
        assert_eq!(outcome, Ok(Some(result())));
        assert!(warnings.len() == 1 && warnings[0].contains("no agent runs here"), "{warnings:?}");
        assert!(start.elapsed() < AGENT_TIMEOUT, "{:?}", start.elapsed());
    }
}
