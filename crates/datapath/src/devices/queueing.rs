//! Whether the queueing discipline of a device keeps packets until their departure time: `fq`, or `mq` with `fq` for every
//! queue, as the kernel makes it where `net.core.default_qdisc` is `fq`.

use rtnetlink::Handle;
use rtnetlink::packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use tracing::debug;

use crate::netlink;

const FAIR: &str = "fq";
const MULTI_QUEUE: &str = "mq";

/// Disciplines that cannot be listed count as ones that keep nothing: packets beyond a limit are dropped then.
pub async fn is_paced(handle: &Handle, link: &LinkMessage) -> bool {
    let root = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Qdisc(kind) => Some(kind.as_str()),
        _ => None,
    });
    match root {
        Some(FAIR) => true,
        Some(MULTI_QUEUE) => match netlink::dump(|| handle.qdisc().get().execute()).await {
            Ok(all) => has_fair_queues(&all, link.header.index),
            Err(error) => {
                debug!(%error, "the queueing disciplines of the uplink cannot be listed");
                false
            }
        },
        _ => false,
    }
}

/// Whether every queue of the device's `mq` is `fq`.
fn has_fair_queues(all: &[TcMessage], index: u32) -> bool {
    let of_device = || all.iter().filter(|one| u32::try_from(one.header.index) == Ok(index));
    let Some(root) = of_device().find(|one| one.header.parent == TcHandle::ROOT) else { return false };
    // Their parents are the classes of the root, from one on.
    let is_queue = |one: &&TcMessage| {
        let TcHandle { major, minor } = one.header.parent;
        major == root.header.handle.major && minor != 0
    };
    let is_fair = |one: &TcMessage| one.attributes.contains(&TcAttribute::Kind(FAIR.to_owned()));
    let mut queues = of_device().filter(is_queue).peekable();
    queues.peek().is_some() && queues.all(is_fair)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn discipline(index: i32, parent: u32, handle: u32, kind: &str) -> TcMessage {
        let mut message = TcMessage::default();
        message.header.index = index;
        message.header.parent = parent.into();
        message.header.handle = handle.into();
        message.attributes = vec![TcAttribute::Kind(kind.to_owned())];
        message
    }

    #[test]
    fn every_queue_of_the_device_counts() {
        // As `tc qdisc show` lists them: the default root has the handle zero.
        for root in [0, 0x8001_0000] {
            let of = |kinds: &[&str]| {
                let queues = kinds.iter().zip(1..).map(|(kind, number)| discipline(2, root | number, 0, kind));
                let mut all = vec![
                    discipline(2, u32::MAX, root, MULTI_QUEUE),
                    discipline(2, 0xffff_fff1, 0xffff_0000, "clsact"),
                    discipline(3, u32::MAX, 0, "pfifo"),
                    discipline(3, 1, 0, "pfifo"),
                ];
                all.extend(queues);
                has_fair_queues(&all, 2)
            };
            assert!(of(&[FAIR]) && of(&[FAIR, FAIR]));
            assert!(!of(&[]) && !of(&[FAIR, "fq_codel"]) && !of(&["pfifo_fast"]));
        }
        assert!(!has_fair_queues(&[], 2));
    }
}
