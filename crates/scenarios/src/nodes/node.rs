//! A node: container runtime, kubelet and kube-proxy in namespaces of their own, which can be switched off and on.
//!
//! `disk.sh` keeps what a machine's disk would; `node.sh` is the node while it is on. A node that is switched off loses its
//! processes and their control groups, its mounts (BPF pins among them) and what was added to its network since the lab has made it.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::cluster::KUBERNETES;
use super::processes::{self, Processes};
use super::programs::{BOX, NodePrograms};
use crate::cases::cleanup::{differences, settings};
use crate::prelude::*;

const DISK: &str = include_str!("disk.sh");
const NODE: &str = include_str!("node.sh");

pub(super) struct RealNode {
    /// The lab's, with the BPF file system that the node has mounted.
    pub(super) lab: LabNode,
    /// The first process of the node, seen from the machine.
    init: u32,
    running: Processes,
    _disk: Processes,
    /// Has the disk mounted.
    keeper: u32,
    bare: BareNetwork,
    environment: Vec<(&'static str, String)>,
    logs: PathBuf,
    /// Of the kubelet.
    config: PathBuf,
    cgroup: String,
}

impl RealNode {
    pub(super) fn start(lab: &Lab, node: &LabNode, programs: &NodePrograms, folder: &Path) -> Result<Self> {
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
        let environment = vec![
            ("NODE", name.clone()),
            ("ADDRESS", node.number.address().v4.to_string()),
            ("STATE", folder.display().to_string()),
            ("LOGS", logs.display().to_string()),
            ("PLUGINS", programs.plugins.display().to_string()),
            ("PATH", programs.path.clone()),
        ];
        let mut disk = Processes::default();
        let keep = ["--mount", "sh", "-c", DISK].map(str::to_owned);
        let keeper =
            disk.spawn(&node.host, logs.join("disk.log"), Path::new("unshare"), &keep, &borrowed(&environment))?;
        until_true(&format!("{name} has its disk"), KUBERNETES, || {
            disk.ensure_alive()?;
            Ok(Path::new(&format!("/proc/{keeper}/root/mnt/ready")).exists())
        })?;
        let bare = BareNetwork::of(&node.host)?;
        let config = folder.join(format!("{name}.kubelet.yaml"));
        let running = Processes::default();
        let mut node =
            Self { lab: node.clone(), init: 0, running, _disk: disk, keeper, bare, environment, logs, config, cgroup };
        node.boot()?;
        Ok(node)
    }

    fn boot(&mut self) -> Result<()> {
        let arguments =
            [&format!("--target={}", self.keeper), "--mount", "unshare", "--mount", "--uts", "--ipc", "--pid"];
        let arguments = arguments.iter().chain(&["--kill-child", "--mount-proc", "sh", "-c", NODE]);
        let arguments: Vec<String> = arguments.map(|word| (*word).to_owned()).collect();
        let (log, environment) = (self.logs.join("node.log"), borrowed(&self.environment));
        let outer = self.running.spawn(&self.lab.host, log, Path::new("nsenter"), &arguments, &environment)?;
        self.init = until(&format!("{} has its file system", self.lab.name()), KUBERNETES, || {
            self.running.ensure_alive()?;
            let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))?;
            let init = children.split_whitespace().next().and_then(|pid| pid.parse::<u32>().ok());
            Ok(init.filter(|pid| Path::new(&format!("/proc/{pid}/root/run/booted")).exists()))
        })?;
        self.lab.bpffs = self.path("/sys/fs/bpf");
        Ok(())
    }

    /// Nothing is asked and nothing ends in order.
    pub(super) fn power_off(&mut self, lab: &Lab) -> Result<()> {
        lab.set_power(&self.lab, false)?;
        drop(std::mem::take(&mut self.running));
        // The kernel ends all processes of a node before its first one.
        let process = PathBuf::from(format!("/proc/{}/ns/net", self.init));
        until_true(&format!("{} is off", self.lab.name()), KUBERNETES, || Ok(fs::metadata(&process).is_err()))?;
        lab.remake_cgroup(&self.cgroup)?;
        self.bare.restore(&self.lab.host)
    }

    pub(super) fn power_on(&mut self, lab: &Lab) -> Result<()> {
        lab.set_power(&self.lab, true)?;
        self.boot()
    }

    pub(super) fn ensure_alive(&mut self) -> Result<()> {
        self.running.ensure_alive()
    }

    /// Starts the kubelet again, with these fields besides those that it always has. Pods are not touched.
    pub(super) fn restart_kubelet(&self, fields: &Value) -> Result<()> {
        let mut config = kubelet(&self.cgroup);
        for (key, value) in fields.as_object().context("fields")? {
            config[key] = value.clone();
        }
        fs::write(&self.config, config.to_string())?;
        let pid = || self.exec(&["cat", "/run/kubelet.pid"]);
        let former = pid()?;
        self.exec(&["kill", former.trim()])?;
        until_true(&format!("{} has another kubelet", self.lab.name()), KUBERNETES, || Ok(pid()? != former))
    }

    /// A path of the node's, seen from the machine.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Runs a program on the node.
    pub(super) fn exec(&self, arguments: &[&str]) -> Result<String> {
        let path = self.environment.iter().find(|(name, _)| *name == "PATH").map(|(_, path)| format!("PATH={path}"));
        let path = path.context("a node without PATH")?;
        let target = format!("--target={}", self.init);
        let inside = [target.as_str(), "--mount", "--uts", "--ipc", "--pid", "env", &path];
        self.lab.host.exec("nsenter", &[&inside, arguments].concat())
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
        Ok(processes::all()?.into_iter().filter(is_one).collect())
    }
}

fn borrowed<'a>(environment: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a str)> {
    environment.iter().map(|(name, value)| (*name, value.as_str())).collect()
}

/// What is in the network of a node before it is switched on for the first time.
struct BareNetwork {
    parts: BTreeMap<String, BTreeSet<String>>,
    settings: BTreeSet<String>,
}

/// What is compared, and by which command it is seen.
const PARTS: [(&str, &[&str]); 5] = [
    ("links", &["ip", "-brief", "link", "show"]),
    ("tables", &["nft", "list", "tables"]),
    ("disciplines", &["tc", "qdisc", "show"]),
    ("rules", &["ip", "rule", "show"]),
    ("routes", &["ip", "route", "show", "table", "all"]),
];

impl BareNetwork {
    fn of(host: &Netns) -> Result<Self> {
        Ok(Self { parts: Self::parts(host)?, settings: host.run(settings)? })
    }

    fn parts(host: &Netns) -> Result<BTreeMap<String, BTreeSet<String>>> {
        let mut parts = BTreeMap::new();
        for (part, command) in PARTS {
            let lines = host.exec(command[0], &command[1..])?;
            // A link's state, and what follows from it, changes with the cable.
            let line = |line: &str| match part {
                "links" => line.split_whitespace().next().unwrap_or_default().to_owned(),
                _ => line.replace(" linkdown", "").trim().to_owned(),
            };
            parts.insert(part.to_owned(), lines.lines().map(line).collect());
        }
        Ok(parts)
    }

    /// Removes what was added, and sets what was changed.
    fn restore(&self, host: &Netns) -> Result<()> {
        let now = Self::parts(host)?;
        let added = |part: &str| now[part].difference(&self.parts[part]).cloned().collect::<Vec<_>>();
        for link in added("links") {
            // Of a pod's pair one end is gone with the pod, and the other by itself.
            let name = link.split('@').next().unwrap_or_default();
            drop(host.output("ip", &["link", "del", name])?);
        }
        for table in added("tables") {
            let words: Vec<&str> = std::iter::once("delete").chain(table.split(' ')).collect();
            host.exec("nft", &words)?;
        }
        for rule in added("rules") {
            let words: Vec<&str> = rule.split_whitespace().skip(1).collect();
            host.exec("ip", &[&["rule", "del"], words.as_slice()].concat())?;
        }
        host.run(|| {
            for changed in self.settings.difference(&settings()?) {
                let (path, value) = changed.split_once(" = ").context("a setting")?;
                if Path::new(path).exists() {
                    // Some are set by the kernel alone.
                    drop(fs::write(path, value));
                }
            }
            Ok(())
        })?;
        let mut left = Vec::new();
        let outcome = until_true("nothing is left of its network", EFFECT, || {
            left = differences(&self.parts, &Self::parts(host)?);
            Ok(left.is_empty())
        });
        outcome.with_context(|| format!("left or taken: {left:#?}"))
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
        "resolvConf": "", "failSwapOn": false,
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
