//! Report: the time of each phase of a sync, for people (a line per phase) and for programs (`--json`).

use std::time::{Duration, Instant};

use serde::Serialize;

use super::exact::Exactness;
use crate::units::Size;

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
            "{} by {}, {}/s on average",
            Size::bytes(self.snapshot_bytes),
            self.transport,
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
            line("in all", self.total_seconds, interruptions(self.interruptions)),
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
}
