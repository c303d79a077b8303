//! The source: provides one snapshot of a server, and the replication stream behind it, to any number of replicas.
//!
//! ```text
//!                    ┌────────────────────────── one loop ───────────────────────────┐
//!   replicas ──▶ listener ──▶ Incoming ──▶ Machine::apply ──▶ actions ──▶ perform ──▶ messages, captures, grants
//!                data lanes ──▶ the fabric's exporters: they read the tables without this loop or the server
//!   server ══▶ capture threads ══▶ snapshot table, journal          (gauge: their figures, for the loop)
//! ```
//!
//! [`run`] is all that a program needs: it takes [`Options`] and serves until a signal. It connects to the server as
//! one more replica, keeps the snapshot and the stream in memory that others read, and tells each replica what to read
//! from where. It knows no command line.
//!
//! - [`machine`] decides, without I/O. Start there. [`topology`] decides which replica reads the snapshot from which
//!   other one.
//! - `capture` speaks PSYNC with the server and fills the tables; its `bases` put what a snapshot can be made of in the
//!   order in which it is tried. `captures` starts captures, handles their events, and estimates how long the snapshot
//!   will be.
//! - `captured` is the server that is captured, which Sentinels may name: its settings that are changed for the fork,
//!   the limit of what it holds back for a source, and what it does because a source is attached.
//! - `gauge` holds the figures that the capture threads show while they run, and how fast the primary writes.
//! - `tables` is the memory, and divides it between what this host and what others read ([`Shares`]). `exports` are the
//!   transports that export it, and scratch memory for `remora probe`. `compression` decides how slots are compressed
//!   for other hosts. The memory is touched before the first snapshot, while the port is open.
//! - `answers` describes the primary, whether it continues a history, and what a replica would get, of which base.
//!   It also answers `remora status`, Prometheus and probes, and bounds how often replicas make the source ask the
//!   primary.
//! - `standby` copies the snapshots of another source (`--standby-of`), and decides which, and when.
//! - `service_manager` has the service manager keep a snapshot for the next process, and takes a port that it keeps
//!   open.
//! - This file connects them and performs the machine's actions.
#![forbid(unsafe_code)]

mod answers;
mod capture;
mod captured;
mod captures;
mod compression;
mod exports;
mod gauge;
pub mod machine;
mod options;
mod service_manager;
mod standby;
mod tables;
pub mod topology;

/// What the simulation of whole syncs plays without a server: the machine's facts, and a capture's end of a connection.
pub mod parts {
    pub use crate::answers::{known_history, plan_of};
    pub use crate::capture::psync_link::{Pieces, Received, Socket, is_same_history};
    pub use crate::capture::{CaptureError, CaptureEvent, Intake, Written};
    pub use crate::gauge::{Arrivals, Reading};
    pub use crate::standby::{Copies, End, Here, continues, reaches};
}

pub use self::options::{
    Beside, Compress, DEFAULT_FORK_AFTER, LEAST_AGE, LEAST_MEMORY, LaneOptions, MAX_REPLICAS, ModuleCapture,
    ModuleOptions, OpenFile, OpenServer, Options, SLOT_SIZES, SourceFile, TableOptions, Target, TuningOptions,
    default_slot_size,
};
pub use self::tables::{Shares, Wanted, expected, least_memory};

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::memory::local;
use remora_fabric::{RegionId, TransportKind};
use remora_protocol::{MAX_STANDBYS, Message, Offer, Phase, RefusalCode, Upstream, WaitCause};
use remora_table::Origin;
use tokio::signal::unix::Signal;
use tokio::sync::mpsc;

use self::answers::Choice;
use self::answers::{Answered, Questions};
use self::answers::{as_others_reach_it, format_for, name_of};
use self::capture::CaptureEvent;
use self::captured::Captured;
use self::captured::{OutputBuffer, OutputWatch};
use self::captures::Ahead;
use self::captures::{Methods, Threads};
use self::exports::{Exports, Links, Peer, ProbeRegion, Readable, tcp_exporter};
use self::gauge::{Gauge, Rate, Reading};
use self::machine::{Action, Event, Machine, Report, Resume, Rules, Session};
use self::service_manager::{Keeper, Port};
use self::standby::Standby;
use self::tables::Preparation;
use self::tables::{JOURNAL_REGION, SNAPSHOT_REGION, Tables, first_generation};
use self::topology::{Joining, Topology, Witness};
use remora_base::pace::Backoff;
use remora_conversation::{Connection, Endpoint, Fault, listener};
use remora_metrics::{Scrape, Site};
use remora_process::AbortOnDrop;
use remora_process::exit::Failure;
use remora_process::exit::Patience;
use remora_process::rdb_file::Found;
use remora_process::service::Service;
use remora_process::signals::{self, Signals};
use remora_process::{events, host};
use remora_server::Facts;

/// Runs a source until SIGINT or SIGTERM stops it.
///
/// # Errors
/// The source cannot start (the token file, the server, the memory or the address to listen on), or it can no longer
/// take snapshots.
pub async fn run(options: Options) -> Result<(), Failure> {
    // The handlers come first: without them a signal would kill the process before it can clean up.
    let (mut signals, hangups) = (Signals::catch()?, signals::hangups()?);
    let (source, mailboxes, listener) = tokio::select! {
        started = start(options) => started?,
        name = signals.next() => {
            tracing::info!("stopped by {name} before the source was ready");
            return Ok(());
        }
    };
    source.run(mailboxes, listener, signals, hangups).await
}

/// What the source's loop receives.
struct Mailboxes {
    incoming: mpsc::Receiver<Incoming>,
    captured: mpsc::UnboundedReceiver<CaptureEvent>,
    /// The site that asks for metrics.
    _metrics: Option<Site>,
    /// The task that looks after a group of servers.
    _watching: Option<AbortOnDrop>,
    service: Service,
}

/// Opens everything that a source needs, and reports that it is ready.
async fn start(options: Options) -> Result<(Source, Mailboxes, listener::Listener), Failure> {
    let security = options.tokens.security().clone();
    tables::check_descriptors(options.max_replicas)?;
    host::check_memory("--memory", options.tables.memory)?;
    let mut patience = Patience::new(options.wait_for_server, WAIT_FOR_SERVER);
    let (captured, facts, methods) = patience.keep_trying(async || captures::first_look(&options).await).await?;
    let server = captured.server();
    let metrics = match options.metrics {
        Some(address) => Some(remora_metrics::bind(address).await?),
        None => None,
    };
    service_manager::tell_of_another_process();
    let mut inherited = local::take();
    let port = Port::take(&mut inherited, options.listen)?;
    let is_sealed = security.seals_tables(port.address().ip());
    let (left, mut tables) = match service_manager::take(&options, is_sealed, inherited) {
        Some((left, tables)) => (Some(left), tables),
        None => (None, Tables::empty(&options, is_sealed)?),
    };
    tables.warn_of_a_window(&options.tables, &facts, server.url());
    let (incoming, inbox) = mpsc::channel(INCOMING_LIMIT);
    let (events, captures) = mpsc::unbounded_channel();
    let port = port.open(&security).await?;
    let tcp = Arc::new(tcp_exporter(&options.lanes, options.max_replicas, port.1)?);
    let conversations =
        Endpoint::with_keyring(options.tokens.keyring(), &remora_conversation::Options::secured(security.clone()));
    let conversations =
        conversations.map_err(|error| Failure::local(format!("cannot set up control connections: {error}")))?;
    let listener = listener::start(port, conversations, tcp.clone(), incoming.clone());
    let exports = Exports::open(&options, &security, listener.address(), &tables, tcp).await?;
    tracing::info!(
        event = events::SOURCE_READY,
        listening = %listener.address(),
        server = %server.url(),
        version = %facts.name(),
        memory = %options.tables.memory,
        security = security.text(listener.address().ip()),
        "source ready; it takes a snapshot {}",
        if options.is_eager() { "now" } else { "when the first replica joins" }
    );
    let gauge = Arc::new(Gauge::default());
    let rules = Rules {
        max_age: options.max_age,
        max_replicas: options.max_replicas as usize,
        at_once: options.at_once,
        stall_limit: options.stall_limit,
        fork_interval: options.fork_interval,
        slot_bytes: u64::from(tables.snapshot.1.slot_size),
        // There is no other snapshot than the file.
        standby: options
            .first
            .as_ref()
            .map(|_| if options.needs_the_first() { Duration::MAX } else { options.fork_after }),
        repeat_messages: if options.file.is_some() { Duration::MAX } else { options.repeat_messages },
    };
    let machine = Machine::new(Instant::now(), rules, Backoff::from_system(), first_generation(), options.is_eager());
    let preparation = match &left {
        Some(_) => Preparation::none(),
        None => Preparation::begin(tables.to_prepare(&facts), incoming.clone())?,
    };
    let metrics = metrics.map(|listener| answers::serve(listener, incoming.clone()));
    let watching = captured.watch(incoming.clone());
    let choice = Choice::begin(options.stored.as_ref(), incoming.clone());
    let mut source = Source {
        options,
        methods,
        captured,
        facts,
        tables,
        preparation,
        gauge,
        machine,
        topology: Topology::default(),
        exports,
        incoming,
        events,
        sessions: HashMap::new(),
        threads: Threads::default(),
        questions: Questions::new(),
        rate: Rate::default(),
        ahead: Ahead::default(),
        output: OutputWatch::default(),
        links: Links::default(),
        probe_region: ProbeRegion::default(),
        keeper: Keeper::new(),
        standby: None,
        choice,
    };
    let (serves_at, process) = (listener.address().to_string(), source.questions.process);
    source.standby = Standby::begin(&source.options, serves_at, process, &source.gauge, source.incoming.clone());
    service_manager::go_on_with(&mut source, left).await;
    // The first look at the write rate. Later ones measure from it.
    source.learn();
    let service = Service::ready_in_a_loop("ready");
    let mailboxes = Mailboxes { incoming: inbox, captured: captures, _metrics: metrics, _watching: watching, service };
    Ok((source, mailboxes, listener))
}

/// The option that limits how long the source waits for its server.
const WAIT_FOR_SERVER: &str = "--wait-for-server";

/// An event for the source's loop, from another task.
pub(crate) enum Incoming {
    /// A peer authenticated.
    Arrived(Connection),
    /// A message from that peer.
    Said { session: Session, message: Box<Message> },
    /// The connection of that peer has ended.
    Left { session: Session, fault: Fault },
    /// Fresh facts of the server, and why it sends no snapshot.
    Learned(Box<(Facts, OutputBuffer, Option<String>)>),
    /// The server has not told its facts, and why.
    NotLearned(String),
    /// The server has said how far it is with a snapshot.
    Saving(captures::Answer),
    /// Another server of the group is captured from now on, with these facts.
    Moved(Box<Facts>),
    /// The primary has answered a question that the source asked for replicas.
    Answered(Answered),
    /// What a look at the server has shown that is about the source's own links.
    Presence(captured::Look),
    /// What is stored of which a snapshot can be made.
    Stored(Vec<Found>),
    /// The source that this one stands by for has said something.
    First(standby::News),
    /// Metrics are wanted.
    Scraped(Box<Scrape>),
    /// The tables' memory is prepared, or why it is not.
    Prepared(Result<(), Failure>),
    /// The probe region was exported, or why it was not.
    ProbeRegionReady { id: RegionId, exported: Result<(), remora_fabric::Error> },
}

impl From<Connection> for Incoming {
    fn from(connection: Connection) -> Incoming {
        Incoming::Arrived(connection)
    }
}

/// Messages that may wait for the loop: a few for each of many replicas. Connections wait while the queue is full.
const INCOMING_LIMIT: usize = 1024;

/// How often the machine is given the time and a reading of the gauge without another event.
const TICK: Duration = Duration::from_millis(50);

/// The driver: it owns what the source has, and performs the machine's actions.
// Larger than the bound: a method for each message and each action.
struct Source {
    options: Options,
    captured: Captured,
    facts: Facts,
    tables: Tables,
    preparation: Preparation,
    gauge: Arc<Gauge>,
    machine: Machine,
    topology: Topology,
    exports: Exports,
    incoming: mpsc::Sender<Incoming>,
    events: mpsc::UnboundedSender<CaptureEvent>,
    sessions: HashMap<Session, Peer>,
    threads: Threads,
    methods: Methods,
    questions: Questions,
    rate: Rate,
    ahead: Ahead,
    output: OutputWatch,
    links: Links,
    probe_region: ProbeRegion,
    keeper: Keeper,
    standby: Option<Standby>,
    choice: Choice,
}

impl Source {
    async fn run(
        mut self,
        mut mailboxes: Mailboxes,
        listener: listener::Listener,
        mut signals: Signals,
        mut hangups: Signal,
    ) -> Result<(), Failure> {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(incoming) = mailboxes.incoming.recv() => self.receive(incoming)?,
                Some(event) = mailboxes.captured.recv() => {
                    standby::capture_says(&mut self, &event);
                    self.capture_says(&event)?;
                    self.apply(Event::Capture(event))?;
                    captures::look(&mut self);
                }
                _ = tick.tick() => {
                    self.rate.sample(Instant::now(), self.gauge.journal().1);
                    exports::look(&mut self);
                    captures::look(&mut self);
                    captured::look(&mut self);
                    self.preparation.say(Instant::now());
                    self.apply(Event::Tick)?;
                    standby::look(&mut self)?;
                    let moved = self.topology.tick(Instant::now(), self.gauge.published_slots());
                    self.assign(&moved);
                    mailboxes.service.turn(|| answers::in_short(&self));
                }
                Some(()) = hangups.recv() => self.options.tokens.read_again(),
                _ = signals.next() => break,
            }
        }
        // From now on connections wait for the next source, if the service manager keeps the port open.
        drop(listener);
        drop(mailboxes.service);
        self.stop().await;
        Ok(())
    }

    fn receive(&mut self, incoming: Incoming) -> Result<(), Failure> {
        match incoming {
            Incoming::Arrived(connection) => self.welcome(connection),
            Incoming::Said { session, message } => self.said(session, *message),
            Incoming::Left { session, fault } => self.left(session, &fault),
            Incoming::Learned(learned) => {
                let (facts, buffer, refusal) = *learned;
                self.output.learned(Instant::now(), &facts, buffer);
                self.questions.learned(Instant::now(), refusal);
                self.facts = facts;
                self.tell_of_an_obstacle();
            }
            Incoming::NotLearned(why) => {
                self.questions.not_learned(why);
                self.tell_of_an_obstacle();
            }
            Incoming::Saving(answer) => captures::answered(self, answer),
            Incoming::Moved(facts) => captured::moved(self, *facts),
            Incoming::Answered(answered) => answers::answered(self, answered),
            Incoming::Presence(look) => captured::saw(self, look),
            Incoming::Stored(found) => self.choice.found(found),
            Incoming::First(news) => standby::told(self, news),
            Incoming::Scraped(scrape) => answers::answer(self, *scrape),
            Incoming::Prepared(done) => {
                done?;
                self.preparation.ended();
                return self.apply(Event::Tick);
            }
            Incoming::ProbeRegionReady { id, exported } => self.probe_region_ready(id, exported),
        }
        Ok(())
    }

    fn welcome(&mut self, connection: Connection) {
        let session = connection.session();
        let (peer, receiver) = Peer::of(connection);
        self.sessions.insert(session, peer);
        listener::listen_to(receiver, self.incoming.clone(), move |heard| match heard {
            Ok(message) => Incoming::Said { session, message: Box::new(message) },
            Err(error) => Incoming::Left { session, fault: error.fault },
        });
    }

    fn said(&mut self, session: Session, message: Message) {
        let Some(peer) = self.sessions.get_mut(&session) else { return };
        if !peer.role.may_send(&message) {
            peer.done = true;
            tracing::warn!(address = %peer.address, request = message.name(), permits = peer.role.permits(), "refused: the peer's role does not permit it");
            let text = format!("the token or the certificate permits {}; use that of a replica", peer.role.permits());
            return self.send(session, Message::Refused { code: RefusalCode::NotPermitted, text });
        }
        let event = match message {
            Message::Join(join) if join.plan_only => return self.send_plan(session),
            Message::ProbeQuery => return self.probe_requested(session),
            Message::StandBy { serves_at } => {
                peer.standby_at = Some(as_others_reach_it(&serves_at, peer.address));
                return;
            }
            Message::Join(join) => {
                peer.relays_at = join.relays.map(|relays| as_others_reach_it(&relays.serves_at, peer.address));
                let address = peer.address.to_string();
                let name = name_of(join.name, peer.address);
                tracing::info!(
                    event = events::REPLICA_JOINED,
                    replica = %name,
                    %address,
                    server = %join.server,
                    resumes = join.resume.is_some(),
                    protection = %peer.protection,
                    "replica joined"
                );
                if peer.standby_at.is_some() {
                    let _ = self.apply(Event::StandbyJoined { session, name, address });
                    return self.tell_of_standbys();
                }
                let resume = join.resume.as_ref().map(Resume::of);
                let reads = format_for(&self.facts, &join.server);
                Event::Joined { session, name, address, zone: join.zone, resume, reads }
            }
            // The report is about a snapshot that was revoked meanwhile: its slots are not those of the current one.
            Message::Progress(progress) if self.machine.status().offered(session) != Some(progress.generation) => {
                return;
            }
            Message::Progress(progress) => {
                let transport = progress.transport.and_then(TransportKind::from_code);
                let before = self.machine.status().replica(session);
                if let (Some(kind), Some(replica)) = (transport, before)
                    && replica.transport() != transport
                {
                    let protection = peer.protection.of_data(kind, self.tables.is_sealed(), peer.address.ip());
                    tracing::info!(event = events::REPLICA_READS, replica = %replica.name, transport = kind.name(), %protection, "replica reads");
                }
                self.questions.is_in(session, progress.phase);
                let report = Report::of(&progress);
                peer.transport_why = progress.transport_why;
                peer.no_fast_keys = progress.no_fast_keys;
                if let Some(at) = progress.relaying {
                    let is_done = progress.phase > Phase::Transfer;
                    self.topology.progress(Instant::now(), session, at, progress.bytes, is_done);
                }
                Event::Progress { session, at: report }
            }
            Message::PeerLost { generation, session: peer, cause, text } => {
                return self.peer_lost(session, generation, peer, cause, &text);
            }
            Message::HandOffQuery { offset, .. } => return self.answer_hand_off(session, offset),
            Message::StatusQuery => return answers::send_status(self, session),
            Message::Leave { outcome, text } => {
                let replica = self.machine.status().replica(session).map(|replica| replica.name.as_str());
                tracing::info!(event = events::REPLICA_LEFT, replica, ?outcome, %text, "replica left");
                self.questions.is_in(session, Phase::Done);
                let done = outcome == remora_protocol::Outcome::HandedOver;
                if let Some(peer) = self.sessions.get_mut(&session) {
                    peer.done = true;
                }
                Event::Gone { session, done }
            }
            _ => return,
        };
        let _ = self.apply(event);
    }

    fn left(&mut self, session: Session, fault: &Fault) {
        let Some(peer) = self.sessions.remove(&session) else { return };
        let moved = self.topology.gone(session);
        self.assign(&moved);
        self.exports.withdraw(session);
        self.probe_left(session);
        self.questions.left(session);
        if peer.standby_at.is_some() {
            self.tell_of_standbys();
        }
        if !peer.done {
            if self.machine.status().replica(session).is_some() {
                tracing::warn!(event = events::REPLICA_DISCONNECTED, address = %peer.address, %fault, "replica disconnected");
            }
            let _ = self.apply(Event::Gone { session, done: false });
        }
    }

    fn send(&mut self, session: Session, message: Message) {
        let Some(peer) = self.sessions.get(&session) else { return };
        if let Err(error) = peer.sender.try_send(message) {
            // Without this message the replica might wait for it without end. When its connection ends, it joins again.
            tracing::warn!(session, %error, "cannot queue a message for a replica; closing its connection");
            peer.sender.close();
        }
    }

    // ---- the machine's actions ----

    fn apply(&mut self, event: Event) -> Result<(), Failure> {
        let (length, is_preparing) = (self.ahead.expected().length, self.preparation.is_under_way());
        let is_windowed = !self.tables.retained;
        let reading = Reading { length, is_preparing, is_windowed, ..self.gauge.reading() };
        for action in self.machine.apply(Instant::now(), reading, event) {
            self.perform(action)?;
        }
        service_manager::keep(self);
        Ok(())
    }

    fn perform(&mut self, action: Action) -> Result<(), Failure> {
        match action {
            Action::Capture { generation, with_stream, fresh } => {
                // The thread of an earlier capture may still run until it ends. It must not reuse further slots.
                self.gauge.allow_retiring(0);
                let copying = self.standby.as_ref().and_then(|standby| standby.copies.copying().cloned());
                let replaced = match copying.filter(|copying| copying.offer.generation == generation) {
                    Some(first) => {
                        let copied = standby::copied(&first.offer).map_err(Failure::refused)?;
                        self.tables.prepare_copy(&self.options, copied, fresh)?
                    }
                    None => self.tables.prepare(&self.options, &self.facts, fresh)?,
                };
                if let Some(replaced) = replaced {
                    self.exports.forget_in_background(replaced);
                }
                self.tables.warn_of_a_window(&self.options.tables, &self.facts, self.captured.server().url());
                self.start_capture(generation, with_stream)?;
            }
            Action::AllowRetiring { below } => self.gauge.allow_retiring(below),
            Action::Offer { session } => self.offer(session),
            Action::Wait { session, cause, text } => {
                let cut_off = (cause == WaitCause::LastAttemptFailed).then(|| self.is_cut_off()).flatten();
                let preparing = self.preparation.words();
                let (cause, text) = match cut_off {
                    Some(why) => (WaitCause::CutOff, why),
                    None if !preparing.is_empty() => (cause, format!("the source is {preparing}")),
                    None if cause == WaitCause::NotYet => (cause, self.methods.tuning.explained(text)),
                    None => (cause, text),
                };
                self.send(session, Message::Waiting { cause, text });
            }
            Action::Drop { session, code, text } => {
                tracing::warn!(session, %text, "replica refused");
                self.send(session, Message::Refused { code, text });
                self.exports.withdraw(session);
                if let Some(peer) = self.sessions.get_mut(&session) {
                    (peer.done, peer.readable) = (true, Readable::default());
                }
                let moved = self.topology.gone(session);
                self.assign(&moved);
            }
            Action::GenerationGone { session, generation, text } => {
                self.send(session, Message::GenerationGone { generation, text });
            }
            Action::RevokeSnapshot { generation } => {
                self.topology.clear();
                self.exports.revoke(RegionId { generation, region: SNAPSHOT_REGION });
            }
            Action::EndStream { generation } => {
                self.exports.revoke(RegionId { generation, region: JOURNAL_REGION });
                self.threads.stop_the_stream();
            }
            Action::StopCapture { generation } => self.threads.stop(generation),
        }
        Ok(())
    }

    // ---- answers ----

    /// The peer from which a replica is to read the snapshot's slots; `None`: the source.
    ///
    /// This is so for windowed snapshots too. A slot stays in the window until every replica has it, so the source
    /// remains a fallback.
    fn place_for(&mut self, generation: u64, session: Session) -> Option<Upstream> {
        let replica = self.machine.status().replica(session)?;
        let peer = self.sessions.get(&session)?;
        let (serves, witness) = (!peer.relays_at.as_ref()?.is_empty(), Witness::new(peer.address.ip(), &replica.name));
        if replica.is_loaded() {
            return None;
        }
        let first = replica.held_slots(generation);
        let joining = Joining { serves, zone: replica.zone.clone(), witness, first };
        let from = self.topology.join(Instant::now(), generation, session, joining);
        let spliced = self.topology.spliced();
        self.assign(&spliced);
        self.upstream(from?)
    }

    fn upstream(&self, session: Session) -> Option<Upstream> {
        let address = self.sessions.get(&session)?.relays_at.clone()?;
        Some(Upstream { session, name: self.machine.status().replica(session)?.name.clone(), address })
    }

    fn offer(&mut self, session: Session) {
        let Some(generation) = self.machine.status().generation() else { return };
        let upstream = self.place_for(generation, session);
        let (Some(snapshot), Some(stream)) = (self.machine.status().snapshot, self.machine.status().stream) else {
            return;
        };
        let Some(origin) = snapshot.origin() else { return };
        let id = |origin: Origin, region| RegionId { generation: origin.generation, region };
        let tables = [id(origin, SNAPSHOT_REGION), id(stream, JOURNAL_REGION)];
        let Some(peer) = self.sessions.get_mut(&session) else { return };
        peer.grant(session, &self.exports, |readable| readable.tables = Some(tables));
        let table = |origin: Origin, id| self.tables.offer(id, origin.offset, self.exports.keys(id));
        let ([snapshot, journal], plan) = (tables, self.plan());
        let offer = Offer {
            generation: origin.generation,
            replid: Some(origin.history),
            former: plan.former.filter(|_| plan.replid == Some(origin.history)),
            offset: origin.offset,
            snapshot: table(origin, snapshot),
            journal: table(stream, journal),
            upstream,
            ..plan
        };
        self.send(session, Message::Offer(offer));
        self.send(session, Message::Expected(self.ahead.expected()));
        let addresses = self.standbys();
        let is_standby = self.machine.status().replica(session).is_some_and(|replica| replica.is_standby);
        if !addresses.is_empty() && !is_standby {
            self.send(session, Message::Standbys { addresses });
        }
    }

    /// Where the standbys that have joined serve, as others reach them.
    fn standbys(&self) -> Vec<String> {
        let addresses = self.sessions.values().filter_map(|peer| peer.standby_at.clone());
        let mut addresses: Vec<String> = addresses.filter(|address| !address.is_empty()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses.truncate(MAX_STANDBYS);
        addresses
    }

    /// Tells the replicas that have an offer where the standbys serve.
    fn tell_of_standbys(&mut self) {
        let addresses = self.standbys();
        let replicas = self.machine.status().replicas.iter();
        let have_offers = replicas.filter(|(_, replica)| replica.generation.is_some() && !replica.is_standby);
        let sessions: Vec<Session> = have_offers.map(|(&session, _)| session).collect();
        for session in sessions {
            self.send(session, Message::Standbys { addresses: addresses.clone() });
        }
    }

    /// Tells the replicas that the source stops, and ends the capture threads.
    async fn stop(mut self) {
        tracing::info!("stopping");
        let sessions: Vec<Session> = self.sessions.keys().copied().collect();
        for session in sessions {
            let code = RefusalCode::Stopping;
            self.send(session, Message::Refused { code, text: "the source is being stopped".into() });
        }
        self.threads.end().await;
        self.methods.tuning.close().await;
    }
}
