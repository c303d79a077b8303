//! A sweep in its server: the filter of commands, the turns, and the end.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::commands::{Need, need};
use super::course::{Astray, Course, Place};
use super::feed::{Feed, FeedError};
use crate::api::{
    CommandFilter, Context, Cursor, EVENT_FLUSH, EVENT_MODULE_CHANGE, EVENT_ROLE_CHANGED, EVENT_SWAP, EventHandler,
    FilterId, KeyHash, KeyKind, LogLevel, Number, OwnContext, OwnedStr, StrRef, Timer, Words,
};
use crate::capture::record::{self, Age};
use crate::capture::shown;

/// The most of the main thread's time that the turns take, in percent.
pub(crate) static SHARE: Number =
    Number { name: c"sweep-share", default: 25, least: 1, most: 90, value: AtomicU64::new(25) };

/// Time between two turns: the shortest that the servers' timers have.
const TURN_MILLIS: u64 = 1;

/// The shortest and the longest turn. A server that is busy comes to its timers more seldom, and has turns that are
/// longer by as much.
const TURN_MIN: Duration = Duration::from_micros(100);
const TURN_MAX: Duration = Duration::from_millis(5);

/// Bytes of a string from which on a client would wait for its record for too long: some milliseconds.
const STRING_BYTES_MAX: usize = 4 << 20;

/// The same for the elements of another value, and for the memory that it takes.
const ELEMENTS_MAX: usize = 20_000;
const MEMORY_BYTES_MAX: i64 = 4 << 20;

/// How the sweeps of this server have ended, for INFO and `REMORA.STATUS`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    /// Keys of the last one that was done.
    pub(crate) keys: u64,
    /// Why the last one failed.
    pub(crate) error: String,
}

thread_local! {
    /// The sweep that is running. Only the server's main thread uses it. While it is borrowed, the server is doing what
    /// the sweep has told it, and its filter does nothing.
    static SWEEP: RefCell<Option<Sweep>> = const { RefCell::new(None) };
    /// What has happened to the server that ends the sweep.
    static INTERRUPTED: Cell<Option<&'static str>> = const { Cell::new(None) };
    static OUTCOMES: RefCell<Outcomes> = RefCell::new(Outcomes::default());
}

/// Whether a sweep is running.
pub(crate) fn is_busy() -> bool {
    SWEEP.with(|sweep| sweep.try_borrow().map_or(true, |sweep| sweep.is_some()))
}

pub(crate) fn outcomes() -> Outcomes {
    OUTCOMES.with_borrow(Outcomes::clone)
}

/// Ends the sweep if there is one.
pub(super) fn interrupt(why: &'static str) {
    INTERRUPTED.set(Some(why));
}

/// Counters of the server by which keys leave without a command.
#[derive(Clone, Copy)]
pub(super) struct Counts {
    expired: u64,
    evicted: u64,
}

impl Counts {
    pub(super) fn read(context: &Context<'_>) -> Option<Counts> {
        let info = context.server_info(c"stats")?;
        Some(Counts { expired: info.number(c"expired_keys")?, evicted: info.number(c"evicted_keys")? })
    }
}

/// How often a sweep looks whether keys were evicted. The snapshot would lack them: the server's counter is all that
/// tells of them.
const EVICTION_LOOK: Duration = Duration::from_millis(100);

/// Why a sweep ends before its end.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Astray(#[from] Astray),
    #[error(transparent)]
    Feed(#[from] FeedError),
    #[error("{0}")]
    Interrupted(&'static str),
    #[error("a client sent {0}, which changes keys that it does not name")]
    Command(String),
    #[error("the value of the key {key:?} of database {database} is too large to be written in one moment")]
    TooLarge { database: u32, key: String },
    #[error("the server did not dump the key {key:?} of database {database}: {text}")]
    NotDumped { database: u32, key: String, text: String },
    #[error("the database {0} cannot be selected")]
    NoDatabase(u32),
    #[error("the server evicted keys meanwhile: its memory is at maxmemory")]
    Evicted,
    #[error("maxmemory-policy was changed meanwhile")]
    OtherPolicy,
    #[error("the server does not report its counters")]
    NotReported,
    #[error("a bug of remora; the server's log has the location")]
    Bug,
}

/// What a scan says about a key.
struct Found {
    name: OwnedStr,
    place: Place,
    kind: KeyKind,
    length: usize,
    expires_at: Option<u64>,
    /// What a record would change: it uses the key.
    age: Age,
}

/// A sweep that is running.
pub(super) struct Sweep {
    course: Course,
    feed: Feed,
    own: OwnContext,
    hash: KeyHash,
    /// Of the turns.
    cursor: Cursor,
    /// Of looking a key up.
    seek: Cursor,
    filter: Option<FilterId>,
    counts: Counts,
    /// The server's `maxmemory-policy`.
    policy: String,
    /// When the sweep last looked for evicted keys.
    looked: Instant,
    /// The database that the next record belongs to without a word.
    database: Option<u32>,
    keys: u64,
    /// When the last turn ended.
    rested: Instant,
    trouble: Option<Trouble>,
}

impl Sweep {
    /// Begins a sweep, whose snapshot begins with `head`. `None` if the server takes no filter.
    pub(super) fn begin(
        context: &Context<'_>,
        own: OwnContext,
        hash: KeyHash,
        socket: OwnedFd,
        (course, counts, policy): (Course, Counts, String),
        head: &[u8],
    ) -> Option<()> {
        let mut feed = Feed::new(socket);
        feed.records().extend_from_slice(head);
        let (cursor, seek) = (Cursor::new(context), Cursor::new(context));
        let filter = Some(context.add_filter::<Filter>()?);
        let (database, keys, trouble) = (None, 0, None);
        let (looked, rested) = (Instant::now(), Instant::now());
        let sweep = Sweep {
            course,
            feed,
            own,
            hash,
            cursor,
            seek,
            filter,
            counts,
            policy,
            looked,
            database,
            keys,
            rested,
            trouble,
        };
        INTERRUPTED.set(None);
        SWEEP.set(Some(sweep));
        context.set_timer::<Turn>(TURN_MILLIS, 0);
        Some(())
    }

    fn is_sweeping(&self) -> bool {
        self.trouble.is_none() && self.course.current().is_some()
    }

    /// Does something that may end the sweep, also by a panic.
    fn attempt(&mut self, work: impl FnOnce(&mut Sweep) -> Result<(), Trouble>) {
        self.trouble = Some(Trouble::Bug);
        let done = INTERRUPTED.get().map_or(Ok(()), |why| Err(Trouble::Interrupted(why)));
        self.trouble = done.and_then(|()| work(self)).err();
    }

    /// A command is about to run.
    fn see(&mut self, words: &Words) -> Result<(), Trouble> {
        match need(words.len(), |at| words.get(at).map(|word| word.as_bytes())) {
            Need::Nothing => Ok(()),
            Need::End => {
                let name = words.get(0).map(|name| shown(name.as_bytes())).unwrap_or_default();
                Err(Trouble::Command(name))
            }
            Need::Keys => {
                let words = words.all();
                let mut places = Vec::new();
                self.own.command_keys(&words, |place| places.push(place));
                for name in places.into_iter().filter_map(|place| words.get(place)) {
                    self.settle(name.as_bytes())?;
                }
                Ok(self.feed.check()?)
            }
        }
    }

    /// Records a key ahead as it is now, in every database ahead that has it.
    fn settle(&mut self, name: &[u8]) -> Result<(), Trouble> {
        let hash = self.hash.of(name);
        for index in self.course.settle(Place::of_hash(hash), name)? {
            let Some(database) = self.course.databases().get(index).map(|database| database.number) else { continue };
            if let Some(found) = self.look_up(database, hash, name)? {
                self.record(index, database, &found)?;
            }
        }
        Ok(())
    }

    /// What a database has of that name. It changes nothing, not even a key that has expired: the command that is about
    /// to run does that.
    fn look_up(&mut self, database: u32, hash: u64, name: &[u8]) -> Result<Option<Found>, Trouble> {
        let Sweep { own, seek, hash: hashes, .. } = self;
        if !own.select(database) {
            return Err(Trouble::NoDatabase(database));
        }
        seek.seek(hash);
        let mut found = None;
        own.scan(seek, |shown, key| {
            if shown.as_bytes() == name {
                found = Some(Found::of(own, *hashes, shown, &key));
            }
        });
        Ok(found)
    }

    /// Takes some steps.
    fn turn(&mut self, until: Instant) -> Result<(), Trouble> {
        while let Some((index, database)) = self.course.current() {
            if self.feed.is_full() || Instant::now() >= until {
                return Ok(());
            }
            let Sweep { own, cursor, hash, .. } = self;
            if !own.select(database) {
                return Err(Trouble::NoDatabase(database));
            }
            let mut shown = Vec::new();
            let more = own.scan(cursor, |name, key| shown.push(Found::of(own, *hash, name, &key)));
            let next = if more { Place::of_cursor(cursor.position()) } else { None };
            for found in &shown {
                if self.course.shown(found.place, found.name.borrow().as_bytes(), next)? {
                    self.record(index, database, found)?;
                }
            }
            self.course.passed(next)?;
            if next.is_none() {
                self.cursor.seek(0);
            }
        }
        Ok(())
    }

    /// Writes the record of a key.
    fn record(&mut self, index: usize, database: u32, found: &Found) -> Result<(), Trouble> {
        let name = found.name.borrow();
        let key = || shown(name.as_bytes());
        if self.is_large(found)? {
            return Err(Trouble::TooLarge { database, key: key() });
        }
        let reply = self.own.call(c"DUMP", &[name]);
        let Some(reply) = reply else {
            return Err(Trouble::NotDumped { database, key: key(), text: "no reply".into() });
        };
        if let Some(text) = reply.error() {
            return Err(Trouble::NotDumped { database, key: key(), text });
        }
        let Some((kind, value)) = reply.as_bytes().and_then(record::dumped_value).and_then(<[u8]>::split_first) else {
            // It had expired, and is gone: the server has put that into its stream, or will.
            self.own.propagate(name);
            return Ok(());
        };
        let records = self.feed.records();
        if self.database != Some(database) {
            record::put_selected(records, database);
            self.database = Some(database);
        }
        // As the server's own saver: an age that the policy goes by.
        let counts = match found.age {
            Age::Idle(_) => self.policy.ends_with("-lru"),
            Age::Frequency(_) => self.policy.ends_with("-lfu"),
            Age::Unknown => false,
        };
        let age = if counts { found.age } else { Age::Unknown };
        record::put_key(records, found.expires_at, age, *kind, name.as_bytes());
        records.extend_from_slice(value);
        // The command has used the key, and nobody else has.
        if let Some(mut key) = self.own.open_untouched(name) {
            match found.age {
                Age::Idle(milliseconds) => key.set_idle_time(milliseconds),
                Age::Frequency(frequency) => key.set_frequency(frequency),
                Age::Unknown => {}
            }
        }
        self.course.recorded(index);
        self.keys += 1;
        Ok(())
    }

    /// Whether writing a value down would keep the server's clients waiting.
    fn is_large(&self, found: &Found) -> Result<bool, Trouble> {
        if found.kind == KeyKind::String {
            return Ok(found.length > STRING_BYTES_MAX);
        }
        if found.length > ELEMENTS_MAX {
            return Ok(true);
        }
        let usage = OwnedStr::new(&self.own, b"USAGE");
        let reply = self.own.call(c"MEMORY", &[usage.borrow(), found.name.borrow()]).ok_or(Trouble::NotReported)?;
        Ok(reply.integer().is_some_and(|bytes| bytes > MEMORY_BYTES_MAX))
    }

    /// Every key is passed: do the numbers agree?
    fn conclude(&mut self, context: &Context<'_>) -> Result<(), Trouble> {
        let now = self.look_for_evicted_keys(context)?;
        let policy = context.setting("maxmemory-policy").ok_or(Trouble::NotReported)?;
        if policy != self.policy {
            return Err(Trouble::OtherPolicy);
        }
        self.course.check(now.expired.saturating_sub(self.counts.expired))?;
        record::put_end(self.feed.records());
        self.feed.end(self.keys);
        Ok(())
    }

    fn look_for_evicted_keys(&mut self, context: &Context<'_>) -> Result<Counts, Trouble> {
        self.looked = Instant::now();
        let now = Counts::read(context).ok_or(Trouble::NotReported)?;
        if now.evicted == self.counts.evicted { Ok(now) } else { Err(Trouble::Evicted) }
    }

    fn remove_filter(&mut self, context: &Context<'_>) {
        if let Some(filter) = self.filter.take() {
            context.remove_filter(&filter);
        }
    }
}

impl Found {
    fn of(context: &Context<'_>, hash: KeyHash, name: StrRef<'_>, key: &crate::api::Key<'_>) -> Found {
        let name = OwnedStr::new(context, name.as_bytes());
        let place = Place::of_hash(hash.of(name.borrow().as_bytes()));
        let age = match (key.idle_time(), key.frequency()) {
            (Some(milliseconds), _) => Age::Idle(milliseconds),
            (None, Some(frequency)) => Age::Frequency(frequency),
            (None, None) => Age::Unknown,
        };
        Found { name, place, kind: key.kind(), length: key.length(), expires_at: key.expires_at(), age }
    }
}

/// Sees every command while a sweep is running.
struct Filter;

impl CommandFilter for Filter {
    fn see(words: &Words) {
        SWEEP.with(|sweep| {
            // Borrowed: the sweep itself makes the server run a command.
            let Ok(mut sweep) = sweep.try_borrow_mut() else { return };
            if let Some(sweep) = sweep.as_mut().filter(|sweep| sweep.is_sweeping()) {
                sweep.attempt(|sweep| sweep.see(words));
            }
        });
    }
}

/// The timer of the turns.
struct Turn;

impl Timer for Turn {
    fn fire(context: &Context<'_>, number: u64) {
        SWEEP.with(|cell| {
            let Ok(mut running) = cell.try_borrow_mut() else { return };
            let Some(sweep) = running.as_mut() else { return };
            if let Some(ended) = sweep_on(context, sweep) {
                sweep.remove_filter(context);
                *running = None;
                conclude(context, ended);
            } else {
                context.set_timer::<Turn>(TURN_MILLIS, number);
            }
        });
    }
}

/// One turn. Returns how the sweep has ended, if it has: the number of its keys, or why it failed.
fn sweep_on(context: &Context<'_>, sweep: &mut Sweep) -> Option<Result<u64, String>> {
    let share = u32::try_from(SHARE.get().min(99)).unwrap_or(1);
    let turn = sweep.rested.elapsed() * share / (100 - share);
    let until = Instant::now() + turn.clamp(TURN_MIN, TURN_MAX);
    if sweep.is_sweeping() {
        if sweep.looked.elapsed() >= EVICTION_LOOK {
            sweep.attempt(|sweep| sweep.look_for_evicted_keys(context).map(drop));
        }
        if sweep.trouble.is_none() {
            sweep.attempt(|sweep| sweep.turn(until));
        }
        if sweep.trouble.is_none() && sweep.course.current().is_none() {
            sweep.remove_filter(context);
            sweep.attempt(|sweep| sweep.conclude(context));
        }
    }
    sweep.rested = Instant::now();
    let sent = match &sweep.trouble {
        Some(trouble) => return Some(Err(trouble.to_string())),
        None => sweep.feed.send(),
    };
    match sent {
        Err(error) => Some(Err(error.to_string())),
        Ok(true) if sweep.course.current().is_none() => Some(Ok(sweep.keys)),
        Ok(_) => None,
    }
}

fn conclude(context: &Context<'_>, ended: Result<u64, String>) {
    OUTCOMES.with_borrow_mut(|outcomes| match ended {
        Ok(keys) => {
            outcomes.done += 1;
            outcomes.keys = keys;
        }
        Err(why) => {
            context.log(LogLevel::Warning, &format!("remora: a sweep has ended before its end: {why}"));
            outcomes.failed += 1;
            outcomes.error = why;
        }
    });
}

macro_rules! interruptions {
    ($($(#[$doc:meta])* $name:ident = $event:expr, $why:literal;)*) => {
        $($(#[$doc])*
        pub(crate) struct $name;

        impl EventHandler for $name {
            const EVENT: u64 = $event;

            fn handle(_context: &Context<'_>, _what: u64) {
                interrupt($why);
            }
        })*
    };
}

interruptions! {
    /// `FLUSHALL`, `FLUSHDB`, `DEBUG RELOAD`, a full sync.
    Flushed = EVENT_FLUSH, "a database was emptied meanwhile";
    /// `REPLICAOF`, a fail-over.
    RoleChanged = EVENT_ROLE_CHANGED, "the server has become a replica, or a primary";
    /// `SWAPDB`.
    Swapped = EVENT_SWAP, "databases were swapped meanwhile";
    /// `MODULE LOAD`, `MODULE UNLOAD`.
    ModulesChanged = EVENT_MODULE_CHANGE, "a module was loaded or unloaded meanwhile";
}
