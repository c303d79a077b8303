//! The soak: real servers and agents for an hour, while a random script restarts, promotes, freezes and cuts off what
//! it can, and compares all data again and again.
//!
//! ```text
//!   for each group:   fresh servers A ◀── B, C, D ── source ── writer on
//!     events:   one after the other, with random pauses ──▶ rest: writer off, faults over ──▶ every server in step? equal? ──▶ writer on …
//! ```
//!
//! A finding ends its group: a server that differs from its primary, one that does not get in step, an agent that ends
//! in a way that docs/reference/exit-codes.md does not have, a panic. The seed of the group is printed, and its logs
//! are kept.
//!
//! - [`script`]: the events and settings of a seed, and how an event is carried out. **Start here.**
//! - [`group`]: the servers and the writer; the agents and how they end.
//! - Here: what must hold when the faults are over, the history and the counts.

mod group;
mod script;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use remora_bench::sync::Result;
use remora_lab::compare::{CALM_TIME, same_data};
use remora_lab::{Kind, Random, process, random, scratch};

use self::group::{Agents, Group, tail};
use self::script::{Event, How, Plan, Seat, TAKEN_KEY, Who, events_until_rest, pause};
use crate::demo::Which;
use crate::process::{Screen, lay_out};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// How long to run, in minutes. The run ends at the first rest after this time.
    #[arg(long, value_name = "NUMBER", default_value_t = 60.0, value_parser = minutes)]
    minutes: f64,

    /// Seed of the script. Default: a random one, which is printed.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Which servers to use. Both: in turn.
    #[arg(long, value_name = "WHICH", default_value = "both")]
    server: Which,

    /// End after this many events with each kind of server, if the time is not over before.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    events: Option<u64>,

    /// Commands per second that change the primary meanwhile.
    #[arg(long, value_name = "N", default_value_t = 1500, value_parser = clap::value_parser!(u64).range(1..))]
    writes: u64,

    /// After a finding, go on with fresh servers and the next seed.
    #[arg(long)]
    keep_going: bool,

    /// Folder for the logs. Default: a temporary folder, which is kept after a finding.
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
}

/// Runs the soak and prints the summary on stdout.
pub(crate) fn run(options: &Options) -> Result<()> {
    let begun = Instant::now();
    let screen = Screen::new();
    let kinds = options.server.kinds();
    let program = screen.build_for(&kinds)?;
    let seed = options.seed.unwrap_or_else(|| random::seed("soak"));
    let temporary = scratch::folder("soak")?;
    let folder = options.logs.clone().unwrap_or_else(|| temporary.path().to_owned());
    let time = Duration::from_secs_f64(options.minutes * 60.0);
    let count = groups(time, kinds.len(), options.events.is_some());
    let each = time / count;
    screen.say(&format!("soak: seed {seed}, {} minutes, logs in {}", options.minutes, folder.display()));
    let mut totals = Totals::default();
    for (number, kind) in (0..).zip(kinds.iter().copied().cycle()) {
        // Groups that a finding has ended leave time for others.
        let left = time.saturating_sub(begun.elapsed());
        if number >= count && (options.events.is_some() || totals.findings.is_empty() || left < LEAST_TIME) {
            break;
        }
        let each = if number < count { each } else { each.min(left) };
        let seed = seed.wrapping_add(number.into());
        let logs = folder.join(format!("group-{}", number + 1));
        let mut history = History::new(&screen, begun, &logs)?;
        let again = again(options, kind, seed, each);
        history.note(&format!("group {}: {kind}, seed {seed}; alone: {again}", number + 1));
        let played = play(options, program.path(), kind, seed, each, &mut history, &mut totals);
        crate::process::fail_if_stopped()?;
        if let Err(error) = played {
            let what = format!("{kind}: {error}");
            history.note(&format!("FINDING: {what}"));
            totals.findings.push(Finding { again, what, logs });
            if !options.keep_going {
                break;
            }
        }
    }
    print!("{}", totals.text());
    println!("seed {seed}; {:.1} minutes in all", begun.elapsed().as_secs_f64() / 60.0);
    if totals.findings.is_empty() {
        return Ok(());
    }
    // Dropped, it would remove what the findings refer to.
    let _ = temporary.keep();
    Err(format!("{}, described above; logs in {}", totals.found(), folder.display()).into())
}

/// Plays one group to its end: the time is over, or the number of events.
fn play(
    options: &Options,
    program: &std::path::Path,
    kind: Kind,
    seed: u64,
    time: Duration,
    history: &mut History<'_>,
    totals: &mut Totals,
) -> Result<()> {
    let mut random = Random::new(seed);
    let plan = Plan::draw(kind, &mut random);
    history.note(&format!("  {plan}"));
    let group = Group::start(kind, &plan, options.writes)?;
    if !group.has_network() {
        history.note("  no rights to make network namespaces: nothing is cut; connections are broken instead");
    }
    let agents = Agents::new(program, &plan)?;
    let mut soak = Soak { group, agents, history, totals, random, plan, taken: [false; 2], rests: 0 };
    let played = soak.play(Instant::now() + time, options.events.unwrap_or(u64::MAX));
    soak.totals.commands += soak.group.commands();
    if played.is_err() {
        soak.agents.keep_outputs(soak.history);
        soak.group.logs().iter().for_each(|(name, log)| soak.history.keep(name, log));
    }
    played
}

/// A group while it is played.
struct Soak<'a, 'h> {
    group: Group,
    agents: Agents,
    history: &'a mut History<'h>,
    totals: &'a mut Totals,
    random: Random,
    plan: Plan,
    /// Which of C and D an operator has taken over.
    taken: [bool; 2],
    rests: u64,
}

impl Soak<'_, '_> {
    fn play(&mut self, end: Instant, most: u64) -> Result<()> {
        self.group.fill(&mut self.random)?;
        self.group.write(&mut self.random)?;
        self.ensure_source(false)?;
        let mut played = 0;
        while played < most && Instant::now() < end {
            for _ in 0..events_until_rest(&mut self.random) {
                let event = Event::draw(&mut self.random);
                played += 1;
                self.history.note(&format!("{played} {event}"));
                Totals::count(&mut self.totals.events, event.kind());
                self.perform(&event)?;
                self.group.write(&mut self.random)?;
                let pause = pause(&mut self.random);
                self.pass(pause)?;
                if played >= most || Instant::now() >= end {
                    break;
                }
            }
            self.rest()?;
        }
        Ok(())
    }

    /// Lets time pass, and looks after servers and agents meanwhile.
    fn pass(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        loop {
            self.look()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
    }

    /// Fails if a server or an agent has ended as it must not, or if the run is being stopped.
    fn look(&mut self) -> Result<()> {
        crate::process::fail_if_stopped()?;
        self.group.check_servers()?;
        self.agents.look(self.totals, self.history)
    }

    /// Waits until `done` says so, and fails with its last words when the time is over.
    fn until(
        &mut self,
        what: &str,
        within: Duration,
        mut done: impl FnMut(&mut Self) -> Result<std::result::Result<(), String>>,
    ) -> Result<()> {
        let end = Instant::now() + within;
        loop {
            self.look()?;
            let Err(state) = done(self)? else { return Ok(()) };
            if Instant::now() >= end {
                return Err(format!("waited {within:?} for {what}: {state}").into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Starts a source beside the primary or the standby, unless one runs.
    fn ensure_source(&mut self, beside_standby: bool) -> Result<()> {
        if self.agents.has_source() {
            return Ok(());
        }
        self.agents.start_source(self.group.captured(beside_standby), self.history)
    }
}

/// The number of groups: one for each kind of server, and more if each would be played for longer than
/// [`GROUP_TIME`].
fn groups(time: Duration, kinds: usize, counted: bool) -> u32 {
    let kinds = u32::try_from(kinds).unwrap_or(1).max(1);
    if counted {
        return kinds;
    }
    let rounds = time.as_secs().div_ceil(GROUP_TIME.as_secs() * u64::from(kinds));
    kinds * u32::try_from(rounds).unwrap_or(1).max(1)
}

/// The command that plays a group alone.
fn again(options: &Options, kind: Kind, seed: u64, time: Duration) -> String {
    let server = match kind {
        Kind::Redis7 => "redis",
        Kind::Valkey9 => "valkey",
    };
    let events = options.events.map(|events| format!(" --events {events}")).unwrap_or_default();
    let minutes = time.as_secs_f64() / 60.0;
    format!(
        "cargo xtask soak --server {server} --seed {seed} --minutes {minutes:.1} --writes {}{events}",
        options.writes
    )
}

fn minutes(text: &str) -> std::result::Result<f64, String> {
    let minutes: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if minutes > 0.0 && minutes <= MOST_MINUTES {
        Ok(minutes)
    } else {
        Err(format!("more than 0, at most {MOST_MINUTES}"))
    }
}

/// How long a group is played at most. A new one has other settings, and fresh logs of a size that can be read.
const GROUP_TIME: Duration = Duration::from_secs(600);

/// A group that is played for a shorter time has hardly begun.
const LEAST_TIME: Duration = Duration::from_secs(30);

/// A week. More is taken for a typing error.
const MOST_MINUTES: f64 = 7.0 * 24.0 * 60.0;

/// Interval between two looks at servers and agents.
const LOOK_EVERY: Duration = Duration::from_millis(50);

// A rest: the writer is stopped, the faults are over, and the servers are compared.
//
// What must hold then:
//
// - A server that an operator took over is still a primary and has the operator's key.
// - Every other server gets in step within [`SETTLE_TIME`]. A server that is a primary, because its sync failed, gets
//   an agent as an operator would start it. So does one that follows the closed link of an agent that was killed, or
//   that said that it could not tell the server anything. That agent must succeed, at the second try at the latest.
// - No other server follows a closed link.
// - All data, replid and offset are equal; `remora verify` agrees.
// - Settings that agents change have their old values where no agent runs.

impl Soak<'_, '_> {
    /// Waits until all servers are in step, and compares them.
    fn rest(&mut self) -> Result<()> {
        // Empty servers are equal too easily.
        if self.group.lacks_long_strings()? {
            self.group.fill(&mut self.random)?;
        }
        self.group.stop_writing();
        self.look()?;
        self.agents.check_for_panics()?;
        self.check_taken()?;
        let begun = Instant::now();
        self.wait_for_standby(SETTLE_TIME)?;
        for seat in Seat::ALL {
            self.settle(seat)?;
        }
        let settled = begun.elapsed();
        let mut words = Vec::new();
        for who in [Who::Standby, Who::Seat(Seat::C), Who::Seat(Seat::D)] {
            words.push(self.compare(who)?);
        }
        self.check_settings()?;
        self.rests += 1;
        self.totals.rests += 1;
        if self.rests.is_multiple_of(2) {
            words.push(self.verify()?);
        }
        let (settled, all) = (settled.as_secs_f64(), begun.elapsed().as_secs_f64());
        self.history
            .note(&format!("rest: {}; in step after {settled:.1} s, compared after {all:.1} s", words.join(", ")));
        Ok(())
    }

    /// A server that an operator took over must be left alone, also by an agent that ended since.
    fn check_taken(&mut self) -> Result<()> {
        for seat in Seat::ALL {
            if !std::mem::take(&mut self.taken[seat.index()]) {
                continue;
            }
            let who = Who::Seat(seat);
            let standing = self.group.standing(who)?;
            let key = self.group.server(who).client()?.text(&["GET", TAKEN_KEY])?;
            if standing.is_replica || key.is_empty() {
                let what =
                    format!("{seat} was taken over by an operator and changed since: {standing:?}, the key is {key:?}");
                return Err(what.into());
            }
        }
        Ok(())
    }

    /// Waits until the seat's server is in step, and starts agents for it where an operator would.
    fn settle(&mut self, seat: Seat) -> Result<()> {
        let who = Who::Seat(seat);
        let mut repairs = 0;
        self.until(&format!("{seat} to be in step"), SETTLE_TIME, |soak| {
            // An agent that has not been in step yet can change the server at any moment.
            if soak.agents.runs(seat) && !soak.agents.stays_in_step(seat) {
                return Ok(Err("its agent still runs".into()));
            }
            let standing = soak.group.standing(who)?;
            let follows_a_server = soak.group.is_server(&standing.follows);
            if standing.is_replica && (follows_a_server || soak.agents.runs(seat)) {
                let state = format!("{standing:?}");
                return Ok(if standing.is_up { Ok(()) } else { Err(state) });
            }
            if soak.agents.runs(seat) {
                return Ok(Err("its agent has not noticed yet that the server has left it".into()));
            }
            let end = soak.agents.last_end(seat);
            if standing.is_replica && !end.is_some_and(|end| end.may_leave_link) {
                let how = end.map_or("no agent has ended", |end| &end.how);
                return Err(
                    format!("{seat} follows {}, and no agent runs there (the last: {how})", standing.follows).into()
                );
            }
            if repairs == MOST_REPAIRS {
                return Err(format!(
                    "{repairs} agents in a row could not make {seat} a replica, and nothing disturbed them"
                )
                .into());
            }
            repairs += 1;
            soak.history.note(&format!("  {seat} {}: starting an agent", how_it_is(standing.is_replica)));
            soak.start_agent(seat, &How::plain())?;
            Ok(Err("its agent was started".into()))
        })
    }

    fn compare(&mut self, who: Who) -> Result<String> {
        self.look()?;
        let (primary, server) = (self.group.server(Who::Primary), self.group.server(who));
        let agreement = same_data(primary, server, CALM_TIME).map_err(|error| {
            let native = if who == Who::Standby { ", a replica of the servers' own" } else { "" };
            format!("{}{native}: {error}", self.group.name(who))
        })?;
        self.totals.comparisons += 1;
        Ok(format!("{} equal at {}", self.group.name(who), agreement.offset))
    }

    /// Settings that an agent changes for a sync.
    fn check_settings(&mut self) -> Result<()> {
        for seat in Seat::ALL {
            let may_differ = self.agents.last_end(seat).is_some_and(|end| end.may_leave_settings);
            if self.agents.runs(seat) || may_differ {
                continue;
            }
            let server = self.group.server(Who::Seat(seat));
            let expected = [("repl-diskless-load", self.plan.diskless_load[seat.index()]), ("masterauth", "")];
            for (name, expected) in expected {
                let present = server.configured(name)?;
                if present != expected {
                    return Err(format!(
                        "{seat}: the agent did not restore {name}: {present:?} instead of {expected:?}"
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<String> {
        let seats = [Who::Standby, Who::Seat(Seat::C), Who::Seat(Seat::D)];
        let who = seats[self.random.below(3) as usize];
        let more: &[&str] = if self.random.one_in(2) { &["--digest", "never"] } else { &[] };
        let (status, output) = self.agents.verify(self.group.server(Who::Primary), self.group.server(who), more)?;
        self.totals.verified += 1;
        if status.success() {
            return Ok(format!("verify {} 0", self.group.name(who)));
        }
        let (name, how) = (self.group.name(who), process::in_words(status));
        Err(format!("remora verify {} of {name} ended with {how}:\n{}", more.join(" "), tail(&output)).into())
    }
}

fn how_it_is(is_replica: bool) -> &'static str {
    if is_replica { "follows the closed link of an agent" } else { "is no replica" }
}

/// How long servers and agents may take until all are in step: `--retry-for` of an agent and the time of a sync, twice,
/// on a busy machine.
const SETTLE_TIME: Duration = Duration::from_secs(180);

/// How many agents may fail at a rest, one after the other: the first may meet what the last fault has caused.
const MOST_REPAIRS: u32 = 2;

// What is kept of a run: the history of a group with its times, and the counts of all groups.

/// The history of a group: each line is printed, and written to a file.
pub(super) struct History<'a> {
    screen: &'a Screen,
    begun: Instant,
    file: File,
    folder: PathBuf,
}

impl<'a> History<'a> {
    /// An empty history in `folder`. Times count from `begun`, the start of the run.
    fn new(screen: &'a Screen, begun: Instant, folder: &Path) -> Result<History<'a>> {
        fs::create_dir_all(folder)?;
        let file = OpenOptions::new().create(true).append(true).open(folder.join("history.log"))?;
        Ok(History { screen, begun, file, folder: folder.to_owned() })
    }

    /// Prints a line and keeps it.
    fn note(&mut self, line: &str) {
        let line = format!("[{}] {line}", clock(self.begun.elapsed()));
        self.screen.say(&line);
        // The line was printed; a full disk does not end the run.
        let _ = writeln!(self.file, "{line}");
    }

    /// Keeps the output of a process, or a server's log, under this name.
    fn keep(&self, name: &str, text: &str) {
        // As above: what is missing then is a file, not the finding.
        let _ = fs::write(self.folder.join(name), text);
    }

    /// A path in the folder of the group.
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Minutes, seconds and tenths.
fn clock(time: Duration) -> String {
    format!("{:>3}:{:02}.{}", time.as_secs() / 60, time.as_secs() % 60, time.subsec_millis() / 100)
}

/// The counts of a run.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// Events by kind.
    pub(super) events: BTreeMap<&'static str, u64>,
    /// Moments at which everything was compared.
    pub(super) rests: u64,
    /// Servers compared with their primary.
    pub(super) comparisons: u64,
    /// Runs of `remora verify`.
    pub(super) verified: u64,
    /// Replicas that an agent brought in step, by method.
    pub(super) syncs: BTreeMap<String, u64>,
    /// How agents ended, by program and exit code or signal.
    pub(super) ends: BTreeMap<String, u64>,
    /// Commands of the writer.
    pub(super) commands: u64,
    /// What must not happen and did.
    pub(super) findings: Vec<Finding>,
}

/// Something that must not happen.
#[derive(Debug)]
pub(super) struct Finding {
    /// The arguments that play the group again.
    pub(super) again: String,
    /// What happened.
    pub(super) what: String,
    /// Where the logs are.
    pub(super) logs: PathBuf,
}

impl Totals {
    /// Counts one more.
    fn count<K: Ord>(counts: &mut BTreeMap<K, u64>, what: K) {
        *counts.entry(what).or_default() += 1;
    }

    /// The number of findings, in words.
    fn found(&self) -> String {
        match self.findings.len() {
            1 => "1 finding".to_owned(),
            count => format!("{count} findings"),
        }
    }

    /// The summary that is printed at the end.
    fn text(&self) -> String {
        let rows = |counts: Vec<(String, u64)>| -> Vec<Vec<String>> {
            counts.into_iter().map(|(what, count)| vec![what, count.to_string()]).collect()
        };
        let named =
            |counts: &BTreeMap<String, u64>| counts.iter().map(|(what, count)| (what.clone(), *count)).collect();
        let events = self.events.iter().map(|(what, count)| ((*what).to_owned(), *count)).collect();
        let mut text = String::from("\n");
        for (head, counts) in
            [("event", events), ("sync completed", named(&self.syncs)), ("end of an agent", named(&self.ends))]
        {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", lay_out(&[head, "count"], 1, &rows(counts)));
        }
        let events: u64 = self.events.values().sum();
        let _ = writeln!(
            text,
            "{events} events, {} rests, {} comparisons of all data, {} runs of remora verify, {} commands written, {}",
            self.rests,
            self.comparisons,
            self.verified,
            self.commands,
            self.found()
        );
        for Finding { again, what, logs } in &self.findings {
            let _ = writeln!(text, "\nFINDING: {what}\n  again: {again}\n  logs: {}", logs.display());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_divided_among_groups_of_all_kinds() {
        let count = |minutes: u64, kinds| groups(Duration::from_secs(60 * minutes), kinds, false);
        assert_eq!((count(60, 2), count(60, 1), count(5, 2), count(25, 2)), (6, 6, 2, 4));
        assert_eq!(groups(Duration::from_secs(30), 2, false), 2);
        assert_eq!(groups(Duration::from_secs(3600), 2, true), 2, "a number of events for each kind");
    }

    #[test]
    fn minutes_are_positive_and_bounded() {
        assert_eq!(minutes("0.5"), Ok(0.5));
        for wrong in ["0", "-1", "NaN", "1e9", "an hour"] {
            assert!(minutes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_summary_names_counts_and_findings() {
        let mut totals = Totals { rests: 3, ..Totals::default() };
        Totals::count(&mut totals.events, "FLUSHALL");
        Totals::count(&mut totals.events, "FLUSHALL");
        Totals::count(&mut totals.ends, "replica: exit code 6".to_owned());
        let (again, what, logs) = ("--seed 7".to_owned(), "C differs".to_owned(), PathBuf::from("/tmp/x"));
        totals.findings.push(Finding { again, what, logs });
        let text = totals.text();
        for part in [
            "FLUSHALL",
            "2 events, 3 rests",
            "written, 1 finding\n",
            "replica: exit code 6",
            "C differs",
            "--seed 7",
            "/tmp/x",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }

    #[test]
    fn a_time_is_shown_in_minutes() {
        assert_eq!(clock(Duration::from_millis(125_340)), "  2:05.3");
    }
}
