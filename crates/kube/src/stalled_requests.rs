//! Ends requests and watches that an outage has left without an answer. By hand, because neither the read timeout of
//! kube's client nor HTTP/2 keep-alive depends on the end of an outage: they end idle watches, or react only after
//! their own timeout.
//!
//! A server that loses power, or whose address moves, closes no connection. An open watch would wait for a minute, a request for
//! its timeout, a new connection for the kernel's growing retry interval. So at the end of an outage
//!
//! - a request that was sent before and is not answered yet fails, and its caller retries;
//! - a watch that was established before the outage ends, and is resumed where it was, without another list.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use http::{Request, Response, Uri};
use http_body_util::{BodyStream, StreamBody};
use kube::client::{Body, DynBody};
use tokio::sync::watch;
use tokio::time::sleep;
use tower::{BoxError, Layer, Service};

use crate::api_outage::ApiOutages;
use crate::backoff::random_delay;

/// A request that is younger than this may still be answered.
const MIN_REQUEST_AGE: Duration = Duration::from_secs(1);
/// Shorter outages end no request: a slow server has many of them, and requests have timeouts.
const MIN_OUTAGE: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
#[error("the API server was away during the request")]
struct OutageDuringRequest;

/// A layer around the API client's service.
#[derive(Clone, Debug)]
pub(super) struct StalledRequests(pub(super) ApiOutages);

impl<S> Layer<S> for StalledRequests {
    type Service = WithStallCheck<S>;

    fn layer(&self, inner: S) -> WithStallCheck<S> {
        WithStallCheck { inner, outages: self.0.clone() }
    }
}

#[derive(Debug)]
pub(super) struct WithStallCheck<S> {
    inner: S,
    outages: ApiOutages,
}

impl<S> Service<Request<Body>> for WithStallCheck<S>
where
    S: Service<Request<Body>, Response = Response<Box<DynBody>>, Error = BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<Box<DynBody>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let watched = is_watch(request.uri()).then(|| request.uri().path().to_owned());
        let (outages, begun) = (self.outages.clone(), Instant::now());
        let mut ends = outages.ends();
        let answer = self.inner.call(request);
        async move {
            let response = tokio::select! {
                response = answer => response?,
                () = stalled_by_outage(&mut ends, begun) => return Err(OutageDuringRequest.into()),
            };
            if let Some(path) = watched.filter(|_| response.status().is_success()) {
                outages.watch_established(&path);
            }
            let (head, body) = response.into_parts();
            let end = async move {
                outage_since(&mut ends, begun).await;
                sleep(random_delay()).await;
            };
            let body: Pin<Box<_>> = Box::pin(BodyStream::new(body).take_until(end.boxed()));
            Ok(Response::from_parts(head, Box::new(StreamBody::new(body)) as Box<DynBody>))
        }
        .boxed()
    }
}

/// Waits for the end of an outage at which the request is old enough to fail.
async fn stalled_by_outage(ends: &mut watch::Receiver<Option<Instant>>, begun: Instant) {
    while ends.changed().await.is_ok() {
        if begun.elapsed() > MIN_REQUEST_AGE && is_long_outage(*ends.borrow_and_update()) {
            return;
        }
    }
    std::future::pending().await
}

/// A few late answers are no outage, and repeated requests add load.
fn is_long_outage(began: Option<Instant>) -> bool {
    began.is_some_and(|began| began.elapsed() >= MIN_OUTAGE)
}

/// Waits for the end of an outage that began after `begun`.
async fn outage_since(ends: &mut watch::Receiver<Option<Instant>>, begun: Instant) {
    if ends.wait_for(|began| is_long_outage(*began) && began.is_some_and(|began| began > begun)).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn is_watch(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|part| part == "watch=true"))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Error;
    use kube::api::Api;
    use kube::runtime::watcher::{self, Event, watcher};

    use super::*;
    use crate::backoff::with_backoff;
    use crate::stub::{StubServer, until};

    fn late_once(outages: &ApiOutages) {
        outages.unanswered("the Lease", "no answer");
        outages.answered("the Lease");
    }

    async fn outage(outages: &ApiOutages) {
        outages.unanswered("the Lease", "no answer");
        sleep(MIN_OUTAGE).await;
        outages.answered("the Lease");
    }

    #[tokio::test]
    async fn a_watch_from_before_an_outage_is_resumed_where_it_was() {
        let server = StubServer::start().await;
        let (client, outages) = server.client();
        let maps: Api<ConfigMap> = Api::namespaced(client, "there");
        let mut watch = Box::pin(with_backoff(watcher(maps, watcher::Config::default()).boxed(), &outages));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&seen);
        let watching = tokio::spawn(async move {
            while let Some(event) = watch.next().await {
                record.lock().expect("not poisoned").push(matches!(event, Ok(Event::Init | Event::InitDone)));
            }
        });
        until("it watches", || server.requests("watch=true") == 1).await;
        sleep(Duration::from_millis(50)).await;
        late_once(&outages);
        outage(&outages).await;
        until("it watches again", || server.requests("watch=true") == 2).await;
        assert_eq!(server.requests("resourceVersion=7"), 2);
        assert_eq!(server.requests("limit="), 1, "without another list");
        assert_eq!(*seen.lock().expect("not poisoned"), [true, true], "and without an error");
        watching.abort();
    }

    #[tokio::test]
    async fn a_watch_established_during_an_outage_continues() {
        let server = StubServer::start().await;
        let (client, outages) = server.client();
        outages.unanswered("the Lease", "no answer");
        sleep(Duration::from_millis(20)).await;
        let maps: Api<ConfigMap> = Api::namespaced(client, "there");
        let mut watch = Box::pin(with_backoff(watcher(maps, watcher::Config::default()).boxed(), &outages));
        let watching = tokio::spawn(async move { while watch.next().await.is_some() {} });
        until("it watches", || server.requests("watch=true") == 1).await;
        outages.answered("the Lease");
        sleep(Duration::from_millis(1300)).await;
        assert_eq!(server.requests("watch=true"), 1);
        watching.abort();
    }

    #[tokio::test]
    async fn an_established_watch_ends_the_outage_of_a_failed_one() {
        let server = StubServer::start().await;
        let (client, outages) = server.client();
        outages.register_watch("/api/v1/namespaces/there/configmaps", "the maps");
        let mut ends = outages.ends();
        outages.unanswered("the maps", "no answer");
        let maps: Api<ConfigMap> = Api::namespaced(client, "there");
        let _stream = maps.watch(&kube::api::WatchParams::default(), "7").await.expect("a watch");
        tokio::time::timeout(Duration::from_secs(1), ends.changed()).await.expect("in time").expect("a sender");
    }

    #[tokio::test]
    async fn an_old_request_fails_at_the_end_of_an_outage_and_not_after_a_late_answer() {
        let server = StubServer::start().await;
        let (client, outages) = server.client();
        let maps: Api<ConfigMap> = Api::namespaced(client, "there");
        let asking = tokio::spawn(async move { maps.get("silence").await });
        until("it asks", || server.requests("silence") == 1).await;
        sleep(MIN_REQUEST_AGE).await;
        late_once(&outages);
        sleep(Duration::from_millis(100)).await;
        assert!(!asking.is_finished(), "a server that was late once still answers it");
        outage(&outages).await;
        let answer = tokio::time::timeout(Duration::from_secs(1), asking).await.expect("in time").expect("no panic");
        assert!(matches!(answer, Err(Error::Service(_))), "{answer:?}");
    }

    #[tokio::test]
    async fn the_client_does_not_retry_a_5xx_answer_by_itself() {
        let server = StubServer::start().await;
        let (client, _) = server.client();
        let maps: Api<ConfigMap> = Api::namespaced(client, "there");
        let answer = tokio::time::timeout(Duration::from_secs(2), maps.get("busy")).await.expect("at once");
        assert!(matches!(answer, Err(Error::Api(status)) if status.code == 503));
        assert_eq!(server.requests("busy"), 1);
    }
}
