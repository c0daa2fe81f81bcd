//! Open vSwitch and OVN of Debian 13, unpacked below the target folder and run by their own dynamic loader and libraries, on
//! whatever release the machine has. (Open vSwitch 3.1 of Debian 12 ends by a failed assertion of its connection tracking.)

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Paths;
use super::command::{Progress, output};
use super::debs::{self, PackageLists};

const SUITE: &str = "trixie";
const PACKAGES: [&str; 3] = ["openvswitch-switch", "ovn-central", "ovn-host"];
/// Beside the libraries.
const OWN: [&str; 2] = ["openvswitch-", "ovn-"];

/// The unpacked programs.
#[derive(Debug, Clone)]
pub struct OvnPrograms {
    root: PathBuf,
    loader: PathBuf,
    libraries: PathBuf,
}

/// Fetches and unpacks the packages, once.
pub fn ensure(paths: &Paths, progress: &Progress) -> Result<OvnPrograms> {
    let folder = paths.ovn();
    if !folder.exists() {
        let lists = PackageLists::of_release(SUITE, paths);
        let choose = || lists.closure(&PACKAGES, &OWN);
        debs::fetch((&folder, "Open vSwitch and OVN"), &lists, progress, choose, |_| Ok(()))?;
    }
    OvnPrograms::expected(paths)
}

impl OvnPrograms {
    /// Those that [`ensure`] has unpacked.
    pub fn expected(paths: &Paths) -> Result<Self> {
        let root = debs::root(&paths.ovn());
        let (loader, libraries) = debs::loader(&root)?;
        Ok(Self { root, loader, libraries })
    }

    /// The command line that starts a program.
    pub fn line(&self, program: &str) -> Result<Vec<String>> {
        let folders = ["usr/bin", "usr/sbin", "usr/lib/openvswitch-switch", "usr/lib/openvswitch-common"];
        let is_program = |path: &PathBuf| {
            fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        };
        let Some(path) = folders.iter().map(|folder| self.root.join(folder).join(program)).find(is_program) else {
            bail!("the packages of Open vSwitch and OVN have no program {program}");
        };
        let parts = [&self.loader, Path::new("--library-path"), &self.libraries, path.as_path()];
        Ok(parts.iter().map(|part| part.display().to_string()).collect())
    }

    pub fn command(&self, program: &str) -> Result<Command> {
        let line = self.line(program)?;
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]);
        Ok(command)
    }

    /// Everything that the lab runs and reads, for a machine that has nothing else.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        const PROGRAMS: [&str; 9] = [
            "ovs-vsctl",
            "ovs-appctl",
            "ovs-ofctl",
            "ovsdb-tool",
            "ovsdb-server",
            "ovs-vswitchd",
            "ovn-nbctl",
            "ovn-northd",
            "ovn-controller",
        ];
        let mut files = BTreeSet::from([self.loader.clone()]);
        files.extend(["vswitch", "ovn-nb", "ovn-sb"].map(|name| self.schema(name)));
        for program in PROGRAMS {
            let line = self.line(program)?;
            let (loader, rest) = line.split_first().context("an empty command line")?;
            files.extend(rest.last().map(PathBuf::from));
            let listed = output(Command::new(loader).arg("--list").args(rest))?;
            files.extend(listed.split_whitespace().map(PathBuf::from).filter(|path| path.starts_with(&self.root)));
        }
        Ok(files.into_iter().collect())
    }

    /// The schema of a database: `vswitch`, `ovn-nb`, `ovn-sb`.
    pub fn schema(&self, name: &str) -> PathBuf {
        let folder = if name == "vswitch" { "openvswitch" } else { "ovn" };
        self.root.join(format!("usr/share/{folder}/{name}.ovsschema"))
    }
}
