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

pub mod agent;
mod beyond_digest;
pub mod browser;
pub mod client;
pub mod compare;
pub mod error;
pub mod net;
pub mod process;
pub mod random;
pub mod rdma;
pub mod require;
pub mod scratch;
pub mod sentinel;
pub mod server;
pub mod workload;

pub use agent::Agent;
pub use browser::Browser;
pub use browser::Prometheus;
pub use client::{Address, Client};
pub use compare::{Agreement, assert_same_data};
pub use error::{Error, Result};
pub use net::{BitRate, Host, Loss, Net, Shape};
pub use random::Random;
pub use rdma::RdmaVm;
pub use sentinel::Cluster;
pub use sentinel::Sentinels;
pub use server::Tls;
pub use server::{Builder, Kind, Server};
pub use workload::{Workload, fill_every_type};
