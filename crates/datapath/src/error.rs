//! Start errors. Each message says what to do. Running traffic is untouched in every case, since links are attached last.

use std::io;
use std::path::PathBuf;

use crate::attach::pod_interfaces::{PodInterface, UnservedCni};
use crate::names::Device;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{}", crate::object::NOT_EMBEDDED)]
    NoObject,
    #[error("this kernel lacks {missing}: use a kernel that has it (see docs/kernel-support.md)")]
    MissingFeatures { missing: String },
    #[error(
        "the kernel denies this process BPF: run it as root; in a container privileged, or with at least CAP_BPF, \
         CAP_PERFMON and CAP_NET_ADMIN"
    )]
    NoRights,
    #[error("{name} is named as uplink and as management port: they are two interfaces")]
    SameInterface { name: String },
    #[error("no interface can have the name {name:?}: name the {device} with {flag}")]
    NoSuchName { device: Device, name: String, flag: &'static str },
    #[error("--mgmt-port {name}: {cni}")]
    PodsPassBy { name: String, cni: UnservedCni },
    #[error(
        "there is no interface {mgmt_port} (--mgmt-port), and {name} is a pod's: {cni}; if {mgmt_port} appears later, set \
         --skip-cni-check", name = .pod.name, cni = .pod.cni
    )]
    UnservedCni { pod: PodInterface, mgmt_port: String },
    #[error(
        "there is no interface {name}, and the programs of a former run are on {there}: is the {device} right ({flag})? If it \
         is, run `egress-agent cleanup` first"
    )]
    Elsewhere { device: Device, name: String, flag: &'static str, there: String },
    #[error("{path} is not on a BPF file system: {advice}", path = .path.display())]
    NotBpffs { path: PathBuf, advice: String },
    #[error("another egress-agent runs on {what}: stop it first")]
    Busy { what: String },
    #[error(
        "{path} was pinned by another version ({found}; this one has {wanted}): run `egress-agent cleanup`, or the version \
         that made it"
    )]
    ForeignMap { path: PathBuf, found: String, wanted: String },
    #[error("{path} is none of egress-agent's pins: take it away, or name another directory with --bpffs")]
    NotPins { path: PathBuf },
    #[error(
        "{program} of another set of maps runs on {device}: run `egress-agent cleanup --bpffs {directory}` first, or start \
         with that --bpffs"
    )]
    ForeignPrograms { program: &'static str, device: String, directory: String },
    #[error("UDP port {port} is in use on this node: give every agent another one with --tunnel-port")]
    TunnelPortTaken { port: u16 },
    #[error("the eBPF object has no {what} `{name}`: build with cargo xtask build")]
    NotInObject { what: &'static str, name: &'static str },
    #[error("the kernel refused the eBPF object: {0}")]
    Object(String),
    #[error("the kernel refused to attach {hook}: {reason}")]
    Attach { hook: &'static str, reason: String },
    #[error("{what}: {source}")]
    Kernel { what: String, source: io::Error },
}

impl StartError {
    pub fn kernel(what: impl Into<String>, source: io::Error) -> Self {
        Self::Kernel { what: what.into(), source }
    }

    /// Reason of the event for administrators, for errors that are not caused by the agent's own installation.
    pub fn event_reason(&self) -> Option<&'static str> {
        match self {
            Self::Busy { .. } | Self::ForeignPrograms { .. } => Some("SecondAgent"),
            Self::TunnelPortTaken { .. } => Some("TunnelPortTaken"),
            Self::PodsPassBy { .. } | Self::UnservedCni { .. } => Some("CNINotServed"),
            Self::NoObject
            | Self::MissingFeatures { .. }
            | Self::NoRights
            | Self::SameInterface { .. }
            | Self::NoSuchName { .. }
            | Self::Elsewhere { .. }
            | Self::NotBpffs { .. }
            | Self::ForeignMap { .. }
            | Self::NotPins { .. }
            | Self::NotInObject { .. }
            | Self::Object(_)
            | Self::Attach { .. }
            | Self::Kernel { .. } => None,
        }
    }
}

/// The error number below one of rtnetlink's errors, where there is one.
pub fn netlink_io(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}

/// The error number below one of aya's map errors, where there is one.
pub fn map_io(error: aya::maps::MapError) -> io::Error {
    use aya::maps::MapError;
    match error {
        MapError::SyscallError(error) => error.io_error,
        MapError::IoError(error) => error,
        MapError::CreateError { io_error, .. } => io_error,
        MapError::KeyNotFound | MapError::ElementNotFound => io::Error::from_raw_os_error(libc::ENOENT),
        other => io::Error::other(other),
    }
}
