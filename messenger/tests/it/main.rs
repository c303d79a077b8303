//! The messenger over real sockets, shared memory and RDMA: what the simulation cannot show. `kit` is
//! shared, and the cases in it that every transport must pass.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod kit;
mod rdma;
mod security;
mod sessions;
