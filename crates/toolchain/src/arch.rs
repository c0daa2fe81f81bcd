//! Architectures of nodes, by the names of Kubernetes and Debian.

use std::fmt;

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    pub const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// This machine's.
    pub const fn own() -> Self {
        if cfg!(target_arch = "aarch64") { Self::Arm64 } else { Self::Amd64 }
    }

    /// Debian's, Kubernetes' and OCI's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The compiler's target of the image's binaries.
    pub const fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-musl",
            Self::Arm64 => "aarch64-unknown-linux-musl",
        }
    }

    /// What Debian's folders of libraries are named after, and its cross compiler.
    pub const fn multiarch(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu",
            Self::Arm64 => "aarch64-linux-gnu",
        }
    }

    /// As musl names it.
    pub(super) const fn musl(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-musl",
            Self::Arm64 => "aarch64-linux-musl",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(self.name())
    }
}
