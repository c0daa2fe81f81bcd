//! `cargo xtask test --kernel VERSION`: the parts `program` and `lab` on another kernel, in a virtual machine.
//!
//! The guest has its root in memory. Tests on the lab find there what the clone has: the agent, and `deploy`.
//!
//! Outside: `image` unpacks the distribution's kernel, `archive` packs the guest's root (programs of this machine, test binaries,
//! the `plan` of tests), `qemu` runs it, and `watch` counts results and ends a guest that dies or hangs. Inside: `guest` is the
//! first process, `suite` runs each test in a process of its own, `pace` scales time limits by the guest's speed.
//!
//! A guest of another architecture (`--arch`) has test binaries that are cross-compiled, and `programs` from packages.
//!
//! Only programs that tests call (`ip`, `tc`, ...) are installed, and nothing else needs root. Without KVM the guest is emulated.

mod archive;
mod guest;
mod image;
mod line;
mod pace;
mod plan;
mod programs;
mod qemu;
mod suite;
mod watch;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::cargo_tests::{self, DATAPLANE, FILTERS, SAME_BY_FILTERS};
use super::summary::{PartOutcome, Summary};
use archive::Archive;
use egress_lab::topology::builder::{GROUND, Ground};
use egress_toolchain::ovn::{self, OvnPrograms};
use egress_toolchain::packages::{self, Purpose};
use egress_toolchain::{
    Arch, BuildArgs, Built, Paths, Progress, cargo_for, ensure_built, ensure_built_for, output, run as run_command,
};
pub(crate) use guest::run as run_guest;
use image::KernelImage;
use plan::{KernelPlan, MODULES, PLAN, PROGRAMS, Suite, TARGET};
use programs::GuestPrograms;
use qemu::{Accelerator, CPUS, Qemu};
use watch::SilenceLimits;

/// Read by `egress-agent/tests/kernel_programs/slow_guest.rs`: of what a test repeats, one in so many is enough in a guest.
const THINNED: (&str, &str) = ("EGRESS_TEST_THINNED", "15");

/// In every kernel with TCX links.
const TCX_SYMBOL: &str = "tcx_prog_attach";

/// Programs of this machine that tests call.
const CALLED: [&str; 6] = ["ip", "tc", "ss", "nft", "bpftool", "ping"];
/// The tests of the CNI plugin, and the plugin.
const ROUTER_TESTS: &str = "kernel_router";
const ROUTER: &str = "egress-router";
/// The distribution's plugins that they call before it are in one folder, and where they look for them.
const IPAM: &str = "host-local";
const PLUGINS: &str = "/usr/lib/cni";
/// The same on the lab.
const CALLED_ON_LAB: [&str; 2] = ["ethtool", "setpriv"];
/// Agents and controllers read it. With the default of one second, slow nodes count as unreachable.
const SLOW_NODES: (&str, &str) = ("EGRESS_AGENT_EGRESSIP_REACHABILITY_TOTAL_TIMEOUT", "10");
/// A client of the API server does not start without any.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// A busy machine is slow; one that hangs prints nothing. The guest names what it runs every minute.
const LIMITS: SilenceLimits = SilenceLimits { boot: Duration::from_secs(600), silence: Duration::from_secs(600) };
/// KVM that works brings a guest up in seconds.
const KVM_LIMITS: SilenceLimits = SilenceLimits { boot: Duration::from_secs(20), ..LIMITS };

/// What to run on each kernel.
#[derive(Debug)]
pub(super) struct SuiteRequest {
    /// Of the guests.
    pub(super) arch: Arch,
    /// Arguments of cargo that choose the test binaries.
    pub(super) targets: Vec<String>,
    /// Arguments of the test binaries.
    pub(super) arguments: Vec<String>,
    /// Tests on the lab, by name.
    pub(super) on_lab: Vec<String>,
    pub(super) ground: Ground,
    pub(super) no_install: bool,
}

/// Runs the tests on each kernel, counts them and returns the guests' output.
pub(super) fn run(versions: &[String], request: &SuiteRequest, summary: &mut Summary) -> Result<Vec<String>> {
    let no_install = request.no_install;
    let progress = Progress::start();
    let paths = Paths::find()?;
    packages::ensure(Purpose::Guest, !no_install)?;
    if !request.on_lab.is_empty() {
        packages::ensure(Purpose::Lab, !no_install)?;
    }
    if request.ground.is_ovn() && request.arch != Arch::own() {
        bail!("OVN runs in a guest of this machine's architecture alone");
    }
    let ovn = request.ground.is_ovn().then(|| ovn::ensure(&paths, &progress)).transpose()?;
    let arch = request.arch;
    let qemu = Qemu::ensure(&paths, arch, &progress)?;
    let programs = GuestPrograms::ensure(&paths, arch, &progress)?;
    let images = versions.iter().map(|version| image::ensure(&paths, (version, arch), &progress));
    let images = images.collect::<Result<Vec<KernelImage>>>()?;
    progress.step("the eBPF object and the tests");
    let (built, init) = match arch == Arch::own() {
        true => (ensure_built(&BuildArgs { no_install, ..BuildArgs::default() }, &progress)?, "/proc/self/exe".into()),
        false => foreign(&paths, request, &progress)?,
    };
    let mut tests = match &request.targets[..] {
        [] => Vec::new(),
        targets => guest_tests(targets, request, &paths, &progress)?,
    };
    // The dear ones last, whatever cargo's order.
    tests.sort_by_key(|test| test.name == DATAPLANE);
    let lines = RefCell::new(Vec::new());
    for (version, image) in versions.iter().zip(&images) {
        let start = Instant::now();
        let mut outcome = PartOutcome::new(version);
        let bench = KernelRun {
            ovn: ovn.as_ref(),
            paths: &paths,
            built: &built,
            init: &init,
            programs: &programs,
            qemu: &qemu,
            progress: &progress,
            version: &image::guest_name(version, arch),
            image,
            lines: &lines,
        };
        if let Err(error) = bench.test(&tests, request, &mut outcome) {
            outcome.fail(&format!("{error:#}"));
        }
        outcome.elapsed = start.elapsed();
        summary.add(outcome);
    }
    Ok(lines.into_inner())
}

/// The agent, the router and this program, built for the guests.
fn foreign(paths: &Paths, request: &SuiteRequest, progress: &Progress) -> Result<(Built, PathBuf)> {
    let (arch, install) = (request.arch, !request.no_install);
    let built = ensure_built_for(arch, request.no_install, progress)?;
    let mut cargo = cargo_for(paths, arch, install, progress)?;
    cargo.args(["build", "--package", "xtask", "--target", arch.target()]).current_dir(&paths.root);
    run_command(&mut cargo).context("build the guest's first process")?;
    let init = built.agent.with_file_name("xtask");
    Ok((built, init))
}

/// A test binary for the guest, and this machine's of the same source, which lists its tests.
struct GuestTest {
    name: String,
    listing: PathBuf,
    program: PathBuf,
}

fn guest_tests(
    targets: &[String],
    request: &SuiteRequest,
    paths: &Paths,
    progress: &Progress,
) -> Result<Vec<GuestTest>> {
    let here = cargo_tests::binaries(targets, paths)?;
    let named = |program: PathBuf| Ok((name_of(&program)?, program));
    let here = here.into_iter().map(named).collect::<Result<Vec<_>>>()?;
    if request.arch == Arch::own() {
        return Ok(here
            .into_iter()
            .map(|(name, program)| GuestTest { name, listing: program.clone(), program })
            .collect());
    }
    let cargo = cargo_for(paths, request.arch, !request.no_install, progress)?;
    let built = cargo_tests::binaries_for(cargo, request.arch.target(), targets, paths)?;
    let mut built = built.into_iter().map(named).collect::<Result<BTreeMap<_, _>>>()?;
    // The distribution's plugins that it calls are of this machine.
    let wanted = here.into_iter().filter(|(name, _)| name != ROUTER_TESTS);
    let pair = |(name, listing)| {
        let program = built.remove(&name).with_context(|| format!("cargo built no {name} for the guest"))?;
        Ok(GuestTest { name, listing, program })
    };
    wanted.map(pair).collect()
}

/// One kernel and what runs it.
struct KernelRun<'a> {
    /// For tests on this ground.
    ovn: Option<&'a OvnPrograms>,
    paths: &'a Paths,
    built: &'a Built,
    /// This program, for the guest.
    init: &'a Path,
    programs: &'a GuestPrograms,
    qemu: &'a Qemu,
    progress: &'a Progress,
    version: &'a str,
    image: &'a KernelImage,
    /// The guests' output.
    lines: &'a RefCell<Vec<String>>,
}

impl KernelRun<'_> {
    fn test(&self, tests: &[GuestTest], request: &SuiteRequest, outcome: &mut PartOutcome) -> Result<()> {
        let root = self.paths.kernels().join(format!("root-{}.cpio", self.version));
        self.progress.step(&format!("{}: packing the guest's root", self.version));
        self.pack(&root, tests, request)?;
        for accelerator in self.accelerators() {
            if self.boot(accelerator, &root, outcome)? {
                return Ok(());
            }
        }
        watch::show_end(&self.console());
        bail!("the guest did not come up; its console is {}", self.console().display());
    }

    fn console(&self) -> PathBuf {
        self.paths.kernels().join(format!("console-{}.log", self.version))
    }

    fn pack(&self, root: &Path, tests: &[GuestTest], request: &SuiteRequest) -> Result<()> {
        let arguments = &request.arguments[..];
        let mut archive = Archive::create(root)?;
        for folder in ["/dev", "/proc", "/sys", "/run", "/tmp"] {
            archive.folder(folder)?;
        }
        // A copy: other programs are asked about it, and cargo may replace the file that we were started from.
        let (programs, init) = (self.programs, root.with_extension("init"));
        fs::copy(self.init, &init).with_context(|| format!("copy this program to {}", init.display()))?;
        archive.program(programs, "/init", &init)?;
        called(&mut archive, programs, &CALLED)?;
        let (host_pace, _) = pace::measure("ip")?;
        let mut plan = KernelPlan { modules: Vec::new(), suites: Vec::new(), host_pace };
        for (name, bytes) in self.image.modules(self.ovn.is_some())? {
            archive.data(&format!("{MODULES}/{name}"), &bytes)?;
            plan.modules.push(name);
        }
        for test in tests {
            let GuestTest { name, listing, program: test } = test;
            let program = format!("/tests/{name}");
            archive.program(programs, &program, test)?;
            // It calls the program that cargo has made beside it, where cargo has made it.
            if let (ROUTER_TESTS, Some(folder)) = (name.as_str(), test.parent().and_then(Path::parent)) {
                let router = folder.join(ROUTER);
                archive.program(programs, &router.to_string_lossy(), &router)?;
                // iproute2 has a `bridge` too.
                let ipam = packages::find(IPAM).with_context(|| format!("there is no {IPAM}"))?;
                for plugin in [ipam.with_file_name("bridge"), ipam] {
                    let name = plugin.file_name().context("a plugin without a name")?;
                    archive.program(programs, &format!("{PLUGINS}/{}", name.to_string_lossy()), &plugin)?;
                }
            }
            // Who names the binary wants all of its tests.
            let is_whole = matches!(arguments, [filter] if name.contains(filter.as_str()));
            let tests = listed(listing, if is_whole { &[] } else { arguments })?;
            plan.suites.extend(suites(name, &program, &tests, arguments));
        }
        if !request.on_lab.is_empty() {
            called(&mut archive, programs, &CALLED_ON_LAB)?;
            let there = Built::expected(&Paths { target: PathBuf::from(TARGET), ..self.paths.clone() }, false);
            archive.program(programs, &there.agent.to_string_lossy(), &self.built.agent)?;
            archive.program(programs, &there.router.to_string_lossy(), &self.built.router)?;
            archive.tree(&self.paths.root.join("deploy"))?;
            archive.file(Path::new(AUTHORITIES))?;
            if let Some(ovn) = self.ovn {
                for file in ovn.files()? {
                    let inside =
                        file.strip_prefix(&self.paths.target).context("OVN is outside of the target folder")?;
                    archive.copy(&Path::new(TARGET).join(inside), &file)?;
                }
            }
            plan.suites.push(suite_on_lab(&request.on_lab, request.ground));
        }
        archive.data(PLAN, &serde_json::to_vec(&plan).context("write the guest's plan")?)?;
        archive.finish()
    }

    /// What to try, in this order. That KVM is there and does not work is remembered: trying takes its time.
    fn accelerators(&self) -> Vec<Accelerator> {
        let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        // KVM runs this machine's architecture.
        let kvm = kvm && self.qemu.is_native();
        let first = (kvm && !self.no_kvm().exists()).then_some(Accelerator::Kvm);
        first.into_iter().chain([Accelerator::Tcg]).collect()
    }

    fn no_kvm(&self) -> PathBuf {
        self.paths.kernels().join("kvm-does-not-work")
    }

    /// Runs the guest; whether it came up.
    fn boot(&self, accelerator: Accelerator, root: &Path, outcome: &mut PartOutcome) -> Result<bool> {
        let (version, console) = (self.version, self.console());
        self.progress.step(&format!("{version}: booting {} ({accelerator:?})", self.image.release));
        let machine = self.qemu.machine(accelerator, &self.image.vmlinuz, root, &console);
        let limits = if accelerator == Accelerator::Kvm { KVM_LIMITS } else { LIMITS };
        let state =
            watch::watch(machine, &console, limits, outcome, |line, far| match line.strip_prefix(watch::OURS) {
                Some(text) => {
                    let far = far.as_ref().map_or(String::new(), |far| format!("{far} "));
                    self.progress.step(&format!("{version}: {far}{text}"));
                }
                None => {
                    println!("{line}");
                    self.lines.borrow_mut().push(line.to_owned());
                }
            })?;
        if state.release.is_none() && accelerator == Accelerator::Kvm {
            let note = self.no_kvm();
            self.progress.step(&format!("KVM does not work here (remove {} to try again)", note.display()));
            fs::write(&note, "").with_context(|| format!("write {}", note.display()))?;
        }
        Ok(state.release.is_some())
    }
}

fn called(archive: &mut Archive, programs: &GuestPrograms, names: &[&str]) -> Result<()> {
    for name in names {
        archive.program(programs, &format!("{PROGRAMS}/{name}"), &programs.find(name)?)?;
    }
    Ok(())
}

/// The test's name, from the file that cargo made: `NAME-HASH`.
fn name_of(test: &Path) -> Result<String> {
    let file = test.file_name().context("a test binary without a name")?.to_string_lossy();
    Ok(file.rsplit_once('-').map_or(file.as_ref(), |(name, _)| name).to_owned())
}

/// The names of the binary's tests that these arguments choose.
fn listed(test: &Path, arguments: &[String]) -> Result<Vec<String>> {
    let text = output(Command::new(test).args(arguments).arg("--list"))?;
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// How a test binary is run: as the kernel offers, and where that is TCX, by filters too. Not at all where none of its
/// tests is wanted.
fn suites(name: &str, program: &str, tests: &[String], arguments: &[String]) -> Vec<Suite> {
    let environment = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    if tests.is_empty() {
        return Vec::new();
    }
    let suite = Suite {
        name: name.to_owned(),
        program: program.to_owned(),
        before: Vec::new(),
        after: ["--exact", "--nocapture", "--test-threads=1"].map(str::to_owned).to_vec(),
        tests: tests.to_vec(),
        at_once: CPUS,
        environment: vec![environment(THINNED)],
        needs_symbol: None,
        is_shown: arguments.iter().any(|argument| argument == "--nocapture"),
    };
    if name != DATAPLANE {
        return vec![suite];
    }
    let mut by_filters = tests.to_vec();
    by_filters.retain(|test| !SAME_BY_FILTERS.iter().any(|same| test.starts_with(same)));
    let filters = Suite {
        name: format!("{name}/clsact"),
        tests: by_filters,
        environment: [suite.environment.as_slice(), &[environment(FILTERS)]].concat(),
        needs_symbol: Some(TCX_SYMBOL.to_owned()),
        ..suite.clone()
    };
    [suite, filters].into_iter().filter(|suite| !suite.tests.is_empty()).collect()
}

/// Of tests on the lab, which are run by this program. Each starts several agents, so none is run beside another.
fn suite_on_lab(tests: &[String], ground: Ground) -> Suite {
    Suite {
        name: "lab".to_owned(),
        program: "/init".to_owned(),
        before: ["test", "--lab-one"].map(str::to_owned).to_vec(),
        after: Vec::new(),
        tests: tests.to_vec(),
        at_once: 1,
        environment: [("CARGO_TARGET_DIR", TARGET), (GROUND, &ground.to_string()), SLOW_NODES]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
        needs_symbol: None,
        // What is measured is worth reading.
        is_shown: tests.iter().any(|test| test.starts_with("bench_")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_plane_is_run_with_filters_too() {
        let tests = ["a::b".to_owned()];
        let names =
            |name: &str| suites(name, "/x", &tests, &[]).into_iter().map(|suite| suite.name).collect::<Vec<_>>();
        assert_eq!(names("kernel_programs"), ["kernel_programs"]);
        assert_eq!(names(DATAPLANE), ["kernel_dataplane", "kernel_dataplane/clsact"]);
        assert!(suites(DATAPLANE, "/x", &[], &[]).is_empty(), "none of its tests is wanted");
        let tests = ["announce::a".to_owned(), "a::b".to_owned()];
        let [all, by_filters] = &suites(DATAPLANE, "/x", &tests, &[])[..] else { panic!("by links and by filters") };
        assert_eq!((&all.tests[..], &by_filters.tests[..]), (&tests[..], &tests[1..]), "what is the same by both");
    }

    #[test]
    fn a_test_is_named_without_cargos_hash() {
        assert_eq!(name_of(Path::new("/t/kernel_programs-0123456789abcdef")).expect("a name"), "kernel_programs");
    }
}
