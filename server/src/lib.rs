//! What Remora knows of a Redis or Valkey server, and what it says to one.
//!
//! ```text
//!  ServerUrl, Credentials,
//!  TlsOptions, Task ──new()──▶ Server ──connect()──▶ Client ──into_stream()──▶ Stream ──raw()──▶ the plain socket
//!  what the user named         address and login,    commands and replies,     for PSYNC          for bytes received
//!                              cheap to clone        each with a time-out                         straight into a region
//! ```
//!
//! The client is for few commands: one at a time, or a counted pipeline. Everything has a time-out, and every refusal
//! is sorted by what the user can do about it. It keeps no pool and does not reconnect: its callers decide when to. It
//! knows nothing of replication, which is in `remora_redis::psync`.
//!
//! - Start with [`Server`], and [`Task`]: what the connection is for, which a refusal's advice depends on.
//! - [`Facts`] is what a server reports about itself: its role, history, offset, backlog. [`own_changes`] finds what of
//!   its data is not from its primary, and [`permission`] asks what it would carry out.
//! - [`pins`]: a server keeps the part of its stream that a replica needs next.
//! - [`sentinel`]: what the Sentinels of a group say. [`nodes`]: what a node of a cluster says of all nodes.
//! - [`module`]: our module in the server. [`local`]: processes of servers on this host.
//!
//! Errors are sorted by who can act: [`SetupError`] is an option or a file that the user has to correct, before any
//! connection; [`ServerError`] is the server or the way to it, and says whether it passes by itself. [`refusals`] is
//! the table of the servers' error replies, with what follows from each.
//!
//! [`simulated`] puts servers of a test in the place of sockets.

#![forbid(unsafe_code)]

mod client;
mod facts;
pub mod local;
pub mod module;
pub mod nodes;
pub mod own_changes;
pub mod permission;
pub mod pins;
pub mod refusals;
pub mod sentinel;
pub mod simulated;
mod tls;
mod url;

pub use self::client::{Client, Login, Pipeline, Raw, SETTLE_LIMIT, SETTLE_POLL, Server, Stream, TlsConnection};
pub use self::facts::{Backlog, CONVERTED, Database, Facts, Family, Link, OutputLimit, Role, Version};
pub use self::local::{Configuration, read_configuration};
pub use self::pins::{Kept, PinSizes, Pins, Position};
pub use self::refusals::{RefusalKind, ServerError, SetupError, Task};
pub use self::tls::TlsOptions;
pub use self::url::{Credentials, HostPort, PASSWORD_VARIABLE, Password, Place, ServerUrl, UrlError};
