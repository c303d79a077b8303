//! Callbacks of the server: C entry points, each of which creates handles, calls a trait and stops panics.
//!
//! A panic that leaves an `extern "C"` function would end the whole server. [`guard`] stops it: the command is answered
//! with an error, the event has no effect, and the panic's text is on the server's standard error, which is its log
//! file.

use std::ffi::{CStr, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use super::context::Context;
use super::functions::{ERR, OK, RawContext, RawEvent, RawString};
use super::key::StrRef;

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
