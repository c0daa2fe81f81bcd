//! What the host tells the guest to do: a file in the guest's root.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The plan's place in the guest.
pub(super) const PLAN: &str = "/plan.json";
/// Modules, by name.
pub(super) const MODULES: &str = "/modules";
/// Programs that tests call.
pub(super) const PROGRAMS: &str = "/bin";
/// The lab's target folder.
pub(super) const TARGET: &str = "/target";

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct KernelPlan {
    /// In the order in which they can be loaded.
    pub(super) modules: Vec<String>,
    pub(super) suites: Vec<Suite>,
    /// What [`super::pace`] has measured on the host.
    pub(super) host_pace: Duration,
}

/// Tests of one binary; each is run in a process of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Suite {
    /// For people; no spaces.
    pub(super) name: String,
    pub(super) program: String,
    /// Arguments before a test's name, and after it.
    pub(super) before: Vec<String>,
    pub(super) after: Vec<String>,
    pub(super) tests: Vec<String>,
    /// How many run at once.
    pub(super) at_once: usize,
    pub(super) environment: Vec<(String, String)>,
    /// Left out on a kernel without this symbol.
    pub(super) needs_symbol: Option<String>,
    /// Whether the output of a test that passed is printed.
    pub(super) is_shown: bool,
}
