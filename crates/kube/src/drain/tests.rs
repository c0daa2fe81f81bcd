//! The command against a minimal API server.

use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use egress_core::keys;

/// Requests in order: method and path.
type RequestLog = Arc<Mutex<Vec<String>>>;

/// `answers` gets the number of the request, from 0, with method and path; `None` is no answer.
fn server(answers: impl Fn(usize, &str) -> Option<(u16, Value)> + Send + Sync + 'static) -> (Client, RequestLog) {
    let (requests, answers) = (RequestLog::default(), Arc::new(answers));
    let log = requests.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let what = format!("{} {}", request.method(), request.uri().path());
        let number = {
            let mut log = log.lock().expect("not poisoned");
            log.push(what.clone());
            log.len() - 1
        };
        let answer = answers(number, &what);
        async move {
            let Some((code, body)) = answer else { return std::future::pending().await };
            Response::builder().status(code).body(Body::from(body.to_string().into_bytes()))
        }
    });
    (Client::new(service, "default"), requests)
}

/// A cluster with one node, without objects.
fn cluster(what: &str, drained: bool) -> Option<(u16, Value)> {
    let list = json!({"metadata": {}, "items": []});
    let annotations = if drained { json!({keys::DRAIN: "true"}) } else { json!({}) };
    let node = json!({"metadata": {"name": "n1", "annotations": annotations}});
    Some((200, if what.ends_with("/n1") { node } else { list }))
}

fn refusal(code: u16) -> Option<(u16, Value)> {
    let reason = if code == 404 { "NotFound" } else { "Other" };
    let status = json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "no"});
    Some((code, status))
}

fn arguments(timeout: u64) -> DrainRequest {
    DrainRequest { node: "n1".into(), undo: false, timeout, undo_command: "undo it".into() }
}

/// For a test that reads no line.
fn ignored(_: DrainLine) {}

fn writes(requests: &RequestLog) -> usize {
    let requests = requests.lock().expect("not poisoned");
    requests.iter().filter(|what| what.starts_with(Method::PATCH.as_str())).count()
}

#[tokio::test]
async fn nothing_is_written_if_something_cannot_be_read() {
    for (path, code) in
        [("/nodes/n1", 403), ("/nodes/n1", 404), ("/nodes", 403), ("/egressnodes", 403), ("/egressips", 403)]
    {
        let (client, requests) =
            server(move |_, what| if what.ends_with(path) { refusal(code) } else { cluster(what, false) });
        let error = drain(client, &arguments(60), ignored).await.expect_err("it is refused");
        assert_eq!(matches!(error, DrainError::UnknownNode(_)), code == 404, "{error}");
        assert_eq!(writes(&requests), 0, "{path}");
    }
}

#[tokio::test]
async fn a_cluster_without_the_kind_of_egress_services_is_drained_too() {
    let is_kind = |what: &str| what.ends_with("/egressassignments");
    let (client, _) = server(move |number, what| if is_kind(what) { refusal(404) } else { cluster(what, number > 5) });
    drain(client, &arguments(60), ignored).await.expect("it is drained");
}

#[tokio::test]
async fn each_line_is_reported_and_names_the_command_that_undoes_it() {
    let (client, _) = server(|number, what| cluster(what, number > 5));
    let lines = std::cell::RefCell::<Vec<_>>::default();
    drain(client, &arguments(60), |line| lines.borrow_mut().push(line)).await.expect("it is drained");
    let expected = [
        "n1 has no egress IPs",
        "it is marked: its egress IPs move away, also after this command ends, until `undo it`",
        "n1 is drained: it has no egress IPs, and it gets none until `undo it`",
    ];
    assert_eq!(*lines.borrow(), expected.map(|line| DrainLine::Progress(line.to_owned())));
}

#[tokio::test]
async fn a_request_that_fails_after_the_mark_is_repeated() {
    // Six requests of the first read, and the mark.
    let (client, requests) = server(|number, what| if number == 7 { refusal(500) } else { cluster(what, number > 5) });
    drain(client, &arguments(60), ignored).await.expect("it is drained");
    assert_eq!(writes(&requests), 1);
}

#[tokio::test]
async fn the_timeout_holds_if_the_server_stops_answering() {
    for silent_from in [0, 6, 7] {
        let (client, requests) =
            server(move |number, what| (number < silent_from).then(|| cluster(what, true)).flatten());
        let begin = Instant::now();
        let error = drain(client, &arguments(1), ignored).await.expect_err("it cannot know");
        assert!(begin.elapsed() < TIMEOUT_AFTER, "{:?}", begin.elapsed());
        let expected = match silent_from {
            0 => matches!(error, DrainError::Refused(_)),
            6 => matches!(error, DrainError::Unsure { .. }),
            _ => matches!(error, DrainError::Short { .. }),
        };
        assert!(expected, "{silent_from}: {error}");
        assert_eq!(writes(&requests), usize::from(silent_from > 0));
    }
}
