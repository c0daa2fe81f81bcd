//! A client for the cluster that the agent belongs to.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Uri;
use kube::client::ClientBuilder;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use tokio::time::{sleep, timeout};

use crate::api_outage::ApiOutages;
use crate::stalled_requests::StalledRequests;

/// Longer than any handshake takes, and short enough that a server that has moved is found.
const CONNECT: Duration = Duration::from_secs(5);
/// Between two questions whether it answers, and for each answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Why there is no client. One line each, with what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot use the kubeconfig {path}: {}; check --kubeconfig", first_line(source), path = path.display())]
    Kubeconfig { path: PathBuf, source: KubeconfigError },
    #[error("not in a pod of a cluster ({0}); give --kubeconfig")]
    NotInCluster(#[source] InClusterError),
    #[error("no way to an API server is known ({}; {pod}); give --kubeconfig", first_line(source))]
    NoWay { source: KubeconfigError, pod: InClusterError },
    #[error(
        "the kubeconfig has the proxy {0} for its cluster, and none is supported; name a server that is reached without one"
    )]
    Proxy(String),
    #[error("cannot set up the connection to the API server: {0}")]
    Setup(#[source] kube::Error),
}

/// The library shows the place in the file on further lines.
fn first_line(error: &KubeconfigError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// From the file, else from the pod's service account; with who tells of the server's outages.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<(Client, ApiOutages), ClientError> {
    let config = match kubeconfig {
        Some(path) => {
            let source = |source| ClientError::Kubeconfig { path: path.to_owned(), source };
            direct(read(Kubeconfig::read_from(path)).await.map_err(source)?)?
        }
        None => Config::incluster().map_err(ClientError::NotInCluster)?,
    };
    client(config).map_err(ClientError::Setup)
}

/// Waits until the server answers anything, be it that we may not ask. `waits` is told where it does not at once.
pub async fn answered(client: &Client, waits: impl FnOnce()) {
    let mut waits = Some(waits);
    loop {
        match timeout(PAUSE, client.apiserver_version()).await {
            Ok(Ok(_)) => return,
            Ok(Err(kube::Error::Api(status))) if status.code < 500 => return,
            Ok(Err(_)) | Err(_) => {}
        }
        waits.take().into_iter().for_each(|tell| tell());
        sleep(PAUSE).await;
    }
}

/// The addresses that the client connects to, asked for once where the server has a name.
pub async fn addresses(outages: &ApiOutages) -> BTreeSet<IpAddr> {
    let Ok(url) = outages.server().parse::<Uri>() else { return BTreeSet::new() };
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    if let Ok(address) = host.parse() {
        return BTreeSet::from([address]);
    }
    match timeout(CONNECT, tokio::net::lookup_host((host.as_str(), 0))).await {
        Ok(Ok(found)) => found.map(|found| found.ip().to_canonical()).collect(),
        // The watches say that the server cannot be reached.
        Ok(Err(_)) | Err(_) => BTreeSet::new(),
    }
}

/// For a command of an administrator: from the file, else as kubectl finds its way, else from the pod's service account.
pub async fn connect_as_user(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    if kubeconfig.is_some() {
        return Ok(connect(kubeconfig).await?.0);
    }
    let config = match read(Kubeconfig::read()).await {
        Ok(found) => direct(found)?,
        Err(source) => Config::incluster().map_err(|pod| ClientError::NoWay { source, pod })?,
    };
    Ok(client(config).map_err(ClientError::Setup)?.0)
}

/// The library asks again by itself where a server, or the load balancer before it, cannot answer now, and waits for minutes
/// in between. Here whoever asks knows better when to ask again, and is to know that it was in vain.
pub(super) fn client(mut config: Config) -> kube::Result<(Client, ApiOutages)> {
    (config.default_retry, config.connect_timeout) = (false, Some(CONNECT));
    // Without TLS nobody's word is needed; else the library would look for the system's, and an image has none.
    if config.cluster_url.scheme_str() == Some("http") {
        config.root_cert.get_or_insert_default();
    }
    let outages = ApiOutages::new(&config.cluster_url.to_string());
    let client = ClientBuilder::try_from(config)?.with_layer(&StalledRequests(outages.clone())).build();
    Ok((client, outages))
}

/// What a kubeconfig says, and the proxy that it has for its cluster.
async fn read(file: Result<Kubeconfig, KubeconfigError>) -> Result<(Config, Option<String>), KubeconfigError> {
    let file = file?;
    let proxy = proxy(&file);
    Ok((Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?, proxy))
}

/// Of the cluster of its context.
fn proxy(file: &Kubeconfig) -> Option<String> {
    let name = file.current_context.as_ref()?;
    let context = file.contexts.iter().find(|one| one.name == *name)?.context.as_ref()?;
    let cluster = file.clusters.iter().find(|one| one.name == context.cluster)?.cluster.as_ref()?;
    cluster.proxy_url.clone().filter(|url| !url.is_empty())
}

/// Where the file has none the library takes that of the environment, without a look at the exceptions beside it. The API server
/// is asked directly.
fn direct((mut config, proxy): (Config, Option<String>)) -> Result<Config, ClientError> {
    config.proxy_url = None;
    proxy.map_or(Ok(config), |url| Err(ClientError::Proxy(url)))
}
