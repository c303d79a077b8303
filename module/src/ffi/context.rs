//! One call of the server into the module, and what it replies and logs. The other functions that are available during
//! the call are in `dataset`.

use std::ffi::{CStr, CString, c_char, c_int};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use super::functions::{ERR, OK, RawContext, server};

/// A call of the server into the module; also the proof of being on the server's thread.
pub(crate) struct Context<'s> {
    raw: NonNull<RawContext>,
    call: PhantomData<&'s RawContext>,
}

impl<'s> Context<'s> {
    /// # Safety
    /// `raw` is a context of the server that lives for `'s`, and this is the server's main thread.
    pub(super) unsafe fn new(raw: NonNull<RawContext>) -> Context<'s> {
        Context { raw, call: PhantomData }
    }

    pub(super) fn raw(&self) -> *mut RawContext {
        self.raw.as_ptr()
    }

    /// Writes a line to the server's log.
    pub(crate) fn log(&self, level: LogLevel, text: &str) {
        let text = without_zeros(text);
        // SAFETY: A living context; a level that the server knows; a format that takes exactly one zero-terminated
        // text.
        unsafe { (server().log)(self.raw(), level.name().as_ptr(), c"%s".as_ptr(), text.as_ptr()) };
    }

    // --- Replies to a command -------------------------------------------------------------------------------------

    /// Replies with a status, such as `OK`.
    pub(crate) fn reply_simple(&self, text: &CStr) {
        // SAFETY: A living context and a zero-terminated text, which is copied. The return value only means "replied".
        unsafe { (server().reply_simple)(self.raw(), text.as_ptr()) };
    }

    /// Replies with an error: a word in capitals, then a sentence.
    pub(crate) fn reply_error(&self, text: &str) {
        // An error is one line of the protocol.
        let text = without_zeros(&text.replace(['\r', '\n'], " "));
        // SAFETY: As for `reply_simple`.
        unsafe { (server().reply_error)(self.raw(), text.as_ptr()) };
    }

    /// Replies with a number.
    pub(crate) fn reply_integer(&self, number: i64) {
        // SAFETY: A living context.
        unsafe { (server().reply_integer)(self.raw(), number) };
    }

    /// Replies with bytes.
    pub(crate) fn reply_bytes(&self, bytes: &[u8]) {
        // SAFETY: A living context; the bytes are copied.
        unsafe { (server().reply_bytes)(self.raw(), bytes.as_ptr().cast(), bytes.len()) };
    }

    /// Begins a reply of `parts` parts, each of which must follow.
    pub(crate) fn reply_array(&self, parts: usize) {
        // SAFETY: A living context.
        unsafe { (server().reply_array)(self.raw(), parts as _) };
    }

    /// Lets the server do urgent work: answer `-LOADING`, run its cron. Our own context stays valid.
    pub(crate) fn yield_now(&self, also_clients: bool, busy: &CStr) {
        let flags = if also_clients { YIELD_CLIENTS } else { YIELD_NONE };
        // SAFETY: A living context; the text is copied or used during the call only.
        unsafe { (server().yield_now)(self.raw(), flags, busy.as_ptr()) };
    }

    /// The kind of this call, as bits (`REDISMODULE_CTX_FLAGS_*`).
    pub(crate) fn flags(&self) -> ContextFlags {
        // SAFETY: A living context.
        ContextFlags(unsafe { (server().context_flags)(self.raw()) })
    }

    /// Sets this module's options, as bits (`REDISMODULE_OPTIONS_*`).
    pub(crate) fn set_module_options(&self, options: c_int) {
        // SAFETY: A living context of this module.
        unsafe { (server().set_module_options)(self.raw(), options) };
    }

    /// Whether the server is Valkey 8 or later: it offers its functions under names of its own too.
    pub(crate) fn is_valkey(&self) -> bool {
        server().set_module_options_of_valkey.is_some()
    }

    /// Ends this process, which must be a fork child, with a failure: its server discards what it has saved so far.
    /// Does nothing in the server's own process.
    pub(crate) fn fail_child(&self) {
        if self.flags().is_child() {
            // SAFETY: The only condition is to be in a fork child, which was just checked. The function does not
            // return.
            unsafe { (server().exit_from_child)(CHILD_FAILED) };
        }
    }
}

/// A context of our own, for callbacks whose context has no client (loading, persistence events).
pub(crate) struct OwnContext {
    context: Context<'static>,
}

impl OwnContext {
    /// Created on the server's thread, as `_proof` proves, and to be used only there (it is not `Send`).
    pub(crate) fn new(_proof: &Context<'_>) -> OwnContext {
        // SAFETY: Null is allowed: a context without a blocked client.
        let raw = unsafe { (server().get_thread_safe_context)(ptr::null_mut()) };
        let raw = NonNull::new(raw).expect("the server ends itself rather than return no context");
        // SAFETY: It lives until `drop` frees it, and is only borrowed.
        OwnContext { context: unsafe { Context::new(raw) } }
    }
}

impl std::ops::Deref for OwnContext {
    type Target = Context<'static>;

    fn deref(&self) -> &Self::Target {
        &self.context
    }
}

impl Drop for OwnContext {
    fn drop(&mut self) {
        // SAFETY: Owned by us, freed once.
        unsafe { (server().free_thread_safe_context)(self.context.raw()) };
    }
}

/// The level of a line in the log.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LogLevel {
    /// Useful for an operator.
    Notice,
    /// Important for an operator.
    Warning,
}

impl LogLevel {
    fn name(self) -> &'static CStr {
        match self {
            LogLevel::Notice => c"notice",
            LogLevel::Warning => c"warning",
        }
    }
}

/// `REDISMODULE_CTX_FLAGS_*`, as far as this module uses them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextFlags(c_int);

impl ContextFlags {
    /// The call comes from a script or from a transaction.
    pub(crate) fn is_within_another(self) -> bool {
        self.0 & (1 | 1 << 1) != 0
    }

    /// The server is a replica.
    pub(crate) fn is_replica(self) -> bool {
        self.0 & (1 << 3) != 0
    }

    /// The server is in cluster mode.
    pub(crate) fn is_cluster(self) -> bool {
        self.0 & (1 << 5) != 0
    }

    /// This process is a fork child.
    pub(crate) fn is_child(self) -> bool {
        self.0 & (1 << 20) != 0
    }
}

/// A text as a C string. A zero byte inside would end it early, so it is removed.
pub(super) fn without_zeros(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// The exit status of a fork child that has failed.
const CHILD_FAILED: c_int = 1;
/// `REDISMODULE_YIELD_FLAG_NONE`.
const YIELD_NONE: c_int = 1;
/// `REDISMODULE_YIELD_FLAG_CLIENTS` together with the former.
const YIELD_CLIENTS: c_int = 3;

const _: () = assert!(OK == 0 && ERR == 1 && size_of::<c_char>() == 1);
