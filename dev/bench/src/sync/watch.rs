//! The measurement of progress: one thread per replica asks its server with INFO. It is the same for every method, so
//! that no difference is due to the way of looking.

use std::thread;
use std::time::{Duration, Instant};

use remora_lab::{Client, Server};
use remora_redis::info::Info;

use super::lost::Lost;
use super::{Phases, Result};

/// The progress of a replica, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// The phase, in one word.
    pub phase: &'static str,
    /// Bytes of the snapshot that have arrived or are loaded.
    pub bytes: u64,
}

/// Is called with every look at a replica, and its number.
pub type Show<'a> = dyn Fn(usize, Sight) + Sync + 'a;

/// What to watch.
pub(crate) struct Watch<'a> {
    pub(crate) primary: &'a Server,
    pub(crate) replicas: &'a [Server],
    pub(crate) begun: Instant,
    pub(crate) loads_while_receiving: bool,
    pub(crate) show: &'a Show<'a>,
    /// Fails if the replica can no longer catch up.
    pub(crate) check: &'a (dyn Fn() -> Result<()> + Sync),
    /// Replicas that are not waited for.
    pub(crate) lost: &'a Lost,
}

impl Watch<'_> {
    /// Waits until all replicas have caught up. Returns the phases of each, in their order; `None` for a lost replica.
    pub(crate) fn until_all_in_step(&self) -> Result<Vec<Option<Phases>>> {
        thread::scope(|scope| {
            let threads: Vec<_> =
                (0..self.replicas.len()).map(|number| scope.spawn(move || self.until_in_step(number))).collect();
            threads.into_iter().map(|thread| thread.join().map_err(|_| "a watching thread panicked")?).collect()
        })
    }

    fn until_in_step(&self, number: usize) -> Result<Option<Phases>> {
        let replica = self.replicas.get(number).ok_or("no such replica")?;
        let (mut there, mut here) = (self.primary.client()?, replica.client()?);
        let mut marks = Marks::default();
        let mut goal = None;
        loop {
            if self.lost.is(number) {
                return Ok(None);
            }
            let info = look(&mut here)?;
            let now = self.begun.elapsed();
            let is_linked = info.get("master_link_status") == Some("up")
                && info.number::<u16>("master_port") == Some(self.primary.port());
            marks.note(&info, now, self.loads_while_receiving);
            (self.show)(number, marks.sight(&info, is_linked));
            if is_linked {
                let goal = match goal {
                    Some(goal) => goal,
                    None => *goal.insert(offset(&there.info("replication")?)),
                };
                if offset(&info) >= goal {
                    return Ok(Some(marks.phases(self.begun.elapsed())));
                }
            }
            (self.check)()?;
            if now > LONGEST_SYNC {
                return Err(format!(
                    "{replica} is not in step after {LONGEST_SYNC:?}; its log ends:\n{}",
                    tail(replica)
                )
                .into());
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// When each phase was first seen.
#[derive(Debug, Default)]
struct Marks {
    receiving: Option<Duration>,
    received: Option<Duration>,
    loaded: Option<Duration>,
}

impl Marks {
    fn note(&mut self, info: &Info, now: Duration, loads_while_receiving: bool) {
        let is_loading = info.get("loading") == Some("1") || info.get("async_loading") == Some("1");
        let has_bytes = info.number::<i64>("master_sync_read_bytes").is_some_and(|bytes| bytes > 0);
        let is_syncing = info.get("master_sync_in_progress") == Some("1");
        if is_loading || (is_syncing && has_bytes) {
            self.receiving.get_or_insert(now);
        } else if self.receiving.is_some() && !is_syncing {
            self.loaded.get_or_insert(now);
        }
        if is_loading && !loads_while_receiving {
            self.received.get_or_insert(now);
        }
    }

    fn sight(&self, info: &Info, is_linked: bool) -> Sight {
        let bytes = |name| info.number::<i64>(name).and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
        let (loaded, received) = (bytes("loading_loaded_bytes"), bytes("master_sync_read_bytes"));
        match () {
            () if is_linked => Sight { phase: "in step", bytes: u64::MAX },
            () if self.loaded.is_some() => Sight { phase: "catch-up", bytes: u64::MAX },
            () if loaded > 0 => Sight { phase: "loading", bytes: loaded },
            () if self.receiving.is_some() => Sight { phase: "receiving", bytes: received },
            () => Sight { phase: "waiting", bytes: 0 },
        }
    }

    /// A phase that was too short to be seen took no time.
    fn phases(&self, end: Duration) -> Phases {
        let loaded = self.loaded.unwrap_or(end);
        let receiving = self.receiving.unwrap_or(loaded);
        let received = self.received.unwrap_or(loaded);
        Phases {
            snapshot: receiving.as_secs_f64(),
            transfer: received.saturating_sub(receiving).as_secs_f64(),
            load: loaded.saturating_sub(received).as_secs_f64(),
            catch_up: end.saturating_sub(loaded).as_secs_f64(),
        }
    }
}

fn look(client: &mut Client) -> Result<Info> {
    Ok(Info::parse(&client.bytes(&["INFO", "replication", "persistence"])?.unwrap_or_default()))
}

fn offset(info: &Info) -> u64 {
    info.number("slave_repl_offset").or_else(|| info.number("master_repl_offset")).unwrap_or(0)
}

fn tail(server: &Server) -> String {
    let log = server.log();
    let lines: Vec<&str> = log.lines().collect();
    lines.get(lines.len().saturating_sub(TAIL_LINES)..).unwrap_or_default().join("\n")
}

/// Each look costs the server a tenth of a millisecond.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Several times the time of the slowest known case (Redis 7 by default, three replicas, four million keys).
const LONGEST_SYNC: Duration = Duration::from_secs(600);

/// Number of log lines in an error.
const TAIL_LINES: usize = 15;

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> Info {
        Info::parse(text.replace(' ', "\n").as_bytes())
    }

    #[test]
    fn a_sync_through_disk_shows_transfer_and_then_load() {
        let mut marks = Marks::default();
        let looks = [
            (1, "loading:0 master_sync_in_progress:0"),
            (2, "loading:0 master_sync_in_progress:1 master_sync_read_bytes:0"),
            (3, "loading:0 master_sync_in_progress:1 master_sync_read_bytes:7"),
            (5, "loading:1 master_sync_in_progress:1 master_sync_read_bytes:9 loading_loaded_bytes:4"),
            (8, "loading:0 master_sync_in_progress:0"),
        ];
        for (second, text) in looks {
            marks.note(&info(text), Duration::from_secs(second), false);
        }
        let phases = marks.phases(Duration::from_secs(9));
        assert_eq!(phases, Phases { snapshot: 3.0, transfer: 2.0, load: 3.0, catch_up: 1.0 });
        assert_eq!(phases.sum(), 9.0);
    }

    #[test]
    fn a_sync_too_quick_to_be_seen_counts_as_snapshot() {
        assert_eq!(Marks::default().phases(Duration::from_secs(1)).snapshot, 1.0);
    }

    #[test]
    fn loading_during_the_transfer_counts_as_transfer() {
        let mut marks = Marks::default();
        marks.note(&info("loading:1 master_sync_in_progress:1 loading_loaded_bytes:4"), Duration::from_secs(1), true);
        assert_eq!(marks.sight(&info("loading:1 loading_loaded_bytes:4"), false), Sight { phase: "loading", bytes: 4 });
        marks.note(&info("loading:0 master_sync_in_progress:0"), Duration::from_secs(4), true);
        let phases = marks.phases(Duration::from_secs(4));
        assert_eq!((phases.transfer, phases.load), (3.0, 0.0));
    }
}
