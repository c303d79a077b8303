//! Both ends of Remora and the command `remora`.
//!
//! ```text
//!   the primary's host                                          a replica's host (one of N)
//!   redis-server ◀──server──▶ source ══ data lanes, messenger ══▶ replica ◀──server──▶ redis-server
//!
//!   remora source │ replica │ attend │ status   the job: one snapshot, any number of exact replicas
//!   remora plan │ devices │ probe         what replicas will need; which transports there are, and how fast
//!   remora migrate │ switch             from one server to another one, and back
//!   remora verify │ load │ module │ generate   compare two servers; fill a server; the module; completions and man pages
//! ```
//!
//! The crate has the loops that drive the pure state machines and the memory of the crates below, and the command line.
//! Protocols are in `remora_redis`, `remora_protocol` and `remora_messenger`, transports in `remora_fabric`, and the
//! layout of tables in `remora_table`. [`remora_source`] is the source, [`remora_replica`] the replica, and
//! [`remora_reader`] what every reader of a source does. [`remora_backup`] has snapshots as files, and backups.
//! [`remora_conversation`] is how agents talk, [`remora_server`] the client of a Redis or Valkey server, with
//! Sentinels, [`remora_metrics`] what agents show to those who watch them, [`remora_process`] what each command stands
//! on, and [`remora_base`] what all do.
//!
//! The modules, in the order in which to read them:
//!
//! - [`args`]: the command line; [`config`]: what files and the environment add to it; [`commands`]: the process around
//!   one command. **Start here.**
//! - [`replicas`]: the commands of [`remora_replica`], the other end of the job. [`status`]: what a source says.
//! - [`probe`] measures the transports, and says whether a server is ready.
//! - [`cluster`]: clusters as a whole. [`backup`]: the commands of [`remora_backup`], which has snapshots as files.
//! - [`volume`]: block devices in the memory of other hosts, as commands.
//! - [`migrate`]: a server of another family or version becomes an exact replica, by both agents.
//! - [`switch`]: a replica and its primary change their roles.
//! - [`plan`]: what replicas will need and cost.
//! - [`load`], [`tools`]: further commands. [`remora_verify`] compares two servers.
#![forbid(unsafe_code)]
// The docs of the two ends name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

pub mod args;
pub mod backup;
pub mod cluster;
pub mod commands;
pub mod config;
pub mod load;
pub mod migrate;
pub mod plan;
pub mod probe;
pub mod replicas;
pub mod status;
pub mod switch;
pub mod tools;
pub mod volume;

// The rooms below, under the names that the modules here know.
use remora_base::pace as growth;
pub use remora_base::{units, x509};
pub use remora_conversation as conversation;
pub use remora_conversation::transports;
use remora_metrics as metrics;
use remora_process::{checked_json, events, host, service, signals};
pub use remora_process::{exit, progress};
use remora_reader as reader;
pub use remora_server as server;
use remora_server::sentinel;
pub use remora_source as source;
