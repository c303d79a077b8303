//! What a callback asks of the server, and what it registers with it.

use std::any::Any;
use std::ffi::{CStr, c_int, c_longlong, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use super::callback::{Command, EventHandler, Timer, command_entry, event_entry, timer_entry};
use super::context::Context;
use super::entry::{Informer, info_entry};
use super::functions::{OK, RawContext, RawCursor, RawEvent, RawKey, RawServerInfo, RawString, server};
use super::key::{Key, OwnedStr, READ, Reply, StrRef, UNTOUCHED, WRITE};

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
    pub(super) fn raw(&mut self) -> *mut RawCursor {
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
