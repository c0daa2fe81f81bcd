//! Kernel features, by probes instead of versions.
//!
//! Missing required features are one error that names all of them. TCX is optional: links if the kernel has them, otherwise
//! clsact filters, or as configured.

use std::{fs, io};

use aya::maps::MapType;
use aya::programs::{ProgramError, ProgramType, TcAttachType};
use aya::sys::{BpfHelper, SyscallError, is_helper_supported, is_map_supported, is_program_supported};
use egress_common::abi::PacketLayout;
use tracing::debug;

use crate::error::StartError;
use crate::loader::kernel_types::KernelTypes;
use crate::maps::access::tcx_programs;
use crate::names::Attachment;

/// The loopback device, which has this number in every network namespace.
const ANY_DEVICE: u32 = 1;

/// Differences between kernels that matter here.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    pub attachment: Attachment,
    pub packet_layout: PacketLayout,
}

impl Features {
    /// With the configured attachment, if any.
    pub fn attaching(self, wish: Option<Attachment>) -> Result<Self, StartError> {
        match wish {
            Some(Attachment::Tcx) if self.attachment != Attachment::Tcx => {
                let missing = "TCX links (Linux 6.6), which --attach=tcx asks for".to_owned();
                Err(StartError::MissingFeatures { missing })
            }
            wish => Ok(Self { attachment: wish.unwrap_or(self.attachment), ..self }),
        }
    }
}

/// Probes the kernel.
pub fn probe() -> Result<Features, StartError> {
    require_rights()?;
    let types = KernelTypes::read().map_err(|error| error.to_string());
    let types = types.as_ref().map_err(String::clone);
    let layout = types.clone().map(packet_layout);
    let checks = [
        (
            "TC programs (CONFIG_NET_CLS_BPF)",
            is_program_supported(ProgramType::SchedClassifier).map_err(|e| e.to_string()),
        ),
        ("bpf_loop (Linux 5.17)", classifier_has(BpfHelper::BPF_FUNC_loop)),
        ("bpf_fib_lookup (Linux 4.18)", classifier_has(BpfHelper::BPF_FUNC_fib_lookup)),
        ("ring buffers (Linux 5.8)", has_map(MapType::RingBuf)),
        ("longest-prefix maps (Linux 4.11)", has_map(MapType::LpmTrie)),
        ("LRU maps (Linux 4.10)", has_map(MapType::LruHash)),
        ("per-CPU hash maps (Linux 4.6)", has_map(MapType::PerCpuHash)),
        ("BTF (Linux 4.18)", Ok(aya::features().btf().is_some())),
        (
            "bpf_probe_read_kernel (Linux 5.8; not with lockdown=confidentiality)",
            classifier_has(BpfHelper::BPF_FUNC_probe_read_kernel),
        ),
        ("a description of its types (CONFIG_DEBUG_INFO_BTF)", layout.clone().map(|layout| layout.is_some())),
        ("a source address in the tunnel metadata (Linux 5.19)", types.map(has_tunnel_source)),
        ("packets that are not interrupted by others on their CPU (not with PREEMPT_RT)", has_whole_runs()),
    ];
    let mut missing = Vec::new();
    for (name, outcome) in checks {
        match outcome {
            Ok(true) => {}
            Ok(false) => missing.push(name.to_owned()),
            Err(reason) => missing.push(format!("{name}: {reason}")),
        }
    }
    let (true, Ok(Some(packet_layout))) = (missing.is_empty(), layout) else {
        return Err(StartError::MissingFeatures { missing: missing.join(", ") });
    };
    // A read-only probe: the TCX programs of the loopback device.
    let attachment = match tcx_programs(ANY_DEVICE, TcAttachType::Ingress) {
        Ok(_) => Attachment::Tcx,
        Err(error) => {
            debug!(%error, "no TCX links (Linux 6.6): using clsact filters");
            Attachment::Clsact
        }
    };
    Ok(Features { attachment, packet_layout })
}

/// Without permission, every probe would fail like a missing feature.
fn require_rights() -> Result<(), StartError> {
    match is_program_supported(ProgramType::SchedClassifier) {
        Err(ProgramError::SyscallError(SyscallError { io_error, .. }))
            if io_error.kind() == io::ErrorKind::PermissionDenied =>
        {
            Err(StartError::NoRights)
        }
        // Other errors are handled with the other probes.
        _ => Ok(()),
    }
}

fn classifier_has(helper: BpfHelper) -> Result<bool, String> {
    is_helper_supported(ProgramType::SchedClassifier, helper).map_err(|error| error.to_string())
}

/// Older kernels have a smaller structure, and helpers refuse an unknown size. Every other probe would need a packet from a
/// tunnel.
fn has_tunnel_source(types: &KernelTypes) -> bool {
    const WITH_SOURCE: u32 = 44;
    types.struct_size("bpf_tunnel_key").is_some_and(|size| size >= WITH_SOURCE)
}

/// Where a packet of the kernel has what the programs read of it: no helper says where a device will write a checksum.
/// `bpf_skb_change_tail` refused to truncate a packet before that place, but newer kernels do it (Debian's 6.1.192 and 6.12.117).
fn packet_layout(types: &KernelTypes) -> Option<PacketLayout> {
    let of = |member| types.member_offset("sk_buff", member).and_then(|offset| u16::try_from(offset).ok());
    let pair = |first, second, distance| {
        let (first, second) = (of(first)?, of(second)?);
        (second == first + distance).then_some(first)
    };
    Some(PacketLayout { checksum: pair("csum_start", "csum_offset", 2)?, head: pair("head", "data", 8)? })
}

/// The programs keep a packet's state in a per-CPU element, which is safe because bottom halves do not interrupt one
/// another. With PREEMPT_RT they may (since Linux 6.18 and 6.12.57, unless built with PREEMPT_RT_NEEDS_BH_LOCK, which
/// cannot be probed): packets would mix their state.
fn has_whole_runs() -> Result<bool, String> {
    let version = fs::read_to_string("/proc/sys/kernel/version").map_err(|error| error.to_string())?;
    Ok(!is_realtime(&version))
}

fn is_realtime(version: &str) -> bool {
    version.split_whitespace().any(|word| word == "PREEMPT_RT")
}

fn has_map(map: MapType) -> Result<bool, String> {
    is_map_supported(map).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preemptible_kernel_is_recognised() {
        for version in ["#1 SMP PREEMPT_RT Debian 6.12.57-1 (2025-11-05)\n", "#1 SMP PREEMPT_RT @0"] {
            assert!(is_realtime(version), "{version}");
        }
        for version in ["#1 SMP PREEMPT_DYNAMIC Debian 6.12.57-1 (2025-11-05)\n", "#1 SMP PREEMPT @0", "#1 SMP @0", ""]
        {
            assert!(!is_realtime(version), "{version}");
        }
    }
}
