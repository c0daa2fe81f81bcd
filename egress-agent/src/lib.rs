//! The agent: see the module headers, data flows from `kube` through `model` to `dataplane`.

pub mod agent;
pub mod cli;
pub mod cni;
pub mod controller;
pub mod dataplane;
pub mod explain;
pub mod fence;
pub mod health;
pub mod inspect;
pub mod kube;
pub mod metrics;
pub mod model;
pub mod object;
pub mod reconcile;
pub mod supervise;
pub mod text;
