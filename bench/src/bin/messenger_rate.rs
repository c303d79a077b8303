//! How many requests a second, and how long each takes: the messenger against raw epoll, iperf3, ZeroMQ, and the ping-pongs of
//! others.
//!
//! Each round measures every case with every subject in turn; a figure is the median of the rounds, a ratio the median of the
//! rounds' ratios. Client and server are two processes, whose processor time is counted apart.
//!
//! ```text
//! cargo run --release -p remora-bench --bin messenger_rate -- --rounds 5 --out bench/runs
//! cargo run --release -p remora-bench --bin messenger_rate -- --connections 1,16 --depths 1,32 --request 64 --reply 64
//! cargo run --release -p remora-bench --bin messenger_rate -- --idle 10000
//! … -- --connections 1,16 --vary spin,adaptive:50,workers:2,workers:10,pool:0     what each of the seeds' findings comes to
//! lab/rdma-vm/rdma-vm -n 2 target/release/messenger_rate --stacks rdma --rivals ib-send --rdma-source 10.77.0.2 --rdma-reader 10.77.0.1
//! ```

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;
use remora_bench::messenger::{Case, Outcome, ours, plots, raw, server::Server, tools, zeromq::ZeroMq};
use remora_bench::perftest::Ends;
use remora_bench::{Run, Sample, Spread};
use remora_messenger::{Address, Options as Manner, Polling};
use serde::Serialize;

/// Requests per second and latency of the messenger and its rivals.
#[derive(Parser, Debug, Clone)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds per measurement.
    #[arg(long, default_value_t = 1000)]
    millis: u64,
    /// Connections, for cases of one's own; without these the cases are those of the promises.
    #[arg(long, value_delimiter = ',')]
    connections: Vec<usize>,
    /// Requests under way on each connection.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    depths: Vec<usize>,
    /// Bytes of a request.
    #[arg(long, value_delimiter = ',', default_value = "64")]
    request: Vec<usize>,
    /// Bytes of a reply.
    #[arg(long, default_value_t = 64)]
    reply: usize,
    /// Transports of the messenger: tcp, shm; rdma, by --rdma-source (the server's device) and --rdma-reader (the client's).
    #[arg(long, value_delimiter = ',', default_value = "tcp")]
    stacks: Vec<String>,
    /// Rivals: raw; iperf3 (bulk); zeromq, redis; sockperf, ucx-tcp, ucx-posix, fi-tcp, fi-shm (to 4 KiB,
    /// one at a time); ib-send (between the devices of --rdma-…). What
    /// is not installed has no figures.
    #[arg(long, value_delimiter = ',', default_value = "raw,iperf3")]
    rivals: Vec<String>,
    /// Workers of the server's messenger, and of the client's.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    #[command(flatten)]
    ends: Ends,
    /// Leaves out checksums over bodies.
    #[arg(long)]
    no_crc: bool,
    /// What a worker does when there is nothing to do: event, spin, or adaptive:MICROSECONDS.
    #[arg(long, default_value = "event")]
    polling: Poll,
    /// Bytes that the pool of received data may keep; 0 takes every message's memory from the allocator.
    #[arg(long)]
    pool_bytes: Option<usize>,
    /// Requests that may be posted on a queue pair (rdma).
    #[arg(long)]
    queue_depth: Option<u32>,
    /// Measures the messenger once more for each of these, with that one thing changed: event, spin, adaptive:MICROSECONDS,
    /// workers:N, pool:BYTES, queue:DEPTH, allocator:LIBRARY.
    #[arg(long, value_delimiter = ',')]
    vary: Vec<String>,
    /// A library with another allocator, put before the system's in the server's process (as LD_PRELOAD does).
    #[arg(long)]
    allocator: Option<String>,
    /// Keeps one processor busy with something else meanwhile.
    #[arg(long)]
    busy: bool,
    /// Instead of requests: opens so many connections that say nothing, and tells the memory of both sides.
    #[arg(long)]
    idle: Option<usize>,
    /// Keeps the run in a folder of its own below this one.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Writes everything as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// What the program tells itself when it is to be the server.
    #[arg(long, hide = true)]
    serve: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct Poll(Polling);

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

impl std::fmt::Display for Poll {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Polling::Event => write!(to, "event"),
            Polling::Spin => write!(to, "spin"),
            Polling::Adaptive(limit) => write!(to, "adaptive:{}", limit.as_micros()),
        }
    }
}

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<ExitCode, Failure> {
    let options = Options::parse();
    if let Some(what) = &options.serve {
        return be_the_server(what, &options).map(|()| ExitCode::SUCCESS);
    }
    if let Some(connections) = options.idle {
        return tell_idle(connections, &options).map(|()| ExitCode::SUCCESS);
    }
    let _load = options.busy.then(Load::start).transpose()?;
    let mut bench = Bench::new(options);
    bench.measure()?;
    bench.finish()
}

fn be_the_server(what: &str, options: &Options) -> Result<(), Failure> {
    match what {
        "raw" => raw::serve(options.request[0], options.reply)?,
        address => ours::serve(&address.parse::<Address>()?, options.reply, &options.manner())?,
    }
    Ok(())
}

fn tell_idle(connections: usize, options: &Options) -> Result<(), Failure> {
    let case = Case { connections, depth: 0, request: 64, reply: 64 };
    let mut server = options.server("tcp:127.0.0.1:0", &case)?;
    let [client, server] = ours::idle(&mut server, connections, &options.manner())?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("{connections} idle connections: client {:.1} MiB, server {:.1} MiB", mib(client), mib(server));
    Ok(())
}

impl Options {
    fn manner(&self) -> Manner {
        let mut manner =
            Manner { workers: self.workers, summed: !self.no_crc, polling: self.polling.0, ..Manner::default() };
        manner.pool_bytes = self.pool_bytes.unwrap_or(manner.pool_bytes);
        manner.rdma.local = self.ends.rdma_reader;
        manner.rdma.wires.queue_depth = self.queue_depth.unwrap_or(manner.rdma.wires.queue_depth);
        manner
    }

    /// The same with one thing changed, as `--vary` words it.
    fn varied(&self, what: &str) -> Result<Options, Failure> {
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

    fn server(&self, what: &str, case: &Case) -> Result<Server, Failure> {
        let mut arguments: Vec<String> =
            ["--serve", what, "--request"].map(str::to_owned).into_iter().chain([case.request.to_string()]).collect();
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
        Ok(Server::start(&arguments, self.allocator.as_deref())?)
    }

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

/// Every figure of a run.
#[derive(Serialize)]
struct Figure {
    subject: String,
    case: Case,
    round: usize,
    #[serde(flatten)]
    outcome: Outcome,
}

struct Bench {
    options: Options,
    run: Run,
    figures: Vec<Figure>,
    zeromq: Option<ZeroMq>,
}

impl Bench {
    fn new(options: Options) -> Bench {
        Bench { options, run: Run::new("messenger_rate", "thousand requests/s"), figures: Vec::new(), zeromq: None }
    }

    fn measure(&mut self) -> Result<(), Failure> {
        let cases = self.options.cases();
        for round in 0..self.options.rounds {
            eprintln!("round {} of {}", round + 1, self.options.rounds);
            for case in &cases {
                for stack in self.options.stacks.clone() {
                    let outcome = self.measure_ours(&stack, case, &self.options)?;
                    self.note(&format!("ours, {stack}"), case, round, outcome);
                    for what in self.options.vary.clone() {
                        let outcome = self.measure_ours(&stack, case, &self.options.varied(&what)?)?;
                        self.note(&format!("ours, {stack}, {what}"), case, round, outcome);
                    }
                }
                for rival in self.options.rivals.clone() {
                    if let Some(outcome) = self.measure_rival(&rival, case)? {
                        self.note(&rival, case, round, outcome);
                    }
                }
            }
        }
        Ok(())
    }

    fn measure_ours(&self, stack: &str, case: &Case, options: &Options) -> Result<Outcome, Failure> {
        let folder = tempfile::tempdir()?;
        let address = match stack {
            "shm" => format!("shm:{}", folder.path().join("bell").display()),
            "rdma" => match self.options.ends.rdma_source {
                Some(server) => format!("rdma:{server}:0"),
                None => return Err("--stacks rdma needs --rdma-source: the address of an RDMA device".into()),
            },
            _ => "tcp:127.0.0.1:0".to_owned(),
        };
        let mut server = options.server(&address, case)?;
        Ok(ours::measure(&mut server, case, self.time(), &options.manner())?)
    }

    fn measure_rival(&mut self, rival: &str, case: &Case) -> Result<Option<Outcome>, Failure> {
        match rival {
            "raw" => {
                let mut server = self.options.server("raw", case)?;
                Ok(Some(raw::measure(&mut server, case, self.time())?))
            }
            _ => {
                let outcome = self.measure_tool(rival, case)?;
                if let Err(missing) = &outcome
                    && !self.run.notes.contains(missing)
                {
                    self.run.notes.push(missing.clone());
                }
                Ok(outcome.ok().flatten())
            }
        }
    }

    /// A rival that others wrote; none where it does not know such cases, the inner error where it is not installed.
    fn measure_tool(&mut self, rival: &str, case: &Case) -> Result<Result<Option<Outcome>, String>, Failure> {
        let is_ping_pong = (case.connections, case.depth) == (1, 1) && case.request <= PING_PONG_BYTES;
        let time = self.time();
        let outcome = match rival {
            // A stream that nobody answers: a rival for bulk only.
            "iperf3" if case.request < BULK_BYTES => return Ok(Ok(None)),
            "iperf3" => tools::iperf3(case, time)?,
            "redis" if case.request >= BULK_BYTES => return Ok(Ok(None)),
            "redis" => tools::redis(case, time)?,
            "zeromq" => {
                if self.zeromq.is_none() {
                    self.zeromq = ZeroMq::build()?;
                }
                self.zeromq.as_ref().map(|zeromq| zeromq.measure(case, time)).transpose()?
            }
            "ib-send" => Some(tools::perftest(case, &self.options.ends)?),
            "sockperf" | "ucx-tcp" | "ucx-posix" | "fi-tcp" | "fi-shm" if !is_ping_pong => return Ok(Ok(None)),
            "sockperf" => tools::sockperf(case, time)?,
            "ucx-tcp" => tools::ucx(case, "tcp")?,
            "ucx-posix" => tools::ucx(case, "posix")?,
            "fi-tcp" => tools::fabric(case, "tcp;ofi_rxm")?,
            "fi-shm" => tools::fabric(case, "shm")?,
            unknown => return Err(format!("{unknown}: no such rival; --help lists them").into()),
        };
        let missing = || format!("{rival} is not installed: no figures of it");
        Ok(outcome.map(Some).ok_or_else(missing))
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.options.millis)
    }

    fn note(&mut self, subject: &str, case: &Case, round: usize, outcome: Outcome) {
        self.run.samples.push(Sample {
            subject: subject.to_owned(),
            case: case.to_string(),
            round,
            value: outcome.rate() / 1e3,
            reader_cpu_seconds: outcome.client_cpu,
            source_cpu_seconds: outcome.server_cpu,
            gigabytes: outcome.requests as f64 * case.request as f64 / 1e9,
        });
        self.figures.push(Figure { subject: subject.to_owned(), case: *case, round, outcome });
    }

    fn compare(&mut self) {
        for case in self.options.cases() {
            let name = case.to_string();
            let promised = |rival: &str| {
                let found = PROMISES.iter().find(|(request, connections, depth, whom, _)| {
                    (*request, *connections, *depth, *whom) == (case.request, case.connections, case.depth, rival)
                });
                // Promises are for quiet machines and plain options, beside rivals that were asked for.
                let is_plain = !self.options.busy && self.options.workers == 1;
                let is_asked = self.options.rivals.iter().any(|asked| asked == rival);
                found.map(|(.., ratio)| *ratio).filter(|_| is_plain && is_asked)
            };
            let (raw, iperf3, zeromq) = (promised("raw"), promised("iperf3"), promised("zeromq"));
            for stack in self.options.stacks.clone() {
                let ours = format!("ours, {stack}");
                let is_tcp = |least: Option<f64>| least.filter(|_| stack == "tcp");
                self.run.compare((&ours, &name), ("raw", &name), is_tcp(raw));
                self.run.compare((&ours, &name), ("zeromq", &name), is_tcp(zeromq));
                self.run.compare((&ours, &name), ("ib-send", &name), None);
                for what in &self.options.vary {
                    self.run.compare((&format!("{ours}, {what}"), &name), (&ours, &name), None);
                }
                if case.request >= BULK_BYTES {
                    self.run.compare((&ours, &name), ("iperf3", &name), is_tcp(iperf3));
                }
            }
        }
        self.run.comparisons.retain(|comparison| comparison.ratio.is_some() || comparison.at_least.is_some());
    }

    fn finish(mut self) -> Result<ExitCode, Failure> {
        self.compare();
        let summary = self.summary();
        print!("{summary}");
        let json = serde_json::to_string_pretty(&serde_json::json!({ "run": self.run, "figures": self.figures }))?;
        if let Some(path) = &self.options.json {
            std::fs::write(path, &json)?;
        }
        if let Some(folder) = &self.options.out {
            let files = [("raw.csv", self.raw()), ("summary.md", summary), ("run.json", json)];
            let kept = self.run.keep_files(folder, &files)?;
            println!("\nkept in {}", kept.display());
            plots::draw(&self.points(), &kept)?;
        }
        Ok(if self.run.keeps_promises() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// The table: a line per case and subject, medians over the rounds.
    fn summary(&self) -> String {
        let mut out = format!("# messenger_rate\n\n`{}`\n\n", self.run.command);
        out += "| request × connections × depth | subject | thousand/s | low | high | GB/s | mean µs | p50 | p99 | p99.9 | client CPU µs | server CPU µs |\n";
        out += "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
        for (case, subject) in self.cells() {
            let of_cell = || self.figures.iter().filter(|figure| figure.case == case && figure.subject == subject);
            let median = |value: &dyn Fn(&Outcome) -> f64| {
                Spread::of(of_cell().map(|figure| value(&figure.outcome))).map_or(0.0, |spread| spread.median)
            };
            let Some(rate) = Spread::of(of_cell().map(|figure| figure.outcome.rate() / 1e3)) else { continue };
            let latency = [0, 1, 2, 3].map(|at| median(&|outcome| outcome.latency[at]));
            let cpu = [0, 1].map(|at| median(&|outcome| outcome.cpu_per_request()[at]));
            let _ = writeln!(
                out,
                "| {case} | {subject} | {:.1} | {:.1} | {:.1} | {:.2} | {:.1} | {:.1} | {:.1} | {:.1} | {:.2} | {:.2} |",
                rate.median,
                rate.low,
                rate.high,
                rate.median * 1e3 * case.request as f64 / 1e9,
                latency[0],
                latency[1],
                latency[2],
                latency[3],
                cpu[0],
                cpu[1],
            );
        }
        self.run.summarise_comparisons(&mut out);
        for note in &self.run.notes {
            let _ = writeln!(out, "\n> {note}");
        }
        out
    }

    /// Medians for the plots.
    fn points(&self) -> Vec<plots::Point> {
        let point = |(case, subject): (Case, &str)| {
            let of_cell = || self.figures.iter().filter(move |figure| figure.case == case && figure.subject == subject);
            let rate = Spread::of(of_cell().map(|figure| figure.outcome.rate()))?.median;
            let p50 = Spread::of(of_cell().map(|figure| figure.outcome.latency[1]))?.median;
            Some(plots::Point { subject: subject.to_owned(), case, rate, p50 })
        };
        self.cells().into_iter().filter_map(point).collect()
    }

    fn cells(&self) -> Vec<(Case, &str)> {
        let mut cells: Vec<(Case, &str)> = Vec::new();
        for figure in &self.figures {
            if !cells.contains(&(figure.case, &figure.subject)) {
                cells.push((figure.case, &figure.subject));
            }
        }
        cells
    }

    fn raw(&self) -> String {
        let mut out = String::from(
            "subject,request,reply,connections,depth,round,requests,seconds,mean_us,p50_us,p99_us,p999_us,client_cpu_seconds,server_cpu_seconds\n",
        );
        for Figure { subject, case, round, outcome } in &self.figures {
            let Case { connections, depth, request, reply } = case;
            let Outcome { requests, seconds, latency: [mean, p50, p99, p999], client_cpu, server_cpu } = outcome;
            let _ = writeln!(
                out,
                "\"{subject}\",{request},{reply},{connections},{depth},{round},{requests},{seconds:.6},{mean:.2},{p50:.2},{p99:.2},{p999:.2},{client_cpu:.6},{server_cpu:.6}"
            );
        }
        out
    }
}

/// Somebody else who uses a processor: a process of its own, whose time is nobody's here.
struct Load(std::process::Child);

impl Load {
    fn start() -> std::io::Result<Load> {
        std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().map(Load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have been ended by somebody else
        let _ = self.0.wait();
    }
}

/// Requests of this size and above are measured against a stream.
const BULK_BYTES: usize = 128 * 1024;

/// Longer messages are no ping-pong.
const PING_PONG_BYTES: usize = 4096;

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

/// ... the rival, and the least ratio of the rates.
const PROMISES: [(usize, usize, usize, &str, f64); 8] = [
    (64, 1, 1, "zeromq", 2.5),
    (64, 1, 1, "raw", 0.75),
    (64, 16, 1, "raw", 0.75),
    (4096, 16, 32, "raw", 0.5),
    (131_072, 1, 32, "iperf3", 0.85),
    (131_072, 16, 32, "iperf3", 0.85),
    (1 << 20, 1, 32, "iperf3", 0.85),
    (1 << 20, 16, 32, "iperf3", 0.85),
];
