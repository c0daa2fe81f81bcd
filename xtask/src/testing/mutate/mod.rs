//! `cargo xtask mutate`: breaks the programs and the agent on purpose and shows which test notices.
//!
//! Per mutation of [`table`] and [`agent`]: the sources are copied (`copy`), one text is replaced, and tests run until the first
//! one fails (`trial`): those that the table names, then all. Mutations of the agent run its library's tests; mutations of the
//! programs build the object and run the tests on the kernel, after egress-common's own.
//!
//! A mutation that no test notices is a missing test. One that the verifier refuses is counted apart. The unchanged sources must
//! pass first.

mod agent;
mod copy;
mod record;
mod table;
mod trial;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::cargo_tests;
use super::part::Part;
use copy::Copy;
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{BuildArgs, Paths, Progress, build_object_of, ensure_built};
use table::{MutatedPart, Mutation};
use trial::TrialEnd;

/// The tests of what is broken may take so many times longer than of what is whole, and this.
const PATIENCE: u32 = 4;
const LEAST_PATIENCE: Duration = Duration::from_secs(120);

#[derive(Args, Debug)]
pub(crate) struct MutateArgs {
    /// Try only this mutation; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Break only this
    #[arg(long, value_name = "PART", conflicts_with = "only")]
    part: Option<MutatedPart>,
    /// Run only those tests whose name contains this: a quick look, and no proof that something survives
    #[arg(long)]
    filter: Option<String>,
    /// Ask only the tests that the table names, and not all of them where these pass
    #[arg(long, conflicts_with = "filter")]
    named_only: bool,
    /// Write what became of all mutations of a part to docs/mutations
    #[arg(long, conflicts_with_all = ["only", "filter", "named_only"])]
    record: bool,
    /// Print the mutations, try none
    #[arg(long)]
    list: bool,
    /// Never install a distribution package or a toolchain component: name what is missing and stop
    #[arg(long)]
    no_install: bool,
}

impl MutateArgs {
    fn chosen(&self) -> Result<Vec<&'static Mutation>> {
        if let Some(name) = self.only.iter().find(|name| !table::all().any(|mutation| mutation.name == **name)) {
            bail!("there is no mutation {name}; --list names them");
        }
        let is_chosen = |mutation: &&Mutation| {
            let is_named = self.only.is_empty() || self.only.iter().any(|name| name == mutation.name);
            is_named && self.part.is_none_or(|part| part == mutation.part())
        };
        Ok(table::all().filter(is_chosen).collect())
    }
}

/// What became of a mutation.
#[derive(Debug, PartialEq, Eq)]
enum MutationResult {
    /// By a test that the table names.
    Killed(String),
    /// By another test.
    KilledElsewhere(String),
    /// By a test of egress-common, which is asked before those on the kernel.
    KilledOnHost(String),
    /// The verifier takes no such program.
    Refused(String),
    /// The tests waited for ever.
    Stuck,
    Survived,
}

impl fmt::Display for MutationResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed(test) => write!(f, "killed by {test}"),
            Self::KilledElsewhere(test) => write!(f, "killed by {test}, which the table does not name"),
            Self::KilledOnHost(test) => write!(f, "killed by {test} (host)"),
            Self::Refused(test) => write!(f, "refused by the verifier, in {test}"),
            Self::Stuck => f.write_str("killed: the tests came to no end"),
            Self::Survived => f.write_str("SURVIVED"),
        }
    }
}

pub(crate) fn mutate(args: &MutateArgs) -> Result<ExitCode> {
    let chosen = args.chosen()?;
    if args.list {
        for mutation in chosen {
            println!("{:<42} {}: {}", mutation.name, mutation.file, mutation.why);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let trials = Trials::prepare(args, &chosen)?;
    let (mut results, count) = (Vec::new(), chosen.len());
    for (index, mutation) in chosen.into_iter().enumerate() {
        let start = Instant::now();
        let result = trials.try_out(mutation)?;
        trials.progress.step(&format!("{} of {count}: {}: {result}", index + 1, mutation.name));
        results.push((mutation, result, start.elapsed()));
    }
    trials.copy.restore()?;
    if args.record {
        record::write(&trials.paths, &results)?;
    }
    Ok(conclude(&results))
}

/// What all mutations share.
struct Trials {
    paths: Paths,
    copy: Copy,
    filter: Option<String>,
    /// All tests are asked where those of the table pass.
    second_look: bool,
    /// Where programs are broken.
    programs: Option<ProgramTrials>,
    /// How long the agent's tests may take.
    limit: Duration,
    no_install: bool,
    progress: Progress,
}

/// What mutations of the programs share.
struct ProgramTrials {
    /// The tests on the kernel.
    binary: PathBuf,
    /// The object of the sources as they are.
    whole: Vec<u8>,
    limit: Duration,
}

/// Nothing is broken yet.
const UNBROKEN: Duration = Duration::from_secs(3600);

impl Trials {
    /// Builds everything once and sees that the sources as they are pass.
    fn prepare(args: &MutateArgs, chosen: &[&Mutation]) -> Result<Self> {
        let (no_install, filter) = (args.no_install, args.filter.clone());
        // What none of the mutations asks for need not be green.
        let named = |part| -> Vec<&str> {
            let of_part = chosen.iter().filter(|mutation| mutation.part() == part);
            let tests: BTreeSet<&str> = match &args.filter {
                Some(filter) => of_part.map(|_| filter.as_str()).collect(),
                None => of_part.flat_map(|mutation| mutation.tests.iter().copied()).collect(),
            };
            tests.into_iter().collect()
        };
        let (of_programs, of_agent) = (named(MutatedPart::Programs), named(MutatedPart::Agent));
        let (paths, progress) = (Paths::find()?, Progress::start());
        let copy = Copy::of(&paths);
        let second_look = filter.is_none() && !args.named_only;
        let mut trials =
            Self { filter, second_look, programs: None, limit: UNBROKEN, no_install, paths, copy, progress };
        trials.copy.restore()?;
        if !of_programs.is_empty() {
            trials.programs = Some(trials.prepare_programs(&of_programs)?);
        }
        if !of_agent.is_empty() {
            let start = Instant::now();
            trials.is_green("the agent", trial::of_agent(&trials.copy.paths, &of_agent, UNBROKEN)?)?;
            trials.limit = patience(start.elapsed());
        }
        Ok(trials)
    }

    fn prepare_programs(&self, named: &[&str]) -> Result<ProgramTrials> {
        if let Some(reason) = Part::Program.hindrance() {
            bail!("the tests on the kernel cannot run here: {reason}");
        }
        packages::ensure(Purpose::Programs, !self.no_install)?;
        ensure_built(&BuildArgs { no_install: self.no_install, ..BuildArgs::default() }, &self.progress)?;
        let binaries = cargo_tests::binaries(&cargo_tests::named("kernel_programs"), &self.paths)?;
        let [binary] = binaries.as_slice() else { bail!("cargo built {} test programs, not one", binaries.len()) };
        let object = build_object_of(&self.copy.paths, self.no_install, &self.progress)?;
        let start = Instant::now();
        self.is_green("the programs", trial::on_kernel(binary, &object, named, &self.paths, UNBROKEN)?)?;
        self.is_green("egress-common", trial::on_host(&self.copy.paths, UNBROKEN)?)?;
        Ok(ProgramTrials { binary: binary.clone(), whole: read(&object)?, limit: patience(start.elapsed()) })
    }

    fn is_green(&self, what: &str, end: TrialEnd) -> Result<()> {
        match end {
            TrialEnd::Green(passed) => self.progress.step(&format!("nothing of {what} is broken: {passed} tests pass")),
            other => bail!("the tests of {what} do not pass without a mutation either: {other:?}"),
        }
        Ok(())
    }

    /// The tests to ask, one list after the other: none means all.
    fn looks<'a>(&'a self, mutation: &'a Mutation) -> Vec<Vec<&'a str>> {
        let named = self.filter.as_deref().map_or_else(|| mutation.tests.to_vec(), |filter| vec![filter]);
        if self.second_look { vec![named, Vec::new()] } else { vec![named] }
    }

    fn try_out(&self, mutation: &Mutation) -> Result<MutationResult> {
        self.copy.restore()?;
        self.copy.apply(mutation)?;
        match (mutation.part(), &self.programs) {
            (MutatedPart::Agent, _) => {
                self.ask(mutation, |tests| trial::of_agent(&self.copy.paths, tests, self.limit)).with_context(|| {
                    let errors = self.copy.paths.target.join("errors");
                    format!("the mutation {}: see {}", mutation.name, errors.display())
                })
            }
            (MutatedPart::Programs, Some(programs)) => self.try_programs(mutation, programs),
            (MutatedPart::Programs, None) => bail!("{} was not prepared for", mutation.name),
        }
    }

    fn try_programs(&self, mutation: &Mutation, programs: &ProgramTrials) -> Result<MutationResult> {
        if mutation.is_pure() {
            match trial::on_host(&self.copy.paths, programs.limit)? {
                TrialEnd::Red(test) | TrialEnd::Refused(test) => return Ok(MutationResult::KilledOnHost(test)),
                TrialEnd::Stuck => return Ok(MutationResult::Stuck),
                TrialEnd::Green(_) => {}
            }
        }
        let object = build_object_of(&self.copy.paths, self.no_install, &self.progress)
            .with_context(|| format!("the mutation {} does not build", mutation.name))?;
        if read(&object)? == programs.whole {
            return Ok(MutationResult::Survived);
        }
        let ProgramTrials { binary, limit, .. } = programs;
        self.ask(mutation, |tests| trial::on_kernel(binary, &object, tests, &self.paths, *limit))
    }

    fn ask(&self, mutation: &Mutation, run: impl Fn(&[&str]) -> Result<TrialEnd>) -> Result<MutationResult> {
        for (index, tests) in self.looks(mutation).iter().enumerate() {
            match run(tests)? {
                TrialEnd::Red(test) if index == 0 => return Ok(MutationResult::Killed(test)),
                TrialEnd::Red(test) => return Ok(MutationResult::KilledElsewhere(test)),
                TrialEnd::Refused(test) => return Ok(MutationResult::Refused(test)),
                TrialEnd::Stuck => return Ok(MutationResult::Stuck),
                TrialEnd::Green(_) => {}
            }
        }
        Ok(MutationResult::Survived)
    }
}

fn patience(whole: Duration) -> Duration {
    whole.max(LEAST_PATIENCE) * PATIENCE
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Prints everything and returns the exit code.
fn conclude(results: &[(&'static Mutation, MutationResult, Duration)]) -> ExitCode {
    println!("\n{:<42} {:>7}  what became of it", "mutation", "seconds");
    for (mutation, result, elapsed) in results {
        println!("{:<42} {:>7.1}  {result}", mutation.name, elapsed.as_secs_f64());
    }
    println!();
    for (mutation, _, _) in results.iter().filter(|(_, result, _)| *result == MutationResult::Survived) {
        println!("no test notices {} ({}): {}", mutation.name, mutation.file, mutation.why);
    }
    let survived = count(results, |result| *result == MutationResult::Survived);
    let refused = count(results, |result| matches!(result, MutationResult::Refused(_)));
    let killed = results.len() - survived - refused;
    println!("{killed} killed, {refused} refused by the verifier, {survived} survived");
    if survived == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn count<'a>(
    results: impl IntoIterator<Item = &'a (&'static Mutation, MutationResult, Duration)>,
    which: impl Fn(&MutationResult) -> bool,
) -> usize {
    results.into_iter().filter(|(_, result, _)| which(result)).count()
}
