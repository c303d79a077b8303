//! This module as the server sees it: the two symbols that it looks up, its section of INFO, and its settings.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::io::Write;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::Context;
use super::callback::guard;
use super::functions::{API_VERSION, ERR, Functions, GetApi, OK, RawContext, RawInfo, RawString, keep, server};
use super::key::StrRef;
use super::without_zeros;

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
    if unsafe { (server().info_section)(raw.as_ptr(), c"".as_ptr()) } != super::functions::OK {
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
