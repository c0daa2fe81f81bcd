//! The first process of the guest: mounts, loads modules, runs the steps of the plan one after the other, and ends the
//! machine. What it and the tests say goes to the second serial line; the first is the kernel's console.
//!
//! Its own lines begin with `guest: ` and are read by `watch`. The last one is `guest: done`: without it, the guest died.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

use super::plan::{MODULES, PLAN, PROGRAMS, Plan, Step};

const LINE: &str = "/dev/ttyS1";

const MOUNTS: [(&str, &str); 6] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("bpf", "/sys/fs/bpf"),
    ("tmpfs", "/run"),
    ("tmpfs", "/tmp"),
];

/// Runs the plan and ends the machine, whatever happens.
pub(crate) fn run() -> Result<()> {
    if std::process::id() != 1 {
        bail!("this is what runs inside of `cargo xtask test --kernel`");
    }
    // The kernel panics when its first process ends; what is printed before shows on its console.
    let outcome = set_up().and_then(|line| {
        let outcome = work(&line);
        match &outcome {
            Ok(()) => tell(&line, "done")?,
            Err(error) => tell(&line, &format!("failed {error:#}"))?,
        }
        // Returns when everything is on the line.
        nix::sys::termios::tcdrain(&line).context("finish writing")?;
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

fn set_up() -> Result<File> {
    for (kind, target) in MOUNTS {
        mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount {target}"))?;
    }
    OpenOptions::new().write(true).open(LINE).with_context(|| format!("open {LINE}"))
}

fn tell(mut line: &File, text: &str) -> Result<()> {
    writeln!(line, "guest: {text}").context("write to the serial line")
}

fn work(line: &File) -> Result<()> {
    let plan = fs::read(PLAN).with_context(|| format!("read {PLAN}"))?;
    let plan: Plan = serde_json::from_slice(&plan).with_context(|| format!("read {PLAN}"))?;
    for name in &plan.modules {
        load(name)?;
    }
    let release = nix::sys::utsname::uname().context("ask for the kernel's version")?;
    tell(line, &format!("up {} ({} modules)", release.release().to_string_lossy(), plan.modules.len()))?;
    let symbols = fs::read_to_string("/proc/kallsyms").context("read the kernel's symbols")?;
    for step in &plan.steps {
        let missing = step.needs_symbol.as_ref().filter(|name| !has_symbol(&symbols, name));
        match missing {
            Some(name) => tell(line, &format!("without {} (this kernel has no {name})", step.name))?,
            None => {
                tell(line, &format!("begins {}", step.name))?;
                let ended = perform(step, line)?;
                tell(line, &format!("ended {} {ended}", step.name))?;
            }
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

/// Runs the step; how it ended: `ok`, or what else.
fn perform(step: &Step, line: &File) -> Result<String> {
    let share = || line.try_clone().map(Stdio::from).context("share the serial line");
    let mut child = Command::new(&step.program)
        .args(&step.arguments)
        .envs(step.environment.iter().map(|(name, value)| (name, value)))
        .env("PATH", PROGRAMS)
        .stdin(Stdio::null())
        .stdout(share()?)
        .stderr(share()?)
        .spawn()
        .with_context(|| format!("start {}", step.program))?;
    wait(&mut child, Duration::from_secs(step.limit_seconds))
}

fn wait(child: &mut Child, limit: Duration) -> Result<String> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait().context("wait for a step")? {
            return Ok(if status.success() { "ok".to_owned() } else { status.to_string() });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().context("kill a step")?;
    child.wait().context("wait for a killed step")?;
    Ok(format!("not within {} s", limit.as_secs()))
}
