//! Forecast: what a sync will do, as a dry run prints it.
//!
//! Its parts come from where the sync takes them: the transport was connected to, the source says what it would serve,
//! and the primary's own facts say whether a hand-off can be pinned.

use std::path::Path;
use std::time::Duration;

use remora_protocol::{Offer, Terms};
use serde::Serialize;

use super::exact;
use super::reading::Reading;
use crate::args::ReplicaArgs;
use crate::estimate::{Course, Times};
use crate::exit::Failure;
use crate::progress;
use crate::server::{Facts, PinSizes};
use crate::units::{Size, readable, rounded};

/// What a sync will do.
#[derive(Clone, Debug, Serialize)]
struct Forecast {
    /// What the dry run has found.
    verdict: String,
    transport: String,
    /// Why better transports are not used.
    transport_why: String,
    protection: String,
    bytes_per_second: Option<u64>,
    snapshot: Option<Snapshot>,
    backlog_bytes: u64,
    write_bytes_per_second: u64,
    /// Why the primary cannot be made to keep what a hand-off needs; `None`: it can.
    no_pin_because: Option<String>,
    times: Option<Times>,
    not_checked: Vec<String>,
    #[serde(skip)]
    bound_by_servers: bool,
}

/// What the source will serve.
#[derive(Clone, Debug, Serialize)]
struct Snapshot {
    bytes: u64,
    source_memory_bytes: u64,
    windowed: bool,
    /// The source has it already.
    held: bool,
    fork_delay_seconds: u64,
    tunes_server: bool,
}

/// Prints what a run with these options will do.
///
/// # Errors
/// The file of `--json` cannot be written.
pub(super) fn tell(
    args: &ReplicaArgs,
    verdict: String,
    plan: &Offer,
    primary: Option<&Facts>,
    (reading, unchecked): (Option<Reading>, Vec<String>),
) -> Result<(), Failure> {
    let known = Known { plan, primary, unchecked, download_limit: args.lend.relay.download_limit };
    Forecast::of(verdict, reading.as_ref(), known).publish(args.json.as_deref())?;
    if args.explain {
        exact::what_will_be_checked().for_each(|line| progress::say(&line));
    }
    Ok(())
}

/// What a forecast is made of.
struct Known<'a> {
    plan: &'a Offer,
    /// What the primary says of itself; `None` if it does not tell the server's user.
    primary: Option<&'a Facts>,
    /// The limit of this replica, in bytes per second.
    download_limit: Option<Size>,
    /// What could not be checked.
    unchecked: Vec<String>,
}

impl Forecast {
    fn of(verdict: String, reading: Option<&Reading>, known: Known<'_>) -> Forecast {
        let Known { plan, primary, download_limit, unchecked } = known;
        let measured = reading.and_then(|reading| reading.rate);
        let rate = measured.into_iter().chain(download_limit.map(Size::get)).min();
        let course =
            plan.terms.map(|terms| Course { snapshot_bytes: terms.snapshot_bytes, delay: delay(&terms), rate });
        let no_pin_because = match primary {
            None => Some("the primary does not tell its backlog".to_owned()),
            Some(facts) => facts.why_no_pin(&PinSizes::SERVERS).map(str::to_owned),
        };
        let primary_unseen = primary.is_none().then(|| "what the primary says of itself (INFO)".to_owned());
        Forecast {
            verdict,
            transport: reading.map_or("not tried", |reading| reading.transport.name()).to_owned(),
            transport_why: reading.map(|reading| reading.why.clone()).unwrap_or_default(),
            protection: reading.map(|reading| reading.protection.to_string()).unwrap_or_default(),
            bytes_per_second: measured,
            snapshot: plan.terms.map(|terms| Snapshot {
                bytes: terms.snapshot_bytes,
                source_memory_bytes: terms.ring_bytes,
                windowed: terms.windowed,
                held: terms.held,
                fork_delay_seconds: terms.fork_delay_seconds,
                tunes_server: terms.tunes_server,
            }),
            backlog_bytes: primary.and_then(|facts| facts.backlog).map_or(plan.backlog_bytes, |backlog| backlog.size),
            write_bytes_per_second: plan.write_rate,
            no_pin_because,
            times: course.map(|course| course.times()),
            not_checked: primary_unseen.into_iter().chain(unchecked).collect(),
            bound_by_servers: course.is_some_and(|course| course.is_bound_by_servers()),
        }
    }

    /// Prints it, and writes it to the file of `--json`.
    ///
    /// # Errors
    /// The file cannot be written.
    fn publish(&self, json: Option<&Path>) -> Result<(), Failure> {
        progress::say(&self.verdict);
        self.lines().iter().for_each(|line| progress::say(line));
        let Some(path) = json else { return Ok(()) };
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        std::fs::write(path, text)
            .map_err(|error| Failure::local(format!("{} can't be written: {error}", path.display())))
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut line = |name: &str, text: String| lines.push(format!("  {name:<11} {text}"));
        let rate = self.bytes_per_second.map_or_else(String::new, |rate| format!(", {}/s just now", rounded(rate)));
        let why = match self.transport_why.as_str() {
            "" => String::new(),
            why => format!(" ({why})"),
        };
        line("transport", format!("{}{rate}{why}", self.transport));
        line("protection", self.protection.clone());
        if let Some(snapshot) = &self.snapshot {
            line("snapshot", snapshot.text());
            line("fork", snapshot.fork());
        }
        line("backlog", self.backlog());
        if let Some(times) = self.times {
            line("time", self.time(times));
        }
        self.not_checked.iter().for_each(|what| line("not checked", what.clone()));
        lines
    }

    fn backlog(&self) -> String {
        let size = Size::bytes(self.backlog_bytes);
        let writes = match self.backlog_bytes.checked_div(self.write_bytes_per_second) {
            None => "; no writes are seen now".to_owned(),
            Some(seconds) => format!(
                ", {} of the {}/s that clients write now",
                readable(Duration::from_secs(seconds)),
                rounded(self.write_bytes_per_second)
            ),
        };
        match &self.no_pin_because {
            None => format!("{size}{writes}; the hand-off keeps what it needs there (a pin), whatever is written"),
            Some(why) => {
                format!("{size}{writes}; it must hold what is written during the hand-off, as there is no pin: {why}")
            }
        }
    }

    fn time(&self, times: Times) -> String {
        let slowest = match self.bound_by_servers {
            true => "for the servers to save and load it",
            false => "for the way to the source",
        };
        format!(
            "about {}: {} until the fork, {} {slowest}, {} for the hand-off",
            readable(times.total()),
            readable(Duration::from_secs_f64(times.delay_seconds)),
            readable(Duration::try_from_secs_f64(times.copy_seconds).unwrap_or(Duration::MAX)),
            readable(Duration::from_secs_f64(times.hand_off_seconds))
        )
    }
}

impl Snapshot {
    fn text(&self) -> String {
        let (bytes, memory) = (rounded(self.bytes), Size::bytes(self.source_memory_bytes));
        match self.windowed {
            false => format!(
                "about {bytes}, whole in the source's memory for it ({memory}): later replicas get the same one"
            ),
            true => format!(
                "about {bytes}, through a window of {memory}: replicas that begin together share it at the pace of the slowest, \
                 and a later one makes the primary fork again"
            ),
        }
    }

    fn fork(&self) -> String {
        match (self.held, self.fork_delay_seconds, self.tunes_server) {
            (true, ..) => "none: the source has the snapshot".to_owned(),
            (false, 0, _) => "one, at once".to_owned(),
            (false, _, true) => "one, at once (--tune-server)".to_owned(),
            (false, seconds, false) => format!(
                "one, after {seconds} s in which the server waits for more replicas (repl-diskless-sync-delay); remora source \
                 --tune-server does without"
            ),
        }
    }
}

/// How long the server waits before it forks for a replica that joins now.
fn delay(terms: &Terms) -> Duration {
    match terms.held || terms.tunes_server {
        true => Duration::ZERO,
        false => Duration::from_secs(terms.fork_delay_seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot() -> Snapshot {
        Snapshot {
            bytes: 500 << 20,
            source_memory_bytes: 768 << 20,
            windowed: false,
            held: false,
            fork_delay_seconds: 5,
            tunes_server: false,
        }
    }

    #[test]
    fn what_a_replica_gets_and_costs_is_said_in_words() {
        assert_eq!(
            snapshot().text(),
            "about 500 MiB, whole in the source's memory for it (768 MiB): later replicas get the same one"
        );
        assert!(Snapshot { windowed: true, ..snapshot() }.text().contains("through a window of 768 MiB"));
        assert!(snapshot().fork().contains("after 5 s") && snapshot().fork().contains("--tune-server"));
        assert!(Snapshot { tunes_server: true, ..snapshot() }.fork().starts_with("one, at once"));
        assert!(Snapshot { held: true, ..snapshot() }.fork().starts_with("none"));
    }

    #[test]
    fn a_snapshot_that_is_there_is_not_waited_for() {
        let terms = Terms {
            snapshot_bytes: 1,
            ring_bytes: 1,
            windowed: false,
            held: false,
            sealed: false,
            fork_delay_seconds: 5,
            tunes_server: false,
            is_refused: false,
            offers_shm: true,
            offers_verbs: false,
        };
        assert_eq!(delay(&terms), Duration::from_secs(5));
        assert_eq!(delay(&Terms { held: true, ..terms }), Duration::ZERO);
        assert_eq!(delay(&Terms { tunes_server: true, ..terms }), Duration::ZERO);
    }
}
