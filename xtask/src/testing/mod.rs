//! `cargo xtask test`.

use anyhow::Result;
use clap::Args;

#[derive(Args)]
pub(crate) struct TestArgs {}

pub(crate) fn test(_args: &TestArgs) -> Result<()> {
    anyhow::bail!("not built yet")
}
