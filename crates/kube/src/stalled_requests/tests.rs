use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Error;
use kube::api::Api;
use kube::runtime::watcher::{self, Event, watcher};

use super::*;
use crate::backoff::paced;
use crate::stub::{Server, until};

fn late_once(outages: &ApiOutages) {
    outages.unanswered("the Lease", "no answer");
    outages.works("the Lease");
}

async fn outage(outages: &ApiOutages) {
    outages.unanswered("the Lease", "no answer");
    sleep(SERIOUS).await;
    outages.works("the Lease");
}

#[tokio::test]
async fn a_watch_from_before_an_outage_is_begun_anew_where_it_was() {
    let server = Server::start().await;
    let (client, outages) = server.client();
    let maps: Api<ConfigMap> = Api::namespaced(client, "there");
    let mut watch = Box::pin(paced(watcher(maps, watcher::Config::default()).boxed(), &outages));
    let told = Arc::new(Mutex::new(Vec::new()));
    let tell = Arc::clone(&told);
    let watching = tokio::spawn(async move {
        while let Some(event) = watch.next().await {
            tell.lock().expect("not poisoned").push(matches!(event, Ok(Event::Init | Event::InitDone)));
        }
    });
    until("it watches", || server.asked("watch=true") == 1).await;
    sleep(Duration::from_millis(50)).await;
    late_once(&outages);
    outage(&outages).await;
    until("it watches again", || server.asked("watch=true") == 2).await;
    assert_eq!(server.asked("resourceVersion=7"), 2);
    assert_eq!(server.asked("limit="), 1, "without another list");
    assert_eq!(*told.lock().expect("not poisoned"), [true, true], "and without an error");
    watching.abort();
}

#[tokio::test]
async fn a_watch_that_has_begun_during_an_outage_goes_on() {
    let server = Server::start().await;
    let (client, outages) = server.client();
    outages.unanswered("the Lease", "no answer");
    sleep(Duration::from_millis(20)).await;
    let maps: Api<ConfigMap> = Api::namespaced(client, "there");
    let mut watch = Box::pin(paced(watcher(maps, watcher::Config::default()).boxed(), &outages));
    let watching = tokio::spawn(async move { while watch.next().await.is_some() {} });
    until("it watches", || server.asked("watch=true") == 1).await;
    outages.works("the Lease");
    sleep(Duration::from_millis(1300)).await;
    assert_eq!(server.asked("watch=true"), 1);
    watching.abort();
}

#[tokio::test]
async fn a_watch_that_begins_is_an_answer_to_the_one_that_had_failed() {
    let server = Server::start().await;
    let (client, outages) = server.client();
    outages.watches("/api/v1/namespaces/there/configmaps", "the maps");
    let mut ends = outages.ends();
    outages.unanswered("the maps", "no answer");
    let maps: Api<ConfigMap> = Api::namespaced(client, "there");
    let _stream = maps.watch(&kube::api::WatchParams::default(), "7").await.expect("a watch");
    tokio::time::timeout(Duration::from_secs(1), ends.changed()).await.expect("in time").expect("a sender");
}

#[tokio::test]
async fn what_was_asked_before_fails_when_an_outage_is_over_and_not_when_an_answer_was_late() {
    let server = Server::start().await;
    let (client, outages) = server.client();
    let maps: Api<ConfigMap> = Api::namespaced(client, "there");
    let asking = tokio::spawn(async move { maps.get("silence").await });
    until("it asks", || server.asked("silence") == 1).await;
    sleep(YOUNG).await;
    late_once(&outages);
    sleep(Duration::from_millis(100)).await;
    assert!(!asking.is_finished(), "a server that was late once has not forgotten it");
    outage(&outages).await;
    let answer = tokio::time::timeout(Duration::from_secs(1), asking).await.expect("in time").expect("no panic");
    assert!(matches!(answer, Err(Error::Service(_))), "{answer:?}");
}

#[tokio::test]
async fn a_server_that_cannot_answer_now_is_not_asked_behind_the_back_of_the_caller() {
    let server = Server::start().await;
    let (client, _) = server.client();
    let maps: Api<ConfigMap> = Api::namespaced(client, "there");
    let answer = tokio::time::timeout(Duration::from_secs(2), maps.get("busy")).await.expect("at once");
    assert!(matches!(answer, Err(Error::Api(status)) if status.code == 503));
    assert_eq!(server.asked("busy"), 1);
}
