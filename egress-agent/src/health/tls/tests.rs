//! Servers and probes on loopback, with certificates made here.

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

/// A number that nobody else has.
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
pub(crate) struct Node(PathBuf);

impl Drop for Node {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

impl Node {
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

/// Asks once; else why not.
async fn probe(port: u16, tls: Option<&Tls>) -> Result<i32, String> {
    let words =
        |error: &(dyn std::error::Error + 'static)| cause::find(error).unwrap_or_else(|| format!("not TLS: {error:?}"));
    let mut client = connect(port, tls).await.map_err(|error| words(&error))?;
    ask(&mut client).await.map_err(|error| words(&error))
}

const SERVING: Result<i32, String> = Ok(Answer::Serving as i32);

#[tokio::test]
async fn agents_with_certificates_of_one_ca_understand_each_other() {
    let ca = Authority::new();
    let (server, client) = (Node::new(&ca), Node::new(&ca));
    let ((server, keeper), (client, _)) = (server.read(), client.read());
    assert_eq!(keeper.said, None);
    assert_eq!(probe(serve(Some(server)).await, Some(&client)).await, SERVING);
}

#[tokio::test]
async fn what_is_wrong_with_a_servers_certificate_is_told_on_both_ends() {
    let (ca, other) = (Authority::new(), Authority::new());
    let client = Node::new(&ca).read().0;
    for (make, words) in [
        (
            (&|node: &Node| node.renew(&other, NAME, |_| {})) as &dyn Fn(&Node),
            "was not signed by the CA: use one of --egressip-healthcheck-client-cacert",
        ),
        (
            &|node: &Node| node.renew(&ca, "somebody", |_| {}),
            "does not bear the name \"egress-agents\" of --egressip-healthcheck-cert-common-name, but [DnsName(\"somebody\")]",
        ),
        (&|node: &Node| node.renew(&ca, NAME, expired), "has expired: renew it, or set the clock right"),
    ] {
        let node = Node::new(&ca);
        make(&node);
        let (tls, keeper) = node.read();
        let certificate = node.0.join("certificate");
        let own = format!("the certificate in {} {words}; health checks will fail", certificate.display());
        assert_eq!(keeper.said, Some(own));
        let told = probe(serve(Some(tls)).await, Some(&client)).await;
        assert_eq!(told, Err(format!("the other side's certificate {words}")));
    }
}

#[tokio::test]
async fn whoever_probes_shows_a_certificate_where_that_is_asked_for() {
    let (ca, other) = (Authority::new(), Authority::new());
    let stranger = Node::new(&other);
    // It knows the CA, as everybody may.
    stranger.put("ca", &ca.pem);
    let stranger = stranger.read().0;
    let server = Node::new(&ca);
    let told = probe(serve(Some(server.read().0)).await, Some(&stranger)).await;
    let words = "received fatal alert: UnknownCA: the log of the other side says why";
    assert_eq!(told, Err(words.to_owned()));
    let (anybody, _) = read(Files { client_certificate: false, ..server.files() }).expect("files");
    assert_eq!(probe(serve(Some(anybody)).await, Some(&stranger)).await, SERVING);
}

#[tokio::test]
async fn a_certificate_for_servers_alone_is_enough_where_clients_show_none() {
    let ca = Authority::new();
    let node = Node::new(&ca);
    node.renew(&ca, NAME, |params| params.extended_key_usages = vec![Purpose::ServerAuth]);
    let said = node.read().1.said.expect("a warning");
    assert!(said.contains("is not for this use: it must allow the authentication of servers and"), "{said}");
    let (_, keeper) = read(Files { client_certificate: false, ..node.files() }).expect("files");
    assert_eq!(keeper.said, None);
}

#[tokio::test]
async fn tls_and_plaintext_do_not_meet_and_say_so() {
    let node = Node::new(&Authority::new());
    let (tls, _keeper) = node.read();
    let told = probe(serve(None).await, Some(&tls)).await;
    let words = "the other side does not speak TLS: give all agents certificates, or none";
    assert_eq!(told, Err(words.to_owned()));
    assert!(probe(serve(Some(tls)).await, None).await.is_err());
}

#[tokio::test]
async fn files_are_read_anew_and_broken_ones_are_not_used() {
    let (old, new) = (Authority::new(), Authority::new());
    let (server, client) = (Node::new(&old), Node::new(&old));
    let ((tls, mut keeper), (client_tls, mut client_keeper)) = (server.read(), client.read());
    let port = serve(Some(tls)).await;
    let mut session = connect(port, Some(&client_tls)).await.expect("a session");
    assert_eq!(ask(&mut session).await.ok(), SERVING.ok());

    // Half of it is there, or none that can be used: the former stay.
    let whole = std::fs::read_to_string(server.0.join("certificate")).expect("the certificate");
    server.put("certificate", &whole[..whole.len() / 2]);
    keeper.look();
    let said = keeper.said.clone().expect("a line");
    assert!(said.ends_with("certificate holds no certificate in PEM form; the former files stay in use"), "{said}");
    server.put("certificate", &whole);
    server.put("key", &KeyPair::generate().expect("a key").serialize_pem());
    keeper.look();
    let said = keeper.said.clone().expect("a line");
    assert!(said.contains("does not fit the certificate") && said.ends_with("stay in use"), "{said}");
    std::fs::remove_file(server.0.join("key")).expect("it was there");
    keeper.look();
    assert!(keeper.said.as_ref().is_some_and(|said| said.starts_with("cannot read ")), "{:?}", keeper.said);
    // In order, but worse than what is in use.
    server.renew(&old, NAME, expired);
    keeper.look();
    let said = keeper.said.clone().expect("a line");
    assert!(said.contains("has expired") && said.ends_with("; the former files stay in use"), "{said}");
    assert_eq!(probe(port, Some(&client_tls)).await, SERVING);

    // Another CA, for all.
    for (node, keeper) in [(&server, &mut keeper), (&client, &mut client_keeper)] {
        node.put("ca", &new.pem);
        node.renew(&new, NAME, |_| {});
        keeper.look();
        assert_eq!(keeper.said, None);
    }
    assert_eq!(probe(port, Some(&client_tls)).await, SERVING);
    assert_eq!(ask(&mut session).await.ok(), SERVING.ok(), "a session goes on");
    let former = Node::new(&old);
    assert!(probe(port, Some(&former.read().0)).await.is_err());
}

#[tokio::test]
async fn the_keeper_looks_every_so_often() {
    let (old, new) = (Authority::new(), Authority::new());
    let node = Node::new(&old);
    let (tls, keeper) = node.read();
    let stop = CancellationToken::new();
    let keeping = tokio::spawn(keeper.run(Duration::from_millis(10), stop.clone()));
    node.put("ca", &new.pem);
    node.renew(&new, NAME, |_| {});
    let mut changes = tls.0.clone();
    changes.changed().await.expect("the keeper is there");
    assert_eq!(tls.now().fault(), None);
    stop.cancel();
    keeping.await.expect("it ends");
}

#[test]
fn what_cannot_be_used_at_all_is_one_line() {
    let node = Node::new(&Authority::new());
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
