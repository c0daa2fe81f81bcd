//! A client for the cluster that the agent belongs to.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

use super::outage::Outages;
use super::revive::Revive;

/// Longer than any handshake takes, and short enough that a server that has moved is found.
const CONNECT: Duration = Duration::from_secs(5);

/// Why there is no client. One line each, with what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot use the kubeconfig {path}: {}; check --kubeconfig", first_line(source), path = path.display())]
    Kubeconfig { path: PathBuf, source: KubeconfigError },
    #[error("not in a pod of a cluster ({0}); give --kubeconfig")]
    NotInCluster(#[source] kube::config::InClusterError),
    #[error("no way to an API server is known ({0}); give --kubeconfig")]
    NoWay(#[source] kube::config::InferConfigError),
    #[error("cannot set up the connection to the API server: {0}")]
    Setup(#[source] kube::Error),
}

/// The library shows the place in the file on further lines.
fn first_line(error: &KubeconfigError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// From the file, else from the pod's service account; with who tells of the server's outages.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<(Client, Outages), ClientError> {
    let config = match kubeconfig {
        Some(path) => {
            from_file(path).await.map_err(|source| ClientError::Kubeconfig { path: path.to_owned(), source })?
        }
        None => Config::incluster().map_err(ClientError::NotInCluster)?,
    };
    client(config).map_err(ClientError::Setup)
}

/// For a command of an administrator: from the file, else as kubectl finds its way, else from the pod's service account.
pub async fn connect_as_user(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let (client, _) = match kubeconfig {
        Some(path) => connect(Some(path)).await?,
        None => client(Config::infer().await.map_err(ClientError::NoWay)?).map_err(ClientError::Setup)?,
    };
    Ok(client)
}

/// The library asks again by itself where a server, or the load balancer before it, cannot answer now, and waits for minutes
/// in between. Here whoever asks knows better when to ask again, and is to know that it was in vain.
pub(super) fn client(mut config: Config) -> kube::Result<(Client, Outages)> {
    (config.default_retry, config.connect_timeout) = (false, Some(CONNECT));
    // Without TLS nobody's word is needed; else the library would look for the system's, and an image has none.
    if config.cluster_url.scheme_str() == Some("http") {
        config.root_cert.get_or_insert_default();
    }
    let outages = Outages::new(&config.cluster_url.to_string());
    let client = ClientBuilder::try_from(config)?.with_layer(&Revive(outages.clone())).build();
    Ok((client, outages))
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default()).await
}
