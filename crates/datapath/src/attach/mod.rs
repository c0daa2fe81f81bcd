//! Programs on their hooks: TCX links, clsact filters, programs of another installation, and devices that do not exist yet.

pub mod clsact;
pub mod filters;
pub mod foreign;
pub mod listing;
pub mod missing_devices;
