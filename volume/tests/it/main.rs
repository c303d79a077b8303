//! Servers and clients with real messengers: in one process, and as processes that are killed and stopped.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod cluster;
mod growth;
mod looks;
mod nbd;
mod networks;
mod processes;
mod usage;
