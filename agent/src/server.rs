//! The conversation with a Redis or Valkey server as one of its ordinary clients.
//!
//! ```text
//!  ServerArgs ──open()──▶ Server ──connect()──▶ Client ──into_stream()──▶ Stream ──raw()──▶ the plain socket
//!  what was typed         where and who,        commands and replies,     for PSYNC, which   for bytes received
//!                         cheap to clone        each within its time      ends our talk      straight into a region
//! ```
//!
//! It is a client for few and careful commands: one at a time, or a counted pipeline, everything with a time-out, every refusal
//! sorted by what its reader can do about it. It is not a pool, does not reconnect by itself (its users decide when), and knows
//! nothing of replication: `remora_redis::psync` does.
//!
//! Start with [`Server`]; [`Facts`] is what a server says about itself.

mod acl;
mod args;
mod client;
mod credentials;
mod error;
mod facts;
pub(crate) mod module;
mod stream;
mod tls;
mod url;

pub(crate) use self::args::UrlParser;
pub use self::{
    acl::Task,
    args::{ServerArgs, TlsArgs},
    client::{Client, Pipeline, Server},
    credentials::{Credentials, PASSWORD_VARIABLE, Password},
    error::{RefusalKind, ServerError, SetupError},
    facts::{Backlog, Database, Facts, Family, Link, Role, Version},
    stream::{Raw, Stream, TlsConnection},
    tls::TlsOptions,
    url::{Place, ServerUrl, UrlError},
};
