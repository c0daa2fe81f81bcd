//! That every link of every page leads to a file, and to a heading of it. Pure.

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::{Component, Path, PathBuf};

    use crate::documents::{pages, read};
    use egress_toolchain::Paths;

    /// The text without what is code: there brackets are no links.
    fn prose(text: &str) -> String {
        let mut inside = false;
        let mut prose = String::new();
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                inside = !inside;
            } else if !inside {
                let parts = line.split('`').step_by(2);
                prose += &parts.collect::<Vec<_>>().join("`");
                prose.push('\n');
            }
        }
        prose
    }

    fn targets(text: &str) -> Vec<String> {
        let prose = prose(text);
        let links = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        links.map(|(target, _)| target.to_owned()).collect()
    }

    /// As GitHub makes them: lower case, spaces to dashes, other signs gone, the second of a name with a number.
    fn anchors(text: &str) -> BTreeSet<String> {
        let (mut inside, mut seen, mut anchors) = (false, BTreeMap::new(), BTreeSet::new());
        for line in text.lines() {
            inside ^= line.trim_start().starts_with("```");
            let Some(title) = line.strip_prefix('#').filter(|_| !inside) else { continue };
            let title = title.trim_start_matches('#').trim();
            // Of a link the words are shown.
            let title =
                title.split("](").map(|part| part.split_once(')').map_or(part, |(_, rest)| rest)).collect::<String>();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
            let name: String = kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect();
            let count = seen.entry(name.clone()).and_modify(|count| *count += 1).or_insert(0);
            anchors.insert(if *count == 0 { name } else { format!("{name}-{count}") });
        }
        anchors
    }

    /// `a/../b` without the detour.
    fn straight(path: &Path) -> PathBuf {
        let mut straight = PathBuf::new();
        for part in path.components() {
            match part {
                Component::ParentDir => drop(straight.pop()),
                Component::CurDir => {}
                other => straight.push(other),
            }
        }
        straight
    }

    #[test]
    fn every_link_leads_somewhere() {
        let root = Paths::find().expect("a clone").root;
        let (mut broken, mut named) = (Vec::new(), BTreeMap::new());
        for page in pages().expect("pages") {
            let text = read(&page).expect("a page");
            for target in targets(&text).into_iter().filter(|target| !target.contains("://")) {
                let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
                let folder = page.parent().unwrap_or(Path::new(""));
                let there = if file.is_empty() { page.clone() } else { straight(&folder.join(file)) };
                let is_there = root.join(&there).exists();
                let names = named.entry(there.clone());
                let is_named = anchor.is_empty()
                    || names.or_insert_with(|| anchors(&read(&there).unwrap_or_default())).contains(anchor);
                if !is_there || !is_named {
                    broken.push(format!("{}: {target}", page.display()));
                }
            }
        }
        assert_eq!(broken, Vec::<String>::new());
    }

    #[test]
    fn headings_are_found_by_their_names() {
        let text = "# A page's `name`, said\n```sh\n# no heading\n```\n## Two [words](x.md)\n## Same\n## Same\n";
        let expected = ["a-pages-name-said", "two-words", "same", "same-1"].map(str::to_owned);
        assert_eq!(anchors(text), BTreeSet::from(expected));
        assert_eq!(targets("[a](b.md#c) `[no](d)` [e](f)\n```sh\n[g](h)\n```\n"), ["b.md#c", "f"]);
    }
}
