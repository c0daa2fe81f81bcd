//! Checks that the agent understands the manifests in `deploy/`: arguments, variables, the configuration file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{ArgMatches, CommandFactory, FromArgMatches};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cmd::{Cli, Command, ConfigFile};

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(path)
}

fn documents(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(deploy(path)).expect("a manifest");
    serde_yaml::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML")).collect()
}

/// Name, arguments and variables of each container. A value that only a cluster knows is `node`.
fn containers(path: &str) -> Vec<(String, Vec<String>, BTreeMap<String, String>)> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or("node").to_owned();
    let mut found = Vec::new();
    for document in documents(path) {
        let pod = &document["spec"]["template"]["spec"];
        for container in [list(&pod["initContainers"]), list(&pod["containers"])].concat() {
            let variables =
                list(&container["env"]).iter().map(|one| (text(&one["name"]), text(&one["value"]))).collect();
            found.push((text(&container["name"]), list(&container["args"]).iter().map(text).collect(), variables));
        }
    }
    found
}

/// The settings of an overlay's ConfigMap.
fn settings(overlay: &str) -> BTreeMap<String, String> {
    generated(overlay, "egress-agent-settings")
}

fn generated(overlay: &str, map: &str) -> BTreeMap<String, String> {
    let kustomization = documents(&format!("{overlay}/kustomization.yaml")).remove(0);
    let generators = kustomization["configMapGenerator"].as_array().cloned().unwrap_or_default();
    let ours = generators.iter().filter(|one| one["name"] == map);
    let literals = ours.flat_map(|one| one["literals"].as_array().cloned().unwrap_or_default());
    let pairs = literals.map(|one| {
        let (name, value) = one.as_str().and_then(|one| one.split_once('=')).expect("NAME=value");
        (name.to_owned(), value.to_owned())
    });
    pairs.collect()
}

/// Parses a line with these variables, each as the flag that it stands for: those of this process stay as they are.
fn parse(line: &[String], variables: &BTreeMap<String, String>) -> Result<(Command, ArgMatches), String> {
    let definition = Cli::command();
    let command = line.first().and_then(|name| definition.find_subcommand(name)).ok_or("no such command")?;
    let mut arguments = vec!["egress-agent".to_owned()];
    arguments.extend_from_slice(line);
    for (name, value) in variables {
        let argument = command.get_arguments().find(|one| one.get_env().is_some_and(|env| env == name.as_str()));
        let argument = argument.ok_or_else(|| format!("no flag has the variable {name}"))?;
        let long = argument.get_long().ok_or("a flag without a name")?;
        match argument.get_action().takes_values() {
            true => arguments.push(format!("--{long}={value}")),
            false if value == "true" => arguments.push(format!("--{long}")),
            false => return Err(format!("{name} is {value}: what is not wanted is left out")),
        }
    }
    let matches = Cli::command().try_get_matches_from(arguments).map_err(|error| error.to_string())?;
    Ok((Cli::from_arg_matches(&matches).map_err(|error| error.to_string())?.command, matches))
}

const OVERLAYS: [&str; 3] =
    ["overlays/ovn-kubernetes-kind", "overlays/ovn-kubernetes-openshift", "overlays/bridge-cni"];
/// For the same clusters.
const CLEANUPS: [&str; 3] =
    ["overlays/cleanup-ovn-kubernetes-kind", "overlays/cleanup-openshift", "overlays/cleanup-bridge-cni"];

#[test]
fn the_agent_understands_its_daemonset_in_every_overlay() {
    for overlay in OVERLAYS {
        let added = settings(overlay);
        assert!(added.len() > 2, "{overlay} has no settings of its cluster");
        let [(name, line, variables)] = &containers("base/daemonset.yaml")[..] else { panic!("one container") };
        let mut variables = variables.clone();
        variables.extend(settings("base"));
        variables.extend(added);
        let parsed = parse(line, &variables);
        assert!(matches!(parsed, Ok((Command::Run(_), _))), "{overlay}, {name}: {:?}", parsed.err());
    }
}

#[test]
fn the_controller_understands_its_deployment_in_every_overlay() {
    let agents = &containers("base/daemonset.yaml")[0].2;
    for overlay in OVERLAYS {
        let [(name, line, own)] = &containers("base/controller.yaml")[..] else { panic!("one container") };
        // It takes the agents' settings that it has a flag for; its own variables override them.
        let mut variables = settings("base");
        variables.extend(settings(overlay));
        let definition = Cli::command();
        let command = definition.find_subcommand("controller").expect("it is one");
        let has = |name: &str| command.get_arguments().any(|one| one.get_env().is_some_and(|env| env == name));
        variables.retain(|name, _| has(name));
        variables.extend(own.clone());
        let parsed = parse(line, &variables);
        assert!(matches!(parsed, Ok((Command::Controller(_), _))), "{overlay}, {name}: {:?}", parsed.err());
        for same in ["EGRESS_AGENT_NAMESPACE", "EGRESS_AGENT_CONFIG_FILE"] {
            assert_eq!(own[same], agents[same]);
        }
    }
    let pod = |path: &str| documents(path).remove(0)["spec"]["template"]["spec"].clone();
    let (controller, agent) = (pod("base/controller.yaml"), pod("base/daemonset.yaml"));
    assert_eq!(controller["containers"][0]["envFrom"], agent["containers"][0]["envFrom"]);
    assert_eq!(controller["containers"][0]["image"], agent["containers"][0]["image"]);
    assert_ne!(controller["serviceAccountName"], agent["serviceAccountName"]);
}

#[test]
fn cleanup_finds_what_the_agent_has_pinned() {
    let [(_, _, agents)] = &containers("base/daemonset.yaml")[..] else { panic!("one container") };
    let cleaning = containers("cleanup/daemonset.yaml");
    assert_eq!(cleaning.len(), 2);
    for (name, line, variables) in cleaning {
        let parsed = parse(&line, &variables);
        assert!(matches!(parsed, Ok((Command::Cleanup(_), _))), "{name}: {:?}", parsed.err());
        assert_eq!(variables["EGRESS_AGENT_BPFFS"], agents["EGRESS_AGENT_BPFFS"]);
    }
    // Both use the same mount of the same host directory, with the same rights.
    let part = |path: &str, pointers: &[&str]| -> Vec<Value> {
        let document = documents(path).remove(0);
        pointers.iter().map(|one| document.pointer(one).cloned().unwrap_or_else(|| panic!("{path}: {one}"))).collect()
    };
    let pod = "/spec/template/spec";
    let agent = part("base/daemonset.yaml", &[&format!("{pod}/containers/0/securityContext")]);
    let cleanup = "cleanup/daemonset.yaml";
    let init = part(cleanup, &[&format!("{pod}/initContainers/0/securityContext")]);
    let stay = part(cleanup, &[&format!("{pod}/containers/0/securityContext")]);
    assert_eq!((&agent, &agent), (&init, &stay));
    for path in ["base/daemonset.yaml", cleanup] {
        let found = part(path, &[&format!("{pod}/containers/0/volumeMounts/0"), &format!("{pod}/volumes/0")]);
        let mount = json!({"name": "bpffs", "mountPath": "/bpf"});
        let volume = json!({"name": "bpffs", "hostPath": {"path": "/sys/fs/bpf", "type": "Directory"}});
        assert_eq!(found, [mount, volume], "{path}");
    }
}

/// Where the agent's volume of pins is, and so for the host, before the agent starts.
#[test]
fn a_component_mounts_what_the_agent_pins_in() {
    let [(_, line, variables)] = &containers("mount-bpffs/daemonset.yaml")[..] else { panic!("one container") };
    let parsed = parse(line, variables);
    assert!(matches!(parsed, Ok((Command::MountBpffs(_), _))), "{:?}", parsed.err());
    let pod = |path: &str| documents(path).remove(0)["spec"]["template"]["spec"].clone();
    let (component, agent) = (pod("mount-bpffs/daemonset.yaml"), pod("base/daemonset.yaml"));
    let container = &component["initContainers"][0];
    let mount = json!({"name": "bpffs", "mountPath": "/bpf", "mountPropagation": "Bidirectional"});
    assert_eq!(container["volumeMounts"], json!([mount]));
    assert_eq!(container["securityContext"]["privileged"], true, "the API server requires it for the propagation");
    assert_eq!(agent["containers"][0]["volumeMounts"][0], json!({"name": "bpffs", "mountPath": "/bpf"}));
    assert_eq!(variables["EGRESS_AGENT_MOUNT_POINT"], "/bpf");
    let pins = &containers("base/daemonset.yaml")[0].2["EGRESS_AGENT_BPFFS"];
    assert_eq!(Path::new(pins).parent(), Some(Path::new("/bpf")));
    // What the agent's error names.
    let folder = documents("mount-bpffs/kustomization.yaml").remove(0);
    assert_eq!((&folder["kind"], &folder["patches"]), (&json!("Component"), &json!([{"path": "daemonset.yaml"}])));
    let values = documents("helm/egress-agent/values.yaml").remove(0);
    assert_eq!(values["bpffs"], json!({"mount": false}));
    // systemd mounts it except in a container.
    let of_kind = documents("overlays/ovn-kubernetes-kind/kustomization.yaml").remove(0);
    assert_eq!(of_kind["components"], json!(["../../mount-bpffs"]));
}

#[test]
fn cleanup_uses_the_interfaces_of_the_agents() {
    let map = "egress-agent-cleanup-settings";
    for (agents, cleanup) in OVERLAYS.into_iter().zip(CLEANUPS) {
        let mut given = generated("cleanup", map);
        given.extend(generated(cleanup, map));
        given.retain(|name, _| !name.starts_with("EGRESS_AGENT_CNI_"));
        let mut wanted = settings(agents);
        wanted.retain(|name, _| ["EGRESS_AGENT_UPLINK", "EGRESS_AGENT_MGMT_PORT"].contains(&name.as_str()));
        assert_eq!(given, wanted, "{cleanup}");
        for (name, line, mut variables) in containers("cleanup/daemonset.yaml") {
            variables.extend(given.clone());
            let parsed = parse(&line, &variables);
            assert!(matches!(parsed, Ok((Command::Cleanup(_), _))), "{cleanup}, {name}: {:?}", parsed.err());
        }
    }
    let pod = documents("cleanup/daemonset.yaml").remove(0)["spec"]["template"]["spec"].clone();
    for container in [&pod["initContainers"][0], &pod["containers"][0]] {
        assert_eq!(container["envFrom"], json!([{"configMapRef": {"name": map}}]));
    }
}

/// The plugin is removed from the directories that it was added to, and finds the agent's socket.
#[test]
fn the_plugin_is_removed_where_it_was_added() {
    let (agents, cleanup) = ("overlays/bridge-cni", "overlays/cleanup-bridge-cni");
    let [(_, line, variables)] = &containers(&format!("{agents}/cni.yaml"))[..] else { panic!("one container") };
    let parsed = parse(line, variables);
    assert!(matches!(parsed, Ok((Command::CniInstall(_), _))), "{:?}", parsed.err());
    let mut removed = generated(cleanup, "egress-agent-cleanup-settings");
    removed.retain(|name, _| name.starts_with("EGRESS_AGENT_CNI_"));
    let mut put = variables.clone();
    let socket = put.remove("EGRESS_AGENT_CNI_SOCKET");
    assert_eq!(put, removed);
    let pod = |path: &str| documents(path).remove(0)["spec"]["template"]["spec"].clone();
    let (putting, removing) = (pod(&format!("{agents}/cni.yaml")), pod(&format!("{cleanup}/cni.yaml")));
    let of_host = |pod: &Value| -> Vec<Value> {
        let volumes = pod["volumes"].as_array().cloned().unwrap_or_default();
        volumes.into_iter().filter(|one| one["name"] != "run").collect()
    };
    assert_eq!(of_host(&putting), of_host(&removing));
    assert_eq!(putting["containers"][0]["volumeMounts"], removing["containers"][0]["volumeMounts"]);
    assert_eq!(putting["containers"][0]["volumeMounts"], removing["initContainers"][0]["volumeMounts"]);
    let run = putting["volumes"].as_array().into_iter().flatten().find(|one| one["name"] == "run").expect("a volume");
    let base = pod("base/daemonset.yaml")["containers"][0]["volumeMounts"].clone();
    let at = base.as_array().into_iter().flatten().find(|one| one["name"] == "run").expect("a mount");
    assert_eq!(run["hostPath"]["path"], at["mountPath"], "the socket's path is the host's too");
    assert_eq!(socket.as_deref(), Some(crate::cmd::page::DEFAULT_SOCKET));
}

#[test]
fn no_part_of_the_configuration_file_is_ignored() {
    let file = ConfigFile::read(&deploy("base/agent.conf")).expect("a file that can be read");
    assert_eq!(file.warnings, Vec::<String>::new());
    let (_, matches) = parse(&["run".to_owned(), "--node-name=a".to_owned()], &BTreeMap::new()).expect("a line");
    let definition = Cli::command();
    let (definition, given) =
        (definition.find_subcommand("run").expect("run"), matches.subcommand().expect("a command").1);
    let mut arguments = file.arguments(definition, given).expect("values that the flags take");
    arguments.sort_unstable();
    assert_eq!(arguments, ["--egressip-node-healthcheck-port=9107", "--egressip-reachability-total-timeout=1"]);
}

#[test]
fn probes_ask_where_the_process_answers() {
    for (path, is_agent) in [("base/daemonset.yaml", true), ("base/controller.yaml", false)] {
        let container = documents(path).remove(0)["spec"]["template"]["spec"]["containers"][0].clone();
        for overlay in OVERLAYS {
            let variable = "EGRESS_AGENT_METRICS_BIND_ADDRESS";
            let address = if is_agent {
                settings(overlay).remove(variable).or_else(|| settings("base").remove(variable))
            } else {
                containers(path).remove(0).2.remove(variable)
            };
            // Loopback is always served on the same port.
            let port = address.as_deref().and_then(|address| address.rsplit(':').next());
            let port: u16 = port.and_then(|port| port.parse().ok()).expect("a port");
            for (probe, page) in [("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")] {
                let asked = json!({"host": "127.0.0.1", "port": port, "path": page});
                assert_eq!(container[probe]["httpGet"], asked, "{path}, {overlay}, {probe}");
            }
            let declared = json!([{"name": "metrics", "containerPort": port, "hostPort": port, "protocol": "TCP"}]);
            assert_eq!(container["ports"], declared, "{path}, {overlay}: for the scheduler");
        }
    }
}

/// Each group, resource and verb of these rules.
fn spread(rules: &Value) -> Vec<[String; 3]> {
    let list = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|one| one.as_str().map(str::to_owned)).collect()
    };
    let mut found = Vec::new();
    for rule in rules.as_array().into_iter().flatten() {
        for group in list(&rule["apiGroups"]) {
            for resource in list(&rule["resources"]) {
                found.extend(list(&rule["verbs"]).into_iter().map(|verb| [group.clone(), resource.clone(), verb]));
            }
        }
    }
    found
}

#[test]
fn writes_of_agents_do_not_queue_with_other_accounts() {
    let schemas = documents("base/flowcontrol.yaml").into_iter().filter(|one| one["kind"] == "FlowSchema");
    let rules =
        schemas.flat_map(|one| one["spec"]["rules"][0]["resourceRules"].as_array().cloned().unwrap_or_default());
    let rules = Value::from(rules.collect::<Vec<_>>());
    let preferred = spread(&rules);
    let granted: Vec<_> = documents("base/rbac.yaml").iter().flat_map(|one| spread(&one["rules"])).collect();
    let writes = granted
        .iter()
        .filter(|[_, resource, verb]| ["create", "update", "patch"].contains(&verb.as_str()) && resource != "events");
    let missing: Vec<_> = writes.filter(|one| !preferred.contains(one)).collect();
    assert_eq!(missing, Vec::<&[String; 3]>::new());
    assert!(preferred.iter().all(|one| granted.contains(one)), "a request that agents may not make");
    for rule in rules.as_array().into_iter().flatten() {
        let wanted = if rule["clusterScope"] == json!(true) { "*" } else { "egress-agent" };
        assert_eq!(rule["namespaces"], json!([wanted]), "{rule}");
    }
}

/// A cluster of a thousand nodes patches as many objects at once, and must not lose its leader by that.
#[test]
fn requests_for_the_lease_do_not_queue_with_patches() {
    let all = documents("base/flowcontrol.yaml");
    let level = |resource: &str| -> Value {
        let queues =
            |one: &&Value| spread(&one["spec"]["rules"][0]["resourceRules"]).iter().any(|[_, of, _]| of == resource);
        let found: Vec<_> = all.iter().filter(|one| one["kind"] == "FlowSchema").filter(queues).collect();
        let [schema] = found[..] else { panic!("{} schemas for {resource}", found.len()) };
        let name = &schema["spec"]["priorityLevelConfiguration"]["name"];
        let level = |one: &&Value| one["kind"] == "PriorityLevelConfiguration" && one["metadata"]["name"] == *name;
        let level = all.iter().find(level).unwrap_or_else(|| panic!("no level {name}"));
        let limit = level.pointer("/spec/limited/limitResponse/queuing/queueLengthLimit").and_then(Value::as_u64);
        assert!(limit.is_some_and(|limit| limit >= 1000), "{name}: {limit:?} requests may wait");
        name.clone()
    };
    assert_eq!(level("leases"), level("configmaps"), "agents hold their addresses by both");
    for patched in ["egressnodes/status", "egressips", "egressips/status"] {
        assert_ne!(level("leases"), level(patched), "{patched}");
    }
}

/// An overlay's image applies only if no base names one.
#[test]
fn only_overlays_name_the_image() {
    let images = |folder: &str| documents(&format!("{folder}/kustomization.yaml")).remove(0)["images"].clone();
    for folder in ["base", "cleanup"] {
        assert_eq!(images(folder), Value::Null, "{folder}");
    }
    let ours = images(OVERLAYS[0]);
    assert_eq!(ours[0]["name"], "egress-agent");
    for folder in [OVERLAYS, CLEANUPS].concat() {
        assert_eq!(images(folder), ours, "{folder}");
    }
    for path in ["base/daemonset.yaml", "base/controller.yaml", "cleanup/daemonset.yaml"] {
        let pod = &documents(path).remove(0)["spec"]["template"]["spec"];
        for list in ["initContainers", "containers"] {
            for container in pod[list].as_array().into_iter().flatten() {
                assert_eq!(container["image"], "egress-agent", "{path}");
            }
        }
    }
}

/// There are images for these alone (`cargo xtask image --arch`).
#[test]
fn pods_run_on_nodes_that_the_image_is_built_for() {
    for path in ["base/daemonset.yaml", "base/controller.yaml", "cleanup/daemonset.yaml"] {
        let pod = documents(path).remove(0)["spec"]["template"]["spec"].clone();
        assert_eq!(pod["nodeSelector"], json!({"kubernetes.io/os": "linux"}), "{path}");
        let required = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let arch = json!([{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}]);
        assert_eq!(required["nodeSelectorTerms"], json!([{"matchExpressions": arch}]), "{path}");
    }
}

/// The component `mount-bpffs` has the only container that is: see `a_component_mounts_what_the_agent_pins_in`.
#[test]
fn pods_are_not_privileged() {
    let all = ["base/daemonset.yaml", "base/controller.yaml", "cleanup/daemonset.yaml", "overlays/bridge-cni/cni.yaml"];
    for path in all {
        let pod = documents(path).remove(0)["spec"]["template"]["spec"].clone();
        for list in ["initContainers", "containers"] {
            for container in pod[list].as_array().into_iter().flatten() {
                let security = &container["securityContext"];
                let is = |field: &str, value: bool| security[field] == json!(value);
                assert!(is("privileged", false) && is("allowPrivilegeEscalation", false), "{path}: {security}");
                assert!(is("readOnlyRootFilesystem", true), "{path}: {security}");
                assert_eq!(security["capabilities"]["drop"], json!(["ALL"]), "{path}");
                assert_eq!(container["resources"].get("limits"), None, "{path}");
            }
        }
        assert_eq!((pod.get("hostPID"), pod.get("hostIPC")), (None, None), "{path}");
    }
    let granted = documents("base/daemonset.yaml").remove(0);
    let granted =
        granted["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"].clone();
    let scc = documents("overlays/ovn-kubernetes-openshift/scc.yaml").remove(0);
    assert_eq!(granted, scc["allowedCapabilities"], "OpenShift grants what is asked for");
}
