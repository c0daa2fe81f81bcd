//! What the programs of this repository share at a terminal.
//!
//! - [`help`]: the variables of a command's flags, listed once at the end of its `--help`.
//! - [`completion`]: scripts for shells.
//! - [`page`]: lines with a severity, in colour on a terminal that shows it.
//! - [`screen`]: a page that is shown again and again in place.

pub mod completion;
pub mod help;
pub mod page;
pub mod screen;
