//! Checks that every drop reason has a test that runs the programs and asserts its counter.

use std::fs;
use std::path::Path;

use egress_common::abi::{Class, Verdict};

/// Drop reasons that no test packet can reach, and why.
const UNREACHABLE: [(Verdict, &str); 1] = [(
    Verdict::EncapFailed,
    "the helpers fail only if the kernel refuses a tunnel header of the right size, or finds no packet after making space",
)];

/// The tests' text without comments and imports, which assert nothing. The oracle and traces are left out: they compare with
/// a model, or name exceptions.
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
    assert_eq!(untested, excused, "left: reasons without a test; right: unreachable reasons");
}

#[test]
fn a_name_does_not_match_a_longer_one() {
    assert!(is_named("(x, Verdict::NoNatEntry),", Verdict::NoNatEntry));
    assert!(!is_named("Verdict::HairpinAnswered", Verdict::Hairpin));
    assert!(!is_named("", Verdict::Hairpin));
}
