//! Fast keys: small values loaded by the server's own functions, many keys at a time, where the server is a build that
//! is known exactly.
//!
//! ```text
//!   module is loaded ──▶ which build is this? ── unknown ──▶ "no", and why
//!                              │ version and SHA-256 of a layout
//!   first REMORA.LOAD ──▶ a forked child tries everything (trial) ── it crashes, or finds a difference ──▶ "no", and why
//!                              │ fine
//!   every REMORA.LOAD ──▶ do the server's settings permit it? ── no ──▶ "no", and why, for this load
//!                              │ yes
//!                         the agent is told, and refers to runs of records
//! ```
//!
//! - [`layout`]: the builds that are known. [`trial`]: what the child tries.
//!
//! The unsafe part is `crate::ffi::fast`.

pub(crate) mod layout;
mod trial;

use std::cell::RefCell;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::sync::atomic::AtomicBool;

use sha2::{Digest, Sha256};

use crate::api::{Context, FastServer, Flag, LogLevel, OwnedStr};
use layout::Layout;

/// Whether fast keys may be used on this server.
pub(crate) static ALLOWED: Flag = Flag { name: c"fast-keys", default: true, value: AtomicBool::new(true) };

/// What is known about this server.
enum Known {
    /// The module has not looked yet.
    Nothing,
    /// Its build is known; nothing was tried yet.
    Build(FastServer),
    /// A child has tried it.
    Tried(FastServer),
    /// Fast keys are not offered.
    No(String),
}

thread_local! {
    /// Only the server's main thread, and its copy in a fork child, access it.
    static KNOWN: RefCell<Known> = const { RefCell::new(Known::Nothing) };
}

/// Finds out which build of a server this is. Only while the module is being loaded. `more`: the path of a layout file
/// of the operator's.
pub(crate) fn identify(context: &Context<'_>, more: Option<&str>) {
    let known = match recognize(context, more) {
        Ok(server) => Known::Build(server),
        Err(why) => Known::No(why),
    };
    if let Known::No(why) = &known {
        context.log(LogLevel::Notice, &format!("remora: fast keys are not offered: {why}"));
    }
    KNOWN.set(known);
}

/// The server's functions, if they may be used for the next load. The databases must be empty.
///
/// # Errors
/// Why not.
pub(crate) fn offer(context: &Context<'_>) -> Result<FastServer, String> {
    permitted(context)?;
    let build = KNOWN.with_borrow(|known| match known {
        Known::Nothing => Err("the module is being loaded".to_owned()),
        Known::No(why) => Err(why.clone()),
        Known::Build(server) => Ok((*server, false)),
        Known::Tried(server) => Ok((*server, true)),
    });
    let (server, tried) = build?;
    if tried {
        return Ok(server);
    }
    match trial::run(context, server) {
        Ok(()) => {
            KNOWN.set(Known::Tried(server));
            Ok(server)
        }
        Err(why) => {
            let why = format!("a trial in a forked child failed: {why}");
            context.log(LogLevel::Warning, &format!("remora: fast keys are not offered: {why}"));
            KNOWN.set(Known::No(why.clone()));
            Err(why)
        }
    }
}

/// The server's functions, if a fork child may walk its tables. The child has to try them first.
///
/// # Errors
/// Why not.
pub(crate) fn offer_walk(context: &Context<'_>) -> Result<FastServer, String> {
    if !ALLOWED.get() {
        return Err("remora.fast-keys is no".into());
    }
    if context.flags().is_cluster() {
        return Err("the server is in cluster mode, where each slot has its own table".into());
    }
    KNOWN.with_borrow(|known| match known {
        Known::Nothing => Err("the module is being loaded".to_owned()),
        Known::No(why) => Err(why.clone()),
        Known::Build(server) | Known::Tried(server) => Ok(*server),
    })
}

/// The state for users.
pub(crate) fn state() -> String {
    if !ALLOWED.get() {
        return "no: remora.fast-keys is no".into();
    }
    KNOWN.with_borrow(|known| match known {
        Known::Nothing => "no: the module is being loaded".into(),
        Known::Build(_) => "known, not tried yet".into(),
        Known::Tried(_) => "yes".into(),
        Known::No(why) => format!("no: {why}"),
    })
}

/// Whether the server's settings, which may change, permit fast keys.
fn permitted(context: &Context<'_>) -> Result<(), String> {
    if !ALLOWED.get() {
        return Err("remora.fast-keys is no".into());
    }
    if context.flags().is_cluster() {
        return Err("the server is in cluster mode, where each slot has its own table".into());
    }
    // The server tells other modules about each key that it loads itself.
    if let Some(name) = other_module(context) {
        return Err(format!("the module {name} is loaded, which may wait for an event for each key"));
    }
    // It moves keys while the server answers its clients in the middle of a load.
    if context.setting("activedefrag").is_some_and(|value| value == "yes") {
        return Err("active defragmentation is on (activedefrag yes)".into());
    }
    if context.setting("key-load-delay").is_some_and(|value| value != "0") {
        return Err("the server delays the load of each key (key-load-delay)".into());
    }
    Ok(())
}

/// The name of a module besides this one and those that are a part of the server. `None`: there is no such module.
fn other_module(context: &Context<'_>) -> Option<String> {
    let list = OwnedStr::new(context, b"LIST");
    let Some(reply) = context.call(c"MODULE", &[list.borrow()]) else { return Some("unknown".into()) };
    (0..reply.len()).find_map(|number| {
        let fields = reply.element(number)?;
        // Names and values in turn, the first of which is the module's name.
        let name = fields.element(1).and_then(|name| Some(String::from_utf8_lossy(name.as_bytes()?).into_owned()));
        name.filter(|name| !OWN_MODULES.contains(&name.as_str()))
    })
}

/// This module, and what servers bring: an engine for scripts (Valkey), and vector sets (Redis 8), which wait for no
/// event.
const OWN_MODULES: [&str; 3] = ["remora", "lua", "vectorset"];

// Which build of a server this module runs in.

/// The running program, also where another has taken its place on the disk.
const PROGRAM: &str = "/proc/self/exe";

/// Finds the layout of this build, and its functions.
///
/// # Errors
/// Why fast keys are not offered.
fn recognize(context: &Context<'_>, more: Option<&str>) -> Result<FastServer, String> {
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
