//! No two types of one name, private ones included: a search for a type finds one definition.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use regex::Regex;

const FOLDERS: [&str; 7] =
    ["crates", "egress-agent", "egress-common", "egress-ebpf", "fuzz", "kubectl-egress", "xtask"];
const EXCEPTIONS: [&str; 3] = [
    // The command line of a binary, as clap's documentation calls it.
    "Cli",
    "Command",
    // Both binaries have a command `codegen`, and arguments are named after their command.
    "CodegenArgs",
];
/// Indented aliases belong to an implementation or a function.
const DEFINITION: &str =
    r"(?m)^(?: *(?:pub(?:\(\w+\))? )?(?:struct|enum|union|trait)|(?:pub(?:\(\w+\))? )?type) ([A-Z]\w*)";

pub(super) fn check_type_names(root: &Path) -> Result<()> {
    let mut sources = Vec::new();
    FOLDERS.iter().try_for_each(|folder| collect(&root.join(folder), &mut sources))?;
    let twice = duplicates(&sources);
    ensure!(twice.is_empty(), "types of one name; rename all but one of each:\n{}", twice.join("\n"));
    Ok(())
}

fn collect(folder: &Path, sources: &mut Vec<(String, String)>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, sources)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push((path.display().to_string(), fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

fn duplicates(sources: &[(String, String)]) -> Vec<String> {
    let definition = Regex::new(DEFINITION).expect("a pattern");
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (file, text) in sources {
        let names = definition.captures_iter(text).filter_map(|captures| captures.get(1));
        names.for_each(|name| found.entry(name.as_str()).or_default().push(file));
    }
    found.retain(|name, files| files.len() > 1 && !EXCEPTIONS.contains(name));
    found.iter().map(|(name, files)| format!("{name}: {}", files.join(", "))).collect()
}

#[test]
fn a_name_of_two_types_is_found() {
    let first = "pub(crate) struct Flow {}\nimpl X {\n    type Error = Y;\n}\nstruct Cli;".to_owned();
    let second = "mod tests {\n    enum Flow {}\n}\nimpl Z {\n    type Error = Y;\n}\nstruct Cli;".to_owned();
    assert_eq!(duplicates(&[("a.rs".to_owned(), first), ("b.rs".to_owned(), second)]), ["Flow: a.rs, b.rs"]);
}
