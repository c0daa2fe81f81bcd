//! `egress-router install` and `uninstall`: the plugin among the node's, the defaults of its routers, and a kubeconfig.
//!
//! The kubeconfig has the token of the pod's service account, which the kubelet replaces before it expires. With `--stay` a change
//! is written within [`INTERVAL`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::node_files::{CONFIG_DIR, CONFIG_DIR_VARIABLE, DEFAULT_KEYS, DEFAULTS, FOLDER, KUBECONFIG};
use clap::Args;
use egress_cni::files;
use ipnet::IpNet;
use k8s_openapi::ByteString;
use serde_json::{Map, Value, json};
use tokio::signal::unix::{SignalKind, signal};

/// The plugin's type, which is the name of its file.
const PLUGIN: &str = "egress-router";
/// Where the kubelet puts the credentials of a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// How often what is installed is compared.
const INTERVAL: Duration = Duration::from_secs(10);

/// Where it is installed.
#[derive(Args)]
pub(super) struct PlaceArgs {
    /// Directory of the CNI binaries, which the container runtime calls
    #[arg(long, env = "EGRESS_ROUTER_BIN_DIR", value_name = "DIRECTORY", default_value = "/opt/cni/bin")]
    bin_dir: PathBuf,
    /// Directory of the CNI configurations
    #[arg(long, env = CONFIG_DIR_VARIABLE, value_name = "DIRECTORY", default_value = CONFIG_DIR)]
    config_dir: PathBuf,
    /// Stay until a signal, as a pod of a DaemonSet has to
    #[arg(long)]
    stay: bool,
}

#[derive(Args)]
pub(super) struct InstallArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Networks of pods, for configurations without `clusterNetworks`
    #[arg(long, env = "EGRESS_ROUTER_CLUSTER_NETWORKS", value_name = "CIDR", value_delimiter = ',')]
    cluster_networks: Vec<IpNet>,
    /// Networks of Services, for configurations without `serviceNetworks`
    #[arg(long, env = "EGRESS_ROUTER_SERVICE_NETWORKS", value_name = "CIDR", value_delimiter = ',')]
    service_networks: Vec<IpNet>,
    /// Write a kubeconfig with this pod's service account, for `ipConfig` with a ConfigMap
    #[arg(long, env = "EGRESS_ROUTER_KUBECONFIG")]
    kubeconfig: bool,
}

impl PlaceArgs {
    fn program(&self) -> PathBuf {
        self.bin_dir.join(PLUGIN)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.config_dir.join(FOLDER).join(name)
    }

    /// Does it once, or again and again until a signal. An error ends the former; the latter says it once and tries again.
    fn perform(&self, mut act: impl FnMut() -> Result<Vec<PathBuf>, String>) -> Result<(), String> {
        if !self.stay {
            return act().map(|changed| say(&changed));
        }
        let mut reported = String::new();
        until_signal(|| match act() {
            Ok(changed) => {
                say(&changed);
                reported.clear();
            }
            Err(why) => {
                if why != reported {
                    eprintln!("{why}; trying again");
                    reported = why;
                }
            }
        })
    }
}

/// Does it again and again until a signal.
fn until_signal(mut act: impl FnMut()) -> Result<(), String> {
    let io = |error: std::io::Error| format!("cannot wait for signals: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(io)?.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(io)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(io)?;
        loop {
            act();
            tokio::select! {
                _ = terminate.recv() => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    })
}

fn say(changed: &[PathBuf]) {
    changed.iter().for_each(|path| println!("changed {}", path.display()));
}

pub(super) fn install(args: &InstallArgs) -> Result<(), String> {
    let program = std::fs::read("/proc/self/exe").map_err(|error| format!("cannot read this program: {error}"))?;
    let defaults = defaults(&args.cluster_networks, &args.service_networks);
    args.place.perform(|| {
        let folder = args.place.config_dir.join(FOLDER);
        std::fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        let mut changed = Vec::new();
        let mut put = |path: PathBuf, content: &[u8], mode| match files::ensure(&path, content, mode) {
            Ok(is_changed) => {
                changed.extend(is_changed.then_some(path));
                Ok(())
            }
            Err(error) => Err(format!("cannot write {}: {error}", path.display())),
        };
        put(args.place.file(DEFAULTS), &defaults, 0o644)?;
        if args.kubeconfig {
            put(args.place.file(KUBECONFIG), &kubeconfig(Path::new(ACCOUNT), |name| std::env::var(name).ok())?, 0o600)?;
        }
        // The last one: what it reads is there when a runtime finds it.
        put(args.place.program(), &program, 0o755)?;
        if !args.kubeconfig {
            changed.extend(removed(&[args.place.file(KUBECONFIG)])?);
        }
        Ok(changed)
    })
}

pub(super) fn uninstall(args: &PlaceArgs) -> Result<(), String> {
    args.perform(|| {
        let changed = removed(&[args.program(), args.file(KUBECONFIG), args.file(DEFAULTS)])?;
        // What else an administrator has put there stays.
        drop(std::fs::remove_dir(args.config_dir.join(FOLDER)));
        Ok(changed)
    })
}

/// Waits for a signal, as the container of a router pod, whose work the kernel does.
pub(super) fn pause() -> Result<(), String> {
    until_signal(|| ())
}

fn removed(paths: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
    let mut changed = Vec::new();
    for path in paths {
        let is_removed = files::remove(path).map_err(|error| format!("cannot remove {}: {error}", path.display()))?;
        changed.extend(is_removed.then(|| path.clone()));
    }
    Ok(changed)
}

fn defaults(cluster: &[IpNet], services: &[IpNet]) -> Vec<u8> {
    let texts = |networks: &[IpNet]| {
        let sorted: BTreeSet<String> = networks.iter().map(ToString::to_string).collect();
        json!(sorted)
    };
    let [cluster_key, service_key, ..] = DEFAULT_KEYS;
    let given =
        [(cluster_key, cluster), (service_key, services)].into_iter().filter(|(_, networks)| !networks.is_empty());
    let fields: Map<String, Value> = given.map(|(key, networks)| (key.to_owned(), texts(networks))).collect();
    format!("{:#}\n", Value::Object(fields)).into_bytes()
}

/// As `kubectl` and other clients read it; JSON is YAML.
fn kubeconfig(account: &Path, variable: impl Fn(&str) -> Option<String>) -> Result<Vec<u8>, String> {
    let read = |name: &str| {
        let path = account.join(name);
        std::fs::read(&path)
            .map_err(|error| format!("cannot read {}: {error}; is a service account mounted?", path.display()))
    };
    let set = |name: &str| variable(name).ok_or_else(|| format!("{name} is not set; --kubeconfig is for pods"));
    let (host, port) = (set("KUBERNETES_SERVICE_HOST")?, set("KUBERNETES_SERVICE_PORT")?);
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let token = String::from_utf8_lossy(&read("token")?).trim().to_owned();
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": PLUGIN, "cluster": {
            "server": format!("https://{host}:{port}"),
            "certificate-authority-data": ByteString(read("ca.crt")?),
        }}],
        "users": [{"name": PLUGIN, "user": {"token": token}}],
        "contexts": [{"name": PLUGIN, "context": {"cluster": PLUGIN, "user": PLUGIN}}],
        "current-context": PLUGIN,
    });
    Ok(format!("{config:#}\n").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("egress-router-{name}-{}", std::process::id()));
        std::fs::create_dir_all(path.join("bin")).expect("a folder");
        path
    }

    fn place(folder: &Path) -> PlaceArgs {
        PlaceArgs { bin_dir: folder.join("bin"), config_dir: folder.join("net.d"), stay: false }
    }

    #[test]
    fn what_is_installed_is_removed_and_nothing_else() {
        let folder = folder("install");
        let networks = vec!["10.128.0.0/14".parse().expect("a network"), "fd01::/48".parse().expect("a network")];
        let args = InstallArgs {
            place: place(&folder),
            cluster_networks: networks,
            service_networks: Vec::new(),
            kubeconfig: false,
        };
        install(&args).expect("installed");
        install(&args).expect("it is there");
        assert_eq!(
            std::fs::read(args.place.program()).expect("a file"),
            std::fs::read("/proc/self/exe").expect("a file")
        );
        let defaults = std::fs::read_to_string(args.place.file(DEFAULTS)).expect("a file");
        let defaults: Value = serde_json::from_str(&defaults).expect("JSON");
        assert_eq!(defaults, json!({"clusterNetworks": ["10.128.0.0/14", "fd01::/48"]}));
        std::fs::write(args.place.file("own.json"), "{}").expect("a file");
        uninstall(&args.place).expect("removed");
        uninstall(&args.place).expect("it is gone");
        assert!(!args.place.program().exists() && args.place.file("own.json").exists());
        std::fs::remove_file(args.place.file("own.json")).expect("it was there");
        uninstall(&args.place).expect("removed");
        assert!(!args.place.config_dir.join(FOLDER).exists());
        std::fs::remove_dir_all(&folder).expect("it was there");
    }

    #[test]
    fn the_kubeconfig_has_the_account_of_the_pod() {
        let folder = folder("account");
        let variable = |name: &str| match name {
            "KUBERNETES_SERVICE_HOST" => Some("fd02::1".to_owned()),
            "KUBERNETES_SERVICE_PORT" => Some("443".to_owned()),
            _ => None,
        };
        assert!(kubeconfig(&folder, variable).is_err_and(|why| why.contains("service account")));
        for (name, content) in [("token", "abc\n"), ("ca.crt", "PEM")] {
            std::fs::write(folder.join(name), content).expect("a file");
        }
        let config: Value = serde_json::from_slice(&kubeconfig(&folder, variable).expect("written")).expect("JSON");
        let cluster = &config["clusters"][0]["cluster"];
        assert_eq!(cluster, &json!({"server": "https://[fd02::1]:443", "certificate-authority-data": "UEVN"}));
        assert_eq!(config["users"][0]["user"]["token"], "abc");
        assert!(kubeconfig(&folder, |_| None).is_err_and(|why| why.contains("KUBERNETES_SERVICE_HOST")));
        std::fs::remove_dir_all(&folder).expect("it was there");
    }
}
