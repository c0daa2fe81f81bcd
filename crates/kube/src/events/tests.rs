use super::*;
use crate::api_outage::OutageSummary;
use crate::stub::{Created, StubServer, until};

#[tokio::test]
async fn an_event_waits_for_a_server_that_hangs_up() {
    let server = StubServer::start().await;
    let (client, outages) = server.client();
    let (events, delivery) = queue(client, "a", &outages);
    let stop = CancellationToken::new();
    let writing = tokio::spawn(delivery.run(stop.clone()));
    server.close_connections(2);
    for (name, message) in [("one", "first"), ("two", "second")] {
        events.warn(Regarding::policy(&name.into(), "u"), "EgressIPConflict", message);
    }
    // Two failed tries, then one for each.
    until("both are written", || server.requests("POST") == 4).await;
    stop.cancel();
    writing.await.expect("no panic");
    assert_eq!(outages.summary(), OutageSummary::default(), "failed events alone are no outage");
}

#[tokio::test]
async fn an_existing_event_is_written_again_by_a_running_agent_and_not_by_a_starting_one() {
    for (age, posts) in [(Duration::ZERO, 2), (RECENT_START, 3)] {
        let server = StubServer::start().await;
        let (client, outages) = server.client();
        let (mut events, delivery) = queue(client, "a", &outages);
        events.since = events.since.checked_sub(age).expect("a machine that is up for longer");
        server.creates([Created::Exists]);
        events.warn_of_node("MapNearlyFull", "nat");
        events.warn_of_node("MapNearlyFull", "flows");
        drop(events);
        delivery.run(CancellationToken::new()).await;
        assert_eq!(server.requests("POST"), posts, "at the age of {age:?}");
    }
}

/// The outcome for an event of a long-running agent whose tries end like this, and the names that were tried.
async fn written_after(ends: impl IntoIterator<Item = Created>) -> (Result<(), String>, Vec<&'static str>) {
    let server = StubServer::start().await;
    let (client, outages) = server.client();
    let (_events, delivery) = queue(client, "a", &outages);
    let mut event = of_node("a", "a", ("MapNearlyFull", "nat"), Timestamp::now());
    let by_content = name_by_content(&event);
    event.metadata.name = Some(by_content.clone());
    let by_time = name_by_time(&event);
    server.creates(ends);
    let mut recorded = Recorded { event, may_be_repeated: false };
    let outcome = delivery.write(&mut recorded, &mut Backoff::new(&outages)).await;
    let names = server.created().into_iter().map(|body| match (body.contains(&by_content), body.contains(&by_time)) {
        (true, false) => "content",
        (false, true) => "time",
        _ => panic!("{body}"),
    });
    (outcome, names.collect())
}

#[tokio::test]
async fn a_taken_name_ends_the_tries_if_only_this_event_can_have_it() {
    use Created::{Exists, HangsUp};
    assert_eq!(written_after([]).await, (Ok(()), vec!["content"]));
    assert_eq!(written_after([Exists]).await, (Ok(()), vec!["content", "time"]));
    assert_eq!(
        written_after([HangsUp, Exists]).await,
        (Ok(()), vec!["content", "content", "time"]),
        "it may be an earlier event"
    );
    assert_eq!(
        written_after([Exists, HangsUp, Exists]).await,
        (Ok(()), vec!["content", "time", "time"]),
        "an earlier try has arrived"
    );
    let (outcome, names) = written_after([HangsUp, Exists, Exists]).await;
    assert!(outcome.is_err() && names.len() == 3, "another event: {names:?}");
}

#[tokio::test]
async fn an_agent_that_exits_writes_its_event_first() {
    let server = StubServer::start().await;
    let (client, outages) = server.client();
    write_node_event(client, "a", &outages, ("SecondAgent", "another one runs here")).await;
    assert_eq!(server.requests("POST"), 1);
}

#[test]
fn an_event_of_a_node_is_where_describe_looks_for_it() {
    let event = of_node("node1", "node1", ("MapNearlyFull", "nat"), Timestamp::UNIX_EPOCH);
    let regarding = event.regarding.as_ref().expect("the object");
    assert_eq!((regarding.kind.as_deref(), regarding.uid.as_deref()), (Some("Node"), Some("node1")));
    assert_eq!((event.reporting_instance.as_deref(), event.reason.as_deref()), (Some("node1"), Some("MapNearlyFull")));
    assert!(name_by_content(&event).starts_with("node1."));
}

#[test]
fn long_names_are_cut_where_the_api_refuses_them() {
    let now = Timestamp::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
    let of = |object: &str| of_node(object, object, ("MapNearlyFull", "nat"), now);
    assert_eq!(name_by_time(&of("eip")), "eip.17979cfe362a0000");
    for name in [name_by_time, name_by_content] {
        assert_eq!(name(&of(&format!("{}.b", "a".repeat(251)))).len(), MAX_NAME);
        let dotted = name(&of(&format!("{}.{}", "a".repeat(235), "b".repeat(17))));
        assert!(dotted.starts_with(&"a".repeat(235)) && !dotted.contains(".."), "{dotted}");
    }
}

#[test]
fn equal_events_of_one_hour_have_the_same_name() {
    let after = |secs| Timestamp::UNIX_EPOCH + Duration::from_secs(secs);
    let later = after(3599);
    let one = name_by_content(&of_node("node1", "node1", ("MapNearlyFull", "nat"), Timestamp::UNIX_EPOCH));
    assert_eq!(one, name_by_content(&of_node("node1", "node1", ("MapNearlyFull", "nat"), later)));
    assert_ne!(
        one,
        name_by_content(&of_node("node1", "node1", ("MapNearlyFull", "nat"), after(3600))),
        "in another hour"
    );
    let others =
        [("node2", "MapNearlyFull", "nat"), ("node1", "PolicyInForward", "nat"), ("node1", "MapNearlyFull", "flows")];
    for (node, reason, note) in others {
        assert_ne!(one, name_by_content(&of_node(node, node, (reason, note), later)), "{node} {reason} {note}");
    }
}

#[test]
fn a_note_is_cut_between_characters() {
    assert_eq!(cut("no\u{e9}", 3), "no");
    assert_eq!(cut("no\u{e9}", 4), "no\u{e9}");
    assert_eq!(cut("note", 1024), "note");
}
