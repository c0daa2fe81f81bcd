//! attach.

pub mod clsact;
pub mod filters;
pub mod foreign;
pub mod listing;
