//! The servers' module API with its own names: opaque types, numbers, and the functions that are looked up by name at
//! loading.
//!
//! Written by hand from the API's published reference; no header is compiled in. A function that some supported server
//! lacks is an `Option`, and its caller documents what happens without it. Not here: anything that makes the functions
//! safe to call.

use std::ffi::{c_char, c_int, c_long, c_longlong, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])*
        #[repr(C)]
        pub(crate) struct $name {
            _private: [u8; 0],
        })*
    };
}

opaque! {
    /// `RedisModuleCtx`: one call of the server into the module.
    RawContext;
    /// `RedisModuleString`.
    RawString;
    /// `RedisModuleKey`.
    RawKey;
    /// `RedisModuleCallReply`.
    RawReply;
    /// `RedisModuleCommand`.
    RawCommand;
    /// `RedisModuleScanCursor`.
    RawCursor;
    /// `RedisModuleServerInfoData`.
    RawServerInfo;
    /// `RedisModuleInfoCtx`.
    RawInfo;
    /// `RedisModuleType`.
    RawType;
    /// `RedisModuleIO`.
    RawIo;
    /// `RedisModuleCommandFilter`.
    RawFilter;
    /// `RedisModuleCommandFilterCtx`.
    RawFiltered;
}

/// `RedisModuleEvent`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawEvent {
    pub(crate) id: u64,
    pub(crate) version: u64,
}

pub(crate) type CommandFn = unsafe extern "C" fn(*mut RawContext, *mut *mut RawString, c_int) -> c_int;
pub(crate) type EventFn = unsafe extern "C" fn(*mut RawContext, RawEvent, u64, *mut c_void);
pub(crate) type ScanFn = unsafe extern "C" fn(*mut RawContext, *mut RawString, *mut RawKey, *mut c_void);
pub(crate) type ElementFn = unsafe extern "C" fn(*mut RawKey, *mut RawString, *mut RawString, *mut c_void);
pub(crate) type InfoFn = unsafe extern "C" fn(*mut RawInfo, c_int);
pub(crate) type TimerFn = unsafe extern "C" fn(*mut RawContext, *mut c_void);
pub(crate) type AuxLoadFn = unsafe extern "C" fn(*mut RawIo, c_int, c_int) -> c_int;
pub(crate) type AuxSaveFn = unsafe extern "C" fn(*mut RawIo, c_int);
pub(crate) type RdbLoadFn = unsafe extern "C" fn(*mut RawIo, c_int) -> *mut c_void;
pub(crate) type RdbSaveFn = unsafe extern "C" fn(*mut RawIo, *mut c_void);
pub(crate) type RewriteFn = unsafe extern "C" fn(*mut RawIo, *mut RawString, *mut c_void);
pub(crate) type FreeFn = unsafe extern "C" fn(*mut c_void);
pub(crate) type GetNumberFn = unsafe extern "C" fn(*const c_char, *mut c_void) -> c_longlong;
pub(crate) type SetNumberFn =
    unsafe extern "C" fn(*const c_char, c_longlong, *mut c_void, *mut *mut RawString) -> c_int;
pub(crate) type GetBoolFn = unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int;
pub(crate) type SetBoolFn = unsafe extern "C" fn(*const c_char, c_int, *mut c_void, *mut *mut RawString) -> c_int;
pub(crate) type ApplyFn = unsafe extern "C" fn(*mut RawContext, *mut c_void, *mut *mut RawString) -> c_int;

pub(crate) type FilterFn = unsafe extern "C" fn(*mut RawFiltered);
pub(crate) type KeyspaceFn = unsafe extern "C" fn(*mut RawContext, c_int, *const c_char, *mut RawString) -> c_int;

/// `RedisModuleTypeMethods`, version 3, which every supported server knows.
#[repr(C)]
pub(crate) struct RawTypeMethods {
    pub(crate) version: u64,
    pub(crate) rdb_load: Option<RdbLoadFn>,
    pub(crate) rdb_save: Option<RdbSaveFn>,
    pub(crate) aof_rewrite: Option<RewriteFn>,
    pub(crate) mem_usage: Option<unsafe extern "C" fn(*const c_void) -> usize>,
    pub(crate) digest: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
    pub(crate) free: Option<FreeFn>,
    pub(crate) aux_load: Option<AuxLoadFn>,
    pub(crate) aux_save: Option<AuxSaveFn>,
    pub(crate) aux_save_triggers: c_int,
    pub(crate) free_effort: Option<unsafe extern "C" fn(*mut RawString, *const c_void) -> usize>,
    pub(crate) unlink: Option<unsafe extern "C" fn(*mut RawString, *const c_void)>,
    pub(crate) copy: Option<unsafe extern "C" fn(*mut RawString, *mut RawString, *const c_void) -> *mut c_void>,
    pub(crate) defrag: Option<unsafe extern "C" fn(*mut c_void, *mut RawString, *mut *mut c_void) -> c_int>,
}

/// Version of [`RawTypeMethods`].
pub(crate) const TYPE_METHODS_VERSION: u64 = 3;

/// `GetApi` itself: a context begins with its address.
pub(crate) type GetApi = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;

macro_rules! functions {
    (required { $($name:ident = $symbol:literal: $type:ty,)* } optional { $($maybe:ident = $maybe_symbol:literal: $maybe_type:ty,)* }) => {
        /// All functions of the server that this module calls.
        pub(crate) struct Functions {
            $(pub(crate) $name: $type,)*
            $(pub(crate) $maybe: Option<$maybe_type>,)*
        }

        impl Functions {
            /// Looks up all of them.
            ///
            /// # Errors
            /// The name of the first required one that this server lacks.
            ///
            /// # Safety
            /// `get_api` is the server's `GetApi`.
            pub(crate) unsafe fn look_up(get_api: GetApi) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $(
                        // SAFETY: The server promises that the function of this name has the published signature, which
                        // `$type` is.
                        $name: unsafe { find::<$type>(get_api, concat!($symbol, "\0")) }.ok_or($symbol)?,
                    )*
                    $(
                        // SAFETY: As above.
                        $maybe: unsafe { find::<$maybe_type>(get_api, concat!($maybe_symbol, "\0")) },
                    )*
                })
            }
        }
    };
}

functions! {
    required {
        set_module_attributes = "RedisModule_SetModuleAttribs": unsafe extern "C" fn(*mut RawContext, *const c_char, c_int, c_int),
        is_module_name_busy = "RedisModule_IsModuleNameBusy": unsafe extern "C" fn(*const c_char) -> c_int,
        set_module_options = "RedisModule_SetModuleOptions": unsafe extern "C" fn(*mut RawContext, c_int),
        create_command = "RedisModule_CreateCommand": unsafe extern "C" fn(*mut RawContext, *const c_char, CommandFn, *const c_char, c_int, c_int, c_int) -> c_int,
        get_command = "RedisModule_GetCommand": unsafe extern "C" fn(*mut RawContext, *const c_char) -> *mut RawCommand,
        reply_simple = "RedisModule_ReplyWithSimpleString": unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int,
        reply_error = "RedisModule_ReplyWithError": unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int,
        reply_integer = "RedisModule_ReplyWithLongLong": unsafe extern "C" fn(*mut RawContext, c_longlong) -> c_int,
        reply_array = "RedisModule_ReplyWithArray": unsafe extern "C" fn(*mut RawContext, c_long) -> c_int,
        reply_bytes = "RedisModule_ReplyWithStringBuffer": unsafe extern "C" fn(*mut RawContext, *const c_char, usize) -> c_int,
        string_bytes = "RedisModule_StringPtrLen": unsafe extern "C" fn(*const RawString, *mut usize) -> *const c_char,
        create_string = "RedisModule_CreateString": unsafe extern "C" fn(*mut RawContext, *const c_char, usize) -> *mut RawString,
        free_string = "RedisModule_FreeString": unsafe extern "C" fn(*mut RawContext, *mut RawString),
        select_db = "RedisModule_SelectDb": unsafe extern "C" fn(*mut RawContext, c_int) -> c_int,
        db_size = "RedisModule_DbSize": unsafe extern "C" fn(*mut RawContext) -> c_ulonglong,
        open_key = "RedisModule_OpenKey": unsafe extern "C" fn(*mut RawContext, *mut RawString, c_int) -> *mut RawKey,
        close_key = "RedisModule_CloseKey": unsafe extern "C" fn(*mut RawKey),
        key_type = "RedisModule_KeyType": unsafe extern "C" fn(*mut RawKey) -> c_int,
        value_length = "RedisModule_ValueLength": unsafe extern "C" fn(*mut RawKey) -> usize,
        string_dma = "RedisModule_StringDMA": unsafe extern "C" fn(*mut RawKey, *mut usize, c_int) -> *mut c_char,
        string_set = "RedisModule_StringSet": unsafe extern "C" fn(*mut RawKey, *mut RawString) -> c_int,
        string_truncate = "RedisModule_StringTruncate": unsafe extern "C" fn(*mut RawKey, usize) -> c_int,
        get_expire = "RedisModule_GetAbsExpire": unsafe extern "C" fn(*mut RawKey) -> c_longlong,
        set_expire = "RedisModule_SetAbsExpire": unsafe extern "C" fn(*mut RawKey, c_longlong) -> c_int,
        get_lru = "RedisModule_GetLRU": unsafe extern "C" fn(*mut RawKey, *mut c_longlong) -> c_int,
        get_lfu = "RedisModule_GetLFU": unsafe extern "C" fn(*mut RawKey, *mut c_longlong) -> c_int,
        set_lru = "RedisModule_SetLRU": unsafe extern "C" fn(*mut RawKey, c_longlong) -> c_int,
        set_lfu = "RedisModule_SetLFU": unsafe extern "C" fn(*mut RawKey, c_longlong) -> c_int,
        delete_key = "RedisModule_DeleteKey": unsafe extern "C" fn(*mut RawKey) -> c_int,
        scan = "RedisModule_Scan": unsafe extern "C" fn(*mut RawContext, *mut RawCursor, ScanFn, *mut c_void) -> c_int,
        scan_key = "RedisModule_ScanKey": unsafe extern "C" fn(*mut RawKey, *mut RawCursor, ElementFn, *mut c_void) -> c_int,
        list_get = "RedisModule_ListGet": unsafe extern "C" fn(*mut RawKey, c_long) -> *mut RawString,
        cursor_create = "RedisModule_ScanCursorCreate": unsafe extern "C" fn() -> *mut RawCursor,
        cursor_destroy = "RedisModule_ScanCursorDestroy": unsafe extern "C" fn(*mut RawCursor),
        call = "RedisModule_Call": unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...) -> *mut RawReply,
        free_reply = "RedisModule_FreeCallReply": unsafe extern "C" fn(*mut RawReply),
        reply_type = "RedisModule_CallReplyType": unsafe extern "C" fn(*mut RawReply) -> c_int,
        reply_string = "RedisModule_CallReplyStringPtr": unsafe extern "C" fn(*mut RawReply, *mut usize) -> *const c_char,
        reply_number = "RedisModule_CallReplyInteger": unsafe extern "C" fn(*mut RawReply) -> c_longlong,
        reply_length = "RedisModule_CallReplyLength": unsafe extern "C" fn(*mut RawReply) -> usize,
        reply_element = "RedisModule_CallReplyArrayElement": unsafe extern "C" fn(*mut RawReply, usize) -> *mut RawReply,
        get_server_info = "RedisModule_GetServerInfo": unsafe extern "C" fn(*mut RawContext, *const c_char) -> *mut RawServerInfo,
        free_server_info = "RedisModule_FreeServerInfo": unsafe extern "C" fn(*mut RawContext, *mut RawServerInfo),
        server_info_field = "RedisModule_ServerInfoGetFieldC": unsafe extern "C" fn(*mut RawServerInfo, *const c_char) -> *const c_char,
        get_thread_safe_context = "RedisModule_GetThreadSafeContext": unsafe extern "C" fn(*mut c_void) -> *mut RawContext,
        free_thread_safe_context = "RedisModule_FreeThreadSafeContext": unsafe extern "C" fn(*mut RawContext),
        subscribe = "RedisModule_SubscribeToServerEvent": unsafe extern "C" fn(*mut RawContext, RawEvent, Option<EventFn>) -> c_int,
        log = "RedisModule_Log": unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...),
        register_info = "RedisModule_RegisterInfoFunc": unsafe extern "C" fn(*mut RawContext, InfoFn) -> c_int,
        info_section = "RedisModule_InfoAddSection": unsafe extern "C" fn(*mut RawInfo, *const c_char) -> c_int,
        info_text = "RedisModule_InfoAddFieldCString": unsafe extern "C" fn(*mut RawInfo, *const c_char, *const c_char) -> c_int,
        info_number = "RedisModule_InfoAddFieldULongLong": unsafe extern "C" fn(*mut RawInfo, *const c_char, c_ulonglong) -> c_int,
        create_type = "RedisModule_CreateDataType": unsafe extern "C" fn(*mut RawContext, *const c_char, c_int, *mut RawTypeMethods) -> *mut RawType,
        load_bytes = "RedisModule_LoadStringBuffer": unsafe extern "C" fn(*mut RawIo, *mut usize) -> *mut c_char,
        is_io_error = "RedisModule_IsIOError": unsafe extern "C" fn(*mut RawIo) -> c_int,
        context_of_io = "RedisModule_GetContextFromIO": unsafe extern "C" fn(*mut RawIo) -> *mut RawContext,
        alloc = "RedisModule_Alloc": unsafe extern "C" fn(usize) -> *mut c_void,
        free = "RedisModule_Free": unsafe extern "C" fn(*mut c_void),
        yield_now = "RedisModule_Yield": unsafe extern "C" fn(*mut RawContext, c_int, *const c_char),
        exit_from_child = "RedisModule_ExitFromChild": unsafe extern "C" fn(c_int) -> c_int,
        context_flags = "RedisModule_GetContextFlags": unsafe extern "C" fn(*mut RawContext) -> c_int,
        create_timer = "RedisModule_CreateTimer": unsafe extern "C" fn(*mut RawContext, c_longlong, TimerFn, *mut c_void) -> u64,
        stop_timer = "RedisModule_StopTimer": unsafe extern "C" fn(*mut RawContext, u64, *mut *mut c_void) -> c_int,
        register_number = "RedisModule_RegisterNumericConfig": unsafe extern "C" fn(*mut RawContext, *const c_char, c_longlong, c_uint, c_longlong, c_longlong, GetNumberFn, SetNumberFn, Option<ApplyFn>, *mut c_void) -> c_int,
        register_bool = "RedisModule_RegisterBoolConfig": unsafe extern "C" fn(*mut RawContext, *const c_char, c_int, c_uint, GetBoolFn, SetBoolFn, Option<ApplyFn>, *mut c_void) -> c_int,
        load_configs = "RedisModule_LoadConfigs": unsafe extern "C" fn(*mut RawContext) -> c_int,
        register_filter = "RedisModule_RegisterCommandFilter": unsafe extern "C" fn(*mut RawContext, FilterFn, c_int) -> *mut RawFilter,
        unregister_filter = "RedisModule_UnregisterCommandFilter": unsafe extern "C" fn(*mut RawContext, *mut RawFilter) -> c_int,
        filtered_count = "RedisModule_CommandFilterArgsCount": unsafe extern "C" fn(*mut RawFiltered) -> c_int,
        filtered_word = "RedisModule_CommandFilterArgGet": unsafe extern "C" fn(*mut RawFiltered, c_int) -> *mut RawString,
        command_keys = "RedisModule_GetCommandKeysWithFlags": unsafe extern "C" fn(*mut RawContext, *mut *mut RawString, c_int, *mut c_int, *mut *mut c_int) -> *mut c_int,
        replicate = "RedisModule_Replicate": unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...) -> c_int,
        subscribe_to_keys = "RedisModule_SubscribeToKeyspaceEvents": unsafe extern "C" fn(*mut RawContext, c_int, KeyspaceFn) -> c_int,
        notify_of_key = "RedisModule_NotifyKeyspaceEvent": unsafe extern "C" fn(*mut RawContext, c_int, *const c_char, *mut RawString) -> c_int,
    }
    optional {
        // Redis 7.4, Valkey 8.
        add_acl_category = "RedisModule_AddACLCategory": unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int,
        // Valkey 8. Not called: Redis has the same function under its own name only.
        set_module_options_of_valkey = "ValkeyModule_SetModuleOptions": unsafe extern "C" fn(*mut RawContext, c_int),
        // Redis 7.2, Valkey 7.2.
        set_acl_categories = "RedisModule_SetCommandACLCategories": unsafe extern "C" fn(*mut RawCommand, *const c_char) -> c_int,
    }
}

/// Looks up one function by its zero-terminated name; `None` if the server lacks it.
///
/// # Safety
/// `get_api` is the server's `GetApi`, and `F` is the type of a pointer to the function of that name.
unsafe fn find<F: Copy>(get_api: GetApi, name: &'static str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
    let mut found = std::ptr::null_mut();
    // SAFETY: A zero-terminated name (by `look_up`), and space for one pointer.
    let known = unsafe { get_api(name.as_ptr().cast(), &mut found) } == OK;
    if !known || found.is_null() {
        return None;
    }
    // SAFETY: The same size (asserted above), not null, and of this type as guaranteed by the caller.
    Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
}

/// `REDISMODULE_OK`.
pub(crate) const OK: c_int = 0;
/// `REDISMODULE_ERR`.
pub(crate) const ERR: c_int = 1;
/// `REDISMODULE_APIVER_1`, the only version.
pub(crate) const API_VERSION: c_int = 1;

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Keeps the functions for all later calls; a second load into the same process finds them again.
pub(crate) fn keep(functions: Functions) {
    let _ = FUNCTIONS.set(functions);
}

/// The functions. Reachable only through a handle, and the server gives out handles only after loading the module.
pub(crate) fn server() -> &'static Functions {
    FUNCTIONS.get().expect("the server's functions are looked up before it hands out anything to call them with")
}
