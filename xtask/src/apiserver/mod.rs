//! The lab's in-memory Kubernetes API server: a test double that real `kubectl` and kube clients talk to over plain HTTP.
//!
//! ```text
//! connections ─ http ─ route ─┬─ discovery, openapi
//!                             ├─ list, watch ── represent (objects, metadata, tables) ── client
//!                             └─ verbs ── patch, schema, fields ── store (objects, versions, history)
//! ```
//!
//! - `store` holds every object of every kind under one version counter; `kind` and `registry` say which kinds there are;
//!   a custom resource definition adds its kinds the moment it is written (`crd`).
//! - Everything else is generic over the kind. What differs between kinds is a flag in `kind::Traits`, a filled-in default
//!   in `verbs::prepare` or a refusal in `verbs::check`.
//! - `lag` makes watches late and lists from the cache old, where a test wants it.
//! - `access` asks who may: accounts have the rights of the RBAC objects in the store.
//! - `patch`, `schema`, `structural`, `fields`, `select`, `table` are pure.
//!
//! What it is not, and only a real server can prove: authentication and admission; CEL and `format` rules;
//! fields of built-in kinds (they are stored as they come); conversion between versions; protobuf (but for three kinds that
//! kubectl creates in it); garbage collection by owner references; grace periods; cluster IPs; logs, exec and the other
//! subresources than `status`.
//! Each file's header says what its part leaves out.

mod access;
mod clock;
mod connections;
mod convert;
mod crd;
mod discovery;
mod fields;
mod http;
mod kind;
mod lag;
mod list;
mod meta;
mod openapi;
mod patch;
mod protobuf;
mod query;
mod registry;
mod represent;
mod route;
mod schema;
mod select;
mod server;
mod status;
mod store;
mod structural;
mod table;
mod verbs;
mod watch;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::lab::cluster::{ControlPlane, Place};

pub(crate) use server::{ApiServer, kubeconfig};

#[derive(Args)]
pub(crate) struct ApiserverArgs {
    /// Where to listen; port 0 takes any free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Write a kubeconfig for this server here
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Answer late: by 300 to 700 ms, and each sixteenth by 1.5 s
    #[arg(long, conflicts_with = "assets")]
    slow: bool,
    /// Start etcd and kube-apiserver from this folder instead, on free ports, with their data and logs in --folder
    #[arg(long, value_name = "DIR", requires = "folder")]
    assets: Option<PathBuf>,
    #[arg(long, value_name = "DIR", requires = "assets")]
    folder: Option<PathBuf>,
}

/// `cargo xtask apiserver`: serve until Ctrl-C or SIGTERM. SIGUSR1 begins and ends an outage, SIGUSR2 forgets the history.
pub(crate) fn run(args: &ApiserverArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start tokio")?;
    if let (Some(assets), Some(folder)) = (&args.assets, &args.folder) {
        return run_real(&runtime, args, assets, folder);
    }
    runtime.block_on(async {
        let server = ApiServer::bind(args.listen)?;
        if let Some(path) = &args.kubeconfig {
            std::fs::write(path, kubeconfig(&server.url()))
                .with_context(|| format!("cannot write the kubeconfig {}", path.display()))?;
        }
        if args.slow {
            server.be_slow();
        }
        println!("{}", server.url());
        obey_signals(&server).await?;
        server.stop().await;
        Ok(())
    })
}

/// The real thing in the double's place, for the tests of what both must do.
fn run_real(runtime: &Runtime, args: &ApiserverArgs, assets: &Path, folder: &Path) -> Result<()> {
    let place = Place { folder: folder.to_owned(), logs: folder, prefix: "apiserver" };
    let plane = ControlPlane::start(&place, assets)?;
    if let Some(path) = &args.kubeconfig {
        std::fs::write(path, plane.kubeconfig())
            .with_context(|| format!("cannot write the kubeconfig {}", path.display()))?;
    }
    println!("{}", plane.url());
    let terminate = || signal(SignalKind::terminate()).context("cannot listen for signals");
    runtime.block_on(async {
        let mut terminated = terminate()?;
        tokio::select! {
            _ = terminated.recv() => Ok(()),
            interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot listen for signals"),
        }
    })
}

async fn obey_signals(server: &ApiServer) -> Result<()> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let (mut outage, mut compact) = (listen(SignalKind::user_defined1())?, listen(SignalKind::user_defined2())?);
    let mut is_out = false;
    loop {
        tokio::select! {
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = outage.recv() => {
                is_out = !is_out;
                server.set_outage(is_out);
            }
            _ = compact.recv() => server.compact(),
        }
    }
}
