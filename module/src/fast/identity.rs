//! Which build of a server this module runs in.

use std::fmt::Write;
use std::fs::File;
use std::io;

use sha2::{Digest, Sha256};

use super::layout::Layout;
use crate::api::{Context, FastServer};

/// The running program, also where another has taken its place on the disk.
const PROGRAM: &str = "/proc/self/exe";

/// Finds the layout of this build, and its functions.
///
/// # Errors
/// Why fast keys are not offered.
pub(super) fn recognize(context: &Context<'_>, more: Option<&str>) -> Result<FastServer, String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("they are known for x86-64 only".into());
    }
    let version = version(context).ok_or("the server does not report its version")?;
    let sha256 = fingerprint(PROGRAM).map_err(|error| format!("{PROGRAM} could not be read: {error}"))?;
    let text = more.map(|path| {
        std::fs::read_to_string(path).map_err(|error| format!("the layout file {path} could not be read: {error}"))
    });
    let layout = Layout::find(&version, &sha256, text.transpose()?.as_deref()).map_err(|error| error.to_string())?;
    FastServer::of_build(context, &layout)
        .map_err(|name| format!("the server's program does not show {name}: it was linked without -rdynamic"))
}

/// The server's own version: Valkey also reports the version of Redis that it is compatible with.
fn version(context: &Context<'_>) -> Option<String> {
    let info = context.server_info(c"server")?;
    info.get(c"valkey_version").or_else(|| info.get(c"redis_version")).map(str::to_owned)
}

/// The SHA-256 of a file, hexadecimal.
fn fingerprint(path: &str) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hash)?;
    Ok(hash.finalize().iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    }))
}
