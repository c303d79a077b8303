//! The half of Remora that may live inside the server: `libremora_module.so`.
//!
//! A server that has loaded it can write a snapshot straight into a table that an agent has handed it, out of its fork child, and
//! load a table that an agent has handed it, without a socket in between. Nothing here opens a port, starts a fork or changes a
//! setting of the server; without an agent it does nothing at all.
//!
//! ```text
//!   remora source ──REMORA.ARM, memfd──▶ server ──fork──▶ child: capture ──RDB records──▶ slots of the table ══▶ replicas read
//!
//!   remora replica ──memfd──▶ server, loading an RDB of a hundred bytes ──our auxiliary field──▶ load ◀──keys── slots
//! ```
//!
//! In the order in which to read it:
//!
//! * [`api`]: what can be asked of a server: contexts, keys, strings, replies.
//! * `ffi`: how that is done. The only unsafe code.
//!
//! `docs/module.md` tells how to use it.

#![deny(unsafe_code)]

#[allow(dead_code)]
mod api;
#[allow(unsafe_code, dead_code)]
mod ffi;

use std::ffi::CStr;

use api::{Context, LogLevel, Module, StrRef};

/// This crate, to the server.
struct Remora;

impl Module for Remora {
    const NAME: &'static CStr = c"remora";
    const VERSION: u16 = 100;

    fn load(context: &Context<'_>, _arguments: &[StrRef<'_>]) -> bool {
        context.log(LogLevel::Notice, concat!("remora ", env!("CARGO_PKG_VERSION"), " is ready"));
        true
    }

    fn unload(_context: &Context<'_>) -> bool {
        true
    }
}
