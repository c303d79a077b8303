//! Files in volumes on real servers: of one writer, and of hosts that only read.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod following;
mod writing;

// The servers are those of the volume's own tests.
#[allow(dead_code)]
#[path = "../../../volume/tests/it/cluster.rs"]
mod cluster;
