//! Captures, as the source's loop starts them, their threads, what the loop does about their events, and what it
//! expects of the snapshot that is taken: its length, how far it is, and when it ends.
//!
//! ```text
//!   INFO persistence, once a second ──▶ keys saved of all ──┐
//!   the last snapshot, and the growth of the data set ──────┼──▶ length ──▶ percent and time left: here, and at replicas
//!   the memory of the data set ─────────────────────────────┘
//! ```
//!
//! A server that saves to a file first, and a file, announce the length. Otherwise it is known at the end only. Until
//! then the best estimate counts: the servers report the keys that their child has saved, and what came of them is
//! there. The report comes from the child once a second and for each 1024 keys: of a data set with fewer keys it says
//! nothing, and the memory counts.
//!
//! The question goes over the connection that the source has to the server anyway, one at a time. A server that refuses
//! it, or does not know the fields (before 6.2), is not asked again for this snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_base::units::{Moment, Size};
use remora_fabric::RegionId;
use remora_process::exit::{Code, Failure};
use remora_process::progress::{Look, Tracker, known};
use remora_process::{blocking, events};
use remora_protocol::{BaseKind, Basis, Expected, Length, Message, Saving, WaitCause};
use remora_redis::info::Info;
use remora_server::own_changes::why_not_as_its_primary;
use remora_server::{Facts, Server};

use super::answers::Rights;
use super::capture::{
    Candidate, Capture, CaptureError, CaptureEvent, Data, Journal, Known, Method, MethodHistory, ModuleRules, Plan,
    SnapshotFile,
};
use super::captured::{Captured, Tuning};
use super::machine::{Format, Session, Stage};
use super::options::{Options, SourceFile};
use super::tables::{JOURNAL_REGION, SNAPSHOT_REGION, expected};
use super::{Incoming, Source, captured, exports};

/// How snapshots are taken.
pub(super) struct Methods {
    /// What a module in the server may be asked to do.
    rules: Arc<ModuleRules>,
    history: MethodHistory,
    /// The file that has the snapshot, instead of the server.
    file: Option<Arc<SnapshotFile>>,
    /// What is changed at the server meanwhile.
    pub(super) tuning: Arc<Tuning>,
    /// What the server has permitted.
    pub(super) rights: Arc<Rights>,
}

impl Methods {
    /// Whether the server saves for a snapshot: it does not if a file has it.
    pub(super) fn takes_from_the_server(&self) -> bool {
        self.file.is_none()
    }

    /// The file that has the snapshot, as a base.
    pub(super) fn file(&self) -> Option<Candidate> {
        let file = self.file.as_ref()?;
        let (history, offset) = (file.history(), file.offset());
        let age = Duration::from_secs(Moment::now().get().saturating_sub(file.taken().get()));
        let known = Known::There(Data { history, offset, reaches: offset, age });
        Some(Candidate { kind: BaseKind::File, place: file.place(), known })
    }

    pub(super) fn sweep_failed_lately(&self, now: Instant) -> bool {
        self.history.sweep_failed_lately(now)
    }

    /// What the options say. A file is read, and must be one behind which the server continues. What a source that was
    /// killed has left changed at the server is put back.
    ///
    /// # Errors
    /// The server does not continue behind the file, or the state folder cannot be used.
    pub(super) async fn of(options: &Options, server: &Server, facts: &Facts) -> Result<Methods, Failure> {
        if options.no_fork && options.file.is_none() && options.first.is_none() && options.needs_the_first() {
            let text = "--no-fork goes with --from-file, --base, --standby-of or --module-capture sweep: every other snapshot needs a fork";
            return Err(Failure::new(Code::Usage, text));
        }
        let mut file = None;
        if let Some(SourceFile { path, open }) = &options.file {
            let (path, open) = (path.clone(), *open);
            let found = blocking(move || SnapshotFile::of(&path, &open(&path)?)).await?;
            found.check(facts).map_err(Failure::refused)?;
            file = Some(Arc::new(found));
        }
        let tuning = Arc::new(Tuning::new(&options.tuning));
        tuning.recover(server).await?;
        let (rules, history) = (Arc::new(ModuleRules::new(&options.module)), MethodHistory::default());
        Ok(Methods { rules, history, file, tuning, rights: Arc::default() })
    }
}

/// Finds the server, and asks it what the source needs to know before it begins.
///
/// # Errors
/// It does not answer or is not suitable, or the options contradict each other.
pub(super) async fn first_look(options: &Options) -> Result<(Captured, Facts, Methods), Failure> {
    let captured = Captured::find(&options.target).await?;
    let server = captured.server();
    let mut client = server.connect().await?;
    let facts = Facts::read(&mut client).await?;
    if let Some(why) = why_not_as_its_primary(&mut client).await? {
        return Err(Failure::refused(why));
    }
    captured::warn_of_min_replicas(&mut client).await;
    let methods = Methods::of(options, &server, &facts).await?;
    if methods.takes_from_the_server()
        && let Some(why) = methods.rights.why_refused(&mut client, &facts).await?
    {
        tracing::warn!("no replica can be served until this is changed: {why}");
    }
    Ok((captured, facts, methods))
}

impl Source {
    pub(super) fn start_capture(&mut self, generation: u64, with_stream: bool) -> Result<(), Failure> {
        let own_format = self.machine.status().snapshot.is_some_and(|snapshot| snapshot.format == Format::Own);
        // The replicas that it is for have joined.
        exports::look(self);
        let plan = plan(self, generation, with_stream, own_format);
        if plan.first.is_some() {
            tracing::info!(
                event = events::STANDBY_COPIES,
                generation,
                with_stream,
                "copying the first source's snapshot"
            );
        } else {
            tracing::info!(
                event = events::SNAPSHOT_REQUESTED,
                generation,
                with_stream,
                "requesting a snapshot from the server"
            );
        }
        self.threads.start(plan)
    }

    /// Logs a capture's event, and exports the tables when a snapshot begins. Called before the machine gets the event.
    pub(super) fn capture_says(&mut self, event: &CaptureEvent) -> Result<(), Failure> {
        match event {
            CaptureEvent::Started { generation, replid, offset } => {
                tracing::info!(event = events::SNAPSHOT_STARTED, generation, %replid, offset, "snapshot started");
                let follows = self.threads.follows_stream(*generation);
                self.export(*generation, SNAPSHOT_REGION)?;
                if follows {
                    self.export(*generation, JOURNAL_REGION)?;
                }
                self.links.begin(self.exports.bytes_served());
                self.learn();
            }
            CaptureEvent::Forked { generation } => tracing::debug!(generation, "the server forks"),
            CaptureEvent::Completed { generation, bytes } => {
                let seconds = self.gauge.began().map_or(0.0, |began| began.elapsed().as_secs_f64());
                let rate = Size::bytes((*bytes as f64 / seconds.max(1e-9)) as u64);
                tracing::info!(event = events::SNAPSHOT_COMPLETED, generation, size = %Size::bytes(*bytes), compression = %exports::compression(self), method = %self.gauge.method(), "snapshot completed in {seconds:.3} s ({rate}/s)");
            }
            CaptureEvent::FromBase { generation, place, age } => self.choice.begins(*generation, place, *age),
            CaptureEvent::BaseTried { place, offset } => self.choice.tried.note(place, *offset, Instant::now()),
            CaptureEvent::ModuleFailed => self.methods.history.module_failed(Instant::now()),
            CaptureEvent::SweepFailed => self.methods.history.sweep_failed(Instant::now()),
            CaptureEvent::Failed { generation, error } => {
                self.tables.outgrown |= matches!(error, CaptureError::Outgrown);
                tracing::warn!(event = events::SNAPSHOT_FAILED, generation, %error, "snapshot failed");
                self.learn();
            }
            CaptureEvent::StreamResumed => tracing::info!(event = events::STREAM_RESUMED, "replication stream resumed"),
            CaptureEvent::HistoryChanged { generation, from, to, at } => {
                tracing::warn!(
                    event = events::HISTORY_CHANGED,
                    generation, old = %from, new = %to, offset = at,
                    "the server's replication history changed (a promotion, a failover or a restart): the stream of the old history \
                     ends at this offset; replicas that have loaded are handed over to the primary, the others get a new snapshot"
                );
                self.learn();
            }
            CaptureEvent::StreamLost { text } => {
                tracing::warn!(event = events::STREAM_LOST, %text, "replication stream lost")
            }
        }
        Ok(())
    }

    pub(super) fn export(&self, generation: u64, region: u32) -> Result<(), Failure> {
        let exported = self.exports.export(RegionId { generation, region }, &self.tables.memory(region));
        exported.map_err(|error| Failure::local(format!("cannot export a table over any transport: {error}")))
    }
}

/// What a capture of this generation is given.
pub(super) fn plan(source: &Source, generation: u64, with_stream: bool, own_format: bool) -> Plan {
    let (exports, memory) = (source.exports.clone(), source.tables.memory(SNAPSHOT_REGION));
    let remote = source.tables.remote.as_ref();
    Plan {
        generation,
        server: source.captured.server(),
        captured: source.captured.clone(),
        is_examined: true,
        file: source.methods.file.clone(),
        stored: source.options.stored.clone(),
        tried: source.choice.tried.clone(),
        journal_bytes: source.tables.journal_ring(),
        first: source.standby.as_ref().and_then(|standby| standby.copies.copying().cloned()),
        tuning: source.methods.tuning.clone(),
        reader_version: source.facts.own_format().filter(|_| own_format).map(|version| version.to_string()),
        may_import_slots: source.facts.may_import_slots(),
        snapshot: source.tables.snapshot.clone(),
        retained: source.tables.retained,
        prepare: Arc::new(move || exports.prepare(&memory)),
        journal: with_stream.then(|| source.tables.journal.clone()),
        remote: remote.map(|remote| remote.snapshot_table(RegionId { generation, region: SNAPSHOT_REGION })),
        sealed_journal: remote.and_then(|remote| remote.journal_table(RegionId { generation, region: JOURNAL_REGION })),
        module: source.methods.rules.clone(),
        module_failed_lately: source.methods.history.module_failed_lately(Instant::now()),
        no_fork: source.options.no_fork,
        sweep_failed_lately: source.methods.history.sweep_failed_lately(Instant::now()),
        gauge: source.gauge.clone(),
        events: source.events.clone(),
        stop: Arc::new(AtomicBool::new(false)),
        presence: source.questions.presence.shared(),
        runtime: tokio::runtime::Handle::current(),
    }
}

// The running capture threads. At most one takes a snapshot and one follows the stream, beside threads that were told
// to stop.

/// How long the source waits for its threads when it ends.
const END_LIMIT: Duration = Duration::from_secs(3);

/// The running capture threads, by generation.
#[derive(Default)]
pub(super) struct Threads {
    threads: Vec<CaptureThread>,
}

struct CaptureThread {
    generation: u64,
    follows_stream: bool,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Threads {
    /// Starts a capture. It begins once the threads that were told to stop have ended. Such a thread may still write
    /// for one tick, and a table must never have two writers.
    pub(super) fn start(&mut self, plan: Plan) -> Result<(), Failure> {
        self.spawn(plan, |capture| capture.run())
    }

    /// Starts the thread that goes on with the stream of a former process, behind what the journal has of it.
    pub(super) fn go_on(&mut self, plan: Plan, journal: Journal) -> Result<(), Failure> {
        self.spawn(plan, |capture| capture.go_on(journal))
    }

    fn spawn(&mut self, plan: Plan, body: impl FnOnce(Capture) + Send + 'static) -> Result<(), Failure> {
        let has_ended = |thread: &CaptureThread| thread.stop.load(Ordering::Relaxed) || thread.thread.is_finished();
        let (ended, running): (Vec<_>, Vec<_>) = self.threads.drain(..).partition(has_ended);
        self.threads = running;
        let (generation, follows_stream, stop) = (plan.generation, plan.journal.is_some(), plan.stop.clone());
        let thread = std::thread::Builder::new()
            .name("capture".into())
            .spawn(move || {
                for thread in ended {
                    let _ = thread.thread.join();
                }
                body(Capture::new(plan));
            })
            .map_err(|error| Failure::local(format!("cannot start a thread for the capture: {error}")))?;
        self.threads.push(CaptureThread { generation, follows_stream, stop, thread });
        Ok(())
    }

    /// Whether the capture of that generation follows the stream.
    pub(super) fn follows_stream(&self, generation: u64) -> bool {
        self.threads.iter().any(|thread| thread.generation == generation && thread.follows_stream)
    }

    /// Whether a thread may have a link to the server.
    pub(super) fn hold_links(&self) -> bool {
        self.threads.iter().any(|thread| !thread.stop.load(Ordering::Relaxed) && !thread.thread.is_finished())
    }

    /// Tells the capture of that generation to stop.
    pub(super) fn stop(&self, generation: u64) {
        self.stop_if(|thread| thread.generation == generation);
    }

    /// Tells the thread that follows the stream to stop.
    pub(super) fn stop_the_stream(&self) {
        self.stop_if(|thread| thread.follows_stream);
    }

    /// Stops all threads and waits for them, for at most [`END_LIMIT`].
    pub(super) async fn end(self) {
        self.stop_if(|_| true);
        let joined = tokio::task::spawn_blocking(move || {
            for thread in self.threads {
                let _ = thread.thread.join();
            }
        });
        if tokio::time::timeout(END_LIMIT, joined).await.is_err() {
            tracing::warn!("a capture thread did not end in time");
        }
    }

    fn stop_if(&self, which: impl Fn(&CaptureThread) -> bool) {
        for thread in self.threads.iter().filter(|thread| which(thread)) {
            thread.stop.store(true, Ordering::Relaxed);
        }
    }
}

/// How often the server is asked how far it is, and replicas are told. Its child reports once a second.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Reports of fewer keys say nothing: the child counts its first key at once, and the next ones by 1024.
const FIRST_REPORT: u64 = 2;

/// What the source expects of the current snapshot.
#[derive(Default)]
pub(super) struct Ahead {
    expected: Expected,
    tracker: Tracker,
    estimate: Estimate,
    former: Option<Former>,
    question: Question,
    /// What replicas were told last, and when.
    told: Option<(Instant, Expected)>,
    /// How often they were told that the server saves and sends nothing.
    told_slow: u32,
}

/// Questions to the server about one snapshot.
#[derive(Default)]
struct Question {
    is_open: bool,
    /// No further question is asked about this snapshot.
    is_over: bool,
    next: Option<Instant>,
}

/// The last whole snapshot.
#[derive(Clone, Copy)]
struct Former {
    bytes: u64,
    /// What its data took in memory.
    memory: u64,
}

/// The answer of the server to one question.
pub(crate) struct Answer {
    generation: u64,
    saving: Result<Option<Saving>, String>,
    /// For how long it has been saving.
    running: Option<Duration>,
}

/// What is known of a snapshot beside the server's reports.
#[derive(Clone, Copy)]
struct Seen {
    received: u64,
    announced: Option<u64>,
    /// An upper estimate of the length, from the memory of the data set.
    memory: u64,
    former: Option<Former>,
}

/// The length by the keys that the server has saved.
#[derive(Default)]
struct Estimate {
    by_keys: Option<u64>,
    /// The last report, and the bytes that had been received then.
    last: Option<(Saving, u64)>,
}

impl Estimate {
    /// The server has reported. `is_fresh`: the report is of this moment, and not up to two seconds old.
    fn reported(&mut self, saving: Saving, received: u64, is_fresh: bool) {
        let before = self.last;
        if before.is_some_and(|(before, _)| saving.keys < before.keys) {
            return; // another child
        }
        self.last = Some((saving, received));
        // A report that was not there at the question before is of a moment between the two, or a little before.
        let bytes = match before {
            _ if is_fresh => received,
            Some((before, bytes)) if saving.keys > before.keys => bytes + received.saturating_sub(bytes) / 2,
            _ => return,
        };
        if saving.keys >= FIRST_REPORT && bytes > 0 {
            let whole = u128::from(bytes) * u128::from(saving.keys_total.max(saving.keys)) / u128::from(saving.keys);
            self.by_keys = Some(u64::try_from(whole).unwrap_or(u64::MAX));
        }
    }

    /// The best estimate. One that the bytes have exceeded no longer counts, except that of the keys, which grows with
    /// them.
    fn length(&self, seen: Seen) -> Length {
        if let Some(bytes) = seen.announced {
            return known(bytes);
        }
        if let Some(bytes) = self.by_keys {
            return Length { bytes: bytes.max(seen.received), basis: Basis::Keys };
        }
        let grown = |former: Former| {
            let bytes = u128::from(former.bytes) * u128::from(seen.memory) / u128::from(former.memory.max(1));
            Length { bytes: u64::try_from(bytes).unwrap_or(u64::MAX), basis: Basis::Former }
        };
        let memory = Length { bytes: seen.memory, basis: Basis::Memory };
        let estimates = seen.former.map(grown).into_iter().chain([memory]);
        estimates.into_iter().find(|length| length.bytes > seen.received).unwrap_or_default()
    }
}

impl Ahead {
    pub(super) fn expected(&self) -> Expected {
        self.expected
    }

    pub(super) fn look(&self, now: Instant) -> Look {
        self.tracker.look(now)
    }

    /// Begins anew if the current snapshot is another one. `None`: the source has no snapshot.
    fn is_of(&mut self, generation: Option<u64>) {
        let generation = generation.unwrap_or(0);
        if self.expected.generation != generation {
            let expected = Expected { generation, ..Expected::default() };
            *self = Ahead { expected, former: self.former, ..Ahead::default() };
        }
    }

    /// Whether the server is to be asked now.
    fn asks(&mut self, now: Instant) -> bool {
        let question = &mut self.question;
        let is_due = !question.is_open && !question.is_over && question.next.is_none_or(|next| next <= now);
        if is_due {
            (question.is_open, question.next) = (true, Some(now + ASK_EVERY));
        }
        is_due
    }

    /// What replicas are to be told now: what is new, once a second, and the end at once.
    fn news(&mut self, now: Instant) -> Option<Expected> {
        let (at, before) =
            self.told.unwrap_or((now, Expected { generation: self.expected.generation, ..Expected::default() }));
        let is_early = self.told.is_some() && now < at + ASK_EVERY && self.expected.length.basis != Basis::Known;
        if self.expected == before || is_early {
            return None;
        }
        self.told = Some((now, self.expected));
        Some(self.expected)
    }
}

/// Looks how far the snapshot is. Asks the server, and tells the replicas, when that is due.
pub(super) fn look(source: &mut Source) {
    let (now, snapshot) = (Instant::now(), source.machine.status().snapshot);
    source.ahead.is_of(snapshot.map(|snapshot| snapshot.generation));
    let Some(snapshot) = snapshot else { return };
    let memory = expected(&source.facts, source.tables.snapshot.1);
    let ahead = &mut source.ahead;
    match snapshot.stage {
        // The gauge still shows the last one.
        Stage::Asked => {}
        Stage::Open(_) => {
            let (received, announced) = (source.gauge.received(), source.gauge.announced_length());
            ahead.expected.length = ahead.estimate.length(Seen { received, announced, memory, former: ahead.former });
            ahead.tracker.reach(now, received, ahead.expected.length);
        }
        Stage::Sealed { bytes, .. } => {
            if !ahead.tracker.is_whole() {
                ahead.former = Some(Former { bytes, memory });
            }
            (ahead.expected.length, ahead.expected.saving) = (known(bytes), None);
            ahead.tracker.reach(now, bytes, ahead.expected.length);
        }
    }
    // Before the first byte the question is whether the server gets on at all.
    let is_begun = snapshot.has_forked() || matches!(snapshot.stage, Stage::Asked);
    let is_saved = !snapshot.is_sealed() && is_begun && source.methods.takes_from_the_server();
    let generation = snapshot.generation;
    if is_saved && source.ahead.asks(now) {
        ask(source, generation);
    }
    if let Some(news) = source.ahead.news(now) {
        let all = source.machine.status().replicas.iter();
        let concerned = all.filter(|(_, replica)| replica.generation.is_none() || replica.is_reading());
        let sessions: Vec<Session> = concerned.map(|(session, _)| *session).collect();
        sessions.into_iter().for_each(|session| source.send(session, Message::Expected(news)));
    }
}

/// Asks the server how far it is, in the background. Its connection limits the time.
fn ask(source: &Source, generation: u64) {
    let (client, server) = (source.questions.client.clone(), source.captured.server());
    let incoming = source.incoming.clone();
    tokio::spawn(async move {
        let mut client = client.lock().await;
        let asked = match client.as_mut() {
            Some(open) => open.info("persistence").await,
            None => match server.connect().await {
                Ok(fresh) => client.insert(fresh).info("persistence").await,
                Err(error) => Err(error),
            },
        };
        if asked.is_err() {
            *client = None;
        }
        drop(client);
        let running = asked.as_ref().ok().and_then(running);
        let saving = asked.map_err(|error| error.to_string()).and_then(|info| saving(&info));
        let _ = incoming.send(Incoming::Saving(Answer { generation, saving, running })).await;
    });
}

/// The server has answered.
pub(super) fn answered(source: &mut Source, answer: Answer) {
    let ahead = &mut source.ahead;
    if answer.generation != ahead.expected.generation {
        return;
    }
    ahead.question.is_open = false;
    let snapshot = source.machine.status().snapshot;
    let is_waited_for = snapshot.is_some_and(|snapshot| matches!(snapshot.stage, Stage::Asked));
    let has_forked = snapshot.is_some_and(|snapshot| snapshot.has_forked());
    if let Some(running) = answer.running.filter(|_| is_waited_for)
        && slowness(running) > ahead.told_slow
    {
        ahead.told_slow = slowness(running);
        say_slow(source, running, answer.saving.ok().flatten());
        return;
    }
    if !has_forked {
        return; // it saves for another client, or not yet
    }
    match answer.saving {
        Ok(Some(saving)) => {
            // The module takes out of the server's child what it has written: the child saves and counts the rest.
            let walked = source.gauge.walked_keys();
            let keys = saving.keys.saturating_add(walked).min(saving.keys_total);
            let saving = Saving { keys, ..saving };
            ahead.expected.saving = Some(saving);
            // Long strings are few of the keys, and most of the bytes: their number says nothing of the length.
            if source.gauge.method() != Method::Walked {
                ahead.estimate.reported(saving, source.gauge.received(), walked > 0);
            }
        }
        // Its child has ended. The next one is not for this snapshot.
        Ok(None) => ahead.question.is_over = ahead.expected.saving.take().is_some(),
        Err(why) => {
            tracing::debug!(%why, "the server does not say how far its snapshot is");
            (ahead.question.is_over, ahead.expected.saving) = (true, None);
        }
    }
}

/// After this long a server that saves and sends nothing is named, and after each doubling of it.
const SLOW: Duration = Duration::from_secs(10);

/// How often a server that has been saving for this long was to be named.
fn slowness(running: Duration) -> u32 {
    (running.as_secs() / SLOW.as_secs()).checked_ilog2().map_or(0, |doublings| doublings + 1)
}

/// Says that the server has been saving for long and has sent nothing: here, and at the replicas that wait for it.
fn say_slow(source: &mut Source, running: Duration, saving: Option<Saving>) {
    let seconds = running.as_secs();
    let keys = saving
        .map_or_else(String::new, |Saving { keys, keys_total }| format!(" ({keys} of {keys_total} keys are saved)"));
    let text = format!(
        "the primary is preparing a snapshot: its BGSAVE has run for {seconds} s and has sent nothing yet{keys}; if that number \
         does not grow, its child process or its disk hangs"
    );
    tracing::warn!(server = %source.captured.server().url(), "{text}");
    let waiting = source.machine.status().replicas.iter().filter(|(_, replica)| replica.generation.is_none());
    for session in waiting.map(|(session, _)| *session).collect::<Vec<_>>() {
        source.send(session, Message::Waiting { cause: WaitCause::NotYet, text: text.clone() });
    }
}

/// For how long the server has been saving; `None` if it does not.
fn running(info: &Info) -> Option<Duration> {
    let is_saving = info.get("rdb_bgsave_in_progress") == Some("1");
    info.number("rdb_current_bgsave_time_sec").filter(|_| is_saving).map(Duration::from_secs)
}

/// What a server says of a child that saves; `None` if none does.
///
/// # Errors
/// It does not know the fields.
fn saving(info: &Info) -> Result<Option<Saving>, String> {
    let number = |name| info.number::<u64>(name);
    let (Some(keys), Some(keys_total)) = (number("current_save_keys_processed"), number("current_save_keys_total"))
    else {
        return Err("INFO has no current_save_keys_processed".to_owned());
    };
    let is_saving = info.get("rdb_bgsave_in_progress") == Some("1") && keys_total > 0;
    Ok(is_saving.then_some(Saving { keys, keys_total }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SEEN: Seen = Seen { received: 0, announced: None, memory: 1000, former: None };

    fn at(keys: u64) -> Saving {
        Saving { keys, keys_total: 50_000 }
    }

    #[test]
    fn the_length_follows_from_the_keys_and_what_had_arrived_between_two_reports() {
        let mut estimate = Estimate::default();
        for (keys, received) in [(0, 0), (1, 100), (1, 200), (4097, 500), (8193, 1000)] {
            estimate.reported(at(keys), received, false);
        }
        let length = |received| estimate.length(Seen { received, ..SEEN });
        let by_keys = |bytes| Length { bytes, basis: Basis::Keys };
        assert_eq!(length(1100), by_keys(750 * 50_000 / 8193));
        assert_eq!(length(9000), by_keys(9000), "it is never shorter than what is there");
    }

    #[test]
    fn few_keys_are_no_report_and_those_of_another_child_are_ignored() {
        let mut estimate = Estimate::default();
        (1..10).for_each(|second| estimate.reported(Saving { keys: 1, keys_total: 500 }, second * 100, false));
        assert_eq!(estimate.length(SEEN), Length { bytes: 1000, basis: Basis::Memory });
        let mut estimate = Estimate::default();
        for (keys, received) in [(1, 10), (25_001, 510), (1025, 600), (5000, 700)] {
            estimate.reported(at(keys), received, false);
        }
        assert_eq!(estimate.by_keys, Some(260 * 50_000 / 25_001));
    }

    #[test]
    fn a_fresh_report_is_of_what_is_there_now() {
        let mut estimate = Estimate::default();
        estimate.reported(at(25_000), 500, true);
        assert_eq!(estimate.by_keys, Some(1000));
        estimate.reported(Saving { keys: 50_000, keys_total: 10 }, 1200, true);
        assert_eq!(estimate.by_keys, Some(1200), "a total that has shrunk");
        estimate.reported(Saving { keys: 60_000, keys_total: u64::MAX }, u64::MAX, true);
        assert_eq!(estimate.by_keys, Some(u64::MAX));
    }

    #[test]
    fn without_keys_the_last_snapshot_counts_then_the_memory_and_what_was_exceeded_is_unknown() {
        let former = Some(Former { bytes: 400, memory: 500 });
        let length = |received, former| {
            let Length { bytes, basis } = Estimate::default().length(Seen { received, former, ..SEEN });
            (bytes, basis)
        };
        assert_eq!(length(0, former), (800, Basis::Former), "the data set has doubled");
        assert_eq!(length(800, former), (1000, Basis::Memory));
        assert_eq!(length(999, None), (1000, Basis::Memory));
        assert_eq!(length(1000, None), (0, Basis::Unknown));
        assert_eq!(length(0, Some(Former { bytes: 400, memory: 0 })).1, Basis::Former, "no division by zero");
        let announced = Estimate::default().length(Seen { announced: Some(7), former, ..SEEN });
        assert_eq!(announced, known(7));
    }

    #[test]
    fn a_server_that_saves_says_how_far_it_is() {
        let info = |text: &str| saving(&Info::parse(text.as_bytes()));
        let fields = |is_saving, keys, total| {
            format!(
                "# Persistence\r\nrdb_bgsave_in_progress:{is_saving}\r\ncurrent_save_keys_processed:{keys}\r\n\
                 current_save_keys_total:{total}\r\n"
            )
        };
        assert_eq!(info(&fields(1, 8193, 50_000)), Ok(Some(at(8193))));
        assert_eq!(info(&fields(0, 8193, 50_000)), Ok(None), "a rewrite of the append-only file");
        assert_eq!(info(&fields(1, 0, 0)), Ok(None));
        assert!(info("rdb_bgsave_in_progress:1\r\n").is_err(), "a server before 6.2");
    }

    #[test]
    fn a_server_that_saves_for_long_is_named_after_ten_seconds_and_at_each_doubling() {
        let info = |text: &str| running(&Info::parse(text.as_bytes()));
        let seconds = Duration::from_secs(42);
        assert_eq!(info("rdb_bgsave_in_progress:1\r\nrdb_current_bgsave_time_sec:42\r\n"), Some(seconds));
        assert_eq!(info("rdb_bgsave_in_progress:0\r\nrdb_current_bgsave_time_sec:-1\r\n"), None);
        let named = [0, 9, 10, 19, 20, 39, 40, 80].map(|seconds| slowness(Duration::from_secs(seconds)));
        assert_eq!(named, [0, 0, 1, 1, 2, 2, 3, 4]);
    }

    #[test]
    fn replicas_are_told_once_a_second_and_of_the_end_at_once() {
        let (now, mut ahead) = (Instant::now(), Ahead::default());
        ahead.is_of(Some(7));
        assert_eq!(ahead.news(now), None, "nothing is known");
        ahead.expected.length = Length { bytes: 10, basis: Basis::Memory };
        assert_eq!(ahead.news(now).map(|news| news.length.bytes), Some(10));
        ahead.expected.length = Length { bytes: 20, basis: Basis::Keys };
        assert_eq!(ahead.news(now + ASK_EVERY / 2), None);
        assert_eq!(ahead.news(now + ASK_EVERY).map(|news| news.length.bytes), Some(20));
        ahead.expected.length = known(15);
        assert_eq!(ahead.news(now + ASK_EVERY).map(|news| news.length.bytes), Some(15));
        assert_eq!(ahead.news(now + ASK_EVERY * 9), None, "it was told");
        assert!(ahead.asks(now) && !ahead.asks(now + ASK_EVERY), "one at a time");
        ahead.is_of(Some(8));
        assert!(ahead.told.is_none() && ahead.expected.length == Length::default() && ahead.asks(now));
    }
}
