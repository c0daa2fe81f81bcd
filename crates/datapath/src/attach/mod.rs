//! Programs on their hooks: TCX links, clsact filters, programs of another installation, devices that do not exist yet, and CNIs
//! that cannot be served.

pub mod clsact;
pub mod filters;
pub mod foreign;
pub mod listing;
pub mod missing_devices;
pub mod pod_interfaces;
