//! `cargo xtask deps`: what the three workspaces depend on.
//!
//! - All lock files fit their manifests (`--locked`).
//! - Every package comes from this clone or from one registry, the same for all; no git address.
//! - Every licence is in the list below. It covers what is built for Linux, on either architecture.
//! - Several versions of one package are reported, not refused: most of them come from dependencies.
//!
//! Known vulnerabilities are not looked up here: that needs an advisory database, which is not part of the clone.
//! `cargo audit` or `cargo deny check advisories` does it where there is a network.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::spdx;
use egress_toolchain::{Paths, cargo, output};

/// Licences that ask for no more than to be named, and MPL-2.0, whose demands end at its own files.
const ACCEPTED: [&str; 16] = [
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    // Of libFuzzer, which is in no binary of the product: as BSD-3-Clause.
    "NCSA",
    "OpenSSL",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// How cargo marks a registry as the source of a package.
const REGISTRY: &str = "registry+";

const PLATFORMS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    manifest_path: String,
}

pub(crate) fn deps() -> Result<()> {
    let paths = Paths::find()?;
    let mut complaints = Vec::new();
    let mut registries = BTreeSet::new();
    for manifest in [paths.root.join("Cargo.toml"), paths.ebpf_manifest(), paths.fuzz_manifest()] {
        let packages = packages(&manifest)?;
        println!("{}: {} packages", shown(&manifest, &paths), packages.len());
        complaints.extend(packages.iter().filter_map(|package| complaint(package, &paths)));
        report_duplicates(&packages);
        registries.extend(packages.into_iter().filter_map(|package| package.source));
    }
    if registries.len() > 1 {
        complaints.push(format!("packages come from {} sources, not one: {registries:?}", registries.len()));
    }
    println!("Known vulnerabilities are not part of this check: it works without a network.");
    for complaint in &complaints {
        println!("refused: {complaint}");
    }
    if !complaints.is_empty() {
        bail!("{} dependencies refused", complaints.len());
    }
    println!("dependencies: lock files, sources and licences are in order");
    Ok(())
}

fn shown(manifest: &Path, paths: &Paths) -> String {
    manifest.strip_prefix(&paths.root).unwrap_or(manifest).display().to_string()
}

/// The packages of all platforms together. `--locked` fails where the lock file is not up to date.
fn packages(manifest: &Path) -> Result<BTreeSet<Package>> {
    let mut all = BTreeSet::new();
    for platform in PLATFORMS {
        let mut command = cargo();
        command.args(["metadata", "--locked", "--format-version", "1", "--filter-platform", platform]);
        let text = output(command.arg("--manifest-path").arg(manifest))?;
        let metadata: Metadata = serde_json::from_str(&text).context("read the answer of cargo metadata")?;
        all.extend(metadata.packages);
    }
    Ok(all)
}

/// What is wrong with this package, if anything.
fn complaint(package: &Package, paths: &Paths) -> Option<String> {
    let name = format!("{} {}", package.name, package.version);
    match package.source.as_deref() {
        Some(source) if source.starts_with(REGISTRY) => {}
        None if Path::new(&package.manifest_path).starts_with(&paths.root) => {}
        Some(other) => return Some(format!("{name} comes from {other}")),
        None => return Some(format!("{name} comes from {}", package.manifest_path)),
    }
    match package.license.as_deref() {
        Some(license) if spdx::satisfied(license, &ACCEPTED) => None,
        Some(license) => Some(format!("{name} has the licence {license}")),
        None => Some(format!("{name} names no licence")),
    }
}

fn report_duplicates(packages: &BTreeSet<Package>) {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().push(&package.version);
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        println!("  several versions of {name}: {}", versions.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(license: Option<&str>, source: Option<&str>) -> Package {
        Package {
            name: "thing".to_owned(),
            version: "1.0.0".to_owned(),
            license: license.map(str::to_owned),
            source: source.map(str::to_owned),
            manifest_path: "/elsewhere/Cargo.toml".to_owned(),
        }
    }

    #[test]
    fn sources_and_licences_are_judged() {
        let paths = Paths { root: "/clone".into(), target: "/clone/target".into() };
        let judge = |license, source| complaint(&package(license, source), &paths);
        assert_eq!(judge(Some("MIT OR Apache-2.0"), Some("registry+https://example.org/index")), None);
        assert!(judge(Some("MIT"), Some("git+https://example.org/thing")).is_some());
        assert!(judge(Some("MIT"), None).is_some());
        assert!(judge(Some("AGPL-3.0"), Some("registry+https://example.org/index")).is_some());
        assert!(judge(None, Some("registry+https://example.org/index")).is_some());
    }
}
