//! The rights of the DaemonSet's manifest are enough for the whole data plane: exactly these capabilities in every set,
//! `/proc/sys` read-only, and no way to gain others.
//!
//! Each step is its own process, since a process cannot regain dropped rights.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use egress_datapath::bpffs::mount_at;
use egress_datapath::names::Hook;
use egress_datapath::{Attachment, Settings, StartError};
use nix::mount::{MsFlags, mount};

use crate::node::{self, TestNode, clean, filters, is_attached, links, on_node, output, programs, refused, start};
use crate::skips::skipped;

/// Included in the binary, which also runs without the sources.
const MANIFEST: &str = include_str!("../../../deploy/base/daemonset.yaml");

const STEP: &str = "EGRESS_TEST_STEP";
const BPFFS: &str = "EGRESS_TEST_BPFFS";
const SEEN: &str = "seen: ";

/// The names of setpriv: lower case, without the prefix.
fn granted() -> BTreeSet<String> {
    let manifest: serde_json::Value = serde_yaml::from_str(MANIFEST).expect("YAML");
    let container = &manifest["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    let added = container["capabilities"]["add"].as_array().expect("a list");
    added.iter().map(|name| name.as_str().expect("a name").to_lowercase()).collect()
}

/// Runs the step in a process with these rights; `None` without setpriv.
fn with_granted(node: &TestNode, step: &str) -> Option<Output> {
    with(&granted(), node, step)
}

fn with(rights: &BTreeSet<String>, node: &TestNode, step: &str) -> Option<Output> {
    let set = rights.iter().fold("-all".to_owned(), |set, name| format!("{set},+{name}"));
    let me = std::env::current_exe().expect("this binary's path");
    let mut command = Command::new("setpriv");
    command.args(["--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all"]).arg(format!("--bounding-set={set}"));
    command.arg(me).args(["--exact", "rights::restricted_process", "--ignored", "--nocapture"]);
    command.env(STEP, step).env(BPFFS, &node.bpffs);
    match command.output() {
        Ok(output) => Some(output),
        Err(_) => {
            skipped("setpriv is not installed");
            None
        }
    }
}

fn seen(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<_> = text.lines().filter_map(|line| Some(line.split_once(SEEN)?.1.to_owned())).collect();
    assert!(output.status.success() && !lines.is_empty(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    lines
}

/// Not a test: one step with fewer rights, for the tests below.
#[test]
#[ignore = "helper process"]
fn restricted_process() {
    let step = std::env::var_os(STEP).expect("a step, from the test that starts this");
    let bpffs = std::env::var_os(BPFFS).expect("a folder, from the test that starts this");
    let settings = node::settings(bpffs.into());
    let by = |attachment| Settings { attachment: Some(attachment), ..settings.clone() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("make a runtime");
    let seen = runtime.block_on(async {
        match step.to_str().expect("a step") {
            "rights" => status(),
            "links" => run(by(Attachment::Tcx)).await,
            "filters" => run(by(Attachment::Clsact)).await,
            "elsewhere" => {
                let elsewhere = Settings { bpffs: "/run/bpf/deep/other".into(), ..settings.clone() };
                match refused(elsewhere).await {
                    error @ StartError::ForeignPrograms { .. } => error.to_string(),
                    other => panic!("{other}"),
                }
            }
            "cleanup" => format!("{:?}", clean(&settings).await),
            "mount" => mount_at(Path::new("/run")).expect_err("it has not the right").to_string(),
            other => panic!("no step {other}"),
        }
    });
    println!("\n{SEEN}{seen}");
}

/// The sets of capabilities of this process, and whether it can gain others.
fn status() -> String {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or_default();
    ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:", "NoNewPrivs:"].map(field).join(" ")
}

async fn run(settings: Settings) -> String {
    let dataplane = start(settings).await;
    dataplane.sweep().expect("a sweep");
    format!("{:?}", dataplane.features().attachment)
}

/// As in containers.
fn make_settings_read_only() {
    let (path, none) = ("/proc/sys", None::<&str>);
    mount(Some(path), path, none, MsFlags::MS_BIND | MsFlags::MS_REC, none).expect("mount it over itself");
    mount(none, path, none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none).expect("for reading");
    assert!(std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1").is_err(), "it can still be written");
}

fn source_check(device: &str) -> String {
    std::fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{device}/rp_filter")).expect("procfs").trim().to_owned()
}

fn nothing_is_left(node: &TestNode) {
    assert!(!node.bpffs.exists(), "pins are left");
    assert!(!output(&["ip", "-o", "link"]).contains("egress0"));
    assert!(!output(&["nft", "list", "ruleset"]).contains("egress-agent"));
    for hook in Hook::ALL {
        assert_eq!((programs(hook), filters(hook)), (vec![], vec![]));
    }
    assert!(!output(&["tc", "qdisc"]).contains("clsact"));
}

#[test]
fn a_process_has_only_the_granted_rights() {
    on_node(|node| async move {
        let Some(output) = with_granted(&node, "rights") else { return };
        // linux/capability.h
        let numbers = [("net_admin", 12), ("net_raw", 13), ("perfmon", 38), ("bpf", 39)];
        let names: BTreeSet<String> = numbers.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(granted(), names);
        let set = format!("{:016x}", numbers.iter().fold(0_u64, |set, (_, number)| set | 1 << number));
        let none = "0".repeat(16);
        assert_eq!(seen(&output), [format!("{none} {set} {set} {set} {none} 1")]);
    });
}

#[test]
fn granted_rights_suffice_with_links() {
    on_node(|node| async move {
        if links(Hook::FromPod).is_none() {
            return skipped("this kernel has no links");
        }
        std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1").expect("a strict host");
        make_settings_read_only();
        let Some(first) = with_granted(&node, "links") else { return };
        assert_eq!(seen(&first), ["Tcx"]);
        assert_eq!(source_check("egress0"), "2", "loose");
        let before = Hook::ALL.map(|hook| links(hook).unwrap_or_default());
        assert!(before.iter().all(|programs| programs.len() == 1), "{before:?}");
        // Adopted: in the same places, with new programs.
        seen(&with_granted(&node, "links").expect("as before"));
        let after = Hook::ALL.map(|hook| links(hook).unwrap_or_default());
        assert!(before.iter().zip(&after).all(|(old, new)| old.len() == new.len() && old != new), "{after:?}");
        let refusal = seen(&with_granted(&node, "elsewhere").expect("as before"));
        assert!(refusal[0].contains("egress-agent cleanup --bpffs /run/bpf/egress-agent"), "{refusal:?}");
        assert_eq!(seen(&with_granted(&node, "cleanup").expect("as before")), ["[]"]);
        nothing_is_left(&node);
    });
}

#[test]
fn granted_rights_suffice_with_filters() {
    on_node(|node| async move {
        make_settings_read_only();
        // Filters of an agent with all rights are adopted, and distinguished from others.
        drop(start(Settings { attachment: Some(Attachment::Clsact), ..node.settings() }).await);
        let before = Hook::ALL.map(filters);
        let Some(taken_over) = with_granted(&node, "filters") else { return };
        assert_eq!(seen(&taken_over), ["Clsact"]);
        let after = Hook::ALL.map(filters);
        assert!(
            before.iter().zip(&after).all(|(old, new)| old.len() == 1 && new.len() == 1 && old != new),
            "{after:?}"
        );
        let refusal = seen(&with_granted(&node, "elsewhere").expect("as before"));
        assert!(refusal[0].contains("egress-agent cleanup --bpffs /run/bpf/egress-agent"), "{refusal:?}");
        assert_eq!(seen(&with_granted(&node, "cleanup").expect("as before")), ["[]"]);
        nothing_is_left(&node);
    });
}

/// The agent's own rights do not suffice to mount, so the component has a container of its own for it.
#[test]
fn a_mount_without_the_right_says_what_is_missing() {
    on_node(|node| async move {
        let Some(output) = with_granted(&node, "mount") else { return };
        let refusal = seen(&output);
        assert!(refusal[0].contains("at /run: run it as root with CAP_SYS_ADMIN"), "{refusal:?}");
    });
}

/// Each right is needed: without it the data plane does not start, except for NET_RAW, which only its packets need.
#[test]
fn each_granted_right_is_needed() {
    on_node(|node| async move {
        let all = granted();
        for one in all.iter().filter(|one| *one != "net_raw") {
            let rest = all.iter().filter(|other| *other != one).cloned().collect();
            let Some(output) = with(&rest, &node, "filters") else { return };
            assert!(!output.status.success(), "the data plane starts without {one}");
            assert!(!is_attached(Hook::FromPod));
        }
    });
}
