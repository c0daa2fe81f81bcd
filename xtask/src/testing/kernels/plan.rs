//! What the host tells the guest to do: a file in the guest's root.

use serde::{Deserialize, Serialize};

/// The plan's place in the guest.
pub(super) const PLAN: &str = "/plan.json";
/// Modules, by name.
pub(super) const MODULES: &str = "/modules";
/// Programs that tests call.
pub(super) const PROGRAMS: &str = "/bin";

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// In the order in which they can be loaded.
    pub(super) modules: Vec<String>,
    pub(super) steps: Vec<Step>,
}

/// One program to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Step {
    /// For people; no spaces.
    pub(super) name: String,
    pub(super) program: String,
    pub(super) arguments: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
    /// After this time it is killed.
    pub(super) limit_seconds: u64,
    /// Left out on a kernel without this symbol.
    pub(super) needs_symbol: Option<String>,
}
