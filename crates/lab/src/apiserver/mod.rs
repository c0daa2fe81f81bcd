//! The lab's in-memory Kubernetes API server: a test double for real `kubectl` and kube clients, over plain HTTP.
//!
//! ```text
//! connections ─ http ─ route ─┬─ discovery, openapi
//!                             ├─ list, watch ── represent (objects, metadata, tables) ── client
//!                             └─ verbs ── patch, schema, fields ── store (objects, versions, history)
//! ```
//!
//! All objects are in `store` under one version counter. A kind differs by `KindTraits`, `verbs::prepare` and `verbs::check`.
//! Not implemented, and proved only by a real server: authentication, admission, CEL and `format` rules, schemas of built-in
//! kinds, conversion, protobuf, strategic merge patches, set-based selectors, generated names, deletion of collections,
//! dry runs of deletions, garbage collection, grace periods, cluster IPs, and subresources other than `status` and `token`.

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
