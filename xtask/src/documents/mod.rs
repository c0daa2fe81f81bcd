//! Tests of the documents: links (`links`), tests named for the claims on security (`played`), and commands (`page`, `typed`),
//! which run on one lab (`commands`).
//!
//! A fence has an info word: `sh` for commands, `console` for commands after `$ ` with their output, or the language. The test
//! runs each command unless its comment, or the sentence before its block, says "not run here" or "run on real nodes". A line
//! `<!-- lab: SCENE -->` above a fence sets the state of the lab.

mod commands;
#[cfg(test)]
mod links;
pub(crate) mod page;
#[cfg(test)]
mod played;
pub(crate) mod typed;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use egress_lab::test::LabTest;

use egress_toolchain::Paths;

/// The test on the lab that runs the commands of the pages.
pub(crate) fn tests() -> Vec<LabTest> {
    let run = commands::commands_of_all_pages;
    vec![
        LabTest::new("documents_commands_do_what_they_show", Duration::from_secs(120), run)
            .not_on_ovn("commands are the same on every ground"),
    ]
}

/// Every page, by its path in the clone.
pub(crate) fn pages() -> Result<Vec<PathBuf>> {
    let root = Paths::find()?.root;
    let mut pages = Vec::from(["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(PathBuf::from));
    for folder in ["docs", "deploy"] {
        below(&root, Path::new(folder), &mut pages)?;
    }
    pages.sort();
    Ok(pages)
}

fn below(root: &Path, folder: &Path, pages: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(root.join(folder)).with_context(|| format!("read {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            below(root, &path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    Ok(())
}

pub(crate) fn read(page: &Path) -> Result<String> {
    let path = Paths::find()?.root.join(page);
    std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}
