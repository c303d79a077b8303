//! The figures of a plan. Pure.

use std::time::Duration;

use serde::Serialize;

use super::sample::Sample;
use crate::args::{CompressChoice, PlanArgs, PlannedSecurity, default_slot_size};
use crate::estimate::{BACKLOG_SECONDS, Course, Times};
use crate::exit::Failure;
use crate::replica::source::{DEFAULT_MEMORY, Sinks};
use crate::server::{Facts, PinSizes};
use crate::source::tables::{Shares, Wanted, expected, least_memory};
use crate::units::Size;

/// What clients write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Writes {
    pub(super) bytes_per_second: u64,
    /// Commands of any kind; `None` if they were not counted.
    pub(super) commands_per_second: Option<u64>,
    /// The server does not count its stream without a replica: this is all that it receives.
    pub(super) is_upper_bound: bool,
}

/// What is known of the primary.
pub(super) struct Known {
    pub(super) url: String,
    pub(super) facts: Facts,
    /// Bytes of memory of its host.
    pub(super) host_memory: Option<u64>,
    /// Bytes that its last save copied because clients had written to them.
    pub(super) last_copied_on_write: Option<u64>,
    /// How long it waits before it forks.
    pub(super) fork_delay: Duration,
    pub(super) writes: Writes,
    /// Some of its keys, if our user may look at them.
    pub(super) sample: Option<Sample>,
}

/// The plan.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plan {
    pub(super) primary: Primary,
    pub(super) writes: Writes,
    /// An estimate, from a sample of the keys if there is one.
    pub(super) snapshot_bytes: u64,
    /// An upper estimate, by which a source decides whether the snapshot fits.
    pub(super) snapshot_at_most_bytes: u64,
    pub(super) source: Source,
    pub(super) replicas: Replicas,
    pub(super) backlog: Backlog,
    pub(super) fork: Fork,
    /// For all replicas together, which pass slots on.
    pub(super) times: Times,
    pub(super) total_seconds: f64,
    pub(super) late: Late,
    #[serde(skip)]
    pub(super) bound_by_servers: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Primary {
    pub(super) url: String,
    pub(super) server: String,
    pub(super) keys: u64,
    pub(super) data_bytes: u64,
    pub(super) used_bytes: u64,
    pub(super) host_memory_bytes: Option<u64>,
}

/// The source with the given memory, and with as much as it needs.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Source {
    pub(super) sealed: bool,
    /// The given `--memory`.
    pub(super) memory_bytes: u64,
    /// Bytes of the snapshot that it holds at once.
    pub(super) window_bytes: u64,
    /// The snapshot does not fit.
    pub(super) windowed: bool,
    /// The least `--memory` that holds the whole snapshot.
    pub(super) whole_memory_bytes: u64,
    /// Bytes of that memory which the source takes for the snapshot, before it knows how long it is.
    pub(super) whole_in_use_bytes: u64,
    /// Further bytes when the journal is full.
    pub(super) whole_journal_in_use_bytes: u64,
}

/// Each replica.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Replicas {
    pub(super) count: u32,
    /// Its server.
    pub(super) server_bytes: u64,
    /// Its agent, with the default `--memory`.
    pub(super) agent_memory_bytes: u64,
    /// The least `--memory` with which the agent holds the whole snapshot for others.
    pub(super) whole_memory_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Backlog {
    pub(super) bytes: u64,
    /// What it should have at least.
    pub(super) advised_bytes: u64,
    /// Why a hand-off cannot be pinned with the advised size; `None`: it can.
    pub(super) no_pin_because: Option<&'static str>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Fork {
    /// Forks for all replicas that begin together.
    pub(super) count: u32,
    /// Bytes that are copied because clients write while the snapshot is saved: from, to.
    pub(super) copied_bytes: [u64; 2],
    pub(super) last_copied_bytes: Option<u64>,
    /// Bytes that the host has left for that; `None` if it is not known.
    pub(super) left_bytes: Option<u64>,
}

/// Replicas that join later.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Late {
    /// Each makes the primary fork.
    pub(super) forks: bool,
    /// For how long the journal reaches back to the snapshot; `None`: without end, or no late replica is served.
    pub(super) free_for_seconds: Option<u64>,
}

/// Bytes that a written command makes the kernel copy at most while a save goes on: the page of the value and that of
/// the dictionary's entry.
const COPIED_PER_COMMAND: u64 = 2 * 4096;

impl Plan {
    /// # Errors
    /// The given memory is too small.
    pub(super) fn of(args: &PlanArgs, known: &Known) -> Result<Plan, Failure> {
        let (facts, writes) = (&known.facts, known.writes);
        let is_sealed = args.security != PlannedSecurity::None;
        let wanted = |memory: u64| Wanted {
            memory,
            journal: args.journal_memory.map(Size::get),
            slot: default_slot_size(Size::bytes(memory)).get(),
            is_sealed,
            compress: CompressChoice::Auto,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;
    use remora_redis::info::Info;

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
            url: "redis://h:1".into(),
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
}
