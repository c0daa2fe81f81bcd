//! TLS of health checks, on both ends: an agent's server, and the probes of controllers.
//!
//! One certificate, key and CA serve both ends. A probe wants a certificate that the CA has signed and that bears the
//! expected name among its subject alternative names; a server wants one that the CA has signed, unless that is turned
//! off. The files are looked at every few seconds and read anew when what they say has changed. What cannot be used,
//! or is worse than what is in use, is not: that goes on, and one line says why. Sessions that exist go on in any case.
//!
//! - [`Tls`] is what server and prober take. [`Keeper`] looks at the files.
//! - [`incoming`]: connections of a server, each after its handshake. [`cause`]: what went wrong, in words.

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

/// How often the files are looked at. A projected secret of a pod takes up to a minute to change.
pub const INTERVAL: Duration = Duration::from_secs(10);

const ABOUT: &str = "TLS of health checks";

/// Where everything is, and what is asked of the other side.
#[derive(Clone, Debug)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub ca: PathBuf,
    /// What the certificate of a server must bear.
    pub name: ServerName<'static>,
    /// A server wants a certificate of whoever probes.
    pub client_certificate: bool,
}

/// What both ends use now. Ask anew for each connection.
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

/// Looks at the files.
pub struct Keeper {
    files: Files,
    publish: watch::Sender<Arc<Material>>,
    /// What was said last of files that are not used, or of what is used and will be refused.
    said: Option<String>,
    notes: Notes,
}

/// Reads the files for the first time. What cannot be used is an error; what the other side will refuse is a warning.
pub fn read(files: Files) -> Result<(Tls, Keeper), TlsError> {
    let material = Material::new(&files, Pem::read(&files)?)?;
    let (publish, receiver) = watch::channel(Arc::new(material));
    let mut keeper = Keeper { files, publish, said: None, notes: Notes::default() };
    keeper.look();
    Ok((Tls(receiver), keeper))
}

impl Keeper {
    /// Looks at the files every so often, until told to stop.
    pub async fn run(mut self, interval: Duration, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(interval)).await.is_some() {
            // A few kilobytes from a file system in memory, as a rule.
            self.look();
        }
    }

    /// Says there too what is wrong.
    #[must_use]
    pub fn telling(mut self, notes: Notes) -> Self {
        self.notes = notes;
        self.notes.set(ABOUT, self.said.iter().cloned().collect());
        self
    }

    fn look(&mut self) {
        let now = self.publish.borrow().clone();
        let trouble = match egress_supervise::blocking(|| Pem::read(&self.files)) {
            Ok(pem) if *now.pem() == pem => now.fault().map(|fault| (fault, "health checks will fail")),
            Ok(pem) => match Material::new(&self.files, pem) {
                Ok(new) => match (new.fault(), now.fault()) {
                    (Some(fault), None) => Some((fault, "the former files stay in use")),
                    (fault, _) => {
                        self.publish.send_replace(Arc::new(new));
                        info!("the certificate, key and CA of health checks are read anew");
                        fault.map(|fault| (fault, "health checks will fail"))
                    }
                },
                Err(error) => Some((error.to_string(), "the former files stay in use")),
            },
            Err(error) => Some((error.to_string(), "the former files stay in use")),
        };
        let line = trouble.map(|(trouble, so)| format!("{trouble}; {so}"));
        if let Some(line) = line.as_ref().filter(|line| self.said.as_ref() != Some(line)) {
            warn!("{ABOUT}: {line}");
        }
        self.notes.set(ABOUT, line.iter().cloned().collect());
        self.said = line;
    }
}
