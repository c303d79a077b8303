//! Real servers, steady writers and test networks, for the tests, the demo and the benchmarks.
//!
//! ```text
//!   a test ──starts──▶ Server (primary) ◀──writes── Workload          one process each, killed with the test
//!     │                   │  in a folder, on a free port, or on a Host of a Net
//!     ├────starts──▶ Agent (the program under test) ──▶ Server (replica)
//!     │                   │  its lines, exit status, CPU time, memory
//!     └────asks────▶ assert_same_data(primary, replica)
//! ```
//!
//! The lab mocks nothing: servers are the shipped ones, packets go through the kernel. It is not a part of Remora
//! either: it uses only our RESP codec, so that our own bugs cannot hide themselves. It is blocking and simple on
//! purpose, with threads where two things happen at once.
//!
//! The modules, in the order in which to read them:
//!
//! - [`server`]: start a Redis or Valkey, with certificates that are generated for each test, and ask what it says of
//!   its commands. **Start here.**
//! - [`sentinel`]: Sentinels that watch a group, and clusters: primaries that share the slots, and their replicas.
//! - [`client`]: talk to it.
//! - [`agent`]: start the program under test, read its output, wait, send signals, measure.
//! - [`workload`]: a writer at full speed, and a data set with every type in it.
//! - [`compare`]: whether a replica is exact, and what differs if not; `beyond_digest` is its part that digests say
//!   nothing of. Here is also everything that a server holds, by value and without digests.
//! - [`require`]: what a test needs of its machine, and how it is skipped if that is missing.
//! - [`browser`]: a real browser that shows a page, one question by HTTP, and a real Prometheus that scrapes one.
//! - [`net`]: hosts as network namespaces, with cables to cut, slow down and make lossy; iperf3 measures
//!   their rates. [`Link`](net::Link): a slow way to a server, on any kernel.
//! - [`rdma`]: an emulated machine with RDMA devices, for tests on hosts that have none.
//! - [`process`], [`scratch`] with notes about a test that passes, [`random`]: the foundations of the others.
//!
//! The crate's unsafe code is three calls, between fork and exec or on a thread that changes its network namespace.
//! Each has a comment that says why it is sound.
//!
//! An [`Error`] says why the lab could not do what a test asked of it. Errors are sorted by who can act on it: the
//! machine lacks something (run the set-up), a process failed (read the end of its output), a server refused a command
//! (read its answer), two servers differ (which is what the test looks for).

pub mod agent;
mod beyond_digest;
pub mod browser;
pub mod client;
pub mod compare;
pub mod net;
pub mod process;
pub mod random;
pub mod rdma;
pub mod require;
pub mod scratch;
pub mod sentinel;
pub mod server;
pub mod workload;

use std::fmt::Display;
use std::io;
use std::time::Duration;

pub use agent::Agent;
pub use browser::{Browser, Prometheus};
pub use client::{Address, Client};
pub use compare::{Agreement, assert_same_data};
pub use net::{BitRate, Host, Loss, Net, Shape};
pub use random::Random;
pub use rdma::RdmaVm;
pub use sentinel::{Cluster, Sentinels};
pub use server::{Builder, Kind, Server, Tls};
pub use workload::{Workload, fill_every_type};

/// Every error of the lab. Tests mostly `unwrap` it; its `Display` is written for a test's output.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This machine lacks a program or a right that the lab needs.
    #[error("this machine lacks {what}; {how}")]
    Missing {
        /// What is missing.
        what: String,
        /// How to get it.
        how: String,
    },

    /// A process ended while it was still needed.
    #[error("{who} ended ({status}); the last it wrote:\n{tail}")]
    Ended {
        /// Program and process id.
        who: String,
        /// Exit status, in words.
        status: String,
        /// The last lines of its output.
        tail: String,
    },

    /// An expected event did not happen in time.
    #[error("waited {waited:?} for {what}; the last that was seen:\n{tail}")]
    TooLate {
        /// The expected event.
        what: String,
        /// How long the lab waited.
        waited: Duration,
        /// Last lines of output, or the last state seen.
        tail: String,
    },

    /// A server answered a command with an error.
    #[error("the server refused {command:?}: {reply}")]
    Refused {
        /// The command, shortened.
        command: String,
        /// The server's answer.
        reply: String,
    },

    /// A server answered a command with an unexpected type.
    #[error("the server answered {command:?} with {reply}, which is no {wanted}")]
    Unexpected {
        /// The command, shortened.
        command: String,
        /// The answer, shortened.
        reply: String,
        /// The expected type.
        wanted: &'static str,
    },

    /// An answer is not RESP, or not what was asked for.
    #[error("what the server sent is not understood: {0}")]
    Garbled(String),

    /// Two servers do not hold the same data.
    #[error("{0}")]
    Different(String),

    /// A system call failed.
    #[error("{doing}: {source}")]
    Io {
        /// What the lab was doing.
        doing: String,
        /// The system's error.
        source: io::Error,
    },
}

/// The result of the lab's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds to an error of the system what was being done.
pub(crate) trait Doing<T> {
    /// Converts the system's error; `doing` completes "could not …".
    fn doing<D: Display>(self, doing: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing<D: Display>(self, doing: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|error| Error::Io { doing: format!("could not {}", doing()), source: error.into() })
    }
}
