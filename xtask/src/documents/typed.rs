//! One command of a page: whether the lab can run it, and with which words. Pure.

use clap::Parser;

/// What pages write in capitals, and what stands for it in the lab.
const PLACEHOLDERS: [(&str, &str); 8] = [
    // Agents of the lab serve their pages on loopback.
    ("NODE_ADDRESS:9477", "127.0.0.1:9477"),
    ("NS/NAME", "simpson/homer"),
    ("ADDRESS:PORT", "198.51.100.10:8080"),
    ("ADDRESS", "198.51.100.10"),
    ("PORT", "40000"),
    ("NODE", "node1"),
    ("NAME", "egressip-simpson"),
    ("REASON", "forged_tunnel"),
];

/// What the lab has another place for.
pub(crate) const BPFFS: &str = "/sys/fs/bpf/egress-agent";
const NAMESPACE: &str = "egress-agent";
const LAB_NAMESPACE: &str = "kube-system";

/// What `kubectl` does in the lab, which has an API server and neither controllers nor kubelets.
const KUBECTL: [&str; 6] = ["annotate", "apply", "delete", "describe", "get", "label"];
/// Programs that look at a node.
const ON_NODE: [&str; 5] = ["bpftool", "curl", "find", "ip", "nft"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Runner {
    Kubectl(Vec<String>),
    /// `egress-agent`, on node1.
    Agent(Vec<String>),
    /// `egress-router`, on node1, with files of the clone.
    Router(Vec<String>),
    /// Another program, on node1.
    OnNode(Vec<String>),
    /// Read by xtask's own definitions, and not run: these commands run the lab, and the tests.
    Xtask,
}

impl Runner {
    /// By what these words are run, or why they are not.
    pub(crate) fn of(words: &[String]) -> Result<Self, String> {
        let mut words = words;
        // Variables of a command of xtask.
        while words.first().is_some_and(|word| is_variable(word)) {
            words = &words[1..];
        }
        if let [cargo, xtask, ..] = words
            && (cargo.as_str(), xtask.as_str()) == ("cargo", "xtask")
        {
            return match crate::Cli::try_parse_from(&words[1..]) {
                Ok(_) => Ok(Self::Xtask),
                Err(error) => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
            };
        }
        let words: Vec<String> = words.iter().map(|word| filled(word)).collect();
        if let Some(word) = words.iter().find_map(|word| placeholder(word)) {
            return Err(format!("{word} stands for nothing"));
        }
        let (program, arguments) = words.split_first().ok_or("no command")?;
        let arguments = arguments.to_vec();
        match program.as_str() {
            "kubectl" => kubectl(arguments),
            "egress-agent" if arguments.first().is_some_and(|one| ["run", "cleanup"].contains(&one.as_str())) => {
                Err("the lab runs its agents itself".to_owned())
            }
            "egress-agent" => Ok(Self::Agent(arguments)),
            "egress-router" => Ok(Self::Router(arguments)),
            one if ON_NODE.contains(&one) => Ok(Self::OnNode(words)),
            one => Err(format!("there is no {one}")),
        }
    }
}

fn is_variable(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
}

fn kubectl(mut arguments: Vec<String>) -> Result<Runner, String> {
    for pair in 1..arguments.len() {
        if arguments[pair - 1] == "-n" && arguments[pair] == NAMESPACE {
            LAB_NAMESPACE.clone_into(&mut arguments[pair]);
        }
    }
    let mut rest = arguments.iter().map(String::as_str);
    let verb = loop {
        match rest.next() {
            Some("-n") => drop(rest.next()),
            other => break other.unwrap_or_default(),
        }
    };
    if !KUBECTL.contains(&verb) {
        return Err(format!("kubectl {verb} needs more than an API server"));
    }
    if rest.any(|argument| argument == "-k") {
        return Err("the lab installs nothing".to_owned());
    }
    Ok(Runner::Kubectl(arguments))
}

/// With what the lab has for the placeholders.
fn filled(word: &str) -> String {
    let mut word = word.to_owned();
    for (name, value) in PLACEHOLDERS {
        // A name within a longer one of capitals is not meant.
        let Some(at) = word.find(name) else { continue };
        let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
        let (before, after) = (&word[..at], &word[at + name.len()..]);
        if !before.ends_with(is_part) && !after.starts_with(is_part) {
            word = format!("{before}{value}{after}");
        }
    }
    word
}

/// A word in capitals, which is to be filled in by the reader.
fn placeholder(word: &str) -> Option<&str> {
    let parts = word.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    parts.into_iter().find(|part| part.len() > 1 && part.chars().all(|c| c.is_ascii_uppercase()))
}

/// The words of a line, without its comment. A line that takes a shell is refused.
pub(crate) fn words(line: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let mut quote = None;
    for character in line.chars() {
        match (quote, character) {
            (Some(open), close) if open == close => quote = None,
            (Some(_), inside) => word.get_or_insert_default().push(inside),
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, space) if space.is_whitespace() => words.extend(word.take()),
            (None, '|' | '&' | ';' | '<' | '>' | '$' | '(' | ')' | '`' | '\\') => {
                return Err(format!("{character:?} takes a shell"));
            }
            (None, plain) => word.get_or_insert_default().push(plain),
        }
    }
    if quote.is_some() {
        return Err("the quotes are not closed".to_owned());
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runner(line: &str) -> Result<Runner, String> {
        Runner::of(&words(line)?)
    }

    fn owned(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn lines_are_words() {
        assert_eq!(words("a  'b c' \"d\"e # f").expect("words"), ["a", "b c", "de"]);
        assert_eq!(
            words("get -o jsonpath='{.a[0]}{\"\\n\"}'").expect("words"),
            ["get", "-o", "jsonpath={.a[0]}{\"\\n\"}"]
        );
        assert_eq!(words("label node a/b#c=").expect("words"), ["label", "node", "a/b#c="]);
        for shell in ["a | b", "a && b", "for n in $(b); do", "a > b", "a 'b"] {
            assert!(words(shell).is_err(), "{shell}");
        }
    }

    #[test]
    fn the_lab_has_places_for_what_pages_leave_open() {
        let line = "egress-agent trace --pod NS/NAME --to ADDRESS:PORT";
        let filled = owned(&["trace", "--pod", "simpson/homer", "--to", "198.51.100.10:8080"]);
        assert_eq!(runner(line), Ok(Runner::Agent(filled)));
        let line = "kubectl -n egress-agent get configmap NAME";
        assert_eq!(
            runner(line),
            Ok(Runner::Kubectl(owned(&["-n", "kube-system", "get", "configmap", "egressip-simpson"])))
        );
        assert_eq!(
            runner("curl NODE_ADDRESS:9477/metrics"),
            Ok(Runner::OnNode(owned(&["curl", "127.0.0.1:9477/metrics"])))
        );
        assert!(runner("kubectl get pod POD").expect_err("an unknown name").contains("POD"));
        assert!(runner("kubectl describe RENAMES").is_err(), "no name within another");
    }

    #[test]
    fn what_the_lab_has_not_is_refused() {
        for line in [
            "kind load image-archive x",
            "kubectl -n egress-agent rollout status daemonset/egress-agent",
            "kubectl apply -k deploy/overlays/bridge-cni",
            "kubectl exec x -- egress-agent status",
            "egress-agent run --node-name=a",
            "cargo xtask dance",
            "cargo xtask test --dance",
            "",
        ] {
            assert!(runner(line).is_err(), "{line}");
        }
        assert_eq!(runner("NAME_OF=x cargo xtask test --only lab --filter NAME"), Ok(Runner::Xtask));
    }
}
