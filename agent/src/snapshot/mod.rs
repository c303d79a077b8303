//! `remora snapshot mount` and `remora fetch`: a source's snapshot without a server, as a file.
//!
//! ```text
//!   source ══ slots ══▶ arrival ──▶ target ─┬─ kept, on the shelf ◀── file_system ◀── kernel ◀── cp, redis-check-rdb, …
//!      └─ conversation ─ receiving          ╰─ file ──▶ dump.rdb in its place
//! ```
//!
//! - [`receiving`] has the conversation with the source, as a replica has it, and [`arrival`] reads the slots into a
//!   target.
//! - [`mount`] keeps the bytes on a shelf, for the readers that wait for them, and shows them to the kernel.
//! - [`fetch`] has the slots beside the file that they become, or writes them to standard output; [`beside`] puts files
//!   in their places.
//!
//! A slot's bytes count when they match the source's checksum. What has arrived stays, whatever becomes of the source.
//! What does not arrive is an error, and never the end of the file.

mod arrival;
pub mod fetch;
mod mount;
mod receiving;

pub(crate) use remora_base::files as beside;

use crate::args::{SnapshotAction, SnapshotArgs};
use crate::exit::Failure;

/// Runs `remora snapshot`.
///
/// # Errors
/// The source cannot be reached or refuses, or the snapshot cannot be kept or mounted.
pub async fn run(args: SnapshotArgs) -> Result<(), Failure> {
    match args.action {
        SnapshotAction::Mount(args) => mount::run(args).await,
    }
}
