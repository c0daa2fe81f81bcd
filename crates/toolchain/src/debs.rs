//! The distribution's packages, unpacked below the target folder and not installed.
//!
//! `apt-get download` and `dpkg-deb -x` need neither root nor a place in the system, and leave alone what someone else
//! installed. What root is needed for is only `apt-get update`, where the package lists are missing or old.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::command::{Progress, is_root, output, run};
use super::packages;

/// Which package lists are read.
pub enum Lists {
    /// Those of the machine.
    OfMachine,
    /// Those of another release of Debian, from the archive that the machine's own sources name, kept in a folder of their own:
    /// the machine's configuration is not changed.
    OfRelease { suite: &'static str, folder: PathBuf },
}

/// Signs Debian's releases.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

impl Lists {
    /// A command of apt that reads these lists.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        if let Self::OfRelease { folder, .. } = self {
            let place = |name: &str| folder.join(name).display().to_string();
            for option in [
                format!("Dir::Etc::sourcelist={}", place("sources.list")),
                "Dir::Etc::sourceparts=/dev/null".to_owned(),
                format!("Dir::State::lists={}", place("lists")),
                format!("Dir::Cache={}", place("cache")),
            ] {
                command.args(["-o", &option]);
            }
        }
        command
    }

    fn are_empty(&self) -> bool {
        match self {
            Self::OfMachine => packages::lists_are_empty(),
            Self::OfRelease { folder, .. } => !packages::has_lists(&folder.join("lists")),
        }
    }

    fn update(&self) -> Result<()> {
        let Self::OfRelease { suite, folder } = self else {
            packages::update_lists();
            return Ok(());
        };
        let archive = archive()?;
        for name in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(name)).with_context(|| format!("create {}", folder.display()))?;
        }
        fs::write(folder.join("sources.list"), format!("deb [signed-by={KEYRING}] {archive} {suite} main\n"))
            .with_context(|| format!("write the sources of {suite}"))?;
        run(self.command("apt-get").args(["-o", "APT::Sandbox::User=root", "-qq", "update"]))
    }

    /// Whether `update` needs no rights of root.
    fn are_own(&self) -> bool {
        matches!(self, Self::OfRelease { .. })
    }
}

/// Debian's archive, as the machine's sources name it.
fn archive() -> Result<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let parts = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    files.extend(parts.map(|entry| entry.path()));
    let texts = files.iter().filter_map(|file| fs::read_to_string(file).ok());
    texts
        .flat_map(|text| archives(&text).map(str::to_owned).collect::<Vec<_>>())
        .next()
        .context("the package sources of this machine name no archive of Debian (an address that ends in /debian)")
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

/// What the packages are unpacked into, in the folder that `fetch` makes.
pub fn root(folder: &Path) -> PathBuf {
    folder.join("root")
}

/// Makes the folder with the chosen packages unpacked in it, all or nothing.
///
/// `choose` names the packages; it is asked again after the package lists were brought up to date. `finish` adds what
/// else belongs into the folder, which then still has another name.
pub fn fetch(
    folder: &Path,
    what: &str,
    lists: &Lists,
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
        download(lists, &parts.join("debs"), &names).with_context(|| format!("download {what}"))?;
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
fn with_fresh_lists<T>(lists: &Lists, progress: &Progress, attempt: impl Fn() -> Result<T>) -> Result<T> {
    let may_update = is_root() || lists.are_own();
    if may_update && lists.are_empty() {
        progress.step("there are no package lists yet: running apt-get update");
        lists.update()?;
    }
    let first = match attempt() {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    if !may_update {
        bail!("{first:#} (the package lists may be missing or old: run `apt-get update` as root)");
    }
    progress.step(&format!("{first:#}: running apt-get update"));
    lists.update()?;
    attempt()
}

/// These packages, and of what they depend on: the packages of their `own` (by how the name begins), and the libraries
/// that the system lacks.
///
/// apt works the dependencies out as if nothing were installed, so that no conflict with an installed package counts.
pub fn closure(lists: &Lists, packages: &[&str], own: &[&str]) -> Result<Vec<String>> {
    let plan = output(
        lists
            .command("apt-get")
            .args(["--simulate", "-o", "Dir::State::status=/dev/null", "install", "--no-install-recommends"])
            .args(packages)
            .env("LC_ALL", "C"),
    )
    .with_context(|| format!("the package lists do not have {}", packages.join(", ")))?;
    // Libraries of another release are used whatever the machine has.
    let installed = if lists.are_own() { HashSet::new() } else { installed()? };
    let wanted = |name: &&str| {
        let own = own.iter().any(|prefix| name.starts_with(prefix));
        let library = name.starts_with("lib") && !name.ends_with("-dev") && !installed.contains(*name);
        own || library
    };
    let names: Vec<String> = planned(&plan).filter(wanted).map(str::to_owned).collect();
    if let Some(absent) = packages.iter().find(|package| !names.iter().any(|name| name == *package)) {
        bail!("apt-get does not plan to install {absent}");
    }
    Ok(names)
}

/// The names in the lines `Inst NAME (VERSION ...)`.
fn planned(simulation: &str) -> impl Iterator<Item = &str> {
    simulation.lines().filter_map(|line| line.strip_prefix("Inst ")).filter_map(|rest| rest.split_whitespace().next())
}

fn installed() -> Result<HashSet<String>> {
    let text = output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status} ${Package}\n"]))?;
    Ok(text.lines().filter_map(|line| line.strip_prefix("installed ")).map(str::to_owned).collect())
}

/// Names of packages that match a regular expression as apt understands it.
pub fn search(pattern: &str) -> Result<Vec<String>> {
    let text = output(Command::new("apt-cache").args(["search", "--names-only", pattern]))?;
    Ok(text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect())
}

fn download(lists: &Lists, folder: &Path, names: &[String]) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    // As root, apt would rather be another user, who often cannot read our folder: say so beforehand, not in a warning.
    let mut command = lists.command("apt-get");
    command.args(["-qq", "-o", "APT::Sandbox::User=root", "download"]).args(names);
    run(command.current_dir(folder))
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
