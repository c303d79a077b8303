//! Both ends of Remora and the command `remora`.
//!
//! ```text
//!   the primary's host                                          a replica's host (one of N)
//!   redis-server ◀──server──▶ source ══ data lanes, messenger ══▶ replica ◀──server──▶ redis-server
//!
//!   remora source │ replica │ status      the job: one snapshot, any number of exact replicas
//!   remora devices │ probe                which ways for the bytes there are, and how fast
//!   remora verify │ load │ module │ generate   beside it: is it the same? fill a server; the module; manuals
//! ```
//!
//! What it is: the owners and loops that drive the pure machines and the memory of the crates below, and the command line over
//! them. What it is not: a protocol (`remora_redis`, `remora_protocol`, `remora_messenger`), a transport (`remora_fabric`) or a layout
//! (`remora_table`).
//!
//! The modules, in the order one should meet them:
//!
//! - [`args`]: what can be typed; [`commands`]: the process around one command. **Start here.**
//! - [`exit`]: how a command ends; [`progress`]: what it shows while it runs; [`units`]: sizes and times as people write them.
//! - [`server`]: the client to a Redis or Valkey server that everything below uses.
//! - [`conversation`]: connections between agents, and the port that either end may open.
//! - [`source`], [`replica`], [`status`]: the job.
//! - [`transports`]: which ways to the memory there are, and the command that looks at them alone; [`probe`] measures them.
//! - [`verify`], [`load`], [`library`], [`generate`]: beside it.
#![forbid(unsafe_code)]
// The maps of the two ends name their private parts: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

pub mod args;
mod backoff;
pub mod commands;
pub mod conversation;
pub mod exit;
pub mod generate;
mod lanes;
pub mod library;
pub mod load;
pub mod probe;
pub mod progress;
pub mod replica;
pub mod server;
mod signals;
pub mod source;
pub mod status;
mod tasks;
pub mod transports;
pub mod units;
pub mod verify;
