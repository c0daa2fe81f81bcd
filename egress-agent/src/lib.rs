//! The agent: see the module headers, data flows from `kube` through `model` to `dataplane`.

pub mod dataplane;
pub mod model;
pub mod object;
