//! Where the addresses of a router come from: the configuration itself, an entry for its pod, or a ConfigMap, which may say only
//! what its overrides allow. Pure.

use std::path::PathBuf;

use egress_cni::{CniError, code};
use serde_json::{Map, Value};

use super::destinations::{Allowed, Redirects};
use super::{Addressing, PodName, Problems};
use crate::node_files::{CONFIG_DIR, FOLDER, KUBECONFIG};

/// The kubeconfig that the installation leaves on the node.
fn default_kubeconfig() -> PathBuf {
    [CONFIG_DIR, FOLDER, KUBECONFIG].iter().collect()
}

/// Where the addresses of a router come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Given(Addressing),
    Elsewhere(Elsewhere),
}

/// The value of `ipConfig`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    pub place: Place,
    /// What it is allowed to say; only what is set counts.
    pub overrides: Overrides,
}

/// Where the data of `ipConfig` is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    ConfigMap { namespace: String, name: String, kubeconfig: PathBuf },
    File(PathBuf),
}

/// A fence around what a ConfigMap says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    addressing: Addressing,
    has_redirects: bool,
}

/// The entry for a pod: that of its name, else the one with the longest beginning of it.
///
/// # Errors
/// There is none, or the runtime does not name the pod.
pub(super) fn of_pod<'a>(pods: &'a Map<String, Value>, name: Option<&str>) -> Result<(&'a str, &'a Value), String> {
    let name = name.ok_or("the runtime does not pass K8S_POD_NAME, so the pod's entry cannot be found")?;
    if let Some((key, ip)) = pods.get_key_value(name) {
        return Ok((key, ip));
    }
    let beginnings = pods.iter().filter_map(|(key, ip)| Some((key.strip_suffix('*')?, key, ip)));
    let longest =
        beginnings.filter(|(beginning, ..)| name.starts_with(beginning)).max_by_key(|(beginning, ..)| beginning.len());
    longest.map(|(_, key, ip)| (key.as_str(), ip)).ok_or_else(|| format!("no entry for pod {name:?}"))
}

impl Problems {
    pub(super) fn ip_config(&mut self, config: &Value, all: &Value, pod: PodName<'_>) -> Source {
        if !config.is_object() {
            self.add("ipConfig", format!("{config} is no object"));
            return Source::Given(Addressing::default());
        }
        let path = "ipConfig.";
        let (name, file) = (self.text(config, path, "name"), self.text(config, path, "file"));
        let namespace = self.text(config, path, "namespace").or_else(|| pod.namespace.map(str::to_owned));
        let kubeconfig = self.text(all, "", "kubeconfig").map_or_else(default_kubeconfig, PathBuf::from);
        let place = match (name, file, namespace) {
            (Some(_), Some(_), _) => Err("only one of name and file may be given"),
            (None, None, _) => Err("name, of a ConfigMap, or file is needed"),
            (None, Some(file), _) => Ok(Place::File(PathBuf::from(file))),
            (Some(_), None, None) => Err("namespace is needed: the runtime does not pass K8S_POD_NAMESPACE"),
            (Some(name), None, Some(namespace)) => Ok(Place::ConfigMap { namespace, name, kubeconfig }),
        };
        let overrides = match &config["overrides"] {
            Value::Null => Overrides::default(),
            overrides => {
                let has = |field: &str| !overrides[field].is_null();
                let has_redirects = has("redirect") || has("destinations") || has("fallbackIP");
                Overrides { addressing: self.parts_of_addressing(overrides, "ipConfig.overrides."), has_redirects }
            }
        };
        match place {
            Ok(place) => Source::Elsewhere(Elsewhere { place, overrides }),
            Err(why) => {
                self.add("ipConfig", why);
                Source::Given(Addressing::default())
            }
        }
    }
}

impl Elsewhere {
    /// What the data of the ConfigMap or file says for this pod: the value of `ip` or `podIP`, as JSON. Also returns what the
    /// overrides took away.
    ///
    /// # Errors
    /// Both or neither is there, it is invalid, or the overrides do not allow it.
    pub fn read(&self, data: &Map<String, Value>, pod: PodName<'_>) -> Result<(Addressing, Vec<String>), CniError> {
        let mut problems = Problems::default();
        let found = self.entry(data, pod);
        let (mut addressing, mut removed) = (Addressing::default(), Vec::new());
        match found {
            Ok((path, ip)) => {
                addressing = match self.overrides.with_defaults(&ip) {
                    Ok(ip) => problems.addressing(&ip, &path),
                    Err(why) => {
                        problems.add(&path, why);
                        Addressing::default()
                    }
                };
                removed = self.overrides.enforce(&mut addressing, &path, &mut problems);
            }
            Err(why) => problems.add(&self.place.to_string(), why),
        }
        problems
            .ended((addressing, removed))
            .map_err(|error| CniError { message: format!("{}: {}", self.place, error.message), ..error })
    }

    fn entry(&self, data: &Map<String, Value>, pod: PodName<'_>) -> Result<(String, Value), String> {
        let value = |field: &str| match data.get(field) {
            None | Some(Value::Null) => Ok(None),
            // In a ConfigMap every value is a text.
            Some(Value::String(text)) => {
                serde_json::from_str::<Value>(text).map(Some).map_err(|error| format!("{field} is no JSON: {error}"))
            }
            Some(value) => Ok(Some(value.clone())),
        };
        match (value("ip")?, value("podIP")?) {
            (Some(_), Some(_)) => Err("only one of ip and podIP may be there".to_owned()),
            (None, None) => Err("neither ip nor podIP is there".to_owned()),
            (Some(ip), None) => Ok(("ip.".to_owned(), ip)),
            (None, Some(Value::Object(pods))) => {
                let (key, ip) = of_pod(&pods, pod.name)?;
                Ok((format!("podIP[{key:?}]."), ip.clone()))
            }
            (None, Some(other)) => Err(format!("podIP: {other} is no object")),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ConfigMap { namespace, name, .. } => write!(f, "ConfigMap {namespace}/{name}"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl Overrides {
    /// `ip` with the overrides' gateway, where it has none.
    fn with_defaults(&self, ip: &Value) -> Result<Value, String> {
        let mut ip = ip.clone();
        let gateways = &self.addressing.gateways;
        if let Some(object) = ip.as_object_mut() {
            let has_none = object.get("gateway").is_none_or(|gateway| gateway.is_null() || *gateway == "");
            if has_none && !gateways.is_empty() {
                let gateways = gateways.values().map(|gateway| Value::String(gateway.to_string())).collect();
                object.insert("gateway".to_owned(), Value::Array(gateways));
            }
            return Ok(ip);
        }
        Err(format!("{ip} is no object"))
    }

    /// Refuses addresses and gateways that are not allowed, and removes destinations that are not. Returns these.
    fn enforce(&self, of: &mut Addressing, path: &str, problems: &mut Problems) -> Vec<String> {
        let fence = &self.addressing;
        for one in &of.addresses {
            let is_same = |allowed: &super::RouterAddress| {
                allowed.address == one.address && allowed.prefix.is_none_or(|prefix| one.prefix == Some(prefix))
            };
            if !fence.addresses.is_empty() && !fence.addresses.iter().any(is_same) {
                problems.add(&format!("{path}addresses"), format!("the overrides of the network do not allow {one}"));
            }
        }
        for (family, gateway) in &of.gateways {
            if let Some(allowed) = fence.gateways.get(family).filter(|allowed| *allowed != gateway) {
                let why = format!("the overrides of the network have {allowed}, and allow no other such as {gateway}");
                problems.add(&format!("{path}gateway"), why);
            }
        }
        let mut removed = Vec::new();
        let redirected = !of.redirects.is_empty();
        self.intersect_redirects(&mut of.redirects, &mut removed);
        if redirected && of.redirects.is_empty() {
            // A router without redirects passes on everything; this one was never meant to.
            of.allowed.get_or_insert_default();
        }
        if let Some(fence) = &fence.allowed {
            of.allowed = Some(match of.allowed.take() {
                None => fence.clone(),
                Some(asked) => intersection(&asked, fence, &mut removed),
            });
        }
        removed
    }

    /// Without any redirect, the ones of the overrides hold. Else those stay that the overrides have too; none of them may
    /// stay, and then none is redirected.
    fn intersect_redirects(&self, asked: &mut Redirects, removed: &mut Vec<String>) {
        let allowed = &self.addressing.redirects;
        if !self.has_redirects {
            return;
        }
        if asked.is_empty() {
            asked.clone_from(allowed);
            return;
        }
        asked.ports.retain(|key @ (family, protocol, port), to| {
            let is_allowed = allowed.ports.get(key) == Some(to)
                // What takes everything to one address allows each port of it.
                || allowed.fallback.get(family) == Some(&to.ip()) && to.port() == *port;
            if !is_allowed {
                removed.push(format!("port {port} {protocol} to {to}"));
            }
            is_allowed
        });
        asked.fallback.retain(|family, address| {
            let is_allowed = allowed.fallback.get(family) == Some(address);
            if !is_allowed {
                removed.push(format!("everything else to {address}"));
            }
            is_allowed
        });
    }
}

/// What both allow. An entry that is wider than one of the fence becomes that one.
fn intersection(asked: &[Allowed], fence: &[Allowed], removed: &mut Vec<String>) -> Vec<Allowed> {
    let mut both = Vec::new();
    for one in asked {
        let before = both.len();
        both.extend(fence.iter().filter_map(|allowed| one.and(allowed)));
        if both.len() == before {
            removed.push(format!("{} is not reached", one.network));
        }
    }
    both.sort_unstable();
    both.dedup();
    both
}

/// An error of a place that cannot be read.
pub fn unreadable(place: &Place, why: impl std::fmt::Display) -> CniError {
    CniError::new(code::IO, format!("{place} cannot be read: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RouterConfig;
    use serde_json::json;

    const POD: PodName<'static> = PodName { namespace: Some("red"), name: Some("router") };

    fn elsewhere(config: &Value) -> Elsewhere {
        let fields = json!({"ipConfig": config});
        match RouterConfig::of(fields.as_object().expect("an object"), POD).expect("valid").source {
            Source::Elsewhere(elsewhere) => elsewhere,
            other => panic!("{other:?}"),
        }
    }

    fn says(config: &Value, ip: &Value) -> Result<(Addressing, Vec<String>), CniError> {
        let data = json!({"ip": ip.to_string(), "note": "ignored"});
        elsewhere(config).read(data.as_object().expect("an object"), POD)
    }

    #[test]
    fn a_config_map_is_of_the_pods_namespace() {
        let place = elsewhere(&json!({"name": "routers"})).place;
        let kubeconfig = default_kubeconfig();
        assert_eq!(place, Place::ConfigMap { namespace: "red".into(), name: "routers".into(), kubeconfig });
        assert_eq!(elsewhere(&json!({"file": "/etc/routers"})).place, Place::File("/etc/routers".into()));
    }

    #[test]
    fn one_of_both_forms_is_there() {
        let elsewhere = elsewhere(&json!({"name": "routers"}));
        let read = |data: Value| elsewhere.read(data.as_object().expect("an object"), POD);
        let ip = json!({"addresses": ["192.168.12.9/24"]});
        assert!(read(json!({"ip": ip.to_string()})).is_ok());
        assert!(read(json!({"podIP": json!({"rou*": ip}).to_string()})).is_ok());
        for (data, says) in [
            (json!({}), "neither ip nor podIP"),
            (json!({"ip": ip.to_string(), "podIP": "{}"}), "only one"),
            (json!({"ip": "{"}), "no JSON"),
            (json!({"ip": "[]"}), "no object"),
            (json!({"ip": "{}"}), "at least one"),
            (json!({"podIP": "{}"}), "no entry"),
        ] {
            let error = read(data.clone()).expect_err(says);
            assert!(error.message.contains("ConfigMap red/routers"), "{error}");
            assert!(error.message.contains(says), "{data}: {error}");
        }
    }

    #[test]
    fn overrides_fence_addresses_and_gateways() {
        let config = json!({"name": "routers", "overrides": {
            "addresses": ["192.168.12.9/24", "192.168.12.10"], "gateway": "192.168.12.1",
        }});
        let (read, _) = says(&config, &json!({"addresses": ["192.168.12.10/24"]})).expect("allowed");
        assert_eq!(read.gateways.values().map(ToString::to_string).collect::<Vec<_>>(), ["192.168.12.1"]);
        for (ip, why) in [
            (json!({"addresses": ["192.168.12.11/24"]}), "do not allow 192.168.12.11/24"),
            (json!({"addresses": ["192.168.12.9/25"]}), "do not allow 192.168.12.9/25"),
            (
                json!({"addresses": ["192.168.12.9/24"], "gateway": "192.168.12.2"}),
                "allow no other such as 192.168.12.2",
            ),
        ] {
            let error = says(&config, &ip).expect_err(why);
            assert!(error.message.contains(why), "{error}");
        }
    }

    #[test]
    fn overrides_fence_destinations() {
        let config = json!({"name": "routers", "overrides": {
            "redirect": ["80 tcp 203.0.113.25", "203.0.113.26"], "allow": ["203.0.113.0/24 tcp"],
        }});
        let addresses = json!(["192.168.12.9/24"]);
        let (read, removed) = says(&config, &json!({"addresses": addresses})).expect("allowed");
        assert_eq!((read.redirects.ports.len(), read.redirects.fallback.len(), removed.len()), (1, 1, 0));
        let asked = json!({
            "addresses": addresses,
            "redirect": ["80 tcp 203.0.113.25", "81 tcp 203.0.113.25", "82 tcp 203.0.113.26", "83 tcp 203.0.113.26 84"],
            "allow": ["203.0.0.0/16", "203.0.113.7 tcp 443", "198.51.100.0/24"],
        });
        let (read, removed) = says(&config, &asked).expect("allowed in part");
        assert_eq!(read.redirects.ports.keys().map(|(_, _, port)| *port).collect::<Vec<_>>(), [80, 82]);
        assert_eq!(removed.len(), 3, "{removed:?}");
        let allowed: Vec<String> = read.allowed.into_iter().flatten().map(|one| format!("{one:?}")).collect();
        assert_eq!(allowed.len(), 2, "{allowed:?}");
        // Nothing that is asked for is allowed: nothing is reached, rather than everything.
        let nothing = json!({"addresses": addresses, "redirect": ["9 tcp 203.0.113.25"], "allow": ["198.51.100.0/24"]});
        let (read, _) = says(&config, &nothing).expect("it is a valid wish");
        assert!(read.redirects.is_empty() && read.allowed.is_some_and(|allowed| allowed.is_empty()));
    }
}
