//! How a snapshot is taken: with the module in the server or without it, and what the server's child writes. Pure: no
//! I/O, no lock, and times are arguments.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use remora_fabric::shm::Place;
use remora_table::server_pages::Work;

use crate::options::{ModuleCapture, ModuleOptions};
use remora_base::units::Size;
use remora_server::Facts;

/// How a snapshot is taken from the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Method {
    /// By `PSYNC`, as the server sends it to replicas.
    #[default]
    Psync,
    /// By `PSYNC`, and the module keeps the server from compressing it.
    Eased,
    /// The module's part in the server's child writes long strings into the table; the rest comes by `PSYNC`.
    Walked,
    /// As [`Method::Walked`], and nearly all keys, in the fast way.
    FastWalked,
    /// The module in the server's own process writes all of it, without a fork.
    Swept,
    /// It is a copy of another source's.
    Copied,
    /// It comes from a backup or a file.
    Stored,
}

impl Method {
    pub(crate) const ALL: [Method; 7] = [
        Method::Psync,
        Method::Eased,
        Method::Walked,
        Method::FastWalked,
        Method::Swept,
        Method::Copied,
        Method::Stored,
    ];
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Psync => "psync",
            Method::Eased => "psync, not compressed by the module",
            Method::Walked => "the module",
            Method::FastWalked => "the module, fast keys",
            Method::Swept => "the module, without a fork",
            Method::Copied => "a copy of another source's",
            Method::Stored => "reading a stored one",
        })
    }
}

/// What a module in the server may be asked to do, as the arguments say.
pub(crate) struct ModuleRules {
    pub(super) choice: ModuleCapture,
    /// The child writes strings of at least this many bytes. `None`: chosen by the server's allocator.
    pub(super) walk_from: Option<u64>,
    /// The library to load into a server without the module. An empty path: the library beside this program.
    pub(super) load: Option<PathBuf>,
    /// Whether the child may walk in the fast way.
    pub(super) fast_keys: bool,
    /// Where the socket is bound over which the module fetches the table.
    pub(super) place: Place,
}

impl ModuleRules {
    pub(crate) fn new(options: &ModuleOptions) -> ModuleRules {
        ModuleRules {
            choice: options.capture,
            walk_from: options.walk_from.map(Size::get),
            load: options.load.clone(),
            fast_keys: options.fast_keys,
            place: options.socket_folder.clone().map_or(Place::Abstract, Place::Folder),
        }
    }
}

/// When the module failed last. The source's loop keeps it, and hands every capture the answer for its start.
#[derive(Debug, Default)]
pub(crate) struct MethodHistory {
    module_failed: Option<Instant>,
    sweep_failed: Option<Instant>,
}

impl MethodHistory {
    /// A capture with the module has failed.
    pub(crate) fn module_failed(&mut self, now: Instant) {
        self.module_failed = Some(now);
    }

    /// A sweep has ended before its end.
    pub(crate) fn sweep_failed(&mut self, now: Instant) {
        self.sweep_failed = Some(now);
    }

    /// Whether a sweep failed a short time ago. A capture has the server fork then.
    pub(crate) fn sweep_failed_lately(&self, now: Instant) -> bool {
        self.sweep_failed.is_some_and(|failed| now.saturating_duration_since(failed) < DISTRUST)
    }

    /// Whether the module failed a short time ago. A capture does without it then.
    pub(crate) fn module_failed_lately(&self, now: Instant) -> bool {
        self.module_failed.is_some_and(|failed| now.saturating_duration_since(failed) < DISTRUST)
    }
}

/// What a child is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Task {
    pub(super) work: Work,
    /// The child writes strings of at least this many bytes.
    pub(super) least_bytes: u64,
}

impl ModuleRules {
    /// Why the fast walk, which is offered, is not chosen.
    pub(super) fn no_fast_walk(&self, facts: &Facts) -> String {
        match self.choice {
            _ if !self.fast_keys => "--fast-keys is off".into(),
            _ if has_few_keys(facts) => {
                format!("{} is the average of a key: so few keys gain nothing", Size::bytes(average(facts)))
            }
            ModuleCapture::Server => "--module-capture is server".into(),
            _ => "readers wait that do not know the server's newest format".into(),
        }
    }

    /// What the module of this server is asked to do. `fast`: it offers the fast walk.
    pub(super) fn task(&self, facts: &Facts, own_format: bool, fast: bool) -> Task {
        let long = self.walk_from.unwrap_or_else(|| long_from(facts));
        let fast = fast && self.fast_keys && !has_few_keys(facts);
        match best(self.choice, facts, own_format, if fast { 0 } else { long }) {
            // In the fast way a short string costs less than the server's saver does, whatever its length.
            Work::Walk if fast => Task { work: Work::FastWalk, least_bytes: self.walk_from.unwrap_or(0) },
            work => Task { work, least_bytes: long },
        }
    }
}

/// The work that costs the server less.
///
/// A walk writes the newest format that the server knows. If some readers know only an older one, the server must
/// write.
fn best(choice: ModuleCapture, facts: &Facts, own_format: bool, long: u64) -> Work {
    if facts.own_format().is_some() && !own_format {
        return Work::Ease;
    }
    match choice {
        ModuleCapture::Walk => Work::Walk,
        ModuleCapture::Server | ModuleCapture::Off => Work::Ease,
        // With many short strings, to look at each key costs more than the few long ones among them save.
        ModuleCapture::Auto | ModuleCapture::Sweep if average(facts) >= long => Work::Walk,
        ModuleCapture::Auto | ModuleCapture::Sweep => Work::Ease,
    }
}

/// The size in bytes from which a string counts as long on this server.
fn long_from(facts: &Facts) -> u64 {
    let has_jemalloc = facts.allocator.as_deref().is_some_and(|name| name.starts_with("jemalloc"));
    if has_jemalloc { LONG_WITH_JEMALLOC_BYTES } else { LONG_BYTES }
}

/// Whether the values are so long that a fast walk gains less than its trial costs.
fn has_few_keys(facts: &Facts) -> bool {
    facts.used_memory_dataset.unwrap_or(0) >= LARGE_BYTES && average(facts) >= FEW_KEYS_BYTES
}

/// The average number of bytes of data per key; 0 if there is no key.
pub(super) fn average(facts: &Facts) -> u64 {
    facts.used_memory_dataset.unwrap_or(0).checked_div(facts.keys()).unwrap_or(0)
}

/// The size from which a string costs the server less if its child writes it, with jemalloc.
/// docs/decisions/0007-walk-or-ease.md has the measurements.
///
/// The child frees the strings that it has written. jemalloc keeps its metadata apart from the strings. Other
/// allocators keep it beside each allocation, so that freeing a string makes the kernel copy two of its pages.
const LONG_WITH_JEMALLOC_BYTES: u64 = 1 << 10;
/// The same with another allocator.
const LONG_BYTES: u64 = 64 << 10;

/// Average bytes of a key from which the fast walk is not worth its trial. The trial forks, which takes a tenth of a
/// second for a gigabyte. A gigabyte in keys of this size has 16,384 of them, and each takes microseconds otherwise.
const FEW_KEYS_BYTES: u64 = 64 << 10;

/// Bytes of data from which the trial's fork takes long enough to matter: some 10 ms.
const LARGE_BYTES: u64 = 64 << 20;

/// How long captures do without a module that has failed: long enough that the waiting replicas get their snapshots,
/// short enough that the module is used again the same day once the cause is gone.
const DISTRUST: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::info::Info;

    use super::*;

    fn facts(keys: u64, dataset: u64, version: &str) -> Facts {
        let text = format!("{version}\r\nused_memory_dataset:{dataset}\r\ndb0:keys={keys},expires=0\r\n");
        Facts::from_info(&Info::parse(text.as_bytes()))
    }

    #[test]
    fn large_values_are_walked_and_small_ones_left_to_the_server() {
        let redis = "redis_version:7.0.15";
        let best = |choice, facts: &Facts| super::best(choice, facts, false, 4096);
        assert_eq!(best(ModuleCapture::Auto, &facts(10, 10 << 20, redis)), Work::Walk);
        assert_eq!(best(ModuleCapture::Auto, &facts(1 << 20, 100 << 20, redis)), Work::Ease);
        assert_eq!(best(ModuleCapture::Auto, &facts(0, 1000, redis)), Work::Ease);
        assert_eq!(best(ModuleCapture::Walk, &facts(1 << 20, 100 << 20, redis)), Work::Walk);
        assert_eq!(best(ModuleCapture::Server, &facts(10, 10 << 20, redis)), Work::Ease);
    }

    #[test]
    fn a_fast_walk_is_chosen_where_it_is_offered_and_wished() {
        let task = |choice, walk_from, fast_keys, offered| {
            let (load, place) = (None, Place::Abstract);
            let rules = ModuleRules { choice, walk_from, load, fast_keys, place };
            let long = rules.task(&facts(256, 1 << 30, "redis_version:7.0.15"), false, offered);
            assert_ne!(long.work, Work::FastWalk, "a few long values");
            let few = rules.task(&facts(4, 1 << 20, "redis_version:7.0.15"), false, offered);
            assert_eq!(few.work == Work::FastWalk, offered && fast_keys && choice != ModuleCapture::Server);
            rules.task(&facts(1 << 20, 100 << 20, "redis_version:7.0.15"), false, offered)
        };
        let small = |least_bytes| Task { work: Work::FastWalk, least_bytes };
        assert_eq!(task(ModuleCapture::Auto, None, true, true), small(0));
        assert_eq!(task(ModuleCapture::Walk, Some(100), true, true), small(100));
        assert_eq!(task(ModuleCapture::Auto, None, true, false).work, Work::Ease);
        assert_eq!(task(ModuleCapture::Auto, None, false, true).work, Work::Ease);
        assert_eq!(task(ModuleCapture::Walk, None, false, true).work, Work::Walk);
        assert_eq!(task(ModuleCapture::Server, None, true, true).work, Work::Ease);
    }

    #[test]
    fn what_is_long_depends_on_where_the_servers_memory_comes_from() {
        let long = |allocator: &str| long_from(&facts(1, 1, &format!("mem_allocator:{allocator}")));
        assert_eq!((long("jemalloc-5.3.0"), long("libc"), long_from(&Facts::default())), (1024, 65536, 65536));
    }

    #[test]
    fn a_format_that_the_readers_do_not_know_is_not_walked() {
        let valkey = "server_name:valkey\r\nvalkey_version:9.1.2";
        assert_eq!(best(ModuleCapture::Walk, &facts(10, 10 << 20, valkey), false, 1), Work::Ease);
        assert_eq!(best(ModuleCapture::Walk, &facts(10, 10 << 20, valkey), true, 1), Work::Walk);
    }

    #[test]
    fn a_module_that_failed_is_asked_again_after_five_minutes() {
        let (mut history, now) = (MethodHistory::default(), Instant::now());
        assert!(!history.module_failed_lately(now));
        history.module_failed(now);
        assert!(history.module_failed_lately(now));
        assert!(history.module_failed_lately(now + DISTRUST - Duration::from_millis(1)));
        assert!(!history.module_failed_lately(now + DISTRUST));
        assert!(!history.sweep_failed_lately(now));
        history.sweep_failed(now);
        assert!(history.sweep_failed_lately(now) && !history.sweep_failed_lately(now + DISTRUST));
    }
}
