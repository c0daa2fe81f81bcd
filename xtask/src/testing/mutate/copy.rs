//! The copy of the sources that mutations are made in. The clone itself is only read.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::table::Mutation;
use egress_toolchain::Paths;

/// What the object and the agent's own tests are built from.
const FOLDERS: [&str; 8] =
    ["crates", "egress-common", "egress-ebpf", "egress-agent", "egress-router", "fuzz", "deploy", "docs"];
/// The host workspace of the copy.
const KEPT: &str = r#"members = ["crates/*", "egress-agent", "egress-common", "egress-router", "fuzz"]"#;

/// How the line with the workspace's members begins.
const MEMBERS: &str = "members = ";

/// A copy of the crates, with target folders of its own.
pub(super) struct Copy {
    source: PathBuf,
    pub(super) paths: Paths,
}

impl Copy {
    pub(super) fn of(paths: &Paths) -> Self {
        let folder = paths.target.join("mutate");
        let paths_of_copy = Paths { root: folder.join("source"), target: folder.join("target") };
        Self { source: paths.root.clone(), paths: paths_of_copy }
    }

    /// Makes the copy equal to the clone. Files that are equal already keep their times, by which cargo goes.
    pub(super) fn restore(&self) -> Result<()> {
        for name in FOLDERS {
            sync(&self.source.join(name), &self.paths.root.join(name))?;
        }
        let manifest = read(&self.source.join("Cargo.toml"))?;
        if manifest.lines().filter(|line| line.starts_with(MEMBERS)).count() != 1 {
            bail!("Cargo.toml has no single line that begins with {MEMBERS:?}");
        }
        let only = |line: &str| format!("{}\n", if line.starts_with(MEMBERS) { KEPT } else { line });
        write(&self.paths.root.join("Cargo.toml"), manifest.lines().map(only).collect::<String>().as_bytes())?;
        // Cargo drops from it what the copy has not.
        let lock = self.paths.root.join("Cargo.lock");
        if lock.exists() { Ok(()) } else { write(&lock, read(&self.source.join("Cargo.lock"))?.as_bytes()) }
    }

    pub(super) fn apply(&self, mutation: &Mutation) -> Result<()> {
        write(&self.paths.root.join(mutation.file), mutated(&self.source, mutation)?.as_bytes())
    }
}

/// The file of the mutation, broken.
pub(super) fn mutated(root: &Path, mutation: &Mutation) -> Result<String> {
    let text = read(&root.join(mutation.file))?;
    match text.matches(mutation.find).count() {
        1 => Ok(text.replace(mutation.find, mutation.replace)),
        count => bail!(
            "the table of mutations is stale: {}: {:?} is {count} times in {}, not once",
            mutation.name,
            mutation.find,
            mutation.file
        ),
    }
}

/// Makes `to` like `from`.
fn sync(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    let names = |folder: &Path| -> Result<Vec<_>> {
        let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
        entries.map(|entry| Ok(entry.with_context(|| format!("read {}", folder.display()))?.file_name())).collect()
    };
    for name in names(to)? {
        let (old, source) = (to.join(&name), from.join(&name));
        if !source.exists() || source.is_dir() != old.is_dir() {
            let removed = if old.is_dir() { fs::remove_dir_all(&old) } else { fs::remove_file(&old) };
            removed.with_context(|| format!("remove {}", old.display()))?;
        }
    }
    for name in names(from)? {
        let (source, copy) = (from.join(&name), to.join(&name));
        match source.is_dir() {
            true => sync(&source, &copy)?,
            false => write(&copy, &fs::read(&source).with_context(|| format!("read {}", source.display()))?)?,
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// Writes only what is not there already.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crate of the workspace that the copied ones may depend on is copied and a member there.
    #[test]
    fn the_copy_has_every_crate_that_others_depend_on() {
        let manifest = read(&Paths::find().expect("the clone").root.join("Cargo.toml")).expect("the manifest");
        let paths = manifest.lines().filter_map(|line| line.split_once("path = \"")?.1.split_once('"'));
        let folders: Vec<&str> = paths.filter_map(|(path, _)| path.split('/').next()).collect();
        assert!(folders.len() > 10, "{folders:?}");
        for folder in folders {
            let member = if folder == "crates" { "\"crates/*\"".to_owned() } else { format!("\"{folder}\"") };
            assert!(FOLDERS.contains(&folder) && KEPT.contains(&member), "{folder} is not copied");
        }
    }

    #[test]
    fn the_copy_becomes_like_the_source_and_equal_files_stay() {
        let root = std::env::temp_dir().join(format!("xtask-mutate-{}", std::process::id()));
        let (from, to) = (root.join("from"), root.join("to"));
        fs::create_dir_all(from.join("src")).expect("a folder");
        fs::create_dir_all(to.join("old")).expect("a folder");
        fs::write(from.join("src/a"), "one").expect("a file");
        sync(&from, &to).expect("sync");
        let written = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).expect("its time");
        let before = written(&to.join("src/a"));
        sync(&from, &to).expect("sync");
        assert_eq!(written(&to.join("src/a")), before);
        assert!(!to.join("old").exists());
        fs::write(to.join("src/a"), "broken").expect("a file");
        sync(&from, &to).expect("sync");
        assert_eq!(read(&to.join("src/a")).expect("read"), "one");
        fs::remove_dir_all(&root).expect("remove");
    }
}
