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
//! - [`script`]: the events and settings of a seed. **Start here.** [`perform`]: how an event is carried out.
//! - [`rest`]: what must hold when the faults are over.
//! - [`group`]: the servers and the writer. [`agents`]: the agents and how they end. [`report`]: history and counts.

mod agents;
mod group;
mod perform;
mod report;
mod rest;
mod script;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use remora_bench::sync::Result;
use remora_lab::{Kind, Random, random, scratch};

use self::agents::Agents;
use self::group::Group;
use self::report::{Finding, History, Totals};
use self::script::{Event, Plan, events_until_rest, pause};
use crate::demo::Which;
use crate::show::Screen;
use crate::stop;

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
        stop::check()?;
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
        stop::check()?;
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
}
