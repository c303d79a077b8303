//! The client of a Redis or Valkey server.
//!
//! ```text
//!  ServerArgs ──open()──▶ Server ──connect()──▶ Client ──into_stream()──▶ Stream ──raw()──▶ the plain socket
//!  the options            address and login,    commands and replies,     for PSYNC          for bytes received
//!                         cheap to clone        each with a time-out                         straight into a region
//! ```
//!
//! The client is for few commands: one at a time, or a counted pipeline. Everything has a time-out, and every refusal
//! is sorted by what the user can do about it. It keeps no pool and does not reconnect: its callers decide when to. It
//! knows nothing of replication, which is in `remora_redis::psync`.
//!
//! Start with [`Server`]. [`Facts`] is what a server reports about itself, and `own_changes` what of its data is not
//! from its primary. `permission` asks what a server would carry out. [`refusals`] is the table of the servers' error
//! replies, with what follows from each.

mod acl;
mod args;
mod client;
mod configuration;
mod coverage;
mod credentials;
mod error;
mod facts;
pub(crate) mod local;
pub(crate) mod module;
mod output_limit;
pub(crate) mod own_changes;
pub(crate) mod permission;
mod pin;
pub(crate) mod pinning;
mod pins;
pub(crate) mod refusals;
#[cfg(any(test, feature = "simulation"))]
pub(crate) mod simulated;
mod stream;
mod tls;
mod trust;
mod url;

pub(crate) use self::args::UrlParser;
pub(crate) use self::configuration::{Configuration, read_configuration};
pub(crate) use self::facts::CONVERTED;
pub(crate) use self::output_limit::OutputLimit;
pub(crate) use self::pinning::{PinSizes, Position};
pub(crate) use self::pins::{Kept, Pins};
pub use self::{
    acl::Task,
    args::{ServerArgs, TlsArgs},
    client::{Client, Pipeline, Server},
    credentials::{Credentials, PASSWORD_VARIABLE, Password},
    error::{ServerError, SetupError},
    facts::{Backlog, Database, Facts, Family, Link, Role, Version},
    refusals::RefusalKind,
    stream::{Raw, Stream, TlsConnection},
    tls::TlsOptions,
    url::{Place, ServerUrl, UrlError},
};
