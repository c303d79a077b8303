//! Failure: how a volume ended, or why it is not open, and what to do.

use remora_volume::client::{Error, Volume};
use remora_volume::files::FilesError;
use remora_volume::message::ServerId;
use remora_volume::writer::End;

use super::metrics::Shown;
use crate::exit::{Code, Failure};

/// The end of a command for a volume with this name.
pub(super) fn failure(name: &str, error: &Error) -> Failure {
    let (code, cure) = match error {
        Error::Ended(End::Fenced { .. }) => (Code::Replaced, ""),
        Error::InUse { .. } => (Code::InUse, "; --take-over replaces it at once"),
        _ => (Code::Volume, ""),
    };
    Failure::new(code, format!("the volume {name}: {error}{cure}"))
}

/// The end of a command whose volume has ended. If no copy is left, it says why each server was left out.
pub(super) fn ended(shown: &Shown, volume: &Volume, end: End) -> Failure {
    let failure = failure(&shown.file, &Error::Ended(end));
    if end != End::NoCopyLeft {
        return failure;
    }
    let why = |(place, server): (usize, &String)| Some(format!("{server}: {}", volume.left_out(ServerId(place))?));
    let all: Vec<_> = shown.servers.iter().enumerate().filter_map(why).collect();
    if all.is_empty() { failure } else { failure.and(&all.join("; ")) }
}

/// Why there are no files in the volume with this name, or it holds something else, and what to do.
pub(super) fn files_failure(name: &str, error: &FilesError) -> Failure {
    match error {
        FilesError::Disk(error) => failure(name, error),
        _ => Failure::new(Code::Volume, format!("the volume {name}: {error}")),
    }
}
