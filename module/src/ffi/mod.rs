//! The interface to the server: the only unsafe code of this crate. It makes no decisions.
//!
//! ```text
//!   server ──RedisModule_OnLoad──▶ entry.rs ──look_up──▶ functions.rs      names → pointers, once
//!   server ──callback──▶ callback.rs (no panic gets out) ──▶ traits that the rest of the crate implements
//!   rest of the crate ──▶ handles: Context, Key, Str, Reply … ──▶ functions.rs ──▶ server
//! ```
//!
//! `fast` has the server's private functions and tables, for builds that are known exactly.
//!
//! This file has the functions that need no other handle, those for keys, commands and INFO, those for what a callback
//! registers (commands, events, timers and settings), and what a sweep needs: commands before they run, and the
//! server's hash function. `callback` has callbacks of the server, and values some elements at a time.
//!
//! The rules that every SAFETY comment here relies on:
//!
//! - **The handle rule.** A handle (`Context`, `Key`, `StrRef`, `Io`, `InfoSection`) exists only while the server's
//!   object does: callbacks create handles from what the server passes and give them out by reference, with a lifetime
//!   that ends with the callback; owned ones (`OwnedStr`, `Key` from `open_to_write`, `Reply`, `Cursor`, `ServerInfo`,
//!   `OwnContext`) free their object when dropped.
//! - **The thread rule.** The server's functions may be called only on its main thread. A [`Context`] is the proof of
//!   being on it (callbacks come only there; it is neither `Send` nor `Sync`), and every other handle is created from
//!   one, and is neither `Send` nor `Sync` either, as it holds a raw pointer. A fork child has one thread, which is a
//!   copy of that main thread: the rule holds there too.
//! - **The names rule.** `key::server()` holds pointers that the server itself returned for those names; their
//!   signatures are the published ones.

mod entry;
mod fast;
mod key;

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int, c_longlong, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use entry::info_entry;
use entry::{command_entry, event_entry, guard, timer_entry};
use key::{ERR, OK, RawContext, RawCursor, RawEvent, RawFilter, RawFiltered, RawKey, RawServerInfo, RawString, server};
use key::{READ, Reply, UNTOUCHED, WRITE};
use libloading::os::unix::Library;

pub(crate) use entry::{AuxLoad, Command, EventHandler, Io, ListEvents, Timer, register_aux};
pub(crate) use entry::{Flag, InfoSection, Informer, Module, Number};
pub(crate) use fast::{
    AddError, Adding, BATCH, FastServer, FoundKey, FoundValue, Functions, Scratch, Shape, Step, Steps, Trouble,
    in_child,
};
pub(crate) use key::{Key, KeyKind, OwnedStr, StrRef, warm};

// One call of the server into the module, and what it replies and logs. The other functions that are available during
// the call are below.

/// A call of the server into the module; also the proof of being on the server's thread.
pub(crate) struct Context<'s> {
    raw: NonNull<RawContext>,
    call: PhantomData<&'s RawContext>,
}

impl<'s> Context<'s> {
    /// # Safety
    /// `raw` is a context of the server that lives for `'s`, and this is the server's main thread.
    unsafe fn new(raw: NonNull<RawContext>) -> Context<'s> {
        Context { raw, call: PhantomData }
    }

    fn raw(&self) -> *mut RawContext {
        self.raw.as_ptr()
    }

    /// Writes a line to the server's log.
    pub(crate) fn log(&self, level: LogLevel, text: &str) {
        let text = without_zeros(text);
        // SAFETY: A living context; a level that the server knows; a format that takes exactly one zero-terminated
        // text.
        unsafe { (server().log)(self.raw(), level.name().as_ptr(), c"%s".as_ptr(), text.as_ptr()) };
    }

    // --- Replies to a command -------------------------------------------------------------------------------------

    /// Replies with a status, such as `OK`.
    pub(crate) fn reply_simple(&self, text: &CStr) {
        // SAFETY: A living context and a zero-terminated text, which is copied. The return value only means "replied".
        unsafe { (server().reply_simple)(self.raw(), text.as_ptr()) };
    }

    /// Replies with an error: a word in capitals, then a sentence.
    pub(crate) fn reply_error(&self, text: &str) {
        // An error is one line of the protocol.
        let text = without_zeros(&text.replace(['\r', '\n'], " "));
        // SAFETY: As for `reply_simple`.
        unsafe { (server().reply_error)(self.raw(), text.as_ptr()) };
    }

    /// Replies with a number.
    pub(crate) fn reply_integer(&self, number: i64) {
        // SAFETY: A living context.
        unsafe { (server().reply_integer)(self.raw(), number) };
    }

    /// Replies with bytes.
    pub(crate) fn reply_bytes(&self, bytes: &[u8]) {
        // SAFETY: A living context; the bytes are copied.
        unsafe { (server().reply_bytes)(self.raw(), bytes.as_ptr().cast(), bytes.len()) };
    }

    /// Begins a reply of `parts` parts, each of which must follow.
    pub(crate) fn reply_array(&self, parts: usize) {
        // SAFETY: A living context.
        unsafe { (server().reply_array)(self.raw(), parts as _) };
    }

    /// Lets the server do urgent work: answer `-LOADING`, run its cron. Our own context stays valid.
    pub(crate) fn yield_now(&self, also_clients: bool, busy: &CStr) {
        let flags = if also_clients { YIELD_CLIENTS } else { YIELD_NONE };
        // SAFETY: A living context; the text is copied or used during the call only.
        unsafe { (server().yield_now)(self.raw(), flags, busy.as_ptr()) };
    }

    /// The kind of this call, as bits (`REDISMODULE_CTX_FLAGS_*`).
    pub(crate) fn flags(&self) -> ContextFlags {
        // SAFETY: A living context.
        ContextFlags(unsafe { (server().context_flags)(self.raw()) })
    }

    /// Sets this module's options, as bits (`REDISMODULE_OPTIONS_*`).
    pub(crate) fn set_module_options(&self, options: c_int) {
        // SAFETY: A living context of this module.
        unsafe { (server().set_module_options)(self.raw(), options) };
    }

    /// Whether the server is Valkey 8 or later: it offers its functions under names of its own too.
    pub(crate) fn is_valkey(&self) -> bool {
        server().set_module_options_of_valkey.is_some()
    }

    /// Ends this process, which must be a fork child, with a failure: its server discards what it has saved so far.
    /// Does nothing in the server's own process.
    pub(crate) fn fail_child(&self) {
        if self.flags().is_child() {
            // SAFETY: The only condition is to be in a fork child, which was just checked. The function does not
            // return.
            unsafe { (server().exit_from_child)(CHILD_FAILED) };
        }
    }
}

/// A context of our own, for callbacks whose context has no client (loading, persistence events).
pub(crate) struct OwnContext {
    context: Context<'static>,
}

impl OwnContext {
    /// Created on the server's thread, as `_proof` proves, and to be used only there (it is not `Send`).
    pub(crate) fn new(_proof: &Context<'_>) -> OwnContext {
        // SAFETY: Null is allowed: a context without a blocked client.
        let raw = unsafe { (server().get_thread_safe_context)(ptr::null_mut()) };
        let raw = NonNull::new(raw).expect("the server ends itself rather than return no context");
        // SAFETY: It lives until `drop` frees it, and is only borrowed.
        OwnContext { context: unsafe { Context::new(raw) } }
    }
}

impl std::ops::Deref for OwnContext {
    type Target = Context<'static>;

    fn deref(&self) -> &Self::Target {
        &self.context
    }
}

impl Drop for OwnContext {
    fn drop(&mut self) {
        // SAFETY: Owned by us, freed once.
        unsafe { (server().free_thread_safe_context)(self.context.raw()) };
    }
}

/// The level of a line in the log.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LogLevel {
    /// Useful for an operator.
    Notice,
    /// Important for an operator.
    Warning,
}

impl LogLevel {
    fn name(self) -> &'static CStr {
        match self {
            LogLevel::Notice => c"notice",
            LogLevel::Warning => c"warning",
        }
    }
}

/// `REDISMODULE_CTX_FLAGS_*`, as far as this module uses them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextFlags(c_int);

impl ContextFlags {
    /// The call comes from a script or from a transaction.
    pub(crate) fn is_within_another(self) -> bool {
        self.0 & (1 | 1 << 1) != 0
    }

    /// The server is a replica.
    pub(crate) fn is_replica(self) -> bool {
        self.0 & (1 << 3) != 0
    }

    /// The server is in cluster mode.
    pub(crate) fn is_cluster(self) -> bool {
        self.0 & (1 << 5) != 0
    }

    /// This process is a fork child.
    pub(crate) fn is_child(self) -> bool {
        self.0 & (1 << 20) != 0
    }
}

/// A text as a C string. A zero byte inside would end it early, so it is removed.
fn without_zeros(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// The exit status of a fork child that has failed.
const CHILD_FAILED: c_int = 1;
/// `REDISMODULE_YIELD_FLAG_NONE`.
const YIELD_NONE: c_int = 1;
/// `REDISMODULE_YIELD_FLAG_CLIENTS` together with the former.
const YIELD_CLIENTS: c_int = 3;

const _: () = assert!(OK == 0 && ERR == 1 && size_of::<c_char>() == 1);

// What a callback asks of the server: its keys, its commands, and INFO.

impl Context<'_> {
    /// Selects the database that later calls work on. False if it does not exist.
    pub(crate) fn select(&self, database: u32) -> bool {
        let Ok(database) = c_int::try_from(database) else { return false };
        // SAFETY: A living context; the server checks the number.
        unsafe { (server().select_db)(self.raw(), database) == OK }
    }

    /// Keys in the selected database.
    pub(crate) fn key_count(&self) -> u64 {
        // SAFETY: A living context.
        unsafe { (server().db_size)(self.raw()) }
    }

    /// Opens a key for writing; it need not exist.
    pub(crate) fn open_to_write(&self, name: StrRef<'_>) -> Option<Key<'_>> {
        // SAFETY: A living context and string; the key takes a reference of its own to the string.
        let raw = unsafe { (server().open_key)(self.raw(), name.raw(), READ | WRITE) };
        // SAFETY: Just opened, owned by us, and it can't outlive the context, which is borrowed.
        NonNull::new(raw).map(|raw| unsafe { Key::new(raw, true) })
    }

    /// Opens a key as it is, which counts as no use of it. `None`: it does not exist.
    pub(crate) fn open_untouched(&self, name: StrRef<'_>) -> Option<Key<'_>> {
        // SAFETY: A living context and string; the key takes a reference of its own to the string.
        let raw = unsafe { (server().open_key)(self.raw(), name.raw(), READ | UNTOUCHED) };
        // SAFETY: Just opened, owned by us, and it can't outlive the context, which is borrowed.
        NonNull::new(raw).map(|raw| unsafe { Key::new(raw, true) })
    }

    /// Shows the keys of one scan step over the selected database. False when the scan is complete.
    ///
    /// The guarantees of `SCAN` hold: a key that exists all the time is shown at least once; more than once is possible
    /// only if the table is resized meanwhile. A panic of `show` continues from here, after the server's function has
    /// returned.
    pub(crate) fn scan<F: FnMut(StrRef<'_>, Key<'_>)>(&self, cursor: &mut Cursor, show: F) -> bool {
        let mut showing = Showing { show, panicked: None };
        let data: *mut Showing<F> = &mut showing;
        // SAFETY: A living context and cursor. `data` stays valid through the call, and only `scan_entry::<F>` uses it,
        // with its true type.
        let more = unsafe { (server().scan)(self.raw(), cursor.raw.as_ptr(), scan_entry::<F>, data.cast()) != 0 };
        if let Some(panic) = showing.panicked {
            std::panic::resume_unwind(panic);
        }
        more
    }

    /// Calls a command; its errors are replies. `None`: the server gave no reply at all.
    pub(crate) fn call(&self, name: &CStr, arguments: &[StrRef<'_>]) -> Option<Reply<'_>> {
        let list: *const StrRef<'_> = arguments.as_ptr();
        // SAFETY: A living context. The format "v" takes a list of strings and its length (a `size_t`), and `StrRef` is
        // such a pointer and nothing else; "E" takes no argument. The server keeps nothing after the call.
        let raw = unsafe {
            (server().call)(self.raw(), name.as_ptr(), c"vE".as_ptr(), list.cast::<*mut RawString>(), arguments.len())
        };
        // SAFETY: A new reply, owned by us, that can't outlive the context, which is borrowed.
        NonNull::new(raw).map(|raw| unsafe { Reply::new(raw, true) })
    }

    /// The value of a setting of the server.
    pub(crate) fn setting(&self, name: &str) -> Option<String> {
        let arguments = [OwnedStr::new(self, b"GET"), OwnedStr::new(self, name.as_bytes())];
        let reply = self.call(c"CONFIG", &arguments.each_ref().map(OwnedStr::borrow))?;
        let value = reply.element(1)?;
        Some(String::from_utf8_lossy(value.as_bytes()?).into_owned())
    }

    /// INFO of one section.
    pub(crate) fn server_info(&self, section: &CStr) -> Option<ServerInfo<'_>> {
        // SAFETY: A living context and a zero-terminated name.
        let raw = unsafe { (server().get_server_info)(self.raw(), section.as_ptr()) };
        NonNull::new(raw).map(|raw| ServerInfo { raw, context: self })
    }

    /// Registers a command. Only while the module is being loaded.
    pub(crate) fn register_command<C: Command>(&self) -> bool {
        let (name, flags) = (C::NAME.as_ptr(), C::FLAGS.as_ptr());
        // SAFETY: A living context, zero-terminated texts, and an entry of the right signature that exists as long as
        // the module is loaded.
        let made = unsafe { (server().create_command)(self.raw(), name, command_entry::<C>, flags, 0, 0, 0) };
        made == OK
    }

    /// Registers an ACL category, if the server supports it.
    pub(crate) fn add_acl_category(&self, name: &CStr) -> bool {
        // SAFETY: A living context and a zero-terminated name.
        server().add_acl_category.is_some_and(|add| unsafe { add(self.raw(), name.as_ptr()) } == OK)
    }

    /// Adds a command to ACL categories (names separated by spaces), if the server supports it.
    pub(crate) fn set_acl_categories(&self, command: &CStr, categories: &CStr) -> bool {
        let Some(set) = server().set_acl_categories else { return false };
        // SAFETY: A living context and a zero-terminated name.
        let raw = unsafe { (server().get_command)(self.raw(), command.as_ptr()) };
        // SAFETY: A command of this module that was just found, and a zero-terminated text.
        !raw.is_null() && unsafe { set(raw, categories.as_ptr()) } == OK
    }

    /// Subscribes to one kind of events (`REDISMODULE_EVENT_*`). False if this server doesn't know it.
    pub(crate) fn subscribe<H: EventHandler>(&self) -> bool {
        let event = RawEvent { id: H::EVENT, version: 1 };
        // SAFETY: A living context; an entry of the right signature. The server drops the subscription when it unloads
        // the module.
        unsafe { (server().subscribe)(self.raw(), event, Some(event_entry::<H>)) == OK }
    }

    /// Registers the callback for INFO.
    pub(crate) fn register_info<I: Informer>(&self) -> bool {
        // SAFETY: A living context; an entry of the right signature.
        unsafe { (server().register_info)(self.raw(), info_entry::<I>) == OK }
    }

    /// Sets a timer that fires after this many milliseconds; it gets `number`. The server does not unload a module that
    /// has a timer.
    pub(crate) fn set_timer<T: Timer>(&self, milliseconds: u64, number: u64) -> TimerId {
        let period = c_longlong::try_from(milliseconds).unwrap_or(c_longlong::MAX);
        let data = ptr::without_provenance_mut::<c_void>(number as usize);
        // SAFETY: A living context; an entry of the right signature; the data is a number and is never dereferenced.
        TimerId(unsafe { (server().create_timer)(self.raw(), period, timer_entry::<T>, data) })
    }

    /// Stops a timer. A timer that has fired no longer exists, and stopping it has no effect.
    pub(crate) fn stop_timer(&self, timer: TimerId) {
        // SAFETY: A living context; a null pointer means that the data isn't wanted.
        unsafe { (server().stop_timer)(self.raw(), timer.0, ptr::null_mut()) };
    }

    /// Applies the settings of the configuration file or of `MODULE LOADEX`. Once, after all settings are registered.
    pub(crate) fn load_settings(&self) -> bool {
        // SAFETY: A living context of a module that is being loaded.
        unsafe { (server().load_configs)(self.raw()) == OK }
    }
}

/// The position of a [`Context::scan`].
pub(crate) struct Cursor {
    raw: NonNull<RawCursor>,
}

impl Cursor {
    /// At the beginning. The context proves that this is the server's thread.
    pub(crate) fn new(_context: &Context<'_>) -> Cursor {
        // SAFETY: No conditions.
        let raw = unsafe { (server().cursor_create)() };
        Cursor { raw: NonNull::new(raw).expect("the server ends itself rather than return no cursor") }
    }
}

impl Cursor {
    fn raw(&mut self) -> *mut RawCursor {
        self.raw.as_ptr()
    }

    /// Where the next step begins: what `SCAN` calls its cursor. 0 at the beginning and at the end.
    pub(crate) fn position(&self) -> u64 {
        // SAFETY: The server's object begins with this number in every supported server (`struct
        // RedisModuleScanCursor`), and lives as long as `self`.
        unsafe { self.raw.cast::<CursorParts>().read() }.position
    }

    /// Has the next step show the part of the table in which a key of this hash is.
    pub(crate) fn seek(&mut self, hash: u64) {
        // SAFETY: As in `position`; any number is a position, and nothing else uses the object meanwhile.
        unsafe { self.raw.cast::<CursorParts>().write(CursorParts { position: hash, done: 0 }) };
    }
}

/// `struct RedisModuleScanCursor`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CursorParts {
    position: u64,
    done: c_int,
}

impl Drop for Cursor {
    fn drop(&mut self) {
        // SAFETY: Owned by us, freed once.
        unsafe { (server().cursor_destroy)(self.raw.as_ptr()) };
    }
}

/// What a scan passes through the server: a closure, and the panic that ended it.
struct Showing<F> {
    show: F,
    panicked: Option<Box<dyn Any + Send>>,
}

/// Callback of the server for one key.
///
/// # Safety
/// `data` points to a `Showing<F>` that nothing else uses meanwhile.
unsafe extern "C" fn scan_entry<F: FnMut(StrRef<'_>, Key<'_>)>(
    _context: *mut RawContext,
    name: *mut RawString,
    key: *mut RawKey,
    data: *mut c_void,
) {
    let (Some(name), Some(key)) = (NonNull::new(name), NonNull::new(key)) else { return };
    // SAFETY: Guaranteed by the caller.
    let Showing { show, panicked } = unsafe { &mut *data.cast::<Showing<F>>() };
    if panicked.is_some() {
        return;
    }
    // SAFETY: Owned by the server and alive during this call; the closure can't keep it longer.
    let name = unsafe { StrRef::new(name) };
    // SAFETY: As above; the server closes the key itself.
    let key = unsafe { Key::new(key, false) };
    // Unwind safety: after a panic the closure is not called again.
    *panicked = catch_unwind(AssertUnwindSafe(|| show(name, key))).err();
}

/// INFO, queried line by line.
pub(crate) struct ServerInfo<'c> {
    raw: NonNull<RawServerInfo>,
    context: &'c Context<'c>,
}

impl ServerInfo<'_> {
    /// The value of a line.
    pub(crate) fn get(&self, field: &CStr) -> Option<&str> {
        // SAFETY: A living INFO answer and a zero-terminated name.
        let text = unsafe { (server().server_info_field)(self.raw.as_ptr(), field.as_ptr()) };
        if text.is_null() {
            return None;
        }
        // SAFETY: Zero-terminated by the server, and alive as long as the answer, which is borrowed.
        unsafe { CStr::from_ptr(text) }.to_str().ok()
    }

    /// The value of a line that is a number.
    pub(crate) fn number(&self, field: &CStr) -> Option<u64> {
        self.get(field)?.parse().ok()
    }
}

impl Drop for ServerInfo<'_> {
    fn drop(&mut self) {
        // SAFETY: Owned by us, freed once, with the context it was created with.
        unsafe { (server().free_server_info)(self.context.raw(), self.raw.as_ptr()) };
    }
}

// What a callback registers with the server: commands, events, INFO, timers and settings.

/// A timer that was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimerId(u64);

// What a sweep asks of the server: the commands of clients before they run, the keys that they name, and the server's
// own hash function.

/// Sees every command before it runs, of clients and of scripts; in a transaction when it is queued.
pub(crate) trait CommandFilter {
    /// `words`: the command's name and its arguments.
    fn see(words: &Words);
}

/// A filter that is registered. It must be removed by [`Context::remove_filter`].
pub(crate) struct FilterId(NonNull<RawFilter>);

/// The words of a command that is about to run.
pub(crate) struct Words {
    raw: NonNull<RawFiltered>,
}

impl Words {
    /// Number of words.
    pub(crate) fn len(&self) -> usize {
        // SAFETY: Alive during the callback (handle rule).
        usize::try_from(unsafe { (server().filtered_count)(self.raw.as_ptr()) }).unwrap_or(0)
    }

    /// One of them.
    pub(crate) fn get(&self, index: usize) -> Option<StrRef<'_>> {
        let index = c_int::try_from(index).ok()?;
        // SAFETY: Alive during the callback; the server checks the index.
        let raw = NonNull::new(unsafe { (server().filtered_word)(self.raw.as_ptr(), index) })?;
        // SAFETY: The server keeps it during the callback, for which `self` is borrowed.
        Some(unsafe { StrRef::new(raw) })
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<StrRef<'_>> {
        (0..self.len()).filter_map(|index| self.get(index)).collect()
    }
}

/// # Safety
/// Called by the server, with an object that lives during the call, on its main thread.
unsafe extern "C" fn filter_entry<F: CommandFilter>(filtered: *mut RawFiltered) {
    let Some(raw) = NonNull::new(filtered) else { return };
    guard((), || F::see(&Words { raw }));
}

impl Context<'_> {
    /// Registers a filter of commands; its own module's calls pass it by where the server can tell them.
    pub(crate) fn add_filter<F: CommandFilter>(&self) -> Option<FilterId> {
        // SAFETY: A living context of this module; an entry of the right signature.
        let raw = unsafe { (server().register_filter)(self.raw(), filter_entry::<F>, NOT_ITSELF) };
        NonNull::new(raw).map(FilterId)
    }

    /// Removes a filter. Not from within a filter.
    pub(crate) fn remove_filter(&self, filter: &FilterId) {
        // SAFETY: A living context of this module, and a filter of it that is removed once: `FilterId` is not copied.
        unsafe { (server().unregister_filter)(self.raw(), filter.0.as_ptr()) };
    }

    /// Shows the places of the keys that a command names. None if it names none, or is not one that could run.
    pub(crate) fn command_keys(&self, words: &[StrRef<'_>], mut show: impl FnMut(usize)) {
        let Ok(count) = c_int::try_from(words.len()) else { return };
        let (list, mut keys) = (words.as_ptr().cast::<*mut RawString>().cast_mut(), 0);
        // SAFETY: A living context; `StrRef` is a pointer to a string and nothing else, all of which live meanwhile;
        // the server only reads them. A null pointer means that the flags are not wanted.
        let places = unsafe { (server().command_keys)(self.raw(), list, count, &mut keys, ptr::null_mut()) };
        if places.is_null() {
            return;
        }
        // SAFETY: The server returned that many numbers, which stay until they are freed below.
        let list = unsafe { std::slice::from_raw_parts(places, usize::try_from(keys).unwrap_or(0)) };
        list.iter().filter_map(|place| usize::try_from(*place).ok()).for_each(&mut show);
        // SAFETY: Allocated by the server for us, freed once.
        unsafe { (server().free)(places.cast::<c_void>()) };
    }

    /// Puts a `PING` into the stream of replicas, and not into an append-only file: it follows this command, behind a
    /// `SELECT` of the selected database if the stream's last command was in another one.
    pub(crate) fn replicate_ping(&self) -> bool {
        // SAFETY: A living context, zero-terminated texts; the format "A" takes no argument.
        unsafe { (server().replicate)(self.raw(), c"PING".as_ptr(), c"A".as_ptr()) == OK }
    }

    /// Subscribes to events that hardly anybody but [`Context::propagate`] fires. Only while the module is being
    /// loaded.
    pub(crate) fn subscribe_to_nothing(&self) -> bool {
        // SAFETY: A living context; an entry of the right signature.
        unsafe { (server().subscribe_to_keys)(self.raw(), MODULE_EVENTS, nothing) == OK }
    }

    /// Has the server put into its stream what waits for it, unless it is running a command: an event makes a context
    /// of this module, and the end of that context does it. Redis 7.0 needs it after a key has expired under our eyes.
    pub(crate) fn propagate(&self, key: StrRef<'_>) {
        // SAFETY: A living context and string, and a zero-terminated text.
        unsafe { (server().notify_of_key)(self.raw(), MODULE_EVENTS, c"remora".as_ptr(), key.raw()) };
    }
}

/// # Safety
/// Called by the server. It uses nothing.
unsafe extern "C" fn nothing(_: *mut RawContext, _: c_int, _: *const c_char, _: *mut RawString) -> c_int {
    OK
}

/// The server's hash function of keys' names, with the server's seed.
#[derive(Clone, Copy)]
pub(crate) struct KeyHash(unsafe extern "C" fn(*const c_void, usize) -> u64);

impl KeyHash {
    /// Looks it up in this program. `None` if it does not show it.
    pub(crate) fn find(_context: &Context<'_>) -> Option<KeyHash> {
        let program = Library::this();
        // SAFETY: In every supported server the function of this name has this signature.
        let function = unsafe { program.get(b"dictGenHashFunction\0") }.ok()?;
        Some(KeyHash(*function))
    }

    /// The hash of a name.
    pub(crate) fn of(self, name: &[u8]) -> u64 {
        // SAFETY: It reads this many bytes from there.
        unsafe { (self.0)(name.as_ptr().cast(), name.len()) }
    }
}

/// `REDISMODULE_CMDFILTER_NOSELF`.
const NOT_ITSELF: c_int = 1;

/// `REDISMODULE_NOTIFY_MODULE`: events that modules fire.
const MODULE_EVENTS: c_int = 1 << 13;
