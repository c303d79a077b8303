//! Callbacks of the server: C entry points, each of which creates handles, calls a trait and stops panics.
//!
//! A panic that leaves an `extern "C"` function would end the whole server. [`guard`] stops it: the command is answered
//! with an error, the event has no effect, and the panic's text is on the server's standard error, which is its log
//! file.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use super::functions::{
    ERR, OK, RawContext, RawEvent, RawIo, RawKey, RawString, RawTypeMethods, TYPE_METHODS_VERSION, server,
};
use super::key::{Key, StrRef};
use super::{Context, Cursor};

/// Runs `work`; returns `otherwise` if it panics.
pub(crate) fn guard<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    // Unwind safety: what `work` borrows belongs to this callback, or is behind a mutex that recovers from poison.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

/// A command of this module.
pub(crate) trait Command {
    /// Its name in lower case.
    const NAME: &'static CStr;
    /// The flags of the command, in the server's words.
    const FLAGS: &'static CStr;

    /// Replies once. `arguments`: without the command's name.
    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]);
}

/// # Safety
/// Called by the server, with what its API promises: a context, and `count` strings, all alive during the call.
pub(super) unsafe extern "C" fn command_entry<C: Command>(
    context: *mut RawContext,
    arguments: *mut *mut RawString,
    count: c_int,
) -> c_int {
    let (Some(context), Some(arguments)) = (NonNull::new(context), NonNull::new(arguments)) else { return ERR };
    // SAFETY: Alive during the call, and the server calls commands on its main thread.
    let context = unsafe { Context::new(context) };
    // SAFETY: `count` pointers are there, none of them null, to strings that live during the call; a `StrRef` is such a
    // pointer.
    let arguments: &[StrRef<'_>] =
        unsafe { std::slice::from_raw_parts(arguments.as_ptr().cast(), usize::try_from(count).unwrap_or(0)) };
    let answered = guard(false, || {
        C::run(&context, arguments.get(1..).unwrap_or_default());
        true
    });
    if !answered {
        context.reply_error("ERR remora: a bug of remora in this command; the server's log has the location");
    }
    OK
}

/// A handler of one kind of events.
pub(crate) trait EventHandler {
    /// `REDISMODULE_EVENT_*`.
    const EVENT: u64;

    /// `what`: `REDISMODULE_SUBEVENT_*`.
    fn handle(context: &Context<'_>, what: u64);
}

/// # Safety
/// Called by the server, with a context that lives during the call.
pub(super) unsafe extern "C" fn event_entry<H: EventHandler>(
    context: *mut RawContext,
    _event: RawEvent,
    what: u64,
    _data: *mut c_void,
) {
    let Some(context) = NonNull::new(context) else { return };
    // SAFETY: Alive during the call, and the server fires events on its main thread, or on the only thread of a fork
    // child.
    let context = unsafe { Context::new(context) };
    guard((), || H::handle(&context, what));
}

/// A timer's callback.
pub(crate) trait Timer {
    /// `number`: as given when the timer was set.
    fn fire(context: &Context<'_>, number: u64);
}

/// # Safety
/// Called by the server, with a context that lives during the call; `data` is a number.
pub(super) unsafe extern "C" fn timer_entry<T: Timer>(context: *mut RawContext, data: *mut c_void) {
    let Some(context) = NonNull::new(context) else { return };
    // SAFETY: Alive during the call, and timers fire on the server's main thread.
    let context = unsafe { Context::new(context) };
    guard((), || T::fire(&context, data.addr() as u64));
}

// The part of a snapshot that the server reads for a module type: our auxiliary field.

/// A snapshot being read, at our field.
pub(crate) struct Io<'s> {
    raw: NonNull<RawIo>,
    lender: PhantomData<&'s RawIo>,
}

impl Io<'_> {
    /// The next string; `None` if the snapshot breaks off.
    pub(crate) fn bytes(&self) -> Option<Vec<u8>> {
        let mut length = 0;
        // SAFETY: Alive during the callback (handle rule), and room for a length.
        let start = unsafe { (server().load_bytes)(self.raw.as_ptr(), &mut length) };
        if start.is_null() {
            return None;
        }
        // SAFETY: The server guarantees that `length` bytes are there.
        let bytes = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), length) }.to_vec();
        // SAFETY: Allocated by the server for us, freed once, not used again.
        unsafe { (server().free)(start.cast()) };
        (!self.is_broken()).then_some(bytes)
    }

    fn is_broken(&self) -> bool {
        // SAFETY: Alive during the callback (handle rule).
        unsafe { (server().is_io_error)(self.raw.as_ptr()) != 0 }
    }

    /// A context for this load.
    pub(crate) fn context(&self) -> Option<Context<'_>> {
        // SAFETY: As above. The server frees it with the object.
        let raw = unsafe { (server().context_of_io)(self.raw.as_ptr()) };
        // SAFETY: It lives as long as the object, which is borrowed; snapshots are loaded on the server's main thread.
        NonNull::new(raw).map(|raw| unsafe { Context::new(raw) })
    }
}

/// A module type that exists only for its auxiliary field: it has no values.
pub(crate) trait AuxLoad {
    /// Nine characters of A-Z, a-z, 0-9, `-` and `_`; a part of the file format.
    const TYPE_NAME: &'static CStr;
    /// Version of the field, below 1024.
    const ENCODING: u16;

    /// Reads the field. False ends the load: the server treats the snapshot as damaged.
    fn load(io: &Io<'_>, encoding: u16) -> bool;
}

/// Registers the type. Only while the module is being loaded. From then on the server does not unload the module.
pub(crate) fn register_aux<A: AuxLoad>(context: &Context<'_>) -> bool {
    let mut methods = RawTypeMethods {
        version: TYPE_METHODS_VERSION,
        rdb_load: Some(no_value),
        rdb_save: Some(save_nothing),
        aof_rewrite: Some(rewrite_nothing),
        mem_usage: None,
        digest: None,
        free: Some(free_nothing),
        aux_load: Some(aux_load_entry::<A>),
        aux_save: None,
        aux_save_triggers: 0,
        free_effort: None,
        unlink: None,
        copy: None,
        defrag: None,
    };
    // SAFETY: A living context, a zero-terminated name, methods of the stated version; the server copies them.
    let made =
        unsafe { (server().create_type)(context.raw(), A::TYPE_NAME.as_ptr(), c_int::from(A::ENCODING), &mut methods) };
    !made.is_null()
}

/// # Safety
/// Called by the server, with an object that lives during the call.
unsafe extern "C" fn aux_load_entry<A: AuxLoad>(io: *mut RawIo, encoding: c_int, _when: c_int) -> c_int {
    let Some(raw) = NonNull::new(io) else { return ERR };
    let io = Io { raw, lender: PhantomData };
    if guard(false, || A::load(&io, u16::try_from(encoding).unwrap_or(u16::MAX))) { OK } else { ERR }
}

/// The type has no values: a snapshot that contains one is not ours.
unsafe extern "C" fn no_value(_io: *mut RawIo, _encoding: c_int) -> *mut c_void {
    ptr::null_mut()
}

unsafe extern "C" fn save_nothing(_io: *mut RawIo, _value: *mut c_void) {}

unsafe extern "C" fn rewrite_nothing(_io: *mut RawIo, _key: *mut RawString, _value: *mut c_void) {}

unsafe extern "C" fn free_nothing(_value: *mut c_void) {}

// The elements of an open key's value, some at a time: of a list by their numbers, of a hash, a set or a sorted set by
// a scan of its table; and events of lists that have changed.

impl Key<'_> {
    /// Shows the element of that number of a list, from the tail if it is negative. False if there is none, or this is
    /// no list. One after the other they take no search.
    pub(crate) fn list_element(&mut self, number: c_long, show: impl FnOnce(&[u8])) -> bool {
        // SAFETY: An open key; the server checks its kind and the number.
        let Some(raw) = NonNull::new(unsafe { (server().list_get)(self.raw(), number) }) else { return false };
        // SAFETY: A string of ours, which lives until it is freed below.
        show(unsafe { StrRef::new(raw) }.as_bytes());
        // SAFETY: Ours, and freed once: a context without automatic memory has not kept it.
        unsafe { (server().free_string)(ptr::null_mut(), raw.as_ptr()) };
        true
    }

    /// Shows the elements of one step through a hash (field, value), a set (member, nothing) or a sorted set (member,
    /// score in decimal). False when the scan is complete. A value that is no table is shown in one step.
    pub(crate) fn scan_elements<F: FnMut(&[u8], &[u8])>(&self, cursor: &mut Cursor, show: F) -> bool {
        let mut showing = Showing { show, panicked: None };
        let data: *mut Showing<F> = &mut showing;
        // SAFETY: An open key and a living cursor. `data` stays valid through the call, and only `element_entry::<F>`
        // uses it, with its true type.
        let more = unsafe { (server().scan_key)(self.raw(), cursor.raw(), element_entry::<F>, data.cast()) != 0 };
        if let Some(panic) = showing.panicked {
            std::panic::resume_unwind(panic);
        }
        more
    }
}

/// What a scan passes through the server: a closure, and the panic that ended it.
struct Showing<F> {
    show: F,
    panicked: Option<Box<dyn Any + Send>>,
}

/// Callback of the server for one element.
///
/// # Safety
/// `data` points to a `Showing<F>` that nothing else uses meanwhile.
unsafe extern "C" fn element_entry<F: FnMut(&[u8], &[u8])>(
    _key: *mut RawKey,
    element: *mut RawString,
    value: *mut RawString,
    data: *mut c_void,
) {
    let Some(element) = NonNull::new(element) else { return };
    // SAFETY: Guaranteed by the caller.
    let Showing { show, panicked } = unsafe { &mut *data.cast::<Showing<F>>() };
    if panicked.is_some() {
        return;
    }
    // SAFETY: Owned by the server and alive during this call; the closure can't keep it longer.
    let element = unsafe { StrRef::new(element) };
    // SAFETY: As above. A set's element has no value.
    let value = NonNull::new(value).map(|value| unsafe { StrRef::new(value) });
    // Unwind safety: after a panic the closure is not called again.
    let shown = AssertUnwindSafe(|| show(element.as_bytes(), value.map_or(&[], |value| value.as_bytes())));
    *panicked = catch_unwind(shown).err();
}

/// Hears of every list that has changed, of clients, scripts and transactions, when it has.
pub(crate) trait ListEvents {
    /// `event`: the server's word for what was done to the list (`lpush`).
    fn changed(event: &[u8], key: StrRef<'_>);
}

/// # Safety
/// Called by the server on its main thread, with a zero-terminated text and a string that live during the call.
unsafe extern "C" fn list_entry<L: ListEvents>(
    _: *mut RawContext,
    _: c_int,
    event: *const c_char,
    key: *mut RawString,
) -> c_int {
    let Some(key) = NonNull::new(key).filter(|_| !event.is_null()) else { return OK };
    // SAFETY: Guaranteed by the caller.
    let event = unsafe { CStr::from_ptr(event) };
    // SAFETY: As above.
    let key = unsafe { StrRef::new(key) };
    guard((), || L::changed(event.to_bytes(), key));
    OK
}

impl Context<'_> {
    /// Subscribes to the events of lists. There is no way back on every server, so this is done once.
    pub(crate) fn subscribe_to_lists<L: ListEvents>(&self) -> bool {
        // SAFETY: A living context of this module; an entry of the right signature.
        unsafe { (server().subscribe_to_keys)(self.raw(), LIST_EVENTS, list_entry::<L>) == OK }
    }
}

/// `REDISMODULE_NOTIFY_LIST`.
const LIST_EVENTS: c_int = 1 << 4;
