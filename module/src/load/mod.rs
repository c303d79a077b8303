//! Load: long strings of a snapshot, out of memory that an agent has shown us, while the server loads the rest itself.
//!
//! The replica's agent plays the primary, and passes a snapshot on to its server. Strings that are long enough it leaves out: in
//! their place it puts fields of ours, which say where in memory their bytes lie ([`remora_redis::rdb::reference`]). The server's own
//! loader meets such a field and calls us; we make the key and copy its bytes, once.
//!
//! ```text
//!   agent ──REMORA.LOAD──▶ arm          takes the memory, checks that the server will load from the link, empties it
//!         ──snapshot─────▶ the server   … keys … │ our field │ … keys … │ our field │ … end mark
//!                                                    └──▶ field ──▶ strings ──▶ OpenKey, the bytes, expiry
//!         ◀──tally────────────────────────────────────────┘ one more is done
//! ```
//!
//! - [`arm`]: the command. [`field`]: what the server calls when it meets a field. [`strings`]: the keys.
//!
//! What is relied on:
//!
//! - A field's words name only memory that is whole: nothing here waits for anybody. Whether it *still* was whole when it had been
//!   copied is looked at by the agent, which sends the end of the snapshot only if so.
//! - An error ends the loading as a broken link does: the server empties itself and asks again. That is true only of a server that
//!   loads from its link: one that loads from a file ends itself on any error. Hence the checks when armed; and the agent sends
//!   nothing that such a server could begin to load before we have counted the first field.

pub(crate) mod arm;
mod field;
mod strings;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use remora_redis::rdb::reference::TICKET_BYTES;
use remora_table::LoadPage;

use self::strings::Strings;
use crate::api::{Context, EventHandler, OwnContext, Timer, TimerId};

/// Makes type and events known. Only while the module is being loaded.
pub(crate) fn register(context: &Context<'_>) -> bool {
    let made = crate::api::register_aux::<field::References>(context) && context.subscribe::<Loading>();
    REGISTERED.store(made, Relaxed);
    made
}

/// Whether this half is there: not in a module that was loaded for capture only.
pub(crate) fn is_registered() -> bool {
    REGISTERED.load(Relaxed)
}

static REGISTERED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// What is armed or under way. The server's main thread alone gets here.
    static ARMED: RefCell<Option<Armed>> = const { RefCell::new(None) };
}

/// Memory that we have been shown, and who will refer to it.
struct Armed {
    ticket: [u8; TICKET_BYTES],
    strings: Strings,
    page: LoadPage,
    /// For keys: what the server passes to a field has no database.
    context: OwnContext,
    /// The first field has come.
    begun: bool,
    /// Rings when nobody came.
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

/// What has been loaded so since the module was, for INFO.
pub(crate) static COUNTS: Counts =
    Counts { loads: AtomicU64::new(0), keys: AtomicU64::new(0), bytes: AtomicU64::new(0) };

/// See [`COUNTS`].
pub(crate) struct Counts {
    /// Loadings that came to their end.
    pub(crate) loads: AtomicU64,
    /// Keys made out of shown memory.
    pub(crate) keys: AtomicU64,
    /// Bytes of their values.
    pub(crate) bytes: AtomicU64,
}

/// What we are doing, in a word.
pub(crate) fn state() -> &'static str {
    ARMED.with(|armed| match armed.borrow().as_ref() {
        _ if BUSY.load(Relaxed) => "loading",
        Some(armed) if armed.begun => "loading",
        Some(_) => "armed",
        None => "idle",
    })
}

/// A field is being read: what is armed has been taken out for that, and others may ask meanwhile.
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

/// The server begins or ends to load something.
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
        armed.page.refuse("the loading has ended");
    }
}

/// Nobody came.
struct Expired;

impl Timer for Expired {
    fn fire(context: &Context<'_>, _number: u64) {
        if let Some(armed) = Armed::take() {
            armed.page.refuse("no loading began in time");
            context.log(crate::api::LogLevel::Warning, "the memory that was shown is let go: no loading began in time");
        }
    }
}
