//! Checks that this build parses every command line of `egress-agent` in the documents, in text and in blocks, including
//! those that the lab does not run.

use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap::error::ErrorKind;

use crate::cmd::Cli;

/// Placeholders in the documents that a flag does not accept as they are.
const PLACEHOLDERS: [(&str, &str); 6] = [
    ("ADDRESS:PORT", "192.0.2.1:80"),
    ("ADDRESS", "192.0.2.1"),
    ("PORT", "4000"),
    ("FILTER", "info"),
    ("REASON", "no_route"),
    ("SHELL", "bash"),
];

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The arguments of `egress-agent` in each span in backticks and each line of a block.
fn lines(text: &str) -> Vec<Vec<String>> {
    let (mut is_block, mut found) = (false, Vec::new());
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
            continue;
        }
        let shown: Vec<&str> = if is_block { vec![line] } else { line.split('`').skip(1).step_by(2).collect() };
        for one in shown {
            let command = one.strip_prefix("$ ").unwrap_or(one);
            // Alone, or after `kubectl exec POD --`.
            let arguments =
                command.strip_prefix("egress-agent ").or_else(|| Some(command.split_once("-- egress-agent ")?.1));
            // Skip a generated usage line.
            let Some(arguments) = arguments.filter(|line| !line.contains(['<', '['])) else { continue };
            let without_comment = arguments.split(" #").next().unwrap_or_default();
            let arguments = without_comment.split_whitespace().filter(|one| *one != "...").map(filled);
            found.push(arguments.collect());
        }
    }
    found
}

fn filled(argument: &str) -> String {
    let known = PLACEHOLDERS.into_iter().find(|(name, _)| argument == *name);
    known.map_or(argument, |(_, value)| value).to_owned()
}

fn all_pages(root: &Path) -> Vec<PathBuf> {
    let mut all = vec![root.join("README.md")];
    pages(&root.join("docs"), &mut all);
    pages(&root.join("deploy"), &mut all);
    all
}

#[test]
fn every_command_line_of_the_documents_parses() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut wrong, mut read) = (Vec::new(), 0);
    for page in all_pages(&root) {
        let text = std::fs::read_to_string(&page).expect("a page");
        // `COMMAND` stands for any command.
        for arguments in
            lines(&text).into_iter().filter(|arguments| arguments.first().is_some_and(|one| one != "COMMAND"))
        {
            read += 1;
            let line = std::iter::once("egress-agent").chain(arguments.iter().map(String::as_str));
            let Err(error) = Cli::command().try_get_matches_from(line) else { continue };
            let is_name_alone = matches!(
                error.kind(),
                ErrorKind::MissingRequiredArgument
                    | ErrorKind::MissingSubcommand
                    | ErrorKind::DisplayHelp
                    | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            );
            if !is_name_alone {
                let page = page.strip_prefix(&root).unwrap_or(&page).display().to_string();
                wrong.push(format!("{page}: egress-agent {}: {}", arguments.join(" "), error.kind()));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    assert!(read > 60, "only {read} lines were read");
}

#[test]
fn lines_are_found_in_text_and_in_blocks() {
    let page = "Type `egress-agent drain NODE`, not `kubectl`.\n```sh\n$ kubectl exec POD -- egress-agent status -o json # all\n```\n";
    assert_eq!(lines(page), [vec!["drain", "NODE"], vec!["status", "-o", "json"]]);
}

/// The sources of this crate, without its test files.
fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.file_name().is_some_and(|name| name != "tests.rs" && name != "documents.rs") {
            *text += &std::fs::read_to_string(path).expect("a source");
        }
    }
}

/// A selector for an unknown reason would silently find nothing.
#[test]
fn event_selectors_use_existing_reasons() {
    let (own, mut text, mut found) = (Path::new(env!("CARGO_MANIFEST_DIR")), String::new(), 0);
    sources(&own.join("src"), &mut text);
    for page in all_pages(&own.join("..")) {
        let shown = std::fs::read_to_string(&page).expect("a page");
        for after in shown.split("reason=").skip(1) {
            let reason: String = after.chars().take_while(char::is_ascii_alphanumeric).collect();
            assert!(text.contains(&format!("\"{reason}\"")), "{}: reason={reason}", page.display());
            found += 1;
        }
    }
    assert!(found > 0);
}
