//! Cost of each program in the verifier, against the record for this kernel (egress-ebpf/verifier.yaml).
//!
//! The kernel refuses a million instructions, and 512 bytes of stack in a call chain, and loading is slow long before
//! that. Both jump when a small change loses verifier state. `cargo xtask verifier --bless` writes the record.
//!
//! The stack depth is only in the verifier's log, which the loader returns only for a refused program. So a separate
//! process (`measure`) leaves no free file descriptor: the kernel verifies the program, writes its log, and fails at
//! the end with EMFILE.

use std::collections::BTreeMap;
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

fn load() -> Ebpf {
    let object = egress_datapath::object::embedded().expect("an embedded object");
    EbpfLoader::new().verifier_log_level(VerifierLogLevel::STATS).load(object).expect("load the maps")
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
