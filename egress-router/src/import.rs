//! What other routers are configured by, as configurations of this one: OpenShift SDN's egress router pods, whose container reads
//! `EGRESS_SOURCE`, `EGRESS_GATEWAY` and `EGRESS_DESTINATION`, and EgressRouter objects. Pure.

use egress_kube::egress_router::EgressRouterSpec;
use serde_json::{Map, Value, json};

use crate::manifests::{NamedRouter, of_egress_router};

const SOURCE: &str = "EGRESS_SOURCE";
const GATEWAY: &str = "EGRESS_GATEWAY";
const DESTINATION: &str = "EGRESS_DESTINATION";
const MODE: &str = "EGRESS_ROUTER_MODE";
/// The annotation that gave a pod its interface; `true` or the name of the node's.
const MACVLAN: &str = "pod.network.openshift.io/assign-macvlan";

/// One router of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// As `Pod shop/router`.
    pub what: String,
    pub router: NamedRouter,
    /// What behaves differently.
    pub warnings: Vec<String>,
}

/// The routers among the objects of a file. ConfigMaps that they take their destinations from are among the objects too.
pub fn routers(objects: &[Value]) -> Vec<Result<Imported, String>> {
    let all: Vec<&Value> = objects.iter().flat_map(items).collect();
    all.iter().filter_map(|object| imported(object, &all)).collect()
}

/// A router by the values that the former one's container had in its environment.
///
/// # Errors
/// The text has no destination.
pub fn of_text(name: &str, source: &str, gateway: Option<&str>, destination: &str) -> Result<Imported, String> {
    let values = [(SOURCE, Some(source)), (GATEWAY, gateway), (DESTINATION, Some(destination))];
    let given = values.into_iter().filter_map(|(name, value)| Some(json!({"name": name, "value": value?})));
    let (fields, warnings) = of_sdn(&given.collect::<Vec<_>>(), &Value::Null, &|_, _| None)?;
    let router = NamedRouter { namespace: "default".to_owned(), name: name.to_owned(), fields };
    Ok(Imported { what: format!("router {name}"), router, warnings })
}

/// The objects of a list, or the one object.
fn items(object: &Value) -> Vec<&Value> {
    match object["items"].as_array() {
        Some(items) if object["kind"].as_str().is_some_and(|kind| kind.ends_with("List")) => items.iter().collect(),
        _ => vec![object],
    }
}

fn imported(object: &Value, all: &[&Value]) -> Option<Result<Imported, String>> {
    // What made it is in the file too, or is what counts.
    if object["metadata"]["ownerReferences"]
        .as_array()
        .is_some_and(|owners| owners.iter().any(|one| one["controller"] == true))
    {
        return None;
    }
    let kind = object["kind"].as_str().unwrap_or_default();
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let name = text("/metadata/name").or_else(|| text("/metadata/generateName")).unwrap_or("router");
    let name = name.trim_end_matches('-');
    let namespace = text("/metadata/namespace").unwrap_or("default");
    let what = format!("{kind} {namespace}/{name}");
    let named = |why: String| format!("{what}: {why}");
    if kind == "EgressRouter" {
        let spec = serde_json::from_value::<EgressRouterSpec>(object["spec"].clone());
        let router = spec.map_err(|error| error.to_string()).and_then(|spec| of_egress_router(namespace, name, &spec));
        return Some(router.map_err(named).map(|router| Imported { what: what.clone(), router, warnings: Vec::new() }));
    }
    // A pod, or the template of what makes pods.
    let pod = if kind == "Pod" { object } else { object.pointer("/spec/template")? };
    let lists = ["initContainers", "containers"].map(|field| pod["spec"][field].as_array());
    let mut containers = lists.into_iter().flatten().flatten();
    let variables = containers.find_map(|container| {
        let variables = container["env"].as_array()?;
        variables.iter().any(|one| one["name"] == SOURCE).then_some(variables)
    })?;
    let router = of_sdn(variables, &pod["metadata"]["annotations"][MACVLAN], &|map, key| {
        let is_it = |object: &&&Value| {
            let metadata = &object["metadata"];
            object["kind"] == "ConfigMap"
                && metadata["name"] == map
                && metadata["namespace"].as_str().unwrap_or("default") == namespace
        };
        all.iter().find(is_it).and_then(|found| found["data"][key].as_str().map(str::to_owned))
    });
    Some(router.map_err(named).map(|(fields, warnings)| {
        let router = NamedRouter { namespace: namespace.to_owned(), name: name.to_owned(), fields };
        Imported { what: what.clone(), router, warnings }
    }))
}

/// A router by the variables of its container.
fn of_sdn(
    variables: &[Value],
    annotation: &Value,
    data: &dyn Fn(&str, &str) -> Option<String>,
) -> Result<(Map<String, Value>, Vec<String>), String> {
    let value = |name: &str| -> Result<Option<String>, String> {
        let Some(variable) = variables.iter().find(|one| one["name"] == name) else { return Ok(None) };
        let reference = &variable["valueFrom"]["configMapKeyRef"];
        match (variable["value"].as_str(), reference["name"].as_str(), reference["key"].as_str()) {
            (Some(value), ..) => Ok(Some(value.trim().to_owned())),
            (None, Some(map), Some(key)) => {
                let text = data(map, key);
                text.map(Some)
                    .ok_or_else(|| format!("{name}: put ConfigMap {map}, with its key {key}, into the file too"))
            }
            _ => Err(format!("{name}: it is neither a value nor a key of a ConfigMap")),
        }
    };
    let source = value(SOURCE)?.ok_or_else(|| format!("{SOURCE} is not set"))?;
    let mut ip = json!({"addresses": [source]});
    if let Some(gateway) = value(GATEWAY)? {
        ip["gateway"] = json!(gateway);
    }
    let mut warnings = Vec::new();
    match value(MODE)?.as_deref() {
        None | Some("" | "init" | "legacy") => {
            let text = value(DESTINATION)?.unwrap_or_default();
            let entries: Vec<&str> =
                text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
            if entries.is_empty() {
                return Err(format!("{DESTINATION} is empty"));
            }
            ip["redirect"] = json!(entries);
        }
        Some(proxy @ ("http-proxy" | "dns-proxy")) => warnings.push(format!(
            "{MODE} is {proxy}: run a proxy as the pod's container; it is reached by its port and connects with the router's \
             address"
        )),
        Some(other) => return Err(format!("{MODE}: {other:?} is none of init, legacy, http-proxy and dns-proxy")),
    }
    // The interface of the former router was always of this mode.
    let mut arguments = json!({"mode": "private"});
    match annotation.as_str() {
        None | Some("true") => {}
        Some(master) => arguments["master"] = json!(master),
    }
    Ok((Map::from_iter([("interfaceArgs".to_owned(), arguments), ("ip".to_owned(), ip)]), warnings))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(variables: &[(&str, &str)]) -> Value {
        let env: Vec<Value> = variables.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
        json!({
            "kind": "Pod",
            "metadata": {"name": "egress-1", "namespace": "shop", "annotations": {MACVLAN: "eth1"}},
            "spec": {"initContainers": [{"name": "egress-router", "env": env}], "containers": [{"name": "wait"}]},
        })
    }

    fn one(objects: &[Value]) -> Result<Imported, String> {
        let [found] = &routers(objects)[..] else { panic!("one router: {objects:?}") };
        let found = found.clone()?;
        found.router.check().map_err(|error| error.to_string())?;
        Ok(found)
    }

    const TEXT: &str = "# web\n80   tcp 203.0.113.25\n\n8080 tcp 203.0.113.26 80\n203.0.113.27\n";

    #[test]
    fn a_pod_of_the_former_router_becomes_a_configuration() {
        for source in ["192.168.12.99/24", "192.168.12.99"] {
            let variables = [(SOURCE, source), (GATEWAY, "192.168.12.1"), (DESTINATION, TEXT), (MODE, "init")];
            let found = one(&[pod(&variables)]).expect("valid");
            assert_eq!((found.what.as_str(), found.router.name.as_str()), ("Pod shop/egress-1", "egress-1"));
            let wanted = json!({
                "interfaceArgs": {"mode": "private", "master": "eth1"},
                "ip": {
                    "addresses": [source], "gateway": "192.168.12.1",
                    "redirect": ["80   tcp 203.0.113.25", "8080 tcp 203.0.113.26 80", "203.0.113.27"],
                },
            });
            assert_eq!(Value::Object(found.router.fields), wanted);
        }
    }

    #[test]
    fn its_text_alone_is_enough() {
        let found = of_text("web", "192.168.12.99/24", Some("192.168.12.1"), TEXT).expect("valid");
        assert_eq!(found.router.fields["ip"]["redirect"].as_array().map(Vec::len), Some(3));
        assert!(found.router.check().is_ok() && of_text("web", "192.168.12.99/24", None, "# none").is_err());
    }

    #[test]
    fn destinations_may_be_in_a_config_map_and_the_pod_in_a_template() {
        let mut template = pod(&[(SOURCE, "192.168.12.99/24")]);
        let reference =
            json!({"name": DESTINATION, "valueFrom": {"configMapKeyRef": {"name": "routes", "key": "text"}}});
        template["spec"]["initContainers"][0]["env"].as_array_mut().expect("a list").push(reference);
        let metadata = json!({"name": "routers", "namespace": "shop"});
        let deployment = json!({"kind": "DeploymentConfig", "metadata": metadata, "spec": {"template": template}});
        let map = |namespace: &str| json!({"kind": "ConfigMap", "metadata": {"name": "routes", "namespace": namespace}, "data": {"text": TEXT}});
        // One of its pods is no router of its own.
        let mut of_deployment = pod(&[(SOURCE, "192.168.12.99/24")]);
        of_deployment["metadata"]["ownerReferences"] = json!([{"kind": "ReplicationController", "controller": true}]);
        let list = json!({"kind": "List", "items": [map("shop"), deployment.clone(), of_deployment]});
        let found = one(&[list]).expect("valid");
        assert_eq!(found.router.fields["ip"]["redirect"].as_array().map(Vec::len), Some(3));
        let error = one(&[map("other"), deployment]).expect_err("that of another namespace");
        assert_eq!(
            error,
            "DeploymentConfig shop/routers: EGRESS_DESTINATION: put ConfigMap routes, with its key text, into the file too"
        );
    }

    #[test]
    fn what_the_former_router_refused_is_refused() {
        for (variables, says) in [
            (vec![(SOURCE, "x"), (DESTINATION, TEXT)], "ip.addresses[0]"),
            (vec![(SOURCE, "192.168.12.99/24"), (GATEWAY, "x"), (DESTINATION, TEXT)], "ip.gateway"),
            (vec![(SOURCE, "192.168.12.99/24")], "EGRESS_DESTINATION is empty"),
            (vec![(SOURCE, "192.168.12.99/24"), (DESTINATION, "800000 tcp 203.0.113.25")], "800000"),
            (vec![(SOURCE, "192.168.12.99/24"), (DESTINATION, "80 tcp 203.0.113.25\n80 tcp 203.0.113.26")], "80"),
            (vec![(SOURCE, "192.168.12.99/24"), (DESTINATION, "203.0.113.25\n80 tcp 203.0.113.26")], "redirect"),
            (vec![(SOURCE, "192.168.12.99/24"), (MODE, "unit-test")], "unit-test"),
        ] {
            let error = one(&[pod(&variables)]).expect_err(says);
            assert!(error.contains(says), "{says}: {error}");
        }
    }

    #[test]
    fn a_proxy_keeps_its_address_and_says_what_is_missing() {
        let found = one(&[pod(&[(SOURCE, "192.168.12.99/24"), (MODE, "http-proxy")])]).expect("valid");
        assert!(found.warnings[0].contains("run a proxy") && found.router.fields["ip"].get("redirect").is_none());
    }
}
