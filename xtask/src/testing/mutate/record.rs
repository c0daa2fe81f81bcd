//! What became of all mutations of a part, as a page of the documents.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::table::{self, MutatedPart, Mutation};
use super::{MutationResult, count};
use egress_toolchain::Paths;

/// Below the clone.
const FOLDER: &str = "docs/mutations";

pub(super) fn write(paths: &Paths, results: &[(&'static Mutation, MutationResult, Duration)]) -> Result<()> {
    for (part, name) in [(MutatedPart::Programs, "programs"), (MutatedPart::Agent, "agent")] {
        let of_part: Vec<_> = results.iter().filter(|(mutation, _, _)| mutation.part() == part).collect();
        // A part that was not tried keeps its page.
        if of_part.len() < table::all().filter(|mutation| mutation.part() == part).count() {
            continue;
        }
        let path = paths.root.join(FOLDER).join(format!("{name}.md"));
        fs::create_dir_all(paths.root.join(FOLDER)).with_context(|| format!("create {FOLDER}"))?;
        fs::write(&path, page(name, &of_part)).with_context(|| format!("write {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

fn page(name: &str, results: &[&(&'static Mutation, MutationResult, Duration)]) -> String {
    let (survived, refused) = (
        count(results.iter().copied(), |result| *result == MutationResult::Survived),
        count(results.iter().copied(), |result| matches!(result, MutationResult::Refused(_))),
    );
    let killed = results.len() - survived - refused;
    let minutes = results.iter().map(|(_, _, elapsed)| *elapsed).sum::<Duration>().as_secs() / 60;
    let mut page = format!(
        "# Mutations of the {name}\n\nWritten by `cargo xtask mutate --part {name} --record`: its last full run. What a mutation \
         is, [testing](../testing.md#mutations) says.\n\n{} mutations in {minutes} minutes: {killed} killed, {refused} refused by \
         the verifier, {survived} survived.\n\n| mutation | where | what it would mean | what became of it |\n|---|---|---|---|\n",
        results.len()
    );
    for (Mutation { name, file, why, .. }, result, _) in results {
        let why = why.replace('|', "\\|");
        // Writing to a string does not fail.
        let _ = writeln!(page, "| `{name}` | [{file}](../../{file}) | {why} | {result} |");
    }
    page
}
