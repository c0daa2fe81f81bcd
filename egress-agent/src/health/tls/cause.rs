//! The text of a failed handshake: its cause, and what to do.

use std::error::Error;
use std::io;

use tokio_rustls::rustls::{self, CertificateError};

/// The cause, if an error of a connection or call is due to TLS. It is the last of a chain of errors.
pub fn find(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return Some(cause(error));
        }
        let io = error.downcast_ref::<io::Error>();
        // `io::Error::source` skips its inner error.
        let inside = io.and_then(io::Error::get_ref).map(|inside| inside as &(dyn Error + 'static));
        let further = inside.or_else(|| error.source());
        // A server verifies the client's certificate after the client has finished the handshake. HTTP/2 keeps only the text
        // of the resulting error.
        if let Some(io) = io.filter(|io| io.kind() == io::ErrorKind::InvalidData)
            && further.is_none_or(|further| !further.is::<rustls::Error>())
        {
            return Some(format!("{io}: see the log of the other side"));
        }
        next = further;
    }
    None
}

fn cause(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(_) => format!("the other side's certificate {}", of_certificate(error)),
        rustls::Error::NoCertificatesPresented => {
            "the other side sends no certificate: give it one, or set --egressip-healthcheck-client-auth=off".to_owned()
        }
        rustls::Error::InvalidMessage(_) => {
            "the other side does not speak TLS: give all agents certificates, or none".to_owned()
        }
        rustls::Error::AlertReceived(alert) => {
            format!("the other side refuses this node's certificate ({alert:?}): see its log")
        }
        other => other.to_string(),
    }
}

/// What is wrong with a certificate, to follow its name.
pub(super) fn of_certificate(error: &rustls::Error) -> String {
    let rustls::Error::InvalidCertificate(error) = error else { return format!("cannot be used: {error}") };
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "has expired: renew it, or correct the clock".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet: correct the clocks".to_owned()
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "was not signed by the CA: use one of --egressip-healthcheck-client-cacert".to_owned()
        }
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "does not have the name {:?} of --egressip-healthcheck-cert-common-name, but [{}]",
            expected.to_str(),
            presented.join(", ")
        ),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "is not for this use: it must allow the authentication of servers and, unless \
             --egressip-healthcheck-client-auth is off, of clients"
                .to_owned()
        }
        other => format!("is refused: {other}"),
    }
}
