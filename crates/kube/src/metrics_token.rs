//! The token by which other hosts read the metrics, in a Secret of the agents' namespace. Each controller looks for it now and then
//! and creates it if there is none; the manifests mount it into agents and controllers, and Prometheus gets it from there. To replace
//! it, delete the Secret, or make one: an existing Secret is left alone.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta};
use kube::{Client, Error};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::api_outage::ApiOutages;
use crate::backoff::random_delay;
use crate::post_params;

pub const SECRET_NAME: &str = "egress-agent-metrics";
const ENTRY: &str = "token";
/// In bytes.
const LENGTH: usize = 32;

const WHAT: &str = "the Secret with the token for the metrics";
/// From one look for the Secret to the next: after a deletion there is another within this time, and the kubelet takes as long to
/// mount it.
pub const INTERVAL: Duration = Duration::from_secs(60);
/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(5);

/// Creates the Secret whenever there is none, until stopped.
pub async fn provide(
    (client, namespace): (Client, &str),
    interval: Duration,
    outages: &ApiOutages,
    stop: CancellationToken,
) {
    let api = Api::namespaced(client, namespace);
    let forever = async {
        loop {
            let is_there = is_there(&api, outages).await;
            tokio::time::sleep(if is_there { interval + random_delay() } else { RETRY }).await;
        }
    };
    stop.run_until_cancelled(forever).await;
}

/// Without the right to read the Secret: the server refuses to create a name that exists.
async fn is_there(api: &Api<Secret>, outages: &ApiOutages) -> bool {
    let mut bytes = [0; LENGTH];
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        outages.refused(WHAT, "no random numbers");
        return false;
    }
    let secret = new_secret(&bytes);
    let create = async {
        match api.create(&post_params(), &secret).await {
            Ok(_) => Ok(true),
            Err(Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    };
    let is_new = outages.answer(WHAT, TIMEOUT, create).await;
    if is_new == Some(true) {
        info!("there was no Secret {SECRET_NAME}: this controller has created one, with a random token");
    }
    is_new.is_some()
}

/// The token is printable, since it is sent in a header: two hexadecimal digits for each byte.
fn new_secret(bytes: &[u8; LENGTH]) -> Secret {
    let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Secret {
        metadata: ObjectMeta { name: Some(SECRET_NAME.to_owned()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([(ENTRY.to_owned(), ByteString(token.into_bytes()))])),
        ..Secret::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_printable_and_as_long_as_its_bytes() {
        let mut bytes = [0; LENGTH];
        (bytes[0], bytes[31]) = (0xa0, 0x0f);
        let secret = new_secret(&bytes);
        let token = &secret.data.expect("data")[ENTRY].0;
        assert_eq!(token.len(), 64);
        assert!(token.starts_with(b"a000") && token.ends_with(b"000f"));
    }
}
