//! The leader's view of the ledger: what it and the nodes' acknowledgements say about hand-overs, and how it is written.
//!
//! The standby keeps this state too, so that a new leader knows what it has seen itself: since when nodes are suspected, and which
//! nodes had the addresses of policies that were deleted a moment ago.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use tracing::{info, warn};

use egress_core::allocation::Nodes;
use egress_core::leader_election::node_of;
use egress_core::model::ledger::Ledger;
use egress_core::model::node::Node;
use egress_core::model::policy::{EgressPolicy, Policies, parse_egress_ip};
use egress_core::node_health::NodeHealth;
use egress_core::ownership::acknowledgements::{AcknowledgementReader, SeenAcknowledgements};
use egress_core::ownership::endless::{self, Alone};
use egress_core::ownership::handover::{Evidence, HandOver, RecordChange};
use egress_core::ownership::suspicion::{Longest, Suspicions, TermStart, Terms, suspects};
use egress_kube::leader_election::Leadership;
use egress_kube::ledger::{self, LEDGER_NAME, LedgerStore};
use egress_kube::policy::status::{WriteError, WriteErrorLog};

/// After this time a node that had the address of a deleted policy has learned of the deletion, or is out of touch for long.
const DEPARTED: Duration = Duration::from_secs(60);
/// Timeout of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct LedgerWriter {
    store: LedgerStore,
    leadership: Leadership,
    /// Beginning of the leadership in the current pass: its writes are refused if another may have led since.
    since: Option<Instant>,
    write_errors: WriteErrorLog,
    /// When a signature of another leader was seen after this leader's own.
    overwritten: Option<Instant>,
    /// The identity with which this leader signs.
    leader: String,
    /// The durations of the leases that this leader gives.
    own: Terms,
    longest_lease: Longest,
    longest_programs: Longest,
    ledger: Option<Arc<Ledger>>,
    suspicions: Suspicions,
    departed: BTreeMap<IpAddr, (String, Instant)>,
    acknowledgements: AcknowledgementReader,
    endless_leases: Alone,
}

/// What one decision is based on.
#[derive(Debug)]
pub(super) struct LedgerExtract {
    /// The ledger to write before anything else.
    pub(super) draft: Ledger,
    acknowledged: SeenAcknowledgements,
    departed: BTreeMap<IpAddr, String>,
    ends: BTreeMap<String, Instant>,
    /// The nodes whose leases have no end.
    pub(super) endless: BTreeSet<String>,
    /// When the next node is to be suspected, or the wait for one ends.
    pub(super) look_again: Option<Instant>,
}

impl LedgerExtract {
    pub(super) fn evidence(&self) -> Evidence<'_> {
        let SeenAcknowledgements { released, given, prepared, .. } = &self.acknowledged;
        Evidence { released, given, prepared, ends: &self.ends, departed: &self.departed }
    }
}

impl LedgerWriter {
    /// `own` are this controller's lease durations.
    pub(super) fn new(store: LedgerStore, leadership: Leadership, leader: String, own: Terms) -> Self {
        Self {
            store,
            leadership,
            since: None,
            write_errors: WriteErrorLog::default(),
            overwritten: None,
            leader,
            own,
            longest_lease: Longest::default(),
            longest_programs: Longest::default(),
            ledger: None,
            suspicions: Suspicions::default(),
            departed: BTreeMap::new(),
            acknowledgements: AcknowledgementReader::default(),
            endless_leases: Alone::default(),
        }
    }

    /// Takes a version. Older ones, which the watch brings after the answer to a write, are ignored.
    pub(super) fn follow(&mut self, ledger: Arc<Ledger>, now: Instant) {
        let version = |ledger: &Ledger| ledger.version.parse::<u64>().ok();
        let known = self.ledger.as_ref().and_then(|known| version(known));
        if known.zip(version(&ledger)).is_some_and(|(known, new)| new < known) {
            return;
        }
        if self.ledger.as_ref().is_some_and(|known| known.leader == self.leader && is_of_another(&ledger, &self.leader))
        {
            self.overwritten = Some(now);
        }
        self.suspicions.note(&ledger, now);
        let times = (now, self.leadership.former().map_or(now, |former| former.until));
        self.longest_lease.note((ledger.total, ledger.former_total), self.own.lease, times);
        self.longest_programs.note((ledger.programs, ledger.former_programs), self.own.programs, times);
        self.ledger = Some(ledger);
    }

    /// A policy is deleted: remembers which nodes had its addresses.
    pub(super) fn depart(&mut self, policy: &EgressPolicy, now: Instant) {
        self.departed.retain(|_, (_, since)| now < *since + DEPARTED);
        let items = policy.published.items.iter().filter_map(|item| Some((parse_egress_ip(&item.egress_ip)?, item)));
        self.departed.extend(items.map(|(address, item)| (address, (item.node.clone(), now))));
    }

    /// Collects what a decision needs. `None` while the ledger is not known. `since` is when this leader began to lead.
    pub(super) fn extract(
        &mut self,
        policies: &Policies,
        nodes: &Nodes,
        node_health: &NodeHealth,
        (since, now): (Instant, Instant),
    ) -> Option<LedgerExtract> {
        self.since = Some(since);
        let ledger = self.ledger.as_ref()?;
        let own = self.own;
        let mut draft = Ledger {
            leader: self.leader.clone(),
            total: Some(own.lease),
            former_total: self.longest_lease.to_write(own.lease, now),
            programs: Some(own.programs),
            former_programs: self.longest_programs.to_write(own.programs, now),
            ..(**ledger).clone()
        };
        // A clock before 1970 counts from the beginning.
        let unix_ms = UNIX_EPOCH.elapsed().map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(0));
        let released = nodes.values().map(|node| &node.released).chain(node_health.released.values());
        draft.continue_after(released.flat_map(|released| released.values().copied()), unix_ms);
        let (suspected, look_again) = suspects(node_health, ledger, since, now);
        draft.suspects.retain(|node, _| suspected.contains(node));
        for node in suspected {
            if !draft.suspects.contains_key(&node) {
                draft.records.last += 1;
                draft.suspects.insert(node, draft.records.last);
            }
        }
        // Probes bring it sooner; without a health port only the policy has it.
        let mut bounded = node_health.bounded.clone();
        for (name, number) in nodes.iter().filter_map(|(name, node)| Some((name, node.bounded?))) {
            bounded.entry(name.clone()).and_modify(|by_probes| *by_probes = number.max(*by_probes)).or_insert(number);
        }
        let settled = self.endless_leases.follow(&mut draft, (policies, nodes), &bounded, now);
        let acknowledged = self.acknowledgements.read(ledger, nodes, node_health, now);
        let open = &ledger.records.open;
        let shown: BTreeSet<IpAddr> = match self.departed.is_empty() {
            true => BTreeSet::new(),
            false => policies
                .values()
                .flat_map(|o| &o.published.items)
                .filter_map(|i| parse_egress_ip(&i.egress_ip))
                .collect(),
        };
        self.departed.retain(|address, (_, since)| {
            now < *since + DEPARTED && !open.contains_key(address) && !shown.contains(address)
        });
        let departed = self.departed.iter().map(|(address, (node, _))| (*address, node.clone())).collect();
        let (lease, programs) = (&self.longest_lease, &self.longest_programs);
        let terms = Terms { lease: lease.of(own.lease, now), programs: programs.of(own.programs, now) };
        let former = self.leadership.former();
        let is_asked = |name: &str, node: &Node| node.assignable && node_of(&self.leader).is_none_or(|own| own != name);
        let others = nodes.iter().filter(|(name, node)| is_asked(name, node)).map(|(name, _)| name.as_str()).collect();
        let beginning = TermStart { since, former: former.as_ref(), others: &others };
        let mut ends = self.suspicions.ends(node_health, terms, beginning);
        // By the written ledger and by the draft.
        let endless: BTreeSet<String> = endless::all(ledger).chain(endless::all(&draft)).cloned().collect();
        ends.retain(|node, _| !endless.contains(node));
        let longest = lease.next(now).into_iter().chain(programs.next(now)).chain(settled);
        let look_again = look_again.into_iter().chain(acknowledged.look_again).chain(longest).min();
        Some(LedgerExtract { draft, acknowledged, departed, ends, endless, look_again })
    }

    /// Writes the draft with the hand-overs that begin or change, if it differs. It comes before any status that follows from it.
    pub(super) async fn open(&mut self, mut draft: Ledger, steps: &[RecordChange]) -> bool {
        let recorded = || {
            steps.iter().filter_map(|step| match step {
                RecordChange::Record(address, hand_over) => Some((address, hand_over)),
                _ => None,
            })
        };
        for (address, hand_over) in recorded() {
            draft.record(*address, hand_over.clone());
        }
        let is_written = self.write(draft).await;
        // What cannot be written is tried again each second, and not logged each time.
        for (address, HandOver { number, from, to }) in recorded().filter(|_| is_written) {
            let to = to.as_deref().unwrap_or("none yet");
            info!(%address, number, from, to, "an egress IP is to change its node");
        }
        is_written
    }

    /// Removes finished hand-overs, after everything that waited for them is written.
    pub(super) async fn close(&mut self, steps: &[RecordChange]) -> bool {
        let Some(ledger) = &self.ledger else { return true };
        let mut draft = Ledger::clone(ledger);
        for step in steps {
            if let RecordChange::Forget(address) = step {
                draft.forget(address);
            }
        }
        self.write(draft).await
    }

    /// Adopts an older ledger after a rollback of the API server, because no write would succeed by the known version. A quorum read
    /// is never late, so an older version means a rollback. The leader continues from it as a new leader does, but never reuses
    /// a number.
    async fn adopt_rollback(&mut self) {
        let version = |ledger: &Ledger| ledger.version.parse::<u64>().ok();
        let Some(known) = self.ledger.clone() else { return };
        let Ok(Ok(Some(read))) = tokio::time::timeout(TIMEOUT, self.store.read()).await else { return };
        let Ok(mut older) = ledger::read(&read) else { return };
        let Some((old, new)) = version(&older).zip(version(&known)).filter(|(old, new)| old < new) else { return };
        warn!(
            version = old,
            before = new,
            "the ConfigMap {LEDGER_NAME} is an older one than before: continuing from it"
        );
        older.records.last = older.records.last.max(known.records.last);
        self.ledger = None;
        self.follow(Arc::new(older), Instant::now());
    }

    /// False when it could not be written.
    async fn write(&mut self, draft: Ledger) -> bool {
        // A deleted ledger is written again.
        if self.ledger.as_deref() == Some(&draft) && !draft.version.is_empty() {
            return true;
        }
        if self.since.is_none() || self.leadership.since() != self.since {
            return false;
        }
        // Another leader that has signed it may have taken over early. Only a renewal of the Lease can exclude that.
        if self.overwritten.is_some_and(|at| self.leadership.renewed().is_none_or(|renewed| renewed <= at)) {
            return false;
        }
        let written = tokio::time::timeout(TIMEOUT, self.store.write(&draft)).await;
        match written.unwrap_or(Err(WriteError::Timeout)) {
            Ok(ledger) => {
                self.follow(Arc::new(ledger), Instant::now());
                if self.write_errors.ends() {
                    info!("hand-overs are written again");
                }
                true
            }
            // The watch brings the version of the other writer.
            Err(WriteError::Stale) => {
                self.adopt_rollback().await;
                false
            }
            Err(error) => {
                if self.write_errors.is_due(error.code(), Instant::now()) {
                    warn!(%error, "cannot write the ConfigMap {LEDGER_NAME}: no egress IP changes its node; trying again");
                }
                false
            }
        }
    }
}

/// Whether another leader has signed it. A deleted ledger has no signature.
fn is_of_another(ledger: &Ledger, leader: &str) -> bool {
    !ledger.leader.is_empty() && ledger.leader != leader
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::model::ledger::Records;
    use egress_kube::leader_election::leadership;
    use egress_kube::stub::Server;

    fn writer(server: &Server, leads: &Leadership) -> LedgerWriter {
        let store = LedgerStore::new(server.client().0, "now");
        LedgerWriter::new(store, leads.clone(), "me".into(), terms())
    }

    fn terms() -> Terms {
        Terms { lease: Duration::from_secs(1), programs: Duration::from_secs(31) }
    }

    /// What is written is answered with version 7.
    #[tokio::test]
    async fn a_former_leader_writes_nothing_and_a_late_watch_changes_nothing() {
        let server = Server::start().await;
        let (published, leads, _duty) = leadership();
        published.set_leads_until(Some(Instant::now() + Duration::from_secs(60)));
        let mut writer = writer(&server, &leads);
        let ledger = |version: &str| Ledger { version: version.into(), ..Ledger::default() };
        writer.follow(Arc::new(ledger("6")), Instant::now());
        let draft = Ledger { leader: "me".into(), ..ledger("6") };
        // Another has led since this pass began.
        writer.since = leads.since().map(|since| since - Duration::from_secs(1));
        assert!(!writer.write(draft.clone()).await);
        assert_eq!(server.asked("PUT"), 0);
        writer.since = leads.since();
        assert!(writer.write(draft).await);
        writer.follow(Arc::new(ledger("6")), Instant::now());
        assert_eq!(writer.ledger.as_ref().map(|ledger| ledger.version.as_str()), Some("7"));
    }

    /// It may consider itself the leader until its renew deadline.
    #[tokio::test]
    async fn a_leader_that_was_replaced_early_writes_nothing_after_its_successor() {
        let server = Server::start().await;
        let (published, leads, _duty) = leadership();
        published.set_leads_until(Some(Instant::now() + Duration::from_secs(60)));
        let mut writer = writer(&server, &leads);
        writer.since = leads.since();
        let signed = |leader: &str, version: &str| {
            Arc::new(Ledger { leader: leader.into(), version: version.into(), ..Ledger::default() })
        };
        let draft = Ledger { leader: "me".into(), ..Ledger::default() };
        writer.follow(signed("former", "5"), Instant::now());
        assert!(writer.write(draft.clone()).await, "a new leader signs");
        writer.follow(signed("", "7"), Instant::now());
        assert!(writer.write(draft.clone()).await, "it was deleted");
        writer.follow(signed("other", "9"), Instant::now());
        writer.follow(signed("other", "10"), Instant::now());
        assert!(!writer.write(draft.clone()).await);
        published.set_renewed(Some(Instant::now()));
        assert!(writer.write(draft).await, "it still holds the Lease");
    }

    #[tokio::test]
    async fn waits_for_leases_are_as_long_as_a_former_leader_gave_them() {
        let server = Server::start().await;
        let (_published, leads, _duty) = leadership();
        let mut writer = writer(&server, &leads);
        let (now, former) = (Instant::now(), Duration::from_secs(30));
        let suspects = BTreeMap::from([("n1".to_owned(), 1)]);
        let (total, programs) = (Some(former), Some(former + terms().programs));
        writer.follow(Arc::new(Ledger { total, programs, suspects, ..Ledger::default() }), now);
        let nothing = (Policies::new(), Nodes::new());
        let mut end = |node_health: &NodeHealth| {
            let extract = writer.extract(&nothing.0, &nothing.1, node_health, (now, now)).expect("the ledger is known");
            (extract.evidence().ends["n1"], extract)
        };
        let unknown = NodeHealth::by(Duration::from_secs(1));
        let silent = NodeHealth { silent: BTreeSet::from(["n1".to_owned()]), ..unknown.clone() };
        assert!((now + former..now + former + terms().programs).contains(&end(&silent).0));
        let (end, extract) = end(&unknown);
        assert!(end >= now + former + terms().programs);
        assert_eq!((extract.draft.former_total, extract.draft.programs), (Some(former), Some(terms().programs)));
    }

    /// Its programs emit without an end, even if it is suspected.
    #[tokio::test]
    async fn addresses_of_a_node_with_an_endless_lease_are_not_given_away() {
        let server = Server::start().await;
        let (_published, leads, _duty) = leadership();
        let now = Instant::now();
        let ends = |endless: &[&str], ending: &[&str]| {
            let numbered = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), 2)).collect();
            let ledger = Ledger {
                suspects: BTreeMap::from([("n1".to_owned(), 1)]),
                endless: numbered(endless),
                ending: numbered(ending),
                ..Ledger::default()
            };
            let mut writer = writer(&server, &leads);
            writer.follow(Arc::new(ledger), now);
            let nodes = Nodes::from([egress_core::allocation::samples::node("n1", "172.18.0.2/16")]);
            let extract = writer.extract(&Policies::new(), &nodes, &NodeHealth::by(terms().lease), (now, now));
            let extract = extract.expect("the ledger is known");
            extract.evidence().ends.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(ends(&[], &[]), ["n1"]);
        assert!(ends(&["n1"], &[]).is_empty() && ends(&[], &["n1"]).is_empty());
    }

    /// The server has version 7, and refuses writes over any other.
    #[tokio::test]
    async fn an_older_ledger_of_the_server_is_adopted_and_a_newer_one_waited_for() {
        let server = Server::start().await;
        let (published, leads, _duty) = leadership();
        published.set_leads_until(Some(Instant::now() + Duration::from_secs(60)));
        let store = LedgerStore::new(server.client().0, "past");
        let mut writer = LedgerWriter::new(store, leads.clone(), "me".into(), terms());
        writer.since = leads.since();
        for (known, expected) in [("6", "6"), ("9", "7")] {
            writer.ledger = None;
            let records = Records { last: 40, ..Records::default() };
            let ledger = Ledger { version: known.into(), records, ..Ledger::default() };
            writer.follow(Arc::new(ledger.clone()), Instant::now());
            assert!(!writer.write(Ledger { leader: "me".into(), ..ledger }).await);
            let now = writer.ledger.as_ref().expect("known");
            assert_eq!((now.version.as_str(), now.records.last), (expected, 40));
        }
    }
}
