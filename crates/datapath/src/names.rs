//! Every pin, link, device, filter and lock that the data plane creates, named once.
//!
//! Start adopts or removes exactly these, and `cleanup` finds exactly these. Nothing else stays in the kernel, except the
//! multicast filters of owned IPv6 addresses, which follow from the map `owned` (see `announce`).
//!
//! ```text
//! <bpffs>/v<ABI_VERSION>/maps/<map>      one per map that outlives the agent
//! <bpffs>/v<ABI_VERSION>-<times>/         such a directory, set aside because its maps have other sizes than asked for
//! <bpffs>/v<ABI_VERSION>/links/<hook>    TCX link; its program name is the hook's name
//! <bpffs>/v<ABI_VERSION>/links/<hook>-<index>  the same on a further egress interface, by the interface's index
//! <bpffs>/v<ABI_VERSION>/clsact/<index>  an empty directory for each interface whose clsact discipline we have made
//! <bpffs>/v<ABI_VERSION>/filters/<number>  a program that is, or is about to be, a filter of ours, by its number
//! <bpffs>/v<ABI_VERSION>/sweep           the program `sweep`, for the moment in which a second handle to it is opened
//! ```
//!
//! Where the kernel has no TCX links, a hook is a clsact filter with our priority, named like the program.

use std::fmt;
use std::path::{Path, PathBuf};

use aya::programs::TcAttachType;
use aya::programs::tc::TcHandle;
use egress_common::abi::ABI_VERSION;

/// Default directory of pins.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf/egress-agent";

/// Default UDP port of the overlay. VXLAN's 4789 (OVN, Calico, OpenShift SDN), 8472 (Flannel, Cilium), 4790 (VXLAN-GPE),
/// Geneve's 6081 (OVN, Antrea), Weave's 6783-6784 and WireGuard's 51820-51821, 51871 are in use on some clusters; this one
/// is unassigned and outside the ephemeral and NodePort ranges.
pub const DEFAULT_TUNNEL_PORT: u16 = 4794;

/// Default number of NAT entries of a node.
pub const DEFAULT_NAT_ENTRIES: u32 = 262_144;

/// Default number of inbound connections of a node.
pub const DEFAULT_INBOUND_ENTRIES: u32 = egress_common::abi::DEFAULT_INBOUND;

/// The maps with configurable sizes: NAT entries and inbound connections.
pub const NAT_MAP: &str = "nat";
pub const BLOCKS_MAP: &str = "blocks";
pub const POD_BLOCKS_MAP: &str = "pod_blocks";
pub const SHARES_MAP: &str = "shares";
pub const FLOWS_MAP: &str = "flows";
pub const INBOUND_MAP: &str = "inbound";

/// The VXLAN device in external mode.
pub const OVERLAY_DEVICE: &str = "egress0";

/// The VLAN devices on the uplink have this name with their number.
pub const VLAN_DEVICE: &str = "egress.";

/// Link address of the overlay device, the same on every node, so that senders need no lookup.
pub const OVERLAY_MAC: [u8; 6] = [0x02, 0xe6, 0x7e, 0x55, 0x00, 0x01];

/// The nftables table of the leak guard, which also disables connection tracking on the tunnel port.
pub const NFT_TABLE: &str = "egress-agent";

/// The nftables table that marks what follows routing tables of EgressServices.
pub const NFT_NETWORKS: &str = "egress-agent-networks";

/// Priority before all other filters of the hook.
pub const CLSACT_PRIORITY: u16 = 1;
/// Preferred handle among the filters of that priority.
pub const CLSACT_HANDLE: TcHandle = TcHandle::new(0, 0xe67e);

/// Directory of the marks of clsact disciplines, below that of the layout's version.
pub const CLSACT_MARKERS: &str = "clsact";

/// Directory of links, below that of the layout's version.
pub const LINKS: &str = "links";

/// Directory of the programs that are filters, below that of the layout's version.
pub const CLSACT_PROGRAMS: &str = "filters";

/// Abstract socket that one agent per network namespace holds: it vanishes with the process.
pub const INSTANCE_SOCKET: &str = "egress-agent";

/// Maps that outlive the agent. Others in the object (scratch space) live as long as the programs.
pub const PINNED_MAPS: [&str; 29] = [
    "lease",
    "pods",
    "classes",
    "policy",
    "destinations",
    "owned",
    "owned_addr",
    "interfaces",
    "routes",
    "neighbours",
    "handovers",
    "cluster",
    "nodes",
    "flows",
    "inbound",
    "exposed",
    "datagrams",
    "nat",
    BLOCKS_MAP,
    POD_BLOCKS_MAP,
    "usage",
    "shares",
    "epochs",
    "flow_cache_use",
    "frags",
    "counters",
    "eip_counters",
    "events",
    "config",
];

/// The pinned maps that programs only read: a trace shares them with the attached programs.
pub const READ_MAPS: [&str; 14] = [
    "lease",
    "pods",
    "classes",
    "policy",
    "destinations",
    "owned",
    "owned_addr",
    "interfaces",
    "routes",
    "neighbours",
    "handovers",
    "cluster",
    "nodes",
    "config",
];

/// The pinned maps that programs write: a trace has its own.
#[cfg(test)]
const WRITTEN_MAPS: [&str; 15] = [
    "flows",
    "inbound",
    "exposed",
    "datagrams",
    "nat",
    BLOCKS_MAP,
    POD_BLOCKS_MAP,
    "usage",
    "shares",
    "epochs",
    "flow_cache_use",
    "frags",
    "counters",
    "eip_counters",
    "events",
];

/// Classifier that expires flows; run on demand, never attached.
pub const SWEEP_PROGRAM: &str = "sweep";

/// The device of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// Where pod traffic enters the host.
    Mgmt,
    /// The uplink.
    Uplink,
    /// [`OVERLAY_DEVICE`].
    Overlay,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Device::Mgmt => "management port",
            Device::Uplink => "uplink",
            Device::Overlay => "overlay device",
        })
    }
}

/// A hook of one of our programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    ToNetdev,
    FromNetdev,
    FromOverlay,
    ToPod,
    FromPod,
}

impl Hook {
    /// The programs of the uplink run on every further egress interface too.
    pub const NETDEV: [Self; 2] = [Self::ToNetdev, Self::FromNetdev];

    /// Order of attaching at start: the guard of the uplink first, the program that redirects to it last.
    pub const ALL: [Self; 5] = [Self::ToNetdev, Self::FromNetdev, Self::FromOverlay, Self::ToPod, Self::FromPod];

    /// Order of attaching to devices that were replaced at run time: first the programs that keep pods' packets from
    /// leaving untranslated. Each attachment waits some ten milliseconds for RCU, while the programs before it already run.
    pub const RETURN_ORDER: [Self; 5] =
        [Self::FromPod, Self::ToNetdev, Self::FromNetdev, Self::FromOverlay, Self::ToPod];

    /// Name of the program, of the pinned link and of the clsact filter.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ToNetdev => "to_netdev",
            Self::FromNetdev => "from_netdev",
            Self::FromOverlay => "from_overlay",
            Self::ToPod => "to_pod",
            Self::FromPod => "from_pod",
        }
    }

    /// The name up to layout 6. Adoption and cleanup look for both.
    const fn former_name(self) -> &'static str {
        match self {
            Self::ToNetdev => "uplink_egress",
            Self::FromNetdev => "uplink_ingress",
            Self::FromOverlay => "overlay_ingress",
            Self::ToPod => "mgmt_egress",
            Self::FromPod => "mgmt_ingress",
        }
    }

    /// The hook's name in this layout, then the one in former layouts.
    pub(super) const fn names(self) -> [&'static str; 2] {
        [self.name(), self.former_name()]
    }

    /// The hook of a link or filter of any layout.
    pub(super) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hook| hook.names().contains(&name))
    }

    /// The hook of a pinned link of any layout, and the index of the further egress interface that the name has.
    pub(super) fn of_link(name: &str) -> Option<(Self, Option<u32>)> {
        match name.split_once('-') {
            None => Some((Self::of_name(name)?, None)),
            Some((hook, index)) => Some((Self::of_name(hook)?, Some(index.parse().ok()?))),
        }
    }

    pub const fn device(self) -> Device {
        match self {
            Self::ToNetdev | Self::FromNetdev => Device::Uplink,
            Self::FromOverlay => Device::Overlay,
            Self::ToPod | Self::FromPod => Device::Mgmt,
        }
    }

    pub const fn direction(self) -> TcAttachType {
        match self {
            Self::ToNetdev | Self::ToPod => TcAttachType::Egress,
            Self::FromNetdev | Self::FromOverlay | Self::FromPod => TcAttachType::Ingress,
        }
    }
}

/// A hook of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttachPoint {
    pub hook: Hook,
    pub ifindex: u32,
    /// Of a further egress interface, and not of the hook's own device.
    pub is_further: bool,
}

/// How programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// TCX links, pinned.
    Tcx,
    /// Filters of the clsact queueing discipline.
    Clsact,
}

/// Paths below `--bpffs`.
#[derive(Clone, Debug)]
pub struct Pins {
    root: PathBuf,
}

impl Pins {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Directory name of this layout.
    pub fn version_name() -> String {
        format!("v{ABI_VERSION}")
    }

    /// Whether this is the name of a layout's directory, possibly one that was set aside.
    pub fn is_version(name: &str) -> bool {
        let is_number = |text: &str| text.parse::<u32>().is_ok();
        name.strip_prefix('v').is_some_and(|name| {
            name.split_once('-')
                .map_or_else(|| is_number(name), |(number, times)| is_number(number) && is_number(times))
        })
    }

    /// The first free name for maps of this layout that are set aside.
    pub fn aside(&self) -> PathBuf {
        let mut times = 1_u32;
        loop {
            let path = self.root.join(format!("{}-{times}", Self::version_name()));
            if !path.exists() {
                return path;
            }
            times += 1;
        }
    }

    pub fn version(&self) -> PathBuf {
        self.root.join(Self::version_name())
    }

    pub fn maps(&self) -> PathBuf {
        self.version().join("maps")
    }

    pub fn links(&self) -> PathBuf {
        self.version().join(LINKS)
    }

    pub fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name)
    }

    pub fn link(&self, hook: Hook) -> PathBuf {
        self.links().join(hook.name())
    }

    pub fn link_of(&self, place: AttachPoint) -> PathBuf {
        if place.is_further { self.further_link(place.hook, place.ifindex) } else { self.link(place.hook) }
    }

    /// The link on a further egress interface. The BPF file system refuses names with dots.
    pub fn further_link(&self, hook: Hook, ifindex: u32) -> PathBuf {
        self.links().join(format!("{}-{ifindex}", hook.name()))
    }

    pub fn sweep(&self) -> PathBuf {
        self.version().join(SWEEP_PROGRAM)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_hook_is_found_by_its_former_name_too() {
        for hook in Hook::ALL {
            assert!(hook.names().into_iter().all(|name| Hook::of_name(name) == Some(hook)), "{hook:?}");
        }
        assert_eq!(Hook::of_name("sweep"), None);
    }

    #[test]
    fn a_link_names_its_further_interface() {
        let pins = Pins::new(Path::new("/sys/fs/bpf/x"));
        for (path, expected) in [
            (pins.link(Hook::ToNetdev), Some((Hook::ToNetdev, None))),
            (pins.further_link(Hook::FromNetdev, 12), Some((Hook::FromNetdev, Some(12)))),
            (pins.links().join("from_netdev-"), None),
            (pins.links().join("from_netdev-eth1"), None),
            (pins.links().join("other-12"), None),
        ] {
            let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
            assert_eq!(Hook::of_link(name), expected, "{name}");
        }
    }

    #[test]
    fn a_new_map_must_say_whether_programs_write_it() {
        let both: BTreeSet<_> = READ_MAPS.into_iter().chain(WRITTEN_MAPS).collect();
        assert_eq!(both, BTreeSet::from(PINNED_MAPS), "a trace must change none that programs write");
        assert_eq!(READ_MAPS.len() + WRITTEN_MAPS.len(), PINNED_MAPS.len());
    }
}
