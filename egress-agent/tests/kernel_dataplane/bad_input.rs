//! Start-up errors: one clear line each, and running traffic is unaffected.

use std::fs;
use std::net::UdpSocket;

use aya::maps::{HashMap, MapData};
use egress_datapath::names::{DEFAULT_TUNNEL_PORT, Hook};
use egress_datapath::{Attachment, Settings, StartError};

use crate::node::{
    MGMT, TestNode, UPLINK, clean, eventually, ip, is_attached, on_node, output, programs, refused, start,
};

async fn refusal(settings: Settings) -> StartError {
    let error = refused(settings).await;
    let line = error.to_string();
    assert_eq!(line.lines().count(), 1, "{line}");
    error
}

fn nothing_is_attached() {
    for hook in Hook::ALL {
        assert_eq!(programs(hook), []);
    }
}

#[test]
fn a_name_that_no_device_can_have() {
    on_node(|node: TestNode| async move {
        let error = refusal(Settings { uplink: "a-bridge-with-a-name".to_owned(), ..node.settings() }).await;
        let wanted = "no interface can have the name \"a-bridge-with-a-name\": name the uplink with --uplink";
        assert_eq!(error.to_string(), wanted);
        let error = refusal(Settings { mgmt_port: String::new(), ..node.settings() }).await;
        let wanted = "no interface can have the name \"\": name the management port with --mgmt-port";
        assert_eq!(error.to_string(), wanted);
        nothing_is_attached();
    });
}

/// All other devices have their programs meanwhile; it gets its own when it appears.
#[test]
fn a_missing_device_is_waited_for() {
    on_node(|node: TestNode| async move {
        ip(&format!("link del {MGMT}\n"));
        let dataplane = node.start().await;
        let is_mgmt = |hook: &Hook| matches!(hook, Hook::FromPod | Hook::ToPod);
        assert!(Hook::ALL.into_iter().filter(|hook| !is_mgmt(hook)).all(is_attached));
        let awaits = |hook: Hook| dataplane.meter().expect("a meter").hooks()[hook.name()].awaits.clone();
        let wanted =
            format!("waiting for interface {MGMT}, the management port (--mgmt-port): there is none of that name");
        assert_eq!((awaits(Hook::FromPod), awaits(Hook::FromNetdev)), (Some(wanted), None));
        node.make_mgmt();
        eventually("its programs are attached", || Hook::ALL.into_iter().all(is_attached)).await;
        assert_eq!(awaits(Hook::FromPod), None);
    });
}

/// A wrong name; programs on the right device are unaffected.
#[test]
fn a_device_that_is_missing_while_its_programs_run_elsewhere() {
    on_node(|node: TestNode| async move {
        drop(node.start().await);
        let before = Hook::ALL.map(programs);
        let error = refusal(Settings { uplink: "nosuch0".to_owned(), ..node.settings() }).await;
        let wanted = format!(
            "there is no interface nosuch0, and the programs of a former run are on {UPLINK}: is the uplink right (--uplink)? \
             If it is, run `egress-agent cleanup` first"
        );
        assert_eq!(error.to_string(), wanted);
        assert_eq!(Hook::ALL.map(programs), before);
        // Without their device they are not attached anywhere.
        ip(&format!("link del {MGMT}\n"));
        let _dataplane = node.start().await;
        assert!(is_attached(Hook::FromNetdev) && !is_attached(Hook::FromPod));
    });
}

#[test]
fn pins_that_are_not_on_a_bpf_file_system() {
    on_node(|node: TestNode| async move {
        let error = refusal(Settings { bpffs: "/run/elsewhere".into(), ..node.settings() }).await;
        assert!(matches!(error, StartError::NotBpffs { .. }), "{error}");
        assert!(!fs::exists("/run/elsewhere").expect("look for it"));
    });
}

#[test]
fn no_object() {
    on_node(|node: TestNode| async move {
        let error = refusal(Settings { object: Vec::new().into(), ..node.settings() }).await;
        assert!(matches!(error, StartError::NoObject), "{error}");
    });
}

#[test]
fn an_invalid_object() {
    on_node(|node: TestNode| async move {
        let error = refusal(Settings { object: b"no ELF file".to_vec().into(), ..node.settings() }).await;
        assert!(matches!(error, StartError::Object(_)), "{error}");
    });
}

#[test]
fn a_second_agent() {
    on_node(|node: TestNode| async move {
        let first = node.start().await;
        let before = Hook::ALL.map(programs);
        for settings in [node.settings(), Settings { bpffs: "/run/bpf/other".into(), ..node.settings() }] {
            let error = refusal(settings).await;
            assert!(matches!(error, StartError::Busy { .. }), "{error}");
        }
        assert_eq!(Hook::ALL.map(programs), before);
        drop(first);
        node.start().await;
    });
}

/// Its programs use maps of another directory.
#[test]
fn a_second_set_of_programs() {
    on_node(|node: TestNode| async move {
        drop(node.start().await);
        let programs = Hook::ALL.map(programs);
        let has_links = crate::node::links(Hook::FromPod).is_some();
        let attachments =
            [Attachment::Tcx, Attachment::Clsact].into_iter().filter(|one| has_links || *one != Attachment::Tcx);
        for attachment in attachments {
            let bpffs = "/run/bpf/deep/other".into();
            let settings = Settings { bpffs, attachment: Some(attachment), ..node.settings() };
            let error = refusal(settings).await;
            assert!(matches!(error, StartError::ForeignPrograms { .. }), "{error}");
            assert!(error.to_string().contains("egress-agent cleanup --bpffs /run/bpf/egress-agent"), "{error}");
            assert_eq!(Hook::ALL.map(crate::node::programs), programs, "they are unaffected");
        }
        node.start().await;
        assert_eq!(clean(&node.settings()).await, [] as [&str; 0]);
        start(Settings { bpffs: "/run/bpf/deep/other".into(), ..node.settings() }).await;
    });
}

#[test]
fn maps_of_another_shape() {
    on_node(|node: TestNode| async move {
        fs::create_dir_all(node.pin("maps")).expect("make the directory");
        let small: HashMap<MapData, u32, u32> = HashMap::create(10, 0).expect("make a map");
        small.pin(node.pin("maps/pods")).expect("pin it");
        let error = refusal(node.settings()).await;
        assert!(matches!(error, StartError::ForeignMap { .. }), "{error}");
        assert!(error.to_string().contains("egress-agent cleanup"), "{error}");
        nothing_is_attached();
    });
}

#[test]
fn a_tunnel_port_in_use() {
    on_node(|node: TestNode| async move {
        let socket = UdpSocket::bind(("0.0.0.0", DEFAULT_TUNNEL_PORT)).expect("take the port");
        let error = refusal(node.settings()).await;
        assert!(matches!(error, StartError::TunnelPortTaken { port: DEFAULT_TUNNEL_PORT }), "{error}");
        assert!(!output(&["ip", "-o", "link"]).contains("egress0"));
        nothing_is_attached();
        drop(socket);
        node.start().await;
    });
}
