//! The replication stream: from the connection into the journal, resumed at the next byte if the connection breaks.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_redis::ReplId;
use remora_redis::aof::{Seen, Watch};
use remora_redis::psync::client;
use remora_table::{Identity, JournalWriter, Kind, Origin};

use super::psync_link::{PsyncLink, Received, Socket, is_same_history};
use super::{Capture, CaptureError, CaptureEvent, Plan, TICK};
use crate::gauge::Gauge;
use remora_base::pace::Backoff;
use remora_process::events;
use remora_server::{Facts, Server};

/// The most bytes that one read of the stream takes: a few of the server's writes, which have 16 KiB each.
const STREAM_READ_BYTES: usize = 256 * 1024;

/// The phase of a capture that this module is about, for its errors.
pub(super) const DURING: &str = "stream";

/// How long the server may take to close a link whose other end was closed: it does that in the same millisecond.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// The capture of a thread that follows the stream. A server that is being shut down does not stop it: it closes its
/// link, and waits.
fn following(capture: &Capture) -> Capture {
    Capture { stop: capture.stop.without_presence(), ..capture.clone() }
}

/// Which thread follows the stream once a snapshot is complete.
pub(super) enum Following {
    /// The thread of an earlier capture.
    AnotherCapture,
    /// This capture's own thread, as its next step.
    ThisThread(Box<Follower>),
    /// A thread that has followed the stream since the snapshot began.
    OwnThread(JoinHandle<()>),
}

/// Writes the stream of one connection after the other into the journal.
pub(super) struct Follower {
    capture: Capture,
    /// `None` before the first connection of a stream that a former process has followed.
    socket: Option<Socket>,
    journal: Journal,
    /// Whether the server waits for this connection when it is told of slots that move.
    is_waited_for: bool,
    written: Written,
}

impl Follower {
    pub(super) fn new(capture: &Capture, socket: Socket, journal: Journal) -> Follower {
        let is_waited_for = capture.plan.may_import_slots && capture.plan.reader_version.is_some();
        let written = Written::new(journal.written());
        Follower { capture: following(capture), socket: Some(socket), journal, is_waited_for, written }
    }

    /// One that connects first, and asks for the journal's next byte.
    pub(super) fn unconnected(capture: &Capture, journal: Journal) -> Follower {
        let written = Written::new(journal.written());
        Follower { capture: following(capture), socket: None, journal, is_waited_for: false, written }
    }

    /// Makes `abandoned` stop the follower too.
    pub(super) fn until(mut self, abandoned: Arc<AtomicBool>) -> Follower {
        self.capture.stop = self.capture.stop.or(abandoned);
        self
    }

    /// Follows the stream until it is stopped, lost, or continued under another replid. A broken connection is
    /// replaced, and the stream resumed at the next byte.
    pub(super) fn run(mut self) {
        let mut backoff = Backoff::from_system();
        loop {
            let Err(broke) = self.pour();
            match broke {
                CaptureError::Stopped => return self.journal.abort(),
                CaptureError::ServerEnds => {
                    tracing::info!(
                        event = events::SHUTDOWN_SEEN,
                        offset = self.journal.end_offset() - 1,
                        "the server is being shut down: the source has all bytes up to this offset and has closed its link, so that the \
                         server does not wait for it"
                    );
                    if self.capture.not_while_the_server_ends().is_err() {
                        return self.journal.abort();
                    }
                }
                _ => {
                    tracing::warn!(%broke, offset = self.journal.end_offset(), "the stream broke; resuming it at the next byte");
                }
            }
            match self.reconnect(&mut backoff) {
                Ok(()) => {
                    backoff.reset();
                    self.capture.report(CaptureEvent::StreamResumed);
                }
                Err(CaptureError::HistoryChanged { from, to, at }) => {
                    // The journal is not aborted: it holds all bytes of the old history that we received, and replicas
                    // may still read it.
                    let generation = self.capture.plan.generation;
                    self.capture.report(CaptureEvent::HistoryChanged { generation, from, to, at });
                    return;
                }
                Err(CaptureError::Stopped) => return self.journal.abort(),
                Err(error) => {
                    self.journal.abort();
                    self.capture.report(CaptureEvent::StreamLost { text: format!("{broke}; then: {error}") });
                    return;
                }
            }
        }
    }

    /// Writes the stream into the journal until it is stopped or the connection breaks.
    pub(super) fn pour(&mut self) -> Result<Infallible, CaptureError> {
        let link = |cause: io::Error| CaptureError::Link { during: DURING, cause: cause.to_string() };
        let mut buffer = vec![0; STREAM_READ_BYTES];
        let mut acks = AckClock::new();
        // The primary sends a PING every `repl-ping-replica-period`, 10 s by default. One with a longer period says by
        // INFO that it has written nothing meanwhile.
        let mut silence = self.capture.silence(DURING);
        loop {
            self.capture.stop.check()?;
            let Some(socket) = &mut self.socket else {
                return Err(CaptureError::Link { during: DURING, cause: "the source was started again".into() });
            };
            if self.capture.plan.presence.leaves_at().is_some_and(|offset| self.journal.end_offset() > offset) {
                return Err(self.leave());
            }
            if let Some(ack) = acks.due(Instant::now()) {
                socket.write_all(&ack).map_err(link)?;
            }
            let (presence, last) = (&self.capture.plan.presence, self.journal.end_offset() - 1);
            let has_no_more = || presence.has_no_more(Instant::now(), last);
            let read = silence.check_unless(socket.read(&mut buffer), has_no_more)?;
            self.journal.written_since(self.written.read(Instant::now(), read, buffer.len()));
            if let Some(n) = read {
                self.journal.append(&buffer[..n], &self.capture.plan.gauge)?;
                acks.stream_began();
                // A snapshot over a second connection ends with this one.
                if self.is_waited_for && !self.capture.plan.gauge.is_capturing() {
                    self.step_aside();
                }
            }
        }
    }

    /// Closes the link to a server that waits for it, and for nothing else that it has sent: what arrives until the
    /// server has closed its end is appended. An acknowledgement of these bytes would do as well for the server, and
    /// would be one for `WAIT` too.
    fn leave(&mut self) -> CaptureError {
        let Some(mut socket) = self.socket.take() else { return CaptureError::ServerEnds };
        let (until, mut buffer) = (Instant::now() + LEAVE_LIMIT, vec![0; STREAM_READ_BYTES]);
        let mut is_open = socket.end_writing().is_ok();
        while is_open && Instant::now() < until && !self.capture.stop.is_set() {
            match socket.read(&mut buffer) {
                Ok(Received::Bytes(n)) => {
                    self.journal.written_since(self.written.read(Instant::now(), Some(n), buffer.len()));
                    if let Err(error) = self.journal.append(&buffer[..n], &self.capture.plan.gauge) {
                        return error.into();
                    }
                }
                Ok(Received::Idle) => {}
                Ok(Received::End) | Err(_) => is_open = false,
            }
        }
        CaptureError::ServerEnds
    }

    /// Goes on over a connection that the server does not wait for.
    ///
    /// A Valkey primary in cluster mode answers `CLUSTER SETSLOT` when each replica that has told its version has
    /// acknowledged it, or fails after two seconds. A source tells a version for its snapshot, and acknowledges
    /// nothing. A connection that requests the rest of the stream needs no version.
    fn step_aside(&mut self) {
        self.is_waited_for = false;
        match self.is_covered().and_then(|()| self.try_reconnect()) {
            Ok(()) => tracing::info!(
                event = events::SLOT_MOVES_FREE,
                "the server waits for this source no more when slots move key by key"
            ),
            Err(error) => {
                tracing::warn!(%error, "CLUSTER SETSLOT at the server will fail: it waits for this source");
            }
        }
    }

    /// Fails if the server would answer a request for the rest of the stream with a snapshot.
    fn is_covered(&self) -> Result<(), CaptureError> {
        let facts =
            self.capture.wait_for(async { Facts::read(&mut self.capture.plan.server.connect().await?).await })?;
        let history = self.capture.plan.gauge.replid().ok_or(CaptureError::Stopped)?;
        let covered = facts.covers(history, self.journal.end_offset() - 1, STREAM_READ_BYTES as u64);
        covered.map_err(|cause| CaptureError::Link { during: DURING, cause })
    }

    /// Resumes the stream over another connection. Tries again with back-off, within [`RESUME_LIMIT`].
    fn reconnect(&mut self, backoff: &mut Backoff) -> Result<(), CaptureError> {
        let began = Instant::now();
        loop {
            match self.try_reconnect() {
                // The server would answer the next attempt alike.
                Err(error @ CaptureError::HistoryChanged { .. }) => return Err(error),
                Err(error) if error.is_transient() && began.elapsed() < RESUME_LIMIT => {
                    tracing::debug!(%error, "the stream cannot be resumed yet");
                    self.pause(backoff.next())?;
                }
                other => return other,
            }
        }
    }

    fn pause(&self, length: Duration) -> Result<(), CaptureError> {
        let until = Instant::now() + length;
        while Instant::now() < until {
            self.capture.stop.check()?;
            std::thread::sleep(TICK.min(length));
        }
        Ok(())
    }

    fn try_reconnect(&mut self) -> Result<(), CaptureError> {
        let history = self.capture.plan.gauge.replid().ok_or(CaptureError::Stopped)?;
        let present = self.capture.plan.captured.server();
        if present.url() != self.capture.plan.server.url() {
            self.has_reached_the_journal(&present)?;
            self.capture.plan.server = present;
        }
        if self.capture.plan.no_fork {
            self.is_continued(history)?;
        }
        let link = self.capture.handshake(self.options(history))?;
        self.resume_over(link, history)
    }

    /// Fails if the server would answer the request with a snapshot, for which it would fork. It can lose the byte
    /// between this question and the request: then it forks only if it does not wait for more replicas
    /// (`repl-diskless-sync-delay 0`).
    fn is_continued(&self, history: ReplId) -> Result<(), CaptureError> {
        let server = &self.capture.plan.server;
        let facts = self.capture.wait_for(async { Facts::read(&mut server.connect().await?).await })?;
        facts.covers(history, self.journal.end_offset().saturating_sub(1), 0).map_err(|why| {
            tracing::debug!(why, "the server would not continue the stream, and must not fork");
            CaptureError::HistoryGone
        })
    }

    /// Fails if another server of the group has not got as far as the journal: it would answer the request with a
    /// snapshot.
    fn has_reached_the_journal(&self, server: &Server) -> Result<(), CaptureError> {
        let facts = self.capture.wait_for(async { Facts::read(&mut server.connect().await?).await })?;
        match facts.offset {
            Some(offset) if offset >= self.journal.end_offset().saturating_sub(1) => Ok(()),
            _ => {
                let cause = format!("the server {} has not got as far as the stream", server.url());
                Err(CaptureError::Link { during: DURING, cause })
            }
        }
    }

    /// What to request of the server: `history` from the journal's next byte on.
    pub(super) fn options(&self, history: ReplId) -> client::Options {
        client::Options { resume: Some((history, self.journal.end_offset())), ..Default::default() }
    }

    /// Replaces the connection by one whose handshake requests the journal's next byte of `history`.
    pub(super) fn resume_over(&mut self, mut link: PsyncLink, history: ReplId) -> Result<(), CaptureError> {
        let replid = link.continued()?.ok_or(CaptureError::HistoryGone)?;
        is_same_history(history, replid, self.journal.end_offset() - 1)?;
        self.socket = Some(link.into_socket());
        self.written.resumed();
        Ok(())
    }
}

/// When the server may have written at the earliest what arrives.
///
/// What a read brings was not there when the read before it had emptied the socket. At the beginning of a connection
/// the server sends what it has kept: while the snapshot arrived, or while there was no connection.
#[derive(Debug)]
pub struct Written {
    /// The socket was empty.
    emptied: Instant,
    kept: Option<Kept>,
}

/// What arrives was kept by the server.
#[derive(Clone, Copy, Debug)]
struct Kept {
    since: Instant,
    /// When the first bytes of it arrived.
    first: Option<Instant>,
}

/// The shortest and the longest time in which a server that never pauses is taken to send what it has kept; as long as
/// it has kept it in between.
const KEPT_TIME: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];

impl Written {
    /// For a connection that begins with what was kept since then.
    pub fn new(since: Instant) -> Written {
        Written { emptied: since, kept: Some(Kept { since, first: None }) }
    }

    /// Another connection begins with what was kept since the last one brought nothing more.
    pub fn resumed(&mut self) {
        let since = self.kept.map_or(self.emptied, |kept| kept.since);
        self.kept = Some(Kept { since, first: None });
    }

    /// A read has brought bytes into a buffer of this size, or nothing in a while. Returns when the server may have
    /// written them.
    pub fn read(&mut self, now: Instant, bytes: Option<usize>, buffer: usize) -> Instant {
        let before = self.kept.map_or(self.emptied, |kept| kept.since);
        match (&mut self.kept, bytes) {
            (Some(Kept { first: None, .. }), None) => return before,
            (Some(Kept { since, first }), Some(_)) => {
                let first = *first.get_or_insert(now);
                let limit = first.saturating_duration_since(*since).clamp(KEPT_TIME[0], KEPT_TIME[1]);
                if now.saturating_duration_since(first) < limit {
                    return before;
                }
                self.kept = None;
            }
            (Some(_), None) => self.kept = None,
            (None, _) => {}
        }
        if bytes.is_none_or(|bytes| bytes < buffer) {
            self.emptied = now;
        }
        before
    }
}

/// How long the source tries to resume a broken stream. Servers keep their backlog far longer, but replicas should not
/// wait long before they begin again.
const RESUME_LIMIT: Duration = Duration::from_secs(60);

/// The offset that a source acknowledges. It is less than the offset of every write, so `WAIT` never counts a source,
/// which keeps writes in memory only and cannot be promoted.
const ACKED_OFFSET: u64 = 0;

/// When to send the primary an acknowledgement.
///
/// The primary starts to send the stream only at an ACK that arrives *after* it has reaped its child, and one sent too
/// early has no effect. So ACKs are sent quickly until the stream's first byte arrives, then once a second, as replicas
/// do.
///
/// The acknowledged offset is always [`ACKED_OFFSET`]. The servers use the time of an ACK and its arrival for
/// everything that keeps a connection alive, and its offset only to count replicas (`WAIT`, `FAILOVER`, `SHUTDOWN`).
struct AckClock {
    last: Option<Instant>,
    began: Instant,
    stream_began: bool,
}

impl AckClock {
    const EVERY: Duration = Duration::from_secs(1);
    const EAGER_FOR: Duration = Duration::from_secs(5);

    fn new() -> Self {
        AckClock { last: None, began: Instant::now(), stream_began: false }
    }

    fn stream_began(&mut self) {
        self.stream_began = true;
    }

    /// The ACK to send, if one is due.
    fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let eager = !self.stream_began && now.duration_since(self.began) < Self::EAGER_FOR;
        let every = if eager { TICK } else { Self::EVERY };
        if self.last.is_some_and(|last| now.duration_since(last) < every) {
            return None;
        }
        self.last = Some(now);
        let mut bytes = Vec::new();
        client::ack(&mut bytes, ACKED_OFFSET);
        Some(bytes)
    }
}

// The journal of a capture: the plain one, and the sealed one if replicas on other hosts read ciphertext. What is
// appended is watched for commands that must not be applied late.

/// The journals, which hold the same stream.
pub(crate) struct Journal {
    plain: JournalWriter,
    sealed: Option<JournalWriter>,
    watch: Watch,
    /// The server has written what is appended next at this time, or later.
    written: Instant,
}

impl Journal {
    /// Creates the journal, unless another capture writes one.
    pub(super) fn create(plan: &Plan, identity: &Identity) -> Result<Option<Journal>, CaptureError> {
        let Some((memory, geometry)) = &plan.journal else { return Ok(None) };
        let plain = JournalWriter::create(memory.clone(), *geometry, identity.clone())?;
        let sealed = plan.sealed_journal.as_ref().map(|sealed| {
            let create = match sealed.compressed {
                true => JournalWriter::create_compressed,
                false => JournalWriter::create_sealed,
            };
            create(sealed.memory.clone(), *geometry, identity.clone(), &sealed.key)
        });
        plan.gauge.journal_begins();
        let watch = Watch::new(plain.end_offset());
        Ok(Some(Journal { plain, sealed: sealed.transpose()?, watch, written: Instant::now() }))
    }

    /// The server may have written what follows at this time already.
    pub(crate) fn written_since(&mut self, at: Instant) {
        self.written = at;
    }

    /// When the server may have written what is appended next.
    pub(super) fn written(&self) -> Instant {
        self.written
    }

    /// Notes what must not be applied late, before readers have it.
    fn note(&mut self, bytes: &[u8], gauge: &Gauge) {
        let (seen, fed) = self.watch.feed(bytes);
        if let Err(error) = fed {
            tracing::warn!(%error, "the stream is not one of commands; replicas that join from now on get another snapshot");
        }
        if seen != Seen::default() {
            gauge.arrived(seen, self.written);
        }
    }

    /// Appends bytes of the stream; readers may take them at once. The gauge shows them before: a replica whose server
    /// has them may ask at once for what follows, and must not be taken for one that is ahead of the stream.
    pub(crate) fn append(&mut self, bytes: &[u8], gauge: &Gauge) -> Result<(), remora_table::Error> {
        self.note(bytes, gauge);
        let end = self.end_offset() + bytes.len() as u64;
        gauge.journal_at(self.first_offset(), end - 1);
        self.plain.append(bytes)?;
        if let Some(sealed) = &mut self.sealed {
            sealed.compress(gauge.is_compressing());
            sealed.append(bytes)?;
        }
        gauge.journal_at(self.first_offset(), end - 1);
        Ok(())
    }

    /// Aborts the journal: readers take what it holds and then find it aborted.
    pub(super) fn abort(&mut self) {
        self.plain.abort();
        if let Some(sealed) = &mut self.sealed {
            sealed.abort();
        }
    }

    /// Replication offset of the oldest byte that every reader can still read.
    pub(super) fn first_offset(&self) -> u64 {
        let sealed = self.sealed.as_ref().map_or(0, JournalWriter::first_offset);
        self.plain.first_offset().max(sealed)
    }

    /// Replication offset of the byte that will be appended next.
    pub(crate) fn end_offset(&self) -> u64 {
        self.plain.end_offset()
    }
}

impl Plan {
    /// An empty journal that begins there, for what a former process had of the stream.
    pub(crate) fn new_journal(&self, origin: Origin) -> Result<Journal, CaptureError> {
        Journal::create(self, &Identity { kind: Kind::Journal, origin })?.ok_or(CaptureError::HistoryGone)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::tests::{Rig, history};
    use super::*;

    #[test]
    fn what_a_read_brings_was_written_since_the_socket_was_empty_or_since_the_server_began_to_keep_it() {
        let (began, millisecond, full) = (Instant::now(), Duration::from_millis(1), 100);
        let at = |after: u32| began + millisecond * after;
        let mut written = Written::new(began);
        // A snapshot of ten seconds: nothing arrives, and then what was kept meanwhile.
        assert_eq!(written.read(at(9_900), None, full), began);
        assert_eq!(written.read(at(10_000), Some(50), full), began);
        assert_eq!(written.read(at(12_500), Some(50), full), began, "it was kept for longer than it has been arriving");
        assert_eq!(written.read(at(12_700), None, full), began);
        assert_eq!(written.read(at(12_800), Some(50), full), at(12_700));
        assert_eq!(written.read(at(13_000), Some(full), full), at(12_800));
        assert_eq!(written.read(at(13_001), Some(50), full), at(12_800), "the read before may have left something");
        // The process did not run for a while.
        assert_eq!(written.read(at(33_000), Some(50), full), at(13_001));
        written.resumed();
        assert_eq!(written.read(at(40_000), Some(50), full), at(33_000));
        written.resumed();
        assert_eq!(written.read(at(50_000), Some(50), full), at(33_000));
        // A stream without a pause.
        assert_eq!(written.read(at(66_900), Some(50), full), at(33_000));
        assert_eq!(written.read(at(67_100), Some(50), full), at(33_000));
        assert_eq!(written.read(at(67_200), Some(50), full), at(67_100));
    }

    #[test]
    fn acks_come_quickly_until_the_stream_does_and_acknowledge_no_write() {
        let mut clock = AckClock::new();
        let now = Instant::now();
        let first = clock.due(now).expect("the first is due at once");
        assert!(first.ends_with(b"ACK\r\n$1\r\n0\r\n"));
        assert!(clock.due(now).is_none());
        assert!(clock.due(now + TICK).is_some());
        clock.stream_began();
        assert!(clock.due(now + TICK * 2).is_none());
        assert_eq!(clock.due(now + TICK + AckClock::EVERY), Some(first));
    }

    #[test]
    fn bytes_are_shown_before_a_reader_can_have_them() {
        let rig = Rig::new();
        let (plan, gauge) = (&rig.capture.plan, &rig.capture.plan.gauge);
        let identity =
            Identity { kind: Kind::Journal, origin: Origin { generation: 5, history: history(), offset: 77 } };
        let mut journal = Journal::create(plan, &identity).unwrap().unwrap();
        journal.append(b"PING", gauge).unwrap();
        assert_eq!(gauge.journal(), (78, 81));
        // The tables take nothing any more.
        journal.abort();
        journal.append(b"PING", gauge).unwrap_err();
        assert_eq!(gauge.journal(), (78, 85));
    }
}
