//! The fenced blocks of a page. Pure.

use std::path::{Path, PathBuf};

use super::typed::{Runner, words};

/// What a reader sees where a command was not run.
const NOT_RUN: &str = "not run here";
/// What a reader sees where the lab has not run a command, but the tests on real nodes have (`cargo xtask test --only cluster`).
const RUN_ON_NODES: &str = "run on real nodes";

/// Blocks that are no commands.
const OTHERS: [&str; 6] = ["json", "mermaid", "nft", "text", "toml", "yaml"];

/// What the lab looks like when a block is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Scene {
    /// Three nodes with the label, objects that are all assigned.
    #[default]
    Usual,
    NoLabel,
    /// As `Usual`, and node1 is drained.
    Node1Drained,
}

impl Scene {
    fn named(name: &str) -> Option<Self> {
        match name {
            "no node has the label" => Some(Self::NoLabel),
            "node1 is drained" => Some(Self::Node1Drained),
            _ => None,
        }
    }
}

/// A block of commands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) scene: Scene,
    pub(crate) commands: Vec<Shown>,
}

/// A command as a page shows it, and what it prints there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Page and line.
    pub(crate) place: String,
    pub(crate) line: String,
    /// It says that the lab does not run it, or its block does.
    pub(crate) not_run: bool,
    /// It says that the tests on real nodes run it, or its block does.
    pub(crate) on_nodes: bool,
    pub(crate) prints: Vec<String>,
}

/// What is wrong with a page.
pub(crate) type Wrong = String;

/// The commands of a page. Each is marked as not run, or can be run.
pub(crate) fn blocks(page: &Path, text: &str) -> Result<Vec<Block>, Wrong> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    let mut before = Before::default();
    while let Some((number, line)) = lines.next() {
        let Some(info) = line.trim_start().strip_prefix("```") else {
            before.note(line);
            continue;
        };
        let indent = line.len() - line.trim_start().len();
        let place = Position { page: page.to_owned(), line: number + 1 };
        let inside: Vec<(usize, String)> = lines
            .by_ref()
            .take_while(|(_, line)| line.trim_start() != "```")
            .map(|(number, line)| (number, line.get(indent..).unwrap_or_default().to_owned()))
            .collect();
        let before = std::mem::take(&mut before);
        let is_prompted = match info.trim() {
            "sh" => false,
            "console" => true,
            other if OTHERS.contains(&other) => continue,
            other => {
                let known = OTHERS.join(", ");
                return Err(place.says(&format!("a fence with {other:?}: sh, console, or one of {known}")));
            }
        };
        let scene = match &before.scene {
            None => Scene::Usual,
            Some(name) => Scene::named(name).ok_or_else(|| place.says(&format!("the lab knows no {name:?}")))?,
        };
        let commands = if is_prompted { prompted(&place, inside)? } else { listed(&place, inside) };
        if commands.is_empty() {
            return Err(place.says("no command in a block of commands"));
        }
        let mut block = Block { scene, commands };
        for command in &mut block.commands {
            command.on_nodes |= before.says(&[RUN_ON_NODES]) && !command.says_otherwise();
            command.not_run |= before.says(&[NOT_RUN, RUN_ON_NODES]);
            command.check()?;
        }
        blocks.push(block);
    }
    Ok(blocks)
}

struct Position {
    page: PathBuf,
    line: usize,
}

impl Position {
    fn says(&self, what: &str) -> Wrong {
        format!("{}:{}: {what}", self.page.display(), self.line)
    }
}

/// What stands right before a fence.
#[derive(Default)]
struct Before {
    /// The last paragraph, or the last item of a list.
    words: String,
    scene: Option<String>,
    has_ended: bool,
}

impl Before {
    fn note(&mut self, line: &str) {
        let line = line.trim();
        if let Some(scene) = line.strip_prefix("<!-- lab: ").and_then(|line| line.strip_suffix(" -->")) {
            self.scene = Some(scene.to_owned());
        } else if line.is_empty() {
            self.has_ended = true;
        } else {
            if std::mem::take(&mut self.has_ended) {
                self.words.clear();
                self.scene = None;
            }
            self.words.push_str(line);
            self.words.push(' ');
        }
    }

    fn says(&self, marks: &[&str]) -> bool {
        says(&self.words, marks)
    }
}

fn says(text: &str, marks: &[&str]) -> bool {
    let text = text.to_lowercase();
    marks.iter().any(|words| text.contains(words))
}

/// One command in each line. A block that is not run may continue in the next line; in any other that is an error, since the
/// line is no command.
fn listed(place: &Position, inside: Vec<(usize, String)>) -> Vec<Shown> {
    let commands =
        inside.into_iter().filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
    commands.map(|(number, line)| shown(place, number, line)).collect()
}

/// Commands after a prompt, each with what it prints.
fn prompted(place: &Position, inside: Vec<(usize, String)>) -> Result<Vec<Shown>, Wrong> {
    let mut commands: Vec<Shown> = Vec::new();
    for (number, line) in inside {
        match (line.strip_prefix("$ "), commands.last_mut()) {
            (Some(line), _) => commands.push(shown(place, number, line.to_owned())),
            (None, Some(command)) => command.prints.push(line),
            (None, None) => return Err(place.says("a console begins with `$ ` and a command")),
        }
    }
    Ok(commands)
}

fn shown(place: &Position, number: usize, line: String) -> Shown {
    let place = format!("{}:{}", place.page.display(), number + 1);
    let comment = line.split_once(" #").map(|(_, comment)| comment).unwrap_or_default();
    let on_nodes = says(comment, &[RUN_ON_NODES]);
    let not_run = on_nodes || says(comment, &[NOT_RUN]);
    Shown { place, line, not_run, on_nodes, prints: Vec::new() }
}

impl Shown {
    /// By what it is run; `None` where it is not.
    pub(crate) fn runner(&self) -> Result<Option<Runner>, Wrong> {
        if self.not_run {
            return Ok(None);
        }
        let runner = words(&self.line).and_then(|words| Runner::of(&words));
        runner.map(Some).map_err(|why| {
            format!(
                "{}: {:?} is neither run in the lab ({why}) nor marked as {NOT_RUN:?} or {RUN_ON_NODES:?}",
                self.place, self.line
            )
        })
    }

    /// The comment of a line counts more than the words before its block.
    fn says_otherwise(&self) -> bool {
        self.not_run && !self.on_nodes
    }

    fn check(&self) -> Result<(), Wrong> {
        self.runner().map(drop)
    }

    /// Its output shows that it fails.
    pub(crate) fn fails(&self) -> bool {
        self.prints.iter().any(|line| line.starts_with("error: "))
    }

    /// The words that it should have printed and has not. Errors are printed beside the output, and may have the same words, so
    /// only a command that fails may have them there.
    pub(crate) fn missing(&self, output: &str, errors: &str) -> Vec<&str> {
        let errors = if self.fails() { errors } else { "" };
        self.fixed_words().into_iter().filter(|word| !output.contains(word) && !errors.contains(word)).collect()
    }

    /// The words that it prints in every lab, whatever its addresses and times: the first word of each line, and all of a
    /// table's heading.
    pub(crate) fn fixed_words(&self) -> Vec<&str> {
        let mut fixed = Vec::new();
        for line in &self.prints {
            let plain =
                |word: &&str| word.len() > 1 && word.chars().all(|c| c.is_ascii_alphabetic() || c == '_' || c == '-');
            let words: Vec<&str> =
                line.split_whitespace().map(|word| word.trim_matches(|c: char| !c.is_ascii_alphanumeric())).collect();
            let is_heading = words.len() > 1 && words.iter().all(|word| plain(word) && word.to_uppercase() == **word);
            let shown = words.iter().copied().take(if is_heading { words.len() } else { 1 });
            fixed.extend(shown.filter(plain));
        }
        fixed
    }
}

#[cfg(test)]
mod tests {
    use super::super::{pages, read};
    use super::*;

    fn of(text: &str) -> Result<Vec<Block>, Wrong> {
        blocks(Path::new("page.md"), text)
    }

    fn runs(text: &str) -> Vec<String> {
        let blocks = of(text).expect("a page");
        let commands = blocks.into_iter().flat_map(|block| block.commands);
        commands.filter(|command| !command.not_run).map(|command| command.line).collect()
    }

    /// The test that this file is for.
    #[test]
    fn every_command_of_every_page_is_run_or_says_that_it_was_not() {
        let (mut wrong, mut run) = (Vec::new(), 0);
        for page in pages().expect("pages") {
            match blocks(&page, &read(&page).expect("a page")) {
                Ok(blocks) => {
                    run += blocks.iter().flat_map(|block| &block.commands).filter(|command| !command.not_run).count();
                }
                Err(why) => wrong.push(why),
            }
        }
        assert_eq!(wrong, Vec::<String>::new());
        assert!(run > 30, "only {run} commands are run");
    }

    /// The tests on real nodes have each of them as it is shown.
    #[test]
    fn every_command_that_is_run_on_real_nodes_is_in_their_tests() {
        let folder = egress_toolchain::Paths::find().expect("a clone").root.join("crates/scenarios/src/nodes/steps");
        let files = std::fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        let tests: String = files.map(|file| std::fs::read_to_string(file).expect("a file")).collect();
        let (mut missing, mut found) = (Vec::new(), 0);
        for page in pages().expect("pages") {
            let blocks = blocks(&page, &read(&page).expect("a page")).expect("a sound page");
            for shown in blocks.iter().flat_map(|block| &block.commands).filter(|command| command.on_nodes) {
                let command = shown.line.split(" #").next().unwrap_or_default().trim();
                found += 1;
                if !tests.contains(command) {
                    missing.push(format!("{}: {command}", shown.place));
                }
            }
        }
        assert_eq!(missing, Vec::<String>::new());
        assert!(found > 40, "only {found} commands");
    }

    #[test]
    fn what_is_run_on_real_nodes_says_so_itself_or_before_its_block() {
        let on_nodes = |text: &str| -> Vec<String> {
            let commands = of(text).expect("a page").into_iter().flat_map(|block| block.commands);
            commands.filter(|command| command.on_nodes).map(|command| command.line).collect()
        };
        let page = "Run on real nodes.\n\n```sh\nkubectl x\nkind x    # not run here\n```\n";
        assert_eq!(on_nodes(page), ["kubectl x"]);
        let page = "Not run here.\n\n```sh\nkubectl x    # run on real nodes\nkind x\n```\n";
        assert_eq!(on_nodes(page), ["kubectl x    # run on real nodes"]);
    }

    #[test]
    fn what_is_said_before_a_block_is_said_of_it_and_of_no_other() {
        let page = "Look.\n\n```sh\nkubectl get egressip   # both\n```\n\nNot run here: no kubelet.\n\n```sh\nkind x\n```\n\nMore.\n";
        assert_eq!(runs(page), ["kubectl get egressip   # both"]);
        let page = "Not run here.\n\nBut this:\n\n```sh\nkind x\n```\n";
        let wrong = of(page).expect_err("not marked");
        assert!(wrong.contains("page.md:6") && wrong.contains("kind x") && wrong.contains("not run here"), "{wrong}");
        assert!(
            of("Run on real nodes.\n\n```sh\nkubectl apply -k deploy/overlays/bridge-cni\n```\n").is_ok(),
            "by other tests"
        );
        assert_eq!(runs("```sh\nkubectl get eip\nkind x     # not run here\n\n# said\n```\n"), ["kubectl get eip"]);
        assert!(of("```sh\nkubectl get eip\n  and more\n```\n").is_err(), "a line of its own");
        assert!(of("Not run here.\n\n```sh\nkubectl get 'a\n  b'\n```\n").is_ok(), "it continues");
    }

    #[test]
    fn a_fence_says_what_it_is() {
        assert!(of("```\nkubectl get eip\n```\n").expect_err("no word").contains("a fence with \"\""));
        assert!(of("```yaml\nkind: x\n```\n").expect("no commands").is_empty());
        assert!(of("```console\nNAME\n```\n").expect_err("no prompt").contains("begins with"));
        assert!(of("```sh\n# nothing\n```\n").is_err());
        let indented = "1. So:\n\n   ```sh\n   kubectl get eip\n   ```\n";
        assert_eq!(runs(indented), ["kubectl get eip"]);
    }

    #[test]
    fn a_scene_is_one_that_the_lab_knows() {
        let page =
            |scene: &str| format!("So it is.\n\n<!-- lab: {scene} -->\n```console\n$ kubectl get eip\nNAME\n```\n");
        assert_eq!(of(&page("no node has the label")).expect("known")[0].scene, Scene::NoLabel);
        assert!(of(&page("rain")).expect_err("unknown").contains("rain"));
        let both = format!("{}\nNext.\n\n```sh\nkubectl get eip\n```\n", page("node1 is drained"));
        assert_eq!(
            of(&both).expect("two").iter().map(|block| block.scene).collect::<Vec<_>>(),
            [Scene::Node1Drained, Scene::Usual]
        );
    }

    #[test]
    fn what_a_command_prints_everywhere_is_kept_to() {
        let page = "```console\n$ egress-agent status\nnode         node1 (egress node)\nEGRESS IP     ID  OBJECT\n172.18.0.110  1   first\n  \"values\": [{\nerror: no\n```\n";
        let blocks = of(page).expect("a page");
        let command = &blocks[0].commands[0];
        assert_eq!(command.fixed_words(), ["node", "EGRESS", "IP", "ID", "OBJECT", "values", "error"]);
        assert!(command.fails());
    }

    #[test]
    fn what_a_command_prints_is_not_what_it_warns_of() {
        let command = |prints: &str| {
            let page = format!("```console\n$ egress-agent status\n{prints}\n```\n");
            of(&page).expect("a page").remove(0).commands.remove(0)
        };
        let table = command("OBJECT  NODE\nfirst   node1");
        assert_eq!(table.missing("OBJECT NODE\nfirst", ""), [""; 0]);
        assert_eq!(table.missing("OBJECT", "no NODE of the first is known"), ["NODE", "first"]);
        let error = command("waits for an address\nerror: no");
        assert_eq!(error.missing("waits", "error: others"), [""; 0]);
        assert_eq!(error.missing("waits", ""), ["error"]);
    }
}
