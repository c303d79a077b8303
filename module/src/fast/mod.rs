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
//! - [`layout`]: the builds that are known. [`trial`]: what the child tries, after the shapes of functions (below); and
//!   the first load in a build that is not listed.
//!
//! The unsafe part is `crate::ffi::fast`.

pub(crate) mod layout;
mod trial;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use layout::{Identity, Layout, LayoutError};
use remora_layout::build::Maps;
use remora_layout::family::Maker;
use remora_layout::folder::{self, FolderError};
use remora_layout::{Build, Program};
use remora_redis::rdb::{COLLECTION_TYPES, Collection, Usage};

use crate::api::{Adding, Context, FastServer, Flag, Functions, KeyKind, LogLevel, OwnedStr, Shape, Steps, Trouble};

pub(crate) use trial::Sample;

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
    check(context, server, steps)
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
        let is_variable = name == remora_layout::build::STATE;
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

// The shapes of the server's functions: each is called with known arguments, and must return what its name says. A
// build whose function takes other arguments than its family's is found here by that function's name, by a difference
// or by a crash of the child.

/// A name that no key has.
const NAME: &[u8] = b"remora: the shapes of the server's functions: 5e0c1f7a";

/// A time after which no check runs: 2100-01-01, in milliseconds since 1970.
const FAR_MS: u64 = 4_102_444_800_000;

/// Seconds of idleness, and the counter of uses, that are set and read. The servers' clocks for ages have seconds, and
/// ages that are written as they are read may be one off.
const IDLE_SECONDS: u64 = 5000;
const IDLE_SLACK: u64 = 3;
const USES: u8 = 77;

/// Lengths of strings, for each size of their heads.
const LENGTHS: [usize; 6] = [0, 5, 31, 100, 300, 70_000];

/// `OBJ_STRING`, and its encodings as bytes of their own, as a number and inside of the object.
const STRING: u8 = 0;
const RAW: u8 = 0;
const NUMBER: u8 = 1;
const EMBEDDED: u8 = 8;

/// Calls each function in this child. The data of the server may be there.
fn check(context: &Context<'_>, server: &FastServer, steps: &Steps) -> Result<(), String> {
    let checking = Checking { context, server, steps };
    checking.strings()?;
    checking.hash()?;
    checking.values()?;
    checking.one_key()
}

struct Checking<'c> {
    context: &'c Context<'c>,
    server: &'c FastServer,
    steps: &'c Steps,
}

impl Checking<'_> {
    /// Says what is called next, for the message about a crash there.
    fn calls<T>(&self, names: &str, call: impl FnOnce() -> T) -> T {
        self.steps.begin(names);
        call()
    }

    fn strings(&self) -> Result<(), String> {
        for length in LENGTHS {
            let text: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let (has, ends) = self.calls("sdsnewlen", || self.server.try_sds(&text));
            is("sdsnewlen", has == text && ends)?;
            let copied = self.calls("sdscpylen", || self.server.try_copy(b"what was there before", &text));
            is("sdscpylen", copied.is_none_or(|copied| copied == text))?;
            let shape = self.calls("createRawStringObject", || self.server.try_string(&text, true));
            is("createRawStringObject", shape == string(RAW, &text))?;
            let shape = self.calls("createStringObject", || self.server.try_string(&text, false));
            let encoding = if length < 44 { EMBEDDED } else { shape.encoding };
            is("createStringObject", shape == string(encoding, &text) && [RAW, EMBEDDED].contains(&encoding))?;
        }
        for number in [0, 7, -7, 123_456_789, i32::MIN] {
            let shape = self.calls("createStringObjectFromLongLongForValue", || self.server.try_number(number));
            is("createStringObjectFromLongLongForValue", shape == string(NUMBER, number.to_string().as_bytes()))?;
        }
        for (text, encoding) in [("12345678901", NUMBER), ("-5", NUMBER), ("007", EMBEDDED), ("a text", EMBEDDED)] {
            let shape = self.calls("tryObjectEncoding", || self.server.try_encoded(text.as_bytes()));
            is("tryObjectEncoding", shape == string(encoding, text.as_bytes()))?;
        }
        let references = self.calls("incrRefCount", || self.server.try_references());
        is("incrRefCount", references.is_none_or(|[made, retained, released]| made != retained && made == released))
    }

    fn hash(&self) -> Result<(), String> {
        let hash = |bytes: &[u8]| self.calls("the hash function", || self.server.try_hash(bytes));
        let (whole, three) = (hash(b"abcdef"), hash(&b"abcdef"[..3]));
        // Of the bytes that it was given, and of no other.
        let depends = three == hash(&b"abcxyz"[..3]) && three != whole && whole == hash(b"abcdef");
        let many: std::collections::BTreeSet<u64> = (0..64_u8).map(|byte| hash(&[byte; 40]) & 0xFFFF).collect();
        is("the hash function", depends && many.len() > 48)
    }

    /// Values of each type of collection, as the server's own `DUMP` shows them.
    fn values(&self) -> Result<(), String> {
        let name = b"remora: a value for the functions of one value: 5e0c1f7a".as_slice();
        // Values are taken from the replies to DUMP. A setting of this child only.
        self.command("CONFIG", &[b"SET", b"rdbcompression", b"no"])?;
        for words in [
            [b"HSET".as_slice(), name, b"field", b"value"].as_slice(),
            &[b"RPUSH", name, b"one", b"2"],
            &[b"SADD", name, b"1", b"70000"],
            // Two in one bucket of a table would change places.
            &[b"SADD", name, b"one"],
            &[b"ZADD", name, b"1.5", b"one"],
        ] {
            self.command("DEL", &[name])?;
            let (command, arguments) = words.split_first().ok_or("no command")?;
            self.command(&String::from_utf8_lossy(command), arguments)?;
            let dump = self.command("DUMP", &[name])?;
            let (value, footer) = dump.split_at_checked(dump.len().saturating_sub(FOOTER_BYTES)).ok_or(SHORT)?;
            let (kind, bytes) = value.split_first().ok_or(SHORT)?;
            let version = footer.first_chunk().map(|bytes| u16::from_le_bytes(*bytes)).ok_or(SHORT)?;
            if !COLLECTION_TYPES.contains(kind) {
                return Err(format!("the server dumps a value as type {kind}, which no family of its version does"));
            }
            let functions = "rdbLoadObject, rdbSaveObject and the function of a value's type";
            let again = self.calls(functions, || self.server.try_value(&Collection { kind: *kind, bytes }, version));
            let (_, saved_kind, saved) = again.ok_or_else(|| differs(functions))?;
            is(functions, saved_kind == *kind && saved == bytes)?;
        }
        self.command("DEL", &[name]).map(drop)
    }

    /// One key: added, found in its bucket, refused a second time, with an expiry and an age.
    fn one_key(&self) -> Result<(), String> {
        let adding = Adding { database: 0, key: NAME };
        self.context.select(0);
        let before = self.context.key_count();
        let added = self.calls("dbAddRDBLoad", || self.server.try_add(self.context, &adding, b"value"));
        is("dbAddRDBLoad", added == Some(true) && self.context.key_count() == before + 1)?;
        let again = self.calls("dbAddRDBLoad", || self.server.try_add(self.context, &adding, b"other"));
        is("dbAddRDBLoad", again == Some(false) && self.context.key_count() == before + 1)?;
        is("dbAddRDBLoad", self.by_the_api() == Some((b"value".to_vec(), None)))?;
        let found = self.calls("the table's functions", || self.server.try_find(&adding));
        is("the table's functions", found.is_some_and(|shape| shape.text.as_deref() == Some(b"value")))?;
        is("the function for an expiry", self.calls("an expiry", || self.server.try_expiry(&adding)).is_none())?;
        self.calls("setExpire", || self.server.try_expire(&adding, FAR_MS));
        is("setExpire", self.by_the_api() == Some((b"value".to_vec(), Some(FAR_MS))))?;
        let expiry = self.calls("the function for an expiry", || self.server.try_expiry(&adding));
        is("the function for an expiry", expiry == i64::try_from(FAR_MS).ok())?;
        let unknown = Adding { database: 0, key: b"remora: a name that no key has: 5e0c1f7a" };
        is(
            "the table's functions",
            self.calls("a key that is not there", || self.server.try_find(&unknown)).is_none(),
        )?;
        self.usage(&adding)?;
        is("dbAddRDBLoad", self.command("DEL", &[NAME])? == b"1" && self.context.key_count() == before)
    }

    /// The key's age, or its counter of uses: what the server's policy keeps. (Valkey 9 takes another policy over at
    /// its next tick, which a child does not have.)
    fn usage(&self, adding: &Adding<'_>) -> Result<(), String> {
        let policy = self.context.setting("maxmemory-policy").ok_or("the server does not say its maxmemory-policy")?;
        if policy.ends_with("lfu") {
            self.calls("objectSetLRUOrLFU", || self.server.try_use(adding, Usage::Frequency(USES)));
            let uses = self.calls("the function for a counter of uses", || self.server.try_uses(adding));
            is("objectSetLRUOrLFU", self.command("OBJECT", &[b"FREQ", NAME])? == USES.to_string().into_bytes())?;
            return is("the function for a counter of uses", uses == Some(USES));
        }
        self.calls("objectSetLRUOrLFU", || self.server.try_use(adding, Usage::Idle(IDLE_SECONDS)));
        let idle = self.calls("the function for an age", || self.server.try_idle(adding));
        let own = self.command("OBJECT", &[b"IDLETIME", NAME])?;
        let own = std::str::from_utf8(&own).ok().and_then(|own| own.parse::<u64>().ok()).unwrap_or_default();
        let near = |seconds: u64| seconds.abs_diff(IDLE_SECONDS) <= IDLE_SLACK;
        is("objectSetLRUOrLFU", near(own))?;
        is("the function for an age", idle.is_some_and(near))
    }

    /// The key's value and expiry by the module's API.
    fn by_the_api(&self) -> Option<(Vec<u8>, Option<u64>)> {
        let name = OwnedStr::new(self.context, NAME);
        let mut key = self.context.open_to_write(name.borrow())?;
        let expires_at = key.expires_at();
        if key.kind() != KeyKind::String { None } else { Some((key.string()?.to_vec(), expires_at)) }
    }

    fn command(&self, name: &str, arguments: &[&[u8]]) -> Result<Vec<u8>, String> {
        self.steps.begin(&format!("the command {name}"));
        command(self.context, name, arguments)
    }
}

/// What follows a value in the reply to `DUMP`: the version of the format, and a checksum.
const FOOTER_BYTES: usize = 10;
const SHORT: &str = "a DUMP is too short";

fn string(encoding: u8, text: &[u8]) -> Shape {
    Shape { kind: STRING, encoding, text: Some(text.to_vec()) }
}

fn is(function: &str, as_expected: bool) -> Result<(), String> {
    if as_expected { Ok(()) } else { Err(differs(function)) }
}

fn differs(function: &str) -> String {
    format!("{function} does not do in this build what it does in its family")
}
