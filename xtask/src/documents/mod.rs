//! The documents, as far as a test can hold them to what they say.
//!
//! | file | what |
//! |---|---|
//! | `page` | a page's fenced blocks, and what is said of them; that each is run or says that it was not |
//! | `typed` | one command of a block: by what it is run in the lab, and with which words |
//! | `links` | that every link leads somewhere |
//! | `played` | that the page on security names a test for each of its claims |
//! | `commands` | the commands of all pages, run on one lab |
//!
//! A fence has an info word: `sh` for commands to type, `console` for commands behind `$ ` with what they print, and for all
//! else what it is (`yaml`, `mermaid`, `text`, ...). A block of commands is run by the lab's test unless the sentence before
//! it says «not run here» or «run on real nodes», and so is each command unless its comment says so: a reader sees the same words that the test goes
//! by. A line `<!-- lab: SCENE -->` above a fence names what the lab is to look like, where it is not as usual.

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
    vec![LabTest::new("documents_commands_do_what_they_show", Duration::from_secs(120), run)]
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
