//! What a sweep asks of the server: the commands of clients before they run, the keys that they name, and the server's
//! own hash function.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::{self, NonNull};

use libloading::os::unix::Library;

use super::callback::guard;
use super::context::Context;
use super::functions::{OK, RawContext, RawFilter, RawFiltered, RawString, server};
use super::key::StrRef;

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
