//! Lists: consistent at one version, in pages if asked.
//!
//! A list that asks for any version (`resourceVersion=0`) may be of the past ([`super::lag`]), as from a server's cache.
//!
//! A page's continue token carries the version of the first page and the last key, so all pages show one moment. `Exact` reads
//! that version from the history; any other version only sets a lower bound, which the live state always meets.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::kind::Kind;
use super::query::Query;
use super::select::ListSelector;
use super::status::ApiError;
use super::store::{ObjectKey, ObjectTable, StoreState};

pub(super) struct Listing {
    pub items: Vec<Arc<Value>>,
    pub metadata: Value,
}

#[derive(Serialize, Deserialize)]
struct Token {
    version: u64,
    namespace: String,
    name: String,
}

pub(super) fn list(
    state: &StoreState,
    kind: &Kind,
    namespace: Option<&str>,
    query: &Query,
    selector: &ListSelector,
) -> Result<Listing, ApiError> {
    let token = if query.continue_from.is_empty() { None } else { Some(Token::decode(&query.continue_from)?) };
    let (table, version) = snapshot(state, kind, query, token.as_ref())?;
    let after = token.map(|token| ObjectKey { namespace: token.namespace, name: token.name });
    let mut matching = table
        .into_iter()
        .filter(|(key, _)| after.as_ref().is_none_or(|after| key > after))
        .filter(|(key, object)| namespace.is_none_or(|wanted| key.namespace == wanted) && selector.matches(object));
    let mut metadata = json!({"resourceVersion": version.to_string()});
    let page: Vec<(ObjectKey, Arc<Value>)> = matching.by_ref().take(query.limit.unwrap_or(usize::MAX)).collect();
    let left = matching.count();
    if left > 0
        && let Some((last, _)) = page.last()
    {
        let token = Token { version, namespace: last.namespace.clone(), name: last.name.clone() };
        metadata["continue"] = json!(token.encode());
        if selector.is_empty() {
            metadata["remainingItemCount"] = json!(left);
        }
    }
    Ok(Listing { items: page.into_iter().map(|(_, object)| object).collect(), metadata })
}

fn snapshot(
    state: &StoreState,
    kind: &Kind,
    query: &Query,
    token: Option<&Token>,
) -> Result<(ObjectTable, u64), ApiError> {
    let current = state.version();
    let asked = query.resource_version.unwrap_or_default();
    if asked > current {
        return Err(ApiError::version_from_the_future(asked, current));
    }
    let fixed = match token {
        Some(_) if asked > 0 => {
            return Err(ApiError::bad_request("specifying resource version is not allowed when using continue"));
        }
        Some(token) => Some(token.version),
        None if query.resource_version_match == "Exact" => Some(asked),
        None if query.resource_version == Some(0) => cached(state),
        None => None,
    };
    match fixed {
        Some(version) => Ok((state.list_at(&kind.storage, version)?, version)),
        None => Ok((state.list(&kind.storage), current)),
    }
}

/// The version that a list from the cache has, where there is a lag.
fn cached(state: &StoreState) -> Option<u64> {
    // Each version has readers of its own.
    let age = state.lag.as_ref()?.of(state.version());
    Some(state.version_of(age, Instant::now()).0)
}

impl Token {
    /// Opaque to clients, hexadecimal so that no query string has to escape it.
    fn encode(&self) -> String {
        let text = json!(self).to_string();
        text.bytes().map(|byte| format!("{byte:02x}")).collect()
    }

    fn decode(text: &str) -> Result<Self, ApiError> {
        let unreadable = || ApiError::bad_request("continue key is not valid");
        let digit = |c: &u8| char::from(*c).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let bytes: Option<Vec<u8>> = text
            .as_bytes()
            .chunks(2)
            .map(|pair| match pair {
                [high, low] => Some(digit(high)? * 16 + digit(low)?),
                _ => None,
            })
            .collect();
        serde_json::from_slice(&bytes.ok_or_else(unreadable)?).map_err(|_| unreadable())
    }
}
