//! Writes the manual pages of the plugin into a folder, for `cargo xtask man`. An example, so that the plugin does not contain
//! what makes the pages.

use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("usage: plugin_man_pages DIRECTORY"))?;
    fs::create_dir_all(&folder)?;
    clap_mangen::generate_to(kubectl_egress::definition(), &folder)
}
