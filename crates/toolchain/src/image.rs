//! `cargo xtask image`: two static binaries on an empty base, as an OCI image.
//!
//! The binaries are built for musl, for this machine's architecture or another one (`cross`). `umoci`, from the distribution's
//! packages, makes the image; no engine runs and no registry is asked. There are two forms of it below `target/image`: an OCI
//! layout (`oci`, for `skopeo copy`), and the same in one file (for `ctr images import`, `podman load` and
//! `kind load image-archive`).
//!
//! There are no certificates in it: the API server's authority comes with the service account or the kubeconfig, that of
//! health checks with a flag.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use super::arch::Arch;
use super::archive::archive;
use super::binaries::{self, AGENT, PLUGIN, ROUTER};
use super::command::{Progress, output, run};
use super::cross::cargo_for;
use super::packages::{self, Purpose};
use super::{BuildArgs, Paths, ensure_object};

#[derive(Args, Clone, Debug)]
pub struct ImageArgs {
    /// Build the binaries without optimisations: quicker, for trying the image
    #[arg(long)]
    dev: bool,
    /// Architecture of the nodes, if not this machine's: the binaries are cross-compiled
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Never install a distribution package or a toolchain component: name what is missing and stop
    #[arg(long)]
    no_install: bool,
}

/// The name that people give it; a registry goes before it.
const NAME: &str = "egress-agent";
/// How the manifests name the image where no registry goes before it.
const LOCAL: &str = "localhost";
/// Also the tag.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Where the agent is in the image.
pub const BINARY: &str = "/usr/bin/egress-agent";
/// Mount points of the DaemonSet, and what every runtime mounts: the root is read-only.
const FOLDERS: [&str; 7] = ["bpf", "dev", "etc/egress-agent", "proc", "run/egress-agent", "sys", "usr/bin"];

/// The result of `cargo xtask image`.
pub struct Image {
    folder: PathBuf,
    arch: Arch,
}

impl Image {
    /// Of this machine's architecture.
    pub fn expected(paths: &Paths) -> Self {
        Self::expected_for(paths, Arch::own())
    }

    pub fn expected_for(paths: &Paths, arch: Arch) -> Self {
        let name = if arch == Arch::own() { "image".to_owned() } else { format!("image-{arch}") };
        Self { folder: paths.target.join(name), arch }
    }

    pub fn at(folder: PathBuf) -> Self {
        Self::in_folder(folder, Arch::own())
    }

    pub fn in_folder(folder: PathBuf, arch: Arch) -> Self {
        Self { folder, arch }
    }

    pub fn exists(&self) -> bool {
        self.layout().join("index.json").exists()
    }

    fn layout(&self) -> PathBuf {
        self.folder.join("oci")
    }

    pub fn archive(&self) -> PathBuf {
        self.folder.join(format!("{NAME}-{VERSION}-{}.tar", self.arch))
    }

    /// As umoci names it.
    fn reference(&self) -> String {
        format!("{}:{VERSION}", self.layout().display())
    }

    /// The layout in one file, by the name that the kubelet will ask for. `umoci` notes the tag alone, which is right for a
    /// layout; containerd makes a name of its own of such an archive, and then nothing finds the image.
    fn pack(&self) -> Result<()> {
        self.pack_into(&self.archive(), &format!("{LOCAL}/{NAME}:{VERSION}"))
    }

    pub fn pack_into(&self, file: &Path, name: &str) -> Result<()> {
        let index = fs::read_to_string(self.layout().join("index.json"))?;
        let named = self.folder.join("named");
        fs::create_dir_all(&named)?;
        fs::write(named.join("index.json"), with_name(&index, name)?)?;
        let mut tar = archive(file, 0);
        tar.arg("-C").arg(self.layout()).args(["oci-layout", "blobs"]);
        run(tar.arg("-C").arg(&named).arg("index.json"))?;
        Ok(fs::remove_dir_all(&named)?)
    }

    /// Makes an image of a root file system, with these options of `umoci config`. Its files and itself are of this time, in seconds
    /// since 1970.
    pub fn assemble(&self, root: &Path, created: u64, config: &[&str]) -> Result<()> {
        let (layout, reference) = (self.layout().display().to_string(), self.reference());
        let time = format!("--date=@{created}");
        run(Command::new("find").arg(root).args(["-exec", "touch", "--no-dereference", &time, "{}", "+"]))?;
        let time = output(Command::new("date").args(["--utc", &time, "+%Y-%m-%dT%H:%M:%SZ"]))?;
        let time = format!("--created={}", time.trim());
        umoci(&["init", "--layout", &layout])?;
        umoci(&["new", "--image", &reference])?;
        umoci(&["insert", "--no-history", "--image", &reference, &root.display().to_string(), "/"])?;
        umoci(&[&["config", "--no-history", &time, "--image", &reference], config].concat())?;
        umoci(&["gc", "--layout", &layout])
    }

    /// A bundle for a container runtime: the root file system, and a configuration made from the image's.
    pub fn unpack(&self, bundle: &Path) -> Result<()> {
        umoci(&["unpack", "--image", &self.reference(), &bundle.display().to_string()])
    }
}

pub fn image(args: &ImageArgs) -> Result<()> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    let arch = args.arch.unwrap_or(Arch::own());
    let profile = if args.dev { Profile::Dev } else { Profile::Release };
    let image = Image::expected_for(&paths, arch);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).context("the clock is before 1970")?;
    image_for(&paths, &image, (profile, now.as_secs()), &[], args.no_install, &progress)?;
    progress.step(&format!("ready: {}, {}", image.layout().display(), image.archive().display()));
    Ok(())
}

/// Makes the image of its architecture, with these further labels (without `org.opencontainers.image.`). Returns where the agent's
/// binary was built.
pub fn image_for(
    paths: &Paths,
    image: &Image,
    (profile, created): (Profile, u64),
    labels: &[String],
    no_install: bool,
    progress: &Progress,
) -> Result<PathBuf> {
    packages::ensure(Purpose::Image, !no_install)?;
    ensure_object(paths, &BuildArgs { no_install, ..BuildArgs::default() }, progress)?;
    let binaries = static_binaries(paths, (image.arch, profile), no_install, progress)?;
    if image.folder.exists() {
        fs::remove_dir_all(&image.folder).with_context(|| format!("remove {}", image.folder.display()))?;
    }
    let root = image.folder.join("root");
    lay_out(&root, &binaries)?;
    assemble(image, &root, created, labels)?;
    fs::remove_dir_all(&root)?;
    image.pack()?;
    let [agent, _router] = binaries;
    Ok(agent)
}

/// How the binaries are optimised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    Dev,
    Release,
}

/// egress-agent and egress-router, linked with everything that they need, so that they run on nothing.
pub(crate) fn static_binaries(
    paths: &Paths,
    build: (Arch, Profile),
    no_install: bool,
    progress: &Progress,
) -> Result<[PathBuf; 2]> {
    linked_statically([AGENT, ROUTER], paths, build, no_install, progress)
}

/// The kubectl plugin, linked in the same way: it runs on any Linux of the architecture.
pub fn static_plugin(paths: &Paths, build: (Arch, Profile), no_install: bool, progress: &Progress) -> Result<PathBuf> {
    linked_statically([PLUGIN], paths, build, no_install, progress).map(|[plugin]| plugin)
}

fn linked_statically<const N: usize>(
    names: [&str; N],
    paths: &Paths,
    (arch, profile): (Arch, Profile),
    no_install: bool,
    progress: &Progress,
) -> Result<[PathBuf; N]> {
    let target = arch.target();
    let cargo = cargo_for(paths, arch, !no_install, progress)?;
    let shown = names.join(" and ");
    progress.step(&format!("building {shown} for {target}; the first time takes some minutes"));
    let (folder, arguments): (&str, &[&str]) = match profile {
        Profile::Dev => ("debug", &["--locked", "--target", target]),
        Profile::Release => ("release", &["--locked", "--target", target, "--release"]),
    };
    let folder = paths.target.join(target).join(folder);
    let built = binaries::build((cargo, names), &paths.root, arguments, &folder, progress)?;
    for binary in &built {
        let bytes = fs::read(binary).with_context(|| format!("read {}", binary.display()))?;
        if names_an_interpreter(&bytes)? {
            bail!("{} wants a dynamic linker, so it does not run everywhere", binary.display());
        }
    }
    Ok(built)
}

/// Whether an ELF file has a program header of the type `PT_INTERP`.
pub fn names_an_interpreter(file: &[u8]) -> Result<bool> {
    const INTERP: u32 = 3;
    let field = |at: usize, size: usize| -> Option<u64> {
        let bytes = file.get(at..at + size)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    };
    let read = || -> Option<bool> {
        // 64 bits, little endian.
        if file.get(..6)? != [0x7f, b'E', b'L', b'F', 2, 1] {
            return None;
        }
        let (begin, size, count) = (field(32, 8)?, field(54, 2)?, field(56, 2)?);
        let headers = (0..count).map(|number| field(usize::try_from(begin + number * size).ok()?, 4));
        let kinds: Option<Vec<u64>> = headers.collect();
        Some(kinds?.contains(&u64::from(INTERP)))
    };
    read().context("this is no ELF file of 64 bits")
}

fn lay_out(root: &Path, binaries: &[PathBuf]) -> Result<()> {
    for folder in FOLDERS {
        fs::create_dir_all(root.join(folder))?;
    }
    let place = root.join(BINARY.trim_start_matches('/'));
    for binary in binaries {
        let place = place.with_file_name(binary.file_name().context("a binary without a name")?);
        fs::copy(binary, &place)?;
        fs::set_permissions(&place, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn assemble(image: &Image, root: &Path, created: u64, more: &[String]) -> Result<()> {
    let labels = ["title=egress-agent".to_owned(), format!("version={VERSION}"), "licenses=Apache-2.0".to_owned()];
    let labels = labels.iter().chain(more).map(|label| format!("--config.label=org.opencontainers.image.{label}"));
    let labels: Vec<String> = labels.collect();
    // The path is for `kubectl exec POD -- egress-agent status`.
    let path = "--config.env=PATH=/usr/bin";
    let entry = format!("--config.entrypoint={BINARY}");
    let architecture = format!("--architecture={}", image.arch);
    let mut config = vec![entry.as_str(), path, &architecture];
    config.extend(labels.iter().map(String::as_str));
    image.assemble(root, created, &config)
}

/// An index whose one image has this name, as containerd reads it and as the OCI image specification has it.
fn with_name(index: &str, name: &str) -> Result<String> {
    let mut index: Value = serde_json::from_str(index)?;
    let [manifest] = index["manifests"].as_array_mut().map(Vec::as_mut_slice).unwrap_or_default() else {
        bail!("the layout has not one image: {index}");
    };
    for key in ["io.containerd.image.name", "org.opencontainers.image.ref.name"] {
        manifest["annotations"][key] = json!(name);
    }
    Ok(index.to_string())
}

fn umoci(arguments: &[&str]) -> Result<()> {
    output(Command::new("umoci").args(arguments)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `ctr images import` and `kind load image-archive` make of the file is what the overlays ask for.
    #[test]
    fn the_archive_has_the_name_that_the_manifests_ask_for() {
        let image = Image {
            arch: Arch::own(),
            folder: std::env::temp_dir().join(format!("egress-image-{}", std::process::id())),
        };
        fs::create_dir_all(image.layout().join("blobs/sha256")).expect("a folder");
        fs::write(image.layout().join("blobs/sha256/ab"), "{}").expect("a blob");
        fs::write(image.layout().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("a file");
        let by_umoci = json!({"schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "sha256:ab", "size": 2,
            "annotations": {"org.opencontainers.image.ref.name": VERSION},
        }]});
        fs::write(image.layout().join("index.json"), by_umoci.to_string()).expect("a file");
        image.pack().expect("an archive");
        let tar = |line: &[&str]| output(Command::new("tar").args(line).arg(image.archive())).expect("tar");
        let mut entries: Vec<String> = tar(&["-tf"]).lines().map(str::to_owned).collect();
        entries.sort();
        let index = output(Command::new("tar").arg("-xOf").arg(image.archive()).arg("index.json")).expect("tar");
        let layout = fs::read_to_string(image.layout().join("index.json")).expect("it stays");
        fs::remove_dir_all(&image.folder).expect("it was there");
        assert_eq!(entries, ["blobs/", "blobs/sha256/", "blobs/sha256/ab", "index.json", "oci-layout"]);
        assert_eq!(layout, by_umoci.to_string(), "the layout has its tag, for skopeo");

        let overlay = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/overlays/ovn-kubernetes-kind");
        let overlay = fs::read_to_string(overlay.join("kustomization.yaml")).expect("an overlay");
        let value =
            |key: &str| overlay.lines().find_map(|line| line.trim().strip_prefix(key)).expect("an image").trim();
        let wanted = format!("{}:{}", value("newName:"), value("newTag:"));
        let index: Value = serde_json::from_str(&index).expect("JSON");
        let annotations = json!({"io.containerd.image.name": wanted, "org.opencontainers.image.ref.name": wanted});
        assert_eq!(index["manifests"][0]["annotations"], annotations);
        assert_eq!(index["manifests"][0]["digest"], "sha256:ab");
    }

    #[test]
    fn a_layout_with_another_number_of_images_is_refused() {
        for manifests in [json!([]), json!([{}, {}]), Value::Null] {
            assert!(with_name(&json!({ "manifests": manifests }).to_string(), "a").is_err(), "{manifests}");
        }
    }

    #[test]
    fn a_program_that_wants_a_dynamic_linker_is_known() {
        // This test is such a program wherever the project is built; its text is no program at all.
        let me = fs::read("/proc/self/exe").expect("this program");
        assert!(names_an_interpreter(&me).expect("an ELF file"));
        assert!(names_an_interpreter(b"#!/bin/sh\n").is_err());
        assert!(names_an_interpreter(&me[..40]).is_err());
    }
}
