//! Writes the completion scripts of both programs below a folder, at their places below `/usr/local/share`, for
//! `cargo xtask release`. An example, as that of the manual pages: both are built once.

use std::fs::File;
use std::path::PathBuf;
use std::{env, fs, io};

use egress_terminal::completion::{self, Shell};

fn main() -> io::Result<()> {
    let folder = env::args_os().nth(1).map(PathBuf::from);
    let folder = folder.ok_or_else(|| io::Error::other("usage: completions DIRECTORY"))?;
    for definition in [egress_agent::cmd::definition(), egress_router::cmd::definition()] {
        let name = definition.get_name().to_owned();
        let places = [
            (Shell::Bash, "bash-completion/completions", name.clone()),
            (Shell::Fish, "fish/vendor_completions.d", format!("{name}.fish")),
            (Shell::Zsh, "zsh/site-functions", format!("_{name}")),
        ];
        for (shell, place, file) in places {
            fs::create_dir_all(folder.join(place))?;
            completion::write(definition.clone(), shell, &mut File::create(folder.join(place).join(file))?)?;
        }
    }
    Ok(())
}
