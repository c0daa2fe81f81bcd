//! `egress-agent cleanup` leaves a node as it was before the first agent: devices, addresses, routes, rules, multicast
//! filters, traffic control, links, nftables, kernel settings and pins. Beside a running agent it refuses. Agents and cleanup
//! run with the rights of their DaemonSets.

use std::io::{BufRead, BufReader};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::prelude::*;
use egress_lab::pins::bpftool;

/// Between two looks that must come out alike: longer than between two solicitations for an address would be seen.
const APART: Duration = Duration::from_millis(300);
const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";

pub(super) fn leaves_nothing(context: &LabContext) -> Result<()> {
    let pods = vec![pod("one", "red", 1, &[]), pod("two", "red", 2, &[]), pod("three", "red", 3, &[])];
    let mut cluster = TestCluster::without_agents(context, pods)?;
    let before = cluster.lab.nodes().iter().map(settled).collect::<Result<Vec<_>>>()?;
    let options = cluster.options(context);
    // One node has its programs attached by filters.
    let mut by_filters = options.clone();
    by_filters.extra.push("--attach=clsact".to_owned());
    let start = |node: &LabNode| {
        Agent::start(&cluster.lab, node, if node.number.index() == 2 { &by_filters } else { &options })
    };
    cluster.agents = cluster.lab.nodes().iter().map(start).collect::<Result<_>>()?;
    cluster.agents_serve()?;
    cluster.assignable(2, true)?;
    cluster.assignable(3, true)?;
    cluster.assign(&egress_ip("doomed", &[V4, V6], &all(), &all()))?;
    for name in ["one", "two", "three"] {
        cluster.is_seen_as(name, Some(V4), Some(V6))?;
    }
    for (node, before) in cluster.lab.nodes().iter().zip(&before) {
        let changed = differences(before, &snapshot(node)?).len();
        ensure!(changed > 3, "the snapshot of {} does not see the agent", node.name());
    }
    let refused = cluster.agent(1)?.clean_up();
    ensure!(refused.is_err(), "cleanup ran beside an agent: {refused:?}");
    println!("beside an agent: {:#}", refused.err().context("no error")?);
    cluster.is_seen_as("one", Some(V4), Some(V6))?;

    for agent in &mut cluster.agents {
        agent.kill()?;
    }
    for (agent, before) in cluster.agents.iter().zip(&before) {
        println!("{}: {}", agent.node().name(), agent.clean_up()?.replace('\n', "; "));
        same(before, agent.node())?;
        let again = agent.clean_up()?;
        ensure!(again.trim() == "nothing to remove", "a second cleanup finds {again}");
    }
    stays_until_sigterm(cluster.agent(1)?)?;
    for pod in cluster.lab.pods() {
        for to in plan::SERVER.both() {
            let seen = observe(&pod.netns, to)?;
            ensure!(seen == Observed::Source(pod.node.address().towards(to)), "after cleanup {} is {seen}", pod.name);
        }
    }
    Ok(())
}

/// As the DaemonSet in `deploy/cleanup` has it: its pods must not end by themselves, and must end on SIGTERM.
fn stays_until_sigterm(agent: &Agent) -> Result<()> {
    let mut staying = agent.clean_up_and_stay()?;
    let mut printed = String::new();
    BufReader::new(staying.stdout.take().context("no output")?).read_line(&mut printed)?;
    ensure!(printed.trim() == "nothing to remove", "it says {printed:?}");
    ensure!(staying.try_wait()?.is_none(), "it does not stay");
    kill(Pid::from_raw(i32::try_from(staying.id())?), Signal::SIGTERM)?;
    let ended = staying.wait()?;
    ensure!(ended.success(), "it ends with {ended}");
    Ok(())
}

/// A link ends when the kernel gets to it.
fn same(before: &BTreeMap<String, BTreeSet<String>>, node: &LabNode) -> Result<()> {
    let mut left = Vec::new();
    let outcome = until_true(&format!("{} is as it was", node.name()), EFFECT, || {
        left = differences(before, &snapshot(node)?);
        Ok(left.is_empty())
    });
    outcome.with_context(|| format!("cleanup left or took: {left:#?}"))
}

pub(crate) fn differences(
    before: &BTreeMap<String, BTreeSet<String>>,
    after: &BTreeMap<String, BTreeSet<String>>,
) -> Vec<String> {
    let none = BTreeSet::new();
    let mut found = Vec::new();
    for (what, lines) in after {
        let old = before.get(what).unwrap_or(&none);
        found.extend(lines.difference(old).map(|line| format!("{what}: + {line}")));
        found.extend(old.difference(lines).map(|line| format!("{what}: - {line}")));
    }
    found
}

/// The same once nothing changes by itself any more: an address of IPv6 may be tentative for seconds, and what comes of it
/// (its multicast group, its route) later still.
fn settled(node: &LabNode) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut last = snapshot(node)?;
    until(&format!("{} has settled", node.name()), EFFECT, || {
        std::thread::sleep(APART);
        let now = snapshot(node)?;
        let is_tentative = now.values().flatten().any(|line| line.contains("tentative"));
        let is_same = std::mem::replace(&mut last, now.clone()) == now;
        Ok((is_same && !is_tentative).then_some(now))
    })
}

/// What an agent could leave, line by line.
pub(crate) fn snapshot(node: &LabNode) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let questions: [(&str, &[&str]); 10] = [
        ("ip", &["-details", "-o", "link", "show"]),
        ("ip", &["-o", "addr", "show"]),
        ("ip", &["route", "show", "table", "all"]),
        ("ip", &["-6", "route", "show", "table", "all"]),
        ("ip", &["rule", "show"]),
        ("ip", &["-6", "rule", "show"]),
        ("ip", &["-o", "maddr", "show"]),
        ("tc", &["qdisc", "show"]),
        // Counters of the host's own rules continue.
        ("nft", &["--stateless", "list", "ruleset"]),
        ("bridge", &["fdb", "show"]),
    ];
    let mut snapshot = BTreeMap::new();
    for (program, args) in questions {
        let text = node.host.exec(program, args)?;
        snapshot
            .insert(format!("{program} {}", args.join(" ")), text.lines().map(|line| line.trim().to_owned()).collect());
    }
    for device in ["breth0", node.management_port()] {
        for direction in ["ingress", "egress"] {
            let text = node.host.exec("tc", &["filter", "show", "dev", device, direction])?;
            snapshot.insert(format!("filters {device} {direction}"), text.lines().map(str::to_owned).collect());
        }
    }
    let attached = node.host.run(|| bpftool(&["net", "show"]))?.to_string();
    snapshot.insert("bpftool net".to_owned(), BTreeSet::from([attached]));
    snapshot.insert("settings".to_owned(), node.host.run(settings)?);
    snapshot.insert("pins".to_owned(), files(&node.bpffs)?);
    Ok(snapshot)
}

/// The network's kernel settings, all of them.
pub(crate) fn settings() -> Result<BTreeSet<String>> {
    let mut lines = BTreeSet::new();
    for path in below(Path::new("/proc/sys/net"))? {
        // Some can only be written; one is another random number at each look, and one a count.
        let is_none = path.ends_with("stable_secret") || path.ends_with("nf_conntrack_count");
        let readable = std::fs::read_to_string(&path).ok().filter(|_| !is_none);
        lines.extend(readable.map(|value| format!("{} = {}", path.display(), value.trim())));
    }
    ensure!(lines.len() > 100, "only {} settings are seen", lines.len());
    Ok(lines)
}

fn files(folder: &Path) -> Result<BTreeSet<String>> {
    Ok(below(folder)?.iter().map(|path| path.display().to_string()).collect())
}

/// Everything below a folder.
fn below(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut folders: Vec<PathBuf> = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        // Cleanup removes the folder itself, which the agent would make.
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path.clone());
            }
            found.insert(path);
        }
    }
    Ok(found)
}
