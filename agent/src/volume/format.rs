//! `remora volume format`.

use remora_volume::files::{Files, Purpose};
use remora_volume::names::New;

use super::failure::files_failure;
use super::opening::Opening;
use crate::args::FormatArgs;
use crate::exit::Failure;
use crate::progress;
use crate::signals::Signals;

/// Runs `remora volume format`.
///
/// # Errors
/// The volume cannot be opened, or holds something.
pub(super) async fn run(args: FormatArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let opening = Opening::read(&args.writer)?;
    let name = opening.name().to_owned();
    let of = name.clone();
    let purpose = Purpose::Format { force: args.force };
    let made = opening.open(&mut signals, purpose, move |volume| {
        let root =
            New { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw(), ..New::default() };
        Files::format(&volume, &root, args.force).map_err(|error| files_failure(&of, &error))
    });
    made.await?;
    progress::say(&format!("{name}: an empty file system; mount it with `remora volume mount`"));
    Ok(())
}
