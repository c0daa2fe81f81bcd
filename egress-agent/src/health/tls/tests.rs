//! Servers and probes on loopback, with generated certificates.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose as Purpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus as Answer;
use tonic_health::pb::health_client::HealthClient;

use super::*;

const NAME: &str = "egress-agents";

/// A unique number.
fn next() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A CA.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.distinguished_name.push(DnType::CommonName, format!("CA {}", next()));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }
}

/// A folder with the files of one node, gone with the value.
pub(crate) struct NodeFiles(PathBuf);

impl Drop for NodeFiles {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

impl NodeFiles {
    /// With a certificate of the CA, for the usual name and all uses.
    pub(crate) fn new(ca: &Authority) -> Self {
        let name = format!("egress-agent-tls-{}-{}", std::process::id(), next());
        let node = Self(std::env::temp_dir().join(name));
        std::fs::create_dir(&node.0).expect("a folder");
        node.put("ca", &ca.pem);
        node.renew(ca, NAME, |_| {});
        node
    }

    pub(crate) fn put(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).expect("written");
    }

    fn renew(&self, ca: &Authority, name: &str, change: impl FnOnce(&mut CertificateParams)) {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.extended_key_usages = vec![Purpose::ServerAuth, Purpose::ClientAuth];
        change(&mut params);
        let certificate = params.signed_by(&key, &ca.issuer).expect("a certificate");
        self.put("certificate", &certificate.pem());
        self.put("key", &key.serialize_pem());
    }

    fn files(&self) -> Files {
        Files {
            certificate: self.0.join("certificate"),
            key: self.0.join("key"),
            ca: self.0.join("ca"),
            name: NAME.try_into().expect("a name"),
            client_certificate: true,
        }
    }

    pub(crate) fn read(&self) -> (Tls, Keeper) {
        read(self.files()).expect("files")
    }
}

fn expired(params: &mut CertificateParams) {
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2021, 1, 1);
}

/// A health server; returns its port. It ends with the test.
async fn serve(tls: Option<Tls>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (reporter, service) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let plain = TcpIncoming::from(listener);
    tokio::spawn(async move {
        let server = Server::builder().add_service(service);
        match tls {
            Some(tls) => server.serve_with_incoming(tls.incoming(plain)).await,
            None => server.serve_with_incoming(plain).await,
        }
    });
    port
}

async fn connect(port: u16, tls: Option<&Tls>) -> Result<HealthClient<Channel>, tonic::transport::Error> {
    let scheme = if tls.is_some() { "https" } else { "http" };
    let mut endpoint = Endpoint::from_shared(format!("{scheme}://127.0.0.1:{port}"))?;
    if let Some(tls) = tls {
        endpoint = endpoint.tls_config(tls.client())?;
    }
    Ok(HealthClient::new(endpoint.connect().await?))
}

async fn ask(client: &mut HealthClient<Channel>) -> Result<i32, tonic::Status> {
    let request = HealthCheckRequest { service: String::new() };
    client.check(request).await.map(|answer| answer.into_inner().status)
}

/// Probes once; else the cause.
async fn probe(port: u16, tls: Option<&Tls>) -> Result<i32, String> {
    let text =
        |error: &(dyn std::error::Error + 'static)| cause::find(error).unwrap_or_else(|| format!("not TLS: {error:?}"));
    let mut client = connect(port, tls).await.map_err(|error| text(&error))?;
    ask(&mut client).await.map_err(|error| text(&error))
}

const SERVING: Result<i32, String> = Ok(Answer::Serving as i32);

#[tokio::test]
async fn certificates_of_one_ca_are_accepted() {
    let ca = Authority::new();
    let (server, client) = (NodeFiles::new(&ca), NodeFiles::new(&ca));
    let ((server, keeper), (client, _)) = (server.read(), client.read());
    assert_eq!(keeper.reported, None);
    assert_eq!(probe(serve(Some(server)).await, Some(&client)).await, SERVING);
}

#[tokio::test]
async fn a_wrong_server_certificate_is_reported_on_both_ends() {
    let (ca, other) = (Authority::new(), Authority::new());
    let client = NodeFiles::new(&ca).read().0;
    for (make, text) in [
        (
            (&|node: &NodeFiles| node.renew(&other, NAME, |_| {})) as &dyn Fn(&NodeFiles),
            "was not signed by the CA: use one of --egressip-healthcheck-client-cacert",
        ),
        (
            &|node: &NodeFiles| node.renew(&ca, "other", |_| {}),
            "does not have the name \"egress-agents\" of --egressip-healthcheck-cert-common-name, but [DnsName(\"other\")]",
        ),
        (&|node: &NodeFiles| node.renew(&ca, NAME, expired), "has expired: renew it, or correct the clock"),
    ] {
        let node = NodeFiles::new(&ca);
        make(&node);
        let (tls, keeper) = node.read();
        let certificate = node.0.join("certificate");
        let own = format!("the certificate in {} {text}; health checks will fail", certificate.display());
        assert_eq!(keeper.reported, Some(own));
        let outcome = probe(serve(Some(tls)).await, Some(&client)).await;
        assert_eq!(outcome, Err(format!("the other side's certificate {text}")));
    }
}

/// Of one for a year the last thirty days, of one for three days the last one.
#[test]
fn a_certificate_that_ends_soon_is_reported() {
    let ca = Authority::new();
    let node = NodeFiles::new(&ca);
    let day = |from_today: i64| {
        let today = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date();
        let date = today.saturating_add(jiff::Span::new().days(from_today));
        let unsigned = |number: i8| u8::try_from(number).expect("a month or a day");
        date_time_ymd(date.year().into(), unsigned(date.month()), unsigned(date.day()))
    };
    // At midnight, so up to a day less.
    let reported = |since: i64, until: i64| {
        node.renew(&ca, NAME, |params| (params.not_before, params.not_after) = (day(-since), day(until)));
        node.read().1.reported
    };
    assert_eq!(reported(334, 31), None);
    let line = reported(335, 30).expect("it ends soon");
    assert!(line.contains("expires at ") && line.ends_with("Z: renew it; health checks will fail then"), "{line}");
    assert_eq!(reported(1, 3), None);
    assert!(reported(2, 1).is_some());
}

#[tokio::test]
async fn a_client_certificate_is_required_unless_that_is_off() {
    let (ca, other) = (Authority::new(), Authority::new());
    let foreign = NodeFiles::new(&other);
    // It has the CA, which is no secret.
    foreign.put("ca", &ca.pem);
    let foreign = foreign.read().0;
    let server = NodeFiles::new(&ca);
    let outcome = probe(serve(Some(server.read().0)).await, Some(&foreign)).await;
    let text = "received fatal alert: UnknownCA: see the log of the other side";
    assert_eq!(outcome, Err(text.to_owned()));
    let (without_auth, _) = read(Files { client_certificate: false, ..server.files() }).expect("files");
    assert_eq!(probe(serve(Some(without_auth)).await, Some(&foreign)).await, SERVING);
}

#[tokio::test]
async fn a_server_certificate_is_enough_without_client_certificates() {
    let ca = Authority::new();
    let node = NodeFiles::new(&ca);
    node.renew(&ca, NAME, |params| params.extended_key_usages = vec![Purpose::ServerAuth]);
    let reported = node.read().1.reported.expect("a warning");
    assert!(reported.contains("is not for this use: it must allow the authentication of servers and"), "{reported}");
    let (_, keeper) = read(Files { client_certificate: false, ..node.files() }).expect("files");
    assert_eq!(keeper.reported, None);
}

#[tokio::test]
async fn tls_and_plaintext_do_not_connect_and_report_it() {
    let node = NodeFiles::new(&Authority::new());
    let (tls, _keeper) = node.read();
    let outcome = probe(serve(None).await, Some(&tls)).await;
    let text = "the other side does not speak TLS: give all agents certificates, or none";
    assert_eq!(outcome, Err(text.to_owned()));
    assert!(probe(serve(Some(tls)).await, None).await.is_err());
}

#[tokio::test]
async fn changed_files_are_reloaded_and_broken_ones_are_not_used() {
    let (old, new) = (Authority::new(), Authority::new());
    let (server, client) = (NodeFiles::new(&old), NodeFiles::new(&old));
    let ((tls, mut keeper), (client_tls, mut client_keeper)) = (server.read(), client.read());
    let port = serve(Some(tls)).await;
    let mut session = connect(port, Some(&client_tls)).await.expect("a session");
    assert_eq!(ask(&mut session).await.ok(), SERVING.ok());

    // Incomplete or unusable files: the former ones stay.
    let whole = std::fs::read_to_string(server.0.join("certificate")).expect("the certificate");
    server.put("certificate", &whole[..whole.len() / 2]);
    keeper.check();
    let reported = keeper.reported.clone().expect("a line");
    assert!(
        reported.ends_with("certificate holds no certificate in PEM form; the former files stay in use"),
        "{reported}"
    );
    server.put("certificate", &whole);
    server.put("key", &KeyPair::generate().expect("a key").serialize_pem());
    keeper.check();
    let reported = keeper.reported.clone().expect("a line");
    assert!(reported.contains("does not match the certificate") && reported.ends_with("stay in use"), "{reported}");
    std::fs::remove_file(server.0.join("key")).expect("it exists");
    keeper.check();
    assert!(
        keeper.reported.as_ref().is_some_and(|reported| reported.starts_with("cannot read ")),
        "{:?}",
        keeper.reported
    );
    // Usable, but worse than those in use.
    server.renew(&old, NAME, expired);
    keeper.check();
    let reported = keeper.reported.clone().expect("a line");
    assert!(reported.contains("has expired") && reported.ends_with("; the former files stay in use"), "{reported}");
    assert_eq!(probe(port, Some(&client_tls)).await, SERVING);

    // Another CA, for all.
    for (node, keeper) in [(&server, &mut keeper), (&client, &mut client_keeper)] {
        node.put("ca", &new.pem);
        node.renew(&new, NAME, |_| {});
        keeper.check();
        assert_eq!(keeper.reported, None);
    }
    assert_eq!(probe(port, Some(&client_tls)).await, SERVING);
    assert_eq!(ask(&mut session).await.ok(), SERVING.ok(), "an existing session continues");
    let former = NodeFiles::new(&old);
    assert!(probe(port, Some(&former.read().0)).await.is_err());
}

#[tokio::test]
async fn the_keeper_checks_at_its_interval() {
    let (old, new) = (Authority::new(), Authority::new());
    let node = NodeFiles::new(&old);
    let (tls, keeper) = node.read();
    let stop = CancellationToken::new();
    let keeping = tokio::spawn(keeper.run(Duration::from_millis(10), stop.clone()));
    node.put("ca", &new.pem);
    node.renew(&new, NAME, |_| {});
    let mut changes = tls.0.clone();
    changes.changed().await.expect("the keeper runs");
    assert_eq!(tls.now().fault(), None);
    stop.cancel();
    keeping.await.expect("it ends");
}

#[test]
fn an_unusable_file_is_one_line() {
    let node = NodeFiles::new(&Authority::new());
    let files = node.files();
    let wrong = |change: &dyn Fn(&mut Files)| {
        let mut files = files.clone();
        change(&mut files);
        read(files).err().map(|error| error.to_string()).expect("an error")
    };
    let path = |name: &str| node.0.join(name).display().to_string();
    let missing = wrong(&|files| files.ca = Path::new("/nonexistent").to_owned());
    assert!(missing.starts_with("cannot read /nonexistent: "), "{missing}");
    let swapped = wrong(&|files| std::mem::swap(&mut files.key, &mut files.certificate));
    assert_eq!(swapped, format!("{} holds no certificate in PEM form", path("key")));
    let no_key = wrong(&|files| files.key = files.ca.clone());
    assert_eq!(no_key, format!("{} holds no private key in PEM form", path("ca")));
}
