//! Driver: carries out what the [machine](super::machine) decides, and reports to it what happened. It makes no
//! decision itself.
//!
//! ```text
//!   signals ────────────┐
//!   Session (source) ───┤
//!   ServerTask ─────────┼─▶ Driver::next ──▶ Replica::handle ──▶ Driver::perform ──▶ orders, jobs, messages, tasks
//!   delivery thread ────┤       ▲
//!   connecting tasks ───┘       └── at Replica::deadline, and for each report of progress
//! ```
//!
//! [`Driver::perform`] never waits: each long operation is a task that reports an event. So the driver handles signals
//! and reports progress at any moment, also while the server empties itself or takes a full copy.
//!
//! The driver owns every task: dropping it ends them. [`Relay`] has its own decisions, which do not depend on how far
//! the server is, and is called from here directly.

pub(super) mod display;
mod server;
pub mod simulated;
mod start;
mod watches;

use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_protocol::{Message, Offer, Progress as ProgressMessage};
use tokio::signal::unix::Signal;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use self::display::{Display, Standing};
use self::server::{ServerTask, Work};
pub(super) use self::start::{Attending, Setup};
use self::watches::Coverage;
use super::control::Guard;
use super::exact::Judgement;
use super::machine::{Action, DeliveryEvent, Event, Job, Reading, Replica, SourceEvent};
use super::report::{PROGRESS_EVERY, Summary};
use crate::options::SyncOptions;
use remora_base::units::readable;
use remora_conversation::tokens::Credentials;
use remora_delivery::introduction::{Answer, Introduction};
use remora_delivery::link::candidates::Newcomer;
use remora_delivery::{Handle, Notice, Order};
use remora_process::exit::{Code, Failure};
use remora_process::progress;
use remora_process::tasks::AbortOnDrop;
use remora_reader::data_set::DataSet;
use remora_reader::feed::Feed;
use remora_reader::loss::Loss;
use remora_reader::meter::Meter;
use remora_reader::primaries::Finding;
use remora_reader::relay::reader::ReadFrom;
use remora_reader::relay::{Relay, Said};
use remora_reader::source::{Chosen, Received, Session, Sinks, Source, join_again};
use remora_reader::spool::SnapshotId;
use remora_server::Position;

/// How often progress is shown and reported, at least.
const LOOK_EVERY: Duration = PROGRESS_EVERY;

/// Carries out what the machine decides, and reports to it what happened.
pub(super) struct Driver {
    options: Arc<SyncOptions>,
    credentials: Credentials,
    machine: Replica,
    facts: Facts,
    session: Option<Session>,
    server: ServerTask,
    relay: Relay,
    delivery: Handle,
    from_server: FromServer,
    meter: Arc<Meter>,
    judgement: Judgement,
    sinks: Sinks,
    connecting: (UnboundedSender<Connected>, UnboundedReceiver<Connected>),
    /// The task that connects to the source.
    calling: Option<AbortOnDrop>,
    /// Tables that the machine has not yet ordered to be attached.
    tables: Option<(u64, Box<Feed>, Chosen, Box<Offer>)>,
    /// The memory that the delivery wants to give to the module.
    introduction: Option<Introduction>,
    /// What the module answered.
    answer: Option<(u64, Result<Answer, String>)>,
    display: Display,
    /// Asks the primary whether it would continue the server: while the source is away, and where it cannot tell.
    coverage: Coverage,
    signals: (Signal, Signal),
    published: Result<(), Failure>,
}

/// What comes from the server's side, and goes to the agent that attends it.
struct FromServer {
    notices: UnboundedReceiver<Notice>,
    /// Connections of a server that is attended.
    arrivals: Option<UnboundedReceiver<Newcomer>>,
    is_intercepted: bool,
    /// Told when such a server needs the sync no more, and other replicas still read here.
    lingers: Option<oneshot::Sender<()>>,
    /// The task that asks a server that stays for its own word.
    listening: Option<AbortOnDrop>,
    /// The process that puts the server's login back if this one is killed.
    #[allow(dead_code)] // held until the end
    guard: Option<Guard>,
}

/// Findings of the preflight that messages name.
struct Facts {
    /// The server's address.
    server: String,
    /// What it is called at the source.
    name: String,
    /// Kind and version of the server.
    kind: String,
    /// The primary's address.
    primary: String,
    /// Where the primary is at any time, as Sentinels say.
    finding: Option<Finding>,
    /// The source cannot tell whether the primary would continue the server: it captures another one.
    asks_primary: bool,
    /// What the run is about.
    data_set: DataSet,
    /// The snapshot whose slots are in the state folder, and how many of them for certain.
    spooled: Option<(SnapshotId, u64)>,
}

/// The result of a connecting task.
enum Connected {
    Source(Result<Source, Loss>),
    Tables { attempt: u64, offer: Box<Offer>, result: Result<(Box<Feed>, Chosen), Failure> },
}

/// Whether the run goes on.
enum Flow {
    Continue,
    End(Result<(), Failure>, Box<Message>),
}

impl Driver {
    /// How far the sync is.
    pub(super) fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Runs to the end, and leaves the server in the state that the outcome names.
    pub(super) async fn run(mut self) -> Result<(), Failure> {
        loop {
            while let Some(action) = self.machine.poll_action() {
                if let Flow::End(outcome, last) = self.perform(action) {
                    return self.end(outcome, *last).await;
                }
            }
            let event = self.next().await;
            self.machine.handle(Instant::now(), self.reading(), event);
            self.show_progress();
        }
    }

    async fn end(mut self, outcome: Result<(), Failure>, last: Message) -> Result<(), Failure> {
        self.display.scrapes.leave(|families| display::show(&self, families));
        self.display.finish();
        if let Some(session) = self.session.take() {
            session.leave(last).await;
        }
        outcome.and(self.published)
    }

    /// Readings of the delivery and the relay.
    fn reading(&self) -> Reading {
        Reading {
            loaded: self.delivery.progress().loaded,
            bytes_delivered: self.meter.bytes_given.get(),
            slots_held: self.meter.slots_held.get(),
            stream_fetched: self.meter.stream_fetched.get(),
            stream_paused: self.meter.stream_paused.get() > 0,
            stream_delivered: self.meter.stream_delivered.get(),
            readers: self.relay.readers(),
        }
    }

    // ---- events ----

    async fn next(&mut self) -> Event {
        loop {
            let due = self.machine.deadline().map_or(self.display.due, |at| at.min(self.display.due));
            let received = async {
                match &mut self.session {
                    Some(session) => session.received().await,
                    None => std::future::pending().await,
                }
            };
            let arrived = async {
                match &mut self.from_server.arrivals {
                    Some(arrivals) => arrivals.recv().await,
                    None => std::future::pending().await,
                }
            };
            let event = tokio::select! {
                biased;
                _ = self.signals.0.recv() => Some(Event::Stop { signal: "SIGINT" }),
                _ = self.signals.1.recv() => Some(Event::Stop { signal: "SIGTERM" }),
                done = self.server.done() => {
                    self.answer = done.answer.or(self.answer.take());
                    Some(Event::Server(done.report))
                }
                received = received => self.received(received),
                covered = self.coverage.answered() => {
                    let (covered, text) = (covered.is_ok(), covered.err().unwrap_or_default());
                    Some(Event::Source(SourceEvent::HandOffAnswer { covered, text }))
                }
                connected = self.connecting.1.recv() => connected.and_then(|connected| self.connected(connected)),
                notice = self.from_server.notices.recv(), if self.delivery.is_running() => self.notice(notice),
                arrived = arrived => {
                    match arrived {
                        Some(newcomer) => {
                            self.delivery.order(Order::Adopt(Box::new(newcomer)));
                            None
                        }
                        None => {
                            self.from_server.arrivals = None;
                            Some(Event::Stop { signal: "the agent that attends the server" })
                        }
                    }
                }
                said = self.relay.said() => {
                    self.upstream_said(said);
                    None
                }
                scrape = self.display.scrapes.next() => {
                    display::answer(self, scrape);
                    None
                }
                () = tokio::time::sleep_until(due.into()) => Some(Event::Tick),
            };
            if let Some(event) = event {
                return event;
            }
        }
    }

    /// The event that a message of the source stands for.
    fn received(&mut self, received: Received) -> Option<Event> {
        let message = match received {
            Received::Message(message) => *message,
            Received::Lost(loss) => {
                self.session = None;
                return Some(Event::Source(SourceEvent::Lost(loss)));
            }
        };
        let event = match message {
            Message::Waiting { cause, text } => SourceEvent::Waiting { cause, text },
            Message::Offer(offer) => {
                self.relay.offered();
                SourceEvent::Offer(Box::new(offer))
            }
            Message::GenerationGone { generation, text } => SourceEvent::GenerationGone { generation, text },
            Message::Expected(expected) => {
                self.display.expect(expected);
                return None;
            }
            Message::HandOffAnswer { covered, text } => SourceEvent::HandOffAnswer { covered, text },
            Message::ReadFrom { generation, upstream } => {
                let from = self.relay.assigned(generation, upstream);
                self.read_from(from);
                return None;
            }
            other => {
                tracing::debug!(message = other.name(), "not expected here");
                return None;
            }
        };
        Some(Event::Source(event))
    }

    fn connected(&mut self, connected: Connected) -> Option<Event> {
        match connected {
            Connected::Source(Ok(source)) => {
                let way = source.way(&self.options.read);
                self.session = Some(Session::start(source, way, &self.options.read.source));
                Some(Event::Source(SourceEvent::Connected))
            }
            Connected::Source(Err(loss)) => Some(Event::Source(SourceEvent::Unreachable(loss))),
            Connected::Tables { attempt, offer, result: Ok((feed, chosen)) } => {
                let tables = chosen.tables(offer.clone());
                self.tables = Some((attempt, feed, chosen, offer));
                Some(Event::Tables { attempt, connected: Ok(tables) })
            }
            Connected::Tables { attempt, result: Err(failure), .. } => {
                Some(Event::Tables { attempt, connected: Err(failure) })
            }
        }
    }

    /// The event that a notice of the delivery stands for.
    fn notice(&mut self, notice: Option<Notice>) -> Option<Event> {
        let fatal = |text: String| DeliveryEvent::Fatal { failure: Failure::local(text) };
        let event = match notice {
            None => fatal("the delivery ended unexpectedly; this is a bug of remora, please report it".into()),
            Some(Notice::Fatal { text }) => fatal(text),
            Some(Notice::Refused { failure }) => DeliveryEvent::Fatal { failure },
            Some(Notice::Damaged { error }) => {
                let text = format!("{error}; restart remora source, which then takes a new snapshot");
                DeliveryEvent::Fatal { failure: Failure::new(Code::SyncFailed, text) }
            }
            Some(Notice::Asked) => DeliveryEvent::Asked,
            Some(Notice::Introduce(introduction)) => {
                let number = introduction.number;
                self.introduction = Some(introduction);
                DeliveryEvent::Introduce { number }
            }
            Some(Notice::Fetched) => {
                self.relay.leave_upstream();
                DeliveryEvent::Fetched
            }
            Some(Notice::PayloadSent) => DeliveryEvent::PayloadSent,
            Some(Notice::Loaded) => DeliveryEvent::Loaded,
            Some(Notice::LinkLost { text, loading }) => DeliveryEvent::LinkLost { text, loading },
            Some(Notice::FeedLost { error }) => {
                // Whether this or the end of the session is seen first is chance: both name the source.
                let text = format!("the source {}: {error}", self.options.read.source);
                DeliveryEvent::FeedLost { failure: Failure::new(Code::Source, text) }
            }
            Some(Notice::PeerLost(lost)) => {
                self.upstream_lost(lost);
                return None;
            }
            Some(Notice::FeedWanted) => DeliveryEvent::FeedWanted,
        };
        Some(Event::Delivery(event))
    }

    /// The event that a report of the upstream replica stands for.
    fn upstream_said(&mut self, said: Said) {
        match said {
            Said::ReadFrom(from) => self.read_from(Some(from)),
            Said::Lost(lost) => {
                self.read_from(Some(ReadFrom::Left { session: lost.session }));
                self.upstream_lost(lost);
            }
        }
    }

    fn upstream_lost(&mut self, lost: remora_reader::relay::reader::Lost) {
        if let (Some(message), Some(session)) = (self.relay.lost(lost), &self.session) {
            session.send(message);
        }
    }

    fn read_from(&self, from: Option<ReadFrom>) {
        if let Some(from) = from {
            self.delivery.order(Order::ReadFrom(from));
        }
    }

    // ---- actions ----

    fn perform(&mut self, action: Action) -> Flow {
        match action {
            Action::ConnectSource => self.connect_source(),
            Action::Join => self.join(),
            Action::ConnectTables { attempt, offer } => self.connect_tables(attempt, offer),
            Action::Attach { attempt } => self.attach(attempt),
            Action::AskHandOff { generation, offset } => self.ask_hand_off(generation, offset),
            Action::TellProgress => self.tell_progress(),
            Action::UseModule(used) => self.delivery.order(Order::UseModule(used)),
            Action::EndIntroduction { number } => {
                if let Some((_, answer)) = self.answer.take_if(|(answered, _)| *answered == number) {
                    self.delivery.order(Order::Introduced { number, answer });
                }
            }
            Action::GiveUpLoad => self.delivery.order(Order::GiveUp),
            Action::LoadAgain => self.delivery.order(Order::LoadAgain),
            Action::HoldStream => self.delivery.order(Order::Hold),
            Action::Server(job) => self.give(job),
            Action::CancelIntroduction => self.server.cancel(),
            Action::Hurry => self.server.hurry(),
            Action::StopDelivery { done } => self.delivery.stop(done),
            Action::Publish => self.publish(),
            Action::SayLingering { readers } => {
                let plural = if readers == 1 { "replica reads" } else { "replicas read" };
                let limit = readable(self.options.linger);
                progress::say(&format!(
                    "{readers} {plural} slots from here still: serving them for {limit} at most (--linger)"
                ));
                if let Some(lingers) = self.from_server.lingers.take() {
                    let _ = lingers.send(()); // its owner may have gone
                }
            }
            Action::End { outcome, last } => return Flow::End(outcome, last),
        }
        Flow::Continue
    }

    fn send(&self, message: Message) {
        if let Some(session) = &self.session {
            session.send(message);
        }
    }

    /// Asks whether the primary would continue the server: the source, or the primary itself if the source is away or
    /// captures another server.
    fn ask_hand_off(&mut self, generation: u64, offset: u64) {
        let offer = self.machine.tables().map(|tables| &tables.offer);
        let question =
            offer.and_then(|offer| Some(Position { history: offer.replid?, offset, rate: offer.write_rate }));
        match question {
            Some(question) if self.facts.asks_primary || self.session.is_none() => self.coverage.ask(question),
            _ => self.send(Message::HandOffQuery { generation, offset }),
        }
    }

    fn connect_source(&mut self) {
        let (options, credentials, tell) = (self.options.clone(), self.credentials.clone(), self.connecting.0.clone());
        let (data_set, kind, name) = (self.facts.data_set.clone(), self.facts.kind.clone(), self.facts.name.clone());
        let task = tokio::spawn(async move {
            let connected = data_set.connect(&options.read, &credentials, Some(&name), &kind).await;
            let _ = tell.send(Connected::Source(connected));
        });
        self.calling = Some(AbortOnDrop::new(&task));
    }

    /// Asks the source for what is still needed.
    fn join(&self) {
        let mut progress = self.delivery.progress();
        let mut held = progress.next_slot;
        if let (None, Some((snapshot, below))) = (progress.snapshot, self.facts.spooled) {
            progress.snapshot = Some(snapshot);
            held = below;
        } else if self.options.told.state_dir.is_some() {
            held = held.max(self.meter.slots_below.get().min(self.meter.slots_held.get()));
        } else if progress.copy.is_some() {
            held = held.max(self.meter.slots_held.get());
        }
        self.send(join_again(Some(&self.facts.name), &self.facts.kind, &progress, held, self.relay.introduction()));
    }

    fn connect_tables(&self, attempt: u64, offer: Box<Offer>) {
        let Some(session) = &self.session else { return };
        let (way, sinks, tell) = (session.way().clone(), self.sinks, self.connecting.0.clone());
        let progress = self.delivery.progress();
        let is_same = progress.snapshot.is_some_and(|id| id.origin.generation == offer.generation);
        let relay = self.relay.wish(progress.copy.filter(|_| is_same));
        let (data_set, at) = (self.facts.data_set.clone(), self.options.read.source.present());
        // It cannot be aborted, but it ends within the limits of the comparison and of the transports. Nothing is
        // reported to a driver that is gone.
        tokio::spawn(async move {
            // A server that has loaded gets the rest of the history that it has, or nothing.
            if !progress.loaded
                && let Err(loss) = data_set.check(&at, way.source(), &offer).await
            {
                let _ = tell.send(match loss.passes {
                    true => Connected::Tables { attempt, offer, result: Err(loss.failure) },
                    false => Connected::Source(Err(loss)),
                });
                return;
            }
            tokio::task::spawn_blocking(move || {
                let result = way.feed(&offer, sinks, progress.loaded, relay.as_ref());
                let result = result.map(|(feed, chosen)| (Box::new(feed), chosen));
                let _ = tell.send(Connected::Tables { attempt, offer, result });
            });
        });
    }

    fn attach(&mut self, attempt: u64) {
        let Some((_, feed, mut chosen, offer)) = self.tables.take_if(|(connected, ..)| *connected == attempt) else {
            return;
        };
        let loaded = self.delivery.progress().loaded;
        if self.options.told.state_dir.is_some() && self.facts.spooled.is_none_or(|(snapshot, _)| snapshot != feed.id) {
            self.facts.spooled = Some((feed.id, 0));
        }
        self.delivery.order(Order::Attach(feed));
        let from = self.relay.attached(&offer, &mut chosen, loaded);
        self.read_from(from);
    }

    fn give(&mut self, job: Job) {
        let work = match job {
            Job::Introduce { number } => {
                let introduction = self.introduction.take_if(|introduction| introduction.number == number);
                introduction.map_or(Work::Job(job), Work::Introduce)
            }
            job => Work::Job(job),
        };
        self.server.give(work);
    }

    // ---- progress ----

    /// Shows and reports the progress, when it is due.
    fn show_progress(&mut self) {
        let now = Instant::now();
        if now < self.display.due {
            return;
        }
        self.display.due = now + LOOK_EVERY;
        let loaded = self.delivery.progress().loaded;
        let standing = Standing {
            server: &self.facts.server,
            primary: &self.facts.primary,
            generation: self.machine.tables().map(|tables| tables.offer.generation),
            follows_link: self.machine.follows_link(),
            loaded,
        };
        self.display.show(now, &self.meter, &standing);
        if !loaded {
            self.display.outrun.watch(now, &self.meter);
        }
        self.tell_progress();
    }

    fn tell_progress(&self) {
        let (Some(tables), Some(phase)) = (self.machine.tables(), self.machine.phase()) else { return };
        let generation = tables.offer.generation;
        let progress = self.delivery.progress();
        let counts_this = progress.snapshot.is_some_and(|id| id.origin.generation == generation);
        if !counts_this && !progress.loaded {
            // The meter still counts slots of an earlier snapshot: reported for this one, they would be reused unread.
            return;
        }
        let report = ProgressMessage {
            generation,
            phase,
            transport: Some(tables.transport.code()),
            transport_why: tables.why.clone(),
            no_fast_keys: self.meter.no_fast_keys(),
            slots_below: self.relay.slots_below(),
            slots_held: self.meter.slots_held.get(),
            bytes: self.meter.bytes_fetched.get().max(self.meter.bytes_delivered.get()),
            applied_offset: self.meter.acknowledged.get().max(self.machine.hand_off_offset()),
            relaying: self.relay.relaying(),
        };
        if let Some(session) = &self.session {
            session.report(report, tables.offer.snapshot.retained);
        }
    }

    /// Prints the summary, for people and for programs.
    fn publish(&mut self) {
        self.display.finish();
        let summary = self.summary();
        if let Some(path) = &self.options.json {
            let text = serde_json::to_string_pretty(&summary).unwrap_or_default();
            self.published = std::fs::write(path, text).map_err(|error| {
                Failure::local(format!("{} can't be written: {error}; the sync itself is done", path.display()))
            });
        }
        summary.lines().iter().for_each(|line| progress::say(line));
        if self.options.explain {
            summary.exact.lines().iter().for_each(|line| progress::say(line));
        }
    }

    fn summary(&self) -> Summary {
        let origin = self.delivery.progress().snapshot.map(|id| id.origin);
        let snapshot_offset = origin.map_or(0, |origin| origin.offset);
        let moments = self.machine.moments();
        let mut summary = Summary {
            server: self.facts.server.clone(),
            primary: self
                .facts
                .finding
                .as_ref()
                .map_or_else(|| self.facts.primary.clone(), |found| found.last().to_string()),
            replid: origin.map(|origin| origin.history.to_string()).unwrap_or_default(),
            snapshot_offset,
            hand_off_offset: self.machine.hand_off_offset(),
            transport: self.machine.tables().map_or("none", |tables| tables.transport.name()).to_string(),
            delivery: match () {
                () if self.from_server.is_intercepted => "intercept",
                () if self.meter.by_module.get() > 0 => "module",
                () => "link",
            }
            .to_string(),
            referred_bytes: self.meter.referred.get(),
            snapshot_bytes: self.meter.bytes_delivered.get(),
            stream_bytes: self.meter.stream_delivered.get().saturating_sub(snapshot_offset),
            interruptions: self.machine.interruptions(),
            strangers: self.meter.strangers.get(),
            ..Summary::default()
        };
        summary.exact = self.judgement.get().proved(&summary.replid, snapshot_offset, summary.hand_off_offset);
        summary.time(moments, moments.handed_over.unwrap_or_else(Instant::now));
        summary
    }
}
