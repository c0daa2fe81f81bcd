//! The protocol between container runtimes and CNI plugins (<https://www.cni.dev/docs/spec/>, versions 0.3.0 to 1.1.0): what a
//! runtime asks in the environment, and what a plugin answers on standard output. Pure, but for the files of plugins on a node.

pub mod files;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

/// All versions, oldest first.
pub const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
const LATEST: &str = VERSIONS[VERSIONS.len() - 1];

/// Error codes: those of the specification, and those that its library in Go uses.
pub mod code {
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    pub const UNSUPPORTED_FIELD: u32 = 2;
    pub const UNKNOWN_CONTAINER: u32 = 3;
    pub const INVALID_ENVIRONMENT: u32 = 4;
    pub const IO: u32 = 5;
    pub const UNREADABLE: u32 = 6;
    pub const INVALID_CONFIGURATION: u32 = 7;
    pub const INVALID_NAMESPACE: u32 = 8;
    pub const TRY_AGAIN_LATER: u32 = 11;
    pub const NOT_AVAILABLE: u32 = 50;
}

/// An error as the runtime reads it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", if details.is_empty() { String::new() } else { format!(": {details}") })]
pub struct CniError {
    pub code: u32,
    pub message: String,
    /// More about it; may have several lines.
    pub details: String,
}

impl CniError {
    pub fn new(code: u32, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: String::new() }
    }

    #[must_use]
    pub fn with_details(self, details: impl Into<String>) -> Self {
        Self { details: details.into(), ..self }
    }

    /// The answer in the version that the runtime asked in; in the latest one if it is not known.
    pub fn to_json(&self, version: Option<&str>) -> Value {
        let version = version.filter(|version| VERSIONS.contains(version)).unwrap_or(LATEST);
        let mut answer = json!({"cniVersion": version, "code": self.code, "msg": self.message});
        if !self.details.is_empty() {
            answer["details"] = json!(self.details);
        }
        answer
    }
}

/// What a runtime asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

impl Command {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }
}

/// One call of a plugin. What its command does not need is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniCall {
    pub command: Command,
    pub container: String,
    /// The path of the container's network namespace; none in a DEL after it has gone.
    pub netns: Option<PathBuf>,
    /// The name of the interface in the container.
    pub interface: String,
    /// `CNI_ARGS`.
    pub arguments: BTreeMap<String, String>,
}

impl CniCall {
    /// Reads the environment.
    ///
    /// # Errors
    /// Names every variable that is missing or that has an invalid value.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Self, CniError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let refused = |message: String| CniError::new(code::INVALID_ENVIRONMENT, message);
        let command = variable("CNI_COMMAND")
            .ok_or_else(|| refused("CNI_COMMAND is not set: a container runtime calls this program".to_owned()))?;
        let (command, needed): (Command, &[&str]) = match command.as_str() {
            "ADD" => (Command::Add, &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
            "DEL" => (Command::Del, &["CNI_CONTAINERID", "CNI_IFNAME"]),
            "CHECK" => (Command::Check, &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
            "GC" => (Command::Gc, &[]),
            "STATUS" => (Command::Status, &[]),
            "VERSION" => (Command::Version, &[]),
            other => return Err(refused(format!("CNI_COMMAND={other} is unknown"))),
        };
        let missing: Vec<&str> = needed.iter().copied().filter(|name| variable(name).is_none()).collect();
        if !missing.is_empty() {
            return Err(refused(format!("{} not set", missing.join(", "))));
        }
        let arguments = variable("CNI_ARGS").unwrap_or_default();
        let arguments = arguments.split(';').filter_map(|one| one.split_once('='));
        let call = Self {
            command,
            container: variable("CNI_CONTAINERID").unwrap_or_default(),
            netns: variable("CNI_NETNS").map(PathBuf::from),
            interface: variable("CNI_IFNAME").unwrap_or_default(),
            arguments: arguments.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        };
        if needed.contains(&"CNI_CONTAINERID") && !is_container_id(&call.container) {
            return Err(refused(format!("CNI_CONTAINERID={:?} is no container ID", call.container)));
        }
        if needed.contains(&"CNI_IFNAME") && !is_interface_name(&call.interface) {
            return Err(refused(format!("CNI_IFNAME={:?} is no name of an interface", call.interface)));
        }
        Ok(call)
    }

    /// An argument of Kubernetes, such as `K8S_POD_NAME`.
    pub fn argument(&self, name: &str) -> Option<&str> {
        self.arguments.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

/// As the specification says: a letter or digit, then also `_`, `.` and `-`.
fn is_container_id(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

/// As the kernel has it (`dev_valid_name`), without the names that stand for all interfaces among its settings.
pub fn is_interface_name(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && !matches!(text, "." | ".." | "all" | "default")
        && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:".contains(&byte))
}

/// The answer to VERSION.
pub fn versions() -> Value {
    json!({"cniVersion": LATEST, "supportedVersions": VERSIONS})
}

/// The fields that every configuration has.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkConfiguration {
    pub version: String,
    pub name: String,
    /// The object, as it was passed.
    pub fields: Map<String, Value>,
}

impl NetworkConfiguration {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Text that is no JSON object, another version, no valid name.
    pub fn of(input: &str) -> Result<Self, CniError> {
        let fields: Map<String, Value> = serde_json::from_str(input).map_err(|error| {
            CniError::new(code::UNREADABLE, format!("the configuration is no JSON object: {error}"))
        })?;
        let version = match fields.get("cniVersion") {
            // As the specification before 0.3.0 had it, which no runtime asks in any more.
            None => "0.1.0",
            Some(version) => version.as_str().unwrap_or_default(),
        };
        if !VERSIONS.contains(&version) {
            let message = format!("cniVersion {version:?} is not supported: {} are", VERSIONS.join(", "));
            return Err(CniError::new(code::INCOMPATIBLE_VERSION, message));
        }
        let (version, name) = (version.to_owned(), fields.get("name").and_then(Value::as_str).unwrap_or_default());
        if !is_container_id(name) {
            let message = format!("name: {name:?} is no name of a network");
            return Err(CniError::new(code::INVALID_CONFIGURATION, message));
        }
        Ok(Self { version, name: name.to_owned(), fields })
    }

    pub fn previous_result(&self) -> Option<&Value> {
        self.fields.get("prevResult").filter(|value| !value.is_null())
    }
}

/// What a plugin has added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Added {
    pub name: String,
    pub mac: String,
    pub sandbox: String,
    pub mtu: u32,
    /// Each with the gateway of its family.
    pub addresses: Vec<(IpNet, Option<IpAddr>)>,
    pub routes: Vec<(IpNet, Option<IpAddr>)>,
}

/// The result of ADD in a version: of the plugins before, if there were any, and of this one. `dns` is that of the
/// configuration.
pub fn result(version: &str, previous: Option<&Value>, added: &Added, dns: Option<&Value>) -> Value {
    let has_mtu = version == "1.1.0";
    let names_family = version.starts_with("0.");
    let mut result = previous.cloned().unwrap_or_else(|| json!({}));
    result["cniVersion"] = json!(version);
    let mut list = |field: &str| match result.get_mut(field).map(Value::take) {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    };
    let (mut interfaces, mut addresses, mut routes) = (list("interfaces"), list("ips"), list("routes"));
    let mut interface = json!({"name": added.name, "mac": added.mac, "sandbox": added.sandbox});
    if has_mtu {
        interface["mtu"] = json!(added.mtu);
    }
    for (address, gateway) in &added.addresses {
        let mut one = json!({"interface": interfaces.len(), "address": address.to_string()});
        if let Some(gateway) = gateway {
            one["gateway"] = json!(gateway.to_string());
        }
        if names_family {
            one["version"] = json!(if address.addr().is_ipv4() { "4" } else { "6" });
        }
        addresses.push(one);
    }
    for (destination, gateway) in &added.routes {
        let mut one = json!({"dst": destination.to_string()});
        if let Some(gateway) = gateway {
            one["gw"] = json!(gateway.to_string());
        }
        routes.push(one);
    }
    interfaces.push(interface);
    result["interfaces"] = Value::Array(interfaces);
    result["ips"] = Value::Array(addresses);
    if !routes.is_empty() {
        result["routes"] = Value::Array(routes);
    }
    if let Some(dns) = dns.filter(|dns| !dns.is_null()) {
        result["dns"] = dns.clone();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(variables: &[(&str, &str)]) -> Result<CniCall, CniError> {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        CniCall::of(|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    const ADD: [(&str, &str); 4] =
        [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1"), ("CNI_NETNS", "/run/netns/a"), ("CNI_IFNAME", "net1")];

    #[test]
    fn each_command_needs_its_variables() {
        let read = call(&ADD).expect("all is there");
        assert_eq!((read.command, read.container.as_str(), read.interface.as_str()), (Command::Add, "c1", "net1"));
        let refused = |variables: &[(&str, &str)], says: &str| {
            let error = call(variables).expect_err(says);
            assert!(error.code == code::INVALID_ENVIRONMENT && error.message.contains(says), "{error:?}");
        };
        refused(&[], "CNI_COMMAND is not set");
        refused(&[("CNI_COMMAND", "MAKE")], "CNI_COMMAND=MAKE is unknown");
        refused(&[("CNI_COMMAND", "ADD")], "CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME not set");
        refused(&[("CNI_COMMAND", "DEL")], "CNI_CONTAINERID, CNI_IFNAME not set");
        for (name, value) in [("CNI_CONTAINERID", "-bad/"), ("CNI_IFNAME", "nineteen-characters"), ("CNI_IFNAME", "..")]
        {
            let variables: Vec<_> =
                ADD.into_iter().map(|(known, was)| (known, if known == name { value } else { was })).collect();
            refused(&variables, name);
        }
        for command in ["GC", "STATUS", "VERSION"] {
            assert!(call(&[("CNI_COMMAND", command)]).is_ok());
        }
        assert_eq!(call(&ADD[..]).map(|call| call.argument("K8S_POD_NAME").is_none()), Ok(true));
        let with_arguments = [&ADD[..], &[("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=a;K8S_POD_UID=")]].concat();
        let read = call(&with_arguments).expect("all is there");
        assert_eq!((read.argument("K8S_POD_NAME"), read.argument("K8S_POD_UID")), (Some("a"), None));
    }

    #[test]
    fn a_configuration_has_a_version_and_a_name() {
        let refused = |text: &str| NetworkConfiguration::of(text).expect_err(text).code;
        assert_eq!(refused("{"), code::UNREADABLE);
        assert_eq!(refused("[]"), code::UNREADABLE);
        assert_eq!(refused(r#"{"name": "n"}"#), code::INCOMPATIBLE_VERSION);
        assert_eq!(refused(r#"{"cniVersion": "2.0.0", "name": "n"}"#), code::INCOMPATIBLE_VERSION);
        assert_eq!(refused(r#"{"cniVersion": "1.0.0"}"#), code::INVALID_CONFIGURATION);
        assert_eq!(refused(r#"{"cniVersion": "1.0.0", "name": "a b"}"#), code::INVALID_CONFIGURATION);
        assert!(NetworkConfiguration::of(r#"{"cniVersion": "0.3.1", "name": "n"}"#).is_ok());
    }

    #[test]
    fn a_result_is_in_the_version_that_was_asked_for() {
        let net = |text: &str| text.parse::<IpNet>().expect("a network");
        let gateway = |text: &str| Some(text.parse::<IpAddr>().expect("an address"));
        let added = Added {
            name: "net1".into(),
            mac: "02:00:00:00:00:01".into(),
            sandbox: "/run/netns/a".into(),
            mtu: 1400,
            addresses: vec![(net("192.168.12.99/24"), gateway("192.168.12.1"))],
            routes: vec![(net("0.0.0.0/0"), gateway("192.168.12.1"))],
        };
        let old = result("0.3.1", None, &added, Some(&json!({"nameservers": ["10.0.0.2"]})));
        assert_eq!(
            old,
            json!({
                "cniVersion": "0.3.1",
                "interfaces": [{"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/a"}],
                "ips": [{"version": "4", "interface": 0, "address": "192.168.12.99/24", "gateway": "192.168.12.1"}],
                "routes": [{"dst": "0.0.0.0/0", "gw": "192.168.12.1"}],
                "dns": {"nameservers": ["10.0.0.2"]},
            })
        );
        let previous =
            json!({"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}], "ips": [{"address": "10.0.0.7/24"}]});
        let new = result("1.1.0", Some(&previous), &added, None);
        assert_eq!(new["interfaces"][1]["mtu"], json!(1400));
        assert_eq!(new["ips"].as_array().map(Vec::len), Some(2));
        assert_eq!((new["ips"][1]["interface"].clone(), new["ips"][1].get("version")), (json!(1), None));
    }

    #[test]
    fn an_error_answers_in_the_version_of_the_question() {
        let error = CniError::new(code::IO, "no").with_details("more");
        assert_eq!(
            error.to_json(Some("0.4.0")),
            json!({"cniVersion": "0.4.0", "code": 5, "msg": "no", "details": "more"})
        );
        assert_eq!(CniError::new(7, "x").to_json(Some("9")), json!({"cniVersion": "1.1.0", "code": 7, "msg": "x"}));
    }
}
