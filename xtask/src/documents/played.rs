//! docs/security.md says which test plays each of its claims.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use regex::Regex;

    use crate::documents::read;
    use egress_toolchain::Paths;

    const PAGE: &str = "docs/security.md";
    /// Head of the last column of a table of claims.
    const COLUMN: &str = "played by";
    const WITHOUT: [&str; 2] = ["not played", "by hand"];

    /// All sources, one after the other.
    fn sources(folder: &Path, text: &mut String) {
        for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            if entry.is_dir() {
                sources(&entry, text);
            } else if entry.extension().is_some_and(|extension| extension == "rs") {
                *text += &fs::read_to_string(&entry).expect("a source");
            }
        }
    }

    /// Names of tests, which are sentences; the last part of a path.
    fn names(text: &str) -> Vec<&str> {
        let name = Regex::new(r"`(?:[a-z0-9_]+::)*([a-z0-9]+(?:_[a-z0-9]+){3,})`").expect("an expression");
        let all = name.captures_iter(text).filter_map(|found| found.get(1)).map(|name| name.as_str());
        all.filter(|name| !name.starts_with("egress_agent_")).collect()
    }

    #[test]
    fn every_claim_of_the_security_page_names_a_test_that_there_is() {
        let root = Paths::find().expect("a clone").root;
        let page = read(Path::new(PAGE)).expect("the page");
        let mut text = String::new();
        let crates = ["core", "datapath", "kube", "lab", "scenarios", "supervise", "toolchain"]
            .map(|name| format!("crates/{name}"));
        let others = ["egress-agent", "egress-common", "fuzz", "xtask"].map(str::to_owned);
        for folder in crates.into_iter().chain(others) {
            for part in ["src", "tests"].map(|part| root.join(&folder).join(part)) {
                if part.is_dir() {
                    sources(&part, &mut text);
                }
            }
        }
        let is_there = |name: &str| text.contains(&format!("fn {name}(")) || text.contains(&format!("\"{name}\""));
        let unknown: Vec<&str> = names(&page).into_iter().filter(|name| !is_there(name)).collect();
        assert_eq!(unknown, [""; 0], "no test has this name");
        let (mut is_of_claims, mut claims, mut bare) = (false, 0, Vec::new());
        for line in page.lines() {
            let Some(row) = line.strip_prefix('|').and_then(|line| line.strip_suffix('|')) else {
                is_of_claims = false;
                continue;
            };
            let last = row.rsplit('|').next().unwrap_or_default().trim();
            if last.starts_with(COLUMN) {
                is_of_claims = true;
            } else if is_of_claims && !last.starts_with("---") {
                claims += 1;
                if names(last).is_empty() && !WITHOUT.iter().any(|word| last.starts_with(word)) {
                    bare.push(line);
                }
            }
        }
        assert!(claims > 50, "{claims} claims were found");
        assert_eq!(bare, [""; 0], "which test plays it?");
    }
}
