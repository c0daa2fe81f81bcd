//! A node for one test: a thread with its own network namespace and mount namespace.
//!
//! ```text
//!   test's namespace                       the outside's namespace
//!   breth0  172.18.0.2/16, fd00:172:18::2  --- out0  172.18.0.1/16, fd00:172:18::1
//!   ovn-k8s-mp0  10.244.1.2/24             --- pods0 10.244.1.1/24
//!   /run/egress-test: a BPF file system
//! ```
//!
//! Nothing is visible outside: the namespaces end with the thread and with the outside's descriptor, and with them devices,
//! mounts and pins.

use std::fs::File;
use std::future::Future;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::skips::skipped;
use aya::maps::{Array, HashMap, Map, MapData};
use aya::programs::{SchedClassifier, TcAttachType};
use egress_common::abi::{ABI_VERSION, Config, Lease};
use egress_core::plan::executor::Executor;
use egress_datapath::names::Hook;
use egress_datapath::{Attachment, Dataplane, Settings, StartError, cleanup, probe};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

pub(crate) const UPLINK: &str = "breth0";
pub(crate) const MGMT: &str = "ovn-k8s-mp0";
const MOUNT: &str = "/run";

/// The node and its surroundings.
pub(crate) struct TestNode {
    pub(crate) outside: File,
    pub(crate) bpffs: PathBuf,
}

/// Runs the test on its own node; without root it is skipped with a note.
pub(crate) fn on_node<F, Fut>(test: F)
where
    F: FnOnce(TestNode) -> Fut + Send + 'static,
    Fut: Future<Output = ()>,
{
    if !nix::unistd::geteuid().is_root() {
        skipped("needs root");
        return;
    }
    // Named after the test.
    let thread = std::thread::Builder::new().name(std::thread::current().name().unwrap_or_default().to_owned());
    let thread = thread.spawn(move || {
        let node = TestNode::make();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("make a runtime");
        runtime.block_on(test(node));
    });
    let thread = thread.expect("start a thread");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

impl TestNode {
    fn make() -> Self {
        let outside = new_network();
        ip("link set lo up\n");
        let node = new_network();
        drop(node);
        private_mounts();
        let node = Self { outside, bpffs: Path::new(MOUNT).join("bpf/egress-agent") };
        std::fs::create_dir("/run/bpf").expect("make the mount point");
        mount_type("bpf", "/run/bpf");
        ip("link set lo up\n");
        node.make_uplink();
        node.make_mgmt();
        node
    }

    pub(crate) fn make_uplink(&self) {
        let outside = self.outside_path();
        ip(&format!(
            "link add {UPLINK} type veth peer name out0 netns {outside}\n\
             addr add 172.18.0.2/16 dev {UPLINK}\n\
             addr add fd00:172:18::2/64 dev {UPLINK} nodad\n\
             link set {UPLINK} up\n\
             route add default via 172.18.0.1\n"
        ));
        self.outside(|| {
            ip("addr add 172.18.0.1/16 dev out0\naddr add fd00:172:18::1/64 dev out0 nodad\nlink set out0 up\n");
        });
    }

    pub(crate) fn make_mgmt(&self) {
        let outside = self.outside_path();
        ip(&format!(
            "link add {MGMT} mtu 1400 type veth peer name pods0 netns {outside}\n\
             addr add 10.244.1.2/24 dev {MGMT}\n\
             link set {MGMT} up\n"
        ));
        self.outside(|| ip("addr add 10.244.1.1/24 dev pods0\nlink set pods0 up\n"));
    }

    /// The namespace's path for iproute2.
    pub(crate) fn outside_path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.outside.as_raw_fd())
    }

    /// Runs something in the outside's network namespace.
    pub(crate) fn outside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&self.outside, CloneFlags::CLONE_NEWNET).expect("enter the outside");
                work()
            });
            thread.join().expect("the outside's work")
        })
    }

    pub(crate) fn settings(&self) -> Settings {
        settings(self.bpffs.clone())
    }

    pub(crate) async fn start(&self) -> Dataplane {
        start(self.settings()).await
    }

    pub(crate) fn pin(&self, below: &str) -> PathBuf {
        self.bpffs.join(format!("v{ABI_VERSION}")).join(below)
    }

    pub(crate) fn map<K: aya::Pod, V: aya::Pod>(&self, name: &str) -> HashMap<MapData, K, V> {
        let data = MapData::from_pin(self.pin("maps").join(name)).expect("open a pinned map");
        HashMap::try_from(Map::HashMap(data)).expect("a hash map of these types")
    }

    pub(crate) fn array<V: aya::Pod>(&self, name: &str) -> Array<MapData, V> {
        let data = MapData::from_pin(self.pin("maps").join(name)).expect("open a pinned map");
        Array::try_from(Map::Array(data)).expect("an array of these")
    }

    pub(crate) fn config_map(&self) -> Array<MapData, Config> {
        self.array("config")
    }

    pub(crate) fn config(&self) -> Config {
        self.config_map().get(&0, 0).expect("read the config")
    }
}

/// Settings of a data plane with its pins here.
pub(crate) fn settings(bpffs: PathBuf) -> Settings {
    Settings { bpffs, attachment: requested(), ..Settings::new(UPLINK, MGMT) }
}

/// The environment may request filters on a kernel that also has links.
fn requested() -> Option<Attachment> {
    std::env::var_os("EGRESS_TEST_ATTACHMENT").map(|requested| {
        assert_eq!(requested, "clsact", "the only possible value");
        Attachment::Clsact
    })
}

/// How programs are attached in this run.
pub(crate) fn attachment() -> Attachment {
    requested().unwrap_or_else(|| probe().expect("a kernel that can serve").attachment)
}

/// Starts the data plane. The tunnel port is free in a test that calls this: where it seems taken, a process that another
/// test is just starting still holds a copy of the socket that checked it.
pub(crate) async fn start(settings: Settings) -> Dataplane {
    let is_passing = |error: &StartError| is_busy(error) || matches!(error, StartError::TunnelPortTaken { .. });
    let attempt = async || Dataplane::start(settings.clone()).await;
    let dataplane = patiently(is_passing, attempt).await.expect("start the data plane");
    // There is no lease keeper.
    let lease = dataplane.lease();
    assert!(lease.renew(lease.read(), Lease::ENDLESS), "no program ends it");
    dataplane
}

/// Starts the data plane, and returns the error.
pub(crate) async fn refused(settings: Settings) -> StartError {
    let started = patiently(is_busy, async || Dataplane::start(settings.clone()).await).await;
    started.map(drop).expect_err("must not start")
}

/// Cleans up and lists what could not be removed.
pub(crate) async fn clean(settings: &Settings) -> Vec<String> {
    patiently(is_busy, async || cleanup(settings).await).await.expect("clean up").problems
}

fn is_busy(error: &StartError) -> bool {
    matches!(error, StartError::Busy { .. })
}

/// Retries while a process that another test is just starting still holds copies of this one's locks and sockets.
pub(crate) async fn patiently<T>(
    is_passing: impl Fn(&StartError) -> bool,
    mut attempt: impl AsyncFnMut() -> Result<T, StartError>,
) -> Result<T, StartError> {
    for _ in 0..100 {
        match attempt().await {
            Err(error) if is_passing(&error) => tokio::time::sleep(Duration::from_millis(10)).await,
            other => return other,
        }
    }
    attempt().await
}

/// Moves this thread into a new network namespace and returns a descriptor of it.
fn new_network() -> File {
    unshare(CloneFlags::CLONE_NEWNET).expect("make a network namespace");
    File::open("/proc/thread-self/ns/net").expect("open the network namespace")
}

fn private_mounts() {
    unshare(CloneFlags::CLONE_NEWNS).expect("make a mount namespace");
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("make mounts private");
    mount_type("tmpfs", MOUNT);
}

fn mount_type(kind: &str, target: &str) {
    mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>).expect("mount a file system");
}

/// Runs `ip -batch` in this thread's network namespace.
pub(crate) fn ip(script: &str) {
    let mut child = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().expect("run ip");
    child.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("write to ip");
    assert!(child.wait().expect("wait for ip").success(), "ip refused:\n{script}");
}

/// The host forwards IPv4 packets.
pub(crate) fn forward() {
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("the node forwards");
}

/// The output of a command.
pub(crate) fn output(command: &[&str]) -> String {
    let (program, arguments) = command.split_first().expect("a command");
    let output = Command::new(program).args(arguments).output().expect("run a command");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Index and link address of a device, by `ip`.
pub(crate) fn device(name: &str) -> (u32, [u8; 6]) {
    let line = output(&["ip", "-o", "link", "show", name]);
    let index = line.split(':').next().and_then(|index| index.parse().ok()).expect("an index");
    let mac = line.split("link/ether ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a link address");
    let mut bytes = [0; 6];
    for (byte, text) in bytes.iter_mut().zip(mac.split(':')) {
        *byte = u8::from_str_radix(text, 16).expect("a byte");
    }
    (index, bytes)
}

pub(crate) fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Device and direction of a hook.
pub(crate) fn place(hook: Hook) -> (&'static str, TcAttachType) {
    match hook {
        Hook::ToNetdev => (UPLINK, TcAttachType::Egress),
        Hook::FromNetdev => (UPLINK, TcAttachType::Ingress),
        Hook::FromOverlay => ("egress0", TcAttachType::Ingress),
        Hook::ToPod => (MGMT, TcAttachType::Egress),
        Hook::FromPod => (MGMT, TcAttachType::Ingress),
    }
}

/// Names and IDs of the programs of a hook, first to last; none if the device is missing.
pub(crate) fn programs(hook: Hook) -> Vec<(String, u32)> {
    let (device, direction) = place(hook);
    programs_on(device, direction)
}

/// The same of any device.
pub(crate) fn programs_on(device: &str, direction: TcAttachType) -> Vec<(String, u32)> {
    match attachment() {
        Attachment::Tcx => links_on(device, direction).unwrap_or_default(),
        Attachment::Clsact => filters_on(device, direction),
    }
}

/// The linked programs; `None` if the device is missing, or the kernel has no links.
pub(crate) fn links(hook: Hook) -> Option<Vec<(String, u32)>> {
    let (device, direction) = place(hook);
    links_on(device, direction)
}

fn links_on(device: &str, direction: TcAttachType) -> Option<Vec<(String, u32)>> {
    let (_, programs) = SchedClassifier::query_tcx(device, direction).ok()?;
    Some(programs.iter().map(|program| (program.name_as_str().unwrap_or("?").to_owned(), program.id())).collect())
}

/// The kernel lists filters by priority.
pub(crate) fn filters(hook: Hook) -> Vec<(String, u32)> {
    let (device, direction) = place(hook);
    filters_on(device, direction)
}

fn filters_on(device: &str, direction: TcAttachType) -> Vec<(String, u32)> {
    let direction = if direction == TcAttachType::Ingress { "ingress" } else { "egress" };
    let arguments = ["-json", "filter", "show", "dev", device, direction];
    let output = Command::new("tc").args(arguments).output().expect("run tc");
    let Ok(serde_json::Value::Array(filters)) = serde_json::from_slice(&output.stdout) else { return Vec::new() };
    let program = |filter: &serde_json::Value| {
        let program = filter.pointer("/options/prog")?;
        Some((program["name"].as_str()?.to_owned(), program["id"].as_u64()?.try_into().ok()?))
    };
    filters.iter().filter_map(program).collect()
}

pub(crate) fn is_attached(hook: Hook) -> bool {
    // The kernel cuts names to 15 characters.
    programs(hook).first().is_some_and(|(name, _)| hook.name().starts_with(name.as_str()))
}

/// The limit for something that takes at most `here` on an idle machine: an emulated guest needs more.
pub(crate) fn patience(here: Duration) -> Duration {
    here * slowness()
}

/// Whether this is an emulated guest.
pub(crate) fn is_slow() -> bool {
    slowness() > 1
}

fn slowness() -> u32 {
    std::env::var("EGRESS_TEST_PATIENCE").map_or(1, |factor| factor.parse().expect("a factor"))
}

/// Waits for something that should happen soon, and returns how long it took.
pub(crate) async fn eventually(what: &str, happened: impl FnMut() -> bool) -> Duration {
    within(Duration::from_secs(5), what, happened).await
}

/// The same with another limit.
pub(crate) async fn within(limit: Duration, what: &str, mut happened: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < patience(limit), "{what}: not in time");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    start.elapsed()
}
