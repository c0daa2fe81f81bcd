//! One run of a program on a packet, by `BPF_PROG_TEST_RUN`: hooks, input and output.

#![expect(unsafe_code, reason = "the one system call for which aya has no flags")]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::OnceLock;

use aya::programs::SchedClassifier;

use egress_common::abi::Config;

use crate::devices::{MGMT, UPLINK};

/// What a program returns.
pub(crate) const NEXT: i32 = -1;
pub(crate) const SHOT: i32 = 2;
pub(crate) const REDIRECT: i32 = 7;

/// Priority of redirected packets.
pub(crate) const REDIRECTED: u32 = Config::EMPTY.redirected_priority();
/// Priority of packets with an egress IP that use the kernel's neighbour entry, as the first packet of a flow.
pub(crate) const WAITING: u32 = Config::EMPTY.waiting_priority();

/// Program, device and packet metadata.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestRun {
    pub(crate) program: &'static str,
    pub(crate) ifindex: u32,
    pub(crate) ingress_ifindex: u32,
    pub(crate) mark: u32,
    pub(crate) gso_size: u32,
    pub(crate) priority: u32,
}

const fn run(program: &'static str, ifindex: u32) -> TestRun {
    TestRun { program, ifindex, ingress_ifindex: 0, mark: 0, gso_size: 0, priority: 0 }
}

pub(crate) const FROM_POD: TestRun = run("from_pod", MGMT);
pub(crate) const TO_POD: TestRun = run("to_pod", MGMT);
pub(crate) const FROM_NETDEV: TestRun = run("from_netdev", UPLINK);
pub(crate) const SWEEP: TestRun = run("sweep", 0);
pub(crate) const TO_NETDEV: TestRun = TestRun { ingress_ifindex: MGMT, ..run("to_netdev", UPLINK) };

/// Result of a run. Equality ignores which of the two priorities it has, and its mark, which depend on the next hop
/// cache; and the departure time.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) action: i32,
    pub(crate) frame: Vec<u8>,
    pub(crate) mark: u32,
    pub(crate) priority: u32,
    /// CLOCK_MONOTONIC (ns), or zero.
    pub(crate) departure_ns: u64,
}

impl PartialEq for Ran {
    fn eq(&self, other: &Self) -> bool {
        let sign = |ran: &Self| if ran.priority == WAITING { (REDIRECTED, 0) } else { (ran.priority, ran.mark) };
        (self.action, &self.frame, sign(self)) == (other.action, &other.frame, sign(other))
    }
}

impl Ran {
    /// Whether it has the priority of redirected packets.
    pub(crate) fn plain(action: i32, frame: Vec<u8>, mark: u32) -> Self {
        Self { action, frame, mark, priority: if action == REDIRECT { REDIRECTED } else { 0 }, departure_ns: 0 }
    }
}

/// One run, without counters.
pub(crate) fn test_run(program: &SchedClassifier, run: &TestRun, frame: &[u8]) -> Ran {
    run_with(fd(program), run, frame, 0).unwrap_or_else(|error| panic!("{run:?}: {error}; {frame:02x?}"))
}

/// One run of a program that is in no object file: what it returns, and the frame.
pub(crate) fn test_run_of(program: BorrowedFd<'_>, frame: &[u8]) -> (i32, Vec<u8>) {
    let ran = run_with(program, &run("a program", 0), frame, 0).expect("run a program");
    (ran.action, ran.frame)
}

fn fd(program: &SchedClassifier) -> BorrowedFd<'_> {
    program.fd().expect("loaded").as_fd()
}

/// As [`test_run`], with a packet that has a complete checksum where the kernel can make one (`CHECKSUM_COMPLETE`: the
/// sum of everything behind the Ethernet header, as a device has found it). The run fails with `EBADMSG` if the output
/// does not match its complete checksum. Used only for packets that keep their length: a helper that changes it resets
/// the checksum, and the run compares nevertheless.
pub(crate) fn test_run_summed(program: &SchedClassifier, run: &TestRun, frame: &[u8]) -> Ran {
    let flags = if knows_complete_sums(program) { COMPLETE_SUM } else { 0 };
    run_with(fd(program), run, frame, flags).unwrap_or_else(|error| panic!("{run:?}: {error}; {frame:02x?}"))
}

/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE` (Linux 6.17).
const COMPLETE_SUM: u32 = 1 << 2;

/// Probed once, without a run: the kernel checks the flags before it fails to read the packet.
fn knows_complete_sums(program: &SchedClassifier) -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let mut attr = TestRunAttr { data_size_in: 64, flags: COMPLETE_SUM, ..TestRunAttr::of(fd(program)) };
        // SAFETY: the kernel may read 64 bytes at address zero, which it finds is not the process's memory.
        let error = unsafe { attr.run() }.expect_err("a packet from nowhere");
        let is_known = error.raw_os_error() == Some(libc::EFAULT);
        if !is_known {
            println!("the kernel makes no packets with complete checksums ({error}; Linux 6.17): tested without them");
        }
        is_known
    })
}

/// `union bpf_attr` (linux/bpf.h) for `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct TestRunAttr {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    reserved: u32,
}

impl TestRunAttr {
    fn of(program: BorrowedFd<'_>) -> Self {
        Self { prog_fd: program.as_raw_fd().cast_unsigned(), repeat: 1, ..Self::default() }
    }

    /// # Safety
    ///
    /// Its pointers are to live memory of the lengths beside them, or to none of the process's.
    unsafe fn run(&mut self) -> io::Result<()> {
        const BPF_PROG_TEST_RUN: libc::c_long = 10;
        let size = size_of::<Self>() as libc::c_ulong;
        // SAFETY: this is the kernel's layout for this command, and its size; the caller answers for the pointers in it.
        let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, std::ptr::from_mut(self), size) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

fn run_with(program: BorrowedFd<'_>, run: &TestRun, frame: &[u8], flags: u32) -> io::Result<Ran> {
    let context = context(run);
    let (mut out, mut context_out) = ([0_u8; 4096], [0_u8; CONTEXT]);
    let size = |length: usize| u32::try_from(length).expect("a length");
    let mut attr = TestRunAttr {
        data_size_in: size(frame.len()),
        data_size_out: size(out.len()),
        data_in: frame.as_ptr() as u64,
        data_out: out.as_mut_ptr() as u64,
        ctx_size_in: size(CONTEXT),
        ctx_size_out: size(CONTEXT),
        ctx_in: context.as_ptr() as u64,
        ctx_out: context_out.as_mut_ptr() as u64,
        flags,
        ..TestRunAttr::of(program)
    };
    // SAFETY: the four pointers are to live arrays of these lengths; the kernel reads the inputs and writes the outputs.
    unsafe { attr.run() }?;
    let length = usize::try_from(attr.data_size_out).expect("a length");
    let field = |at: usize| context_out[at..at + 4].try_into().map(u32::from_ne_bytes).expect("four bytes");
    let (mark, priority) = (field(MARK), field(PRIORITY));
    let departure_ns = context_out[TSTAMP..TSTAMP + 8].try_into().map(u64::from_ne_bytes).expect("eight bytes");
    Ok(Ran { action: attr.retval.cast_signed(), frame: out[..length].to_vec(), mark, priority, departure_ns })
}

/// Size of `struct __sk_buff` (linux/bpf.h) and where its fields lie.
const CONTEXT: usize = 192;
const MARK: usize = 8;
const PRIORITY: usize = 32;
const INGRESS_IFINDEX: usize = 36;
const IFINDEX: usize = 40;
const TSTAMP: usize = 152;
const GSO_SIZE: usize = 176;

fn context(run: &TestRun) -> [u8; CONTEXT] {
    let mut context = [0; CONTEXT];
    for (at, value) in [
        (MARK, run.mark),
        (PRIORITY, run.priority),
        (INGRESS_IFINDEX, run.ingress_ifindex),
        (IFINDEX, run.ifindex),
        (GSO_SIZE, run.gso_size),
    ] {
        context[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    context
}
