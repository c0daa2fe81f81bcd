//! Writes the manual pages of both programs into a folder, for `cargo xtask man`. An example, so that the programs do not
//! contain what makes the pages.

use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("usage: man_pages DIRECTORY"))?;
    fs::create_dir_all(&folder)?;
    for definition in [egress_agent::cmd::definition(), egress_router::cmd::definition()] {
        clap_mangen::generate_to(definition, &folder)?;
    }
    Ok(())
}
