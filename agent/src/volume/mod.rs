//! `remora volume`: blocks in the memory of other hosts, as [`remora_volume`] keeps them.
//!
//! - `file`: what a client must know of a volume. **Start here.**
//! - `servers`: what protects connections, and where the servers of a volume are.
//!   `remora volume serve`, and what is shown to those who watch.
//! - `opening`: how a volume is opened for writing, how it ended, and what to do.
//! - `lifecycle`, `clients`, `health`: the other subcommands.

mod clients;
mod health;
mod servers;

use crate::args::{VolumeAction, VolumeArgs};
use crate::exit::Failure;
use remora_process::blocking;

/// Runs `remora volume`.
///
/// # Errors
/// What the subcommand says.
pub async fn run(args: VolumeArgs) -> Result<(), Failure> {
    match args.action {
        VolumeAction::Serve(args) => servers::run(args).await,
        VolumeAction::Create(args) => blocking(move || health::create(&args)).await,
        VolumeAction::Status(args) => blocking(move || health::status(&args)).await,
        VolumeAction::Scrub(args) => blocking(move || health::scrub(&args)).await,
        VolumeAction::Repair(args) => health::repair(args).await,
        VolumeAction::Grow(args) => blocking(move || health::grow(&args)).await,
        VolumeAction::Remove(args) => blocking(move || health::remove(&args)).await,
        VolumeAction::Nbd(args) => clients::nbd(args).await,
        VolumeAction::Format(args) => health::format(args).await,
        VolumeAction::Mount(args) => clients::mount(args).await,
    }
}
