//! The content of the files, and the TLS configurations made from it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::health::tls::Files;
use crate::health::tls::cause;

/// A certificate is reported so long before its end. Of one that is valid for a shorter time, the last third.
const RENEW_BEFORE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// HTTP/2, for gRPC.
const ALPN: &[u8] = b"h2";

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} holds no certificate in PEM form", .0.display())]
    NoCertificate(PathBuf),
    #[error("{} holds no private key in PEM form", .0.display())]
    NoKey(PathBuf),
    #[error("{} cannot be used as a CA: {why}", path.display())]
    Ca { path: PathBuf, why: String },
    #[error("the key in {} does not match the certificate in {}: {why}", key.display(), certificate.display())]
    Pair { certificate: PathBuf, key: PathBuf, why: String },
}

/// The content of the files.
#[derive(PartialEq, Eq)]
pub(super) struct Pem {
    certificate: Vec<u8>,
    key: Vec<u8>,
    ca: Vec<u8>,
}

impl Pem {
    pub(super) fn read(files: &Files) -> Result<Self, TlsError> {
        let read = |path: &Path| std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source });
        Ok(Self { certificate: read(&files.certificate)?, key: read(&files.key)?, ca: read(&files.ca)? })
    }
}

/// TLS configurations of connections.
pub(super) struct Material {
    files: Files,
    pem: Pem,
    server: Arc<ServerConfig>,
    /// The node's own certificates, and the verifiers of the other ends.
    chain: Vec<CertificateDer<'static>>,
    /// Of the first of them, in seconds since the epoch. `None` if it is unreadable.
    validity: Option<Validity>,
    of_servers: Arc<dyn ServerCertVerifier>,
    of_clients: Arc<dyn ClientCertVerifier>,
}

impl Material {
    pub(super) fn new(files: &Files, pem: Pem) -> Result<Self, TlsError> {
        let chain = certificates(&files.certificate, &pem.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&pem.key).map_err(|_| TlsError::NoKey(files.key.clone()))?;
        let unusable = |why: String| TlsError::Ca { path: files.ca.clone(), why };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&files.ca, &pem.ca)? {
            roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(aws_lc_rs::default_provider()));
        let of_servers = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| unusable(error.to_string()))?;
        let of_clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| unusable(error.to_string()))?;
        let mismatch = |error: rustls::Error| TlsError::Pair {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            why: error.to_string(),
        };
        let server =
            ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(mismatch)?;
        let server = match files.client_certificate {
            true => server.with_client_cert_verifier(of_clients.clone()),
            false => server.with_no_client_auth(),
        };
        let mut server = server.with_single_cert(chain.clone(), key).map_err(mismatch)?;
        server.alpn_protocols.push(ALPN.to_vec());
        let validity = chain.first().and_then(Validity::of);
        Ok(Self { files: files.clone(), pem, server: Arc::new(server), chain, validity, of_servers, of_clients })
    }

    pub(super) fn pem(&self) -> &Pem {
        &self.pem
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.server.clone())
    }

    pub(super) fn client(&self) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.pem.ca))
            .identity(Identity::from_pem(&self.pem.certificate, &self.pem.key))
            .domain_name(self.files.name.to_str())
    }

    /// What is wrong with the node's certificate, now or soon, and the effect.
    pub(super) fn problem(&self) -> Option<(String, &'static str)> {
        if let Some(fault) = self.fault() {
            return Some((fault, "health checks will fail"));
        }
        let validity = self.validity.filter(|validity| validity.ends_soon(UnixTime::now().as_secs()))?;
        let (path, end) = (self.files.certificate.display(), validity.end_text());
        Some((format!("the certificate in {path} expires at {end}: renew it"), "health checks will fail then"))
    }

    /// Why other agents, with the same name and CA, would refuse this node's certificate now.
    pub(super) fn fault(&self) -> Option<String> {
        let (own, others) = self.chain.split_first()?;
        let now = UnixTime::now();
        let name: &ServerName<'_> = &self.files.name;
        let as_server = self.of_servers.verify_server_cert(own, others, name, &[], now).err();
        let as_client = || match self.files.client_certificate {
            true => self.of_clients.verify_client_cert(own, others, now).err(),
            false => None,
        };
        let error = as_server.or_else(as_client)?;
        Some(format!("the certificate in {} {}", self.files.certificate.display(), cause::of_certificate(&error)))
    }
}

/// From when until when a certificate is valid, in seconds since the epoch.
#[derive(Clone, Copy, Debug)]
struct Validity {
    begin: i64,
    end: i64,
}

impl Validity {
    fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
        let validity = parsed.validity();
        Some(Self { begin: validity.not_before.timestamp(), end: validity.not_after.timestamp() })
    }

    fn ends_soon(self, now: u64) -> bool {
        let before = (self.end - self.begin) / 3;
        let before = before.min(i64::try_from(RENEW_BEFORE.as_secs()).unwrap_or(i64::MAX));
        i64::try_from(now).is_ok_and(|now| now >= self.end - before)
    }

    fn end_text(self) -> String {
        jiff::Timestamp::from_second(self.end).map_or_else(|_| self.end.to_string(), |end| end.to_string())
    }
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let none = || TlsError::NoCertificate(path.to_owned());
    let all: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|_| none())?;
    if all.is_empty() { Err(none()) } else { Ok(all) }
}
