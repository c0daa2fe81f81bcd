//! A real etcd and kube-apiserver, from the folder that `KUBEBUILDER_ASSETS` names (as controller-runtime's envtest
//! lays it out). Both listen on loopback, keep their data in a folder of the lab's and carry the lab's mark, so they go
//! with it. There is no controller manager and no scheduler: the lab writes what those would.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process::last_lines;
use crate::topology::netns;
use crate::wait::poll;

/// How long kube-apiserver may take until it is ready.
const PATIENCE: Duration = Duration::from_secs(60);
/// The folder that the server puts its certificate into.
const CERTIFICATES: &str = "certificates";
/// The administrator's token: the server listens on loopback only, and as long as the lab is up.
const TOKEN: &str = "lab-administrator";

/// The processes; dropping this ends them.
pub struct ControlPlane {
    port: u16,
    /// The server makes it for itself; it comes with the authority that signed it.
    certificate: PathBuf,
    children: Vec<Child>,
}

/// Where the control plane of a lab lives.
pub struct ControlPlaneLocation<'a> {
    pub folder: PathBuf,
    pub logs: &'a Path,
    /// The lab's, by which its processes are found again.
    pub prefix: &'a str,
}

impl ControlPlane {
    pub fn start(place: &ControlPlaneLocation<'_>, assets: &Path) -> Result<Self> {
        let folder = &place.folder;
        std::fs::create_dir_all(folder)?;
        let [client_port, peer_port, port] = free_ports()?;
        let certificate = folder.join(CERTIFICATES).join("apiserver.crt");
        let mut plane = Self { port, certificate, children: Vec::new() };
        let etcd = program(assets, "etcd")?;
        plane.spawn(place, &etcd, &etcd_arguments(folder, client_port, peer_port))?;
        let server = program(assets, "kube-apiserver")?;
        let arguments = server_arguments(folder, client_port, port)?;
        let log = plane.spawn(place, &server, &arguments)?;
        plane.wait_until_ready(&log)?;
        Ok(plane)
    }

    fn spawn(&mut self, place: &ControlPlaneLocation<'_>, program: &Path, arguments: &[String]) -> Result<PathBuf> {
        let name = program.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let log = place.logs.join(format!("{name}.log"));
        let output = File::create(&log)?;
        let mut command = netns::marked(place.prefix, &program.to_string_lossy());
        command.args(arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        self.children.push(child);
        Ok(log)
    }

    /// `/readyz` answers "ok" to everybody; curl is what the lab needs anyway and speaks TLS.
    fn wait_until_ready(&mut self, log: &Path) -> Result<()> {
        let url = format!("{}/readyz", self.url());
        let ready = poll(PATIENCE, || {
            for child in &mut self.children {
                let ended = child.try_wait()?;
                ensure!(ended.is_none(), "a part of the control plane has ended:\n{}", last_lines(log, 15));
            }
            let answer = Command::new("curl").args(["-sk", "--max-time", "2", &url]).output()?;
            Ok((answer.stdout == b"ok").then_some(()))
        })?;
        ready.with_context(|| {
            format!("kube-apiserver is not ready after {} s:\n{}", PATIENCE.as_secs(), last_lines(log, 15))
        })
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    pub fn kubeconfig(&self) -> String {
        format!(
            "apiVersion: v1
kind: Config
clusters:
- name: lab
  cluster: {{server: '{}', certificate-authority: '{}'}}
users:
- name: lab
  user: {{token: {TOKEN}}}
contexts:
- name: lab
  context: {{cluster: lab, user: lab}}
current-context: lab
",
            self.url(),
            self.certificate.display()
        )
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // The server first: without etcd it would only complain.
        for child in self.children.iter_mut().rev() {
            if let Err(error) = child.kill().and_then(|()| child.wait()) {
                eprintln!("lab: cannot end the control plane: {error}");
            }
        }
    }
}

fn program(assets: &Path, name: &str) -> Result<PathBuf> {
    let path = assets.join(name);
    ensure!(path.is_file(), "KUBEBUILDER_ASSETS is {} and has no {name}", assets.display());
    Ok(path)
}

/// Ports that were free a moment ago.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0"));
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(listeners) {
        *port = listener?.local_addr()?.port();
    }
    Ok(ports)
}

pub fn etcd_arguments(folder: &Path, client: u16, peer: u16) -> Vec<String> {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    vec![
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        // The data lives as long as the lab.
        "--unsafe-no-fsync".to_owned(),
    ]
}

fn server_arguments(folder: &Path, etcd: u16, port: u16) -> Result<Vec<String>> {
    let key = folder.join("service-account.key");
    let made = Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048").output();
    let made = made.context("kube-apiserver needs a service account key, and openssl is missing to make it")?;
    ensure!(made.status.success(), "openssl made no key: {}", String::from_utf8_lossy(&made.stderr).trim());
    let tokens = folder.join("tokens.csv");
    std::fs::write(&tokens, format!("{TOKEN},lab,lab,system:masters\n"))?;
    let key = key.display();
    Ok(vec![
        format!("--etcd-servers=http://127.0.0.1:{etcd}"),
        "--bind-address=127.0.0.1".to_owned(),
        "--advertise-address=127.0.0.1".to_owned(),
        format!("--secure-port={port}"),
        format!("--cert-dir={}", folder.join(CERTIFICATES).display()),
        format!("--token-auth-file={}", tokens.display()),
        "--authorization-mode=RBAC".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        "--service-account-issuer=https://lab".to_owned(),
        format!("--service-account-key-file={key}"),
        format!("--service-account-signing-key-file={key}"),
        // Pods of the lab have no tokens, and no controller here would create their accounts.
        "--disable-admission-plugins=ServiceAccount".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
        "--allow-privileged=true".to_owned(),
    ])
}
