//! Load: creates the long strings of a snapshot from an agent's memory, while the server loads the rest itself.
//!
//! The replica's agent acts as the primary, and forwards a snapshot to its server. It leaves out strings that are long
//! enough, and puts fields of ours in their place, which say where in memory their bytes are
//! ([`remora_redis::rdb::reference`]). When the server's own loader meets such a field, it calls us; we create the key
//! and copy its bytes, once.
//!
//! ```text
//!   agent ──REMORA.LOAD──▶ arm          takes the memory, checks that the server will load from the link, empties it
//!         ──snapshot─────▶ the server   … keys … │ our field │ … keys … │ our field │ … end mark
//!                                                    └──▶ field ──▶ strings ──▶ OpenKey, the bytes, expiry
//!         ◀──load page────────────────────────────────────┘ one more is done
//! ```
//!
//! In this order: the command, and the loader's callback for a field; the keys; many short ones at a time.
//!
//! Conditions that this relies on:
//!
//! - A field's words refer only to memory that is complete: nothing here waits. The agent checks that it *still* was
//!   complete when it had been copied, and sends the end of the snapshot only if so.
//! - An error ends the load as a broken link does: the server empties itself and asks again. That is true only of a
//!   server that loads from its link; a server that loads from a file exits on any error. Hence the checks in
//!   `REMORA.LOAD`. Besides, the agent sends nothing that such a server could begin to load before we have counted the
//!   first field.

use std::cell::RefCell;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use remora_fabric::{Memory, View, handover};
use remora_redis::rdb::reference::{RUN_BYTES_MAX, RUN_VALUES_BELOW, TICKET_BYTES, Word, WordError, words};
use remora_redis::rdb::{Collection, Content, Record, Records, Usage, Value};
use remora_table::LoadPage;
use remora_table::server_pages::LOAD_PAGE_BYTES;

use crate::api::{
    AddError, AuxLoad, BATCH, Command, Context, EventHandler, FastServer, Io, Key, LogLevel, OwnContext, OwnedStr,
    Scratch, StrRef, Timer, TimerId, warm,
};
use crate::fast::{self, Offer, Sample};

/// Registers type and events. Only while the module is being loaded.
pub(crate) fn register(context: &Context<'_>) -> bool {
    let made = crate::api::register_aux::<References>(context) && context.subscribe::<Loading>();
    REGISTERED.store(made, Relaxed);
    made
}

/// Whether this half is registered: not in a module that was loaded with `capture-only`.
pub(crate) fn is_registered() -> bool {
    REGISTERED.load(Relaxed)
}

static REGISTERED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// What is armed or in progress. Only the server's main thread accesses it.
    static ARMED: RefCell<Option<Armed>> = const { RefCell::new(None) };
}

/// Memory that an agent has handed over, and the ticket of the fields that will refer to it.
struct Armed {
    ticket: [u8; TICKET_BYTES],
    strings: Strings,
    page: LoadPage,
    /// For keys: the context that the server passes to a field has no database.
    context: OwnContext,
    /// The first field has arrived.
    begun: bool,
    /// Fires if no load begins.
    timer: TimerId,
}

impl Armed {
    fn take() -> Option<Armed> {
        ARMED.with(|armed| armed.borrow_mut().take())
    }

    fn put(self) {
        ARMED.with(|armed| *armed.borrow_mut() = Some(self));
    }
}

/// Load counters since the module was loaded, for INFO.
pub(crate) static COUNTS: Counts =
    Counts { loads: AtomicU64::new(0), keys: AtomicU64::new(0), bytes: AtomicU64::new(0) };

/// The counters in [`COUNTS`].
pub(crate) struct Counts {
    /// Loads that were completed.
    pub(crate) loads: AtomicU64,
    /// Keys created from an agent's memory.
    pub(crate) keys: AtomicU64,
    /// Bytes of their values.
    pub(crate) bytes: AtomicU64,
}

/// The state of this half, as a word.
pub(crate) fn state() -> &'static str {
    ARMED.with(|armed| match armed.borrow().as_ref() {
        _ if BUSY.load(Relaxed) => "loading",
        Some(armed) if armed.begun => "loading",
        Some(_) => "armed",
        None => "idle",
    })
}

/// A field is being read: meanwhile the armed state is taken out of its cell, and other callbacks may ask for it.
struct Busy;

impl Busy {
    fn begin() -> Busy {
        BUSY.store(true, Relaxed);
        Busy
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        BUSY.store(false, Relaxed);
    }
}

static BUSY: AtomicBool = AtomicBool::new(false);

/// Handles the beginning and the end of a load.
struct Loading;

impl EventHandler for Loading {
    const EVENT: u64 = crate::api::EVENT_LOADING;

    fn handle(context: &Context<'_>, what: u64) {
        if !matches!(what, crate::api::LOADING_ENDED | crate::api::LOADING_FAILED) {
            return;
        }
        let Some(armed) = Armed::take() else { return };
        context.stop_timer(armed.timer);
        if armed.begun && what == crate::api::LOADING_ENDED {
            COUNTS.loads.fetch_add(1, Relaxed);
        }
        armed.page.refuse("the load has ended");
    }
}

/// Handles a load that did not begin.
struct Expired;

impl Timer for Expired {
    fn fire(context: &Context<'_>, _number: u64) {
        if let Some(armed) = Armed::take() {
            armed.page.refuse("no load began in time");
            context.log(crate::api::LogLevel::Warning, "the memory of an agent is released: no load began in time");
        }
    }
}

// The callback of the server's loader for one of our fields in a snapshot.

/// The module type that exists for these fields.
struct References;

impl AuxLoad for References {
    const TYPE_NAME: &'static CStr = c"RemoraRef";
    const ENCODING: u16 = remora_redis::rdb::reference::VERSION;

    fn load(io: &Io<'_>, _encoding: u16) -> bool {
        // Taken out of the cell while it is used: the server may call us again when we yield.
        let Some(mut armed) = Armed::take() else {
            warn(io, "the snapshot contains memory references, but no memory was handed over (REMORA.LOAD)");
            return false;
        };
        let busy = Busy::begin();
        let result = armed.execute(io);
        match &result {
            Ok(()) => {
                armed.page.count();
                armed.context.yield_now(true, c"loading a snapshot out of shared memory");
            }
            Err(error) => {
                let text = error.to_string();
                armed.page.refuse(&text);
                warn(io, &text);
            }
        }
        armed.put();
        drop(busy);
        result.is_ok()
    }
}

const _: () = assert!(
    const_equal(References::TYPE_NAME.to_bytes(), remora_redis::rdb::reference::TYPE_NAME.as_bytes()),
    "the type's name is the one that agents write"
);

const fn const_equal(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// Why a load fails.
#[derive(Debug, thiserror::Error)]
enum FieldError {
    #[error("the snapshot breaks off inside a field of references")]
    CutOff,
    #[error(transparent)]
    Word(#[from] WordError),
    #[error("the snapshot refers to other memory than was handed over: an agent that was replaced sent it")]
    Ticket,
    #[error("the field of references lacks its first word")]
    NoHello,
    #[error(
        "the server loads into a data set that it does not serve yet (repl-diskless-load is {0}), where a module \
         can't create keys"
    )]
    Aside(String),
    #[error(transparent)]
    String(#[from] StringError),
}

impl Armed {
    fn execute(&mut self, io: &Io<'_>) -> Result<(), FieldError> {
        let bytes = io.bytes().ok_or(FieldError::CutOff)?;
        for word in words(&bytes) {
            match word? {
                Word::Hello { ticket } => self.begin(&ticket)?,
                _ if !self.begun => return Err(FieldError::NoHello),
                word => self.strings.execute(&self.context, &word)?,
            }
        }
        let (keys, bytes) = self.strings.take_counts();
        COUNTS.keys.fetch_add(keys, Relaxed);
        COUNTS.bytes.fetch_add(bytes, Relaxed);
        Ok(())
    }

    fn begin(&mut self, ticket: &[u8]) -> Result<(), FieldError> {
        if ticket != self.ticket {
            return Err(FieldError::Ticket);
        }
        // Checked again: the setting may have changed since the memory was handed over. It can't change while the
        // server is loading.
        let way = self.context.setting("repl-diskless-load").unwrap_or_default();
        if way == "swapdb" {
            return Err(FieldError::Aside(way));
        }
        self.begun = true;
        Ok(())
    }
}

fn warn(io: &Io<'_>, text: &str) {
    if let Some(context) = io.context() {
        context.log(LogLevel::Warning, text);
    }
}

// `REMORA.LOAD`: takes the memory to which the next snapshot will refer.

/// `REMORA.LOAD address secret ticket length [FLUSH]`
///
/// Address and secret of the handover, the ticket in the first field (hexadecimal), length of the memory in bytes.
/// `FLUSH`: empty the server, whose data are about to be replaced in any case. The reply has names and values:
/// `idle_times` is `yes` if the module can set the idle times of keys, and `no` if keys with idle times must come over
/// the link; `fast_keys` is `yes` if the module takes runs of small values, or `no` and why; `verify` is `yes` if it
/// wants to look at what was loaded ([`Word::Verify`]) before the snapshot ends.
pub(crate) struct Load;

impl Command for Load {
    const NAME: &'static CStr = c"remora.load";
    // A replica that waits for its snapshot is stale. Not allowed while something is being loaded: that would be the
    // wrong load.
    const FLAGS: &'static CStr = c"admin deny-script allow-stale no-monitor no-slowlog";

    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]) {
        match arm(context, arguments) {
            Ok(fast_keys) => {
                let idle_times = if sets_idle_times(context) { "yes" } else { "no" };
                let verify = if fast_keys == Ok(true) { "yes" } else { "no" };
                let fast_keys = fast_keys.map_or_else(|why| format!("no: {why}"), |_| "yes".to_owned());
                let answers = [("idle_times", idle_times), ("fast_keys", fast_keys.as_str()), ("verify", verify)];
                context.reply_array(2 * answers.len());
                for (name, value) in answers {
                    context.reply_bytes(name.as_bytes());
                    context.reply_bytes(value.as_bytes());
                }
            }
            Err(error) => context.reply_error(&format!("ERR remora: {error}")),
        }
    }
}

/// Why `REMORA.LOAD` failed.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("usage: REMORA.LOAD address secret ticket length [FLUSH]")]
    Arguments,
    #[error("the memory was not handed over: {0}; is the agent on this host, in the same network namespace?")]
    Handover(#[from] remora_fabric::memory::Error),
    #[error("{0}")]
    LoadPage(#[from] remora_table::Error),
    #[error("expected 2 descriptors, got {0}")]
    Count(usize),
    #[error(
        "repl-diskless-load is {0}: only on-empty-db and flush-before-load load from the link into the server's own \
         data"
    )]
    Setting(String),
    #[error(
        "there are {0} keys, and with repl-diskless-load on-empty-db only an empty server loads from its link: FLUSH \
         was not given"
    )]
    NotEmpty(u64),
    #[error("emptying the server failed: {0}")]
    Flush(String),
    #[error("not supported in cluster mode")]
    Cluster,
}

/// How long the agent may take to hand the memory over: it is waiting for us, on this host. The server does nothing
/// else meanwhile.
const TAKE_LIMIT: Duration = Duration::from_secs(1);

/// How long the load may take to begin: the agent sends at once, but the server may empty itself first, which may take
/// minutes.
const BEGIN_LIMIT_MILLIS: u64 = 10 * 60 * 1000;

/// Returns whether the module takes runs, and then whether that load must be verified; or why not.
fn arm(context: &Context<'_>, arguments: &[StrRef<'_>]) -> Result<Result<bool, String>, LoadError> {
    let wanted = Wanted::parse(arguments).ok_or(LoadError::Arguments)?;
    if context.flags().is_cluster() {
        return Err(LoadError::Cluster);
    }
    if let Some(former) = Armed::take() {
        context.stop_timer(former.timer);
        former.page.refuse("other memory was handed over");
    }
    let mut descriptors = handover::take(wanted.address, wanted.secret, TAKE_LIMIT)?.into_iter();
    let (Some(memory), Some(page), None) = (descriptors.next(), descriptors.next(), descriptors.next()) else {
        return Err(LoadError::Count(descriptors.len()));
    };
    let view = View::open(memory, wanted.length)?;
    let page = LoadPage::adopt(Memory::adopt(page, LOAD_PAGE_BYTES)?)?;
    let own = OwnContext::new(context);
    make_ready(&own, wanted.flush)?;
    let fast = fast::offer(&own);
    let fast_keys = fast.as_ref().map(|offer| offer.verify).map_err(String::clone);
    let how = fast.as_ref().map_or_else(|why| format!("without fast keys: {why}"), |_| "with fast keys".to_owned());
    let timer = context.set_timer::<Expired>(BEGIN_LIMIT_MILLIS, 0);
    let strings = Strings::new(view, fast.ok());
    Armed { ticket: wanted.ticket, strings, page, context: own, begun: false, timer }.put();
    context.log(LogLevel::Notice, &format!("remora: memory was handed over for the next load, {how}"));
    Ok(fast_keys)
}

/// The parsed arguments.
struct Wanted<'a> {
    address: &'a str,
    secret: &'a str,
    ticket: [u8; TICKET_BYTES],
    length: u64,
    flush: bool,
}

impl<'a> Wanted<'a> {
    fn parse(arguments: &[StrRef<'a>]) -> Option<Wanted<'a>> {
        let (required, rest) = arguments.split_first_chunk::<4>()?;
        let flush = match rest {
            [] => false,
            [word] => word.as_str().filter(|word| word.eq_ignore_ascii_case("flush")).map(|_| true)?,
            _ => return None,
        };
        let [address, secret, ticket, length] = required;
        let ticket = hexadecimal(ticket.as_str()?)?;
        Some(Wanted {
            address: address.as_str()?,
            secret: secret.as_str()?,
            ticket,
            length: length.as_str()?.parse().ok()?,
            flush,
        })
    }
}

/// Parses 32 hexadecimal digits as 16 bytes.
fn hexadecimal(text: &str) -> Option<[u8; TICKET_BYTES]> {
    let mut bytes = [0; TICKET_BYTES];
    if text.len() != 2 * TICKET_BYTES || !text.is_ascii() {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// Makes sure that the server will load from its link, into its own data.
fn make_ready(context: &Context<'_>, flush: bool) -> Result<(), LoadError> {
    match context.setting("repl-diskless-load").as_deref() {
        // The server would empty itself while its agent waits for the load: do it now.
        Some("flush-before-load") if flush => empty(context, true),
        Some("flush-before-load") => Ok(()),
        Some("on-empty-db") => empty(context, flush),
        other => Err(LoadError::Setting(other.unwrap_or("unknown").to_owned())),
    }
}

/// Whether the idle time of a key can be set. Valkey 9.1 takes the milliseconds of its API for thousands of seconds.
fn sets_idle_times(context: &Context<'_>) -> bool {
    let info = context.server_info(c"server");
    info.is_some_and(|info| info.get(c"server_name").is_none_or(|name| name != "valkey"))
}

/// Empties the databases one by one with FLUSHDB: FLUSHALL would also replace the server's last RDB file by an empty
/// one.
fn empty(context: &Context<'_>, allowed: bool) -> Result<(), LoadError> {
    let lazy = context.setting("replica-lazy-flush").as_deref() == Some("yes");
    let how = OwnedStr::new(context, if lazy { b"ASYNC" } else { b"SYNC" });
    for database in (0..).take_while(|database| context.select(*database)) {
        match context.key_count() {
            0 => {}
            keys if !allowed => return Err(LoadError::NotEmpty(keys)),
            _ => match context.call(c"FLUSHDB", &[how.borrow()]) {
                Some(reply) => reply.error().map_or(Ok(()), |error| Err(LoadError::Flush(error)))?,
                None => return Err(LoadError::Flush(format!("FLUSHDB of database {database} gave no reply"))),
            },
        }
    }
    Ok(())
}

// Creates keys from the words of a field. Only this and runs (below) write to the server's data.

/// Why a word can't be executed.
#[derive(Debug, thiserror::Error)]
enum StringError {
    #[error("the server has no database {0}, but the snapshot has keys in it: set databases to more than that")]
    Database(u32),
    #[error("a string begins while {missing} bytes of the one before it are missing")]
    Unfinished { missing: u64 },
    #[error("a piece has {given} bytes, the string lacks only {wanted}")]
    TooMany { given: u64, wanted: u64 },
    #[error("a piece comes before its string")]
    NoString,
    #[error("the server refused to create a string of {0} bytes")]
    Refused(u64),
    #[error("the field has a second greeting")]
    Greeting,
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("the snapshot refers to memory outside what was handed over: {0}")]
    Memory(#[from] remora_fabric::memory::Error),
}

/// Creates strings from memory.
struct Strings {
    memory: View,
    open: Option<Open>,
    used: Used,
    heap: Heap,
    /// The same for runs: jemalloc puts small objects elsewhere, which must not count for long strings.
    heap_for_runs: Heap,
    runs: Runs,
    /// Whether the server takes a string as it is, without copying it again.
    takes_strings: bool,
    keys: u64,
    bytes: u64,
}

/// Bytes of the memory that were read approximately in sequence. They count as resident memory of this process until
/// they are released.
#[derive(Default)]
struct Used(Range<u64>);

/// A string that is not complete yet.
struct Open {
    name: OwnedStr,
    database: u32,
    length: u64,
    filled: u64,
    expires_ms: Option<u64>,
    usage: Option<Usage>,
}

impl Strings {
    fn new(memory: View, fast: Option<Offer>) -> Strings {
        Strings {
            memory,
            open: None,
            used: Used::default(),
            heap: Heap::default(),
            heap_for_runs: Heap::default(),
            runs: Runs::new(fast),
            takes_strings: true,
            keys: 0,
            bytes: 0,
        }
    }

    /// Keys and bytes since the last call.
    fn take_counts(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.keys), std::mem::take(&mut self.bytes))
    }

    fn execute(&mut self, context: &Context<'_>, word: &Word<'_>) -> Result<(), StringError> {
        match *word {
            Word::Hello { .. } => Err(StringError::Greeting),
            Word::Text { database, key, length, expires_ms, usage } => {
                if let Some(open) = &self.open {
                    return Err(StringError::Unfinished { missing: open.length - open.filled });
                }
                let name = OwnedStr::new(context, key);
                self.open = Some(Open { name, database, length, filled: 0, expires_ms, usage });
                Ok(())
            }
            Word::Piece { offset, length } => self.piece(context, offset, u64::from(length)),
            Word::Verify => Ok(self.runs.verify(context)?),
            Word::Run { database, offset, length } => {
                if let Some(open) = &self.open {
                    return Err(StringError::Unfinished { missing: open.length - open.filled });
                }
                self.used.next(&self.memory, offset, u64::from(length));
                let memory = u64::from(length) * HEAP_BYTES_PER_RUN.0 / HEAP_BYTES_PER_RUN.1;
                self.heap_for_runs.prepare(memory, |bytes| warm(context, bytes));
                let (keys, bytes) = self.runs.add(context, &self.memory, database, offset, length)?;
                if let Some(address) = self.runs.made_at() {
                    self.heap_for_runs.note(memory, address, memory);
                }
                self.keys += keys;
                self.bytes += bytes;
                Ok(())
            }
        }
    }

    fn piece(&mut self, context: &Context<'_>, offset: u64, length: u64) -> Result<(), StringError> {
        let open = self.open.as_mut().ok_or(StringError::NoString)?;
        let missing = open.length - open.filled;
        if length > missing {
            return Err(StringError::TooMany { given: length, wanted: missing });
        }
        self.used.next(&self.memory, offset, length);
        let place = offset..offset.saturating_add(length);
        // A string is allocated with its first piece.
        if open.filled == 0 {
            self.heap.prepare(open.length, |bytes| warm(context, bytes));
        }
        let address = if self.takes_strings && open.length == length {
            let (address, taken) = open.make(context, &self.memory, &place)?;
            self.takes_strings = taken;
            address
        } else {
            open.append(context, &self.memory, &place)?
        };
        self.heap.note(open.length, address, length);
        self.bytes += length;
        if open.filled == open.length {
            self.keys += 1;
            self.open = None;
        }
        Ok(())
    }
}

impl Used {
    /// These bytes will be read next. Long pieces are mapped at once; bytes that were read are released once that is
    /// worth a system call.
    fn next(&mut self, memory: &View, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        // Between two strings is the beginning of a record.
        let follows = self.0.end <= offset && offset - self.0.end <= GAP_BYTES;
        if !follows || self.0.end - self.0.start >= LET_GO_BYTES {
            memory.forget(self.0.clone());
            self.0 = offset..offset;
        }
        self.0.end = end;
        if length >= POPULATE_BYTES {
            memory.populate(offset..end);
        }
    }
}

/// A piece of at least this many bytes is mapped by one call instead of a fault for every few pages.
const POPULATE_BYTES: u64 = 128 << 10;

/// Strings at most this far apart count as one sequence. Releasing each by itself would cost a system call and a fault
/// for every page.
const GAP_BYTES: u64 = 64 << 10;

/// This many bytes in a sequence are released together: our mapping stays about as small.
const LET_GO_BYTES: u64 = 1 << 20;

/// Memory for the server's allocator that is requested from the system before it is needed.
#[derive(Default)]
struct Heap {
    /// The addresses that were populated.
    ready: Range<usize>,
    /// Bytes of strings created since then, and how many of them are at these addresses.
    made: u64,
    hit: u64,
    /// How many times in a row the server's allocator used other memory.
    misses: u32,
}

impl Heap {
    /// Announces a string of this many bytes. `warm` populates that many bytes and returns where, if the system can.
    fn prepare(&mut self, string: u64, warm: impl FnOnce(usize) -> Option<Range<usize>>) {
        if string > STRING_BYTES_MAX || self.misses >= MISSES_MAX || self.made + string <= self.ready.len() as u64 {
            return;
        }
        self.misses = if self.hit * 2 < self.made { self.misses + 1 } else { 0 };
        if self.misses >= MISSES_MAX {
            return;
        }
        match warm((string + HEAD_BYTES).max(HEAP_BYTES) as usize) {
            Some(ready) => *self = Heap { ready, misses: self.misses, ..Heap::default() },
            None => self.misses = MISSES_MAX,
        }
    }

    /// That many bytes of such a string are at `address`. Nothing was populated for longer strings, so they prove
    /// nothing.
    fn note(&mut self, string: u64, address: usize, bytes: u64) {
        if string > STRING_BYTES_MAX {
            return;
        }
        self.made += bytes;
        if self.ready.contains(&address) {
            self.hit += bytes;
        }
    }
}

/// Bytes populated at a time: many pages for one call, and little is lost if it was in vain. Not more, since jemalloc
/// places small objects into free memory only if that is at most 64 times as large as the extents of 16 KiB and more in
/// which it keeps them.
const HEAP_BYTES: u64 = 1 << 20;

/// Memory that a server needs for the records of a run, as a share of their bytes: it has heads for objects, entries of
/// tables and the allocator's own. An estimate that is too high costs little: pages that are there already are only
/// looked at.
const HEAP_BYTES_PER_RUN: (u64, u64) = (3, 2);

/// Longest string for which memory is populated: jemalloc returns longer ones to the system at once (8 MiB, rounded up
/// from 7).
const STRING_BYTES_MAX: u64 = (7 << 20) - HEAD_BYTES;

/// Maximum size of what servers put before and after the bytes of a string.
const HEAD_BYTES: u64 = 64;

/// If less than half of the created bytes were in populated memory this many times in a row, the allocator is assumed
/// to work differently.
const MISSES_MAX: u32 = 4;

impl Open {
    /// Creates a string whose bytes are all present. Returns their address, and whether the server took the string as
    /// it was.
    fn make(&mut self, context: &Context<'_>, memory: &View, place: &Range<u64>) -> Result<(usize, bool), StringError> {
        let refused = || StringError::Refused(self.length);
        let value = OwnedStr::of_memory(context, memory, place)?;
        let mut key = self.key(context)?;
        if !key.set_string(value.borrow()) {
            return Err(refused());
        }
        let made = value.borrow().as_bytes().as_ptr();
        let taken = key.string().ok_or_else(refused)?.as_ptr() == made;
        self.filled = self.length;
        self.qualify(&mut key);
        Ok((made.addr(), taken))
    }

    /// Copies the next bytes into the key, and returns their address.
    fn append(&mut self, context: &Context<'_>, memory: &View, place: &Range<u64>) -> Result<usize, StringError> {
        let refused = || StringError::Refused(self.length);
        let mut key = self.key(context)?;
        let whole = usize::try_from(self.length).map_err(|_| refused())?;
        // Looked up again for every piece: the server may have moved the bytes while it did other work.
        let bytes = key.string_to_fill(whole).ok_or_else(refused)?;
        let length = place.end - place.start;
        let range = self.filled as usize..(self.filled + length) as usize;
        let into = bytes.get_mut(range).ok_or_else(refused)?;
        memory.read(place.start, into)?;
        let address = into.as_ptr().addr();
        self.filled += length;
        if self.filled == self.length {
            self.qualify(&mut key);
        }
        Ok(address)
    }

    /// Opens the key in its database.
    fn key<'c>(&self, context: &'c Context<'_>) -> Result<Key<'c>, StringError> {
        if !context.select(self.database) {
            return Err(StringError::Database(self.database));
        }
        context.open_to_write(self.name.borrow()).ok_or(StringError::Refused(self.length))
    }

    /// Sets expiry and age.
    fn qualify(&self, key: &mut Key<'_>) {
        if let Some(at) = self.expires_ms {
            key.expire_at(at);
        }
        match self.usage {
            None => {}
            Some(Usage::Idle(seconds)) => key.set_idle_time(seconds.saturating_mul(1000)),
            Some(Usage::Frequency(count)) => key.set_frequency(count),
        }
    }
}

// Runs: whole records of small values that lie in an agent's memory, added many at a time in the fast way.
//
// The agent's memory may change while it is read, so a run is copied first, and then read as records. The copy stays
// in the processor's cache. The agent finds out afterwards whether the memory had changed.

/// Why a run can't be added.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("the field has a run of small values, which this server was not offered for (fast_keys no)")]
    NotOffered,
    #[error("byte {at} of a run of {length} is not a record of a small value")]
    NotRecords { at: usize, length: u32 },
    #[error(transparent)]
    Add(#[from] AddError),
    #[error("what was loaded in the fast way is not as it should be: {0}")]
    Differs(String),
    #[error("the snapshot refers to memory outside what was handed over: {0}")]
    Memory(#[from] remora_fabric::memory::Error),
}

/// Adds runs.
struct Runs {
    server: Option<(FastServer, Scratch)>,
    /// Of a load that must be verified.
    sample: Option<Sample>,
    buffer: Vec<u8>,
}

impl Runs {
    /// `server`: its functions, if the fast way was offered.
    fn new(offer: Option<Offer>) -> Runs {
        let sample = offer.is_some_and(|offer| offer.verify).then(Sample::new);
        let server = offer.map(|offer| (offer.functions, offer.functions.scratch()));
        Runs { server, sample, buffer: Vec::new() }
    }

    /// Compares a sample of what was loaded with what the server has, if this load must be verified.
    fn verify(&mut self, context: &Context<'_>) -> Result<(), RunError> {
        let (Some((server, _)), Some(sample)) = (&self.server, self.sample.take()) else { return Ok(()) };
        match sample.verify(context, *server) {
            Ok(()) => fast::verified(context),
            Err(trouble) => {
                fast::failed(context, &trouble);
                return Err(RunError::Differs(trouble.to_string()));
            }
        }
        Ok(())
    }

    /// Where the last value is that the server has made.
    fn made_at(&self) -> Option<usize> {
        self.server.as_ref().map(|(_, scratch)| scratch.made_at())
    }

    /// Adds the records that lie there. Returns their number, and the bytes of their values.
    fn add(
        &mut self,
        context: &Context<'_>,
        memory: &View,
        database: u32,
        offset: u64,
        length: u32,
    ) -> Result<(u64, u64), RunError> {
        let (server, scratch) = self.server.as_mut().ok_or(RunError::NotOffered)?;
        self.buffer.resize(RUN_BYTES_MAX as usize, 0);
        let run = self.buffer.get_mut(..length as usize).unwrap_or_default();
        memory.read(offset, run)?;
        let mut records = Records::new(run, RUN_VALUES_BELOW);
        let (mut keys, mut bytes) = (0, 0);
        let mut batch: Vec<Record<'_>> = Vec::with_capacity(BATCH);
        loop {
            batch.clear();
            batch.extend(records.by_ref().take(BATCH));
            if batch.is_empty() {
                break;
            }
            server.add(context, scratch, database, &batch)?;
            if let Some(sample) = &mut self.sample {
                sample.note(database, &batch);
            }
            keys += batch.len() as u64;
            bytes += batch.iter().map(|record| value_bytes(&record.value)).sum::<u64>();
        }
        if records.taken() != run.len() {
            return Err(RunError::NotRecords { at: records.taken(), length });
        }
        Ok((keys, bytes))
    }
}

fn value_bytes(value: &Value<'_>) -> u64 {
    match value {
        Value::String(Content::Bytes(bytes)) | Value::Collection(Collection { bytes, .. }) => bytes.len() as u64,
        Value::String(Content::Number(_)) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates strings at the addresses that `place` chooses in the populated block; returns how often a block was
    /// requested.
    fn make(heap: &mut Heap, strings: usize, bytes: u64, place: impl Fn(&Range<usize>) -> usize) -> usize {
        let mut asked = 0;
        for _ in 0..strings {
            heap.prepare(bytes, |block| {
                asked += 1;
                Some(1 << 30..(1 << 30) + block)
            });
            heap.note(bytes, place(&heap.ready), bytes);
        }
        asked
    }

    #[test]
    fn a_block_is_made_ready_whenever_the_last_one_is_used_up() {
        let mut heap = Heap::default();
        assert_eq!(make(&mut heap, 4096, 1024, |ready| ready.start), 4);
        assert_eq!(make(&mut heap, 3, 3 << 20, |ready| ready.start), 3, "one for each that is larger");
    }

    #[test]
    fn an_allocator_that_takes_other_memory_is_left_alone_and_one_that_does_so_once_is_not() {
        let mut heap = Heap::default();
        make(&mut heap, 2, 1 << 20, |_| 7);
        make(&mut heap, 2, 1 << 20, |ready| ready.start);
        assert_eq!(heap.misses, 0);
        let asked = make(&mut heap, 100, 1 << 20, |_| 7);
        assert_eq!(asked, MISSES_MAX as usize);
    }

    #[test]
    fn strings_that_nothing_is_made_ready_for_say_nothing_about_the_allocator() {
        let mut heap = Heap::default();
        for _ in 0..20 {
            assert_eq!(make(&mut heap, 1, STRING_BYTES_MAX + 1, |_| 7), 0);
            make(&mut heap, 1, 1 << 20, |ready| ready.start);
        }
        assert_eq!(heap.misses, 0);
    }

    #[test]
    fn a_system_that_cannot_is_asked_once() {
        let mut heap = Heap::default();
        heap.prepare(1024, |_| None);
        heap.prepare(1024, |_| panic!("asked again"));
    }
}
