//! Gateways and addresses that fail.

use super::*;

/// How long it is watched whether a node that is back does harm.
const WATCHED: Duration = Duration::from_secs(5);
const TAKEN: Ipv4Addr = Ipv4Addr::new(172, 18, 0, 150);

/// docs/operations/measured-faults.md, "What happens in each fault". Leaves both nodes with the label.
pub(super) fn cut(test: &mut NodeTest) -> Result<()> {
    let (from, to) = test.gateway_and_other()?;
    let bound = test.fail_over_of(&from)?;
    test.leases_end()?;
    let cluster = &test.cluster;
    let remaining = test.selected_on(to)?;
    let traffic = test.traffic()?;
    let node = &cluster.node(&from)?.lab;
    until("an answer to a pod that stays", EFFECT, || Ok(cluster.is_seen_as(remaining, EGRESS_IP).ok()))?;
    cluster.lab.set_power(node, false)?;
    let moved = test.is_served_by(to, bound + EFFECT);
    let seen = cluster.is_seen_as(remaining, EGRESS_IP);
    let reported = cluster.event(OBJECT, "EgressIPMoved", REPORTED);
    cluster.lab.set_power(node, true)?;
    moved?;
    seen?;
    println!("{}", reported?);
    test.all_are_right()?;
    std::thread::sleep(WATCHED);
    let (lost, seen) = traffic.finish()?;
    let gap = lost.iter().find(|one| one.name == remaining.name).context("no flow")?.longest_gap;
    ensure!(gap < bound, "{} had no answer for {gap:?}, which is more than {bound:?}", remaining.name);
    emitted_in_turn(&seen, &from, to)?;
    Ok(())
}

/// docs/operations/assignments.md, "The condition `Degraded`": another host of the nodes' network has the address.
pub(super) fn conflict(test: &mut NodeTest) -> Result<()> {
    const NAME: &str = "taken";
    let cluster = &test.cluster;
    let host = Netns::new(cluster.lab.prefix(), "host");
    cluster.lab.add_namespaces(std::slice::from_ref(&host))?;
    let lan = cluster.lab.lan();
    host.exec("ip", &["link", "add", POD_INTERFACE, "type", "veth", "peer", "name", "host", "netns", lan.name()])?;
    lan.exec("ip", &["link", "set", "host", "master", "br0", "up"])?;
    host.exec("ip", &["addr", "add", &format!("{TAKEN}/16"), "dev", POD_INTERFACE])?;
    host.exec("ip", &["link", "set", POD_INTERFACE, "up"])?;
    cluster.add_house("szyslak")?;
    cluster.apply(&egress_ip(NAME, &[&TAKEN.to_string()], &labels("house", "szyslak"), &all()))?;
    let outcome = until_true("Degraded is True", REPORTED, || {
        let object = cluster.get(&["egressip", NAME])?;
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is = |kind: &str, status: &str, reason: &str| {
            conditions.iter().any(|one| one["type"] == kind && one["status"] == status && one["reason"] == reason)
        };
        Ok(is("Degraded", "True", "AddressInUse") && is("Assigned", "False", "NotServed"))
    });
    let reported = cluster.event(NAME, "EgressIPConflict", REPORTED);
    println!("{}", cluster.kubectl(&["get", "egressip", NAME, "-o", "jsonpath={.status.conditions}"])?);
    cluster.types(&format!("kubectl delete egressip {NAME}"))?;
    outcome?;
    println!("{}", reported?);
    test.all_are_right()
}

/// docs/operations/measured-faults.md, "power lost, booted again". The node's pods run again, with new addresses.
pub(super) fn power_loss(test: &mut NodeTest) -> Result<()> {
    install::ensure_installed(test)?;
    let (from, to) = test.gateway_and_other()?;
    let bound = test.fail_over_of(&from)?;
    test.leases_end()?;
    let remaining = test.selected_on(to)?.clone();
    let traffic = test.traffic_on(to)?;
    until("an answer to a pod that stays", EFFECT, || Ok(test.cluster.is_seen_as(&remaining, EGRESS_IP).ok()))?;
    test.cluster.set_power(&from, false)?;
    test.is_served_by(to, bound + EFFECT)?;
    test.cluster.is_seen_as(&remaining, EGRESS_IP)?;
    println!("{}", test.cluster.event(OBJECT, "EgressIPMoved", REPORTED)?);
    test.boots(&from)?;
    test.all_are_right()?;
    ensure!(test.gateway()? == to, "{EGRESS_IP} has gone back to {from}");
    let (lost, seen) = traffic.finish()?;
    let gap = lost.iter().find(|one| one.name == remaining.name).context("no flow")?.longest_gap;
    ensure!(gap < bound, "{} had no answer for {gap:?}, which is more than {bound:?}", remaining.name);
    emitted_in_turn(&seen, &from, to)
}
