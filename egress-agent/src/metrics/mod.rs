//! What the agent tells of itself by HTTP, on `--metrics-bind-address`: `/metrics`, `/healthz` and `/readyz`.
//!
//! ```text
//! kernel maps ──> dataplane::meter ─┐
//! node's half ──> NodeFacts ────────┼─> HealthPage::facts ─> expose::page ─> http
//! meters (counted on the way) ──────┘
//! ```
//!
//! A scrape reads the kernel's counters then and there, by handles of its own, so that it waits for nobody and nobody for
//! it. What would take a walk of a large map is counted in the background ([`egress_datapath::maps::port_use`]), and by the
//! sweep. Definitions are in [`catalogue`], once; a scrape and the documentation are made from them.

pub mod awaited;
pub mod catalogue;
pub mod expose;
pub mod facts;
pub mod health_page;
pub mod http;
pub mod life;
pub mod meters;
#[cfg(test)]
mod monitoring;
pub mod page;
pub mod troubles;
pub mod watchdog;

pub use crate::metrics::health_page::HealthPage;
pub use crate::metrics::http::{Listen, serve};
pub use crate::metrics::meters::Meters;
