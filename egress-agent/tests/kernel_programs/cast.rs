//! Addresses for the tests: one set per family, so that both families share test bodies.

use egress_common::abi::{Addr, Family};

use crate::frames::ip;

#[derive(Clone, Copy, Debug)]
pub(crate) struct FamilyAddresses {
    pub(crate) family: Family,
    /// Egress IDs of policies with an address here, on another node, and pending.
    pub(crate) here: u32,
    pub(crate) away: u32,
    pub(crate) pending: u32,
    pub(crate) node: &'static str,
    pub(crate) router: &'static str,
    pub(crate) mgmt: &'static str,
    pub(crate) other_node: &'static str,
    /// Pods selected by `here`, `away`, `pending`, by an egress ID without policy, and by none.
    pub(crate) pod: &'static str,
    pub(crate) away_pod: &'static str,
    pub(crate) pending_pod: &'static str,
    pub(crate) early_pod: &'static str,
    pub(crate) known_pod: &'static str,
    pub(crate) unknown_pod: &'static str,
    pub(crate) remote_pod: &'static str,
    pub(crate) service: &'static str,
    pub(crate) world: &'static str,
    /// Has no route.
    pub(crate) nowhere: &'static str,
    pub(crate) egress: &'static str,
    pub(crate) away_egress: &'static str,
}

pub(crate) const V4: FamilyAddresses = FamilyAddresses {
    family: Family::V4,
    here: 7,
    away: 8,
    pending: 9,
    node: "172.18.0.2",
    router: "172.18.0.1",
    mgmt: "10.244.1.2",
    other_node: "172.18.0.3",
    pod: "10.244.1.10",
    away_pod: "10.244.1.11",
    pending_pod: "10.244.1.12",
    early_pod: "10.244.1.13",
    known_pod: "10.244.1.14",
    unknown_pod: "10.244.1.15",
    remote_pod: "10.244.2.10",
    service: "10.96.0.10",
    world: "198.51.100.10",
    nowhere: "203.0.113.10",
    egress: "172.18.0.100",
    away_egress: "172.18.0.101",
};

pub(crate) const V6: FamilyAddresses = FamilyAddresses {
    family: Family::V6,
    here: 17,
    away: 18,
    pending: 19,
    node: "fd00:172:18::2",
    router: "fd00:172:18::1",
    mgmt: "fd00:10:244:1::2",
    other_node: "fd00:172:18::3",
    pod: "fd00:10:244:1::10",
    away_pod: "fd00:10:244:1::11",
    pending_pod: "fd00:10:244:1::12",
    early_pod: "fd00:10:244:1::13",
    known_pod: "fd00:10:244:1::14",
    unknown_pod: "fd00:10:244:1::15",
    remote_pod: "fd00:10:244:2::10",
    service: "fd00:10:96::10",
    world: "2001:db8::10",
    nowhere: "2001:db8:1::10",
    egress: "fd00:172:18::100",
    away_egress: "fd00:172:18::101",
};

pub(crate) fn addr(text: &str) -> Addr {
    Addr::from(ip(text))
}
