//! Kubeconfigs: one for people, one for nodes.
//!
//! The nodes' names the relay inside the lab instead of the server, and keeps the server's name for TLS, so that the
//! certificate is checked against what it was made for.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use axum::http::Uri;
use kube::config::{AuthInfo, Cluster, KubeConfigOptions, Kubeconfig, NamedAuthInfo};
use kube::{Client, Config};

/// Copies a kubeconfig; paths in it become absolute.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    let config = Kubeconfig::read_from(from).with_context(|| format!("cannot use kubeconfig {}", from.display()))?;
    write(&config, to)
}

/// Writes the nodes' kubeconfig. Returns where the relay has to go, as `host:port`.
pub(super) fn for_nodes(people: &Path, relay: SocketAddr, to: &Path) -> Result<String> {
    let mut config = Kubeconfig::read_from(people)?;
    let current = config.current_context.clone().context("the kubeconfig has no current context")?;
    let context = config.contexts.iter().find(|named| named.name == current);
    let name = context.and_then(|named| named.context.as_ref()).map(|context| context.cluster.clone());
    let cluster = config.clusters.iter_mut().find(|named| Some(&named.name) == name.as_ref());
    let cluster =
        cluster.and_then(|named| named.cluster.as_mut()).context("the kubeconfig's context has no cluster")?;
    let target = redirect(cluster, relay)?;
    write(&config, to)?;
    Ok(target)
}

/// Makes the current context of a kubeconfig one of who has this token.
pub(super) fn authenticate(file: &Path, token: &str) -> Result<()> {
    const USER: &str = "egress-agent";
    let mut config = Kubeconfig::read_from(file)?;
    let current = config.current_context.clone();
    let context = config.contexts.iter_mut().find(|named| Some(&named.name) == current.as_ref());
    let context = context.and_then(|named| named.context.as_mut()).context("the kubeconfig has no current context")?;
    context.user = Some(USER.to_owned());
    let auth_info = Some(AuthInfo { token: Some(token.to_owned().into()), ..AuthInfo::default() });
    // No other credentials stay in it.
    config.auth_infos = vec![NamedAuthInfo { name: USER.to_owned(), auth_info, ..NamedAuthInfo::default() }];
    write(&config, file)
}

/// Makes a cluster's entry lead to the relay. Returns where it led before.
fn redirect(cluster: &mut Cluster, relay: SocketAddr) -> Result<String> {
    ensure!(cluster.proxy_url.is_none(), "a kubeconfig with a proxy-url cannot be relayed to the nodes");
    let server = cluster.server.clone().context("the kubeconfig names no server")?;
    let uri: Uri = server.parse().with_context(|| format!("{server} is no URL"))?;
    let host = uri.host().with_context(|| format!("{server} names no host"))?;
    let scheme = uri.scheme_str().unwrap_or("https");
    let port = uri.port_u16().unwrap_or(if scheme == "http" { 80 } else { 443 });
    if scheme == "https" && cluster.tls_server_name.is_none() {
        cluster.tls_server_name = Some(host.trim_matches(['[', ']']).to_owned());
    }
    let path = uri.path().trim_end_matches('/');
    cluster.server = Some(format!("{scheme}://{relay}{path}"));
    Ok(format!("{host}:{port}"))
}

fn write(config: &Kubeconfig, to: &Path) -> Result<()> {
    let text = serde_yaml::to_string(config)?;
    std::fs::write(to, text).with_context(|| format!("cannot write {}", to.display()))
}

/// A client for the root namespace.
pub(crate) async fn client(people: &Path) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(people)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELAY: &str = "172.18.0.1:6443";

    fn redirected(server: &str) -> (Cluster, String) {
        let mut cluster = Cluster { server: Some(server.to_owned()), ..Cluster::default() };
        let target = redirect(&mut cluster, RELAY.parse().expect("address")).expect("a good URL");
        (cluster, target)
    }

    #[test]
    fn the_name_for_tls_is_kept() {
        let (cluster, target) = redirected("https://kube.example:8443/prefix/");
        assert_eq!(cluster.server.as_deref(), Some("https://172.18.0.1:6443/prefix"));
        assert_eq!(cluster.tls_server_name.as_deref(), Some("kube.example"));
        assert_eq!(target, "kube.example:8443");
    }

    #[test]
    fn a_plain_server_needs_no_name() {
        let (cluster, target) = redirected("http://127.0.0.1:8080");
        assert_eq!(cluster.tls_server_name, None);
        assert_eq!(target, "127.0.0.1:8080");
    }

    #[test]
    fn an_ipv6_server_keeps_its_brackets_only_in_the_target() {
        let (cluster, target) = redirected("https://[::1]:6443");
        assert_eq!(cluster.tls_server_name.as_deref(), Some("::1"));
        assert_eq!(target, "[::1]:6443");
    }
}
