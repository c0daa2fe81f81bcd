//! User settings of a node's data plane.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use egress_common::abi::Timeouts;
use ipnet::IpNet;

use crate::names::{self, Attachment, Device};
use crate::object;
use egress_core::model::state::Prefix;

/// Networks of the cluster that are known before the API server has answered.
pub type InitialState = BTreeMap<IpNet, Prefix>;

/// Share of `flows` and `nat` per holder, in percent; 100 means the size of the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotas {
    pub pod: u32,
    pub policy: u32,
}

impl Quotas {
    pub const DEFAULT: Self = Self { pod: 25, policy: 75 };

    /// In entries, for maps of this size.
    pub(crate) fn entries(percent: u32, flows: u32) -> u32 {
        let part = u64::from(flows) * u64::from(percent) / 100;
        if percent >= 100 { u32::MAX } else { u32::try_from(part).unwrap_or(u32::MAX).max(1) }
    }
}

/// Settings of the data plane.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The uplink interface.
    pub uplink: String,
    /// Interface by which pod traffic enters the host.
    pub mgmt_port: String,
    /// Directory of pins, on a BPF file system.
    pub bpffs: PathBuf,
    /// UDP port of the overlay, the same on all nodes.
    pub tunnel_port: u16,
    /// The cluster's NodePort range, which NAT on the node's own address does not use.
    pub node_port_range: RangeInclusive<u16>,
    /// Idle timeouts.
    pub timeouts: Timeouts,
    /// Maximum number of NAT entries.
    pub nat_entries: u32,
    /// Share of them, and of `flows`, for one pod address or one egress policy (percent).
    pub quotas: Quotas,
    /// Maximum number of inbound connections.
    pub inbound_entries: u32,
    /// Whether hosts outside reach pods by the pods' own addresses.
    pub direct_routing: bool,
    /// Whether new flows to egress IPs get a random port.
    pub random_ports: bool,
    /// Ports of a block, of which each pod has its own on every egress IP; zero: pods share the ports.
    pub port_block: u16,
    /// Whether the programs encapsulate and decapsulate simple packets. The device does it for all others, and for all
    /// packets if this is off.
    pub overlay_in_program: bool,
    /// Whether to wait for the management port also where pods enter the host by interfaces of their own.
    pub skip_cni_check: bool,
    /// How programs are attached; `None` probes the kernel.
    pub attachment: Option<Attachment>,
    /// Initial state before the API server answers, with unknown pods dropped from the first packet on; `None` if they
    /// pass.
    pub initial_state: Option<InitialState>,
    /// The eBPF object, an ELF file.
    pub object: Cow<'static, [u8]>,
}

impl Settings {
    /// Defaults for everything except the interfaces.
    pub fn new(uplink: impl Into<String>, mgmt_port: impl Into<String>) -> Self {
        Self {
            uplink: uplink.into(),
            mgmt_port: mgmt_port.into(),
            bpffs: names::DEFAULT_BPFFS.into(),
            tunnel_port: names::DEFAULT_TUNNEL_PORT,
            node_port_range: 30000..=32767,
            timeouts: Timeouts::DEFAULT,
            nat_entries: names::DEFAULT_NAT_ENTRIES,
            quotas: Quotas::DEFAULT,
            inbound_entries: names::DEFAULT_INBOUND_ENTRIES,
            direct_routing: false,
            random_ports: false,
            port_block: 0,
            overlay_in_program: true,
            skip_cni_check: false,
            attachment: None,
            initial_state: None,
            object: Cow::Borrowed(object::embedded().unwrap_or_default()),
        }
    }

    /// Map sizes that differ from the object's.
    pub(crate) fn map_size(&self, name: &str) -> Option<u32> {
        match name {
            // A NAT entry has two keys.
            names::NAT_MAP => Some(self.nat_entries.saturating_mul(2)),
            names::FLOWS_MAP => Some(self.nat_entries),
            names::INBOUND_MAP => Some(self.inbound_entries),
            _ => None,
        }
    }

    /// Name of a device on this node.
    pub(crate) fn device(&self, device: Device) -> &str {
        match device {
            Device::Mgmt => &self.mgmt_port,
            Device::Uplink => &self.uplink,
            Device::Overlay => names::OVERLAY_DEVICE,
        }
    }
}
