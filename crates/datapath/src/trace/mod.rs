//! `egress-agent trace`: runs a test packet through the loaded programs and explains the verdict, without side effects.
//!
//! Two independent sources must agree: the **programs** run by `BPF_PROG_TEST_RUN` and give the verdict, and the
//! **decision** of `egress_common::decide` runs on the host over the same map entries and gives the reasons ([`recorder`],
//! [`questions`]). A verdict outside of the [`prediction`] is a defect, unless the maps changed in between.
//!
//! The object is loaded once more, attached nowhere: maps that programs only read are the pinned ones, maps that they write are
//! its own, with copies of the entries that concern the packet ([`copy`](mod@copy)). The kernel's hash of the instructions (the
//! tag) shows that it is the program on the hook. State that is not pinned (fragments, flow cache, failed port searches) starts
//! empty, which matters only in the second after a search that found no port. Full maps are copied as full.

pub mod advice;
pub mod arrival;
pub mod copy;
pub mod prediction;
pub mod questions;
pub mod recorder;
pub mod report;
pub mod test_packet;

use std::io;
use std::path::{Path, PathBuf};

use aya::maps::{MapData, PerCpuArray};
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions};
use aya::sys::SyscallError;
use aya::{Ebpf, EbpfLoader};
use egress_common::abi::{
    Addr, AnswerKey, BlockHolder, BlockOwner, Config, Count, Datagram, Direction, EPOCHS, Flow, HeldBlocks, Holder,
    Inbound, NatEntry, Origin, PortBlock, PrefixKind, Share, Tuple, Verdict,
};
use egress_common::decide::Tables as _;
use egress_common::wire::Headers;

use crate::attach::listing::{self, AttachedProgram};
use crate::error::{StartError, map_io};
use crate::loader::{pins, programs};
use crate::maps::access;
use crate::maps::handles::{self, Hash};
use crate::names::{BLOCKS_MAP, Hook, POD_BLOCKS_MAP, Pins, READ_MAPS};
use crate::survey;
use crate::trace::copy::{CopiedMaps, Sizes};
use crate::trace::prediction::{Prediction, predict};
use crate::trace::test_packet::TestPacket;

/// Verdict of a test packet, and its reasons.
#[derive(Debug)]
pub struct Traced {
    /// Verdict of the programs.
    pub verdict: Verdict,
    /// Prediction of the decision.
    pub predicted: Prediction,
    pub headers: Headers,
    pub config: Config,
    /// The flow and NAT entry of the packet, existing or new. The port is random if the source port is taken.
    pub flow: Option<Flow>,
    pub mapping: Option<NatEntry>,
    /// The outgoing device.
    pub device: Option<String>,
    /// Whether the flow exists already.
    pub is_known: bool,
    /// Whether the destination is an egress IP of the cluster, which the decision does not ask for every pod.
    pub to_egress_ip: bool,
    /// The attached program; absent if there is none.
    pub attached: Option<AttachedProgram>,
    /// Tag of the program that was run.
    pub tag: u64,
}

impl Traced {
    pub fn agrees(&self) -> bool {
        self.predicted.holds(self.verdict)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("no programs of an agent are here (no pins below {})", .0.display())]
    NoPrograms(PathBuf),
    #[error(
        "the program on the management port is of another build than this command (its tag is {there:016x}, not {here:016x}): \
         run the trace of the agent's own image, `kubectl exec POD -- egress-agent trace`"
    )]
    OtherBuild { there: u64, here: u64 },
    #[error("the packet's two addresses are of different families")]
    TwoFamilies,
    #[error("the management port (interface {0}) is not there: is this the node's network namespace?")]
    NoDevice(u32),
    #[error("this kernel runs no made packet of {0} bytes: give a smaller --length, {SHORTER} is taken by all")]
    TooLong(usize),
    #[error("the kernel did not run the packet: {0}")]
    Refused(#[source] io::Error),
    #[error("the run moved {0} counters, not one: report it")]
    NoVerdict(usize),
    #[error(transparent)]
    Load(#[from] StartError),
    #[error("cannot read the pins: {0}")]
    Pins(#[from] io::Error),
}

/// Runs packets. The first one loads the program, which takes time; others reuse it if the copies have the same sizes.
pub struct Tracer<'o> {
    pins: Pins,
    object: &'o [u8],
    loaded: Option<Loaded>,
}

impl<'o> Tracer<'o> {
    pub fn new(bpffs: &Path, object: &'o [u8]) -> Result<Self, TraceError> {
        if object.is_empty() {
            return Err(StartError::NoObject.into());
        }
        let pins = Pins::new(bpffs);
        if !pins.map("config").try_exists()? {
            return Err(TraceError::NoPrograms(bpffs.to_owned()));
        }
        pins::check_read(&pins, object)?;
        Ok(Self { pins, object, loaded: None })
    }

    /// Runs the packet; once more if verdict and prediction differ, because the maps may have changed in between.
    pub fn trace(&mut self, packet: &TestPacket) -> Result<Traced, TraceError> {
        let first = self.once(packet)?;
        if first.agrees() { Ok(first) } else { self.once(packet) }
    }

    fn once(&mut self, packet: &TestPacket) -> Result<Traced, TraceError> {
        let headers = packet.headers().ok_or(TraceError::TwoFamilies)?;
        let copied = CopiedMaps::of(&self.pins, &headers)?;
        let config = copied.maps.config.get();
        let attached = listing::attached(&self.pins, &config, HOOK)?;
        let loaded = match self.loaded.take().filter(|loaded| loaded.sizes == copied.sizes()) {
            Some(loaded) => self.loaded.insert(loaded),
            None => self.loaded.insert(Loaded::new(&self.pins, self.object, &copied)?),
        };
        let tag = loaded.tag;
        if let Some(there) = attached.as_ref().and_then(|attached| attached.tag).filter(|there| *there != tag) {
            return Err(TraceError::OtherBuild { there, here: tag });
        }
        let frame = packet.frame(config.mgmt_mac);
        let verdict = loaded.run(&frame, &config, &copied)?;
        let tuple = headers.tuple;
        let is_known = copied.maps.flows.get(&tuple).is_some();
        let frame_len = u32::try_from(frame.len()).map_err(io::Error::other)?;
        let predicted = predict(headers, frame_len, &copied.maps);
        let to_egress_ip =
            copied.maps.prefix(&tuple.daddr).is_some_and(|prefix| prefix.kind() == Some(PrefixKind::EgressIp));
        let (flow, mapping) = (loaded.private.flows.get(&tuple)?, loaded.private.nat.get(&tuple)?);
        let device = mapping.and_then(|mapping| survey::name_of(mapping.hop.ifindex));
        Ok(Traced { verdict, predicted, headers, config, flow, mapping, device, is_known, to_egress_ip, attached, tag })
    }
}

const HOOK: Hook = Hook::FromPod;

/// The program, with its own maps for writes.
struct Loaded {
    ebpf: Ebpf,
    private: Private,
    sizes: Sizes,
    tag: u64,
}

impl Loaded {
    fn new(pins: &Pins, object: &[u8], copied: &CopiedMaps) -> Result<Self, StartError> {
        let mut ebpf = load(pins, object, copied)?;
        let private = Private::take(&mut ebpf)?;
        let name = HOOK.name();
        let program = ebpf.program_mut(name).ok_or(StartError::NotInObject { what: "program", name })?;
        programs::load_classifier(program, name)?;
        let tag = classifier(&ebpf)?.info().map_err(|error| refused(&error))?.tag();
        Ok(Self { ebpf, private, sizes: copied.sizes(), tag })
    }

    fn run(&mut self, frame: &[u8], config: &Config, copied: &CopiedMaps) -> Result<Verdict, TraceError> {
        self.private.begin(copied)?;
        let before = self.private.counted()?;
        run(classifier(&self.ebpf)?, frame, config.mgmt_ifindex)?;
        let after = self.private.counted()?;
        let moved: Vec<_> = after.into_iter().zip(before).filter(|(after, before)| after != before).collect();
        match moved.as_slice() {
            [((verdict, after), (_, before))] if *after == before + 1 => Ok(*verdict),
            others => Err(TraceError::NoVerdict(others.len())),
        }
    }
}

/// The object, with its own maps for writes.
fn load(pins: &Pins, object: &[u8], copied: &CopiedMaps) -> Result<Ebpf, StartError> {
    let paths: Vec<_> = READ_MAPS.iter().map(|name| (*name, pins.map(name))).collect();
    let mut loader = EbpfLoader::new();
    for (name, path) in &paths {
        loader.map_pin_path(name, path.as_path());
    }
    for (name, size) in copied.sizes() {
        loader.map_max_entries(name, size);
    }
    loader.load(object).map_err(|error| StartError::Object(programs::chain(&error)))
}

fn classifier(ebpf: &Ebpf) -> Result<&SchedClassifier, StartError> {
    let name = HOOK.name();
    let program = ebpf.program(name).ok_or(StartError::NotInObject { what: "program", name })?;
    program.try_into().map_err(|_| StartError::NotInObject { what: "classifier", name })
}

fn refused(error: &ProgramError) -> StartError {
    StartError::Object(error.to_string())
}

/// Size of `struct __sk_buff` (linux/bpf.h), and the offset of the device.
const CONTEXT: usize = 192;
const IFINDEX: usize = 40;
/// Buffer for a packet with outer headers.
const ROOM: usize = 1 << 17;

fn run(program: &SchedClassifier, frame: &[u8], ifindex: u32) -> Result<(), TraceError> {
    let mut context = [0; CONTEXT];
    context[IFINDEX..IFINDEX + 4].copy_from_slice(&ifindex.to_ne_bytes());
    let mut out = vec![0; ROOM];
    let options = TestRunOptions {
        data_in: Some(frame),
        data_out: Some(&mut out),
        ctx_in: Some(&context),
        ..TestRunOptions::default()
    };
    match program.test_run(options) {
        Ok(_) => Ok(()),
        Err(ProgramError::SyscallError(SyscallError { io_error, .. })) => Err(why(io_error, ifindex, frame.len())),
        Err(error) => Err(refused(&error).into()),
    }
}

/// Packets that fit into a page with the kernel's overhead; most kernels refuse longer ones.
const SHORTER: usize = 3500;

fn why(error: io::Error, ifindex: u32, frame: usize) -> TraceError {
    match error.raw_os_error() {
        Some(libc::ENODEV) => TraceError::NoDevice(ifindex),
        Some(libc::EINVAL | libc::EMSGSIZE) if frame > SHORTER => TraceError::TooLong(frame),
        _ => TraceError::Refused(error),
    }
}

/// The maps that programs write.
struct Private {
    flows: Hash<Tuple, Flow>,
    nat: Hash<Tuple, NatEntry>,
    inbound: Hash<Tuple, Inbound>,
    exhausted: Hash<Tuple, Datagram>,
    blocks: Hash<PortBlock, BlockOwner>,
    pod_blocks: Hash<BlockHolder, HeldBlocks>,
    epochs: MapData,
    /// Value of all epochs.
    runs: u32,
    shares: Hash<Holder, Share>,
    answers: Hash<AnswerKey, u64>,
    counters: PerCpuArray<MapData, Count>,
}

impl Private {
    fn take(ebpf: &mut Ebpf) -> Result<Self, StartError> {
        Ok(Self {
            flows: handles::hash(ebpf, "flows")?,
            nat: handles::hash(ebpf, "nat")?,
            inbound: handles::hash(ebpf, "inbound")?,
            exhausted: handles::hash(ebpf, "exhausted")?,
            blocks: handles::hash(ebpf, BLOCKS_MAP)?,
            pod_blocks: handles::hash(ebpf, POD_BLOCKS_MAP)?,
            epochs: handles::array(ebpf, "epochs")?,
            runs: 0,
            shares: handles::hash(ebpf, "shares")?,
            answers: handles::hash(ebpf, "answers")?,
            counters: handles::typed(ebpf, "counters")?,
        })
    }

    /// Resets the state of earlier runs.
    fn begin(&mut self, copied: &CopiedMaps) -> io::Result<()> {
        self.flows.clear()?;
        self.nat.clear()?;
        self.inbound.clear()?;
        self.exhausted.clear()?;
        self.blocks.clear()?;
        self.pod_blocks.clear()?;
        self.answers.clear()?;
        self.shares.clear()?;
        // Invalidates the flow caches.
        self.runs = self.runs.wrapping_add(1);
        access::write_array(&self.epochs, &vec![self.runs; EPOCHS as usize])?;
        self.fill(copied)
    }

    fn fill(&mut self, copied: &CopiedMaps) -> io::Result<()> {
        for (key, flow) in copied.maps.flows.all() {
            self.flows.put(&key, &flow)?;
        }
        for (holder, share) in &*copied.maps.shares.borrow() {
            self.shares.put(holder, share)?;
        }
        for (key, inbound) in copied.maps.inbound.all() {
            self.inbound.put(&key, &inbound)?;
        }
        for (key, mapping) in copied.maps.nat.all() {
            self.nat.put(&key, &mapping)?;
        }
        for (block, owner) in &*copied.maps.blocks.borrow() {
            self.blocks.put(block, owner)?;
        }
        for (holder, held) in &*copied.maps.pod_blocks.borrow() {
            self.pod_blocks.put(holder, held)?;
        }
        let (flows, nat) = copied.are_full_of_others();
        let filler = Tuple::new(Direction::Egress, Addr::UNSPECIFIED, Addr::UNSPECIFIED, 0, 0, 0);
        if flows {
            self.flows.put(&filler, &Flow::new(Addr::UNSPECIFIED, 0, 0, 0, 0))?;
        }
        if nat {
            self.nat.put(&filler, &NatEntry::new(filler, Origin::Here, Addr::UNSPECIFIED, 0, 0))?;
        }
        Ok(())
    }

    /// Packets by verdict.
    fn counted(&self) -> io::Result<Vec<(Verdict, u64)>> {
        let packets = |verdict: &Verdict| {
            let values = self.counters.get(&verdict.index(), 0).map_err(map_io)?;
            Ok((*verdict, values.iter().map(|count| count.packets).sum()))
        };
        Verdict::ALL.iter().map(packets).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_the_kernel_are_explained_by_their_error() {
        let said = |errno, frame| why(io::Error::from_raw_os_error(errno), 7, frame).to_string();
        assert!(said(libc::ENODEV, 60).starts_with("the management port (interface 7) is not there"));
        let long = said(libc::EINVAL, 3964);
        assert!(long.contains("no made packet of 3964 bytes") && long.contains("--length, 3500"), "{long}");
        assert!(said(libc::EINVAL, 60).starts_with("the kernel did not run the packet: "));
    }
}
