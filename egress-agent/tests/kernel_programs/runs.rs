//! One run of a program on a packet, by `BPF_PROG_TEST_RUN`: the hooks, what is put in and what comes out.

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};

use crate::devices::{MGMT, UPLINK};

/// What a program returns.
pub(crate) const NEXT: i32 = -1;
pub(crate) const SHOT: i32 = 2;
pub(crate) const REDIRECT: i32 = 7;

/// Which program, on which device, and what the packet brings along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) program: &'static str,
    pub(crate) ifindex: u32,
    pub(crate) ingress_ifindex: u32,
    pub(crate) mark: u32,
    pub(crate) gso_size: u32,
}

const fn run(program: &'static str, ifindex: u32) -> Run {
    Run { program, ifindex, ingress_ifindex: 0, mark: 0, gso_size: 0 }
}

pub(crate) const STEER: Run = run("mgmt_ingress", MGMT);
pub(crate) const NOTICE: Run = run("mgmt_egress", MGMT);
pub(crate) const ENTER: Run = run("uplink_ingress", UPLINK);
pub(crate) const SWEEP: Run = run("sweep", 0);
pub(crate) const LEAVE: Run = Run { ingress_ifindex: MGMT, ..run("uplink_egress", UPLINK) };

/// What a run came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ran {
    pub(crate) action: i32,
    pub(crate) frame: Vec<u8>,
    pub(crate) mark: u32,
    pub(crate) priority: u32,
}

impl Ran {
    /// With the priority that no packet has had.
    pub(crate) fn plain(action: i32, frame: Vec<u8>, mark: u32) -> Self {
        Self { action, frame, mark, priority: 0 }
    }
}

/// One run, without looking at counters.
pub(crate) fn test_run(program: &SchedClassifier, run: &Run, frame: &[u8]) -> Ran {
    let context = context(run);
    let (mut out, mut context_out) = ([0; 4096], [0; CONTEXT]);
    let result = program
        .test_run(TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ctx_out: Some(&mut context_out),
            ..TestRunOptions::default()
        })
        .unwrap_or_else(|error| panic!("{run:?}: {error:?}"));
    let length = usize::try_from(result.data_size_out).expect("a length");
    let field = |at: usize| context_out[at..at + 4].try_into().map(u32::from_ne_bytes).expect("four bytes");
    let (mark, priority) = (field(MARK), field(PRIORITY));
    Ran { action: result.return_value.cast_signed(), frame: out[..length].to_vec(), mark, priority }
}

/// Size of `struct __sk_buff` (linux/bpf.h) and where its fields lie.
const CONTEXT: usize = 192;
const MARK: usize = 8;
const PRIORITY: usize = 32;
const INGRESS_IFINDEX: usize = 36;
const IFINDEX: usize = 40;
const GSO_SIZE: usize = 176;

fn context(run: &Run) -> [u8; CONTEXT] {
    let mut context = [0; CONTEXT];
    for (at, value) in
        [(MARK, run.mark), (INGRESS_IFINDEX, run.ingress_ifindex), (IFINDEX, run.ifindex), (GSO_SIZE, run.gso_size)]
    {
        context[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    context
}
