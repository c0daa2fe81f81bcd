//! A kernel from the distribution's packages: the image that is booted, and the modules that the tests need.
//!
//! Debian's `cloud` flavour is a third of the ordinary one, and has every module that is needed here.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use egress_toolchain::debs::{self, PackageLists};
use egress_toolchain::{Arch, Paths, Progress};

/// What the tests use and the kernel may have as a module. What it has built in is in none of its files.
const WANTED: [&str; 22] = [
    "ipvlan",
    "veth",
    "bridge",
    "vxlan",
    "dummy",
    "macvlan",
    "vrf",
    "8021q",
    "bonding",
    "sch_ingress",
    "sch_fq",
    "cls_bpf",
    "nf_tables",
    "nft_ct",
    "nft_chain_nat",
    "nft_nat",
    "nft_masq",
    "nft_numgen",
    "nft_reject_inet",
    "nf_flow_table",
    "nf_flow_table_inet",
    "nft_flow_offload",
];

/// What Open vSwitch needs.
const WANTED_BY_OVN: [&str; 2] = ["openvswitch", "vport_geneve"];

/// An unpacked kernel.
pub(super) struct KernelImage {
    /// As `uname -r` will say.
    pub(super) release: String,
    pub(super) vmlinuz: PathBuf,
    /// Every module of the package, by name.
    files: BTreeMap<String, PathBuf>,
}

/// Fetches and unpacks the newest kernel of this version, once. A folder that is there already is used as it is: that
/// boots a kernel which is in no package list (see docs/kernel-support.md).
pub(super) fn ensure(paths: &Paths, (version, arch): (&str, Arch), progress: &Progress) -> Result<KernelImage> {
    let is_version = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_digit())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || ".+-~".contains(c))
    };
    if !is_version(version) {
        bail!("{version:?} is no version of a kernel, like 6.1 or 6.12.117");
    }
    let folder = paths.kernels().join(guest_name(version, arch));
    if !folder.exists() {
        let packages =
            if arch == Arch::own() { PackageLists::OfMachine } else { PackageLists::of_architecture(arch, paths) };
        let choose = || newest(version, arch, &packages).map(|name| vec![name]);
        let what = format!("Linux {version} for {arch}");
        debs::fetch((&folder, &what), &packages, progress, choose, |_| Ok(()))?;
    }
    KernelImage::find(&debs::root(&folder)).with_context(|| format!("{}: remove it and try again", folder.display()))
}

/// Of a kernel's files; this machine's architecture is not named.
pub(super) fn guest_name(version: &str, arch: Arch) -> String {
    if arch == Arch::own() { version.to_owned() } else { format!("{version}-{arch}") }
}

fn newest(version: &str, arch: Arch, packages: &PackageLists) -> Result<String> {
    let escaped = version.replace('.', "\\.").replace('+', "\\+");
    let names = packages.search(&format!("^linux-image-{escaped}([.+-].*)?-cloud-{arch}-unsigned$"))?;
    let newest = names.into_iter().max_by_key(|name| numbers(name));
    newest.with_context(|| format!("no package linux-image-{version}...-cloud-{arch}-unsigned in the package lists"))
}

/// The numbers in a name, so that 6.1.0-9 is before 6.1.0-10.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

impl KernelImage {
    fn find(root: &Path) -> Result<Self> {
        let boot = root.join("boot");
        let mut entries = fs::read_dir(&boot).with_context(|| format!("read {}", boot.display()))?.flatten();
        let (release, vmlinuz) = entries
            .find_map(|entry| {
                let release = entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned();
                Some((release, entry.path()))
            })
            .with_context(|| format!("{} has no vmlinuz", boot.display()))?;
        let mut files = BTreeMap::new();
        for folder in ["lib/modules", "usr/lib/modules"] {
            collect(&root.join(folder).join(&release), &mut files);
        }
        if files.is_empty() {
            bail!("no modules of {release} in {}", root.display());
        }
        Ok(Self { release, vmlinuz, files })
    }

    /// The modules in the order in which they can be loaded, each with its content.
    pub(super) fn modules(&self, with_ovn: bool) -> Result<Vec<(String, Vec<u8>)>> {
        let mut loaded = Vec::new();
        let more: &[&str] = if with_ovn { &WANTED_BY_OVN } else { &[] };
        for name in WANTED.iter().chain(more) {
            self.add(name, &mut loaded)?;
        }
        Ok(loaded)
    }

    fn add(&self, name: &str, loaded: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
        let Some(file) = self.files.get(name) else { return Ok(()) };
        if loaded.iter().any(|(known, _)| known == name) {
            return Ok(());
        }
        let bytes = content(file)?;
        for other in needs(&bytes) {
            self.add(&other, loaded)?;
        }
        loaded.push((name.to_owned(), bytes));
        Ok(())
    }
}

/// Modules below a folder; a missing folder has none.
fn collect(folder: &Path, files: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else if let Some((name, _)) = entry.file_name().to_str().and_then(|name| name.split_once(".ko")) {
            files.insert(name.replace('-', "_"), path);
        }
    }
}

fn content(file: &Path) -> Result<Vec<u8>> {
    let program = match file.extension().and_then(|extension| extension.to_str()) {
        Some("ko") => return fs::read(file).with_context(|| format!("read {}", file.display())),
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => bail!("{}: compressed in an unknown format", file.display()),
    };
    let unpacked = Command::new(program).arg("-dc").arg(file).output();
    let unpacked = unpacked.with_context(|| format!("start {program} to unpack a kernel module"))?;
    if !unpacked.status.success() {
        bail!("{program} cannot unpack {}", file.display());
    }
    Ok(unpacked.stdout)
}

/// A module's own information: `depends=udp_tunnel,ip6_udp_tunnel`, ended by a zero.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|bytes| bytes == KEY) else { return Vec::new() };
    let rest = &module[at + KEY.len()..];
    let list = String::from_utf8_lossy(rest.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
    list.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let names = ["linux-image-6.1.0-9-cloud-amd64-unsigned", "linux-image-6.1.0-10-cloud-amd64-unsigned"];
        assert!(numbers(names[0]) < numbers(names[1]));
    }

    #[test]
    fn a_module_names_what_it_needs() {
        let module = b"license=GPL\0depends=udp_tunnel,ip6-udp-tunnel\0retpoline=Y\0";
        assert_eq!(needs(module), ["udp_tunnel", "ip6_udp_tunnel"]);
        assert_eq!(needs(b"license=GPL\0depends=\0name=veth\0"), [""; 0]);
        assert_eq!(needs(b"no module"), [""; 0]);
    }
}
