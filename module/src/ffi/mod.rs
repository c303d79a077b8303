//! The interface to the server: the only unsafe code of this crate. It makes no decisions.
//!
//! ```text
//!   server ──RedisModule_OnLoad──▶ entry.rs ──look_up──▶ functions.rs      names → pointers, once
//!   server ──callback──▶ callback.rs (no panic gets out) ──▶ traits that the rest of the crate implements
//!   rest of the crate ──▶ handles: Context, Key, Str, Reply … ──▶ functions.rs ──▶ server
//! ```
//!
//! `fast` has the server's private functions and tables, for builds that are known exactly.
//!
//! `filter` and `elements` have what a sweep needs: commands before they run, the server's hash function, and values
//! some elements at a time.
//!
//! `context` has the functions that need no other handle; `dataset` adds those for keys, commands and INFO, and for
//! what a callback registers: commands, events, timers and settings.
//!
//! The rules that every SAFETY comment here relies on:
//!
//! - **The handle rule.** A handle (`Context`, `Key`, `StrRef`, `Io`, `InfoSection`) exists only while the server's
//!   object does: callbacks create handles from what the server passes and give them out by reference, with a lifetime
//!   that ends with the callback; owned ones (`OwnedStr`, `Key` from `open_to_write`, `Reply`, `Cursor`, `ServerInfo`,
//!   `OwnContext`) free their object when dropped.
//! - **The thread rule.** The server's functions may be called only on its main thread. A [`Context`] is the proof of
//!   being on it (callbacks come only there; it is neither `Send` nor `Sync`), and every other handle is created from
//!   one, and is neither `Send` nor `Sync` either, as it holds a raw pointer. A fork child has one thread, which is a
//!   copy of that main thread: the rule holds there too.
//! - **The names rule.** `functions::server()` holds pointers that the server itself returned for those names; their
//!   signatures are the published ones.

mod callback;
mod context;
mod dataset;
mod elements;
mod entry;
mod fast;
mod filter;
mod functions;
mod io;
mod key;

pub(crate) use callback::{Command, EventHandler, Timer};
pub(crate) use context::{Context, LogLevel, OwnContext};
pub(crate) use dataset::{Cursor, ServerInfo, TimerId};
pub(crate) use elements::ListEvents;
pub(crate) use entry::{Flag, InfoSection, Informer, Module, Number};
pub(crate) use fast::{
    AddError, Adding, BATCH, FastServer, FoundKey, FoundValue, Functions, Scratch, Shape, Step, Steps, Trouble,
    in_child,
};
pub(crate) use filter::{CommandFilter, FilterId, KeyHash, Words};
pub(crate) use io::{AuxLoad, Io, register_aux};
pub(crate) use key::{Key, KeyKind, OwnedStr, StrRef, warm};
