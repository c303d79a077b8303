//! `remora plan`: what replicas of a primary need and cost, before an agent is started. It changes nothing, but some
//! keys count as used (LRU, LFU).
//!
//! The figures are those of the agents: [`Shares`] divides the source's memory, `Sinks` a
//! replica's, `estimate` has the times, and the primary's own facts say whether a hand-off can be pinned.

use std::time::{Duration, Instant};

use remora_redis::info::Info;
use remora_redis::resp::Frame;
use serde::Serialize;

use crate::args::{PlanArgs, PlannedSecurity};
use crate::exit::Failure;
use crate::growth::Growth;
use crate::progress;
use crate::reader::source::{DEFAULT_MEMORY, Sinks};
use crate::server::{Client, Facts, PinSizes, ServerError, Task};
use crate::source::{Compress, Shares, Wanted, default_slot_size, expected, least_memory};
use remora_replica::prepared::{BACKLOG_SECONDS, Course, Times};

use crate::units::{Size, counted, readable, rounded};

/// Asks the primary, and prints the plan on stdout.
///
/// # Errors
/// The primary does not answer, or the options leave no memory.
pub async fn run(args: PlanArgs) -> Result<(), Failure> {
    let known = match args.data {
        Some(data) => Known::imagined(data, args.write_rate),
        None => Known::ask(&args).await?,
    };
    let plan = Plan::of(&args, &known)?;
    match args.json {
        true => progress::print_line(&as_json(&plan)),
        false => progress::print(&as_text(&plan)),
    }
}

async fn setting(client: &mut Client, name: &str) -> Option<String> {
    client.config_get(name).await.ok().flatten()
}

/// Looks at what clients write for this long. A server without a backlog does not count what it would send to replicas:
/// what it receives is then an upper bound.
async fn measure(client: &mut Client, time: Duration) -> Result<Writes, Failure> {
    let (mut stream, mut received, mut commands) = (Growth::default(), Growth::default(), Growth::default());
    let mut look = async |client: &mut Client| {
        let info = client.info("").await?;
        let (facts, now) = (Facts::from_info(&info), Instant::now());
        let number = |name: &str| info.number::<u64>(name).unwrap_or(0);
        let is_counted = facts.backlog.is_some_and(|backlog| backlog.active);
        let stream = stream.look(now, facts.offset.unwrap_or(0), Duration::ZERO);
        let received = received.look(now, number("total_net_input_bytes"), Duration::ZERO);
        let commands = commands.look(now, number("total_commands_processed"), Duration::ZERO);
        let (bytes, is_bound) = if is_counted { (stream, false) } else { (received, true) };
        let measured = bytes.zip(commands).map(|(bytes, commands)| Writes {
            bytes_per_second: bytes as u64,
            commands_per_second: Some(commands as u64),
            is_upper_bound: is_bound,
        });
        Ok::<_, Failure>(measured)
    };
    look(client).await?;
    tokio::time::sleep(time.max(LEAST_TIME)).await;
    Ok(look(client).await?.unwrap_or_default())
}

/// The shortest time that says anything about a rate.
const LEAST_TIME: Duration = Duration::from_millis(200);

// The figures of a plan. Pure.

/// What clients write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Writes {
    bytes_per_second: u64,
    /// Commands of any kind; `None` if they were not counted.
    commands_per_second: Option<u64>,
    /// The server does not count its stream without a replica: this is all that it receives.
    is_upper_bound: bool,
}

/// What is known of the primary.
struct Known {
    /// `None`: no primary was asked, and the facts are those of a server with default settings.
    url: Option<String>,
    facts: Facts,
    /// Bytes of memory of its host.
    host_memory: Option<u64>,
    /// Bytes that its last save copied because clients had written to them.
    last_copied_on_write: Option<u64>,
    /// How long it waits before it forks.
    fork_delay: Duration,
    writes: Writes,
    /// Some of its keys, if our user may look at them.
    sample: Option<Sample>,
}

impl Known {
    /// Asks a primary.
    async fn ask(args: &PlanArgs) -> Result<Known, Failure> {
        let server = args.server.open(Task::Plan)?;
        let mut client = server.connect().await?;
        let writes = match args.write_rate {
            Some(rate) => Writes { bytes_per_second: rate.get(), ..Writes::default() },
            None => measure(&mut client, args.measure).await?,
        };
        let info = client.info("").await?;
        let delay = match setting(&mut client, "repl-diskless-sync").await.as_deref() {
            Some("no") => None,
            _ => setting(&mut client, "repl-diskless-sync-delay").await.and_then(|text| text.parse().ok()),
        };
        let facts = Facts::from_info(&info);
        let sample = Sample::take(&mut client, &facts).await?;
        Ok(Known {
            url: Some(server.url().to_string()),
            facts,
            sample,
            host_memory: info.number("total_system_memory"),
            last_copied_on_write: info.number("rdb_last_cow_size").filter(|bytes| *bytes > 0),
            fork_delay: Duration::from_secs(delay.unwrap_or(0)),
            writes,
        })
    }

    /// A primary with so much data and the settings that a Redis or Valkey server has by default.
    fn imagined(data: Size, write_rate: Option<Size>) -> Known {
        let info = format!(
            "redis_version:7.0.0\nused_memory:{data}\nused_memory_dataset:{data}\nrepl_backlog_active:1\n\
             repl_backlog_size:1048576\nrepl_backlog_first_byte_offset:1\nrepl_backlog_histlen:1\n",
            data = data.get()
        );
        Known {
            url: None,
            facts: Facts::from_info(&Info::parse(info.as_bytes())),
            host_memory: None,
            last_copied_on_write: None,
            fork_delay: DEFAULT_FORK_DELAY,
            writes: Writes { bytes_per_second: write_rate.map_or(0, Size::get), ..Writes::default() },
            sample: None,
        }
    }
}

/// The default `repl-diskless-sync-delay` of a server.
const DEFAULT_FORK_DELAY: Duration = Duration::from_secs(5);

/// The plan.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    primary: Primary,
    writes: Writes,
    /// An estimate, from a sample of the keys if there is one.
    snapshot_bytes: u64,
    /// An upper estimate, by which a source decides whether the snapshot fits.
    snapshot_at_most_bytes: u64,
    source: Source,
    replicas: Replicas,
    backlog: Backlog,
    fork: Fork,
    /// For all replicas together, which pass slots on.
    times: Times,
    total_seconds: f64,
    late: Late,
    #[serde(skip)]
    bound_by_servers: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Primary {
    /// `None` with `--data`.
    url: Option<String>,
    server: String,
    keys: u64,
    data_bytes: u64,
    used_bytes: u64,
    host_memory_bytes: Option<u64>,
}

/// The source with the given memory, and with as much as it needs.
#[derive(Clone, Debug, Serialize)]
struct Source {
    sealed: bool,
    /// The given `--memory`.
    memory_bytes: u64,
    /// Bytes of the snapshot that it holds at once.
    window_bytes: u64,
    /// The snapshot does not fit.
    windowed: bool,
    /// The least `--memory` that holds the whole snapshot.
    whole_memory_bytes: u64,
    /// Bytes of that memory which the source takes for the snapshot, before it knows how long it is.
    whole_in_use_bytes: u64,
    /// Further bytes when the journal is full.
    whole_journal_in_use_bytes: u64,
}

/// Each replica.
#[derive(Clone, Debug, Serialize)]
struct Replicas {
    count: u32,
    /// Its server.
    server_bytes: u64,
    /// Its agent, with the default `--memory`.
    agent_memory_bytes: u64,
    /// The least `--memory` with which the agent holds the whole snapshot for others.
    whole_memory_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Backlog {
    bytes: u64,
    /// What it should have at least.
    advised_bytes: u64,
    /// Why a hand-off cannot be pinned with the advised size; `None`: it can.
    no_pin_because: Option<&'static str>,
}

#[derive(Clone, Debug, Serialize)]
struct Fork {
    /// Forks for all replicas that begin together.
    count: u32,
    /// Bytes that are copied because clients write while the snapshot is saved: from, to.
    copied_bytes: [u64; 2],
    last_copied_bytes: Option<u64>,
    /// Bytes that the host has left for that; `None` if it is not known.
    left_bytes: Option<u64>,
}

/// Replicas that join later.
#[derive(Clone, Debug, Serialize)]
struct Late {
    /// Each makes the primary fork.
    forks: bool,
    /// For how long the journal reaches back to the snapshot; `None`: without end, or no late replica is served.
    free_for_seconds: Option<u64>,
}

/// Bytes that a written command makes the kernel copy at most while a save goes on: the page of the value and that of
/// the dictionary's entry.
const COPIED_PER_COMMAND: u64 = 2 * 4096;

impl Plan {
    /// # Errors
    /// The given memory is too small.
    fn of(args: &PlanArgs, known: &Known) -> Result<Plan, Failure> {
        let (facts, writes) = (&known.facts, known.writes);
        let is_sealed = args.security != PlannedSecurity::None;
        let wanted = |memory: u64| Wanted {
            memory,
            journal: args.journal_memory.map(Size::get),
            slot: default_slot_size(Size::bytes(memory)).get(),
            is_sealed,
            compress: Compress::Auto,
        };
        let given = Shares::of(&wanted(args.memory.get()))?;
        let windowed = !given.hold(facts);
        let whole_memory = least_memory(|memory| Shares::of(&wanted(memory)).is_ok_and(|shares| shares.hold(facts)))
            .ok_or_else(too_much)?;
        let whole = Shares::of(&wanted(whole_memory))?;
        let (used, at_most) = (facts.used_memory.unwrap_or(0), expected(facts, whole.snapshot));
        let data = facts.used_memory_dataset.unwrap_or(used);
        let sampled = known.sample.map(|sample| sample.snapshot_of(facts.keys(), data));
        let snapshot_bytes = sampled.unwrap_or(at_most).min(at_most);
        let slots = at_most.div_ceil(u64::from(whole.snapshot.slot_size));
        let course = Course { snapshot_bytes, delay: known.fork_delay, rate: args.rate.map(Size::get) };
        let times = course.times();
        let backlog = facts.backlog.map_or(0, |backlog| backlog.size);
        let advised = advised_backlog(writes.bytes_per_second).max(backlog);
        let with_advised = Facts {
            backlog: facts.backlog.map(|now| crate::server::Backlog { size: advised, ..now }),
            ..facts.clone()
        };
        Ok(Plan {
            primary: Primary {
                url: known.url.clone(),
                server: facts.name(),
                keys: facts.keys(),
                data_bytes: data,
                used_bytes: used,
                host_memory_bytes: known.host_memory,
            },
            writes,
            snapshot_bytes,
            snapshot_at_most_bytes: at_most,
            source: Source {
                sealed: is_sealed,
                memory_bytes: args.memory.get(),
                window_bytes: given.ring(),
                windowed,
                whole_memory_bytes: whole_memory,
                whole_in_use_bytes: whole.in_use_by_a_snapshot(at_most),
                whole_journal_in_use_bytes: whole.in_use_by_the_journal(),
            },
            replicas: Replicas {
                count: args.replicas,
                server_bytes: used,
                agent_memory_bytes: DEFAULT_MEMORY.get(),
                whole_memory_bytes: least_memory(|memory| Sinks::new(memory).holds(&whole.snapshot, slots, is_sealed))
                    .ok_or_else(too_much)?,
            },
            backlog: Backlog {
                bytes: backlog,
                advised_bytes: advised,
                no_pin_because: with_advised.why_no_pin(&PinSizes::SERVERS),
            },
            fork: Fork {
                count: 1,
                copied_bytes: copied_on_write(writes, &times, used),
                last_copied_bytes: known.last_copied_on_write,
                left_bytes: known.host_memory.map(|host| host.saturating_sub(used)),
            },
            times,
            total_seconds: times.total().as_secs_f64(),
            late: Late {
                forks: windowed,
                free_for_seconds: given.journal_ring().checked_div(writes.bytes_per_second).filter(|_| !windowed),
            },
            bound_by_servers: course.is_bound_by_servers(),
        })
    }
}

fn too_much() -> Failure {
    Failure::refused("the primary says that it has more data than any host has memory")
}

/// A backlog that holds some seconds of writes, and that can be pinned.
fn advised_backlog(write_rate: u64) -> u64 {
    let bytes = write_rate.saturating_mul(BACKLOG_SECONDS).max(PinSizes::SERVERS.least_backlog);
    bytes.checked_next_power_of_two().unwrap_or(u64::MAX)
}

/// From what is written while the snapshot is saved to what that many commands can touch, but no more than all memory.
fn copied_on_write(writes: Writes, times: &Times, used: u64) -> [u64; 2] {
    let in_all = |rate: u64| (rate as f64 * times.copy_seconds) as u64;
    let least = if writes.is_upper_bound { 0 } else { in_all(writes.bytes_per_second) };
    let most = match writes.commands_per_second {
        Some(commands) => in_all(commands.saturating_mul(COPIED_PER_COMMAND)).max(in_all(writes.bytes_per_second)),
        None if writes.bytes_per_second == 0 => 0,
        None => u64::MAX,
    };
    [least.min(used), most.min(used)]
}

// A sample of the primary's keys: how many bytes they take in memory and in a snapshot.
//
// `INFO` tells what the data take in memory, where strings stand in blocks of the allocator's sizes. A snapshot has
// their bytes alone, and compresses some. `DUMP` answers with the bytes that the snapshot will have.

/// What some keys take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    keys: u64,
    /// Bytes of memory.
    in_memory: u64,
    /// Bytes of a snapshot.
    in_snapshot: u64,
}

/// Keys of a sample.
const KEYS: u64 = 256;

/// The longest time for a sample.
const TIME: Duration = Duration::from_secs(2);

/// Larger values are not dumped, as the primary does nothing else meanwhile. Of a string the length is asked; others
/// take about as many bytes in a snapshot as in memory.
const DUMPED: u64 = 256 << 10;

/// What `DUMP` adds: the version of the format, and a checksum.
const DUMP_FOOTER: u64 = 10;

/// What a snapshot adds to a key: its length.
const KEY_LENGTH: u64 = 2;

impl Sample {
    /// Takes some keys of the database that has the most; `None` if our user may not, or there are none.
    ///
    /// # Errors
    /// The connection failed.
    async fn take(client: &mut Client, facts: &Facts) -> Result<Option<Sample>, ServerError> {
        match Sample::taken(client, facts).await {
            Err(error) if error.refusal().is_some() => Ok(None),
            sample => sample.map(|sample| Some(sample).filter(|sample| sample.keys > 0)),
        }
    }

    async fn taken(client: &mut Client, facts: &Facts) -> Result<Sample, ServerError> {
        let (mut sample, began) = (Sample::default(), Instant::now());
        let fullest = facts.databases.iter().max_by_key(|database| database.keys);
        if let Some(database) = fullest.filter(|database| database.number != 0) {
            client.command(&["SELECT", &database.number.to_string()]).await?;
        }
        for _ in 0..KEYS {
            let Frame::Bulk(key) = client.command(&["RANDOMKEY"]).await? else { break };
            let usage = client.command(&[b"MEMORY".as_slice(), b"USAGE", &key]).await?;
            // A key that has just expired is not there.
            let Frame::Integer(used) = usage else { continue };
            let used = u64::try_from(used).unwrap_or(0);
            let dumped = match used > DUMPED {
                true => match client.command(&[b"STRLEN".as_slice(), &key]).await {
                    Ok(Frame::Integer(length)) => u64::try_from(length).unwrap_or(used),
                    Ok(_) => used,
                    Err(error) if error.refusal().is_some() => used,
                    Err(error) => return Err(error),
                },
                false => match client.command(&[b"DUMP".as_slice(), &key]).await? {
                    Frame::Bulk(value) => {
                        (value.len() as u64).saturating_sub(DUMP_FOOTER) + key.len() as u64 + KEY_LENGTH
                    }
                    _ => continue,
                },
            };
            sample.keys += 1;
            sample.in_memory = sample.in_memory.saturating_add(used);
            sample.in_snapshot = sample.in_snapshot.saturating_add(dumped);
            if began.elapsed() >= TIME {
                break;
            }
        }
        Ok(sample)
    }

    /// Bytes of the snapshot of this number of keys. `data`: the bytes that all of them take in memory. What the sample
    /// does not explain, such as a few large values, counts as many bytes as it takes in memory.
    fn snapshot_of(&self, keys: u64, data: u64) -> u64 {
        let of_all = |bytes: u64| {
            u64::try_from(u128::from(bytes) * u128::from(keys) / u128::from(self.keys.max(1))).unwrap_or(u64::MAX)
        };
        of_all(self.in_snapshot).saturating_add(data.saturating_sub(of_all(self.in_memory)))
    }
}

// A plan as text, and as JSON.

fn as_json(plan: &Plan) -> String {
    serde_json::to_string_pretty(plan).unwrap_or_default()
}

fn as_text(plan: &Plan) -> String {
    let lines = [
        ("primary", primary(plan)),
        ("writes", writes(plan)),
        ("source", whole(plan)),
        ("", given(plan)),
        ("replicas", replicas(plan)),
        ("backlog", backlog(plan)),
        ("fork", fork(plan)),
        ("time", time(plan)),
        ("later", late(plan)),
    ];
    lines.iter().map(|(name, text)| format!("{name:<9} {text}\n")).collect()
}

fn primary(plan: &Plan) -> String {
    let primary = &plan.primary;
    let Some(url) = &primary.url else {
        return format!(
            "none was asked: {} of data in a server with default settings",
            Size::bytes(primary.data_bytes)
        );
    };
    let host = primary.host_memory_bytes.map_or_else(String::new, |bytes| format!("; its host has {}", rounded(bytes)));
    format!(
        "{url} ({}): {} of data in {}, {} of memory{host}",
        primary.server,
        rounded(primary.data_bytes),
        counted(primary.keys, "key"),
        rounded(primary.used_bytes)
    )
}

fn writes(plan: &Plan) -> String {
    let rate = rounded(plan.writes.bytes_per_second);
    match plan.writes.is_upper_bound {
        true => format!("at most {rate}/s: the primary has no backlog yet, so this is all that it receives"),
        false => format!("{rate}/s"),
    }
}

fn whole(plan: &Plan) -> String {
    let source = &plan.source;
    let twice = if source.sealed { ", twice because other hosts read it sealed" } else { "" };
    format!(
        "--memory {} holds the snapshot (about {}, at most {}) whole{twice}: {} in use, and up to {} more for the journal",
        Size::bytes(source.whole_memory_bytes),
        rounded(plan.snapshot_bytes),
        rounded(plan.snapshot_at_most_bytes),
        rounded(source.whole_in_use_bytes),
        rounded(source.whole_journal_in_use_bytes)
    )
}

fn given(plan: &Plan) -> String {
    let (memory, window) = (Size::bytes(plan.source.memory_bytes), rounded(plan.source.window_bytes));
    match plan.source.windowed {
        false => format!("--memory {memory} is enough"),
        true => format!(
            "--memory {memory} is a window of {window}: replicas must begin together, and read at the pace of the slowest, for \
             which the primary holds its stream back"
        ),
    }
}

fn replicas(plan: &Plan) -> String {
    let replicas = &plan.replicas;
    let each = if replicas.count == 1 { "" } else { "each " };
    format!(
        "{}, {each}with about {} for its server and {} for its agent (--memory), which needs {} to hold the whole snapshot for others",
        replicas.count,
        rounded(replicas.server_bytes),
        Size::bytes(replicas.agent_memory_bytes),
        Size::bytes(replicas.whole_memory_bytes)
    )
}

fn backlog(plan: &Plan) -> String {
    let backlog = &plan.backlog;
    let advice = match backlog.bytes >= backlog.advised_bytes {
        true => format!("{} is enough", Size::bytes(backlog.bytes)),
        false => format!(
            "{}; set repl-backlog-size to {} or more",
            Size::bytes(backlog.bytes),
            Size::bytes(backlog.advised_bytes)
        ),
    };
    match backlog.no_pin_because {
        None => format!("{advice}; the hand-off keeps what it needs there (a pin), whatever is written"),
        Some(why) => format!("{advice}; there is no pin: {why}"),
    }
}

fn fork(plan: &Plan) -> String {
    let fork = &plan.fork;
    let [least, most] = fork.copied_bytes;
    let last =
        fork.last_copied_bytes.map_or_else(String::new, |bytes| format!("; the last save copied {}", rounded(bytes)));
    let left = fork.left_bytes.map_or_else(String::new, |bytes| format!("; the host has {} beside it", rounded(bytes)));
    if most == 0 {
        return format!("one for all that begin together; what clients write meanwhile is copied{last}{left}");
    }
    format!(
        "one for all that begin together; {} to {} are copied because clients write meanwhile{last}{left}",
        rounded(least),
        rounded(most)
    )
}

fn time(plan: &Plan) -> String {
    let seconds = |seconds: f64| readable(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
    let slowest = if plan.bound_by_servers { "servers" } else { "network" };
    let delay = match plan.times.delay_seconds {
        0.0 => String::new(),
        delay => format!("{} until the fork (remora source --tune-server: none), ", seconds(delay)),
    };
    let together = if plan.replicas.count == 1 { "" } else { " for all, which pass it on" };
    format!(
        "about {}: {delay}{} for the snapshot{together} (bound by the {slowest}), {} for the hand-off",
        seconds(plan.total_seconds),
        seconds(plan.times.copy_seconds),
        seconds(plan.times.hand_off_seconds)
    )
}

/// A time that says no more than "long" in seconds.
const LONG_SECONDS: u64 = 7 * 86_400;

fn late(plan: &Plan) -> String {
    match (plan.late.forks, plan.late.free_for_seconds) {
        (true, _) => "each replica that joins later makes the primary fork and send its data again".to_owned(),
        (false, None) => "a replica that joins later costs the primary nothing, at any time".to_owned(),
        // At such a rate the journal is not what ends it.
        (false, Some(free)) if free >= LONG_SECONDS => {
            "a replica that joins within a week of the snapshot costs the primary nothing at this rate".to_owned()
        }
        (false, Some(free)) => format!(
            "a replica that joins within {} of the snapshot costs the primary nothing: so long the journal reaches back at this \
             rate; a later one makes it fork again",
            readable(Duration::from_secs(free))
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Options {
        #[command(flatten)]
        plan: PlanArgs,
    }

    fn args(more: &[&str]) -> PlanArgs {
        let begin = ["remora", "--server", "redis://h:1"];
        Options::try_parse_from(begin.iter().chain(more)).unwrap().plan
    }

    /// A primary with 60 GiB of data.
    fn known(writes: Writes) -> Known {
        let data: u64 = 60 << 30;
        let text = format!(
            "redis_version:7.0.15\nused_memory:{}\nused_memory_dataset:{data}\nrepl_backlog_active:1\n\
             repl_backlog_size:1048576\nrepl_backlog_first_byte_offset:1\nrepl_backlog_histlen:1\ndb0:keys=9,expires=0\n",
            data + (4 << 30)
        );
        Known {
            url: Some("redis://h:1".into()),
            facts: Facts::from_info(&Info::parse(text.as_bytes())),
            host_memory: Some(125 << 30),
            last_copied_on_write: None,
            fork_delay: Duration::from_secs(5),
            writes,
            sample: None,
        }
    }

    const QUIET: Writes = Writes { bytes_per_second: 0, commands_per_second: Some(0), is_upper_bound: false };

    fn plan(more: &[&str], writes: Writes) -> Plan {
        Plan::of(&args(more), &known(writes)).unwrap()
    }

    #[test]
    fn sixty_gibibytes_are_held_whole_by_this_much_memory() {
        let gib = |bytes: u64| bytes >> 30;
        let sealed = plan(&[], QUIET);
        assert!(sealed.source.windowed && sealed.late.forks, "1 GiB by default");
        assert_eq!(gib(sealed.source.whole_memory_bytes), 170);
        assert_eq!(gib(plan(&["--security", "none"], QUIET).source.whole_memory_bytes), 85);
        assert_eq!(gib(plan(&["--journal-memory", "4GiB", "--memory", "64GiB"], QUIET).source.whole_memory_bytes), 131);
        let enough = plan(&["--memory", "171GiB"], QUIET);
        assert!(!enough.source.windowed && !enough.late.forks && enough.late.free_for_seconds.is_none());
        assert!(sealed.source.whole_in_use_bytes < sealed.source.whole_memory_bytes);
        // A replica opens what is sealed in further buffers.
        assert!(gib(sealed.replicas.whole_memory_bytes) >= 85);
    }

    #[test]
    fn an_amount_of_data_is_planned_for_without_a_primary() {
        let line = ["remora", "--data", "60GiB", "--replicas", "3"];
        let args = Options::try_parse_from(line).unwrap().plan;
        let plan = Plan::of(&args, &Known::imagined(args.data.unwrap(), args.write_rate)).unwrap();
        assert_eq!(plan.source.whole_memory_bytes >> 30, 170);
        assert!(as_text(&plan).starts_with("primary   none was asked: 60 GiB of data"), "{}", as_text(&plan));
        for line in [&["remora"][..], &["remora", "--data", "1GiB", "--server", "redis://h:1"]] {
            assert!(Options::try_parse_from(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn what_is_written_counts_for_backlog_fork_and_late_replicas() {
        let writes = Writes { bytes_per_second: 8 << 20, commands_per_second: Some(10_000), is_upper_bound: false };
        let busy = plan(&["--memory", "200GiB", "--rate", "1Gbit/s"], writes);
        assert_eq!(busy.backlog.advised_bytes, 128 << 20);
        assert_eq!(busy.backlog.no_pin_because, None);
        let [least, most] = busy.fork.copied_bytes;
        assert!(least > 1 << 30 && most > 4 * least && most <= busy.primary.used_bytes, "{least} {most}");
        assert_eq!(busy.late.free_for_seconds, Some((25 << 30) / (8 << 20) - 1));
        assert!((500.0..600.0).contains(&busy.times.copy_seconds), "{:?}", busy.times);
        assert_eq!(plan(&[], Writes::default()).fork.copied_bytes, [0, 0]);
    }

    #[test]
    fn the_defaults_are_those_of_the_agents() {
        use crate::args::{Cli, Command};
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).unwrap().command;
        let Command::Source(source) = parse("remora source --server redis://h:1 --token-file t") else { panic!() };
        let Command::Replica(replica) = parse("remora replica --server redis://h:1 --token-file t --source h:2") else {
            panic!()
        };
        assert_eq!((args(&[]).memory, DEFAULT_MEMORY), (source.memory, replica.memory));
    }

    #[test]
    fn what_the_sample_does_not_explain_is_taken_as_it_is() {
        let sample = Sample { keys: 2, in_memory: 2600, in_snapshot: 2100 };
        assert_eq!(sample.snapshot_of(1000, 1_300_000), 1_050_000);
        assert_eq!(sample.snapshot_of(1000, 1_250_000), 1_050_000, "INFO does not count all that MEMORY USAGE does");
        assert_eq!(sample.snapshot_of(1000, 9_300_000), 9_050_000);
        assert_eq!(Sample::default().snapshot_of(u64::MAX, 7), 7);
    }
}
