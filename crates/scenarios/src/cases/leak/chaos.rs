//! What happens to the cluster, one step after the other, by a seed. Each step that changes what is right for a caller
//! says so in its history before the next step begins.

use std::time::SystemTime;

use super::callers::{CallerKind, LeakCaller};
use super::judge::LIMIT;
use crate::prelude::*;
use egress_lab::random::SplitMix64;
use egress_lab::test_cluster::LOADED;

/// The addresses of an object.
type AddressPair = [&'static str; 2];

const FIRST: AddressPair = ["172.18.0.110", "fd00:172:18::110"];
const SECOND: AddressPair = ["172.18.0.111", "fd00:172:18::111"];
const BRIEF: AddressPair = ["172.18.0.112", "fd00:172:18::112"];
const TOWN: AddressPair = ["172.18.0.113", "fd00:172:18::113"];
/// On no node's network.
const HOPELESS: AddressPair = ["192.0.2.50", "2001:db8:dead::50"];
const SILENT: AddressPair = ["192.0.2.51", "2001:db8:dead::51"];

fn ips(pair: AddressPair) -> Vec<IpAddr> {
    pair.iter().filter_map(|text| text.parse().ok()).collect()
}

/// How long the cluster is left alone between two steps.
pub(super) fn pause(random: &mut SplitMix64) -> Duration {
    Duration::from_millis(random.below(900) + 100)
}

/// The cluster as it should be now, and its callers.
pub(super) struct Chaos {
    pub(super) cluster: TestCluster,
    pub(super) callers: Vec<LeakCaller>,
    random: SplitMix64,
    /// Of `always` and of `pair`, which swap them.
    pairs: [AddressPair; 2],
    /// Assignable nodes, at least two.
    gateways: Vec<usize>,
    swapped: SystemTime,
    toggled: usize,
    townie: bool,
    brief: bool,
}

impl Chaos {
    pub(super) fn new(cluster: TestCluster, random: SplitMix64) -> Result<Self> {
        let callers = LeakCaller::all(&cluster.lab)?;
        for node in [1, 2] {
            cluster.assignable(node, true)?;
        }
        let mut chaos = Self {
            cluster,
            callers,
            random,
            pairs: [FIRST, SECOND],
            gateways: vec![1, 2],
            swapped: SystemTime::now(),
            toggled: 0,
            townie: false,
            brief: true,
        };
        for (name, pair) in [("always", FIRST), ("pair", SECOND), ("brief", BRIEF)] {
            chaos.cluster.assign(&grouped(name, pair))?;
        }
        chaos.cluster.assign(&egress_ip("town", &TOWN, &labels("town", "yes"), &all()))?;
        chaos.cluster.put(&grouped("hopeless", HOPELESS))?;
        let mut silent = grouped("silent", SILENT);
        silent["metadata"]["annotations"] = json!({"k8s.ovn.org/egressip-on-unassigned": "drop"});
        chaos.cluster.put(&silent)?;
        let now = SystemTime::now();
        for kind in [CallerKind::Never, CallerKind::Toggled, CallerKind::Townie, CallerKind::Hopeless] {
            chaos.say(now, kind, None);
        }
        for (kind, pair) in [(CallerKind::Always, FIRST), (CallerKind::Reborn, FIRST), (CallerKind::Brief, BRIEF)] {
            chaos.say(now, kind, Some(&ips(pair)));
        }
        chaos.say(now, CallerKind::Silent, Some(&[]));
        Ok(chaos)
    }

    /// These addresses are right for callers of this fate from now on, or, if none are named, their node's.
    fn say(&mut self, asked: SystemTime, kind: CallerKind, allowed: Option<&[IpAddr]>) {
        for caller in self.callers.iter_mut().filter(|caller| caller.kind == kind) {
            match allowed {
                Some(allowed) => caller.is_now(asked, allowed),
                None => caller.is_not_selected(asked),
            }
        }
    }

    /// One step; its name for people.
    pub(super) fn step(&mut self) -> Result<String> {
        match self.random.index(12) {
            0 | 1 => self.move_gateway(),
            2 | 3 => self.swap_addresses(),
            4 | 5 => self.restart(true),
            6 => self.restart(false),
            7 | 8 => self.toggle(),
            9 => self.bear_again(),
            10 => self.make_or_delete(),
            _ => self.move_town(),
        }
    }

    fn move_gateway(&mut self) -> Result<String> {
        let spare = (1..=3).find(|node| !self.gateways.contains(node));
        if let Some(spare) = spare {
            self.cluster.assignable(spare, true)?;
            self.gateways.push(spare);
            return Ok(format!("node{spare} becomes a gateway"));
        }
        let gone = self.gateways.remove(self.random.index(2));
        self.cluster.assignable(gone, false)?;
        Ok(format!("node{gone} is no gateway any more"))
    }

    /// Whoever is edited first waits for the other to give its addresses up.
    fn swap_addresses(&mut self) -> Result<String> {
        self.pairs.swap(0, 1);
        self.swapped = SystemTime::now();
        let first = self.random.index(2);
        for place in [first, 1 - first] {
            let (name, pair) = (["always", "pair"][place], self.pairs[place]);
            let asked = SystemTime::now();
            self.cluster.put(&grouped(name, pair))?;
            if place == 0 {
                self.say(asked, CallerKind::Always, Some(&ips(pair)));
                self.say(asked, CallerKind::Reborn, Some(&ips(pair)));
            }
            if self.toggled == place + 1 {
                self.say(asked, CallerKind::Toggled, Some(&ips(pair)));
            }
        }
        Ok("two objects swap their addresses".to_owned())
    }

    /// Not while the agent starts, which takes some seconds on a slow machine: a node whose agent never gets to the cluster's
    /// state follows no change within [`LIMIT`].
    fn restart(&mut self, kill: bool) -> Result<String> {
        let node = self.random.index(3) + 1;
        let agent = self.cluster.agent(node)?;
        agent.ensure_alive()?;
        if !agent.has_served()? {
            return Ok(format!("the agent of node{node} is still starting"));
        }
        if kill {
            agent.kill()?
        } else {
            agent.terminate(Duration::from_secs(8))?
        }
        agent.restart()?;
        Ok(format!("the agent of node{node} is {} and started again", if kill { "killed" } else { "stopped" }))
    }

    /// From no object to one, to another, to none.
    fn toggle(&mut self) -> Result<String> {
        self.toggled = (self.toggled + 1) % 3;
        let group = ["none", "always", "pair"][self.toggled];
        let asked = SystemTime::now();
        self.cluster.label_pod("toggled1", "group", Some(group))?;
        let mut addresses = self.toggled.checked_sub(1).map(|place| ips(self.pairs[place]));
        // Who joins an object may meet it as it was before its last edit has taken effect.
        if let Some(addresses) = addresses.as_mut().filter(|_| self.swapped + LIMIT > asked) {
            addresses.extend(self.pairs.iter().flat_map(|pair| ips(*pair)));
        }
        self.say(asked, CallerKind::Toggled, addresses.as_deref());
        Ok(format!("toggled1 goes to {group}"))
    }

    /// Half the time its node's agent is away while the pod is deleted, and has served again before it is made again.
    fn bear_again(&mut self) -> Result<String> {
        let agent = self.cluster.agent(2)?;
        let unnoticed = self.random.index(2) == 0 && agent.has_served()?;
        if unnoticed {
            agent.kill()?;
        }
        let asked = SystemTime::now();
        self.cluster.api.delete(&self.cluster.pod_path("reborn2")?)?;
        self.say(asked, CallerKind::Reborn, Some(&[]));
        if unnoticed {
            let agent = self.cluster.agent(2)?;
            agent.restart()?;
            until_true("the new agent of node2 serves", LOADED, || agent.has_served())?;
        }
        std::thread::sleep(pause(&mut self.random));
        let asked = SystemTime::now();
        self.cluster.api.publish_pod(self.cluster.pod("reborn2")?)?;
        self.say(asked, CallerKind::Reborn, Some(&ips(self.pairs[0])));
        let away = if unnoticed { ", unnoticed by an agent," } else { "" };
        Ok(format!("reborn2 is deleted{away} and made again"))
    }

    fn make_or_delete(&mut self) -> Result<String> {
        self.brief = !self.brief;
        let asked = SystemTime::now();
        if self.brief {
            self.cluster.put(&grouped("brief", BRIEF))?;
            self.say(asked, CallerKind::Brief, Some(&ips(BRIEF)));
            return Ok("the object brief is made".to_owned());
        }
        self.cluster.remove("brief")?;
        self.say(asked, CallerKind::Brief, None);
        Ok("the object brief is deleted".to_owned())
    }

    fn move_town(&mut self) -> Result<String> {
        self.townie = !self.townie;
        let asked = SystemTime::now();
        self.cluster.label_namespace("town", "town", self.townie.then_some("yes"))?;
        let town = ips(TOWN);
        self.say(asked, CallerKind::Townie, self.townie.then_some(town.as_slice()));
        Ok(format!("the namespace town is {}selected", if self.townie { "" } else { "not " }))
    }

    /// All callers are seen as they should be now.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.cluster.agents_serve()?;
        if let Some(place) = self.toggled.checked_sub(1) {
            self.say(SystemTime::now(), CallerKind::Toggled, Some(&ips(self.pairs[place])));
        }
        for caller in &self.callers {
            let from = &self.cluster.pod(caller.name)?.netns;
            for to in caller.server_address.both() {
                self.cluster.becomes(from, to, caller.seen_as(to)?)?;
            }
        }
        ensure!(self.gateways.len() >= 2, "too few gateways");
        Ok(())
    }
}

fn grouped(name: &str, pair: AddressPair) -> Value {
    egress_ip(name, &pair, &all(), &labels("group", name))
}
