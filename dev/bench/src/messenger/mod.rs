//! `remora-bench messenger`: requests a second and their latency, of the messenger against raw epoll, iperf3, ZeroMQ
//! and other ping-pong programs. Request and reply, over a number of connections, with a number of requests in flight
//! on each. This module defines the terms; [`options`] is the command line, [`rate`] a run,
//! `goals` what it must reach; [`ours`] is the messenger,
//! [`raw`] its simplest rival, [`tools`] and [`zeromq`] are other people's rivals.
//!
//! A request ends when its whole reply has arrived. Exactly `depth` requests are in flight on each connection from the
//! first to the last moment of the measured time. Requests in flight at the end are awaited and not counted. Every
//! request carries all of its bytes. Neither side sleeps.

mod goals;
pub mod histogram;
pub mod options;
pub mod ours;
pub mod plots;
pub mod rate;
pub mod raw;
pub mod server;
pub mod tools;
pub mod zeromq;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use histogram::Histogram;

/// One case: the sizes and the number of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Number of connections.
    pub connections: usize,
    /// Requests in flight on each.
    pub depth: usize,
    /// Bytes of a request.
    pub request: usize,
    /// Bytes of a reply.
    pub reply: usize,
}

impl std::fmt::Display for Case {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{} × {} × {}", crate::bytes(self.request as u64), self.connections, self.depth)
    }
}

/// The result of one measurement of one case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Requests answered in the time.
    pub requests: u64,
    /// The measured time.
    pub seconds: f64,
    /// Mean, 50th, 99th and 99.9th percentile of the time from request to reply, in µs; zero if a tool does not report
    /// it.
    pub latency: [f64; 4],
    /// Processor seconds of the client side.
    pub client_cpu: f64,
    /// Processor seconds of the server side.
    pub server_cpu: f64,
}

impl Outcome {
    fn of(histogram: &Histogram, took: Duration, client_cpu: Duration, server_cpu: Duration) -> Outcome {
        let at = |q| histogram.quantile(q).as_secs_f64() * 1e6;
        Outcome {
            requests: histogram.count(),
            seconds: took.as_secs_f64(),
            latency: [histogram.mean().as_secs_f64() * 1e6, at(0.5), at(0.99), at(0.999)],
            client_cpu: client_cpu.as_secs_f64(),
            server_cpu: server_cpu.as_secs_f64(),
        }
    }

    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    /// Processor µs per request, of the client and of the server side.
    pub fn cpu_per_request(&self) -> [f64; 2] {
        [self.client_cpu, self.server_cpu].map(|seconds| seconds * 1e6 / self.requests.max(1) as f64)
    }
}

/// One measurement of a run.
#[derive(Serialize, Deserialize)]
struct Figure {
    subject: String,
    case: Case,
    round: usize,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Requests of this size and above are measured against a stream.
const BULK_BYTES: usize = 128 * 1024;

/// Content that neither compression nor zero pages make cheaper.
pub fn content(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut step = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..length).map(|_| step()).collect()
}
