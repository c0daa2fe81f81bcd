//! The same packets through our programs and through nftables. The output must be equal in every field, except the port
//! or identifier that a translation chooses (see `outcome`). Differing cases are listed with their reason in
//! `differences.rs` and `docs/nat-differences.md`; a listed case that does not differ fails too.
//!
//! Two nodes with real interfaces (`nodes`) run all cases at once, step by step (`runner`). A case is a named sequence
//! of packets from a pod and from outside (`cases`), built layer by layer (`packets`) and read back field by field
//! (`decode`). The tests need root; without it they report that and pass, and `cargo xtask test` counts them as
//! skipped.

mod cases;
mod decode;
mod differences;
mod endpoints;
mod layout;
#[expect(dead_code, reason = "the tests of the data plane use all of it, these a part")]
#[path = "../kernel_dataplane/node.rs"]
mod node;
mod nodes;
mod outcome;
mod packets;
mod runner;
#[path = "../skips/mod.rs"]
mod skips;
mod sockets;

use std::collections::BTreeMap;

use crate::nodes::{Translator, on_translator};
use crate::outcome::{difference, outcome};
use crate::runner::{Played, play};

/// Name of a case, and the results of netfilter and of our programs.
type Differing = BTreeMap<String, (String, String)>;

#[test]
fn differential_suite_against_netfilter() {
    let names: Vec<String> = cases::all().into_iter().map(|case| case.name).collect();
    // One after the other; both finish within seconds.
    let played =
        [Translator::Netfilter, Translator::Ours].map(|by| on_translator(by, |ends| play(ends, &cases::all())));
    let [Some(netfilter), Some(ours)] = played else { return };
    let mut differing = Differing::new();
    for ((name, netfilter), ours) in names.iter().zip(&netfilter).zip(&ours) {
        explain(name, netfilter, ours);
        if let Some(difference) = difference(&outcome(netfilter), &outcome(ours)) {
            differing.insert(name.clone(), difference);
        }
    }
    let listed = differences::listed(&names);
    println!("{} cases, {} of them differ", names.len(), differing.len());
    let problems = problems(&differing, &listed);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    differences::check_page(&differing, &listed);
}

/// Deviations from the list.
fn problems(differing: &Differing, listed: &BTreeMap<String, usize>) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, (netfilter, ours)) in differing {
        if !listed.contains_key(name) {
            problems.push(format!("{name}\n  netfilter: {netfilter}\n  ours:      {ours}"));
        }
    }
    for name in listed.keys() {
        if !differing.contains_key(name) {
            problems.push(format!("{name}: listed as differing, and does not differ"));
        }
    }
    problems
}

/// Prints the full results of the cases whose name contains the text in the environment variable.
fn explain(name: &str, netfilter: &Played, ours: &Played) {
    let Ok(asked) = std::env::var("DIFFERENTIAL_EXPLAIN") else { return };
    if name.contains(&asked) {
        println!("{name}\n  netfilter: {:#?}\n  ours: {:#?}", outcome(netfilter), outcome(ours));
    }
}
