//! A server for one test, and its clients.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail, ensure};
use egress_lab::apiserver::{ApiServer, kubeconfig};
use egress_lab::kube_api::{ControlPlane, ControlPlaneLocation};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::PostParams;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use tokio::runtime::{Builder, Runtime};

use crate::objects;

pub(crate) struct TestedServer {
    kind: ServerKind,
    folder: PathBuf,
}

/// The double with the runtime that serves it, or a real server.
enum ServerKind {
    Double { server: ApiServer, runtime: Option<Runtime> },
    Real(#[expect(dead_code, reason = "held while the test runs")] ControlPlane),
}

impl TestedServer {
    pub(crate) fn start() -> Result<Self> {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("apiserver-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).context("cannot make the test's folder")?;
        let (kind, text) = match assets() {
            Some(assets) => {
                let place = ControlPlaneLocation { folder: folder.clone(), logs: &folder, prefix: "apiserver" };
                let plane = ControlPlane::start(&place, Path::new(&assets))?;
                let text = plane.kubeconfig();
                (ServerKind::Real(plane), text)
            }
            None => {
                let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
                let server = {
                    let _entered = runtime.enter();
                    ApiServer::bind(([127, 0, 0, 1], 0).into())?
                };
                let text = kubeconfig(&server.url());
                (ServerKind::Double { server, runtime: Some(runtime) }, text)
            }
        };
        fs::write(folder.join("kubeconfig"), text).context("cannot write the kubeconfig")?;
        Ok(Self { kind, folder })
    }

    /// With the EgressIP kind established.
    pub(crate) async fn with_egress_ips() -> Result<Self> {
        let server = Self::start()?;
        objects::establish(server.client().await?, objects::DEFINITION).await?;
        Ok(server)
    }

    pub(crate) async fn client(&self) -> Result<Client> {
        self.client_by(|_| {}).await
    }

    /// A client with this token.
    pub(crate) async fn client_with(&self, token: &str) -> Result<Client> {
        self.client_by(|config| {
            let user = AuthInfo { token: Some(token.to_owned().into()), ..AuthInfo::default() };
            for named in &mut config.auth_infos {
                named.auth_info = Some(user.clone());
            }
        })
        .await
    }

    /// A client with the rights of a service account.
    pub(crate) async fn client_of(&self, namespace: &str, account: &str) -> Result<Client> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client().await?, namespace);
        let request = TokenRequest::default();
        let granted = accounts.create_token_request(account, &PostParams::default(), &request).await?;
        self.client_with(&granted.status.and_then(|status| status.token).context("no token")?).await
    }

    /// What the namespace controller does when a deleted namespace is empty, where there is none.
    pub(crate) async fn end_namespace(&self, name: &str) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client().await?);
        let Some(mut namespace) = namespaces.get_opt(name).await? else { return Ok(()) };
        namespace.spec.get_or_insert_default().finalizers = None;
        namespaces.replace_subresource("finalize", name, &PostParams::default(), &namespace).await?;
        Ok(())
    }

    async fn client_by(&self, change: impl FnOnce(&mut Kubeconfig)) -> Result<Client> {
        let mut kubeconfig = Kubeconfig::read_from(self.folder.join("kubeconfig"))?;
        change(&mut kubeconfig);
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Client::try_from(config).context("cannot make a client")
    }

    /// The double: a real server cannot fail on request.
    pub(crate) fn double(&self) -> Result<&ApiServer> {
        match &self.kind {
            ServerKind::Double { server, .. } => Ok(server),
            ServerKind::Real(_) => bail!("this is a real API server"),
        }
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    pub(crate) fn kubectl_command(&self, line: &str) -> Command {
        let mut command = Command::new("kubectl");
        command
            .args(line.split_whitespace())
            .env("KUBECONFIG", self.kubeconfig())
            .env("KUBECACHEDIR", self.folder.join("cache"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Run kubectl with this on its standard input; words of the line are split at spaces.
    fn kubectl_output(&self, line: &str, input: &str) -> Result<Output> {
        let mut child = self.kubectl_command(line).spawn().context("cannot start kubectl")?;
        let mut stdin = child.stdin.take().context("kubectl has no input")?;
        stdin.write_all(input.as_bytes()).context("kubectl does not read")?;
        drop(stdin);
        child.wait_with_output().context("kubectl does not end")
    }

    /// What kubectl prints, where it succeeds.
    pub(crate) fn kubectl_with(&self, line: &str, input: &str) -> Result<String> {
        let output = self.kubectl_output(line, input)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {line}: {errors}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(crate) fn kubectl(&self, line: &str) -> Result<String> {
        self.kubectl_with(line, "")
    }

    /// What kubectl complains about, where it fails.
    pub(crate) fn kubectl_fails(&self, line: &str, input: &str) -> Result<String> {
        let output = self.kubectl_output(line, input)?;
        ensure!(!output.status.success(), "kubectl {line} should fail");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

impl Drop for TestedServer {
    fn drop(&mut self) {
        // In an asynchronous test a runtime cannot wait for its tasks.
        if let ServerKind::Double { runtime, .. } = &mut self.kind
            && let Some(runtime) = runtime.take()
        {
            runtime.shutdown_background();
        }
        // A folder that stays in target/ fails no test.
        drop(fs::remove_dir_all(&self.folder));
    }
}

/// The folder of a real server, where that is to be tested instead of the double.
fn assets() -> Option<OsString> {
    std::env::var_os("KUBEBUILDER_ASSETS").filter(|folder| !folder.is_empty())
}

/// Is this the double? A real API server cannot fail on request.
pub(crate) fn is_double(test: &str) -> bool {
    assets().is_none() || skipped(test, "a real API server cannot fail on request")
}

/// Is this the real thing? The double has not all that the manifests are made of.
pub(crate) fn is_real(test: &str) -> bool {
    assets().is_some() || skipped(test, "KUBEBUILDER_ASSETS names no folder with a real API server")
}

/// Beside a real API server no controllers run.
pub(crate) fn has_controllers(test: &str) -> bool {
    assets().is_none() || skipped(test, "no controllers run beside this API server")
}

/// Is kubectl here, and one that asks for definitions as the double has them?
pub(crate) fn has_kubectl(test: &str) -> bool {
    let version = Command::new("kubectl").args(["version", "--client", "--output=json"]).output();
    let version = version.ok().and_then(|output| serde_json::from_slice::<serde_json::Value>(&output.stdout).ok());
    let minor = version.as_ref().and_then(|version| version["clientVersion"]["minor"].as_str());
    let digits = minor.unwrap_or_default().trim_end_matches('+').parse::<u32>();
    digits.is_ok_and(|minor| minor >= OLDEST_KUBECTL) || skipped(test, "kubectl is not installed, or too old")
}

/// The first that asks for OpenAPI v3 by itself (KEP-2896). Also in crates/toolchain/src/kubectl.rs.
const OLDEST_KUBECTL: u32 = 27;

/// Notes that a test shows nothing here, as `cargo xtask test` wants it (xtask/src/testing/skips.rs).
pub(crate) fn skipped(test: &str, reason: &str) -> bool {
    // Not by a macro: the test harness would hide what a passing test prints.
    writeln!(io::stderr(), "SKIPPED {test}: {reason}").unwrap_or_default();
    if let Some(file) = std::env::var_os("EGRESS_TEST_SKIPS") {
        let file = fs::OpenOptions::new().create(true).append(true).open(file);
        // One write for one line, since tests run beside one another.
        let noted = file.and_then(|mut file| file.write_all(format!("{test}\t{reason}\n").as_bytes()));
        noted.expect("note that a test is skipped");
    }
    false
}
