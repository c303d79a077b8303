//! The stream: from the connection into the journal, taken up again where it breaks.

use std::io;
use std::time::{Duration, Instant};

use remora_redis::psync::client;
use remora_table::JournalWriter;

use super::plan::{CaptureEvent, Fault, Plan, Stops, TICK};
use super::psync_link::{Opening, PsyncLink, came, is_same_history};
use super::socket::Wire;
use crate::backoff::Backoff;

/// Bytes that one read of the stream takes at most: a few of the server's 16 KiB writes at once.
const STREAM_READ: usize = 256 * 1024;

/// Writes the stream into the journal until it is stopped, lost, or continued under another replid. A broken link is
/// resumed at the next byte.
pub(super) fn follow(plan: &Plan, wire: Wire, journal: &mut JournalWriter, stop: Stops<'_>) {
    let mut wire = wire;
    let mut backoff = Backoff::from_system();
    loop {
        let broke = match pour(plan, &mut wire, journal, stop) {
            Ok(()) | Err(Fault::Stopped) => return journal.abort(),
            Err(fault) => fault,
        };
        tracing::warn!(%broke, offset = journal.end_offset(), "the stream broke; taking it up at the next byte");
        match reconnect(plan, journal, &mut backoff, stop) {
            Ok(again) => {
                wire = again;
                backoff.reset();
                let _ = plan.events.send(CaptureEvent::StreamResumed);
            }
            Err(Fault::HistoryChanged { from, to, at }) => {
                // The journal is not aborted: it holds all bytes of the old history that we received, and replicas may
                // still read it.
                let generation = plan.generation;
                let _ = plan.events.send(CaptureEvent::HistoryChanged { generation, from, to, at });
                return;
            }
            Err(fault) => {
                journal.abort();
                let text = format!("{broke}; then: {fault}");
                let _ = plan.events.send(CaptureEvent::StreamLost { text });
                return;
            }
        }
    }
}

/// Pours the stream into the journal. `Ok` is never reached but by `stop`.
fn pour(plan: &Plan, wire: &mut Wire, journal: &mut JournalWriter, stop: Stops<'_>) -> Result<(), Fault> {
    let during = "stream";
    let link = |cause: io::Error| Fault::Link { during, cause: cause.to_string() };
    let mut buffer = vec![0; STREAM_READ];
    let mut acks = AckClock::new(plan.gauge.snapshot_offset());
    let mut heard = Instant::now();
    loop {
        if stop.set() {
            return Err(Fault::Stopped);
        }
        if let Some(ack) = acks.due(Instant::now()) {
            wire.write_all(&ack).map_err(link)?;
        }
        // The primary sends a PING every `repl-ping-replica-period`, 10 s by default.
        if let Some(n) = came(wire.read(&mut buffer), heard, during)? {
            journal.append(&buffer[..n])?;
            plan.gauge.journal_at(journal.first_offset(), journal.end_offset() - 1);
            heard = Instant::now();
            acks.stream_came();
        }
    }
}

/// How long a broken stream is tried again before the journal is given up: servers keep their backlog far longer, but
/// replicas should not wait for ever to learn that they must start again.
const RESUME_LIMIT: Duration = Duration::from_secs(60);

fn reconnect(plan: &Plan, journal: &JournalWriter, backoff: &mut Backoff, stop: Stops<'_>) -> Result<Wire, Fault> {
    let began = Instant::now();
    loop {
        let tried = try_reconnect(plan, journal, stop);
        match tried {
            // The next attempt would be answered alike.
            Err(fault @ Fault::HistoryChanged { .. }) => return Err(fault),
            Err(fault) if fault.is_transient() && began.elapsed() < RESUME_LIMIT => {
                tracing::debug!(%fault, "the stream can't be taken up yet");
                let pause = backoff.next();
                let until = Instant::now() + pause;
                while Instant::now() < until {
                    if stop.set() {
                        return Err(Fault::Stopped);
                    }
                    std::thread::sleep(TICK.min(pause));
                }
            }
            other => return other,
        }
    }
}

fn try_reconnect(plan: &Plan, journal: &JournalWriter, stop: Stops<'_>) -> Result<Wire, Fault> {
    let replid = plan.gauge.replid().ok_or(Fault::Stopped)?;
    let options = client::Options { resume: Some((replid, journal.end_offset())), ..Default::default() };
    let mut link = PsyncLink::connect(plan, options)?;
    match link.opening(stop)? {
        Opening::Continue { replid: now } => {
            is_same_history(replid, now, journal.end_offset() - 1)?;
            Ok(link.into_stream())
        }
        _ => Err(Fault::HistoryGone),
    }
}

/// When to tell the primary that we are here.
///
/// The primary puts the stream on only at an ACK that arrives *after* it has reaped its child, and one sent too early is lost:
/// so they come quickly until the first byte of the stream does, then once a second, as replicas do.
///
/// The offset acknowledged is always that of the snapshot. A source is no durable copy of anything: an ACK that followed
/// the stream would let `WAIT` count it as one.
struct AckClock {
    offset: u64,
    last: Option<Instant>,
    began: Instant,
    came: bool,
}

impl AckClock {
    const EVERY: Duration = Duration::from_secs(1);
    const EAGER_FOR: Duration = Duration::from_secs(5);

    fn new(offset: u64) -> Self {
        AckClock { offset, last: None, began: Instant::now(), came: false }
    }

    fn stream_came(&mut self) {
        self.came = true;
    }

    fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let eager = !self.came && now.duration_since(self.began) < Self::EAGER_FOR;
        let every = if eager { TICK } else { Self::EVERY };
        if self.last.is_some_and(|last| now.duration_since(last) < every) {
            return None;
        }
        self.last = Some(now);
        let mut bytes = Vec::new();
        client::ack(&mut bytes, self.offset);
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acks_come_quickly_until_the_stream_does_and_never_move() {
        let mut clock = AckClock::new(77);
        let now = Instant::now();
        let first = clock.due(now).expect("the first is due at once");
        assert!(first.windows(2).any(|w| w == b"77"));
        assert!(clock.due(now).is_none());
        assert!(clock.due(now + TICK).is_some());
        clock.stream_came();
        assert!(clock.due(now + TICK * 2).is_none());
        assert_eq!(clock.due(now + TICK + AckClock::EVERY), Some(first));
    }
}
