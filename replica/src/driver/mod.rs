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

mod server;
pub mod simulated;
mod watches;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustls::ServerConfig;
use server::{Hands, Intercepted, Keeper, Watched};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{Notify, oneshot};
use watches::Outrun;

use self::server::{ServerTask, Work};
use self::watches::Coverage;
use super::control::Guard;
use super::exact::Judgement;
use super::machine::{Action, DeliveryEvent, Event, Job, Reading, Replica, SourceEvent};
use super::report::{PROGRESS_EVERY, Summary};
use crate::attend::guide::Watcher;
use crate::attend::passage::{Gate, Login};
use crate::control::Control;
use crate::machine::Rules;
use crate::options::{Options, SyncOptions};
use crate::preflight::{Primary, Target};
use crate::record::Record;
use remora_base::pace::Backoff;
use remora_base::units::readable;
use remora_conversation::tokens::{Credentials, TokenFiles};
use remora_delivery as delivery;
use remora_delivery::link::candidates::{Candidates, LinkLogin, Locality, Newcomer};
use remora_delivery::payload::{Answer, Conversion, Introduction};
use remora_delivery::{Handle, Notice, Order};
use remora_metrics::{Families, Scrape, Scrapes, register as all};
use remora_process::AbortOnDrop;
use remora_process::exit::{Code, Failure};
use remora_process::progress::{self, Look, Tracker, Unit, known};
use remora_protocol::{Basis, Expected, Length, MAX_NAME_BYTES, Message, Offer, Phase, Progress as ProgressMessage};
use remora_reader::addresses::Loss;
use remora_reader::data_set::{DataSet, Finding};
use remora_reader::feed::Feed;
use remora_reader::parts::Meter;
use remora_reader::relay::reader::ReadFrom;
use remora_reader::relay::{Relay, Said};
use remora_reader::source::{Chosen, Received, Session, Sinks, Source, join_again};
use remora_reader::spool::{SnapshotId, Spool};
use remora_server::{CONVERTED, HostPort, PinSizes, Position, ServerUrl};

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
    /// Whom the hand-off's question goes to.
    asks: Asks,
    /// What the run is about.
    data_set: DataSet,
    /// The snapshot whose slots are in the state folder, and how many of them for certain.
    spooled: Option<(SnapshotId, u64)>,
}

/// Whom the hand-off's question goes to: the source, or the primary itself, if the source cannot tell.
#[derive(Clone, Debug)]
pub struct Asks {
    /// The source of the first conversation captures another server than the primary.
    primary: bool,
    /// The run id of the server that it captures; `None`: not compared, as the primary does not tell its own.
    captured: Option<String>,
}

impl Asks {
    /// `primary`: the source captures another server than the primary; `is_told`: the primary has told its run id.
    pub(crate) fn new(primary: bool, is_told: bool, data_set: &DataSet) -> Asks {
        Asks { primary, captured: data_set.captured().filter(|_| is_told) }
    }

    /// Whether the primary is asked. A source to which the reader has moved may stand beside another server, and so may
    /// one that has moved itself.
    pub fn primary(&self, data_set: &DataSet) -> bool {
        let has_moved = self.captured.is_some() && self.captured != data_set.captured();
        self.primary || (has_moved && !remora_base::mutation::Mutation::FirstPlanBelieved.is_active())
    }
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
        self.display.scrapes.leave(|families| show(&self, families));
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
                    answer(self, scrape);
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
            Some(question) if self.facts.asks.primary(&self.facts.data_set) || self.session.is_none() => {
                self.coverage.ask(question);
            }
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
        let request = join_again(Some(&self.facts.name), &self.facts.kind, &progress, held);
        self.send(Message::Join(self.relay.introduce(request)));
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

// Start: takes what the preflight has found, and starts the tasks of a sync.

/// The start of a sync.
pub(crate) struct Setup {
    pub(crate) options: Options,
    pub(crate) tokens: TokenFiles,
    pub(crate) control: Control,
    pub(crate) record: Record,
    pub(crate) target: Target,
    pub(crate) primary: Primary,
    pub(crate) source: Source,
    pub(crate) data_set: DataSet,
    pub(crate) link_tls: Option<Arc<ServerConfig>>,
    /// The slots that an earlier agent has left in the state folder.
    pub(crate) spool: Option<Spool>,
}

/// The start of a sync of a server whose connections to its primary are intercepted.
pub(crate) struct Attending {
    pub(crate) options: SyncOptions,
    pub(crate) tokens: TokenFiles,
    pub(crate) control: Control,
    /// What the server says of itself.
    pub(crate) server: remora_server::Facts,
    /// The primary that it follows.
    pub(crate) primary: (String, u16),
    /// How it has logged in there.
    pub(crate) login: Login,
    pub(crate) source: Source,
    pub(crate) data_set: DataSet,
    /// How the copy is converted for the server.
    pub(crate) conversion: Option<Conversion>,
    pub(crate) gate: Gate,
    /// The source cannot tell whether the primary would continue the server: it captures another one.
    pub(crate) asks_primary: bool,
    /// What the Sentinels say of the group, if they are asked.
    pub(crate) watcher: Option<Watcher>,
    /// Its connections that have sent `PSYNC`. Their end ends what is lent to other replicas.
    pub(crate) arrivals: UnboundedReceiver<Newcomer>,
    /// Told when the server needs the sync no more, and other replicas still read here.
    pub(crate) lingers: oneshot::Sender<()>,
}

/// What a sync needs however the server comes to it.
struct Ways {
    options: Arc<SyncOptions>,
    tokens: TokenFiles,
    source: Source,
    candidates: Candidates,
    arrivals: Option<UnboundedReceiver<Newcomer>>,
    lingers: Option<oneshot::Sender<()>>,
    facts: Facts,
    run_id: Option<String>,
    coverage: Coverage,
    spool: Option<Spool>,
    conversion: Option<Conversion>,
}

impl Facts {
    fn of(
        control: &Control,
        server: &remora_server::Facts,
        primary: (&str, u16),
        spool: Option<&Spool>,
        data_set: DataSet,
    ) -> Facts {
        let url = control.server().url();
        Facts {
            server: url.to_string(),
            name: default_name(url),
            kind: server.name(),
            primary: format!("{}:{}", primary.0, primary.1),
            finding: None,
            asks: Asks::new(false, false, &data_set),
            data_set,
            spooled: spool.map(|spool| (spool.snapshot(), spool.held_below())),
        }
    }
}

/// What a server is called at the source if the operator gives it no name: its address, which stays the same when the
/// agent connects again. A source puts the agent's host before a port without one.
fn default_name(url: &ServerUrl) -> String {
    match url.host_and_port() {
        Some((host, port)) if !url.is_local_only() && host.len() + ":65535".len() <= MAX_NAME_BYTES => {
            HostPort { host: host.to_owned(), port }.to_string()
        }
        Some((_, port)) => format!(":{port}"),
        None => String::new(),
    }
}

impl Driver {
    /// Takes a port for the link and starts the tasks. Changes nothing on the server yet.
    pub(crate) async fn begin(setup: Setup) -> Result<Driver, Failure> {
        let Setup { options, tokens, control, record, target, primary, source, data_set, link_tls, spool } = setup;
        let sync = Arc::new(options.of_a_sync());
        let options = Arc::new(options);
        let locality = Locality::of(control.present(), target.facts.process_id).or_listen(options.listen);
        let (listener, link) = locality.take_port()?;
        let needs_guard = matches!(target.link_login, LinkLogin::Secret { .. });
        let link_tls = link_tls.filter(|_| target.tls_replication);
        let candidates = Candidates::new(listener, link_tls, target.link_login.access(), locality);
        let link_failure = candidates.failure();
        let facts = Facts::of(&control, &target.facts, (&primary.host, primary.port), spool.as_ref(), data_set);
        let finding = primary.finding.clone();
        let asks = Asks::new(primary.is_asked, primary.facts.is_some(), &facts.data_set);
        let coverage = Coverage::start(primary.server.clone(), finding.clone());
        let facts = Facts { finding, asks, kind: target.name(), ..facts };
        let (run_id, conversion) = (target.facts.run_id.clone(), target.conversion.clone());
        let listening = options.stay.then(|| watches::start(control.server().clone()));
        let (arrivals, lingers) = (None, None);
        let ways = Ways {
            options: sync,
            tokens,
            source,
            candidates,
            arrivals,
            lingers,
            facts,
            run_id,
            coverage,
            spool,
            conversion,
        };
        let keeper = |meter, judgement, hurry| {
            let watched = Watched { meter, judgement, link_failure, hurry };
            Hands::Commands(Box::new(Keeper::new(options, control, record, target, primary, link, watched)))
        };
        let mut driver = Driver::assemble(ways, keeper).await?;
        driver.from_server.guard = needs_guard.then(Guard::start).flatten();
        driver.from_server.listening = listening;
        Ok(driver)
    }

    /// Starts the tasks for a server that is on its way to its primary, and whose connections are intercepted. Changes
    /// nothing on the server, then or later.
    pub(crate) async fn begin_attending(attending: Attending) -> Result<Driver, Failure> {
        let Attending { options, tokens, control, server, primary, source, data_set, conversion, .. } = attending;
        let Attending { gate, login, asks_primary, watcher, arrivals, lingers, .. } = attending;
        let options = Arc::new(options);
        let facts = Facts::of(&control, &server, (&primary.0, primary.1), None, data_set);
        let kind = if conversion.is_some() { facts.kind.clone() + CONVERTED } else { facts.kind.clone() };
        let facts = Facts { asks: Asks::new(asks_primary, true, &facts.data_set), kind, ..facts };
        let (candidates, run_id) = (Candidates::without_a_port(), server.run_id);
        let (arrivals, lingers) = (Some(arrivals), Some(lingers));
        let (coverage, spool) = (Coverage::start_as_the_server(login), None);
        let ways =
            Ways { options, tokens, source, candidates, arrivals, lingers, facts, run_id, coverage, spool, conversion };
        let hands = |_, judgement, _| {
            Hands::Interception(Box::new(Intercepted::new(control, primary, gate, watcher, judgement)))
        };
        Driver::assemble(ways, hands).await
    }

    async fn assemble(
        ways: Ways,
        keeper: impl FnOnce(Arc<Meter>, Judgement, Arc<Notify>) -> Hands,
    ) -> Result<Driver, Failure> {
        let Ways { options, tokens, source, candidates, arrivals, lingers, facts, run_id, coverage, spool, conversion } =
            ways;
        let facts = Facts { name: options.name.clone().unwrap_or(facts.name), ..facts };
        let no_handler = |error| Failure::local(format!("signals can't be caught: {error}"));
        let signals = (
            signal(SignalKind::interrupt()).map_err(no_handler)?,
            signal(SignalKind::terminate()).map_err(no_handler)?,
        );
        let (meter, judgement, hurry) = (Arc::new(Meter::default()), Judgement::default(), Arc::new(Notify::new()));
        let sinks = Sinks::new(options.memory.get());
        let (tell, notices) = mpsc::unbounded_channel();
        let delivery = delivery::spawn(delivery::Setup {
            candidates,
            spool: options.told.state_dir.clone(),
            found: spool,
            conversion,
            backlog_limit: sinks.backlog_limit(),
            meter: meter.clone(),
            notices: tell,
        });
        let delivery = delivery.map_err(|error| Failure::local(format!("no thread for the delivery: {error}")))?;
        let rules = Rules {
            retry_for: options.read.retry_for,
            linger: options.linger,
            stay: options.told.stay,
            intercepted: arrivals.is_some(),
            replace: options.told.replaces,
            server: facts.server.clone(),
            source: options.read.source.to_string(),
            // Its address may change.
            primary: facts
                .finding
                .as_ref()
                .map_or_else(|| facts.primary.clone(), |found| found.sentinels().name().to_owned()),
            run_id,
            sizes: PinSizes::SERVERS,
        };
        let name = options.name.clone().unwrap_or_else(|| facts.server.clone());
        let (read, relay, has_folder) = (options.read.clone(), options.relay.clone(), options.told.state_dir.is_some());
        let relay = Relay::open(read, relay, has_folder, &tokens, name, meter.clone(), &source).await?;
        let way = source.way(&options.read);
        let now = Instant::now();
        Ok(Driver {
            credentials: tokens.credentials(options.source_key),
            machine: Replica::begin(now, rules, Backoff::from_system()),
            facts,
            session: Some(Session::start(source, way, &options.read.source)),
            server: ServerTask::start(keeper(meter.clone(), judgement.clone(), hurry.clone()), hurry),
            relay,
            delivery,
            from_server: FromServer {
                notices,
                is_intercepted: arrivals.is_some(),
                arrivals,
                lingers,
                listening: None,
                guard: None,
            },
            meter,
            judgement,
            sinks,
            connecting: mpsc::unbounded_channel(),
            calling: None,
            tables: None,
            introduction: None,
            answer: None,
            display: Display::new(now),
            coverage,
            signals,
            published: Ok(()),
            options,
        })
    }
}

// Display: how far a sync is, for its operator: one bar or line at a time.
//
// ```text
//   the source waits for a server that saves to a file    "127.0.0.1:6379 saves"         keys
//   the snapshot arrives                                  "transfer to 127.0.0.1:7001"   bytes that have arrived
//   all has arrived, the server loads it                  "load into 127.0.0.1:7001"     bytes that it was given
// ```
//
// What has arrived is what the source shows of this replica, too.

/// When progress is shown next, and where.
struct Display {
    due: Instant,
    shown: Option<(Step, remora_process::progress::Meter)>,
    /// Bytes of the snapshot that have arrived.
    arrived: Tracker,
    expected: Expected,
    outrun: Outrun,
    /// The questions of those who watch.
    scrapes: Scrapes,
}

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Saving,
    Transfer,
    Load,
}

/// How the sync stands.
struct Standing<'a> {
    server: &'a str,
    primary: &'a str,
    /// The generation of the tables that are read; `None`: the agent waits for an offer.
    generation: Option<u64>,
    /// Whether the server was pointed at the link.
    follows_link: bool,
    loaded: bool,
}

impl Display {
    fn new(now: Instant) -> Display {
        Display {
            due: now,
            shown: None,
            arrived: Tracker::default(),
            expected: Expected::default(),
            outrun: Outrun::default(),
            scrapes: Scrapes::default(),
        }
    }

    /// The source has said what it expects of the snapshot.
    fn expect(&mut self, expected: Expected) {
        self.expected = expected;
    }

    /// How far the transfer is.
    fn transfer(&self, now: Instant) -> Look {
        self.arrived.look(now)
    }

    /// Shows how far the sync is.
    fn show(&mut self, now: Instant, counters: &Meter, standing: &Standing<'_>) {
        let arrived = counters.bytes_fetched.get().max(counters.bytes_delivered.get());
        let length = self.length(counters, standing.generation);
        self.arrived.reach(now, arrived, length);
        let saving = self.expected.saving.filter(|_| standing.generation.is_none() && !standing.follows_link);
        let due = match saving {
            _ if standing.loaded => None,
            Some(saving) => Some((Step::Saving, saving.keys, known(saving.keys_total))),
            None if !standing.follows_link => None,
            None if !self.arrived.is_whole() => Some((Step::Transfer, arrived, length)),
            None => Some((Step::Load, counters.bytes_delivered.get(), length))
                .filter(|(_, given, length)| *given < length.bytes),
        };
        // The end of a transfer is shown before what follows it.
        if let Some((Step::Transfer, meter)) = &self.shown {
            meter.expect(length);
            meter.set(arrived);
        }
        let Some((step, position, length)) = due else { return self.leave() };
        if self.shown.as_ref().is_none_or(|(shown, _)| *shown != step) {
            self.leave();
            let (label, unit) = match step {
                Step::Saving => (format!("{} saves", standing.primary), Unit::Count("key")),
                Step::Transfer => (format!("transfer to {}", standing.server), Unit::Bytes),
                Step::Load => (format!("load into {}", standing.server), Unit::Bytes),
            };
            self.shown = Some((step, remora_process::progress::Meter::start_from(label, unit, position, length)));
        }
        if let Some((_, meter)) = &self.shown {
            meter.expect(length);
            meter.set(position);
        }
    }

    /// Nothing is shown any more. The last line of what ended stays.
    fn finish(&mut self) {
        if let Some((_, meter)) = self.shown.take() {
            meter.finish();
        }
    }

    /// Goes on to what is shown next. Of what did not end no line stays.
    fn leave(&mut self) {
        match self.shown.take() {
            Some((Step::Transfer, meter)) if meter.is_whole() => meter.finish(),
            Some((Step::Load, meter)) => meter.finish(),
            _ => {}
        }
    }

    /// The length of the snapshot: the table says it at its end, and the source before.
    fn length(&self, counters: &Meter, generation: Option<u64>) -> Length {
        if counters.slots_total.get() > 0 {
            return known(counters.bytes_known.get());
        }
        let expected = Some(self.expected).filter(|expected| Some(expected.generation) == generation);
        // Meter of an earlier snapshot may be there for a moment.
        expected.map(|expected| expected.length).filter(|length| length.basis != Basis::Unknown).unwrap_or_default()
    }
}

// Metrics: what a sync shows to those who watch it, out of its machine and its meters.

/// From now on the driver answers these questions.
pub(crate) fn watch(driver: &mut Driver, scrapes: Scrapes) {
    driver.display.scrapes = scrapes;
}

/// Answers one.
fn answer(driver: &Driver, mut scrape: Scrape) {
    show(driver, &mut scrape.families);
    let server = &driver.facts.server;
    scrape.answer(match driver.machine.phase() {
        Some(Phase::Stay | Phase::Done) => None,
        Some(phase) => Some(format!("{server} is not in step yet: its sync is in phase {phase}")),
        None => Some(format!("the sync of {server} has failed")),
    });
}

/// Adds all values.
fn show(driver: &Driver, families: &mut Families) {
    let (machine, meter, summary) = (&driver.machine, &driver.meter, driver.summary());
    let source = driver.options.read.source.to_string();
    families.info(&all::SYNC, [&*summary.server, &*summary.primary, &*source, &*summary.transport, &*summary.delivery]);
    let phases =
        [Phase::Waiting, Phase::Transfer, Phase::Load, Phase::CatchUp, Phase::HandOff, Phase::Stay, Phase::Done];
    let names = phases.map(|phase| phase.to_string());
    let present = machine.phase().map(|phase| phase.to_string());
    families.states(&all::SYNC_PHASE, names.each_ref().map(String::as_str), present.as_deref());
    let started = SystemTime::now() - Instant::now().saturating_duration_since(machine.moments().joined);
    families.gauge(&all::SYNC_STARTED, started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    families.gauges(
        &all::SYNC_PHASE_DURATION,
        [
            (["snapshot"], summary.snapshot_seconds),
            (["transfer"], summary.transfer_seconds),
            (["load"], summary.load_seconds),
            (["catch-up"], summary.catch_up_seconds),
            (["hand-off"], summary.hand_off_seconds),
        ],
    );
    families.whether(&all::SYNC_SOURCE_UP, driver.session.is_some());
    let (held, slots) = (meter.slots_held.get(), meter.slots_total.get());
    // The server's module takes bytes that the agent has not fetched.
    let fetched = meter.bytes_fetched.get().max(meter.bytes_delivered.get());
    let (stream_fetched, acknowledged) = (meter.stream_fetched.get(), meter.acknowledged.get());
    for (family, value) in [
        (&all::SYNC_KNOWN, meter.bytes_known.get()),
        (&all::SYNC_FETCHED, fetched),
        (&all::SYNC_DELIVERED, meter.bytes_delivered.get()),
        (&all::SYNC_REFERRED, summary.referred_bytes),
        (&all::SYNC_SLOTS, slots),
        (&all::SYNC_HELD, held),
        (&all::SYNC_OFFSET, summary.snapshot_offset),
        (&all::SYNC_STREAM_FETCHED, stream_fetched),
        (&all::SYNC_STREAM_DELIVERED, meter.stream_delivered.get()),
        (&all::SYNC_ACKNOWLEDGED, acknowledged),
        (&all::SYNC_READERS, driver.relay.readers() as u64),
    ] {
        families.number(family, value);
    }
    let transfer = driver.display.transfer(Instant::now());
    families.gauge(&all::SYNC_PROGRESS, transfer.advance().ratio().unwrap_or(0.0));
    families.gauge(&all::SYNC_RATE, transfer.rate.unwrap_or(0.0));
    if let Some(left) = transfer.left {
        families.gauge(&all::SYNC_LEFT, left.as_secs_f64());
    }
    families.number(&all::SYNC_EXPECTED, transfer.length.bytes);
    if acknowledged > 0 {
        families.number(&all::SYNC_LAG, stream_fetched.saturating_sub(acknowledged));
    }
    families.counter(&all::SYNC_INTERRUPTIONS, machine.interruptions().into());
    families.counter(&all::SYNC_STRANGERS, summary.strangers);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;
    use remora_protocol::Saving;

    #[test]
    fn a_server_is_called_by_its_address_which_only_a_source_knows_of_a_loopback_one() {
        for (url, name) in [
            ("redis://10.0.0.7:7002", "10.0.0.7:7002"),
            ("rediss://[fd00::1]:7002/3", "[fd00::1]:7002"),
            ("redis://127.0.0.1:7002", ":7002"),
            ("redis://localhost", ":6379"),
            ("unix:///run/redis.sock", ""),
        ] {
            assert_eq!(default_name(&url.parse().unwrap()), name, "{url}");
        }
        let long = format!("redis://{}:7002", "h".repeat(MAX_NAME_BYTES));
        assert_eq!(default_name(&long.parse().unwrap()), ":7002");
    }

    fn standing(generation: Option<u64>, follows_link: bool) -> Standing<'static> {
        Standing { server: "b:1", primary: "a:1", generation, follows_link, loaded: false }
    }

    fn step(display: &Display) -> Option<Step> {
        display.shown.as_ref().map(|(step, _)| *step)
    }

    #[test]
    fn a_sync_is_shown_from_the_servers_file_to_the_end_of_the_load() {
        remora_process::progress::configure(true);
        let (start, counters) = (Instant::now(), Meter::default());
        let mut display = Display::new(start);
        let at = |second: u64, display: &mut Display, standing: &Standing<'_>| {
            display.show(start + Duration::from_secs(second), &counters, standing);
            (step(display), display.transfer(start + Duration::from_secs(second)).permille)
        };
        assert_eq!(at(0, &mut display, &standing(None, false)), (None, None));
        let saving = Some(Saving { keys: 5, keys_total: 10 });
        display.expect(Expected { generation: 7, saving, ..Expected::default() });
        assert_eq!(at(1, &mut display, &standing(None, false)).0, Some(Step::Saving));
        let length = Length { bytes: 1000, basis: Basis::Keys };
        display.expect(Expected { generation: 7, length, saving });
        counters.bytes_fetched.set(250);
        assert_eq!(at(2, &mut display, &standing(Some(7), true)), (Some(Step::Transfer), Some(250)));
        // The source expects something of a later snapshot.
        display.expect(Expected { generation: 8, length: Length { bytes: 10, ..length }, saving });
        assert_eq!(at(3, &mut display, &standing(Some(7), true)), (Some(Step::Transfer), None));
        counters.slots_total.set(4);
        counters.bytes_known.set(900);
        assert_eq!(at(4, &mut display, &standing(Some(7), true)), (Some(Step::Transfer), Some(277)));
        counters.bytes_fetched.set(900);
        assert_eq!(at(5, &mut display, &standing(Some(7), true)), (Some(Step::Load), Some(1000)));
        counters.bytes_delivered.set(900);
        assert_eq!(at(6, &mut display, &standing(Some(7), true)), (None, Some(1000)));
    }
}
