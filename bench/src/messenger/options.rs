//! What can be typed after `remora-bench messenger`.
//!
//! ```text
//! remora-bench messenger --rounds 5 --out bench/runs
//! remora-bench messenger --connections 1,16 --depths 1,32 --request 64 --reply 64
//! remora-bench messenger --idle 10000
//! … --connections 1,16 --vary spin,adaptive:50,workers:2,workers:10,pool:0     what each of the seeds' findings comes to
//! lab/rdma-vm/rdma-vm -n 2 target/release/remora-bench messenger --stacks rdma --rivals ib-send --rdma-source 10.77.0.2 --rdma-reader 10.77.0.1
//!
//! one host$ remora-bench messenger --serve 10.0.0.1:7000          or rdma:10.0.0.1:7000
//! another$  remora-bench messenger --ask 10.0.0.1:7000 --connections 1,4,16,64 --request 4096 --out runs
//! ```

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use remora_messenger::{Address, Options as Manner, Polling};

use super::Case;
use crate::perftest::Ends;

/// Requests per second and latency of the messenger and its rivals.
// Larger than the bound: a field for each option of the command line.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Milliseconds per measurement, 1000 if not said; with --serve, until it ends.
    #[arg(long)]
    pub millis: Option<u64>,
    /// Connections, for cases of one's own; without these the cases are those of the promises.
    #[arg(long, value_delimiter = ',')]
    pub connections: Vec<usize>,
    /// Requests under way on each connection.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub depths: Vec<usize>,
    /// Bytes of a request.
    #[arg(long, value_delimiter = ',', default_value = "64")]
    pub request: Vec<usize>,
    /// Bytes of a reply.
    #[arg(long, default_value_t = 64)]
    pub reply: usize,
    /// Transports of the messenger: tcp, shm; rdma, by --rdma-source (the server's device) and --rdma-reader (the client's).
    #[arg(long, value_delimiter = ',', default_value = "tcp")]
    pub stacks: Vec<String>,
    /// Rivals: raw; iperf3 (bulk); zeromq, redis; sockperf, ucx-tcp, ucx-posix, fi-tcp, fi-shm (to 4 KiB,
    /// one at a time); ib-send (between the devices of --rdma-…). What
    /// is not installed has no figures.
    #[arg(long, value_delimiter = ',', default_value = "raw,iperf3")]
    pub rivals: Vec<String>,
    /// Workers of the server's messenger, and of the client's.
    #[arg(long, default_value_t = 1)]
    pub workers: usize,
    /// The devices of RDMA.
    #[command(flatten)]
    pub ends: Ends,
    /// Leaves out checksums over bodies.
    #[arg(long)]
    pub no_crc: bool,
    /// What a worker does when there is nothing to do: event, spin, or adaptive:MICROSECONDS.
    #[arg(long, default_value = "event")]
    pub polling: Poll,
    /// Bytes that the pool of received data may keep; 0 takes every message's memory from the allocator.
    #[arg(long)]
    pub pool_bytes: Option<usize>,
    /// Requests that may be posted on a queue pair (rdma).
    #[arg(long)]
    pub queue_depth: Option<u32>,
    /// Measures the messenger once more for each of these, with that one thing changed: event, spin, adaptive:MICROSECONDS,
    /// workers:N, pool:BYTES, queue:DEPTH, allocator:LIBRARY.
    #[arg(long, value_delimiter = ',')]
    pub vary: Vec<String>,
    /// A library with another allocator, put before the system's in the server's process (as LD_PRELOAD does).
    #[arg(long)]
    pub allocator: Option<String>,
    /// Keeps one processor busy with something else meanwhile.
    #[arg(long)]
    pub busy: bool,
    /// Instead of requests: opens so many connections that say nothing, and tells the memory of both sides.
    #[arg(long)]
    pub idle: Option<usize>,
    /// Keeps the run in a folder of its own below this one.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// A word at the end of that folder's name, for runs that stand beside each other.
    #[arg(long)]
    pub label: Option<String>,
    /// Writes everything as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Runs the same, with these options, between the two devices of an emulated machine (lab/rdma-vm): RDMA where there is none.
    #[arg(long, conflicts_with_all = ["serve", "ask", "draw", "json", "rdma_source", "rdma_reader"])]
    pub emulated: bool,
    /// The server alone, for clients elsewhere, until Ctrl-C or for --millis: at IP:PORT over TCP, or an address with its transport
    /// (rdma:IP:PORT, shm:PATH). What it answers with is --reply bytes; it says where it listens.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["ask", "idle", "vary", "out", "json"])]
    pub serve: Option<Place>,
    /// The client alone, against such a server, with the same --reply: without rivals, which it could not start there.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["idle", "vary", "stacks", "rivals", "allocator"])]
    pub ask: Option<Place>,
    /// Draws the plots of a kept run again, out of the run.json in that folder.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["serve", "ask", "idle", "out"])]
    pub draw: Option<PathBuf>,
    /// What the program tells itself when it is to be the server.
    #[arg(long, hide = true)]
    pub answer: Option<String>,
}

/// Where a server listens that is not ours to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(pub Address);

impl Place {
    /// By which transport.
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
                Err("tls: needs certificates, which nobody has here; choose tcp, rdma or shm".to_owned())
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

/// What a worker does when there is nothing to do, as it is typed.
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

impl Options {
    /// How the client's messenger works.
    pub(super) fn manner(&self) -> Manner {
        let mut manner =
            Manner { workers: self.workers, summed: !self.no_crc, polling: self.polling.0, ..Manner::default() };
        manner.pool_bytes = self.pool_bytes.unwrap_or(manner.pool_bytes);
        manner.rdma.local = self.ends.rdma_reader;
        manner.rdma.wires.queue_depth = self.queue_depth.unwrap_or(manner.rdma.wires.queue_depth);
        manner
    }

    /// ... and the server's, which is called and calls from nowhere.
    pub(super) fn manner_of_server(&self) -> Manner {
        let mut manner = self.manner();
        manner.rdma.local = None;
        manner
    }

    /// The same with one thing changed, as `--vary` words it.
    pub(super) fn varied(&self, what: &str) -> crate::sync::Result<Options> {
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

    /// What this program is told when it is to be the server of a case.
    pub(super) fn for_server(&self, what: &str, case: &Case) -> Vec<String> {
        let mut arguments: Vec<String> = [NAME, "--answer", what, "--request"].map(str::to_owned).into();
        arguments.push(case.request.to_string());
        arguments.extend(["--reply".to_owned(), case.reply.to_string()]);
        arguments.extend(["--workers".to_owned(), self.workers.to_string()]);
        arguments.extend(["--polling".to_owned(), self.polling.to_string()]);
        arguments.extend(self.no_crc.then(|| "--no-crc".to_owned()));
        let numbers = [
            ("--pool-bytes", self.pool_bytes.map(|n| n.to_string())),
            ("--queue-depth", self.queue_depth.map(|n| n.to_string())),
        ];
        for (flag, number) in numbers {
            arguments.extend(number.into_iter().flat_map(|number| [flag.to_owned(), number]));
        }
        arguments
    }

    /// What is measured.
    pub(super) fn cases(&self) -> Vec<Case> {
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

/// The subcommand.
pub const NAME: &str = "messenger";

/// Milliseconds per measurement, unless somebody says otherwise: some ten thousand requests of the slowest.
pub(super) const MILLIS: u64 = 1000;

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
