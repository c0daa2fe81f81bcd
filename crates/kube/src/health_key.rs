//! The key that controllers and agents sign with (`egress_agent::health::signature`), in a Secret of their namespace. A controller
//! that finds none makes one; the first to write it wins, and the others read what it wrote.
//!
//! It is read at the start, and again where something was not signed with it: then it may have been replaced. After the Secret
//! is deleted the controllers that are started next make another, and all agents have it within seconds
//! (docs/operations/health-check-key.md). Where it cannot be read the process continues with what it has; without a key it
//! believes no one, and is not believed.

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

/// How long one reading may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Behind one that failed.
const RETRY: Duration = Duration::from_secs(1);
/// Between two readings, the former of which has shown another key.
const SOON: Duration = Duration::from_secs(2);
/// The same where it has shown the same key: whoever reaches the health ports of all agents can have each doubt its key as
/// often. A node that is not believed meanwhile is in its grace period (30 s).
const PAUSE: Duration = Duration::from_secs(15);

const ABOUT: &str = "the key that agents sign health checks with";

/// What to do where there is no Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfAbsent {
    /// A controller makes it.
    Make,
    /// An agent waits for it, and has no right to more.
    Wait,
}

/// Why there is no key. None of these shows it.
#[derive(Debug, thiserror::Error)]
enum KeyError {
    #[error(transparent)]
    Request(#[from] Error),
    #[error(
        "the Secret {SECRET_NAME} has no entry `{ENTRY}` of {} bytes: delete it, and a controller makes another",
        Key::LENGTH
    )]
    Malformed,
    #[error("no random numbers")]
    Random,
    #[error("there is no Secret {SECRET_NAME} yet: a controller makes it, so none has run")]
    Absent,
}

/// Of agents and controllers. Neither logs nor errors show it.
#[derive(Clone)]
pub struct Key(Arc<hmac::Key>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// In bytes: the length of what the hash gives, as RFC 2104 recommends.
    pub const LENGTH: usize = 32;

    /// `None` where it has another length.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() == Self::LENGTH).then(|| Self(Arc::new(hmac::Key::new(HMAC_SHA256, bytes))))
    }

    pub fn hmac(&self) -> &hmac::Key {
        &self.0
    }
}

/// The key as it is now, for all who sign.
#[derive(Clone)]
pub struct SharedKey {
    now: watch::Receiver<Option<Key>>,
    doubt: Arc<Notify>,
}

impl fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedKey")
    }
}

impl Default for SharedKey {
    /// None, ever.
    fn default() -> Self {
        Self::new().0
    }
}

/// The other end of a [`SharedKey`].
pub struct KeyHolder {
    pub now: watch::Sender<Option<Key>>,
    doubt: Arc<Notify>,
}

impl SharedKey {
    /// Before the key is known.
    pub fn new() -> (Self, KeyHolder) {
        let ((publish, now), doubt) = (watch::channel(None), Arc::new(Notify::new()));
        (Self { now, doubt: doubt.clone() }, KeyHolder { now: publish, doubt })
    }

    /// `None` while it is not known: nothing is believed then.
    pub fn now(&self) -> Option<Key> {
        self.now.borrow().clone()
    }

    /// Waits until it is.
    pub async fn known(&self) {
        // One that ends knows none any more.
        drop(self.now.clone().wait_for(Option::is_some).await);
    }

    /// Something was not signed with it: the key may be another by now.
    pub fn doubt(&self) {
        self.doubt.notify_one();
    }
}

impl KeyHolder {
    /// Waits until somebody doubts that it is the right one; at once where somebody has since.
    pub async fn doubted(&self) {
        self.doubt.notified().await;
    }
}

/// Has it read and known, until told to stop.
pub async fn keep(
    (client, namespace): (Client, &str),
    holder: KeyHolder,
    (outages, notes): (&ApiOutages, Option<Notes>),
    if_absent: IfAbsent,
    stop: CancellationToken,
) {
    let store = Store { api: Api::namespaced(client, namespace) };
    let mut known = Vec::new();
    let mut ends = outages.ends();
    loop {
        ends.mark_unchanged();
        let Some(read) = stop.run_until_cancelled(tokio::time::timeout(PATIENCE, store.read(if_absent))).await else {
            return;
        };
        let mut pause = PAUSE;
        let (is_done, note) = match read {
            Ok(Ok((key, bytes))) => {
                outages.works(ABOUT);
                if known != bytes {
                    info!(is_another = !known.is_empty(), "{ABOUT} is known");
                    known = bytes;
                    pause = SOON;
                    holder.now.send_replace(Some(key));
                }
                (true, None)
            }
            Ok(Err(KeyError::Request(error))) => {
                outages.failed(ABOUT, &error);
                (false, Some(crate::error_text::ErrorText(&error).to_string()))
            }
            Ok(Err(error)) => (false, Some(error.to_string())),
            Err(_) => {
                outages.unanswered(ABOUT, "a request took too long");
                (false, Some("a request took too long".to_owned()))
            }
        };
        if let Some(notes) = &notes {
            let why = note.map(|why| format!("cannot be read: {why}"));
            notes.set(ABOUT, why.into_iter().collect());
        }
        let next = async {
            if is_done {
                tokio::time::sleep(pause).await;
                holder.doubted().await;
            } else {
                tokio::time::sleep(RETRY).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = next => {}
            Ok(()) = ends.changed(), if !is_done => {}
        }
    }
}

struct Store {
    api: Api<Secret>,
}

impl Store {
    async fn read(&self, if_absent: IfAbsent) -> Result<(Key, Vec<u8>), KeyError> {
        if let Some(secret) = self.api.get_opt(SECRET_NAME).await? {
            return key_of(secret);
        }
        if if_absent == IfAbsent::Wait {
            return Err(KeyError::Absent);
        }
        match self.api.create(&post_params(), &new_secret()?).await {
            Ok(made) => {
                warn!("there was no Secret {SECRET_NAME}: this controller has made one");
                key_of(made)
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
    let mut bytes = [0; Key::LENGTH];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| KeyError::Random)?;
    Ok(Secret {
        metadata: ObjectMeta { name: Some(SECRET_NAME.to_owned()), ..ObjectMeta::default() },
        // To be deleted and made again, not edited.
        immutable: Some(true),
        data: Some(BTreeMap::from([(ENTRY.to_owned(), ByteString(bytes.to_vec()))])),
        ..Secret::default()
    })
}

fn key_of(secret: Secret) -> Result<(Key, Vec<u8>), KeyError> {
    let ByteString(bytes) = secret.data.and_then(|mut data| data.remove(ENTRY)).ok_or(KeyError::Malformed)?;
    Ok((Key::new(&bytes).ok_or(KeyError::Malformed)?, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_random_and_what_is_none_is_refused() {
        let [one, other] = [(); 2].map(|()| key_of(new_secret().expect("random")).expect("a key").1);
        assert!(one != other && one.len() == Key::LENGTH);
        let secret = |data: &[(&str, &[u8])]| Secret {
            data: Some(data.iter().map(|(name, bytes)| ((*name).to_owned(), ByteString(bytes.to_vec()))).collect()),
            ..Secret::default()
        };
        let (short, whole) = (&b"short"[..], &[1; Key::LENGTH][..]);
        for data in [&[][..], &[(ENTRY, short)], &[("another", whole)]] {
            assert!(matches!(key_of(secret(data)), Err(KeyError::Malformed)), "{data:?}");
        }
        assert!(matches!(key_of(Secret::default()), Err(KeyError::Malformed)));
    }
}
