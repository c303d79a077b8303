//! A run: every case with every subject in turn, round by round, summarised and kept; or the server alone, or the
//! client alone.
//!
//! A figure is the median of the rounds, a ratio the median of the rounds' ratios. Client and server are two processes,
//! whose processor time is counted separately.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use remora_lab::RdmaVm;

use super::ours::Server;
use super::ours::ZeroMq;
use super::{BULK_BYTES, Case, Figure, MILLIS, Options, Outcome, Place, Subject, ours};
use crate::processors::{self, Role};
use crate::suite;
use crate::sync::Result;
use crate::{Goal, Run, Sample, Spread, Target, cpu, distinct};

/// Runs the subcommand.
pub fn run(options: &Options) -> Result<bool> {
    if let Some(what) = &options.answer {
        return be_the_server(what, options).map(|()| true);
    }
    if let Some(place) = &options.serve {
        return serve(place, options).map(|()| true);
    }
    if options.emulated {
        return emulated(options);
    }
    if let Some(connections) = options.idle {
        return tell_idle(connections, options);
    }
    let _load = options.busy.then(Load::start).transpose()?;
    let mut bench = Bench::new(options.clone());
    bench.measure()?;
    bench.finish()
}

fn be_the_server(what: &str, options: &Options) -> Result<()> {
    match what {
        "raw" => ours::serve_raw(options.request[0], options.reply)?,
        address => ours::serve(&address.parse()?, options.reply, &options.manner_of_server())?,
    }
    Ok(())
}

/// Runs the server alone: prints its address on a line, and answers until its time is over or a signal ends it.
fn serve(place: &Place, options: &Options) -> Result<()> {
    let (_messenger, address) = ours::listen(&place.0, options.reply, &options.manner_of_server())?;
    println!("{address}");
    let Some(millis) = options.millis else {
        eprintln!("answers with {} bytes until Ctrl-C", options.reply);
        loop {
            std::thread::park();
        }
    };
    let until = Instant::now() + Duration::from_millis(millis);
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        std::thread::sleep(left);
    }
    println!("{:.2} s of processor time", cpu::of_self()?.as_secs_f64());
    Ok(())
}

fn tell_idle(connections: usize, options: &Options) -> Result<bool> {
    let case = Case { connections, depth: 0, request: 64, reply: 64 };
    let mut run = Run { unit: "MiB resident".to_owned(), ..new_run(options) };
    for round in 0..options.rounds {
        let mut server = server_of(options, "tcp:127.0.0.1:0", &case)?;
        let resident = ours::idle(&mut server, connections, &options.manner())?;
        for (subject, bytes) in ["client", "server"].into_iter().zip(resident) {
            let case = format!("{connections} idle connections");
            run.samples.push(Sample::new(subject, case, round, bytes as f64 / f64::from(1 << 20)));
        }
    }
    judge_idle(&mut run, connections);
    options.keep.finish(&run)?;
    Ok(run.keeps_promises())
}

/// Runs this command in an emulated machine that has RDMA devices.
fn emulated(options: &Options) -> Result<bool> {
    let (reader, source) = (RdmaVm::address(0).to_string(), RdmaVm::address(1).to_string());
    let devices = ["--rdma-reader", &reader, "--rdma-source", &source];
    suite::emulated(2, EMULATED_TIME, options.keep.out.as_deref(), &[], &devices)
}

/// An empty run with this command line.
fn new_run(options: &Options) -> Run {
    let name = options.label.as_deref().map_or_else(|| PROGRAM.to_owned(), |label| format!("{PROGRAM}-{label}"));
    let typed = suite::arguments(std::env::args().skip(1));
    Run { command: format!("remora-bench {typed}"), ..Run::new(&name, "thousand requests/s") }
}

fn server_of(options: &Options, what: &str, case: &Case) -> Result<Server> {
    let start = || Server::start(&options.for_server(what, case), options.allocator.as_deref());
    Ok(processors::on(Role::Primary, start)?)
}

struct Bench {
    options: Options,
    run: Run,
    figures: Vec<Figure>,
    zeromq: Option<ZeroMq>,
}

impl Bench {
    fn new(mut options: Options) -> Bench {
        let mut run = new_run(&options);
        if let Some(place) = &options.ask {
            run.notes.push(format!(
                "another command started the server at {place}: its processor time is that of all its clients"
            ));
            options.stacks = vec![place.transport().to_owned()];
            options.rivals.clear();
        }
        Bench { options, run, figures: Vec::new(), zeromq: None }
    }

    fn measure(&mut self) -> Result<()> {
        let cases = self.options.cases();
        for round in 0..self.options.rounds {
            eprintln!("round {} of {}", round + 1, self.options.rounds);
            let mut subjects = self.options.subjects();
            let count = subjects.len().max(1);
            subjects.rotate_left(round % count);
            for case in &cases {
                for subject in &subjects {
                    let outcome = match subject {
                        Subject::Ours { stack, varied: None } => Some(self.measure_ours(stack, case, &self.options)?),
                        Subject::Ours { stack, varied: Some(what) } => {
                            Some(self.measure_ours(stack, case, &self.options.varied(what)?)?)
                        }
                        Subject::Rival(rival) => self.measure_rival(rival, case)?,
                    };
                    if let Some(outcome) = outcome {
                        self.note(&subject.to_string(), case, round, outcome);
                    }
                }
            }
        }
        Ok(())
    }

    fn measure_ours(&self, stack: &str, case: &Case, options: &Options) -> Result<Outcome> {
        if let Some(place) = &self.options.ask {
            return Ok(ours::measure(&mut Server::elsewhere(place), case, self.time(), &options.manner())?);
        }
        let folder = tempfile::tempdir()?;
        let address = match stack {
            "shm" => format!("shm:{}", folder.path().join("link").display()),
            "rdma" => match self.options.ends.rdma_source {
                Some(server) => format!("rdma:{server}:0"),
                None => return Err("--stacks rdma needs --rdma-source: the address of an RDMA device".into()),
            },
            _ => "tcp:127.0.0.1:0".to_owned(),
        };
        let mut server = server_of(options, &address, case)?;
        let measure = || ours::measure(&mut server, case, self.time(), &options.manner());
        Ok(processors::on(Role::Source, measure)?)
    }

    fn measure_rival(&mut self, rival: &str, case: &Case) -> Result<Option<Outcome>> {
        match rival {
            "raw" => {
                let mut server = server_of(&self.options, "raw", case)?;
                let measure = || ours::measure_raw(&mut server, case, self.time());
                Ok(Some(processors::on(Role::Source, measure)?))
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

    /// Measures another program as rival: `None` if it does not support such cases, an inner error if it is not
    /// installed.
    fn measure_tool(&mut self, rival: &str, case: &Case) -> Result<std::result::Result<Option<Outcome>, String>> {
        let time = self.time();
        let outcome = match rival {
            // A stream without replies: a rival for bulk only.
            "iperf3" if case.request < BULK_BYTES => return Ok(Ok(None)),
            "iperf3" => ours::iperf3(case, time)?,
            "zeromq" => {
                if self.zeromq.is_none() {
                    self.zeromq = ZeroMq::build()?;
                }
                self.zeromq.as_ref().map(|zeromq| zeromq.measure(case, time)).transpose()?
            }
            "ib-send" => Some(ours::perftest(case, &self.options.ends)?),
            unknown => return Err(format!("{unknown}: unknown rival; --help lists them").into()),
        };
        let missing = || format!("{rival} is not installed: no figures of it");
        Ok(outcome.map(Some).ok_or_else(missing))
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.options.millis.unwrap_or(MILLIS))
    }

    fn note(&mut self, subject: &str, case: &Case, round: usize, outcome: Outcome) {
        let gigabytes = outcome.requests as f64 * case.request as f64 / 1e9;
        let sample = Sample::new(subject, case.to_string(), round, outcome.rate() / 1e3);
        self.run.samples.push(sample.cost(outcome.client_cpu, outcome.server_cpu, gigabytes));
        self.figures.push(Figure { subject: subject.to_owned(), case: *case, round, outcome });
    }

    fn finish(mut self) -> Result<bool> {
        judge(&mut self.run, &self.figures, &self.options);
        let summary = self.summary();
        print!("{summary}");
        let all = serde_json::json!({ "run": self.run, "figures": self.figures });
        let keep = &self.options.keep;
        keep.said(keep.write(&self.run, summary, &self.figures, &all)?);
        Ok(self.run.keeps_promises())
    }

    /// The table: a line per case and subject, medians over the rounds.
    fn summary(&self) -> String {
        let mut out = format!("# {}\n\n`{}`\n\n", self.run.program, self.run.command);
        out += "| request × connections × depth | subject | thousand/s | low | high | GB/s | mean µs | p50 | p99 | p99.9 | client CPU µs | server CPU µs |\n";
        out += "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
        for (case, subject) in distinct(self.figures.iter().map(|figure| (figure.case, &figure.subject))) {
            let of_cell = || self.figures.iter().filter(|figure| figure.case == case && figure.subject == *subject);
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
        self.run.conclude(&mut out);
        out
    }
}

/// Load on a processor: a separate process, whose processor time is not counted.
struct Load(std::process::Child);

impl Load {
    fn start() -> std::io::Result<Load> {
        std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().map(Load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended already
        let _ = self.0.wait();
    }
}

/// The name of kept runs.
const PROGRAM: &str = "bench_messenger";

/// Time limit for booting an emulated machine and measuring in it.
const EMULATED_TIME: Duration = Duration::from_secs(600);

// The goals of messenger/README.md, and whether a run reaches them.
//
// Goals are for quiet machines and default options. A goal is judged in each run that has its case; a run without it
// does not miss it.

/// Compares ours with each rival and with itself, and judges the figures that have a goal of their own.
pub(super) fn judge(run: &mut Run, figures: &[Figure], options: &Options) {
    let is_plain = !options.busy && options.workers == 1;
    for case in options.cases() {
        compare(run, &case, options, is_plain);
    }
    run.comparisons.retain(|comparison| comparison.ratio.is_some() || comparison.target.is_some());
    if is_plain {
        run.goals = goals(figures);
    }
}

/// Judges the memory of both ends together.
fn judge_idle(run: &mut Run, connections: usize) {
    let rounds = run.samples.iter().map(|sample| sample.round + 1).max().unwrap_or(0);
    let of = |round| run.samples.iter().filter(move |sample| sample.round == round).map(|sample| sample.value).sum();
    if connections >= IDLE_CONNECTIONS {
        run.goals.push(Goal {
            what: format!("{connections} idle connections, both ends, MiB"),
            target: Target::most(IDLE_MIB),
            value: Spread::of((0..rounds).map(of)),
        });
    }
}

fn compare(run: &mut Run, case: &Case, options: &Options, is_plain: bool) {
    let name = case.to_string();
    let promised = |rival: &str| {
        let found = RATIOS.iter().find(|(request, connections, depth, beside, _)| {
            (*request, *connections, *depth, *beside) == (case.request, case.connections, case.depth, rival)
        });
        // Beside rivals that were requested.
        let is_asked = options.rivals.iter().any(|asked| asked == rival);
        found.map(|(.., ratio)| *ratio).filter(|_| is_plain && is_asked)
    };
    let (raw, iperf3, zeromq) = (promised("raw"), promised("iperf3"), promised("zeromq"));
    for stack in &options.stacks {
        let ours = format!("ours, {stack}");
        let is_tcp = |least: Option<f64>| least.filter(|_| stack == "tcp");
        run.compare((&ours, &name), ("raw", &name), is_tcp(raw));
        run.compare((&ours, &name), ("zeromq", &name), is_tcp(zeromq));
        run.compare((&ours, &name), ("ib-send", &name), None);
        for what in &options.vary {
            run.compare((&format!("{ours}, {what}"), &name), (&ours, &name), None);
        }
        if case.request >= BULK_BYTES {
            run.compare((&ours, &name), ("iperf3", &name), is_tcp(iperf3));
        }
        let few = Case { connections: FEW, ..*case };
        if (case.request, case.connections, case.depth) == (SMALL, MANY, 1) && options.cases().contains(&few) {
            let least = is_tcp(Some(MANY_LEAST)).filter(|_| is_plain);
            run.compare((&ours, &name), (&ours, &few.to_string()), least);
        }
    }
}

/// The goals of which there are figures.
fn goals(figures: &[Figure]) -> Vec<Goal> {
    let goal = |figure: &Absolute| {
        let of = figures.iter().filter(|measured| {
            let Case { connections, depth, request, .. } = measured.case;
            measured.subject == figure.subject && (request, connections, depth) == figure.case
        });
        let value = Spread::of(of.map(|measured| (figure.value)(&measured.outcome)))?;
        let (request, connections, depth) = figure.case;
        let case = Case { connections, depth, request, reply: 0 };
        Some(Goal {
            what: format!("{}, {case}: {}", figure.subject, figure.what),
            target: figure.target,
            value: Some(value),
        })
    };
    ABSOLUTE.iter().filter_map(goal).collect()
}

/// A goal for a figure itself.
struct Absolute {
    subject: &'static str,
    /// Request bytes, connections, depth.
    case: (usize, usize, usize),
    what: &'static str,
    value: fn(&Outcome) -> f64,
    target: Target,
}

/// Figures that have a goal of their own.
const ABSOLUTE: [Absolute; 4] = [
    Absolute {
        subject: "ours, tcp",
        case: (4096, 16, 32),
        what: "thousand requests/s",
        value: |outcome| outcome.rate() / 1e3,
        target: Target::least(600.0),
    },
    Absolute {
        subject: "ours, tcp",
        case: (4096, 16, 32),
        what: "processor µs of both ends for each request",
        value: |outcome| outcome.cpu_per_request().iter().sum(),
        target: Target::most(3.0),
    },
    Absolute {
        subject: "ours, shm, spin",
        case: (SMALL, 1, 1),
        what: "median time of a request, µs",
        value: |outcome| outcome.latency[1],
        target: Target::most(1.5),
    },
    Absolute {
        subject: "ours, shm",
        case: (SMALL, 1, 1),
        what: "median time of a request, µs",
        value: |outcome| outcome.latency[1],
        target: Target::most(10.0),
    },
];

/// Goals beside a rival: request bytes, connections, depth, the rival, and the least ratio of the rates.
const RATIOS: [(usize, usize, usize, &str, f64); 8] = [
    (SMALL, 1, 1, "zeromq", 2.5),
    (SMALL, 1, 1, "raw", 0.75),
    (SMALL, 16, 1, "raw", 0.75),
    (4096, 16, 32, "raw", 0.5),
    (131_072, 1, 32, "iperf3", 0.85),
    (131_072, 16, 32, "iperf3", 0.85),
    (1 << 20, 1, 32, "iperf3", 0.85),
    (1 << 20, 16, 32, "iperf3", 0.85),
];

/// Bytes of a small request.
const SMALL: usize = 64;

/// Many connections must reach this share of the rate of a few.
const MANY: usize = 64;
const FEW: usize = 16;
const MANY_LEAST: f64 = 0.95;

/// This many idle connections may take so much memory at both ends together, in MiB.
const IDLE_CONNECTIONS: usize = 10_000;
const IDLE_MIB: f64 = 200.0;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// Judges a kept run again, by its figures and its command line.
    fn judged(name: &str) -> Run {
        #[derive(serde::Deserialize)]
        struct Kept {
            run: Run,
            figures: Vec<Figure>,
        }
        let file = Path::new("../../bench/runs").join(name).join("run.json");
        let Kept { run, figures } = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let typed = run.command.strip_prefix("remora-bench ").unwrap().to_owned();
        let mut run = Run { comparisons: Vec::new(), ..run };
        judge(&mut run, &figures, &Line::parse_from(typed.split_whitespace()).options);
        run
    }

    /// The goals of a run, its own figures and the ratios of ours, and whether they are reached.
    fn verdicts(run: &Run) -> Vec<(String, bool)> {
        let goals = run.goals.iter().map(|goal| (goal.what.clone(), goal.is_kept()));
        let promised = run.comparisons.iter().filter(|comparison| comparison.target.is_some());
        let ratios = promised.map(|comparison| {
            let (ours, rival) = (&comparison.ours, &comparison.rival);
            (format!("{}, {} : {}, {}", ours.0, ours.1, rival.0, rival.1), comparison.is_kept())
        });
        goals.chain(ratios).collect()
    }

    fn assert_verdicts(name: &str, wanted: &[(&str, bool)]) {
        let judged = verdicts(&judged(name));
        let judged: Vec<(&str, bool)> = judged.iter().map(|(what, kept)| (what.as_str(), *kept)).collect();
        assert_eq!(judged, wanted, "{name}");
    }

    #[test]
    fn kept_runs_are_judged_as_the_page_says() {
        assert_verdicts(
            "2026-11-22-2vcpu-bench_messenger",
            &[
                ("ours, tcp, 4 KiB × 16 × 32: thousand requests/s", true),
                ("ours, tcp, 4 KiB × 16 × 32: processor µs of both ends for each request", true),
                ("ours, tcp, 64 B × 1 × 1 : raw, 64 B × 1 × 1", true),
                ("ours, tcp, 64 B × 16 × 1 : raw, 64 B × 16 × 1", true),
                ("ours, tcp, 64 B × 64 × 1 : ours, tcp, 64 B × 16 × 1", true),
                ("ours, tcp, 4 KiB × 16 × 32 : raw, 4 KiB × 16 × 32", false),
                ("ours, tcp, 128 KiB × 1 × 32 : iperf3, 128 KiB × 1 × 32", true),
                ("ours, tcp, 128 KiB × 16 × 32 : iperf3, 128 KiB × 16 × 32", true),
                ("ours, tcp, 1 MiB × 1 × 32 : iperf3, 1 MiB × 1 × 32", true),
                ("ours, tcp, 1 MiB × 16 × 32 : iperf3, 1 MiB × 16 × 32", true),
            ],
        );
        assert_verdicts(
            "2026-11-22-2vcpu-bench_messenger-rivals",
            &[
                ("ours, tcp, 64 B × 1 × 1 : raw, 64 B × 1 × 1", true),
                ("ours, tcp, 64 B × 1 × 1 : zeromq, 64 B × 1 × 1", true),
                ("ours, tcp, 64 B × 16 × 1 : raw, 64 B × 16 × 1", true),
                ("ours, tcp, 64 B × 64 × 1 : ours, tcp, 64 B × 16 × 1", false),
            ],
        );
        let median = "64 B × 1 × 1: median time of a request, µs";
        assert_verdicts(
            "2026-11-22-2vcpu-bench_messenger-shm",
            &[(&format!("ours, shm, spin, {median}"), false), (&format!("ours, shm, {median}"), false)],
        );
        // Goals are for quiet machines.
        assert_verdicts("2026-11-22-2vcpu-bench_messenger-busy", &[]);
    }

    #[test]
    fn ten_thousand_idle_connections_are_judged_by_the_memory_of_both_ends() {
        let file = Path::new("../../bench/runs/2026-11-22-2vcpu-bench_messenger-idle/run.json");
        let mut run: Run = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        judge_idle(&mut run, 100);
        assert!(run.goals.is_empty(), "fewer connections have no goal");
        judge_idle(&mut run, 10_000);
        let value = run.goals[0].value.unwrap();
        assert!((100.0..110.0).contains(&value.median) && run.keeps_promises(), "{value:?}");
        run.samples.iter_mut().filter(|sample| sample.subject == "server").for_each(|sample| sample.value += 100.0);
        run.goals.clear();
        judge_idle(&mut run, 10_000);
        assert!(!run.keeps_promises());
    }
}
