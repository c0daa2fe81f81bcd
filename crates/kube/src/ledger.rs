//! The ledger of hand-overs as a ConfigMap in the agents' namespace: one object, so that one watch brings all of it.
//!
//! Every write is conditional on the version that was read, so it fails if another writer, such as a new leader, came first.
//! Entries that people read (`kubectl get configmap egress-agent-hand-overs -o yaml`) are compact JSON.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ObjectMeta};
use kube::{Client, Error, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::policy::status::WriteError;
use crate::post_params;
use egress_core::model::ledger::{HandOver, Ledger, Records};

pub const LEDGER_NAME: &str = "egress-agent-hand-overs";

const LEADER: &str = "leader";
const TOTAL: &str = "total-timeout-ms";
const FORMER: &str = "former-total-timeout-ms";
const PROGRAMS: &str = "programs-timeout-ms";
const FORMER_PROGRAMS: &str = "former-programs-timeout-ms";
const LAST: &str = "last";
const RECORDS: &str = "records";
const FORMER_TARGETS: &str = "former-targets";
const SUSPECTS: &str = "suspects";
const ENDLESS: &str = "endless-leases";
const ENDING: &str = "ending-leases";

/// A ledger that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableLedger {
    /// The version to overwrite.
    pub version: String,
    /// The entry, and the error.
    pub why: String,
}

/// Reads the ConfigMap.
pub fn read(object: &ConfigMap) -> Result<Ledger, UnreadableLedger> {
    entries(object).map_err(|why| UnreadableLedger { version: object.resource_version().unwrap_or_default(), why })
}

fn entries(object: &ConfigMap) -> Result<Ledger, String> {
    let text = |key: &str| object.data.as_ref().and_then(|data| data.get(key)).map(String::as_str);
    let open: BTreeMap<IpAddr, (u64, String, Option<String>)> = entry(RECORDS, text(RECORDS))?;
    let record = |(address, (number, from, to))| (address, HandOver { number, from, to });
    let time = |key: &str| Ok::<_, String>(entry::<Option<u64>>(key, text(key))?.map(Duration::from_millis));
    Ok(Ledger {
        version: object.resource_version().unwrap_or_default(),
        leader: text(LEADER).unwrap_or_default().to_owned(),
        total: time(TOTAL)?,
        former_total: time(FORMER)?,
        programs: time(PROGRAMS)?,
        former_programs: time(FORMER_PROGRAMS)?,
        records: Records { last: entry(LAST, text(LAST))?, open: open.into_iter().map(record).collect() },
        former_targets: entry(FORMER_TARGETS, text(FORMER_TARGETS))?,
        suspects: entry(SUSPECTS, text(SUSPECTS))?,
        endless: entry(ENDLESS, text(ENDLESS))?,
        ending: entry(ENDING, text(ENDING))?,
    })
}

fn entry<T: DeserializeOwned + Default>(key: &str, text: Option<&str>) -> Result<T, String> {
    text.map_or_else(|| Ok(T::default()), serde_json::from_str).map_err(|error| format!("{key}: {error}"))
}

fn data(ledger: &Ledger) -> BTreeMap<String, String> {
    let records = ledger.records.open.iter();
    let records: BTreeMap<_, _> = records.map(|(address, one)| (address, (one.number, &one.from, &one.to))).collect();
    let mut data = BTreeMap::from([
        (LEADER.to_owned(), ledger.leader.clone()),
        (LAST.to_owned(), ledger.records.last.to_string()),
        (RECORDS.to_owned(), json!(records).to_string()),
        (SUSPECTS.to_owned(), json!(ledger.suspects).to_string()),
    ]);
    let leases = [(ENDLESS, &ledger.endless), (ENDING, &ledger.ending)];
    data.extend(
        leases
            .into_iter()
            .filter(|(_, all)| !all.is_empty())
            .map(|(key, all)| (key.to_owned(), json!(all).to_string())),
    );
    if !ledger.former_targets.is_empty() {
        data.insert(FORMER_TARGETS.to_owned(), json!(ledger.former_targets).to_string());
    }
    let times = [
        (TOTAL, ledger.total),
        (FORMER, ledger.former_total),
        (PROGRAMS, ledger.programs),
        (FORMER_PROGRAMS, ledger.former_programs),
    ];
    data.extend(times.into_iter().filter_map(|(key, total)| Some((key.to_owned(), total?.as_millis().to_string()))));
    data
}

/// Writes the ledger, and reads it past the watches.
#[derive(Clone)]
pub struct LedgerStore {
    api: Api<ConfigMap>,
}

impl LedgerStore {
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace) }
    }

    /// Replaces the version that the ledger names. Returns it with its new version.
    pub async fn write(&self, ledger: &Ledger) -> Result<Ledger, WriteError> {
        let version = (!ledger.version.is_empty()).then(|| ledger.version.clone());
        let metadata =
            ObjectMeta { name: Some(LEDGER_NAME.to_owned()), resource_version: version, ..ObjectMeta::default() };
        let object = ConfigMap { metadata, data: Some(data(ledger)), ..ConfigMap::default() };
        let answer = if ledger.version.is_empty() {
            self.api.create(&post_params(), &object).await
        } else {
            self.api.replace(LEDGER_NAME, &post_params(), &object).await
        };
        match answer {
            Ok(answer) => Ok(Ledger { version: answer.resource_version().unwrap_or_default(), ..ledger.clone() }),
            Err(Error::Api(status)) if matches!(status.code, 404 | 409) => Err(WriteError::Stale),
            Err(error) => Err(error.into()),
        }
    }

    /// A quorum read. `None` if there is no ledger.
    pub async fn read(&self) -> Result<Option<ConfigMap>, Error> {
        self.api.get_opt(LEDGER_NAME).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::ownership::handover::MAX_OPEN;

    #[test]
    fn a_ledger_is_read_as_it_was_written() {
        let hand_over = |number, to: Option<&str>| HandOver { number, from: "a".into(), to: to.map(str::to_owned) };
        let open = [("172.18.0.100", hand_over(6, Some("b"))), ("fd00::1", hand_over(7, None))];
        let open = open.into_iter().map(|(address, record)| (address.parse().expect("a literal"), record)).collect();
        let ledger = Ledger {
            version: String::new(),
            leader: "a_1".into(),
            total: Some(Duration::from_millis(1500)),
            former_total: Some(Duration::from_millis(2500)),
            programs: Some(Duration::from_millis(31_500)),
            former_programs: None,
            records: Records { last: 9, open },
            former_targets: BTreeMap::from([(6, ["e".to_owned()].into())]),
            suspects: BTreeMap::from([("c".to_owned(), 8)]),
            endless: BTreeMap::from([("d".to_owned(), 5)]),
            ending: BTreeMap::new(),
        };
        let written = data(&ledger);
        assert_eq!(written[RECORDS], r#"{"172.18.0.100":[6,"a","b"],"fd00::1":[7,"a",null]}"#);
        let object = |data| ConfigMap { data: Some(data), ..ConfigMap::default() };
        assert_eq!(read(&object(written.clone())), Ok(ledger));
        assert_eq!(read(&ConfigMap::default()), Ok(Ledger::default()));
        let broken = BTreeMap::from([(RECORDS.to_owned(), "{".to_owned())]);
        assert!(read(&object(broken)).is_err_and(|broken| broken.why.starts_with("records: ")));
    }

    /// Every agent gets all of it with each write, with as many open hand-overs as there may be
    /// (docs/adr/0012-ledger-and-leases.md).
    #[test]
    fn a_full_ledger_is_small_and_fits_with_the_longest_names() {
        let full = |node: &str, address: fn(u16) -> IpAddr| {
            let record = |number| HandOver { number, from: node.to_owned(), to: Some(node.to_owned()) };
            let most = u16::try_from(MAX_OPEN).expect("a few");
            let open = (0..most).map(|place| (address(place), record(1_795_321_234_567 + u64::from(place)))).collect();
            let ledger = Ledger { records: Records { last: 1_795_321_299_999, open }, ..Ledger::default() };
            // As in the object: quotes within a string take two bytes.
            json!(data(&ledger)).to_string().len()
        };
        let v4 = full("ip-10-0-131-217.ec2.internal", |place| {
            std::net::Ipv4Addr::from(0xac12_0000 + u32::from(place)).into()
        });
        assert!(v4 < 110_000, "{v4} bytes");
        let v6 = full(&"n".repeat(253), |place| [0xfd00, 0x1234, 0x5678, 0x9abc, 0xdef0, 0x1234, 0x5678, place].into());
        assert!(v6 < 700_000, "{v6} bytes");
        println!("{v4} bytes with usual names, {v6} with the longest");
    }
}
