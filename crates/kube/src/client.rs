//! A client of the API server of the agent's cluster.

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

/// Longer than any handshake, and short enough to find a server that has moved.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two requests whether the server answers, and timeout of each.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Why there is no client: one line each, with what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot use the kubeconfig {path}: {}; check --kubeconfig", first_line(source), path = path.display())]
    Kubeconfig { path: PathBuf, source: KubeconfigError },
    #[error("cannot use the context {context}: {}; see `kubectl config get-contexts`", first_line(source))]
    Context { context: String, source: KubeconfigError },
    #[error("not in a pod of a cluster ({0}); give --kubeconfig")]
    NotInCluster(#[source] InClusterError),
    #[error("no API server is known ({}; {pod}); give --kubeconfig", first_line(source))]
    NotConfigured { source: KubeconfigError, pod: InClusterError },
    #[error(
        "the kubeconfig has the proxy {0} for its cluster, and none is supported; name a server that is reached without one"
    )]
    Proxy(String),
    #[error("cannot set up the connection to the API server: {0}")]
    Setup(#[source] kube::Error),
}

/// The library appends an excerpt of the file on further lines.
fn first_line(error: &KubeconfigError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Connects by the kubeconfig, else by the pod's service account. The outages are those of the client's server.
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

/// Waits until the server answers anything, a refusal included. Calls `on_wait` if it does not answer at once.
pub async fn until_answered(client: &Client, on_wait: impl FnOnce()) {
    let mut on_wait = Some(on_wait);
    loop {
        match timeout(RETRY_PAUSE, client.apiserver_version()).await {
            Ok(Ok(_)) => return,
            Ok(Err(kube::Error::Api(status))) if status.code < 500 => return,
            Ok(Err(_)) | Err(_) => {}
        }
        on_wait.take().into_iter().for_each(|report| report());
        sleep(RETRY_PAUSE).await;
    }
}

/// The addresses that the client connects to. A name is resolved once.
pub async fn server_addresses(outages: &ApiOutages) -> BTreeSet<IpAddr> {
    let Ok(url) = outages.server().parse::<Uri>() else { return BTreeSet::new() };
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    if let Ok(address) = host.parse() {
        return BTreeSet::from([address]);
    }
    match timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((host.as_str(), 0))).await {
        Ok(Ok(found)) => found.map(|found| found.ip().to_canonical()).collect(),
        // The watches log that the server cannot be reached.
        Ok(Err(_)) | Err(_) => BTreeSet::new(),
    }
}

/// Connects for a command: by the given kubeconfig, else by that which kubectl uses, else by the pod's service account.
pub async fn connect_as_user(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    if kubeconfig.is_some() {
        return Ok(connect(kubeconfig).await?.0);
    }
    let config = match read(Kubeconfig::read()).await {
        Ok(found) => direct(found)?,
        Err(source) => Config::incluster().map_err(|pod| ClientError::NotConfigured { source, pod })?,
    };
    Ok(client(config).map_err(ClientError::Setup)?.0)
}

/// The same, by this context of the kubeconfig instead of its current one.
pub async fn connect_by_context(kubeconfig: Option<&Path>, context: &str) -> Result<Client, ClientError> {
    let file = kubeconfig.map_or_else(Kubeconfig::read, Kubeconfig::read_from);
    let chosen = file.map(|file| Kubeconfig { current_context: Some(context.to_owned()), ..file });
    let found = read(chosen).await.map_err(|source| ClientError::Context { context: context.to_owned(), source })?;
    Ok(client(direct(found)?).map_err(ClientError::Setup)?.0)
}

/// Turns off the library's own retries of 5xx answers, with pauses of minutes: callers here decide when to retry, and must know
/// of each failure.
pub(super) fn client(mut config: Config) -> kube::Result<(Client, ApiOutages)> {
    (config.default_retry, config.connect_timeout) = (false, Some(CONNECT_TIMEOUT));
    // Without TLS no CA is needed; else the library would load the system's, and the image has none.
    if config.cluster_url.scheme_str() == Some("http") {
        config.root_cert.get_or_insert_default();
    }
    let outages = ApiOutages::new(&config.cluster_url.to_string());
    let client = ClientBuilder::try_from(config)?.with_layer(&StalledRequests(outages.clone())).build();
    Ok((client, outages))
}

/// The configuration of a kubeconfig, and the proxy that it names for its cluster.
async fn read(file: Result<Kubeconfig, KubeconfigError>) -> Result<(Config, Option<String>), KubeconfigError> {
    let file = file?;
    let proxy = proxy(&file);
    Ok((Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?, proxy))
}

/// The proxy of the cluster of its current context.
fn proxy(file: &Kubeconfig) -> Option<String> {
    let name = file.current_context.as_ref()?;
    let context = file.contexts.iter().find(|one| one.name == *name)?.context.as_ref()?;
    let cluster = file.clusters.iter().find(|one| one.name == context.cluster)?.cluster.as_ref()?;
    cluster.proxy_url.clone().filter(|url| !url.is_empty())
}

/// Connects without a proxy. If the file has none, the library would take that of the environment and ignore its exceptions
/// (`NO_PROXY`).
fn direct((mut config, proxy): (Config, Option<String>)) -> Result<Config, ClientError> {
    config.proxy_url = None;
    proxy.map_or(Ok(config), |url| Err(ClientError::Proxy(url)))
}
