//! The leader's view of the ledger: hand-overs, by the ledger and the nodes' acknowledgements, and the writes of the
//! ledger.
//!
//! The standby keeps this state too, so that a new leader continues from its own observations: since when nodes are
//! suspected, and which nodes were the gateways of recently deleted policies.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use tracing::{info, warn};

use egress_core::allocation::Nodes;
use egress_core::leader_election::node_of;
use egress_core::model::ledger::Ledger;
use egress_core::model::node::Node;
use egress_core::model::policy::{EgressNodes, EgressPolicy, Policies, parse_egress_ip};
use egress_core::node_health::NodeHealth;
use egress_core::ownership::acknowledgements::{AcknowledgementReader, ReceivedAcknowledgements};
use egress_core::ownership::endless_leases::{SoleHosts, endless_nodes};
use egress_core::ownership::handover::{Evidence, HandOver, RecordChange};
use egress_core::ownership::suspicion::{LeaseDurations, LongestDuration, Suspicions, TermStart, suspects};
use egress_kube::leader_election::Leadership;
use egress_kube::ledger::{self, LEDGER_NAME, LedgerStore};
use egress_kube::policy::status::{WriteError, WriteErrorLog};

/// After this time a node that had the address of a deleted policy has learned of the deletion, or is out of touch for long.
const DELETED_REMEMBERED_FOR: Duration = Duration::from_secs(60);
/// Timeout of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct LedgerWriter {
    store: LedgerStore,
    leadership: Leadership,
    /// Beginning of the leadership in the current pass: its writes are refused if another may have led since.
    since: Option<Instant>,
    write_errors: WriteErrorLog,
    /// When a signature of another leader was found after this leader's own.
    overwritten_at: Option<Instant>,
    /// The identity with which this leader signs.
    leader: String,
    /// The durations of the leases that this leader gives.
    own_durations: LeaseDurations,
    longest_lease: LongestDuration,
    longest_programs: LongestDuration,
    ledger: Option<Arc<Ledger>>,
    suspicions: Suspicions,
    deleted: BTreeMap<IpAddr, (String, Instant)>,
    acknowledgements: AcknowledgementReader,
    sole_hosts: SoleHosts,
}

/// What one pass of the reconciler needs of the ledger.
#[derive(Debug)]
pub(super) struct LedgerInputs {
    /// The ledger to write before anything else.
    pub(super) draft: Ledger,
    received: ReceivedAcknowledgements,
    deleted_objects_gateways: BTreeMap<IpAddr, String>,
    lease_expiries: BTreeMap<String, Instant>,
    /// The nodes whose leases have no end.
    pub(super) endless: BTreeSet<String>,
    /// When the next node is to be suspected, or the wait for one ends.
    pub(super) requeue_at: Option<Instant>,
}

impl LedgerInputs {
    pub(super) fn evidence(&self) -> Evidence<'_> {
        let ReceivedAcknowledgements { released, new_owners, prepared, .. } = &self.received;
        Evidence {
            released,
            new_owners,
            prepared,
            lease_expiries: &self.lease_expiries,
            deleted_objects_gateways: &self.deleted_objects_gateways,
        }
    }
}

impl LedgerWriter {
    /// `own` are this controller's lease durations.
    pub(super) fn new(store: LedgerStore, leadership: Leadership, leader: String, own: LeaseDurations) -> Self {
        Self {
            store,
            leadership,
            since: None,
            write_errors: WriteErrorLog::default(),
            overwritten_at: None,
            leader,
            own_durations: own,
            longest_lease: LongestDuration::default(),
            longest_programs: LongestDuration::default(),
            ledger: None,
            suspicions: Suspicions::default(),
            deleted: BTreeMap::new(),
            acknowledgements: AcknowledgementReader::default(),
            sole_hosts: SoleHosts::default(),
        }
    }

    /// Takes a version. Older ones, which the watch brings after the answer to a write, are ignored.
    pub(super) fn observe(&mut self, ledger: Arc<Ledger>, now: Instant) {
        let version = |ledger: &Ledger| ledger.version.parse::<u64>().ok();
        let known = self.ledger.as_ref().and_then(|known| version(known));
        if known.zip(version(&ledger)).is_some_and(|(known, new)| new < known) {
            return;
        }
        if self.ledger.as_ref().is_some_and(|known| known.leader == self.leader && is_of_another(&ledger, &self.leader))
        {
            self.overwritten_at = Some(now);
        }
        self.suspicions.observe(&ledger, now);
        let times = (now, self.leadership.former().map_or(now, |former_leader| former_leader.until));
        self.longest_lease.observe((ledger.total, ledger.former_total), self.own_durations.lease, times);
        self.longest_programs.observe((ledger.programs, ledger.former_programs), self.own_durations.programs, times);
        self.ledger = Some(ledger);
    }

    /// A policy is deleted: remembers which nodes had its addresses.
    pub(super) fn note_deleted(&mut self, policy: &EgressPolicy, now: Instant) {
        self.deleted.retain(|_, (_, since)| now < *since + DELETED_REMEMBERED_FOR);
        let items = policy.published.items.iter().filter_map(|item| Some((parse_egress_ip(&item.egress_ip)?, item)));
        self.deleted.extend(items.map(|(address, item)| (address, (item.node.clone(), now))));
    }

    /// Collects what a pass needs. `None` while the ledger is not known. `since` is when this leader began to lead.
    pub(super) fn inputs(
        &mut self,
        policies: &Policies,
        nodes: &Nodes,
        node_health: &NodeHealth,
        (since, now): (Instant, Instant),
    ) -> Option<LedgerInputs> {
        self.since = Some(since);
        let ledger = self.ledger.as_ref()?;
        let own = self.own_durations;
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
        let (suspected, suspicion_requeue_at) = suspects(node_health, ledger, since, now);
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
        let sole_host_change = self.sole_hosts.update_draft(&mut draft, (policies, nodes), &bounded, now);
        let received = self.acknowledgements.read(ledger, nodes, node_health, now);
        let open = &ledger.records.open;
        let in_status: BTreeSet<IpAddr> = match self.deleted.is_empty() {
            true => BTreeSet::new(),
            false => policies
                .values()
                .flat_map(|o| &o.published.items)
                .filter_map(|i| parse_egress_ip(&i.egress_ip))
                .collect(),
        };
        self.deleted.retain(|address, (_, since)| {
            now < *since + DELETED_REMEMBERED_FOR && !open.contains_key(address) && !in_status.contains(address)
        });
        let deleted_objects_gateways =
            self.deleted.iter().map(|(address, (node, _))| (*address, node.clone())).collect();
        let (lease, programs) = (&self.longest_lease, &self.longest_programs);
        let terms =
            LeaseDurations { lease: lease.effective(own.lease, now), programs: programs.effective(own.programs, now) };
        let former_leader = self.leadership.former();
        let egress_nodes = EgressNodes::of(policies.values().map(|policy| &**policy));
        let is_probed =
            |name: &str, node: &Node| egress_nodes.has(node) && node_of(&self.leader).is_none_or(|own| own != name);
        let others = nodes.iter().filter(|(name, node)| is_probed(name, node)).map(|(name, _)| name.as_str()).collect();
        let term_start = TermStart { since, former: former_leader.as_ref(), others: &others };
        let mut lease_expiries = self.suspicions.lease_expiries(node_health, terms, term_start);
        // By the written ledger and by the draft.
        let endless: BTreeSet<String> = endless_nodes(ledger).chain(endless_nodes(&draft)).cloned().collect();
        lease_expiries.retain(|node, _| !endless.contains(node));
        let expiry = lease.expires_at(now).into_iter().chain(programs.expires_at(now)).chain(sole_host_change);
        let requeue_at = suspicion_requeue_at.into_iter().chain(received.requeue_at).chain(expiry).min();
        Some(LedgerInputs { draft, received, deleted_objects_gateways, lease_expiries, endless, requeue_at })
    }

    /// Writes the draft with the hand-overs that begin or change, if it differs. It comes before any status that follows from it.
    pub(super) async fn write_begun(&mut self, mut draft: Ledger, changes: &[RecordChange]) -> bool {
        let recorded = || {
            changes.iter().filter_map(|change| match change {
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
    pub(super) async fn write_finished(&mut self, changes: &[RecordChange]) -> bool {
        let Some(ledger) = &self.ledger else { return true };
        let mut draft = Ledger::clone(ledger);
        for change in changes {
            if let RecordChange::Remove(address) = change {
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
        self.observe(Arc::new(older), Instant::now());
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
        if self.overwritten_at.is_some_and(|at| self.leadership.renewed().is_none_or(|renewed| renewed <= at)) {
            return false;
        }
        let written = tokio::time::timeout(TIMEOUT, self.store.write(&draft)).await;
        match written.unwrap_or(Err(WriteError::Timeout)) {
            Ok(ledger) => {
                self.observe(Arc::new(ledger), Instant::now());
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
    use egress_kube::stub::StubServer;

    fn writer(server: &StubServer, leads: &Leadership) -> LedgerWriter {
        let store = LedgerStore::new(server.client().0, "now");
        LedgerWriter::new(store, leads.clone(), "me".into(), terms())
    }

    fn terms() -> LeaseDurations {
        LeaseDurations { lease: Duration::from_secs(1), programs: Duration::from_secs(31) }
    }

    /// What is written is answered with version 7.
    #[tokio::test]
    async fn a_former_leader_writes_nothing_and_a_late_watch_changes_nothing() {
        let server = StubServer::start().await;
        let (published, leads, _duty) = leadership();
        published.set_leads_until(Some(Instant::now() + Duration::from_secs(60)));
        let mut writer = writer(&server, &leads);
        let ledger = |version: &str| Ledger { version: version.into(), ..Ledger::default() };
        writer.observe(Arc::new(ledger("6")), Instant::now());
        let draft = Ledger { leader: "me".into(), ..ledger("6") };
        // Another has led since this pass began.
        writer.since = leads.since().map(|since| since - Duration::from_secs(1));
        assert!(!writer.write(draft.clone()).await);
        assert_eq!(server.requests("PUT"), 0);
        writer.since = leads.since();
        assert!(writer.write(draft).await);
        writer.observe(Arc::new(ledger("6")), Instant::now());
        assert_eq!(writer.ledger.as_ref().map(|ledger| ledger.version.as_str()), Some("7"));
    }

    /// It may consider itself the leader until its renew deadline.
    #[tokio::test]
    async fn a_leader_that_was_replaced_early_writes_nothing_after_its_successor() {
        let server = StubServer::start().await;
        let (published, leads, _duty) = leadership();
        published.set_leads_until(Some(Instant::now() + Duration::from_secs(60)));
        let mut writer = writer(&server, &leads);
        writer.since = leads.since();
        let signed = |leader: &str, version: &str| {
            Arc::new(Ledger { leader: leader.into(), version: version.into(), ..Ledger::default() })
        };
        let draft = Ledger { leader: "me".into(), ..Ledger::default() };
        writer.observe(signed("former", "5"), Instant::now());
        assert!(writer.write(draft.clone()).await, "a new leader signs");
        writer.observe(signed("", "7"), Instant::now());
        assert!(writer.write(draft.clone()).await, "it was deleted");
        writer.observe(signed("other", "9"), Instant::now());
        writer.observe(signed("other", "10"), Instant::now());
        assert!(!writer.write(draft.clone()).await);
        published.set_renewed(Some(Instant::now()));
        assert!(writer.write(draft).await, "it still holds the Lease");
    }

    #[tokio::test]
    async fn waits_for_leases_are_as_long_as_a_former_leader_gave_them() {
        let server = StubServer::start().await;
        let (_published, leads, _duty) = leadership();
        let mut writer = writer(&server, &leads);
        let (now, former) = (Instant::now(), Duration::from_secs(30));
        let suspects = BTreeMap::from([("n1".to_owned(), 1)]);
        let (total, programs) = (Some(former), Some(former + terms().programs));
        writer.observe(Arc::new(Ledger { total, programs, suspects, ..Ledger::default() }), now);
        let nothing = (Policies::new(), Nodes::new());
        let mut end = |node_health: &NodeHealth| {
            let inputs = writer.inputs(&nothing.0, &nothing.1, node_health, (now, now)).expect("the ledger is known");
            (inputs.evidence().lease_expiries["n1"], inputs)
        };
        let unknown = NodeHealth::with_lease(Duration::from_secs(1));
        let silent = NodeHealth { silent: BTreeSet::from(["n1".to_owned()]), ..unknown.clone() };
        assert!((now + former..now + former + terms().programs).contains(&end(&silent).0));
        let (end, inputs) = end(&unknown);
        assert!(end >= now + former + terms().programs);
        assert_eq!((inputs.draft.former_total, inputs.draft.programs), (Some(former), Some(terms().programs)));
    }

    /// Its programs emit without an end, even if it is suspected.
    #[tokio::test]
    async fn addresses_of_a_node_with_an_endless_lease_are_not_given_away() {
        let server = StubServer::start().await;
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
            writer.observe(Arc::new(ledger), now);
            let nodes = Nodes::from([egress_core::allocation::samples::node("n1", "172.18.0.2/16")]);
            let inputs = writer.inputs(&Policies::new(), &nodes, &NodeHealth::with_lease(terms().lease), (now, now));
            let inputs = inputs.expect("the ledger is known");
            inputs.evidence().lease_expiries.keys().cloned().collect::<Vec<_>>()
        };
        assert_eq!(ends(&[], &[]), ["n1"]);
        assert!(ends(&["n1"], &[]).is_empty() && ends(&[], &["n1"]).is_empty());
    }

    /// The server has version 7, and refuses writes over any other.
    #[tokio::test]
    async fn an_older_ledger_of_the_server_is_adopted_and_a_newer_one_waited_for() {
        let server = StubServer::start().await;
        let (published, leads, _duty) = leadership();
        published.set_leads_until(Some(Instant::now() + Duration::from_secs(60)));
        let store = LedgerStore::new(server.client().0, "past");
        let mut writer = LedgerWriter::new(store, leads.clone(), "me".into(), terms());
        writer.since = leads.since();
        for (known, expected) in [("6", "6"), ("9", "7")] {
            writer.ledger = None;
            let records = Records { last: 40, ..Records::default() };
            let ledger = Ledger { version: known.into(), records, ..Ledger::default() };
            writer.observe(Arc::new(ledger.clone()), Instant::now());
            assert!(!writer.write(Ledger { leader: "me".into(), ..ledger }).await);
            let now = writer.ledger.as_ref().expect("known");
            assert_eq!((now.version.as_str(), now.records.last), (expected, 40));
        }
    }
}
