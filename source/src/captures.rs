//! Captures, as the source's loop starts them, their threads, and what the loop does about their events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_fabric::RegionId;
use remora_protocol::BaseKind;

use super::answers::Rights;
use super::bases::{Candidate, Data, Known};
use super::capture::{Capture, CaptureError, CaptureEvent, Journal, MethodHistory, ModuleRules, Plan, SnapshotFile};
use super::captured::Captured;
use super::machine::Format;
use super::server_settings::Tuning;
use super::tables::{JOURNAL_REGION, SNAPSHOT_REGION};
use super::{Source, exports, presence};
use crate::options::{Options, SourceFile};
use remora_base::units::Moment;
use remora_base::units::Size;
use remora_process::blocking;
use remora_process::events;
use remora_process::exit::{Code, Failure};
use remora_server::own_changes::why_not_as_its_primary;
use remora_server::{Facts, Server};

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
    presence::warn_of_min_replicas(&mut client).await;
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
