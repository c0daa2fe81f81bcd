//! The first process of the guest: mounts, loads modules, runs the suites of the plan one after the other (`suite`), and
//! ends the machine. What it and the tests say goes to the second serial line; the first is the kernel's console.
//!
//! Its own lines begin with `guest: ` and are read by `watch`. The last one is `guest: done`: without it, the guest died.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

use egress_toolchain::output;

use super::line::SerialLine;
use super::pace;
use super::plan::{KernelPlan, MODULES, PLAN, PROGRAMS};
use super::suite;

/// The board of an arm64 guest has one line of another kind; ours is the first of this kind.
const LINE: &str = if cfg!(target_arch = "aarch64") { "/dev/ttyS0" } else { "/dev/ttyS1" };

/// Where what is pinned outlives its process.
pub(super) const BPFFS: &str = "/sys/fs/bpf";

/// Not on `/tmp`, where the clone may be.
const MOUNTS: [(&str, &str); 5] =
    [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("bpf", BPFFS), ("tmpfs", "/run")];

/// Runs the plan and ends the machine, whatever happens.
pub(crate) fn run() -> Result<()> {
    if std::process::id() != 1 {
        bail!("this is what runs inside of `cargo xtask test --kernel`");
    }
    // The kernel panics when its first process ends; what is printed before shows on its console.
    let outcome = set_up().and_then(|line| {
        let outcome = work(&line);
        match &outcome {
            Ok(()) => line.tell("done")?,
            Err(error) => line.tell(&format!("broke {error:#}"))?,
        }
        line.drain()?;
        outcome
    });
    if let Err(error) = &outcome {
        eprintln!("guest: {error:#}");
    }
    match reboot(RebootMode::RB_AUTOBOOT) {
        Ok(never) => match never {},
        Err(error) => Err(error).context("end the machine"),
    }
}

fn set_up() -> Result<SerialLine> {
    for (kind, target) in MOUNTS {
        mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount {target}"))?;
    }
    let file = OpenOptions::new().write(true).open(LINE).with_context(|| format!("open {LINE}"))?;
    Ok(SerialLine::new(file))
}

fn work(line: &SerialLine) -> Result<()> {
    let plan = fs::read(PLAN).with_context(|| format!("read {PLAN}"))?;
    let plan: KernelPlan = serde_json::from_slice(&plan).with_context(|| format!("read {PLAN}"))?;
    for name in &plan.modules {
        load(name)?;
    }
    let release = nix::sys::utsname::uname().context("ask for the kernel's version")?;
    line.tell(&format!("up {} ({} modules)", release.release().to_string_lossy(), plan.modules.len()))?;
    let ip = format!("{PROGRAMS}/ip");
    // The lab's API server is there.
    output(Command::new(&ip).args(["link", "set", "lo", "up"]))?;
    let (_, pace) = pace::measure(&ip)?;
    let patience = pace::patience(plan.host_pace, pace);
    let clock = fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    line.tell(&format!(
        "pace: starting a program takes {pace:.0?}, {:.0?} on the host; time limits are {patience} times as long; \
         clock {}",
        plan.host_pace,
        clock.unwrap_or_default().trim()
    ))?;
    let symbols = fs::read_to_string("/proc/kallsyms").context("read the kernel's symbols")?;
    for suite in &plan.suites {
        let missing = suite.needs_symbol.as_ref().filter(|name| !has_symbol(&symbols, name));
        match missing {
            Some(name) => line.tell(&format!("without {} (this kernel has no {name})", suite.name))?,
            None => suite::run(suite, patience, line)?,
        }
    }
    Ok(())
}

fn has_symbol(symbols: &str, name: &str) -> bool {
    symbols.lines().any(|line| line.split_whitespace().nth(2) == Some(name))
}

fn load(name: &str) -> Result<()> {
    let path = Path::new(MODULES).join(name);
    let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
    finit_module(&file, c"", ModuleInitFlags::empty()).with_context(|| format!("load the module {name}"))
}
