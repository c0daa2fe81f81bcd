//! Why a handshake failed, in words that say what to do.

use std::error::Error;
use std::io;

use tokio_rustls::rustls::{self, CertificateError};

/// The cause, if TLS is to blame for an error of a connection or of a call. It stands at the end of a chain of others' errors.
pub fn find(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return Some(cause(error));
        }
        let io = error.downcast_ref::<io::Error>();
        // An error of input or output hides the one that it is made of from those who walk along the chain.
        let inside = io.and_then(io::Error::get_ref).map(|inside| inside as &(dyn Error + 'static));
        let further = inside.or_else(|| error.source());
        // A server judges the client's certificate when for the client the handshake is over. HTTP/2 leaves nothing but the
        // text of what comes then.
        if let Some(io) = io.filter(|io| io.kind() == io::ErrorKind::InvalidData)
            && further.is_none_or(|further| !further.is::<rustls::Error>())
        {
            return Some(format!("{io}: the log of the other side says why"));
        }
        next = further;
    }
    None
}

fn cause(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(_) => format!("the other side's certificate {}", of_certificate(error)),
        rustls::Error::NoCertificatesPresented => {
            "the other side shows no certificate: give it one, or turn --egressip-healthcheck-client-auth off"
                .to_owned()
        }
        rustls::Error::InvalidMessage(_) => {
            "the other side does not speak TLS: give all agents certificates, or none".to_owned()
        }
        rustls::Error::AlertReceived(alert) => {
            format!("the other side refuses this node's certificate ({alert:?}): its log says why")
        }
        other => other.to_string(),
    }
}

/// What is wrong with a certificate: goes on behind its name.
pub(super) fn of_certificate(error: &rustls::Error) -> String {
    let rustls::Error::InvalidCertificate(error) = error else { return format!("cannot be used: {error}") };
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "has expired: renew it, or set the clock right".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet: set the clocks right".to_owned()
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "was not signed by the CA: use one of --egressip-healthcheck-client-cacert".to_owned()
        }
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "does not bear the name {:?} of --egressip-healthcheck-cert-common-name, but [{}]",
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
