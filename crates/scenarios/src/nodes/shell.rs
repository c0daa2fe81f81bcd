//! The administrator's shell: what the documents show is typed here as it stands there, with the names of this cluster in the place
//! of words in capitals.
//!
//! It stands in a folder of its own with a copy of the repository's `deploy` in it, and in the lab's router, from which every node and the
//! API server can be reached. Kubeconfig and home folder are the cluster's.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

use super::programs::NodePrograms;
use crate::prelude::*;
use egress_toolchain::{Built, Paths};

pub(super) struct Shell {
    host: Netns,
    pub(super) folder: PathBuf,
    environment: [(&'static str, String); 3],
}

impl Shell {
    pub(super) fn new(lab: &Lab, programs: &NodePrograms, cluster: &Path) -> Result<Self> {
        let (folder, bin, home) = (cluster.join("shell"), cluster.join("bin"), cluster.join("home"));
        for one in [&folder, &bin, &home] {
            fs::create_dir_all(one)?;
        }
        let paths = Paths::find()?;
        let copied = Command::new("cp").arg("-r").arg(paths.root.join("deploy")).arg(&folder).status()?;
        ensure!(copied.success(), "cannot copy deploy");
        let built = Built::expected(&paths, false);
        let here = [
            ("kubectl", Some(programs.kubectl.clone())),
            ("helm", programs.helm.clone()),
            ("egress-agent", Some(built.agent.clone())),
            ("egress-router", Some(built.router.clone())),
            ("kubectl-egress", Some(built.plugin())),
        ];
        for (name, program) in here {
            if let Some(program) = program {
                symlink(&program, bin.join(name)).with_context(|| format!("{name}: {}", program.display()))?;
            }
        }
        let environment = [
            ("HOME", home.display().to_string()),
            ("KUBECONFIG", cluster.join("admin.kubeconfig").display().to_string()),
            ("PATH", format!("{}:{}", bin.display(), programs.path)),
        ];
        Ok(Self { host: lab.ext().clone(), folder, environment })
    }

    /// From where every node and the API server can be reached.
    pub(super) fn netns(&self) -> &Netns {
        &self.host
    }

    pub(super) fn has(&self, program: &str) -> bool {
        self.output("sh", &["-c", &format!("command -v {program}")]).is_ok_and(|output| output.status.success())
    }

    /// Replaces a text that stands once in a file.
    pub(super) fn edit(&self, file: &str, former: &str, text: &str) -> Result<()> {
        let path = self.folder.join(file);
        let before = fs::read_to_string(&path)?;
        ensure!(before.matches(former).count() == 1, "{former} is not once in {file}");
        Ok(fs::write(path, before.replace(former, text))?)
    }

    fn output(&self, program: &str, arguments: &[&str]) -> Result<Output> {
        self.host.run(|| {
            let mut command = self.host.command(program);
            command.args(arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
            command.current_dir(&self.folder).stdin(Stdio::null());
            command.output().with_context(|| format!("cannot start {program}"))
        })
    }

    /// Runs a program; a failure is an error with what it printed. Returns its standard output.
    pub(super) fn exec(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let output = self.output(program, arguments)?;
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{program} {}: {}\n{stdout}", arguments.join(" "), stderr.trim());
        Ok(stdout.into_owned())
    }

    /// Types a line of a document, with values for its words in capitals. Shows and returns what it prints,
    /// errors included.
    pub(super) fn types(&self, line: &str, values: &[(&str, &str)]) -> Result<String> {
        let (code, printed) = self.types_to_its_end(line, values)?;
        ensure!(code == Some(0), "`{}` ends with {code:?}:\n{printed}", filled(line, values));
        Ok(printed)
    }

    /// The same for one that may fail: its exit code too.
    pub(super) fn types_to_its_end(&self, line: &str, values: &[(&str, &str)]) -> Result<(Option<i32>, String)> {
        let line = filled(line, values);
        println!("$ {line}");
        let output = self.output("sh", &["-c", &format!("{{ {line}\n}} 2>&1")])?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        print!("{printed}");
        Ok((output.status.code(), printed))
    }
}

/// Longer words first, of which others may be parts.
fn filled(line: &str, values: &[(&str, &str)]) -> String {
    let mut values = values.to_vec();
    values.sort_by_key(|(word, _)| std::cmp::Reverse(word.len()));
    values.iter().fold(line.to_owned(), |line, (word, value)| line.replace(word, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_capitals_are_filled_in() {
        let values = [("NAME", "eip"), ("NAMESPACE", "simpson"), ("ADDRESS:PORT", "192.0.2.1:80")];
        let line = "kubectl egress check --target ADDRESS:PORT --object NAME -n NAMESPACE";
        assert_eq!(filled(line, &values), "kubectl egress check --target 192.0.2.1:80 --object eip -n simpson");
    }
}
