//! The eBPF object: built from `egress-ebpf`, checked, copied to the one place where everybody looks for it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::command::{Progress, output, run};
use super::compiler::{BpfCompiler, TARGET};
use super::{Paths, packages};

/// Flags of the compiler and of bpf-linker.
///
/// - `debuginfo=2` and `--btf`: the types of the maps, for bpftool and for what the kernel finds by name.
/// - `target-cpu=v3`: atomic operations that return a value, and 32-bit arithmetic; every kernel since 5.12 has them.
/// - `--disable-expand-memcpy-in-order`: copies by words; the default copies bytes and doubles the verifier's work.
const FLAGS: &str = "-Cdebuginfo=2 -Ctarget-cpu=v3 -Clink-arg=--btf -Clink-arg=--disable-expand-memcpy-in-order";

/// Builds the object where a source has changed, and the benchmark's beside it.
pub(super) fn build(
    paths: &Paths,
    compiler: &BpfCompiler,
    linker: &Path,
    log_packets: bool,
    progress: &Progress,
) -> Result<PathBuf> {
    let features: &[&str] = if log_packets { &["--features", "log"] } else { &[] };
    let object = compile(paths, compiler, linker, features, progress)?;
    let rig = paths.ebpf_target().join(TARGET).join("release/egress-rig");
    fs::copy(rig, paths.rig()).context("copy the benchmark's object")?;
    Ok(object)
}

/// The object alone.
pub(super) fn build_alone(
    paths: &Paths,
    compiler: &BpfCompiler,
    linker: &Path,
    progress: &Progress,
) -> Result<PathBuf> {
    compile(paths, compiler, linker, &["--bin", "egress-ebpf"], progress)
}

fn compile(
    paths: &Paths,
    compiler: &BpfCompiler,
    linker: &Path,
    arguments: &[&str],
    progress: &Progress,
) -> Result<PathBuf> {
    let built = paths.ebpf_target().join(TARGET).join("release/egress-ebpf");
    if modified(&built).is_none() {
        progress.step(&format!("building the eBPF object with {} ({})", compiler.version.full, compiler.name));
    }
    let mut command = compiler.cargo(paths, "build");
    command
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", linker)
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_RUSTFLAGS", FLAGS);
    run(command.args(arguments)).context("build egress-ebpf")?;
    check(&built)?;
    let object = paths.object();
    let old = modified(&object) < modified(&built) || size(&object) == 0;
    if old && publish(&built, &object)? {
        progress.step(&format!("eBPF object: {} ({} bytes)", object.display(), size(&object)));
    }
    Ok(object)
}

/// The flags for a check without linking.
pub(super) fn check_command(paths: &Paths, compiler: &BpfCompiler) -> std::process::Command {
    let mut command = compiler.cargo(paths, "check");
    command.arg("--all-features");
    command.env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_RUSTFLAGS", FLAGS);
    command
}

fn modified(path: &Path) -> Option<std::time::SystemTime> {
    fs::metadata(path).and_then(|meta| meta.modified()).ok()
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map(|meta| meta.len()).unwrap_or(0)
}

/// The ELF header's first bytes, class and byte order, and its machine: 247 is eBPF.
fn check(object: &Path) -> Result<()> {
    let bytes = fs::read(object).with_context(|| format!("read {}", object.display()))?;
    let is_elf = bytes.starts_with(b"\x7fELF\x02\x01");
    let is_bpf = bytes.get(18..20) == Some(&[247, 0]);
    if !(is_elf && is_bpf) {
        bail!("{} is not an eBPF object: remove {TARGET} beside it and build again", object.display());
    }
    Ok(())
}

/// Copies the object in one step, without its debug information where a tool for that is at hand; tells whether the
/// copy differs from the last one. Where it does not, the file stays as it is and the agent need not be built again.
///
/// The kernel does not see the difference, BTF stays; so a missing or failing tool is no reason to stop.
fn publish(built: &Path, object: &Path) -> Result<bool> {
    let parts = object.with_extension("o.new");
    fs::copy(built, &parts).with_context(|| format!("copy {} to {}", built.display(), parts.display()))?;
    if let Some(strip) = packages::find("llvm-strip") {
        let stripped = object.with_extension("o.stripped");
        let mut command = std::process::Command::new(strip);
        command.arg("-g").arg("-o").arg(&stripped).arg(&parts);
        if output(&mut command).is_ok() && check(&stripped).is_ok() {
            fs::rename(&stripped, &parts).with_context(|| format!("rename {}", stripped.display()))?;
        }
    }
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    if object.exists() && read(&parts)? == read(object)? {
        fs::remove_file(&parts).with_context(|| format!("remove {}", parts.display()))?;
        return Ok(false);
    }
    fs::rename(&parts, object).with_context(|| format!("rename {} to {}", parts.display(), object.display()))?;
    Ok(true)
}
