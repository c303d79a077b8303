//! Real servers, steady writers, cut cables: what the tests, the demo and the benchmarks stand on.
//!
//! ```text
//!   a test ──starts──▶ Server (primary) ◀──writes── Workload          one process each, killed with the test
//!     │                   │  in a folder, on a free port, or on a Host of a Net
//!     ├────starts──▶ Agent (the program under test) ──▶ Server (replica)
//!     │                   │  its lines, exit status, CPU time, memory
//!     └────asks────▶ assert_same_data(primary, replica)
//! ```
//!
//! What it is not: a mock of anything (servers are the shipped ones, packets go through the kernel), nor a part of
//! Remora: nothing of ours but the RESP codec is used here, so that a bug of ours cannot hide itself. Blocking and plain
//! on purpose; threads where two things happen at once.
//!
//! The modules, in the order one should meet them:
//!
//! - [`server`]: start a Redis or Valkey. **Start here.**
//! - [`client`]: talk to it.
//! - [`agent`]: start the program under test, read along, wait, signal, measure.
//! - [`workload`]: a writer that never rests, and a data set with every type in it.
//! - [`compare`]: whether a replica is exact, and what differs where it isn't.
//! - [`require`]: what a test needs of its machine, and how it is passed over where that is missing.
//! - [`tls`]: certificates made on the spot.
//! - [`net`]: hosts as network namespaces, with cables to cut, to slow down, to make lossy; rates are measured by iperf3 ([`iperf`]).
//! - [`rdma`]: a machine that has RDMA devices, emulated, for what a host without any can't run.
//! - [`process`], [`scratch`], [`random`]: what these stand on.
//!
//! The crate's unsafe code is three calls, all about what happens between fork and exec or on a thread that changes its
//! network namespace; each says why it is right.

pub mod agent;
pub mod client;
pub mod compare;
pub mod error;
pub mod iperf;
pub mod net;
pub mod process;
pub mod random;
pub mod rdma;
pub mod require;
pub mod scratch;
pub mod server;
pub mod tls;
pub mod workload;

pub use agent::Agent;
pub use client::{Address, Client};
pub use compare::{Agreement, assert_same_data};
pub use error::{Error, Result};
pub use net::{BitRate, Host, Loss, Net, Shape};
pub use random::Random;
pub use rdma::RdmaVm;
pub use server::{Builder, Kind, Server};
pub use tls::Tls;
pub use workload::{Workload, fill_every_type};
