//! Devices that do not exist yet.
//!
//! An agent may start before its CNI has created them: a bridge comes with the first pod, `ovn-k8s-mp0` with OVN-Kubernetes on
//! the node. The programs must be attached before that pod sends. So the start does not wait: programs and maps are loaded,
//! existing devices are attached, and a new device is attached at once (`node_state::watch`). A wrong name looks like an early
//! start, so the health page shows the missing device and the log has it once per device.
//!
//! Three names are known to be wrong and refused: one that no device can have, one of a CNI's own devices as the management port,
//! and one where a former run's programs are attached to another device. A management port that is missing beside pods that enter
//! by interfaces of their own is refused too ([`pod_interfaces`]).

use std::path::PathBuf;

use nix::net::if_::if_indextoname;

use crate::attach::listing;
use crate::attach::pod_interfaces::{self, PodInterface, UnservedCni};
use crate::devices::interfaces::NodeFacts;
use crate::error::StartError;
use crate::names::{Device, Hook};
use crate::settings::Settings;

/// `IFNAMSIZ`: size of a name with its terminating zero.
const NAME_SIZE: usize = 16;

/// Devices with a configurable name.
const NAMED: [Device; 2] = [Device::Uplink, Device::Mgmt];

const fn flag(device: Device) -> &'static str {
    match device {
        Device::Mgmt => "--mgmt-port",
        // The name of the overlay device is fixed.
        Device::Uplink | Device::Overlay => "--uplink",
    }
}

/// Description of a missing device, for the log and the health page. Pods that came after the start may explain it.
pub fn line(device: Device, name: &str, pod: Option<&PodInterface>) -> String {
    let waits = format!("waiting for interface {name}, the {device} ({}): there is none of that name", flag(device));
    let chained = || pod_interfaces::has_cilium().then_some(UnservedCni::Cilium);
    match pod.map(|pod| pod.cni).or_else(chained).filter(|_| device == Device::Mgmt) {
        Some(cni) => format!("{waits}; {cni}"),
        None => waits,
    }
}

/// Fails if pods of the node have interfaces of their own, and the management port is missing.
pub fn pods_elsewhere(settings: &Settings, facts: &NodeFacts) -> Result<(), StartError> {
    match &facts.pod_interface {
        Some(pod) if !settings.skip_cni_check => {
            Err(StartError::UnservedCni { pod: pod.clone(), mgmt_port: settings.mgmt_port.clone() })
        }
        _ => Ok(()),
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
    match pod_interfaces::own_device(mgmt_port) {
        Some(cni) => Err(StartError::PodsPassBy { name: mgmt_port.to_owned(), cni }),
        None => Ok(()),
    }
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
