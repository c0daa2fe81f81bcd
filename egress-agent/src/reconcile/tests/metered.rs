//! What is counted of the way from a change to the kernel, and what the node's half says to a scrape.

use tokio::sync::{mpsc, oneshot, watch};

use super::*;
use crate::inspect::Question;
use crate::metrics::facts::{NodeFacts, Served};
use crate::metrics::meters::count_and_sum;
use crate::model::inbox::{Giver, inbox};

struct Running {
    giver: Giver,
    asks: mpsc::Sender<Question>,
    meters: Meters,
}

fn start(recorder: &Recorder) -> Running {
    let ((giver, taker), meters) = (inbox(), Meters::default());
    let (asks, asked) = mpsc::channel(4);
    let ties = Ties::none("n1").asked(asked);
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0);
    let reconciler = reconciler.tied(ties).metered(meters.clone());
    tokio::spawn(reconciler.run(taker, CancellationToken::new()));
    Running { giver, asks, meters }
}

impl Running {
    fn count(&self) -> u64 {
        count_and_sum(&self.meters.reconcile()).0
    }

    /// Answered between two rounds: what came before is in the kernel, or has failed.
    async fn facts(&self) -> NodeFacts {
        let (asker, answer) = oneshot::channel();
        self.asks.send(Question::Facts(asker)).await.expect("it runs");
        answer.await.expect("it answers")
    }

    async fn until(&self, what: &str, is_so: impl Fn(&NodeFacts) -> bool) -> NodeFacts {
        for _ in 0..500 {
            let facts = self.facts().await;
            if is_so(&facts) {
                return facts;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("not within five seconds: {what}");
    }
}

#[tokio::test]
async fn each_batch_is_timed_from_its_arrival_and_only_when_all_is_known() {
    let running = start(&Recorder::default());
    let items = [("n1", "172.18.0.100")];
    world(&items).into_iter().for_each(|change| running.giver.put(change));
    let facts = running.until("the first lists are taken", |facts| {
        facts.missing.as_ref().is_some_and(|missing| !missing.contains("nodes"))
    });
    assert_eq!(facts.await.missing.as_deref(), Some("waiting for the API server to say: pods"));
    assert_eq!(running.count(), 0);
    running.giver.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let facts = running.until("it is served", |facts| !facts.served.is_empty()).await;
    assert_eq!(
        facts.served,
        BTreeMap::from([(EgressId(1), Served { address: ip("172.18.0.100"), object: "a".into(), uid: "a".into() })])
    );
    assert_eq!((facts.entries["pods"], facts.entries["owned"], facts.unclaimed), (1, 1, 0));
    assert_eq!(running.count(), 1, "what was waited for before is not the kernel's");
    running.giver.put(Change::Pods(Update::Changed(key("q"), pod("10.244.1.11", "web"))));
    running.until("the other pod is known", |facts| facts.entries["pods"] == 2).await;
    assert_eq!((running.count(), running.meters.failures()), (2, 0));
}

#[tokio::test]
async fn what_fails_is_counted_and_timed_when_it_is_done() {
    let fails = Action::PutPod(ip("10.244.1.10"), PodState::Selected(EgressId(1)));
    let recorder =
        Recorder { fails: Arc::new(Mutex::new(Some(fails))), in_use: Some(ip("172.18.0.100")), ..Recorder::default() };
    let running = start(&recorder);
    world(&[("n1", "172.18.0.100")]).into_iter().for_each(|change| running.giver.put(change));
    running.giver.put(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    let facts = running.until("the pod is known at last", |facts| facts.entries["pods"] == 1).await;
    assert_eq!((running.count(), running.meters.failures()), (1, 1));
    assert!(
        count_and_sum(&running.meters.reconcile()).1 >= FIRST_RETRY.as_secs_f64(),
        "with the time until the next attempt"
    );
    assert_eq!((facts.unclaimed, facts.served.len()), (1, 0), "somebody else has the address");
}
