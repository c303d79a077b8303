//! The two symbols that a server looks up in a module.

use std::ffi::{CStr, c_int, c_void};
use std::io::Write;
use std::ptr::NonNull;

use super::callback::guard;
use super::context::Context;
use super::functions::{API_VERSION, ERR, Functions, GetApi, OK, RawContext, RawString, keep, server};
use super::string::StrRef;

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
