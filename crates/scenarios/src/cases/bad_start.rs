//! Bad input at the start of an agent: it ends with one clear line that says what to do, and with an exit code other than zero.
//! Where nothing can be decided (the API server does not answer) it waits, and says so once. Traffic that an
//! earlier agent has set up is unaffected.

use std::process::{Child, Stdio};

use crate::prelude::*;
use egress_lab::pins::bpftool;
use egress_lab::{MANAGEMENT, UPLINK};

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const ATTEMPTS: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(10);

pub(super) fn one_clear_line(context: &LabContext) -> Result<()> {
    let mut cluster = TestCluster::start(context, vec![pod("one", "red", 1, &[]), pod("two", "red", 2, &[])])?;
    cluster.assignable(2, true)?;
    cluster.assignable(3, true)?;
    cluster.assign(&egress_ip("running", &[V4, V6], &all(), &all()))?;
    cluster.is_seen_as("one", Some(V4), Some(V6))?;
    let mut flows = Vec::new();
    for to in plan::SERVER.both() {
        let (from, echo) = (&cluster.pod("one")?.netns, SocketAddr::new(to, ECHO_PORT));
        flows.push(TrafficFlow::udp(from, echo, TICK)?);
        flows.push(TrafficFlow::tcp(from, echo, TICK, client::PATIENCE)?);
    }
    let trial = Trial::new(&cluster, context)?;
    beside_an_agent(&trial, context)?;
    cluster.agent(1)?.kill()?;
    interfaces(&trial)?;
    pins_of_others(&trial)?;
    without_rights(&trial)?;
    dead_server(&trial, context)?;
    cluster.agent(1)?.restart()?;
    cluster.serves(1)?;
    cluster.is_seen_as("one", Some(V4), Some(V6))?;
    for flow in flows {
        let report = flow.finish()?;
        ensure!(report.lost() == 0 && report.broken.is_none(), "running traffic was harmed: {report:?}");
        println!("running traffic: {} sent, none lost", report.sent);
    }
    Ok(())
}

/// How agents are started here: like node 1's own, but for what is changed.
struct Trial {
    node: LabNode,
    binary: PathBuf,
    kubeconfig: PathBuf,
    /// A folder of the lab's BPF file system, for pins of others.
    bpffs: PathBuf,
}

impl Trial {
    fn new(cluster: &TestCluster, context: &LabContext) -> Result<Self> {
        let node = cluster.lab.node(node(1)?).clone();
        let bpffs = node.bpffs.parent().context("no BPF file system")?.to_owned();
        let kubeconfig = cluster.api.node_kubeconfig().to_owned();
        Ok(Self { node, binary: context.built.agent.clone(), kubeconfig, bpffs })
    }

    /// The usual arguments, in which some options have other values.
    fn arguments(&self, changed: &[(&str, &Path)]) -> Vec<String> {
        let usual = [
            ("--node-name", PathBuf::from("node1")),
            ("--kubeconfig", self.kubeconfig.clone()),
            ("--uplink", PathBuf::from(UPLINK)),
            ("--mgmt-port", PathBuf::from(MANAGEMENT)),
            ("--bpffs", self.node.bpffs.clone()),
        ];
        let mut arguments = vec!["run".to_owned()];
        for (option, value) in &usual {
            let value = changed.iter().find(|(name, _)| name == option).map_or(value.as_path(), |(_, value)| value);
            arguments.extend([(*option).to_owned(), value.display().to_string()]);
        }
        let more = changed.iter().filter(|(name, _)| usual.iter().all(|(option, _)| option != name));
        arguments.extend(more.flat_map(|(name, value)| [(*name).to_owned(), value.display().to_string()]));
        arguments
    }

    /// Starts one that may continue; its output is in the log.
    fn start(&self, changed: &[(&str, &Path)], log: &Path) -> Result<Child> {
        let output = std::fs::File::create(log)?;
        self.node.host.run(|| {
            let mut command = self.node.host.command(&self.binary.to_string_lossy());
            command.args(self.arguments(changed)).stdin(Stdio::null());
            Ok(command.stdout(output.try_clone()?).stderr(output).spawn()?)
        })
    }

    /// The agent refuses to start, with one line that contains these texts.
    fn refuses(&self, wrapper: &[&str], changed: &[(&str, &Path)], texts: &[&str]) -> Result<()> {
        let binary = self.binary.display().to_string();
        let mut args = vec!["20"];
        args.extend(wrapper);
        args.push(&binary);
        let arguments = self.arguments(changed);
        args.extend(arguments.iter().map(String::as_str));
        let output = self.node.host.output("timeout", &args)?;
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines: Vec<&str> = printed.lines().collect();
        println!("{changed:?} {wrapper:?}: {}: {printed}", output.status);
        ensure!(output.status.code() == Some(1), "the exit status is {}", output.status);
        ensure!(lines.len() == 1 && lines[0].starts_with("error: "), "not one line: {printed}");
        for text in texts {
            ensure!(printed.contains(text), "the line does not say {text:?}: {printed}");
        }
        Ok(())
    }
}

fn beside_an_agent(trial: &Trial, context: &LabContext) -> Result<()> {
    let missing = context.logs.join("no-kubeconfig");
    trial.refuses(&[], &[("--kubeconfig", &missing)], &["no-kubeconfig", "--kubeconfig"])?;
    let garbage = context.logs.join("garbage-kubeconfig");
    std::fs::write(&garbage, "clusters: {this is: [no kubeconfig\n")?;
    trial.refuses(&[], &[("--kubeconfig", &garbage)], &["garbage-kubeconfig", "--kubeconfig"])?;
    let config = context.logs.join("bad.conf");
    std::fs::write(&config, "[ovnkubernetesfeature]\negressip-node-healthcheck-port=91o7\n")?;
    trial.refuses(&[], &[("--config-file", &config)], &["bad.conf:2:", "egressip-node-healthcheck-port", "91o7"])?;
    let certificate = ("--egressip-healthcheck-client-cert", config.as_path());
    trial.refuses(&[], &[certificate], &["lacks --egressip-healthcheck-client-privkey", "or none of them"])?;
    trial.refuses(&[], &[], &["another egress-agent runs", "stop it"])?;
    // Other pins do not make it another node.
    trial.refuses(&[], &[("--bpffs", &trial.bpffs.join("second"))], &["another egress-agent runs on this node"])?;
    std::fs::remove_dir(trial.bpffs.join("second")).context("the refused agent's folder")
}

fn interfaces(trial: &Trial) -> Result<()> {
    // The programs of the agent that has just ended are on others.
    for (flag, name, there, device) in
        [("--uplink", "nosuch0", UPLINK, "uplink"), ("--mgmt-port", "nosuch1", MANAGEMENT, "management port")]
    {
        trial.refuses(&[], &[(flag, Path::new(name))], &[name, there, device, flag])?;
    }
    trial.refuses(&[], &[("--mgmt-port", Path::new(UPLINK))], &[UPLINK, "two interfaces"])?;
    trial.refuses(&[], &[("--mgmt-port", Path::new("cilium_host"))], &["cilium_host", "chained to a CNI"])?;
    trial.refuses(&[], &[("--bpffs", Path::new("/run/no-bpffs"))], &["BPF file system", "mount", "--bpffs"])
}

/// A folder without our pins, pins of another set, and a map of another shape in this layout's place.
fn pins_of_others(trial: &Trial) -> Result<()> {
    let unrelated = trial.bpffs.join("unrelated");
    std::fs::create_dir_all(unrelated.join("pods"))?;
    trial.refuses(&[], &[("--bpffs", &unrelated)], &["none of egress-agent's pins", "--bpffs"])?;
    // Another layout is taken over; what runs here is pinned elsewhere.
    let older = trial.bpffs.join("older");
    std::fs::create_dir_all(older.join("v0"))?;
    trial.refuses(&[], &[("--bpffs", &older)], &["another set of maps runs", "egress-agent cleanup --bpffs"])?;

    let layout = AgentPins::of(&trial.node).layout()?;
    let foreign = trial.bpffs.join("foreign");
    let maps = foreign.join(layout.file_name().context("no layout")?).join("maps");
    std::fs::create_dir_all(&maps)?;
    let pin = maps.join("pods").display().to_string();
    bpftool(&["map", "create", &pin, "type", "hash", "key", "4", "value", "4", "entries", "4", "name", "pods"])?;
    trial.refuses(&[], &[("--bpffs", &foreign)], &["pods", "another version", "egress-agent cleanup"])?;
    let left = std::fs::read_dir(&maps)?.count();
    ensure!(left == 1, "a refused start has left {left} pins beside the foreign one");
    std::fs::remove_file(pin)?;
    for folder in [unrelated, older, foreign] {
        remove_folders(&folder)?;
    }
    Ok(())
}

/// A BPF file system has folders and pins only.
fn remove_folders(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        remove_folders(&entry?.path())?;
    }
    std::fs::remove_dir(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// A kernel that lacks what the agent needs cannot be had here; one that denies it can: the rights are taken away.
fn without_rights(trial: &Trial) -> Result<()> {
    trial.refuses(&["setpriv", "--bounding-set", "-all"], &[], &["CAP_"])
}

/// It waits, logs so once and touches nothing: the traffic of the node continues by what is in the kernel.
fn dead_server(trial: &Trial, context: &LabContext) -> Result<()> {
    let dead = context.logs.join("dead-kubeconfig");
    let text = std::fs::read_to_string(&trial.kubeconfig)?;
    let changed = text.replace(&format!(":{}", egress_lab::kube_api::API_PORT), ":1");
    ensure!(changed != text, "the kubeconfig names no port");
    std::fs::write(&dead, changed)?;
    let pods = AgentPins::of(&trial.node).keys("pods")?;
    let log = context.logs.join("agent-dead-server.log");
    let mut child = trial.start(&[("--kubeconfig", &dead)], &log)?;
    let complaints = || -> Result<usize> {
        let printed = std::fs::read_to_string(&log)?;
        Ok(printed.lines().filter(|line| line.contains("WARN") && line.contains("refused")).count())
    };
    let heard = until_true("the agent logs that the API server does not answer", EFFECT, || Ok(complaints()? > 0));
    // Long enough for several attempts; it continues trying and does not continue talking.
    std::thread::sleep(ATTEMPTS);
    let ended = child.try_wait()?;
    child.kill()?;
    child.wait()?;
    println!("{}", std::fs::read_to_string(&log)?);
    heard?;
    ensure!(ended.is_none(), "the agent has ended ({ended:?}) instead of waiting");
    // All that ask the server fail; together they say it once, and name the server.
    ensure!(complaints()? == 1, "the agent says it {} times in {ATTEMPTS:?}", complaints()?);
    let printed = std::fs::read_to_string(&log)?;
    ensure!(
        printed.lines().any(|line| line.contains("refused") && line.contains("server=http")),
        "no server is named: {printed}"
    );
    ensure!(AgentPins::of(&trial.node).keys("pods")? == pods, "an agent without a cluster has changed the maps");
    Ok(())
}
