//! The part of Remora that runs inside a server: `libremora_module.so`.
//!
//! A server with this module can write the long strings of a snapshot straight into a table that an agent has handed to
//! it, from its fork child, and load them from memory that an agent has handed to it, without a socket in between. The
//! module opens no port, forks no process and changes no setting of the server; without an agent it does nothing.
//!
//! ```text
//!   remora source ──REMORA.ARM, memfd──▶ server ──fork──▶ child: capture ──RDB records──▶ slots of the table ══▶ replicas read
//!
//!   remora replica ──REMORA.LOAD, memfd──▶ server, loading what the agent sends ──our auxiliary fields──▶ load ◀── long strings
//! ```
//!
//! In reading order:
//!
//! * `api`: the functions of a server: contexts, keys, strings, replies.
//! * `capture`: the fork child writes long strings into a table and leaves the rest to its server.
//! * `load`: loads long strings of a snapshot from an agent's memory, and runs of small values.
//! * `sweep`: the other way to a snapshot, without a fork.
//! * `fast`: whether this build of the server is known well enough for the fast way with small values.
//! * `ffi`: the calls into a server. The only unsafe code.
//!
//! `docs/explanation/module.md` describes how to use it.

#![deny(unsafe_code)]

mod api;
mod capture;
mod fast;
#[allow(unsafe_code)]
mod ffi;
mod load;
mod sweep;

use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;

use api::{Command, Context, InfoSection, Informer, LogLevel, Module, StrRef};
use sweep::running;

/// This crate, as a module of the server.
struct Remora;

impl Module for Remora {
    const NAME: &'static CStr = c"remora";
    const VERSION: u16 = 100;

    fn load(context: &Context<'_>, arguments: &[StrRef<'_>]) -> bool {
        let settings = capture::ALLOWED.register(context)
            && capture::AGENT_TIMEOUT.register(context)
            && fast::ALLOWED.register(context)
            && running::SHARE.register(context)
            && context.load_settings();
        if !settings {
            return refuse(context, "the server rejects its settings; docs/explanation/module.md lists them");
        }
        context.add_acl_category(CATEGORY);
        let commands = command::<capture::Arm>(context)
            && command::<capture::Disarm>(context)
            && command::<capture::Status>(context)
            && command::<capture::Help>(context)
            && command::<capture::Walk>(context)
            && command::<sweep::Begin>(context);
        if !commands {
            return refuse(context, "the server already has commands with its names");
        }
        if !context.subscribe::<capture::SnapshotBegins>() || !context.subscribe::<capture::ChildEnded>() {
            return refuse(context, "the server has no events for its fork children");
        }
        let events = context.subscribe::<running::Flushed>()
            && context.subscribe::<running::RoleChanged>()
            && context.subscribe::<running::Swapped>()
            && context.subscribe::<running::ModulesChanged>()
            && context.subscribe_to_nothing();
        if !events {
            return refuse(context, "the server has no events for databases, roles and modules");
        }
        running::loaded();
        context.register_info::<Remora>();
        // We tolerate a snapshot that breaks off, and old data being served beside new data: otherwise the server would
        // no longer load from its link.
        let options = api::OPTION_HANDLE_IO_ERRORS | api::OPTION_HANDLE_REPL_ASYNC_LOAD;
        // Slots may move: the source takes no snapshot while its server imports some, and a server in cluster mode is
        // not loaded by the module.
        let moves_slots = if context.is_valkey() { api::OPTION_HANDLE_ATOMIC_SLOT_MIGRATION } else { 0 };
        context.set_module_options(options | moves_slots);
        // A server does not unload a module that has a type, and the loading half needs a type.
        let capture_only = arguments.iter().any(|argument| argument.as_bytes() == CAPTURE_ONLY);
        let loads = capture_only || (command::<load::Load>(context) && load::register(context));
        if !loads {
            return refuse(context, "the server already has a type named RemoraRef");
        }
        let layouts = arguments.iter().skip_while(|argument| argument.as_bytes() != LAYOUT).nth(1);
        let folder = arguments.iter().skip_while(|argument| argument.as_bytes() != LAYOUTS).nth(1);
        fast::identify(context, layouts.and_then(StrRef::as_str), folder.and_then(StrRef::as_str));
        context.log(LogLevel::Notice, concat!("remora ", env!("CARGO_PKG_VERSION"), " is ready"));
        true
    }

    fn unload(context: &Context<'_>) -> bool {
        let (state, generation) = capture::state();
        if let Some(generation) = generation {
            context
                .log(LogLevel::Warning, &format!("remora is not unloaded: it is {state} for generation {generation}"));
        }
        if running::is_busy() {
            context.log(LogLevel::Warning, "remora is not unloaded: it sweeps the server");
        }
        generation.is_none() && !running::is_busy()
    }
}

/// An argument of `MODULE LOAD`: without the loading half, the module can be unloaded again.
const CAPTURE_ONLY: &[u8] = b"capture-only";

/// An argument of `MODULE LOAD`: the path of a file with the layout of one more build of a server follows.
const LAYOUT: &[u8] = b"layout";

/// An argument of `MODULE LOAD`: the folder follows with the layouts that `remora module layout` has found.
const LAYOUTS: &[u8] = b"layouts";

/// The ACL category: an operator grants all commands with `+@remora`, on servers with categories of modules (Redis 7.4,
/// Valkey 8).
const CATEGORY: &CStr = c"remora";

fn command<C: Command>(context: &Context<'_>) -> bool {
    let made = context.register_command::<C>();
    // A server without module categories still assigns the ordinary ones, by the command's flags.
    context.set_acl_categories(C::NAME, CATEGORY);
    made
}

fn refuse(context: &Context<'_>, why: &str) -> bool {
    context.log(LogLevel::Warning, &format!("remora is not loaded: {why}"));
    false
}

impl Informer for Remora {
    fn inform(section: &InfoSection<'_>) {
        let (state, generation) = capture::state();
        let history = capture::history();
        section.text(c"version", env!("CARGO_PKG_VERSION"));
        section.text(c"state", state);
        section.number(c"generation", generation.unwrap_or(0));
        section.number(c"captures_done", history.done);
        section.number(c"captures_failed", history.failed);
        section.number(c"last_bytes", history.last.received);
        section.number(c"last_keys", history.last.keys);
        section.number(c"last_micros", history.last.took_micros);
        section.text(c"last_error", &history.last_error);
        let sweeps = running::outcomes();
        section.text(c"sweep", if running::is_busy() { "running" } else { "idle" });
        section.number(c"sweeps_done", sweeps.done);
        section.number(c"sweeps_failed", sweeps.failed);
        section.number(c"sweep_keys", sweeps.keys);
        section.number(c"sweep_keys_in_pieces", sweeps.large);
        section.text(c"sweep_error", &sweeps.error);
        section.text(c"fast_keys", &fast::state());
        section.text(c"fast_keys_layout", fast::origin());
        section.text(c"load_state", load::state());
        section.number(c"loads", load::COUNTS.loads.load(Relaxed));
        section.number(c"loaded_keys", load::COUNTS.keys.load(Relaxed));
        section.number(c"loaded_bytes", load::COUNTS.bytes.load(Relaxed));
    }
}
