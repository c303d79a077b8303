//! The source: one snapshot of a server, and the stream that follows it, for any number of replicas.
//!
//! ```text
//!                    ┌────────────────────────── one loop ───────────────────────────┐
//!   replicas ──▶ door ──▶ Incoming ──▶ Owner::apply ──▶ actions ──▶ perform ──▶ messages, captures, grants
//!                data lanes ──▶ the fabric's exporters: they read the tables without this loop or the server
//!   server ══▶ capture threads ══▶ snapshot table, journal          (gauge: what the loop sees of them)
//! ```
//!
//! - [`owner`] decides, without I/O; start there.
//! - [`capture`] speaks with the server and fills the tables; [`wire`] is its connection.
//! - [`module`] has the server's own child write long strings into the snapshot's table, where the server has our module; [`rest`]
//!   joins to them what the server saves.
//! - [`gauge`] is what the threads show of themselves.
//! - [`trial`] lends memory to who measures the way.
//! - [`directory`] decides which replica reads the snapshot from which other one.
//! - [`door`] tells control connections from data lanes on the one port that is opened.
//! - this file wires them up and does what the owner says.

mod capture;
mod directory;
mod gauge;
mod module;
mod owner;
mod rest;
mod trial;
mod wire;

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{SendMode, TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, Pages, RegionId};
use remora_protocol::{
    Announce, GenerationState, GenerationStatus, LossCause, Message, Offer, Phase, RefusalCode, Relays, ReplicaStatus,
    StatusReport, TableOffer, Totals, Upstream,
};
use remora_redis::ReplId;
use remora_table::Geometry;
use tokio::sync::{Mutex, mpsc};

use self::capture::{CaptureEvent, Plan};
use self::directory::{Assignment, Directory, Joining};
use self::gauge::Gauge;
use self::owner::{Action, Event, Format, Owner, Replica, Report, Resume, Rules, Session, Stage};
use self::trial::Trial;
use crate::args::{SendChoice, SourceArgs};
use crate::backoff::Backoff;
use crate::conversation::listener as door;
use crate::conversation::{Connection, Endpoint, Fault, Options, Sender, Token, derive};
use crate::exit::Failure;
use crate::lanes::LANES_LABEL;
use crate::server::{Client, Facts, Link, Place, Role, Server, Task};
use crate::transports;
use crate::units::Size;

/// Runs a source until it is stopped.
///
/// # Errors
/// What keeps it from starting: the token, the server, the memory, the address to listen on.
pub async fn run(args: SourceArgs) -> Result<(), Failure> {
    let token = Token::read_file(&args.token_file).map_err(|error| Failure::refused(error.to_string()))?;
    let server = args.server.open(Task::Source)?;
    let facts = Facts::read(&mut server.connect().await?).await?;
    if facts.cluster_enabled == Some(true) {
        return Err(Failure::refused(format!(
            "the server {} runs in cluster mode, where replicas can't be redirected (REPLICAOF is refused); \
             delivery by a dump file for clusters is to come",
            server.url()
        )));
    }
    let tables = Tables::create(&args, &facts).await?;
    let (incoming, inbox) = mpsc::channel(INCOMING_LIMIT);
    let (captured, captures) = mpsc::unbounded_channel();
    let port = door::take(args.listen, "the source", "--listen").await?;
    let tcp = Arc::new(tcp_exporter(&args, port.1)?);
    let conversations = Endpoint::new(&token, &Options::default());
    let conversations = conversations.map_err(|error| Failure::local(format!("no conversations: {error}")))?;
    let door = door::open(port, conversations, tcp.clone(), incoming.clone());
    let mut exporters: Vec<Arc<dyn Exporter>> = Vec::new();
    if !args.no_shm {
        match ShmExporter::bind(ShmOptions::default()) {
            Ok(shm) => exporters.push(Arc::new(shm)),
            Err(error) => tracing::warn!(%error, "shared memory can't be offered; replicas on this host will use tcp"),
        }
    }
    let (rdma, memories) = (args.rdma.clone(), vec![tables.snapshot.0.clone(), tables.journal.0.clone()]);
    let listen = door.address();
    let rdma = tokio::task::spawn_blocking(move || transports::offered::rdma(&rdma, listen, &memories)).await;
    exporters.extend(rdma.map_err(|error| Failure::local(format!("looking for RDMA failed: {error}")))??);
    exporters.push(tcp);
    tracing::info!(
        listening = %door.address(),
        server = %server.url(),
        facts = %facts.name(),
        memory = %args.memory,
        "source ready; one snapshot at the first replica{}",
        if args.eager { "'s wish or at once, as asked by --eager" } else { "'s wish" }
    );
    let gauge = Arc::new(Gauge::default());
    let rules =
        Rules { max_age: args.max_age, max_replicas: args.max_replicas as usize, stall_limit: args.stall_timeout };
    let owner = Owner::new(Instant::now(), rules, Backoff::from_system(), first_generation(), args.eager);
    let module = Arc::new(module::Rules::new(&args));
    let source = Source {
        args,
        module,
        server,
        facts,
        tables,
        gauge,
        owner,
        directory: Directory::default(),
        exporters,
        incoming,
        captured,
        sessions: HashMap::new(),
        threads: Vec::new(),
        client: Arc::new(Mutex::new(None)),
        rate: Rate::default(),
        trial: Trial::default(),
    };
    source.run(inbox, captures).await?;
    drop(door);
    Ok(())
}

/// What reaches the loop from outside of it.
pub(crate) enum Incoming {
    /// Somebody has proved to hold the token.
    Arrived(Connection),
    /// ... and says this.
    Said { session: Session, message: Box<Message> },
    /// ... and is gone.
    Left { session: Session, fault: Fault },
    /// The server was asked about itself.
    Learned(Box<Facts>),
    /// ... as well as it could be, for this replica's plan.
    PlanReady(Session),
    /// The region to measure by is lent, or why not.
    TrialReady { id: RegionId, lent: Result<(), remora_fabric::Error> },
}

impl From<Connection> for Incoming {
    fn from(connection: Connection) -> Incoming {
        Incoming::Arrived(connection)
    }
}

/// Messages that may wait for the loop: some for each of many replicas. Beyond it their connections wait.
const INCOMING_LIMIT: usize = 1024;

/// How often the owner looks at the clock and at the gauge.
const TICK: Duration = Duration::from_millis(50);

/// How long a replica's plan waits for the server to say how it is: well below the time that replicas wait for a plan.
const LEARN_LIMIT: Duration = Duration::from_secs(3);

/// How long the threads have to end when the source does.
const FAREWELL: Duration = Duration::from_secs(3);

/// What of the region's numbering is the snapshot, and what the journal.
const SNAPSHOT_REGION: u32 = 0;
const JOURNAL_REGION: u32 = 1;

struct Source {
    args: SourceArgs,
    server: Server,
    facts: Facts,
    tables: Tables,
    gauge: Arc<Gauge>,
    owner: Owner,
    directory: Directory,
    exporters: Vec<Arc<dyn Exporter>>,
    incoming: mpsc::Sender<Incoming>,
    captured: mpsc::UnboundedSender<CaptureEvent>,
    sessions: HashMap<Session, Peer>,
    threads: Vec<CaptureThread>,
    /// What may be asked of a module in the server.
    module: Arc<module::Rules>,
    /// One connection for questions, made when first needed and again after a failure.
    client: Arc<Mutex<Option<Client>>>,
    rate: Rate,
    trial: Trial,
}

/// One authenticated connection.
struct Peer {
    sender: Sender,
    address: std::net::SocketAddr,
    key: [u8; 32],
    done: bool,
    /// Why it reads by no better transport, in its own words.
    transport_why: String,
    /// How it takes part in passing slots on; its address as others reach it.
    relays: Option<Relays>,
}

struct CaptureThread {
    generation: u64,
    follows_stream: bool,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Source {
    async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Incoming>,
        mut captures: mpsc::UnboundedReceiver<CaptureEvent>,
    ) -> Result<(), Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let no_handler = |error| Failure::local(format!("signals can't be caught: {error}"));
        let mut interrupt = signal(SignalKind::interrupt()).map_err(no_handler)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(no_handler)?;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(incoming) = inbox.recv() => self.receive(incoming),
                Some(event) = captures.recv() => {
                    self.capture_says(&event)?;
                    self.apply(Event::Capture(event))?;
                }
                _ = tick.tick() => {
                    self.rate.sample(self.gauge.journal().1);
                    self.apply(Event::Tick)?;
                    let moved = self.directory.tick(Instant::now(), self.gauge.published_slots());
                    self.assign(&moved);
                }
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
            }
        }
        self.stop().await;
        Ok(())
    }

    fn receive(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Arrived(connection) => self.welcome(connection),
            Incoming::Said { session, message } => self.said(session, *message),
            Incoming::Left { session, fault } => self.left(session, &fault),
            Incoming::Learned(facts) => self.facts = *facts,
            Incoming::PlanReady(session) => {
                let plan = self.plan();
                self.send(session, Message::Offer(plan));
            }
            Incoming::TrialReady { id, lent } => self.trial_ready(id, lent),
        }
    }

    fn welcome(&mut self, connection: Connection) {
        let (session, address, key) = (connection.session(), connection.peer_addr(), connection.session_key());
        let (sender, receiver) = connection.split();
        self.sessions
            .insert(session, Peer { sender, address, key, done: false, transport_why: String::new(), relays: None });
        door::listen_to(receiver, self.incoming.clone(), move |heard| match heard {
            Ok(message) => Incoming::Said { session, message: Box::new(message) },
            Err(error) => Incoming::Left { session, fault: error.fault },
        });
    }

    fn said(&mut self, session: Session, message: Message) {
        let event = match message {
            Message::Join(join) if join.plan_only => return self.send_plan(session),
            Message::ProbeQuery => return self.trial_wanted(session),
            Message::Join(join) => {
                self.grant(session);
                let Some(peer) = self.sessions.get_mut(&session) else { return };
                peer.relays = join.relays.map(|relays| as_others_reach_it(relays, peer.address));
                let address = peer.address.to_string();
                let name = if join.name.is_empty() { address.clone() } else { join.name };
                tracing::info!(replica = %name, %address, server = %join.server, resumes = join.resume.is_some(), "a replica joins");
                let resume = join.resume.map(|resume| Resume {
                    generation: resume.generation,
                    held_slots: resume.held_slots,
                    loaded: resume.loaded.then_some((resume.replid, resume.next_byte)),
                });
                let reads = self.format_for(&join.server);
                Event::Joined { session, name, address, resume, reads }
            }
            // Said of a snapshot that was taken from it meanwhile: its slots are not those of the present one.
            Message::Progress(progress) if self.owner.status().offered(session) != Some(progress.generation) => return,
            Message::Progress(progress) => {
                if let Some(peer) = self.sessions.get_mut(&session) {
                    peer.transport_why = progress.transport_why;
                }
                if let Some(at) = progress.relaying {
                    let is_done = progress.phase > Phase::Transfer;
                    self.directory.progress(Instant::now(), session, at, progress.bytes, is_done);
                }
                let at = Report {
                    phase: progress.phase,
                    transport: progress.transport,
                    slots_below: progress.slots_below,
                    slots_held: progress.slots_held,
                    bytes: progress.bytes,
                    applied_offset: progress.applied_offset,
                };
                Event::Progress { session, at }
            }
            Message::PeerLost { generation, session: peer, cause, text } => {
                return self.peer_lost(session, generation, peer, cause, &text);
            }
            Message::HandOffQuery { offset, .. } => return self.answer_hand_off(session, offset),
            Message::StatusQuery => return self.send(session, Message::Status(self.report())),
            Message::Leave { outcome, text } => {
                tracing::info!(session, ?outcome, %text, "a replica leaves");
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

    /// Which format of the primary a server reads that calls itself so (`Valkey 9.1.2`).
    fn format_for(&self, server: &str) -> Format {
        let major = server.strip_prefix("Valkey ").and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        match self.facts.own_format() {
            Some(own) if major.is_none_or(|major| major < own.major) => Format::Shared,
            _ => Format::Own,
        }
    }

    fn left(&mut self, session: Session, fault: &Fault) {
        let Some(peer) = self.sessions.remove(&session) else { return };
        let moved = self.directory.gone(session);
        self.assign(&moved);
        for exporter in &self.exporters {
            exporter.withdraw(session);
        }
        self.trial_left(session);
        if !peer.done {
            if self.owner.status().replica(session).is_some() {
                tracing::warn!(address = %peer.address, %fault, "a replica is gone");
            }
            let _ = self.apply(Event::Gone { session, done: false });
        }
    }

    fn send(&mut self, session: Session, message: Message) {
        let Some(peer) = self.sessions.get(&session) else { return };
        if let Err(error) = peer.sender.try_send(message) {
            tracing::debug!(%error, "a message could not be queued");
        }
    }

    // ---- the owner's word ----

    fn apply(&mut self, event: Event) -> Result<(), Failure> {
        for action in self.owner.apply(Instant::now(), self.gauge.reading(), event) {
            self.perform(action)?;
        }
        Ok(())
    }

    fn perform(&mut self, action: Action) -> Result<(), Failure> {
        match action {
            Action::Capture { generation, with_stream, fresh } => {
                // The thread of an earlier capture that still runs may reuse no further slot, and ends.
                self.gauge.allow_retiring(0);
                self.tables.prepare(&self.args, &self.facts, fresh)?;
                self.start_capture(generation, with_stream)?;
            }
            Action::AllowRetiring { below } => self.gauge.allow_retiring(below),
            Action::Offer { session } => self.offer(session),
            Action::Wait { session, cause, text } => self.send(session, Message::Waiting { cause, text }),
            Action::Drop { session, code, text } => {
                tracing::warn!(session, %text, "a replica is refused");
                self.send(session, Message::Refused { code, text });
                for exporter in &self.exporters {
                    exporter.withdraw(session);
                }
                if let Some(peer) = self.sessions.get_mut(&session) {
                    peer.done = true;
                }
                let moved = self.directory.gone(session);
                self.assign(&moved);
            }
            Action::GenerationGone { session, generation, text } => {
                self.send(session, Message::GenerationGone { generation, text });
            }
            Action::RevokeSnapshot { generation } => {
                self.directory.clear();
                self.revoke(generation, SNAPSHOT_REGION);
            }
            Action::EndStream { generation } => {
                self.revoke(generation, JOURNAL_REGION);
                self.stop_threads(|thread| thread.follows_stream);
            }
            Action::StopCapture { generation } => self.stop_threads(|thread| thread.generation == generation),
        }
        Ok(())
    }

    fn revoke(&self, generation: u64, region: u32) {
        for exporter in &self.exporters {
            exporter.revoke(RegionId { generation, region });
        }
    }

    fn stop_threads(&self, which: impl Fn(&CaptureThread) -> bool) {
        for thread in self.threads.iter().filter(|thread| which(thread)) {
            thread.stop.store(true, Ordering::Relaxed);
        }
    }

    fn start_capture(&mut self, generation: u64, with_stream: bool) -> Result<(), Failure> {
        // A thread that was told to stop may still write for one tick: two writers of one table must never be.
        let (ended, running): (Vec<_>, Vec<_>) = self
            .threads
            .drain(..)
            .partition(|thread| thread.stop.load(Ordering::Relaxed) || thread.thread.is_finished());
        self.threads = running;
        let stop = Arc::new(AtomicBool::new(false));
        let own_format = self.owner.status().snapshot.is_some_and(|snapshot| snapshot.format == Format::Own);
        let plan = Plan {
            generation,
            server: self.server.clone(),
            reader_version: self.facts.own_format().filter(|_| own_format).map(|version| version.to_string()),
            snapshot: self.tables.snapshot.clone(),
            retained: self.tables.retained,
            journal: with_stream.then(|| self.tables.journal.clone()),
            module: self.module.clone(),
            gauge: self.gauge.clone(),
            events: self.captured.clone(),
            stop: stop.clone(),
            runtime: tokio::runtime::Handle::current(),
        };
        tracing::info!(generation, with_stream, "asking the server for a snapshot");
        let thread = std::thread::Builder::new()
            .name("capture".into())
            .spawn(move || {
                for thread in ended {
                    let _ = thread.thread.join();
                }
                capture::run(plan);
            })
            .map_err(|error| Failure::local(format!("no thread for the capture: {error}")))?;
        self.threads.push(CaptureThread { generation, follows_stream: with_stream, stop, thread });
        Ok(())
    }

    /// What a capture's news means for the exporters, before the owner hears it.
    fn capture_says(&mut self, event: &CaptureEvent) -> Result<(), Failure> {
        match event {
            CaptureEvent::Started { generation, replid, offset } => {
                tracing::info!(generation, %replid, offset, "the snapshot begins");
                let follows = self.threads.iter().any(|t| t.generation == *generation && t.follows_stream);
                self.export(*generation, SNAPSHOT_REGION)?;
                if follows {
                    self.export(*generation, JOURNAL_REGION)?;
                    self.tables.journal_origin = (*generation, *offset);
                }
                self.learn();
            }
            CaptureEvent::Completed { generation, bytes } => {
                let seconds = self.gauge.began().map_or(0.0, |began| began.elapsed().as_secs_f64());
                let rate = Size::bytes((*bytes as f64 / seconds.max(1e-9)) as u64);
                tracing::info!(generation, size = %Size::bytes(*bytes), way = %self.gauge.way(), "the snapshot is whole after {seconds:.3} s ({rate}/s)");
            }
            CaptureEvent::Failed { generation, fault } => {
                self.tables.outgrown |= matches!(fault, capture::Fault::Outgrown);
                tracing::warn!(generation, %fault, "the snapshot failed");
            }
            CaptureEvent::StreamResumed => tracing::info!("the stream goes on where it broke"),
            CaptureEvent::HistoryChanged { generation, from, to, at } => {
                tracing::warn!(
                    generation, old = %from, new = %to, offset = at,
                    "the server's replication history has changed (a promotion, a fail-over or a restart): the stream of the old history \
                     ends at this offset; replicas that have loaded go to the primary, the others get a new snapshot"
                );
                self.learn();
            }
            CaptureEvent::StreamLost { text } => tracing::warn!(%text, "the stream is lost"),
        }
        Ok(())
    }

    fn export(&self, generation: u64, region: u32) -> Result<(), Failure> {
        let table = if region == SNAPSHOT_REGION { &self.tables.snapshot } else { &self.tables.journal };
        for exporter in &self.exporters {
            exporter.export(RegionId { generation, region }, table.0.clone()).map_err(|error| {
                Failure::local(format!("the table can't be offered by {}: {error}", exporter.kind()))
            })?;
        }
        Ok(())
    }

    /// Lets a session read whatever is lent.
    fn grant(&self, session: Session) {
        let Some(peer) = self.sessions.get(&session) else { return };
        let secret = derive(&peer.key, LANES_LABEL);
        for exporter in &self.exporters {
            exporter.grant(session, secret);
        }
    }

    // ---- answers ----

    /// Where a region lies, by each transport.
    fn keys(&self, id: RegionId) -> Vec<Vec<u8>> {
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(id).ok());
        keys.map(|key| key.as_bytes().to_vec()).collect()
    }

    fn table_offer(&self, generation: u64, region: u32, first_offset: u64) -> TableOffer {
        let geometry = if region == SNAPSHOT_REGION { self.tables.snapshot.1 } else { self.tables.journal.1 };
        TableOffer {
            generation,
            first_offset,
            slot_size: geometry.slot_size,
            slots: geometry.slots,
            retained: region == SNAPSHOT_REGION && self.tables.retained,
            keys: self.keys(RegionId { generation, region }),
        }
    }

    /// From whom a replica is to take the snapshot's slots; `None`: from the source.
    ///
    /// Out of a window too: a slot stays in it until everybody has it, from whomever, so that the source is the last resort there as well.
    fn place_for(&mut self, generation: u64, session: Session) -> Option<Upstream> {
        let replica = self.owner.status().replica(session)?;
        let relays = self.sessions.get(&session)?.relays.clone()?;
        if replica.is_loaded() {
            return None;
        }
        let first = replica.held_slots(generation);
        let joining = Joining { serves: !relays.serves_at.is_empty(), zone: relays.zone, first };
        let from = self.directory.join(Instant::now(), generation, session, joining)?;
        self.upstream(from)
    }

    fn upstream(&self, session: Session) -> Option<Upstream> {
        let address = self.sessions.get(&session)?.relays.as_ref()?.serves_at.clone();
        Some(Upstream { session, name: self.owner.status().replica(session)?.name.clone(), address })
    }

    /// Sends replicas elsewhere, as the directory wants it.
    fn assign(&mut self, assignments: &[Assignment]) {
        let Some(generation) = self.owner.status().generation() else { return };
        for &Assignment { reader, from } in assignments {
            let upstream = from.and_then(|from| self.upstream(from));
            let name = upstream.as_ref().map_or("the source", |upstream| upstream.name.as_str());
            tracing::info!(reader, from = name, "a replica is sent elsewhere for its slots");
            self.send(reader, Message::ReadFrom { generation, upstream });
        }
    }

    fn peer_lost(&mut self, reader: Session, generation: u64, peer: Session, cause: LossCause, text: &str) {
        if self.owner.status().offered(reader) != Some(generation) {
            return;
        }
        let name = |session| self.owner.status().replica(session).map_or("gone", |replica| replica.name.as_str());
        match cause {
            LossCause::Lied => {
                tracing::warn!(peer = name(peer), reader = name(reader), %text, "a replica passed on bytes that are not ours");
            }
            _ => tracing::info!(peer = name(peer), reader = name(reader), %text, "a replica lost the one it read from"),
        }
        let moved = self.directory.lost(reader, peer, cause);
        self.assign(&moved);
    }

    fn offer(&mut self, session: Session) {
        let Some(generation) = self.owner.status().generation() else { return };
        let upstream = self.place_for(generation, session);
        let (Some(snapshot), Some(stream)) = (self.owner.status().snapshot, self.owner.status().stream) else { return };
        let Some((replid, offset)) = snapshot.origin() else { return };
        let (journal_generation, journal_offset) = self.tables.journal_origin;
        debug_assert_eq!(journal_generation, stream.generation);
        let offer = Offer {
            generation: snapshot.generation,
            replid: *replid.as_bytes(),
            offset,
            snapshot: self.table_offer(snapshot.generation, SNAPSHOT_REGION, offset),
            journal: self.table_offer(journal_generation, JOURNAL_REGION, journal_offset),
            upstream,
            ..self.plan()
        };
        self.send(session, Message::Offer(offer));
    }

    /// An offer without tables: what a dry run needs to know.
    fn plan(&self) -> Offer {
        let nothing =
            || TableOffer { generation: 0, first_offset: 0, slot_size: 0, slots: 0, retained: false, keys: Vec::new() };
        Offer {
            generation: 0,
            replid: self.facts.replid.map_or([b'0'; 40], |replid| *replid.as_bytes()),
            offset: self.facts.offset.unwrap_or(0),
            snapshot: nothing(),
            journal: nothing(),
            primary: self.announce(),
            server: self.facts.name(),
            run_id: self.facts.run_id.clone().unwrap_or_default(),
            backlog_bytes: self.facts.backlog.map_or(0, |backlog| backlog.size),
            write_rate: self.rate.bytes_per_second(),
            upstream: None,
        }
    }

    /// Answers with what the server says now: it may have restarted, or been failed over, since the last snapshot. One that does
    /// not answer soon is described as it was.
    fn send_plan(&self, session: Session) {
        let (learning, incoming) = (self.learn(), self.incoming.clone());
        tokio::spawn(async move {
            let _ = tokio::time::timeout(LEARN_LIMIT, learning).await;
            let _ = incoming.send(Incoming::PlanReady(session)).await;
        });
    }

    /// Where a replica's server finds the primary: as told, else the server's own address; an empty host where that address
    /// means something only on this machine.
    fn announce(&self) -> Announce {
        let source_sees_as = self.server.url().to_string();
        if let Some(told) = &self.args.announce {
            let tls = self.server.url().is_tls();
            return Announce { host: told.host.clone(), port: told.port, tls, source_sees_as };
        }
        match self.server.url().place() {
            Place::Tcp { host, port, tls } => {
                let host = if self.server.url().is_local_only() { String::new() } else { host.clone() };
                Announce { host, port: *port, tls: *tls, source_sees_as }
            }
            Place::Unix(_) => {
                let port = self.facts.tcp_port.or(self.facts.tls_port).unwrap_or(0);
                let tls = self.facts.tcp_port.is_none();
                Announce { host: String::new(), port, tls, source_sees_as }
            }
        }
    }

    /// Asks the server about itself, in the background.
    fn learn(&self) -> tokio::task::JoinHandle<()> {
        let (client, server, incoming) = (self.client.clone(), self.server.clone(), self.incoming.clone());
        tokio::spawn(async move {
            if let Ok(facts) = ask(&client, &server).await {
                let _ = incoming.send(Incoming::Learned(Box::new(facts))).await;
            }
        })
    }

    fn answer_hand_off(&mut self, session: Session, offset: u64) {
        let Some(peer) = self.sessions.get(&session) else { return };
        let (client, server, sender) = (self.client.clone(), self.server.clone(), peer.sender.clone());
        let (rate, history) = (self.rate.bytes_per_second(), self.owner.status().history_of(session));
        tokio::spawn(async move {
            let answer = match ask(&client, &server).await {
                Ok(facts) => hand_off_answer(&facts, history, offset, rate),
                Err(error) => not_covered(format!("the primary does not answer: {error}")),
            };
            let _ = sender.send(answer).await;
        });
    }

    fn report(&self) -> StatusReport {
        let (now, status) = (Instant::now(), self.owner.status());
        StatusReport {
            source: env!("CARGO_PKG_VERSION").into(),
            server: self.server.url().to_string(),
            role: role(&self.facts),
            generation: self.generation_status(),
            replicas: status
                .replicas
                .iter()
                .map(|(session, replica)| self.replica_status(*session, replica, now))
                .collect(),
            totals: Totals {
                snapshots_taken: status.snapshots_taken,
                replicas_done: status.replicas_done,
                bytes_served: self.exporters.iter().map(|exporter| exporter.bytes_served()).sum(),
            },
        }
    }

    fn generation_status(&self) -> Option<GenerationStatus> {
        let snapshot = self.owner.status().snapshot?;
        let (replid, offset) = snapshot.origin()?;
        let (first, end) = self.gauge.journal();
        let memory = [&self.tables.snapshot.0, &self.tables.journal.0];
        Some(GenerationStatus {
            generation: snapshot.generation,
            replid: replid.to_string(),
            offset_start: offset,
            offset_now: end,
            state: match snapshot.stage {
                Stage::Sealed { .. } => GenerationState::Complete,
                _ => GenerationState::Capturing,
            },
            snapshot_bytes: self.gauge.received(),
            slots: u64::from(self.tables.snapshot.1.slots),
            published_slots: self.gauge.published_slots(),
            retired_slots: self.gauge.retired_slots(),
            windowed: self.gauge.retired_slots() > 0,
            memory_bytes: memory.iter().filter_map(|memory| memory.resident().ok()).sum(),
            memory_limit: self.args.memory.get(),
            age_seconds: snapshot.asked().elapsed().as_secs(),
            journal_first: first,
            journal_end: end + 1,
            capture_millis: self.gauge.capture_time().as_millis() as u64,
            capture: self.gauge.way().to_string(),
        })
    }

    fn replica_status(&self, session: Session, replica: &Replica, now: Instant) -> ReplicaStatus {
        let slots = self.gauge.published_slots().max(1);
        let held = replica.at.slots_held;
        let (oldest_slot, serves) = self.directory.lends(session);
        let relays = self.sessions.get(&session).and_then(|peer| peer.relays.as_ref());
        ReplicaStatus {
            name: replica.name.clone(),
            address: replica.address.clone(),
            transport: replica.transport_name(),
            transport_why: self.sessions.get(&session).map(|peer| peer.transport_why.clone()).unwrap_or_default(),
            phase: replica.at.phase,
            slots_held: held,
            percent_permille: (held.min(slots) * 1000 / slots) as u16,
            rate_bytes_per_s: replica.rate,
            journal_lag_bytes: self.gauge.journal().1.saturating_sub(replica.at.applied_offset),
            applied_offset: replica.at.applied_offset,
            joined_seconds: now.duration_since(replica.joined).as_secs(),
            silent_seconds: now.duration_since(replica.heard).as_secs(),
            session,
            reads_from: self.directory.reads_from(session),
            serves,
            oldest_slot,
            zone: relays.map(|relays| relays.zone.clone()).unwrap_or_default(),
        }
    }

    /// Tells the replicas, ends the threads, leaves the server as it was.
    async fn stop(mut self) {
        tracing::info!("stopping");
        let sessions: Vec<Session> = self.sessions.keys().copied().collect();
        for session in sessions {
            let code = RefusalCode::Stopping;
            self.send(session, Message::Refused { code, text: "the source is being stopped".into() });
        }
        self.stop_threads(|_| true);
        let threads = std::mem::take(&mut self.threads);
        let joined = tokio::task::spawn_blocking(move || {
            for thread in threads {
                let _ = thread.thread.join();
            }
        });
        if tokio::time::timeout(FAREWELL, joined).await.is_err() {
            tracing::warn!("a capture thread did not end in time");
        }
    }
}

/// A replica that serves at an unspecified host is reached by others at the one that we see it by.
fn as_others_reach_it(relays: Relays, seen: std::net::SocketAddr) -> Relays {
    let serves_at = match relays.serves_at.parse::<std::net::SocketAddr>() {
        Ok(address) if address.ip().is_unspecified() => {
            std::net::SocketAddr::new(seen.ip(), address.port()).to_string()
        }
        Ok(address) => address.to_string(),
        // What is no address is nowhere.
        Err(_) => String::new(),
    };
    Relays { serves_at, ..relays }
}

/// Whether the primary would continue `history` from `offset`, with room for the time that a hand-off takes.
fn hand_off_answer(facts: &Facts, history: Option<ReplId>, offset: u64, rate: u64) -> Message {
    let Some(history) = history else {
        return not_covered("this source has given the replica no snapshot and no stream".into());
    };
    if !facts.continues(history, offset + 1) {
        return not_covered(other_history(facts, history, offset));
    }
    let Some(backlog) = facts.backlog else {
        return not_covered("the primary does not tell of its backlog (INFO replication)".into());
    };
    let end = backlog.first.saturating_add(backlog.held).saturating_sub(1);
    // What may still be written before the byte that the replica needs next falls out of the backlog.
    let room = (offset + 1).saturating_sub(backlog.first) + backlog.size.saturating_sub(backlog.held);
    let needed = (rate as f64 * HAND_OFF_TIME.as_secs_f64()) as u64;
    let covered = backlog.covers(offset + 1) && room >= needed;
    let text = if covered {
        String::new()
    } else {
        format!(
            "its backlog of {} reaches from {} to {}, the replica is at {offset} and {} a second are written: raise \
             repl-backlog-size to {} or more",
            Size::bytes(backlog.size),
            backlog.first,
            end,
            Size::bytes(rate),
            Size::bytes(needed.max(end.saturating_sub(offset)).saturating_mul(2).next_power_of_two())
        )
    };
    Message::HandOffAnswer { covered, text }
}

fn not_covered(text: String) -> Message {
    Message::HandOffAnswer { covered: false, text }
}

/// Why a server does not continue `history` after `offset`.
fn other_history(facts: &Facts, history: ReplId, offset: u64) -> String {
    let Some(now) = facts.replid else {
        return "the primary does not name its replication history (INFO replication)".into();
    };
    match facts.former {
        Some((former, end)) if former == history => format!(
            "the primary's history is {now} since offset {end}, and the replica is at offset {offset} of the former one, {history}"
        ),
        _ => format!("the primary's history is {now}, and the replica has another one, {history}"),
    }
}

/// The time between asking and the primary's `+CONTINUE`: some round trips, and a server that is busy with other things.
const HAND_OFF_TIME: Duration = Duration::from_millis(250);

async fn ask(client: &Mutex<Option<Client>>, server: &Server) -> Result<Facts, crate::server::ServerError> {
    let mut client = client.lock().await;
    if let Some(open) = client.as_mut() {
        if let Ok(facts) = Facts::read(open).await {
            return Ok(facts);
        }
        *client = None;
    }
    let mut fresh = server.connect().await?;
    let facts = Facts::read(&mut fresh).await?;
    *client = Some(fresh);
    Ok(facts)
}

fn role(facts: &Facts) -> String {
    match (facts.role, &facts.link) {
        (Some(Role::Replica), Some(Link { host, port, .. })) => format!("replica of {host}:{port}"),
        (Some(Role::Replica), None) => "replica".into(),
        _ => "primary".into(),
    }
}

/// Numbers that no earlier run of a source on this machine has used.
fn first_generation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_millis() as u64) << 8
}

/// `address`: what the keys tell readers to connect to.
fn tcp_exporter(args: &SourceArgs, address: std::net::SocketAddr) -> Result<TcpExporter, Failure> {
    let send = match args.tcp_send {
        SendChoice::Copy => SendMode::Copy,
        SendChoice::File => SendMode::File,
    };
    let upload_rate = args.upload_limit.and_then(|limit| NonZeroU64::new(limit.get()));
    let congestion = args.tcp_congestion.clone();
    let options = TcpOptions { send, congestion, upload_rate, ..TcpOptions::default() };
    TcpExporter::new(options, Some(address)).map_err(|error| Failure::refused(error.to_string()))
}

/// The two tables' memory: used by one generation after the other.
struct Tables {
    snapshot: (Arc<Memory>, Geometry),
    journal: (Arc<Memory>, Geometry),
    /// Whether the present snapshot keeps to the promise of [`TableOffer::retained`].
    retained: bool,
    /// A snapshot was larger than the server's INFO let expect: there will be no such promise again.
    outgrown: bool,
    /// Generation and offset with which the journal now in it began.
    journal_origin: (u64, u64),
}

impl Tables {
    async fn create(args: &SourceArgs, facts: &Facts) -> Result<Tables, Failure> {
        let total = args.memory.get();
        let journal = args.journal_memory.map_or(total / JOURNAL_SHARE, Size::get);
        if journal >= total {
            let text = format!(
                "--journal-memory {} leaves nothing of --memory {} for the snapshot",
                Size::bytes(journal),
                args.memory
            );
            return Err(Failure::refused(text));
        }
        let slot = |size: u64| u32::try_from(size).unwrap_or(u32::MAX);
        let snapshot = table("remora-snapshot", total - journal, slot(args.slot_size().get()))?;
        let journal = table("remora-journal", journal, JOURNAL_SLOT.min(slot(journal / 8).next_power_of_two() / 2))?;
        let touch = snapshot.1.data_offset() + expected(facts, snapshot.1);
        let memory = snapshot.0.clone();
        let touch = touch.min(memory.length());
        tracing::debug!(bytes = touch, "touching the snapshot's memory beforehand");
        let touched = tokio::task::spawn_blocking(move || memory.prefault(0..touch)).await;
        match touched {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(no_memory(error)),
            Err(error) => return Err(no_memory(error)),
        }
        Ok(Tables { snapshot, journal, retained: false, outgrown: false, journal_origin: (0, 0) })
    }

    /// Gets the snapshot's memory ready for another generation. `fresh`: the present one may still be read by those who were lent
    /// it, so they keep it, and it goes when they do.
    fn prepare(&mut self, args: &SourceArgs, facts: &Facts, fresh: bool) -> Result<(), Failure> {
        if fresh && self.retained {
            let slot_size = self.snapshot.1.slot_size;
            let budget = self.snapshot.0.length();
            tracing::debug!(memory = %args.memory, "a replica was lost in the middle: the snapshot gets fresh memory");
            self.snapshot = table("remora-snapshot", budget, slot_size)?;
        }
        let ring = u64::from(self.snapshot.1.slot_size) * u64::from(self.snapshot.1.slots);
        self.retained = !self.outgrown && expected(facts, self.snapshot.1) <= ring;
        Ok(())
    }
}

/// Bytes that a snapshot of this server will have at most, as far as its INFO tells: what its data take in memory is more than
/// what they take in a snapshot, except for large values, where it is as much.
fn expected(facts: &Facts, geometry: Geometry) -> u64 {
    let dataset = facts.used_memory_dataset.or(facts.used_memory).unwrap_or(0);
    dataset + dataset / 16 + 2 * u64::from(geometry.slot_size)
}

/// The journal's share of the memory, unless told otherwise: a quarter.
const JOURNAL_SHARE: u64 = 4;

/// Bytes of a slot of the journal, at most: small enough that overwriting the oldest costs late readers little, large
/// enough that its entry is looked up seldom.
const JOURNAL_SLOT: u32 = 1 << 20;

fn table(name: &str, budget: u64, slot_size: u32) -> Result<(Arc<Memory>, Geometry), Failure> {
    let geometry = Geometry::within(budget, slot_size)
        .map_err(|error| Failure::refused(format!("--memory is too small for its slots: {error}")))?;
    let memory = Memory::create(name, geometry.memory_len(), Pages::Small).map_err(no_memory)?;
    Ok((Arc::new(memory), geometry))
}

fn no_memory(error: impl std::fmt::Display) -> Failure {
    Failure::local(format!("the memory for the tables can't be had: {error}; give a smaller --memory"))
}

/// How fast the stream grows, over the last few seconds.
#[derive(Default)]
struct Rate {
    last: Option<(Instant, u64)>,
    bytes_per_second: f64,
}

impl Rate {
    /// The span over which a rate is taken.
    const SPAN: Duration = Duration::from_millis(500);

    fn sample(&mut self, position: u64) {
        let now = Instant::now();
        match self.last {
            Some((then, _)) if now.duration_since(then) < Self::SPAN => {}
            Some((then, before)) => {
                let fresh = position.saturating_sub(before) as f64 / now.duration_since(then).as_secs_f64();
                // The first sample after a new journal is no rate: its offsets are absolute.
                let fresh = if before == 0 { 0.0 } else { fresh };
                self.bytes_per_second = (self.bytes_per_second + fresh) / 2.0;
                self.last = Some((now, position));
            }
            None => self.last = Some((now, position)),
        }
    }

    fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second as u64
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::server::Backlog;

    fn replid(digit: &str) -> ReplId {
        digit.repeat(40).parse().unwrap()
    }

    /// A primary with the history `a`, which was `b` up to offset 100, and a backlog from 50 to 149.
    fn primary() -> Facts {
        let backlog = Backlog { active: true, size: 1 << 20, first: 50, held: 100 };
        let former = Some((replid("b"), 101));
        Facts { replid: Some(replid("a")), former, backlog: Some(backlog), ..Facts::default() }
    }

    fn answer(facts: &Facts, history: Option<ReplId>, offset: u64) -> (bool, String) {
        match hand_off_answer(facts, history, offset, 0) {
            Message::HandOffAnswer { covered, text, .. } => (covered, text),
            other => panic!("{}", other.name()),
        }
    }

    #[test]
    fn a_hand_off_is_covered_only_in_a_history_that_the_primary_continues() {
        let covered = |digit, offset| answer(&primary(), Some(replid(digit)), offset).0;
        assert!(covered("a", 149) && covered("b", 100) && covered("b", 60));
        assert!(!covered("a", 20), "the backlog does not reach back");
        assert!(!covered("b", 101), "beyond the end of the former history");
        assert!(!covered("c", 100));
    }

    #[test]
    fn a_hand_off_that_is_not_covered_for_its_history_says_so() {
        let (_, text) = answer(&primary(), Some(replid("b")), 120);
        assert!(text.contains(&replid("a").to_string()) && text.contains("offset 120 of the former one"), "{text}");
        let (_, text) = answer(&primary(), Some(replid("c")), 120);
        assert!(text.contains("the replica has another one") && text.contains(&replid("c").to_string()), "{text}");
        let (covered, text) = answer(&primary(), None, 120);
        assert!(!covered && text.contains("no snapshot"), "{text}");
        let (covered, text) = answer(&Facts { replid: None, former: None, ..primary() }, Some(replid("a")), 120);
        assert!(!covered && text.contains("does not name"), "{text}");
    }
}
