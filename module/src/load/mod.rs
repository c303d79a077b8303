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
//! - [`field`]: the command, and the loader's callback for a field. [`strings`]: the keys. [`runs`]: many short ones at
//!   a time.
//!
//! Conditions that this relies on:
//!
//! - A field's words refer only to memory that is complete: nothing here waits. The agent checks that it *still* was
//!   complete when it had been copied, and sends the end of the snapshot only if so.
//! - An error ends the load as a broken link does: the server empties itself and asks again. That is true only of a
//!   server that loads from its link; a server that loads from a file exits on any error. Hence the checks in
//!   `REMORA.LOAD`. Besides, the agent sends nothing that such a server could begin to load before we have counted the
//!   first field.

pub(crate) mod field;
mod runs;
mod strings;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use remora_redis::rdb::reference::TICKET_BYTES;
use remora_table::LoadPage;

use self::strings::Strings;
use crate::api::{Context, EventHandler, OwnContext, Timer, TimerId};

/// Registers type and events. Only while the module is being loaded.
pub(crate) fn register(context: &Context<'_>) -> bool {
    let made = crate::api::register_aux::<field::References>(context) && context.subscribe::<Loading>();
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
