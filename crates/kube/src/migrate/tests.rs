//! The manifests have the fields of the examples in the documentation of each project: Antrea's "Egress", Cilium's "Egress Gateway",
//! OpenShift's "Configuring egress IPs for a project" and OVN-Kubernetes' "EgressIP".

use serde::Deserialize;

use super::*;
use MigrationNote::{Changes, Loses};

fn objects(text: &str) -> Vec<DynamicObject> {
    let documents = serde_yaml::Deserializer::from_str(text);
    documents.map(|document| DynamicObject::deserialize(document).expect("an object")).collect()
}

fn migrated(text: &str, from: EgressSystem, to: MigrationTarget) -> Vec<Migrated> {
    migrate(&objects(text), from, to).objects
}

/// The specs of what becomes of each, and how many notes say that it changes and that it loses something.
fn outcome(all: &[Migrated]) -> Vec<(String, Vec<Value>, usize, usize)> {
    let one = |one: &Migrated| {
        let loses = one.notes.iter().filter(|note| matches!(note, Loses(_))).count();
        let specs = one.becomes.iter().map(|object| object["spec"].clone()).collect();
        (one.from.clone(), specs, one.notes.len() - loses, loses)
    };
    all.iter().map(one).collect()
}

const ANTREA: &str = "
apiVersion: crd.antrea.io/v1alpha2
kind: ExternalIPPool
metadata: {name: prod-external-ip-pool}
spec:
  ipRanges: [{start: 10.10.0.2, end: 10.10.0.10}, {cidr: 10.10.1.0/28}]
  subnetInfo: {gateway: 10.10.0.1, prefixLength: 16, vlan: 10}
  nodeSelector: {matchLabels: {network-role: egress-gateway}}
---
apiVersion: crd.antrea.io/v1alpha2
kind: Egress
metadata: {name: egress-prod-web, uid: u, resourceVersion: '7', labels: {team: a}}
spec:
  appliedTo:
    namespaceSelector: {matchLabels: {env: prod}}
    podSelector: {matchLabels: {role: web}}
  egressIP: 10.10.0.8
  externalIPPool: prod-external-ip-pool
  bandwidth: {rate: 800M, burst: 2G}
status: {egressNode: node1}
---
apiVersion: crd.antrea.io/v1beta1
kind: Egress
metadata: {name: egress-staging-web}
spec:
  appliedTo: {podSelector: {matchLabels: {role: web}}}
  egressIP: 10.10.0.11
---
apiVersion: v1
kind: Namespace
metadata: {name: prod}
";

#[test]
fn antrea_objects_stay_what_they_are() {
    let migration = migrate(&objects(ANTREA), EgressSystem::Antrea, MigrationTarget::Here);
    assert_eq!(migration.others, [("Namespace".to_owned(), 1)].into());
    let found = &migration.objects;
    let web = &found[0].becomes[0];
    assert_eq!(
        (&web["apiVersion"], &web["metadata"]),
        (&json!("crd.antrea.io/v1beta1"), &json!({"name": "egress-prod-web", "labels": {"team": "a"}}))
    );
    assert!(web["status"].is_null() && web["spec"]["egressIP"] == "10.10.0.8", "{web}");
    assert!(found[0].notes.is_empty() && web["spec"]["bandwidth"]["rate"] == "800M", "{web}");
    let counts: Vec<_> = outcome(found).into_iter().map(|(from, specs, ..)| (from, specs.len())).collect();
    let names = ["Egress egress-prod-web", "Egress egress-staging-web", "ExternalIPPool prod-external-ip-pool"];
    assert_eq!(counts, names.map(|name| (name.to_owned(), 1)));
    assert!(matches!(&found[1].notes[..], [Changes(why)] if why.contains("the ports of the node's address")));
    assert!(found[2].notes.is_empty() && found[2].becomes[0]["spec"]["subnetInfo"]["vlan"] == 10);
}

#[test]
fn an_egress_becomes_an_egress_ip() {
    let found = migrated(ANTREA, EgressSystem::Antrea, MigrationTarget::System(EgressSystem::OvnKubernetes));
    let web = json!({
        "egressIPs": ["10.10.0.8"], "namespaceSelector": {"matchLabels": {"env": "prod"}},
        "podSelector": {"matchLabels": {"role": "web"}},
    });
    let staging = json!({
        "egressIPs": ["10.10.0.11"], "namespaceSelector": {}, "podSelector": {"matchLabels": {"role": "web"}},
    });
    let expected = [
        ("Egress egress-prod-web".to_owned(), vec![web], 1, 2),
        ("Egress egress-staging-web".to_owned(), vec![staging], 1, 0),
    ];
    assert_eq!(outcome(&found), expected);
    let texts: Vec<String> = found[0].notes.iter().map(ToString::to_string).collect();
    assert_eq!(texts[0], "loses: spec.bandwidth: not limited");
    assert!(texts[1].contains("the VLAN of ExternalIPPool prod-external-ip-pool"), "{}", texts[1]);
    assert!(
        texts[2].contains(r#"those that {"matchLabels":{"network-role":"egress-gateway"}} selects"#),
        "{}",
        texts[2]
    );
    assert_eq!(
        found[1].notes[0].to_string(),
        "changes: 10.10.0.11: take it from the interface of the node, an EgressIP is on none"
    );
    // An address that the pool has not given yet, and no pods.
    let text = "{apiVersion: crd.antrea.io/v1beta1, kind: Egress, metadata: {name: a}, spec: {appliedTo: {podSelector: {}}, externalIPPool: p}}";
    let waiting = migrated(text, EgressSystem::Antrea, MigrationTarget::System(EgressSystem::OvnKubernetes));
    assert!(waiting[0].loses() && waiting[0].becomes.is_empty(), "{waiting:?}");
    let text = "{apiVersion: crd.antrea.io/v1beta1, kind: Egress, metadata: {name: a}, spec: {appliedTo: {}, egressIP: 10.0.0.1}}";
    let nothing = migrated(text, EgressSystem::Antrea, MigrationTarget::System(EgressSystem::Cilium));
    assert_eq!(nothing[0].notes, [Loses("it selects no pods, so it becomes nothing".into())]);
    let text = text.replace("egressIP: 10.0.0.1", "egressIP: 10.0.0.1, bandwidth: {rate: 1M, burst: 1M}");
    let nothing = migrated(&text, EgressSystem::Antrea, MigrationTarget::System(EgressSystem::Cilium));
    assert_eq!(nothing[0].notes.len(), 2, "{nothing:?}");
    // Two pools whose nodes one gateway cannot select.
    let text = "
{apiVersion: crd.antrea.io/v1beta1, kind: ExternalIPPool, metadata: {name: p}, spec: {ipRanges: [], nodeSelector: {matchLabels: {a: b}}}}
---
{apiVersion: crd.antrea.io/v1beta1, kind: ExternalIPPool, metadata: {name: q}, spec: {ipRanges: [], nodeSelector: {matchLabels: {c: d}}}}
---
{apiVersion: crd.antrea.io/v1beta1, kind: Egress, metadata: {name: a}, spec: {appliedTo: {podSelector: {}}, egressIPs: [10.0.0.1, 10.0.0.2], externalIPPools: [p, q]}}
";
    let two = migrated(text, EgressSystem::Antrea, MigrationTarget::System(EgressSystem::Cilium));
    assert_eq!(two[0].becomes[0]["spec"]["egressGateways"].as_array().map(Vec::len), Some(2));
    assert!(
        two[0].notes.contains(&Loses(r#"nodes: those that {"matchLabels":{"c":"d"}} selects too"#.into())),
        "{two:?}"
    );
}

const CILIUM: &str = "
apiVersion: cilium.io/v2
kind: CiliumEgressGatewayPolicy
metadata: {name: egress-sample}
spec:
  selectors:
  - podSelector:
      matchLabels: {org: empire, class: mediabot, io.kubernetes.pod.namespace: default}
  destinationCIDRs: [0.0.0.0/0]
  egressGateway:
    nodeSelector: {matchLabels: {node.kubernetes.io/name: node1}}
    egressIP: 10.168.60.100
---
apiVersion: cilium.io/v2
kind: CiliumEgressGatewayPolicy
metadata: {name: egress-several}
spec:
  selectors:
  - namespaceSelector: {matchExpressions: [{key: team, operator: Exists}]}
    podSelector: {}
    nodeSelector: {matchLabels: {zone: a}}
  destinationCIDRs: [192.168.0.0/16]
  excludedCIDRs: [192.168.7.0/24]
  egressGateway: {nodeSelector: {}}
  egressGateways:
  - {nodeSelector: {matchLabels: {zone: a}}, interface: eth1}
  - {nodeSelector: {matchLabels: {zone: b}}}
---
apiVersion: cilium.io/v2
kind: CiliumEgressGatewayPolicy
metadata: {name: egress-service-account}
spec:
  selectors: [{podSelector: {matchLabels: {io.cilium.k8s.policy.serviceaccount: web}}}]
  destinationCIDRs: [0.0.0.0/0]
  egressGateway: {nodeSelector: {}}
";

#[test]
fn cilium_policies_stay_or_lose_their_destinations() {
    let here = migrated(CILIUM, EgressSystem::Cilium, MigrationTarget::Here);
    assert!(here.iter().map(|one| one.becomes.len()).eq([1, 1, 1]), "{here:?}");
    assert!(here.iter().map(Migrated::loses).eq([false, true, false]), "the label of a service account: {here:?}");
    let found = migrated(CILIUM, EgressSystem::Cilium, MigrationTarget::System(EgressSystem::OvnKubernetes));
    let (sample, account, several) = (&found[0], &found[1], &found[2]);
    let spec = json!({
        "egressIPs": ["10.168.60.100"],
        "namespaceSelector": {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["default"]}]},
        "podSelector": {"matchLabels": {"class": "mediabot", "org": "empire"}},
    });
    assert_eq!((&sample.becomes[0]["spec"], sample.notes.len(), sample.loses()), (&spec, 2, false));
    assert!(account.becomes.is_empty() && several.becomes.is_empty() && several.loses(), "{found:?}");
    let found = migrated(CILIUM, EgressSystem::Cilium, MigrationTarget::System(EgressSystem::Antrea));
    let spec = &found[0].becomes[0]["spec"];
    assert_eq!((&spec["egressIP"], spec["externalIPPool"].is_null()), (&json!("10.168.60.100"), true), "a node has it");
    // There and back.
    let back = migrate(&objects(CILIUM)[..1], EgressSystem::Cilium, MigrationTarget::System(EgressSystem::Cilium));
    assert_eq!(back.objects[0].becomes[0]["spec"], objects(CILIUM)[0].data["spec"]);
}

const OPENSHIFT: &str = "
{apiVersion: network.openshift.io/v1, kind: NetNamespace, metadata: {name: project1}, netname: project1, netid: 7, egressIPs: [192.168.1.100, 192.168.1.101]}
---
{apiVersion: network.openshift.io/v1, kind: NetNamespace, metadata: {name: project2}, netname: project2, netid: 8}
---
{apiVersion: network.openshift.io/v1, kind: HostSubnet, metadata: {name: node1}, host: node1, hostIP: 10.0.0.1, subnet: 10.128.0.0/23, egressCIDRs: [192.168.1.0/24]}
---
{apiVersion: network.openshift.io/v1, kind: HostSubnet, metadata: {name: node2}, host: node2, hostIP: 10.0.0.2, subnet: 10.130.0.0/23}
";

#[test]
fn projects_of_openshift_sdn_become_egress_ips_and_labels_of_nodes() {
    let found = migrated(OPENSHIFT, EgressSystem::OpenShiftSdn, MigrationTarget::Here);
    assert_eq!(found.len(), 2, "others ask for nothing: {found:?}");
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1", "labels": {"k8s.ovn.org/egress-assignable": ""}}});
    assert_eq!((found[0].from.as_str(), &found[0].becomes[..]), ("HostSubnet node1", &[node][..]));
    let spec = json!({
        "egressIPs": ["192.168.1.100", "192.168.1.101"],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "project1"}},
    });
    assert_eq!((&found[1].becomes[0]["spec"], found[1].loses()), (&spec, false));
}

const OVN: &str = "
apiVersion: k8s.ovn.org/v1
kind: EgressIP
metadata: {name: egressip-prod, annotations: {k8s.ovn.org/egressip-mark: '50000'}}
spec:
  egressIPs: [172.18.0.33, 172.18.0.44, 'fd00::33']
  namespaceSelector: {matchExpressions: [{key: environment, operator: NotIn, values: [development]}]}
  podSelector: {matchLabels: {app: web}}
status: {items: []}
---
apiVersion: k8s.ovn.org/v1
kind: EgressService
metadata: {name: front, namespace: shop}
spec: {sourceIPBy: LoadBalancerIP}
";

#[test]
fn egress_ips_stay_and_become_those_of_others() {
    let here = migrated(OVN, EgressSystem::OvnKubernetes, MigrationTarget::Here);
    assert!(here.iter().all(|one| one.notes.is_empty() && one.becomes.len() == 1), "{here:?}");
    assert_eq!(here[0].becomes[0]["metadata"], json!({"name": "egressip-prod"}));
    assert_eq!(here[1].becomes[0]["metadata"]["namespace"], "shop");
    let antrea = migrated(OVN, EgressSystem::OvnKubernetes, MigrationTarget::System(EgressSystem::Antrea));
    let kinds: Vec<&str> = antrea[0].becomes.iter().filter_map(|object| object["kind"].as_str()).collect();
    assert_eq!((kinds, antrea[0].loses()), (vec!["ExternalIPPool", "Egress"], true), "one address of three");
    assert_eq!(antrea[0].becomes[0]["spec"]["ipRanges"], json!([{"start": "172.18.0.33", "end": "172.18.0.33"}]));
    assert_eq!(antrea[0].becomes[1]["spec"]["externalIPPool"], "egressip-prod");
    let cilium = migrated(OVN, EgressSystem::OvnKubernetes, MigrationTarget::System(EgressSystem::Cilium));
    let [v4, v6] = &cilium[0].becomes[..] else { panic!("{cilium:?}") };
    assert_eq!(
        (&v4["metadata"]["name"], &v6["metadata"]["name"]),
        (&json!("egressip-prod"), &json!("egressip-prod-v6"))
    );
    assert_eq!(v4["spec"]["egressGateways"].as_array().map(Vec::len), Some(2));
    assert_eq!((&v6["spec"]["destinationCIDRs"], v6["spec"].get("egressGateways")), (&json!(["::/0"]), None));
    assert_eq!(cilium[0].notes.len(), 4, "{cilium:?}");
    // What is made can be read, and read back it is the same.
    for policy in [v4, v6] {
        let object: DynamicObject = serde_json::from_value(policy.clone()).expect("an object");
        let read = crate::cilium::policy(&object).object.spec.expect("readable");
        assert_eq!(read.families.len(), 1);
        let back = migrate(&[object], EgressSystem::Cilium, MigrationTarget::System(EgressSystem::OvnKubernetes));
        let spec = &back.objects[0].becomes[0]["spec"];
        assert_eq!(spec["namespaceSelector"]["matchExpressions"][0]["values"], json!(["development"]));
    }
}

/// What is converted to a kind that is served here passes its definition.
#[test]
fn what_is_made_is_of_the_defined_types() {
    let all = [
        (ANTREA, EgressSystem::Antrea),
        (CILIUM, EgressSystem::Cilium),
        (OPENSHIFT, EgressSystem::OpenShiftSdn),
        (OVN, EgressSystem::OvnKubernetes),
    ];
    let targets = [
        MigrationTarget::Here,
        MigrationTarget::System(EgressSystem::Antrea),
        MigrationTarget::System(EgressSystem::Cilium),
        MigrationTarget::System(EgressSystem::OvnKubernetes),
    ];
    let mut made = 0;
    for ((text, from), to) in all.into_iter().flat_map(|from| targets.map(|to| (from, to))) {
        for object in migrated(text, from, to).into_iter().flat_map(|one| one.becomes) {
            let spec = object["spec"].clone();
            let read = match object["kind"].as_str().expect("a kind") {
                "EgressIP" => serde_json::from_value::<crate::crd::EgressIPSpec>(spec).err(),
                "EgressService" => serde_json::from_value::<crate::crd::EgressServiceSpec>(spec).err(),
                "Egress" => serde_json::from_value::<crate::antrea::crd::EgressSpec>(spec).err(),
                "ExternalIPPool" => serde_json::from_value::<crate::antrea::crd::ExternalIPPoolSpec>(spec).err(),
                "CiliumEgressGatewayPolicy" => {
                    serde_json::from_value::<crate::cilium::crd::CiliumEgressGatewayPolicySpec>(spec).err()
                }
                "Node" => None,
                other => panic!("{other}"),
            };
            assert!(read.is_none(), "{from} to {to:?}: {object}: {read:?}");
            made += 1;
        }
    }
    assert!(made > 20, "{made}");
}
