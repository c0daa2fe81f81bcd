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
    let names = with_fresh_lists(progress, || {
        let names = choose()?;
        progress.step(&format!("downloading {what}: {}", names.join(" ")));
        remove(&parts)?;
        download(&parts.join("debs"), &names).with_context(|| format!("download {what}"))?;
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
fn with_fresh_lists<T>(progress: &Progress, attempt: impl Fn() -> Result<T>) -> Result<T> {
    if is_root() && packages::lists_are_empty() {
        progress.step("there are no package lists yet: running apt-get update");
        packages::update_lists();
    }
    let first = match attempt() {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    if !is_root() {
        bail!("{first:#} (the package lists may be missing or old: run `apt-get update` as root)");
    }
    progress.step(&format!("{first:#}: running apt-get update"));
    packages::update_lists();
    attempt()
}

/// These packages, and of what they depend on: the packages of their `own` (by how the name begins), and the libraries
/// that the system lacks.
///
/// apt works the dependencies out as if nothing were installed, so that no conflict with an installed package counts.
pub fn closure(packages: &[&str], own: &[&str]) -> Result<Vec<String>> {
    let plan = output(
        Command::new("apt-get")
            .args(["--simulate", "-o", "Dir::State::status=/dev/null", "install", "--no-install-recommends"])
            .args(packages)
            .env("LC_ALL", "C"),
    )
    .with_context(|| format!("the package lists do not have {}", packages.join(", ")))?;
    let installed = installed()?;
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

fn download(folder: &Path, names: &[String]) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    // As root, apt would rather be another user, who often cannot read our folder: say so beforehand, not in a warning.
    let mut command = Command::new("apt-get");
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
    fn an_unfinished_folder_keeps_the_whole_version() {
        assert_eq!(beside(Path::new("kernels/6.1")), Path::new("kernels/6.1.new"));
    }
}
