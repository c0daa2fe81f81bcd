//! Behind the distribution's plugin `bridge`, as libcni calls a list of plugins: each gets the result of the one before, and DEL
//! goes backwards with the last result.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use egress_lab::cni_runtime;
use serde_json::{Value, json};

use crate::skips::skipped;
use crate::world::{World, address};

/// Where distributions and CNIs put plugins; the guests have them there too.
const FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

fn found(plugin: &str) -> Option<PathBuf> {
    FOLDERS.iter().map(|folder| Path::new(folder).join(plugin)).find(|path| path.exists())
}

/// Calls the plugins of a list for a pod; the last result.
fn call(world: &World, pod: &str, plugins: &[(PathBuf, Value)], command: &str, result: Option<Value>) -> Option<Value> {
    let netns = world.path(pod);
    let folder = plugins[0].0.parent().expect("a folder").display().to_string();
    let variables = BTreeMap::from([
        ("CNI_COMMAND", command),
        ("CNI_CONTAINERID", pod),
        ("CNI_NETNS", &netns),
        ("CNI_IFNAME", "eth0"),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1"),
        ("CNI_PATH", &folder),
    ]);
    let mut result = result;
    let mut order: Vec<&(PathBuf, Value)> = plugins.iter().collect();
    if command == "DEL" {
        order.reverse();
    }
    for (plugin, config) in order {
        let mut config = config.clone();
        config["cniVersion"] = json!("1.0.0");
        config["name"] = json!("chained");
        if let Some(result) = &result {
            config["prevResult"] = result.clone();
        }
        let output = cni_runtime::call(&world.netns("node"), plugin, &variables, &config.to_string()).expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{} {command}: {said}{log}", plugin.display());
        if command == "ADD" {
            result = Some(serde_json::from_str(&said).unwrap_or_else(|error| panic!("{said}: {error}")));
        }
    }
    result
}

#[test]
fn a_router_is_chained_behind_the_bridge_plugin() {
    let (Some(bridge), Some(_)) = (found("bridge"), found("host-local")) else {
        return skipped("no plugin bridge");
    };
    let mut world = World::new();
    world.pod_without_interface("chained");
    world.ip("node", "link set cni0 mtu 1500");
    let leases = std::env::temp_dir().join(format!("egress-router-leases-{}", std::process::id()));
    let range = json!([[{"subnet": "10.128.6.0/23", "rangeStart": "10.128.6.60", "gateway": "10.128.6.1"}]]);
    let ipam = json!({"type": "host-local", "dataDir": leases, "ranges": range, "routes": [{"dst": "0.0.0.0/0"}]});
    let router = json!({
        "type": "egress-router", "interface": "net1", "clusterNetworks": ["10.128.0.0/14"],
        "podIP": {"web-*": {"addresses": ["192.168.12.99/24"], "redirect": ["8080 tcp 203.0.113.26 80"]}},
    });
    let plugins = [
        (bridge, json!({"type": "bridge", "bridge": "cni0", "ipam": ipam})),
        (PathBuf::from(env!("CARGO_BIN_EXE_egress-router")), router),
    ];
    let result = call(&world, "chained", &plugins, "ADD", None).expect("a result");
    let names: Vec<&str> =
        result["interfaces"].as_array().expect("a list").iter().filter_map(|one| one["name"].as_str()).collect();
    assert!(names.starts_with(&["cni0"]) && names.ends_with(&["eth0", "net1"]), "{names:?}");
    let ips: Vec<(&str, u64)> = result["ips"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| Some((one["address"].as_str()?, one["interface"].as_u64()?)))
        .collect();
    assert_eq!(ips, [("10.128.6.60/23", 2), ("192.168.12.99/24", 3)], "{result}");
    let _server = world.serve("server", "0.0.0.0:80");
    world.until_up("chained");
    assert_eq!(world.connect("client", "10.128.6.60:8080").expect("redirected"), address("192.168.12.99"));
    // That of `bridge` takes every address for one of its own interface.
    call(&world, "chained", &plugins[1..], "CHECK", Some(result.clone()));
    for _ in 0..2 {
        call(&world, "chained", &plugins, "DEL", Some(result.clone()));
    }
    let links = world.netns("chained").exec("ip", &["-brief", "link"]).expect("a list");
    assert_eq!(links.lines().count(), 1, "{links}");
    std::fs::remove_dir_all(&leases).expect("the plugin made it");
}
