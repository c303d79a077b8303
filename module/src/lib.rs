//! The half of Remora that may live inside the server: `libremora_module.so`.
//!
//! A server that has loaded it can write the long strings of a snapshot straight into a table that an agent has handed it, out of its fork
//! child, and load them out of memory that an agent has shown it, without a socket in between. Nothing here opens a port, starts a fork or changes a
//! setting of the server; without an agent it does nothing at all.
//!
//! ```text
//!   remora source ──REMORA.ARM, memfd──▶ server ──fork──▶ child: capture ──RDB records──▶ slots of the table ══▶ replicas read
//!
//!   remora replica ──REMORA.LOAD, memfd──▶ server, loading what the agent sends ──our auxiliary fields──▶ load ◀── long strings
//! ```
//!
//! In the order in which to read it:
//!
//! * `api`: what can be asked of a server: contexts, keys, strings, replies.
//! * `capture`: the fork child writes long strings into a table, and leaves the rest to its server.
//! * `load`: long strings of a snapshot, out of memory that an agent has shown.
//! * `ffi`: how things are asked of a server. The only unsafe code.
//!
//! `docs/module.md` tells how to use it.

#![deny(unsafe_code)]

mod api;
mod capture;
#[allow(unsafe_code)]
mod ffi;
mod load;

use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;

use api::{Command, Context, InfoSection, Informer, LogLevel, Module, StrRef};
use capture::{armed, child, commands};

/// This crate, to the server.
struct Remora;

impl Module for Remora {
    const NAME: &'static CStr = c"remora";
    const VERSION: u16 = 100;

    fn load(context: &Context<'_>, arguments: &[StrRef<'_>]) -> bool {
        if !armed::ALLOWED.register(context) || !armed::AGENT_TIMEOUT.register(context) || !context.load_settings() {
            return refuse(context, "its settings are not what the server allows; they stand in docs/module.md");
        }
        context.add_acl_category(CATEGORY);
        let commands = command::<commands::Arm>(context)
            && command::<commands::Disarm>(context)
            && command::<commands::Status>(context)
            && command::<commands::Help>(context)
            && command::<commands::Walk>(context);
        if !commands {
            return refuse(context, "the server has commands of its names already");
        }
        if !context.subscribe::<child::SnapshotBegins>() || !context.subscribe::<armed::ChildEnded>() {
            return refuse(context, "the server does not tell of its fork children");
        }
        context.register_info::<Remora>();
        // We bear a snapshot that breaks off, and mind no old data beside new: otherwise the server would never again load from its link.
        context.set_module_options(api::OPTION_HANDLE_IO_ERRORS | api::OPTION_HANDLE_REPL_ASYNC_LOAD);
        // A server does not let go of a module that has a type, and the loading half needs one.
        let capture_only = arguments.iter().any(|argument| argument.as_bytes() == CAPTURE_ONLY);
        let loads = capture_only || (command::<load::arm::Load>(context) && load::register(context));
        if !loads {
            return refuse(context, "the server has a type of the name RemoraRef already");
        }
        context.log(LogLevel::Notice, concat!("remora ", env!("CARGO_PKG_VERSION"), " is ready"));
        true
    }

    fn unload(context: &Context<'_>) -> bool {
        let (state, generation) = armed::state();
        if let Some(generation) = generation {
            context.log(LogLevel::Warning, &format!("remora stays: it is {state} for generation {generation}"));
        }
        generation.is_none()
    }
}

/// An argument of `MODULE LOAD`: without the loading half the module can be unloaded again.
const CAPTURE_ONLY: &[u8] = b"capture-only";

/// What an operator grants by one word, `+@remora`, where servers know categories of modules (Redis 7.4, Valkey 8).
const CATEGORY: &CStr = c"remora";

fn command<C: Command>(context: &Context<'_>) -> bool {
    let made = context.register_command::<C>();
    // A server without categories of modules still has the ordinary ones, by the command's flags.
    context.set_acl_categories(C::NAME, CATEGORY);
    made
}

fn refuse(context: &Context<'_>, why: &str) -> bool {
    context.log(LogLevel::Warning, &format!("remora is not loaded: {why}"));
    false
}

impl Informer for Remora {
    fn inform(section: &InfoSection<'_>) {
        let (state, generation) = armed::state();
        let history = armed::history();
        section.text(c"version", env!("CARGO_PKG_VERSION"));
        section.text(c"state", state);
        section.number(c"generation", generation.unwrap_or(0));
        section.number(c"captures_done", history.done);
        section.number(c"captures_failed", history.failed);
        section.number(c"last_bytes", history.last.received);
        section.number(c"last_keys", history.last.keys);
        section.number(c"last_micros", history.last.took_micros);
        section.text(c"last_error", &history.last_error);
        section.text(c"load_state", load::state());
        section.number(c"loads", load::COUNTS.loads.load(Relaxed));
        section.number(c"loaded_keys", load::COUNTS.keys.load(Relaxed));
        section.number(c"loaded_bytes", load::COUNTS.bytes.load(Relaxed));
    }
}
