//! Signatures of probes and answers, with a key that all agents and controllers share (`egress_kube::health_key`).
//!
//! ```text
//! leader --- from, to, challenge, session, number, ... + signature of all of it --> agent
//! leader <-- status, challenge, ... + signature of all of it and of the request --- agent
//! ```
//!
//! HMAC-SHA256 (RFC 2104) over all `egress-agent-` metadata, the direction, both node names, and the service or status.
//! **An answer** also covers its request's signature, so it proves that the probed node answered this request. **A request**
//! names a challenge: the agent's random process ID and time. It counts once, while the challenge is fresh
//! ([`ReplayGuard`]); a replay at any node or process changes nothing. Delaying a message has the effect of a slow network,
//! which leases and orders allow for. Anything unsigned is a plain health check.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aws_lc_rs::hmac::{self, Tag};
use aws_lc_rs::rand;
pub use egress_kube::health_key::HealthKey;
use tonic::metadata::{AsciiMetadataValue, BinaryMetadataValue, MetadataMap};

/// The prefix of all signed metadata.
const PREFIX: &str = "egress-agent-";
const SIGNATURE: &str = "egress-agent-signature-bin";
/// In a request: the probing node, and the probed node.
const FROM: &str = "egress-agent-from";
const TO: &str = "egress-agent-to";
/// In an answer: the challenge for the next request. In a request: the latest challenge.
const CHALLENGE: &str = "egress-agent-challenge";
/// Without these, a signature of one direction would be valid in the other.
const REQUEST: &[u8] = b"egress-agent health request 1";
const ANSWER: &[u8] = b"egress-agent health answer 1";
/// Sessions that are kept: of a leader and a former one, by each address, and some that have ended.
const SESSIONS: usize = 16;

/// Signs and verifies the messages of health checks.
pub trait MessageAuth {
    /// Signs a request, in its metadata. No change may follow.
    fn sign_request(&self, metadata: &mut MetadataMap, service: &str, from: &str, to: &str) -> Signature;

    /// The signature of a request to this node, if it is valid.
    fn verify_request(&self, metadata: &MetadataMap, service: &str, own_name: &str) -> Option<Signature>;

    /// Signs the answer to a request, in its metadata. No change may follow.
    fn sign_answer(&self, metadata: &mut MetadataMap, status: i32, own_name: &str, to: &Signature);

    /// Whether the node has signed this answer to this request.
    fn has_signed_answer(&self, metadata: &MetadataMap, status: i32, node: &str, to: &Signature) -> bool;
}

impl MessageAuth for HealthKey {
    fn sign_request(&self, metadata: &mut MetadataMap, service: &str, from: &str, to: &str) -> Signature {
        for (key, name) in [(FROM, from), (TO, to)] {
            // Node names are letters, digits, dots and dashes.
            if let Ok(value) = AsciiMetadataValue::try_from(name) {
                metadata.insert(key, value);
            }
        }
        put(self, metadata, &request(metadata, service))
    }

    fn verify_request(&self, metadata: &MetadataMap, service: &str, own_name: &str) -> Option<Signature> {
        let is_for_us = metadata.get(TO).is_some_and(|to| to.as_bytes() == own_name.as_bytes());
        if is_for_us { verify(self, metadata, &request(metadata, service)) } else { None }
    }

    fn sign_answer(&self, metadata: &mut MetadataMap, status: i32, own_name: &str, to: &Signature) {
        put(self, metadata, &answer(metadata, status, own_name, to));
    }

    fn has_signed_answer(&self, metadata: &MetadataMap, status: i32, node: &str, to: &Signature) -> bool {
        verify(self, metadata, &answer(metadata, status, node, to)).is_some()
    }
}

fn put(key: &HealthKey, metadata: &mut MetadataMap, message: &[u8]) -> Signature {
    let tag = hmac::sign(key.hmac(), message);
    metadata.insert_bin(SIGNATURE, BinaryMetadataValue::from_bytes(tag.as_ref()));
    Signature(tag)
}

fn verify(key: &HealthKey, metadata: &MetadataMap, message: &[u8]) -> Option<Signature> {
    let tag = metadata.get_bin(SIGNATURE)?.to_bytes().ok()?;
    // Compares in constant time.
    hmac::verify(key.hmac(), message, &tag).ok()?;
    Some(Signature(hmac::sign(key.hmac(), message)))
}

/// A request's signature, which its answer's signature covers.
#[derive(Clone)]
pub struct Signature(Tag);

fn request(metadata: &MetadataMap, service: &str) -> Vec<u8> {
    canonical(&[REQUEST, service.as_bytes()], metadata)
}

fn answer(metadata: &MetadataMap, status: i32, node: &str, to: &Signature) -> Vec<u8> {
    canonical(&[ANSWER, &status.to_be_bytes(), node.as_bytes(), to.0.as_ref()], metadata)
}

/// Every part with its length before it, so that no two messages have the same bytes. Metadata is sorted, since its order has
/// no meaning except among values of one name.
fn canonical(parts: &[&[u8]], metadata: &MetadataMap) -> Vec<u8> {
    let entries = metadata.as_ref().iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    let mut entries: Vec<_> = entries.filter(|(name, _)| name.starts_with(PREFIX) && *name != SIGNATURE).collect();
    entries.sort_by_key(|(name, _)| *name);
    let entries = entries.into_iter().flat_map(|(name, value)| [name.as_bytes(), value]);
    let mut bytes = Vec::with_capacity(512);
    for part in parts.iter().copied().chain(entries) {
        bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

/// The node of the controller that sent a request. Trust it only in a signed request.
pub fn from(metadata: &MetadataMap) -> Option<&str> {
    metadata.get(FROM)?.to_str().ok()
}

/// What a request must name to count: the agent's process, and its time in milliseconds since its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    process: u128,
    at: u64,
}

impl Challenge {
    /// `None` if it is missing or invalid.
    pub fn read(metadata: &MetadataMap) -> Option<Self> {
        let (process, at) = metadata.get(CHALLENGE)?.to_str().ok()?.split_once(' ')?;
        Some(Self { process: u128::from_str_radix(process, 16).ok()?, at: at.parse().ok()? })
    }

    pub fn write(&self, metadata: &mut MetadataMap) {
        // Digits, letters and a space are ASCII.
        if let Ok(value) = AsciiMetadataValue::try_from(format!("{:032x} {}", self.process, self.at)) {
            metadata.insert(CHALLENGE, value);
        }
    }

    pub fn is_of_the_process_of(&self, other: &Self) -> bool {
        self.process == other.process
    }

    /// Of another process, or younger.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        self.process != other.process || self.at > other.at
    }
}

/// Rejects replayed requests. Every time is an argument.
#[derive(Debug)]
pub struct ReplayGuard {
    process: u128,
    started: Instant,
    /// The greatest number of each session, and when it arrived.
    sessions: BTreeMap<u64, (u64, u64)>,
    /// In a session that is not kept, challenges before this time do not count: a forgotten session may have used them.
    forgotten: u64,
}

impl ReplayGuard {
    pub fn new(now: Instant) -> Self {
        let mut random = [0; 16];
        // Without a random ID, a process would accept requests for another one. It fails only in self-tests of certified modules.
        #[expect(clippy::expect_used, reason = "without random numbers replays cannot be rejected")]
        rand::fill(&mut random).expect("the kernel has random numbers");
        Self { process: u128::from_be_bytes(random), started: now, sessions: BTreeMap::new(), forgotten: 0 }
    }

    pub fn challenge(&self, now: Instant) -> Challenge {
        Challenge { process: self.process, at: self.since_start(now) }
    }

    /// Whether a request counts. Call it only for signed requests.
    pub fn accept(
        &mut self,
        named: Option<Challenge>,
        (session, number): (u64, u64),
        age: Duration,
        now: Instant,
    ) -> bool {
        let (now, age) = (self.since_start(now), u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        let Some(named) = named.filter(|named| named.process == self.process) else { return false };
        if named.at > now || now - named.at > age {
            return false;
        }
        match self.sessions.get(&session) {
            Some((greatest, _)) if number <= *greatest => return false,
            None if named.at < self.forgotten => return false,
            None if self.sessions.len() == SESSIONS => self.forget_oldest(),
            _ => {}
        }
        self.sessions.insert(session, (number, now));
        true
    }

    fn forget_oldest(&mut self) {
        let oldest =
            self.sessions.iter().min_by_key(|(_, (_, latest))| *latest).map(|(id, (_, latest))| (*id, *latest));
        if let Some((id, latest)) = oldest {
            self.sessions.remove(&id);
            self.forgotten = self.forgotten.max(latest + 1);
        }
    }

    fn since_start(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tonic::{Request, Response};
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

    use super::*;
    use egress_kube::health_key::SharedKey;

    /// A key for tests, by a number.
    pub(crate) fn key(number: u8) -> HealthKey {
        HealthKey::new(&[number; HealthKey::LENGTH]).expect("its length")
    }

    /// The same as a shared key.
    pub(crate) fn shared(number: u8) -> SharedKey {
        let (shared, holder) = SharedKey::new();
        holder.current.send_replace(Some(key(number)));
        shared
    }

    /// The answer of a serving agent, under any name.
    pub(crate) fn answer_for_anyone(request: &Request<HealthCheckRequest>) -> Response<HealthCheckResponse> {
        let status = i32::from(ServingStatus::Serving);
        let mut answer = Response::new(HealthCheckResponse { status });
        let name = request.metadata().get(TO).and_then(|name| name.to_str().ok()).unwrap_or_default();
        let signature = key(1).verify_request(request.metadata(), &request.get_ref().service, name);
        signature.iter().for_each(|signature| key(1).sign_answer(answer.metadata_mut(), status, name, signature));
        answer
    }

    fn put(metadata: &mut MetadataMap, name: &'static str, value: &str) {
        metadata.insert(name, value.parse().expect("ASCII"));
    }

    fn signed() -> (MetadataMap, Signature) {
        let mut metadata = MetadataMap::new();
        put(&mut metadata, "egress-agent-a", "1");
        put(&mut metadata, "egress-agent-b", "2");
        let signature = key(1).sign_request(&mut metadata, "s", "node1", "node2");
        (metadata, signature)
    }

    #[test]
    fn a_request_is_valid_for_one_node_and_its_signed_content() {
        let is_right = |metadata: &MetadataMap| key(1).verify_request(metadata, "s", "node2").is_some();
        let (original, _) = signed();
        assert!(is_right(&original));
        assert!(key(2).verify_request(&original, "s", "node2").is_none(), "another key");
        assert!(key(1).verify_request(&original, "t", "node2").is_none(), "another service");
        assert!(key(1).verify_request(&original, "s", "node3").is_none(), "another node");
        let mut other = original.clone();
        put(&mut other, TO, "node3");
        assert!(key(1).verify_request(&other, "s", "node3").is_none(), "another name");
        type Change = fn(&mut MetadataMap);
        let changes: [(&str, Change); 6] = [
            ("another value", |metadata| put(metadata, "egress-agent-a", "2")),
            ("one more", |metadata| put(metadata, "egress-agent-c", "")),
            ("one more of a name", |metadata| assert!(metadata.append("egress-agent-a", "0".parse().expect("ASCII")))),
            ("one less", |metadata| drop(metadata.remove("egress-agent-b"))),
            ("a border moved", |metadata| {
                metadata.remove("egress-agent-b");
                put(metadata, "egress-agent-a", "1egress-agent-b2");
            }),
            ("no signature", |metadata| drop(metadata.remove_bin(SIGNATURE))),
        ];
        for (what, change) in changes {
            let mut metadata = original.clone();
            change(&mut metadata);
            assert!(!is_right(&metadata), "{what}");
        }
        let mut metadata = original.clone();
        put(&mut metadata, "user-agent", "anything");
        assert!(is_right(&metadata), "other metadata is not signed");
    }

    #[test]
    fn an_answer_is_valid_for_one_node_and_one_request() {
        let (request, of_request) = signed();
        let at_agent = key(1).verify_request(&request, "s", "node2").expect("right");
        let mut metadata = MetadataMap::new();
        put(&mut metadata, "egress-agent-a", "1");
        key(1).sign_answer(&mut metadata, 1, "node2", &at_agent);
        let is_right =
            |metadata: &MetadataMap, status, node| key(1).has_signed_answer(metadata, status, node, &of_request);
        assert!(is_right(&metadata, 1, "node2"));
        assert!(!is_right(&metadata, 2, "node2") && !is_right(&metadata, 1, "node3"));
        let mut next = request.clone();
        put(&mut next, "egress-agent-a", "2");
        let of_next = key(1).sign_request(&mut next, "s", "node1", "node2");
        assert!(!key(1).has_signed_answer(&metadata, 1, "node2", &of_next), "another request's");
        assert!(!key(2).has_signed_answer(&metadata, 1, "node2", &of_request), "another key's");
        assert!(!is_right(&request, 1, "node2"), "a request sent back");
        put(&mut metadata, "egress-agent-a", "2");
        assert!(!is_right(&metadata, 1, "node2"));
    }

    #[test]
    fn the_key_is_never_shown() {
        let shown = format!("{:?} {:?} {:?}", key(7), Some(key(7)), shared(7));
        assert_eq!(shown, "HealthKey Some(HealthKey) SharedKey");
        assert!(
            HealthKey::new(&[]).is_none() && HealthKey::new(&[1; 31]).is_none() && HealthKey::new(&[1; 33]).is_none()
        );
    }

    /// Times in milliseconds.
    struct Requests {
        guard: ReplayGuard,
        start: Instant,
    }

    impl Requests {
        fn new() -> Self {
            let start = Instant::now();
            Self { guard: ReplayGuard::new(start), start }
        }

        fn challenge(&self, at: u64) -> Option<Challenge> {
            let mut metadata = MetadataMap::new();
            self.guard.challenge(self.start + Duration::from_millis(at)).write(&mut metadata);
            Challenge::read(&metadata)
        }

        fn accepts(&mut self, at: u64, challenge: Option<Challenge>, session: u64, number: u64) -> bool {
            let now = self.start + Duration::from_millis(at);
            self.guard.accept(challenge, (session, number), Duration::from_secs(10), now)
        }
    }

    #[test]
    fn a_request_counts_once_in_time_and_at_its_process() {
        let mut requests = Requests::new();
        assert!(!requests.accepts(0, None, 7, 1), "it names no challenge");
        let challenge = requests.challenge(0);
        assert!(requests.accepts(10, challenge, 7, 1));
        assert!(!requests.accepts(20, challenge, 7, 1), "a copy");
        assert!(requests.accepts(30, challenge, 7, 3));
        assert!(!requests.accepts(40, challenge, 7, 2), "a delayed request");
        assert!(!requests.accepts(10_001, challenge, 7, 4), "an old challenge");
        assert!(!requests.accepts(50, requests.challenge(60), 7, 4), "a challenge from the future");
        assert!(!requests.accepts(50, Requests::new().challenge(40), 7, 4), "another process'");
        assert!(requests.accepts(10_002, requests.challenge(10_000), 7, 4));
        for invalid in ["", "1", "x 1", "1 x", "-1 1", "1 -1", "1 2 3"] {
            let mut metadata = MetadataMap::new();
            put(&mut metadata, CHALLENGE, invalid);
            assert_eq!(Challenge::read(&metadata), None, "{invalid:?}");
        }
    }

    #[test]
    fn replays_of_a_forgotten_session_do_not_count() {
        let mut requests = Requests::new();
        let first = requests.challenge(0);
        assert!(requests.accepts(0, first, 0, 1));
        for session in 1..1000 {
            let challenge = requests.challenge(session);
            assert!(requests.accepts(session, challenge, session, 1), "{session}");
            assert!(
                !requests.accepts(session, first, 0, 1) && !requests.accepts(session, challenge, session, 1),
                "{session}"
            );
        }
        assert!(requests.guard.sessions.len() <= SESSIONS);
        assert!(
            !requests.accepts(1000, requests.challenge(500), 500, 1)
                && requests.accepts(1000, requests.challenge(1000), 500, 1)
        );
    }

    #[test]
    fn a_signature_takes_microseconds() {
        let (mut metadata, _) = signed();
        put(&mut metadata, "egress-agent-let-go", &"2001:db8:1234:5678:9abc:def0:1234:5678 ".repeat(128));
        let (begin, times) = (Instant::now(), 1000);
        for _ in 0..times {
            key(1).sign_request(&mut metadata, "s", "node1", "node2");
        }
        let each = begin.elapsed() / times;
        println!("{each:?} for a request of five kilobytes");
        assert!(each < Duration::from_millis(2), "{each:?}");
    }
}
