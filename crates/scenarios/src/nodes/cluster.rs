//! Two real nodes on a lab's network, and what an administrator does with them.
//!
//! The lab (`Cni::Bridge`, no pods) brings switch, router, server, and each node's uplink, routes to the other's pods and
//! masquerade, as Flannel's host-gw would. The control plane and the administrator's shell run in the router `ext`; a node
//! (`node`) runs containerd, kubelet, kube-proxy, and pods by the CNI plugin `bridge`. Pods and mounts end with the node's first
//! process. Only its control group is in the lab's ledger besides.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::node::RealNode;
use super::pki;
use super::processes::{self, Processes};
use super::programs::{BOX, NodePrograms};
use super::shell::Shell;
use crate::prelude::*;
use egress_lab::Cni;
use egress_lab::topology::addresses::{EXT, SERVER};
use egress_lab::wait::until_equal;
use egress_toolchain::Progress;

/// As deploy/overlays/bridge-cni has it, and the address that Kubernetes gives to its own Service.
const SERVICES: &str = "10.96.0.0/12";
const FIRST_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Addresses of the server, one for each caller.
pub(super) const SERVER_ADDRESSES: u8 = 60;
/// How long Kubernetes itself may take for something on a busy machine; no document publishes a bound.
pub(super) const KUBERNETES: Duration = Duration::from_secs(180);

/// The cluster. Fields are dropped in this order: nodes first, the network last.
pub(super) struct RealCluster {
    nodes: Vec<RealNode>,
    _control_plane: Processes,
    pub(super) server: Server,
    pub(super) shell: Shell,
    folder: PathBuf,
    pub(super) lab: Lab,
}

/// A pod that runs.
#[derive(Debug, Clone)]
pub(super) struct RealPod {
    pub(super) house: String,
    pub(super) name: String,
    pub(super) netns: Netns,
    /// What a pod that nothing selects is seen as.
    pub(super) node: IpAddr,
}

impl RealCluster {
    pub(super) fn start(programs: &NodePrograms, logs: &Path, progress: &Progress) -> Result<Self> {
        progress.step("nodes: network");
        let config = |_| HostConfig { cni: Cni::Bridge, service_proxy: false, ..HostConfig::default() };
        let lab = LabBuilder::default().nodes(2).host_config(config).keep_logs(logs.to_owned()).start()?;
        let server = Server::outside_with_addresses(&lab, SERVER_ADDRESSES)?;
        let folder = lab.folder().join("nodes");
        fs::create_dir_all(&folder)?;
        pki::write(&folder, EXT.v4.into(), FIRST_SERVICE.into())?;
        let age = fs::metadata(&programs.image)?.modified()?.elapsed().unwrap_or_default().as_secs() / 60;
        progress.step(&format!("nodes: images; the agent's is {age} minutes old"));
        programs.lay_out_images(&folder)?;
        let shell = Shell::new(&lab, programs, &folder)?;
        progress.step("nodes: control plane");
        let control_plane = control_plane(&lab, &shell, programs, &folder)?;
        let mut cluster = Self { nodes: Vec::new(), _control_plane: control_plane, server, shell, folder, lab };
        for node in cluster.lab.nodes() {
            // The kubelet finds its Node, with the subnet that the lab's routes lead to.
            let subnet = node.number.pod_subnet_v4();
            let metadata = json!({"name": node.name()});
            let spec = json!({"podCIDR": subnet, "podCIDRs": [subnet]});
            cluster.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec}))?;
        }
        progress.step("nodes: container runtime, kubelet and kube-proxy of node1 and node2");
        let nodes =
            cluster.lab.nodes().iter().map(|node| RealNode::start(&cluster.lab, node, programs, &cluster.folder));
        cluster.nodes = nodes.collect::<Result<_>>()?;
        cluster.nodes_are_ready()?;
        Ok(cluster)
    }

    pub(super) fn nodes_are_ready(&mut self) -> Result<()> {
        until_true("both nodes are Ready", KUBERNETES, || {
            self.nodes.iter_mut().try_for_each(RealNode::ensure_alive)?;
            let nodes = self.list(&["nodes"])?;
            Ok(nodes.iter().all(|node| condition(node, "Ready") == Some("True")))
        })
    }

    pub(super) fn node(&self, name: &str) -> Result<&RealNode> {
        self.nodes.iter().find(|node| node.lab.name() == name).with_context(|| format!("there is no node {name}"))
    }

    pub(super) fn tear_down(self) -> Result<()> {
        let Self { nodes, _control_plane: control_plane, server, lab, .. } = self;
        drop((nodes, control_plane, server));
        lab.tear_down()
    }

    pub(super) fn nodes(&self) -> &[RealNode] {
        &self.nodes
    }

    /// Switches a node off or on, as its mains switch would.
    pub(super) fn set_power(&mut self, name: &str, on: bool) -> Result<()> {
        let node = self.nodes.iter_mut().find(|node| node.lab.name() == name);
        let node = node.with_context(|| format!("there is no node {name}"))?;
        if on { node.power_on(&self.lab) } else { node.power_off(&self.lab) }
    }

    /// What kubectl prints, where it succeeds.
    pub(super) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.shell.exec("kubectl", arguments)
    }

    /// A line that an administrator types (`Shell::types`); its output is shown.
    pub(super) fn types(&self, line: &str) -> Result<String> {
        self.shell.types(line, &[])
    }

    pub(super) fn get(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.kubectl(&[&["get", "--output=json"], arguments].concat())?;
        serde_json::from_str(&text).context("kubectl prints no JSON")
    }

    pub(super) fn list(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        Ok(self.get(arguments)?["items"].as_array().cloned().unwrap_or_default())
    }

    pub(super) fn apply(&self, object: &Value) -> Result<()> {
        let file = self.folder.join("applied.json");
        fs::write(&file, object.to_string())?;
        self.kubectl(&["apply", "-f", &file.display().to_string()]).map(drop)
    }

    /// A namespace with a label like its name, in which pods can be made.
    pub(super) fn add_house(&self, house: &str) -> Result<()> {
        let metadata = json!({"name": house, "labels": {"house": house}});
        self.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))?;
        // No pod is admitted before the controller manager has made it.
        until(&format!("the service account of {house}"), KUBERNETES, || {
            Ok(self.get(&["--namespace", house, "serviceaccount", "default"]).ok())
        })
        .map(drop)
    }

    /// Pods, each with its name and its node, that sleep or run this script once.
    pub(super) fn add_pods(&self, house: &str, pods: &[(String, &str, Option<String>)]) -> Result<()> {
        let pods = pods.iter().map(|(name, node, script)| {
            let label = if script.is_some() { json!({"made-for": "tests"}) } else { json!({}) };
            let mut container = json!({"name": "box", "image": BOX, "imagePullPolicy": "Never"});
            if let Some(script) = script {
                container["command"] = json!(["/bin/sh", "-c", script]);
            }
            // Without a script it stays, also when its node boots.
            let policy = if script.is_some() { "Never" } else { "Always" };
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": house, "labels": label},
                "spec": {
                    "nodeName": node, "restartPolicy": policy, "terminationGracePeriodSeconds": 0,
                    "automountServiceAccountToken": false, "enableServiceLinks": false, "containers": [container],
                },
            })
        });
        self.apply(&json!({"apiVersion": "v1", "kind": "List", "items": pods.collect::<Vec<_>>()}))
    }

    /// A pod of [`add_pods`](Self::add_pods) once it runs.
    pub(super) fn pod(&self, house: &str, name: &str) -> Result<RealPod> {
        let (pod, pid) = until(&format!("pod {name} runs"), KUBERNETES, || {
            let pod = self.get(&["--namespace", house, "pod", name])?;
            let is_ready = condition(&pod, "Ready") == Some("True");
            // What the API server says of a node that has just been off may be of the time before.
            let pid = if is_ready { self.process_of(&pod)? } else { None };
            Ok(pid.map(|pid| (pod, pid)))
        })?;
        let node = self.node(pod["spec"]["nodeName"].as_str().unwrap_or_default())?;
        let netns = Netns::of_process(self.lab.prefix(), pid);
        let (house, name) = (house.to_owned(), name.to_owned());
        Ok(RealPod { house, name, netns, node: node.lab.number.address().v4.into() })
    }

    /// One of a pod's processes, in the pod's network.
    fn process_of(&self, pod: &Value) -> Result<Option<u32>> {
        let uid = pod["metadata"]["uid"].as_str().context("a pod without UID")?;
        // The kubelet's name for the control group of the pod, by either driver.
        let groups = [format!("pod{uid}"), format!("pod{}", uid.replace('-', "_"))];
        let is_its = |pid: &u32| {
            let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            groups.iter().any(|group| text.contains(group))
        };
        // The runtime's first process of a container enters its namespaces a moment later.
        let hosts =
            self.nodes.iter().map(|node| Ok(fs::metadata(node.lab.host.path())?.ino())).collect::<Result<Vec<_>>>()?;
        let is_inside =
            |pid: &u32| fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|netns| !hosts.contains(&netns.ino()));
        Ok(processes::all()?.into_iter().find(|pid| is_its(pid) && is_inside(pid)))
    }

    /// Waits until the server outside sees the pod's requests come from this address.
    pub(super) fn is_seen_as(&self, pod: &RealPod, address: IpAddr) -> Result<()> {
        until_equal(&pod.name, &Observed::Source(address), || observe(&pod.netns, SERVER.v4.into()))
    }

    /// The node that an address of this object has, by its status.
    pub(super) fn server_of(&self, object: &str, address: IpAddr) -> Result<Option<String>> {
        let pairs = assigned(&self.get(&["egressip", object])?);
        Ok(pairs.into_iter().find(|(ip, _)| *ip == address.to_string()).map(|(_, node)| node))
    }

    /// The agent's pod on a node.
    pub(super) fn agent_pod(&self, node: &str) -> Result<Value> {
        let on = format!("spec.nodeName={node}");
        let of =
            ["--namespace=egress-agent", "pods", "--selector=app.kubernetes.io/component=agent", "--field-selector"];
        let mut pods = self.list(&[&of[..], &[&on]].concat())?;
        pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        pods.pop().with_context(|| format!("no agent on {node}"))
    }

    /// Waits for an event about an object and returns its message.
    pub(super) fn event(&self, object: &str, reason: &str, patience: Duration) -> Result<String> {
        until(&format!("event {reason} about {object}"), patience, || {
            let events = self.list(&["--all-namespaces", "events"])?;
            let ours = |event: &&Value| event["involvedObject"]["name"] == object && event["reason"] == reason;
            Ok(events.iter().find(ours).and_then(|event| event["message"].as_str()).map(str::to_owned))
        })
    }
}

/// The status of a condition.
pub(super) fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    let conditions = object.pointer("/status/conditions")?.as_array()?;
    conditions.iter().find(|one| one["type"] == kind)?["status"].as_str()
}

fn control_plane(lab: &Lab, shell: &Shell, programs: &NodePrograms, folder: &Path) -> Result<Processes> {
    let mut processes = Processes::default();
    let file = |name: &str| folder.join(name).display().to_string();
    let mut spawn = |name: &str, arguments: Vec<String>| {
        let log = lab.logs().join(format!("{name}.log"));
        processes.spawn(lab.ext(), log, &programs.assets.join(name), &arguments, &[]).map(drop)
    };
    spawn("etcd", egress_lab::kube_api::etcd_arguments(folder, 2379, 2380))?;
    let mut server = vec![
        "--etcd-servers=http://127.0.0.1:2379".to_owned(),
        format!("--advertise-address={}", EXT.v4),
        format!("--service-cluster-ip-range={SERVICES}"),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged=true".to_owned(),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
    ];
    server.extend(
        [
            ("tls-cert-file", "apiserver.crt"),
            ("tls-private-key-file", "apiserver.key"),
            ("token-auth-file", "tokens.csv"),
            ("service-account-key-file", "sa.pub"),
            ("service-account-signing-key-file", "sa.key"),
            ("kubelet-client-certificate", "kubelet-client.crt"),
            ("kubelet-client-key", "kubelet-client.key"),
        ]
        .map(|(flag, name)| format!("--{flag}={}", file(name))),
    );
    spawn("kube-apiserver", server)?;
    let controllers = [
        format!("--kubeconfig={}", file("controller-manager.kubeconfig")),
        format!("--root-ca-file={}", file("ca.crt")),
        format!("--service-account-private-key-file={}", file("sa.key")),
    ];
    let scheduler = [format!("--kubeconfig={}", file("scheduler.kubeconfig"))];
    let common = ["--leader-elect=false", "--bind-address=127.0.0.1"].map(str::to_owned);
    until("kube-apiserver is ready", KUBERNETES, || Ok(shell.exec("kubectl", &["get", "--raw", "/readyz"]).ok()))?;
    let accounts = "--use-service-account-credentials".to_owned();
    spawn("kube-controller-manager", [&controllers[..], &common, &[accounts]].concat())?;
    spawn("kube-scheduler", [&scheduler[..], &common].concat())?;
    processes.ensure_alive()?;
    Ok(processes)
}
