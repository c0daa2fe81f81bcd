//! `cargo xtask man`: the manual pages of egress-agent and egress-router, for packages.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use egress_toolchain::{Paths, cargo, run};

#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Folder of the pages [default: man in the target folder]
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
}

pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let paths = Paths::find()?;
    let folder = args.out.clone().unwrap_or_else(|| paths.target.join("man"));
    let folder = std::path::absolute(&folder).with_context(|| format!("the path {}", folder.display()))?;
    let mut pages = cargo();
    pages
        .args(["run", "--quiet", "--locked", "--package", "egress-agent", "--example", "man_pages", "--"])
        .arg(&folder);
    run(pages.current_dir(&paths.root)).context("write the manual pages")?;
    let count = fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?.count();
    println!("{count} pages in {}; read one with `man {}`", folder.display(), folder.join("egress-agent.1").display());
    Ok(())
}
