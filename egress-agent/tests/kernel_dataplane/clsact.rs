//! Filters among those of other software: only our filters, and the queueing disciplines that we created, are removed.

use std::time::Duration;

use aya::Ebpf;
use aya::programs::tc::{NlOptions, TcAttachOptions, TcHandle, qdisc_add_clsact};
use aya::programs::{SchedClassifier, TcAttachType};
use egress_datapath::names::Hook;
use egress_datapath::{Attachment, Settings};

use crate::node::{self, MGMT, TestNode, UPLINK, clean, filters, ip, on_node, output, patience, start};
use crate::skips::skipped;

fn by(node: &TestNode, attachment: Attachment) -> Settings {
    Settings { attachment: Some(attachment), ..node.settings() }
}

/// Another application's filter for the kernel: another name, other maps. Dropping the value removes it.
struct Other {
    _ebpf: Ebpf,
    seen: (String, u32),
}

impl Other {
    fn attach(node: &TestNode, device: &str, direction: TcAttachType, options: NlOptions) -> Self {
        let mut ebpf = Ebpf::load(&node.settings().object).expect("load the object");
        let program: &mut SchedClassifier =
            ebpf.program_mut("sweep").and_then(|program| program.try_into().ok()).expect("a classifier");
        program.load().expect("load the program");
        // It may exist already.
        let _made = qdisc_add_clsact(device);
        program.attach_with_options(device, direction, TcAttachOptions::Netlink(options)).expect("attach it");
        let number = program.info().expect("its information").id();
        Self { _ebpf: ebpf, seen: ("sweep".to_owned(), number) }
    }
}

/// The programs that are pinned because they are filters.
fn pinned(node: &TestNode) -> usize {
    std::fs::read_dir(node.pin("filters")).map_or(0, Iterator::count)
}

/// The filters of a hook by name, sorted.
fn names(hook: Hook) -> Vec<String> {
    let mut names: Vec<_> = filters(hook).into_iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    names
}

/// Whether the device has the discipline.
fn has_clsact(device: &str) -> bool {
    output(&["tc", "qdisc", "show", "dev", device]).contains("clsact")
}

#[test]
fn a_filter_of_another_program_with_our_handle_stays() {
    on_node(|node| async move {
        let settings = by(&node, Attachment::Clsact);
        let options = NlOptions { priority: 1, handle: TcHandle::new(0, 0xe67e), classid: None };
        let other = Other::attach(&node, MGMT, TcAttachType::Ingress, options);
        for _ in 0..2 {
            drop(start(settings.clone()).await);
            assert_eq!(names(Hook::FromPod), ["from_pod", "sweep"], "one of ours beside it");
            assert!(filters(Hook::FromPod).contains(&other.seen));
        }
        assert_eq!(clean(&settings).await, [] as [&str; 0]);
        assert_eq!(filters(Hook::FromPod), [other.seen]);
        assert_eq!([has_clsact(MGMT), has_clsact(UPLINK)], [true, false], "only our discipline is removed");
    });
}

#[test]
fn a_discipline_is_removed_with_our_filters_unless_another_application_created_it() {
    on_node(|node| async move {
        if node::links(Hook::FromPod).is_none() {
            return skipped("this kernel has no links");
        }
        output(&["tc", "qdisc", "add", "dev", MGMT, "clsact"]);
        drop(start(by(&node, Attachment::Clsact)).await);
        assert_eq!([MGMT, UPLINK, "egress0"].map(has_clsact), [true; 3]);
        drop(start(by(&node, Attachment::Tcx)).await);
        assert_eq!([MGMT, UPLINK, "egress0"].map(has_clsact), [true, false, false], "one existed before");
        assert_eq!(pinned(&node), 0, "links hold their programs");

        // A discipline that others use stays.
        drop(start(by(&node, Attachment::Clsact)).await);
        let options = NlOptions { priority: 7, ..NlOptions::default() };
        let other = Other::attach(&node, UPLINK, TcAttachType::Egress, options);
        drop(start(by(&node, Attachment::Tcx)).await);
        assert_eq!(filters(Hook::ToNetdev), std::slice::from_ref(&other.seen));
        drop(other);
        assert_eq!(clean(&by(&node, Attachment::Tcx)).await, [] as [&str; 0]);
        assert_eq!([MGMT, UPLINK].map(has_clsact), [true; 2]);
    });
}

#[test]
fn another_uplink_takes_the_filters_along() {
    on_node(|node| async move {
        let options = NlOptions { priority: 7, ..NlOptions::default() };
        drop(start(by(&node, Attachment::Clsact)).await);
        // The former uplink hosts no egress IP.
        ip(&format!("link add eth7 type veth peer name eth8\nlink set eth7 up\naddr flush dev {UPLINK}\n"));
        let moved = Settings { uplink: "eth7".to_owned(), ..by(&node, Attachment::Clsact) };
        drop(start(moved.clone()).await);
        assert_eq!(pinned(&node), Hook::ALL.len(), "pins of the former filters are removed");
        assert!(names(Hook::FromNetdev).is_empty() && names(Hook::ToNetdev).is_empty());
        assert_eq!([has_clsact(UPLINK), has_clsact("eth7")], [false, true]);

        // Back again, and away while another filter exists.
        drop(start(by(&node, Attachment::Clsact)).await);
        assert_eq!([has_clsact(UPLINK), has_clsact("eth7")], [true, false]);
        let other = Other::attach(&node, UPLINK, TcAttachType::Egress, options);
        drop(start(moved.clone()).await);
        assert_eq!(filters(Hook::ToNetdev), [other.seen]);
        // Filters on another device than that of the settings are found too.
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        assert!(!has_clsact("eth7"));
    });
}

#[test]
fn a_detached_filter_is_attached_again_and_an_attached_one_is_not_touched() {
    on_node(|node| async move {
        let _dataplane = start(by(&node, Attachment::Clsact)).await;
        let before = Hook::ALL.map(filters);
        output(&["tc", "filter", "del", "dev", MGMT, "ingress"]);
        let start_time = std::time::Instant::now();
        while filters(Hook::FromPod).is_empty() {
            assert!(start_time.elapsed() < patience(Duration::from_secs(15)), "checked every ten seconds");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(Hook::ALL.map(filters), before, "the same programs");
        assert_eq!(pinned(&node), Hook::ALL.len(), "each once");
    });
}

/// The note of a created discipline outlives it.
#[test]
fn a_discipline_that_another_application_created_in_place_of_ours_stays() {
    on_node(|node| async move {
        let settings = by(&node, Attachment::Clsact);
        drop(start(settings.clone()).await);
        // On a device that got the number of a former one.
        let (index, _) = node::device(UPLINK);
        ip(&format!("link del {UPLINK}\nlink add name other0 index {index} type veth peer name other1\n"));
        output(&["tc", "qdisc", "add", "dev", "other0", "clsact"]);
        node.make_uplink();
        // On the same device, which gets our filters again.
        output(&["tc", "qdisc", "del", "dev", MGMT, "clsact"]);
        output(&["tc", "qdisc", "add", "dev", MGMT, "clsact"]);
        drop(start(settings.clone()).await);
        assert_eq!([MGMT, UPLINK, "other0"].map(has_clsact), [true; 3]);
        assert_eq!(clean(&settings).await, [] as [&str; 0]);
        assert_eq!([MGMT, UPLINK, "other0"].map(has_clsact), [true, false, true]);
        assert_eq!(names(Hook::FromPod), [""; 0], "our filters do not");
    });
}

/// Also if no agent has run since, and none of our filters exist.
#[test]
fn a_note_alone_removes_no_discipline() {
    on_node(|node| async move {
        let settings = by(&node, Attachment::Clsact);
        drop(start(settings.clone()).await);
        output(&["tc", "qdisc", "del", "dev", MGMT, "clsact"]);
        output(&["tc", "qdisc", "add", "dev", MGMT, "clsact"]);
        assert_eq!(clean(&settings).await, [] as [&str; 0]);
        assert_eq!([MGMT, UPLINK].map(has_clsact), [true, false]);
    });
}
