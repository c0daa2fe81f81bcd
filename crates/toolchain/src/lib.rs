//! The eBPF toolchain and the builds: the steps of `cargo xtask build`. A build with nothing to do takes well under a second.
//!
//! 1. `compiler` finds a Rust compiler for `bpfel-unknown-none`: one with the sources of `core`, or one with a ready-made `core`;
//!    else `debian` fetches one into the target folder (`debs`).
//! 2. `linker` builds bpf-linker against that compiler's libLLVM: another LLVM may misread the bitcode.
//! 3. `object` builds `egress-ebpf`, `binaries` builds egress-agent, which embeds the object, egress-router and the kubectl
//!    plugin, and `image` makes an image of the first two.
//!
//! `packages` installs distribution packages for run time (nft, tcpdump, ...); `ovn` unpacks Open vSwitch and OVN for the lab.

mod arch;
mod archive;
mod binaries;
mod command;
mod compiler;
mod cross;
mod debian;
pub mod debs;
pub mod helm;
mod image;
pub mod kubectl;
mod linker;
mod object;
pub mod ovn;
pub mod packages;
mod paths;
pub mod prometheus;

use std::fs::File;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

pub use arch::Arch;
pub use archive::archive;
pub use command::{Progress, cargo, is_root, output, run};
pub use cross::cargo_for;
use image::static_binaries;
pub use image::{BINARY, Image, ImageArgs, Profile, image, image_for, names_an_interpreter, static_plugin};
pub use paths::Paths;

#[derive(Args, Clone, Debug, Default)]
pub struct BuildArgs {
    /// Build the binaries with optimisations
    #[arg(long)]
    pub release: bool,
    /// Never install a distribution package or a toolchain component: name what is missing and stop
    #[arg(long)]
    pub no_install: bool,
    /// Build programs that write a line about every packet to the agent's log: for looking, not for work
    #[arg(long)]
    pub log_packets: bool,
}

/// The result of a build.
#[derive(Clone, Debug)]
pub struct Built {
    /// The egress-agent binary.
    pub agent: PathBuf,
    /// The egress-router binary.
    pub router: PathBuf,
    /// The eBPF object that the agent embeds.
    pub object: PathBuf,
}

impl Built {
    /// The paths, whether or not anything was built.
    pub fn expected(paths: &Paths, release: bool) -> Self {
        let folder = paths.target.join(if release { "release" } else { "debug" });
        Self { agent: folder.join(binaries::AGENT), router: folder.join(binaries::ROUTER), object: paths.object() }
    }

    /// The kubectl plugin, which [`ensure_plugin`] builds beside the agent.
    pub fn plugin(&self) -> PathBuf {
        self.agent.with_file_name(binaries::PLUGIN)
    }
}

pub fn build(args: &BuildArgs) -> Result<()> {
    let progress = Progress::start();
    let built = ensure_built(args, &progress)?;
    ensure_plugin(args)?;
    let ready = [&built.agent, &built.router, &built.plugin(), &built.object].map(|path| path.display().to_string());
    progress.step(&format!("ready: {}", ready.join(", ")));
    Ok(())
}

/// Brings the object and the agent up to date. The lab, the story and the tests begin with this.
pub fn ensure_built(args: &BuildArgs, progress: &Progress) -> Result<Built> {
    let paths = Paths::find()?;
    ensure_object(&paths, args, progress)?;
    let built = Built::expected(&paths, args.release);
    let arguments: &[&str] = if args.release { &["--release"] } else { &[] };
    let mut command = cargo();
    // One place for the binaries, also where a configuration file names a target.
    command.env_remove("CARGO_BUILD_TARGET");
    let (names, folder) = ([binaries::AGENT, binaries::ROUTER], built.agent.parent().unwrap_or(&paths.target));
    binaries::build((command, names), &paths.root, arguments, folder, progress)?;
    Ok(built)
}

/// Brings the kubectl plugin up to date.
pub fn ensure_plugin(args: &BuildArgs) -> Result<()> {
    let arguments: &[&str] = if args.release { &["--release"] } else { &[] };
    binaries::build_plugin(&Paths::find()?.root, arguments)
}

/// As [`ensure_built`], with the binaries as the image has them: optimised, and linked with musl.
pub fn ensure_built_static(args: &BuildArgs, progress: &Progress) -> Result<Built> {
    let paths = Paths::find()?;
    let object = ensure_object(&paths, args, progress)?;
    let [agent, router] = static_binaries(&paths, (Arch::own(), Profile::Release), args.no_install, progress)?;
    Ok(Built { agent, router, object })
}

/// The same for another architecture, as `cargo xtask image --dev` has them.
pub fn ensure_built_for(arch: Arch, no_install: bool, progress: &Progress) -> Result<Built> {
    let paths = Paths::find()?;
    let object = ensure_object(&paths, &BuildArgs { no_install, ..BuildArgs::default() }, progress)?;
    let [agent, router] = static_binaries(&paths, (arch, Profile::Dev), no_install, progress)?;
    Ok(Built { agent, router, object })
}

/// Builds the object of a copy of this clone's sources, with this clone's compiler and linker.
pub fn build_object_of(copy: &Paths, no_install: bool, progress: &Progress) -> Result<PathBuf> {
    let paths = Paths::find()?;
    let lock = lock(&paths, progress)?;
    let compiler = compiler::choose(&paths, !no_install, progress)?;
    let linker = linker::ensure(&paths, &compiler, progress)?;
    drop(lock);
    object::build_alone(copy, &compiler, &linker, progress)
}

/// Clippy of the eBPF workspace, for its own target.
pub fn lint_object(paths: &Paths, install: bool, progress: &Progress) -> Result<()> {
    let _lock = lock(paths, progress)?;
    let compiler = compiler::choose(paths, install, progress)?;
    let Some(clippy) = &compiler.clippy else {
        progress.step(&format!("clippy of egress-ebpf skipped: {} came without clippy-driver", compiler.name));
        return Ok(());
    };
    progress.step(&format!("clippy of egress-ebpf with {}", compiler.version.full));
    let mut command = object::check_command(paths, &compiler);
    // What `cargo clippy` does itself; but it would take the host's clippy, which has another compiler inside.
    command.env("RUSTC_WORKSPACE_WRAPPER", clippy).env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__");
    run(&mut command).context("clippy of egress-ebpf")
}

fn ensure_object(paths: &Paths, args: &BuildArgs, progress: &Progress) -> Result<PathBuf> {
    let _lock = lock(paths, progress)?;
    let compiler = compiler::choose(paths, !args.no_install, progress)?;
    let linker = linker::ensure(paths, &compiler, progress)?;
    object::build(paths, &compiler, &linker, args.log_packets, progress)
}

/// Two builds in one target folder take turns; the lock ends with the process, however that ends.
fn lock(paths: &Paths, progress: &Progress) -> Result<File> {
    let dir = paths.toolchain();
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let path = dir.join("lock");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    if file.try_lock().is_ok() {
        return Ok(file);
    }
    progress.step("waiting for another build in this target folder");
    file.lock().with_context(|| format!("lock {}", path.display()))?;
    Ok(file)
}
