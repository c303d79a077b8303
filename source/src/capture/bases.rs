//! From what the next snapshot is made, of all that there is, and its capture from a base: a copy of another source's,
//! a backup or a file in place of the server, then a sweep, and a fork of the server last.
//!
//! ```text
//!   the source's snapshot ─▶ a copy of another source's ─▶ a backup, a file ─▶ a sweep ─▶ a fork of the server
//!     costs nothing           the stream behind it           the same           time       memory too
//! ```
//!
//! Of backups and files the one with the least of the stream behind it comes first. A base serves if its history is
//! that of the server, if the server has all of the stream behind it, or behind the commands that are stored with it,
//! and if the journal holds that.
//!
//! A capture tries them in this order, and a dry run and the status say the first of them: there is one function,
//! [`order`], which is pure.
//!
//! ```text
//!   look at what is stored, ask the server (INFO) ─▶ order ─▶ first ── not whole, not continued ─▶ the next one
//!                                                               │ it serves
//!                                      data ─▶ slots    journal ◀─ PSYNC at their end ── the server
//! ```
//!
//! Nothing is asked of the server that would make it fork: it says first that it continues the stream. A base that
//! was tried is not tried again for some minutes, so that a replica that it cannot serve gets another one.
//!
//! A copy of another source's snapshot comes slot by slot:
//!
//! ```text
//!   the first source:  journal ══ from the snapshot's offset up to now ══▶ journal ◀══ PSYNC at its end ── the server
//!                      slots ═══════════════ slot by slot ═══════════════▶ the same slots, sealed as they were there
//! ```
//!
//! The server's backlog need not reach back to the snapshot: what it lacks is in the first source's journal. The server
//! is asked by `INFO` before each `PSYNC`: one that it cannot continue would have it take a snapshot.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use remora_base::units::{Moment, Size, readable};
use remora_process::rdb_file::{Found, Opened, StoredHead};
use remora_protocol::{Base, BaseKind};
use remora_reader::parts::Part;
use remora_reader::source::Sinks;
use remora_redis::ReplId;
use remora_redis::psync::client::Options;
use remora_server::Facts;
use remora_table::{Identity, JournalReader, Kind, Origin, SnapshotReader, SnapshotSealer, SnapshotWriter, State};

use super::method::Method;
use super::psync_link::is_same_history;
use super::snapshot::{SnapshotFile, Taking, long_ago};
use super::stream::{Following, Journal};
use super::with_module::{ModuleError, before};
use super::{Capture, CaptureError, CaptureEvent, Offered};
use crate::options::{Compress, ModuleCapture};
use crate::standby::{continues, reaches};

/// What is known of one way to a base.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    /// Which way it is.
    pub(crate) kind: BaseKind,
    /// Where it is, for people; empty if the kind says that.
    pub(crate) place: String,
    /// What is known of its data.
    pub(crate) known: Known,
}

/// What is known of the data of a base.
#[derive(Clone, Debug)]
pub(crate) enum Known {
    /// They are taken when they are wanted.
    New,
    /// They are there.
    There(Data),
    /// They cannot be used, and why.
    Unusable(String),
}

/// Data that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Data {
    /// The history that they belong to.
    pub(crate) history: ReplId,
    /// The last byte of the stream that they hold.
    pub(crate) offset: u64,
    /// The last byte of the stream that is stored with them; [`Data::offset`] where none is.
    pub(crate) reaches: u64,
    /// How long ago they were the server's.
    pub(crate) age: Duration,
}

/// What the order depends on beside the candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World<'a> {
    /// What the server says of itself: its history, and its backlog.
    pub(crate) facts: &'a Facts,
    /// The stream that the source follows already: its history, and the first and last byte in the journal.
    pub(crate) journal: Option<(ReplId, u64, u64)>,
    /// Bytes of the stream that the journal can hold.
    pub(crate) journal_bytes: u64,
    /// A snapshot of the source that is older is not given to those who join.
    pub(crate) max_age: Duration,
    /// The server must not fork.
    pub(crate) no_fork: bool,
}

/// The candidates that serve, the best one first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    /// Each with its place among the candidates.
    pub(crate) serve: Vec<Serves>,
    /// What does not serve, and why: a place among the candidates, and a sentence.
    pub(crate) passed_over: Vec<(usize, String)>,
}

/// A candidate that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Serves {
    /// Its place among the candidates.
    pub(crate) candidate: usize,
    /// Bytes of the stream behind it.
    pub(crate) behind: u64,
    /// The server does not have all of them: the first ones are stored with it.
    pub(crate) with_commands: bool,
}

/// Puts the candidates in the order in which they are tried.
pub(crate) fn order(candidates: &[Candidate], world: &World<'_>) -> Order {
    let mut order = Order::default();
    for (number, candidate) in candidates.iter().enumerate() {
        match world.behind(candidate) {
            Ok((behind, with_commands)) => order.serve.push(Serves { candidate: number, behind, with_commands }),
            Err(why) => order.passed_over.push((number, format!("{}: {why}", candidate.name()))),
        }
    }
    // In the order in which they were named, where nothing else tells them apart.
    order.serve.sort_by_key(|serves| (candidates.get(serves.candidate).map(Candidate::class), serves.behind));
    order
}

impl World<'_> {
    /// How much of the stream is behind the candidate, and whether its commands are needed for that.
    ///
    /// # Errors
    /// It does not serve, and why.
    fn behind(&self, candidate: &Candidate) -> Result<(u64, bool), String> {
        let data = match &candidate.known {
            Known::Unusable(why) => return Err(why.clone()),
            Known::New if candidate.kind == BaseKind::Fork && self.no_fork => {
                return Err("the server must not fork (--no-fork)".to_owned());
            }
            Known::New => return Ok((0, false)),
            Known::There(data) => data,
        };
        if candidate.kind == BaseKind::Snapshot && data.age > self.max_age {
            let [age, most] = [data.age, self.max_age].map(readable);
            return Err(format!("{age} old, and {most} is the most (--max-age)"));
        }
        let mut with_commands = false;
        let end = match self.journal {
            // The stream that is followed serves for a snapshot that begins within it.
            Some((history, first, end)) => {
                if history != data.history {
                    return Err("it belongs to another history than the stream that is followed".to_owned());
                }
                if first > data.offset.saturating_add(1) {
                    return Err("the journal does not reach back to it".to_owned());
                }
                if data.offset > end {
                    return Err("it is ahead of the stream that is followed".to_owned());
                }
                end
            }
            None => {
                if let Err(why) = self.facts.covers(data.history, data.offset, 0) {
                    if data.reaches <= data.offset || self.facts.covers(data.history, data.reaches, 0).is_err() {
                        return Err(why);
                    }
                    with_commands = true;
                }
                self.facts.offset.unwrap_or(data.offset)
            }
        };
        let behind = end.saturating_sub(data.offset);
        match behind <= self.journal_bytes {
            true => Ok((behind, with_commands)),
            false => Err(format!(
                "{} of the stream are behind it, and the journal holds {} (--journal-memory)",
                Size::bytes(behind),
                Size::bytes(self.journal_bytes)
            )),
        }
    }
}

impl Candidate {
    /// A base of which nothing is there before it is wanted.
    pub(crate) fn new(kind: BaseKind) -> Candidate {
        Candidate { kind, place: String::new(), known: Known::New }
    }

    /// What it is, for people.
    pub(crate) fn name(&self) -> &str {
        match self.kind {
            _ if !self.place.is_empty() => &self.place,
            kind => kind.words(),
        }
    }

    /// Its place in the order.
    fn class(&self) -> u8 {
        match self.kind {
            BaseKind::Snapshot => 0,
            BaseKind::Copy => 1,
            BaseKind::Backup | BaseKind::File => 2,
            BaseKind::Sweep => 3,
            BaseKind::Fork => 4,
            BaseKind::None => 5,
        }
    }

    /// How old its data are.
    pub(crate) fn age(&self) -> Duration {
        match &self.known {
            Known::There(data) => data.age,
            Known::New | Known::Unusable(_) => Duration::ZERO,
        }
    }
}

impl Order {
    /// The first base of these candidates, in the words of a report.
    pub(crate) fn told(&self, candidates: &[Candidate]) -> Base {
        let why: Vec<&str> = self.passed_over.iter().map(|(_, why)| why.as_str()).collect();
        let passed_over = why.join("; ");
        let first = self.serve.first().and_then(|serves| Some((serves, candidates.get(serves.candidate)?)));
        match first {
            None => Base { passed_over, ..Base::default() },
            Some((serves, candidate)) => Base {
                kind: candidate.kind,
                place: candidate.place.clone(),
                age_seconds: candidate.age().as_secs(),
                stream_bytes: serves.behind,
                passed_over,
            },
        }
    }
}

/// How long a base is not tried again: long enough that the replicas that it does not serve get another one.
const TRIED_FOR: Duration = Duration::from_secs(300);

/// The first version of the formats that only Valkey from 9 on reads.
const OWN_FORMATS: u32 = 80;

/// Which bases were tried lately. The source's loop keeps it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tried(Vec<(String, u64, Instant)>);

impl Tried {
    /// A base has served, or has turned out to be of no use.
    pub(crate) fn note(&mut self, place: &str, offset: u64, now: Instant) {
        self.0.retain(|(_, _, at)| now.saturating_duration_since(*at) < TRIED_FOR);
        self.0.push((place.to_owned(), offset, now));
    }

    fn has(&self, place: &str, offset: u64, now: Instant) -> bool {
        let is_it = |(other, at, since): &(String, u64, Instant)| {
            other == place && *at == offset && now.saturating_duration_since(*since) < TRIED_FOR
        };
        self.0.iter().any(is_it)
    }
}

/// What a found base is to one who chooses. `is_shared`: it is for replicas that read no format of one family alone.
pub(crate) fn candidate(found: &Found, is_shared: bool, tried: &Tried) -> Candidate {
    let known = match &found.head {
        Err(why) => Known::Unusable(why.clone()),
        Ok(head) if tried.has(&found.place, head.offset, Instant::now()) => {
            Known::Unusable("it was tried less than five minutes ago".to_owned())
        }
        Ok(head) if is_shared && head.version >= OWN_FORMATS => {
            Known::Unusable("readers wait that do not know its format".to_owned())
        }
        Ok(StoredHead { history, offset, reaches, taken, .. }) => {
            let age = Duration::from_secs(Moment::now().get().saturating_sub(taken.get()));
            Known::There(Data { history: *history, offset: *offset, reaches: *reaches, age })
        }
    };
    Candidate { kind: found.kind, place: found.place.clone(), known }
}

/// What a server gives: a sweep, if it is wanted, and a fork.
pub(crate) fn of_the_server(capture: ModuleCapture, no_fork: bool, sweep_failed_lately: bool) -> Vec<Candidate> {
    let mut all = Vec::new();
    if capture == ModuleCapture::Sweep {
        let mut sweep = Candidate::new(BaseKind::Sweep);
        // Without a fork there is no other way, and the machine pauses between two attempts.
        if sweep_failed_lately && !no_fork {
            sweep.known = Known::Unusable("a sweep failed a short time ago".to_owned());
        }
        all.push(sweep);
    }
    all.push(Candidate::new(BaseKind::Fork));
    all
}

impl Capture {
    /// Takes the snapshot from the best base. `from_the_server`: has the server fork for it.
    pub(super) fn take_best(
        &self,
        from_the_server: impl FnOnce() -> Result<Following, CaptureError>,
    ) -> Result<Following, CaptureError> {
        let plan = &self.plan;
        let found = plan.stored.as_ref().map(|stored| self.beside_the_runtime(|| stored.look())).unwrap_or_default();
        let facts = match found.is_empty() {
            true => Facts::default(),
            false => self.wait_for(async { Facts::read(&mut plan.server.connect().await?).await })?,
        };
        let is_shared = facts.own_format().is_some() && plan.reader_version.is_none();
        let mut candidates: Vec<_> = found.iter().map(|found| candidate(found, is_shared, &plan.tried)).collect();
        candidates.extend(of_the_server(plan.module.choice, plan.no_fork, plan.sweep_failed_lately));
        let (first, end) = plan.gauge.journal();
        let journal = match plan.journal {
            Some(_) => None,
            None => plan.gauge.replid().map(|history| (history, first, end)),
        };
        let world = World {
            facts: &facts,
            journal,
            journal_bytes: plan.journal_bytes,
            max_age: Duration::MAX,
            no_fork: plan.no_fork,
        };
        let order = order(&candidates, &world);
        let mut whys: Vec<String> = order.passed_over.iter().map(|(_, why)| why.clone()).collect();
        for serves in &order.serve {
            let Some(candidate) = candidates.get(serves.candidate) else { continue };
            let taken = match (candidate.kind, found.get(serves.candidate)) {
                (BaseKind::Backup | BaseKind::File, Some(found)) => {
                    tracing::info!(
                        age = %readable(candidate.age()),
                        behind = %Size::bytes(serves.behind),
                        "the snapshot comes from {}, and the stream behind it from {}", found.place,
                        if serves.with_commands { "there and the server" } else { "the server" }
                    );
                    self.take_stored(found, candidate, serves.with_commands)
                }
                (BaseKind::Sweep, _) => self.swept(),
                _ => return from_the_server(),
            };
            match taken {
                Ok(following) => return Ok(following),
                Err(ModuleError::Final(error)) => return Err(error),
                Err(ModuleError::BeforeSnapshot(why)) => {
                    tracing::warn!(%why, "no snapshot comes from {}; the next base is tried", candidate.name());
                    whys.push(format!("{}: {why}", candidate.name()));
                }
            }
        }
        Err(CaptureError::NeedsFork(whys.join("; ")))
    }

    /// Runs what blocks this thread, and uses the runtime for its connections.
    fn beside_the_runtime<T>(&self, blocking: impl FnOnce() -> T) -> T {
        let _entered = self.plan.runtime.enter();
        blocking()
    }

    /// Takes the snapshot by a sweep.
    fn swept(&self) -> Result<Following, ModuleError> {
        self.sweep().inspect_err(|error| {
            if matches!(error, ModuleError::Final(CaptureError::Module(_))) {
                self.report(CaptureEvent::SweepFailed);
            }
        })
    }

    /// Takes the snapshot from what is stored, and the first of the stream behind it too if `with_commands`.
    fn take_stored(&self, found: &Found, candidate: &Candidate, with_commands: bool) -> Result<Following, ModuleError> {
        let (Some(stored), Ok(head)) = (&self.plan.stored, &found.head) else { return Err(before("it is gone")) };
        let tried = |error: CaptureError| match error {
            CaptureError::File(_) | CaptureError::HistoryGone | CaptureError::HistoryChanged { .. } => {
                self.tried(found, head.offset);
                before(error)
            }
            error => ModuleError::Final(error),
        };
        let opened = self.beside_the_runtime(|| stored.open(found, with_commands, &|| !self.stop.is_set()));
        // One that was stopped is no reason to try the next base.
        self.stop.check().map_err(ModuleError::Final)?;
        let Opened { path, rdb, stream, keeps: _keeps } = opened.map_err(|failure| {
            self.tried(found, head.offset);
            before(failure)
        })?;
        let file = SnapshotFile::of(&path, &rdb).map_err(before)?.with_stream(stream);
        if (file.history(), file.offset()) != (head.history, head.offset) {
            return Err(before("it is another one than a moment ago"));
        }
        let opened = self.open_file(&file).map_err(tried)?;
        self.plan.gauge.set_method(Method::Stored);
        let age = candidate.age();
        self.report(CaptureEvent::FromBase { generation: self.plan.generation, place: found.place.clone(), age });
        let taken = self.take_opened(&file, opened);
        match taken {
            Err(CaptureError::File(why)) => {
                self.tried(found, head.offset);
                Err(ModuleError::Final(CaptureError::Base(format!("{}: {why}", found.place))))
            }
            Err(error) => Err(ModuleError::Final(error)),
            Ok(following) => {
                self.tried(found, head.offset);
                Ok(following)
            }
        }
    }

    fn tried(&self, found: &Found, offset: u64) {
        self.report(CaptureEvent::BaseTried { place: found.place.clone(), offset });
    }
}

/// Bytes of the buffers in which slots and records arrive, and of what is read at once.
const BUFFER_MEMORY: u64 = 96 << 20;

/// How long to wait for the next arrival before the stop is looked at again.
const WAIT: Duration = Duration::from_millis(20);

/// How long to wait for a source that has published nothing more.
const NEWS_PAUSE: Duration = Duration::from_millis(2);

impl Capture {
    /// Copies the snapshot that another source offers, and follows the server's stream behind it.
    pub(super) fn take_copy(&self, first: &Offered) -> Result<Following, CaptureError> {
        self.plan.gauge.set_method(Method::Copied);
        let sinks = Sinks::new(BUFFER_MEMORY);
        let lost = |failure: remora_process::exit::Failure| CaptureError::First(failure.message);
        let (_, records, _) = first.way.journal(&first.offer, sinks).map_err(lost)?;
        let (id, part, _) = first.way.snapshot(&first.offer, sinks, None).map_err(lost)?;
        let Origin { history, offset, .. } = id.origin;
        if self.plan.journal.is_none() {
            reaches(self.plan.gauge.journal().0, offset).map_err(CaptureError::First)?;
        }
        let (memory, geometry) = &self.plan.snapshot;
        let identity = self.identity(Kind::Snapshot, history, offset);
        let writer = SnapshotWriter::create(memory.clone(), *geometry, identity.clone(), 0)?;
        let sealer = self.sealer_of_a_copy(identity)?;
        let journal = Journal::create(&self.plan, &self.identity(Kind::Journal, history, offset))?;
        self.plan.gauge.snapshot_began(history, offset, journal.is_some());
        self.report(CaptureEvent::Started { generation: self.plan.generation, replid: history, offset });
        let taking = Taking::new(self, writer, None);
        let Some(mut journal) = journal else {
            self.copy_slots(first, taking, part, sealer)?;
            return Ok(Following::AnotherCapture);
        };
        // When the server has written what is there already is not known.
        journal.written_since(long_ago(Instant::now()));
        self.copy_records(first, &mut journal, records)?;
        let end = journal.end_offset();
        let facts = self.wait_for(async { Facts::read(&mut self.plan.server.connect().await?).await })?;
        let next = continues(&facts, history, end - 1).map_err(CaptureError::First)?;
        let mut link = self.handshake(Options { resume: Some(next), ..Options::default() })?;
        let gone = || CaptureError::First("the server here does not continue its stream".into());
        let now = link.continued()?.ok_or_else(gone)?;
        is_same_history(history, now, end - 1)?;
        journal.written_since(Instant::now());
        self.beside_the_stream(link.into_socket(), journal, || self.copy_slots(first, taking, part, sealer))
    }

    /// What fills the table for other hosts, if there is one.
    fn sealer_of_a_copy(&self, identity: Identity) -> Result<Option<SnapshotSealer>, CaptureError> {
        let Some(remote) = &self.plan.remote else {
            self.plan.gauge.not_compressed();
            return Ok(None);
        };
        let ((plain, geometry), memory) = (self.plan.snapshot.clone(), remote.memory.clone());
        let sealer = match &remote.key {
            Some(key) if remote.compress == Compress::Off => {
                SnapshotSealer::create(plain, memory, geometry, identity, key)?
            }
            key => SnapshotSealer::create_compressed(plain, memory, geometry, identity, key.as_ref())?,
        };
        self.plan.gauge.sealing_begins();
        Ok(Some(sealer.as_a_copy()))
    }

    /// Copies what the first source has of the stream until now.
    fn copy_records(&self, first: &Offered, journal: &mut Journal, part: Part) -> Result<(), CaptureError> {
        let Part { mut peer, sink, layout, expect, .. } = part;
        let mut reader = JournalReader::new(None, sink, layout, expect, journal.end_offset()).map_err(lost)?;
        while !reader.is_caught_up() {
            self.check_first(first)?;
            reader.pump(&mut *peer).map_err(lost)?;
            let mut is_idle = true;
            while let Some(chunk) = reader.next_chunk() {
                is_idle = false;
                journal.append(&chunk.bytes, &self.plan.gauge)?;
            }
            if is_idle && !reader.is_caught_up() {
                peer.wait(WAIT).map_err(|error| CaptureError::First(error.to_string()))?;
            }
        }
        Ok(())
    }

    /// Copies slot after slot, each as it is stored there.
    fn copy_slots(
        &self,
        first: &Offered,
        mut taking: Taking<'_>,
        part: Part,
        mut sealer: Option<SnapshotSealer>,
    ) -> Result<(), CaptureError> {
        let (Part { mut peer, sink, layout, expect, .. }, mut bytes) = (part, Vec::new());
        let reader = SnapshotReader::new(None, sink, layout, expect, |_| false).map_err(lost)?;
        let mut reader = reader.keeping_encoded(sealer.is_some());
        let mut stored = 0;
        while !reader.is_complete() {
            self.check_first(first)?;
            reader.pump(&mut *peer).map_err(lost)?;
            let mut is_idle = true;
            while let Some(slot) = reader.next_slot() {
                is_idle = false;
                let (view, range) = slot.bytes();
                bytes.resize(slot.length as usize, 0);
                view.read(range.start, &mut bytes).map_err(remora_table::Error::from)?;
                if let Some(sealer) = &mut sealer {
                    sealer.store_as(slot.encoded().cloned());
                }
                reader.release(slot).map_err(lost)?;
                taking.append(&bytes)?;
                self.seal_copied(sealer.as_mut(), &mut stored)?;
            }
            if is_idle && reader.is_caught_up() {
                std::thread::sleep(NEWS_PAUSE);
            } else if is_idle {
                peer.wait(WAIT).map_err(|error| CaptureError::First(error.to_string()))?;
            }
        }
        taking.complete_with(|| {
            self.seal_copied(sealer.as_mut(), &mut stored)?;
            match sealer.is_none_or(|sealer| sealer.state() == State::Sealed) {
                true => Ok(()),
                false => Err(CaptureError::First("the copy for other hosts is not whole".into())),
            }
        })
    }

    /// Seals what is complete in the plain table.
    fn seal_copied(&self, sealer: Option<&mut SnapshotSealer>, stored: &mut u64) -> Result<(), CaptureError> {
        let Some(sealer) = sealer else { return Ok(()) };
        while sealer.pump()? {
            if let Some(slot) = sealer.take_stored() {
                *stored += u64::from(slot.stored);
                self.plan.gauge.stored(*stored, slot.method.is_some(), "as the first source has done it".into());
            }
            self.plan.gauge.sealed(sealer.sealed_slots());
        }
        Ok(())
    }

    /// Fails if the copy was stopped, or the first source's conversation has ended.
    fn check_first(&self, first: &Offered) -> Result<(), CaptureError> {
        self.stop.check()?;
        match first.is_over.load(Relaxed) {
            true => Err(CaptureError::First("its conversation has ended".into())),
            false => Ok(()),
        }
    }
}

fn lost(error: remora_table::Error) -> CaptureError {
    CaptureError::First(error.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use remora_server::Backlog;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn replid(digit: char) -> ReplId {
        digit.to_string().repeat(40).parse().unwrap()
    }

    /// A server with the history `a` at offset 1000, whose backlog keeps what follows offset 500.
    fn facts() -> Facts {
        let backlog = Backlog { active: true, size: 500, first: 501, held: 500 };
        Facts { replid: Some(replid('a')), offset: Some(1000), backlog: Some(backlog), ..Facts::default() }
    }

    fn world(facts: &Facts) -> World<'_> {
        World { facts, journal: None, journal_bytes: 10_000, max_age: HOUR, no_fork: false }
    }

    fn there(kind: BaseKind, place: &str, offset: u64) -> Candidate {
        let data = Data { history: replid('a'), offset, reaches: offset, age: HOUR * 3 };
        Candidate { kind, place: place.into(), known: Known::There(data) }
    }

    fn all() -> Vec<Candidate> {
        vec![
            Candidate::new(BaseKind::Fork),
            Candidate::new(BaseKind::Sweep),
            there(BaseKind::File, "old.rdb", 400),
            there(BaseKind::File, "dump.rdb", 600),
            there(BaseKind::Backup, "s3://b", 550),
            Candidate::new(BaseKind::Copy),
        ]
    }

    fn kinds(order: &Order, candidates: &[Candidate]) -> Vec<(BaseKind, u64)> {
        order.serve.iter().map(|serves| (candidates[serves.candidate].kind, serves.behind)).collect()
    }

    #[test]
    fn each_way_has_its_place_and_a_reason() {
        use BaseKind::{Backup, Copy, File, Fork, Sweep};
        let (facts, candidates) = (facts(), all());
        let found = order(&candidates, &world(&facts));
        assert_eq!(kinds(&found, &candidates), [(Copy, 0), (File, 400), (Backup, 450), (Sweep, 0), (Fork, 0)]);
        let [(2, why)] = &found.passed_over[..] else { panic!("{found:?}") };
        assert!(why.starts_with("old.rdb: ") && why.contains("backlog"), "{why}");

        // What a table of cases leaves of them.
        let cases: [(&str, World<'_>, &[BaseKind]); 4] = [
            ("no fork", World { no_fork: true, ..world(&facts) }, &[Copy, File, Backup, Sweep]),
            ("a small journal", World { journal_bytes: 420, ..world(&facts) }, &[Copy, File, Sweep, Fork]),
            (
                "a stream that is followed",
                World { journal: Some((replid('a'), 350, 1100)), ..world(&facts) },
                &[Copy, File, Backup, File, Sweep, Fork],
            ),
            (
                "a stream of another history",
                World { journal: Some((replid('b'), 1, 1100)), ..world(&facts) },
                &[Copy, Sweep, Fork],
            ),
        ];
        for (what, world, expected) in cases {
            let found = order(&candidates, &world);
            let kinds: Vec<_> = kinds(&found, &candidates).into_iter().map(|(kind, _)| kind).collect();
            assert_eq!(kinds, expected, "{what}: {found:?}");
        }
    }

    #[test]
    fn the_snapshot_that_is_there_comes_first_unless_it_is_too_old() {
        let facts = facts();
        let held = |age| {
            let data = Data { history: replid('a'), offset: 700, reaches: 700, age };
            Candidate { kind: BaseKind::Snapshot, place: String::new(), known: Known::There(data) }
        };
        let world = World { journal: Some((replid('a'), 701, 1000)), ..world(&facts) };
        let candidates = [Candidate::new(BaseKind::Fork), held(HOUR)];
        let told = order(&candidates, &world).told(&candidates);
        assert_eq!((told.kind, told.age_seconds, told.stream_bytes), (BaseKind::Snapshot, 3600, 300));
        let candidates = [Candidate::new(BaseKind::Fork), held(HOUR + Duration::from_secs(1))];
        let told = order(&candidates, &world).told(&candidates);
        assert!(told.kind == BaseKind::Fork && told.passed_over.contains("--max-age"), "{told:?}");
    }

    #[test]
    fn a_base_of_a_former_history_serves_to_the_end_of_that() {
        let facts = Facts { former: Some((replid('b'), 801)), ..facts() };
        for (offset, serves) in [(800, true), (801, false)] {
            let data = Data { history: replid('b'), offset, reaches: offset, age: HOUR };
            let candidate = Candidate { kind: BaseKind::File, place: "f".into(), known: Known::There(data) };
            assert_eq!(!order(&[candidate], &world(&facts)).serve.is_empty(), serves, "{offset}");
        }
    }

    #[test]
    fn the_commands_of_a_backup_are_taken_where_the_server_lacks_what_is_behind_its_snapshot() {
        let facts = facts();
        let stored = |offset, reaches| {
            let data = Data { history: replid('a'), offset, reaches, age: HOUR };
            Candidate { kind: BaseKind::Backup, place: "b".into(), known: Known::There(data) }
        };
        // The backlog keeps what follows offset 500.
        for (offset, reaches, expected) in [
            (500, 900, Some((500, false))),
            (499, 900, Some((501, true))),
            (100, 500, Some((900, true))),
            (100, 499, None),
            (100, 100, None),
            (100, 1001, None),
        ] {
            let found = order(&[stored(offset, reaches)], &world(&facts));
            let serves = found.serve.first().map(|serves| (serves.behind, serves.with_commands));
            assert_eq!(serves, expected, "{offset} to {reaches}: {found:?}");
        }
        // All of it must find room, and a stream that is followed is never given its beginning later.
        let small = World { journal_bytes: 800, ..world(&facts) };
        assert!(order(&[stored(100, 900)], &small).serve.is_empty());
        let follows = World { journal: Some((replid('a'), 501, 1000)), ..world(&facts) };
        assert!(order(&[stored(100, 900)], &follows).serve.is_empty());
    }

    #[test]
    fn nothing_that_serves_is_said_with_its_reasons() {
        let facts = facts();
        let candidates = [Candidate::new(BaseKind::Fork), there(BaseKind::File, "f.rdb", 1)];
        let told = order(&candidates, &World { no_fork: true, ..world(&facts) }).told(&candidates);
        assert_eq!(told.kind, BaseKind::None);
        assert!(told.passed_over.contains("--no-fork") && told.passed_over.contains("f.rdb"), "{told:?}");
    }

    fn candidates() -> impl Strategy<Value = Candidate> {
        let kinds = prop_oneof![
            Just(BaseKind::Snapshot),
            Just(BaseKind::Copy),
            Just(BaseKind::Backup),
            Just(BaseKind::File),
            Just(BaseKind::Sweep),
            Just(BaseKind::Fork),
        ];
        let offsets = || prop_oneof![0..2000_u64, Just(u64::MAX)];
        (kinds, 0..4_u8, prop_oneof![Just('a'), Just('b'), Just('c')], offsets(), 0..7200_u64).prop_map(
            |(kind, known, digit, offset, age)| {
                let known = match known {
                    0 => Known::New,
                    1 => Known::Unusable("broken".into()),
                    _ => {
                        let (history, age) = (replid(digit), Duration::from_secs(age));
                        let reaches = offset.saturating_add(if known == 2 { 0 } else { 400 });
                        Known::There(Data { history, offset, reaches, age })
                    }
                };
                Candidate { kind, place: String::new(), known }
            },
        )
    }

    proptest! {
        #[test]
        fn whatever_there_is_each_is_chosen_or_passed_over_and_the_best_comes_first(
            candidates in prop::collection::vec(candidates(), 0..8),
            follows in any::<bool>(),
            no_fork in any::<bool>(),
            journal_bytes in 0..2000_u64,
        ) {
            let facts = Facts { former: Some((replid('b'), 801)), ..facts() };
            let journal = follows.then(|| (replid('a'), 600, 1100));
            let world = World { journal, journal_bytes, no_fork, ..world(&facts) };
            let found = order(&candidates, &world);
            let mut seen: Vec<usize> = found.serve.iter().map(|serves| serves.candidate).collect();
            seen.extend(found.passed_over.iter().map(|(number, _)| *number));
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..candidates.len()).collect::<Vec<_>>());
            let keys: Vec<_> = found.serve.iter().map(|at| (candidates[at.candidate].class(), at.behind)).collect();
            prop_assert!(keys.is_sorted(), "{keys:?}");
            for serves in &found.serve {
                let candidate = &candidates[serves.candidate];
                match &candidate.known {
                    Known::Unusable(_) => prop_assert!(false, "it cannot be used"),
                    Known::New => prop_assert!(!(no_fork && candidate.kind == BaseKind::Fork)),
                    Known::There(data) => {
                        prop_assert!(serves.behind <= journal_bytes);
                        // Every byte behind the data is in the journal, or is the server's to send.
                        match journal {
                            Some((history, first, end)) => {
                                prop_assert!(history == data.history && (first - 1..=end).contains(&data.offset));
                            }
                            None => {
                                let from = if serves.with_commands { data.reaches } else { data.offset };
                                prop_assert!(facts.covers(data.history, from, 0).is_ok());
                            }
                        }
                    }
                }
            }
            // The order in which they are named changes nothing but the choice between equals.
            let mut reversed = candidates.clone();
            reversed.reverse();
            let other = order(&reversed, &world);
            let of = |order: &Order, all: &[Candidate]| -> Vec<(u8, u64)> {
                order.serve.iter().map(|at| (all[at.candidate].class(), at.behind)).collect()
            };
            prop_assert_eq!(of(&found, &candidates), of(&other, &reversed));
            let told = found.told(&candidates);
            prop_assert_eq!(told.kind == BaseKind::None, found.serve.is_empty());
        }
    }
}
