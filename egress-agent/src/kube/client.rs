//! A client for the cluster that the agent belongs to.

use std::path::{Path, PathBuf};

use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// Why there is no client. One line each, with what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot use the kubeconfig {path}: {}; check --kubeconfig", first_line(source), path = path.display())]
    Kubeconfig { path: PathBuf, source: KubeconfigError },
    #[error("not in a pod of a cluster ({0}); give --kubeconfig")]
    NotInCluster(#[source] kube::config::InClusterError),
    #[error("cannot set up the connection to the API server: {0}")]
    Setup(#[source] kube::Error),
}

/// The library shows the place in the file on further lines.
fn first_line(error: &KubeconfigError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// From the file, else from the pod's service account; with the server's address, for people.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<(Client, String), ClientError> {
    let config = match kubeconfig {
        Some(path) => {
            from_file(path).await.map_err(|source| ClientError::Kubeconfig { path: path.to_owned(), source })?
        }
        None => Config::incluster().map_err(ClientError::NotInCluster)?,
    };
    let server = config.cluster_url.to_string();
    Ok((Client::try_from(config).map_err(ClientError::Setup)?, server))
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default()).await
}
