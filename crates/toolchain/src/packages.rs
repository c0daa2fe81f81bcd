//! The distribution packages that the lab and the tests need at run time: one table, and one function that installs them.
//!
//! A program counts as present when it can be found, however it came there. What is missing is installed where we are
//! root and may, and is otherwise named in one message. `kubectl` is in no package of Debian or Ubuntu: it is used
//! where someone installed it, and never asked for here.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::arch::Arch;
use super::command::{is_root, run};

/// What something is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Bringing up the lab: namespaces, devices, the CNI's firewall rules.
    Lab,
    /// The walkthrough and the tests on the lab: traffic, captures, offloads.
    Traffic,
    /// Loading programs and looking at their maps.
    Programs,
    /// A guest with another kernel: what its tests call, and unpacking its modules.
    Guest,
    /// Building libFuzzer.
    Fuzz,
    /// The container image, and starting it.
    Image,
    /// The image for another architecture.
    Cross(Arch),
    /// The plugins of a bridge CNI.
    Cni,
    /// Real nodes: a container runtime, and what their pods run. Never installed, since a runtime is a service of the machine.
    Nodes,
}

/// Names a folder with packages that are unpacked (`dpkg -x`) and not installed.
pub const UNPACKED: &str = "EGRESS_TEST_NODE_PACKAGES";

/// One program, and the packages that bring it.
struct Tool {
    program: &'static str,
    debian: &'static str,
    ubuntu: &'static str,
    purposes: &'static [Purpose],
}

/// A program whose package has the same name everywhere.
const fn tool(program: &'static str, package: &'static str, purposes: &'static [Purpose]) -> Tool {
    Tool { program, debian: package, ubuntu: package, purposes }
}

use Purpose::{Cni, Cross, Fuzz, Guest, Image, Lab, Nodes, Programs, Traffic};

const TOOLS: &[Tool] = &[
    tool("ip", "iproute2", &[Lab, Traffic, Programs, Guest]),
    tool("tc", "iproute2", &[Lab, Programs, Guest]),
    tool("ss", "iproute2", &[Programs, Guest]),
    tool("nft", "nftables", &[Lab, Programs, Guest]),
    tool("iptables-legacy", "iptables", &[Programs]),
    tool("setpriv", "util-linux", &[Lab, Programs]),
    tool("xz", "xz-utils", &[Guest]),
    tool("c++", "g++", &[Fuzz]),
    tool("musl-gcc", "musl-tools", &[Image]),
    tool("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu", &[Cross(Arch::Arm64)]),
    tool("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu", &[Cross(Arch::Amd64)]),
    tool("umoci", "umoci", &[Image, Nodes]),
    tool("runc", "runc", &[Image, Nodes]),
    tool("containerd", "containerd", &[Nodes]),
    tool("ctr", "containerd", &[Nodes]),
    tool("busybox", "busybox-static", &[Nodes]),
    tool("iptables", "iptables", &[Nodes]),
    tool("host-local", "containernetworking-plugins", &[Cni, Nodes, Guest]),
    tool("ethtool", "ethtool", &[Lab]),
    tool("ping", "iputils-ping", &[Traffic, Programs, Guest]),
    tool("curl", "curl", &[Traffic]),
    tool("tcpdump", "tcpdump", &[Traffic]),
    // Ubuntu's packages of the kernel's tools; `find` looks where they put it.
    Tool {
        program: "bpftool",
        debian: "bpftool",
        ubuntu: "linux-tools-common linux-tools-generic",
        purposes: &[Traffic, Programs, Guest],
    },
];

/// Sees to everything that the purpose needs. With `may_install` false nothing is installed, only named.
pub fn ensure(purpose: Purpose, may_install: bool) -> Result<()> {
    let missing = missing(purpose);
    if missing.is_empty() {
        return Ok(());
    }
    let programs = missing.iter().map(|tool| tool.program).collect::<Vec<_>>().join(", ");
    let packages = packages(&missing, is_ubuntu());
    let advice = format!("missing: {programs}; install with `apt-get install {}`", packages.join(" "));
    if purpose == Nodes {
        bail!("{advice}, or unpack these packages into a folder that {UNPACKED} names");
    }
    if !may_install {
        bail!("{advice}, or leave out --no-install");
    }
    if !is_root() {
        bail!("{advice} as root");
    }
    if find("apt-get").is_none() {
        bail!("missing: {programs}, and no apt-get to install them with: use the distribution's package manager");
    }
    install(&packages).with_context(|| advice)?;
    let left = self::missing(purpose);
    if !left.is_empty() {
        let programs = left.iter().map(|tool| tool.program).collect::<Vec<_>>().join(", ");
        bail!("still missing after installing {}: {programs}", packages.join(" "));
    }
    Ok(())
}

fn missing(purpose: Purpose) -> Vec<&'static Tool> {
    TOOLS.iter().filter(|tool| tool.purposes.contains(&purpose) && find(tool.program).is_none()).collect()
}

/// The packages of these tools, each once.
fn packages(tools: &[&Tool], ubuntu: bool) -> Vec<&'static str> {
    let mut names = Vec::new();
    for tool in tools {
        let list = if ubuntu { tool.ubuntu } else { tool.debian };
        for name in list.split(' ') {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}

fn is_ubuntu() -> bool {
    std::fs::read_to_string("/etc/os-release").is_ok_and(|text| text.lines().any(|line| line == "ID=ubuntu"))
}

/// Lists that are missing or old show only when the installation fails; then once more with fresh ones.
pub(super) fn install(packages: &[&str]) -> Result<()> {
    println!("installing distribution packages: {}", packages.join(" "));
    if lists_are_empty() {
        println!("there are no package lists yet: running apt-get update");
        update_lists();
    }
    let attempt = || run(apt_get().args(["-qq", "install", "-y", "--no-install-recommends"]).args(packages));
    if attempt().is_ok() {
        return Ok(());
    }
    println!("running apt-get update, then trying again");
    update_lists();
    attempt()
}

/// `apt-get update`. Only root may. One unreachable source among several is no reason to stop: whether the lists have
/// what is needed shows at the next attempt.
pub(super) fn update_lists() {
    if let Err(error) = run(apt_get().args(["-qq", "update"])) {
        println!("{error:#}; going on with the lists that there are");
    }
}

/// As in a fresh image of a container or a cloud.
pub(super) fn lists_are_empty() -> bool {
    are_empty(Path::new("/var/lib/apt/lists"))
}

/// Whether this folder of package lists has none.
pub(super) fn are_empty(folder: &Path) -> bool {
    let is_list = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().contains("_Packages");
    !std::fs::read_dir(folder).into_iter().flatten().flatten().any(is_list)
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    // Someone else's installation may be under way: wait for it.
    command.args(["-o", "DPkg::Lock::Timeout=120"]);
    // Without a terminal of its own dpkg draws no progress bars into our output.
    command.args(["-o", "Dpkg::Use-Pty=0"]);
    command
}

/// Where a program is. Root's PATH is not always set, so the administrator's folders count too; Ubuntu puts bpftool into a
/// folder of the kernel's version, and distributions put CNI plugins into one of their own.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administrator = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/lib/cni"].map(PathBuf::from);
    unpacked()
        .into_iter()
        .chain(std::env::split_paths(&path))
        .chain(administrator)
        .chain(kernel_tools(program))
        .map(|folder| folder.join(program))
        .find(|file| is_program(file))
}

/// Where unpacked packages have programs.
pub fn unpacked() -> Vec<PathBuf> {
    let folder = std::env::var_os(UNPACKED).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let below = |folder: PathBuf| ["usr/bin", "usr/sbin", "bin", "sbin", "usr/lib/cni"].map(|part| folder.join(part));
    folder.map(below).into_iter().flatten().collect()
}

fn kernel_tools(program: &str) -> Vec<PathBuf> {
    if program != "bpftool" {
        return Vec::new();
    }
    let mut folders: Vec<PathBuf> = std::fs::read_dir("/usr/lib/linux-tools")
        .map(|entries| entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect())
        .unwrap_or_default();
    folders.sort();
    folders.reverse();
    folders
}

/// Ubuntu's /usr/sbin/bpftool is a script that only knows the tools of the running kernel: the real one is better.
fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    let executable = std::fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    let stand_in = file.ends_with("sbin/bpftool") && std::fs::read(file).is_ok_and(|bytes| bytes.starts_with(b"#!"));
    executable && !stand_in
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_named_once_and_by_distribution() {
        let tools: Vec<&Tool> = TOOLS.iter().filter(|tool| tool.purposes.contains(&Programs)).collect();
        let both = ["iproute2", "nftables", "iptables", "util-linux", "iputils-ping"];
        assert_eq!(packages(&tools, false), [&both[..], &["bpftool"]].concat());
        assert_eq!(packages(&tools, true), [&both[..], &["linux-tools-common", "linux-tools-generic"]].concat());
    }

    #[test]
    fn programs_are_found_by_name() {
        assert!(find("sh").is_some());
        assert_eq!(find("no-such-program-at-all"), None);
    }
}
