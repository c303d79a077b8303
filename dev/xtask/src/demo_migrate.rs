//! The demonstration of a migration: a server with clients becomes one of the other family, and goes back.
//!
//! ```text
//!   Redis ◀── a client writes without a pause, and counts what was acknowledged ──▶ Valkey
//!     │  remora migrate ──▶ Valkey is an exact replica
//!     │  remora switch ───▶ Valkey is the primary, Redis follows
//!     │  remora switch ───▶ Redis is the primary again
//!     └─ every acknowledged write is looked for, and all data are compared
//! ```

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_agent::units::Size;
use remora_bench::sync::{Program, Result};
use remora_lab::server::{self, project_root};
use remora_lab::workload::fill_every_type;
use remora_lab::workload::{PairWriter, assert_has_all};
use remora_lab::{Kind, Server};

use crate::process::Screen;
use crate::process::{START_LIMIT, ended_within};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Random data besides values of every type.
    #[arg(long, value_name = "SIZE", default_value = "128MiB")]
    size: Size,

    /// Writes a second.
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    rate: u32,
}

/// Where the set-up of `make test-matrix` puts servers of several versions.
const VERSIONS: &str = ".cache/servers/versions";

/// The families, as the lab calls them.
const REDIS: &str = "Redis";
const VALKEY: &str = "Valkey";

/// Bytes of a random value.
const VALUE_BYTES: u64 = 1024;

/// The time of one column of the picture.
const COLUMN: Duration = Duration::from_millis(100);

/// Rows of the picture.
const HEIGHT: u64 = 8;

/// Columns of the picture that fit a terminal.
const WIDTH: usize = 100;

/// How long a command may take that reads all data: some gigabytes on a busy machine.
const DATA_LIMIT: Duration = Duration::from_secs(1_800);

/// Seconds that the client writes between two steps.
const BETWEEN: u32 = 2;

/// Runs the demonstration, and prints the picture and the verdict.
pub(crate) fn run(options: &Options) -> Result<()> {
    let screen = Screen::new();
    let program = screen.build_for(&[])?;
    let (old, new) = (start(Kind::Redis7, REDIS)?, start(Kind::Valkey9, VALKEY)?);
    screen.say(&format!("filling {} with {}", named(&old)?, options.size));
    fill_every_type(&mut old.client()?, 7)?;
    let keys = (options.size.get() / VALUE_BYTES).to_string();
    let bytes = VALUE_BYTES.to_string();
    let words = ["load", "--server", &old.url(), "--keys", &keys, "--value-size", &bytes];
    ended_within(DATA_LIMIT, &program, Path::new("."), &words)?;
    let writer = Arc::new(PairWriter::start([&old, &new], options.rate));
    let (columns, rate) = (Columns::start(writer.clone()), options.rate);
    let mut demo =
        Demo { screen: &screen, program: &program, writer: &writer, columns: &columns, rate, steps: Vec::new() };
    let (one, other) = (old.url(), new.url());
    demo.step(&format!("{} becomes an exact replica of {}", named(&new)?, named(&old)?), "migrate", [&one, &other])?;
    demo.step(&format!("{} is the primary", named(&new)?), "switch", [&one, &other])?;
    demo.step(&format!("back: {} is the primary", named(&old)?), "switch", [&other, &one])?;
    let steps = demo.steps;
    let picture = columns.end();
    let acknowledged = Arc::into_inner(writer).ok_or("the writer is still in use")?.stop();
    assert_has_all(&old, acknowledged)?;
    let words = ["verify", "--digest", "never", "--primary", &one, "--replica", &other];
    ended_within(DATA_LIMIT, &program, Path::new("."), &words)?;
    let copies = (old.fact("sync_full")?, new.fact("sync_full")?);
    println!("{}", draw(&picture, &steps));
    for (column, text) in &steps {
        println!("  {:>5.1} s  {text}", (COLUMN * *column as u32).as_secs_f64());
    }
    println!(
        "\n{acknowledged} writes were acknowledged at about {} a second, and all of them are there; all data of both are the \
         same.\nFull copies that the servers have served: {} and {}.",
        options.rate, copies.0, copies.1
    );
    Ok(())
}

/// The newest server of the family that the set-up has, or else the one of the tests.
fn start(kind: Kind, family: &str) -> Result<Server> {
    let folder = project_root().join(VERSIONS);
    let found = if folder.is_dir() { server::Program::all(&folder)? } else { Vec::new() };
    let newest = found.into_iter().filter(|program| program.family() == family).max_by_key(server::Program::version);
    let builder = Server::builder(kind).config("repl-diskless-sync-delay", 0).config("repl-backlog-size", "64mb");
    Ok(match &newest {
        Some(program) => builder.program(program).start()?,
        None => builder.start()?,
    })
}

/// Family and version.
fn named(server: &Server) -> Result<String> {
    let family = if server.fact("valkey_version").is_ok() { VALKEY } else { REDIS };
    Ok(format!("{family} {}", server.version()?))
}

struct Demo<'a> {
    screen: &'a Screen,
    program: &'a Program,
    writer: &'a PairWriter,
    columns: &'a Columns,
    rate: u32,
    /// What was done, and the column in which it was over.
    steps: Vec<(usize, String)>,
}

impl Demo<'_> {
    /// Runs a command between two servers, and lets the client write on.
    fn step(&mut self, what: &str, command: &str, [from, to]: [&str; 2]) -> Result<()> {
        self.screen.say(&format!("remora {command} --from {from} --to {to}"));
        let more = u64::from(self.rate * BETWEEN);
        self.writer.wait_for_more(more, START_LIMIT)?;
        self.writer.take_longest();
        let said = ended_within(DATA_LIMIT, self.program, Path::new("."), &[command, "--from", from, "--to", to])?;
        self.writer.wait_for_more(more, START_LIMIT)?;
        self.screen.say(said.lines().next().unwrap_or_default());
        let longest = self.writer.take_longest().as_millis();
        let text = format!("{what}; the longest time between two writes was {longest} ms");
        self.steps.push((self.columns.present(), text));
        Ok(())
    }
}

/// Counts what is acknowledged in each tenth of a second.
struct Columns {
    is_done: Arc<AtomicBool>,
    thread: thread::JoinHandle<Vec<u64>>,
    began: Instant,
}

impl Columns {
    fn start(writer: Arc<PairWriter>) -> Columns {
        let is_done = Arc::<AtomicBool>::default();
        let end = is_done.clone();
        let thread = thread::spawn(move || {
            let (mut counts, mut before) = (Vec::new(), writer.acknowledged());
            while !end.load(Ordering::Relaxed) {
                thread::sleep(COLUMN);
                let now = writer.acknowledged();
                counts.push(now - before);
                before = now;
            }
            counts
        });
        Columns { is_done, thread, began: Instant::now() }
    }

    /// The column that is being counted.
    fn present(&self) -> usize {
        (self.began.elapsed().as_millis() / COLUMN.as_millis()) as usize
    }

    fn end(self) -> Vec<u64> {
        self.is_done.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// The counts as bars, from left to right. Where there are more than fit, a column has the least of its counts: a pause
/// is never averaged away.
fn draw(counts: &[u64], steps: &[(usize, String)]) -> String {
    let each = counts.len().div_ceil(WIDTH).max(1);
    let least: Vec<u64> = counts.chunks(each).map(|some| some.iter().copied().min().unwrap_or(0)).collect();
    let most = least.iter().copied().max().unwrap_or(0).max(1);
    let mut text = format!("acknowledged writes in {} ms (at most {most}), over time\n", COLUMN.as_millis());
    for row in (1..=HEIGHT).rev() {
        let bar = |count: &u64| if count * HEIGHT >= row * most { '█' } else { ' ' };
        text.push_str(&format!("│{}\n", least.iter().map(bar).collect::<String>().trim_end()));
    }
    let marked = |column: usize| steps.iter().any(|(at, _)| at / each == column);
    text.push_str(&format!(
        "└{}\n",
        (0..least.len()).map(|column| if marked(column) { '▲' } else { '─' }).collect::<String>()
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_seen_also_where_columns_are_joined() {
        let mut counts = vec![8; 250];
        counts[100] = 0;
        let text = draw(&counts, &[(99, "switch".into())]);
        let floor = text.lines().nth(HEIGHT as usize).unwrap_or_default();
        assert_eq!(floor.chars().filter(|bar| *bar == ' ').count(), 1, "{text}");
        assert!(text.lines().last().unwrap_or_default().contains('▲'), "{text}");
    }
}
