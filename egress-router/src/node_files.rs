//! Which files of the node a configuration may name. This program is root there, and who may write a network's configuration in
//! some namespace is not: such a path must lead neither to a file that it could change, nor to credentials that are not its own.
//!
//! The installation leaves a folder of its own among the configurations, with [`DEFAULTS`] of all routers of the node and a
//! kubeconfig.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use egress_cni::{CniError, code};
use serde_json::{Map, Value};

/// Where the runtime's environment, which is the node's, says that configurations are.
pub const CONFIG_DIR_VARIABLE: &str = "EGRESS_ROUTER_CONFIG_DIR";
pub const CONFIG_DIR: &str = "/etc/cni/net.d";
/// The installation's own folder there, and its files.
pub const FOLDER: &str = "egress-router.d";
pub const DEFAULTS: &str = "defaults.json";
pub const KUBECONFIG: &str = "egress-router.kubeconfig";
/// What the defaults may have: what is the same for all routers of a node.
pub const DEFAULT_KEYS: [&str; 4] = ["clusterNetworks", "serviceNetworks", "localPorts", "duplicateCheckMilliseconds"];
/// Where logs may be.
const LOG_DIRS: [&str; 2] = ["/var/log", "/tmp"];

fn config_dir() -> PathBuf {
    std::env::var_os(CONFIG_DIR_VARIABLE).map_or_else(|| PathBuf::from(CONFIG_DIR), PathBuf::from)
}

/// The fields of a configuration, with the node's defaults for those that are missing.
///
/// # Errors
/// The defaults cannot be read, or have what is none.
pub fn with_defaults(fields: &Map<String, Value>) -> Result<Map<String, Value>, CniError> {
    let path = config_dir().join(FOLDER).join(DEFAULTS);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(fields.clone()),
        text => text.map_err(|error| CniError::new(code::IO, format!("cannot read {}: {error}", path.display())))?,
    };
    completed(fields, &text).map_err(|why| {
        CniError::new(code::INVALID_CONFIGURATION, format!("{}, the defaults of this node: {why}", path.display()))
    })
}

fn completed(fields: &Map<String, Value>, defaults: &str) -> Result<Map<String, Value>, String> {
    let defaults: Map<String, Value> =
        serde_json::from_str(defaults).map_err(|error| format!("it is no JSON object: {error}"))?;
    let mut all = fields.clone();
    for (key, value) in defaults {
        if !DEFAULT_KEYS.contains(&key.as_str()) {
            return Err(format!("{key:?} is none of {}", DEFAULT_KEYS.join(", ")));
        }
        if all.get(&key).is_none_or(Value::is_null) {
            all.insert(key, value);
        }
    }
    Ok(all)
}

/// A file in the folder of CNI's configurations, where an administrator of the node has put it.
///
/// # Errors
/// It is elsewhere, or is not there.
pub fn configuration(path: &Path) -> io::Result<PathBuf> {
    let folder = config_dir();
    let real = fs::canonicalize(path)?;
    match real.starts_with(fs::canonicalize(&folder)?) {
        true => Ok(real),
        false => Err(io::Error::other(format!("it is not in {}", folder.display()))),
    }
}

/// Opens a log file for further lines.
///
/// # Errors
/// It is not where logs may be, is a link, or cannot be opened.
pub fn log(path: &Path) -> io::Result<File> {
    let name = path.file_name().ok_or_else(|| io::Error::other("it names no file"))?;
    let folder = fs::canonicalize(path.parent().unwrap_or(Path::new("/")))?;
    if !LOG_DIRS.iter().any(|allowed| folder.starts_with(allowed)) {
        return Err(io::Error::other(format!("logs may be in {}", LOG_DIRS.join(" and "))));
    }
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o640).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(folder.join(name))?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_regular_files_where_logs_may_be() {
        let folder = std::env::temp_dir().join(format!("egress-router-log-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        assert!(log(&folder.join("log")).is_ok());
        for elsewhere in ["/etc/cron.d/x", "/tmp/../etc/x", "/", "log"] {
            assert!(log(Path::new(elsewhere)).is_err(), "{elsewhere}");
        }
        std::os::unix::fs::symlink("/etc/egress-router-test", folder.join("link")).expect("a link");
        assert!(log(&folder.join("link")).is_err() && !Path::new("/etc/egress-router-test").exists());
        std::os::unix::fs::symlink("/etc", folder.join("folder")).expect("a link");
        assert!(log(&folder.join("folder/egress-router-test")).is_err());
        fs::remove_dir_all(&folder).expect("it was there");
    }

    #[test]
    fn defaults_are_for_what_a_configuration_does_not_have() {
        let fields = serde_json::json!({"ip": {}, "localPorts": [1], "serviceNetworks": null});
        let fields = fields.as_object().expect("an object");
        let defaults =
            r#"{"clusterNetworks": ["10.128.0.0/14"], "serviceNetworks": ["172.30.0.0/16"], "localPorts": [2]}"#;
        let all = completed(fields, defaults).expect("valid");
        let expected = serde_json::json!({
            "ip": {}, "localPorts": [1], "clusterNetworks": ["10.128.0.0/14"], "serviceNetworks": ["172.30.0.0/16"],
        });
        assert_eq!(Value::Object(all), expected);
        for invalid in ["", "[]", r#"{"ip": {}}"#, r#"{"kubeconfig": "/etc/x"}"#] {
            assert!(completed(fields, invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn configurations_are_where_the_node_has_them() {
        for elsewhere in ["/etc/hostname", "/etc/cni/net.d/../../hostname"] {
            assert!(configuration(Path::new(elsewhere)).is_err(), "{elsewhere}");
        }
    }
}
