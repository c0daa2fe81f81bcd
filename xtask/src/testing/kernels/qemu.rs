//! The machine that another kernel runs on: qemu, the system's own or one from the distribution's packages.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use egress_toolchain::debs::{self, PackageLists};
use egress_toolchain::{Arch, Paths, Progress, packages};

/// What qemu reads at run time, beside the libraries.
const OWN: [&str; 2] = ["qemu-system-", "seabios"];

/// Processors of the guest.
pub(super) const CPUS: usize = 2;

/// A kernel that complains of itself has failed the test: it stops at once, with its reason on the console; one whose
/// processor is stuck for two minutes does too. The second line is speed alone: a translated guest pays most for memory that the
/// verifier asks for, and tests wait for readers of the kernel's tables. A word that the kernel does not know goes to the first
/// process, which would not start.
const KERNEL_ARGUMENTS: &str = "quiet panic=-1 oops=panic watchdog_thresh=60 softlockup_panic=1 \
    mitigations=off init_on_alloc=0 hardened_usercopy=off rcupdate.rcu_expedited=1 -- guest";

/// qemu, and what it needs to find its libraries where it is unpacked and not installed.
pub(super) struct Qemu {
    arch: Arch,
    program: PathBuf,
    libraries: Option<std::ffi::OsString>,
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
        if let Some(program) = packages::find(name) {
            return Ok(Self { arch, program, libraries: None });
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
        Ok(Self { arch, program: root.join("usr/bin").join(name), libraries: Some(libraries) })
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
        let mut to_file = std::ffi::OsString::from("file:");
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
        let mut command = Command::new(&self.program);
        if let Some(libraries) = &self.libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        match accelerator {
            // Where we are in a guest ourselves, that register may be refused.
            Accelerator::Kvm => command.args(["-accel", "kvm", "-cpu", "max,-arch-capabilities"]),
            Accelerator::Tcg => command.args(["-accel", "tcg,thread=multi"]).args(self.translated()),
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
