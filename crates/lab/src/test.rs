//! A test on the lab: its name, its limits and what it gets. `cargo xtask test` runs each in its own process.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use egress_toolchain::Built;

use crate::topology::builder::Ground;
use crate::topology::host_config::Cni;

/// Whether a test runs on a lab with a real OVN (`cargo xtask test --ground ovn`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOvn {
    /// There too.
    Also,
    /// There alone.
    Alone,
    /// There alone, and in every test run.
    Smoke,
    /// Not there, for this reason.
    Never(&'static str),
}

/// For [`LabTest::not_on_ovn`].
pub const NO_LOAD_BALANCER: &str =
    "the lab's load balancer translates on hosts, of which OVN shows pods the host's address";

/// One test on the lab.
pub struct LabTest {
    /// What it shows, in snake_case; `--filter` looks for parts of it.
    pub name: &'static str,
    /// After this time it has failed.
    pub timeout: Duration,
    pub run: fn(&LabContext) -> Result<()>,
    /// How pods are connected on its ground.
    pub cni: Cni,
    /// It wants the machine for itself.
    pub alone: bool,
    pub on_ovn: OnOvn,
}

impl LabTest {
    pub fn new(name: &'static str, timeout: Duration, run: fn(&LabContext) -> Result<()>) -> Self {
        Self { name, timeout, run, cni: Cni::Routed, alone: false, on_ovn: OnOvn::Also }
    }

    /// No other test runs beside it, since it measures or fills the machine.
    pub fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    /// The same on nodes with a bridge CNI, under another name.
    pub fn on_a_bridge(self, name: &'static str) -> Self {
        Self { name, cni: Cni::Bridge, ..self }.not_on_ovn("a bridge CNI has no OVN")
    }

    /// Not on a real OVN, for this reason.
    pub fn not_on_ovn(self, reason: &'static str) -> Self {
        Self { on_ovn: OnOvn::Never(reason), ..self }
    }

    /// On a real OVN alone.
    pub fn only_on_ovn(self) -> Self {
        Self { on_ovn: OnOvn::Alone, ..self }
    }

    /// On a real OVN alone, and in every test run.
    pub fn smoke_on_ovn(self) -> Self {
        Self { on_ovn: OnOvn::Smoke, ..self }
    }

    /// The ground that it runs on in a run of tests for `ground`, if any.
    pub fn ground(&self, ground: Ground) -> Option<Ground> {
        match (self.on_ovn, ground) {
            (OnOvn::Smoke, Ground::Routed) => Some(Ground::Ovn),
            (OnOvn::Smoke | OnOvn::Alone | OnOvn::Also, ground @ (Ground::Ovn | Ground::OvnKernel)) => Some(ground),
            (OnOvn::Also | OnOvn::Never(_), Ground::Routed) => Some(Ground::Routed),
            (OnOvn::Alone, Ground::Routed) | (OnOvn::Never(_), Ground::Ovn | Ground::OvnKernel) => None,
        }
    }
}

/// What a test gets.
pub struct LabContext {
    /// The agent to run.
    pub built: Built,
    /// An empty folder for logs and captures.
    pub logs: PathBuf,
    /// How pods are to be connected.
    pub cni: Cni,
}

/// Why a test has nothing to show here; what it takes is nothing that the test run brings. It ends the test as an error does.
#[derive(Debug)]
pub struct Skip(pub &'static str);

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "skipped: {}", self.0)
    }
}

impl std::error::Error for Skip {}
