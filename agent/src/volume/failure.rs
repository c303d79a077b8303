//! Failure: how a volume ended, or why it is not open, and what to do.

use remora_volume::client::Error;
use remora_volume::writer::End;

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
