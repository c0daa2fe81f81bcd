//! The life of an egress IP: no object, served for pods of every node, moved when its gateway dies, removed.

use super::leader::leader;
use crate::prelude::*;
use egress_lab::api_objects::EGRESS_NODES;
use egress_lab::wait::FAIL_OVER;

const V4: &str = "172.18.0.110";
const V6: &str = "fd00:172:18::110";
const NAMES: [&str; 3] = ["one", "two", "three"];

pub(super) fn from_nothing_to_removed(context: &LabContext) -> Result<()> {
    let pods = NAMES.iter().zip(1..).map(|(name, number)| pod(name, "red", number, &[]));
    let cluster = TestCluster::start(context, pods.chain([pod("other", "blue", 1, &[])]).collect())?;
    for at in cluster.lab.nodes() {
        let path = format!("{EGRESS_NODES}/{}", at.name());
        let published = until(&format!("{} says where it answers health checks", at.name()), EFFECT, || {
            let published = cluster.api.get(&path)?.unwrap_or_default()["status"]["healthAddresses"].clone();
            Ok((!published.is_null()).then_some(published))
        })?;
        let own = at.management();
        ensure!(published == json!([own.v4, own.v6]), "{}: {published}", at.name());
    }
    for name in NAMES {
        cluster.is_seen_as(name, None, None)?;
    }
    let leader = leader(&cluster)?;
    let (first, second) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    cluster.assignable(first, true)?;
    cluster.assignable(second, true)?;
    let object = egress_ip("both", &[V4, V6], &labels("house", "red"), &all());
    cluster.assign(&object)?;
    for name in NAMES {
        cluster.is_seen_as(name, Some(V4), Some(V6))?;
    }
    cluster.is_seen_as("other", None, None)?;

    println!("node{first} loses power, and node{leader} may have egress IPs too");
    let dead = cluster.lab.node(node(first)?);
    cluster.assignable(leader, true)?;
    cluster.lab.set_power(dead, false)?;
    cluster.api.set_ready(dead.number, false)?;
    let begun = Instant::now();
    for name in NAMES.into_iter().filter(|name| *name != NAMES[first - 1]) {
        cluster.is_seen_as(name, Some(V4), Some(V6))?;
    }
    println!("both addresses serve again after {} ms", begun.elapsed().as_millis());
    ensure!(begun.elapsed() < FAIL_OVER, "{:?}", begun.elapsed());
    let reported = cluster.event("both", "EgressIPMoved")?;
    println!("event: {reported}");
    ensure!(reported.contains(&format!("from node node{first}, which ")), "{reported}");
    cluster.lab.set_power(dead, true)?;
    cluster.api.set_ready(dead.number, true)?;
    for name in NAMES {
        cluster.is_seen_as(name, Some(V4), Some(V6))?;
    }

    println!("the object is deleted");
    cluster.remove("both")?;
    for name in NAMES {
        cluster.is_seen_as(name, None, None)?;
    }
    Ok(())
}
