//! The goals of messenger/README.md, and whether a run reaches them.
//!
//! Goals are for quiet machines and default options. A goal is judged in each run that has its case; a run without it
//! does not miss it.

use super::options::Options;
use super::{BULK_BYTES, Case, Figure, Outcome};
use crate::{Goal, Run, Spread};

/// Compares ours with each rival and with itself, and judges the figures that have a goal of their own.
pub(super) fn judge(run: &mut Run, figures: &[Figure], options: &Options) {
    let is_plain = !options.busy && options.workers == 1;
    for case in options.cases() {
        compare(run, &case, options, is_plain);
    }
    run.comparisons.retain(|comparison| comparison.ratio.is_some() || comparison.at_least.is_some());
    if is_plain {
        run.goals = goals(figures);
    }
}

/// Judges the memory of both ends together.
pub(super) fn judge_idle(run: &mut Run, connections: usize) {
    let rounds = run.samples.iter().map(|sample| sample.round + 1).max().unwrap_or(0);
    let of = |round| run.samples.iter().filter(move |sample| sample.round == round).map(|sample| sample.value).sum();
    if connections >= IDLE_CONNECTIONS {
        run.goals.push(Goal {
            what: format!("{connections} idle connections, both ends, MiB"),
            at_least: None,
            at_most: Some(IDLE_MIB),
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
            at_least: figure.at_least,
            at_most: figure.at_most,
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
    at_least: Option<f64>,
    at_most: Option<f64>,
}

/// Figures that have a goal of their own.
const ABSOLUTE: [Absolute; 4] = [
    Absolute {
        subject: "ours, tcp",
        case: (4096, 16, 32),
        what: "thousand requests/s",
        value: |outcome| outcome.rate() / 1e3,
        at_least: Some(600.0),
        at_most: None,
    },
    Absolute {
        subject: "ours, tcp",
        case: (4096, 16, 32),
        what: "processor µs of both ends for each request",
        value: |outcome| outcome.cpu_per_request().iter().sum(),
        at_least: None,
        at_most: Some(3.0),
    },
    Absolute {
        subject: "ours, shm, spin",
        case: (SMALL, 1, 1),
        what: "median time of a request, µs",
        value: |outcome| outcome.latency[1],
        at_least: None,
        at_most: Some(1.5),
    },
    Absolute {
        subject: "ours, shm",
        case: (SMALL, 1, 1),
        what: "median time of a request, µs",
        value: |outcome| outcome.latency[1],
        at_least: None,
        at_most: Some(10.0),
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
        let promised = run.comparisons.iter().filter(|comparison| comparison.at_least.is_some());
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
