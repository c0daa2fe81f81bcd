//! Addresses that the fence took, and that all others have promised not to take.

use super::*;
use crate::fence::regain::{Addresses, Regain};

const A: &str = "172.18.0.100";

struct Stage {
    recorder: Recorder,
    standing: watch::Sender<ties::Standing>,
    regain: Regain,
    back: watch::Sender<Addresses>,
    _changes: crate::model::inbox::Giver,
    stop: CancellationToken,
}

impl Stage {
    /// The API server says nothing to whoever asks it.
    fn begin() -> Self {
        let recorder = Recorder::default();
        let (standing, is_standing) = watch::channel(ties::Standing::Holds);
        let silent: ties::Ask = Box::new(|_| Box::pin(std::future::pending()));
        let tells = (watch::channel(Default::default()).0, watch::channel(BTreeMap::new()).0);
        let ((back, is_back), regain) = (watch::channel(Addresses::new()), Regain::default());
        let ties = Ties::new("n1", (is_standing, watch::channel(BTreeMap::new()).1), tells, silent);
        let ties = ties.regaining(regain.clone(), is_back);
        let ready = watch::channel(Ready::default());
        let reconciler = Reconciler::new(settings(), recorder.clone(), None, ready.0).tied(ties);
        let (giver, taker) = crate::model::inbox::inbox();
        held().into_iter().for_each(|change| giver.put(change));
        let stop = CancellationToken::new();
        tokio::spawn(reconciler.run(taker, stop.clone()));
        Self { recorder, standing, regain, back, _changes: giver, stop }
    }

    async fn until_owned(&self, count: usize) {
        let owned = || self.recorder.state.lock().expect("not poisoned").owned.len();
        let is_so = async {
            while owned() != count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), is_so).await.expect("in time");
    }
}

#[tokio::test]
async fn what_the_fence_took_is_had_back_without_the_api_server_and_lost_again_when_promises_end() {
    let stage = Stage::begin();
    stage.until_owned(1).await;
    let all = Addresses::from([ip(A)]);
    assert_eq!(stage.regain.wanted(), Addresses::new());
    assert_eq!(stage.regain.promise(&all, Duration::ZERO, Instant::now().into_std()), Addresses::new(), "it has it");
    stage.standing.send_replace(ties::Standing::Fenced);
    stage.until_owned(0).await;
    let wants = async {
        while stage.regain.wanted() != all {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), wants).await.expect("it would have it back");
    stage.back.send_replace(all.clone());
    stage.until_owned(1).await;
    // In touch: it asks whose the address is, and has no answer. What it has it keeps, and does not wait to give it up.
    stage.standing.send_replace(ties::Standing::Holds);
    tokio::time::sleep(Duration::from_millis(50)).await;
    stage.until_owned(1).await;
    stage.back.send_replace(Addresses::new());
    stage.until_owned(0).await;
    assert_eq!(stage.regain.wanted(), all);
    stage.stop.cancel();
}

#[tokio::test]
async fn what_was_promised_is_not_taken_until_that_has_run_out() {
    let mut changes = world(&[]);
    changes.push(Change::Pods(Update::Replaced(BTreeMap::new())));
    let (recorder, regain) = (Recorder::default(), Regain::default());
    let ties = Ties::none("n1").regaining(regain.clone(), watch::channel(Addresses::new()).1);
    let ready = watch::channel(Ready::default());
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready.0).tied(ties);
    changes.into_iter().for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("a recorder does not fail");
    let all = Addresses::from([ip(A)]);
    assert_eq!(regain.promise(&all, Duration::ZERO, Instant::now().into_std()), all, "it has nothing");
    held().into_iter().for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("a recorder does not fail");
    assert!(recorder.state.lock().expect("not poisoned").owned.is_empty() && reconciler.incomplete);
    // Longer than a promise for no time lasts.
    tokio::time::sleep(Duration::from_millis(260)).await;
    reconciler.reconcile().await.expect("a recorder does not fail");
    assert_eq!(recorder.state.lock().expect("not poisoned").owned.len(), 1);
}

/// Nor by a hand-over.
#[tokio::test]
async fn what_was_promised_is_not_made_ready_for_either() {
    let regain = Regain::default();
    let recorder = Recorder::default();
    let ties = Ties::none("n1").regaining(regain.clone(), watch::channel(Addresses::new()).1);
    let ready = watch::channel(Ready::default());
    let mut reconciler = Reconciler::new(settings(), recorder.clone(), None, ready.0).tied(ties);
    let mut changes = world(&[("n2", A)]);
    changes.push(Change::Pods(Update::Replaced([(key("p"), pod("10.244.1.10", "web"))].into())));
    changes.into_iter().for_each(|change| reconciler.apply(change));
    reconciler.reconcile().await.expect("a recorder does not fail");
    let all = Addresses::from([ip(A)]);
    assert_eq!(regain.promise(&all, Duration::ZERO, Instant::now().into_std()), all, "it has nothing");
    let Change::Ledger(ledger) = hand_over(7, "n2", "n1") else { unreachable!("a ledger") };
    let ledger = Ledger { leases: true, ..Arc::unwrap_or_clone(ledger) };
    reconciler.apply(Change::Ledger(Arc::new(ledger)));
    reconciler.reconcile().await.expect("a recorder does not fail");
    let moving = || recorder.state.lock().expect("not poisoned").moving.len();
    assert_eq!((moving(), reconciler.incomplete), (0, true));
    // Longer than a promise for no time lasts.
    tokio::time::sleep(Duration::from_millis(260)).await;
    reconciler.reconcile().await.expect("a recorder does not fail");
    assert_eq!(moving(), 1);
}

/// It began when nobody could be asked: some lists never come.
#[tokio::test]
async fn a_node_whose_leases_run_out_before_it_knows_the_cluster_lets_go() {
    let recorder = Recorder::default();
    recorder.state.lock().expect("not poisoned").owned.insert(EgressId(1), ip(A));
    let (standing, is_standing) = watch::channel(ties::Standing::Undecided);
    let nobody: ties::Ask = Box::new(|_| Box::pin(std::future::pending()));
    let tells = (watch::channel(Default::default()).0, watch::channel(BTreeMap::new()).0);
    let ties = Ties::new("n1", (is_standing, watch::channel(BTreeMap::new()).1), tells, nobody);
    let reconciler = Reconciler::new(settings(), recorder.clone(), None, watch::channel(Ready::default()).0).tied(ties);
    let (giver, taker) = crate::model::inbox::inbox();
    let stop = CancellationToken::new();
    tokio::spawn(reconciler.run(taker, stop.clone()));
    giver.put(Change::Ledger(Arc::default()));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let owned = || recorder.state.lock().expect("not poisoned").owned.len();
    assert_eq!(owned(), 1, "that is not known yet");
    standing.send_replace(ties::Standing::Fenced);
    let gone = async {
        while owned() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), gone).await.expect("in time");
    stop.cancel();
}
