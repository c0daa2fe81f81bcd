//! Services: addresses that the service proxy translates outside the service networks, and the pods that they expose.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service as KubeService;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::convert::protocol;
use egress_core::keys;
use egress_core::model::exposed::{Exposes, MOST_PORTS, TargetPort};
use egress_core::model::services::{Service, ServiceKey};
use egress_core::model::state::PodPort;
use egress_core::plan::capacity::MOST_OF_SERVICE;

pub fn service_key(service: &KubeService) -> ServiceKey {
    let meta = &service.metadata;
    ServiceKey { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
}

/// What a node needs of the Service.
pub fn service(service: &KubeService, service_networks: &[IpNet]) -> Service {
    let uid = service.metadata.uid.clone().unwrap_or_default();
    let (given, chosen) = addresses(service, service_networks);
    let chosen: BTreeSet<IpAddr> = &chosen - &given;
    let count = given.len() + chosen.len();
    let given: BTreeSet<IpAddr> = given.into_iter().take(MOST_OF_SERVICE).collect();
    let addresses: BTreeSet<IpAddr> = given.iter().copied().chain(chosen).take(MOST_OF_SERVICE).collect();
    let (ports, exposes) = (ports(service), exposes(service));
    Service { uid, surplus: count - addresses.len(), addresses, given, ports, exposes }
}

/// Its own ports, the lowest ones.
fn ports(service: &KubeService) -> BTreeSet<PodPort> {
    let listed = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let all: BTreeSet<PodPort> = listed
        .filter_map(|port| {
            let number = u16::try_from(port.port).ok()?;
            Some(PodPort { protocol: protocol(port.protocol.as_deref())?, number })
        })
        .collect();
    all.into_iter().take(MOST_PORTS).collect()
}

/// The pods that it makes reachable from outside, and by which of their ports.
fn exposes(service: &KubeService) -> Exposes {
    let Some(spec) = &service.spec else { return Exposes::default() };
    let by_type = matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"));
    let by_address = spec.external_ips.iter().flatten().next().is_some();
    let selector = spec.selector.clone().unwrap_or_default();
    // Without a selector it has no pods, rather than all.
    if selector.is_empty() || !(by_type || by_address) {
        return Exposes::default();
    }
    let ports = spec.ports.iter().flatten().filter_map(|port| {
        let target = match &port.target_port {
            Some(IntOrString::String(name)) => TargetPort::Name(name.clone()),
            // Zero means unset.
            Some(IntOrString::Int(number)) if *number != 0 => TargetPort::Number(u16::try_from(*number).ok()?),
            Some(IntOrString::Int(_)) | None => TargetPort::Number(u16::try_from(port.port).ok()?),
        };
        Some((protocol(port.protocol.as_deref())?, target))
    });
    Exposes::of(selector, ports.collect())
}

/// Addresses that kube-proxy translates outside the service networks: those given by the cluster, and those chosen by the user.
///
/// Excluded are a Service of another proxy (label `service-proxy-name`), a Service without a cluster IP, and a load balancer's
/// address with `ipMode: Proxy`.
fn addresses(service: &KubeService, service_networks: &[IpNet]) -> (BTreeSet<IpAddr>, BTreeSet<IpAddr>) {
    let Some(spec) = &service.spec else { return Default::default() };
    let cluster_ips = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
    let mut given: BTreeSet<IpAddr> = cluster_ips.filter_map(|text| address(text)).collect();
    let of_another_proxy = service.metadata.labels.iter().flatten().any(|(key, _)| key == keys::SERVICE_PROXY_NAME);
    let mut chosen = BTreeSet::new();
    if !given.is_empty() && !of_another_proxy {
        chosen.extend(spec.external_ips.iter().flatten().filter_map(|text| address(text)));
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let ingress = status.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
        let ours = ingress.filter(|one| one.ip_mode.as_deref() != Some("Proxy"));
        given.extend(ours.filter_map(|one| one.ip.as_deref().and_then(address)));
    }
    for addresses in [&mut given, &mut chosen] {
        addresses.retain(|address| !service_networks.iter().any(|network| network.contains(address)));
    }
    (given, chosen)
}

/// Parses a host address. `None`, of a headless Service, is no address; nor are unspecified, loopback and multicast addresses,
/// whose entries would match nothing or everything.
fn address(text: &str) -> Option<IpAddr> {
    let address: IpAddr = text.parse().ok()?;
    let address = address.to_canonical();
    (!address.is_unspecified() && !address.is_loopback() && !address.is_multicast()).then_some(address)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> Service {
        let networks = ["10.96.0.0/16".parse().expect("a literal")];
        service(&serde_json::from_value(value).expect("a service"), &networks)
    }

    fn texts(value: Value) -> Vec<String> {
        read(value).addresses.iter().map(IpAddr::to_string).collect()
    }

    #[test]
    fn a_service_reached_from_outside_exposes_the_target_ports_of_its_pods() {
        let ports = json!([{"port": 80, "targetPort": 8080}, {"port": 53, "protocol": "UDP", "targetPort": "dns"},
                           {"port": 36412, "protocol": "SCTP"}, {"port": 81, "targetPort": 0},
                           {"port": 82, "protocol": "ICMP"}, {"port": 83, "targetPort": 70000}]);
        let with = |more: Value| {
            let mut spec = json!({"clusterIP": "10.96.0.7", "selector": {"app": "web"}, "ports": ports.clone()});
            spec.as_object_mut().expect("an object").extend(more.as_object().cloned().expect("an object"));
            read(json!({"metadata": {}, "spec": spec})).exposes
        };
        let number = TargetPort::Number;
        let expected = [(6, number(81)), (6, number(8080)), (17, TargetPort::Name("dns".into())), (132, number(36412))];
        for reached in
            [json!({"type": "NodePort"}), json!({"type": "LoadBalancer"}), json!({"externalIPs": ["192.0.2.7"]})]
        {
            assert_eq!(with(reached).ports.into_iter().collect::<Vec<_>>(), expected);
        }
        assert!(with(json!({"type": "ClusterIP"})).is_empty());
        assert!(with(json!({"type": "NodePort", "selector": {}})).is_empty(), "endpoints are written by hand");
    }

    #[test]
    fn a_service_has_its_own_ports_and_not_its_pods() {
        let ports = json!([{"port": 80, "targetPort": 8080}, {"port": 53, "protocol": "UDP", "targetPort": "dns"},
                           {"port": 82, "protocol": "ICMP"}, {"port": 70000}]);
        let ports = read(json!({"metadata": {}, "spec": {"clusterIP": "10.96.0.7", "ports": ports}})).ports;
        let ports: Vec<_> = ports.into_iter().map(|port| (port.protocol, port.number)).collect();
        assert_eq!(ports, [(6, 80), (17, 53)]);
    }

    #[test]
    fn addresses_ports_and_labels_of_a_service_are_bounded() {
        let many: Vec<String> =
            (0..100_000_u32).map(|i| std::net::Ipv4Addr::from(0x1400_0000 + i).to_string()).collect();
        let ports: Vec<Value> = (1..20_000)
            .flat_map(|i| [json!({"port": i}), json!({"port": i, "protocol": "UDP", "targetPort": format!("p{i}")})])
            .collect();
        let spec = json!({"clusterIP": "172.30.0.7", "selector": {"app": "web"}, "ports": ports, "externalIPs": many});
        let service = read(json!({"metadata": {}, "spec": spec}));
        assert_eq!((service.addresses.len(), service.surplus), (MOST_OF_SERVICE, 100_001 - MOST_OF_SERVICE));
        assert!(service.addresses.contains(&"172.30.0.7".parse().expect("a literal")), "the cluster IP comes first");
        assert_eq!((service.exposes.ports.len(), service.ports.len()), (2 * MOST_PORTS, MOST_PORTS));
        assert_eq!(service.exposes.ports.first(), Some(&(6, TargetPort::Number(1))));
        let labels: serde_json::Map<String, Value> = (0..10_000).map(|i| (format!("l{i}"), json!("x"))).collect();
        let spec = json!({"type": "NodePort", "clusterIP": "10.96.0.7", "selector": labels, "ports": [{"port": 80}]});
        assert!(read(json!({"metadata": {}, "spec": spec})).exposes.is_empty());
    }

    #[test]
    fn addresses_that_the_service_proxy_translates_belong_to_the_cluster() {
        let spec = json!({"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7", "fd00:96::7"],
                          "externalIPs": ["192.0.2.7", "nonsense", "0.0.0.0"]});
        let ingress = json!([{"ip": "192.0.2.8"}, {"ip": "192.0.2.9", "ipMode": "VIP"},
                             {"ip": "192.0.2.10", "ipMode": "Proxy"}, {"hostname": "lb.example"}]);
        let status = json!({"loadBalancer": {"ingress": ingress}});
        let whole = json!({"metadata": {}, "spec": spec, "status": status});
        assert_eq!(texts(whole.clone()), ["192.0.2.7", "192.0.2.8", "192.0.2.9", "fd00:96::7"]);
        let chosen: BTreeSet<IpAddr> = &read(whole.clone()).addresses - &read(whole.clone()).given;
        assert_eq!(chosen.into_iter().collect::<Vec<_>>(), ["192.0.2.7".parse::<IpAddr>().expect("a literal")]);
        let mut of_another_proxy = whole.clone();
        of_another_proxy["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "mesh"});
        assert_eq!(texts(of_another_proxy), ["fd00:96::7"]);
        let headless = json!({"clusterIP": "None", "clusterIPs": ["None"], "externalIPs": ["192.0.2.7"]});
        assert!(texts(json!({"metadata": {}, "spec": headless, "status": status})).is_empty());
        assert!(texts(json!({"metadata": {}, "spec": {"type": "ExternalName", "externalName": "a"}})).is_empty());
    }
}
