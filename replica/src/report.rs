//! Report: the time of each phase of a sync, for people (a line per phase) and for programs (`--json`).

use std::path::Path;
use std::time::{Duration, Instant};

use remora_metrics::view;
use remora_protocol::{Base, BaseKind, Offer, Terms};
use serde::Serialize;

use super::exact::{self, Exactness};
use super::prepared::Reading;
use crate::options::Options;
use crate::prepared::{Course, Times};
use remora_base::units::{Size, readable, rounded};
use remora_process::exit::Failure;
use remora_process::progress;
use remora_server::{Facts, PinSizes};

/// The moments at which the phases change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moments {
    /// The agent asked the source for a snapshot.
    pub(super) joined: Instant,
    /// The source's tables were connected.
    pub(super) offered: Option<Instant>,
    /// The last slot had arrived.
    pub(super) fetched: Option<Instant>,
    /// The server had loaded it.
    pub(super) loaded: Option<Instant>,
    /// The server had applied the stream up to the present.
    pub(super) caught_up: Option<Instant>,
    /// The server followed the primary by itself.
    pub(super) handed_over: Option<Instant>,
}

impl Moments {
    pub(super) fn begin(now: Instant) -> Moments {
        Moments { joined: now, offered: None, fetched: None, loaded: None, caught_up: None, handed_over: None }
    }
}

/// The summary of a finished sync. Seconds of wall time; the phases follow one another, so their sum is the total.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Summary {
    /// Address of the replica's server.
    pub(super) server: String,
    /// Address of the primary it now follows, or would.
    pub(super) primary: String,
    /// The replication history.
    pub(super) replid: String,
    /// The snapshot's offset in it.
    pub(super) snapshot_offset: u64,
    /// The offset at which the server was handed over.
    pub(super) hand_off_offset: u64,
    /// The transport of the bytes.
    pub(super) transport: String,
    /// How the server got the snapshot: `link`, `module` if its module loaded long strings from shared memory, or
    /// `intercept` if its own connection to its primary was intercepted.
    pub(super) delivery: String,
    /// Bytes of the snapshot.
    pub(super) snapshot_bytes: u64,
    /// Bytes of it that the server's module loaded out of shared memory.
    pub(super) referred_bytes: u64,
    /// Bytes of the stream passed on meanwhile.
    pub(super) stream_bytes: u64,
    /// From joining to the source's offer: the server's fork, or nothing for a late joiner.
    pub(super) snapshot_seconds: f64,
    /// Until the last slot had arrived. The server loads meanwhile.
    pub(super) transfer_seconds: f64,
    /// From then until the server had loaded it all.
    pub(super) load_seconds: f64,
    /// Until the server had applied the stream.
    pub(super) catch_up_seconds: f64,
    /// Until it followed the primary by itself.
    pub(super) hand_off_seconds: f64,
    /// The whole sync.
    pub(super) total_seconds: f64,
    /// How often the feed or the link was lost.
    pub(super) interruptions: u32,
    /// Connections to the link's port that were closed before they had logged in.
    pub(super) strangers: u64,
    /// The conditions under which the server is called an exact replica, and what was found of each.
    pub(super) exact: Exactness,
}

impl Summary {
    /// Fills in the phases.
    pub(super) fn time(&mut self, moments: &Moments, now: Instant) {
        let mut last = moments.joined;
        let mut phase = |end: Option<Instant>| {
            let end = end.unwrap_or(now).max(last);
            let span = end - last;
            last = end;
            span.as_secs_f64()
        };
        self.snapshot_seconds = phase(moments.offered);
        // Without a spool the last slot leaves as the server takes it: loading then overlaps the whole transfer.
        self.transfer_seconds = phase(moments.fetched);
        self.load_seconds = phase(moments.loaded);
        self.catch_up_seconds = phase(moments.caught_up);
        self.hand_off_seconds = phase(moments.handed_over);
        self.total_seconds = (now - moments.joined).as_secs_f64();
    }

    /// The lines that are printed at the end.
    pub(super) fn lines(&self) -> Vec<String> {
        let rate = |bytes: u64, seconds: f64| Size::bytes((bytes as f64 / seconds.max(1e-6)) as u64);
        let line = |name: &str, seconds: f64, more: String| format!("  {name:<10} {seconds:>9.3} s  {more}");
        let transfer = format!(
            "{} over {}, {}/s on average",
            Size::bytes(self.snapshot_bytes),
            view::medium(&self.transport),
            rate(self.snapshot_bytes, self.transfer_seconds)
        );
        let loaded = match self.referred_bytes {
            0 => "after the last slot had arrived".into(),
            bytes => format!("by the server's module, {} out of shared memory", Size::bytes(bytes)),
        };
        let mut lines = vec![
            format!("{} is a replica of {} at {}:{}", self.server, self.primary, self.replid, self.hand_off_offset),
            line("snapshot", self.snapshot_seconds, format!("at offset {}", self.snapshot_offset)),
            line("transfer", self.transfer_seconds, transfer),
            line("load", self.load_seconds, loaded),
            line("catch-up", self.catch_up_seconds, format!("{} of the stream", Size::bytes(self.stream_bytes))),
            line("hand-off", self.hand_off_seconds, format!("at offset {}", self.hand_off_offset)),
            line("in all", self.total_seconds, interruptions(self.interruptions)).trim_end().to_owned(),
        ];
        match self.strangers {
            0 => {}
            1 => lines.push("  1 connection to the link's port was closed before it had logged in".into()),
            n => lines.push(format!("  {n} connections to the link's port were closed before they had logged in")),
        }
        lines
    }
}

fn interruptions(count: u32) -> String {
    match count {
        0 => String::new(),
        1 => "1 interruption".into(),
        n => format!("{n} interruptions"),
    }
}

/// Progress messages to the source: at most this often.
pub(super) const PROGRESS_EVERY: Duration = Duration::from_millis(50);

// Forecast: what a sync will do, as a dry run prints it.
//
// Its parts come from where the sync takes them: the transport was connected to, the source says what it would serve,
// and the primary's own facts say whether a hand-off can be pinned.

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
    /// From what it is made.
    base: Base,
}

/// Prints what a run with these options will do.
///
/// # Errors
/// The file of `--json` cannot be written.
pub(super) fn tell(
    options: &Options,
    verdict: String,
    plan: &Offer,
    primary: Option<&Facts>,
    (reading, unchecked): (Option<Reading>, Vec<String>),
) -> Result<(), Failure> {
    let known = Known { plan, primary, unchecked, download_limit: options.relay.download_limit };
    Forecast::of(verdict, reading.as_ref(), known).publish(options.json.as_deref())?;
    if options.explain {
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
            plan.terms.as_ref().map(|terms| Course { snapshot_bytes: terms.snapshot_bytes, delay: delay(terms), rate });
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
            snapshot: plan.terms.as_ref().map(|terms| Snapshot {
                bytes: terms.snapshot_bytes,
                source_memory_bytes: terms.ring_bytes,
                windowed: terms.windowed,
                held: terms.held,
                fork_delay_seconds: terms.fork_delay_seconds,
                tunes_server: terms.tunes_server,
                base: terms.base.clone(),
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
            // Of a fork that nothing could have saved, the next line says it.
            if snapshot.base.kind != BaseKind::Fork || !snapshot.base.passed_over.is_empty() {
                line("base", view::base(&snapshot.base).join(", "));
            }
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
        match (self.base.kind, self.fork_delay_seconds, self.tunes_server) {
            (BaseKind::Snapshot, ..) => "none: the source has the snapshot".to_owned(),
            (BaseKind::Copy | BaseKind::Backup | BaseKind::File | BaseKind::Sweep | BaseKind::None, ..) => {
                "none".to_owned()
            }
            (BaseKind::Fork, 0, _) => "one, at once".to_owned(),
            (BaseKind::Fork, _, true) => "one, at once (--tune-server)".to_owned(),
            (BaseKind::Fork, seconds, false) => format!(
                "one, after {seconds} s in which the server waits for more replicas (repl-diskless-sync-delay); remora source \
                 --tune-server does without"
            ),
        }
    }
}

/// How long the server waits before it forks for a replica that joins now.
fn delay(terms: &Terms) -> Duration {
    match terms.base.kind == BaseKind::Fork && !terms.tunes_server {
        true => Duration::from_secs(terms.fork_delay_seconds),
        false => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_phases_add_up_to_the_whole_also_when_some_are_missing() {
        let start = Instant::now();
        let at = |millis| Some(start + Duration::from_millis(millis));
        let mut moments = Moments::begin(start);
        moments.offered = at(10);
        moments.fetched = at(300);
        // A server that loads from the spool may have loaded before the moment we note; never a negative phase.
        moments.loaded = at(290);
        moments.handed_over = at(500);
        let mut summary = Summary::default();
        summary.time(&moments, start + Duration::from_millis(500));
        let sum = summary.snapshot_seconds
            + summary.transfer_seconds
            + summary.load_seconds
            + summary.catch_up_seconds
            + summary.hand_off_seconds;
        assert!((sum - summary.total_seconds).abs() < 1e-9, "{summary:?}");
        assert!(summary.load_seconds == 0.0, "{summary:?}");
    }

    fn base(kind: BaseKind) -> Base {
        Base { kind, ..Base::default() }
    }

    fn snapshot() -> Snapshot {
        Snapshot {
            bytes: 500 << 20,
            source_memory_bytes: 768 << 20,
            windowed: false,
            held: false,
            fork_delay_seconds: 5,
            tunes_server: false,
            base: base(BaseKind::Fork),
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
        for kind in [BaseKind::Snapshot, BaseKind::Backup, BaseKind::File, BaseKind::Sweep, BaseKind::None] {
            assert!(Snapshot { base: base(kind), ..snapshot() }.fork().starts_with("none"), "{kind:?}");
        }
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
            base: base(BaseKind::Fork),
        };
        assert_eq!(delay(&terms), Duration::from_secs(5));
        assert_eq!(delay(&Terms { base: base(BaseKind::Snapshot), ..terms.clone() }), Duration::ZERO);
        assert_eq!(delay(&Terms { tunes_server: true, ..terms }), Duration::ZERO);
    }
}
