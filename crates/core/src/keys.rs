//! Labels and annotations, each named once.

/// Node: may host egress IPs. Presence counts, the value does not.
pub const ASSIGNABLE: &str = "k8s.ovn.org/egress-assignable";
/// Node: `{"ipv4":"192.168.126.202/24","ipv6":"fc00::3/64"}`, either may be empty.
pub const PRIMARY_IFADDR: &str = "k8s.ovn.org/node-primary-ifaddr";
/// Node: `["192.168.126.202/24","fc00::3/64"]`.
pub const HOST_CIDRS: &str = "k8s.ovn.org/host-cidrs";
/// Node: `{"default":["10.244.0.0/24"]}`, or `{"default":"10.244.0.0/24"}` in older releases.
pub const NODE_SUBNETS: &str = "k8s.ovn.org/node-subnets";
/// Node: `[{"interface":"eni-1","ifaddr":{"ipv4":"10.0.128.0/18"},"capacity":{"ipv4":9,"ipv6":10}}]`, or
/// `"capacity":{"ip":14}`; the first entry counts. Written by OpenShift's cloud controller.
pub const CLOUD_CONFIG: &str = "cloud.network.openshift.io/egress-ipconfig";
/// Node: how many egress IPs it takes at most, of all kinds of policies. Written by users, as in Antrea.
pub const MAX_EGRESS_IPS: &str = "node.antrea.io/max-egress-ips";
/// Node: its egress IPs go to other nodes if these can take them, and it gets no new ones. Any value but `false`
/// counts. Written by `egress-agent drain`, or by users.
pub const DRAIN: &str = "k8s.ovn.org/egress-drain";
/// Node: written only by OVN-Kubernetes, on every node where it runs.
pub const CHASSIS_ID: &str = "k8s.ovn.org/node-chassis-id";
/// Node: `{"default":{"mode":"local",..}}`, or `shared`.
pub const GATEWAY_CONFIG: &str = "k8s.ovn.org/l3-gateway-config";
/// Node: one of these marks a node of OVN-Kubernetes.
pub const OF_OVN_KUBERNETES: [&str; 2] = [CHASSIS_ID, GATEWAY_CONFIG];
/// Node: egress IPs that OVN-Kubernetes has put on interfaces, `["10.10.10.100"]`.
pub const EGRESS_IPS_ON_INTERFACES: [&str; 2] =
    ["k8s.ovn.org/secondary-host-egress-ips", "k8s.ovn.org/bridge-egress-ips"];
/// Pod: `{"default":{"ip_addresses":["10.244.0.5/24"],"ip_address":"10.244.0.5/24",..}}`.
pub const POD_NETWORKS: &str = "k8s.ovn.org/pod-networks";
/// Service (label): a proxy other than kube-proxy handles it.
pub const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// Node (label): the prefix of those that say which EgressServices it hosts, before `<namespace>-<name>`. The value is empty.
/// Written by the leader; load balancers announce by it.
pub const EGRESS_SERVICE_PREFIX: &str = "egress-service.k8s.ovn.org/";
/// Namespace (label): its name, set by the API server.
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";
/// EndpointSlice (label): the name of its Service.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// EgressIP: the egress ID, decimal. Written by the leader.
pub const EGRESS_ID: &str = "k8s.ovn.org/egressip-tunnel-id";
/// EgressIP: the addresses of the object, canonical, sorted, joined by commas, if the leader has found that no node can
/// host any of them. Valid only while the object lists exactly these addresses. An annotation, because OVN-Kubernetes'
/// CRD prunes conditions; addresses instead of a generation, because every status write raises the generation there.
pub const NO_ELIGIBLE_NODE: &str = "k8s.ovn.org/egressip-no-eligible-node";
/// EgressIP: `drop` turns off the node's address for this object. Written by users.
pub const ON_UNASSIGNED: &str = "k8s.ovn.org/egressip-on-unassigned";
