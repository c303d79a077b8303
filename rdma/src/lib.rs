//! RDMA by libibverbs and librdmacm: devices, queue pairs, connections, and messages in both directions.
//!
//! This crate wraps the two libraries' objects, each with one owner that frees it. It contains no protocol: the
//! one-sided transport is `remora-fabric`'s `verbs`, and what messages mean is the messenger's.
//!
//! ```text
//!   report, walkthrough             duplex: connections on which both ends send
//!                 │                     │
//!                 └──────▶ cm ◀─────────┘      addresses, connecting, accepting
//!                           ▼
//!                        objects               domains, registrations, completion queues, queue pairs
//!                           ▼
//!                        device                an open device and its asynchronous events
//!                           ▼
//!                  library, bindings           functions found at run time; the headers' types
//! ```
//!
//! - [`objects`]: queue pairs and what they need. **Start here**, or with [`walkthrough`].
//! - [`cm`]: the connection manager.
//! - [`device`]: devices, and alarms that report their failure.
//! - `library`: the two libraries, opened at run time, and errors; [`bindings`]: their types.
//! - [`duplex`]: connections on which both ends send, for the messenger.
//! - [`report`]: what this machine has and what it lacks, and which address belongs to which port of which device.
//! - [`walkthrough`]: one connection and one message, step by step.

pub mod bindings;
pub mod cm;
pub mod device;
pub mod duplex;
mod library;
pub mod objects;
pub mod report;
pub mod walkthrough;

pub use library::{DISABLE, Error, no_device, status_name};
