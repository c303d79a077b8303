//! The server as seen by the rest of this crate: the safe handles of [`crate::ffi`], and the numbers of the API.
//! Nothing here is unsafe.

// Stands alone: the list of what `ffi` gives to the rest of the crate.

pub(crate) use crate::ffi::{
    AddError, Adding, AuxLoad, BATCH, Command, CommandFilter, Context, Cursor, EventHandler, FastServer, FilterId,
    Flag, FoundKey, FoundValue, Functions, InfoSection, Informer, Io, Key, KeyHash, KeyKind, ListEvents, LogLevel,
    Module, Number, OwnContext, OwnedStr, Scratch, ServerInfo, Shape, Step, Steps, StrRef, Timer, TimerId, Trouble,
    Words, in_child, register_aux, warm,
};

/// `REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED`.
pub(crate) const EVENT_ROLE_CHANGED: u64 = 0;
/// `REDISMODULE_EVENT_FLUSHDB`: one database is emptied, or all of them, for a load too.
pub(crate) const EVENT_FLUSH: u64 = 2;
/// `REDISMODULE_EVENT_MODULE_CHANGE`.
pub(crate) const EVENT_MODULE_CHANGE: u64 = 9;
/// `REDISMODULE_EVENT_SWAPDB`.
pub(crate) const EVENT_SWAP: u64 = 11;
/// `REDISMODULE_EVENT_PERSISTENCE`: a snapshot or a rewrite begins or has ended.
pub(crate) const EVENT_PERSISTENCE: u64 = 1;
/// `REDISMODULE_SUBEVENT_PERSISTENCE_RDB_START`: in a fork child, before the first byte.
pub(crate) const PERSISTENCE_RDB_START: u64 = 0;
/// `REDISMODULE_EVENT_LOADING`: a file or a primary's snapshot.
pub(crate) const EVENT_LOADING: u64 = 3;
/// `REDISMODULE_SUBEVENT_LOADING_ENDED`.
pub(crate) const LOADING_ENDED: u64 = 3;
/// `REDISMODULE_SUBEVENT_LOADING_FAILED`.
pub(crate) const LOADING_FAILED: u64 = 4;
/// `REDISMODULE_EVENT_FORK_CHILD`.
pub(crate) const EVENT_FORK_CHILD: u64 = 13;
/// `REDISMODULE_SUBEVENT_FORK_CHILD_DIED`: in the parent.
pub(crate) const FORK_CHILD_DIED: u64 = 1;

/// `REDISMODULE_OPTIONS_HANDLE_IO_ERRORS`: we tolerate a snapshot that breaks off, so the server may load from a
/// socket.
pub(crate) const OPTION_HANDLE_IO_ERRORS: i32 = 1;
/// `REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED`: clients that watch a key are not notified when we change it.
pub(crate) const OPTION_NO_IMPLICIT_SIGNAL_MODIFIED: i32 = 1 << 1;
/// `REDISMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD`: we tolerate that old data is served while new data is loaded.
pub(crate) const OPTION_HANDLE_REPL_ASYNC_LOAD: i32 = 1 << 2;
/// `VALKEYMODULE_OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION`: we tolerate `CLUSTER MIGRATESLOTS`, which Valkey 9 refuses
/// otherwise. Redis does not have it.
pub(crate) const OPTION_HANDLE_ATOMIC_SLOT_MIGRATION: i32 = 1 << 5;
