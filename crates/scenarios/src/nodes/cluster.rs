//! Two real nodes on a lab's network, and what an administrator does with them.
//!
//! The lab (`Cni::Bridge`, no pods) brings switch, router, server, and each node's uplink, routes to the other's pods and
//! masquerade, as Flannel's host-gw would. The control plane and kubectl run in the router `ext`; a node runs containerd,
//! kubelet, kube-proxy, and pods by the CNI plugin `bridge`. A node is one process (node.sh) in namespaces of its own: pods and
//! mounts end with it. Only its control group is in the lab's ledger besides.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};

use super::pki;
use super::programs::{BOX, NodePrograms};
use crate::prelude::*;
use egress_lab::Cni;
use egress_lab::process::last_lines;
use egress_lab::topology::addresses::{EXT, SERVER};
use egress_lab::wait::until_equal;
use egress_toolchain::{Built, Paths, Progress};

/// As deploy/overlays/bridge-cni has it, and the address that Kubernetes gives to its own Service.
const SERVICES: &str = "10.96.0.0/12";
const FIRST_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Addresses of the server, one for each caller.
pub(super) const SERVER_ADDRESSES: u8 = 60;
/// How long Kubernetes itself may take for something on a busy machine; no document publishes a bound.
pub(super) const KUBERNETES: Duration = Duration::from_secs(180);
/// The node.sh of each node.
const SCRIPT: &str = include_str!("node.sh");

/// The cluster. Fields are dropped in this order: nodes first, the network last.
pub(super) struct RealCluster {
    nodes: Vec<RealNode>,
    _control_plane: Processes,
    pub(super) server: Server,
    kubectl: PathBuf,
    folder: PathBuf,
    pub(super) root: PathBuf,
    pub(super) lab: Lab,
}

/// A node that is up.
pub(super) struct RealNode {
    /// The lab's, with the BPF file system that the node has mounted.
    pub(super) lab: LabNode,
    /// Of its first process, seen from the machine.
    init: u32,
    _processes: Processes,
}

/// A pod that runs.
#[derive(Debug, Clone)]
pub(super) struct RealPod {
    pub(super) name: String,
    pub(super) netns: Netns,
    /// What a pod that nothing selects is seen as.
    pub(super) node: IpAddr,
}

/// Programs that run until this is dropped, the last one first.
#[derive(Default)]
struct Processes(Vec<(Child, PathBuf)>);

impl Processes {
    fn spawn(
        &mut self,
        netns: &Netns,
        log: PathBuf,
        program: &Path,
        arguments: &[String],
        env: &[(&str, &str)],
    ) -> Result<u32> {
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = netns.command(&program.display().to_string());
        command
            .args(arguments)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let child = netns.run(|| command.spawn().with_context(|| format!("start {}", program.display())))?;
        let pid = child.id();
        self.0.push((child, log));
        Ok(pid)
    }

    fn ensure_alive(&mut self) -> Result<()> {
        for (child, log) in &mut self.0 {
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "{} has ended:\n{}", log.display(), last_lines(log, 15));
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, _) in self.0.iter_mut().rev() {
            if let Err(error) = child.kill().and_then(|()| child.wait()) {
                eprintln!("nodes: cannot end a process: {error}");
            }
        }
    }
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
        progress.step("nodes: control plane");
        let control_plane = control_plane(&lab, programs, &folder)?;
        let root = Paths::find()?.root;
        let kubectl = programs.kubectl.clone();
        let mut cluster = Self { nodes: Vec::new(), _control_plane: control_plane, server, kubectl, folder, root, lab };
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
        until_true("both nodes are Ready", KUBERNETES, || {
            cluster.nodes.iter_mut().try_for_each(|node| node._processes.ensure_alive())?;
            let nodes = cluster_get(&cluster.lab, &cluster.kubectl, &cluster.folder, &["nodes"])?;
            let nodes = nodes["items"].as_array().cloned().unwrap_or_default();
            Ok(nodes.iter().all(|node| condition(node, "Ready") == Some("True")))
        })?;
        Ok(cluster)
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

    /// What kubectl prints, where it succeeds.
    pub(super) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        kubectl(&self.lab, &self.kubectl, &self.folder, arguments)
    }

    /// The same for a line without quotes; paths are the repository's.
    pub(super) fn types(&self, line: &str) -> Result<String> {
        println!("$ kubectl {line}");
        let words = line.split(' ').map(|word| match word.strip_prefix("deploy/") {
            Some(path) => self.root.join("deploy").join(path).display().to_string(),
            None => word.to_owned(),
        });
        let words: Vec<String> = words.collect();
        self.kubectl(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// `egress-agent` as an administrator types it.
    pub(super) fn egress_agent(&self, arguments: &[&str]) -> Result<String> {
        println!("$ egress-agent {}", arguments.join(" "));
        let config = format!("--kubeconfig={}", self.folder.join("admin.kubeconfig").display());
        let program = Built::expected(&Paths::find()?, false).agent.display().to_string();
        self.lab.ext().exec(&program, &[arguments, &[config.as_str()]].concat())
    }

    pub(super) fn get(&self, arguments: &[&str]) -> Result<Value> {
        cluster_get(&self.lab, &self.kubectl, &self.folder, arguments)
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
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": house, "labels": label},
                "spec": {
                    "nodeName": node, "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
                    "automountServiceAccountToken": false, "enableServiceLinks": false, "containers": [container],
                },
            })
        });
        self.apply(&json!({"apiVersion": "v1", "kind": "List", "items": pods.collect::<Vec<_>>()}))
    }

    /// A pod of [`add_pods`](Self::add_pods) once it runs.
    pub(super) fn pod(&self, house: &str, name: &str) -> Result<RealPod> {
        let pod = until(&format!("pod {name} is Ready"), KUBERNETES, || {
            let pod = self.get(&["--namespace", house, "pod", name])?;
            Ok((condition(&pod, "Ready") == Some("True")).then_some(pod))
        })?;
        let uid = pod["metadata"]["uid"].as_str().context("a pod without UID")?;
        let node = self.node(pod["spec"]["nodeName"].as_str().unwrap_or_default())?;
        // The kubelet's name for the control group of the pod, by either driver.
        let groups = [format!("pod{uid}"), format!("pod{}", uid.replace('-', "_"))];
        let is_its = |pid: &u32| {
            let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            groups.iter().any(|group| text.contains(group))
        };
        let pid = processes()?.into_iter().find(is_its).with_context(|| format!("no process of pod {name}"))?;
        let netns = Netns::of_process(self.lab.prefix(), pid);
        Ok(RealPod { name: name.to_owned(), netns, node: node.lab.number.address().v4.into() })
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
        let pods = self.get(&[&of[..], &[&on]].concat())?;
        let mut pods = pods["items"].as_array().cloned().unwrap_or_default();
        pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        pods.pop().with_context(|| format!("no agent on {node}"))
    }

    /// Waits for an event about an object and returns its message.
    pub(super) fn event(&self, object: &str, reason: &str, patience: Duration) -> Result<String> {
        until(&format!("event {reason} about {object}"), patience, || {
            let events = self.get(&["--all-namespaces", "events"])?;
            let events = events["items"].as_array().cloned().unwrap_or_default();
            let ours = |event: &&Value| event["involvedObject"]["name"] == object && event["reason"] == reason;
            Ok(events.iter().find(ours).and_then(|event| event["message"].as_str()).map(str::to_owned))
        })
    }
}

fn kubectl(lab: &Lab, program: &Path, folder: &Path, arguments: &[&str]) -> Result<String> {
    let config = format!("--kubeconfig={}", folder.join("admin.kubeconfig").display());
    let cache = format!("--cache-dir={}", folder.join("cache").display());
    lab.ext().exec(&program.display().to_string(), &[&[config.as_str(), &cache], arguments].concat())
}

fn cluster_get(lab: &Lab, program: &Path, folder: &Path, arguments: &[&str]) -> Result<Value> {
    let text = kubectl(lab, program, folder, &[&["get", "--output=json"], arguments].concat())?;
    serde_json::from_str(&text).context("kubectl prints no JSON")
}

/// The status of a condition.
pub(super) fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    let conditions = object.pointer("/status/conditions")?.as_array()?;
    conditions.iter().find(|one| one["type"] == kind)?["status"].as_str()
}

pub(super) fn processes() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").context("read /proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

fn control_plane(lab: &Lab, programs: &NodePrograms, folder: &Path) -> Result<Processes> {
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
    until("kube-apiserver is ready", KUBERNETES, || {
        Ok(kubectl(lab, &programs.kubectl, folder, &["get", "--raw", "/readyz"]).ok())
    })?;
    let accounts = "--use-service-account-credentials".to_owned();
    spawn("kube-controller-manager", [&controllers[..], &common, &[accounts]].concat())?;
    spawn("kube-scheduler", [&scheduler[..], &common].concat())?;
    processes.ensure_alive()?;
    Ok(processes)
}

impl RealNode {
    fn start(lab: &Lab, node: &LabNode, programs: &NodePrograms, folder: &Path) -> Result<Self> {
        // The CNI makes it with the first pod.
        node.host.exec("ip", &["link", "del", node.management_port()])?;
        let cgroup = lab.add_cgroup(&node.name())?;
        let name = node.name();
        let logs = lab.logs().join(&name);
        fs::create_dir_all(&logs)?;
        let put =
            |name: String, text: String| fs::write(folder.join(name), text).context("write a node's configuration");
        put("containerd.toml".to_owned(), containerd(&programs.runc))?;
        put("kube-proxy.yaml".to_owned(), kube_proxy().to_string())?;
        put(format!("{name}.kubelet.yaml"), kubelet(&cgroup).to_string())?;
        put(format!("{name}.conflist"), chain(&node.number.pod_subnet_v4()).to_string())?;
        let mut processes = Processes::default();
        let (logs_text, folder_text) = (logs.display().to_string(), folder.display().to_string());
        let (plugins, address) = (programs.plugins.display().to_string(), node.number.address().v4.to_string());
        let env = [
            ("NODE", name.as_str()),
            ("ADDRESS", &address),
            ("STATE", &folder_text),
            ("LOGS", &logs_text),
            ("PLUGINS", &plugins),
            ("PATH", &programs.path),
        ];
        let namespaces = ["--mount", "--uts", "--ipc", "--pid", "--kill-child", "--mount-proc", "sh", "-c", SCRIPT];
        let namespaces = namespaces.map(str::to_owned);
        let outer = processes.spawn(&node.host, logs.join("node.log"), Path::new("unshare"), &namespaces, &env)?;
        let init = until(&format!("{name} has its file system"), KUBERNETES, || {
            processes.ensure_alive()?;
            let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))?;
            let init = children.split_whitespace().next().and_then(|pid| pid.parse::<u32>().ok());
            Ok(init.filter(|pid| Path::new(&format!("/proc/{pid}/root/opt/cni/bin/bridge")).exists()))
        })?;
        let bpffs = PathBuf::from(format!("/proc/{init}/root/sys/fs/bpf"));
        Ok(Self { lab: LabNode { bpffs, ..node.clone() }, init, _processes: processes })
    }

    /// A path of the node's, seen from the machine.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Runs a program on the node.
    pub(super) fn exec(&self, arguments: &[&str]) -> Result<String> {
        let target = format!("--target={}", self.init);
        self.lab.host.exec("nsenter", &[&[target.as_str(), "--mount", "--uts", "--ipc", "--pid"], arguments].concat())
    }

    /// The processes of egress-agent in the node's network with this first argument.
    pub(super) fn agents(&self, command: &str) -> Result<Vec<u32>> {
        let inode = fs::metadata(self.lab.host.path())?.ino();
        let is_one = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            let is_ours = words.next().is_some_and(|program| program.ends_with(b"egress-agent"));
            is_ours
                && words.next() == Some(command.as_bytes())
                && fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|meta| meta.ino() == inode)
        };
        Ok(processes()?.into_iter().filter(is_one).collect())
    }
}

fn containerd(runc: &Path) -> String {
    format!(
        "version = 2
root = \"/mnt/containerd\"
state = \"/run/containerd\"
[plugins.\"io.containerd.grpc.v1.cri\"]
sandbox_image = \"{BOX}\"
# A machine may lack CAP_SYS_RESOURCE.
restrict_oom_score_adj = true
[plugins.\"io.containerd.grpc.v1.cri\".cni]
bin_dir = \"/opt/cni/bin\"
conf_dir = \"/etc/cni/net.d\"
[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]
runtime_type = \"io.containerd.runc.v2\"
[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]
BinaryName = \"{}\"
",
        runc.display()
    )
}

fn kubelet(cgroup: &str) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": {"clientCAFile": "/mnt/state/ca.crt"}},
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{cgroup}"), "enforceNodeAllocatable": [], "failCgroupV1": false,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "resolvConf": "", "failSwapOn": false, "localStorageCapacityIsolation": false,
        "imageGCHighThresholdPercent": 100, "evictionHard": {"memory.available": "100Mi"},
    })
}

fn kube_proxy() -> Value {
    // What is the machine's own it leaves alone.
    let conntrack = json!({"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"});
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": "/mnt/state/proxy.kubeconfig"},
        "mode": "iptables", "clusterCIDR": plan::CLUSTER_V4, "conntrack": conntrack,
    })
}

fn chain(subnet: &str) -> Value {
    json!({"cniVersion": "0.4.0", "name": "cbr0", "plugins": [
        {
            "type": "bridge", "bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "hairpinMode": true, "ipMasq": false,
            "ipam": {"type": "host-local", "dataDir": "/var/lib/cni/networks", "ranges": [[{"subnet": subnet}]]},
        },
        {"type": "portmap", "capabilities": {"portMappings": true}},
    ]})
}
