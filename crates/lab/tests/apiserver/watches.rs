//! Watches as kube's runtime uses them.

use std::time::Duration;

use anyhow::{Context, Result};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{Api, DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;
use tokio::time::timeout;

use crate::objects::{from_json, node, pod};
use crate::server::TestedServer;

/// The next event as text.
async fn next<K: kube::Resource>(
    events: &mut (impl Stream<Item = Result<Event<K>, watcher::Error>> + Unpin),
) -> Result<String> {
    let event = timeout(Duration::from_secs(10), events.next()).await.context("no event")?.context("it ended")??;
    let named = |word: &str, object: &K| format!("{word} {}", object.meta().name.as_deref().unwrap_or_default());
    Ok(match &event {
        Event::Init => "init".to_owned(),
        Event::InitApply(object) => named("initial", object),
        Event::InitDone => "done".to_owned(),
        Event::Apply(object) => named("apply", object),
        Event::Delete(object) => named("delete", object),
    })
}

async fn follow(config: watcher::Config) -> Result<()> {
    let server = TestedServer::start()?;
    let nodes: Api<Node> = Api::all(server.client().await?);
    for name in ["a", "b", "c"] {
        nodes.create(&PostParams::default(), &node(name)?).await?;
    }
    let mut events = watcher(nodes.clone(), config).boxed();
    for expected in ["init", "initial a", "initial b", "initial c", "done"] {
        assert_eq!(next(&mut events).await?, expected);
    }
    nodes.create(&PostParams::default(), &node("d")?).await?;
    assert_eq!(next(&mut events).await?, "apply d");
    let label = Patch::Merge(json!({"metadata": {"labels": {"x": "y"}}}));
    nodes.patch("a", &PatchParams::default(), &label).await?;
    assert_eq!(next(&mut events).await?, "apply a");
    nodes.patch("a", &PatchParams::default(), &label).await?;
    nodes.delete("b", &DeleteParams::default()).await?;
    assert_eq!(next(&mut events).await?, "delete b", "a patch that changes nothing is no event");
    Ok(())
}

#[tokio::test]
async fn the_watcher_lists_then_watches() -> Result<()> {
    follow(watcher::Config::default()).await
}

#[tokio::test]
async fn the_watcher_lists_in_pages() -> Result<()> {
    follow(watcher::Config::default().page_size(1)).await
}

#[tokio::test]
async fn the_watcher_streams_the_list() -> Result<()> {
    follow(watcher::Config::default().streaming_lists()).await
}

#[tokio::test]
async fn the_watcher_takes_any_version() -> Result<()> {
    follow(watcher::Config::default().any_semantic()).await
}

#[tokio::test]
async fn metadata_is_enough_for_namespaces() -> Result<()> {
    let server = TestedServer::start()?;
    let namespaces: Api<Namespace> = Api::all(server.client().await?);
    let partial: Api<PartialObjectMeta<Namespace>> = Api::all(server.client().await?);
    for config in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
        let mut events = watcher(partial.clone(), config).boxed();
        while next(&mut events).await? != "done" {}
        let prod: Namespace = from_json(json!({"metadata": {"name": "prod", "labels": {"env": "prod"}}}))?;
        namespaces.create(&PostParams::default(), &prod).await?;
        let event = timeout(Duration::from_secs(10), events.next()).await?.context("it ended")??;
        let Event::Apply(partial) = event else { anyhow::bail!("not an apply: {event:?}") };
        let labels = partial.metadata.labels.context("labels")?;
        assert_eq!(labels.get("env").map(String::as_str), Some("prod"));
        namespaces.delete("prod", &DeleteParams::default()).await?;
        server.end_namespace("prod").await?;
        // Where it takes two steps, the first is a change.
        let mut last = next(&mut events).await?;
        while last == "apply prod" {
            last = next(&mut events).await?;
        }
        assert_eq!(last, "delete prod");
    }
    Ok(())
}

#[tokio::test]
async fn own_pods_by_field_selector() -> Result<()> {
    let server = TestedServer::start()?;
    let pods: Api<Pod> = Api::default_namespaced(server.client().await?);
    pods.create(&PostParams::default(), &pod("here", "node1", json!({"app": "web"}))?).await?;
    pods.create(&PostParams::default(), &pod("there", "node2", json!({"app": "web"}))?).await?;
    let everywhere: Api<Pod> = Api::all(server.client().await?);
    let config = watcher::Config::default().fields("spec.nodeName=node1").labels("app=web");
    let mut events = watcher(everywhere, config).boxed();
    for expected in ["init", "initial here", "done"] {
        assert_eq!(next(&mut events).await?, expected);
    }
    let relabel = |app: &str| Patch::Merge(json!({"metadata": {"labels": {"app": app}}}));
    pods.patch("there", &PatchParams::default(), &relabel("db")).await?;
    pods.patch("here", &PatchParams::default(), &relabel("db")).await?;
    assert_eq!(next(&mut events).await?, "delete here", "it ceased to match");
    pods.patch("here", &PatchParams::default(), &relabel("web")).await?;
    assert_eq!(next(&mut events).await?, "apply here", "it matches again");
    Ok(())
}

#[tokio::test]
async fn bookmarks_come_and_a_watch_ends_in_time() -> Result<()> {
    let server = TestedServer::start()?;
    let nodes: Api<Node> = Api::all(server.client().await?);
    let mut events = nodes.watch(&WatchParams::default().timeout(7), "0").await?.boxed();
    let namespaces: Api<Namespace> = Api::all(server.client().await?);
    let other =
        Namespace { metadata: ObjectMeta { name: Some("x".into()), ..ObjectMeta::default() }, ..Namespace::default() };
    let version = namespaces.create(&PostParams::default(), &other).await?.metadata.resource_version;
    let first = timeout(Duration::from_secs(6), events.next()).await.context("no bookmark")?.context("it ended")??;
    let WatchEvent::Bookmark(bookmark) = first else { anyhow::bail!("not a bookmark: {first:?}") };
    let number = |version: &str| version.parse::<u64>().context("no version");
    let (seen, latest) = (number(&bookmark.metadata.resource_version)?, number(&version.context("a version")?)?);
    // A real server's may lag after the changes of other kinds, and does not run ahead of them.
    assert!(seen > 0 && seen <= latest, "{seen} of {latest}");
    let end = timeout(Duration::from_secs(12), async {
        while let Some(event) = events.next().await {
            let event = event?;
            anyhow::ensure!(matches!(event, WatchEvent::Bookmark(_)), "not a bookmark: {event:?}");
        }
        Ok(())
    });
    end.await.context("the watch continues")??;
    Ok(())
}

/// Two hundred watches see every one of fifty changes, in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_watches_keep_up() -> Result<()> {
    const WATCHES: usize = 200;
    const CHANGES: usize = 50;
    let server = TestedServer::start()?;
    let nodes: Api<Node> = Api::all(server.client().await?);
    nodes.create(&PostParams::default(), &node("n")?).await?;
    let start = nodes.get("n").await?.metadata.resource_version.context("a version")?;
    let mut watching = Vec::new();
    for _ in 0..WATCHES {
        let mut events = nodes.watch(&WatchParams::default(), &start).await?.boxed();
        watching.push(tokio::spawn(async move {
            for expected in 0..CHANGES {
                let node = loop {
                    match events.next().await.context("it ended")?? {
                        WatchEvent::Modified(node) => break node,
                        WatchEvent::Bookmark(_) => {}
                        event => anyhow::bail!("not a change: {event:?}"),
                    }
                };
                let seen = node.metadata.labels.and_then(|labels| labels.get("n").cloned());
                anyhow::ensure!(seen == Some(expected.to_string()), "{seen:?} instead of {expected}");
            }
            Ok(())
        }));
    }
    for number in 0..CHANGES {
        let label = Patch::Merge(json!({"metadata": {"labels": {"n": number.to_string()}}}));
        nodes.patch("n", &PatchParams::default(), &label).await?;
    }
    for one in watching {
        timeout(Duration::from_secs(60), one).await.context("a watch lags")???;
    }
    Ok(())
}
