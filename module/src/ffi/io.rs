//! The part of a snapshot that the server reads for a module type: our auxiliary field.

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use super::callback::guard;
use super::context::Context;
use super::functions::{ERR, OK, RawIo, RawString, RawTypeMethods, TYPE_METHODS_VERSION, server};

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
