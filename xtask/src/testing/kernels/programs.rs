//! What runs in a guest: programs of this machine where it has the guest's architecture, else of the distribution's packages of
//! that architecture, which are unpacked and not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use egress_toolchain::debs::{self, PackageLists};
use egress_toolchain::{Arch, Paths, Progress, output, packages};

/// The packages of the programs that tests call.
const PACKAGES: [&str; 6] = ["iproute2", "nftables", "bpftool", "iputils-ping", "ethtool", "util-linux"];

/// Where the guest's programs come from.
pub(super) struct GuestPrograms {
    /// The packages' root and the folder of their libraries; `None` for this machine's own.
    unpacked: Option<(PathBuf, &'static str)>,
    /// Takes debug information off.
    strip: String,
}

impl GuestPrograms {
    pub(super) fn ensure(paths: &Paths, arch: Arch, progress: &Progress) -> Result<Self> {
        if arch == Arch::own() {
            return Ok(Self { unpacked: None, strip: "strip".to_owned() });
        }
        let folder = paths.packages(arch.name()).join("guest");
        if !folder.exists() {
            let foreign = PackageLists::of_architecture(arch, paths);
            let choose = || foreign.closure(&PACKAGES, &PACKAGES);
            debs::fetch((&folder, "the guest's programs"), &foreign, progress, choose, |_| Ok(()))?;
        }
        let unpacked = Some((debs::root(&folder), arch.multiarch()));
        Ok(Self { unpacked, strip: format!("{}-strip", arch.multiarch()) })
    }

    pub(super) fn find(&self, name: &str) -> Result<PathBuf> {
        let found = match &self.unpacked {
            None => packages::find(name),
            Some((root, _)) => {
                let folders = ["usr/bin", "usr/sbin", "bin", "sbin"];
                folders.iter().map(|folder| root.join(folder).join(name)).find(|file| file.exists())
            }
        };
        found.with_context(|| format!("there is no {name} for the guest"))
    }

    pub(super) fn strip(&self) -> Option<PathBuf> {
        packages::find(&self.strip)
    }

    /// The libraries that a program is linked with, the loader included, each with its place in the guest. Which ones a program of
    /// another architecture needs is not asked: it gets all. Our own programs are static then.
    pub(super) fn libraries(&self, program: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
        let Some((root, multiarch)) = &self.unpacked else {
            let text = output(Command::new("ldd").arg(program))?;
            return Ok(text.lines().filter_map(library).map(|path| (path.clone(), path)).collect());
        };
        if !program.starts_with(root) {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for folder in ["lib".to_owned(), format!("lib/{multiarch}"), format!("usr/lib/{multiarch}")] {
            for entry in fs::read_dir(root.join(&folder)).into_iter().flatten().flatten() {
                let is_library = entry.file_name().to_str().is_some_and(is_named_for_the_loader);
                // What a link leads to may be in a package that is not here.
                if is_library && entry.path().is_file() {
                    found.push((entry.path(), Path::new("/").join(&folder).join(entry.file_name())));
                }
            }
        }
        Ok(found)
    }
}

/// `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)` or `/lib64/ld-linux-x86-64.so.2 (0x...)`.
fn library(line: &str) -> Option<PathBuf> {
    line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from)
}

/// Programs ask for `libmnl.so.0`, which is a link to `libmnl.so.0.2.0`.
fn is_named_for_the_loader(file: &str) -> bool {
    let version = file.split_once(".so.").map(|(_, version)| version);
    version.is_some_and(|version| !version.is_empty() && version.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_as_ldd_prints_them() {
        let path = |line| library(line).map(|path| path.display().to_string());
        assert_eq!(path("\tlinux-vdso.so.1 (0x00007ffd)"), None);
        assert_eq!(path("\tlibc.so.6 => /lib/libc.so.6 (0x0000)").as_deref(), Some("/lib/libc.so.6"));
        assert_eq!(path("\t/lib64/ld-linux-x86-64.so.2 (0x0)").as_deref(), Some("/lib64/ld-linux-x86-64.so.2"));
    }

    #[test]
    fn a_library_counts_once() {
        for file in ["libmnl.so.0", "ld-linux-aarch64.so.1", "libc.so.6"] {
            assert!(is_named_for_the_loader(file), "{file}");
        }
        for file in ["libmnl.so.0.2.0", "libmnl.so", "README.so.", "libmnl.so.0.gz"] {
            assert!(!is_named_for_the_loader(file), "{file}");
        }
    }
}
