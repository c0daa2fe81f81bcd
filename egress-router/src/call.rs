//! One call by a container runtime, from its environment and standard input to the answer on standard output.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use egress_cni::{Added, CniCall, CniError, Command, NetworkConfiguration, code, result, versions};
use egress_core::model::node::mac_text;
use egress_datapath::devices::interfaces::is_up;
use egress_datapath::nftables::Nft;
use egress_datapath::nftables::message::NftBatch;
use egress_kube::client::connect;
use egress_kube::error_text::ErrorText;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use serde_json::{Map, Value};
use tracing::{info, warn};

use crate::check::Differences;
use crate::config::source::{Place, Source, unreadable};
use crate::config::{Addressing, PodName, RouterConfig};
use crate::neighbours::announce_once;
use crate::plan::{ALIAS, PRIMARY_TABLE, Plan, any, is_global, plan};
use crate::setup::{Setup, install, tear_down};
use crate::{check, kernel, namespace, node_files};

/// How long the API server may take.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// The code of a router that is not as ADD has left it.
const CHANGED: u32 = 101;

/// Answers a call. `None` for no answer.
///
/// # Errors
/// As the runtime reads it.
pub fn answer(call: &CniCall, input: &str) -> Result<Option<Value>, CniError> {
    if call.command == Command::Version {
        return Ok(Some(versions()));
    }
    let configuration = NetworkConfiguration::of(input)?;
    match call.command {
        Command::Version => Ok(Some(versions())),
        Command::Add => add(call, &configuration).map(Some),
        Command::Del => del(call, &configuration).map(|()| None),
        Command::Check => check(call, &configuration).map(|()| None),
        Command::Status => status(&configuration).map(|()| None),
        // A namespace that goes takes everything with it, and the node has nothing of a router.
        Command::Gc => Ok(None),
    }
}

fn add(call: &CniCall, configuration: &NetworkConfiguration) -> Result<Value, CniError> {
    let pod = pod_of(call);
    let config = RouterConfig::of(&node_files::with_defaults(&configuration.fields)?, pod)?;
    let (addressing, removed) = resolved(&config, pod)?;
    removed.iter().for_each(|what| warn!("the overrides do not allow {what}"));
    let io = |what: &str, error: std::io::Error| CniError::new(code::IO, format!("cannot {what}: {error}"));
    let node = namespace::own().map_err(|error| io("open the node's namespace", error))?;
    let path = call.netns.clone().unwrap_or_default();
    let pod = namespace::of_container(&path, &node)?;
    let name = config.interface.as_deref().unwrap_or(&call.interface);
    let plan = plan_of(&Attachment { config: &config, addressing: &addressing, name }, (&node, &pod))?;
    for warning in config.warnings.iter().chain(&plan.warnings) {
        warn!("{warning}");
    }
    let setup = Setup::new(&plan, node.as_fd(), pod.as_fd());
    let mac = namespace::within(&pod, &node, || setup.perform(|_| Ok(())))
        .map_err(|error| io("enter the pod's namespace", error))??;
    info!(interface = plan.name, master = plan.master.name, why = plan.why_master, "router set up");
    Ok(result(
        &configuration.version,
        configuration.previous_result(),
        &added(&plan, mac, &path.display().to_string()),
        configuration.fields.get("dns"),
    ))
}

fn pod_of(call: &CniCall) -> PodName<'_> {
    PodName { namespace: call.argument("K8S_POD_NAMESPACE"), name: call.argument("K8S_POD_NAME") }
}

/// The addressing from where the configuration says it is, and what overrides took away from it.
///
/// # Errors
/// It cannot be read, or is invalid.
pub fn resolved(config: &RouterConfig, pod: PodName<'_>) -> Result<(Addressing, Vec<String>), CniError> {
    match &config.source {
        Source::Given(addressing) => Ok((addressing.clone(), Vec::new())),
        Source::Elsewhere(elsewhere) => elsewhere.read(&data(&elsewhere.place)?, pod),
    }
}

fn data(place: &Place) -> Result<Map<String, Value>, CniError> {
    match place {
        Place::File(path) => {
            let text = node_files::configuration(path).and_then(std::fs::read_to_string);
            let text = text.map_err(|error| unreadable(place, error))?;
            serde_json::from_str(&text).map_err(|error| unreadable(place, format!("it is no JSON object: {error}")))
        }
        Place::ConfigMap { namespace, name, kubeconfig } => config_map(place, (namespace, name), kubeconfig),
    }
}

fn config_map(
    place: &Place,
    (namespace, name): (&str, &str),
    kubeconfig: &Path,
) -> Result<Map<String, Value>, CniError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| unreadable(place, error))?;
    let read = async {
        let refused = |error| unreadable(place, format!("kubeconfig {}: {error}", kubeconfig.display()));
        let kubeconfig = node_files::configuration(kubeconfig).map_err(refused)?;
        let (client, _) = connect(Some(&kubeconfig)).await.map_err(|error| unreadable(place, error))?;
        let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
        let later = |why: String| CniError { code: code::TRY_AGAIN_LATER, ..unreadable(place, why) };
        match tokio::time::timeout(API_TIMEOUT, maps.get_opt(name)).await {
            Err(_) => Err(later(format!("the API server has not answered for {} s", API_TIMEOUT.as_secs()))),
            Ok(Err(error)) => Err(later(ErrorText(&error).to_string())),
            Ok(Ok(None)) => Err(later("it does not exist".to_owned())),
            Ok(Ok(Some(map))) => {
                let data = map.data.unwrap_or_default().into_iter();
                Ok(data.map(|(key, text)| (key, Value::String(text))).collect())
            }
        }
    };
    runtime.block_on(read)
}

/// Whether ADD could be served: what the kernel has, and the master, where the configuration names one.
fn status(configuration: &NetworkConfiguration) -> Result<(), CniError> {
    let unavailable = |why: String| CniError::new(code::NOT_AVAILABLE, why);
    Nft::default().ask(&NftBatch::begin("egress-router").ended()).map_err(|error| {
        unavailable(format!("this node's kernel has no nftables that this process may use: {error}"))
    })?;
    let master = configuration.fields.get("interfaceArgs").and_then(|arguments| arguments["master"].as_str());
    let Some(master) = master.filter(|master| !master.is_empty()) else { return Ok(()) };
    let found = kernel::link_named(master).map_err(|error| unavailable(format!("cannot list interfaces: {error}")))?;
    let Some((.., message)) = found else { return Err(unavailable(format!("the node has no interface {master}"))) };
    match is_up(&message) {
        true => Ok(()),
        false => Err(unavailable(format!("the node's interface {master} is down"))),
    }
}

fn check(call: &CniCall, configuration: &NetworkConfiguration) -> Result<(), CniError> {
    let previous = configuration
        .previous_result()
        .ok_or_else(|| CniError::new(code::INVALID_CONFIGURATION, "prevResult: CHECK needs the result of ADD"))?;
    let config = RouterConfig::of(&node_files::with_defaults(&configuration.fields)?, pod_of(call))?;
    let (addressing, _) = resolved(&config, pod_of(call))?;
    let node = namespace::own().map_err(cannot_look)?;
    let pod = namespace::of_container(&call.netns.clone().unwrap_or_default(), &node)?;
    let name = config.interface.as_deref().unwrap_or(&call.interface);
    let router = Attachment { config: &config, addressing: &addressing, name };
    let (_, differences) = compared(&router, Some(previous), (&node, &pod))?;
    let mut differences = differences.interface.into_iter().chain(differences.rules);
    match differences.next() {
        None => Ok(()),
        Some(first) => {
            let details: Vec<String> = differences.collect();
            Err(CniError::new(CHANGED, format!("{name}: {first}")).with_details(details.join("\n")))
        }
    }
}

fn cannot_look(error: std::io::Error) -> CniError {
    CniError::new(code::IO, format!("cannot look at the pod: {error}"))
}

/// A router that is there beside the plan of its configuration.
fn compared(
    router: &Attachment<'_>,
    previous: Option<&Value>,
    (node, pod): (&File, &File),
) -> Result<(Plan, Differences), CniError> {
    let of_node = kernel::facts().map_err(cannot_look)?;
    let facts = || Ok(check::before(kernel::facts()?, kernel::default_routes(PRIMARY_TABLE)?, router.name));
    let before = namespace::within(pod, node, facts).map_err(cannot_look)?.map_err(cannot_look)?;
    let plan = plan(router.config, router.addressing, router.name, (&of_node, &before))?;
    let differences = || check::differences(&plan, previous, node);
    let differences = namespace::within(pod, node, differences).map_err(cannot_look)?.map_err(cannot_look)?;
    Ok((plan, differences))
}

/// Gives a router that is there the rules of a changed configuration, all at once; connections that are established stay. Returns
/// what was different.
///
/// # Errors
/// More has changed than the rules, which takes a new pod.
pub fn reconcile(router: &Attachment<'_>, (node, pod): (&File, &File)) -> Result<Vec<String>, CniError> {
    let (plan, differences) = compared(router, None, (node, pod))?;
    let mut interface = differences.interface.into_iter();
    if let Some(first) = interface.next() {
        let message = format!("{}: {first}: only rules can be replaced, the rest takes a new pod", router.name);
        return Err(CniError::new(CHANGED, message).with_details(interface.collect::<Vec<_>>().join("\n")));
    }
    if !differences.rules.is_empty() {
        let replace = || match kernel::link_named(router.name)? {
            Some((link, ..)) => install(&plan.ruleset, link.index),
            None => Err(std::io::Error::from_raw_os_error(libc::ENODEV)),
        };
        namespace::within(pod, node, replace).map_err(cannot_look)?.map_err(cannot_look)?;
    }
    Ok(differences.rules)
}

/// Announces the addresses of a router once more, as after a change of the network outside. Returns them.
///
/// # Errors
/// There is no such router, or nothing can be sent.
pub fn announce(name: &str, (node, pod): (&File, &File)) -> Result<Vec<IpNet>, CniError> {
    let sent = || {
        let found = kernel::link_named(name)?.filter(|(link, ..)| link.alias.starts_with(ALIAS));
        let Some((link, mac, _)) = found else { return Ok(None) };
        let addresses: Vec<IpNet> = link.addresses.iter().copied().filter(|net| is_global(net.addr())).collect();
        let own: Vec<IpAddr> = addresses.iter().map(IpNet::addr).collect();
        announce_once(link.index, mac, &own)?;
        Ok(Some(addresses))
    };
    let cannot_send = |error: std::io::Error| CniError::new(code::IO, format!("cannot announce: {error}"));
    let sent = namespace::within(pod, node, sent).map_err(cannot_send)?.map_err(cannot_send)?;
    sent.ok_or_else(|| CniError::new(code::INVALID_ENVIRONMENT, format!("{name} is no interface of a router")))
}

/// A router to be.
pub struct Attachment<'a> {
    pub config: &'a RouterConfig,
    pub addressing: &'a Addressing,
    pub name: &'a str,
}

/// Plans with what is on the node and in the pod, by their namespaces; the calling thread is in the first.
///
/// # Errors
/// As [`plan`].
pub fn plan_of(router: &Attachment<'_>, (node, pod): (&File, &File)) -> Result<Plan, CniError> {
    let io = |error: std::io::Error| CniError::new(code::IO, format!("cannot list interfaces and routes: {error}"));
    let of_node = kernel::facts().map_err(io)?;
    let of_pod = namespace::within(pod, node, kernel::facts).map_err(io)?.map_err(io)?;
    plan(router.config, router.addressing, router.name, (&of_node, &of_pod))
}

fn added(plan: &Plan, mac: [u8; 6], sandbox: &str) -> Added {
    let gateway = |net: &IpNet| {
        let family = egress_core::model::state::family_of(net.addr());
        plan.gateways.get(&family).copied()
    };
    let routes = plan.gateways.iter().filter(|_| plan.is_first);
    Added {
        name: plan.name.clone(),
        mac: mac_text(mac),
        sandbox: sandbox.to_owned(),
        mtu: plan.mtu,
        addresses: plan.addresses.iter().map(|net| (*net, gateway(net))).collect(),
        routes: routes.map(|(family, gateway)| (any(*family), Some(*gateway))).collect(),
    }
}

/// Succeeds for what is not there (any more), and needs no valid configuration.
fn del(call: &CniCall, configuration: &NetworkConfiguration) -> Result<(), CniError> {
    let Some(path) = &call.netns else { return Ok(()) };
    let io = |error: std::io::Error| CniError::new(code::IO, format!("cannot remove the router: {error}"));
    let node = namespace::own().map_err(io)?;
    let pod = match namespace::of_container(path, &node) {
        Ok(pod) => pod,
        Err(error) if error.code == code::UNKNOWN_CONTAINER => return Ok(()),
        Err(error) => return Err(error),
    };
    let name = configuration.fields.get("interface").and_then(Value::as_str).unwrap_or(&call.interface);
    namespace::within(&pod, &node, || tear_down(name)).map_err(io)?.map_err(io)
}
