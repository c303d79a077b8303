//! Processors of its own for each process of a benchmark, where the machine has enough of them and [`APART`] is set.
//!
//! ```text
//!   0 1        2 3       4 …                     as many processors for each as there are, at least one
//!   primary    source    server, agent, server, agent, …
//! ```
//!
//! A program inherits the processors of the thread that starts it. If the replicas' processes are more than the
//! processors that are left, all of them share those.

use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The variable that asks for it.
pub const APART: &str = "REMORA_BENCH_APART";

/// Processors of each end: the primary's also run its fork child, and the source has a thread that seals.
const OF_AN_END: usize = 2;

/// The part of a process in a benchmark. Replicas are counted from 0, and are that many in all.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    /// The primary's server, or the server of a benchmark without replicas.
    Primary,
    /// The source agent, or the client of a benchmark without replicas.
    Source,
    /// A replica's server, and the number of all.
    Server(usize, usize),
    /// A replica's agent, and the number of all.
    Agent(usize, usize),
}

/// Does this on the processors of that role, with everything that it starts.
pub fn on<T>(role: Role, start: impl FnOnce() -> T) -> T {
    let Some((before, mine)) = all().and_then(|all| Some((sched_getaffinity(None).ok()?, of(role, all)?))) else {
        return start();
    };
    let mut set = CpuSet::new();
    mine.iter().for_each(|processor| set.set(*processor));
    // Without them it runs anywhere, as it does on a small machine.
    let _ = sched_setaffinity(None, &set);
    let started = start();
    let _ = sched_setaffinity(None, &before);
    started
}

/// Whether processes have processors of their own here.
pub fn are_apart() -> bool {
    all().is_some_and(|all| of(Role::Primary, all).is_some())
}

/// The processors of that role, if the machine has enough.
pub fn of(role: Role, all: &[usize]) -> Option<&[usize]> {
    let (ends, rest) = all.split_at_checked(2 * OF_AN_END)?;
    let (number, replicas) = match role {
        Role::Primary => return (rest.len() >= 2).then(|| &ends[..OF_AN_END]),
        Role::Source => return (rest.len() >= 2).then(|| &ends[OF_AN_END..]),
        Role::Server(number, replicas) => (2 * number, replicas),
        Role::Agent(number, replicas) => (2 * number + 1, replicas),
    };
    match rest.len() / (2 * replicas.max(1)) {
        _ if rest.len() < 2 => None,
        0 => Some(rest),
        each => rest.get(number * each..(number + 1) * each),
    }
}

/// Those on which this process may run, if it was asked to share them out.
pub fn all() -> Option<&'static [usize]> {
    static ALL: OnceLock<Vec<usize>> = OnceLock::new();
    std::env::var_os(APART)?;
    Some(ALL.get_or_init(|| {
        let set = sched_getaffinity(None).unwrap_or_default();
        (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_processes_have_the_same_processor_where_there_are_enough() {
        let all: Vec<usize> = (0..16).collect();
        let mut seen = [of(Role::Primary, &all), of(Role::Source, &all)].map(Option::unwrap_or_default).concat();
        for number in 0..3 {
            seen.extend(of(Role::Server(number, 3), &all).unwrap_or_default());
            seen.extend(of(Role::Agent(number, 3), &all).unwrap_or_default());
        }
        assert_eq!(seen, all);
        assert_eq!(of(Role::Agent(0, 1), &all), Some(&all[10..]));
    }

    #[test]
    fn many_replicas_share_what_is_left_and_a_small_machine_shares_everything() {
        let all: Vec<usize> = (0..16).collect();
        assert_eq!(of(Role::Server(7, 8), &all), Some(&all[4..]));
        for role in [Role::Primary, Role::Source, Role::Server(0, 1), Role::Agent(0, 1)] {
            assert_eq!(of(role, &all[..5]), None);
        }
    }
}
