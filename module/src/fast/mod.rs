//! Fast keys: small values loaded by the server's own functions, many keys at a time, where the server is a build that
//! is known exactly.
//!
//! ```text
//!   module is loaded ──▶ which build is this? ── not listed ──▶ a layout that was found? ── none ──▶ "no", and why
//!                              │ version and SHA-256                     │ its file is ours, no mark
//!   first REMORA.LOAD ──▶ a forked child tries everything (shapes, trial) ── it crashes, or finds a difference ──▶ "no"
//!                              │ fine
//!   every REMORA.LOAD ──▶ do the server's settings permit it? ── no ──▶ "no", and why, for this load
//!                              │ yes
//!                         the agent is told, and refers to runs of records
//!                              │ a layout that was found: before the end of the first load
//!                         a forked child looks at a sample (verification) ── a difference ──▶ "no", and a mark
//! ```
//!
//! - [`layout`]: the builds that are known. [`shapes`] and [`trial`]: what the child tries. [`verification`]: the first
//!   load in a build that is not listed.
//!
//! The unsafe part is `crate::ffi::fast`.

pub(crate) mod layout;
mod shapes;
mod trial;
mod verification;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use remora_layout::family::Maker;
use remora_layout::folder::{self, FolderError};
use remora_layout::maps::Maps;
use remora_layout::{Build, Program};

use crate::api::{Context, FastServer, Flag, Functions, LogLevel, OwnedStr, Steps, Trouble};
use layout::{Identity, Layout, LayoutError};
pub(crate) use verification::Sample;

/// Whether fast keys may be used on this server.
pub(crate) static ALLOWED: Flag = Flag { name: c"fast-keys", default: true, value: AtomicBool::new(true) };

/// What is known about this server.
#[derive(Clone)]
enum Known {
    /// The module has not looked yet.
    Nothing,
    /// Its layout is known; nothing was tried yet.
    Layout(Server),
    /// A child has tried it.
    Tried(Server),
    /// There is no layout for this build, or its file was refused: a better one may come.
    NoLayout(String),
    /// Fast keys are not offered.
    No(String),
}

/// A server whose layout is known.
#[derive(Clone)]
struct Server {
    functions: FastServer,
    /// Where the layout is from.
    origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// It is compiled in, and was compared with the sources of its version.
    Listed,
    /// It was found; no load has been verified yet.
    Found,
    /// It was found, and a load was verified.
    Verified,
}

/// The server's functions, for one load.
#[derive(Clone, Copy)]
pub(crate) struct Offer {
    pub(crate) functions: FastServer,
    /// The load must be verified before it ends.
    pub(crate) verify: bool,
}

/// Where layouts are, and which build this is.
#[derive(Clone)]
struct Search {
    server: Identity,
    folder: PathBuf,
}

thread_local! {
    /// Only the server's main thread, and its copy in a fork child, access it.
    static KNOWN: RefCell<Known> = const { RefCell::new(Known::Nothing) };
    static SEARCH: RefCell<Option<Search>> = const { RefCell::new(None) };
}

/// Finds out which build of a server this is. Only while the module is being loaded. `given`: the path of a layout file
/// of the operator's. `layouts`: the folder with those that were found.
pub(crate) fn identify(context: &Context<'_>, given: Option<&str>, layouts: Option<&str>) {
    let folder = PathBuf::from(layouts.unwrap_or(folder::DEFAULT));
    let known = match identity(context) {
        Err(why) => Known::No(why),
        Ok(server) => {
            let known = recognize(context, &server, given);
            SEARCH.set(Some(Search { server, folder }));
            known
        }
    };
    note(context, known);
    look_again(context);
    KNOWN.with_borrow(|known| {
        if let Known::No(why) | Known::NoLayout(why) = known {
            context.log(LogLevel::Notice, &format!("remora: fast keys are not offered: {why}"));
        }
    });
}

fn note(_context: &Context<'_>, known: Known) {
    KNOWN.set(known);
}

/// A layout may have been found since the module was loaded, and a mark may have been made, by another process too.
fn look_again(context: &Context<'_>) {
    let Some(Search { server, folder }) = SEARCH.with_borrow(Clone::clone) else { return };
    let known = KNOWN.with_borrow(Clone::clone);
    match known {
        Known::NoLayout(why) => match in_folder(context, &server, &folder) {
            // The folder has none: the reason of before stays.
            Ok(None) => KNOWN.set(Known::NoLayout(why)),
            Ok(Some(server)) => KNOWN.set(Known::Layout(server)),
            Err(why) => KNOWN.set(Known::NoLayout(why)),
        },
        Known::Layout(Server { origin: Origin::Found | Origin::Verified, .. })
        | Known::Tried(Server { origin: Origin::Found | Origin::Verified, .. }) => {
            if let Some(why) = folder::marked(&folder, &server.build) {
                KNOWN.set(Known::NoLayout(marked(&server.build, &why)));
            }
        }
        _ => {}
    }
}

fn marked(build: &Build, why: &str) -> String {
    format!(
        "the build {build} is marked as one that failed: {why}; `remora module layout` makes a new layout and removes the mark"
    )
}

/// The layout of this build in the folder of those that were found, and its functions. `None`: there is none.
///
/// # Errors
/// Why it is not used.
fn in_folder(context: &Context<'_>, server: &Identity, folder: &Path) -> Result<Option<Server>, String> {
    let text = match folder::read(&folder::file(folder, &server.build)) {
        Err(FolderError::Absent(_)) => return Ok(None),
        text => text.map_err(|error| error.to_string())?,
    };
    if let Some(why) = folder::marked(folder, &server.build) {
        return Err(marked(&server.build, &why));
    }
    let layout = Layout::found(server, &text).map_err(|error| error.to_string())?;
    Ok(Some(Server { functions: functions_of(context, &layout)?, origin: Origin::Found }))
}

/// The server's functions, if they may be used for the next load. The databases must be empty.
///
/// # Errors
/// Why not.
pub(crate) fn offer(context: &Context<'_>) -> Result<Offer, String> {
    permitted(context)?;
    look_again(context);
    let (server, tried) = KNOWN.with_borrow(server_of)?;
    if !tried && let Err(why) = trial::run(context, server.functions) {
        let why = not_as_its_family(&format!("a trial in a forked child failed: {why}"));
        context.log(LogLevel::Warning, &format!("remora: fast keys are not offered: {why}"));
        KNOWN.set(Known::No(why.clone()));
        return Err(why);
    }
    let offer = Offer { functions: server.functions, verify: server.origin == Origin::Found };
    KNOWN.set(Known::Tried(server));
    Ok(offer)
}

/// The reason, with the build's name: whoever reads it may have several.
fn not_as_its_family(why: &str) -> String {
    let build = SEARCH.with_borrow(|search| search.as_ref().map(|search| search.server.build.to_string()));
    format!("{why} ({})", build.unwrap_or_default())
}

fn server_of(known: &Known) -> Result<(Server, bool), String> {
    match known {
        Known::Nothing => Err("the module is being loaded".to_owned()),
        Known::No(why) | Known::NoLayout(why) => Err(why.clone()),
        Known::Layout(server) => Ok((server.clone(), false)),
        Known::Tried(server) => Ok((server.clone(), true)),
    }
}

/// A load in a build whose layout was found was as it should be.
pub(crate) fn verified(context: &Context<'_>) {
    KNOWN.with_borrow_mut(|known| {
        if let Known::Tried(server) = known {
            server.origin = Origin::Verified;
        }
    });
    context.log(LogLevel::Notice, "remora: the first load with fast keys in this build of the server is verified");
}

/// Something was found to be different. The build is marked, unless that says nothing about it.
pub(crate) fn failed(context: &Context<'_>, trouble: &Trouble) {
    let why = not_as_its_family(&format!("a load in this build was not as it should be: {trouble}"));
    context.log(LogLevel::Warning, &format!("remora: fast keys are not offered any more: {why}"));
    mark(context, trouble, &why);
    KNOWN.set(Known::No(why));
}

/// Marks the build for what was found, so that no process tries it again. Nothing is written about builds that are
/// listed, nor where nothing was found out.
pub(crate) fn mark(context: &Context<'_>, trouble: &Trouble, why: &str) {
    if let Trouble::Unknown(_) = trouble {
        return;
    }
    let is_found = KNOWN.with_borrow(|known| server_of(known).is_ok_and(|(server, _)| server.origin != Origin::Listed));
    let search = SEARCH.with_borrow(Clone::clone).filter(|_| is_found);
    let Some(Search { server, folder }) = search else { return };
    match folder::mark(&folder, &server.build, why) {
        Ok(path) => context.log(LogLevel::Warning, &format!("remora: this build is marked in {}", path.display())),
        Err(error) => context.log(
            LogLevel::Warning,
            &format!("remora: this build is not marked, and another process may try it again: {error}"),
        ),
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
    look_again(context);
    KNOWN.with_borrow(server_of).map(|(server, _)| server.functions)
}

/// In a child, with the server's data, which it changes: calls every function with known arguments.
///
/// # Errors
/// What is different.
pub(crate) fn check_shapes(context: &Context<'_>, server: &FastServer, steps: &Steps) -> Result<(), String> {
    shapes::check(context, server, steps)
}

/// The state for users.
pub(crate) fn state() -> String {
    if !ALLOWED.get() {
        return "no: remora.fast-keys is no".into();
    }
    KNOWN.with_borrow(|known| match known {
        Known::Nothing => "no: the module is being loaded".into(),
        Known::Layout(_) => "known, not tried yet".into(),
        Known::Tried(_) => "yes".into(),
        Known::No(why) | Known::NoLayout(why) => format!("no: {why}"),
    })
}

/// Where the layout is from, for users.
pub(crate) fn origin() -> &'static str {
    KNOWN.with_borrow(|known| match server_of(known).map(|(server, _)| server.origin) {
        Ok(Origin::Listed) => "listed",
        Ok(Origin::Found) => "found",
        Ok(Origin::Verified) => "found, verified",
        Err(_) => "none",
    })
}

/// The reply to a command, as a text.
///
/// # Errors
/// The server's error.
fn command(context: &Context<'_>, name: &str, arguments: &[&[u8]]) -> Result<Vec<u8>, String> {
    let arguments: Vec<_> = arguments.iter().map(|argument| OwnedStr::new(context, argument)).collect();
    let borrowed: Vec<_> = arguments.iter().map(OwnedStr::borrow).collect();
    let name = std::ffi::CString::new(name).unwrap_or_default();
    let reply = context.call(&name, &borrowed).ok_or("a command had no reply")?;
    match (reply.error(), reply.integer()) {
        (Some(error), _) => Err(error),
        (None, Some(number)) => Ok(number.to_string().into_bytes()),
        (None, None) => Ok(reply.as_bytes().unwrap_or_default().to_vec()),
    }
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

/// Which server this is.
///
/// # Errors
/// Why that is not known.
fn identity(context: &Context<'_>) -> Result<Identity, String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("they are known for x86-64 only".into());
    }
    let (maker, version) = version(context).ok_or("the server does not report its version")?;
    let program = Program::read(Path::new(PROGRAM)).map_err(|error| format!("{PROGRAM} could not be read: {error}"))?;
    Ok(Identity { maker, version, sha256: program.sha256(), build: program.build() })
}

/// The layout of this build in the list, or in the operator's file.
fn recognize(context: &Context<'_>, server: &Identity, given: Option<&str>) -> Known {
    let from_file = given.map(|path| {
        let text = folder::read(Path::new(path)).map_err(|error| format!("the layout file: {error}"))?;
        match Layout::given(server, &text) {
            // It may be of another build, and this one be in the list.
            Err(LayoutError::Unknown(_)) => Ok(None),
            layout => Ok(Some(layout.map_err(|error| format!("the layout file {path}: {error}"))?)),
        }
    });
    let (layout, origin) = match from_file.transpose() {
        Err(why) => return Known::No(why),
        Ok(Some(Some(layout))) => (Ok(layout), Origin::Found),
        Ok(_) => (Layout::listed(server), Origin::Listed),
    };
    match layout {
        Err(error) => Known::NoLayout(error.to_string()),
        Ok(layout) => match functions_of(context, &layout) {
            Ok(functions) => Known::Layout(Server { functions, origin }),
            Err(why) => Known::No(why),
        },
    }
}

/// The functions of this build.
fn functions_of(context: &Context<'_>, layout: &Layout) -> Result<FastServer, String> {
    let functions = match layout.functions.is_empty() {
        true => Functions::Shown,
        false => Functions::At(addresses(layout)?),
    };
    FastServer::of_build(context, layout, &functions)
        .map_err(|name| format!("the server's program does not show {name}: it was linked without -rdynamic"))
}

/// Where the functions of a layout are in this process.
fn addresses(layout: &Layout) -> Result<std::collections::BTreeMap<String, usize>, String> {
    let maps = Maps::of(Path::new("/proc/self")).map_err(|error| format!("/proc/self/maps: {error}"))?;
    let begin = maps.program.ok_or("the program is not in /proc/self/maps")?;
    let place = |(name, offset): (&String, &usize)| {
        let address = begin + *offset as u64;
        let is_variable = name == remora_layout::names::STATE;
        let fits = if is_variable { maps.is_data(address, 1) } else { maps.is_code(address) };
        if fits { Ok((name.clone(), address as usize)) } else { Err(format!("the layout has no place for {name}")) }
    };
    layout.functions.iter().map(place).collect()
}

/// The server's own version: Valkey also reports the version of Redis that it is compatible with.
fn version(context: &Context<'_>) -> Option<(Maker, String)> {
    let info = context.server_info(c"server")?;
    let valkey = info.get(c"valkey_version").map(|version| (Maker::Valkey, version.to_owned()));
    valkey.or_else(|| info.get(c"redis_version").map(|version| (Maker::Redis, version.to_owned())))
}
