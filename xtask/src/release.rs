//! `cargo xtask release`: everything that a release has, below `target/release-artifacts`.
//!
//! Only what is committed is released: the tree must be clean before and after, the lock files must fit their manifests, so that no
//! build chooses other versions, and the changelog must have a section of Cargo.toml's version. That version is the tag of the images,
//! and here alone it gets into the manifests and the chart. Times are the commit's, so a second run has the same checksums. Nothing is
//! uploaded.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use egress_toolchain::{
    Arch, Image, Paths, Profile, Progress, archive, cargo, image_for, kubectl, output, run, static_plugin,
};

use crate::checks;

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// Where the sources are, for the images' label `org.opencontainers.image.source`
    #[arg(long, value_name = "URL")]
    source: String,
    /// Name of the image in the manifests and the chart, with the registry and without a tag
    #[arg(long, value_name = "NAME", default_value = "localhost/egress-agent")]
    image: String,
    /// Only the image and the programs of this architecture, instead of all; may be given several times
    #[arg(long, value_enum)]
    arch: Vec<Arch>,
    /// Build the binaries without optimisations: quicker, for trying a release
    #[arg(long)]
    dev: bool,
    /// Take the changelog's section `Unreleased` for the notes: for trying a release whose section is not written yet
    #[arg(long)]
    unreleased: bool,
    /// Never install a distribution package, a toolchain component or a tool: name what is missing and stop
    #[arg(long)]
    no_install: bool,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Section of what is in no release yet.
const UNRELEASED: &str = "Unreleased";
/// Makes the SBOM. Of this version, so that a later one changes no checksum.
const SBOM_TOOL: &str = "cargo-cyclonedx";
const SBOM_TOOL_VERSION: &str = "0.5.9";
/// The binaries, and the eBPF object inside of the agent.
const SBOM_OF: [&str; 4] = [AGENT, "egress-router", PLUGIN, "egress-ebpf"];
/// Also the chart's name.
const AGENT: &str = "egress-agent";
const PLUGIN: &str = "kubectl-egress";
/// The plugin by this name completes kubectl's command line.
const PLUGIN_COMPLETION: &str = "kubectl_complete-egress";

pub(crate) fn release(args: &ReleaseArgs) -> Result<()> {
    let progress = Progress::start();
    let paths = Paths::find()?;
    let revision = Revision::of_head(&paths.root)?;
    check_locks(&paths.root)?;
    let changelog = paths.root.join("CHANGELOG.md");
    let changelog = fs::read_to_string(&changelog).with_context(|| format!("read {}", changelog.display()))?;
    let notes = notes(&changelog, if args.unreleased { UNRELEASED } else { VERSION })?;
    let Some(kubectl) = kubectl::find() else { bail!("missing: kubectl 1.27 or later, which renders the manifests") };
    let tool = sbom_tool(&paths, args.no_install, &progress)?;

    let out = paths.target.join("release-artifacts");
    let work = paths.target.join("release-work");
    for folder in [&out, &work] {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
        }
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    fs::write(out.join("release-notes.md"), notes)?;
    export(&paths.root, &work)?;
    progress.step("manifests");
    manifests(&work.join("deploy/overlays"), &args.image, (&kubectl, &out))?;
    progress.step("chart");
    chart(&work.join("deploy/helm"), &args.image, revision.time, &out)?;
    progress.step("SBOM");
    sboms(&tool, &work, &revision, &out)?;
    progress.step("manual pages and completion scripts");
    shared_files(&paths, &work.join("share"), revision.time, &out)?;
    for arch in Arch::ALL.into_iter().filter(|arch| args.arch.is_empty() || args.arch.contains(arch)) {
        let image = Image::in_folder(work.join(format!("image-{arch}")), arch);
        let labels = [format!("source={}", args.source), format!("revision={}", revision.hash)];
        let profile = if args.dev { Profile::Dev } else { Profile::Release };
        let agent = image_for(&paths, &image, (profile, revision.time), &labels, args.no_install, &progress)?;
        let file = image.archive();
        let name = file.file_name().context("an archive without a name")?;
        // The name that the manifests ask for.
        image.pack_into(&out.join(name), &format!("{}:{VERSION}", args.image))?;
        let plugin = static_plugin(&paths, (arch, profile), args.no_install, &progress)?;
        let licence = work.join("LICENSE");
        for (name, binary, links) in [(AGENT, &agent, &[][..]), (PLUGIN, &plugin, &[PLUGIN_COMPLETION])] {
            let file = out.join(format!("{name}-{VERSION}-linux-{arch}.tar.gz"));
            program((name, binary), links, (&licence, &work.join(format!("{name}-{arch}"))), revision.time, &file)?;
        }
    }
    if Revision::of_head(&paths.root)? != revision {
        bail!("another commit was checked out while the release was made: run it again");
    }
    checksums(&out)?;
    progress.step(&format!("ready: {}", out.display()));
    Ok(())
}

/// The workspaces, each with a lock file.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "egress-ebpf/Cargo.toml"];

/// Fails where a build would change a lock file.
fn check_locks(root: &Path) -> Result<()> {
    for manifest in MANIFESTS {
        let mut command = cargo();
        command.args(["metadata", "--locked", "--format-version", "1", "--manifest-path"]).arg(root.join(manifest));
        output(&mut command).with_context(|| format!("the lock file of {manifest} is not up to date: commit it"))?;
    }
    Ok(())
}

/// The commit that is released.
#[derive(PartialEq, Eq)]
struct Revision {
    hash: String,
    /// In seconds since 1970.
    time: u64,
}

impl Revision {
    fn of_head(root: &Path) -> Result<Self> {
        let git = |arguments: &[&str]| output(Command::new("git").args(arguments).current_dir(root));
        let changed = git(&["status", "--porcelain"])?;
        if let Some(first) = changed.lines().next() {
            bail!("the tree has changes that are not committed ({}): commit or remove them", first.trim());
        }
        let text = git(&["log", "-1", "--format=%H %ct"])?;
        let (hash, time) = text.trim().split_once(' ').context("git has no commit")?;
        Ok(Self { hash: hash.to_owned(), time: time.parse().context("the commit's time")? })
    }
}

/// The section of this version, without its heading.
fn notes(changelog: &str, version: &str) -> Result<String> {
    let heading = format!("## [{version}]");
    let mut lines = changelog.lines().skip_while(|line| !line.starts_with(&heading)).skip(1);
    let section: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("## ")).collect();
    let text = section.join("\n").trim().to_owned();
    if text.is_empty() {
        bail!(
            "CHANGELOG.md has no section `{heading}`, or an empty one. Cargo.toml's version is {VERSION}: write its section, or try \
             the release with --unreleased"
        );
    }
    Ok(text + "\n")
}

/// The committed files: what tools write beside the sources does not get into the clone.
fn export(root: &Path, work: &Path) -> Result<()> {
    let archive = work.join("sources.tar");
    run(Command::new("git").args(["archive", "--output"]).arg(&archive).arg("HEAD").current_dir(root))?;
    run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(work))?;
    Ok(fs::remove_file(&archive)?)
}

/// Each overlay in one file, with the image's name and tag.
fn manifests(overlays: &Path, image: &str, (kubectl, out): (&Path, &Path)) -> Result<()> {
    for entry in fs::read_dir(overlays).with_context(|| format!("read {}", overlays.display()))? {
        let overlay = entry?.path();
        edit(&overlay.join("kustomization.yaml"), |text| with_image(text, image, VERSION))?;
        let rendered = output(Command::new(kubectl).arg("kustomize").arg(&overlay))?;
        let name = overlay.file_name().context("an overlay without a name")?.to_string_lossy().into_owned();
        fs::write(out.join(format!("manifests-{name}.yaml")), rendered)?;
    }
    Ok(())
}

/// Changes a file of the clone.
fn edit(file: &Path, change: impl FnOnce(&str) -> Result<String>) -> Result<()> {
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let text = change(&text).with_context(|| file.display().to_string())?;
    fs::write(file, text).with_context(|| format!("write {}", file.display()))
}

/// A kustomization that names this image.
fn with_image(kustomization: &str, name: &str, tag: &str) -> Result<String> {
    with_lines(kustomization, [("newName:", format!("newName: {name}")), ("newTag:", format!("newTag: {tag}"))])
}

/// The text with other lines in the place of those that begin so; each of these must be there once.
fn with_lines<const N: usize>(text: &str, lines: [(&str, String); N]) -> Result<String> {
    let mut found = [0; N];
    let line = |line: &str| {
        let content = line.trim_start();
        let number = lines.iter().position(|(begin, _)| content.starts_with(begin));
        let content = number.map_or(content, |number| {
            found[number] += 1;
            &lines[number].1
        });
        format!("{}{content}\n", &line[..line.len() - line.trim_start().len()])
    };
    let text = text.lines().map(line).collect();
    if found != [1; N] {
        bail!("the lines {:?} are there {found:?} times, not once each", lines.map(|(begin, _)| begin));
    }
    Ok(text)
}

/// The chart in one file, for `helm install` and `helm push`. The image's tag is `appVersion`.
fn chart(charts: &Path, image: &str, time: u64, out: &Path) -> Result<()> {
    let folder = charts.join(AGENT);
    let versions = [("version:", format!("version: {VERSION}")), ("appVersion:", format!("appVersion: \"{VERSION}\""))];
    edit(&folder.join("Chart.yaml"), |text| with_lines(text, versions))?;
    let repository = [("repository: localhost/", format!("repository: {image}"))];
    edit(&folder.join("values.yaml"), |text| with_lines(text, repository))?;
    pack(&out.join(format!("{AGENT}-{VERSION}.tgz")), time, charts, &[AGENT])
}

/// The manual pages and the completion scripts, each at its place below `/usr/local/share`.
fn shared_files(paths: &Paths, folder: &Path, time: u64, out: &Path) -> Result<()> {
    checks::write_manual_pages(paths, &folder.join("man/man1"))?;
    let mut scripts = cargo();
    scripts.args(["run", "--quiet", "--locked", "--package", AGENT, "--example", "completions", "--"]).arg(folder);
    run(scripts.current_dir(&paths.root)).context("write the completion scripts")?;
    pack(&out.join(format!("{AGENT}-{VERSION}-man.tar.gz")), time, folder, &["man"])?;
    let scripts = ["bash-completion", "fish", "zsh"];
    pack(&out.join(format!("{AGENT}-{VERSION}-completions.tar.gz")), time, folder, &scripts)
}

/// A program, also by the names of these links, and the licence.
fn program(
    (name, binary): (&str, &Path),
    links: &[&str],
    (licence, folder): (&Path, &Path),
    time: u64,
    file: &Path,
) -> Result<()> {
    fs::create_dir_all(folder)?;
    fs::copy(binary, folder.join(name)).with_context(|| format!("copy {}", binary.display()))?;
    fs::copy(licence, folder.join("LICENSE")).with_context(|| format!("copy {}", licence.display()))?;
    for link in links {
        symlink(name, folder.join(link))?;
    }
    pack(file, time, folder, &[&["LICENSE", name], links].concat())
}

fn pack(file: &Path, time: u64, folder: &Path, entries: &[&str]) -> Result<()> {
    run(archive(file, time).arg("-C").arg(folder).args(entries))
}

fn sbom_tool(paths: &Paths, no_install: bool, progress: &Progress) -> Result<PathBuf> {
    let root = paths.target.join("tools").join(format!("{SBOM_TOOL}-{SBOM_TOOL_VERSION}"));
    let program = root.join("bin").join(SBOM_TOOL);
    if program.exists() {
        return Ok(program);
    }
    if no_install {
        bail!(
            "missing: {SBOM_TOOL} {SBOM_TOOL_VERSION}; leave out --no-install, which installs it below {}",
            root.display()
        );
    }
    progress
        .step(&format!("installing {SBOM_TOOL} {SBOM_TOOL_VERSION} below the target folder, which takes some minutes"));
    let mut command = cargo();
    command.args(["install", SBOM_TOOL, "--version", SBOM_TOOL_VERSION, "--locked", "--quiet", "--root"]).arg(&root);
    run(command.current_dir(&paths.target))?;
    Ok(program)
}

/// One file for each of [`SBOM_OF`], for all architectures, in CycloneDX's format.
fn sboms(tool: &Path, work: &Path, revision: &Revision, out: &Path) -> Result<()> {
    for manifest in MANIFESTS {
        let mut command = Command::new(tool);
        // Without what only builds: it is not in the image.
        command.args(["cyclonedx", "--format", "json", "--spec-version", "1.5", "--target", "all", "--no-build-deps"]);
        command.args(["--quiet", "--manifest-path"]).arg(work.join(manifest));
        output(command.env("SOURCE_DATE_EPOCH", revision.time.to_string()))?;
    }
    for name in SBOM_OF {
        let made = work.join(name).join(format!("{name}.cdx.json"));
        let copied = fs::copy(&made, out.join(format!("{name}-{VERSION}.cdx.json")));
        copied.with_context(|| format!("copy {}", made.display()))?;
    }
    Ok(())
}

/// `SHA256SUMS`, for `sha256sum --check`.
fn checksums(out: &Path) -> Result<()> {
    let mut files = Vec::new();
    for entry in fs::read_dir(out).with_context(|| format!("read {}", out.display()))? {
        files.push(entry?.file_name());
    }
    files.sort();
    let sums = output(Command::new("sha256sum").args(&files).current_dir(out))?;
    Ok(fs::write(out.join("SHA256SUMS"), sums)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_the_section_of_the_version() {
        let changelog =
            "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2027\n\n### Added\n\n- a\n\n## [0.1.0]\n\n- b\n";
        assert_eq!(notes(changelog, "0.2.0").expect("a section"), "### Added\n\n- a\n");
        assert_eq!(notes(changelog, "0.1.0").expect("the last one"), "- b\n");
        assert_eq!(notes(changelog, UNRELEASED).expect("the first one"), "- new\n");
        for absent in ["0.3.0", "0.1", "0.2"] {
            assert!(notes(changelog, absent).is_err(), "{absent}");
        }
        assert!(notes("## [0.1.0]\n\n## [0.0.1]\n- x\n", "0.1.0").is_err(), "an empty section");
    }

    /// A folder below the target folder, which goes with the value.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("egress-release-{name}-{}", std::process::id()));
            fs::create_dir_all(folder.join("egress-ebpf/src")).expect("a folder");
            Self(folder)
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.0.join(file), text).expect("a file");
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_tree_with_changes_is_not_released() {
        let tree = Tree::new("changes");
        let git = |arguments: &[&str]| {
            let own = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"];
            output(Command::new("git").args(own).args(arguments).current_dir(&tree.0)).expect("git")
        };
        git(&["init", "--quiet"]);
        tree.write("a", "1");
        let refused = || Revision::of_head(&tree.0).map(|_| ()).expect_err("a change").to_string();
        assert!(refused().contains("(?? a)"), "{}", refused());
        git(&["add", "a"]);
        git(&["commit", "--quiet", "--message", "a"]);
        let released = Revision::of_head(&tree.0).expect("a clean tree");
        tree.write("a", "2");
        assert!(refused().contains("(M a)"), "{}", refused());
        git(&["commit", "--quiet", "--all", "--message", "b"]);
        assert!(Revision::of_head(&tree.0).expect("a clean tree") != released);
    }

    #[test]
    fn a_lock_file_that_does_not_fit_is_not_released() {
        let tree = Tree::new("locks");
        let manifest = "[package]\nname = \"a\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n";
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"0.1.0\"\n";
        fs::create_dir_all(tree.0.join("src")).expect("a folder");
        for folder in ["", "egress-ebpf/"] {
            tree.write(&format!("{folder}src/lib.rs"), "");
            tree.write(&format!("{folder}Cargo.toml"), manifest);
            tree.write(&format!("{folder}Cargo.lock"), lock);
        }
        check_locks(&tree.0).expect("they fit");
        tree.write("egress-ebpf/Cargo.toml", &manifest.replace("0.1.0", "0.2.0"));
        let error = format!("{:#}", check_locks(&tree.0).expect_err("another version"));
        assert!(error.starts_with("the lock file of egress-ebpf/Cargo.toml is not up to date"), "{error}");
    }

    /// The name and the tag of every overlay are replaced, and nothing else of it.
    #[test]
    fn each_overlay_gets_the_released_image() {
        let overlays = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/overlays");
        for entry in fs::read_dir(overlays).expect("a folder") {
            let file = entry.expect("an overlay").path().join("kustomization.yaml");
            let before = fs::read_to_string(&file).expect("a kustomization");
            let after = with_image(&before, "registry.example/egress-agent", "9.9.9").expect("one image");
            let changed: Vec<_> = after.lines().filter(|line| !before.lines().any(|known| known == *line)).collect();
            let expected = ["  newName: registry.example/egress-agent", "  newTag: 9.9.9"];
            assert_eq!(changed, expected, "{}", file.display());
            assert_eq!(after.lines().count(), before.lines().count());
        }
        assert!(with_image("resources: []\n", "a", "b").is_err());
    }

    /// As the overlays do. A template joins the two, of which the second is the tag where the values name none.
    #[test]
    fn the_packed_chart_asks_for_the_released_image() {
        let (tree, root) = (Tree::new("chart"), Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
        run(Command::new("cp").arg("-r").arg(root.join("deploy/helm")).arg(&tree.0)).expect("a copy");
        chart(&tree.0.join("helm"), "registry.example/egress-agent", 0, &tree.0).expect("a chart");
        let file = tree.0.join(format!("egress-agent-{VERSION}.tgz"));
        let read = |name: &str| -> serde_yaml::Value {
            let text = output(Command::new("tar").arg("-xOf").arg(&file).arg(format!("egress-agent/{name}")));
            serde_yaml::from_str(&text.expect("a file")).expect("YAML")
        };
        let (chart, values) = (read("Chart.yaml"), read("values.yaml"));
        assert_eq!([chart["version"].as_str(), chart["appVersion"].as_str()], [Some(VERSION); 2]);
        assert_eq!(values["image"]["repository"].as_str(), Some("registry.example/egress-agent"));
        assert_eq!(values["image"]["tag"].as_str(), Some(""));
    }

    /// kubectl finds the plugin by both names in one folder, wherever the archive is unpacked.
    #[test]
    fn programs_are_packed_with_their_names_and_the_licence() {
        for (name, links) in [(AGENT, &[][..]), (PLUGIN, &[PLUGIN_COMPLETION])] {
            let tree = Tree::new(name);
            tree.write("built", "#!/bin/sh\necho ${0##*/}\n");
            run(Command::new("chmod").arg("700").arg(tree.0.join("built"))).expect("a program");
            tree.write("LICENSE", "Apache");
            let (binary, file) = (tree.0.join("built"), tree.0.join("program.tar.gz"));
            let places = (&*tree.0.join("LICENSE"), &*tree.0.join("packed"));
            program((name, &binary), links, places, 0, &file).expect("an archive");
            let unpacked = tree.0.join("unpacked");
            fs::create_dir(&unpacked).expect("a folder");
            run(Command::new("tar").arg("-C").arg(&unpacked).arg("-xf").arg(&file)).expect("its files");
            for name in links.iter().chain([&name]) {
                assert_eq!(output(&mut Command::new(unpacked.join(name))).expect("it starts"), format!("{name}\n"));
            }
            assert!(unpacked.join("LICENSE").exists() && links.iter().all(|link| unpacked.join(link).is_symlink()));
            assert_eq!(fs::read_dir(&unpacked).expect("a folder").count(), 2 + links.len());
        }
    }
}
