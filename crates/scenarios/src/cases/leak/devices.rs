//! Devices that vanish and come back, as when the external bridge is restarted: the programs go with them and must be
//! back at once. What leaves in between cannot be stopped, so it is counted, with the time in which it left.

use std::time::SystemTime;

use super::callers::{CallerKind, LeakCaller};
use super::{begin, traffic::CallerTraffic};
use crate::prelude::*;
use egress_lab::capture::CapturedPacket;

/// From a device's return to its program's, at most.
const WINDOW: Duration = Duration::from_millis(500);
/// How long all is watched once it is right again.
const WATCHED: Duration = Duration::from_secs(1);

pub(in crate::cases) fn attached_at_once(context: &LabContext) -> Result<()> {
    let (mut chaos, capture, chatter) = begin(context)?;
    let mut total = 0;
    for number in 1..=3 {
        for management in [true, false] {
            let begun = SystemTime::now();
            let place = chaos.cluster.lab.node(node(number)?);
            if management {
                chaos.cluster.lab.remake_management(place)?;
            } else {
                chaos.cluster.lab.remake_uplink(place)?;
            }
            forget_link_address(&chaos.cluster.lab, place)?;
            chaos.settle()?;
            let device = if management { "the management port" } else { "the uplink" };
            let leaked = leaks(&chaos.callers, &capture, begun)?;
            let span = span(&leaked);
            println!("node{number}, {device} recreated: {} packets of selected pods leaked in {span:?}", leaked.len());
            ensure!(span < WINDOW, "the programs were not back for {span:?}");
            // Behind steering stands a second line.
            ensure!(!management || leaked.is_empty(), "leaked while the management port was recreated: {leaked:?}");
            let right = SystemTime::now();
            until_true("a second without a leak", EFFECT, || Ok(right.elapsed().is_ok_and(|past| past > WATCHED)))?;
            let late = leaks(&chaos.callers, &capture, right)?;
            ensure!(late.is_empty(), "{} packets leaked when all was right again: {:?}", late.len(), late.first());
            total += leaked.len();
        }
    }
    println!("{total} packets leaked while six devices were recreated");
    chatter.into_iter().try_for_each(CallerTraffic::finish)?;
    capture.finish()?;
    Ok(())
}

/// Real devices keep their link addresses, the lab's get new ones, which neighbours of the node itself have to ask for.
/// Those of egress IPs are the product's to announce.
fn forget_link_address(lab: &Lab, node: &LabNode) -> Result<()> {
    let neighbours =
        lab.nodes().iter().flat_map(|other| std::iter::once(&other.host).chain(other.pod_router())).chain([lab.ext()]);
    for neighbour in neighbours {
        for address in node.number.address().both().into_iter().chain(node.management().both()) {
            neighbour.exec("ip", &["neigh", "flush", "to", &address.to_string()])?;
        }
    }
    Ok(())
}

/// Wrong packets of callers that are always selected.
fn leaks(callers: &[LeakCaller], capture: &Capture, since: SystemTime) -> Result<Vec<CapturedPacket>> {
    let seen = capture.seen()?;
    let selected = callers
        .iter()
        .filter(|caller| matches!(caller.kind, CallerKind::Always | CallerKind::Reborn | CallerKind::Silent));
    let wrong = selected.flat_map(|caller| caller.judge(&seen).wrong);
    Ok(wrong.filter(|packet| packet.at >= since).collect())
}

fn span(leaked: &[CapturedPacket]) -> Duration {
    let times = || leaked.iter().map(|packet| packet.at);
    let (first, last) = (times().min(), times().max());
    first.zip(last).and_then(|(first, last)| last.duration_since(first).ok()).unwrap_or_default()
}
