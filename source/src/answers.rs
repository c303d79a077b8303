//! What the source says about the primary: its address, its snapshot formats, whether it continues a replica's history,
//! and what a replica that joins now would get, of which base.
//!
//! The captures choose a base for themselves when they begin, by the same order (`capture::bases`).
//!
//! What the source is asked and answers: `remora status` and metrics with what it knows, and the questions of replicas
//! with fresh facts of the primary, whether it would continue the replica's stream, and the plan of a dry run.
//!
//! ```text
//!   HandOffQuery ──▶ waiting ── the source is not asking ──▶ INFO at the primary ──▶ all answered ── PACE ──▶ next batch
//!                       │ one for each session: a later question replaces the earlier one
//!   Join, plan only ──▶ one at a time for each session; answered at once if the facts are younger than FRESH
//!   StatusQuery ──▶ answered at once, or PACE after the last report to this session; one waits for each session
//! ```
//!
//! A replica that gets a yes is on its way to the primary. [`Pins`] keep what it needs there until it has arrived, or
//! its session has ended. One that has asked counts already: another one's arrival must not release what its answer
//! rests on.
//!
//! So the primary is asked at most once in [`PACE`] for all hand-offs together, and what waits here is bounded by the
//! number of sessions, however often the replicas ask.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use remora_base::units::Size;
use remora_fabric::TransportKind;
use remora_fabric::tcp::Upload;
use remora_metrics::register::Family;
use remora_metrics::{Agent, Families, Scrape, Site, register as all};
use remora_process::progress::{Unit, WHOLE, in_progress};
use remora_process::rdb_file::{Found, Stored};
use remora_process::{AbortOnDrop, blocking};
use remora_protocol::{
    Advance, Announce, Base, BaseKind, Former, GenerationState, GenerationStatus, Message, Offer, Phase, ReplicaStatus,
    StatusReport, TableOffer, Terms, Totals, UploadStatus, WaitCause,
};
use remora_redis::ReplId;
use remora_server::own_changes::why_not_as_its_primary;
use remora_server::permission::{Permission, TO_REPLICATE};
use remora_server::pins::Travellers;
use remora_server::{CONVERTED, Client, Facts, Link, Pins, Place, Position, Role, Server, ServerError, ServerUrl};
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio::sync::mpsc::{self, Sender};

use super::capture::{Candidate, Data, Known, Tried, World, candidate, of_the_server, order};
use super::machine::Format;
use crate::captured::{Lookout, OutputBuffer};
use crate::machine::{Replica, Session, Stage};
use crate::tables::expected;
use crate::{Incoming, Source, exports};

/// An offer without tables, for a dry run.
pub fn plan_of(facts: &Facts, primary: Announce, write_rate: u64, process: u64) -> Offer {
    let nothing = || TableOffer {
        generation: 0,
        first_offset: 0,
        slot_size: 0,
        slots: 0,
        retained: false,
        keys: Vec::new(),
        seal: Vec::new(),
        compressed: false,
    };
    Offer {
        generation: 0,
        replid: facts.replid,
        former: facts.former.map(|(replid, end)| Former { replid, end }),
        offset: facts.offset.unwrap_or(0),
        snapshot: nothing(),
        journal: nothing(),
        primary,
        server: facts.name(),
        run_id: facts.run_id.clone().unwrap_or_default(),
        process,
        backlog_bytes: facts.backlog.map_or(0, |backlog| backlog.size),
        write_rate,
        upstream: None,
        warning: String::new(),
        obstacle: String::new(),
        terms: None,
    }
}

/// Why no snapshot of the server can be taken now, as the end of a sentence that begins with the server. A replica
/// without its primary refuses `PSYNC`.
pub(crate) fn obstacle(facts: &Facts) -> Option<String> {
    if facts.loading == Some(true) {
        return Some("is loading its data set".to_owned());
    }
    let link = facts.link.as_ref()?;
    let primary = format!("{}:{}", link.host, link.port);
    match (link.syncing, link.up) {
        (Some(true), _) => Some(format!("is taking a full copy of its primary {primary}")),
        (_, Some(false)) => Some(format!("has no link to its primary {primary}")),
        _ => None,
    }
}

/// The address at which a replica's server reaches the primary: `told`, or else the server's own address. The host is
/// empty if that address is valid on this host only.
pub(crate) fn announce(told: Option<&remora_server::HostPort>, url: &ServerUrl, facts: &Facts) -> Announce {
    let source_sees_as = url.to_string();
    if let Some(told) = told {
        let tls = url.is_tls();
        return Announce { host: told.host.clone(), port: told.port, tls, source_sees_as };
    }
    match url.place() {
        Place::Tcp { host, port, tls } => {
            let host = if url.is_local_only() { String::new() } else { host.clone() };
            Announce { host, port: *port, tls: *tls, source_sees_as }
        }
        Place::Unix(_) => {
            let port = facts.tcp_port.or(facts.tls_port).unwrap_or(0);
            let tls = facts.tcp_port.is_none();
            Announce { host: String::new(), port, tls, source_sees_as }
        }
    }
}

/// The primary's format that a server with this name and version (`Valkey 9.1.2`) reads.
pub(crate) fn format_for(facts: &Facts, server: &str) -> Format {
    if server.ends_with(CONVERTED) {
        return Format::Own;
    }
    let major = server.strip_prefix("Valkey ").and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    match facts.own_format() {
        Some(own) if major.is_none_or(|major| major < own.major) => Format::Shared,
        _ => Format::Own,
    }
}

/// Replaces an unspecified host (0.0.0.0 or ::), at which a replica lends its slots, by the host from which it
/// connected.
pub(crate) fn as_others_reach_it(serves_at: &str, seen: std::net::SocketAddr) -> String {
    match serves_at.parse::<std::net::SocketAddr>() {
        Ok(address) if address.ip().is_unspecified() => {
            std::net::SocketAddr::new(seen.ip(), address.port()).to_string()
        }
        Ok(address) => address.to_string(),
        // Not a valid address: other replicas cannot reach it.
        Err(_) => String::new(),
    }
}

/// What a reader is called: as it says. If it says only a port, it is a server on the host from which it connected. If
/// it says nothing, it has no name but that of its connection.
pub(crate) fn name_of(said: String, seen: std::net::SocketAddr) -> String {
    if said.is_empty() {
        return seen.to_string();
    }
    match said.strip_prefix(':').and_then(|port| port.parse().ok()) {
        Some(port) => std::net::SocketAddr::new(seen.ip(), port).to_string(),
        None => said,
    }
}

/// The history that a replica has executed, as far as this source has given it any.
pub fn known_history(history: Option<ReplId>) -> Result<ReplId, String> {
    history.ok_or_else(|| "this source has given the replica no snapshot and no stream".to_owned())
}

/// Reads the server's facts over a connection that is opened when first needed and again after a failure.
pub(crate) async fn ask(client: &Mutex<Option<Client>>, server: &Server) -> Result<Facts, remora_server::ServerError> {
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

// What a replica that joins now would get, and whether the server would send this source a snapshot at all.
//
// A source's user may lack `+psync`, and a replica that the source captures may have begun to evict. Both are found
// before a replica asks, when the source starts and with the facts for each plan, so that a dry run hears of them.

/// How long the server is believed to permit what it has permitted: the question can leave a line in its log.
const BELIEVED_FOR: Duration = Duration::from_secs(60);

/// What the server has permitted.
#[derive(Debug, Default)]
pub(super) struct Rights(std::sync::Mutex<Option<Instant>>);

impl Rights {
    /// Why the server sends this source no snapshot until an administrator changes something there; `None` if nothing
    /// is known to speak against it.
    ///
    /// # Errors
    /// The connection failed.
    pub(super) async fn why_refused(&self, client: &mut Client, facts: &Facts) -> Result<Option<String>, ServerError> {
        if !self.are_believed() {
            for needed in TO_REPLICATE {
                if let Permission::Refused(error) = needed.ask(client, facts).await? {
                    return Ok(Some(error.to_string()));
                }
            }
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        why_not_as_its_primary(client).await
    }

    fn are_believed(&self) -> bool {
        let asked = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        asked.is_some_and(|asked| asked.elapsed() < BELIEVED_FOR)
    }
}

/// What a replica that joins now gets. `refusal`: why there will be no further snapshot.
pub(super) fn terms(source: &Source, refusal: Option<&str>) -> Terms {
    let windowed = source.tables.is_windowed_for(&source.facts);
    let held = !needs_fork(source);
    let (geometry, tuning) = (source.tables.snapshot.1, &source.methods.tuning);
    let snapshot_bytes = match held && !source.gauge.is_capturing() {
        true => source.gauge.received(),
        false => expected(&source.facts, geometry),
    };
    Terms {
        snapshot_bytes,
        ring_bytes: source.tables.ring(),
        windowed,
        held,
        sealed: source.tables.is_sealed(),
        fork_delay_seconds: if source.methods.takes_from_the_server() { tuning.fork_delay() } else { 0 },
        tunes_server: tuning.is_wanted(),
        is_refused: refusal.is_some(),
        offers_shm: source.exports.offer(TransportKind::Shm),
        offers_verbs: source.exports.offer(TransportKind::Verbs),
        base: base(source),
    }
}

/// Whether a replica that joins now makes the server fork: there is no snapshot, or its slots are reused.
pub(super) fn needs_fork(source: &Source) -> bool {
    source.machine.status().snapshot.is_none() || source.tables.is_windowed_for(&source.facts)
}

/// What the loop knows.
#[derive(Default)]
pub(super) struct Choice {
    found: Vec<Found>,
    /// Which ones were tried lately.
    pub(super) tried: Tried,
    /// What the present snapshot was made of, if it was stored.
    from: Option<From>,
    _looking: Option<AbortOnDrop>,
}

/// A snapshot was made of what was stored.
struct From {
    generation: u64,
    place: String,
    /// How old the data were when it began.
    age: Duration,
}

impl Choice {
    /// Begins to look at what is stored, if anything is named.
    pub(super) fn begin(stored: Option<&Arc<dyn Stored>>, tell: Sender<Incoming>) -> Choice {
        let looking = stored.map(|stored| AbortOnDrop::new(&tokio::spawn(look(stored.clone(), tell))));
        Choice { _looking: looking, ..Choice::default() }
    }

    /// A look has ended.
    pub(super) fn found(&mut self, found: Vec<Found>) {
        self.found = found;
    }

    /// A snapshot begins that is made of what is stored.
    pub(super) fn begins(&mut self, generation: u64, place: &str, age: Duration) {
        let place = place.to_owned();
        self.from = Some(From { generation, place, age });
    }
}

async fn look(stored: Arc<dyn Stored>, tell: Sender<Incoming>) {
    loop {
        let asked = stored.clone();
        let Ok(found) = blocking(move || Ok(asked.look())).await else { return };
        if tell.send(Incoming::Stored(found)).await.is_err() {
            return;
        }
        tokio::time::sleep(stored.holds()).await;
    }
}

/// From what a replica is made that joins now.
pub(super) fn base(source: &Source) -> Base {
    let candidates = candidates(source);
    let stream = source.machine.status().stream;
    let journal = stream.map(|stream| {
        let (first, end) = source.gauge.journal();
        (stream.history, first, end)
    });
    let world = World {
        facts: &source.facts,
        journal,
        journal_bytes: source.tables.journal_ring(),
        max_age: source.options.max_age,
        no_fork: source.options.no_fork,
    };
    let told = order(&candidates, &world).told(&candidates);
    match made_of(source).filter(|_| told.kind == BaseKind::Snapshot) {
        None => told,
        // It serves by its age here. Its data are older.
        Some(from) => Base { age_seconds: told.age_seconds.saturating_add(from.age.as_secs()), ..told },
    }
}

/// What there is.
fn candidates(source: &Source) -> Vec<Candidate> {
    let (options, methods, now) = (&source.options, &source.methods, Instant::now());
    let mut all: Vec<Candidate> = held(source, now).into_iter().collect();
    if options.first.is_some() {
        all.push(Candidate::new(BaseKind::Copy));
    }
    if let Some(file) = methods.file() {
        all.push(file);
        return all;
    }
    let is_shared = source.machine.status().snapshot.is_some_and(|snapshot| snapshot.format == Format::Shared);
    all.extend(source.choice.found.iter().map(|found| candidate(found, is_shared, &source.choice.tried)));
    all.extend(of_the_server(options.module.capture, options.no_fork, methods.sweep_failed_lately(now)));
    all
}

/// What the present snapshot was made of, if it was stored.
fn made_of(source: &Source) -> Option<&From> {
    let generation = source.machine.status().snapshot?.generation;
    source.choice.from.as_ref().filter(|from| from.generation == generation)
}

/// The snapshot that is here, or is being taken.
fn held(source: &Source, now: Instant) -> Option<Candidate> {
    let snapshot = source.machine.status().snapshot?;
    let place =
        made_of(source).map_or(String::new(), |from| format!("{}, from {}", BaseKind::Snapshot.words(), from.place));
    let known = match snapshot.origin() {
        _ if source.tables.is_windowed_for(&source.facts) => Known::Unusable("its slots are reused".to_owned()),
        // It is asked for, and one of the others has to serve.
        None if source.options.no_fork => return None,
        None => Known::New,
        Some(_) if let Some(why) = source.machine.why_late(now) => Known::Unusable(why.to_owned()),
        Some(origin) => {
            let age = now.saturating_duration_since(snapshot.taken());
            Known::There(Data { history: origin.history, offset: origin.offset, reaches: origin.offset, age })
        }
    };
    Some(Candidate { kind: BaseKind::Snapshot, place, known })
}

/// The shortest time between two questions to the primary about hand-offs: little beside a hand-off, and long beside
/// the time that `INFO` takes. The questions of many replicas that arrive meanwhile are answered together.
const PACE: Duration = Duration::from_millis(50);

/// Facts younger than this are fresh enough for a plan.
const FRESH: Duration = Duration::from_millis(100);

/// How long a replica's plan waits for fresh facts of the server: well below the time that replicas wait for a plan.
const LEARN_LIMIT: Duration = Duration::from_secs(3);

/// Whether the primary would continue this history after this offset, while clients write at this rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandOff {
    offset: u64,
    history: Option<ReplId>,
    rate: u64,
}

impl HandOff {
    fn at(&self, history: ReplId) -> Position {
        Position { history, offset: self.offset, rate: self.rate }
    }
}

/// The questions that are asked together, and their sessions.
type Batch = BTreeMap<Session, HandOff>;

/// The questions that wait for an answer.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// Questions for the next batch.
    waiting: Batch,
    /// Whether the primary is being asked, or was asked less than [`PACE`] ago.
    is_busy: bool,
    /// Sessions that wait for a plan.
    plans: BTreeSet<Session>,
    /// The sessions that have asked for the status.
    reports: BTreeMap<Session, Report>,
    /// The number of this process, for offers.
    pub(super) process: u64,
    /// When the source's facts were read last.
    learned: Option<Instant>,
    /// Why the server has not answered the last question about them.
    silent: Option<String>,
    /// Why the server sends no snapshot until an administrator changes something there.
    refusal: Option<String>,
    /// One connection to the server, opened when first needed and again after a failure.
    pub(super) client: Arc<Mutex<Option<Client>>>,
    /// What the server keeps for the replicas on their way to it.
    pub(super) pins: Arc<Mutex<Pins>>,
    /// For whom.
    travellers: Travellers<Session>,
    /// Whether the source's links may stay.
    pub(super) presence: Lookout,
}

/// What a session gets of the status.
#[derive(Clone, Copy, Debug)]
struct Report {
    /// When it got the last report, or gets the next one.
    at: Instant,
    /// It waits for that report.
    waits: bool,
}

impl Questions {
    /// Those of a process that has just started.
    pub(super) fn new() -> Questions {
        let mut drawn = [0; 8];
        // Without random numbers the process id tells the processes of one host apart.
        let process = getrandom::fill(&mut drawn).map_or(std::process::id().into(), |()| u64::from_le_bytes(drawn));
        Questions { process, ..Questions::default() }
    }

    /// A session asks for the status. Returns how long its report must wait; `None` if it waits for one already.
    fn report(&mut self, session: Session, now: Instant) -> Option<Duration> {
        let last = self.reports.get(&session);
        if last.is_some_and(|last| last.waits) {
            return None;
        }
        let at = last.map_or(now, |last| now.max(last.at + PACE));
        self.reports.insert(session, Report { at, waits: at > now });
        Some(at.saturating_duration_since(now))
    }

    /// A session gets the report that it waits for.
    fn reported(&mut self, session: Session) {
        if let Some(report) = self.reports.get_mut(&session) {
            report.waits = false;
        }
    }

    /// Notes a session's question in place of its earlier one. Returns the batch to ask the primary about, if it may be
    /// asked now.
    fn put(&mut self, session: Session, question: HandOff) -> Option<Batch> {
        self.waiting.insert(session, question);
        self.travellers.asked(session);
        if self.is_busy { None } else { self.next() }
    }

    /// The primary may be asked again. Returns the batch to ask it about, if questions wait.
    fn next(&mut self) -> Option<Batch> {
        self.is_busy = !self.waiting.is_empty();
        self.is_busy.then(|| std::mem::take(&mut self.waiting))
    }

    /// A session has ended.
    pub(super) fn left(&mut self, session: Session) {
        self.waiting.remove(&session);
        self.plans.remove(&session);
        self.reports.remove(&session);
        if self.travellers.left(&session) {
            self.release();
        }
    }

    /// A session's replica is in this phase.
    pub(super) fn is_in(&mut self, session: Session, phase: Phase) {
        if self.travellers.is_in(&session, phase) {
            self.release();
        }
    }

    fn release(&self) {
        let pins = self.pins.clone();
        tokio::spawn(async move { pins.lock().await.release() });
    }

    /// The source has fresh facts.
    pub(super) fn learned(&mut self, now: Instant, refusal: Option<String>) {
        (self.learned, self.silent, self.refusal) = (Some(now), None, refusal);
    }

    /// The server has not answered.
    pub(super) fn not_learned(&mut self, why: String) {
        self.silent = Some(why);
    }

    fn is_fresh(&self, now: Instant) -> bool {
        let is_recent = self.learned.is_some_and(|learned| now.saturating_duration_since(learned) < FRESH);
        // What an administrator has just granted is to be seen at once.
        is_recent && self.refusal.is_none()
    }
}

/// What a task that asks the primary reports to the source's loop.
pub(crate) enum Answered {
    /// The answers to the questions of these sessions.
    HandOffs(Vec<(Session, Result<(), String>)>),
    /// [`PACE`] has passed since that answer.
    AskAgain,
    /// The facts for this replica's plan are there: fresh ones, or the last known if the server did not answer in time.
    Plan(Session),
    /// The time of this session's report has come.
    Report(Session),
}

impl Source {
    /// Answers as soon as the primary has answered the source.
    pub(super) fn answer_hand_off(&mut self, session: Session, offset: u64) {
        let (rate, history) = (self.rate.highest(), self.machine.status().history_of(session));
        let batch = self.questions.put(session, HandOff { offset, history, rate });
        ask_about(self, batch);
    }

    /// Answers with fresh facts of the server, which may have restarted or failed over since the last snapshot. If the
    /// server does not answer within [`LEARN_LIMIT`], the last known facts are sent. A session that asks again while
    /// it waits gets one plan.
    pub(super) fn send_plan(&mut self, session: Session) {
        if self.questions.is_fresh(Instant::now()) {
            return tell_plan(self, session);
        }
        if !self.questions.plans.insert(session) {
            return;
        }
        let (learning, incoming) = (self.learn(), self.incoming.clone());
        tokio::spawn(async move {
            if tokio::time::timeout(LEARN_LIMIT, learning).await.is_err() {
                let why = format!("no answer for {} s", LEARN_LIMIT.as_secs());
                let _ = incoming.send(Incoming::NotLearned(why)).await;
            }
            let _ = incoming.send(Incoming::Answered(Answered::Plan(session))).await;
        });
    }

    /// An offer without tables, for a dry run.
    pub(super) fn plan(&self) -> Offer {
        let told = self.options.announce.clone().or_else(|| self.captured.primary());
        let primary = announce(told.as_ref(), self.captured.server().url(), &self.facts);
        let plan = plan_of(&self.facts, primary, self.rate.bytes_per_second(), self.questions.process);
        // The primary holds the stream back only for a capture that takes both.
        let holds_back = self.machine.status().stream.is_none() && self.tables.is_windowed_for(&self.facts);
        let expected = expected(&self.facts, self.tables.snapshot.1);
        let warning = if holds_back { self.output.warning(expected, self.tables.ring()) } else { String::new() };
        let obstacle = self.obstacle();
        // What the source holds needs no further word of the server.
        let refusal = self.questions.refusal.as_deref().filter(|_| obstacle.is_none() && needs_fork(self));
        let terms = Some(terms(self, refusal));
        Offer { warning, obstacle: obstacle.or(refusal.map(str::to_owned)).unwrap_or_default(), terms, ..plan }
    }

    /// Why no snapshot of the server can be taken now.
    fn obstacle(&self) -> Option<String> {
        let what = match &self.questions.silent {
            Some(why) => format!("does not answer ({why})"),
            None => obstacle(&self.facts)?,
        };
        Some(format!("its server {} {what}", self.captured.server().url()))
    }

    /// Why no snapshot of the server can be taken now, if the server is a replica: its primary may serve those who
    /// wait.
    pub(super) fn is_cut_off(&self) -> Option<String> {
        self.facts.link.as_ref().and_then(|_| self.obstacle())
    }

    /// Tells the replicas that wait for a snapshot why none can be taken now, if that is so.
    pub(super) fn tell_of_an_obstacle(&mut self) {
        let Some(text) = self.is_cut_off() else { return };
        let waiting: Vec<Session> = self.machine.status().waiting().collect();
        for session in waiting {
            self.send(session, Message::Waiting { cause: WaitCause::CutOff, text: text.clone() });
        }
    }

    /// Reads the server's facts in the background.
    pub(super) fn learn(&self) -> tokio::task::JoinHandle<()> {
        let (client, server, incoming) = (self.questions.client.clone(), self.captured.server(), self.incoming.clone());
        let (tuning, rights) = (self.methods.tuning.clone(), self.methods.rights.clone());
        let takes_from_the_server = self.methods.takes_from_the_server();
        tokio::spawn(async move {
            let facts = match ask(&client, &server).await {
                Ok(facts) => facts,
                Err(error) => return drop(incoming.send(Incoming::NotLearned(error.to_string())).await),
            };
            let mut client = client.lock().await;
            let Some(client) = client.as_mut() else { return };
            let buffer = OutputBuffer::read(client, &facts).await;
            tuning.learn(client).await;
            let refusal = match takes_from_the_server {
                true => rights.why_refused(client, &facts).await.unwrap_or_default(),
                false => None,
            };
            let _ = incoming.send(Incoming::Learned(Box::new((facts, buffer, refusal)))).await;
        })
    }
}

/// Sends the status, at most once in [`PACE`] to a session: a report names every replica.
pub(super) fn send_status(source: &mut Source, session: Session) {
    match source.questions.report(session, Instant::now()) {
        None => {}
        Some(Duration::ZERO) => source.send(session, Message::Status(report(source))),
        Some(pause) => {
            let incoming = source.incoming.clone();
            tokio::spawn(async move {
                tokio::time::sleep(pause).await;
                let _ = incoming.send(Incoming::Answered(Answered::Report(session))).await;
            });
        }
    }
}

/// Asks the primary, if there is a batch to ask about.
fn ask_about(source: &Source, batch: Option<Batch>) {
    let Some(batch) = batch else { return };
    let (client, pins) = (source.questions.client.clone(), source.questions.pins.clone());
    let (server, incoming) = (source.captured.server(), source.incoming.clone());
    tokio::spawn(async move {
        let facts = ask(&client, &server).await;
        let mut pins = pins.lock().await;
        // The lowest offset first: its pin serves the others.
        let mut batch: Vec<_> = batch.into_iter().collect();
        batch.sort_by_key(|(_, question)| question.offset);
        let mut answers = Vec::with_capacity(batch.len());
        for (session, question) in batch {
            let answer = match &facts {
                Ok(facts) => match known_history(question.history) {
                    Ok(history) => pins.secure(&server, facts, question.at(history)).await,
                    Err(text) => Err(text),
                },
                Err(error) => Err(format!("the primary does not answer: {error}")),
            };
            answers.push((session, answer));
        }
        drop(pins);
        let _ = incoming.send(Incoming::Answered(Answered::HandOffs(answers))).await;
        tokio::time::sleep(PACE).await;
        let _ = incoming.send(Incoming::Answered(Answered::AskAgain)).await;
    });
}

/// Sends the answers to the replicas that asked, and asks the primary again where questions wait.
pub(super) fn answered(source: &mut Source, answered: Answered) {
    match answered {
        Answered::HandOffs(answers) => {
            for (session, answer) in answers {
                let (covered, text) = (answer.is_ok(), answer.err().unwrap_or_default());
                source.send(session, Message::HandOffAnswer { covered, text });
            }
        }
        Answered::AskAgain => {
            let batch = source.questions.next();
            ask_about(source, batch);
        }
        Answered::Plan(session) => {
            if source.questions.plans.remove(&session) {
                tell_plan(source, session);
            }
        }
        Answered::Report(session) => {
            source.questions.reported(session);
            source.send(session, Message::Status(report(source)));
        }
    }
}

/// Sends a plan. It says if the source would leave the primary alone for a while before the next snapshot.
fn tell_plan(source: &mut Source, session: Session) {
    let mut plan = source.plan();
    let why_not = source.machine.status().forks.why_not();
    if let Some((_, why)) = why_not.filter(|_| needs_fork(source) && plan.warning.is_empty()) {
        plan.warning = why;
    }
    source.send(session, Message::Offer(plan));
}

/// The report that `remora status` shows.
pub(super) fn report(source: &Source) -> StatusReport {
    let (now, status) = (Instant::now(), source.machine.status());
    StatusReport {
        source: env!("CARGO_PKG_VERSION").into(),
        server: source.captured.server().url().to_string(),
        role: role(&source.facts),
        generation: generation_status(source, now),
        base: base(source),
        preparing: source.preparation.words(),
        saving: source.ahead.expected().saving,
        replicas: status
            .replicas
            .iter()
            .map(|(session, replica)| replica_status(source, *session, replica, now))
            .collect(),
        totals: Totals {
            snapshots_taken: status.snapshots_taken,
            snapshots_failed: status.failures.total(),
            forks: status.forks_made,
            replicas_done: status.replicas_done,
            bytes_served: source.exports.bytes_served(),
        },
        last_failure: status.failures.last().to_owned(),
        upload: source.exports.upload().map(upload_status),
    }
}

/// The source in one line, for a service manager.
pub(super) fn in_short(source: &Source) -> String {
    let status = source.machine.status();
    let snapshot = match status.snapshot.map(|snapshot| &snapshot.stage) {
        None if source.preparation.is_under_way() => source.preparation.words(),
        None => "no snapshot".to_owned(),
        Some(Stage::Asked) => "a snapshot is requested".to_owned(),
        Some(Stage::Sealed { .. }) => format!("a snapshot of {}", Size::bytes(source.gauge.received())),
        Some(_) => format!("taking a snapshot, {}", in_progress(&source.ahead.look(Instant::now()), Unit::Bytes)),
    };
    let replicas = match status.replicas.len() {
        0 => "no replica has joined".to_owned(),
        1 => "1 replica has joined".to_owned(),
        count => format!("{count} replicas have joined"),
    };
    let standby = source.standby.as_ref().map_or(String::new(), |standby| format!("{}; ", standby.words(source)));
    format!("{standby}{snapshot}; {replicas}; {} made so far", status.replicas_done)
}

fn generation_status(source: &Source, now: Instant) -> Option<GenerationStatus> {
    let snapshot = source.machine.status().snapshot?;
    let origin = snapshot.origin()?;
    let (first, end) = source.gauge.journal();
    Some(GenerationStatus {
        generation: origin.generation,
        replid: origin.history,
        offset_start: origin.offset,
        offset_now: end,
        state: match snapshot.stage {
            Stage::Sealed { .. } => GenerationState::Complete,
            _ => GenerationState::Capturing,
        },
        snapshot_bytes: source.gauge.received(),
        length: source.ahead.expected().length,
        advance: source.ahead.look(now).advance(),
        slots: u64::from(source.tables.snapshot.1.slots),
        published_slots: source.gauge.published_slots(),
        retired_slots: source.gauge.retired_slots(),
        windowed: source.gauge.retired_slots() > 0,
        memory_bytes: source.tables.resident(),
        memory_limit: source.options.tables.memory.get(),
        age_seconds: snapshot.taken().elapsed().as_secs(),
        journal_first: first,
        journal_end: end + 1,
        capture_millis: source.gauge.capture_time().as_millis() as u64,
        capture: source.gauge.method().to_string(),
        no_fast_keys: source.gauge.no_fast_keys(),
        stored_bytes: source.gauge.stored_bytes(),
        compression: exports::compression(source),
    })
}

fn replica_status(source: &Source, session: Session, replica: &Replica, now: Instant) -> ReplicaStatus {
    let (oldest_slot, serves) = source.topology.lends(session);
    let peer = source.sessions.get(&session);
    ReplicaStatus {
        name: replica.name.clone(),
        address: replica.address.clone(),
        transport: replica.transport().map(|kind| kind.name().to_owned()).unwrap_or_default(),
        transport_why: match replica.waits_because() {
            Some(why) => why.to_owned(),
            None => peer.map(|peer| peer.transport_why.clone()).unwrap_or_default(),
        },
        no_fast_keys: peer.map(|peer| peer.no_fast_keys.clone()).unwrap_or_default(),
        protection: peer
            .map(|peer| peer.data_protection(replica.transport(), source.tables.is_sealed()).to_string())
            .unwrap_or_default(),
        phase: replica.at.phase,
        slots_held: replica.at.slots_held,
        advance: advance(replica, now),
        journal_lag_bytes: source.gauge.journal().1.saturating_sub(replica.at.applied_offset),
        applied_offset: replica.at.applied_offset,
        joined_seconds: now.duration_since(replica.joined).as_secs(),
        silent_seconds: now.duration_since(replica.last_seen).as_secs(),
        session,
        reads_from: source.topology.reads_from(session),
        serves,
        oldest_slot,
        zone: replica.zone.clone(),
    }
}

/// How far a replica is with its snapshot: nothing is known of one that waits, and one that has all has no rate.
fn advance(replica: &Replica, now: Instant) -> Advance {
    match replica.generation {
        _ if replica.has_all_slots() => WHOLE,
        None => Advance::default(),
        Some(_) => replica.tracker.look(now).advance(),
    }
}

fn upload_status(upload: Upload) -> UploadStatus {
    let Upload { bytes_per_second, queueing, yields } = upload;
    UploadStatus { bytes_per_second, queueing_micros: queueing.as_micros() as u64, yields }
}

fn role(facts: &Facts) -> String {
    match (facts.role, &facts.link) {
        (Some(Role::Replica), Some(Link { host, port, .. })) => format!("replica of {host}:{port}"),
        (Some(Role::Replica), None) => "replica".into(),
        _ => "primary".into(),
    }
}

// The source's metrics.

/// How long the server may take to say how it is.
const SERVER_LIMIT: Duration = Duration::from_secs(2);

/// Serves the metrics of the source whose loop reads these messages.
pub(super) fn serve(listener: TcpListener, incoming: mpsc::Sender<Incoming>) -> Site {
    Site::serve(listener, move || {
        let incoming = incoming.clone();
        async move {
            let (scrape, told) = Scrape::of(Agent::Source);
            incoming.send(Incoming::Scraped(Box::new(scrape))).await.ok()?;
            told.await.ok()
        }
    })
}

/// Answers a scrape, after the server was asked how it is.
pub(super) fn answer(source: &Source, mut scrape: Scrape) {
    let (report, rate) = (report(source), source.rate.bytes_per_second());
    let copy = source.standby.as_ref().map(|_| Copy {
        is_whole: source.machine.status().snapshot.is_some_and(|snapshot| snapshot.is_sealed()),
        journal_end: source.machine.status().stream.map(|_| source.gauge.journal().1),
    });
    let (client, server) = (source.questions.client.clone(), source.captured.server());
    tokio::spawn(async move {
        let asked = tokio::time::timeout(SERVER_LIMIT, ask(&client, &server)).await;
        let facts = match asked {
            Ok(Ok(facts)) => Ok(facts),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("{} does not answer within {} s", server.url(), SERVER_LIMIT.as_secs())),
        };
        show(&mut scrape.families, &report, facts.as_ref().ok(), rate);
        show_copy(&mut scrape.families, copy, facts.as_ref().ok());
        let preparing = Some(format!("the source is {}", report.preparing)).filter(|_| !report.preparing.is_empty());
        scrape.report = Some(Box::new(report));
        scrape.answer(match &facts {
            Ok(facts) if facts.loading == Some(true) => Some(format!("{} is loading its data set", server.url())),
            Ok(_) => preparing,
            Err(why) => Some(why.clone()),
        });
    });
}

/// What a standby has.
struct Copy {
    is_whole: bool,
    /// The newest byte of the stream; `None` without a stream.
    journal_end: Option<u64>,
}

fn show_copy(families: &mut Families, copy: Option<Copy>, facts: Option<&Facts>) {
    let Some(copy) = copy else { return };
    families.whether(&all::STANDBY_COPY, copy.is_whole);
    if let (Some(end), Some(offset)) = (copy.journal_end, facts.and_then(|facts| facts.offset)) {
        families.number(&all::STANDBY_LAG, offset.saturating_sub(end));
    }
}

/// `facts`: `None` if the server does not answer. `rate`: bytes that its clients write per second.
fn show(families: &mut Families, report: &StatusReport, facts: Option<&Facts>, rate: u64) {
    families.info(&all::SOURCE_SERVER, [&*report.server, &*report.role]);
    families.whether(&all::SOURCE_SERVER_UP, facts.is_some());
    families.number(&all::SOURCE_WRITTEN, rate);
    show_snapshot(families, report.generation.as_ref());
    show_primary(families, report, facts, rate);
    let totals = &report.totals;
    families.counters(&all::SNAPSHOTS, [(["taken"], totals.snapshots_taken), (["failed"], totals.snapshots_failed)]);
    families.counter(&all::FORKS, totals.forks);
    families.states(&all::BASE, BaseKind::NAMES, Some(report.base.kind.name()));
    families.counter(&all::SYNCS_DONE, totals.replicas_done);
    families.counter(&all::SERVED, totals.bytes_served);
    if let Some(upload) = &report.upload {
        families.number(&all::UPLOAD_RATE, upload.bytes_per_second);
        families.gauge(&all::UPLOAD_QUEUEING, upload.queueing_micros as f64 / 1e6);
        families.whether(&all::UPLOAD_YIELDS, upload.yields);
    }
    show_replicas(families, &report.replicas);
}

fn show_snapshot(families: &mut Families, snapshot: Option<&GenerationStatus>) {
    let state = match snapshot.map(|snapshot| snapshot.state) {
        None => "none",
        Some(GenerationState::Capturing) => "capturing",
        Some(GenerationState::Complete) => "complete",
    };
    families.states(&all::SNAPSHOT_STATE, ["none", "capturing", "complete"], Some(state));
    let Some(snapshot) = snapshot else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let began = now.saturating_sub(Duration::from_secs(snapshot.age_seconds));
    for (family, value) in [
        (&all::SNAPSHOT_BYTES, snapshot.snapshot_bytes),
        (&all::SNAPSHOT_STORED, snapshot.stored_bytes),
        (&all::SNAPSHOT_SLOTS, snapshot.slots),
        (&all::SNAPSHOT_PUBLISHED, snapshot.published_slots),
        (&all::SNAPSHOT_RETIRED, snapshot.retired_slots),
        (&all::SNAPSHOT_WINDOWED, snapshot.windowed.into()),
        (&all::SNAPSHOT_GENERATION, snapshot.generation),
        (&all::SNAPSHOT_OFFSET, snapshot.offset_start),
        (&all::SNAPSHOT_STARTED, began.as_secs()),
        (&all::JOURNAL_FIRST, snapshot.journal_first),
        (&all::JOURNAL_END, snapshot.journal_end),
        (&all::MEMORY_USED, snapshot.memory_bytes),
        (&all::MEMORY_LIMIT, snapshot.memory_limit),
    ] {
        families.number(family, value);
    }
    if let Some(ratio) = snapshot.advance.ratio() {
        families.gauge(&all::SNAPSHOT_PROGRESS, ratio);
    }
    families.gauge(&all::SNAPSHOT_CAPTURE, snapshot.capture_millis as f64 / 1000.0);
}

/// The primary's backlog, where the source is beside the primary: that of a replica says nothing of it.
fn show_primary(families: &mut Families, report: &StatusReport, facts: Option<&Facts>, rate: u64) {
    let Some(facts) = facts.filter(|facts| facts.role == Some(Role::Primary)) else { return };
    let Some(backlog) = facts.backlog else { return };
    families.number(&all::BACKLOG, backlog.size);
    let Some(snapshot) = &report.generation else { return };
    let behind = facts.offset.unwrap_or(0).saturating_sub(snapshot.offset_start);
    if let Some(seconds) = backlog.size.saturating_sub(behind).checked_div(rate) {
        families.number(&all::BACKLOG_HEADROOM, seconds);
    }
}

fn show_replicas(families: &mut Families, replicas: &[ReplicaStatus]) {
    const PHASES: [Phase; 7] =
        [Phase::Waiting, Phase::Transfer, Phase::Load, Phase::CatchUp, Phase::HandOff, Phase::Stay, Phase::Done];
    let counts = PHASES.map(|phase| {
        let count = replicas.iter().filter(|replica| replica.phase == phase).count();
        ([phase.to_string()], count as f64)
    });
    families.gauges(&all::REPLICAS, counts);
    let name = |replica: &ReplicaStatus| replica.name.clone();
    let above = |replica: &ReplicaStatus| {
        let above = replica.reads_from.and_then(|session| replicas.iter().find(|other| other.session == session));
        above.map_or_else(|| "source".to_owned(), name)
    };
    families.infos(
        &all::REPLICA,
        replicas.iter().map(|replica| {
            let ReplicaStatus { address, zone, transport, .. } = replica.clone();
            [name(replica), address, zone, transport, above(replica)]
        }),
    );
    let mut each = |family: &'static Family, value: fn(&ReplicaStatus) -> Option<f64>| {
        families.gauges(family, replicas.iter().filter_map(|replica| Some(([name(replica)], value(replica)?))));
    };
    each(&all::REPLICA_PROGRESS, |replica| replica.advance.ratio());
    each(&all::REPLICA_RATE, |replica| Some(replica.advance.rate_bytes_per_s as f64));
    // Without an acknowledged offset, the lag would be the whole history.
    each(&all::REPLICA_LAG, |replica| (replica.applied_offset > 0).then_some(replica.journal_lag_bytes as f64));
    each(&all::REPLICA_APPLIED, |replica| (replica.applied_offset > 0).then_some(replica.applied_offset as f64));
    each(&all::REPLICA_SILENT, |replica| Some(replica.silent_seconds as f64));
    each(&all::REPLICA_JOINED, |replica| Some(replica.joined_seconds as f64));
    each(&all::REPLICA_SERVES, |replica| Some(f64::from(u8::from(replica.serves))));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_server::{Backlog, Link};

    use super::*;

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
        let answer = known_history(history).and_then(|history| facts.covers(history, offset, 0));
        (answer.is_ok(), answer.err().unwrap_or_default())
    }

    #[test]
    fn a_reader_is_called_as_it_says_or_by_the_port_of_its_server() {
        let name = |said: &str, seen: &str| name_of(said.to_owned(), seen.parse().unwrap());
        assert_eq!(name(":7002", "10.0.0.7:40001"), "10.0.0.7:7002");
        assert_eq!(name(":7002", "[fd00::1]:40001"), "[fd00::1]:7002");
        assert_eq!(name("", "10.0.0.7:40001"), "10.0.0.7:40001");
        for other in ["orders", "db1:6379", ":", ":70000", ":-1"] {
            assert_eq!(name(other, "10.0.0.7:40001"), other);
        }
    }

    #[test]
    fn a_server_without_its_primary_says_so() {
        let replica = |up, syncing| {
            let link = Link { host: "10.0.0.1".into(), port: 6379, up, syncing };
            obstacle(&Facts { link: Some(link), ..Facts::default() })
        };
        assert_eq!(replica(Some(true), Some(false)), None);
        assert_eq!(replica(None, None), None, "what a server does not report is no obstacle");
        assert!(
            replica(Some(false), Some(false)).is_some_and(|text| text.contains("no link to its primary 10.0.0.1:6379"))
        );
        assert!(replica(Some(false), Some(true)).is_some_and(|text| text.contains("a full copy")));
        assert_eq!(obstacle(&primary()), None);
        assert!(obstacle(&Facts { loading: Some(true), ..primary() }).is_some_and(|text| text.contains("loading")));
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
    fn no_offset_of_a_replica_and_no_figure_of_the_server_overflows() {
        assert!(!answer(&primary(), Some(replid("a")), u64::MAX).0);
        assert!(!answer(&primary(), Some(replid("b")), u64::MAX).0);
        let backlog = Backlog { active: true, size: u64::MAX, first: u64::MAX, held: u64::MAX };
        let facts = Facts { backlog: Some(backlog), ..primary() };
        assert!(!answer(&facts, Some(replid("a")), 7).0);
        assert!(primary().covers(replid("a"), 120, u64::MAX).is_err());
    }

    #[test]
    fn a_hand_off_at_an_offset_that_no_server_reaches_is_not_covered() {
        for history in ["a", "b"] {
            for offset in [u64::MAX, u64::MAX - 1, i64::MAX as u64] {
                let (covered, text) = answer(&primary(), Some(replid(history)), offset);
                assert!(!covered && text.contains(&offset.to_string()), "{text}");
            }
        }
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

    fn at(offset: u64) -> HandOff {
        HandOff { offset, history: None, rate: 0 }
    }

    #[test]
    fn a_question_is_asked_at_once_and_those_that_come_meanwhile_are_asked_together() {
        let mut questions = Questions::default();
        assert_eq!(questions.put(1, at(10)), Some(Batch::from([(1, at(10))])));
        for session in 2..5 {
            assert_eq!(questions.put(session, at(20)), None);
        }
        assert_eq!(questions.next().unwrap().len(), 3);
        assert_eq!(questions.next(), None);
        assert_eq!(questions.put(2, at(30)), Some(Batch::from([(2, at(30))])));
    }

    #[test]
    fn a_session_that_asks_without_end_has_one_question_waiting_and_it_is_the_latest() {
        let mut questions = Questions::default();
        questions.put(1, at(0)).unwrap();
        (1..=10_000).for_each(|offset| assert_eq!(questions.put(1, at(offset)), None));
        questions.put(2, at(7));
        assert_eq!(questions.next(), Some(Batch::from([(1, at(10_000)), (2, at(7))])));
    }

    #[test]
    fn a_session_that_has_left_is_not_asked_for() {
        let mut questions = Questions::default();
        questions.put(1, at(0)).unwrap();
        questions.put(2, at(0));
        questions.left(2);
        assert_eq!(questions.next(), None);
    }

    #[test]
    fn a_session_that_asks_for_the_status_without_end_gets_a_report_now_and_then() {
        let (mut questions, now) = (Questions::default(), Instant::now());
        assert_eq!(questions.report(1, now), Some(Duration::ZERO));
        assert_eq!(questions.report(2, now), Some(Duration::ZERO), "each session for itself");
        let soon = now + PACE / 5;
        assert_eq!(questions.report(1, soon), Some(PACE - PACE / 5));
        (0..10_000).for_each(|_| assert_eq!(questions.report(1, soon), None, "one report waits"));
        questions.reported(1);
        assert_eq!(questions.report(1, now + PACE), Some(PACE), "counted from the report that waited");
        questions.reported(1);
        assert_eq!(questions.report(1, now + 3 * PACE), Some(Duration::ZERO));
    }

    #[test]
    fn facts_are_fresh_for_a_moment() {
        let (mut questions, now) = (Questions::default(), Instant::now());
        assert!(!questions.is_fresh(now));
        questions.learned(now, None);
        assert!(questions.is_fresh(now + FRESH / 2) && !questions.is_fresh(now + FRESH));
        questions.learned(now, Some("it refuses PSYNC".into()));
        assert!(!questions.is_fresh(now), "an administrator may have granted it");
    }
}

#[cfg(test)]
mod status_tests {
    use remora_protocol::{Base, Totals};

    use super::*;
    use remora_metrics::families::Form;

    #[test]
    fn a_source_without_a_snapshot_and_without_a_server_has_metrics() {
        let report = StatusReport {
            source: "0.1.0".into(),
            server: "redis://10.0.0.1:6379".into(),
            role: "primary".into(),
            generation: None,
            base: Base::default(),
            preparing: String::new(),
            saving: None,
            replicas: Vec::new(),
            totals: Totals { snapshots_taken: 2, forks: 1, ..Totals::default() },
            last_failure: String::new(),
            upload: None,
        };
        let mut families = Families::new(Agent::Source);
        show(&mut families, &report, None, 0);
        let text = families.text(Form::OpenMetrics);
        for line in [
            "remora_source_server_up 0.0",
            "remora_snapshot_state{state=\"none\"} 1.0",
            "remora_snapshots_total{result=\"taken\"} 2",
            "remora_replicas{phase=\"waiting\"} 0.0",
            "remora_forks_total 1\n",
            "remora_base{kind=\"fork\"} 0.0",
            "remora_base{kind=\"none\"} 1.0",
            "remora_source_server_info{server=\"redis://10.0.0.1:6379\",role=\"primary\"} 1",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("snapshot_bytes") && !text.contains("backlog"), "{text}");
    }
}
