//! Prometheus and its `promtool`, which play and check what is in deploy/monitoring.
//!
//! Where they are not installed, the distribution's package is unpacked below the target folder. It is large, and says nothing
//! of the code, so only the commands that need it fetch it.

use std::path::PathBuf;

use anyhow::Result;

use super::debs::{self, PackageLists};
use super::{Paths, Progress, packages};

/// The package of both.
const PACKAGE: &str = "prometheus";

/// `prometheus` or `promtool`.
pub fn program(name: &str, paths: &Paths, progress: &Progress) -> Result<PathBuf> {
    if let Some(installed) = packages::find(name) {
        return Ok(installed);
    }
    let folder = paths.target.join(PACKAGE);
    if !folder.exists() {
        let choose = || Ok(vec![PACKAGE.to_owned()]);
        debs::fetch((&folder, PACKAGE), &PackageLists::OfMachine, progress, choose, |_| Ok(()))?;
    }
    Ok(debs::root(&folder).join("usr/bin").join(name))
}
