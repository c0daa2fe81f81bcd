//! The key that controllers and agents sign health checks with, in a Secret of their namespace. A controller that finds none
//! creates it; the first write wins, and the others read it.
//!
//! It is read at the start, and again after a message that was not signed with it, since it may have been replaced. After the
//! Secret is deleted, the controllers that start next create another, and all agents have it within seconds
//! (docs/operations/health-check-key.md). If it cannot be read, the process keeps the key that it has; without a key it trusts no message, and
//! its own are not trusted.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::hmac::{self, HMAC_SHA256};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta};
use kube::{Client, Error};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api_outage::ApiOutages;
use crate::post_params;
use egress_core::notes::Notes;

pub const SECRET_NAME: &str = "egress-agent-key";
const ENTRY: &str = "key";

/// Timeout of one read.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a failed read.
const RETRY: Duration = Duration::from_secs(1);
/// Pause after a read that has shown another key.
const PAUSE_AFTER_CHANGE: Duration = Duration::from_secs(2);
/// Pause after a read that has shown the same key: anyone who reaches the health ports can make each agent doubt its key. A node
/// that is not trusted in this time is in its grace period (30 s).
const PAUSE_UNCHANGED: Duration = Duration::from_secs(15);

const WHAT: &str = "the key that agents sign health checks with";

/// What to do if there is no Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfAbsent {
    /// A controller creates it.
    Create,
    /// An agent waits for it: it has no right to create it.
    Wait,
}

/// Why there is no key. No text contains the key.
#[derive(Debug, thiserror::Error)]
enum KeyError {
    #[error(transparent)]
    Request(#[from] Error),
    #[error(
        "the Secret {SECRET_NAME} has no entry `{ENTRY}` of {} bytes: delete it, and a controller makes another",
        HealthKey::LENGTH
    )]
    Malformed,
    #[error("no random numbers")]
    Random,
    #[error("there is no Secret {SECRET_NAME} yet: a controller makes it, so none has run")]
    Absent,
}

/// The key. Neither logs nor errors show it.
#[derive(Clone)]
pub struct HealthKey(Arc<hmac::Key>);

impl fmt::Debug for HealthKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HealthKey")
    }
}

impl HealthKey {
    /// In bytes: the length of the hash, as RFC 2104 recommends.
    pub const LENGTH: usize = 32;

    /// `None` if the length is wrong.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() == Self::LENGTH).then(|| Self(Arc::new(hmac::Key::new(HMAC_SHA256, bytes))))
    }

    pub fn hmac(&self) -> &hmac::Key {
        &self.0
    }
}

/// The current key, for everything that signs.
#[derive(Clone)]
pub struct SharedKey {
    current: watch::Receiver<Option<HealthKey>>,
    doubt: Arc<Notify>,
}

impl fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedKey")
    }
}

impl Default for SharedKey {
    /// Never has a key.
    fn default() -> Self {
        Self::new().0
    }
}

/// The other end of a [`SharedKey`].
pub struct KeyPublisher {
    pub current: watch::Sender<Option<HealthKey>>,
    doubt: Arc<Notify>,
}

impl SharedKey {
    /// A pair without a key so far.
    pub fn new() -> (Self, KeyPublisher) {
        let ((publish, now), doubt) = (watch::channel(None), Arc::new(Notify::new()));
        (Self { current: now, doubt: doubt.clone() }, KeyPublisher { current: publish, doubt })
    }

    /// `None` while it is not known: no message is trusted then.
    pub fn current(&self) -> Option<HealthKey> {
        self.current.borrow().clone()
    }

    /// Waits until it is known.
    pub async fn known(&self) {
        // An error means that the process ends.
        drop(self.current.clone().wait_for(Option::is_some).await);
    }

    /// A message was not signed with it: the key may have been replaced.
    pub fn suspect(&self) {
        self.doubt.notify_one();
    }
}

impl KeyPublisher {
    /// Waits until the key is doubted. Returns at once if it was doubted since the last call.
    pub async fn suspected(&self) {
        self.doubt.notified().await;
    }
}

/// Keeps the key current until stopped.
pub async fn keep(
    (client, namespace): (Client, &str),
    publisher: KeyPublisher,
    (outages, notes): (&ApiOutages, Option<Notes>),
    if_absent: IfAbsent,
    stop: CancellationToken,
) {
    let store = HealthKeyStore { api: Api::namespaced(client, namespace) };
    let mut known = Vec::new();
    let mut outage_ends = outages.ends();
    loop {
        outage_ends.mark_unchanged();
        let Some(read) = stop.run_until_cancelled(tokio::time::timeout(TIMEOUT, store.read(if_absent))).await else {
            return;
        };
        let mut pause = PAUSE_UNCHANGED;
        let (is_done, note) = match read {
            Ok(Ok((key, bytes))) => {
                outages.answered(WHAT);
                if known != bytes {
                    info!(is_another = !known.is_empty(), "{WHAT} is known");
                    known = bytes;
                    pause = PAUSE_AFTER_CHANGE;
                    publisher.current.send_replace(Some(key));
                }
                (true, None)
            }
            Ok(Err(KeyError::Request(error))) => {
                outages.failed(WHAT, &error);
                (false, Some(crate::error_text::ErrorText(&error).to_string()))
            }
            Ok(Err(error)) => (false, Some(error.to_string())),
            Err(_) => {
                outages.unanswered(WHAT, "a request took too long");
                (false, Some("a request took too long".to_owned()))
            }
        };
        if let Some(notes) = &notes {
            let why = note.map(|why| format!("cannot be read: {why}"));
            notes.set(WHAT, why.into_iter().collect());
        }
        let next = async {
            if is_done {
                tokio::time::sleep(pause).await;
                publisher.suspected().await;
            } else {
                tokio::time::sleep(RETRY).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = next => {}
            Ok(()) = outage_ends.changed(), if !is_done => {}
        }
    }
}

struct HealthKeyStore {
    api: Api<Secret>,
}

impl HealthKeyStore {
    async fn read(&self, if_absent: IfAbsent) -> Result<(HealthKey, Vec<u8>), KeyError> {
        if let Some(secret) = self.api.get_opt(SECRET_NAME).await? {
            return key_of(secret);
        }
        if if_absent == IfAbsent::Wait {
            return Err(KeyError::Absent);
        }
        match self.api.create(&post_params(), &new_secret()?).await {
            Ok(created) => {
                warn!("there was no Secret {SECRET_NAME}: this controller has created one");
                key_of(created)
            }
            // The other controller was faster.
            Err(Error::Api(status)) if status.code == 409 => {
                let secret = self.api.get_opt(SECRET_NAME).await?;
                secret.map_or(Err(KeyError::Malformed), key_of)
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn new_secret() -> Result<Secret, KeyError> {
    let mut bytes = [0; HealthKey::LENGTH];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| KeyError::Random)?;
    Ok(Secret {
        metadata: ObjectMeta { name: Some(SECRET_NAME.to_owned()), ..ObjectMeta::default() },
        // It is replaced by deleting it, not edited.
        immutable: Some(true),
        data: Some(BTreeMap::from([(ENTRY.to_owned(), ByteString(bytes.to_vec()))])),
        ..Secret::default()
    })
}

fn key_of(secret: Secret) -> Result<(HealthKey, Vec<u8>), KeyError> {
    let ByteString(bytes) = secret.data.and_then(|mut data| data.remove(ENTRY)).ok_or(KeyError::Malformed)?;
    Ok((HealthKey::new(&bytes).ok_or(KeyError::Malformed)?, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_random_and_a_malformed_secret_is_refused() {
        let [one, other] = [(); 2].map(|()| key_of(new_secret().expect("random")).expect("a key").1);
        assert!(one != other && one.len() == HealthKey::LENGTH);
        let secret = |data: &[(&str, &[u8])]| Secret {
            data: Some(data.iter().map(|(name, bytes)| ((*name).to_owned(), ByteString(bytes.to_vec()))).collect()),
            ..Secret::default()
        };
        let (short, whole) = (&b"short"[..], &[1; HealthKey::LENGTH][..]);
        for data in [&[][..], &[(ENTRY, short)], &[("another", whole)]] {
            assert!(matches!(key_of(secret(data)), Err(KeyError::Malformed)), "{data:?}");
        }
        assert!(matches!(key_of(Secret::default()), Err(KeyError::Malformed)));
    }
}
