//! A BPF file system for a host that has none, mounted by a pod.

use std::fs;
use std::path::Path;

use egress_datapath::bpffs::{MountError, MountOutcome, mount_at};
use egress_datapath::{Settings, StartError};
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};

use crate::node::{TestNode, on_node, refused, start};

/// The host's directory, and its place in a pod.
const OF_HOST: &str = "/run/sys/bpf";
const IN_POD: &str = "/run/pod";

fn mounts_at(point: &str) -> usize {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
    mounts.lines().filter(|line| line.split(' ').nth(4) == Some(point) && line.contains(" - bpf ")).count()
}

/// A host whose mounts are shared, as systemd makes them.
fn share() {
    let none = None::<&str>;
    for folder in ["/run/sys", IN_POD] {
        fs::create_dir(folder).expect("make a directory");
    }
    mount(Some("tmpfs"), "/run/sys", Some("tmpfs"), MsFlags::empty(), none).expect("mount a file system");
    mount(none, "/run/sys", none, MsFlags::MS_SHARED, none).expect("share it");
    fs::create_dir(OF_HOST).expect("make a directory");
}

/// As the runtime does for `mountPropagation: Bidirectional`.
fn in_pod<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let pod = scope.spawn(|| {
            let none = None::<&str>;
            unshare(CloneFlags::CLONE_NEWNS).expect("make a mount namespace");
            mount(Some(OF_HOST), IN_POD, none, MsFlags::MS_BIND | MsFlags::MS_REC, none).expect("mount the host's");
            work()
        });
        pod.join().expect("the pod's work")
    })
}

#[test]
fn a_pod_mounts_one_for_the_host_once() {
    on_node(|node: TestNode| async move {
        share();
        let settings = Settings { bpffs: Path::new(OF_HOST).join("egress-agent"), ..node.settings() };
        let error = refused(settings.clone()).await;
        assert!(matches!(error, StartError::NotBpffs { .. }), "{error}");
        for wanted in [MountOutcome::Mounted, MountOutcome::AlreadyMounted, MountOutcome::AlreadyMounted] {
            let outcome = in_pod(|| mount_at(Path::new(IN_POD)));
            assert_eq!(outcome.expect("mount it"), wanted);
            assert_eq!(mounts_at(OF_HOST), 1, "on the host, after the pod");
        }
        drop(start(settings).await);
        let pins = in_pod(|| fs::exists(Path::new(IN_POD).join("egress-agent")).expect("look for the pins"));
        assert!(pins, "another pod has the same file system");
        umount(OF_HOST).expect("nothing holds it");
    });
}

#[test]
fn what_is_no_directory_is_named() {
    on_node(|_| async {
        fs::write("/run/file", "").expect("make a file");
        for path in ["/run/file", "/run/nosuch"] {
            let error = mount_at(Path::new(path)).expect_err("not a directory");
            assert!(matches!(&error, MountError::NoDirectory { .. }), "{error}");
            assert!(error.to_string().starts_with(&format!("{path} is not a directory")), "{error}");
        }
    });
}
