//! conntrack.

pub mod flush;
pub mod gc;
pub mod idle_reset;
pub mod reset_history;
