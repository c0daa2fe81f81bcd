//! The checks that need no kernel: generated files, manual pages, format and lints, dependencies.

mod chart;
mod codegen;
mod deps;
mod lint;
mod man;
mod spdx;
mod type_names;

pub(crate) use codegen::{CodegenArgs, check_generated, codegen, generated_paths};
pub(crate) use deps::deps;
pub(crate) use lint::{LintArgs, lint};
pub(crate) use man::{ManArgs, man, write_manual_pages};
