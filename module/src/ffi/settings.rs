//! The settings of this module in the server's CONFIG: `remora.<name>`. Each value is in an atomic of this module.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::context::Context;
use super::functions::{OK, RawString, server};

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
