//! Services: the addresses that the service proxy takes care of and that no service network covers.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service as KubeService;

use crate::kube::keys;
use crate::model::view::ServiceKey;

pub fn service_key(service: &KubeService) -> ServiceKey {
    let meta = &service.metadata;
    ServiceKey { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
}

/// What kube-proxy translates besides addresses of the service networks: nothing of a Service that it leaves to another
/// proxy or that has no cluster IP, and no load balancer's address that is to be reached at the load balancer.
pub fn service(service: &KubeService, service_networks: &[IpNet]) -> BTreeSet<IpAddr> {
    let Some(spec) = &service.spec else { return BTreeSet::new() };
    let cluster_ips = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
    let cluster_ips: BTreeSet<IpAddr> = cluster_ips.filter_map(|text| address(text)).collect();
    let of_another = service.metadata.labels.iter().flatten().any(|(key, _)| key == keys::SERVICE_PROXY_NAME);
    let mut addresses = BTreeSet::new();
    if !cluster_ips.is_empty() && !of_another {
        addresses.extend(spec.external_ips.iter().flatten().filter_map(|text| address(text)));
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let ingress = status.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
        let ours = ingress.filter(|one| one.ip_mode.as_deref() != Some("Proxy"));
        addresses.extend(ours.filter_map(|one| one.ip.as_deref().and_then(address)));
    }
    addresses.extend(cluster_ips);
    addresses.retain(|address| !service_networks.iter().any(|network| network.contains(address)));
    addresses
}

/// Also what is there where an address could be: `None`, of a headless Service, is none. Nor are those that are no
/// host's: an entry for one would be an entry for nothing, or for all.
fn address(text: &str) -> Option<IpAddr> {
    let address: IpAddr = text.parse().ok()?;
    let address = address.to_canonical();
    (!address.is_unspecified() && !address.is_loopback() && !address.is_multicast()).then_some(address)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn addresses(value: Value) -> Vec<String> {
        let networks = ["10.96.0.0/16".parse().expect("a literal")];
        let service = service(&serde_json::from_value(value).expect("a service"), &networks);
        service.iter().map(IpAddr::to_string).collect()
    }

    #[test]
    fn what_the_service_proxy_translates_is_the_clusters() {
        let spec = json!({"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7", "fd00:96::7"],
                          "externalIPs": ["192.0.2.7", "nonsense", "0.0.0.0"]});
        let ingress = json!([{"ip": "192.0.2.8"}, {"ip": "192.0.2.9", "ipMode": "VIP"},
                             {"ip": "192.0.2.10", "ipMode": "Proxy"}, {"hostname": "lb.example"}]);
        let status = json!({"loadBalancer": {"ingress": ingress}});
        let whole = json!({"metadata": {}, "spec": spec, "status": status});
        assert_eq!(addresses(whole.clone()), ["192.0.2.7", "192.0.2.8", "192.0.2.9", "fd00:96::7"]);
        let mut of_another = whole.clone();
        of_another["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "mesh"});
        assert_eq!(addresses(of_another), ["fd00:96::7"]);
        let headless = json!({"clusterIP": "None", "clusterIPs": ["None"], "externalIPs": ["192.0.2.7"]});
        assert!(addresses(json!({"metadata": {}, "spec": headless, "status": status})).is_empty());
        assert!(addresses(json!({"metadata": {}, "spec": {"type": "ExternalName", "externalName": "a"}})).is_empty());
    }
}
