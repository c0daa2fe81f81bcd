//! bpf-linker, the linker of the eBPF target: it joins the crates' bitcode, optimises and writes the object with BTF.
//!
//! It is built from its crate, against the libLLVM of the compiler in use, into a folder whose name tells which that
//! was; so a new compiler gets a new linker and nothing is ever stale. LLVM's headers are not needed, only its library.
//! Optimising the linker itself would take three times as long to build and change no byte of its output.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::Paths;
use super::command::{Progress, cargo, run};
use super::compiler::BpfCompiler;

const VERSION: &str = "0.13.0";

/// The LLVM versions that this bpf-linker can be built with.
const LLVM: [u32; 3] = [21, 22, 23];

/// Builds the linker for this compiler, once.
pub(super) fn ensure(paths: &Paths, compiler: &BpfCompiler, progress: &Progress) -> Result<PathBuf> {
    let folder = paths.toolchain().join(format!("linker-{:016x}", key(paths, compiler)));
    let linker = folder.join("bin/bpf-linker");
    if !linker.exists() {
        let llvm = compiler.version.llvm_major;
        if !LLVM.contains(&llvm) {
            bail!(
                "{} has LLVM {llvm}, bpf-linker {VERSION} needs one of {LLVM:?}: choose another toolchain",
                compiler.name
            );
        }
        progress.step(&format!("building bpf-linker {VERSION} for LLVM {llvm} of {}", compiler.name));
        build(paths, compiler, &folder)?;
    }
    Ok(linker)
}

/// What the linker depends on. Paths below the toolchain's folder count relative to it: the folder may be copied.
fn key(paths: &Paths, compiler: &BpfCompiler) -> u64 {
    let folder = &compiler.llvm_folder;
    let mut hasher = DefaultHasher::new();
    VERSION.hash(&mut hasher);
    compiler.version.full.hash(&mut hasher);
    folder.strip_prefix(paths.toolchain()).unwrap_or(folder).hash(&mut hasher);
    hasher.finish()
}

/// The libLLVM in this folder: the file itself, not one of the names that point to it.
pub(super) fn library_in(folder: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libLLVM")))
        .filter(|path| path.is_file() && !path.is_symlink())
        .collect();
    // rustup keeps a small linker script of nearly the same name beside it.
    found.sort_by_key(|path| fs::metadata(path).map(|meta| meta.len()).unwrap_or(0));
    found.pop()
}

fn build(paths: &Paths, compiler: &BpfCompiler, folder: &Path) -> Result<()> {
    let parts = folder.with_extension("new");
    if parts.exists() {
        fs::remove_dir_all(&parts).with_context(|| format!("remove {}", parts.display()))?;
    }
    link_llvm(paths, compiler, &parts.join("lib"))?;
    let scratch = parts.join("target");
    let mut command = cargo();
    command
        .args(["install", "bpf-linker", "--version", VERSION, "--locked", "--quiet", "--no-track"])
        .args(["--no-default-features", "--features", &format!("llvm-{}", compiler.version.llvm_major)])
        .arg("--root")
        .arg(&parts)
        .arg("--target-dir")
        .arg(&scratch)
        .env("LLVM_PREFIX", &parts)
        .env("CARGO_ENCODED_RUSTFLAGS", link_flags(compiler).join("\u{1f}"))
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .env("CARGO_PROFILE_RELEASE_STRIP", "true")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .current_dir(&parts);
    run(&mut command).context("build bpf-linker")?;
    fs::remove_dir_all(&scratch).with_context(|| format!("remove {}", scratch.display()))?;
    fs::rename(&parts, folder).with_context(|| format!("rename {} to {}", parts.display(), folder.display()))
}

/// Puts libLLVM into `lib` beside the linker under every name by which it is looked for: two while the linker is
/// built, its own name while it runs.
fn link_llvm(paths: &Paths, compiler: &BpfCompiler, lib: &Path) -> Result<()> {
    let library = library_in(&compiler.llvm_folder)
        .with_context(|| format!("{} has no libLLVM", compiler.llvm_folder.display()))?;
    fs::create_dir_all(lib).with_context(|| format!("create {}", lib.display()))?;
    let target = match library.strip_prefix(paths.toolchain()) {
        // From <toolchain>/linker-<key>/lib.
        Ok(below) => Path::new("../..").join(below),
        Err(_) => library.clone(),
    };
    let own = library.file_name().context("libLLVM has no name")?.to_string_lossy().into_owned();
    let mut names = vec!["libLLVM.so".to_owned(), format!("libLLVM-{}.so", compiler.version.llvm_major), own];
    names.dedup();
    for name in names {
        let link = lib.join(name);
        symlink(&target, &link).with_context(|| format!("link {}", link.display()))?;
    }
    Ok(())
}

/// The linker finds libLLVM beside itself, whatever LD_LIBRARY_PATH says; and libLLVM's own libraries in its folder.
fn link_flags(compiler: &BpfCompiler) -> Vec<String> {
    vec![
        "-Clink-arg=-Wl,--disable-new-dtags".to_owned(),
        "-Clink-arg=-Wl,-rpath,$ORIGIN/../lib".to_owned(),
        "-Clink-arg=-Wl,-rpath,$ORIGIN/../../debian/root/usr/lib/".to_owned() + std::env::consts::ARCH + "-linux-gnu",
        format!("-Clink-arg=-Wl,-rpath-link,{}", compiler.llvm_folder.display()),
    ]
}
