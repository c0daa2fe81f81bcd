//! The cluster of the walkthrough, and what its steps do on it.
//!
//! An agent acts on an object some moments after kubectl has returned. So each look at the server's log begins with requests
//! until the first one is seen as expected, or patience runs out. What comes after that is checked strictly. A failed check is
//! noted and the story continues; a broken lab or an agent that has ended stops it.

use std::io::ErrorKind;

use super::report::StoryReport;
use crate::prelude::*;
use egress_lab::kube_api::{EGRESS_IP, KubeApi, TypedKind};
use egress_lab::wait::poll;

/// How many requests each pod makes per family once things have settled.
const REQUESTS: usize = 4;
/// The same where requests spread over two addresses: few enough to be quick, and enough that a missing address is
/// not bad luck (one in 2^31 for two pods).
const SPREAD_REQUESTS: usize = 16;
/// How many lines of the access log an act shows.
const SHOWN_LINES: usize = 12;

/// Fields are dropped in this order: traffic first, the test cluster last.
pub(super) struct Walkthrough {
    pub(super) capture: Option<Capture>,
    pub(super) cluster: TestCluster,
    /// The CNI plugin.
    pub(super) router: PathBuf,
    pub(super) report: StoryReport,
    pub(super) examples: PathBuf,
    /// How long an assignment may take; its effects on traffic get a quarter of that.
    pub(super) patience: Duration,
}

impl Walkthrough {
    pub(super) fn agents_alive(&mut self) -> Result<()> {
        self.cluster.agents.iter_mut().try_for_each(Agent::ensure_alive)
    }

    /// Says what a person would type, runs it and prints the answer.
    pub(super) fn show(&self, typed: &str, run: impl FnOnce(&KubeApi) -> Result<String>) -> Result<()> {
        println!("   $ kubectl {typed}");
        for line in run(&self.cluster.api)?.lines() {
            println!("     {line}");
        }
        Ok(())
    }

    pub(super) fn apply(&self, kind: &TypedKind, example: &str) -> Result<()> {
        let file = self.examples.join(example);
        self.show(&format!("apply -f deploy/examples/{example}"), |api| api.apply_file(kind, &file))
    }

    pub(super) fn delete(&self, kind: &TypedKind, name: &str) -> Result<()> {
        self.show(&format!("delete {} {name}", kind.resource), |api| api.delete_named(kind, name))
    }

    pub(super) fn list(&self, kind: &TypedKind) -> Result<()> {
        self.show(&format!("get {}", kind.resource), |api| api.listed(kind))
    }

    pub(super) fn label(&self, node: NodeNumber, on: bool) -> Result<()> {
        self.label_with(node, ASSIGNABLE, on.then_some(""))
    }

    /// Without a value the label is removed.
    pub(super) fn label_with(&self, node: NodeNumber, key: &str, value: Option<&str>) -> Result<()> {
        let (node, change) = (node.name(), value.map_or("-".to_owned(), |value| format!("={value}")));
        self.show(&format!("label node {node} {key}{change}"), |api| api.label_node(&node, key, value))
    }

    /// Waits until the lease of each node has an end ([`TestCluster::leases_have_an_end`]).
    pub(super) fn leases_end(&self) -> Result<()> {
        let ended = poll(self.patience, || Ok(self.cluster.leases_have_an_end()?.then_some(())))?;
        ended.context("a lease has no end though another node could host the address")
    }

    /// Waits until an object is as wanted, and returns it as it is in the end.
    pub(super) fn wait_for(&mut self, kind: &TypedKind, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + self.patience;
        loop {
            self.agents_alive()?;
            let object = self.cluster.api.object(kind, name)?.unwrap_or_default();
            if wanted(&object) || Instant::now() > end {
                return Ok(object);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the EgressIP's addresses are assigned as wanted, notes it, and shows the table.
    pub(super) fn expect_assigned(
        &mut self,
        object: &str,
        expected: &str,
        wanted: impl Fn(&[(String, String)]) -> bool,
    ) -> Result<()> {
        let found = self.wait_for(&EGRESS_IP, object, |object| wanted(&assignments(object)))?;
        let assignment = assignments(&found);
        let pairs: Vec<String> = assignment.iter().map(|(node, address)| format!("{address} on {node}")).collect();
        println!("   assigned: {}", if pairs.is_empty() { "nothing".to_owned() } else { pairs.join(", ") });
        let seen = if wanted(&assignment) { expected.to_owned() } else { format!("[{}]", pairs.join(", ")) };
        self.report.check(object, &expected, &seen);
        self.list(&EGRESS_IP)
    }

    /// Lets every pod that `expected` has an opinion on call the outside, and compares what the server saw.
    pub(super) fn expect_outside(
        &mut self,
        expected: impl Fn(&LabPod, IpAddr) -> Option<BTreeSet<IpAddr>>,
    ) -> Result<()> {
        let questions: Vec<(LabPod, SocketAddr, BTreeSet<IpAddr>)> = self
            .cluster
            .lab
            .pods()
            .iter()
            .flat_map(|pod| plan::SERVER.both().map(|to| (pod.clone(), SocketAddr::new(to, HTTP_PORT))))
            .filter_map(|(pod, to)| expected(&pod, to.ip()).map(|expected| (pod, to, expected)))
            .collect();
        for (pod, to, expected) in &questions {
            self.settle(&pod.netns, *to, expected, &pod.name)?;
        }
        let mark = self.cluster.access_log()?.mark();
        for (pod, to, expected) in &questions {
            let count = if expected.len() > 1 { SPREAD_REQUESTS } else { REQUESTS };
            let mut seen = BTreeSet::new();
            for _ in 0..count {
                seen.insert(ask(&pod.netns, *to, &pod.name)?);
            }
            let who = format!("{} -> {}", pod.name, if to.is_ipv4() { "IPv4" } else { "IPv6" });
            self.report.check(&who, &listed(expected), &listed(&seen));
        }
        self.show_log(mark)
    }

    /// Compares how a server inside the cluster sees a caller.
    pub(super) fn expect_inside(&mut self, what: &str, from: &Netns, to: SocketAddr, expected: IpAddr) -> Result<()> {
        let seen = ask(from, to, "inside")?;
        self.report.check(what, &expected, &seen);
        Ok(())
    }

    fn settle(&mut self, from: &Netns, to: SocketAddr, expected: &BTreeSet<IpAddr>, caller: &str) -> Result<()> {
        let wanted: BTreeSet<String> = expected.iter().map(IpAddr::to_string).collect();
        let mut missing = wanted.clone();
        let end = Instant::now() + self.patience / 4;
        while !missing.is_empty() && Instant::now() < end {
            self.agents_alive()?;
            let seen = ask(from, to, caller)?;
            if !wanted.contains(&seen) {
                // Not there yet: whatever was seen before says nothing.
                missing.clone_from(&wanted);
                std::thread::sleep(Duration::from_millis(50));
            }
            missing.remove(&seen);
        }
        Ok(())
    }

    fn show_log(&self, mark: usize) -> Result<()> {
        let lines = self.cluster.access_log()?.since(mark);
        println!("   access log of the server outside:");
        // One line per caller and address is what tells the story.
        let mut shown = BTreeSet::new();
        let telling = lines.iter().filter(|line| shown.insert((line.user_agent.clone(), line.client.ip())));
        let telling: Vec<_> = telling.collect();
        for line in telling.iter().take(SHOWN_LINES) {
            println!("     {line}");
        }
        println!("     ({} requests in all, each pair of caller and address shown once)", lines.len());
        Ok(())
    }
}

/// One request: how the server saw it, or why it was not answered.
fn ask(from: &Netns, to: SocketAddr, caller: &str) -> Result<String> {
    Ok(match client::get(from, to, "/", caller)? {
        Ok(reply) => reply.seen_as()?.to_string(),
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => "no answer".to_owned(),
        Err(error) => error.kind().to_string(),
    })
}

fn listed(items: &BTreeSet<impl std::fmt::Display>) -> String {
    // By text, since addresses and texts sort differently.
    let texts: BTreeSet<String> = items.iter().map(|item| item.to_string()).collect();
    texts.into_iter().collect::<Vec<_>>().join(", ")
}

/// The (node, address) pairs of an object's status.
fn assignments(object: &Value) -> Vec<(String, String)> {
    let items = object.pointer("/status/items").and_then(Value::as_array);
    let pair = |item: &Value| {
        let text = |key: &str| item.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        (text("node"), text("egressIP"))
    };
    items.map(|items| items.iter().map(pair).collect()).unwrap_or_default()
}
