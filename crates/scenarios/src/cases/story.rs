//! The walkthrough as people start it, with `cargo xtask run`: it ends well, and nothing of it is left on the machine:
//! no namespace, mount, process or file, and in the kernel neither its maps nor its programs.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::prelude::*;
use egress_lab::kube_api::KubeApi;
use egress_lab::pins::{HOOKS, bpftool};
use egress_lab::process::last_lines;
use egress_lab::topology::ledger::FOLDER;
use egress_lab::topology::teardown::processes_of;

/// How long the story may take on a busy machine.
const STORY: Duration = Duration::from_secs(150);
const NODES: usize = 3;

pub(super) fn of_egress_ips(context: &LabContext) -> Result<()> {
    succeeds(context, "egress-ip", "y")
}

pub(super) fn of_antrea(context: &LabContext) -> Result<()> {
    succeeds(context, "antrea", "z")
}

pub(super) fn of_cilium(context: &LabContext) -> Result<()> {
    succeeds(context, "cilium", "x")
}

pub(super) fn of_the_egress_router(context: &LabContext) -> Result<()> {
    succeeds(context, "egress-router", "w")
}

fn succeeds(context: &LabContext, story: &str, prefix: &str) -> Result<()> {
    let prefix = format!("{prefix}{}", std::process::id());
    let folder = Path::new(FOLDER).join(&prefix);
    let log = context.logs.join("story.log");
    let output = File::create(&log)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["run", "--story", story, "--no-install", "--prefix", &prefix, "--agent"])
        .arg(&context.built.agent)
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    let begin = Instant::now();
    let mut kernel = Objects::default();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begin.elapsed() > STORY {
            child.kill()?;
            child.wait()?;
        }
        // What the agents pin is known only while the story runs. A folder that goes in the meantime is no error.
        if let Ok(found) = Objects::pinned(&folder.join("bpf")) {
            kernel = kernel.and(found);
        }
        thread::sleep(Duration::from_millis(300));
    };
    println!("{}\nthe story took {} s", last_lines(&log, 4), begin.elapsed().as_secs());
    ensure!(status.success(), "the story ended with {status}:\n{}", last_lines(&log, 60));
    let succeeds = std::fs::read_to_string(&log)?;
    ensure!(succeeds.contains("checks as expected"), "the story has no summary");
    ensure!(kernel.programs.len() >= NODES * HOOKS.len(), "only {} programs were seen", kernel.programs.len());
    println!("{} maps and {} programs were pinned at some time", kernel.maps.len(), kernel.programs.len());
    nothing_left(&prefix, &folder)?;
    // The kernel frees unused objects after a grace period.
    until_true("maps and programs are gone", EFFECT, || Ok(kernel.are_gone()))
}

/// What `--hold` shows is pasted into a shell, as it stands and in its order.
pub(super) fn held_shows_what_can_be_pasted(context: &LabContext) -> Result<()> {
    let prefix = format!("v{}", std::process::id());
    let folder = Path::new(FOLDER).join(&prefix);
    let log = context.logs.join("story.log");
    let output = File::create(&log)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["run", "--hold", "--no-install", "--prefix", &prefix, "--agent"])
        .arg(&context.built.agent)
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    let pasted = until_logged(&log, &["Ctrl-C takes it down."], 1, STORY).and_then(|()| paste(context, &log));
    // An error means that it has ended by itself.
    let stopped = signal::kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT);
    let status = child.wait()?;
    pasted.and(stopped.context("stop the lab")).with_context(|| last_lines(&log, 60))?;
    ensure!(status.success() || status.signal() == Some(Signal::SIGINT as i32), "the lab ended with {status}");
    nothing_left(&prefix, &folder)
}

/// Before what each command prints.
const PASTED: &str = "### ";

fn paste(context: &LabContext, log: &Path) -> Result<()> {
    let text = std::fs::read_to_string(log)?;
    let lines: Vec<&str> = text.lines().collect();
    let commands = lines.windows(2).filter(|pair| pair[0].starts_with("  # ")).map(|pair| pair[1].trim());
    let commands: Vec<&str> = commands.filter(|line| KubeApi::has_kubectl() || !line.starts_with("kubectl")).collect();
    ensure!(commands.len() > 20, "only {} commands are shown", commands.len());
    // Each job has a process group of its own, which ends what the job has started.
    let mut script = "set -m -o pipefail\n".to_owned();
    for command in &commands {
        let is_definition = command.starts_with("export ") || command.contains("() {");
        let is_endless = ["--watch", "--follow", "tail -f"].iter().any(|word| command.contains(word));
        let shown = command.replace('\'', "");
        script += &match (is_definition, is_endless) {
            (true, _) => format!("{command}\n"),
            (_, false) => format!("echo '{PASTED}{shown}'\n{{ {command}\n}} || echo failed with $?: '{shown}'\n"),
            (_, true) => format!(
                "echo '{PASTED}{shown}'\n{{ {command}\n}} & sleep 2; kill -- -$! || echo failed: has ended: '{shown}'\nwait\n"
            ),
        };
    }
    script += "echo all pasted\n";
    let file = context.logs.join("pasted.sh");
    std::fs::write(&file, script)?;
    let ended = Command::new("timeout").args(["90", "bash"]).arg(&file).stdin(Stdio::null()).output()?;
    let [printed, complaints] = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    println!("{} commands\n{printed}\n{complaints}", commands.len());
    let failed: Vec<&str> = printed.lines().filter(|line| line.starts_with("failed")).collect();
    ensure!(failed.is_empty() && printed.contains("all pasted"), "{}, failed: {failed:?}", ended.status);
    // Nothing need have been dropped, and a signal is silent.
    let silent = |(command, printed): &(&str, &str)| {
        printed.trim().is_empty() && !["drops --follow", "kill "].iter().any(|word| command.contains(word))
    };
    let answers = printed.split(PASTED).skip(1).filter_map(|part| part.split_once('\n'));
    let silent: Vec<_> = answers.filter(silent).map(|(command, _)| command.to_owned()).collect();
    ensure!(silent.is_empty(), "these print nothing: {silent:?}");
    ensure!(printed.contains("egress_agent_serving 1"), "the metrics do not say that the agent serves");
    // The example's address is on the node that the commands name.
    let is_served = !KubeApi::has_kubectl() || printed.contains("verdict   snat_here");
    ensure!(is_served, "the node that is shown serves no egress IP");
    // The command that restarts an agent is one of them.
    until_logged(log, &["has ended and is started again"], 1, EFFECT)
}

fn nothing_left(prefix: &str, folder: &Path) -> Result<()> {
    let named = |folder: &str| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
            .map(|entry| entry.path())
            .collect()
    };
    let mut left = named("/run/netns");
    left.extend(named(FOLDER));
    ensure!(left.is_empty(), "the story has left {left:?}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    ensure!(!mounts.contains(&folder.display().to_string()), "the story has left a mount");
    let processes = processes_of(prefix, &std::collections::BTreeSet::new());
    ensure!(processes.is_empty(), "the story has left processes {processes:?}");
    Ok(())
}

/// The kernel's numbers of maps and programs.
#[derive(Default)]
struct Objects {
    maps: BTreeSet<u64>,
    programs: BTreeSet<u64>,
}

impl Objects {
    fn and(mut self, other: Self) -> Self {
        self.maps.extend(other.maps);
        self.programs.extend(other.programs);
        self
    }

    fn pinned(bpffs: &Path) -> Result<Self> {
        let mut found = Self::default();
        for node in std::fs::read_dir(bpffs)? {
            let node = node?;
            // The kernel has files of its own beside the nodes' folders.
            if !node.file_type()?.is_dir() {
                continue;
            }
            for layout in std::fs::read_dir(node.path())? {
                let layout = layout?.path();
                for link in std::fs::read_dir(layout.join("links"))? {
                    let shown = bpftool(&["link", "show", "pinned", &link?.path().to_string_lossy()])?;
                    found.programs.extend(shown["prog_id"].as_u64());
                }
                for map in std::fs::read_dir(layout.join("maps"))? {
                    let shown = bpftool(&["map", "show", "pinned", &map?.path().to_string_lossy()])?;
                    found.maps.extend(shown["id"].as_u64());
                }
            }
        }
        Ok(found)
    }

    fn are_gone(&self) -> bool {
        let gone = |kind: &str, id: &u64| bpftool(&[kind, "show", "id", &id.to_string()]).is_err();
        self.maps.iter().all(|id| gone("map", id)) && self.programs.iter().all(|id| gone("prog", id))
    }
}
