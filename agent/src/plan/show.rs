//! A plan as text, and as JSON.

use std::time::Duration;

use super::figures::Plan;
use crate::units::{Size, readable, rounded};

pub(super) fn as_json(plan: &Plan) -> String {
    serde_json::to_string_pretty(plan).unwrap_or_default()
}

pub(super) fn as_text(plan: &Plan) -> String {
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
    let host = primary.host_memory_bytes.map_or_else(String::new, |bytes| format!("; its host has {}", rounded(bytes)));
    format!(
        "{} ({}): {} of data in {} keys, {} of memory{host}",
        primary.url,
        primary.server,
        rounded(primary.data_bytes),
        primary.keys,
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
    format!(
        "{}, each with about {} for its server and {} for its agent (--memory); with {} an agent holds the whole snapshot for \
         others",
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

fn late(plan: &Plan) -> String {
    match (plan.late.forks, plan.late.free_for_seconds) {
        (true, _) => "each replica that joins later makes the primary fork and send its data again".to_owned(),
        (false, None) => "a replica that joins later costs the primary nothing, at any time".to_owned(),
        (false, Some(free)) => format!(
            "a replica that joins within {} of the snapshot costs the primary nothing: so long the journal reaches back at this \
             rate; a later one makes it fork again",
            readable(Duration::from_secs(free))
        ),
    }
}
