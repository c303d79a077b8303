//! Following: reads a source's journal into a [`Recorder`], across losses of the connection, until it is stopped or the
//! source has not got the next byte any more.
//!
//! ```text
//!   connect ── Join from byte N ──▶ Offer ──▶ thread: journal ──▶ recorder ──▶ files
//!      ▲            │ history gone: ended                │ lost
//!      ╰── pause ───┴────────────────────────────────────╯
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_protocol::{Join, Message, Offer, Outcome, Phase, Progress, RefusalCode, Resume};
use remora_redis::ReplId;
use remora_table::JournalReader;
use tokio::sync::{oneshot, watch};
use tokio::time::MissedTickBehavior;

use super::super::metrics::Recorded;
use super::super::moment::Moment;
use super::recorder::{RecordError, Recorder};
use crate::args::ReadArgs;
use crate::backoff::Backoff;
use crate::conversation::Fault;
use crate::conversation::tokens::Credentials;
use crate::exit::Failure;
use crate::replica::data_set::DataSet;
use crate::replica::parts::Part;
use crate::replica::session::{Received, Session, unreachable};
use crate::replica::source::{Sinks, Source, join};
use crate::tasks::blocking;

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
pub(super) struct From {
    pub(super) read: ReadArgs,
    pub(super) credentials: Credentials,
    /// What all folders of one command are about.
    pub(super) data_set: DataSet,
    pub(super) name: String,
    pub(super) sync_every: Duration,
}

/// A recording under way. Dropping it stops it.
pub(super) struct Following {
    stop: watch::Sender<bool>,
    recorded: Arc<Recorded>,
    ended: oneshot::Receiver<Ended>,
}

/// A recording that has ended. Its files are whole.
pub(super) struct Ended {
    pub(super) why: Why,
    /// The last byte of the stream in them.
    pub(super) recorded: u64,
    /// The last second that they name.
    pub(super) noted: Moment,
}

/// Why a recording has ended.
#[derive(Debug)]
pub(super) enum Why {
    Stopped,
    /// The source has not got the next byte any more.
    Gone(String),
    Failed(Failure),
}

impl Following {
    /// Begins to record what comes next, of this history.
    pub(super) fn start(from: From, history: ReplId, recorder: Recorder) -> Following {
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
    pub(super) fn recorded(&self) -> &Arc<Recorded> {
        &self.recorded
    }

    /// Waits until it has ended by itself. Cancel-safe.
    pub(super) async fn ended(&mut self) -> Ended {
        (&mut self.ended).await.unwrap_or_else(|_| Ended {
            why: Why::Failed(Failure::local("recording ended unexpectedly; this is a bug of remora")),
            recorded: 0,
            noted: Moment::default(),
        })
    }

    /// Stops it, and waits until its files are whole.
    pub(super) async fn stop(mut self) -> Ended {
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
    let failed = |error| Why::Failed(unreachable(error).failure);
    let connected = from.data_set.connect(&from.read, &from.credentials, Some(&from.name), "").await;
    let mut source = connected.map_err(|loss| Why::Failed(loss.failure))?;
    let resume = Resume { generation: 0, held_slots: 0, loaded: true, replid: history, next_byte };
    let request = Join { plan_only: false, ..join(Some(&from.name), "", Some(resume)) };
    match tokio::time::timeout(OFFER_LIMIT, source.journal(request)).await {
        Ok(Ok(offer)) => Ok((source, offer)),
        Ok(Err(error)) => match error.fault {
            Fault::Refused { code: RefusalCode::HistoryGone, text } => Err(Why::Gone(text)),
            _ => Err(failed(error)),
        },
        Err(_) => {
            let text = format!("the source {} offered no journal within {} s", from.read.source, OFFER_LIMIT.as_secs());
            Err(Why::Failed(Failure::new(crate::exit::Code::Source, text)))
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
    let mut session = Session::start(source, way.clone());
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
                        break Failure::new(crate::exit::Code::Source, format!("the stream has ended: {text}"));
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
                    ReadError::Table(error) => Why::Failed(Failure::new(crate::exit::Code::Source, error.to_string())),
                });
                return match end {
                    // The table is lost, and the session with it: another attempt.
                    Err(Why::Failed(failure)) if failure.code == crate::exit::Code::Source => (recorder, Ok(failure)),
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
    thread: Option<JoinHandle<()>>,
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
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
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
