//! `remora volume`: blocks in the memory of other hosts, as [`remora_volume`] keeps them.
//!
//! - `file`: what a client must know of a volume. **Start here.**
//! - `servers`: what protects connections, and where the servers of a volume are.
//! - `opening`: how a volume is opened for writing.
//! - `serve`, `create`, `status`, `scrub`, `repair`, `grow`, `remove`, `nbd`, `format`, `mount`: the subcommands.
//! - `metrics`: what is shown to those who watch.
//! - `failure`: how a volume ended, and what to do.

mod create;
mod failure;
mod file;
mod format;
mod grow;
mod metrics;
mod mount;
mod nbd;
mod opening;
mod remove;
mod repair;
mod scrub;
mod serve;
mod servers;
mod status;

use crate::args::{VolumeAction, VolumeArgs};
use crate::exit::Failure;
use crate::tasks::blocking;

/// Runs `remora volume`.
///
/// # Errors
/// What the subcommand says.
pub async fn run(args: VolumeArgs) -> Result<(), Failure> {
    match args.action {
        VolumeAction::Serve(args) => serve::run(args).await,
        VolumeAction::Create(args) => blocking(move || create::run(&args)).await,
        VolumeAction::Status(args) => blocking(move || status::run(&args)).await,
        VolumeAction::Scrub(args) => blocking(move || scrub::run(&args)).await,
        VolumeAction::Repair(args) => repair::run(args).await,
        VolumeAction::Grow(args) => blocking(move || grow::run(&args)).await,
        VolumeAction::Remove(args) => blocking(move || remove::run(&args)).await,
        VolumeAction::Nbd(args) => nbd::run(args).await,
        VolumeAction::Format(args) => format::run(args).await,
        VolumeAction::Mount(args) => mount::run(args).await,
    }
}
