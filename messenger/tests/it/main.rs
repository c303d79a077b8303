//! The messenger over real sockets, shared memory and RDMA: what the simulation cannot show. One file per concern.
//! `kit` and `alike`, the cases that every transport must pass, are shared.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod alike;
mod kit;
mod pressure;
mod rdma;
mod sessions;
mod shm;
mod stress;
mod tls;
mod unauthenticated;
