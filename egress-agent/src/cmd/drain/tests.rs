//! The command against an API server of a few lines.

use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use egress_core::keys;

/// What is asked, in order: method and path.
type Asked = Arc<Mutex<Vec<String>>>;

/// `answers` gets the number of the request, from 0, and what is asked; none is silence.
fn server(answers: impl Fn(usize, &str) -> Option<(u16, Value)> + Send + Sync + 'static) -> (Client, Asked) {
    let (asked, answers) = (Asked::default(), Arc::new(answers));
    let log = asked.clone();
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
    (Client::new(service, "default"), asked)
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

fn arguments(timeout: u64) -> DrainArgs {
    DrainArgs { node: "n1".into(), undo: false, timeout, kubeconfig: None }
}

fn writes(asked: &Asked) -> usize {
    let asked = asked.lock().expect("not poisoned");
    asked.iter().filter(|what| what.starts_with(Method::PATCH.as_str())).count()
}

#[tokio::test]
async fn nothing_is_written_where_something_cannot_be_read() {
    for (path, code) in
        [("/nodes/n1", 403), ("/nodes/n1", 404), ("/nodes", 403), ("/egressnodes", 403), ("/egressips", 403)]
    {
        let (client, asked) =
            server(move |_, what| if what.ends_with(path) { refusal(code) } else { cluster(what, false) });
        let error = drain(client, &arguments(60)).await.expect_err("it is refused");
        assert_eq!(matches!(error, DrainError::UnknownNode(_)), code == 404, "{error}");
        assert_eq!(writes(&asked), 0, "{path}");
    }
}

#[tokio::test]
async fn a_request_that_fails_behind_the_mark_is_repeated() {
    // Five requests of the first look, and the mark.
    let (client, asked) = server(|number, what| if number == 6 { refusal(500) } else { cluster(what, number > 4) });
    drain(client, &arguments(60)).await.expect("it is drained");
    assert_eq!(writes(&asked), 1);
}

#[tokio::test]
async fn a_server_that_falls_silent_does_not_outlast_the_timeout() {
    for silent_from in [0, 5, 6] {
        let (client, asked) = server(move |number, what| (number < silent_from).then(|| cluster(what, true)).flatten());
        let begin = Instant::now();
        let error = drain(client, &arguments(1)).await.expect_err("it cannot know");
        assert!(begin.elapsed() < LATER, "{:?}", begin.elapsed());
        let expected = match silent_from {
            0 => matches!(error, DrainError::Refused(_)),
            5 => matches!(error, DrainError::Unsure { .. }),
            _ => matches!(error, DrainError::Short { .. }),
        };
        assert!(expected, "{silent_from}: {error}");
        assert_eq!(writes(&asked), usize::from(silent_from > 0));
    }
}
