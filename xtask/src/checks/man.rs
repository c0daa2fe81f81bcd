//! `cargo xtask man`: the manual pages of egress-agent, egress-router and the kubectl plugin, for packages.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use egress_toolchain::{Paths, cargo, run};

#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Folder of the pages [default: man in the target folder]
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
}

/// What writes pages, and its package. The first writes those of egress-router too.
const EXAMPLES: [(&str, &str); 2] = [("egress-agent", "man_pages"), ("kubectl-egress", "plugin_man_pages")];

pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let paths = Paths::find()?;
    let folder = args.out.clone().unwrap_or_else(|| paths.target.join("man"));
    let folder = std::path::absolute(&folder).with_context(|| format!("the path {}", folder.display()))?;
    write_manual_pages(&paths, &folder)?;
    let count = fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?.count();
    println!("{count} pages in {}; read one with `man {}`", folder.display(), folder.join("egress-agent.1").display());
    Ok(())
}

pub(crate) fn write_manual_pages(paths: &Paths, folder: &Path) -> Result<()> {
    for (package, example) in EXAMPLES {
        let mut pages = cargo();
        pages.args(["run", "--quiet", "--locked", "--package", package, "--example", example, "--"]).arg(folder);
        run(pages.current_dir(&paths.root)).with_context(|| format!("write the manual pages of {package}"))?;
    }
    Ok(())
}
