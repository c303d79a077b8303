//! The elements of an open key's value, some at a time: of a list by their numbers, of a hash, a set or a sorted set by
//! a scan of its table; and events of lists that have changed.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

use super::callback::guard;
use super::context::Context;
use super::dataset::Cursor;
use super::functions::{OK, RawContext, RawKey, RawString, server};
use super::key::{Key, StrRef};

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
