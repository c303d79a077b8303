//! Process: what the system says of this process, under the names that every program has for it.

use std::fs;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use super::families::Families;
use super::register::{PROCESS_CPU, PROCESS_FDS, PROCESS_MAX_FDS, PROCESS_MEMORY, PROCESS_START};

/// What of `/proc/self/stat` is used.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    /// Ticks of user and system.
    cpu: u64,
    /// Ticks from the boot to its start.
    started: u64,
    /// Pages in RAM.
    resident: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Stat> {
        // The second field is the program's name in brackets, which may contain spaces and brackets.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<u64> = rest.split_whitespace().skip(1).map(|field| field.parse().unwrap_or(0)).collect();
        // Counted from the fourth, as proc(5) counts: 14 and 15, 22, 24.
        let field = |number: usize| fields.get(number - 4).copied();
        Some(Stat { cpu: field(14)? + field(15)?, started: field(22)?, resident: field(24)? })
    }
}

/// Ticks of the processors that this process has used.
pub(crate) fn own_ticks() -> Option<u64> {
    Stat::parse(&fs::read_to_string("/proc/self/stat").ok()?).map(|stat| stat.cpu)
}

/// Adds what is known. What the system does not say is left out.
pub(super) fn show(families: &mut Families) {
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let page = rustix::param::page_size() as u64;
    if let Some(stat) = fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(Stat::parse) {
        families.seconds(&PROCESS_CPU, stat.cpu as f64 / ticks as f64);
        families.number(&PROCESS_MEMORY, stat.resident.saturating_mul(page));
        if let Some(booted) = booted() {
            families.gauge(&PROCESS_START, booted.as_secs_f64() + stat.started as f64 / ticks as f64);
        }
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // One of them is that of this look.
        families.number(&PROCESS_FDS, (open.count() as u64).saturating_sub(1));
    }
    if let Some(most) = getrlimit(Resource::Nofile).current {
        families.number(&PROCESS_MAX_FDS, most);
    }
}

/// When the system was booted, since 1970.
fn booted() -> Option<Duration> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let seconds = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(Duration::from_secs(seconds.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_moves_no_field() {
        let line = "7 (a ) b) S 1 2 3 4 -1 6 7 8 9 10 100 23 12 13 20 0 5 0 4242 99 512 18446744073709551615 1\n";
        assert_eq!(Stat::parse(line), Some(Stat { cpu: 123, started: 4242, resident: 512 }));
        assert_eq!(Stat::parse("7 (a) S 1"), None);
    }
}
