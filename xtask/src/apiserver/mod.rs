//! The lab's in-memory Kubernetes API server.

use anyhow::Result;
use clap::Args;

#[derive(Args)]
pub(crate) struct ApiserverArgs {}

pub(crate) fn run(_args: &ApiserverArgs) -> Result<()> {
    anyhow::bail!("not built yet")
}
