//! Receiving: the conversation with a source about a snapshot without a server, until all of it has arrived, and, if
//! that is wanted, until the primary has been asked whether it would continue from there.
//!
//! ```text
//!   connect ── Join ──▶ Offer ──▶ Arrival ──▶ all slots ── Leave ──▶ done
//!      ▲         ▲        │           │
//!      ╰─ pause ─┴────────┴─ lost ────╯   the same snapshot goes on where it was; another one begins anew
//! ```
//!
//! Where slots are passed on, the source also says from which replica they come, and [`Relay`] connects to it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::MissedTickBehavior;

use crate::options::{PassOn, SnapshotFrom};
use remora_base::pace::Backoff;
use remora_conversation::tokens::{Credentials, TokenFiles};
use remora_fabric::Peer;
use remora_process::exit::{Code, Failure, RETRY_FOR};
use remora_process::progress::{Meter, Unit};
use remora_process::{blocking, events, exit as startup, host};
use remora_protocol::{Basis, Join, Length, Message, Offer, Outcome, Phase, Progress, Resume, WaitCause};
use remora_reader::addresses::{Loss, no_snapshot, wait_limit};
use remora_reader::data_set::DataSet;
use remora_reader::parts::{FeedError, Mapped, Meter as Counters, Part};
use remora_reader::relay::reader::{Lost, ReadFrom, RelayReader};
use remora_reader::relay::{Relay, Said};
use remora_reader::source::{Chosen, Received, Session, Sinks, Source, join};
use remora_reader::spool::{Held, SnapshotId};
use remora_reader::{ReadOptions, RelayOptions};
use remora_table::{Origin, Slot, SnapshotCopy, SnapshotReader};

/// How often progress is shown, and told to the source.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How long the source may take to ask the primary: it waits for an answer of its own for less.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Memory for slots on their way: enough for the most buffers that a reader has.
const BUFFER_MEMORY: u64 = 96 << 20;

/// Receives one snapshot into a target.
pub(crate) struct Receiving {
    pub(crate) read: ReadOptions,
    pub(crate) credentials: Credentials,
    /// What the source's snapshot must be of.
    pub(crate) data_set: DataSet,
    /// The name that the source shows.
    pub(crate) name: String,
    pub(crate) target: Arc<dyn Target>,
    /// Whether the primary is asked at the end if it would continue from the snapshot.
    pub(crate) asks: bool,
    /// How slots pass between this command and replicas; `None`: they come from the source alone.
    pub(crate) passing: Option<Passing>,
    /// Told when a snapshot has begun to arrive.
    pub(crate) begun: watch::Sender<bool>,
    /// True when it is to stop.
    pub(crate) stopped: watch::Receiver<bool>,
}

/// How slots pass between this command and replicas.
pub(crate) struct Passing {
    pub(crate) tokens: TokenFiles,
    pub(crate) options: RelayOptions,
    /// For slots that replicas read here.
    pub(crate) memory: u64,
}

/// This command's part in passing slots on.
struct Passes {
    relay: Relay,
    counters: Arc<Counters>,
    memory: u64,
}

/// A snapshot that arrives.
struct Present {
    kept: Arc<dyn Keeper>,
    arrival: Arrival,
    chosen: Chosen,
    retained: bool,
}

/// A snapshot that has arrived.
pub(crate) struct Arrived {
    pub(crate) kept: Arc<dyn Keeper>,
    /// What the source says of itself and its server.
    pub(crate) plan: Offer,
    /// Whether the primary would continue from it at this moment, or why not. `None`: it was not asked.
    pub(crate) covered: Option<Result<(), String>>,
}

/// What a session waits for.
enum News {
    Received(Received),
    Arrival(ArrivalNews),
    /// The replica that slots come from, or are to come from.
    Upstream(Said),
    Stopped,
    /// It is time to look how far the snapshot is.
    Look,
}

/// How a session with the source ends.
enum Ended {
    Whole(Box<Arrived>),
    Stopped,
    Lost(Loss),
}

/// Losses that follow each other without a new byte in between, and a source that has nothing to offer.
struct Patience {
    backoff: Backoff,
    away_since: Option<Instant>,
    reached: u64,
    waiting: Option<Waiting>,
}

/// What the source waits for, and since when it has had nothing to offer.
struct Waiting {
    since: Instant,
    cause: WaitCause,
    text: String,
}

/// Why a snapshot does not arrive.
enum Trouble {
    /// It may pass: the source's tables cannot be read.
    Source(Failure),
    /// It does not: the bytes cannot be kept.
    Disk(Failure),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble::Source(failure)
    }
}

impl Receiving {
    /// Runs until all has arrived. `None`: it was stopped before.
    ///
    /// # Errors
    /// The source cannot be reached for too long or refuses, or the bytes cannot be kept.
    pub(crate) async fn run(mut self) -> Result<Option<Arrived>, Failure> {
        let mut patience = Patience { backoff: Backoff::from_system(), away_since: None, reached: 0, waiting: None };
        let mut waits = startup::Patience::new(self.read.retry_for, RETRY_FOR);
        let (mut source, plan) = loop {
            // A snapshot in the primary's own format: it is for a server of this kind and version.
            let first = tokio::select! {
                first = Source::first(&self.read, &self.credentials, &mut waits, (Some(&self.name), "")) => first?,
                _ = until_set(&mut self.stopped) => return Ok(None),
            };
            let (source, plan) = first;
            let Err(loss) = self.data_set.check(&self.read.source.present(), source.address(), &plan).await else {
                break (source, plan);
            };
            let pause = patience.lost(&self.read, &*self.target, loss)?;
            if is_set_within(&mut self.stopped, pause).await {
                return Ok(None);
            }
        };
        let mut passes = self.pass_on(&source).await?;
        let begun = self.target.present().map_or(0, |kept| kept.reached().bytes);
        let label = format!("snapshot of {}", self.read.source);
        let meter = Meter::start_from(label, Unit::Bytes, begun, Length::default());
        loop {
            match self.session(source, &plan, &meter, &mut patience, passes.as_mut()).await {
                Ended::Whole(arrived) => {
                    let whole = arrived.kept.reached().bytes;
                    meter.set_total(whole);
                    meter.set(whole);
                    meter.finish();
                    return Ok(Some(*arrived));
                }
                Ended::Stopped => return Ok(None),
                Ended::Lost(loss) => match self.connect_again(loss, &mut patience).await? {
                    Some(again) => source = again,
                    None => return Ok(None),
                },
            }
        }
    }

    /// `None`: it was stopped.
    async fn connect_again(&mut self, mut loss: Loss, patience: &mut Patience) -> Result<Option<Source>, Failure> {
        loop {
            let pause = patience.lost(&self.read, &*self.target, loss)?;
            if is_set_within(&mut self.stopped, pause).await {
                return Ok(None);
            }
            match self.data_set.connect(&self.read, &self.credentials, Some(&self.name), "").await {
                Ok(source) => return Ok(Some(source)),
                Err(again) => loss = again,
            }
        }
    }

    /// Opens what slots are passed on by.
    async fn pass_on(&self, source: &Source) -> Result<Option<Passes>, Failure> {
        let Some(Passing { tokens, options, memory }) = &self.passing else { return Ok(None) };
        let counters = Arc::new(Counters::default());
        let (read, options, name) = (self.read.clone(), options.clone(), self.name.clone());
        let relay = Relay::open(read, options, false, tokens, name, counters.clone(), source).await?;
        Ok(Some(Passes { relay, counters, memory: *memory }))
    }

    async fn session(
        &self,
        source: Source,
        plan: &Offer,
        meter: &Meter,
        patience: &mut Patience,
        mut passes: Option<&mut Passes>,
    ) -> Ended {
        let way = source.way(&self.read);
        let mut session = Session::start(source, way, &self.read.source);
        session.send(self.request(&plan.server, passes.as_deref()));
        let (mut present, mut stopped) = (None, self.stopped.clone());
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let news = tokio::select! {
                received = session.received() => News::Received(received),
                news = arrival_news(&mut present) => News::Arrival(news),
                said = upstream_said(passes.as_deref_mut()) => News::Upstream(said),
                _ = stopped.wait_for(|stopped| *stopped) => News::Stopped,
                _ = looks.tick() => News::Look,
            };
            let trouble = match news {
                News::Received(Received::Lost(loss)) => return Ended::Lost(loss),
                News::Received(Received::Message(message)) => {
                    if let Message::Expected(expected) = *message {
                        meter.expect(expected.length);
                        match self.has_room(expected.length) {
                            Ok(()) => continue,
                            Err(failure) => return Ended::Lost(Loss { passes: false, ..Loss::passing(failure) }),
                        }
                    }
                    match self.heard(*message, &session, &mut present, passes.as_deref_mut(), patience).await {
                        Ok(()) => continue,
                        Err(Trouble::Source(failure)) => failure,
                        Err(Trouble::Disk(failure)) => {
                            return Ended::Lost(Loss { passes: false, ..Loss::passing(failure) });
                        }
                    }
                }
                News::Arrival(ArrivalNews::Lost(lost)) => {
                    upstream_lost(lost, &session, passes.as_deref_mut());
                    continue;
                }
                News::Upstream(said) => {
                    let lost = match said {
                        Said::ReadFrom(from) => {
                            read_from(&present, Some(from));
                            continue;
                        }
                        Said::Lost(lost) => lost,
                    };
                    read_from(&present, Some(ReadFrom::Left { session: lost.session }));
                    upstream_lost(lost, &session, passes.as_deref_mut());
                    continue;
                }
                News::Arrival(ArrivalNews::Ended(Ok(()))) => {
                    return self.leave_whole(session, present, plan, passes.as_deref()).await;
                }
                News::Arrival(ArrivalNews::Ended(Err(ArrivalError::Disk(error)))) => {
                    return Ended::Lost(Loss { passes: false, ..Loss::passing(self.target.failure(&error)) });
                }
                News::Arrival(ArrivalNews::Ended(Err(ArrivalError::Feed(error)))) => {
                    present = None;
                    Failure::new(Code::Source, format!("the source {}: {error}", self.read.source))
                }
                News::Stopped => {
                    drop(present);
                    let text = "stopped before the whole snapshot had arrived".to_owned();
                    session.leave(Message::Leave { outcome: Outcome::Stopped, text }).await;
                    return Ended::Stopped;
                }
                News::Look if present.is_none() && patience.has_waited_for(&self.read).is_some() => {
                    let failure = patience.has_waited_for(&self.read).unwrap_or_else(|| Failure::local("no source"));
                    let text = failure.message.clone();
                    session.leave(Message::Leave { outcome: Outcome::Failed, text }).await;
                    return Ended::Lost(Loss { passes: false, ..Loss::passing(failure) });
                }
                News::Look => {
                    self.look(&session, present.as_ref(), meter, patience, passes.as_deref());
                    continue;
                }
            };
            // The session is sound; the tables are not, or cannot be reached.
            match patience.lost(&self.read, &*self.target, Loss::passing(trouble)) {
                Ok(pause) => {
                    if !is_set_within(&mut stopped, pause).await {
                        session.send(self.request(&plan.server, passes.as_deref()));
                    }
                }
                Err(failure) => return Ended::Lost(Loss { passes: false, ..Loss::passing(failure) }),
            }
        }
    }

    /// Whether the rest of a snapshot whose length is known for certain fits.
    ///
    /// # Errors
    /// It does not.
    fn has_room(&self, length: Length) -> Result<(), Failure> {
        if length.basis != Basis::Known {
            return Ok(());
        }
        let arrived = self.target.present().map_or(0, |kept| kept.reached().bytes);
        host::check_space("the rest of the snapshot", self.target.folder(), length.bytes.saturating_sub(arrived))
    }

    /// The source has said something. The error says why its tables cannot be read, or their bytes cannot be kept.
    async fn heard(
        &self,
        message: Message,
        session: &Session,
        present: &mut Option<Present>,
        passes: Option<&mut Passes>,
        patience: &mut Patience,
    ) -> Result<(), Trouble> {
        match message {
            Message::Offer(offer) => {
                *present = None;
                *present = Some(self.begin(session, offer, passes).await?);
                patience.waiting = None;
            }
            Message::ReadFrom { generation, upstream } => {
                let from = passes.and_then(|passes| passes.relay.assigned(generation, upstream));
                read_from(present, from);
            }
            Message::Waiting { cause, text } => {
                tracing::info!(event = events::SNAPSHOT_AWAITED, "waiting for a snapshot: {text}");
                patience.waits(cause, text);
            }
            Message::GenerationGone { generation, text } => {
                *present = None;
                self.lose(generation, &text);
            }
            _ => {}
        }
        Ok(())
    }

    /// Shows how far the snapshot is, here and to the source.
    fn look(
        &self,
        session: &Session,
        present: Option<&Present>,
        meter: &Meter,
        patience: &mut Patience,
        passes: Option<&Passes>,
    ) {
        let Some(present) = present else { return };
        let reached = present.kept.reached().bytes;
        patience.reached(reached);
        meter.set(reached);
        session.report(present.progress(passes), present.retained);
    }

    /// The request for a snapshot, or for the rest of the one that has begun to arrive.
    fn request(&self, server: &str, passes: Option<&Passes>) -> Message {
        let begun = self.target.present().filter(|kept| kept.reached().stage == Stage::Arriving);
        let resume = begun.map(|kept| Resume {
            generation: kept.origin().generation,
            held_slots: kept.reached().slots,
            loaded: false,
            replid: kept.origin().history,
            next_byte: kept.origin().offset + 1,
        });
        let request = join(Some(&self.name), server, resume);
        Message::Join(match passes {
            Some(passes) => passes.relay.introduce(request),
            None => request,
        })
    }

    /// Connects to the tables of an offer. The snapshot that has begun to arrive goes on, or another one begins.
    async fn begin(&self, session: &Session, offer: Offer, passes: Option<&mut Passes>) -> Result<Present, Trouble> {
        let (way, retained) = (session.way().clone(), offer.snapshot.retained);
        self.data_set.check(&self.read.source.present(), way.source(), &offer).await.map_err(|loss| loss.failure)?;
        let mut passes = passes;
        passes.iter_mut().for_each(|passes| passes.relay.offered());
        let wish = passes.as_ref().and_then(|passes| passes.relay.wish(None));
        let memory = passes.as_ref().map_or(BUFFER_MEMORY, |passes| passes.memory.max(BUFFER_MEMORY));
        let connecting = move || {
            let (id, part, chosen) = way.snapshot(&offer, Sinks::new(memory), wish.as_ref())?;
            Ok((id, part, chosen, offer))
        };
        let (id, part, mut chosen, offer) = blocking(connecting).await?;
        let origin = id.origin;
        let same = self.target.present();
        let same = same.filter(|kept| kept.origin() == origin && kept.reached().stage == Stage::Arriving);
        let kept = match same {
            Some(kept) => kept,
            None => self.target.put(id).map_err(|error| Trouble::Disk(self.target.failure(&error)))?,
        };
        tracing::info!(
            event = events::SNAPSHOT_ARRIVES,
            generation = origin.generation,
            replid = %origin.history,
            offset = origin.offset,
            transport = chosen.kind.name(),
            protection = %chosen.protection,
            from = kept.reached().bytes,
            "the snapshot arrives"
        );
        let counters = passes.as_ref().map(|passes| passes.counters.clone()).unwrap_or_default();
        let arrival = Arrival::begin(part, Arc::clone(&kept), counters);
        let arrival = arrival.map_err(|error| Failure::local(format!("no thread for the snapshot: {error}")))?;
        let from = passes.and_then(|passes| passes.relay.attached(&offer, &mut chosen, false));
        if let Some(from) = from {
            arrival.read_from(from);
        }
        self.begun.send_replace(true);
        Ok(Present { kept, arrival, chosen, retained })
    }

    /// The source has withdrawn a snapshot. Another offer follows.
    fn lose(&self, generation: u64, text: &str) {
        let present = self.target.present();
        if let Some(kept) = present.filter(|kept| kept.origin().generation == generation) {
            tracing::warn!("the rest of the snapshot will not come: {text}; another one begins a new file");
            kept.lose();
        }
    }

    async fn leave_whole(
        &self,
        mut session: Session,
        present: Option<Present>,
        plan: &Offer,
        passes: Option<&Passes>,
    ) -> Ended {
        let Some(present) = present else { return Ended::Stopped };
        let reached = present.kept.reached();
        tracing::info!(
            event = events::SNAPSHOT_ARRIVED,
            bytes = reached.bytes,
            slots = reached.slots,
            "the whole snapshot has arrived"
        );
        session.report(Progress { phase: Phase::Load, ..present.progress(passes) }, present.retained);
        let mut arrived = Arrived { kept: Arc::clone(&present.kept), plan: plan.clone(), covered: None };
        if self.asks {
            match tokio::time::timeout(ANSWER_LIMIT, self.ask(&mut session, &mut arrived)).await {
                Ok(None) => {}
                Ok(Some(loss)) => return Ended::Lost(loss),
                Err(_) => {
                    let text = format!("the source did not say within {} s whether it does", ANSWER_LIMIT.as_secs());
                    arrived.covered = Some(Err(text));
                }
            }
        }
        let text = "the whole snapshot has arrived".to_owned();
        session.leave(Message::Leave { outcome: Outcome::HandedOver, text }).await;
        Ended::Whole(Box::new(arrived))
    }

    /// Asks whether the primary would continue from the snapshot now, and how its server stands.
    async fn ask(&self, session: &mut Session, arrived: &mut Arrived) -> Option<Loss> {
        let origin = arrived.kept.origin();
        session.send(Message::HandOffQuery { generation: origin.generation, offset: origin.offset });
        let plan = join(Some(&self.name), &arrived.plan.server, None);
        session.send(Message::Join(Join { plan_only: true, ..plan }));
        let mut has_plan = false;
        while !has_plan || arrived.covered.is_none() {
            match session.received().await {
                Received::Lost(loss) => return Some(loss),
                Received::Message(message) => match *message {
                    Message::HandOffAnswer { covered, text } => {
                        arrived.covered = Some(if covered { Ok(()) } else { Err(text) });
                    }
                    Message::Offer(offer) if offer.snapshot.slots == 0 => {
                        arrived.plan = offer;
                        has_plan = true;
                    }
                    _ => {}
                },
            }
        }
        None
    }
}

async fn until_set(flag: &mut watch::Receiver<bool>) {
    _ = flag.wait_for(|set| *set).await; // its owner has gone otherwise
}

async fn is_set_within(flag: &mut watch::Receiver<bool>, limit: Duration) -> bool {
    tokio::time::timeout(limit, flag.wait_for(|set| *set)).await.is_ok()
}

/// Pending while no snapshot arrives.
async fn arrival_news(present: &mut Option<Present>) -> ArrivalNews {
    match present {
        Some(present) => present.arrival.news().await,
        None => std::future::pending().await,
    }
}

/// Pending while slots come from no replica.
async fn upstream_said(passes: Option<&mut Passes>) -> Said {
    match passes {
        Some(passes) => passes.relay.said().await,
        None => std::future::pending().await,
    }
}

/// Tells the source, which then assigns another replica.
fn upstream_lost(lost: Lost, session: &Session, passes: Option<&mut Passes>) {
    if let Some(message) = passes.and_then(|passes| passes.relay.lost(lost)) {
        session.send(message);
    }
}

fn read_from(present: &Option<Present>, from: Option<ReadFrom>) {
    if let (Some(present), Some(from)) = (present, from) {
        present.arrival.read_from(from);
    }
}

impl Present {
    fn progress(&self, passes: Option<&Passes>) -> Progress {
        let reached = self.kept.reached();
        // A copy holds slots before the file does.
        let held = passes.filter(|_| self.arrival.has_copy()).map_or(0, |passes| passes.counters.slots_held.get());
        let below = passes.map_or(0, |passes| passes.relay.slots_below());
        Progress {
            generation: self.kept.origin().generation,
            phase: Phase::Transfer,
            transport: Some(self.chosen.kind.code()),
            transport_why: self.chosen.why.clone(),
            slots_below: reached.slots.max(below),
            slots_held: reached.slots.max(held),
            bytes: reached.bytes,
            applied_offset: 0,
            relaying: passes.and_then(|passes| passes.relay.relaying()),
            no_fast_keys: String::new(),
        }
    }
}

impl Patience {
    fn reached(&mut self, bytes: u64) {
        if bytes > self.reached {
            self.away_since = None;
            self.backoff.reset();
        }
        self.reached = bytes;
    }

    /// Notes that the source has nothing to offer yet.
    fn waits(&mut self, cause: WaitCause, text: String) {
        let since = self.waiting.take().map_or_else(Instant::now, |waiting| waiting.since);
        self.waiting = Some(Waiting { since, cause, text });
    }

    /// The failure, if the source has had nothing to offer for too long.
    fn has_waited_for(&self, read: &ReadOptions) -> Option<Failure> {
        let Waiting { since, cause, text } = self.waiting.as_ref()?;
        let waited = since.elapsed();
        (waited > wait_limit(*cause, read.retry_for)).then(|| no_snapshot(&read.source, waited, text))
    }

    /// The pause before the next attempt.
    ///
    /// # Errors
    /// Another attempt cannot succeed, or the attempts have taken too long.
    fn lost(&mut self, read: &ReadOptions, target: &dyn Target, loss: Loss) -> Result<Duration, Failure> {
        self.reached(target.present().map_or(0, |kept| kept.reached().bytes));
        if !loss.passes {
            return Err(loss.failure);
        }
        let away = self.away_since.get_or_insert_with(Instant::now).elapsed();
        if away > read.retry_for {
            let text = format!("tried for {} s (--retry-for)", read.retry_for.as_secs());
            return Err(loss.failure.and(&text));
        }
        let pause = self.backoff.next();
        tracing::warn!(event = events::SOURCE_LOST, "{}; trying again in {} ms", loss.failure, pause.as_millis());
        Ok(pause)
    }
}

// Reception: a snapshot that is being received, as the commands hold it.

/// The task that receives a snapshot.
pub(crate) type Running = JoinHandle<Result<Option<Arrived>, Failure>>;

/// A snapshot that is being received, and what stops it.
pub(crate) struct Reception {
    pub(crate) running: Running,
    /// Set to stop it.
    pub(crate) stop: watch::Sender<bool>,
    /// True once a snapshot has begun to arrive.
    pub(crate) begun: watch::Receiver<bool>,
}

impl Reception {
    /// Begins to receive. `asks`: whether the primary is asked at the end if it would continue from the snapshot;
    /// `pass_on`: how slots pass between this command and replicas, if they do.
    ///
    /// # Errors
    /// This host has too little memory for slots that others read, or the system refused a handler of signals.
    pub(crate) fn start(
        from: &SnapshotFrom,
        target: Arc<dyn Target>,
        asks: bool,
        pass_on: Option<&PassOn>,
    ) -> Result<Reception, Failure> {
        pass_on.map_or(Ok(()), |pass_on| host::check_memory("--memory", pass_on.memory))?;
        let rereading = from.tokens.read_again_on_hangup()?;
        let (tokens, credentials) = (from.tokens.clone(), from.credentials());
        let passing =
            pass_on.map(|PassOn { relay, memory }| Passing { tokens, options: relay.clone(), memory: memory.get() });
        let (begin, begun) = watch::channel(false);
        let (stop, stopped) = watch::channel(false);
        let SnapshotFrom { read, data_set, name, .. } = from.clone();
        let receiving = Receiving { read, credentials, data_set, name, target, asks, passing, begun: begin, stopped };
        let running = tokio::spawn(async move {
            let _rereading = rereading;
            receiving.run().await
        });
        Ok(Reception { running, stop, begun })
    }
}

/// What receiving has ended with.
pub(crate) fn outcome(done: Result<Result<Option<Arrived>, Failure>, JoinError>) -> Result<Option<Arrived>, Failure> {
    done.unwrap_or_else(|error| {
        Err(Failure::local(format!("receiving failed: {error}; this is a bug of remora, please report it")))
    })
}

/// Stops what still arrives, and waits until the source knows.
pub(crate) async fn end(receiving: Running, stop: &watch::Sender<bool>) -> Result<(), Failure> {
    stop.send_replace(true);
    outcome(receiving.await).map(|_| ())
}

// Arrival: reads the slots of a source's snapshot into a [`Keeper`], on a thread of its own.

/// How long the thread sleeps at most when nothing has arrived: it adds to the time until a new slot is seen, and to
/// the time that stopping takes.
const PACE: Duration = Duration::from_millis(1);

/// Why slots stopped arriving before the last one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArrivalError {
    /// The source's table cannot be read any more.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// The bytes cannot be kept.
    #[error("{0}")]
    Disk(io::Error),
}

impl From<remora_table::Error> for ArrivalError {
    fn from(error: remora_table::Error) -> ArrivalError {
        ArrivalError::Feed(error.into())
    }
}

/// What the thread reports.
pub(crate) enum ArrivalNews {
    /// The replica that slots came from cannot be read any more.
    Lost(Lost),
    /// The last slot has arrived, or none arrives any more.
    Ended(Result<(), ArrivalError>),
}

/// Slots that arrive. Dropping it stops the thread, within a slot's time.
pub(crate) struct Arrival {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
    orders: Sender<ReadFrom>,
    news: UnboundedReceiver<ArrivalNews>,
    has_copy: bool,
}

impl Arrival {
    /// Begins to read, behind what has arrived already. The meter shows how far a copy is.
    pub(crate) fn begin(part: Part, kept: Arc<dyn Keeper>, meter: Arc<Counters>) -> io::Result<Arrival> {
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, news) = unbounded_channel();
        let (orders, ordered) = channel();
        let (stopped, has_copy) = (Arc::clone(&stop), part.copy.is_some());
        let thread = std::thread::Builder::new().name("snapshot".into()).spawn(move || {
            let exchange = Exchange { orders: ordered, tell, meter };
            let result =
                if has_copy { relay(part, &*kept, &stopped, &exchange) } else { arrive(part, &*kept, &stopped) };
            _ = exchange.tell.send(ArrivalNews::Ended(result)); // the owner may have gone
        })?;
        Ok(Arrival { stop, thread: Some(thread), orders, news, has_copy })
    }

    /// Reads from there from now on, if slots go into a copy.
    pub(crate) fn read_from(&self, from: ReadFrom) {
        _ = self.orders.send(from); // a thread that has ended reads nothing more
    }

    /// Whether slots go into a copy that replicas can read.
    pub(crate) fn has_copy(&self) -> bool {
        self.has_copy
    }

    /// The next report. Cancel-safe.
    pub(crate) async fn news(&mut self) -> ArrivalNews {
        match self.news.recv().await {
            Some(news) => news,
            None => {
                let error =
                    io::Error::other("the thread ended unexpectedly; this is a bug of remora, please report it");
                ArrivalNews::Ended(Err(ArrivalError::Disk(error)))
            }
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join(); // what it had to say was said by its result
        }
    }
}

/// What the thread hears and says about other replicas.
struct Exchange {
    orders: Receiver<ReadFrom>,
    tell: UnboundedSender<ArrivalNews>,
    meter: Arc<Counters>,
}

fn arrive(part: Part, kept: &dyn Keeper, stop: &AtomicBool) -> Result<(), ArrivalError> {
    let first = kept.reached().slots;
    let mut peer = part.peer;
    let view = peer.view();
    let mut mapped = Mapped::new(if part.in_place { None } else { view.clone() });
    let view = view.filter(|_| part.in_place);
    let mut reader = SnapshotReader::new(view, part.sink, part.layout, part.expect, move |number| number < first)?;
    while !stop.load(Ordering::Relaxed) {
        if turn(&mut reader, &mut *peer, kept, &mut mapped)? {
            continue;
        }
        if reader.is_complete() {
            return kept.complete().map_err(ArrivalError::Disk);
        }
        peer.wait(PACE).map_err(remora_table::Error::from)?;
    }
    Ok(())
}

/// Reads into a copy, from the source or from a replica, and from there into the keeper.
fn relay(part: Part, kept: &dyn Keeper, stop: &AtomicBool, exchange: &Exchange) -> Result<(), ArrivalError> {
    let Part { peer, sink, expect, copy: Some(plan), .. } = part else { return Ok(()) };
    let copy = SnapshotCopy::create(sink, plan.own, expect, kept.reached().slots)?;
    let mut reader = RelayReader::new(Instant::now(), copy, peer, plan);
    while !stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        exchange.orders.try_iter().for_each(|from| reader.read_from(now, from));
        let before = reader.progress();
        if let Some(lost) = reader.pump(now)? {
            _ = exchange.tell.send(ArrivalNews::Lost(lost)); // the owner may have gone
        }
        let mut moved = reader.progress() != before;
        while let Some(slot) = reader.next_slot() {
            let held = kept.keep(&slot).map_err(ArrivalError::Disk)?;
            reader.release(slot);
            kept.add(held).map_err(ArrivalError::Disk)?;
            moved = true;
        }
        exchange.meter.slots_below.set(kept.reached().slots);
        reader.show(&exchange.meter);
        if moved {
            continue;
        }
        if reader.is_whole() && kept.reached().slots >= reader.progress().published {
            return kept.complete().map_err(ArrivalError::Disk);
        }
        wait(&mut reader);
    }
    Ok(())
}

/// Sleeps until something has arrived, and at most for [`PACE`].
fn wait(reader: &mut RelayReader) {
    let pace = Timespec { tv_sec: 0, tv_nsec: i64::from(PACE.subsec_nanos()) };
    let mut fds: Vec<PollFd<'_>> = reader.arms().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    _ = poll(&mut fds, Some(&pace)); // an interruption is only an earlier look
}

/// Takes what has arrived. Returns whether there was anything.
fn turn(
    reader: &mut SnapshotReader,
    peer: &mut dyn Peer,
    kept: &dyn Keeper,
    mapped: &mut Mapped,
) -> Result<bool, ArrivalError> {
    reader.pump(peer)?;
    let mut moved = false;
    while let Some(slot) = reader.next_slot() {
        let held = kept.keep(&slot).map_err(ArrivalError::Disk)?;
        // Only now is it known that its memory was not used for another slot meanwhile.
        reader.release(slot)?;
        mapped.copied(held.length.into());
        kept.add(held).map_err(ArrivalError::Disk)?;
        moved = true;
    }
    Ok(moved)
}

// Target: where a snapshot goes as it arrives. One keeps each snapshot as a file that is mounted, another one keeps
// the slots of a file that is put in its place at the end.

/// Where snapshots go, one after the other.
pub(crate) trait Target: Send + Sync {
    /// The one that has come last.
    fn present(&self) -> Option<Arc<dyn Keeper>>;

    /// Another one comes: what has not arrived of the one before will not.
    ///
    /// # Errors
    /// There is no place for it.
    fn put(&self, snapshot: SnapshotId) -> io::Result<Arc<dyn Keeper>>;

    /// The folder into whose file system its bytes go.
    fn folder(&self) -> &Path;

    /// Why bytes cannot be kept, and what to do.
    fn failure(&self, error: &io::Error) -> Failure;
}

/// Where the slots of one snapshot go, in their order.
pub(crate) trait Keeper: Send + Sync {
    /// Which snapshot it is.
    fn origin(&self) -> Origin;

    /// How far it is.
    fn reached(&self) -> Reached;

    /// Writes the bytes of the next slot, which count once they are [`Keeper::add`]ed.
    ///
    /// # Errors
    /// They cannot be written.
    fn keep(&self, slot: &Slot) -> io::Result<Held>;

    /// The slot was right: its memory had not been used for another one when it had been written.
    ///
    /// # Errors
    /// It cannot be recorded.
    fn add(&self, held: Held) -> io::Result<()>;

    /// Everything has arrived.
    ///
    /// # Errors
    /// It cannot be made safe, or is not what it should be.
    fn complete(&self) -> io::Result<()>;

    /// What has not arrived will not come.
    fn lose(&self);
}

/// Whether more will come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    #[default]
    Arriving,
    Whole,
    /// The source has withdrawn it before all had arrived.
    Lost,
}

/// How far a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) bytes: u64,
    pub(crate) slots: u64,
    pub(crate) stage: Stage,
}
