//! Cost of each program in the verifier, against the record for this kernel (egress-ebpf/verifier.yaml).
//!
//! The kernel refuses a million instructions, and 512 bytes of stack in a call chain, and loading is slow long before
//! that. Both jump when a small change loses verifier state. `cargo xtask verifier --bless` writes the record.
//!
//! The stack depth is only in the verifier's log, which the loader returns only for a refused program. So a separate
//! process (`measure`) leaves no free file descriptor: the kernel verifies the program, writes its log, and fails at
//! the end with EMFILE.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use aya::programs::{ProgramError, SchedClassifier};
use aya::{Ebpf, EbpfLoader, VerifierLogLevel};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Deserialize;

use crate::stage::on_stage;

const PROGRAMS: [&str; 6] = ["to_pod", "from_pod", "from_overlay", "sweep", "to_netdev", "from_netdev"];

/// Makes `measure` a measurement.
const MEASURE: &str = "EGRESS_TEST_MEASURE";

/// Prefix of the lines that `cargo xtask verifier` reads.
const MARK: &str = "verifier: ";

/// Tolerance, in percent.
const TOLERANCE: u32 = 10;

/// The figures of one program, named as in the record.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Figures {
    /// Instructions that the verifier went through.
    instructions: u32,
    /// Bytes of stack of the program and of each function that is called, as the kernel writes it: `112+0+64`.
    stack: String,
    /// Functions beside the program itself.
    subprograms: usize,
    /// Bytes of machine code.
    jited: u32,
}

impl Figures {
    fn stack_sum(&self) -> u32 {
        self.stack.split('+').map(|bytes| bytes.parse::<u32>().expect("a number of bytes")).sum()
    }
}

/// By major and minor version of the kernel, then by program.
type VerifierRecord = BTreeMap<String, BTreeMap<String, Figures>>;

fn record() -> VerifierRecord {
    serde_yaml::from_str(include_str!("../../../egress-ebpf/verifier.yaml")).expect("the record")
}

/// `6.1` of `6.1.0-56-cloud-amd64`.
fn kernel() -> String {
    let name = nix::sys::utsname::uname().expect("the kernel's name");
    let release = name.release().to_string_lossy().into_owned();
    release.split(['.', '-']).take(2).collect::<Vec<_>>().join(".")
}

fn classifier<'a>(ebpf: &'a mut Ebpf, name: &str) -> &'a mut SchedClassifier {
    ebpf.program_mut(name).expect("a program").try_into().expect("a classifier")
}

fn object() -> &'static [u8] {
    egress_datapath::object::embedded().expect("an embedded object")
}

fn load() -> Ebpf {
    EbpfLoader::new().verifier_log_level(VerifierLogLevel::STATS).load(object()).expect("load the maps")
}

/// Not a test: the body of the process that `every_program_is_as_cheap_as_on_record` starts.
#[test]
#[ignore = "helper process"]
fn measure() {
    assert!(std::env::var_os(MEASURE).is_some(), "to be started by the test");
    let mut jited = BTreeMap::new();
    let mut ebpf = load();
    for name in PROGRAMS {
        let program = classifier(&mut ebpf, name);
        program.load().unwrap_or_else(|error| panic!("{name}: {error}"));
        jited.insert(name, program.info().expect("its information").size_jitted());
    }
    drop(ebpf);
    let mut ebpf = load();
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit of open files");
    // Standard input, output and errors are open, so the next free number is too high.
    setrlimit(Resource::RLIMIT_NOFILE, 3, most).expect("set the limit");
    let kernel = kernel();
    for name in PROGRAMS {
        let log = match classifier(&mut ebpf, name).load() {
            Err(ProgramError::LoadError { io_error, verifier_log })
                if io_error.raw_os_error() == Some(libc::EMFILE) =>
            {
                verifier_log.to_string()
            }
            other => panic!("{name}: {other:?}"),
        };
        let after = |words: &str| {
            let rest = log.split(words).nth(1).unwrap_or_else(|| panic!("no {words:?} in {log}"));
            rest.split_whitespace().next().expect("a figure").to_owned()
        };
        let (instructions, stack) = (after("processed "), after("stack depth "));
        let subprograms = stack.split('+').count() - 1;
        let jited = jited[name];
        println!(
            "\n{MARK}{kernel} {name} \
             {{instructions: {instructions}, stack: \"{stack}\", subprograms: {subprograms}, jited: {jited}}}"
        );
    }
}

/// The figures of this kernel.
fn measured() -> BTreeMap<String, Figures> {
    let me = std::env::current_exe().expect("this binary's path");
    let arguments = ["--exact", "verifier::measure", "--ignored", "--nocapture"];
    let output = Command::new(me).args(arguments).env(MEASURE, "yes").output().expect("start a measurement");
    let text = String::from_utf8_lossy(&output.stdout);
    // Its message about a failed test would be counted as a test.
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let prefix = format!("{MARK}{} ", kernel());
    let mut figures = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with(&prefix)) {
        println!("\n{line}");
        let (name, values) = line[prefix.len()..].split_once(' ').expect("a name and figures");
        figures.insert(name.to_owned(), serde_yaml::from_str(values).expect("figures"));
    }
    figures
}

/// Bytes of stack that a call chain may have.
const MOST_STACK: u32 = 512;
/// What Linux 6.1 rounds each frame up to (`check_max_stack_depth`). Later kernels round up to 16 where their JIT allows.
const FRAME_UNIT: u32 = 32;

/// The functions that each function of a program calls, in the order of their instructions, as the loader links them. A
/// function that is passed to a helper counts as called, as the verifier counts it.
fn calls(object: &[u8]) -> BTreeMap<String, Vec<Vec<usize>>> {
    const CALL: u8 = 0x85;
    const LOAD_64: u8 = 0x18;
    const PSEUDO_CALL: u8 = 1;
    const PSEUDO_FUNCTION: u8 = 4;
    let mut object = aya_obj::Object::parse(object).expect("an object");
    let sections = object.functions.keys().map(|(section, _)| *section).collect();
    object.relocate_calls(&sections).expect("linked functions");
    let of_program = |program: &aya_obj::Program| {
        let instructions = &object.functions[&program.function_key()].instructions;
        let target = |(place, one): (usize, &aya_obj::generated::bpf_insn)| {
            let is_call = (one.code, one.src_reg()) == (CALL, PSEUDO_CALL);
            let is_function = (one.code, one.src_reg()) == (LOAD_64, PSEUDO_FUNCTION);
            let target = i64::try_from(place).expect("few instructions") + 1 + i64::from(one.imm);
            (is_call || is_function).then(|| (place, usize::try_from(target).expect("an instruction")))
        };
        let calls: Vec<(usize, usize)> = instructions.iter().enumerate().filter_map(target).collect();
        let starts: BTreeSet<usize> = calls.iter().map(|(_, target)| *target).chain([0]).collect();
        let starts: Vec<usize> = starts.into_iter().collect();
        let function = |place: usize| starts.partition_point(|start| *start <= place) - 1;
        let mut called = vec![Vec::new(); starts.len()];
        calls.into_iter().for_each(|(place, target)| called[function(place)].push(function(target)));
        called
    };
    object.programs.iter().map(|(name, program)| (name.clone(), of_program(program))).collect()
}

/// The frames of the deepest call chain that begins with this function. `known` are those of functions done before.
fn deepest(function: usize, frames: &[u32], calls: &[Vec<usize>], known: &mut BTreeMap<usize, Vec<u32>>) -> Vec<u32> {
    if let Some(known) = known.get(&function) {
        return known.clone();
    }
    let own = frames[function].max(1).next_multiple_of(FRAME_UNIT);
    let below = calls[function].iter().map(|called| deepest(*called, frames, calls, known));
    let below = below.max_by_key(|chain| chain.iter().sum::<u32>()).unwrap_or_default();
    let chain = [vec![own], below].concat();
    known.insert(function, chain.clone());
    chain
}

/// A kernel of another version counts the same frames, so that this one tells what Linux 6.1 would refuse. That one itself has
/// judged already, and removes functions that a program never calls.
fn fits_into_the_stack_of_old_kernels(figures: &BTreeMap<String, Figures>) {
    if kernel() == "6.1" {
        return;
    }
    let calls = calls(object());
    for (name, figures) in figures {
        let frames: Vec<u32> =
            figures.stack.split('+').map(|bytes| bytes.parse().expect("a number of bytes")).collect();
        let calls = &calls[name];
        assert_eq!(frames.len(), calls.len(), "{name}: as many frames as functions");
        let chain = deepest(0, &frames, calls, &mut BTreeMap::new());
        let depth: u32 = chain.iter().sum();
        println!("{name}: the deepest call chain takes {depth} bytes of stack on Linux 6.1, by frames of {chain:?}");
        assert!(depth <= MOST_STACK, "{name}: Linux 6.1 refuses {depth} bytes of stack in one call chain");
    }
}

fn jump(now: u32, before: u32) -> bool {
    u64::from(now) * 100 > u64::from(before) * u64::from(100 + TOLERANCE)
}

/// Figures that exceed the record, one line each.
fn jumps(now: &BTreeMap<String, Figures>, before: &BTreeMap<String, Figures>) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, now) in now {
        let Some(before) = before.get(name) else {
            lines.push(format!("{name}: not on record"));
            continue;
        };
        if jump(now.instructions, before.instructions) {
            let (now, before) = (now.instructions, before.instructions);
            lines.push(format!("{name}: {now} verified instructions, {before} on record"));
        }
        if jump(now.stack_sum(), before.stack_sum()) {
            let sums = (now.stack_sum(), before.stack_sum());
            let (now, before) = (&now.stack, &before.stack);
            lines.push(format!("{name}: {} bytes of stack ({now}), {} on record ({before})", sums.0, sums.1));
        }
    }
    lines
}

#[test]
fn every_program_is_as_cheap_as_on_record() {
    on_stage(|_| {
        let (kernel, now) = (kernel(), measured());
        assert_eq!(now.len(), PROGRAMS.len(), "{now:?}");
        fits_into_the_stack_of_old_kernels(&now);
        let record = record();
        let Some(before) = record.get(&kernel) else {
            return println!("no figures of Linux {kernel} on record: nothing to compare with");
        };
        let jumps = jumps(&now, before);
        let advice = "if that is meant, `cargo xtask verifier --bless` records it";
        assert!(jumps.is_empty(), "more than {TOLERANCE} % over the record; {advice}:\n{}", jumps.join("\n"));
    });
}

#[test]
fn the_deepest_chain_counts_each_frame_as_linux_6_1_does() {
    let calls = [vec![1, 2], vec![3], vec![3], vec![]];
    let of = |frames: [u32; 4]| deepest(0, &frames, &calls, &mut BTreeMap::new());
    assert_eq!(of([0, 0, 0, 0]), [32, 32, 32]);
    assert_eq!(of([33, 8, 40, 240]), [64, 64, 256]);
    assert_eq!(of([33, 72, 40, 240]), [64, 96, 256]);
}

#[test]
fn a_jump_exceeds_the_tolerance() {
    let figures = |instructions, stack: &str| {
        let figures = Figures { instructions, stack: stack.to_owned(), subprograms: 1, jited: 1 };
        BTreeMap::from([("from_pod".to_owned(), figures)])
    };
    let before = figures(1000, "100+100");
    assert_eq!(jumps(&figures(1100, "200+20"), &before), [""; 0]);
    assert_eq!(jumps(&figures(900, "8"), &before), [""; 0]);
    assert_eq!(jumps(&figures(1101, "8"), &before).len(), 1);
    assert_eq!(jumps(&figures(9, "201+20"), &before).len(), 1);
    assert_eq!(jumps(&before, &BTreeMap::new()), ["from_pod: not on record"]);
}
