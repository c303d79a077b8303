//! This module's section of INFO.

use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

use super::callback::guard;
use super::context::without_zeros;
use super::functions::{RawInfo, server};

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
