//! What Remora's programs stand on, and what knows no server, no agent and no command line.
//!
//! - [`units`]: sizes, times and rates as text, as options take them and messages show them. [`Size`](units::Size).
//! - [`moment`]: a second of the calendar, in texts and in names that sort by time.
//! - [`files`]: folders that other users cannot change, and files that are never seen in halves.
//! - [`pace`]: [`Backoff`], the pauses between attempts, and [`Growth`], how fast an offset grows.
//! - [`random`]: numbers that follow from a seed.
//! - [`AbortOnDrop`]: a task that ends with its owner.
//! - [`x509`]: what a sentence says about a certificate, and fingerprints.
//! - [`mutation`]: faults that tests put back, to see that they are found.
//!
//! Most of it is pure: time, seeds and bytes are handed in. Each error is of its own type and says what can be done;
//! the caller decides how its process ends.

#![forbid(unsafe_code)]

pub mod files;
pub mod moment;
pub mod mutation;
pub mod pace;
pub mod random;
mod tasks;
pub mod units;
pub mod x509;

pub use self::pace::{Backoff, Growth};
pub use self::tasks::AbortOnDrop;
