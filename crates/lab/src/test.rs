//! A test on the lab: its name, its limits and what it gets. `cargo xtask test` runs each in its own process.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use egress_toolchain::Built;

use crate::topology::host_config::Cni;

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
}

impl LabTest {
    pub fn new(name: &'static str, timeout: Duration, run: fn(&LabContext) -> Result<()>) -> Self {
        Self { name, timeout, run, cni: Cni::Ovn, alone: false }
    }

    /// No other test runs beside it, since it measures or fills the machine.
    pub fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    /// The same on nodes with a bridge CNI, under another name.
    pub fn on_a_bridge(self, name: &'static str) -> Self {
        Self { name, cni: Cni::Bridge, ..self }
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
