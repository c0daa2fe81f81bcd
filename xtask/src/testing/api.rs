//! The API server that the controller's tests talk to.

use std::ffi::OsString;
use std::fs;

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

use egress_lab::apiserver::{ApiServer, kubeconfig};
use egress_toolchain::Paths;

/// Read by `egress-agent/tests/cluster`.
pub(super) const VARIABLE: &str = "EGRESS_TEST_KUBECONFIG";
/// Likewise: that of a server whose answers are late.
pub(super) const SLOW: &str = "EGRESS_TEST_SLOW_KUBECONFIG";

/// The lab's API servers, for as long as they are held: one, where the variable names none, and a slow one.
pub(super) struct ApiServers {
    pub(super) kubeconfig: OsString,
    pub(super) slow: OsString,
    _own: (Vec<ApiServer>, Runtime),
}

impl ApiServers {
    pub(super) fn start(paths: &Paths) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().context("start tokio")?;
        let mut own = Vec::new();
        let mut start = |name: &str| {
            let server = {
                let _entered = runtime.enter();
                ApiServer::bind(([127, 0, 0, 1], 0).into())?
            };
            let path = paths.test_logs().join(name);
            fs::create_dir_all(paths.test_logs()).with_context(|| format!("create {}", paths.test_logs().display()))?;
            fs::write(&path, kubeconfig(&server.url())).with_context(|| format!("write {}", path.display()))?;
            own.push(server);
            Ok::<_, anyhow::Error>(path.into())
        };
        let slow = start("slow-cluster.kubeconfig")?;
        let kubeconfig = match std::env::var_os(VARIABLE) {
            Some(kubeconfig) => kubeconfig,
            None => start("cluster.kubeconfig")?,
        };
        own[0].be_slow();
        Ok(Self { kubeconfig, slow, _own: (own, runtime) })
    }
}
