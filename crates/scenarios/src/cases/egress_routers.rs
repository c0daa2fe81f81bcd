//! OpenShift's EgressRouters: the controller makes the objects of each, says what has become of it, and leaves alone what is not its
//! own. Nothing here runs the Deployments; what their controller would say is written in its place.

use crate::prelude::*;
use egress_lab::cni_runtime;

const ROUTERS: &str = "/apis/network.operator.openshift.io/v1/namespaces/shop/egressrouters";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/shop/deployments";
const ATTACHMENTS: &str = "/apis/k8s.cni.cncf.io/v1/namespaces/shop/network-attachment-definitions";
const SERVICES: &str = "/api/v1/namespaces/shop/services";
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const IMAGE: &str = "registry.example/egress-agent:7";

pub(super) fn tests() -> Vec<LabTest> {
    let test = |name, run| LabTest::new(name, Duration::from_secs(120), run);
    vec![
        test("egress_router_objects_become_pods_with_status", objects_and_status),
        test("egress_router_reads_its_addresses_from_a_config_map", config_map),
    ]
}

struct RouterLab {
    cluster: TestCluster,
}

impl RouterLab {
    fn start(context: &LabContext) -> Result<Self> {
        let pods = vec![pod("one", "shop", 1, &[])];
        let mut cluster = TestCluster::without_agents(context, pods)?;
        // As Multus installs it.
        let names = json!({
            "kind": "NetworkAttachmentDefinition", "plural": "network-attachment-definitions",
            "singular": "network-attachment-definition", "listKind": "NetworkAttachmentDefinitionList",
        });
        let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "network-attachment-definitions.k8s.cni.cncf.io"},
            "spec": {
                "group": "k8s.cni.cncf.io", "scope": "Namespaced", "names": names,
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema}],
            },
        });
        cluster.api.create(DEFINITIONS, &definition)?;
        cluster.start_agents(&cluster.options(context).with(["--egress-router-image", IMAGE]))?;
        Ok(Self { cluster })
    }

    fn create(&self, name: &str, spec: &Value) -> Result<()> {
        let object = json!({
            "apiVersion": "network.operator.openshift.io/v1", "kind": "EgressRouter",
            "metadata": {"name": name, "namespace": "shop"}, "spec": spec,
        });
        self.cluster.api.create(ROUTERS, &object).map(drop)
    }

    /// Waits until the condition is true for this reason; its message.
    fn says(&self, name: &str, kind: &str, reason: &str) -> Result<String> {
        until(&format!("{name} is {kind} for {reason}"), EFFECT, || {
            let object = self.cluster.api.get(&format!("{ROUTERS}/{name}"))?.unwrap_or_default();
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let found = conditions.iter().find(|one| one["type"] == kind && one["status"] == "True");
            let found = found.filter(|one| one["reason"] == reason);
            Ok(found.map(|one| one["message"].as_str().unwrap_or_default().to_owned()))
        })
    }

    fn exists(&self, collection: &str, name: &str) -> Result<Value> {
        until(&format!("{collection}/{name} is there"), EFFECT, || {
            self.cluster.api.get(&format!("{collection}/{name}"))
        })
    }

    /// The configuration of its attachment.
    fn configuration(&self, name: &str) -> Result<Value> {
        let attachment = self.exists(ATTACHMENTS, name)?;
        Ok(serde_json::from_str(attachment["spec"]["config"].as_str().context("a configuration")?)?)
    }

    /// As the deployment controller says it.
    fn set_available(&self, name: &str, count: u32) -> Result<()> {
        let generation = self.exists(DEPLOYMENTS, name)?["metadata"]["generation"].clone();
        let counts = json!({"replicas": count, "readyReplicas": count, "availableReplicas": count});
        let mut status = json!({"status": counts});
        status["status"]["observedGeneration"] = generation;
        self.cluster.api.patch_status(&format!("{DEPLOYMENTS}/{name}"), &status)
    }
}

fn spec(address: &str, more: &Value) -> Value {
    let mut spec = json!({
        "mode": "Redirect",
        "addresses": [{"ip": address, "gateway": "192.168.12.1"}],
        "redirect": {"redirectRules": [
            {"destinationIP": "203.0.113.25", "port": 80, "protocol": "TCP"},
            {"destinationIP": "203.0.113.26", "port": 8080, "protocol": "UDP", "targetPort": 80},
        ]},
    });
    if let (Some(spec), Some(more)) = (spec.as_object_mut(), more.as_object()) {
        spec.extend(more.clone());
    }
    spec
}

fn objects_and_status(context: &LabContext) -> Result<()> {
    let mut lab = RouterLab::start(context)?;
    let interface = json!({"networkInterface": {"macvlan": {"mode": "VEPA", "master": "eno2"}}});
    lab.create("web", &spec("192.168.12.99/24", &interface))?;
    lab.says("web", "Progressing", "Waiting")?;
    let uid = lab.exists(ROUTERS, "web")?["metadata"]["uid"].clone();
    let deployment = lab.exists(DEPLOYMENTS, "web")?;
    for object in [&deployment, &lab.exists(ATTACHMENTS, "web")?, &lab.exists(SERVICES, "web")?] {
        let owners = &object["metadata"]["ownerReferences"];
        ensure!(owners[0]["uid"] == uid && owners[0]["controller"] == true, "{object}");
    }
    ensure!(deployment["spec"]["strategy"]["type"] == "Recreate", "{deployment}");
    let pod = &deployment["spec"]["template"];
    ensure!(pod["spec"]["containers"][0]["image"] == IMAGE, "{pod}");
    ensure!(pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "web", "{pod}");
    let configuration = lab.configuration("web")?;
    ensure!(configuration["interfaceArgs"] == json!({"mode": "vepa", "master": "eno2"}), "{configuration}");
    let redirects = json!(["80 tcp 203.0.113.25", "8080 udp 203.0.113.26 80"]);
    ensure!(configuration["ip"]["redirect"] == redirects, "{configuration}");
    lab.set_available("web", 1)?;
    lab.says("web", "Available", "AsExpected")?;

    // A bad one degrades itself alone, and another one of the namespace has objects of its own.
    let bad = json!({"addresses": [{"ip": "192.168.12.98/24", "gateway": "10.0.0.300"}]});
    lab.create("bad", &spec("", &bad))?;
    let why = lab.says("bad", "Degraded", "InvalidSpec")?;
    ensure!(why.contains("10.0.0.300"), "{why}");
    let fallback = json!({"redirect": {"fallbackIP": "203.0.113.27"}});
    lab.create("second", &spec("192.168.12.97/24", &fallback))?;
    ensure!(lab.configuration("second")?["ip"]["fallbackIP"] == "203.0.113.27", "the fallback is lost");
    lab.says("second", "Progressing", "Waiting")?;
    ensure!(lab.cluster.api.get(&format!("{SERVICES}/second"))?.is_none(), "a Service without ports");
    lab.says("web", "Available", "AsExpected")?;
    lab.cluster.api.merge(&format!("{ROUTERS}/bad"), &json!({"spec": {"addresses": [{"ip": "192.168.12.98/24"}]}}))?;
    lab.says("bad", "Progressing", "Waiting")?;

    lab.create("web.shop", &spec("192.168.12.95/24", &json!({})))?;
    let why = lab.says("web.shop", "Degraded", "InvalidSpec")?;
    ensure!(why.contains("metadata.name"), "{why}");

    // What is another one's stays as it is.
    let taken = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken", "namespace": "shop"},
        "spec": {"ports": [{"name": "a", "port": 1}], "clusterIP": "None"},
    });
    lab.cluster.api.create(SERVICES, &taken)?;
    lab.create("taken", &spec("192.168.12.96/24", &json!({})))?;
    let why = lab.says("taken", "Degraded", "NameTaken")?;
    ensure!(why.contains("Service"), "{why}");
    let service = lab.exists(SERVICES, "taken")?;
    ensure!(
        service["spec"]["ports"][0]["port"] == 1 && service["metadata"].get("ownerReferences").is_none(),
        "{service}"
    );

    // A change reaches the pods, and a Service without ports goes.
    let before = pod["metadata"]["annotations"].clone();
    lab.cluster.api.merge(
        &format!("{ROUTERS}/web"),
        &json!({"spec": {"redirect": {"redirectRules": null, "fallbackIP": "203.0.113.28"}}}),
    )?;
    until_true("the Service of web is gone", EFFECT, || {
        Ok(lab.cluster.api.get(&format!("{SERVICES}/web"))?.is_none())
    })?;
    until_true("the pods of web are replaced", EFFECT, || {
        Ok(lab.exists(DEPLOYMENTS, "web")?["spec"]["template"]["metadata"]["annotations"] != before)
    })?;
    lab.says("web", "Progressing", "Waiting")?;

    // A Deployment that is deleted comes back, also by the next leader.
    lab.cluster.api.delete(&format!("{DEPLOYMENTS}/web"))?;
    lab.exists(DEPLOYMENTS, "web")?;
    let (leader, _) = until("a controller leads", EFFECT, || lab.cluster.leader())?;
    lab.cluster.controller(leader.index() + 1)?.kill()?;
    lab.cluster.api.delete(&format!("{DEPLOYMENTS}/second"))?;
    until_true("the next leader makes it", Duration::from_secs(30), || {
        Ok(lab.cluster.api.get(&format!("{DEPLOYMENTS}/second"))?.is_some())
    })?;
    lab.cluster.api.delete(&format!("{ROUTERS}/second"))?;
    lab.cluster.tear_down()
}

/// With the rights that `deploy/egress-router/configmaps` grants, and no others.
fn config_map(context: &LabContext) -> Result<()> {
    let cluster = TestCluster::without_agents(context, vec![pod("web-1", "shop", 1, &[])])?;
    let folder = context.logs.join("net.d");
    std::fs::create_dir_all(&folder)?;
    let kubeconfig = folder.join("egress-router.kubeconfig");
    cluster.api.router_kubeconfig(&kubeconfig)?;
    let pods = json!({"web-*": {"addresses": ["172.18.0.170/16"]}, "*": {"addresses": ["172.18.0.171/16"]}});
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "routers", "namespace": "shop"},
        "data": {"podIP": pods.to_string()},
    });
    cluster.api.create("/api/v1/namespaces/shop/configmaps", &map)?;
    let (router, node) = (cluster.pod("web-1")?, &cluster.lab.node(node(1)?).host);
    let netns = router.netns.path().display().to_string();
    let call = |command: &str, name: &str, overrides: Value| -> Result<Value> {
        let variables = BTreeMap::from([
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", "web-1"),
            ("CNI_IFNAME", "net1"),
            ("CNI_NETNS", &netns),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1"),
        ]);
        let directory = folder.display().to_string();
        let variables = variables.into_iter().chain([("EGRESS_ROUTER_CONFIG_DIR", directory.as_str())]).collect();
        let config = json!({
            "cniVersion": "1.0.0", "name": "r", "type": "egress-router", "kubeconfig": kubeconfig,
            "clusterNetworks": [plan::CLUSTER_V4, plan::CLUSTER_V6],
            "ipConfig": {"name": name, "overrides": overrides},
        });
        let output = cni_runtime::call(node, &context.built.router, &variables, &config.to_string())?;
        let said = String::from_utf8_lossy(&output.stdout);
        println!("{command} {name}: {said}");
        if said.trim().is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_str(&said)?) }
    };
    let missing = call("ADD", "none", Value::Null)?;
    ensure!(missing["code"] == 11 && missing["msg"].as_str().is_some_and(|why| why.contains("shop/none")), "{missing}");
    let refused = call("ADD", "routers", json!({"addresses": ["172.18.0.180/16"]}))?;
    ensure!(refused["code"] == 7, "{refused}");
    let added = call("ADD", "routers", json!({"addresses": ["172.18.0.170/16"]}))?;
    ensure!(added["ips"][0]["address"] == "172.18.0.170/16", "{added}");
    let seen = Observed::Source(Ipv4Addr::new(172, 18, 0, 170).into());
    cluster.becomes(&router.netns, plan::SERVER.v4.into(), seen)?;
    call("DEL", "routers", Value::Null)?;
    cluster.tear_down()
}
