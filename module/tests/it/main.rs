//! The module in real servers: its commands by hand, and loads from a primary that is the test itself.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod asserting;
mod capture;
mod defragmenting;
mod fast;
mod found;
mod load;
mod primary;
mod sweep;
mod twins;
