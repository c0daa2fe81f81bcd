//! From Kubernetes objects to values of `egress_core::model`; [`crate::policy`] converts egress policies. Pure.
//!
//! What cannot be read becomes a problem that is named in the value; it blocks nothing else.

pub mod interface;
pub mod node;
pub mod pod;
pub mod service;

pub use crate::convert::node::{AgentFacts, agent_facts, joined, node};
pub use crate::convert::pod::{pod, pod_key};
pub use crate::convert::service::{service, service_key};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use egress_core::model::view::CreationTimestamp;

/// Maximum bytes of a problem: it may quote what a user has written.
pub(crate) const MOST_OF_PROBLEM: usize = 256;

/// IANA's number of a port's protocol. The default is TCP.
fn protocol(name: Option<&str>) -> Option<u8> {
    match name {
        None | Some("TCP") => Some(6),
        Some("UDP") => Some(17),
        Some("SCTP") => Some(132),
        Some(_) => None,
    }
}

/// A quantity of Kubernetes as a whole number, rounded up: `300k`, `1.5Gi`, `2e6`. `None` for any other text, for a negative one,
/// and for one that does not fit.
pub(crate) fn quantity(text: &str) -> Option<u64> {
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: u128 = [whole, fraction].concat().parse().ok()?;
    let power = |base: u128, exponent: u32| base.checked_pow(exponent);
    let multiple = match suffix {
        "" => 1,
        "k" => power(10, 3)?,
        "M" => power(10, 6)?,
        "G" => power(10, 9)?,
        "T" => power(10, 12)?,
        "P" => power(10, 15)?,
        "E" => power(10, 18)?,
        "Ki" => power(2, 10)?,
        "Mi" => power(2, 20)?,
        "Gi" => power(2, 30)?,
        "Ti" => power(2, 40)?,
        "Pi" => power(2, 50)?,
        "Ei" => power(2, 60)?,
        _ => power(10, suffix.strip_prefix(['e', 'E'])?.parse().ok()?)?,
    };
    let value = digits.checked_mul(multiple)?.div_ceil(power(10, u32::try_from(fraction.len()).ok()?)?);
    u64::try_from(value).ok()
}

pub(crate) fn created(meta: &ObjectMeta) -> CreationTimestamp {
    meta.creation_timestamp.as_ref().map_or(CreationTimestamp::MAX, |time| time.0.as_second())
}

pub(crate) fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        let cases = [
            ("0", 0),
            ("300k", 300_000),
            ("100M", 100_000_000),
            ("2G", 2_000_000_000),
            ("1.5Ki", 1_536),
            ("0.0001k", 1),
            ("1.", 1),
            (".5M", 500_000),
            ("2e6", 2_000_000),
            ("2E3", 2_000),
            ("1E", 1_000_000_000_000_000_000),
        ];
        for (text, expected) in cases {
            assert_eq!(quantity(text), Some(expected), "{text}");
        }
        for text in ["", ".", "k", "-1", "1 M", "1K", "1m", "1e", "1e99", "20E", "1.2.3", "1Mbit", "0x10"] {
            assert_eq!(quantity(text), None, "{text}");
        }
    }
}
