//! Requests and watches that an outage has left hanging.
//!
//! A server that loses its power, or whose address moves to another, says goodbye to nobody. A watch that was open waits
//! for a minute then, a request for whatever its caller thinks right, and a connection that was being made for the next of
//! ever rarer tries of the kernel. So when an outage is over
//!
//! - what had been asked before, and is not answered yet, fails: its caller asks again;
//! - what has been answered before the outage began, and still goes on, ends: a watch is begun anew where it was, which
//!   needs no list.

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
use crate::backoff::spread;

/// What was asked no longer ago than this may still be answered.
const YOUNG: Duration = Duration::from_secs(1);
/// Shorter outages end no request: what hangs by them is tried again by itself, and a slow server has many of them.
const SERIOUS: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
#[error("the API server was away meanwhile")]
struct WasAway;

/// Wraps the API client's service.
#[derive(Clone, Debug)]
pub(super) struct StalledRequests(pub(super) ApiOutages);

impl<S> Layer<S> for StalledRequests {
    type Service = Revived<S>;

    fn layer(&self, inner: S) -> Revived<S> {
        Revived { inner, outages: self.0.clone() }
    }
}

#[derive(Debug)]
pub(super) struct Revived<S> {
    inner: S,
    outages: ApiOutages,
}

impl<S> Service<Request<Body>> for Revived<S>
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
                () = grows_old(&mut ends, begun) => return Err(WasAway.into()),
            };
            if let Some(path) = watched.filter(|_| response.status().is_success()) {
                outages.watch_begins(&path);
            }
            let (head, body) = response.into_parts();
            let end = async move {
                outlives_outage(&mut ends, begun).await;
                sleep(spread()).await;
            };
            let body: Pin<Box<_>> = Box::pin(BodyStream::new(body).take_until(end.boxed()));
            Ok(Response::from_parts(head, Box::new(StreamBody::new(body)) as Box<DynBody>))
        }
        .boxed()
    }
}

/// Waits for the end of an outage at which the request is not young any more.
async fn grows_old(ends: &mut watch::Receiver<Option<Instant>>, begun: Instant) {
    while ends.changed().await.is_ok() {
        if begun.elapsed() > YOUNG && is_serious(*ends.borrow_and_update()) {
            return;
        }
    }
    std::future::pending().await
}

/// A server that was late once or twice is there, and asking all it was asked once more makes it no faster.
fn is_serious(began: Option<Instant>) -> bool {
    began.is_some_and(|began| began.elapsed() >= SERIOUS)
}

/// Waits for the end of an outage that has begun since.
async fn outlives_outage(ends: &mut watch::Receiver<Option<Instant>>, begun: Instant) {
    if ends.wait_for(|began| is_serious(*began) && began.is_some_and(|began| began > begun)).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn is_watch(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|part| part == "watch=true"))
}

#[cfg(test)]
mod tests;
