//! Every reason to drop a packet has a test that runs the programs and asserts its counter: a reason that none names fails
//! here.

use std::fs;
use std::path::Path;

use egress_common::abi::{Class, Verdict};

/// What no packet can be made to come to, and why.
const UNREACHABLE: [(Verdict, &str); 1] = [(
    Verdict::EncapFailed,
    "the helpers fail only where the kernel refuses a tunnel header of right size, or finds no packet where it made room",
)];

/// The tests' text without comments and imports, which name a verdict and assert nothing. The oracle's stories are left
/// out too: what they come to is the model's word; and so are traces, which name what they excuse.
fn text(folder: &Path, out: &mut String) {
    for entry in fs::read_dir(folder).expect("the tests") {
        let path = entry.expect("an entry").path();
        if ["oracle", "traces", "traces.rs"].iter().any(|left_out| path.ends_with(left_out)) {
            continue;
        }
        if path.is_dir() {
            text(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let file = fs::read_to_string(&path).expect("a file of tests");
            let lines = file.lines().filter(|line| {
                let line = line.trim_start();
                !line.starts_with("//") && !line.starts_with("use ")
            });
            out.extend(lines.flat_map(|line| [line, "\n"]));
        }
    }
}

fn is_named(text: &str, verdict: Verdict) -> bool {
    let name = format!("Verdict::{verdict:?}");
    let mut places = text.match_indices(&name);
    places.any(|(at, _)| !text[at + name.len()..].starts_with(char::is_alphanumeric))
}

#[test]
fn every_drop_reason_has_a_program_test() {
    let mut tests = String::new();
    text(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel_programs"), &mut tests);
    let dropping = Verdict::ALL.iter().filter(|verdict| verdict.class() == Class::Drop);
    let untested: Vec<_> = dropping.filter(|verdict| !is_named(&tests, **verdict)).collect();
    let excused: Vec<_> = UNREACHABLE.iter().map(|(verdict, _)| verdict).collect();
    assert_eq!(untested, excused, "left: reasons without a test; right: those that no packet comes to");
}

#[test]
fn a_name_that_begins_another_is_not_taken_for_it() {
    assert!(is_named("(x, Verdict::NoNatEntry),", Verdict::NoNatEntry));
    assert!(!is_named("Verdict::HairpinAnswered", Verdict::Hairpin));
    assert!(!is_named("", Verdict::Hairpin));
}
