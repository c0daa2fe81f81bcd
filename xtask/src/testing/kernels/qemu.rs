//! The machine that another kernel runs on: qemu, the system's own or one from the distribution's packages.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use egress_toolchain::debs::{self, Lists};
use egress_toolchain::{Paths, Progress, packages};

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGES: [&str; 1] = ["qemu-system-x86"];
/// What qemu reads at run time, beside the libraries.
const OWN: [&str; 2] = ["qemu-system-", "seabios"];

/// Processors of the guest.
pub(super) const CPUS: usize = 2;

/// A kernel that complains of itself has failed the test: it stops at once, with its reason on the console; one whose
/// processor is stuck for two minutes does too. The check of
/// the timer is left out because a busy machine's guest may not pass it. The second line is speed alone: a translated
/// guest pays most for memory that the verifier asks for, and tests wait for readers of the kernel's tables. A word that the
/// kernel does not know goes to the first process, which would not start.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 oops=panic watchdog_thresh=60 softlockup_panic=1 \
    mitigations=off no_timer_check init_on_alloc=0 hardened_usercopy=off rcupdate.rcu_expedited=1 -- guest";

/// qemu, and what it needs to find its libraries where it is unpacked and not installed.
pub(super) struct Qemu {
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
    pub(super) fn ensure(paths: &Paths, progress: &Progress) -> Result<Self> {
        if std::env::consts::ARCH != "x86_64" {
            bail!("other kernels are run on x86_64 only");
        }
        if let Some(program) = packages::find(PROGRAM) {
            return Ok(Self { program, libraries: None });
        }
        let folder = paths.kernels().join("qemu");
        if !folder.exists() {
            let lists = Lists::OfMachine;
            debs::fetch(&folder, "qemu", &lists, progress, || debs::closure(&lists, &PACKAGES, &OWN), |_| Ok(()))?;
        }
        let root = debs::root(&folder);
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|library| root.join(library));
        let libraries = std::env::join_paths(libraries).context("the target folder's name has a colon")?;
        Ok(Self { program: root.join("usr/bin").join(PROGRAM), libraries: Some(libraries) })
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
            // Without what guards the kernel from its programs, and with page tables of four levels: each costs time. String
            // instructions are translated byte by byte, and the verifier copies much: the kernel must not think them fast.
            Accelerator::Tcg => command.args([
                "-accel",
                "tcg,thread=multi",
                "-cpu",
                "max,la57=off,smap=off,smep=off,pku=off,erms=off,fsrm=off",
            ]),
        };
        let mut to_file = std::ffi::OsString::from("file:");
        to_file.push(console);
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
            .arg("-serial")
            .arg(to_file)
            .args(["-serial", "stdio"])
            .arg("-kernel")
            .arg(vmlinuz)
            .arg("-initrd")
            .arg(root)
            .args(["-append", KERNEL_ARGUMENTS])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    }
}
