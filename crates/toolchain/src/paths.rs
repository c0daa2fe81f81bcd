//! Where things are: the clone, and everything that is made, which is below the target folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::command::{cargo, output};

/// The folders of one clone.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The folder of the host workspace's Cargo.toml.
    pub root: PathBuf,
    /// Cargo's target folder, wherever the environment or a configuration file puts it.
    pub target: PathBuf,
}

impl Paths {
    pub fn find() -> Result<Self> {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).context("the crate is in no clone")?.to_path_buf();
        let target = target_folder(&root)?;
        Ok(Self { root, target })
    }

    /// The compiler and the linker that the eBPF build uses, where they had to be fetched or built.
    pub fn toolchain(&self) -> PathBuf {
        self.target.join("bpf-toolchain")
    }

    /// The manifest of the eBPF workspace.
    pub fn ebpf_manifest(&self) -> PathBuf {
        self.root.join("egress-ebpf/Cargo.toml")
    }

    /// The manifest of the workspace of libFuzzer's targets.
    pub fn fuzz_manifest(&self) -> PathBuf {
        self.root.join("fuzz/libfuzzer/Cargo.toml")
    }

    /// Cargo's target folder for the eBPF workspace.
    pub fn ebpf_target(&self) -> PathBuf {
        self.target.join("bpf/build")
    }

    /// The finished object. egress-agent/build.rs looks here.
    pub fn object(&self) -> PathBuf {
        self.target.join("bpf/egress-ebpf.o")
    }

    /// Kernels other than the running one, and what runs them.
    pub fn kernels(&self) -> PathBuf {
        self.target.join("kernels")
    }

    /// Open vSwitch and OVN.
    pub fn ovn(&self) -> PathBuf {
        self.target.join("ovn")
    }

    /// Packages of another architecture or release, and their lists.
    pub fn packages(&self, of: &str) -> PathBuf {
        self.target.join("packages").join(of)
    }

    /// The object that the benchmark runs programs with.
    pub fn rig(&self) -> PathBuf {
        self.target.join("bpf/egress-rig.o")
    }

    /// The folder for the logs of tests of this kind.
    pub fn test_logs(&self) -> PathBuf {
        self.target.join("test-logs")
    }
}

/// The variable alone is not enough: `build.target-dir` in a configuration file counts as well, so ask Cargo.
fn target_folder(root: &Path) -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("CARGO_TARGET_DIR") {
        return std::path::absolute(PathBuf::from(dir)).context("CARGO_TARGET_DIR");
    }
    let text = output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root))?;
    let metadata: serde_json::Value = serde_json::from_str(&text).context("read the answer of cargo metadata")?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names no target_directory")?;
    Ok(PathBuf::from(dir))
}
