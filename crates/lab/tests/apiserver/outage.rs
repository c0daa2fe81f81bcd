//! Clients come back after the server was away, and after it forgot the history.

use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use tokio::time::timeout;

use crate::objects::node;
use crate::server::{TestedServer, is_double};

#[tokio::test]
async fn a_watch_resumes_after_an_outage() -> Result<()> {
    if !is_double("a_watch_resumes_after_an_outage") {
        return Ok(());
    }
    let server = TestedServer::start()?;
    let nodes: Api<Node> = Api::all(server.client().await?);
    let mut seen = watcher(nodes.clone(), watcher::Config::default()).default_backoff().applied_objects().boxed();
    nodes.create(&PostParams::default(), &node("first")?).await?;
    assert_eq!(next_name(&mut seen).await?, "first");
    server.double()?.set_outage(true);
    let refused = timeout(Duration::from_secs(5), async {
        while nodes.list(&ListParams::default()).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    refused.await.context("the outage does not begin")?;
    server.double()?.set_outage(false);
    let back = timeout(Duration::from_secs(5), async {
        while nodes.create(&PostParams::default(), &node("second")?).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    });
    back.await.context("the outage does not end")??;
    // The watch may show the first node again on its way.
    while next_name(&mut seen).await? != "second" {}
    Ok(())
}

async fn next_name(seen: &mut (impl futures::Stream<Item = Result<Node, watcher::Error>> + Unpin)) -> Result<String> {
    let deadline = Duration::from_secs(10);
    timeout(deadline, async {
        loop {
            // Errors are what an outage looks like; the watcher continues.
            if let Ok(node) = seen.next().await.context("the watcher ended")? {
                return node.metadata.name.context("a node without a name");
            }
        }
    })
    .await
    .context("no node shows up")?
}

#[tokio::test]
async fn a_forgotten_version_is_gone() -> Result<()> {
    if !is_double("a_forgotten_version_is_gone") {
        return Ok(());
    }
    let server = TestedServer::start()?;
    let nodes: Api<Node> = Api::all(server.client().await?);
    for name in ["a", "b", "c"] {
        nodes.create(&PostParams::default(), &node(name)?).await?;
    }
    let page = nodes.list(&ListParams::default().limit(1)).await?;
    let (version, token) = (page.metadata.resource_version.context("a version")?, page.metadata.continue_);
    server.double()?.compact();
    let gone = |code: u16| matches!(code, 410);
    let expired = timeout(Duration::from_secs(5), async {
        loop {
            let next = ListParams::default().limit(1).continue_token(token.as_deref().unwrap_or_default());
            if let Err(kube::Error::Api(status)) = nodes.list(&next).await {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let expired = expired.await.context("the list continues")?;
    assert!(gone(expired.code) && expired.reason == "Expired", "{expired:?}");
    let mut events = nodes.watch(&WatchParams::default(), &version).await?.boxed();
    match events.try_next().await? {
        Some(WatchEvent::Error(status)) => assert!(gone(status.code), "{status:?}"),
        other => anyhow::bail!("not an error: {other:?}"),
    }
    assert!(events.try_next().await?.is_none(), "the watch is over");
    Ok(())
}
