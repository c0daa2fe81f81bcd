//! The HTTP endpoint `--metrics-bind-address`: `/metrics`, `/healthz` and `/readyz`.
//!
//! ```text
//! kernel maps ──> dataplane::meter ───────┐
//! reconciler ──> ReconcilerSnapshot ──────┼─> HealthPage::snapshot ─> expose::page ─> http
//! meters (counted between two scrapes) ───┘
//! ```
//!
//! A scrape reads the kernel's counters by its own map handles, so neither side waits for the other. Counts that need a walk
//! of a large map come from a background task ([`egress_datapath::maps::port_use`]) and from the sweep. [`catalogue`] defines
//! every metric once; scrapes and docs/metrics.md are generated from it.

pub mod catalogue;
pub mod expose;
pub mod health_page;
pub mod http;
pub mod liveness;
pub mod meters;
#[cfg(test)]
mod monitoring;
pub mod node_watch;
pub mod page;
pub mod snapshot;
pub mod startup_wait;
pub mod warnings;

pub use crate::metrics::health_page::HealthPage;
pub use crate::metrics::http::{Listen, serve};
pub use crate::metrics::meters::Meters;
