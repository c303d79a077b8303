//! This module as the server sees it: the two symbols that it looks up, its section of INFO, and its settings.
//!
//! It calls back by C entry points, each of which creates handles, calls a trait and stops panics.
//!
//! A panic that leaves an `extern "C"` function would end the whole server. [`guard`] stops it: the command is answered
//! with an error, the event has no effect, and the panic's text is on the server's standard error, which is its log
//! file.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_long, c_longlong, c_void};
use std::io::Write;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::key::{
    API_VERSION, ERR, Functions, GetApi, Key, OK, RawContext, RawEvent, RawInfo, RawIo, RawKey, RawString,
    RawTypeMethods, StrRef, TYPE_METHODS_VERSION, keep, server,
};
use super::{Context, Cursor, without_zeros};

// The two symbols that a server looks up in a module.

/// This crate as a module of a server.
pub(crate) trait Module {
    /// Its name in `MODULE LIST`, and the prefix of its commands.
    const NAME: &'static CStr;
    /// Its version, as one number.
    const VERSION: u16;

    /// Registers everything. False refuses the load; the log says why.
    fn load(context: &Context<'_>, arguments: &[StrRef<'_>]) -> bool;

    /// Whether the module may be unloaded now.
    fn unload(context: &Context<'_>) -> bool;
}

/// Called by the server to load the module.
///
/// # Safety
/// Called by the server as its API says: a context, and `count` strings, all alive during the call.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)] // called by its symbol, not through Rust
pub unsafe extern "C" fn RedisModule_OnLoad(context: *mut c_void, arguments: *mut *mut c_void, count: c_int) -> c_int {
    guard(ERR, || {
        // SAFETY: Guaranteed by the caller.
        let loaded = unsafe { load::<crate::Remora>(context.cast(), arguments.cast(), count) };
        if loaded { OK } else { ERR }
    })
}

/// Called by the server to unload the module.
///
/// # Safety
/// Called by the server, with a context that lives during the call.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)] // called by its symbol, not through Rust
pub unsafe extern "C" fn RedisModule_OnUnload(context: *mut c_void) -> c_int {
    let Some(context) = NonNull::new(context.cast::<RawContext>()) else { return ERR };
    // SAFETY: Alive during the call, which comes on the server's main thread.
    let context = unsafe { Context::new(context) };
    guard(ERR, || if <crate::Remora as Module>::unload(&context) { OK } else { ERR })
}

/// # Safety
/// As for [`RedisModule_OnLoad`].
unsafe fn load<M: Module>(context: *mut RawContext, arguments: *mut *mut RawString, count: c_int) -> bool {
    let Some(raw) = NonNull::new(context) else { return false };
    // SAFETY: A context begins with the address of the server's `GetApi`; that is how a module obtains it.
    let get_api = unsafe { raw.cast::<Option<GetApi>>().read() };
    let Some(get_api) = get_api else { return false };
    // SAFETY: It is the server's `GetApi`.
    match unsafe { Functions::look_up(get_api) } {
        Ok(functions) => keep(functions),
        Err(missing) => {
            // The server's log can't be written to yet; without a log file, standard error is where it goes. A server
            // whose standard error can't be written refuses the module without a word.
            let text = format!("remora: this server lacks {missing}: Redis 7.0 or Valkey 7.2 and later have it\n");
            let _ = std::io::stderr().write_all(text.as_bytes());
            return false;
        }
    }
    // SAFETY: A zero-terminated name.
    if unsafe { (server().is_module_name_busy)(M::NAME.as_ptr()) } != 0 {
        return false;
    }
    // SAFETY: A living context of a module that is being loaded, and a zero-terminated name, which is copied.
    unsafe { (server().set_module_attributes)(raw.as_ptr(), M::NAME.as_ptr(), c_int::from(M::VERSION), API_VERSION) };
    // SAFETY: Alive during the call, which comes on the server's main thread.
    let context = unsafe { Context::new(raw) };
    let arguments: &[StrRef<'_>] = match (NonNull::new(arguments), usize::try_from(count)) {
        // SAFETY: `count` pointers are there, none of them null, to strings that live during the call.
        (Some(first), Ok(count)) => unsafe { std::slice::from_raw_parts(first.as_ptr().cast(), count) },
        _ => &[],
    };
    M::load(&context, arguments)
}

// This module's section of INFO.

/// The provider of the section's content.
pub(crate) trait Informer {
    /// Writes the fields.
    fn inform(section: &InfoSection<'_>);
}

/// A section being written. The server adds the module's name before each field.
pub(crate) struct InfoSection<'s> {
    raw: NonNull<RawInfo>,
    lender: std::marker::PhantomData<&'s RawInfo>,
}

impl InfoSection<'_> {
    /// Writes a field with a text.
    pub(crate) fn text(&self, field: &CStr, value: &str) {
        let value = without_zeros(value);
        // SAFETY: Alive during the callback (handle rule); zero-terminated texts, which are copied.
        unsafe { (server().info_text)(self.raw.as_ptr(), field.as_ptr(), value.as_ptr()) };
    }

    /// Writes a field with a number.
    pub(crate) fn number(&self, field: &CStr, value: u64) {
        // SAFETY: As above.
        unsafe { (server().info_number)(self.raw.as_ptr(), field.as_ptr(), value) };
    }
}

/// # Safety
/// Called by the server, with an object that lives during the call.
pub(super) unsafe extern "C" fn info_entry<I: Informer>(info: *mut RawInfo, crashing: c_int) {
    // In a crash report it is not safe to call anything.
    if crashing != 0 {
        return;
    }
    let Some(raw) = NonNull::new(info) else { return };
    // SAFETY: Alive during the call; an empty name means that the section has the module's name.
    if unsafe { (server().info_section)(raw.as_ptr(), c"".as_ptr()) } != super::key::OK {
        // Another section was requested.
        return;
    }
    guard((), || I::inform(&InfoSection { raw, lender: std::marker::PhantomData }));
}

// The settings of this module in the server's CONFIG: `remora.<name>`. Each value is in an atomic of this module.

/// A setting with a number.
pub(crate) struct Number {
    /// Its name, without the module's prefix.
    pub(crate) name: &'static CStr,
    /// The default.
    pub(crate) default: u64,
    /// The minimum.
    pub(crate) least: u64,
    /// The maximum.
    pub(crate) most: u64,
    /// The value.
    pub(crate) value: AtomicU64,
}

impl Number {
    /// The present value.
    pub(crate) fn get(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Registers the setting. Only while the module is being loaded.
    pub(crate) fn register(&'static self, context: &Context<'_>) -> bool {
        let clamp = |number: u64| c_longlong::try_from(number).unwrap_or(c_longlong::MAX);
        let place = std::ptr::from_ref(&self.value).cast_mut().cast::<c_void>();
        // SAFETY: A living context; a zero-terminated name; entries of the right signature; a static that is only ever
        // used as the shared `AtomicU64` that it is.
        let made = unsafe {
            (server().register_number)(
                context.raw(),
                self.name.as_ptr(),
                clamp(self.default),
                MUTABLE,
                clamp(self.least),
                clamp(self.most),
                get_number,
                set_number,
                None,
                place,
            )
        };
        made == OK
    }
}

/// A setting with yes or no.
pub(crate) struct Flag {
    /// Its name, without the module's prefix.
    pub(crate) name: &'static CStr,
    /// The default.
    pub(crate) default: bool,
    /// The value.
    pub(crate) value: AtomicBool,
}

impl Flag {
    /// The present value.
    pub(crate) fn get(&self) -> bool {
        self.value.load(Ordering::Relaxed)
    }

    /// Registers the setting. Only while the module is being loaded.
    pub(crate) fn register(&'static self, context: &Context<'_>) -> bool {
        let place = std::ptr::from_ref(&self.value).cast_mut().cast::<c_void>();
        // SAFETY: As for `Number::register`, with an `AtomicBool`.
        let made = unsafe {
            (server().register_bool)(
                context.raw(),
                self.name.as_ptr(),
                c_int::from(self.default),
                MUTABLE,
                get_flag,
                set_flag,
                None,
                place,
            )
        };
        made == OK
    }
}

/// # Safety
/// `place` points to a `Number`.
unsafe extern "C" fn get_number(_name: *const c_char, place: *mut c_void) -> c_longlong {
    // SAFETY: Guaranteed by the caller; atomics may be shared.
    let value = unsafe { &*place.cast::<AtomicU64>() };
    c_longlong::try_from(value.load(Ordering::Relaxed)).unwrap_or(c_longlong::MAX)
}

/// # Safety
/// As for `get_number`.
unsafe extern "C" fn set_number(
    _name: *const c_char,
    number: c_longlong,
    place: *mut c_void,
    _error: *mut *mut RawString,
) -> c_int {
    // SAFETY: As in `get_number`.
    let value = unsafe { &*place.cast::<AtomicU64>() };
    // The server has checked the limits, and the minimum is not negative.
    value.store(u64::try_from(number).unwrap_or(0), Ordering::Relaxed);
    OK
}

/// # Safety
/// `place` points to a `Flag`.
unsafe extern "C" fn get_flag(_name: *const c_char, place: *mut c_void) -> c_int {
    // SAFETY: Guaranteed by the caller; atomics may be shared.
    let value = unsafe { &*place.cast::<AtomicBool>() };
    c_int::from(value.load(Ordering::Relaxed))
}

/// # Safety
/// As for `get_flag`.
unsafe extern "C" fn set_flag(
    _name: *const c_char,
    flag: c_int,
    place: *mut c_void,
    _error: *mut *mut RawString,
) -> c_int {
    // SAFETY: As in `get_flag`.
    let value = unsafe { &*place.cast::<AtomicBool>() };
    value.store(flag != 0, Ordering::Relaxed);
    OK
}

/// `REDISMODULE_CONFIG_DEFAULT`: can be changed at run time.
const MUTABLE: u32 = 0;

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
