//! Tests that are skipped: counted apart, named, and a failure unless they stand here with the reason.
//!
//! Three kinds come together: what the test harness of Rust ignores by its name, what a test notes when it finds that it can show
//! nothing (`egress-agent/tests/skips`, `crates/lab/tests/apiserver/server.rs`), and tests on the lab that end with [`egress_lab::test::Skip`].

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::summary::PartOutcome;
use egress_toolchain::Paths;

/// Names the file in which tests note it.
const VARIABLE: &str = "EGRESS_TEST_SKIPS";

/// Skips that are as they should be wherever the tests run, each with a part of the reason that it gives. Tests are named with
/// their module.
const EXPECTED: [(&str, &str); 32] = [
    // Built without: `cargo xtask test --kernel 6.12 --only program --filter kernel_router`.
    ("traffic::an_ipvlan_serves_as_a_macvlan_does", "no ipvlan"),
    ("traffic::established_connections_pass_the_chains_once", "no flow tables"),
    // Commands of their own, with optimized code: docs/performance.md.
    ("controller::node_health::prober::tests::what_a_thousand_nodes_cost", "ignored"),
    ("scale::figures", "ignored"),
    // It takes minutes to build, so who wants this test builds it first, as `.ci/run` does.
    ("image_agent_from_it_serves", "no image was built here"),
    // Not every release of every distribution has a package of it.
    ("kubectl_drives_everything", "kubectl is not installed"),
    ("documents_commands_do_what_they_show", "kubectl is not installed"),
    ("", "kubectl is not installed, or too old"),
    // Fetched for x86-64 alone (helm.rs).
    ("chart_", "helm is not here"),
    // They are packages of Debian's archive.
    ("ovn_both_paths", "Open vSwitch and OVN of Debian 13 are not to be had"),
    // With a real API server: docs/testing.md.
    ("refusals_are_sentences", "no folder with a real API server"),
    ("definitions_of_other_apis_refuse_what_they_should", "no folder with a real API server"),
    ("agents_and_controllers_change_what_is_their_own", "no folder with a real API server"),
    ("a_real_server_takes_every_overlay", "no folder with a real API server"),
    ("chart_is_taken_by_a_real_server", "no folder with a real API server"),
    // With real nodes: likewise.
    ("nodes_", "no folder with a kubelet"),
    ("nodes_agents_run_in_groups_of_version_2", "control groups of version 1"),
    ("nodes_the_chart_", "helm is not here"),
    // The datapath's tests run once more by filters, where these have nothing to show.
    ("clsact::", "this kernel has no links"),
    ("rights::", "this kernel has no links"),
    ("lifecycle::", "this kernel has no links"),
    ("lifecycle::", "the order is that of links"),
    ("devices::", "the kernel refuses a link here"),
    // Modules that the running kernel was built without; the guests have them.
    ("fib_helper_finds_the_table_of_a_vrf", "no VRF"),
    ("kinds::nic_on_a_vlan", "no VLAN device"),
    ("kinds::vlan_of_a_pool", "no VLAN device"),
    ("antrea_pools_lie_in_a_vlan", "no VLAN device"),
    ("antrea_bandwidth_by_fq_loses_no_stream", "no fq"),
    ("kinds::nic_on_a_bond", "no bond"),
    ("pacing::limited_packets_wait_in_fq", "no fq"),
    ("kinds::nic_in_a_vrf", "no VRF"),
    // Tables of iptables that the running kernel was built without.
    ("metering::policy_in_forward_is_recognised_in_legacy_tables_too", "this kernel has no such tables"),
];

/// Whether a test may be skipped for that.
fn is_expected(name: &str, reason: &str) -> bool {
    EXPECTED.iter().any(|(test, why)| name.contains(test) && reason.contains(why))
}

/// A skipped test, by whichever way that became known.
pub(super) fn note(outcome: &mut PartOutcome, name: &str, reason: &str) {
    outcome.skipped += 1;
    match is_expected(name, reason) {
        true => println!("skipped, as is known: {name}: {reason}"),
        false => outcome.fail(&format!("{name} is skipped, and not on the list of those that may be: {reason}")),
    }
}

/// The file in which the tests of one run note it.
pub(super) struct SkipNotes {
    file: PathBuf,
}

impl SkipNotes {
    /// Nothing is noted yet.
    pub(super) fn begin(paths: &Paths) -> Result<Self> {
        let folder = paths.test_logs();
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let file = folder.join("skips");
        if file.exists() {
            fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
        }
        Ok(Self { file })
    }

    /// For the environment of the tests.
    pub(super) fn variable(&self) -> (&'static str, &Path) {
        (VARIABLE, &self.file)
    }

    /// Counts what was noted: the harness counts these tests as passed.
    pub(super) fn count(self, outcome: &mut PartOutcome) -> Result<()> {
        if !self.file.exists() {
            return Ok(());
        }
        let text = fs::read_to_string(&self.file).with_context(|| format!("read {}", self.file.display()))?;
        for (name, reason) in noted(&text) {
            outcome.passed = outcome.passed.saturating_sub(1);
            note(outcome, name, reason);
        }
        Ok(())
    }
}

/// Each test once, with the first reason that it gave.
fn noted(text: &str) -> BTreeMap<&str, &str> {
    let mut all = BTreeMap::new();
    for (name, reason) in text.lines().filter_map(|line| line.split_once('\t')) {
        all.entry(name).or_insert(reason);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::part::Part;

    #[test]
    fn what_is_not_on_the_list_fails_the_run() {
        let mut outcome = PartOutcome::new(Part::Program);
        (outcome.passed, outcome.skipped) = (5, 0);
        for (name, reason) in noted("life::a\tneeds two CPUs\nclsact::b\tthis kernel has no links\nlife::a\tagain\n") {
            outcome.passed -= 1;
            note(&mut outcome, name, reason);
        }
        assert_eq!((outcome.passed, outcome.skipped, outcome.failed), (3, 2, 1));
    }
}
