//! Flags that several commands share, and the configuration file. A flag overrides its environment variable, and both override the file.

pub mod file;
pub mod reachability;
pub mod shared;
pub mod timeouts;
pub mod tls;

/// Parses a group of flags alone.
#[cfg(test)]
pub(crate) fn parse_flags<'a, A: clap::Args>(arguments: impl IntoIterator<Item = &'a str>) -> Result<A, clap::Error> {
    let command = A::augment_args(clap::Command::new("flags")).no_binary_name(true);
    A::from_arg_matches(&command.try_get_matches_from(arguments)?)
}
