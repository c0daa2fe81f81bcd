//! The distribution's packages, unpacked below the target folder and not installed.
//!
//! `apt-get download` and `dpkg-deb -x` need neither root nor a place in the system, and leave alone what someone else
//! installed.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::command::{Progress, is_root, output, run};
use super::{Arch, Paths, packages};

/// What the packages are unpacked into, in the folder that `fetch` makes.
pub fn root(folder: &Path) -> PathBuf {
    folder.join("root")
}

/// The dynamic loader of packages of another release, and the folder of their libraries. The machine's own loader does not fit
/// another release's libc.
pub fn loader(root: &Path) -> Result<(PathBuf, PathBuf)> {
    let libraries = root.join("usr/lib").join(Arch::own().multiarch());
    // `ld-linux-x86-64.so.2`, `ld-linux-aarch64.so.1`.
    let is_loader =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld-linux-"));
    let mut entries = fs::read_dir(&libraries).into_iter().flatten().flatten().map(|entry| entry.path());
    let Some(loader) = entries.find(is_loader) else {
        bail!("{} has no dynamic loader; remove the folder and try again", libraries.display());
    };
    Ok((loader, libraries))
}

/// Which package lists are read.
#[derive(Clone, Debug)]
pub enum PackageLists {
    /// This machine's own.
    OfMachine,
    /// Those of another release of Debian, from the archive that the machine's own sources name. They are kept in a folder of
    /// ours: the machine's configuration is not changed.
    OfRelease { suite: &'static str, lists: PathBuf },
    /// Another one's: its lists are kept in a folder of ours, so that dpkg and apt of this machine do not learn of it.
    OfArchitecture { arch: Arch, lists: PathBuf },
}

impl PackageLists {
    pub fn of_architecture(arch: Arch, paths: &Paths) -> Self {
        Self::OfArchitecture { arch, lists: paths.packages(arch.name()) }
    }

    pub fn of_release(suite: &'static str, paths: &Paths) -> Self {
        Self::OfRelease { suite, lists: paths.packages(suite) }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // As root, apt would rather be another user, who often cannot read our folder: say so beforehand, not in a warning.
        command.args(["-o", "APT::Sandbox::User=root"]).env("LC_ALL", "C");
        let Some(lists) = self.folder() else { return command };
        let folder = |key: &str, below: &str| format!("{key}={}", lists.join(below).display());
        let mut options = vec![
            folder("Dir::State::lists", "lists"),
            folder("Dir::Cache", "cache"),
            "Acquire::Languages=none".to_owned(),
            // What is installed here is of another architecture, or of another release.
            "Dir::State::status=/dev/null".to_owned(),
        ];
        match self {
            Self::OfMachine => {}
            Self::OfRelease { .. } => {
                options.extend([folder("Dir::Etc::sourcelist", SOURCES), "Dir::Etc::sourceparts=/dev/null".to_owned()]);
            }
            Self::OfArchitecture { arch, .. } => {
                options.extend([format!("APT::Architecture={arch}"), format!("APT::Architectures::={arch}")]);
            }
        }
        command.args(options.iter().flat_map(|option| ["-o", option]));
        command
    }

    /// Of lists that are ours.
    fn folder(&self) -> Option<&Path> {
        match self {
            Self::OfMachine => None,
            Self::OfRelease { lists, .. } | Self::OfArchitecture { lists, .. } => Some(lists),
        }
    }

    fn are_empty(&self) -> bool {
        self.folder().map_or_else(packages::lists_are_empty, |lists| packages::are_empty(&lists.join("lists")))
    }

    /// One unreachable source among several is no reason to stop, as with [`packages::update_lists`].
    fn update(&self) {
        let Some(lists) = self.folder() else { return packages::update_lists() };
        let made = ["lists/partial", "cache"].map(|folder| fs::create_dir_all(lists.join(folder)));
        let made = made.into_iter().collect::<Result<(), _>>().map_err(anyhow::Error::from);
        let updated = made
            .and_then(|()| self.write_sources())
            .and_then(|()| run(self.command("apt-get").args(["-qq", "update"])));
        if let Err(error) = updated {
            println!("{error:#}; going on with the lists that there are");
        }
    }

    fn write_sources(&self) -> Result<()> {
        let Self::OfRelease { suite, lists } = self else { return Ok(()) };
        let line = |archive| format!("deb [signed-by={KEYRING}] {archive} {suite} main\n");
        let sources: String = found_archives()?.into_iter().map(line).collect();
        fs::write(lists.join(SOURCES), sources).with_context(|| format!("write the sources of {suite}"))
    }

    /// Lists of our own need no rights.
    fn may_update(&self) -> bool {
        is_root() || self.folder().is_some()
    }

    /// These packages, and of what they depend on: the packages of their `own` (by how the name begins), and the libraries
    /// that the system lacks, which are all where it has another architecture or release.
    ///
    /// apt works the dependencies out as if nothing were installed, so that no conflict with an installed package counts.
    pub fn closure(&self, packages: &[&str], own: &[&str]) -> Result<Vec<String>> {
        let plan = output(
            self.command("apt-get")
                .args(["--simulate", "-o", "Dir::State::status=/dev/null", "install", "--no-install-recommends"])
                .args(packages),
        )
        .with_context(|| format!("the package lists do not have {}", packages.join(", ")))?;
        let installed = match self.folder() {
            None => installed()?,
            Some(_) => HashSet::new(),
        };
        let wanted = |name: &&str| {
            let own = own.iter().any(|prefix| name.starts_with(prefix));
            let library = (name.starts_with("lib") || *name == "zlib1g") && !name.ends_with("-dev");
            own || library && !installed.contains(*name)
        };
        let names: Vec<String> = planned(&plan).filter(wanted).map(str::to_owned).collect();
        if let Some(absent) = packages.iter().find(|package| !names.iter().any(|name| name == *package)) {
            bail!("apt-get does not plan to install {absent}");
        }
        Ok(names)
    }

    /// Names of packages that match a regular expression as apt understands it.
    pub fn search(&self, pattern: &str) -> Result<Vec<String>> {
        let text = output(self.command("apt-cache").args(["search", "--names-only", pattern]))?;
        Ok(text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect())
    }

    /// The version of the package that would be installed, as Debian writes it. `None` without the package, or without lists.
    pub fn version(&self, package: &str) -> Option<String> {
        let text = output(self.command("apt-cache").args(["policy", package])).ok()?;
        candidate(&text).map(str::to_owned)
    }

    fn download(&self, folder: &Path, names: &[String]) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        run(self.command("apt-get").args(["-qq", "download"]).args(names).current_dir(folder))
    }
}

/// The sources of [`PackageLists::OfRelease`], in the folder of its lists.
const SOURCES: &str = "sources.list";
/// Signs Debian's releases.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Debian's archive, as the machine's sources name it. Others have addresses of that shape too; those without the release are
/// passed over.
fn found_archives() -> Result<BTreeSet<String>> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let parts = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    files.extend(parts.map(|entry| entry.path()));
    let texts = files.iter().filter_map(|file| fs::read_to_string(file).ok());
    let found: BTreeSet<String> =
        texts.flat_map(|text| archives(&text).map(str::to_owned).collect::<Vec<_>>()).collect();
    if found.is_empty() {
        bail!("the package sources of this machine name no archive of Debian (an address that ends in /debian)");
    }
    Ok(found)
}

/// The addresses in a file of sources, of either format, that are Debian's main archive.
fn archives(sources: &str) -> impl Iterator<Item = &str> {
    sources
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .flat_map(str::split_whitespace)
        .map(|word| word.trim_end_matches('/'))
        .filter(|word| word.contains("://") && word.ends_with("/debian"))
}

/// Makes the folder with the chosen packages unpacked in it, all or nothing.
///
/// `choose` names the packages; it is asked again after the package lists were brought up to date. `finish` adds what
/// else belongs into the folder, which then still has another name.
pub fn fetch(
    (folder, what): (&Path, &str),
    lists: &PackageLists,
    progress: &Progress,
    choose: impl Fn() -> Result<Vec<String>>,
    finish: impl Fn(&Path) -> Result<()>,
) -> Result<()> {
    for tool in ["apt-get", "dpkg-deb"] {
        if packages::find(tool).is_none() {
            bail!("{tool} is not here, so Debian's packages of {what} cannot be used");
        }
    }
    let parts = beside(folder);
    let names = with_fresh_lists(lists, progress, || {
        let names = choose()?;
        progress.step(&format!("downloading {what}: {}", names.join(" ")));
        remove(&parts)?;
        lists.download(&parts.join("debs"), &names).with_context(|| format!("download {what}"))?;
        Ok(names)
    })?;
    progress.step(&format!("unpacking {} packages into {}", names.len(), folder.display()));
    unpack(&parts)?;
    finish(&parts)?;
    remove(folder)?;
    fs::rename(&parts, folder).with_context(|| format!("rename {} to {}", parts.display(), folder.display()))
}

/// A name for the unfinished folder. `with_extension` would cut a version number short.
fn beside(folder: &Path) -> PathBuf {
    let mut name = folder.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Tries; where that fails and we may, brings the package lists up to date and tries again.
fn with_fresh_lists<T>(lists: &PackageLists, progress: &Progress, attempt: impl Fn() -> Result<T>) -> Result<T> {
    if lists.may_update() && lists.are_empty() {
        progress.step("there are no package lists yet: running apt-get update");
        lists.update();
    }
    let first = match attempt() {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    if !lists.may_update() {
        bail!("{first:#} (the package lists may be missing or old: run `apt-get update` as root)");
    }
    progress.step(&format!("{first:#}: running apt-get update"));
    lists.update();
    attempt()
}

/// Of the output of `apt-cache policy`.
fn candidate(policy: &str) -> Option<&str> {
    let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    (version != "(none)").then_some(version)
}

/// The names in the lines `Inst NAME (VERSION ...)`.
fn planned(simulation: &str) -> impl Iterator<Item = &str> {
    simulation.lines().filter_map(|line| line.strip_prefix("Inst ")).filter_map(|rest| rest.split_whitespace().next())
}

fn installed() -> Result<HashSet<String>> {
    let text = output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status} ${Package}\n"]))?;
    Ok(text.lines().filter_map(|line| line.strip_prefix("installed ")).map(str::to_owned).collect())
}

fn unpack(parts: &Path) -> Result<()> {
    let debs = parts.join("debs");
    for entry in fs::read_dir(&debs).with_context(|| format!("read {}", debs.display()))? {
        let deb = entry.with_context(|| format!("read {}", debs.display()))?.path();
        run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(root(parts)))?;
    }
    remove(&debs)
}

/// Removes a folder that may be absent.
fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_of_apt_is_read() {
        let text = "Reading state information...\nInst libllvm22 (1:22.1.8-1 Debian:12 [amd64])\nInst rustc-web (1.96)\nConf rustc-web (1.96)\n";
        assert_eq!(planned(text).collect::<Vec<_>>(), ["libllvm22", "rustc-web"]);
    }

    #[test]
    fn the_candidate_is_read() {
        let policy =
            "qemu-system-x86:\n  Installed: (none)\n  Candidate: 1:7.2+dfsg-7\n  Version table:\n     1:7.2 500\n";
        assert_eq!(candidate(policy), Some("1:7.2+dfsg-7"));
        assert_eq!(candidate("runc:\n  Installed: (none)\n  Candidate: (none)\n"), None);
        assert_eq!(candidate(""), None);
    }

    #[test]
    fn the_archive_is_found_in_both_formats() {
        let list =
            "# deb http://old.example/debian bullseye main\ndeb [arch=amd64] http://a.example/debian/ bookworm main\n";
        assert_eq!(archives(list).collect::<Vec<_>>(), ["http://a.example/debian"]);
        let parts = "Types: deb\nURIs: http://b.example/debian-security http://b.example/debian\nSuites: bookworm\n";
        assert_eq!(archives(parts).collect::<Vec<_>>(), ["http://b.example/debian"]);
        assert_eq!(archives("deb http://c.example/ubuntu noble main\n").count(), 0);
    }

    #[test]
    fn an_unfinished_folder_keeps_the_whole_version() {
        assert_eq!(beside(Path::new("kernels/6.1")), Path::new("kernels/6.1.new"));
    }
}
