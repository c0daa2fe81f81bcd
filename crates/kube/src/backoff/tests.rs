use std::future::Future;

use kube::core::Status;

use super::*;

#[test]
fn pauses_grow_to_their_longest_and_are_of_all_lengths() {
    let mut pace = Backoff::new(&ApiOutages::new("here"));
    let whole: Vec<u64> = (0..8).map(|_| pace.next(LONGEST, 0.0).as_secs()).collect();
    assert_eq!(whole, [1, 2, 4, 8, 16, 30, 30, 30]);
    assert_eq!(pace.next(LONGEST, 1.0).as_secs(), 15);
    assert_eq!(pace.next(LONGEST_REFUSED, 0.0).as_secs(), 5);
    let all: Vec<f64> = (0..400).map(|_| chance()).collect();
    for from in [0.0, 0.25, 0.5, 0.75] {
        let some = all.iter().filter(|one| (from..=from + 0.25).contains(*one)).count();
        assert!((50..=150).contains(&some), "{some} of 400 from {from}");
    }
}

/// Of a watch in the middle of a long outage.
fn away(outages: &ApiOutages) -> Backoff {
    Backoff { tries: 9, ends: outages.ends() }
}

async fn is_soon_over(rest: impl Future<Output = ()>) -> bool {
    tokio::time::timeout(SPREAD + Duration::from_millis(500), rest).await.is_ok()
}

#[tokio::test]
async fn one_request_that_is_answered_ends_the_waiting_of_all_watches() {
    let outages = ApiOutages::new("here");
    let (mut one, mut other) = (away(&outages), away(&outages));
    outages.unanswered("the Lease", "refused");
    let end = async {
        // A request that had not failed is no news.
        outages.works("something else");
        tokio::time::sleep(Duration::from_millis(50)).await;
        outages.works("the Lease");
    };
    let ((), one_is, other_is) =
        tokio::join!(end, is_soon_over(one.rest(Failure::Absence)), is_soon_over(other.rest(Failure::Absence)));
    assert!(one_is && other_is);
    assert_eq!(one.tries, 0, "and it begins with short pauses");
    one.begin();
    one.tries = 9;
    assert!(!is_soon_over(one.rest(Failure::Absence)).await, "what has ended once is no news the next time");
}

#[tokio::test]
async fn an_outage_that_ended_during_a_try_counts_and_a_refusal_is_not_hurried() {
    let outages = ApiOutages::new("here");
    let (mut tried, mut refused) = (away(&outages), away(&outages));
    outages.unanswered("the Lease", "refused");
    outages.works("the Lease");
    let (tried, refused) =
        tokio::join!(is_soon_over(tried.rest(Failure::Absence)), is_soon_over(refused.rest(Failure::Refusal)));
    assert!(tried && !refused);
}

#[tokio::test]
async fn pauses_begin_anew_behind_what_was_told_and_not_behind_a_list_that_begins() {
    let outages = ApiOutages::new("here");
    let error = || {
        let status = Status::failure("no", "Unavailable").with_code(503).boxed();
        Err(watcher::Error::InitialListFailed(Error::Api(status)))
    };
    let events = vec![Ok(Event::Init), error(), Ok(Event::Init), Ok(Event::InitApply(7)), Ok(Event::InitDone), error()];
    let begin = tokio::time::Instant::now();
    let told: Vec<_> = paced(futures::stream::iter(events).boxed(), &outages).collect().await;
    assert_eq!(told.len(), 6);
    // Two first pauses; the second would be the second pause otherwise, of a second at least.
    let took = begin.elapsed();
    assert!((FIRST..FIRST * 2 + Duration::from_millis(400)).contains(&took), "{took:?}");
}
