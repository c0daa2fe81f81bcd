//! TLS flags of health checks. The keys of the section `[egressip-healthcheck-tls]` of the configuration file are these flags
//! without their prefix.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tokio_rustls::rustls::pki_types::ServerName;

use crate::health::tls::Files;

#[derive(Args, Debug)]
#[command(next_help_heading = "TLS of health checks")]
pub struct TlsArgs {
    /// Certificate of this node's health server and of its probes, PEM; with key, CA and name health checks use TLS, with none
    /// of the four plaintext [default: plaintext]
    #[arg(long, env = "EGRESS_AGENT_HEALTHCHECK_CLIENT_CERT", value_name = "FILE")]
    egressip_healthcheck_client_cert: Option<PathBuf>,
    /// The certificate's private key, PEM
    #[arg(long, env = "EGRESS_AGENT_HEALTHCHECK_CLIENT_PRIVKEY", value_name = "FILE")]
    egressip_healthcheck_client_privkey: Option<PathBuf>,
    /// CA that signs the certificates of all agents, PEM; during a CA rotation the file has both
    #[arg(long, env = "EGRESS_AGENT_HEALTHCHECK_CLIENT_CACERT", value_name = "FILE")]
    egressip_healthcheck_client_cacert: Option<PathBuf>,
    /// Name among the subject alternative names of each agent's certificate (its common name does not count)
    #[arg(long, env = "EGRESS_AGENT_HEALTHCHECK_CERT_COMMON_NAME", value_name = "NAME", value_parser = server_name)]
    egressip_healthcheck_cert_common_name: Option<ServerName<'static>>,
    /// Whether the health server requires a client certificate
    #[arg(
        long,
        env = "EGRESS_AGENT_HEALTHCHECK_CLIENT_AUTH",
        value_name = "MODE",
        value_enum,
        default_value_t = ClientAuth::Required
    )]
    egressip_healthcheck_client_auth: ClientAuth,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ClientAuth {
    /// One signed by the CA
    Required,
    /// None: for certificates without client authentication
    Off,
}

/// TLS flags that would protect nothing.
#[derive(Debug, thiserror::Error)]
pub enum UnusableTls {
    /// Only some of them are set.
    #[error(
        "TLS of health checks lacks {}: give certificate, key, CA and name, by flags or in [egressip-healthcheck-tls] of the \
         configuration file, or none of them", .0.join(", ")
    )]
    Incomplete(Vec<&'static str>),
    /// No health checks, which OVN-Kubernetes allows too.
    #[error(
        "TLS of health checks is configured, and there are none, since --egressip-node-healthcheck-port is 0: give a port, such \
         as 9107, by the flag or as egressip-node-healthcheck-port in [ovnkubernetesfeature] of the configuration file, the \
         same for agents and controllers, or remove certificate, key, CA and name"
    )]
    NoHealthChecks,
}

fn server_name(text: &str) -> Result<ServerName<'static>, &'static str> {
    ServerName::try_from(text.to_owned()).map_err(|_| "neither a DNS name nor an address")
}

impl TlsArgs {
    /// The files of TLS; `None` if no flag is set. `port` is the one of health checks.
    pub fn files(&self, port: u16) -> Result<Option<Files>, UnusableTls> {
        let Self {
            egressip_healthcheck_client_cert: certificate,
            egressip_healthcheck_client_privkey: key,
            egressip_healthcheck_client_cacert: ca,
            egressip_healthcheck_cert_common_name: name,
            egressip_healthcheck_client_auth: client_auth,
        } = self;
        if let (Some(certificate), Some(key), Some(ca), Some(name)) = (certificate, key, ca, name) {
            if port == 0 {
                return Err(UnusableTls::NoHealthChecks);
            }
            return Ok(Some(Files {
                certificate: certificate.clone(),
                key: key.clone(),
                ca: ca.clone(),
                name: name.clone(),
                client_certificate: *client_auth == ClientAuth::Required,
            }));
        }
        let missing: Vec<&str> = [
            ("--egressip-healthcheck-client-cert", certificate.is_none()),
            ("--egressip-healthcheck-client-privkey", key.is_none()),
            ("--egressip-healthcheck-client-cacert", ca.is_none()),
            ("--egressip-healthcheck-cert-common-name", name.is_none()),
        ]
        .into_iter()
        .filter_map(|(flag, missing)| missing.then_some(flag))
        .collect();
        if missing.len() == 4 { Ok(None) } else { Err(UnusableTls::Incomplete(missing)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_flags;

    fn files(arguments: &[&str]) -> Result<Option<Files>, String> {
        files_at(9107, arguments)
    }

    fn files_at(port: u16, arguments: &[&str]) -> Result<Option<Files>, String> {
        let flags: TlsArgs = parse_flags(arguments.iter().copied()).map_err(|error| error.to_string())?;
        flags.files(port).map_err(|error| error.to_string())
    }

    const CERT: &str = "--egressip-healthcheck-client-cert=/c";
    const KEY: &str = "--egressip-healthcheck-client-privkey=/k";
    const CA: &str = "--egressip-healthcheck-client-cacert=/ca";
    const NAME: &str = "--egressip-healthcheck-cert-common-name=ovn";

    #[test]
    fn all_flags_enable_tls_and_none_disables_it() {
        assert!(files(&[]).is_ok_and(|files| files.is_none()));
        let all = files(&[CERT, KEY, CA, NAME]).expect("whole").expect("TLS");
        assert_eq!((all.name.to_str().as_ref(), all.client_certificate), ("ovn", true));
        let off = files(&[CERT, KEY, CA, NAME, "--egressip-healthcheck-client-auth=off"]).expect("whole");
        assert!(off.is_some_and(|files| !files.client_certificate));
    }

    #[test]
    fn tls_without_health_checks_is_refused() {
        let line = files_at(0, &[CERT, KEY, CA, NAME]).expect_err("no health checks");
        assert!(line.contains("--egressip-node-healthcheck-port is 0: give a port") && !line.contains('\n'), "{line}");
        assert!(files_at(0, &[]).is_ok_and(|files| files.is_none()));
    }

    #[test]
    fn incomplete_flags_are_one_line_that_names_the_missing_ones() {
        let line = files(&[CERT, CA]).expect_err("half");
        assert_eq!(
            line,
            "TLS of health checks lacks --egressip-healthcheck-client-privkey, --egressip-healthcheck-cert-common-name: give \
             certificate, key, CA and name, by flags or in [egressip-healthcheck-tls] of the configuration file, or none of \
             them"
        );
        assert!(files(&[NAME]).is_err());
        let bad = files(&["--egressip-healthcheck-cert-common-name=two words"]).expect_err("no name");
        assert!(bad.contains("neither a DNS name nor an address"), "{bad}");
    }
}
