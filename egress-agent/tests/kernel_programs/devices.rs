//! The devices of a stage, with routes and permanent neighbours.
//!
//! ```text
//!   breth0        172.18.0.2/16   fd00:172:18::2/64     next hop 172.18.0.1, fd00:172:18::1 (no ARP: known for good)
//!   ovn-k8s-mp0   10.244.1.2/24   fd00:10:244:1::2/64   pods likewise
//!   eth1          another interface of the node, with the link address of breth0, so that the same frames are for it
//! ```

use std::io::Write;
use std::process::{Command, Stdio};

use crate::cast::{V4, V6};

pub(crate) const UPLINK: u32 = 11;
pub(crate) const MGMT: u32 = 12;
pub(crate) const OVERLAY: u32 = 13;
/// Another interface than the uplink.
pub(crate) const FURTHER: u32 = 14;
pub(crate) const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
pub(crate) const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 1, 1];
pub(crate) const MGMT_MAC: [u8; 6] = [2, 0, 0, 0, 2, 2];
pub(crate) const POD_MAC: [u8; 6] = [2, 0, 0, 0, 2, 0x10];
pub(crate) const OWNED_MAC: [u8; 6] = [2, 0, 0, 0, 1, 0x64];

pub(crate) fn make_devices() {
    for switch in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        std::fs::write(format!("/proc/sys/net/{switch}"), "1").expect("forward packets");
    }
    // In one batch, because starting a process is slow on an emulated CPU.
    let mut script = format!(
        "link set lo up\n\
         link add breth0 index {UPLINK} address 02:00:00:00:01:02 type veth peer name out0 index 21\n\
         link add eth1 index {FURTHER} address 02:00:00:00:01:02 type veth peer name far1 index 24\n\
         link add ovn-k8s-mp0 index {MGMT} address 02:00:00:00:02:02 mtu 1400 type veth peer name pods0 index 22\n\
         addr add 172.18.0.2/16 dev breth0\n\
         addr add fd00:172:18::2/64 dev breth0 nodad\n\
         addr add 10.244.1.2/24 dev ovn-k8s-mp0\n\
         addr add fd00:10:244:1::2/64 dev ovn-k8s-mp0 nodad\n\
         link add egress0 index {OVERLAY} type vxlan external dstport 4794 nolearning\n\
         link set breth0 up\nlink set egress0 up\nlink set out0 up\nlink set ovn-k8s-mp0 up\nlink set pods0 up\n\
         route add 198.51.100.0/24 via 172.18.0.1\n\
         route add 2001:db8::/64 via fd00:172:18::1\n\
         neigh replace 172.18.0.3 lladdr 02:00:00:00:01:03 dev breth0 nud permanent\n"
    );
    for cast in [V4, V6] {
        script.push_str(&format!(
            "neigh replace {} lladdr 02:00:00:00:01:01 dev breth0 nud permanent\n\
             neigh replace {} lladdr 02:00:00:00:02:10 dev ovn-k8s-mp0 nud permanent\n",
            cast.router, cast.pod
        ));
    }
    batch(&script);
}

/// Runs `ip -batch` in this thread's network namespace.
pub(crate) fn batch(script: &str) {
    let mut child = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().expect("run ip");
    child.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("write to ip");
    assert!(child.wait().expect("wait for ip").success(), "ip refused:\n{script}");
}
