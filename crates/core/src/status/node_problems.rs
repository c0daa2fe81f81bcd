//! Unreadable parts of nodes: one line for each, when it is new. Pure, except for its memory.
//!
//! Nodes are written every few seconds, and a broken annotation is reported only once.

use std::collections::BTreeMap;

use crate::allocation::Nodes;

/// The reported problems, by node.
#[derive(Debug, Default)]
pub struct NodeProblems {
    reported: BTreeMap<String, Vec<String>>,
}

impl NodeProblems {
    /// New problems, with their nodes.
    pub fn new_problems<'a>(&mut self, nodes: &'a Nodes) -> Vec<(&'a str, &'a str)> {
        let mut all_new = Vec::new();
        for (name, node) in nodes.iter().filter(|(_, node)| !node.problems.is_empty()) {
            let reported = self.reported.get(name).map(Vec::as_slice).unwrap_or_default();
            let new = node.problems.iter().filter(|problem| !reported.contains(problem));
            all_new.extend(new.map(|problem| (name.as_str(), problem.as_str())));
        }
        let broken = nodes.iter().filter(|(_, node)| !node.problems.is_empty());
        self.reported = broken.map(|(name, node)| (name.clone(), node.problems.clone())).collect();
        all_new
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::node::Node;

    #[test]
    fn each_problem_is_reported_once_until_it_is_solved() {
        let mut problems = NodeProblems::default();
        let with = |texts: &[&str]| {
            let problems = texts.iter().map(|text| (*text).to_owned()).collect();
            Nodes::from([("n1".to_owned(), Arc::new(Node { problems, ..Node::default() }))])
        };
        assert_eq!(problems.new_problems(&with(&["a"])), [("n1", "a")]);
        assert!(problems.new_problems(&with(&["a"])).is_empty());
        assert_eq!(problems.new_problems(&with(&["a", "b"])), [("n1", "b")]);
        assert!(problems.new_problems(&with(&[])).is_empty());
        assert_eq!(problems.new_problems(&with(&["b"])), [("n1", "b")], "it was mended in between");
        assert!(problems.new_problems(&Nodes::new()).is_empty());
        assert_eq!(problems.new_problems(&with(&["b"])), [("n1", "b")], "another node of the name");
    }
}
