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
//! - [`Suite`]: which files of which suite. [`Scene`]: how one is run.
//! - [`Outcome`]: what it printed, the list of tests that are known to fail, and the verdict.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use tempfile::TempDir;

use crate::process::{self, Screen, said, succeed};
use remora_bench::sync::Result;
use remora_lab::scratch;
use remora_lab::server::{module_library, project_root};

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
                process::fail_if_stopped()?;
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
    process::fail_if_stopped()?;
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

// The suites: other people's tests of replication.

/// A suite. `dev/judge/setup` brings its sources and its programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Suite {
    /// Redis 7.0's, with Debian's server.
    #[value(name = "redis-7.0")]
    Redis,
    /// Valkey 8.1's, with Debian's server.
    #[value(name = "valkey-8.1")]
    Valkey,
}

impl Suite {
    /// Its name, and that of its folders.
    fn name(self) -> &'static str {
        match self {
            Suite::Redis => "redis-7.0",
            Suite::Valkey => "valkey-8.1",
        }
    }

    /// The server's program.
    fn server(self) -> &'static str {
        match self {
            Suite::Redis => "redis-server",
            Suite::Valkey => "valkey-server",
        }
    }

    /// The files that have to do with replication: every one in which a server takes a copy of another.
    fn files(self) -> &'static [&'static str] {
        match self {
            Suite::Redis => REDIS,
            Suite::Valkey => VALKEY,
        }
    }

    /// Where its sources and programs are.
    fn cache(self) -> Result<PathBuf> {
        let folder = project_root().join(".cache/judge").join(self.name());
        if folder.join("source").is_dir() && folder.join("programs").is_dir() {
            return Ok(folder);
        }
        Err(format!("{} is not there: dev/judge/setup said above why it was left out", self.name()).into())
    }

    /// What is ours: how its sources are adapted, and the list of differences.
    fn ours(self) -> PathBuf {
        project_root().join("dev/judge").join(self.name())
    }

    /// The list of tests that are known to fail with Remora.
    fn differs(self) -> Result<Differs> {
        let path = self.ours().join("differs");
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let differs = Differs::read(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        if let Some(file) = differs.files().find(|file| !self.files().contains(file)) {
            return Err(format!("{}: {file} is not a file that is run", path.display()).into());
        }
        Ok(differs)
    }
}

const REDIS: &[&str] = &[
    "integration/block-repl",
    "integration/failover",
    "integration/psync2",
    "integration/psync2-master-restart",
    "integration/psync2-pingoff",
    "integration/psync2-reg",
    "integration/redis-cli",
    "integration/replication",
    "integration/replication-2",
    "integration/replication-3",
    "integration/replication-4",
    "integration/replication-buffer",
    "integration/replication-psync",
    "integration/shutdown",
    "unit/cluster",
    "unit/cluster-scripting",
    "unit/cluster/announced-endpoints",
    "unit/cluster/links",
    "unit/cluster/misc",
    "unit/functions",
    "unit/wait",
];

/// Not among them is `integration/dual-channel-replication`: its tests watch how the primary itself sends a copy over
/// two channels, and wait for that until the suite gives up. The chaos draws dual channel.
const VALKEY: &[&str] = &[
    "integration/block-repl",
    "integration/failover",
    "integration/psync2",
    "integration/psync2-master-restart",
    "integration/psync2-pingoff",
    "integration/psync2-reg",
    "integration/replica-redirect",
    "integration/replication",
    "integration/replication-2",
    "integration/replication-3",
    "integration/replication-4",
    "integration/replication-buffer",
    "integration/replication-psync",
    "integration/shutdown",
    "integration/valkey-cli",
    "unit/cluster/diskless-load-swapdb",
    "unit/cluster/failover",
    "unit/cluster/failover2",
    "unit/cluster/manual-failover",
    "unit/cluster/no-failover-option",
    "unit/cluster/replica-in-sync",
    "unit/cluster/replica-migration",
    "unit/cluster/slave-selection",
    "unit/cluster/slot-migration",
    "unit/cluster/transactions-on-replica",
    "unit/cluster/update-msg",
    "unit/functions",
    "unit/wait",
];

// A place for runs: the programs where every user can read them, and for each file a fresh copy of its suite.
//
// ```text
//   /tmp/remora-judge-…/bin         remora, the module
//                      /redis-7.0   the server's programs
//                      /run         suite/ a copy, src/redis-server = dev/judge/wrapper; state/ tokens, locks, agents' logs
// ```
//
// A file runs in network and process namespaces of its own (`dev/judge/inside`): its ports are free, its rules are
// nobody else's, and no process is left.

/// The place of a run.
#[derive(Debug)]
pub(super) struct Scene {
    folder: TempDir,
    remora: PathBuf,
    module: PathBuf,
}

/// What one file did.
#[derive(Debug)]
pub(super) struct Played {
    outcome: Outcome,
    pub(super) took: Duration,
    pub(super) copies: Copies,
    /// What the agents' logs have that no log may have.
    pub(super) wrong: Vec<String>,
}

/// What `attend` did of the full copies that the servers asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copies {
    /// Begun from a source.
    pub(super) served: usize,
    /// Brought to their end: the server follows its primary by itself.
    pub(super) completed: usize,
    /// Left to the primary.
    pub(super) passed: usize,
}

impl Scene {
    /// Copies the programs.
    fn set(remora: &Path) -> Result<Scene> {
        let folder = scratch::folder("judge")?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let bin = folder.path().join("bin");
        fs::create_dir(&bin)?;
        let (to, module) = (bin.join("remora"), bin.join("libremora_module.so"));
        fs::copy(remora, &to)?;
        fs::copy(module_library()?, &module)?;
        Ok(Scene { remora: to, module, folder })
    }

    /// Runs a file, and keeps what it printed, and what the agents did, under this path.
    fn play(&self, suite: Suite, file: &str, with: With, keep: &Path) -> Result<Played> {
        let programs = self.programs(suite)?;
        let run = self.folder.path().join("run");
        if run.exists() {
            fs::remove_dir_all(&run)?;
        }
        let (copy, state) = (run.join("suite"), run.join("state"));
        self.copy(suite, with, &programs, &copy)?;
        self.state(&state)?;
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", &FILE_LIMIT.as_secs().to_string()]);
        command.args(["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        let ours = project_root().join("dev/judge");
        command.arg(ours.join("inside")).arg(file).current_dir(&copy);
        let remora = if with == With::Nothing { Path::new("") } else { &self.remora };
        let module = if with == With::Module { &self.module } else { Path::new("") };
        command.env("JUDGE_REMORA", remora).env("JUDGE_MODULE", module).env("JUDGE_STATE", &state);
        command.env("JUDGE_PROGRAMS", &programs).env("JUDGE_BESIDE", ours.join("beside"));
        command.env("JUDGE_FIRST", FIRST.to_string()).env("JUDGE_PORTS", PORTS.to_string());
        command.env("JUDGE_USER", USER.to_string()).env("JUDGE_AGENT", AGENT.to_string());
        fs::create_dir_all(keep.parent().ok_or("the log has no folder")?)?;
        let log = keep.with_extension("log");
        let output = fs::File::create(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let begun = Instant::now();
        let status = command.status().map_err(|error| format!("{command:?} could not be started: {error}"))?;
        let took = begun.elapsed();
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let mut outcome = Outcome::read(&text);
        match status.code() {
            Some(NO_NAMESPACE) => return Err(format!("{file} has no namespace: {}", text.trim_end()).into()),
            Some(OVER_TIME | KILLED) | None => {
                outcome.breaks(format!("it did not end within {} s", FILE_LIMIT.as_secs()));
            }
            _ => {}
        }
        let (copies, wrong) = self.keep(&run, with, &outcome, keep)?;
        Ok(Played { outcome, took, copies, wrong })
    }

    /// The server's programs, where its user can read them.
    fn programs(&self, suite: Suite) -> Result<PathBuf> {
        let to = self.folder.path().join(suite.name());
        if !to.exists() {
            succeed(Command::new("cp").args(["-a", "--"]).arg(suite.cache()?.join("programs")).arg(&to))?;
        }
        Ok(to)
    }

    /// A copy of the suite, in which Remora stands beside every server.
    fn copy(&self, suite: Suite, with: With, programs: &Path, to: &Path) -> Result<()> {
        fs::create_dir_all(to.parent().unwrap_or(to))?;
        succeed(
            Command::new("cp").args(["-a", "--no-preserve=ownership", "--"]).arg(suite.cache()?.join("source")).arg(to),
        )?;
        let adapted = suite.ours().join("adapted.patch");
        let mut patch = Command::new("patch");
        patch.args(["--strip=1", "--fuzz=0", "--silent", "--no-backup-if-mismatch"]);
        succeed(patch.arg("--directory").arg(to).arg("--input").arg(&adapted))?;
        for program in fs::read_dir(programs)? {
            let program = program?;
            if program.file_type()?.is_dir() {
                continue;
            }
            let place = to.join("src").join(program.file_name());
            if with != With::Nothing && program.file_name() == suite.server() {
                fs::copy(project_root().join("dev/judge/wrapper"), &place)?;
            } else {
                std::os::unix::fs::symlink(program.path(), &place)?;
            }
        }
        fs::create_dir_all(to.join("tests/tmp"))?;
        for open in [to, &to.join("tests"), &to.join("tests/tmp")] {
            fs::set_permissions(open, fs::Permissions::from_mode(0o777))?;
        }
        Ok(())
    }

    /// What the agents need.
    fn state(&self, state: &Path) -> Result<()> {
        fs::create_dir(state)?;
        let home = state.join("home");
        fs::create_dir(&home)?;
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700))?;
        let token = scratch::token_file(state)?;
        for owned in [&home, &token] {
            chown(owned, Some(AGENT), Some(AGENT))?;
        }
        Ok(())
    }

    /// Keeps the agents' logs, and those of the servers after a failure; counts what the agents did.
    fn keep(&self, run: &Path, with: With, outcome: &Outcome, keep: &Path) -> Result<(Copies, Vec<String>)> {
        let (agents, servers) = (keep.with_extension("agents"), keep.with_extension("servers"));
        for old in [&agents, &servers] {
            if old.exists() {
                fs::remove_dir_all(old)?;
            }
        }
        let (mut copies, mut wrong) = (Copies::default(), Vec::new());
        if with != With::Nothing {
            fs::create_dir_all(&agents)?;
            for log in fs::read_dir(run.join("state"))? {
                let path = log?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if !["attend", "source", "beside"].iter().any(|agent| name.ends_with(&format!(".{agent}"))) {
                    continue;
                }
                let text = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
                copies.served += text.matches("the source serves it").count();
                copies.completed += text.matches("the server follows its primary by itself").count();
                copies.passed += text.matches("cannot serve it").count();
                wrong.extend(text.lines().filter(|line| is_wrong(line)).map(|line| format!("{name}: {line}")));
                fs::write(agents.join(&name), text)?;
            }
        }
        if outcome.has_failed() || !wrong.is_empty() {
            for server in fs::read_dir(run.join("suite/tests/tmp"))? {
                let server = server?;
                let log = server.path().join("stdout");
                if log.exists() {
                    fs::create_dir_all(&servers)?;
                    fs::copy(&log, servers.join(server.file_name()))?;
                }
            }
        }
        Ok((copies, wrong))
    }
}

/// What no agent may say: it panicked, or it came to an end that has no exit code of ours.
fn is_wrong(line: &str) -> bool {
    line.contains("panicked at") || line.contains(" ended: 101")
}

/// The first port of the servers. Those of their agents are 500 and 800 higher, and a cluster's buses 10,000.
const FIRST: u16 = 21_000;

/// How many ports servers may have: more than one file's servers, fewer than the kernel's set of ports holds.
const PORTS: u16 = 24;

/// The user of the server at the first port.
const USER: u32 = 30_000;

/// The user of the agents.
const AGENT: u32 = 31_000;

/// How long one file may take: twice the longest on a busy machine.
const FILE_LIMIT: Duration = Duration::from_secs(1200);

/// What `dev/judge/inside` and timeout(1) end with.
const NO_NAMESPACE: i32 = 125;

const OVER_TIME: i32 = 124;

const KILLED: i32 = 137;

// What a file of a suite has printed: which tests passed, which failed.

/// The outcome of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Outcome {
    /// The tests by name. Several tests of a file may have the same name.
    tests: BTreeMap<String, Count>,
    /// Why the file did not come to its end, in the suite's words.
    broken: Vec<String>,
}

/// How often tests of one name passed and failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Count {
    passed: usize,
    failed: usize,
    /// What the suite said of the last one that failed.
    why: String,
}

impl Outcome {
    /// Reads the output of one file.
    fn read(output: &str) -> Outcome {
        let mut outcome = Outcome::default();
        let plain = without_colours(output);
        let mut lines = plain.lines().peekable();
        while let Some(line) = lines.next() {
            if let Some(rest) = line.strip_prefix("[ok]: ") {
                outcome.count(rest).passed += 1;
            } else if let Some(rest) = line.strip_prefix("[err]: ") {
                let why = lines.peek().copied().unwrap_or_default().to_owned();
                let count = outcome.count(rest);
                count.failed += 1;
                count.why = why;
            } else if line.starts_with("[exception]: ") || line.starts_with("[TIMEOUT]") {
                let next = lines.peek().copied().unwrap_or_default();
                outcome.broken.push(format!("{line} {next}").trim_end().to_owned());
            }
        }
        outcome.has_ended();
        outcome
    }

    /// Says that the file did not come to its end.
    fn breaks(&mut self, why: String) {
        self.broken.push(why);
        self.has_ended();
    }

    /// Counts the end of the file as a test.
    fn has_ended(&mut self) {
        let why = self.broken.first().cloned();
        let (passed, failed) = if why.is_some() { (0, 1) } else { (1, 0) };
        self.tests.insert(TO_THE_END.into(), Count { passed, failed, why: why.unwrap_or_default() });
    }

    fn count(&mut self, rest: &str) -> &mut Count {
        self.tests.entry(name(rest)).or_default()
    }

    /// How many tests passed.
    fn passed(&self) -> usize {
        self.tests.iter().filter(|(name, _)| *name != TO_THE_END).map(|(_, count)| count.passed).sum()
    }

    /// Whether a test failed, or the file did not come to its end.
    fn has_failed(&self) -> bool {
        self.tests.values().any(|count| count.failed > 0)
    }

    /// The names of its tests.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.tests.keys().map(String::as_str)
    }

    /// Whether tests of this name ran, and all of them passed.
    fn passes(&self, name: &str) -> bool {
        self.tests.get(name).is_some_and(|count| count.passed > 0 && count.failed == 0)
    }
}

/// The name under which the end of a file counts as a test.
const TO_THE_END: &str = "(the file comes to its end)";

/// A test's name: without the time that it took and the file that it is in. What the suite draws at random is left
/// out, such as in "Set #3 to replicate from #1".
fn name(rest: &str) -> String {
    let mut name = rest.trim_end();
    if let Some((before, last)) = name.rsplit_once(" (")
        && last.strip_suffix(" ms)").is_some_and(|time| time.parse::<u64>().is_ok())
    {
        name = before;
    }
    if let Some((before, file)) = name.rsplit_once(" in tests/")
        && file.ends_with(".tcl")
    {
        name = before;
    }
    let mut drawn = String::with_capacity(name.len());
    let mut letters = name.chars().peekable();
    while let Some(letter) = letters.next() {
        drawn.push(letter);
        let is_drawn = DRAWN_AFTER.iter().any(|mark| drawn.ends_with(mark));
        if is_drawn && letters.peek().is_some_and(char::is_ascii_digit) {
            drawn.push('N');
            while letters.next_if(char::is_ascii_digit).is_some() {}
        }
    }
    drawn
}

/// What stands before a number that a suite draws, or reaches in the time that it has.
const DRAWN_AFTER: [&str; 3] = ["#", "(x = ", "--- CYCLE "];

/// The text without the sequences that colour a terminal.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        // Digits and semicolons, and then the letter of the command.
        let rest = part.trim_start_matches(|letter: char| letter.is_ascii_digit() || letter == ';');
        plain.push_str(rest.get(1..).unwrap_or_default());
    }
    plain
}

// The tests that are known to fail with Remora, with their reasons, and what a run says against that list.
//
// ```text
// # A comment.
// integration/shutdown
//   The primary waits at its end for the source's acknowledgement.
//     Shutting down master waits for replica to catch up
//     module: A test that fails only with the module
//     sometimes: A test that fails in some runs
//     A test that may fail in one way only | sync_partial_err
// ```
//
// A file, a reason, the tests that it explains. A test that stands there and passes fails the run: its line is stale.
// That the file comes to its end is a test too, [`TO_THE_END`].

/// A list of known differences.
#[derive(Debug, Default)]
struct Differs {
    /// By file and test.
    known: BTreeMap<(String, String), Vec<Entry>>,
}

/// A line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// Only with this.
    with: Option<With>,
    /// Whether it passes in some runs.
    sometimes: bool,
    /// What the suite must say of it. Of a test that compares data too, another failure is not known.
    words: Option<String>,
}

/// What a run of one file with Remora says, beside the same file without.
#[derive(Debug, Default, PartialEq, Eq)]
struct Verdict {
    /// Tests that pass without Remora, fail with it, and stand in the list.
    known: Vec<String>,
    /// The same, and they do not stand in the list: each with what the suite said.
    unexpected: Vec<String>,
    /// Tests of the list that passed, or that are not in the file.
    stale: Vec<String>,
}

impl Verdict {
    /// Whether the file is as it must be.
    fn is_good(&self) -> bool {
        self.unexpected.is_empty() && self.stale.is_empty()
    }
}

impl Differs {
    /// Reads a list.
    fn read(text: &str) -> Result<Differs> {
        let mut differs = Differs::default();
        let (mut file, mut has_reason) = (None, false);
        for (number, line) in (1..).zip(text.lines()) {
            let wrong = |what: &str| format!("line {number} of the list of differences: {what}: {line}");
            let rest = line.trim_start_matches(' ');
            match line.len() - rest.len() {
                _ if rest.is_empty() || rest.starts_with('#') => {}
                0 => (file, has_reason) = (Some(rest.to_owned()), false),
                2 if file.is_some() => has_reason = true,
                4 => {
                    let file =
                        file.clone().filter(|_| has_reason).ok_or_else(|| wrong("a test without file and reason"))?;
                    let (name, entry) = entry(rest);
                    differs.known.entry((file, name)).or_default().push(entry);
                }
                _ => return Err(wrong("neither a file, nor a reason (2 spaces), nor a test (4)").into()),
            }
        }
        Ok(differs)
    }

    /// The files of the list, for a check that each exists.
    fn files(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(|(file, _)| file.as_str())
    }

    /// Compares a run with Remora with one without. How often tests of one name run may be drawn at random: a name
    /// passes if it ran, and never failed.
    fn judge(&self, file: &str, with: With, plain: &Outcome, remora: &Outcome) -> Verdict {
        let (mut verdict, mut missing) = (Verdict::default(), Vec::new());
        for name in plain.names().filter(|name| plain.passes(name)) {
            let entry = self.entry(file, name, with);
            let why = remora.tests.get(name).map_or("", |count| count.why.as_str());
            match (remora.passes(name), entry) {
                (false, Some(entry)) if entry.words.as_ref().is_none_or(|words| why.contains(words)) => {
                    verdict.known.push(name.to_owned());
                }
                (false, _) => match remora.tests.get(name) {
                    Some(count) => verdict.unexpected.push(format!("{name}: {}", count.why)),
                    None => missing.push(name),
                },
                (true, Some(entry)) if !entry.sometimes => verdict.stale.push(format!("{name}: it passes")),
                (true, _) => {}
            }
        }
        if !missing.is_empty() {
            verdict.unexpected.push(format!("{} tests did not run: {}", missing.len(), missing.join("; ")));
        }
        for ((_, name), _) in self.known.iter().filter(|((of, _), _)| of == file) {
            if !plain.passes(name) && self.entry(file, name, with).is_some_and(|entry| !entry.sometimes) {
                verdict.stale.push(format!("{name}: no test of this name passes without Remora"));
            }
        }
        verdict
    }

    fn entry(&self, file: &str, name: &str, with: With) -> Option<&Entry> {
        let entries = self.known.get(&(file.to_owned(), name.to_owned()))?;
        entries.iter().find(|entry| entry.with.is_none_or(|only| only == with))
    }
}

/// The marks before a test's name, and the name.
fn entry(mut rest: &str) -> (String, Entry) {
    let mut entry = Entry { with: None, sometimes: false, words: None };
    if let Some((before, words)) = rest.rsplit_once(" | ") {
        (rest, entry.words) = (before, Some(words.to_owned()));
    }
    loop {
        if let Some(after) = rest.strip_prefix("sometimes: ") {
            (entry.sometimes, rest) = (true, after);
        } else if let Some(after) = rest.strip_prefix("attend: ") {
            (entry.with, rest) = (Some(With::Attend), after);
        } else if let Some(after) = rest.strip_prefix("module: ") {
            (entry.with, rest) = (Some(With::Module), after);
        } else {
            return (rest.to_owned(), entry);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_list_of_differences_can_be_read() {
        for suite in Suite::value_variants() {
            suite.differs().unwrap();
        }
    }

    const OUTPUT: &str = "\
[ready]: 7
Testing integration/x
[\u{1b}[0;32;49mok\u{1b}[0m]: First (2) of two (1004 ms)
[\u{1b}[0;32;49mok\u{1b}[0m]: PSYNC2: Set #3 to replicate from #12 (11 ms)
[ok]: PSYNC2: Set #1 to replicate from #0 (9 ms)
[ok]: PSYNC2: cluster is consistent after load (x = 100764) (3 ms)
[ok]: PSYNC2: --- CYCLE 6 --- (0 ms)
[\u{1b}[0;31;49merr\u{1b}[0m]: Counted in tests/integration/x.tcl
Expected '1' to be equal to '2' (context: …)
[ok]: Counted (3 ms)
[ignore]: large memory flag not provided
[exception]: Executing test client: assertion:x.
assertion:x
";

    #[test]
    fn tests_are_counted_by_their_names() {
        let outcome = Outcome::read(OUTPUT);
        assert_eq!(outcome.passed(), 6);
        assert!(outcome.has_failed() && outcome.passes("First (2) of two") && !outcome.passes("Counted"));
        assert!(outcome.passes("PSYNC2: cluster is consistent after load (x = N)"), "{outcome:?}");
        assert!(outcome.passes("PSYNC2: --- CYCLE N ---"), "{outcome:?}");
        assert_eq!(outcome.tests["PSYNC2: Set #N to replicate from #N"].passed, 2);
        let counted = &outcome.tests["Counted"];
        assert_eq!((counted.passed, counted.failed), (1, 1));
        assert!(counted.why.starts_with("Expected '1'"), "{counted:?}");
        assert_eq!(outcome.broken, ["[exception]: Executing test client: assertion:x. assertion:x"]);
    }

    #[test]
    fn an_output_of_nothing_has_no_test() {
        assert_eq!(Outcome::read("\u{1b}[").names().collect::<Vec<_>>(), [TO_THE_END]);
        let mut outcome = Outcome::read("");
        assert!(outcome.passes(TO_THE_END) && !outcome.has_failed());
        outcome.breaks("it took too long".into());
        assert!(outcome.has_failed());
    }

    const LIST: &str = "\
# Known.
integration/a
  It counts copies.
    counts
    module: counts memory
    sometimes: races
    sometimes: compares | count
";

    fn outcome(passed: &[&str], failed: &[&str]) -> Outcome {
        let ok = passed.iter().map(|name| format!("[ok]: {name} (1 ms)\n"));
        let err = failed.iter().map(|name| format!("[err]: {name} in tests/integration/a.tcl\nno\n"));
        Outcome::read(&ok.chain(err).collect::<String>())
    }

    const ALL: [&str; 5] = ["counts", "counts memory", "races", "works", "compares"];

    fn judged(with: With, passed: &[&str], failed: &[&str]) -> Verdict {
        Differs::read(LIST).unwrap().judge("integration/a", with, &outcome(&ALL, &[]), &outcome(passed, failed))
    }

    #[test]
    fn a_failure_that_is_in_the_list_is_known() {
        let verdict = judged(With::Attend, &["counts memory", "races", "works", "compares"], &["counts"]);
        assert_eq!(verdict.known, ["counts"]);
        assert!(verdict.is_good());
    }

    #[test]
    fn a_failure_that_is_not_in_the_list_is_a_finding() {
        let verdict = judged(With::Attend, &["counts memory", "races", "compares"], &["counts", "works"]);
        assert_eq!(verdict.unexpected, ["works: no"]);
        // With the module only.
        let verdict = judged(With::Attend, &["races", "works", "compares"], &["counts", "counts memory"]);
        assert_eq!(verdict.unexpected, ["counts memory: no"]);
        assert!(judged(With::Module, &["works", "compares"], &["counts", "counts memory", "races"]).is_good());
    }

    #[test]
    fn a_test_that_may_fail_in_one_way_may_fail_in_no_other() {
        let fails = |why: &str| {
            let mut remora = outcome(&["counts memory", "races", "works"], &["counts", "compares"]);
            remora.tests.get_mut("compares").unwrap().why = why.into();
            Differs::read(LIST).unwrap().judge("integration/a", With::Attend, &outcome(&ALL, &[]), &remora)
        };
        assert!(fails("Expected count > 0").is_good());
        assert_eq!(fails("the data differ").unexpected, ["compares: the data differ"]);
    }

    #[test]
    fn a_test_that_did_not_run_failed() {
        let plain = outcome(&ALL, &[]);
        let broken = Outcome::read("[ok]: counts memory (1 ms)\n[exception]: Executing test client: refused.\n");
        let verdict = Differs::read(LIST).unwrap().judge("integration/a", With::Attend, &plain, &broken);
        let why = "[exception]: Executing test client: refused.";
        assert_eq!(verdict.unexpected, [format!("{TO_THE_END}: {why}"), "2 tests did not run: compares; works".into()]);
        assert_eq!(verdict.known, ["counts", "races"]);
    }

    #[test]
    fn a_known_test_that_passes_is_stale() {
        let verdict = judged(With::Attend, &ALL, &[]);
        assert_eq!(verdict.stale, ["counts: it passes"]);
        let plain = outcome(&["works", "races", "counts memory"], &["counts"]);
        let verdict = Differs::read(LIST).unwrap().judge("integration/a", With::Attend, &plain, &plain);
        assert_eq!(verdict.stale, ["counts: no test of this name passes without Remora"]);
    }

    #[test]
    fn a_name_passes_if_none_of_its_tests_fails() {
        let judge =
            |plain: &Outcome, remora: &Outcome| Differs::default().judge("integration/a", With::Attend, plain, remora);
        let (once, twice, mixed) = (outcome(&["x"], &[]), outcome(&["x", "x"], &[]), outcome(&["x"], &["x"]));
        assert!(judge(&twice, &once).is_good() && judge(&mixed, &outcome(&[], &["x"])).is_good());
        assert_eq!(judge(&twice, &mixed).unexpected, ["x: no"]);
        assert_eq!(judge(&once, &outcome(&[], &[])).unexpected, ["1 tests did not run: x"]);
    }

    #[test]
    fn a_test_without_a_reason_is_refused() {
        assert!(Differs::read("integration/a\n    test\n").unwrap_err().to_string().contains("line 2"));
        assert!(Differs::read("   test\n").is_err());
    }
}
