//! The objects that make a pod a router: a NetworkAttachmentDefinition with the configuration, a Deployment of one pod that Multus
//! attaches to it, and a Service for what is redirected. Pure.

use std::collections::BTreeSet;

use egress_cni::CniError;
use egress_kube::egress_router::EgressRouterSpec;
use serde_json::{Map, Value, json};

use crate::config::source::Source;
use crate::config::{PodName, RouterConfig};

/// The image whose program [`PAUSE`] is the pod's.
pub const IMAGE: &str = concat!("localhost/egress-agent:", env!("CARGO_PKG_VERSION"));
const PAUSE: [&str; 2] = ["/usr/bin/egress-router", "pause"];
/// The label that the pods of a router have, with its name.
const LABEL: &str = "app";

/// A router with the names of its objects.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedRouter {
    pub namespace: String,
    pub name: String,
    /// The configuration without `cniVersion`, `name` and `type`.
    pub fields: Map<String, Value>,
}

impl NamedRouter {
    /// The configuration as a runtime passes it.
    pub fn config(&self) -> Map<String, Value> {
        let mut all = Map::from_iter([
            ("cniVersion".to_owned(), json!("1.0.0")),
            ("name".to_owned(), json!(self.name)),
            ("type".to_owned(), json!("egress-router")),
        ]);
        all.extend(self.fields.clone());
        all
    }

    /// What is wrong with the configuration; what has no effect if nothing is.
    ///
    /// # Errors
    /// Everything that is invalid.
    pub fn check(&self) -> Result<RouterConfig, CniError> {
        RouterConfig::of(&self.config(), PodName { namespace: Some(&self.namespace), name: Some(&self.name) })
    }

    /// The objects; no Service where no port is redirected.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub fn objects(&self, image: &str) -> Result<Vec<Value>, CniError> {
        let config = self.check()?;
        let mut metadata = json!({"name": self.name, "namespace": self.namespace});
        let attachment = json!({
            "apiVersion": "k8s.cni.cncf.io/v1",
            "kind": "NetworkAttachmentDefinition",
            "metadata": metadata,
            "spec": {"config": format!("{:#}\n", Value::Object(self.config()))},
        });
        let labels = json!({LABEL: self.name});
        let service_metadata = metadata.clone();
        metadata["labels"] = labels.clone();
        let deployment = json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 1,
                // Two pods would have one address.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {
                        "labels": labels,
                        "annotations": {"k8s.v1.cni.cncf.io/networks": self.name},
                    },
                    "spec": {
                        "automountServiceAccountToken": false,
                        "containers": [{
                            "name": "pause",
                            "image": image,
                            "imagePullPolicy": "IfNotPresent",
                            "command": PAUSE,
                            "securityContext": {
                                "allowPrivilegeEscalation": false,
                                "readOnlyRootFilesystem": true,
                                "runAsNonRoot": true,
                                "runAsUser": 65534,
                                // Without CAP_NET_RAW no process gets past the router by a packet socket.
                                "capabilities": {"drop": ["ALL"]},
                                "seccompProfile": {"type": "RuntimeDefault"},
                            },
                            "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}},
                        }],
                    },
                },
            },
        });
        let mut objects = vec![attachment, deployment];
        let ports = ports(&config);
        if !ports.is_empty() {
            objects.push(json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": service_metadata,
                "spec": {"selector": labels, "ports": ports},
            }));
        }
        Ok(objects)
    }
}

/// Of the Service: each port once, though it may be redirected in both families.
fn ports(config: &RouterConfig) -> Vec<Value> {
    let Source::Given(addressing) = &config.source else { return Vec::new() };
    let all: BTreeSet<_> = addressing.redirects.ports.keys().map(|(_, protocol, port)| (*port, *protocol)).collect();
    let port = |(port, protocol): (u16, crate::config::destinations::Protocol)| {
        let name = protocol.to_string();
        json!({"name": format!("{name}-{port}"), "port": port, "protocol": name.to_uppercase()})
    };
    all.into_iter().map(port).collect()
}

/// The router that an EgressRouter asks for, and what is lost of it.
///
/// # Errors
/// It has a mode that there is not.
pub fn of_egress_router(namespace: &str, name: &str, spec: &EgressRouterSpec) -> Result<NamedRouter, String> {
    if spec.mode != "Redirect" {
        return Err(format!("spec.mode: {:?} is not Redirect", spec.mode));
    }
    let redirects = spec.redirect.redirect_rules.iter().map(|rule| {
        let target = rule.target_port.map_or(String::new(), |port| format!(" {port}"));
        format!("{} {} {}{target}", rule.port, rule.protocol.to_ascii_lowercase(), rule.destination_ip)
    });
    let addresses: Vec<&str> = spec.addresses.iter().map(|one| one.ip.as_str()).collect();
    // One of each family; the same one with several addresses is no problem.
    let gateways: BTreeSet<&str> =
        spec.addresses.iter().filter_map(|one| one.gateway.as_deref()).filter(|gateway| !gateway.is_empty()).collect();
    let mut ip = json!({"addresses": addresses});
    if !gateways.is_empty() {
        ip["gateway"] = json!(gateways);
    }
    let redirects: Vec<String> = redirects.collect();
    if !redirects.is_empty() {
        ip["redirect"] = json!(redirects);
    }
    if let Some(fallback) = &spec.redirect.fallback_ip {
        ip["fallbackIP"] = json!(fallback);
    }
    let macvlan = &spec.network_interface.macvlan;
    let mut arguments = Map::new();
    for (key, value) in [("mode", macvlan.mode.to_ascii_lowercase()), ("master", macvlan.master.clone())] {
        if !value.is_empty() {
            arguments.insert(key.to_owned(), json!(value));
        }
    }
    let mut fields = Map::new();
    if !arguments.is_empty() {
        fields.insert("interfaceArgs".to_owned(), Value::Object(arguments));
    }
    fields.insert("ip".to_owned(), ip);
    Ok(NamedRouter { namespace: namespace.to_owned(), name: name.to_owned(), fields })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    /// What administrators copy is what the program makes.
    #[test]
    fn the_example_is_what_is_rendered() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/egress-router/example.yaml");
        let text = std::fs::read_to_string(path).expect("a manifest");
        let documents: Vec<Value> =
            serde_yaml::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML")).collect();
        let config = documents[0]["spec"]["config"].as_str().expect("a text");
        let mut fields: Map<String, Value> = serde_json::from_str(config).expect("JSON");
        fields.retain(|key, _| key == "ip");
        let router = NamedRouter { namespace: "default".to_owned(), name: "egress-router".to_owned(), fields };
        let rendered = router.objects(IMAGE).expect("valid");
        assert_eq!(rendered[1..], documents[1..]);
        assert_eq!(serde_json::from_str::<Map<String, Value>>(config).expect("JSON"), router.config());
    }

    #[test]
    fn an_egress_router_keeps_what_it_says() {
        let spec = json!({
            "mode": "Redirect",
            "addresses": [
                {"ip": "192.168.12.99/24", "gateway": "192.168.12.1"},
                {"ip": "192.168.12.98/24", "gateway": "192.168.12.1"},
                {"ip": "2001:db8:12::99/64", "gateway": "2001:db8:12::1"},
            ],
            "networkInterface": {"macvlan": {"mode": "Private", "master": "eno2"}},
            "redirect": {
                "redirectRules": [
                    {"destinationIP": "203.0.113.26", "port": 80, "protocol": "TCP"},
                    {"destinationIP": "2001:db8::26", "port": 80, "protocol": "TCP", "targetPort": 8080},
                    {"destinationIP": "203.0.113.27", "port": 53, "protocol": "UDP"},
                ],
                "fallbackIP": "203.0.113.28",
            },
        });
        let spec: EgressRouterSpec = serde_json::from_value(spec).expect("valid");
        let router = of_egress_router("shop", "payments", &spec).expect("valid");
        let wanted = json!({
            "interfaceArgs": {"mode": "private", "master": "eno2"},
            "ip": {
                "addresses": ["192.168.12.99/24", "192.168.12.98/24", "2001:db8:12::99/64"],
                "gateway": ["192.168.12.1", "2001:db8:12::1"],
                "redirect": ["80 tcp 203.0.113.26", "80 tcp 2001:db8::26 8080", "53 udp 203.0.113.27"],
                "fallbackIP": "203.0.113.28",
            },
        });
        assert_eq!(Value::Object(router.fields.clone()), wanted);
        let objects = router.objects(IMAGE).expect("valid");
        let ports = json!([
            {"name": "udp-53", "port": 53, "protocol": "UDP"},
            {"name": "tcp-80", "port": 80, "protocol": "TCP"},
        ]);
        assert_eq!(objects[2]["spec"]["ports"], ports);
    }
}
