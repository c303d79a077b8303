//! What a callback registers with the server: commands, events, INFO, timers and settings.

use std::ffi::{CStr, c_longlong, c_void};
use std::ptr;

use super::callback::{Command, EventHandler, Timer, command_entry, event_entry, timer_entry};
use super::context::Context;
use super::functions::{OK, RawEvent, server};
use super::info::{Informer, info_entry};

impl Context<'_> {
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

/// A timer that was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimerId(u64);
