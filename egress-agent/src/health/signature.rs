//! What leaders and agents say to each other is signed with a key that all agents and controllers share (`egress_kube::health_key`).
//!
//! ```text
//! leader --- from, to, challenge, session, number, ... + signature of all of it --> agent
//! leader <-- status, challenge, ... + signature of all of it and of the request --- agent
//! ```
//!
//! Signatures are HMAC-SHA256 (RFC 2104) over every entry of the metadata that is ours, the direction, both nodes' names, and
//! the service or status. So nobody without the key says anything, and a message says nothing in another's place:
//!
//! - **An answer** is signed together with the signature of its request, whose session is random and whose number is used
//!   once. It proves that the node that was asked has answered this request, at some time behind its sending.
//! - **A request** names a challenge of the agent: the random name of its process and the time on its clock. It counts where
//!   the challenge is young and the number is greater than all of its session before ([`Fresh`]). A copy that comes again,
//!   late, at another node or at another process changes nothing; it is answered, and the answer brings the next challenge.
//!
//! Who can hold messages back can have one count later, by the challenge's age at most. That is what a slow network does, and
//! leases and orders allow for it: a lease counts from when an earlier request came in, and an order is held against the
//! ledger.
//!
//! Whatever is not signed is a plain health check, and answered with the node's health alone.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aws_lc_rs::hmac::{self, Tag};
use aws_lc_rs::rand;
pub use egress_kube::health_key::Key;
use tonic::metadata::{AsciiMetadataValue, BinaryMetadataValue, MetadataMap};

/// What all entries of the metadata begin with that mean anything.
const OURS: &str = "egress-agent-";
const SIGNATURE: &str = "egress-agent-signature-bin";
/// Of a request: the node that asks, and the node that is asked.
const FROM: &str = "egress-agent-from";
const TO: &str = "egress-agent-to";
/// Of an answer: what the next request has to name. Of a request: what it names.
const CHALLENGE: &str = "egress-agent-challenge";
/// Without these a signature of one direction could be one of the other.
const REQUEST: &[u8] = b"egress-agent health request 1";
const ANSWER: &[u8] = b"egress-agent health answer 1";
/// Sessions that are remembered: a leader and a former one, by each address, and some that have ended.
const SESSIONS: usize = 16;

/// Signs and verifies the messages of health checks.
pub trait MessageAuth {
    /// Signs a request, in its metadata: the last that is done to it.
    fn sign_request(&self, metadata: &mut MetadataMap, service: &str, from: &str, to: &str) -> Signature;

    /// The signature of a request to this node, where it is right.
    fn verify_request(&self, metadata: &MetadataMap, service: &str, own_name: &str) -> Option<Signature>;

    /// Signs the answer to a request, in its metadata: the last that is done to it.
    fn sign_answer(&self, metadata: &mut MetadataMap, status: i32, own_name: &str, to: &Signature);

    /// Whether the node has signed this answer to this request.
    fn has_signed_answer(&self, metadata: &MetadataMap, status: i32, node: &str, to: &Signature) -> bool;
}

impl MessageAuth for Key {
    fn sign_request(&self, metadata: &mut MetadataMap, service: &str, from: &str, to: &str) -> Signature {
        for (key, name) in [(FROM, from), (TO, to)] {
            // Names of nodes are letters, digits, dots and dashes.
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

fn put(key: &Key, metadata: &mut MetadataMap, message: &[u8]) -> Signature {
    let tag = hmac::sign(key.hmac(), message);
    metadata.insert_bin(SIGNATURE, BinaryMetadataValue::from_bytes(tag.as_ref()));
    Signature(tag)
}

fn verify(key: &Key, metadata: &MetadataMap, message: &[u8]) -> Option<Signature> {
    let said = metadata.get_bin(SIGNATURE)?.to_bytes().ok()?;
    // Takes the same time wherever they differ.
    hmac::verify(key.hmac(), message, &said).ok()?;
    Some(Signature(hmac::sign(key.hmac(), message)))
}

/// A request's, which its answer is signed with.
#[derive(Clone)]
pub struct Signature(Tag);

fn request(metadata: &MetadataMap, service: &str) -> Vec<u8> {
    canonical(&[REQUEST, service.as_bytes()], metadata)
}

fn answer(metadata: &MetadataMap, status: i32, node: &str, to: &Signature) -> Vec<u8> {
    canonical(&[ANSWER, &status.to_be_bytes(), node.as_bytes(), to.0.as_ref()], metadata)
}

/// Every part with its length before it, so that no two messages come to the same bytes. The order of metadata is nobody's
/// word, save that of values of one name.
fn canonical(parts: &[&[u8]], metadata: &MetadataMap) -> Vec<u8> {
    let entries = metadata.as_ref().iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    let mut entries: Vec<_> = entries.filter(|(name, _)| name.starts_with(OURS) && *name != SIGNATURE).collect();
    entries.sort_by_key(|(name, _)| *name);
    let entries = entries.into_iter().flat_map(|(name, value)| [name.as_bytes(), value]);
    let mut bytes = Vec::with_capacity(512);
    for part in parts.iter().copied().chain(entries) {
        bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

/// The node of the controller that a request says it is from. As good as its signature.
pub fn from(metadata: &MetadataMap) -> Option<&str> {
    metadata.get(FROM)?.to_str().ok()
}

/// What a request must name to be new: the agent's process, and when it has said so, in milliseconds since it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    process: u128,
    at: u64,
}

impl Challenge {
    /// `None` where there is none, or nonsense.
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

/// The agent's memory of signed requests: which is new. Every time is an argument.
#[derive(Debug)]
pub struct Fresh {
    process: u128,
    began: Instant,
    /// The greatest number of each, and when it came in.
    sessions: BTreeMap<u64, (u64, u64)>,
    /// No challenge up to then counts in a session that is not remembered: one that was forgotten may have named it.
    forgotten: u64,
}

impl Fresh {
    pub fn new(now: Instant) -> Self {
        let mut random = [0; 16];
        // It fails in tests of certified modules alone. Without a name of its own a process would take what was for another.
        #[expect(clippy::expect_used, reason = "an agent without random numbers can prove nothing")]
        rand::fill(&mut random).expect("the kernel has random numbers");
        Self { process: u128::from_be_bytes(random), began: now, sessions: BTreeMap::new(), forgotten: 0 }
    }

    pub fn challenge(&self, now: Instant) -> Challenge {
        Challenge { process: self.process, at: self.since_begin(now) }
    }

    /// Whether a request counts. Only one that is signed may be asked about.
    pub fn take(
        &mut self,
        named: Option<Challenge>,
        (session, number): (u64, u64),
        age: Duration,
        now: Instant,
    ) -> bool {
        let (now, age) = (self.since_begin(now), u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
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

    fn since_begin(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tonic::{Request, Response};
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

    use super::*;
    use egress_kube::health_key::SharedKey;

    /// One for tests, by a number.
    pub(crate) fn key(number: u8) -> Key {
        Key::new(&[number; Key::LENGTH]).expect("its length")
    }

    /// The same for all who sign.
    pub(crate) fn shared(number: u8) -> SharedKey {
        let (shared, holder) = SharedKey::new();
        holder.now.send_replace(Some(key(number)));
        shared
    }

    /// What an agent that serves answers, whichever is asked.
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
    fn a_request_is_for_one_node_and_says_what_was_signed_and_nothing_else() {
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
        assert!(is_right(&metadata), "what means nothing is not signed");
    }

    #[test]
    fn an_answer_is_that_of_one_node_to_one_request() {
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
        assert_eq!(shown, "Key Some(Key) SharedKey");
        assert!(Key::new(&[]).is_none() && Key::new(&[1; 31]).is_none() && Key::new(&[1; 33]).is_none());
    }

    /// Times in milliseconds.
    struct Play {
        fresh: Fresh,
        start: Instant,
    }

    impl Play {
        fn new() -> Self {
            let start = Instant::now();
            Self { fresh: Fresh::new(start), start }
        }

        fn challenge(&self, at: u64) -> Option<Challenge> {
            let mut metadata = MetadataMap::new();
            self.fresh.challenge(self.start + Duration::from_millis(at)).write(&mut metadata);
            Challenge::read(&metadata)
        }

        fn takes(&mut self, at: u64, challenge: Option<Challenge>, session: u64, number: u64) -> bool {
            let now = self.start + Duration::from_millis(at);
            self.fresh.take(challenge, (session, number), Duration::from_secs(10), now)
        }
    }

    #[test]
    fn a_request_counts_once_and_not_late_nor_elsewhere() {
        let mut play = Play::new();
        assert!(!play.takes(0, None, 7, 1), "it names no challenge");
        let challenge = play.challenge(0);
        assert!(play.takes(10, challenge, 7, 1));
        assert!(!play.takes(20, challenge, 7, 1), "a copy");
        assert!(play.takes(30, challenge, 7, 3));
        assert!(!play.takes(40, challenge, 7, 2), "one that was held back");
        assert!(!play.takes(10_001, challenge, 7, 4), "an old challenge");
        assert!(!play.takes(50, play.challenge(60), 7, 4), "one that was not given yet");
        assert!(!play.takes(50, Play::new().challenge(40), 7, 4), "another process'");
        assert!(play.takes(10_002, play.challenge(10_000), 7, 4));
        for nonsense in ["", "1", "x 1", "1 x", "-1 1", "1 -1", "1 2 3"] {
            let mut metadata = MetadataMap::new();
            put(&mut metadata, CHALLENGE, nonsense);
            assert_eq!(Challenge::read(&metadata), None, "{nonsense:?}");
        }
    }

    #[test]
    fn what_is_forgotten_does_not_come_again() {
        let mut play = Play::new();
        let first = play.challenge(0);
        assert!(play.takes(0, first, 0, 1));
        for session in 1..1000 {
            let challenge = play.challenge(session);
            assert!(play.takes(session, challenge, session, 1), "{session}");
            assert!(!play.takes(session, first, 0, 1) && !play.takes(session, challenge, session, 1), "{session}");
        }
        assert!(play.fresh.sessions.len() <= SESSIONS);
        assert!(!play.takes(1000, play.challenge(500), 500, 1) && play.takes(1000, play.challenge(1000), 500, 1));
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
