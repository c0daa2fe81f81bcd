//! The product comes and goes, as docs/install.md has it.

use super::*;
use egress_lab::test::Skip;
use egress_toolchain::{Image, Paths};

/// What the agent's container has: BPF, PERFMON, NET_ADMIN, NET_RAW (linux/capability.h).
const CAPABILITIES: &str = "000000c000003000";
/// What the controller's container has: NET_RAW.
const OF_CONTROLLERS: &str = "0000000000002000";

/// docs/install.md, "The image", "Before you apply" and "A bridge CNI".
pub(super) fn by_kustomize(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    let archive = Image::expected(&Paths::find()?).archive().display().to_string();
    for node in cluster.nodes() {
        let line = "ctr -n k8s.io images import egress-agent-VERSION-ARCH.tar";
        println!("{}", node.exec(&["sh", "-c", &line.replace("egress-agent-VERSION-ARCH.tar", &archive)])?);
    }
    cluster.types("kubectl apply -f deploy/base/namespace.yaml")?;
    cluster.types("openssl rand -hex 32 | tr -d '\n' > token")?;
    cluster.types("kubectl -n egress-agent create secret generic egress-agent-metrics --from-file=token")?;
    let subnets = cluster.types("kubectl get nodes -o custom-columns=NODE:.metadata.name,PODS:.spec.podCIDRs")?;
    ensure!(subnets.matches('/').count() == 2, "not every node has a subnet: {subnets}");
    cluster.types("kubectl apply -k deploy/overlays/bridge-cni")?;
    cluster.types("kubectl -n egress-agent rollout status daemonset/egress-agent")?;
    cluster.types("kubectl -n egress-agent rollout status deployment/egress-agent-controller")?;
    cluster.nodes().iter().try_for_each(has_its_rights_alone)?;
    let controllers = cluster.nodes().iter().map(|node| Ok(node.agents("controller")?.len())).sum::<Result<usize>>()?;
    ensure!(controllers == 2, "{controllers} controllers are seen");
    for node in cluster.nodes() {
        ensure!(is_in_chain(node)?, "{} has no plugin at the end of the CNI's chain", node.lab.name());
    }
    test.nothing_is_selected()
}

/// The agent, what installs the plugin where that is in the DaemonSet, and a controller if there is one.
pub(super) fn has_its_rights_alone(node: &RealNode) -> Result<()> {
    let name = node.lab.name();
    for (command, capabilities) in [("run", CAPABILITIES), ("cni-install", "0000000000000000")] {
        let pids = node.agents(command)?;
        let [pid] = pids[..] else { bail!("{} processes of `egress-agent {command}` on {name}", pids.len()) };
        has_rights(pid, command, capabilities).context(name.clone())?;
    }
    let controllers = node.agents("controller")?;
    controllers.into_iter().try_for_each(|pid| has_rights(pid, "controller", OF_CONTROLLERS).context(name.clone()))
}

fn has_rights(pid: u32, command: &str, capabilities: &str) -> Result<()> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let is = |key: &str, value: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        ensure!(found == Some(value), "`egress-agent {command}`: {key} {found:?}, not {value}");
        Ok(())
    };
    for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
        is(set, capabilities)?;
    }
    is("Seccomp:", "2")?;
    is("NoNewPrivs:", "1")
}

/// Whether the plugin is the last of the CNI's chain, and its program is there.
pub(super) fn is_in_chain(node: &RealNode) -> Result<bool> {
    let chain = fs::read_to_string(node.path("/etc/cni/net.d/10-bridge.conflist"))?;
    let chain: Value = serde_json::from_str(&chain)?;
    let last = chain["plugins"].as_array().and_then(|plugins| plugins.last()).cloned().unwrap_or_default();
    Ok(last["type"] == "egress-agent-cni" && node.path("/opt/cni/bin/egress-agent-cni").exists())
}

/// docs/install.md, "The first egress IP".
pub(super) fn first_egress_ip(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    cluster.types("kubectl label node node1 k8s.ovn.org/egress-assignable=")?;
    cluster.types("kubectl apply -f deploy/examples/egressip-simpson.yaml")?;
    test.is_served_by("node1", EFFECT)?;
    test.all_are_right()?;
    until_true("two pods are counted", REPORTED, || {
        let object = cluster.get(&["egressip", OBJECT])?;
        Ok(object["status"]["selectedPods"] == 2)
    })?;
    cluster.types("kubectl get egressip").map(drop)
}

/// The tests run in control groups of whichever version the machine has.
pub(super) fn in_cgroups_of_version_2(test: &mut NodeTest) -> Result<()> {
    const REASON: &str = "this machine has control groups of version 1";
    if !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return Err(Skip(REASON).into());
    }
    for node in test.cluster.nodes() {
        let name = node.lab.name();
        let [pid] = node.agents("run")?[..] else { bail!("no agent on {name}") };
        let group = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let path = group.trim().strip_prefix("0::/").with_context(|| format!("the agent of {name} is in {group}"))?;
        // What the kubelet makes of the requests, and memory of maps that is charged there.
        let read = |file: &str| fs::read_to_string(Path::new("/sys/fs/cgroup").join(path).join(file));
        let used: u64 = read("memory.current")?.trim().parse()?;
        let weight: u64 = read("cpu.weight")?.trim().parse()?;
        println!("{name}: {} MiB in memory.current, cpu.weight {weight}", used >> 20);
        ensure!(used > 0 && weight > 1, "{name}: its requests are not in its group");
    }
    Ok(())
}

/// docs/install.md, "Uninstall". Leaves the nodes as they were.
pub(super) fn uninstall(test: &mut NodeTest) -> Result<()> {
    let cluster = &test.cluster;
    test.agents_have_left_traces()?;
    cluster.types("kubectl delete egressip --all")?;
    test.nothing_is_selected()?;
    cluster.types("kubectl -n egress-agent delete daemonset egress-agent")?;
    cluster.types("kubectl apply -k deploy/overlays/cleanup-bridge-cni")?;
    cluster.types("kubectl -n egress-agent rollout status daemonset/egress-agent-cleanup")?;
    cluster.types("kubectl delete -k deploy/overlays/cleanup-bridge-cni")?;
    cluster
        .shell
        .types("kubectl delete --ignore-not-found -k deploy/overlays/OVERLAY", &[("OVERLAY", "bridge-cni")])?;
    test.nothing_is_left()
}

/// For a test that begins without the product.
pub(super) fn ensure_uninstalled(test: &mut NodeTest) -> Result<()> {
    let sets = test.cluster.list(&["--all-namespaces", "daemonsets"])?;
    if sets.iter().any(|set| name_of(set) == "egress-agent") { uninstall(test) } else { Ok(()) }
}

impl NodeTest {
    pub(super) fn agents_have_left_traces(&self) -> Result<()> {
        for (node, before) in self.cluster.nodes().iter().zip(&self.before) {
            let seen = differences(before, &snapshot_of(node)?).len();
            ensure!(seen > 3, "the snapshot of {} does not see the agent", node.lab.name());
        }
        Ok(())
    }

    /// The nodes are as they were before the product was installed.
    pub(super) fn nothing_is_left(&self) -> Result<()> {
        self.nothing_is_selected()?;
        for (node, before) in self.cluster.nodes().iter().zip(&self.before) {
            let mut left = Vec::new();
            let outcome = until_true(&format!("{} is as it was", node.lab.name()), EFFECT, || {
                left = differences(before, &snapshot_of(node)?);
                Ok(left.is_empty())
            });
            outcome.with_context(|| format!("left or taken: {left:#?}"))?;
        }
        Ok(())
    }
}

/// What an agent could leave on a node: what the lab's nodes are compared by, and the files of the CNI.
pub(super) fn snapshot_of(node: &RealNode) -> Result<NodeSnapshot> {
    let mut snapshot = snapshot(&node.lab)?;
    // Timers of bridges, and addresses that a bridge has learned and forgets.
    let timer = regex::Regex::new(r"_timer +[0-9.]+")?;
    for (what, lines) in &mut snapshot {
        *lines = lines.iter().map(|line| timer.replace_all(line, "_timer").into_owned()).collect();
        lines.retain(|line| !what.starts_with("bridge fdb") || line.contains("permanent"));
    }
    for folder in ["/etc/cni/net.d", "/opt/cni/bin"] {
        let mut files = BTreeSet::new();
        for entry in fs::read_dir(node.path(folder))? {
            let path = entry?.path();
            // The chain is rewritten, with other spaces, when a plugin is added or removed: its contents are compared.
            let text = fs::read(&path)?;
            let text = serde_json::from_slice::<Value>(&text)
                .map_or_else(|_| text.len().to_string(), |chain| chain.to_string());
            files.insert(format!("{} {text}", path.file_name().unwrap_or_default().display()));
        }
        snapshot.insert(folder.to_owned(), files);
    }
    Ok(snapshot)
}

/// docs/install.md, "What a cluster needs".
pub(super) fn without_bpffs(test: &mut NodeTest) -> Result<()> {
    const LINE: &str = "mount -t bpf bpf /sys/fs/bpf";
    ensure_uninstalled(test)?;
    let cluster = &test.cluster;
    cluster.node("node2")?.exec(&["umount", "--lazy", "/sys/fs/bpf"])?;
    cluster.types("kubectl apply -k deploy/overlays/bridge-cni")?;
    let printed = until("the agent of node2 says what is missing", KUBERNETES, || {
        let Ok(pod) = cluster.agent_pod("node2") else { return Ok(None) };
        let ended = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
        if !ended.clone().any(|one| one["name"] == "agent" && one["restartCount"].as_u64() > Some(0)) {
            return Ok(None);
        }
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        Ok(cluster.kubectl(&["-n", "egress-agent", "logs", &name, "-c", "agent", "--previous"]).ok())
    })?;
    println!("{printed}");
    let errors: Vec<&str> = printed.lines().filter(|line| line.starts_with("error: ")).collect();
    ensure!(errors.len() == 1 && printed.lines().last() == errors.first().copied(), "that is not one line");
    ensure!(errors[0].contains(LINE), "it does not say `{LINE}`");
    // The kubelet starts it again by itself, after at most five minutes; a rollout does not wait for that.
    cluster.node("node2")?.exec(&["sh", "-c", LINE])?;
    cluster.types("kubectl -n egress-agent rollout restart daemonset/egress-agent")?;
    all_rolled_out(cluster)?;
    serve(test)
}

/// For a test that stands on an egress IP that is served.
pub(super) fn ensure_installed(test: &mut NodeTest) -> Result<()> {
    let sets = test.cluster.list(&["--all-namespaces", "daemonsets"])?;
    if !sets.iter().any(|set| name_of(set) == "egress-agent") {
        test.cluster.types("kubectl apply -k deploy/overlays/bridge-cni")?;
        all_rolled_out(&test.cluster)?;
    }
    serve(test)
}

/// The first egress IP, which both nodes may host.
pub(super) fn serve(test: &NodeTest) -> Result<()> {
    test.cluster.types("kubectl label node node1 node2 k8s.ovn.org/egress-assignable= --overwrite")?;
    test.cluster.types("kubectl apply -f deploy/examples/egressip-simpson.yaml")?;
    test.all_are_right()
}
