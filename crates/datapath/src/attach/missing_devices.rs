//! Devices that do not exist yet.
//!
//! An agent may start before its CNI has created them: a bridge comes with the first pod, `ovn-k8s-mp0` with OVN-Kubernetes on
//! the node. The programs must be attached before that pod sends. So the start does not wait: programs and maps are loaded,
//! existing devices are attached, and a new device is attached at once (`node_state::watch`). A wrong name looks like an early
//! start, so the health page shows the missing device and the log has it once per device.
//!
//! Three names are known to be wrong and refused: one that no device can have, one of Cilium's devices as the management port, and
//! one where a former run's programs are attached to another device.

use std::path::PathBuf;

use nix::net::if_::{if_indextoname, if_nametoindex};

use crate::attach::listing;
use crate::devices::interfaces::NodeFacts;
use crate::error::StartError;
use crate::names::{Device, Hook};
use crate::settings::Settings;

/// `IFNAMSIZ`: size of a name with its terminating zero.
const NAME_SIZE: usize = 16;

/// Cilium's own devices on the host.
const OF_CILIUM: [&str; 2] = ["cilium_host", "cilium_net"];
/// Where Cilium is the cluster's only CNI.
pub const CILIUM_ALONE: &str = "packets of Cilium's pods do not enter the host by one interface: Cilium must be chained to a CNI \
                                whose pods are on a bridge, or use its own egress gateway (docs/operations/cilium.md)";

/// Devices with a configurable name.
const NAMED: [Device; 2] = [Device::Uplink, Device::Mgmt];

const fn flag(device: Device) -> &'static str {
    match device {
        Device::Mgmt => "--mgmt-port",
        // The name of the overlay device is fixed.
        Device::Uplink | Device::Overlay => "--uplink",
    }
}

/// Description of a missing device, for the log and the health page.
pub fn line(device: Device, name: &str) -> String {
    let waits = format!("waiting for interface {name}, the {device} ({}): there is none of that name", flag(device));
    match device == Device::Mgmt && if_nametoindex(OF_CILIUM[0]).is_ok() {
        true => format!("{waits}; {CILIUM_ALONE}"),
        false => waits,
    }
}

/// Fails if a configured name is invalid for any device.
pub fn names(settings: &Settings) -> Result<(), StartError> {
    for device in NAMED {
        let name = settings.device(device);
        if !can_be_a_name(name) {
            return Err(StartError::NoSuchName { device, name: name.to_owned(), flag: flag(device) });
        }
    }
    let mgmt_port = settings.device(Device::Mgmt);
    if OF_CILIUM.contains(&mgmt_port) {
        return Err(StartError::PodsPassBy { name: mgmt_port.to_owned() });
    }
    Ok(())
}

/// Fails if a device is missing whose programs, pinned below one of these version directories, run on another device.
pub fn elsewhere(settings: &Settings, facts: &NodeFacts, versions: &[PathBuf]) -> Result<(), StartError> {
    let is_missing = |hook: &Hook| NAMED.contains(&hook.device()) && facts.device(hook.device()).is_none();
    for hook in Hook::ALL.into_iter().filter(is_missing) {
        let device = hook.device();
        for version in versions {
            let found = listing::device_of(version, hook);
            let found = found.map_err(|error| StartError::kernel("look for programs of a former run", error))?;
            let Some(ifindex) = found else { continue };
            let there = if_indextoname(ifindex)
                .map_or_else(|_| format!("interface {ifindex}"), |name| name.to_string_lossy().into_owned());
            let name = settings.device(device).to_owned();
            return Err(StartError::Elsewhere { device, name, flag: flag(device), there });
        }
    }
    Ok(())
}

/// As the kernel checks them (`dev_valid_name`).
fn can_be_a_name(name: &str) -> bool {
    let is_odd = |byte: u8| byte == b'/' || byte == b':' || byte.is_ascii_whitespace() || byte == 0x0b;
    !name.is_empty() && name.len() < NAME_SIZE && name != "." && name != ".." && !name.bytes().any(is_odd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_device_can_have_are_known() {
        for name in ["eth0", "ovn-k8s-mp0", "a23456789012345", "ethernet@host", "..."] {
            assert!(can_be_a_name(name), "{name:?}");
        }
        for name in ["", ".", "..", "a234567890123456", "a/b", "a:1", "a b", "a\n", "a\u{b}"] {
            assert!(!can_be_a_name(name), "{name:?}");
        }
    }
}
