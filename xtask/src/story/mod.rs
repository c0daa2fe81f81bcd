//! The walkthrough that `cargo xtask run` plays.

use anyhow::Result;
use clap::Args;

#[derive(Args)]
pub(crate) struct RunArgs {}

pub(crate) fn run(_args: &RunArgs) -> Result<()> {
    anyhow::bail!("not built yet")
}
