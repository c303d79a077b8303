//! What both ends do with short strings, and from which length on a fork child writes strings.

use clap::{Args, ValueEnum};

use crate::units::Size;

/// What a fork child with the module writes.
#[derive(Args, Clone, Debug)]
pub struct WalkArgs {
    /// Size from which strings are long, for `walk`. For shorter ones the module costs the server more than its own
    /// saver does. Default: with fast keys all keys, else 1KiB if the server's allocator is jemalloc, else 64KiB.
    #[arg(long, value_name = "SIZE", help_heading = "Snapshot")]
    pub module_walk_from: Option<Size>,

    /// Whether the server's fork child writes small values too, in the fast way (docs/explanation/module.md). `auto`:
    /// if the server is a build that the module knows exactly, and a trial in a forked child succeeds. `off`: never.
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Snapshot")]
    pub fast_keys: FastKeys,
}

/// Whether small values are handled in the fast way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FastKeys {
    /// Where the module offers it.
    Auto,
    /// Never.
    Off,
}
