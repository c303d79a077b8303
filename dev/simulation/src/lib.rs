//! Simulation of whole syncs: servers, agents, clock and network in one process, driven by a seed.
//!
//! ```text
//!   seed ──▶ Plan ──▶ Simulation::run ──▶ events in the order of their times ──▶ checks after each
//!                          │
//!        World: clock, network, memory, model servers, oracle
//!        SourceAgent: the real machine; actors in the place of its captures, which read bytes by the real code
//!        ReplicaAgent: the real machine, preflight, record and server's task; an actor in the place of the delivery,
//!        or the real delivery between real tables and a socket
//! ```
//!
//! A server that says "up, at offset X of history H" must hold exactly what a primary recorded in the [`oracle`] at X
//! of H. [`check`] has the other things that must hold. The same seed gives the same schedule.
//!
//! `dev/testing.md` says how to run it, what is modelled, and what is not.
#![forbid(unsafe_code)]
// The docs name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

mod bytes;
mod check;
mod delivery;
mod fleet;
mod memory;
mod operator;
mod oracle;
mod pins;
mod plan;
mod replica_agent;
mod run;
mod server;
mod source_agent;
#[cfg(test)]
mod tests;
mod wire;
mod world;

pub use self::fleet::{Storm, storm};
pub use self::run::{Limits, Summary, explain, explore};
