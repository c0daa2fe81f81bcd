//! TLS of health checks, on both ends: an agent's server, and the probes of controllers.
//!
//! One certificate, key and CA serve both ends. A probe requires a server certificate signed by the CA, with the expected
//! name among its subject alternative names. A server requires a client certificate signed by the CA, unless that is off.
//! The files are checked every few seconds and read again after a change. Files that cannot be used, or are worse than those
//! in use, are ignored with one line of the log. A certificate that ends soon is reported. Existing sessions continue in any case.
//!
//! - [`Tls`] is the current material of server and prober. [`Keeper`] checks the files.
//! - [`incoming`]: connections of a server, each after its handshake. [`cause`]: the text of a failure.

pub mod cause;
pub mod incoming;
pub mod material;
#[cfg(test)]
pub(crate) mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::sync::CancellationToken;
use tonic::transport::ClientTlsConfig;
use tracing::{info, warn};

pub use crate::health::tls::material::TlsError;
use crate::health::tls::material::{Material, Pem};
use egress_core::notes::Notes;
use egress_supervise;

/// Interval of the checks. A projected secret of a pod takes up to a minute to change.
pub const INTERVAL: Duration = Duration::from_secs(10);

const ABOUT: &str = "TLS of health checks";

/// Paths of the files, and requirements on the other side.
#[derive(Clone, Debug)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub ca: PathBuf,
    /// The name that a server's certificate must have.
    pub name: ServerName<'static>,
    /// Whether a server requires a client certificate.
    pub client_certificate: bool,
}

/// The current material of both ends. Read it for each connection.
#[derive(Clone)]
pub struct Tls(watch::Receiver<Arc<Material>>);

impl Tls {
    /// For a connection of a probe.
    pub fn client(&self) -> ClientTlsConfig {
        self.0.borrow().client()
    }

    fn now(&self) -> Arc<Material> {
        self.0.borrow().clone()
    }
}

impl std::fmt::Debug for Tls {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tls").finish_non_exhaustive()
    }
}

/// Checks the files.
pub struct Keeper {
    files: Files,
    publish: watch::Sender<Arc<Material>>,
    /// The last warning about unused files, or about used ones that will be refused.
    reported: Option<String>,
    notes: Notes,
}

/// Reads the files for the first time. Unusable files are an error; files that the other side will refuse cause a warning.
pub fn read(files: Files) -> Result<(Tls, Keeper), TlsError> {
    let material = Material::new(&files, Pem::read(&files)?)?;
    let (publish, receiver) = watch::channel(Arc::new(material));
    let mut keeper = Keeper { files, publish, reported: None, notes: Notes::default() };
    keeper.check();
    Ok((Tls(receiver), keeper))
}

impl Keeper {
    /// Checks the files at this interval, until `stop`.
    pub async fn run(mut self, interval: Duration, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(interval)).await.is_some() {
            // Usually a few kilobytes from a file system in memory.
            self.check();
        }
    }

    /// Adds warnings to `notes` too.
    #[must_use]
    pub fn with_notes(mut self, notes: Notes) -> Self {
        self.notes = notes;
        self.notes.set(ABOUT, self.reported.iter().cloned().collect());
        self
    }

    fn check(&mut self) {
        let now = self.publish.borrow().clone();
        let problem = match egress_supervise::blocking(|| Pem::read(&self.files)) {
            Ok(pem) if *now.pem() == pem => now.problem(),
            Ok(pem) => match Material::new(&self.files, pem) {
                Ok(new) => match (new.fault(), now.fault()) {
                    (Some(fault), None) => Some((fault, "the former files stay in use")),
                    _ => {
                        let problem = new.problem();
                        self.publish.send_replace(Arc::new(new));
                        info!("the certificate, key and CA of health checks were reloaded");
                        problem
                    }
                },
                Err(error) => Some((error.to_string(), "the former files stay in use")),
            },
            Err(error) => Some((error.to_string(), "the former files stay in use")),
        };
        let line = problem.map(|(problem, effect)| format!("{problem}; {effect}"));
        if let Some(line) = line.as_ref().filter(|line| self.reported.as_ref() != Some(line)) {
            warn!("{ABOUT}: {line}");
        }
        self.notes.set(ABOUT, line.iter().cloned().collect());
        self.reported = line;
    }
}
