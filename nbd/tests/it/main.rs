//! The server with clients that others wrote, and with one that says exactly what a test wants.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod bounds;
mod device;
mod foreign;
mod raw;
mod tls;
mod usage;
