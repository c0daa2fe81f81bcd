//! `cargo xtask mutate`: breaks the programs on purpose and shows which test notices.
//!
//! Per mutation of [`table`]: the sources are copied (`copy`; the clone is only read), one text is replaced, and tests run
//! until the first one fails (`trial`). Of egress-common these are its own tests on the host, first. Else, and where they
//! pass, the object is built, and the tests on the kernel that the table names run against it; the test binary is the
//! ordinary one, told where the object is. Where these pass too, all tests on the kernel have their say.
//!
//! A mutation that no test notices is a missing test; one that the verifier refuses would never have been loaded, so it
//! shows nothing of the tests and is counted apart. Before all that the sources as they are must be green, or a failure
//! would mean nothing.

mod copy;
mod table;
mod trial;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::cargo_tests;
use super::part::Part;
use crate::toolchain::packages::{self, Purpose};
use crate::toolchain::{BuildArgs, Paths, Progress, build_object_of, ensure_built};
use copy::Copy;
use table::Mutation;
use trial::End;

/// The tests against a broken object may take so many times longer than against a whole one, and this.
const PATIENCE: u32 = 4;
const LEAST_PATIENCE: Duration = Duration::from_secs(120);

#[derive(Args, Debug)]
pub(crate) struct MutateArgs {
    /// Try only this mutation; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Run only those tests on the kernel whose name contains this: a quick look, and no proof that something survives
    #[arg(long)]
    filter: Option<String>,
    /// Ask only the tests on the kernel that the table names, and not all of them where these pass
    #[arg(long, conflicts_with = "filter")]
    named_only: bool,
    /// Print the mutations, try none
    #[arg(long)]
    list: bool,
    /// Never install a distribution package or a toolchain component: name what is missing and stop
    #[arg(long)]
    no_install: bool,
}

impl MutateArgs {
    fn chosen(&self) -> Result<Vec<&'static Mutation>> {
        if let Some(name) = self.only.iter().find(|name| !table::ALL.iter().any(|mutation| mutation.name == **name)) {
            bail!("there is no mutation {name}; --list names them");
        }
        let is_chosen =
            |mutation: &&Mutation| self.only.is_empty() || self.only.iter().any(|name| name == mutation.name);
        Ok(table::ALL.iter().filter(is_chosen).collect())
    }
}

/// What became of a mutation.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// By a test on the kernel.
    Killed(String),
    /// By a test on the kernel that the table does not name.
    KilledElsewhere(String),
    /// By a test of egress-common.
    KilledOnHost(String),
    Refused(String),
    /// The tests on the kernel waited for ever.
    Stuck,
    Survived,
}

impl fmt::Display for Fate {
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
    if let Some(reason) = Part::Program.hindrance() {
        bail!("the tests on the kernel cannot run here: {reason}");
    }
    packages::ensure(Purpose::Programs, !args.no_install)?;
    let ground = Ground::prepare(args, &chosen)?;
    let (mut results, count) = (Vec::new(), chosen.len());
    for (index, mutation) in chosen.into_iter().enumerate() {
        let start = Instant::now();
        let fate = ground.try_out(mutation)?;
        ground.progress.step(&format!("{} of {count}: {}: {fate}", index + 1, mutation.name));
        results.push((mutation, fate, start.elapsed()));
    }
    ground.copy.restore()?;
    Ok(conclude(&results))
}

/// What all mutations share.
struct Ground {
    paths: Paths,
    copy: Copy,
    /// The tests on the kernel.
    binary: PathBuf,
    filter: Option<String>,
    /// All tests on the kernel are asked where those of the table pass.
    second_look: bool,
    /// The object of the sources as they are.
    whole: Vec<u8>,
    limit: Duration,
    no_install: bool,
    progress: Progress,
}

impl Ground {
    /// Builds everything once and sees that the sources as they are pass.
    fn prepare(args: &MutateArgs, chosen: &[&Mutation]) -> Result<Self> {
        let (no_install, filter) = (args.no_install, args.filter.clone());
        // What none of the mutations asks for need not be green.
        let mut named: Vec<&str> = match &filter {
            Some(filter) => vec![filter],
            None => chosen.iter().flat_map(|mutation| mutation.tests.iter().copied()).collect(),
        };
        named.sort_unstable();
        named.dedup();
        let (paths, progress) = (Paths::find()?, Progress::start());
        ensure_built(&BuildArgs { no_install, ..BuildArgs::default() }, &progress)?;
        let binaries = cargo_tests::binaries(&cargo_tests::named("kernel_programs"), &paths)?;
        let [binary] = binaries.as_slice() else { bail!("cargo built {} test programs, not one", binaries.len()) };
        let copy = Copy::of(&paths);
        copy.restore()?;
        let object = build_object_of(&copy.paths, no_install, &progress)?;
        let start = Instant::now();
        for end in [
            trial::on_kernel(binary, &object, &named, &paths, Duration::from_secs(3600))?,
            trial::on_host(&copy.paths, Duration::from_secs(3600))?,
        ] {
            match end {
                End::Green(passed) => progress.step(&format!("nothing broken: {passed} tests pass")),
                other => bail!("the tests do not pass without a mutation either: {other:?}"),
            }
        }
        let limit = start.elapsed().max(LEAST_PATIENCE) * PATIENCE;
        let whole = read(&object)?;
        let second_look = filter.is_none() && !args.named_only;
        Ok(Self { binary: binary.clone(), filter, second_look, whole, limit, no_install, paths, copy, progress })
    }

    fn try_out(&self, mutation: &Mutation) -> Result<Fate> {
        self.copy.restore()?;
        self.copy.apply(mutation)?;
        if mutation.is_pure() {
            match trial::on_host(&self.copy.paths, self.limit)? {
                End::Red(test) | End::Refused(test) => return Ok(Fate::KilledOnHost(test)),
                End::Stuck => return Ok(Fate::Stuck),
                End::Green(_) => {}
            }
        }
        let object = build_object_of(&self.copy.paths, self.no_install, &self.progress)
            .with_context(|| format!("the mutation {} does not build", mutation.name))?;
        if read(&object)? == self.whole {
            return Ok(Fate::Survived);
        }
        let named = self.filter.as_deref().map_or_else(|| mutation.tests.to_vec(), |filter| vec![filter]);
        let looks = if self.second_look { vec![named, Vec::new()] } else { vec![named] };
        for (index, tests) in looks.iter().enumerate() {
            match trial::on_kernel(&self.binary, &object, tests, &self.paths, self.limit)? {
                End::Red(test) if index == 0 => return Ok(Fate::Killed(test)),
                End::Red(test) => return Ok(Fate::KilledElsewhere(test)),
                End::Refused(test) => return Ok(Fate::Refused(test)),
                End::Stuck => return Ok(Fate::Stuck),
                End::Green(_) => {}
            }
        }
        Ok(Fate::Survived)
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Prints everything and says how the process should end.
fn conclude(results: &[(&Mutation, Fate, Duration)]) -> ExitCode {
    println!("\n{:<42} {:>7}  what became of it", "mutation", "seconds");
    for (mutation, fate, elapsed) in results {
        println!("{:<42} {:>7.1}  {fate}", mutation.name, elapsed.as_secs_f64());
    }
    println!();
    for (mutation, _, _) in results.iter().filter(|(_, fate, _)| *fate == Fate::Survived) {
        println!("no test notices {} ({}): {}", mutation.name, mutation.file, mutation.why);
    }
    let survived = count(results, |fate| *fate == Fate::Survived);
    let refused = count(results, |fate| matches!(fate, Fate::Refused(_)));
    let killed = results.len() - survived - refused;
    println!("{killed} killed, {refused} refused by the verifier, {survived} survived");
    if survived == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn count(results: &[(&Mutation, Fate, Duration)], which: impl Fn(&Fate) -> bool) -> usize {
    results.iter().filter(|(_, fate, _)| which(fate)).count()
}
