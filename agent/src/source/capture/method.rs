//! In which way a snapshot is taken: with the module in the server or without, and what of it the server's child writes. Pure.

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use remora_fabric::shm::Place;
use remora_table::server_pages::capture_page::Work;

use crate::args::{ModuleCapture, SourceArgs};
use crate::server::Facts;
use crate::units::Size;

/// In which way a snapshot comes from the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Way {
    /// As replicas get it.
    #[default]
    Psync,
    /// As replicas get it, but not compressed.
    Eased,
    /// The long strings written into our table by the server's child, the rest as replicas get it.
    Walked,
}

impl Way {
    pub(crate) const ALL: [Way; 3] = [Way::Psync, Way::Eased, Way::Walked];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Psync => "psync",
            Way::Eased => "psync, not compressed by the module",
            Way::Walked => "the module",
        })
    }
}

/// What may be asked of a module, and what was learnt of it.
pub(crate) struct Rules {
    pub(super) choice: ModuleCapture,
    /// The child writes strings of at least this many bytes; `None`: chosen by the server's allocator.
    pub(super) walk_from: Option<u64>,
    /// An empty path: the library beside this program.
    pub(super) load: Option<PathBuf>,
    pub(super) place: Place,
    /// Until when it isn't asked again, as it has failed.
    distrusted: Mutex<Option<Instant>>,
}

impl Rules {
    pub(crate) fn new(args: &SourceArgs) -> Rules {
        Rules {
            choice: args.module_capture,
            walk_from: args.module_walk_from.map(Size::get),
            load: args.load_module.clone(),
            place: args.module_socket_folder.clone().map_or(Place::Abstract, Place::Folder),
            distrusted: Mutex::new(None),
        }
    }

    pub(super) fn distrust(&self) {
        *self.distrusted() = Some(Instant::now() + DISTRUST);
    }

    pub(super) fn is_distrusted(&self) -> bool {
        self.distrusted().is_some_and(|until| Instant::now() < until)
    }

    /// A lock whose holders only assign.
    fn distrusted(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.distrusted.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// What costs the server less. A walk writes the newest format that the server knows: where older readers wait, the server must write.
pub(super) fn best(choice: ModuleCapture, facts: &Facts, own_format: bool, long: u64) -> Work {
    if facts.own_format().is_some() && !own_format {
        return Work::Ease;
    }
    match choice {
        ModuleCapture::Walk => Work::Walk,
        ModuleCapture::Server | ModuleCapture::Off => Work::Ease,
        // Looking at each key of many short ones costs more than the few long ones among them save.
        ModuleCapture::Auto if average(facts) >= long => Work::Walk,
        ModuleCapture::Auto => Work::Ease,
    }
}

/// From how many bytes on a string is long there.
pub(super) fn long_from(facts: &Facts) -> u64 {
    let has_jemalloc = facts.allocator.as_deref().is_some_and(|name| name.starts_with("jemalloc"));
    if has_jemalloc { LONG_WITH_JEMALLOC_BYTES } else { LONG_BYTES }
}

/// Bytes of data for each key; 0 where there is none.
pub(super) fn average(facts: &Facts) -> u64 {
    facts.used_memory_dataset.unwrap_or(0).checked_div(facts.keys()).unwrap_or(0)
}

/// From this size on a string costs the server less if its child writes it. docs/decisions/0007-walk-or-ease.md has the measurements.
///
/// The child frees what it has written. jemalloc keeps its books elsewhere; others keep them around each piece of memory, so that two pages of
/// a string are copied for it.
const LONG_WITH_JEMALLOC_BYTES: u64 = 1 << 10;
const LONG_BYTES: u64 = 64 << 10;

/// How long a module that has failed isn't asked again: long enough that replicas get their snapshots, short enough that a passing cause
/// doesn't cost a day.
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
}
