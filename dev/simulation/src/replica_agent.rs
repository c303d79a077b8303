//! Replica agent: the real machine of a replica agent, and the real preflight and task for its server. An actor stands
//! in the place of its delivery thread.
// Larger than the bound: what happens to an agent, from its preflight to its end, stands in one place.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use remora_protocol::{Join, Message as Said, Offer, Progress, RefusalCode};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::bytes::ByteDelivery;
use super::delivery::{AnyFeed, Deliver, Delivery};
use super::pins::{Pinning, Pins};
use super::plan::Mode;
use super::wire::{Address, Conn, End, Keeper, Message, SOURCES, ServerId, TRANSPORT};
use super::world::{Event, World, shown};
use remora_base::pace::Backoff;
use remora_conversation::Protection;
use remora_process::AbortOnDrop;
use remora_process::exit::{Code, Failure};
use remora_reader::addresses::{Addresses, Loss, Round};
use remora_reader::data_set::DataSet;
use remora_reader::source::Tables;
use remora_replica::Options;
use remora_replica::machine::{Action, DeliveryEvent, Event as Input, Introduced, Job, Replica, Report, SourceEvent};
use remora_replica::parts::driver::{Asks, Prepared, ServerHandle, prepare};
use remora_server::HostPort;
use remora_server::Position;

/// How often progress is reported.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Pause of a reader that found nothing.
const READ_PACE: u64 = 60;

/// Numbers of an agent's own events; those from [`CONNECTED`] on are attempts to connect to tables.
const TICK: u64 = 0;
const PROGRESS: u64 = 1;
const READ: u64 = 2;
const CONNECTED: u64 = 10;

/// What an agent is started with.
#[derive(Clone, Debug)]
pub(super) struct ReplicaOptions {
    pub(super) server: ServerId,
    pub(super) args: Options,
    /// Where the record of changed settings is kept.
    pub(super) folder: PathBuf,
    pub(super) mode: Mode,
}

#[allow(clippy::large_enum_variant)] // one for each agent
enum Stage {
    Preparing { work: JoinHandle<Result<Prepared, Failure>>, plan: Option<oneshot::Sender<Offer>>, _end: AbortOnDrop },
    Running { machine: Box<Replica>, server: ServerHandle, kind: String, data_set: DataSet, comparing: Vec<Comparing> },
    Ended,
}

/// What a source has offered, which is being compared with the data set of the run.
struct Comparing {
    about: About,
    work: JoinHandle<Result<(), Failure>>,
    _end: AbortOnDrop,
}

/// What follows from the comparison.
pub(super) enum About {
    /// Whether this conversation begins.
    Session(Conn),
    /// Whether these tables are connected.
    Tables { attempt: u64, offer: Box<Offer> },
}

/// See the module's text.
pub(super) struct ReplicaAgent {
    pub(super) index: usize,
    pub(super) options: ReplicaOptions,
    pub(super) link: Address,
    stage: Stage,
    session: Option<Conn>,
    /// The sources, and the round of attempts to reach one.
    sources: Addresses,
    round: Option<Round<Away>>,
    /// The source behind a new session has not been compared yet. The machine knows nothing of it.
    greets: bool,
    attempt: u64,
    delivery: Box<dyn Deliver>,
    /// Tables that are being connected, and those that were not attached yet.
    connecting: Vec<(u64, usize, Box<Offer>)>,
    tables: Option<(u64, AnyFeed)>,
    /// The source's incarnation behind the present session.
    source: usize,
    tick: Option<Duration>,
    /// A read of the tables is under way.
    reads: bool,
    /// Its tasks may have something to do: it began or ended a moment ago.
    stirs: bool,
    pub(super) stopped: Option<Duration>,
    pub(super) ended: Option<Duration>,
    pub(super) killed: bool,
    /// The pins at the primary.
    pins: Option<Pinning<()>>,
    /// Who is asked whether the primary covers the server.
    asks: Option<Asks>,
    /// The primary that its server followed when it was started.
    pub(super) found: Option<Address>,
    pub(super) outcome: Option<Result<(), Failure>>,
}

/// What the world's loop waits for.
#[allow(clippy::large_enum_variant)] // a handful at a time
pub(super) enum Done {
    Prepared(Result<Prepared, Failure>),
    Report(Report, bool),
    Compared(About, Result<(), Failure>),
}

impl ReplicaAgent {
    pub(super) fn start(world: &mut World, index: usize, options: ReplicaOptions) -> ReplicaAgent {
        let [high, low] = (index as u16 + 1).to_be_bytes();
        let ip = Ipv4Addr::new(10, 9, high, low);
        let link = SocketAddr::from((ip, 7000));
        let (tell, plan) = oneshot::channel();
        let (args, folder) = (options.args.clone(), options.folder.clone());
        let source = SocketAddr::from((Ipv4Addr::new(10, 8, 0, 1), SOURCES[0].1));
        let work = tokio::spawn(async move { prepare(args, &folder, link, source, plan).await });
        let end = AbortOnDrop::new(&work);
        let (server, options_sources) = (options.server, options.args.read.source.clone());
        let link_end = End::Link(index, server);
        let delivery: Box<dyn Deliver> = match options.mode {
            Mode::Model => Box::new(Delivery::new(link_end)),
            Mode::Bytes { spool, relay } => {
                let spool = spool.then(|| options.folder.join(format!("spool-{}", server.0)));
                Box::new(ByteDelivery::new(link_end, spool, relay))
            }
        };
        let mut agent = ReplicaAgent {
            index,
            options,
            link: Address { host: ip.to_string(), port: link.port() },
            stage: Stage::Preparing { work, plan: Some(tell), _end: end },
            session: None,
            sources: options_sources,
            round: None,
            greets: false,
            attempt: 0,
            delivery,
            connecting: Vec::new(),
            tables: None,
            source: 0,
            tick: None,
            reads: false,
            stirs: true,
            stopped: None,
            ended: None,
            killed: false,
            pins: None,
            asks: None,
            found: world.server(server).follows.clone(),
            outcome: None,
        };
        agent.connect_source(world);
        agent
    }

    pub(super) fn is_running(&self) -> bool {
        !matches!(self.stage, Stage::Ended)
    }

    /// Whether a signal ended it before it was done.
    pub(super) fn was_interrupted(&self) -> bool {
        matches!(&self.outcome, Some(Err(failure)) if failure.code == Code::Interrupted)
    }

    /// Whether its delivery keeps to its memory.
    pub(super) fn within_limits(&self) -> Result<(), String> {
        self.delivery.within_limits()
    }

    fn session_end(&self) -> End {
        End::Replica(self.index, self.options.server)
    }

    // ---- the process ----

    /// SIGTERM.
    pub(super) fn stop(&mut self, world: &mut World) {
        self.stopped.get_or_insert(world.now);
        match self.stage {
            Stage::Preparing { .. } => {
                self.end(world, Err(Failure::new(Code::Interrupted, "stopped: nothing was touched")));
            }
            Stage::Running { .. } => self.handle(world, Input::Stop { signal: "SIGTERM" }),
            Stage::Ended => {}
        }
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self, world: &mut World) {
        self.killed = true;
        self.end(world, Err(Failure::local("killed")));
    }

    fn end(&mut self, world: &mut World, outcome: Result<(), Failure>) {
        let text = match &outcome {
            Ok(()) => "well".to_string(),
            Err(failure) => format!("{:?}: {}", failure.code, failure.message),
        };
        world.log(|| format!("agent {} ends {text}", self.index));
        world.count(&match &outcome {
            Ok(()) => "agent: done".to_string(),
            Err(failure) => format!("agent: {:?}", failure.code),
        });
        self.delivery.stop(world);
        world.end_all(self.session_end());
        self.pins.iter_mut().for_each(|pins| pins.end(world));
        self.stage = Stage::Ended;
        self.stirs = true;
        self.ended = Some(world.now);
        self.outcome = Some(outcome);
    }

    /// Whether its tasks have nothing to do until it is told something.
    pub(super) fn rests(&self) -> bool {
        let is_waiting = match &self.stage {
            Stage::Preparing { .. } => true,
            Stage::Running { server, comparing, .. } => server.is_at_work() || !comparing.is_empty(),
            Stage::Ended => false,
        };
        !is_waiting && !self.stirs
    }

    /// The runtime has run all tasks that could go on.
    pub(super) fn settle(&mut self) {
        self.stirs = false;
    }

    /// What its tasks have done.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Done> {
        match &mut self.stage {
            Stage::Preparing { work, .. } => Pin::new(work)
                .poll(cx)
                .map(|done| Done::Prepared(done.unwrap_or_else(|_| Err(Failure::local("the preflight panicked"))))),
            Stage::Running { server, comparing, .. } => {
                let mut works = comparing.iter_mut().enumerate();
                let ready = works.find_map(|(number, one)| match Pin::new(&mut one.work).poll(cx) {
                    Poll::Ready(done) => Some((number, done)),
                    Poll::Pending => None,
                });
                if let Some((number, done)) = ready {
                    let Comparing { about, .. } = comparing.swap_remove(number);
                    let done = done.unwrap_or_else(|_| Err(Failure::local("the comparison panicked")));
                    return Poll::Ready(Done::Compared(about, done));
                }
                server.poll_report(cx).map(|(report, used)| Done::Report(report, used))
            }
            Stage::Ended => Poll::Pending,
        }
    }

    pub(super) fn done(&mut self, world: &mut World, done: Done) {
        match done {
            Done::Prepared(Err(failure)) => self.end(world, Err(failure)),
            Done::Prepared(Ok(prepared)) => self.begin(world, prepared),
            Done::Compared(about, outcome) => self.compared(world, about, outcome),
            Done::Report(report, used) => {
                let introduced = match &report {
                    Report::Introduced { number, outcome: Introduced::Done { .. } } => Some((*number, used)),
                    Report::Introduced { number, outcome: Introduced::NotUsed } => Some((*number, false)),
                    _ => None,
                };
                self.handle(world, Input::Server(report));
                if let Some((number, refers)) = introduced
                    && self.is_running()
                {
                    self.delivery.introduced(world, number, refers);
                    self.delivery_news(world);
                }
            }
        }
    }

    fn begin(&mut self, world: &mut World, prepared: Prepared) {
        let Prepared { server, rules, data_set, kind, secret, primary, asks } = prepared;
        let primary = world.server_at(&Address { host: primary.0, port: primary.1 });
        self.pins = primary.map(|primary| Pinning::new(Keeper::Replica(self.index, self.options.server), primary));
        self.asks = Some(asks);
        if let Err(error) = self.delivery.start(world, secret) {
            return self.end(world, Err(Failure::local(format!("the delivery cannot start: {error}"))));
        }
        let backoff = Backoff::seeded(world.draw.next());
        let machine = Box::new(Replica::begin(world.instant(), rules, backoff));
        self.stage = Stage::Running { machine, server, kind, data_set, comparing: Vec::new() };
        self.stirs = true;
        world.after(PROGRESS_EVERY, Event::Replica(self.index, PROGRESS));
        if self.delivery.is_awake() {
            self.read_after(world, Duration::from_millis(1));
        }
        if self.session.is_none() {
            self.handle(world, Input::Source(SourceEvent::Lost(gone())));
        } else {
            self.perform(world);
        }
    }

    // ---- the source ----

    fn connect_source(&mut self, world: &mut World) {
        self.round = Some(self.sources.round());
        self.try_source(world);
    }

    fn try_source(&mut self, world: &mut World) {
        self.attempt += 1;
        let HostPort { host, port } = self.sources.present();
        world.dial(self.session_end(), Address { host, port }, self.attempt);
    }

    /// The attempt to reach a source has come to nothing.
    fn not_reached(&mut self, world: &mut World) {
        let loss = Away(gone());
        let outcome = self.round.as_mut().map(|round| round.outcome::<()>(Err(loss), |away| away.0.passes));
        match outcome {
            Some(None) => self.try_source(world),
            _ => {
                self.round = None;
                self.lost_source(world);
            }
        }
    }

    fn reached(&mut self) {
        if let Some(mut round) = self.round.take() {
            let _ = round.outcome::<()>(Ok(()), |_| false);
        }
    }

    pub(super) fn dialed(&mut self, world: &mut World, attempt: u64, source: usize, conn: Option<Conn>) {
        let is_wanted = attempt == self.attempt && self.is_running();
        let Some(conn) = conn.filter(|_| is_wanted) else {
            conn.into_iter().for_each(|conn| world.close(conn, self.session_end()));
            if is_wanted {
                self.not_reached(world);
            }
            return;
        };
        (self.session, self.source) = (Some(conn), source);
        // As in the program, each conversation begins with a comparison.
        self.greets = matches!(self.stage, Stage::Running { .. });
        if !self.greets {
            self.reached();
        }
        let join = Join {
            name: format!("replica {}", self.index),
            server: String::new(),
            resume: None,
            plan_only: true,
            zone: String::new(),
            relays: None,
        };
        self.say(world, Said::Join(join));
    }

    fn compare(&mut self, about: About, offer: &Offer) {
        let Stage::Running { data_set, comparing, .. } = &mut self.stage else { return };
        let (data_set, offer) = (data_set.clone(), offer.clone());
        let source = self.sources.present();
        let ip = source.host.parse().unwrap_or(Ipv4Addr::UNSPECIFIED);
        let at = SocketAddr::from((ip, source.port));
        let work = tokio::spawn(async move { data_set.check(&source, at, &offer).await.map_err(|loss| loss.failure) });
        let end = AbortOnDrop::new(&work);
        comparing.push(Comparing { about, work, _end: end });
    }

    fn compared(&mut self, world: &mut World, about: About, outcome: Result<(), Failure>) {
        if outcome.is_err() {
            world.count("a source of another data set");
        }
        match (about, outcome) {
            (About::Session(conn), _) if self.session != Some(conn) || !self.greets => {}
            (About::Session(_), Ok(())) => {
                self.greets = false;
                self.reached();
                self.handle(world, Input::Source(SourceEvent::Connected));
            }
            (About::Session(conn), Err(_)) => {
                world.close(conn, self.session_end());
                (self.session, self.greets) = (None, false);
                self.not_reached(world);
            }
            (About::Tables { attempt, offer }, Ok(())) => {
                self.connecting.push((attempt, self.source, offer));
                let pause = world.millis(20);
                world.after(pause, Event::Replica(self.index, CONNECTED + attempt));
            }
            (About::Tables { attempt, .. }, Err(failure)) => {
                self.handle(world, Input::Tables { attempt, connected: Err(failure) });
            }
        }
    }

    /// There is no session, or none any more.
    fn lost_source(&mut self, world: &mut World) {
        match &mut self.stage {
            Stage::Preparing { plan, .. } => *plan = None,
            Stage::Running { .. } => {
                let event = SourceEvent::Unreachable(gone());
                self.handle(world, Input::Source(event));
            }
            Stage::Ended => {}
        }
    }

    pub(super) fn session_closed(&mut self, world: &mut World, conn: Conn) {
        if self.session != Some(conn) {
            return;
        }
        self.session = None;
        let greets = std::mem::take(&mut self.greets);
        match &mut self.stage {
            Stage::Preparing { plan, .. } => *plan = None,
            Stage::Running { .. } if greets => self.not_reached(world),
            Stage::Running { .. } => {
                let loss = self.sources.lost(gone());
                self.handle(world, Input::Source(SourceEvent::Lost(loss)));
            }
            Stage::Ended => {}
        }
    }

    fn say(&self, world: &mut World, message: Said) {
        if let Some(conn) = self.session {
            world.send(conn, self.session_end(), Message::Agents(Box::new(message)));
        }
    }

    pub(super) fn said(&mut self, world: &mut World, conn: Conn, message: Said) {
        if self.session != Some(conn) {
            return;
        }
        if let Stage::Preparing { plan, .. } = &mut self.stage {
            if let (Said::Offer(offer), Some(plan)) = (message, plan.take()) {
                let _ = plan.send(offer);
            }
            return;
        }
        if self.greets {
            match message {
                Said::Offer(offer) => self.compare(About::Session(conn), &offer),
                Said::Refused { .. } => {
                    world.close(conn, self.session_end());
                    (self.session, self.greets) = (None, false);
                    self.not_reached(world);
                }
                _ => {}
            }
            return;
        }
        let event = match message {
            Said::Waiting { cause, text } => SourceEvent::Waiting { cause, text },
            Said::Standbys { addresses } => {
                world.count("standby: an agent is told of it");
                return self.sources.learn(&addresses);
            }
            Said::Offer(offer) => {
                self.sources.offered();
                self.delivery.offered(&offer);
                SourceEvent::Offer(Box::new(offer))
            }
            Said::ReadFrom { generation, upstream } => {
                self.delivery.assigned(world, generation, upstream);
                return self.delivery_news(world);
            }
            Said::GenerationGone { generation, text } => SourceEvent::GenerationGone { generation, text },
            Said::HandOffAnswer { covered, text } => SourceEvent::HandOffAnswer { covered, text },
            Said::Refused { code, .. } => {
                world.close(conn, self.session_end());
                self.session = None;
                SourceEvent::Lost(self.sources.lost(refused(code)))
            }
            _ => return,
        };
        self.handle(world, Input::Source(event));
    }

    // ---- the server's link ----

    pub(super) fn has_a_port(&self) -> bool {
        self.delivery.is_running()
    }

    pub(super) fn receive(&mut self, world: &mut World, conn: Conn, message: Message) {
        self.delivery.receive(world, conn, message);
        self.delivery_news(world);
    }

    pub(super) fn link_closed(&mut self, world: &mut World, conn: Conn) {
        self.delivery.closed(world, conn);
        self.delivery_news(world);
    }

    /// The tables that it reads are gone, or the way to them.
    pub(super) fn lose_feed(&mut self, world: &mut World) {
        self.delivery.lose_feed(world);
        self.delivery_news(world);
    }

    fn delivery_news(&mut self, world: &mut World) {
        for event in self.delivery.take_events() {
            self.handle(world, Input::Delivery(event));
        }
        for word in self.delivery.take_words() {
            self.say(world, word);
        }
    }

    // ---- the machine ----

    fn handle(&mut self, world: &mut World, event: Input) {
        let Stage::Running { machine, .. } = &mut self.stage else { return };
        count_event(world, &event);
        let index = self.index;
        world.log(|| format!("agent {index}: {}", shown(&event)));
        machine.handle(world.instant(), self.delivery.reading(), event);
        self.perform(world);
    }

    fn perform(&mut self, world: &mut World) {
        while let Stage::Running { machine, .. } = &mut self.stage {
            let Some(action) = machine.poll_action() else { break };
            let index = self.index;
            world.log(|| format!("agent {index}:     {}", shown(&action)));
            self.act(world, action);
        }
        self.delivery_news_later(world);
        self.plan_tick(world);
    }

    /// What the delivery found while it was told something.
    fn delivery_news_later(&mut self, world: &mut World) {
        if matches!(self.stage, Stage::Running { .. }) {
            self.delivery_news(world);
        }
    }

    fn plan_tick(&mut self, world: &mut World) {
        let Stage::Running { machine, .. } = &self.stage else { return };
        let Some(due) = machine.deadline().map(|due| world.time_of(due).max(world.now)) else { return };
        if self.tick.is_none_or(|tick| due < tick) {
            self.tick = Some(due);
            world.at(due, Event::Replica(self.index, TICK));
        }
    }

    fn act(&mut self, world: &mut World, action: Action) {
        match action {
            Action::ConnectSource => self.connect_source(world),
            Action::Join => self.join(world),
            Action::ConnectTables { attempt, offer } => {
                // A server that has loaded gets the rest of the history that it has, or nothing.
                if self.delivery.resume().is_some_and(|resume| resume.loaded) {
                    return self.compared(world, About::Tables { attempt, offer }, Ok(()));
                }
                let compared = offer.clone();
                self.compare(About::Tables { attempt, offer }, &compared);
            }
            Action::Attach { attempt } => {
                if let Some((_, feed)) = self.tables.take_if(|(connected, _)| *connected == attempt) {
                    self.delivery.attach(world, feed);
                    self.read_after(world, Duration::from_millis(1));
                }
            }
            Action::AskHandOff { generation, offset } => self.ask_hand_off(world, generation, offset),
            Action::LoadAgain => {
                world.count("a snapshot loaded in the place of another");
                self.delivery.load_again(world);
            }
            Action::TellProgress => self.tell_progress(world),
            Action::UseModule(used) => self.delivery.use_module(used),
            Action::EndIntroduction { .. } => {} // the delivery is told with the report
            Action::GiveUpLoad => self.delivery.give_up(world),
            Action::HoldStream => self.delivery.hold(world),
            Action::Server(job) => {
                count_job(world, self.options.server, job);
                if let Stage::Running { server, .. } = &mut self.stage {
                    let (bytes, the_end) = self.delivery.given();
                    server.gave(bytes, the_end);
                    server.give(job);
                }
            }
            Action::Hurry => {} // no Sentinels here, so nothing is waited for
            Action::CancelIntroduction => {
                if let Stage::Running { server, .. } = &self.stage {
                    server.cancel();
                }
            }
            Action::StopDelivery { .. } => self.delivery.stop(world),
            Action::Publish | Action::SayLingering { .. } => {}
            Action::End { outcome, last } => {
                self.say(world, *last);
                self.end(world, outcome);
            }
        }
    }

    /// As in the driver: the primary itself is asked while the source is away, and where the source captures another
    /// server.
    fn ask_hand_off(&mut self, world: &mut World, generation: u64, offset: u64) {
        let Stage::Running { machine, data_set, .. } = &self.stage else { return };
        let offer = machine.tables().map(|tables| &tables.offer);
        let asks_primary = self.asks.as_ref().is_some_and(|asks| asks.primary(data_set));
        let question =
            offer.and_then(|offer| Some(Position { history: offer.replid?, offset, rate: offer.write_rate }));
        let is_asked = asks_primary || self.session.is_none() || self.greets;
        match (&mut self.pins, question) {
            (Some(pins), Some(question)) if is_asked => pins.ask(world, (), question),
            _ => self.say(world, Said::HandOffQuery { generation, offset }),
        }
        self.answered(world);
    }

    pub(super) fn with_pins(&mut self, world: &mut World, tell: impl FnOnce(&mut dyn Pins, &mut World)) {
        if let Some(pins) = &mut self.pins {
            tell(pins, world);
            self.answered(world);
        }
    }

    /// The primary has answered.
    fn answered(&mut self, world: &mut World) {
        let Some(pins) = &mut self.pins else { return };
        let primary = pins.server();
        for answer in pins.take_answers() {
            if answer.outcome.is_ok() {
                world.promised(self.options.server, primary, answer.promise);
            }
            let (covered, text) = (answer.outcome.is_ok(), answer.outcome.err().unwrap_or_default());
            self.handle(world, Input::Source(SourceEvent::HandOffAnswer { covered, text }));
        }
    }

    fn join(&mut self, world: &mut World) {
        let Stage::Running { kind, .. } = &self.stage else { return };
        let resume = self.delivery.resume();
        let (name, server) = (format!("replica {}", self.index), kind.clone());
        let join = Join { name, server, resume, plan_only: false, zone: String::new(), relays: None };
        self.say(world, Said::Join(self.delivery.introduce(join)));
    }

    fn tell_progress(&mut self, world: &mut World) {
        let Stage::Running { machine, .. } = &self.stage else { return };
        let (Some(tables), Some(phase)) = (machine.tables(), machine.phase()) else { return };
        let generation = tables.offer.generation;
        let delivery = &self.delivery;
        let resume = delivery.resume();
        if !resume.is_some_and(|held| held.generation == generation || held.loaded) {
            return;
        }
        let progress = Progress {
            generation,
            phase,
            transport: Some(TRANSPORT.code()),
            transport_why: String::new(),
            no_fast_keys: String::new(),
            slots_below: delivery.slots_below(),
            slots_held: delivery.slots_held(),
            bytes: delivery.bytes(),
            applied_offset: delivery.acknowledged().max(machine.hand_off_offset()),
            relaying: delivery.relaying(),
        };
        self.say(world, Said::Progress(progress));
    }

    // ---- time ----

    pub(super) fn wake(&mut self, world: &mut World, number: u64) {
        if !matches!(self.stage, Stage::Running { .. }) {
            return;
        }
        match number {
            TICK => {
                if self.tick.is_some_and(|tick| tick <= world.now) {
                    self.tick = None;
                    self.handle(world, Input::Tick);
                }
            }
            PROGRESS => {
                self.tell_progress(world);
                world.after(PROGRESS_EVERY, Event::Replica(self.index, PROGRESS));
            }
            READ => {
                self.reads = false;
                self.read(world);
            }
            attempt => self.connected(world, attempt - CONNECTED),
        }
    }

    fn read(&mut self, world: &mut World) {
        if !self.delivery.is_awake() {
            return;
        }
        let moved = self.delivery.read(world);
        let most = if moved { 4 } else { READ_PACE };
        let pause = if moved { world.millis(most) } else { world.millis(most) * world.calm_factor() };
        self.read_after(world, pause + Duration::from_millis(1));
        self.delivery_news(world);
    }

    fn read_after(&mut self, world: &mut World, pause: Duration) {
        if !std::mem::replace(&mut self.reads, true) {
            world.after(pause, Event::Replica(self.index, READ));
        }
    }

    fn connected(&mut self, world: &mut World, attempt: u64) {
        let Some(at) = self.connecting.iter().position(|(connecting, ..)| *connecting == attempt) else { return };
        let (_, source, offer) = self.connecting.swap_remove(at);
        let feed = self.delivery.connect(world, source, &offer);
        let connected = match feed {
            Some(feed) if !world.one_in(30) => {
                self.tables = Some((attempt, feed));
                Ok(Tables { offer, transport: TRANSPORT, why: String::new(), protection: Protection::Plaintext })
            }
            _ => Err(Failure::new(Code::Source, "the tables cannot be connected")),
        };
        self.handle(world, Input::Tables { attempt, connected });
    }
}

/// Why a source was not reached.
struct Away(Loss);

impl std::fmt::Display for Away {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.failure.message.fmt(f)
    }
}

fn gone() -> Loss {
    Loss::passing(Failure::new(Code::Source, "the source is gone"))
}

fn refused(code: RefusalCode) -> Loss {
    let (stalled, history_gone) = (code == RefusalCode::Stalled, code == RefusalCode::HistoryGone);
    Loss { passes: code.may_pass(), stalled, history_gone, ..gone() }
}

fn count_job(world: &mut World, server: ServerId, job: Job) {
    let text = format!("{job:?}");
    let name = text.split([' ', '(']).next().unwrap_or_default().to_string();
    world.count(&format!("job: {name}"));
    world.jobs.push((server, name));
}

fn count_event(world: &mut World, event: &Input) {
    let name = match event {
        Input::Delivery(DeliveryEvent::LinkLost { loading: true, .. }) => "a broken load",
        Input::Delivery(DeliveryEvent::Loaded) => "loaded",
        Input::Delivery(DeliveryEvent::FeedLost { .. }) => "a lost feed",
        Input::Delivery(DeliveryEvent::Introduce { .. }) => "an introduction",
        Input::Source(SourceEvent::Lost(_)) => "a lost source",
        Input::Source(SourceEvent::GenerationGone { .. }) => "a generation gone",
        Input::Server(report) if report.is_take_over() => "a take-over noticed",
        _ => return,
    };
    world.count(name);
}
