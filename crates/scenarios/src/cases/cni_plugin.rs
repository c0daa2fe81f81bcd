//! The chained plugin, with the plugins of a real bridge CNI (`bridge`, `host-local`) before it: pods send the moment that a
//! container runtime would let them begin.

use std::io::Write;
use std::os::unix::fs::symlink;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::prelude::*;
use egress_lab::kube_api::objects;
use egress_lab::topology::addresses::{Dual, SERVER};
use egress_toolchain::packages::{self, Purpose};

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";

/// What is started at once, as a kubelet does.
const AT_ONCE: usize = 4;
/// A kubelet reports a pod's addresses some tenths of a second after the start.
const REPORTED: Duration = Duration::from_millis(400);
/// The plugin waits for an agent for five seconds.
const WAITS: Duration = Duration::from_secs(5);

pub(super) fn no_first_packet_is_lost(context: &LabContext) -> Result<()> {
    packages::ensure(Purpose::Cni, true)?;
    let mut cluster = TestCluster::start(context, vec![pod("steady", "red", 1, &[]), pod("other", "blue", 3, &[])])?;
    cluster.assignable(1, true)?;
    cluster.assignable(2, true)?;
    cluster.assign(&egress_ip("eip", &[V4, V6], &labels("house", "red"), &all()))?;
    cluster.is_seen_as("steady", Some(V4), Some(V6))?;
    let runtime = Runtime::new(&cluster)?;

    println!("without the plugin");
    let without = runtime.start_pods(&cluster, "without", 60)?;
    println!("{without:?}");
    ensure!(without.wrong == 0, "{} of 60 pods were seen with another address", without.wrong);

    println!("the plugin is put into the chain");
    let mut installer = runtime.installer(context)?;
    runtime.is_chained(true)?;
    for round in 0..2 {
        // A hundred addresses: those of the second round have had other pods, selected ones and others.
        let with = runtime.start_pods(&cluster, ["first", "second"][round], 100)?;
        println!("{with:?}");
        ensure!(
            with.wrong == 0 && with.lost == 0,
            "of 100 pods {} lost their first packet, {} were wrong",
            with.lost,
            with.wrong
        );
    }

    println!("the CNI writes its file again");
    runtime.write_chain()?;
    runtime.is_chained(true)?;

    println!("no agent answers");
    cluster.agent(1)?.kill()?;
    let begun = Instant::now();
    let late = runtime.make(&cluster, "late", "red")?;
    println!("the pod starts after {} ms", begun.elapsed().as_millis());
    ensure!(begun.elapsed() < WAITS + Duration::from_secs(1), "it waited for {:?}", begun.elapsed());
    ensure!(observe(&late.netns, SERVER.v4.into())? == Observed::Nothing, "no program knows it, and it got out");
    cluster.agent(1)?.restart()?;
    cluster.api.patch_status(&path_of(&late), &objects::pod_status(&late))?;
    cluster.becomes(&late.netns, SERVER.v4.into(), Observed::Source(V4.parse()?))?;
    runtime.unmake(&cluster, &late)?;

    println!("and it goes without a trace");
    installer.kill()?;
    installer.wait()?;
    cluster.agent(1)?.terminate(EFFECT)?;
    let node1 = cluster.lab.node(node(1)?);
    let cleanup = [
        "cleanup",
        "--uplink=breth0",
        "--mgmt-port",
        node1.management_port(),
        "--bpffs",
        &node1.bpffs.display().to_string(),
        "--cni-conf-dir",
        &runtime.configurations().display().to_string(),
        "--cni-bin-dir",
        &runtime.programs().display().to_string(),
    ]
    .map(str::to_owned);
    let agent = context.built.agent.display().to_string();
    let printed = node1.host.exec(&agent, &cleanup.each_ref().map(String::as_str))?;
    println!("{printed}");
    runtime.is_chained(false)?;
    ensure!(!runtime.programs().join("egress-agent-cni").exists(), "the program is still there");
    Ok(())
}

fn path_of(pod: &LabPod) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name)
}

/// How the world saw the first request of each.
#[derive(Debug, Default)]
struct FirstRequests {
    right: usize,
    /// Not at all, or late.
    lost: usize,
    /// With another address than its object's, or than its node's where none selects it.
    wrong: usize,
}

/// What a container runtime does for the networks of pods, on the first node.
struct Runtime {
    node: LabNode,
    folder: PathBuf,
    prefix: String,
    count: AtomicUsize,
}

impl Runtime {
    fn new(cluster: &TestCluster) -> Result<Self> {
        let node = cluster.lab.node(node(1)?).clone();
        let folder = cluster.lab.folder().join("cni");
        let runtime = Self { node, folder, prefix: cluster.lab.prefix().to_owned(), count: AtomicUsize::new(0) };
        for folder in [runtime.configurations(), runtime.programs()] {
            std::fs::create_dir_all(folder)?;
        }
        let local = packages::find("host-local").context("the CNI plugins are missing")?;
        let folder = local.parent().context("no folder")?;
        for program in ["bridge", "host-local"] {
            symlink(folder.join(program), runtime.programs().join(program))?;
        }
        runtime.write_chain()?;
        Ok(runtime)
    }

    fn configurations(&self) -> PathBuf {
        self.folder.join("net.d")
    }

    fn programs(&self) -> PathBuf {
        self.folder.join("bin")
    }

    fn chain_file(&self) -> PathBuf {
        self.configurations().join("10-bridge.conflist")
    }

    /// As the CNI's own installation leaves it, on the bridge that is there.
    fn write_chain(&self) -> Result<()> {
        let number = self.node.number;
        let router = number.router();
        let prefix = number.pod_subnet_v6();
        let prefix = prefix.trim_end_matches("/64");
        let chain = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [{
            "type": "bridge",
            "bridge": self.node.management_port(),
            "mtu": plan::POD_MTU,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": self.folder.join("leases"),
                "ranges": [
                    [{"subnet": number.pod_subnet_v4(), "gateway": router.v4,
                      "rangeStart": format!("10.244.{}.100", number.index() + 1), "rangeEnd": format!("10.244.{}.199", number.index() + 1)}],
                    [{"subnet": number.pod_subnet_v6(), "gateway": router.v6,
                      "rangeStart": format!("{prefix}1000"), "rangeEnd": format!("{prefix}1063")}],
                ],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            },
        }]});
        Ok(std::fs::write(self.chain_file(), chain.to_string())?)
    }

    fn plugins(&self) -> Result<Value> {
        Ok(serde_json::from_str(&std::fs::read_to_string(self.chain_file())?)?)
    }

    fn installer(&self, context: &LabContext) -> Result<Child> {
        let mut command = self.node.host.command(&context.built.agent.display().to_string());
        command.arg("cni-install").arg("--cni-conf-dir").arg(self.configurations());
        command.arg("--cni-bin-dir").arg(self.programs()).arg("--cni-socket").arg(&self.node.socket);
        command.stdin(Stdio::null()).spawn().context("the installer")
    }

    fn is_chained(&self, wanted: bool) -> Result<()> {
        until_true(if wanted { "the plugin is the last of the chain" } else { "the plugin is gone" }, EFFECT, || {
            let chain = self.plugins()?;
            let last = chain["plugins"].as_array().and_then(|plugins| plugins.last()).context("no plugins")?;
            Ok((last["type"] == "egress-agent-cni") == wanted)
        })
    }

    /// Calls all plugins of the chain, each with what the one before has made.
    fn call(&self, command: &str, netns: &Netns, arguments: &str) -> Result<Value> {
        let chain = self.plugins()?;
        let mut plugins = chain["plugins"].as_array().cloned().context("no plugins")?;
        if command == "DEL" {
            plugins.reverse();
        }
        let mut result = Value::Null;
        for mut plugin in plugins {
            plugin["cniVersion"] = chain["cniVersion"].clone();
            plugin["name"] = chain["name"].clone();
            if !result.is_null() {
                plugin["prevResult"] = result.clone();
            }
            let program = self.programs().join(plugin["type"].as_str().context("no type")?);
            let answer = self.run(&program, command, netns, (arguments, &plugin))?;
            if command == "ADD" {
                result = answer;
            }
        }
        Ok(result)
    }

    fn run(&self, program: &Path, verb: &str, netns: &Netns, (arguments, input): (&str, &Value)) -> Result<Value> {
        let mut command = self.node.host.command(&program.display().to_string());
        command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", netns.name()).env("CNI_NETNS", netns.path());
        command.env("CNI_IFNAME", "eth0").env("CNI_PATH", self.programs()).env("CNI_ARGS", arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let output = self.node.host.run(|| {
            let mut child = command.spawn()?;
            child.stdin.take().context("no input")?.write_all(input.to_string().as_bytes())?;
            Ok(child.wait_with_output()?)
        })?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{} {verb}: {printed}", program.display());
        if printed.trim().is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_str(&printed)?) }
    }

    /// A pod whose containers may begin now. Its object has no address yet.
    fn make(&self, cluster: &TestCluster, name: &str, namespace: &str) -> Result<LabPod> {
        let netns = Netns::new(&self.prefix, &format!("cni{}", self.count.fetch_add(1, Ordering::Relaxed)));
        cluster.lab.add_namespaces(std::slice::from_ref(&netns))?;
        let mut pod = LabPod {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            labels: std::collections::BTreeMap::new(),
            node: self.node.number,
            // None yet: its object has none.
            addresses: self.node.number.router(),
            cni: self.node.config.cni,
            netns,
        };
        let collection = format!("/api/v1/namespaces/{namespace}/pods");
        cluster.api.create(&collection, &objects::pod(&pod))?;
        let result = self.call("ADD", &pod.netns, &self.arguments(cluster, &pod)?)?;
        let listed = result["ips"].as_array().context("no addresses")?;
        let address = |is_v4| -> Result<IpAddr> {
            let listed =
                listed.iter().filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse::<IpAddr>().ok());
            listed.into_iter().find(|ip| ip.is_ipv4() == is_v4).context("an address of each family")
        };
        let (IpAddr::V4(v4), IpAddr::V6(v6)) = (address(true)?, address(false)?) else { bail!("families") };
        pod.addresses = Dual { v4, v6 };
        Ok(pod)
    }

    fn arguments(&self, cluster: &TestCluster, pod: &LabPod) -> Result<String> {
        let object = cluster.api.get(&path_of(pod))?.context("no pod")?;
        let uid = object.pointer("/metadata/uid").and_then(Value::as_str).context("no UID")?;
        Ok(format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={uid}",
            pod.namespace,
            pod.name,
            pod.netns.name()
        ))
    }

    /// The sandbox first, then the object, as a kubelet does.
    fn unmake(&self, cluster: &TestCluster, pod: &LabPod) -> Result<()> {
        self.call("DEL", &pod.netns, &self.arguments(cluster, pod)?)?;
        cluster.api.delete(&path_of(pod))
    }

    /// Starts so many pods, every second one selected, each of which asks the server at once and is gone soon after.
    fn start_pods(&self, cluster: &TestCluster, of: &str, count: usize) -> Result<FirstRequests> {
        let (next, seen) = (AtomicUsize::new(0), Mutex::new(FirstRequests::default()));
        let one = |number: usize| -> Result<()> {
            let namespace = if number.is_multiple_of(2) { "red" } else { "blue" };
            let pod = self.make(cluster, &format!("{of}-{number}"), namespace)?;
            // One family first for one, the other for others.
            let to: IpAddr = if number % 4 < 2 { SERVER.v4.into() } else { SERVER.v6.into() };
            let egress_ip: IpAddr = if to.is_ipv4() { V4.parse()? } else { V6.parse()? };
            let right = if namespace == "red" { egress_ip } else { pod.node.address().towards(to) };
            let observed = observe(&pod.netns, to)?;
            thread::sleep(REPORTED);
            cluster.api.patch_status(&path_of(&pod), &objects::pod_status(&pod))?;
            cluster.becomes(&pod.netns, to, Observed::Source(right))?;
            self.unmake(cluster, &pod)?;
            let mut seen = seen.lock().map_err(|_poisoned| anyhow::anyhow!("another pod has failed"))?;
            match observed {
                Observed::Nothing => seen.lost += 1,
                Observed::Source(address) if address == right => seen.right += 1,
                Observed::Source(address) => {
                    println!("{} of {namespace} was seen as {address}", pod.name);
                    seen.wrong += 1;
                }
            }
            Ok(())
        };
        let work = || -> Result<()> {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return Ok(());
                }
                one(number).with_context(|| format!("pod {number}"))?;
            }
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
            let mut ends = workers.into_iter().map(|worker| worker.join());
            ends.try_for_each(|end| end.map_err(|_panic| anyhow::anyhow!("a worker has panicked"))?)
        })?;
        seen.into_inner().map_err(|_poisoned| anyhow::anyhow!("a worker has panicked"))
    }
}
