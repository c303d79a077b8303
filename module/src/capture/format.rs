//! Which version of the file format the server writes.

use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use super::error::CaptureError;
use super::record;
use crate::api::{Context, OwnedStr};

/// The version of the format that the server writes, as it was when the server was armed, if it could be asked then.
pub(super) fn format_version(context: &Context<'_>) -> Result<u16, CaptureError> {
    match FORMAT_VERSION.load(Relaxed) {
        0 => ask_format_version(context),
        version => Ok(version),
    }
}

/// Asks the server itself, before it forks: in a child, the reply would copy some thirty pages.
pub(super) fn learn(context: &Context<'_>) {
    FORMAT_VERSION.store(ask_format_version(context).unwrap_or(0), Relaxed);
}

/// 0: not known.
static FORMAT_VERSION: AtomicU16 = AtomicU16::new(0);

/// That of its own DUMP. `FUNCTION DUMP` gives it even if there is no key at all.
fn ask_format_version(context: &Context<'_>) -> Result<u16, CaptureError> {
    let dump = OwnedStr::new(context, b"DUMP");
    let reply = context.call(c"FUNCTION", &[dump.borrow()]).ok_or(CaptureError::NoAnswer("FUNCTION DUMP"))?;
    if let Some(text) = reply.error() {
        return Err(CaptureError::Refused { command: "FUNCTION DUMP", text });
    }
    reply.as_bytes().and_then(record::dump_version).ok_or(CaptureError::NoAnswer("FUNCTION DUMP"))
}
