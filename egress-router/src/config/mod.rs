//! The configuration of a router: what a runtime passes on standard input, read and checked as a whole before anything is done.
//! Every problem is reported, each with its path and value. Pure.

pub mod destinations;
pub mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use egress_cni::{CniError, code, is_interface_name};
use egress_core::model::state::{Family, family_of};
use ipnet::IpNet;
use serde_json::{Map, Value};

use self::destinations::{Allowed, Redirects, host, network};
use self::source::Source;

/// How long a probe for another host with the address waits for its answer. Hosts on the same network answer in far less.
const DUPLICATE_WAIT: Duration = Duration::from_millis(20);
/// RFC 5227 waits for up to seven seconds in all.
const LONGEST_DUPLICATE_WAIT: Duration = Duration::from_secs(10);
/// `ETH_MIN_MTU`, and what an IP packet can have.
const MTUS: std::ops::RangeInclusive<u32> = 68..=65535;
/// Addresses of one router.
const MOST_ADDRESSES: usize = 64;

/// What a router is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterConfig {
    pub kind: LinkKind,
    /// The node's interface below that of the router; found by the addresses if `None`.
    pub master: Option<String>,
    /// That of the master if `None`.
    pub mtu: Option<u32>,
    pub source: Source,
    /// Pods, services and others that are reached by the interface that had the default route before.
    pub cluster_networks: Vec<IpNet>,
    /// TCP ports of the pod itself that a fallback does not take, such as those of probes.
    pub local_ports: BTreeSet<u16>,
    /// How long probes for duplicates wait; zero for none.
    pub duplicate_wait: Duration,
    /// The name of the interface; as the runtime says if `None`.
    pub interface: Option<String>,
    pub log: LogConfig,
    /// What has no effect.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogConfig {
    pub file: Option<PathBuf>,
    pub level: Option<String>,
}

/// The kind of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    Macvlan(MacvlanMode),
    Ipvlan,
}

/// Which other interfaces on the same master one may reach (`MACVLAN_MODE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MacvlanMode {
    #[default]
    Bridge,
    Private,
    Vepa,
    Passthru,
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Macvlan(MacvlanMode::Bridge) => "macvlan mode bridge",
            Self::Macvlan(MacvlanMode::Private) => "macvlan mode private",
            Self::Macvlan(MacvlanMode::Vepa) => "macvlan mode vepa",
            Self::Macvlan(MacvlanMode::Passthru) => "macvlan mode passthru",
            Self::Ipvlan => "ipvlan mode l2",
        })
    }
}

/// An address of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterAddress {
    pub address: IpAddr,
    /// That of the master's network if `None`.
    pub prefix: Option<u8>,
}

impl fmt::Display for RouterAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            Some(prefix) => write!(f, "{}/{prefix}", self.address),
            None => self.address.fmt(f),
        }
    }
}

/// The addresses of a router, and what it does with packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addressing {
    pub addresses: Vec<RouterAddress>,
    /// Of each family; those of the master's default routes where there is none.
    pub gateways: BTreeMap<Family, IpAddr>,
    pub redirects: Redirects,
    /// What may be reached; everything if `None`.
    pub allowed: Option<Vec<Allowed>>,
}

/// The pod that a runtime names in `CNI_ARGS`.
#[derive(Clone, Copy, Debug, Default)]
pub struct PodName<'a> {
    pub namespace: Option<&'a str>,
    pub name: Option<&'a str>,
}

impl RouterConfig {
    /// Reads a configuration for this pod.
    ///
    /// # Errors
    /// Everything that is invalid, in one error.
    pub fn of(fields: &Map<String, Value>, pod: PodName<'_>) -> Result<Self, CniError> {
        let mut problems = Problems::default();
        let config = problems.config(fields, pod);
        problems.ended(config)
    }
}

/// What is wrong with a configuration, and what has no effect.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    invalid: Vec<String>,
    warnings: Vec<String>,
}

impl Problems {
    /// `value`, if nothing is wrong.
    pub(crate) fn ended<T>(self, value: T) -> Result<T, CniError> {
        let mut invalid = self.invalid.into_iter();
        match invalid.next() {
            None => Ok(value),
            Some(first) => {
                let error = CniError::new(code::INVALID_CONFIGURATION, first);
                Err(error.with_details(invalid.collect::<Vec<_>>().join("\n")))
            }
        }
    }

    pub(crate) fn add(&mut self, path: &str, why: impl fmt::Display) {
        self.invalid.push(format!("{path}: {why}"));
    }

    /// The value, or its problem.
    fn take<T>(&mut self, path: &str, value: Result<T, String>) -> Option<T> {
        value.map_err(|why| self.add(path, why)).ok()
    }

    fn config(&mut self, fields: &Map<String, Value>, pod: PodName<'_>) -> RouterConfig {
        let all = Value::Object(fields.clone());
        let empty = Map::new();
        let arguments = self.object(&all, "", "interfaceArgs").unwrap_or(&empty).clone();
        let arguments = Value::Object(arguments);
        let kind = self.kind(&all, &arguments);
        let source = self.source(&all, pod);
        let networks =
            [self.list(&all, "", "clusterNetworks", network), self.list(&all, "", "serviceNetworks", network)];
        let local_ports = self.ports(&all);
        let interface = self.interface_name(&all, "", "interface");
        let master = self.interface_name(&arguments, "interfaceArgs.", "master");
        let mtu = self.number(&arguments, "interfaceArgs.", "mtu").and_then(|mtu| {
            let mtu = u32::try_from(mtu).ok().filter(|mtu| MTUS.contains(mtu));
            self.take("interfaceArgs.mtu", mtu.ok_or_else(|| format!("not from {} to {}", MTUS.start(), MTUS.end())))
        });
        let duplicate_wait =
            self.number(&all, "", "duplicateCheckMilliseconds").map_or(DUPLICATE_WAIT, Duration::from_millis);
        if duplicate_wait > LONGEST_DUPLICATE_WAIT {
            self.add("duplicateCheckMilliseconds", format!("more than {}", LONGEST_DUPLICATE_WAIT.as_millis()));
        }
        let log = LogConfig {
            file: self.text(&all, "", "logFile").or_else(|| self.text(&all, "", "log_file")).map(PathBuf::from),
            level: self.text(&all, "", "logLevel").or_else(|| self.text(&all, "", "log_level")),
        };
        self.warn_of_unknown(&arguments, "interfaceArgs.", &["mode", "master", "mtu"]);
        RouterConfig {
            kind,
            master,
            mtu,
            source,
            cluster_networks: networks.into_iter().flatten().flatten().collect(),
            local_ports,
            duplicate_wait,
            interface,
            log,
            warnings: std::mem::take(&mut self.warnings),
        }
    }

    fn kind(&mut self, all: &Value, arguments: &Value) -> LinkKind {
        let mode = self.text(arguments, "interfaceArgs.", "mode").map(|mode| mode.to_ascii_lowercase());
        match self.text(all, "", "interfaceType").as_deref() {
            None | Some("macvlan") => LinkKind::Macvlan(match mode.as_deref() {
                None | Some("bridge") => MacvlanMode::Bridge,
                Some("private") => MacvlanMode::Private,
                Some("vepa") => MacvlanMode::Vepa,
                Some("passthru") => MacvlanMode::Passthru,
                Some(other) => {
                    self.add("interfaceArgs.mode", format!("{other:?} is none of bridge, private, vepa and passthru"));
                    MacvlanMode::Bridge
                }
            }),
            Some("ipvlan") => {
                if let Some(other) = mode.filter(|mode| mode != "l2") {
                    self.add("interfaceArgs.mode", format!("{other:?} of ipvlan: l2 is the only one"));
                }
                LinkKind::Ipvlan
            }
            Some(other) => {
                self.add("interfaceType", format!("{other:?} is neither macvlan nor ipvlan"));
                LinkKind::Ipvlan
            }
        }
    }

    fn source(&mut self, all: &Value, pod: PodName<'_>) -> Source {
        let given: Vec<&str> = ["ip", "podIP", "ipConfig"].into_iter().filter(|field| !all[*field].is_null()).collect();
        let none = Source::Given(Addressing::default());
        match given[..] {
            ["ip"] => self
                .object(all, "", "ip")
                .map_or(none, |ip| Source::Given(self.addressing(&Value::Object(ip.clone()), "ip."))),
            ["podIP"] => match self.object(all, "", "podIP").map(|pods| source::of_pod(pods, pod.name)) {
                Some(Ok((key, ip))) => Source::Given(self.addressing(ip, &format!("podIP[{key:?}]."))),
                Some(Err(why)) => {
                    self.add("podIP", why);
                    none
                }
                None => none,
            },
            ["ipConfig"] => self.ip_config(&all["ipConfig"], all, pod),
            [] => {
                self.add("ip", "none of ip, podIP and ipConfig is given");
                none
            }
            _ => {
                self.add(given[0], format!("only one of {} may be given", given.join(", ")));
                none
            }
        }
    }

    /// Reads the value of `ip`.
    pub(crate) fn addressing(&mut self, ip: &Value, path: &str) -> Addressing {
        if !ip.is_object() {
            self.add(path.trim_end_matches('.'), format!("{ip} is no object"));
            return Addressing::default();
        }
        let known = ["addresses", "gateway", "redirect", "allow", "destinations", "fallbackIP"];
        self.warn_of_unknown(ip, path, &known);
        let addressing = self.parts_of_addressing(ip, path);
        if addressing.addresses.is_empty() && self.invalid.is_empty() {
            self.add(&format!("{path}addresses"), "at least one is needed");
        }
        let families: BTreeSet<Family> = addressing.addresses.iter().map(|one| family_of(one.address)).collect();
        for (family, gateway) in &addressing.gateways {
            if !families.contains(family) {
                self.add(&format!("{path}gateway"), format!("{gateway} is of a family without an address"));
            }
            if addressing.addresses.iter().any(|one| one.address == *gateway) {
                self.add(&format!("{path}gateway"), format!("{gateway} is an address of the router itself"));
            }
        }
        if let Some(target) = addressing.redirects.targets().find(|target| !families.contains(&family_of(*target))) {
            self.add(&format!("{path}redirect"), format!("{target} is of a family without an address"));
        }
        addressing
    }

    /// The same without what one part needs of another: overrides have only some.
    pub(crate) fn parts_of_addressing(&mut self, ip: &Value, path: &str) -> Addressing {
        let addresses = self.list(ip, path, "addresses", address).unwrap_or_default();
        if addresses.len() > MOST_ADDRESSES {
            self.add(&format!("{path}addresses"), format!("more than {MOST_ADDRESSES}"));
        }
        for (at, one) in addresses.iter().enumerate() {
            if addresses[..at].iter().any(|other| other.address == one.address) {
                self.add(&format!("{path}addresses[{at}]"), format!("{} is listed twice", one.address));
            }
        }
        let mut gateways = BTreeMap::new();
        for gateway in self.gateways(ip, path) {
            if gateways.insert(family_of(gateway), gateway).is_some() {
                self.add(&format!("{path}gateway"), "two of one family");
            }
        }
        let (mut redirects, mut allowed) = (Redirects::default(), None);
        for (at, entry) in self.list(ip, path, "redirect", text).unwrap_or_default().iter().enumerate() {
            self.take(&format!("{path}redirect[{at}]"), redirects.add(entry));
        }
        if let Some(entries) = self.list(ip, path, "allow", Allowed::of) {
            allowed = Some(entries.into_iter().flatten().collect::<Vec<_>>());
        }
        // Two meanings under one key: CIDRs that may be reached, as designed, and connections that are redirected, as published.
        // A CIDR of more than one host can only have the first one.
        for (at, entry) in self.list(ip, path, "destinations", text).unwrap_or_default().iter().enumerate() {
            let path = format!("{path}destinations[{at}]");
            match entry.trim().parse::<IpNet>() {
                Ok(net) if net.prefix_len() < net.max_prefix_len() => {
                    let entry = self.take(&path, Allowed::of(entry)).flatten();
                    allowed.get_or_insert_default().extend(entry);
                }
                _ => drop(self.take(&path, redirects.add(entry))),
            }
        }
        if let Some(fallback) = self.text(ip, path, "fallbackIP") {
            let path = format!("{path}fallbackIP");
            let fallback = self.take(&path, host(&fallback));
            fallback.map(|address| self.take(&path, redirects.set_fallback(address)));
        }
        Addressing { addresses, gateways, redirects, allowed }
    }

    /// One, or one of each family.
    fn gateways(&mut self, ip: &Value, path: &str) -> Vec<IpAddr> {
        match &ip["gateway"] {
            Value::Null => Vec::new(),
            Value::String(one) if one.trim().is_empty() => Vec::new(),
            Value::String(one) => self.take(&format!("{path}gateway"), host(one.trim())).into_iter().collect(),
            _ => self.list(ip, path, "gateway", host).unwrap_or_default(),
        }
    }

    fn ports(&mut self, all: &Value) -> BTreeSet<u16> {
        let mut ports = BTreeSet::new();
        for (at, port) in all["localPorts"].as_array().into_iter().flatten().enumerate() {
            let port = port.as_u64().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
            ports.extend(
                self.take(&format!("localPorts[{at}]"), port.ok_or_else(|| "no port from 1 to 65535".to_owned())),
            );
        }
        if !all["localPorts"].is_null() && !all["localPorts"].is_array() {
            self.add("localPorts", "no list");
        }
        ports
    }

    /// A list of texts, each read by `read`; `None` without a list.
    fn list<T>(
        &mut self,
        of: &Value,
        path: &str,
        field: &str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        let path = format!("{path}{field}");
        let list = match &of[field] {
            Value::Null => return None,
            Value::Array(list) => list,
            other => {
                self.add(&path, format!("{other} is no list"));
                return None;
            }
        };
        let mut all = Vec::new();
        for (at, entry) in list.iter().enumerate() {
            let entry = entry.as_str().ok_or_else(|| format!("{entry} is no text")).and_then(&read);
            all.extend(self.take(&format!("{path}[{at}]"), entry));
        }
        Some(all)
    }

    pub(crate) fn text(&mut self, of: &Value, path: &str, field: &str) -> Option<String> {
        match &of[field] {
            Value::Null => None,
            Value::String(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
            other => {
                self.add(&format!("{path}{field}"), format!("{other} is no text"));
                None
            }
        }
    }

    fn object<'a>(&mut self, of: &'a Value, path: &str, field: &str) -> Option<&'a Map<String, Value>> {
        match &of[field] {
            Value::Null => None,
            Value::Object(object) => Some(object),
            other => {
                self.add(&format!("{path}{field}"), format!("{other} is no object"));
                None
            }
        }
    }

    /// A number, or a text that is one.
    fn number(&mut self, of: &Value, path: &str, field: &str) -> Option<u64> {
        let number = match &of[field] {
            Value::Null => return None,
            Value::String(text) if text.trim().is_empty() => return None,
            Value::String(text) => text.trim().parse().ok(),
            other => other.as_u64(),
        };
        self.take(&format!("{path}{field}"), number.ok_or_else(|| format!("{} is no whole number", of[field])))
    }

    fn interface_name(&mut self, of: &Value, path: &str, field: &str) -> Option<String> {
        let name = self.text(of, path, field)?;
        let valid = is_interface_name(&name).then_some(name.clone());
        self.take(&format!("{path}{field}"), valid.ok_or_else(|| format!("{name:?} is no name of an interface")))
    }

    fn warn_of_unknown(&mut self, object: &Value, path: &str, known: &[&str]) {
        let fields = object.as_object().into_iter().flatten().map(|(field, _)| field);
        let unknown = fields.filter(|field| !known.contains(&field.as_str()));
        self.warnings.extend(unknown.map(|field| format!("{path}{field} is unknown and has no effect")));
    }
}

fn text(entry: &str) -> Result<String, String> {
    Ok(entry.to_owned())
}

/// An address with or without its prefix length, that a host can have.
fn address(text: &str) -> Result<RouterAddress, String> {
    let text = text.trim();
    if !text.contains('/') {
        return Ok(RouterAddress { address: host(text)?, prefix: None });
    }
    let net: IpNet = text.parse().map_err(|_| format!("{text:?} is no address with its prefix length"))?;
    let address = host(&net.addr().to_string())?;
    let is_of_all = match net {
        IpNet::V4(net) => net.prefix_len() < 31 && (net.network() == net.addr() || net.broadcast() == net.addr()),
        IpNet::V6(net) => net.prefix_len() < 127 && net.network() == net.addr(),
    };
    if is_of_all {
        return Err(format!("{address} is the address of the network {} itself", net.trunc()));
    }
    Ok(RouterAddress { address, prefix: Some(net.prefix_len()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const POD: PodName<'static> = PodName { namespace: Some("red"), name: Some("router-5") };

    fn read(config: &Value) -> Result<RouterConfig, CniError> {
        RouterConfig::of(config.as_object().expect("an object"), POD)
    }

    fn given(config: &Value) -> Addressing {
        match read(config).expect("valid").source {
            Source::Given(addressing) => addressing,
            other => panic!("{other:?}"),
        }
    }

    fn refused(config: &Value, says: &str) {
        let error = read(config).expect_err(says);
        assert_eq!(error.code, code::INVALID_CONFIGURATION);
        assert!(error.to_string().contains(says), "{config}: {error}");
    }

    fn ip() -> Value {
        json!({"addresses": ["192.168.12.99/24"], "gateway": "192.168.12.1"})
    }

    #[test]
    fn defaults_are_those_of_the_published_plugin() {
        let config = read(&json!({"ip": ip()})).expect("valid");
        assert_eq!(config.kind, LinkKind::Macvlan(MacvlanMode::Bridge));
        assert_eq!((config.master, config.mtu), (None, None));
        let config = json!({"ip": ip(), "interfaceType": "ipvlan", "interfaceArgs": {"master": "eno2", "mtu": "1300"}});
        let config = read(&config).expect("valid");
        assert_eq!((config.kind, config.master.as_deref(), config.mtu), (LinkKind::Ipvlan, Some("eno2"), Some(1300)));
    }

    #[test]
    fn what_the_operator_renders_is_read() {
        let rendered = json!({
            "cniVersion": "0.4.0", "type": "egress-router", "name": "egress-router-cni-nad",
            "ip": {
                "addresses": ["192.168.12.99/24"],
                "destinations": ["80 TCP 10.100.3.200", "8080 TCP 203.0.113.26 80"],
                "gateway": "192.168.12.1",
                "fallbackIP": "10.100.3.9"
            },
            "log_file": "/tmp/egress-router-log", "log_level": "debug"
        });
        let config = read(&rendered).expect("valid");
        assert_eq!(config.log.level.as_deref(), Some("debug"));
        let addressing = given(&rendered);
        assert_eq!(addressing.redirects.ports.len(), 2);
        assert_eq!(addressing.redirects.fallback.len(), 1);
        assert_eq!(addressing.allowed, None);
    }

    #[test]
    fn both_meanings_of_destinations_are_told_apart() {
        let mut ip = ip();
        ip["destinations"] = json!(["203.0.113.0/24", "80 tcp 203.0.113.25", "198.51.100.7/32"]);
        let addressing = given(&json!({"ip": ip}));
        assert_eq!(addressing.allowed.map(|allowed| allowed.len()), Some(1));
        assert_eq!((addressing.redirects.ports.len(), addressing.redirects.fallback.len()), (1, 1));
    }

    #[test]
    fn all_problems_are_said_at_once() {
        let config = json!({
            "interfaceType": "bridge",
            "interfaceArgs": {"mtu": "big", "master": "a/b"},
            "ip": {"addresses": ["192.168.12.0/24", 7, "192.168.12.9/33"], "gateway": "x", "redirect": ["80 icmp 1.2.3.4"]},
            "localPorts": [0],
            "clusterNetworks": "10.0.0.0/8",
        });
        let error = read(&config).expect_err("much is wrong").to_string();
        for says in [
            "interfaceType: \"bridge\" is neither",
            "interfaceArgs.mtu: \"big\"",
            "interfaceArgs.master",
            "ip.addresses[0]: 192.168.12.0 is the address of the network",
            "ip.addresses[1]: 7 is no text",
            "ip.addresses[2]",
            "ip.gateway: \"x\"",
            "ip.redirect[0]: \"80 icmp 1.2.3.4\"",
            "localPorts[0]",
            "clusterNetworks: \"10.0.0.0/8\" is no list",
        ] {
            assert!(error.contains(says), "{says} in {error}");
        }
    }

    #[test]
    fn one_source_is_needed() {
        refused(&json!({}), "none of ip, podIP and ipConfig");
        refused(&json!({"ip": ip(), "ipConfig": {"name": "x"}}), "only one of ip, ipConfig");
        refused(&json!({"ip": []}), "is no object");
        refused(&json!({"ip": {"addresses": []}}), "at least one");
    }

    #[test]
    fn families_fit_each_other() {
        refused(&json!({"ip": {"addresses": ["192.168.12.99/24"], "gateway": "2001:db8::1"}}), "without an address");
        refused(
            &json!({"ip": {"addresses": ["192.168.12.99/24"], "redirect": ["80 tcp 2001:db8::1"]}}),
            "without an address",
        );
        refused(&json!({"ip": {"addresses": ["192.168.12.99/24"], "gateway": "192.168.12.99"}}), "the router itself");
        let both = json!({"ip": {
            "addresses": ["192.168.12.99/24", "2001:db8:12::99/64"], "gateway": ["192.168.12.1", "2001:db8:12::1"]
        }});
        assert_eq!(given(&both).gateways.len(), 2);
        refused(&json!({"ip": {"addresses": ["192.168.12.99/24", "192.168.12.99/25"]}}), "twice");
    }

    #[test]
    fn a_pods_own_entry_is_taken() {
        let of = |address: &str| json!({"addresses": [address]});
        let config = json!({"podIP": {
            "router-*": of("192.168.12.1/24"), "router-5": of("192.168.12.2/24"), "*": of("192.168.12.3/24"), "other": 7
        }});
        assert_eq!(given(&config).addresses[0].to_string(), "192.168.12.2/24");
        let read_for = |name| {
            let pod = PodName { namespace: None, name };
            RouterConfig::of(config.as_object().expect("an object"), pod)
        };
        for (name, address) in [("router-6", "192.168.12.1/24"), ("web", "192.168.12.3/24")] {
            let Ok(RouterConfig { source: Source::Given(addressing), .. }) = read_for(Some(name)) else {
                panic!("{name}")
            };
            assert_eq!(addressing.addresses[0].to_string(), address);
        }
        assert!(read_for(None).is_err_and(|error| error.message.contains("K8S_POD_NAME")));
        assert!(read_for(Some("other")).is_err());
        refused(&json!({"podIP": {"web": of("192.168.12.1/24")}}), "no entry for pod \"router-5\"");
    }

    #[test]
    fn what_has_no_effect_is_said() {
        let mut with_typo = ip();
        with_typo["gatway"] = json!("192.168.12.1");
        let config = read(&json!({"ip": with_typo, "interfaceArgs": {"vlan": "3"}})).expect("valid");
        assert_eq!(config.warnings.len(), 2, "{:?}", config.warnings);
    }
}
