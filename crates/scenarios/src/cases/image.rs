//! The agent from its image, in a container by `runc`: the unpacked root file system for reading only, the DaemonSet's
//! capabilities, its mounts and its variables. It takes over from an agent outside, serves, answers `status`, ends on
//! SIGTERM, and cleans up. What a kubelet adds, above all the runtime's profile for seccomp, is not there.
//!
//! Without an image (`cargo xtask image`) or runc the test is skipped.

use std::fs::{self, File};
use std::process::{Child, Output, Stdio};

use crate::prelude::*;
use egress_lab::process::last_lines;
use egress_lab::test_cluster::LOADED;
use egress_lab::topology::netns::MARK;
use egress_lab::{MANAGEMENT, UPLINK, confinement};
use egress_toolchain::{BINARY, Image, Paths, packages};

const BEFORE: &str = "172.18.0.110";
const FRESH: &str = "172.18.0.111";

pub(super) fn agent_from_the_image_serves(context: &LabContext) -> Result<()> {
    let image = Image::expected(&Paths::find()?);
    if !image.exists() || packages::find("runc").is_none() || packages::find("umoci").is_none() {
        return Err(Skip("no image was built here (`cargo xtask image`), or runc or umoci is not installed").into());
    }
    let pods = vec![pod("one", "red", 1, &[]), pod("two", "red", 2, &[])];
    let mut cluster = TestCluster::start(context, pods)?;
    cluster.assignable(1, true)?;
    cluster.assign(&egress_ip("before", &[BEFORE], &all(), &all()))?;
    cluster.is_seen_as("one", Some(BEFORE), None)?;

    cluster.agent(1)?.kill()?;
    let kubeconfig = cluster.api.node_kubeconfig().to_owned();
    let bundle = Bundle::new(&cluster.lab, node(1)?, &image, kubeconfig)?;
    let mut container = bundle.start("run", &["run"])?;
    until_true("the agent in the container has loaded its programs", LOADED, || {
        ensure!(container.try_wait()?.is_none(), "it has ended:\n{}", last_lines(&bundle.log("run"), 15));
        Ok(fs::read_to_string(bundle.log("run"))?.contains("data plane is up"))
    })?;
    cluster.is_seen_as("one", Some(BEFORE), None)?;
    // Only this agent can claim it, and steer its node's pods to it.
    cluster.remove("before")?;
    cluster.assign(&egress_ip("fresh", &[FRESH], &all(), &all()))?;
    for name in ["one", "two"] {
        cluster.is_seen_as(name, Some(FRESH), None)?;
    }
    let status = bundle.exec(&["egress-agent", "status"])?;
    let printed = String::from_utf8_lossy(&status.stdout).into_owned();
    println!("{printed}");
    ensure!(printed.contains(FRESH) && printed.contains("running for"), "{}", String::from_utf8_lossy(&status.stderr));
    let written = bundle.exec(&[BINARY, "codegen", "crd"])?;
    ensure!(written.status.success(), "the image's program is another");

    bundle.kill()?;
    let ended = container.wait()?;
    ensure!(ended.success(), "the container ends with {ended}:\n{}", last_lines(&bundle.log("run"), 15));
    ensure!(fs::read_dir(&bundle.node.bpffs)?.next().is_some(), "what outlives the agent has gone with it");
    ensure!(bundle.start("cleanup", &["cleanup"])?.wait()?.success(), "{}", last_lines(&bundle.log("cleanup"), 15));
    ensure!(!bundle.node.bpffs.exists(), "cleanup has left pins");
    Ok(())
}

/// An unpacked image, and where its containers run.
struct Bundle {
    node: LabNode,
    folder: PathBuf,
    logs: PathBuf,
    kubeconfig: PathBuf,
    name: String,
}

impl Bundle {
    fn new(lab: &Lab, number: plan::NodeNumber, image: &Image, kubeconfig: PathBuf) -> Result<Self> {
        let folder = lab.folder().join("bundle");
        image.unpack(&folder)?;
        let name = format!("{}-agent", lab.prefix());
        let bundle = Self { node: lab.node(number).clone(), folder, logs: lab.logs().to_owned(), kubeconfig, name };
        bundle.configure(lab.prefix(), &["run"])?;
        Ok(bundle)
    }

    fn log(&self, what: &str) -> PathBuf {
        self.logs.join(format!("container-{what}.log"))
    }

    /// As a kubelet would: the image's configuration, with what the DaemonSet asks for.
    fn configure(&self, prefix: &str, arguments: &[&str]) -> Result<()> {
        let file = self.folder.join("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
        let entry = config["process"]["args"].as_array().and_then(|args| args.first()).cloned();
        ensure!(entry == Some(json!(BINARY)), "the image's entry point is {entry:?}");
        let granted = confinement::granted("daemonset")?;
        let granted: Vec<String> = granted.iter().map(|name| format!("CAP_{}", name.to_uppercase())).collect();
        let process = &mut config["process"];
        process["args"] = std::iter::once(BINARY).chain(arguments.iter().copied()).collect();
        process["terminal"] = json!(false);
        process["noNewPrivileges"] = json!(true);
        process["capabilities"] = json!({"bounding": granted, "effective": granted, "permitted": granted});
        let variables = [
            (MARK, prefix.to_owned()),
            ("EGRESS_AGENT_NODE_NAME", self.node.name()),
            ("EGRESS_AGENT_KUBECONFIG", "/etc/egress-agent/kubeconfig".to_owned()),
            ("EGRESS_AGENT_UPLINK", UPLINK.to_owned()),
            ("EGRESS_AGENT_MGMT_PORT", MANAGEMENT.to_owned()),
            ("EGRESS_AGENT_CLUSTER_SUBNETS", format!("{},{}", plan::CLUSTER_V4, plan::CLUSTER_V6)),
            ("EGRESS_AGENT_SERVICE_CIDRS", format!("{},{}", plan::SERVICES_V4, plan::SERVICES_V6)),
            ("EGRESS_AGENT_BPFFS", format!("/bpf/{}", self.node.name())),
            ("OVN_EGRESSIP_HEALTHCHECK_PORT", "9107".to_owned()),
        ];
        let path = process["env"].as_array().into_iter().flatten().find(|one| *one == "PATH=/usr/bin").cloned();
        let variables = variables.into_iter().map(|(name, value)| json!(format!("{name}={value}")));
        process["env"] = std::iter::once(path.context("the image has no PATH")?).chain(variables).collect();
        config["root"]["readonly"] = json!(true);
        // The host's network, and no cgroup of its own.
        let kept = |list: &Value, field: &str, without: &[&str]| -> Vec<Value> {
            let items = list.as_array().into_iter().flatten();
            items.filter(|one| !without.iter().any(|name| one[field] == *name)).cloned().collect()
        };
        let namespaces = kept(&config["linux"]["namespaces"], "type", &["network", "cgroup", "user"]);
        config["linux"]["namespaces"] = namespaces.into();
        let mut mounts = kept(&config["mounts"], "type", &["cgroup", "cgroup2"]);
        mounts.retain(|one| one["destination"].as_str().is_some_and(|path| !path.starts_with("/etc/")));
        let pins = self.node.bpffs.parent().context("no folder of pins")?;
        let bind = |from: &std::path::Path, to: &str, how: &str| json!({"source": from, "destination": to, "type": "bind", "options": ["rbind", how]});
        mounts.push(bind(pins, "/bpf", "rw"));
        mounts.push(bind(&self.kubeconfig, "/etc/egress-agent/kubeconfig", "ro"));
        mounts.push(json!({"source": "tmpfs", "destination": "/run/egress-agent", "type": "tmpfs", "options": ["nosuid", "nodev"]}));
        config["mounts"] = mounts.into();
        if let Some(linux) = config["linux"].as_object_mut() {
            linux.remove("resources");
            linux.insert(
                "readonlyPaths".to_owned(),
                json!(["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]),
            );
        }
        Ok(fs::write(&file, config.to_string())?)
    }

    /// A container of the image's program with these arguments.
    fn start(&self, what: &str, arguments: &[&str]) -> Result<Child> {
        self.configure(self.node.host.prefix(), arguments)?;
        let log = File::create(self.log(what))?;
        let errors = log.try_clone()?;
        let folder = self.folder.display().to_string();
        self.node.host.run(|| {
            let mut command = self.node.host.command("runc");
            command.arg(self.state()).args(["run", "--bundle", &folder, &self.name]);
            command.stdin(Stdio::null()).stdout(log).stderr(errors);
            command.spawn().context("cannot start runc")
        })
    }

    /// Its state goes with the lab.
    fn state(&self) -> String {
        format!("--root={}", self.folder.join("containers").display())
    }

    fn exec(&self, command: &[&str]) -> Result<Output> {
        let state = self.state();
        self.node.host.output("runc", &[&[state.as_str(), "exec", &self.name], command].concat())
    }

    fn kill(&self) -> Result<()> {
        self.node.host.exec("runc", &[&self.state(), "kill", &self.name, "TERM"]).map(drop)
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // One that has ended is gone, and there is nothing to say.
        drop(self.node.host.output("runc", &[&self.state(), "delete", "--force", &self.name]));
    }
}
