//! The tables, as Markdown, from kept figures.

use std::fmt::Write as _;

use clap::ValueEnum;

use super::cases::{
    self, BLOCKS_KIB, CONNECTION, Case, Cell, EMULATED_RDMA, EMULATED_TCP, Figures, Pattern, Point, Subject, TCP,
};
use crate::suite::Kept;
use crate::{Spread, bytes};

/// All tables of these runs.
pub fn tables(runs: &[&Kept<Point>]) -> String {
    let mut out = String::from(EXPLAINED);
    for kept in runs {
        if !kept.label.is_empty() {
            let _ = writeln!(out, "\n### Run {}", kept.label);
        }
        let figures = Figures(&kept.points);
        for (title, text) in [
            ("Targets", cases::table(figures)),
            ("Redis, `appendfsync always`", sets(figures)),
            ("New connections", of_connections(figures)),
        ] {
            if text.lines().count() > if text.starts_with('|') { 2 } else { 0 } {
                let _ = writeln!(out, "\n**{title}**\n\n{}", text.trim_end());
            }
        }
        for emulated in [false, true] {
            for (direct, jobs) in [true, false].into_iter().flat_map(|direct| [1, 8, 32].map(|jobs| (direct, jobs))) {
                files(&mut out, figures, &Group { emulated, direct, jobs });
            }
        }
    }
    out
}

fn sets(figures: Figures<'_>) -> String {
    let mut out = String::from(
        "| files on | 1 client: µs | p99 µs | CPU µs each | 50 clients: SETs/s | p99 µs | CPU µs each |\n|---|---:|---:|---:|---:|---:|---:|\n",
    );
    for subject in subjects(figures, |case| !case.ends_with("direct") && !case.ends_with("buffered")) {
        let _ = write!(out, "| {}", subject.name());
        for case in [Case::OneClient, Case::ManyClients].map(|case| case.to_string()) {
            let of = || figures.of(subject.name(), &case);
            let spread = figures.spread(subject.name(), &case);
            let each = Spread::of(of().map(|point| 1e6 * point.cpu_seconds / point.operations));
            let _ = write!(
                out,
                " | {} | {} | {}",
                range(spread),
                median(Spread::of(of().filter_map(|p| p.p99_us))),
                median(each)
            );
        }
        out += " |\n";
    }
    out
}

fn of_connections(figures: Figures<'_>) -> String {
    let mut out =
        String::from("| by | µs until the first answer | p99 µs | CPU µs of both ends |\n|---|---:|---:|---:|\n");
    for subject in [TCP, EMULATED_TCP, EMULATED_RDMA] {
        let of = || figures.of(subject, CONNECTION);
        let Some(spread) = figures.spread(subject, CONNECTION) else { continue };
        let each = Spread::of(of().map(|point| 1e6 * point.cpu_seconds / point.operations));
        let p99 = Spread::of(of().filter_map(|point| point.p99_us));
        let _ = writeln!(out, "| {subject} | {} | {} | {} |", range(Some(spread)), median(p99), median(each));
    }
    out
}

/// Cells that stand in one table.
struct Group {
    /// Of the emulated machine, or of this one.
    emulated: bool,
    direct: bool,
    jobs: u32,
}

/// Two tables: MB/s, and processor time.
fn files(out: &mut String, figures: Figures<'_>, &Group { emulated, direct, jobs }: &Group) {
    let mut cells = Vec::new();
    for pattern in Pattern::value_variants().iter().copied() {
        let blocks = BLOCKS_KIB.map(|kib| Cell { direct, pattern, block: kib << 10, jobs });
        let is_measured = |cell: &Cell| {
            let case = Case::Files(*cell).to_string();
            figures.0.iter().any(|point| point.case == case)
        };
        cells.extend(blocks.into_iter().filter(is_measured));
    }
    let (how, threads) = (if direct { "direct" } else { "buffered" }, if jobs == 1 { "job" } else { "jobs" });
    let names = cells.iter().map(|cell| Case::Files(*cell).to_string()).collect::<Vec<_>>();
    let mut subjects = subjects(figures, |case| names.iter().any(|name| name == case));
    subjects.retain(|subject| subject.is_emulated() == emulated);
    if subjects.is_empty() {
        return;
    }
    if emulated {
        files_emulated(out, figures, &format!("{jobs} {threads}, {how}"), &cells, &subjects);
        return;
    }
    let heads: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
    let (heads, line) = (heads.join(" | "), "---:|".repeat(subjects.len()));
    let _ = writeln!(
        out,
        "\n**{jobs} {threads}, {how}: MB/s**\n\n| | CubeFS RDMA | CubeFS TCP | {heads} |\n|---|---:|---:|{line}"
    );
    for (cell, name) in cells.iter().zip(&names) {
        let (rdma, tcp) = cases::published(cell).unzip();
        let published = |figure: Option<f64>| figure.map_or("–".to_owned(), |figure| figure.to_string());
        let ours = subjects.iter().map(|subject| range(figures.spread(subject.name(), name)));
        let _ = writeln!(
            out,
            "| {} {} | {} | {} | {} |",
            cell.pattern.word(),
            bytes(cell.block),
            published(rdma),
            published(tcp),
            ours.collect::<Vec<_>>().join(" | ")
        );
    }
    let _ = writeln!(
        out,
        "\n**{jobs} {threads}, {how}: processor µs of a request, all processes**\n\n| | {heads} |\n|---|{line}"
    );
    for (cell, name) in cells.iter().zip(&names) {
        let each = |subject: &Subject| {
            let of = figures.of(subject.name(), name);
            median(Spread::of(of.map(|point| 1e6 * point.cpu_seconds / point.operations)))
        };
        let each = subjects.iter().map(each).collect::<Vec<_>>().join(" | ");
        let _ = writeln!(out, "| {} {} | {each} |", cell.pattern.word(), bytes(cell.block));
    }
}

/// The same of the emulated machine, without what others have measured on real ones, and with the ratio of two ways.
fn files_emulated(out: &mut String, figures: Figures<'_>, what: &str, cells: &[Cell], subjects: &[Subject]) {
    let heads: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
    let _ = writeln!(
        out,
        "\n**{what}, in the emulated machine: MB/s, and processor µs of a request**\n\n| | {} | RDMA / TCP | {} |\n|---|{}",
        heads.join(" | "),
        heads.iter().map(|head| format!("µs: {head}")).collect::<Vec<_>>().join(" | "),
        "---:|".repeat(2 * subjects.len() + 1)
    );
    for cell in cells {
        let name = Case::Files(*cell).to_string();
        let rates = subjects.iter().map(|subject| range(figures.spread(subject.name(), &name)));
        let each = subjects.iter().map(|subject| {
            let of = figures.of(subject.name(), &name);
            median(Spread::of(of.map(|point| 1e6 * point.cpu_seconds / point.operations)))
        });
        let ratio = figures.ratio(Subject::EmulatedRdma.name(), Subject::EmulatedTcp.name(), &name);
        let columns = rates.chain([range(ratio)]).chain(each).collect::<Vec<_>>().join(" | ");
        let _ = writeln!(out, "| {} {} | {columns} |", cell.pattern.word(), bytes(cell.block));
    }
}

/// Those that have figures of such cases, in their order.
fn subjects(figures: Figures<'_>, is_one: impl Fn(&str) -> bool) -> Vec<Subject> {
    let has = |subject: &Subject| figures.0.iter().any(|point| point.subject == subject.name() && is_one(&point.case));
    Subject::value_variants().iter().copied().filter(has).collect()
}

fn median(spread: Option<Spread>) -> String {
    spread.map_or("–".to_owned(), |spread| short(spread.median))
}

fn range(spread: Option<Spread>) -> String {
    let Some(Spread { median, low, high }) = spread else { return "–".to_owned() };
    let (middle, low, high) = (short(median), short(low), short(high));
    if low == high { middle } else { format!("{middle} ({low}–{high})") }
}

/// Three digits, or all of those before the point.
fn short(figure: f64) -> String {
    match figure.abs() {
        small if small < 10.0 => format!("{figure:.2}"),
        middle if middle < 100.0 => format!("{figure:.1}"),
        _ => format!("{figure:.0}"),
    }
}

const EXPLAINED: &str = "\
Medians over the rounds, in brackets the least and the greatest value. MB are 10⁶ bytes. *CubeFS*: as published, with ConnectX-5 cards, three
copies and a client of its own; all other columns are of this run, in which one host runs clients, mount and servers. *Remora*: a volume with three copies in memory, acknowledged
at two, mounted by `remora volume mount`: *TCP* by messages only, *shm* with blocks read and taken by shared memory. *GlusterFS*: three replicas; *MooseFS*: the goal of three copies, *bindfs*:
a directory once more; their disks are in memory. *nbdfuse*: a file in the memory of nbdkit, one copy. *FUSE floor*: a file system in the memory of one process, by Remora's own FUSE. *local disk*: a
directory of this machine's disk. *Emulated*: in a machine that QEMU emulates, with Soft-RoCE: by RDMA blocks are read, and writes of 64 KiB and more taken; smaller writes are messages over TCP in both columns. Those figures are
compared with each other only. Direct: the same files again and again for the time of a measurement. Buffered: each file once, from a page cache that has been emptied of it, and with one `fsync` at the end
of its writes.
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::volume::cases::tests::point;

    #[test]
    fn every_measured_cell_has_a_row_with_what_was_published() {
        let mut kept = Kept::begin("volume", None);
        kept.points.push(point("Remora, shm", "read 1 MiB, 32 jobs, direct", 0, 1234.4));
        kept.points.push(point("GlusterFS", "SET, 1 client", 0, 99.5));
        let text = tables(&[&kept]);
        assert!(text.contains("| | CubeFS RDMA | CubeFS TCP | Remora, shm |"), "{text}");
        assert!(text.contains("| read 1 MiB | 3394 | 2820 | 1234 |"), "{text}");
        assert!(text.contains("| read 1 MiB | 500 |"), "half a second of 1000 requests: {text}");
        assert!(text.contains("| GlusterFS | 99.5 | – | 500 | – | – | – |"), "{text}");
        assert!(!text.contains("buffered: MB/s") && !text.contains("Targets"), "{text}");
    }

    #[test]
    fn figures_of_the_emulated_machine_stand_in_tables_of_their_own() {
        let mut kept = Kept::begin("volume", None);
        let case = "read 1 MiB, 1 job, direct";
        for (subject, value) in
            [("Remora, shm", 900.0), ("Remora, RDMA, emulated", 30.0), ("Remora, TCP, emulated", 20.0)]
        {
            kept.points.push(point(subject, case, 0, value));
        }
        let text = tables(&[&kept]);
        assert!(text.contains("| read 1 MiB | 581 | 396 | 900 |"), "{text}");
        assert!(text.contains("| read 1 MiB | 30.0 | 20.0 | 1.50 | 500 | 500 |"), "{text}");
    }
}
