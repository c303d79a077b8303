//! Journal: a snapshot, and the commands since, until it is stopped.
//!
//! ```text
//!   source ══ slots ═════▶ snapshot ─╮ whole                      --base-every: the next folder begins,
//!          ══ journal ═══▶ commands ─┴▶ a folder with a name ──── and ends this one when it has its name: no gap
//!                                        │ the source has lost what comes next
//!                                        ╰▶ the next folder, whose manifest says that there is a gap
//! ```
//!
//! - [`recorder`](crate::recorder): the stream as files of commands. **Start there.**
//! - [`sets`]: a folder, its list of files, and how it gets its name; or an archive of a store.
//! - This file: which folder is written when, and the journal of the source, across lost connections.

pub(crate) mod sets;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use remora_protocol::{Join, Message, Offer, Outcome, Phase, Progress, RefusalCode, Resume};
use remora_redis::ReplId;
use remora_table::JournalReader;
use tokio::sync::{Mutex, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use self::sets::Sizes;
use crate::fetch;
use crate::manifest::{Gap, Kind, Manifest};
use crate::options::{BackupOptions, FetchOptions, JournalOptions, SnapshotFrom};
use crate::recorder::{RecordError, Recorder};
use crate::{Destination, Recorded, Seen};
use remora_base::pace::Backoff;
use remora_base::units::Moment;
use remora_base::units::Size;
use remora_conversation::Fault;
use remora_conversation::tokens::Credentials;
use remora_metrics::Scrapes;
use remora_process::blocking;
use remora_process::exit::{Code, Failure};
use remora_process::progress;
use remora_process::rdb_file::RdbFile;
use remora_process::signals::Signals;
use remora_reader::ReadOptions;
use remora_reader::data_set::DataSet;
use remora_reader::parts::Part;
use remora_reader::source::{Received, Session, Sinks, Source, join, loss, unreachable};

/// The part of --base-every after which another snapshot is asked for again, if there was none.
const AGAIN_PART: u32 = 8;

/// The shortest time until then.
const AGAIN_LEAST: Duration = Duration::from_secs(1);

/// What all folders of one command have in common.
struct Context {
    options: Arc<BackupOptions>,
    limits: JournalOptions,
    target: Arc<Destination>,
    from: From,
    /// Held while a folder gets its name, which is not broken off: what is there then has a whole snapshot.
    naming: Arc<Mutex<()>>,
}

/// A folder that has its name, and to which commands are written.
struct Set {
    manifest: Manifest,
    following: Following,
}

/// A folder that begins. `None`: the source has the snapshot of the present one still.
type Beginning = JoinHandle<Result<Option<Set>, Failure>>;

/// Runs until a signal stops it.
///
/// # Errors
/// The source cannot be reached for too long or refuses, or a file cannot be written.
pub(crate) async fn run(
    options: Arc<BackupOptions>,
    limits: JournalOptions,
    target: Arc<Destination>,
    seen: Seen,
    scrapes: &mut Scrapes,
) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let _rereading = options.from.tokens.read_again_on_hangup()?;
    let SnapshotFrom { read, data_set, name, .. } = options.from.clone();
    let credentials = options.from.credentials();
    let from = From { read, credentials, data_set, name, sync_every: limits.sync_every };
    let context = Arc::new(Context { options, limits, target, from, naming: Arc::default() });
    let mut present = scrapes.meanwhile("what is there is being checked", resume(&context)).await?;
    let mut beginning = if present.is_none() { Some(context.begin(None, None)) } else { None };
    let mut due = context.due(present.as_ref());
    loop {
        seen.begins(beginning.is_some());
        seen.records(present.as_ref().map(|set| set.following.recorded()));
        tokio::select! {
            signal = signals.next() => return context.stopped(signal, present, beginning).await,
            scrape = scrapes.next() => {
                let not_ready = present.is_none().then(|| "the first snapshot is not whole yet".to_owned());
                scrape.answer(not_ready);
            }
            done = done(&mut beginning) => {
                beginning = None;
                match done {
                    Ok(Some(set)) => {
                        due = context.due(Some(&set));
                        seen.has(&set.manifest);
                        if let Some(before) = present.replace(set) {
                            let ended = before.following.stop().await;
                            say_ended(&before.manifest, &ended);
                        }
                        context.keep(present.as_ref()).await?;
                    }
                    Ok(None) => due = context.again(),
                    Err(failure) if failure.code == Code::Interrupted || present.is_none() => {
                        return context.failed(failure, present).await;
                    }
                    Err(failure) => {
                        tracing::warn!("no new beginning: {failure}; the commands go on in the present folder");
                        due = context.again();
                    }
                }
            }
            ended = ended(&mut present) => {
                let Some(before) = present.take() else { continue };
                say_ended(&before.manifest, &ended);
                match ended.why {
                    Why::Failed(failure) => return Err(failure),
                    Why::Stopped => return Err(Failure::local("recording stopped by itself; this is a bug of remora, please report it")),
                    Why::Gone(because) => {
                        let gap = Gap { after: before.manifest.name.clone(), after_offset: ended.recorded, because };
                        tracing::warn!(
                            "the source has no more of the stream behind {}:{}: {}; a new folder begins, and no moment \
                             between {} and its snapshot can be restored",
                            before.manifest.replid, ended.recorded, gap.because, ended.noted
                        );
                        beginning.get_or_insert_with(|| context.begin(None, Some((before.manifest, gap))));
                    }
                }
            }
            () = tokio::time::sleep_until(due.into()), if beginning.is_none() => {
                due = context.again();
                if let Some(set) = &present {
                    beginning = Some(context.begin(Some(set.manifest.clone()), None));
                }
            }
        }
    }
}

/// Pending while no folder begins.
async fn done(beginning: &mut Option<Beginning>) -> Result<Option<Set>, Failure> {
    match beginning {
        Some(task) => {
            let done = task.await;
            done.unwrap_or_else(|error| {
                Err(Failure::local(format!("a task failed: {error}; this is a bug of remora, please report it")))
            })
        }
        None => std::future::pending().await,
    }
}

/// Pending while there is no folder with commands.
async fn ended(present: &mut Option<Set>) -> Ended {
    match present {
        Some(set) => set.following.ended().await,
        None => std::future::pending().await,
    }
}

/// Goes on with the newest folder, if there is one.
async fn resume(context: &Arc<Context>) -> Result<Option<Set>, Failure> {
    let (target, sizes) = (Arc::clone(&context.target), Sizes::of(&context.limits));
    let found = blocking(move || sets::resume(&target, sizes)).await?;
    let Some((manifest, recorder)) = found else { return Ok(None) };
    let address = context.target.address_of(&manifest);
    let history = manifest.replid.parse();
    let history = history.map_err(|error| Failure::refused(format!("{address}: its replid {error}")))?;
    progress::say(&format!("{address}: goes on at {history}:{}", recorder.next_byte()));
    let following = Following::start(context.from.clone(), history, recorder);
    Ok(Some(Set { manifest, following }))
}

fn say_ended(manifest: &Manifest, ended: &Ended) {
    progress::say(&format!("{}: ends at {}:{}, {}", manifest.name, manifest.replid, ended.recorded, ended.noted));
}

impl Context {
    /// Begins a folder. `not`: the present one, whose snapshot is of no use again. `after`: a gap, and what is before
    /// it.
    fn begin(self: &Arc<Self>, not: Option<Manifest>, after: Option<(Manifest, Gap)>) -> Beginning {
        let context = Arc::clone(self);
        tokio::spawn(async move { begin(&context, not, after).await })
    }

    /// When the next folder is due.
    fn due(&self, set: Option<&Set>) -> Instant {
        let every = self.limits.base_every;
        let age = set.map_or(0, |set| Moment::now().get().saturating_sub(set.manifest.taken_seconds.get()));
        let left = every.saturating_sub(Duration::from_secs(age)).max(self.pause());
        // As good as never.
        let left = if every.is_zero() { Duration::from_secs(u32::MAX.into()) } else { left };
        Instant::now() + left
    }

    /// When to try again, if there was no new snapshot.
    fn again(&self) -> Instant {
        Instant::now() + self.pause()
    }

    fn pause(&self) -> Duration {
        (self.limits.base_every / AGAIN_PART).max(AGAIN_LEAST)
    }

    async fn keep(&self, set: Option<&Set>) -> Result<(), Failure> {
        let (Some(keep), Some(set)) = (self.options.keep, set) else { return Ok(()) };
        let (target, manifest) = (Arc::clone(&self.target), set.manifest.clone());
        blocking(move || {
            target.keep(&manifest, keep);
            Ok(())
        })
        .await
    }

    /// Ends what is written, in order.
    async fn stopped(
        &self,
        signal: &str,
        mut present: Option<Set>,
        mut beginning: Option<Beginning>,
    ) -> Result<(), Failure> {
        if present.is_none() {
            // Uploads are broken off. A present set needs the target.
            self.target.stop();
        }
        // A folder that is getting its name gets it. Any other one is given up, and has ended when the lock is let go:
        // else it would get the lock after us.
        let held = self.naming.try_lock();
        if let (Ok(_), Some(task)) = (&held, &beginning) {
            task.abort();
        }
        let named = match beginning.is_some() {
            true => done(&mut beginning).await.ok().flatten(),
            false => None,
        };
        drop(held);
        if let Some(set) = named {
            if let Some(before) = present.replace(set) {
                let ended = before.following.stop().await;
                say_ended(&before.manifest, &ended);
            }
            self.keep(present.as_ref()).await?;
        }
        let Some(set) = present else {
            return Err(Failure::new(Code::Interrupted, format!("stopped by {signal} before the snapshot was whole")));
        };
        let ended = set.following.stop().await;
        say_ended(&set.manifest, &ended);
        match ended.why {
            Why::Failed(failure) => Err(failure),
            _ => Ok(()),
        }
    }

    /// A new folder has failed, or was interrupted as the whole command was.
    async fn failed(&self, failure: Failure, present: Option<Set>) -> Result<(), Failure> {
        match present {
            Some(set) if failure.code == Code::Interrupted => self.stopped("a signal", Some(set), None).await,
            _ => Err(failure),
        }
    }
}

async fn begin(
    context: &Context,
    not: Option<Manifest>,
    after: Option<(Manifest, Gap)>,
) -> Result<Option<Set>, Failure> {
    let began = Instant::now();
    let incoming = context.target.incoming_file();
    let (tell, mut begun) = watch::channel(None);
    let file = FetchOptions::of_a_backup(context.options.from.clone(), incoming.clone());
    let mut unasked = Scrapes::default();
    let told = move |origin| _ = tell.send_replace(Some(origin));
    let mut fetching = Box::pin(fetch::to_file(&file, told, &mut unasked));
    let mut recording: Option<(ReplId, u64, sets::Beginning, Following)> = None;
    let fetched = loop {
        tokio::select! {
            done = &mut fetching => break done?,
            Ok(()) = begun.changed() => {
                let Some(origin) = *begun.borrow_and_update() else { continue };
                let is_same = |not: &Manifest| not.replid == origin.history.to_string() && not.offset == origin.offset;
                if not.as_ref().is_some_and(is_same) {
                    return Ok(None);
                }
                if let Some((.., before)) = recording.take() {
                    before.stop().await;
                }
                recording = Some(record(context, origin.history, origin.offset).await?);
            }
        }
    };
    drop(fetching);
    let rdb = blocking(move || RdbFile::read(&incoming)).await?;
    let is_of = |history: &ReplId, offset: u64| history.to_string() == rdb.replid && offset == rdb.offset;
    let (_, _, set, following) = match recording.take() {
        Some(recording) if is_of(&recording.0, recording.1) => recording,
        other => {
            if let Some((.., before)) = other {
                before.stop().await;
            }
            let history = rdb.replid.parse();
            let history = history.map_err(|error| Failure::refused(format!("the snapshot's replid {error}")))?;
            record(context, history, rdb.offset).await?
        }
    };
    let mut manifest = Manifest::of(Kind::Journal, &rdb, &fetched.server, context.options.from.read.source.to_string());
    // A snapshot that was taken before the last command of the earlier folder leaves no gap.
    manifest.gap = after
        .filter(|(before, gap)| before.replid != manifest.replid || gap.after_offset < manifest.offset)
        .map(|(_, gap)| gap);
    let target = Arc::clone(&context.target);
    let naming = Arc::clone(&context.naming).lock_owned().await;
    // Held until this task has ended: who gets the lock then finds the folder among what has a name.
    let (manifest, _naming) = blocking(move || Ok((set.publish(&target, &rdb, &manifest)?, naming))).await?;
    progress::say(&format!(
        "{}: {} of {} at {}:{}, taken {}, in {:.2} s; the commands since are recorded",
        context.target.address_of(&manifest),
        Size::bytes(manifest.bytes),
        manifest.server,
        manifest.replid,
        manifest.offset,
        manifest.taken,
        began.elapsed().as_secs_f64()
    ));
    Ok(Some(Set { manifest, following }))
}

/// Begins to record what follows a snapshot, without a name.
async fn record(
    context: &Context,
    history: ReplId,
    offset: u64,
) -> Result<(ReplId, u64, sets::Beginning, Following), Failure> {
    let (target, sizes) = (Arc::clone(&context.target), Sizes::of(&context.limits));
    let (set, recorder) = blocking(move || sets::begin(&target, sizes, offset)).await?;
    Ok((history, offset, set, Following::start(context.from.clone(), history, recorder)))
}

// Following: reads a source's journal into a [`Recorder`], across losses of the connection, until it is stopped or the
// source has not got the next byte any more.
//
// ```text
//   connect ── Join from byte N ──▶ Offer ──▶ thread: journal ──▶ recorder ──▶ files
//      ▲            │ history gone: ended                │ lost
//      ╰── pause ───┴────────────────────────────────────╯
// ```

/// How often the source is told how far the commands are.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// How long a thread that has nothing to do sleeps: it grows from the first to the last.
const IDLE: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(32)];

/// Memory for pieces of the journal on their way.
const BUFFER_MEMORY: u64 = 96 << 20;

/// How long an offer may take: the source has the journal, or has not.
const OFFER_LIMIT: Duration = Duration::from_secs(20);

/// What is read, and how.
#[derive(Clone)]
struct From {
    read: ReadOptions,
    credentials: Credentials,
    /// What all folders of one command are about.
    data_set: DataSet,
    name: String,
    sync_every: Duration,
}

/// A recording under way. Dropping it stops it.
struct Following {
    stop: watch::Sender<bool>,
    recorded: Arc<Recorded>,
    ended: oneshot::Receiver<Ended>,
}

/// A recording that has ended. Its files are whole.
struct Ended {
    why: Why,
    /// The last byte of the stream in them.
    recorded: u64,
    /// The last second that they name.
    noted: Moment,
}

/// Why a recording has ended.
#[derive(Debug)]
enum Why {
    Stopped,
    /// The source has not got the next byte any more.
    Gone(String),
    Failed(Failure),
}

impl Following {
    /// Begins to record what comes next, of this history.
    fn start(from: From, history: ReplId, recorder: Recorder) -> Following {
        let (stop, stopped) = watch::channel(false);
        let (tell, ended) = oneshot::channel();
        let recorded = Arc::<Recorded>::default();
        recorded.next_byte.store(recorder.next_byte(), Relaxed);
        recorded.noted.store(recorder.noted().get(), Relaxed);
        let shown = Arc::clone(&recorded);
        tokio::spawn(async move {
            let (mut recorder, why) = follow(from, history, recorder, stopped, &shown).await;
            let (mut recorded, mut noted) = (recorder.recorded(), recorder.noted());
            let finished = blocking(move || {
                let finished = recorder.finish().map_err(|error| unwritable(&recorder, RecordError::Disk(error)));
                finished.map(|()| (recorder.recorded(), recorder.noted()))
            });
            let why = match (finished.await, why) {
                (Ok(last), why) => {
                    (recorded, noted) = last;
                    why
                }
                (Err(_), Why::Failed(failure)) | (Err(failure), _) => Why::Failed(failure),
            };
            _ = tell.send(Ended { why, recorded, noted }); // it may not be wanted
        });
        Following { stop, recorded, ended }
    }

    /// How far it is.
    fn recorded(&self) -> &Arc<Recorded> {
        &self.recorded
    }

    /// Waits until it has ended by itself. Cancel-safe.
    async fn ended(&mut self) -> Ended {
        (&mut self.ended).await.unwrap_or_else(|_| Ended {
            why: Why::Failed(Failure::local("recording ended unexpectedly; this is a bug of remora, please report it")),
            recorded: 0,
            noted: Moment::default(),
        })
    }

    /// Stops it, and waits until its files are whole.
    async fn stop(mut self) -> Ended {
        self.stop.send_replace(true);
        self.ended().await
    }
}

fn unwritable(recorder: &Recorder, error: RecordError) -> Failure {
    let text = |what: &dyn std::fmt::Display| format!("the commands cannot be written to {}: {what}", recorder.name());
    match error {
        RecordError::Disk(error) => match error.downcast::<Failure>() {
            Ok(failure) => Failure::new(failure.code, text(&failure)),
            Err(error) => Failure::local(text(&error)),
        },
        error @ (RecordError::Stream(_) | RecordError::TimeUnknown) => Failure::local(text(&error)),
    }
}

/// Waits until it is true, or its owner has gone.
async fn until_set(flag: &mut watch::Receiver<bool>) {
    _ = flag.wait_for(|set| *set).await;
}

async fn follow(
    from: From,
    history: ReplId,
    mut recorder: Recorder,
    mut stopped: watch::Receiver<bool>,
    recorded: &Arc<Recorded>,
) -> (Recorder, Why) {
    let (mut backoff, mut away) = (Backoff::from_system(), None);
    loop {
        let before = recorder.next_byte();
        let lost = match tokio::select! {
            () = until_set(&mut stopped) => return (recorder, Why::Stopped),
            connected = connect(&from, history, before) => connected,
        } {
            Ok((source, offer)) => {
                recorded.is_reading.store(true, Relaxed);
                let (back, end) = session(&from, source, offer, history, recorder, &mut stopped, recorded).await;
                recorded.is_reading.store(false, Relaxed);
                recorder = back;
                match end {
                    Ok(lost) => lost,
                    Err(why) => return (recorder, why),
                }
            }
            Err(Why::Failed(failure)) => failure,
            Err(why) => return (recorder, why),
        };
        if recorder.next_byte() > before {
            (backoff, away) = (Backoff::from_system(), None);
        }
        let since = away.get_or_insert_with(Instant::now).elapsed();
        if since > from.read.retry_for {
            let text = format!("tried for {} s (--retry-for)", from.read.retry_for.as_secs());
            return (recorder, Why::Failed(lost.and(&text)));
        }
        let pause = backoff.next();
        tracing::warn!("{lost}; trying again in {} ms", pause.as_millis());
        if tokio::time::timeout(pause, until_set(&mut stopped)).await.is_ok() {
            return (recorder, Why::Stopped);
        }
    }
}

/// Connects, and asks for the journal from a byte on. `Failed`: another attempt may succeed.
async fn connect(from: &From, history: ReplId, next_byte: u64) -> Result<(Source, Offer), Why> {
    let connected = from.data_set.connect(&from.read, &from.credentials, Some(&from.name), "").await;
    let mut source = connected.map_err(|loss| Why::Failed(loss.failure))?;
    let resume = Resume { generation: 0, held_slots: 0, loaded: true, replid: history, next_byte };
    let request = Join { plan_only: false, ..join(Some(&from.name), "", Some(resume)) };
    match tokio::time::timeout(OFFER_LIMIT, source.journal(request)).await {
        Ok(Ok(offer)) => {
            from.read.source.offered();
            Ok((source, offer))
        }
        Ok(Err(error)) => match &error.fault {
            Fault::Refused { code: RefusalCode::HistoryGone, text } => {
                let text = text.clone();
                // Another source may have it.
                let lost = from.read.source.lost(loss(error));
                Err(if lost.passes { Why::Failed(lost.failure) } else { Why::Gone(text) })
            }
            _ => Err(Why::Failed(unreachable(error).failure)),
        },
        Err(_) => {
            let text = format!("the source {} offered no journal within {} s", from.read.source, OFFER_LIMIT.as_secs());
            Err(Why::Failed(Failure::new(remora_process::exit::Code::Source, text)))
        }
    }
}

/// Reads one offer's journal. `Ok`: the connection or the table was lost.
async fn session(
    from: &From,
    source: Source,
    offer: Offer,
    history: ReplId,
    recorder: Recorder,
    stopped: &mut watch::Receiver<bool>,
    recorded: &Arc<Recorded>,
) -> (Recorder, Result<Failure, Why>) {
    let generation = offer.generation;
    let way = source.way(&from.read);
    let mut session = Session::start(source, way.clone(), &from.read.source);
    let connected = blocking(move || way.journal(&offer, Sinks::new(BUFFER_MEMORY))).await;
    let part = match connected {
        Ok((found, part, kind)) if found == history => {
            tracing::info!(next_byte = recorder.next_byte(), transport = kind.name(), "the journal is recorded");
            part
        }
        Ok(_) => return (recorder, Err(Why::Gone("the source has another history".to_owned()))),
        Err(failure) => return (recorder, Ok(failure)),
    };
    let mut recording = match Recording::start(part, recorder, from.sync_every, recorded) {
        Ok(recording) => recording,
        Err((recorder, failure)) => return (*recorder, Err(Why::Failed(failure))),
    };
    let mut reports = tokio::time::interval(REPORT_EVERY);
    reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let lost = loop {
        tokio::select! {
            received = session.received() => match received {
                Received::Lost(loss) => break loss.failure,
                Received::Message(message) => match *message {
                    Message::GenerationGone { text, .. } => {
                        // What the journal has until then is read: the next attempt says that it is gone.
                        break Failure::new(remora_process::exit::Code::Source, format!("the stream has ended: {text}"));
                    }
                    _ => continue,
                },
            },
            ended = &mut recording.ended => {
                let (recorder, end) = recording.joined(ended);
                let end = end.map_err(|error| match error {
                    ReadError::Record(error @ RecordError::TimeUnknown) => Why::Gone(error.to_string()),
                    ReadError::Record(error) => Why::Failed(unwritable(&recorder, error)),
                    ReadError::Table(error @ remora_table::Error::Overrun { .. }) => Why::Gone(error.to_string()),
                    ReadError::Table(error) => Why::Failed(Failure::new(remora_process::exit::Code::Source, error.to_string())),
                });
                return match end {
                    // The table is lost, and the session with it: another attempt.
                    Err(Why::Failed(failure)) if failure.code == remora_process::exit::Code::Source => (recorder, Ok(failure)),
                    Err(why) => (recorder, Err(why)),
                    Ok(()) => (recorder, Err(Why::Stopped)),
                };
            }
            () = until_set(stopped) => {
                let recorder = recording.stop().await;
                let text = "the backup has been stopped".to_owned();
                session.leave(Message::Leave { outcome: Outcome::Stopped, text }).await;
                return (recorder, Err(Why::Stopped));
            }
            _ = reports.tick() => {
                let applied_offset = recorded.next_byte.load(Relaxed).saturating_sub(1);
                session.report(Progress {
                    generation,
                    phase: Phase::Stay,
                    transport: None,
                    transport_why: String::new(),
                    slots_below: 0,
                    slots_held: 0,
                    bytes: 0,
                    applied_offset,
                    relaying: None,
                    no_fast_keys: String::new(),
                }, true);
            }
        }
    };
    (recording.stop().await, Ok(lost))
}

/// Why no more of a journal is recorded.
#[derive(Debug)]
enum ReadError {
    Table(remora_table::Error),
    Record(RecordError),
}

impl std::convert::From<remora_table::Error> for ReadError {
    fn from(error: remora_table::Error) -> ReadError {
        ReadError::Table(error)
    }
}

/// The thread that reads a journal.
struct Recording {
    stop: Arc<AtomicBool>,
    ended: oneshot::Receiver<(Recorder, Result<(), ReadError>)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Recording {
    fn start(
        part: Part,
        recorder: Recorder,
        sync_every: Duration,
        recorded: &Arc<Recorded>,
    ) -> Result<Recording, (Box<Recorder>, Failure)> {
        let (tell, ended) = oneshot::channel();
        let stop = Arc::new(AtomicBool::new(false));
        // The recorder is handed over once there is a thread.
        let (give, given) = std::sync::mpsc::sync_channel::<(Part, Recorder)>(1);
        let (stopped, recorded) = (Arc::clone(&stop), Arc::clone(recorded));
        let spawned = std::thread::Builder::new().name("journal".into()).spawn(move || {
            let Ok((part, mut recorder)) = given.recv() else { return };
            let end = read(part, &mut recorder, sync_every, &stopped, &recorded);
            _ = tell.send((recorder, end)); // the owner may have gone
        });
        match spawned {
            Ok(thread) => {
                _ = give.send((part, recorder)); // it waits for it
                Ok(Recording { stop, ended, thread: Some(thread) })
            }
            Err(error) => {
                let failure = Failure::local(format!("no thread for the journal: {error}"));
                Err((Box::new(recorder), failure))
            }
        }
    }

    async fn stop(mut self) -> Recorder {
        self.stop.store(true, Relaxed);
        let ended = (&mut self.ended).await;
        self.joined(ended).0
    }

    /// # Panics
    /// The thread has panicked, with the recorder.
    fn joined(
        &mut self,
        ended: Result<(Recorder, Result<(), ReadError>), oneshot::error::RecvError>,
    ) -> (Recorder, Result<(), ReadError>) {
        if let Some(Err(panic)) = self.thread.take().map(std::thread::JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
        match ended {
            Ok(ended) => ended,
            Err(_) => unreachable!("a thread that has not panicked has sent the recorder"),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

fn read(
    part: Part,
    recorder: &mut Recorder,
    sync_every: Duration,
    stop: &AtomicBool,
    recorded: &Recorded,
) -> Result<(), ReadError> {
    let mut peer = part.peer;
    let view = peer.view();
    let mut reader = JournalReader::new(view, part.sink, part.layout, part.expect, recorder.next_byte())?;
    let (mut synced, mut idle) = (Instant::now(), IDLE[0]);
    let disk = |error| ReadError::Record(RecordError::Disk(error));
    while !stop.load(Relaxed) {
        let pumped = reader.pump(&mut *peer);
        let mut moved = false;
        while let Some(chunk) = reader.next_chunk() {
            recorder.take_now(&chunk.bytes).map_err(ReadError::Record)?;
            moved = true;
        }
        if pumped.is_ok() && reader.is_caught_up() {
            recorder.is_in_step();
        }
        recorded.next_byte.store(recorder.next_byte(), Relaxed);
        recorded.noted.store(recorder.noted().get(), Relaxed);
        if synced.elapsed() >= sync_every {
            recorder.sync().map_err(disk)?;
            synced = Instant::now();
        }
        pumped?;
        idle = if moved { IDLE[0] } else { (idle * 2).min(IDLE[1]) };
        if !moved {
            peer.wait(idle).map_err(remora_table::Error::from)?;
        }
    }
    recorder.sync().map_err(disk)
}
