//! The machine that another kernel runs on: qemu, the system's own, or one from packages of the distribution or of Debian 13.
//!
//! Without KVM each of the guest's processors is a thread that translates, which qemu does safely since 8.1. Where neither the
//! system nor its distribution has that, Debian 13's qemu is unpacked and run by its own dynamic loader, as Open vSwitch and OVN
//! are. Where that cannot be had, one thread translates for all processors, which is slower.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use egress_toolchain::debs::{self, PackageLists};
use egress_toolchain::{Arch, Paths, Progress, packages};

/// What qemu reads at run time, beside the libraries.
const OWN: [&str; 2] = ["qemu-system-", "seabios"];

/// The release of Debian whose qemu is used where the machine's is older than [`SAFE_THREADS`]: it has 10.0.
const SUITE: &str = "trixie";

/// Processors of the guest.
pub(super) const CPUS: usize = 2;

/// Before this version a processor's thread may translate code while another one writes it, and keep what it read: where the
/// kernel patches itself (static keys), it then meets the breakpoint of a patch that is over, and dies (`int3` in a function).
/// The commit "accel/tcg: Always lock pages before translation" is of 8.1.
const SAFE_THREADS: (u32, u32) = (8, 1);

/// Major and minor number, of "QEMU emulator version 7.2.22 (Debian ...)".
fn version_of(text: &str) -> Option<(u32, u32)> {
    numbers(text.split_once("version ")?.1)
}

/// Likewise, of a package's version: "1:7.2+dfsg-7+deb12u18".
fn version_of_package(text: &str) -> Option<(u32, u32)> {
    numbers(text.split_once(':').map_or(text, |(_epoch, version)| version))
}

fn numbers(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// A kernel that complains of itself has failed the test: it stops at once, with its reason on the console; one whose
/// processor is stuck for two minutes does too. The second line is speed alone: a translated guest pays most for memory that the
/// verifier asks for, and tests wait for readers of the kernel's tables. A word that the kernel does not know goes to the first
/// process, which would not start.
const KERNEL_ARGUMENTS: &str = "quiet panic=-1 oops=panic watchdog_thresh=60 softlockup_panic=1 \
    mitigations=off init_on_alloc=0 hardened_usercopy=off rcupdate.rcu_expedited=1 -- guest";

/// qemu, and how it is started.
pub(super) struct Qemu {
    arch: Arch,
    program: PathBuf,
    /// Where it is unpacked and not installed.
    unpacked: Option<UnpackedQemu>,
    /// Its processors may be translated by threads of their own.
    has_safe_threads: bool,
}

/// Packages of qemu, and what it needs to find its parts there.
enum UnpackedQemu {
    /// Of this machine's release.
    Own { libraries: OsString },
    /// Of Debian 13.
    OtherRelease { root: PathBuf, loader: PathBuf, libraries: PathBuf },
}

/// How the guest's processor is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accelerator {
    /// By this machine's processor.
    Kvm,
    /// By translation: works everywhere, ten times slower.
    Tcg,
}

impl Qemu {
    pub(super) fn ensure(paths: &Paths, arch: Arch, progress: &Progress) -> Result<Self> {
        let (name, package, folder) = match arch {
            Arch::Amd64 => ("qemu-system-x86_64", "qemu-system-x86", "qemu"),
            Arch::Arm64 => ("qemu-system-aarch64", "qemu-system-arm", "qemu-arm"),
        };
        let installed = packages::find(name).map(|program| Self::new(arch, program, None));
        let own_is_safe = match &installed {
            Some(qemu) => qemu.has_safe_threads,
            None => {
                let version = PackageLists::OfMachine.version(package);
                version.as_deref().and_then(version_of_package) >= Some(SAFE_THREADS)
            }
        };
        if !own_is_safe {
            match Self::of_other_release(paths, arch, (name, package, folder), progress) {
                Ok(qemu) => return Ok(qemu),
                Err(error) => println!("{error:#}: this machine's qemu is used, by one thread if it is older than 8.1"),
            }
        }
        if let Some(qemu) = installed {
            return Ok(qemu);
        }
        let folder = paths.kernels().join(folder);
        if !folder.exists() {
            let choose = || PackageLists::OfMachine.closure(&[package], &OWN);
            debs::fetch((&folder, name), &PackageLists::OfMachine, progress, choose, |_| Ok(()))?;
        }
        let root = debs::root(&folder);
        let multiarch = Arch::own().multiarch();
        let libraries = [format!("usr/lib/{multiarch}"), format!("lib/{multiarch}")].map(|library| root.join(library));
        let libraries = std::env::join_paths(libraries).context("the target folder's name has a colon")?;
        Ok(Self::new(arch, root.join("usr/bin").join(name), Some(UnpackedQemu::Own { libraries })))
    }

    fn of_other_release(
        paths: &Paths,
        arch: Arch,
        (name, package, folder): (&str, &str, &str),
        progress: &Progress,
    ) -> Result<Self> {
        let folder = paths.kernels().join(format!("{folder}-{SUITE}"));
        if !folder.exists() {
            let lists = PackageLists::of_release(SUITE, paths);
            let choose = || lists.closure(&[package], &OWN);
            debs::fetch((&folder, name), &lists, progress, choose, |_| Ok(()))?;
        }
        let root = debs::root(&folder);
        let (loader, libraries) = debs::loader(&root)?;
        let program = root.join("usr/bin").join(name);
        let qemu = Self::new(arch, program, Some(UnpackedQemu::OtherRelease { root, loader, libraries }));
        if !qemu.has_safe_threads {
            bail!("{} does not start; remove the folder and try again", folder.display());
        }
        Ok(qemu)
    }

    fn new(arch: Arch, program: PathBuf, unpacked: Option<UnpackedQemu>) -> Self {
        let mut qemu = Self { arch, program, unpacked, has_safe_threads: false };
        let version = qemu.command().arg("--version").output();
        let version = version.ok().and_then(|output| version_of(&String::from_utf8_lossy(&output.stdout)));
        qemu.has_safe_threads = version >= Some(SAFE_THREADS);
        qemu
    }

    fn command(&self) -> Command {
        match &self.unpacked {
            None => Command::new(&self.program),
            Some(UnpackedQemu::Own { libraries }) => {
                let mut command = Command::new(&self.program);
                command.env("LD_LIBRARY_PATH", libraries);
                command
            }
            // Started by the loader, it takes the loader's place for its own, and looks for firmware beside it.
            Some(UnpackedQemu::OtherRelease { root, loader, libraries }) => {
                let mut command = Command::new(loader);
                command.arg("--library-path").arg(libraries).arg(&self.program);
                for firmware in ["usr/share/qemu", "usr/share/seabios"] {
                    command.arg("-L").arg(root.join(firmware));
                }
                command
            }
        }
    }

    pub(super) fn is_native(&self) -> bool {
        self.arch == Arch::own()
    }

    /// By translation, without what guards the kernel from its programs: each guard costs time.
    const fn translated(&self) -> [&'static str; 2] {
        match self.arch {
            // Page tables of four levels. String instructions are translated byte by byte, and the verifier copies much: the kernel
            // must not think them fast.
            Arch::Amd64 => ["-cpu", "max,la57=off,smap=off,smep=off,pku=off,erms=off,fsrm=off"],
            Arch::Arm64 => ["-cpu", "max,pauth=off"],
        }
    }

    /// The serial lines, the kernel's console into the file `console`, and the guest's line to our pipe.
    fn lines(&self, command: &mut Command, console: &Path) {
        let mut to_file = OsString::from("file:");
        to_file.push(console);
        command.arg("-serial").arg(to_file);
        match self.arch {
            Arch::Amd64 => command.args(["-serial", "stdio"]),
            // The board has one line; the second is on the bus.
            Arch::Arm64 => command.args(["-chardev", "stdio,id=line", "-device", "pci-serial,chardev=line"]),
        };
    }

    /// A machine that boots the kernel, writes the kernel's console into a file and its second serial line to our pipe,
    /// and ends when the guest does.
    pub(super) fn machine(&self, accelerator: Accelerator, vmlinuz: &Path, root: &Path, console: &Path) -> Command {
        let mut command = self.command();
        match accelerator {
            // Where we are in a guest ourselves, that register may be refused.
            Accelerator::Kvm => command.args(["-accel", "kvm", "-cpu", "max,-arch-capabilities"]),
            Accelerator::Tcg => {
                let threads = if self.has_safe_threads { "tcg,thread=multi" } else { "tcg,thread=single" };
                command.args(["-accel", threads]).args(self.translated())
            }
        };
        let console_line = match self.arch {
            // The check of the timer is left out because a busy machine's guest may not pass it.
            Arch::Amd64 => "ttyS0 no_timer_check",
            Arch::Arm64 => {
                command.args(["-machine", "virt,gic-version=3"]);
                "ttyAMA0"
            }
        };
        self.lines(&mut command, console);
        command
            .args([
                "-smp",
                &CPUS.to_string(),
                "-m",
                "3072",
                "-display",
                "none",
                "-monitor",
                "none",
                "-nic",
                "none",
                "-no-reboot",
            ])
            .arg("-kernel")
            .arg(vmlinuz)
            .arg("-initrd")
            .arg(root)
            .args(["-append", &format!("console={console_line} {KERNEL_ARGUMENTS}")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read() {
        let old = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022\n";
        assert_eq!(version_of(old), Some((7, 2)));
        assert_eq!(version_of("QEMU emulator version 10.0.2"), Some((10, 0)));
        assert!(version_of(old) < Some(SAFE_THREADS) && None < Some(SAFE_THREADS));
        assert_eq!(version_of("no qemu"), None);
    }

    #[test]
    fn the_version_of_a_package_is_read() {
        assert_eq!(version_of_package("1:7.2+dfsg-7+deb12u18+b3"), Some((7, 2)));
        assert_eq!(version_of_package("1:10.0.13+ds-0+deb13u1"), Some((10, 0)));
        assert_eq!(version_of_package("8.2"), Some((8, 2)));
        assert_eq!(version_of_package("none"), None);
    }
}
