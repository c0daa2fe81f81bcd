//! The token by which other hosts read the metrics, in a Secret of the agents' namespace. A controller that finds none creates it; the
//! manifests mount it into agents and controllers, and Prometheus gets it from there. To replace it, delete the Secret and restart
//! the controllers, or make one: an existing Secret is left alone.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta};
use kube::{Client, Error};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::api_outage::ApiOutages;
use crate::post_params;

pub const SECRET_NAME: &str = "egress-agent-metrics";
const ENTRY: &str = "token";
/// In bytes.
const LENGTH: usize = 32;

const WHAT: &str = "the Secret with the token for the metrics";
/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(5);

/// Creates the Secret unless there is one, then waits until stopped.
pub async fn provide(client: Client, namespace: &str, outages: &ApiOutages, stop: CancellationToken) {
    let api = Api::namespaced(client, namespace);
    let until_it_is_there = async {
        while !is_there(&api, outages).await {
            tokio::time::sleep(RETRY).await;
        }
    };
    stop.run_until_cancelled(until_it_is_there).await;
    stop.cancelled().await;
}

/// Without the right to read the Secret: the server refuses to create a name that exists.
async fn is_there(api: &Api<Secret>, outages: &ApiOutages) -> bool {
    let mut bytes = [0; LENGTH];
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        outages.refused(WHAT, "no random numbers");
        return false;
    }
    let secret = new_secret(&bytes);
    match tokio::time::timeout(TIMEOUT, api.create(&post_params(), &secret)).await {
        Ok(Ok(_)) => {
            outages.answered(WHAT);
            info!("there was no Secret {SECRET_NAME}: this controller has created one, with a random token");
            true
        }
        Ok(Err(Error::Api(status))) if status.code == 409 => {
            outages.answered(WHAT);
            true
        }
        Ok(Err(error)) => {
            outages.failed(WHAT, &error);
            false
        }
        Err(_) => {
            outages.unanswered(WHAT, "a request took too long");
            false
        }
    }
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
