//! The API server that the controller's tests talk to.

use std::ffi::OsString;
use std::fs;

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

use crate::apiserver::{ApiServer, kubeconfig};
use crate::toolchain::Paths;

/// Read by `egress-agent/tests/cluster.rs`.
pub(super) const VARIABLE: &str = "EGRESS_TEST_KUBECONFIG";

/// The lab's API server, for as long as it is held; none of its own where the variable names another server.
pub(super) struct TestCluster {
    pub(super) kubeconfig: OsString,
    _own: Option<(ApiServer, Runtime)>,
}

impl TestCluster {
    pub(super) fn start(paths: &Paths) -> Result<Self> {
        if let Some(kubeconfig) = std::env::var_os(VARIABLE) {
            return Ok(Self { kubeconfig, _own: None });
        }
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().context("start tokio")?;
        let server = {
            let _entered = runtime.enter();
            ApiServer::bind(([127, 0, 0, 1], 0).into())?
        };
        let path = paths.test_logs().join("cluster.kubeconfig");
        fs::create_dir_all(paths.test_logs()).with_context(|| format!("create {}", paths.test_logs().display()))?;
        fs::write(&path, kubeconfig(&server.url())).with_context(|| format!("write {}", path.display()))?;
        Ok(Self { kubeconfig: path.into(), _own: Some((server, runtime)) })
    }
}
