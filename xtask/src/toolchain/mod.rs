//! The eBPF toolchain and the builds.

use anyhow::Result;
use clap::Args;

#[derive(Args)]
pub(crate) struct BuildArgs {}

pub(crate) fn build(_args: &BuildArgs) -> Result<()> {
    anyhow::bail!("not built yet")
}

#[derive(Args)]
pub(crate) struct CodegenArgs {}

pub(crate) fn codegen(_args: &CodegenArgs) -> Result<()> {
    anyhow::bail!("not built yet")
}
