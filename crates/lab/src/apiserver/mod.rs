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
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

pub use server::{ApiServer, kubeconfig};

#[derive(Args)]
pub struct ApiserverArgs {
    /// Where to listen; port 0 takes any free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Write a kubeconfig for this server here
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Answer late: by 300 to 700 ms, and each sixteenth by 1.5 s
    #[arg(long)]
    slow: bool,
}

/// `cargo xtask apiserver`: serve until Ctrl-C or SIGTERM.
pub fn run(args: &ApiserverArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start tokio")?;
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
        terminated().await?;
        server.stop().await;
        Ok(())
    })
}

async fn terminated() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot listen for signals"),
    }
}
