//! The pods: two families in two namespaces, spread over the nodes. Pure.

use std::collections::BTreeMap;

use egress_lab::PodSpec;

/// The namespace whose pods get an egress IP.
pub(super) const SIMPSON: &str = "simpson";
/// The one whose pods, at first, do not.
pub(super) const BOUVIER: &str = "bouvier";
/// The label that some pods of the second namespace are selected by.
pub(super) const TWIN: &str = "twin";

const SIMPSONS: [&str; 6] = ["homer", "marge", "bart", "lisa", "maggie", "abe"];
const BOUVIERS: [&str; 4] = ["patty", "selma", "jackie", "gladys"];

/// The pods of a lab: on each node the namespaces take turns.
pub(super) fn pods(nodes: usize, pods_per_node: usize) -> Vec<PodSpec> {
    let (mut simpsons, mut bouviers) = (0, 0);
    let mut pods = Vec::new();
    for node in 0..nodes {
        for place in 0..pods_per_node {
            let (namespace, names, number) = match place % 2 {
                0 => (SIMPSON, &SIMPSONS[..], &mut simpsons),
                _ => (BOUVIER, &BOUVIERS[..], &mut bouviers),
            };
            let name = name(names, *number);
            *number += 1;
            let labels = labels(&name);
            pods.push(PodSpec { name, namespace: namespace.to_owned(), labels, node });
        }
    }
    pods
}

fn name(names: &[&str], number: usize) -> String {
    let first = names[number % names.len()];
    match number / names.len() {
        0 => first.to_owned(),
        round => format!("{first}-{}", round + 1),
    }
}

fn labels(name: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([("app".to_owned(), name.to_owned())]);
    if ["patty", "selma"].contains(&name) {
        labels.insert(TWIN.to_owned(), "true".to_owned());
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_has_one_of_each_family() {
        let pods = pods(3, 2);
        let names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
        assert_eq!(names, ["homer", "patty", "marge", "selma", "bart", "jackie"]);
        assert!(pods.iter().all(|pod| (pod.namespace == SIMPSON) == (SIMPSONS.contains(&pod.name.as_str()))));
    }

    #[test]
    fn names_are_unique_in_a_large_cast() {
        let pods = pods(20, 6);
        let names: std::collections::BTreeSet<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
        assert_eq!(names.len(), pods.len());
    }
}
