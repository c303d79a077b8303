//! A sweep in its server: the filter of commands, the turns, and the end.

use std::cell::{Cell, RefCell};
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::Need;
use super::feed::{Astray, Course, Feed, FeedError, Place};
use super::large::{End, Large, Lost, MOMENT_ELEMENTS_MAX, Shape, Show, State, Value};
use super::need;
use super::touch;
use crate::api::{
    CommandFilter, Context, Cursor, EVENT_FLUSH, EVENT_MODULE_CHANGE, EVENT_ROLE_CHANGED, EVENT_SWAP, EventHandler,
    FilterId, Key, KeyHash, KeyKind, ListEvents, LogLevel, Number, OwnContext, OwnedStr, StrRef, Timer, Words,
};
use crate::capture::shown;
use crate::capture::walk::{self, Age};

/// The most of the main thread's time that the turns take, in percent.
pub(crate) static SHARE: Number =
    Number { name: c"sweep-share", default: 25, least: 1, most: 90, value: AtomicU64::new(25) };

/// Time between two turns: the shortest that the servers' timers have.
const TURN_MILLIS: u64 = 1;

/// The shortest and the longest turn. A server that is busy comes to its timers more seldom, and has turns that are
/// longer by as much.
const TURN_MIN: Duration = Duration::from_micros(100);
const TURN_MAX: Duration = Duration::from_millis(5);

/// Elements, and bytes of memory, from which on a value is taken in pieces: a `DUMP` of it would take a millisecond.
const LARGE_ELEMENTS: u64 = 4_000;
const LARGE_BYTES: u64 = 256 << 10;

/// Bytes of a string from which on it is copied in pieces: a `DUMP`, which compresses it, would take a millisecond.
const LARGE_STRING_BYTES: u64 = 64 << 10;

/// Bytes of a value that is not taken in pieces, from which on a `DUMP` of it would take more than some milliseconds: 1
/// MiB took 5 to 13, and 4 MiB 23 to 70 (streams and hashes, of which each value is compressed).
const DUMP_BYTES_MAX: u64 = 1 << 20;

/// The longest that a turn takes pieces of large values.
const PIECES: Duration = Duration::from_millis(1);

/// The longest that a turn sends for: an agent may take as fast as the server gives.
const SEND_MAX: Duration = Duration::from_millis(1);

/// Bytes of large values that are being taken, or wait for the agent. They are kept until they are whole, since a key
/// may expire before that.
const TAKEN_BYTES_MAX: usize = 64 << 20;

/// Bytes of a string beyond which its record is sent before it is whole, also if its key may expire before that, which
/// ends the sweep. One that cannot expire is always sent so: it takes no memory.
const KEPT_STRING_BYTES_MAX: usize = 32 << 20;

/// How the sweeps of this server have ended, for INFO and `REMORA.STATUS`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    /// Keys of the last one that was done.
    pub(crate) keys: u64,
    /// Those among them that were taken in pieces.
    pub(crate) large: u64,
    /// Why the last one failed.
    pub(crate) error: String,
}

thread_local! {
    /// The sweep that is running. Only the server's main thread uses it. While it is borrowed, the server is doing what
    /// the sweep has told it, and its filter does nothing.
    static SWEEP: RefCell<Option<Sweep>> = const { RefCell::new(None) };
    /// What has happened to the server that ends the sweep.
    static INTERRUPTED: Cell<Option<&'static str>> = const { Cell::new(None) };
    /// Whether the server tells which lists have changed. It does so until it unloads the module.
    static LISTENS: Cell<bool> = const { Cell::new(false) };
    static OUTCOMES: RefCell<Outcomes> = RefCell::new(Outcomes::default());
}

/// Whether a sweep is running.
pub(crate) fn is_busy() -> bool {
    SWEEP.with(|sweep| sweep.try_borrow().map_or(true, |sweep| sweep.is_some()))
}

pub(crate) fn outcomes() -> Outcomes {
    OUTCOMES.with_borrow(Outcomes::clone)
}

/// The module has been loaded, perhaps anew: a server drops the subscriptions of a module that it unloads, and the
/// library may have stayed in memory.
pub(crate) fn loaded() {
    LISTENS.set(false);
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
    #[error(
        "the value of the key {key:?} of database {database} is too large to be written in one moment: {elements} elements, {} KiB",
        .bytes >> 10
    )]
    TooLarge { database: u32, key: String, elements: u64, bytes: u64 },
    #[error("the value of the key {key:?} of database {database} was not written in pieces: {lost}")]
    Lost { database: u32, key: String, lost: Lost },
    #[error("large values that are being written have more than {} MiB", TAKEN_BYTES_MAX >> 20)]
    TooManyLarge,
    #[error("the server does not tell which lists have changed")]
    NoEvents,
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

/// A large value that is being taken.
struct Taking {
    /// Of its database.
    index: usize,
    database: u32,
    name: OwnedStr,
    hash: u64,
    /// The record up to the value, and nothing when that is sent.
    head: Vec<u8>,
    sending: Sending,
    value: Large,
}

/// When the record of a large value is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sending {
    /// When it is whole.
    Whole,
    /// In parts, from when it is the first in line.
    Parts,
    /// In parts, and the first part is sent. Only the first in line.
    UnderWay,
}

/// How a value is written down.
#[derive(Clone, Copy, Debug)]
enum Size {
    /// In one moment.
    Moment,
    /// In pieces.
    Pieces(Shape, u64),
    /// Bytes.
    TooLarge(u64),
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
    /// Of the elements of a value.
    elements: Cursor,
    /// Large values that are being taken.
    taking: Vec<Taking>,
    filter: Option<FilterId>,
    counts: Counts,
    /// The server's `maxmemory-policy`.
    policy: String,
    /// When the sweep last looked for evicted keys.
    looked: Instant,
    /// The database that the next record belongs to without a word.
    database: Option<u32>,
    keys: u64,
    /// Keys among them that were taken in pieces.
    large: u64,
    /// When the last turn ended.
    rested: Instant,
    /// Whether the mark of a whole snapshot is written.
    is_whole: bool,
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
        let [cursor, seek, elements] = std::array::from_fn(|_| Cursor::new(context));
        if !LISTENS.get() {
            LISTENS.set(context.subscribe_to_lists::<Lists>());
        }
        let filter = Some(context.add_filter::<Filter>()?);
        let (database, keys, large, is_whole, trouble) = (None, 0, 0, false, None);
        let (looked, rested) = (Instant::now(), Instant::now());
        let sweep = Sweep {
            course,
            feed,
            own,
            hash,
            cursor,
            seek,
            elements,
            taking: Vec::new(),
            filter,
            counts,
            policy,
            looked,
            database,
            keys,
            large,
            rested,
            is_whole,
            trouble,
        };
        INTERRUPTED.set(None);
        SWEEP.set(Some(sweep));
        context.set_timer::<Turn>(TURN_MILLIS, 0);
        Some(())
    }

    fn is_sweeping(&self) -> bool {
        self.trouble.is_none() && !self.is_whole
    }

    /// Whether every key is passed, and every large value is whole.
    fn is_through(&self) -> bool {
        self.course.current().is_none() && self.taking.is_empty()
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
                    self.touch(name.as_bytes(), &words)?;
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

    /// Takes of the large values of that name what a command with these words may change.
    fn touch(&mut self, name: &[u8], words: &[StrRef<'_>]) -> Result<(), Trouble> {
        let word = |at: usize| words.get(at).map(StrRef::as_bytes);
        let mut at = 0;
        while let Some(taking) = self.taking.get(at) {
            if taking.name.borrow().as_bytes() != name {
                at += 1;
                continue;
            }
            let state =
                self.take(at, |value, shown| value.touched(shown, touch(words.len(), word), words.len(), word))?;
            at += usize::from(state == State::Open);
        }
        Ok(())
    }

    /// Takes more of a large value, and lets go of it if it is whole or has expired.
    fn take(
        &mut self,
        at: usize,
        work: impl FnOnce(&mut Large, Option<&mut dyn Value>) -> Result<State, Lost>,
    ) -> Result<State, Trouble> {
        let Sweep { own, seek, elements, hash: hashes, taking, .. } = self;
        let Some(Taking { database, name, hash, value, .. }) = taking.get_mut(at) else { return Ok(State::Gone) };
        let (database, name) = (*database, name.borrow());
        if !own.select(database) {
            return Err(Trouble::NoDatabase(database));
        }
        let (mut work, mut done) = (Some(work), None);
        seek.seek(*hash);
        own.scan(seek, |shown, key| {
            if shown.as_bytes() == name.as_bytes()
                && let Some(work) = work.take()
            {
                done = Some(work(value, Some(&mut Shown { key, elements: &mut *elements, hash: *hashes })));
            }
        });
        if let Some(work) = work {
            done = Some(work(value, None));
        }
        let lost = |lost| Trouble::Lost { database, key: shown(name.as_bytes()), lost };
        let state = done.ok_or(Trouble::Bug)?.map_err(lost)?;
        if state != State::Open {
            let taken = self.taking.remove(at);
            if state == State::Whole {
                self.finish(taken);
            } else if taken.sending == Sending::UnderWay {
                let key = shown(taken.name.borrow().as_bytes());
                return Err(Trouble::Lost { database: taken.database, key, lost: Lost::Expired });
            }
        }
        let taken: usize = self.taking.iter().map(|taking| taking.value.bytes()).sum();
        if taken + self.feed.large_bytes() > TAKEN_BYTES_MAX {
            return Err(Trouble::TooManyLarge);
        }
        Ok(state)
    }

    /// Writes the record of a large value that is whole.
    fn finish(&mut self, taken: Taking) {
        if taken.sending == Sending::UnderWay {
            self.feed.part(taken.value.into_rest());
            self.feed.end_parts();
        } else {
            Self::records(&mut self.feed, &mut self.database, taken.database).extend_from_slice(&taken.head);
            self.feed.large(taken.value.into_record());
        }
        self.course.recorded(taken.index);
        self.keys += 1;
        self.large += 1;
    }

    /// Takes another piece of the large value that is the first in line, and sends it if it may be sent.
    fn take_piece(&mut self, until: Instant) -> Result<(), Trouble> {
        let Sweep { feed, database: selected, taking, .. } = self;
        if let Some(first) = taking.first_mut().filter(|first| first.sending == Sending::Parts) {
            let records = Self::records(feed, selected, first.database);
            records.append(&mut first.head);
            records.extend_from_slice(&first.value.head());
            feed.begin_parts();
            first.sending = Sending::UnderWay;
        }
        let state = self.take(0, |value, shown| value.piece(shown, enough(until)))?;
        let Sweep { feed, taking, .. } = self;
        if state == State::Open
            && let Some(first) = taking.first_mut().filter(|first| first.sending == Sending::UnderWay)
        {
            feed.part(first.value.give());
        }
        Ok(())
    }

    /// A list has changed.
    fn hear(&mut self, end: End, name: &[u8]) -> Result<(), Trouble> {
        for at in 0..self.taking.len() {
            if self.taking.get(at).is_some_and(|taking| taking.name.borrow().as_bytes() == name) {
                self.take(at, |value, shown| {
                    value.list_changed(end, shown.map_or(0, |shown| shown.length()));
                    Ok(State::Open)
                })?;
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
        let end_of_pieces = until.min(Instant::now() + PIECES);
        loop {
            let end = if self.taking.is_empty() { until } else { end_of_pieces };
            if self.feed.is_full() || Instant::now() >= end {
                return Ok(());
            }
            if !self.taking.is_empty() {
                self.take_piece(end_of_pieces)?;
                continue;
            }
            let Some((index, database)) = self.course.current() else { return Ok(()) };
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
    }

    /// The feed, with the records that follow in this database. `selected`: that of those before.
    fn records<'f>(feed: &'f mut Feed, selected: &mut Option<u32>, database: u32) -> &'f mut Vec<u8> {
        let records = feed.records();
        if *selected != Some(database) {
            walk::put_selected(records, database);
            *selected = Some(database);
        }
        records
    }

    /// Writes the record of a key.
    fn record(&mut self, index: usize, database: u32, found: &Found) -> Result<(), Trouble> {
        let name = found.name.borrow();
        let key = || shown(name.as_bytes());
        match self.size(database, found)? {
            Size::Moment => {}
            Size::TooLarge(bytes) => {
                // It may have expired as it was looked at.
                self.own.propagate(name);
                return Err(Trouble::TooLarge { database, key: key(), elements: found.length as u64, bytes });
            }
            Size::Pieces(shape, memory) => {
                self.begin_to_take(index, database, found, shape, memory);
                return Ok(());
            }
        }
        let reply = self.own.call(c"DUMP", &[name]);
        let Some(reply) = reply else {
            return Err(Trouble::NotDumped { database, key: key(), text: "no reply".into() });
        };
        if let Some(text) = reply.error() {
            return Err(Trouble::NotDumped { database, key: key(), text });
        }
        let Some((kind, value)) = reply.as_bytes().and_then(walk::dumped_value).and_then(<[u8]>::split_first) else {
            // It had expired, and is gone: the server has put that into its stream, or will.
            self.own.propagate(name);
            return Ok(());
        };
        let age = self.saved_age(found);
        let Sweep { feed, database: selected, .. } = self;
        let records = Self::records(feed, selected, database);
        walk::put_key(records, found.expires_at, age, *kind, name.as_bytes());
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

    /// A key's age as the server's own saver writes it: the one that the policy goes by.
    fn saved_age(&self, found: &Found) -> Age {
        let counts = match found.age {
            Age::Idle(_) => self.policy.ends_with("-lru"),
            Age::Frequency(_) => self.policy.ends_with("-lfu"),
            Age::Unknown => false,
        };
        if counts { found.age } else { Age::Unknown }
    }

    fn begin_to_take(&mut self, index: usize, database: u32, found: &Found, shape: Shape, memory: u64) {
        let name = found.name.borrow();
        let mut head = Vec::new();
        walk::put_key(&mut head, found.expires_at, self.saved_age(found), shape.record_type(), name.as_bytes());
        let value = Large::new(shape, found.length as u64, memory, found.expires_at);
        let (name, hash) = (OwnedStr::new(&self.own, name.as_bytes()), self.hash.of(name.as_bytes()));
        let is_kept = shape != Shape::String || (found.expires_at.is_some() && found.length <= KEPT_STRING_BYTES_MAX);
        let sending = if is_kept { Sending::Whole } else { Sending::Parts };
        self.taking.push(Taking { index, database, name, hash, head, sending, value });
    }

    /// How a value is written down, so that no client of the server waits for long.
    fn size(&self, database: u32, found: &Found) -> Result<Size, Trouble> {
        if found.kind == KeyKind::String {
            let bytes = found.length as u64;
            return Ok(if bytes > LARGE_STRING_BYTES { Size::Pieces(Shape::String, bytes) } else { Size::Moment });
        }
        let usage = OwnedStr::new(&self.own, b"USAGE");
        let reply = self.own.call(c"MEMORY", &[usage.borrow(), found.name.borrow()]).ok_or(Trouble::NotReported)?;
        let Some(memory) = reply.integer().and_then(|bytes| u64::try_from(bytes).ok()) else {
            // It has expired: what writes it down finds that.
            return Ok(Size::Moment);
        };
        let length = found.length as u64;
        if length <= LARGE_ELEMENTS && memory <= LARGE_BYTES {
            return Ok(Size::Moment);
        }
        Ok(match self.shape(database, found) {
            Some(_) if memory > TAKEN_BYTES_MAX as u64 => Size::TooLarge(memory),
            Some(shape) => {
                if shape == Shape::List && !LISTENS.get() {
                    return Err(Trouble::NoEvents);
                }
                Size::Pieces(shape, memory)
            }
            None if length > MOMENT_ELEMENTS_MAX || memory > DUMP_BYTES_MAX => Size::TooLarge(memory),
            None => Size::Moment,
        })
    }

    /// The shape of a value that can be taken in pieces, and then has nothing but its elements.
    fn shape(&self, database: u32, found: &Found) -> Option<Shape> {
        let encoding = OwnedStr::new(&self.own, b"ENCODING");
        let reply = self.own.call(c"OBJECT", &[encoding.borrow(), found.name.borrow()])?;
        match (found.kind, reply.as_bytes()?) {
            (KeyKind::List, b"quicklist") => Some(Shape::List),
            (KeyKind::Set, b"hashtable") => Some(Shape::Set),
            (KeyKind::SortedSet, b"skiplist") => Some(Shape::SortedSet),
            (KeyKind::Hash, b"hashtable") => (!self.may_have_expiring_fields(database)?).then_some(Shape::Hash),
            _ => None,
        }
    }

    /// Whether a hash of that database may have fields that expire, whose times a scan does not show.
    fn may_have_expiring_fields(&self, database: u32) -> Option<bool> {
        let info = self.own.server_info(c"keyspace")?;
        let line = info.get(&CString::new(format!("db{database}")).ok()?)?.to_owned();
        let hashes = line.split(',').find_map(|pair| {
            pair.strip_prefix("subexpiry=").or_else(|| pair.strip_prefix("keys_with_volatile_items="))
        });
        if let Some(hashes) = hashes {
            return Some(hashes != "0");
        }
        // A server that has no such fields has no number of them either.
        let words = ["INFO", "hexpire"].map(|word| OwnedStr::new(&self.own, word.as_bytes()));
        let reply = self.own.call(c"COMMAND", &words.each_ref().map(OwnedStr::borrow))?;
        Some(reply.element(0)?.len() > 0)
    }

    /// Every key is passed: do the numbers agree?
    fn conclude(&mut self, context: &Context<'_>) -> Result<(), Trouble> {
        let now = self.look_for_evicted_keys(context)?;
        let policy = context.setting("maxmemory-policy").ok_or(Trouble::NotReported)?;
        if policy != self.policy {
            return Err(Trouble::OtherPolicy);
        }
        self.course.check(now.expired.saturating_sub(self.counts.expired))?;
        walk::put_end(self.feed.records());
        self.feed.end(self.keys);
        self.is_whole = true;
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

/// The value of a key as the server shows it.
struct Shown<'k, 'c> {
    key: Key<'k>,
    elements: &'c mut Cursor,
    hash: KeyHash,
}

impl Value for Shown<'_, '_> {
    fn expires_at(&self) -> Option<u64> {
        self.key.expires_at()
    }

    fn length(&self) -> u64 {
        self.key.length() as u64
    }

    fn at(&mut self, number: i64, show: &mut dyn FnMut(&[u8])) -> bool {
        self.key.list_element(number, show)
    }

    fn bytes(&mut self, from: u64, bytes: u64, show: &mut dyn FnMut(&[u8])) -> bool {
        // A string that is large is a plain one, and is shown where it is.
        let shown = self.key.string().and_then(|whole| {
            let (from, bytes) = (usize::try_from(from).ok()?, usize::try_from(bytes).ok()?);
            whole.get(from..from.checked_add(bytes)?)
        });
        shown.inspect(|bytes| show(bytes)).is_some()
    }

    fn hash(&self, element: &[u8]) -> u64 {
        self.hash.of(element)
    }

    fn step(&mut self, cursor: u64, show: &mut Show<'_>) -> Option<u64> {
        let Shown { key, elements, hash } = self;
        elements.seek(cursor);
        let more = key.scan_elements(elements, |element, of| show(hash.of(element), element, of));
        more.then(|| elements.position())
    }
}

/// Whether that moment has come. The clock is looked at after some steps or bytes.
fn enough(until: Instant) -> impl FnMut(usize) -> bool {
    let (mut steps, mut looked_at) = (0_u32, 0);
    move |bytes| {
        steps += 1;
        let looks = steps.is_multiple_of(STEPS_OF_A_LOOK) || bytes.abs_diff(looked_at) > BYTES_OF_A_LOOK;
        if looks {
            looked_at = bytes;
        }
        looks && Instant::now() >= until
    }
}

/// Steps between two looks at the clock, and bytes: some microseconds.
const STEPS_OF_A_LOOK: u32 = 16;
const BYTES_OF_A_LOOK: usize = 16 << 10;

/// Hears which lists have changed.
struct Lists;

impl ListEvents for Lists {
    fn changed(event: &[u8], key: StrRef<'_>) {
        let Some(end) = End::of_event(event) else { return };
        SWEEP.with(|sweep| {
            // Borrowed: what the sweep makes the server do changes no list.
            let Ok(mut sweep) = sweep.try_borrow_mut() else { return interrupt("a list was changed by a sweep") };
            let sweep = sweep.as_mut().filter(|sweep| sweep.is_sweeping() && !sweep.taking.is_empty());
            if let Some(sweep) = sweep {
                sweep.attempt(|sweep| sweep.hear(end, key.as_bytes()));
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

/// One turn. Returns how the sweep has ended, if it has: the number of its keys and of the
/// large ones among them, or why it failed.
fn sweep_on(context: &Context<'_>, sweep: &mut Sweep) -> Option<Result<(u64, u64), String>> {
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
        if sweep.trouble.is_none() && sweep.is_through() {
            sweep.remove_filter(context);
            sweep.attempt(|sweep| sweep.conclude(context));
        }
    }
    sweep.rested = Instant::now();
    let sent = match &sweep.trouble {
        Some(trouble) => return Some(Err(trouble.to_string())),
        None => sweep.feed.send(Instant::now() + SEND_MAX),
    };
    match sent {
        Err(error) => Some(Err(error.to_string())),
        Ok(true) if sweep.is_whole => Some(Ok((sweep.keys, sweep.large))),
        Ok(_) => None,
    }
}

fn conclude(context: &Context<'_>, ended: Result<(u64, u64), String>) {
    OUTCOMES.with_borrow_mut(|outcomes| match ended {
        Ok((keys, large)) => {
            outcomes.done += 1;
            (outcomes.keys, outcomes.large) = (keys, large);
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
