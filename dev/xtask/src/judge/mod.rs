//! The judge: the servers' own replication tests, with Remora serving every full copy.
//!
//! ```text
//!   dev/judge/setup ── sources, programs ──▶ each file: without Remora │ with attend │ with attend and the module
//!                                                          └───────── compared, with the list `differs` ──────┘
//! ```
//!
//! Beside every server of a test stand `remora source` and `remora attend`, and rules send the server's connections to
//! its primary to the latter. A test that passes without Remora must pass with it, or stand in
//! `dev/judge/<suite>/differs` with its reason. A test that stands there must fail.
//!
//! - [`suite`]: which files of which suite. [`scene`]: how one is run. [`outcome`]: what it printed.
//! - [`differs`]: the list, and the verdict.

mod differs;
mod outcome;
mod scene;
mod suite;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use clap::ValueEnum;
use remora_bench::sync::Result;

use self::differs::Verdict;
use self::outcome::Outcome;
use self::scene::{Copies, Played, Scene};
use self::suite::Suite;
use crate::process::said;
use crate::show::Screen;
use crate::stop;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Which suites.
    #[arg(long, value_delimiter = ',', value_name = "SUITE", default_value = "redis-7.0,valkey-8.1")]
    suite: Vec<Suite>,

    /// With what beside the servers. Each is compared with a run without Remora, which is kept for the next time.
    #[arg(long, value_delimiter = ',', value_name = "WHAT", default_value = "attend,module")]
    with: Vec<With>,

    /// Only the files whose names contain this. May be repeated.
    #[arg(long, value_name = "PART")]
    only: Vec<String>,

    /// Run the files without Remora again, although their outcome is known.
    #[arg(long)]
    fresh: bool,

    /// Folder for what the files print, and for the agents' logs.
    #[arg(long, value_name = "DIR", default_value = "target/judge")]
    logs: PathBuf,
}

/// What stands beside the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum With {
    /// Nothing: the servers alone.
    Nothing,
    /// A source and an attending agent for each.
    Attend,
    /// The same, and every server has the module.
    Module,
}

impl With {
    fn name(self) -> &'static str {
        match self {
            With::Nothing => "nothing",
            With::Attend => "attend",
            With::Module => "module",
        }
    }
}

/// Runs the files and prints a table.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err("namespaces, rules and users of servers need root".into());
    }
    let screen = Screen::new();
    let program = screen.build_for(&[])?;
    let scene = Scene::set(program.path())?;
    let logs = std::path::absolute(&options.logs)?;
    let (mut table, mut findings, mut all) = (Vec::new(), Vec::new(), Copies::default());
    for &suite in &options.suite {
        suite.cache()?;
        let differs = suite.differs()?;
        for file in suite.files().iter().filter(|file| options.is_asked(file)) {
            let plain = without_remora(options, &screen, &scene, suite, file)?;
            for &with in &options.with {
                if with == With::Nothing {
                    table.push(row(suite, file, with, &plain, None));
                    continue;
                }
                let keep = logs.join(suite.name()).join(with.name()).join(file.replace('/', "-"));
                let busy = screen.busy(&format!("{} {file}, {}", suite.name(), with.name()));
                let played = scene.play(suite, file, with, &keep)?;
                drop(busy);
                stop::check()?;
                let verdict = differs.judge(file, with, &plain, &played.outcome);
                let line = row(suite, file, with, &plain, Some((&played, &verdict)));
                screen.say(&line);
                table.push(line);
                all.served += played.copies.served;
                all.completed += played.copies.completed;
                all.passed += played.copies.passed;
                findings.extend(found(suite, file, with, &played, &verdict));
            }
        }
    }
    println!(
        "\n| suite | file | with | good | passed | without | known | new | stale | copies: served, completed, left | s |"
    );
    println!("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|");
    table.iter().for_each(|line| println!("{line}"));
    println!(
        "\nfull copies: {} begun from a source, {} completed, {} left to the primary",
        all.served, all.completed, all.passed
    );
    findings.iter().for_each(|finding| println!("{finding}"));
    println!("logs: {}", logs.display());
    if options.with.iter().any(|&with| with != With::Nothing) && options.only.is_empty() && all.completed == 0 {
        return Err("no full copy came from Remora: nothing was judged".into());
    }
    match findings.len() {
        0 => Ok(()),
        count => Err(format!("{count} findings, listed above").into()),
    }
}

impl Options {
    fn is_asked(&self, file: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| file.contains(part.as_str()))
    }
}

/// The outcome of a file without Remora: that of an earlier run, if the server is still the same.
fn without_remora(options: &Options, screen: &Screen, scene: &Scene, suite: Suite, file: &str) -> Result<Outcome> {
    let cache = suite.cache()?;
    let keep = cache.join(With::Nothing.name()).join(file.replace('/', "-"));
    let (log, of) = (keep.with_extension("log"), keep.with_extension("of"));
    let server = said(Command::new(cache.join("programs").join(suite.server())).arg("--version"))?;
    let now = format!("{server}\n{}", fs::read_to_string(suite.ours().join("adapted.patch"))?);
    let is_known = fs::read_to_string(&of).is_ok_and(|before| before == now);
    if is_known && !options.fresh {
        return Ok(Outcome::read(&String::from_utf8_lossy(&fs::read(&log)?)));
    }
    let busy = screen.busy(&format!("{} {file}, without Remora", suite.name()));
    let played = scene.play(suite, file, With::Nothing, &keep)?;
    drop(busy);
    stop::check()?;
    let line = row(suite, file, With::Nothing, &played.outcome, None);
    screen.say(&line);
    not_judged(screen, suite, file, &played);
    fs::write(&of, now)?;
    Ok(played.outcome)
}

/// Says which tests fail without Remora: they are not judged.
fn not_judged(screen: &Screen, suite: Suite, file: &str, played: &Played) {
    for (name, count) in played.outcome.tests.iter().filter(|(_, count)| count.failed > 0) {
        screen.say(&format!("NOT JUDGED: {} {file}: {name} fails without Remora: {}", suite.name(), count.why));
    }
}

/// A line of the table.
fn row(suite: Suite, file: &str, with: With, plain: &Outcome, played: Option<(&Played, &Verdict)>) -> String {
    let start = format!("| {} | {file} | {} |", suite.name(), with.name());
    let Some((played, verdict)) = played else { return format!("{start} | | {} | | | | | |", plain.passed()) };
    let Copies { served, completed, passed } = played.copies;
    format!(
        "{start} {} | {} | {} | {} | {} | {} | {served}, {completed}, {passed} | {:.0} |",
        if verdict.is_good() && played.wrong.is_empty() { "yes" } else { "**no**" },
        played.outcome.passed(),
        plain.passed(),
        verdict.known.len(),
        verdict.unexpected.len(),
        verdict.stale.len(),
        played.took.as_secs_f64(),
    )
}

/// The findings of one file, as text.
fn found(suite: Suite, file: &str, with: With, played: &Played, verdict: &Verdict) -> Vec<String> {
    let place = format!("{} {file}, {}", suite.name(), with.name());
    let failed = verdict.unexpected.iter().map(|what| format!("FAILED: {place}: {what}"));
    let stale = verdict.stale.iter().map(|what| format!("STALE: {place}: {what}"));
    let wrong = played.wrong.iter().map(|what| format!("WRONG: {place}: {what}"));
    failed.chain(stale).chain(wrong).collect()
}
