//! `remora-bench messenger`: requests a second and their latency, of the messenger against raw epoll, iperf3 and
//! ZeroMQ. Request and reply, over a number of connections, with a number of requests in flight on each. This module
//! defines the terms and the command line; [`rate`] is a run and what it must reach; [`ours`] is the messenger, with
//! its server as a process of its own, and the rivals that it is measured beside.
//!
//! A request ends when its whole reply has arrived. Exactly `depth` requests are in flight on each connection from the
//! first to the last moment of the measured time. Requests in flight at the end are awaited and not counted. Every
//! request carries all of its bytes. Neither side sleeps.

pub mod ours;
pub mod rate;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use remora_messenger::{Address, Options as Manner, Polling};
use serde::{Deserialize, Serialize};

use crate::source::Ends;
use crate::{Keep, quantile};

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
    fn of(times: Vec<Duration>, took: Duration, client_cpu: Duration, server_cpu: Duration) -> Outcome {
        let mut micros: Vec<f64> = times.iter().map(|time| time.as_nanos() as f64 / 1e3).collect();
        micros.sort_by(f64::total_cmp);
        let at = |q| quantile(&micros, q).unwrap_or_default();
        Outcome {
            requests: micros.len() as u64,
            seconds: took.as_secs_f64(),
            latency: [micros.iter().sum::<f64>() / micros.len().max(1) as f64, at(0.5), at(0.99), at(0.999)],
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

// The command line of `remora-bench messenger`.
//
// ```text
// remora-bench messenger --rounds 5 --out bench/runs
// remora-bench messenger --connections 1,16 --depths 1,32 --request 64 --reply 64
// remora-bench messenger --idle 10000
// … --connections 1,16 --vary spin,adaptive:50,workers:2,workers:10,pool:0     measures each finding about Ceph
// dev/lab/rdma-vm/rdma-vm -n 2 target/release/remora-bench messenger --stacks rdma --rivals ib-send --rdma-source 10.77.0.2 --rdma-reader 10.77.0.1
//
// one host$ remora-bench messenger --serve 10.0.0.1:7000          or rdma:10.0.0.1:7000
// another$  remora-bench messenger --ask 10.0.0.1:7000 --connections 1,4,16,64 --request 4096 --out runs
// ```

/// Requests per second and latency of the messenger and its rivals.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Milliseconds per measurement, by default 1000; with --serve, by default no limit.
    #[arg(long)]
    pub millis: Option<u64>,
    /// Numbers of connections, for other cases; without these options the cases are those with targets.
    #[arg(long, value_delimiter = ',')]
    pub connections: Vec<usize>,
    /// Requests in flight on each connection.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub depths: Vec<usize>,
    /// Bytes of a request.
    #[arg(long, value_delimiter = ',', default_value = "64")]
    pub request: Vec<usize>,
    /// Bytes of a reply.
    #[arg(long, default_value_t = 64)]
    pub reply: usize,
    /// Transports of the messenger: tcp, shm, rdma; for rdma give --rdma-source (the server's device) and --rdma-reader
    /// (the client's).
    #[arg(long, value_delimiter = ',', default_value = "tcp")]
    pub stacks: Vec<String>,
    /// Rivals: raw; iperf3 (bulk); zeromq; ib-send (between the devices of --rdma-…). A rival that is not installed
    /// has no figures.
    #[arg(long, value_delimiter = ',', default_value = "raw,iperf3")]
    pub rivals: Vec<String>,
    /// Workers of the server's messenger, and of the client's.
    #[arg(long, default_value_t = 1)]
    pub workers: usize,
    /// The RDMA devices.
    #[command(flatten)]
    pub ends: Ends,
    /// What an idle worker does: event, spin, or adaptive:MICROSECONDS.
    #[arg(long, default_value = "event")]
    pub polling: Poll,
    /// Limit on the bytes that the pool of received data keeps; 0 takes each message's memory from the allocator.
    #[arg(long)]
    pub pool_bytes: Option<usize>,
    /// Limit on posted requests of a queue pair (rdma).
    #[arg(long)]
    pub queue_depth: Option<u32>,
    /// Measure the messenger again for each of these, with that one thing changed: event, spin, adaptive:MICROSECONDS,
    /// workers:N, pool:BYTES, queue:DEPTH, allocator:LIBRARY.
    #[arg(long, value_delimiter = ',')]
    pub vary: Vec<String>,
    /// A library with another allocator, preloaded in the server's process (LD_PRELOAD).
    #[arg(long)]
    pub allocator: Option<String>,
    /// Keep one processor busy with another process meanwhile.
    #[arg(long)]
    pub busy: bool,
    /// Instead of sending requests, open this many idle connections and report the memory of both sides.
    #[arg(long)]
    pub idle: Option<usize>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub keep: Keep,
    /// A label at the end of that folder's name, for runs that are shown beside each other.
    #[arg(long)]
    pub label: Option<String>,
    /// Run the same, with these options, between the two devices of an emulated machine (dev/lab/rdma-vm), on a host
    /// without RDMA.
    #[arg(long, conflicts_with_all = ["serve", "ask", "json", "rdma_source", "rdma_reader"])]
    pub emulated: bool,
    /// Run the server alone, for clients on other hosts, until Ctrl-C or for --millis: at IP:PORT over TCP, or an
    /// address with its transport (rdma:IP:PORT, shm:PATH). It answers with --reply bytes, and prints its address.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["ask", "idle", "vary", "out", "json"])]
    pub serve: Option<Place>,
    /// Run the client alone, against such a server, with the same --reply. There are no rivals, since they cannot be
    /// started there.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["idle", "vary", "stacks", "rivals", "allocator"])]
    pub ask: Option<Place>,
    /// Internal: the program starts itself with this option as the server.
    #[arg(long, hide = true)]
    pub answer: Option<String>,
}

/// The address of a server that another command has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(pub Address);

impl Place {
    /// Its transport.
    pub fn transport(&self) -> &'static str {
        match self.0 {
            Address::Tcp(_) => "tcp",
            Address::Tls(_) => "tls",
            Address::Shm(_) => "shm",
            Address::Rdma(_) => "rdma",
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Place, String> {
        let address = text.parse::<SocketAddr>().map_or_else(|_| text.parse(), |address| Ok(Address::Tcp(address)))?;
        match address {
            Address::Tls(_) => {
                Err("tls: is not supported here, since it needs certificates; choose tcp, rdma or shm".to_owned())
            }
            address => Ok(Place(address)),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}

/// What an idle worker does, as an argument of the command line.
#[derive(Clone, Copy, Debug)]
pub struct Poll(pub Polling);

impl FromStr for Poll {
    type Err = String;

    fn from_str(text: &str) -> Result<Poll, String> {
        match (text, text.strip_prefix("adaptive:").map(str::parse)) {
            ("event", _) => Ok(Poll(Polling::Event)),
            ("spin", _) => Ok(Poll(Polling::Spin)),
            (_, Some(Ok(micros))) => Ok(Poll(Polling::Adaptive(Duration::from_micros(micros)))),
            _ => Err("event, spin, or adaptive:MICROSECONDS".to_owned()),
        }
    }
}

impl fmt::Display for Poll {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Polling::Event => write!(to, "event"),
            Polling::Spin => write!(to, "spin"),
            Polling::Adaptive(limit) => write!(to, "adaptive:{}", limit.as_micros()),
        }
    }
}

/// What is measured: we over one transport, perhaps with another option, or a rival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Ours { stack: String, varied: Option<String> },
    Rival(String),
}

/// The name in tables.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::Ours { stack, varied: None } => write!(f, "ours, {stack}"),
            Subject::Ours { stack, varied: Some(what) } => write!(f, "ours, {stack}, {what}"),
            Subject::Rival(rival) => f.write_str(rival),
        }
    }
}

impl Options {
    /// All subjects, in the order of the first round. Each further round begins with the next one.
    fn subjects(&self) -> Vec<Subject> {
        let mut subjects = Vec::new();
        for stack in &self.stacks {
            let variants = std::iter::once(None).chain(self.vary.iter().cloned().map(Some));
            subjects.extend(variants.map(|varied| Subject::Ours { stack: stack.clone(), varied }));
        }
        subjects.extend(self.rivals.iter().cloned().map(Subject::Rival));
        subjects
    }

    /// The options of the client's messenger.
    fn manner(&self) -> Manner {
        let mut manner = Manner { workers: self.workers, polling: self.polling.0, ..Manner::default() };
        manner.pool_bytes = self.pool_bytes.unwrap_or(manner.pool_bytes);
        manner.rdma.local = self.ends.rdma_reader;
        manner.rdma.wires.queue_depth = self.queue_depth.unwrap_or(manner.rdma.wires.queue_depth);
        manner
    }

    /// The options of the server's messenger, which makes no connections itself.
    fn manner_of_server(&self) -> Manner {
        let mut manner = self.manner();
        manner.rdma.local = None;
        manner
    }

    /// The same options with one thing changed, in the syntax of `--vary`.
    fn varied(&self, what: &str) -> crate::sync::Result<Options> {
        let mut options = self.clone();
        match what.split_once(':') {
            Some(("workers", count)) => options.workers = count.parse()?,
            Some(("pool", bytes)) => options.pool_bytes = Some(bytes.parse()?),
            Some(("queue", depth)) => options.queue_depth = Some(depth.parse()?),
            Some(("allocator", library)) => options.allocator = Some(library.to_owned()),
            _ => options.polling = what.parse()?,
        }
        Ok(options)
    }

    /// The arguments with which this program starts itself as the server of a case.
    fn for_server(&self, what: &str, case: &Case) -> Vec<String> {
        let mut arguments: Vec<String> = [NAME, "--answer", what, "--request"].map(str::to_owned).into();
        arguments.push(case.request.to_string());
        arguments.extend(["--reply".to_owned(), case.reply.to_string()]);
        arguments.extend(["--workers".to_owned(), self.workers.to_string()]);
        arguments.extend(["--polling".to_owned(), self.polling.to_string()]);
        let numbers = [
            ("--pool-bytes", self.pool_bytes.map(|n| n.to_string())),
            ("--queue-depth", self.queue_depth.map(|n| n.to_string())),
        ];
        for (flag, number) in numbers {
            arguments.extend(number.into_iter().flat_map(|number| [flag.to_owned(), number]));
        }
        arguments
    }

    /// The cases to measure.
    fn cases(&self) -> Vec<Case> {
        let reply = self.reply;
        if self.connections.is_empty() {
            let promised =
                |&(request, connections, depth): &(usize, usize, usize)| Case { connections, depth, request, reply };
            return PROMISED.iter().map(promised).collect();
        }
        let mut cases = Vec::new();
        for &request in &self.request {
            for &depth in &self.depths {
                cases.extend(self.connections.iter().map(|&connections| Case { connections, depth, request, reply }));
            }
        }
        cases
    }
}

/// The name of the subcommand.
pub const NAME: &str = "messenger";

/// Default milliseconds per measurement: about ten thousand requests of the slowest case.
const MILLIS: u64 = 1000;

/// Request bytes, connections, depth.
const PROMISED: [(usize, usize, usize); 9] = [
    (64, 1, 1),
    (64, 16, 1),
    (64, 64, 1),
    (4096, 1, 32),
    (4096, 16, 32),
    (131_072, 1, 32),
    (131_072, 16, 32),
    (1 << 20, 1, 32),
    (1 << 20, 16, 32),
];
