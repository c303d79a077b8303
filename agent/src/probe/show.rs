//! Formats the figures as tables and as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::measure::Cell;
use super::{Outcome, Report};
use crate::units::{Size, readable};

pub(super) fn as_text(report: &Report) -> String {
    let mut text = format!(
        "source {}: a probe region of {}, {} ms per figure\n",
        report.source,
        Size::bytes(report.region),
        report.plan.time.as_millis()
    );
    for (kind, outcome) in &report.transports {
        match outcome {
            Outcome::Unusable(why) => text.push_str(&format!("\n{kind}: cannot be used: {why}\n")),
            Outcome::Measured { cells, trouble } => {
                text.push_str(&table(kind.name(), cells, &report.plan.depths));
                if let Some(why) = trouble {
                    let missing = report.plan.cells() - cells.len();
                    text.push_str(&format!("{missing} of {} figures are missing: {why}\n", report.plan.cells()));
                }
            }
        }
    }
    text
}

/// A row for each size: how long one read takes with few in flight, and the rate at each depth.
fn table(kind: &str, cells: &[Cell], depths: &[usize]) -> String {
    let few = depths.first().copied().unwrap_or(1);
    let at_once = if few == 1 { "one read at a time".to_owned() } else { format!("{few} reads at a time") };
    let mut text = format!("\n{kind:<9} {at_once:>25}   MB/s, by reads at a time:\n");
    text.push_str(&format!("{:>9} {:>12} {:>12}  ", "size", "median", "99 of 100"));
    depths.iter().for_each(|depth| text.push_str(&format!(" {depth:>10}")));
    text.push('\n');
    for row in cells.chunk_by(|one, other| one.size == other.size) {
        let Some(first) = row.first() else { continue };
        let size = Size::bytes(first.size.into()).to_string();
        text.push_str(&format!("{size:>9} {:>12} {:>12}  ", micros(first.median), micros(first.p99)));
        row.iter().for_each(|cell| text.push_str(&format!(" {:>10}", megabytes(cell.bytes_per_second()))));
        text.push('\n');
    }
    text
}

fn micros(time: Duration) -> String {
    match time {
        time if time >= Duration::from_secs(1) => readable(time),
        time => format!("{:.1} µs", time.as_nanos() as f64 / 1e3),
    }
}

/// At least three significant digits.
fn megabytes(bytes_per_second: f64) -> String {
    match bytes_per_second / 1e6 {
        rate if rate < 10.0 => format!("{rate:.2}"),
        rate if rate < 100.0 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

pub(super) fn as_json(report: &Report) -> Value {
    let transports = report.transports.iter().map(|(kind, outcome)| match outcome {
        Outcome::Unusable(why) => json!({ "transport": kind.name(), "usable": false, "trouble": why, "figures": [] }),
        Outcome::Measured { cells, trouble } => json!({
            "transport": kind.name(),
            "usable": true,
            "trouble": trouble,
            "figures": cells.iter().map(cell_as_json).collect::<Vec<_>>(),
        }),
    });
    json!({
        "source": report.source.to_string(),
        "region_bytes": report.region,
        "figure_millis": report.plan.time.as_millis() as u64,
        "transports": transports.collect::<Vec<_>>(),
    })
}

fn cell_as_json(cell: &Cell) -> Value {
    json!({
        "read_bytes": cell.size,
        "depth": cell.depth,
        "reads": cell.reads,
        "seconds": cell.elapsed.as_secs_f64(),
        "bytes_per_second": cell.bytes_per_second(),
        "reads_per_second": cell.reads_per_second(),
        "median_micros": cell.median.as_nanos() as f64 / 1e3,
        "p99_micros": cell.p99.as_nanos() as f64 / 1e3,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::TransportKind;

    use super::super::measure::Plan;
    use super::*;

    fn report() -> Report {
        let cell = |size, depth, micros| Cell {
            size,
            depth,
            reads: 1000,
            elapsed: Duration::from_millis(100),
            median: Duration::from_micros(micros),
            p99: Duration::from_micros(2 * micros),
        };
        let cells = vec![cell(8, 1, 3), cell(8, 16, 10), cell(1 << 20, 1, 90)];
        Report {
            source: "10.0.0.5:7379".parse().unwrap(),
            region: 64 << 20,
            plan: Plan {
                sizes: vec![8, 1 << 20],
                depths: vec![1, 16],
                time: Duration::from_millis(100),
                limit: Duration::from_secs(1),
            },
            transports: vec![
                (TransportKind::Shm, Outcome::Unusable("another host".into())),
                (TransportKind::Tcp, Outcome::Measured { cells, trouble: Some("too late".into()) }),
            ],
        }
    }

    #[test]
    fn the_table_has_a_row_for_each_size_and_says_what_is_missing() {
        let text = as_text(&report());
        let row = |begin: &str| text.lines().find(|line| line.trim_start().starts_with(begin)).unwrap().to_owned();
        assert_eq!(
            row("8 B").split_whitespace().collect::<Vec<_>>(),
            ["8", "B", "3.0", "µs", "6.0", "µs", "0.08", "0.08"]
        );
        assert_eq!(row("1 MiB").split_whitespace().last(), Some("10486"));
        assert!(text.contains("shm: cannot be used: another host"), "{text}");
        assert!(text.contains("1 of 4 figures are missing: too late"), "{text}");
    }

    #[test]
    fn programs_get_the_same_figures() {
        let value = as_json(&report());
        assert_eq!(value["transports"][0]["usable"], false);
        let figures = &value["transports"][1]["figures"];
        assert_eq!((&figures[0]["median_micros"], &figures[2]["read_bytes"]), (&json!(3.0), &json!(1 << 20)));
        assert_eq!(figures[2]["bytes_per_second"], 1000.0 * f64::from(1 << 20) / 0.1);
    }
}
