//! Programs that the cluster runs on, each with its log.

use std::fs::{self, File};
use std::process::{Child, Stdio};

use crate::prelude::*;
use egress_lab::process::last_lines;

/// Programs that run until this is dropped, the last one first.
#[derive(Default)]
pub(super) struct Processes(Vec<(Child, PathBuf)>);

impl Processes {
    pub(super) fn spawn(
        &mut self,
        netns: &Netns,
        log: PathBuf,
        program: &Path,
        arguments: &[String],
        env: &[(&str, &str)],
    ) -> Result<u32> {
        // One that runs a second time continues its log.
        let output = File::options().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("write {}", log.display()))?;
        let mut command = netns.command(&program.display().to_string());
        command
            .args(arguments)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let child = netns.run(|| command.spawn().with_context(|| format!("start {}", program.display())))?;
        let pid = child.id();
        self.0.push((child, log));
        Ok(pid)
    }

    pub(super) fn ensure_alive(&mut self) -> Result<()> {
        for (child, log) in &mut self.0 {
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "{} has ended:\n{}", log.display(), last_lines(log, 15));
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, _) in self.0.iter_mut().rev() {
            if let Err(error) = child.kill().and_then(|()| child.wait()) {
                eprintln!("nodes: cannot end a process: {error}");
            }
        }
    }
}

/// All processes of the machine.
pub(super) fn all() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").context("read /proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}
