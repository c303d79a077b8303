//! What a callback asks of the server: its keys, its commands, and INFO.

use std::any::Any;
use std::ffi::{CStr, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use super::context::Context;
use super::functions::{OK, RawContext, RawCursor, RawKey, RawServerInfo, RawString, server};
use super::key::{Key, READ, WRITE};
use super::reply::Reply;
use super::string::{OwnedStr, StrRef};

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
