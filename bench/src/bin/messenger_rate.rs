//! How many requests a second, and how long each takes: the messenger against raw epoll and against iperf3.
//!
//! Each round measures every case with every subject in turn; a figure is the median of the rounds, a ratio the median of the
//! rounds' ratios. Client and server are two processes, whose processor time is counted apart.
//!
//! ```text
//! cargo run --release -p remora-bench --bin messenger_rate -- --rounds 5 --out bench/runs
//! cargo run --release -p remora-bench --bin messenger_rate -- --connections 1,16 --depths 1,32 --request 64 --reply 64
//! cargo run --release -p remora-bench --bin messenger_rate -- --idle 10000
//! ```

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;
use remora_bench::messenger::{Case, Outcome, ours, raw, server::Server, tools};
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
    /// Transports of the messenger: tcp, shm.
    #[arg(long, value_delimiter = ',', default_value = "tcp")]
    stacks: Vec<String>,
    /// Rivals: raw, iperf3.
    #[arg(long, value_delimiter = ',', default_value = "raw,iperf3")]
    rivals: Vec<String>,
    /// Workers of the server's messenger, and of the client's.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// Leaves out checksums over bodies.
    #[arg(long)]
    no_crc: bool,
    /// What a worker does when there is nothing to do: event, spin, or adaptive:MICROSECONDS.
    #[arg(long, default_value = "event")]
    polling: Poll,
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
        Manner { workers: self.workers, summed: !self.no_crc, polling: self.polling.0, ..Manner::default() }
    }

    fn server(&self, what: &str, case: &Case) -> Result<Server, Failure> {
        let mut arguments: Vec<String> =
            ["--serve", what, "--request"].map(str::to_owned).into_iter().chain([case.request.to_string()]).collect();
        arguments.extend(["--reply".to_owned(), case.reply.to_string()]);
        arguments.extend(["--workers".to_owned(), self.workers.to_string()]);
        arguments.extend(["--polling".to_owned(), self.polling.to_string()]);
        arguments.extend(self.no_crc.then(|| "--no-crc".to_owned()));
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
}

impl Bench {
    fn new(options: Options) -> Bench {
        Bench { options, run: Run::new("messenger_rate", "thousand requests/s"), figures: Vec::new() }
    }

    fn measure(&mut self) -> Result<(), Failure> {
        let cases = self.options.cases();
        for round in 0..self.options.rounds {
            eprintln!("round {} of {}", round + 1, self.options.rounds);
            for case in &cases {
                for stack in self.options.stacks.clone() {
                    let outcome = self.measure_ours(&stack, case)?;
                    self.note(&format!("ours, {stack}"), case, round, outcome);
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

    fn measure_ours(&self, stack: &str, case: &Case) -> Result<Outcome, Failure> {
        let folder = tempfile::tempdir()?;
        let address = match stack {
            "shm" => format!("shm:{}", folder.path().join("bell").display()),
            _ => "tcp:127.0.0.1:0".to_owned(),
        };
        let mut server = self.options.server(&address, case)?;
        Ok(ours::measure(&mut server, case, self.time(), &self.options.manner())?)
    }

    fn measure_rival(&mut self, rival: &str, case: &Case) -> Result<Option<Outcome>, Failure> {
        match rival {
            "raw" => {
                let mut server = self.options.server("raw", case)?;
                Ok(Some(raw::measure(&mut server, case, self.time())?))
            }
            // A stream that nobody answers: a rival for bulk only.
            "iperf3" if case.request >= BULK_BYTES => {
                let outcome = tools::iperf3(case, self.time())?;
                let missing = "iperf3 is not installed: no figures of it";
                if outcome.is_none() && !self.run.notes.iter().any(|note| note == missing) {
                    self.run.notes.push(missing.to_owned());
                }
                Ok(outcome)
            }
            "iperf3" => Ok(None),
            unknown => Err(format!("{unknown}: no such rival; there are raw and iperf3").into()),
        }
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
                // Promises are for quiet machines and plain options.
                found.map(|(.., ratio)| *ratio).filter(|_| !self.options.busy && self.options.workers == 1)
            };
            let (raw, iperf3) = (promised("raw"), promised("iperf3"));
            for stack in self.options.stacks.clone() {
                let ours = format!("ours, {stack}");
                let is_tcp = |least: Option<f64>| least.filter(|_| stack == "tcp");
                self.run.compare((&ours, &name), ("raw", &name), is_tcp(raw));
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
            println!("\nkept in {}", self.run.keep_files(folder, &files)?.display());
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
const PROMISES: [(usize, usize, usize, &str, f64); 7] = [
    (64, 1, 1, "raw", 0.75),
    (64, 16, 1, "raw", 0.75),
    (4096, 16, 32, "raw", 0.5),
    (131_072, 1, 32, "iperf3", 0.85),
    (131_072, 16, 32, "iperf3", 0.85),
    (1 << 20, 1, 32, "iperf3", 0.85),
    (1 << 20, 16, 32, "iperf3", 0.85),
];
