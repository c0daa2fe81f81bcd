//! `kubectl`, where there is one that the lab's API server can be asked by.
//!
//! Debian has it in `kubernetes-client`, Ubuntu in no package. Debian 12's is of 2021 and asks for definitions in a form that the
//! lab's API server has not (OpenAPI v2 as protobuf), so it is neither installed nor used.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use super::command::is_root;
use super::packages;

const PACKAGE: &str = "kubernetes-client";
/// The first that asks for OpenAPI v3 by itself (KEP-2896). Also in tests/apiserver/server.rs.
const OLDEST: u32 = 27;

/// Where it is, if it is not too old.
pub fn find() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let search = || {
        let program = packages::find("kubectl")?;
        let output = Command::new(&program).args(["version", "--client", "--output=json"]).output().ok()?;
        let version: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let minor = version["clientVersion"]["minor"].as_str()?.trim_end_matches('+').parse::<u32>().ok()?;
        (minor >= OLDEST).then_some(program)
    };
    FOUND.get_or_init(search).clone()
}

/// Installs it where it is missing and the distribution has one that is not too old; says so where it cannot.
pub fn offer(install: bool) {
    if packages::find("kubectl").is_some() {
        return;
    }
    let known = Command::new("apt-cache").args(["policy", PACKAGE]).output().map(|output| output.stdout);
    let minor = known.ok().and_then(|text| candidate(&String::from_utf8_lossy(&text)));
    if install && is_root() && minor.is_some_and(|minor| minor >= OLDEST) {
        // What needs it is skipped by name where this fails.
        if let Err(error) = packages::install(&[PACKAGE]) {
            println!("{error:#}");
        }
    } else {
        println!("kubectl is not installed: what types it is skipped, or done by the lab's own client");
    }
}

/// The 32 of what would be installed, `1.32.4+ds-2`.
fn candidate(policy: &str) -> Option<u32> {
    let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    // Debian marks a version that takes the place of a newer one: 1.20.5+really1.20.2-1.
    let version = version.rsplit("really").next()?;
    version.split('.').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_a_package_is_read() {
        assert_eq!(candidate("kubernetes-client:\n  Installed: (none)\n  Candidate: 1.32.4+ds-2\n"), Some(32));
        assert_eq!(candidate("  Candidate: 1.20.5+really1.20.2-1.1+deb12u1\n"), Some(20));
        assert_eq!(candidate("  Candidate: (none)\n"), None);
        assert_eq!(candidate(""), None);
    }
}
