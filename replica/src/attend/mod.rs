//! `remora attend`: stays beside a server, and turns each full copy that it would take of its primary into a cheap one.
//!
//! ```text
//!   server ── connects to its primary, and the rules send it here ──▶ passage ── PSYNC ──▶ Attendant
//!      can the primary continue it?              yes: passed on, and handed back when the link is up
//!      does the source have this history?        no:  passed on
//!      otherwise: the driver's sync, whose link is this connection ── caught up ──▶ gate closes, the link is cut
//!   server ── connects to its primary by itself ──▶ +CONTINUE; link up ──▶ the gate opens again
//! ```
//!
//! - [`attendance`]: what becomes of each connection, and when they come here: it decides, and does nothing.
//! - [`passage`](mod@passage): whether connections come here, one connection until it asks for a sync, what
//!   opens an encrypted one, and when a server that the primary serves through us can go on without us.
//! - [`guide`]: what becomes of a server when its primary dies and no Sentinel knows it.
//! - [`syncs`]: which source serves it, the sync, and what a connection asks for. [`once`]: a run for one
//!   full copy (`remora replica`).
//! - The sync is that of `remora replica`, with other hands: see `driver/server/mod.rs`.
//!
//! What must hold, beside what [`attendance`] says:
//! - Slots are lent to other replicas as `remora replica` does, also when the server has gone on by itself: the next
//!   sync ends that, and not the other way round.
//! - `PSYNC` reaches the primary, or the delivery, and never both.
//! - While a sync lasts, every connection of the server to the same primary that asks goes to its delivery, until the
//!   gate is closed. A server that asks another primary ends the sync first.
//! - A failure of ours leaves the server with its primary: the gate is closed before the connection is.
//! - The gate opens again when the server's own connection stands: rules change no connection that is established.

pub(crate) mod attendance;
pub(crate) mod guide;
#[cfg(test)]
mod model;
pub(crate) mod once;
pub(crate) mod passage;
pub(crate) mod syncs;

use std::collections::{BTreeSet, VecDeque};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{self, JoinSet};
use tokio::time::{MissedTickBehavior, interval};

use self::attendance::{Action, Attendance, Event, LinkState, Rules, Why};
use self::guide::{Group, Guide};
use self::passage::{Arrival, Between, Passing, Tls};
use self::passage::{Gate, RENEW_EVERY};
use self::syncs::{Looked, Syncs};
use super::preflight;
use crate::options::AttendOptions;
use remora_conversation::tokens::TokenFiles;
use remora_delivery::link::LinkTls;
use remora_delivery::link::server_config;
use remora_metrics::{Scrape, Scrapes, register as all};
use remora_process::AbortOnDrop;
use remora_process::events;
use remora_process::exit::Failure;
use remora_process::exit::Patience;
use remora_process::service::Service;
use remora_process::signals::Signals;
use remora_server::sentinel::Sentinels;
use remora_server::{Facts, Server, Task, TlsOptions};

/// Connections that are passed on at a time: a server makes one to its primary, and some to move slots.
const PASSAGES: usize = 256;

/// Connections that may wait for a decision.
const ARRIVALS: usize = 16;

/// Interval at which the server is asked for its link while something depends on it.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How often it is looked whether a sync gives its server nothing more.
const STUCK_EVERY: Duration = Duration::from_secs(1);

/// Interval at which a server under Sentinel is looked at for a primary that was replaced.
const GUIDE_EVERY: Duration = Duration::from_secs(1);

/// Stays beside a server until a signal stops it. `scrapes` is what those who watch it are shown.
///
/// # Errors
/// The server or the rules are not suitable, a port is taken, or a signal came in the middle of a sync.
pub async fn run(options: AttendOptions, tokens: TokenFiles, mut scrapes: Scrapes) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let _rereading = tokens.read_again_on_hangup()?;
    let server = options.server.open(Task::Attend)?;
    let port = options.listen_port;
    let sentinels = options.sentinels.clone();
    let mut patience = options.patience();
    let mut entrance = tokio::select! {
        entrance = Entrance::open(port, options.primary_ports.iter().copied().collect(), sentinels, &mut patience) => entrance?,
        _ = signals.next() => return Ok(()),
    };
    let gate = entrance.gate.clone();
    if !gate.open() {
        return Err(no_rules(port));
    }
    tracing::info!(event = events::ATTENDING, server = %server.url(), port, ports = ?entrance.ports, "attending");
    // A server that starts after the agent comes here with its first connection, which waits for this.
    let why = format!("the server {} does not answer yet", server.url());
    let suits = patience.keep_trying(async || check(&server, &options.link_tls, options.server.tls.clone()).await);
    let suits = tokio::select! {
        suits = scrapes.meanwhile(&why, suits) => suits,
        _ = signals.next() => {
            gate.close();
            return Ok(());
        }
    };
    entrance.tls.send_replace(suits.inspect_err(|_| gate.close())?);
    let _service = Service::ready(&format!("attending {}", server.url()));
    let (guide, passages) = (entrance.guide.take(), JoinSet::new());
    let watcher = guide.as_ref().map(Guide::watcher);
    let syncs = Syncs::new(options.of_a_sync(), options.sources, tokens, server, gate.clone(), watcher);
    let syncs = syncs.converting(options.convert);
    let attendance = Attendance::new(Instant::now(), Rules::Stay);
    let (passing, kept, counts) = (None, None, Counts::default());
    let attendant = Attendant { syncs, attendance, passing, kept, guide, passages, counts };
    let outcome = attendant.run(&mut entrance.arrivals, &mut signals, scrapes).await;
    gate.close();
    outcome
}

/// Where the server's connections come in: the gate, the port behind it, and the tasks that keep both.
struct Entrance {
    gate: Gate,
    /// Connections that ask for a sync.
    arrivals: Receiver<Arrival>,
    /// What opens connections with TLS, once it is known.
    tls: watch::Sender<Tls>,
    /// The ports that were meant at first.
    ports: BTreeSet<u16>,
    /// With Sentinels.
    guide: Option<Guide>,
    _tasks: Vec<AbortOnDrop>,
}

impl Entrance {
    /// With a closed gate, for connections to these ports. With Sentinels the ports are those of the group.
    async fn open(
        port: u16,
        ports: BTreeSet<u16>,
        sentinels: Option<Sentinels>,
        patience: &mut Patience,
    ) -> Result<Entrance, Failure> {
        let listener = listen((Ipv4Addr::LOCALHOST, port).into()).await?;
        // A host without IPv6 has no such connections either.
        let listener6 = listen((Ipv6Addr::LOCALHOST, port).into()).await.ok();
        let group = match &sentinels {
            Some(sentinels) => Some(patience.keep_trying(async || Group::ask(sentinels).await).await?),
            None => None,
        };
        let ports = group.as_ref().map_or(ports, Group::ports);
        let gate = Gate::new(port, ports.clone())?;
        let (tell, arrivals) = channel(ARRIVALS);
        let (tls, known) = watch::channel(Tls::NotKnown);
        let mut tasks = vec![renew(gate.clone()), accept(listener, tell.clone(), known.clone())];
        tasks.extend(listener6.map(|listener| accept(listener, tell, known)));
        let guide = sentinels.zip(group).map(|(sentinels, group)| {
            let (guide, task) = guide::follow(sentinels, group, gate.clone());
            tasks.push(task);
            guide
        });
        Ok(Entrance { gate, arrivals, tls, ports, guide, _tasks: tasks })
    }
}

/// Why nothing comes.
fn no_rules(port: u16) -> Failure {
    Failure::refused(format!(
        "no rules send connections to port {port}: run remora intercept add --server-uid … --agent-uid {} --listen-port {port} in \
         this network namespace first",
        rustix::process::geteuid().as_raw()
    ))
}

/// Looks whether the server's connections can be attended, and with which TLS.
async fn check(server: &Server, link: &LinkTls, given: TlsOptions) -> Result<Tls, Failure> {
    let link = server_config(link)?;
    let mut client = server.connect().await?;
    match (client.config_get("tls-replication").await, link) {
        (Err(error), _) if error.is_passing() => Err(error.into()),
        (Ok(Some(setting)), None) if setting == "yes" => Err(Failure::refused(format!(
            "the server {} speaks TLS to its primary (tls-replication yes): give a certificate that it accepts as its primary's with \
             --link-cert and --link-key",
            server.url()
        ))),
        (Ok(Some(setting)), Some(link)) if setting == "yes" => {
            let own = preflight::tls_files(&mut client).await?;
            Ok(Tls::Open(Between::new(link, preflight::tls_of(given, own))))
        }
        _ => Ok(Tls::Closed),
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    let taken = |error| {
        Failure::local(format!(
            "the port {address} cannot be used: {error}; give another port by --listen-port, here and to remora intercept add"
        ))
    };
    TcpListener::bind(address).await.map_err(taken)
}

fn renew(gate: Gate) -> AbortOnDrop {
    let task = tokio::spawn(async move {
        let mut due = interval(RENEW_EVERY);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut had_rules = true;
        loop {
            due.tick().await;
            let has_rules = gate.renew();
            if had_rules && !has_rules {
                tracing::warn!("the rules of remora intercept are gone: the server goes to its primary by itself");
            }
            had_rules = has_rules;
        }
    });
    AbortOnDrop::new(&task)
}

/// Accepts connections, and passes each on until it ends or asks for a sync.
fn accept(listener: TcpListener, tell: Sender<Arrival>, tls: watch::Receiver<Tls>) -> AbortOnDrop {
    let task = tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(PASSAGES));
        let mut passages = JoinSet::new();
        loop {
            let (socket, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(LOOK_EVERY).await;
                    continue;
                }
            };
            while passages.try_join_next().is_some() {}
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                tracing::warn!(%peer, "{PASSAGES} connections are passed on already: this one is closed");
                continue;
            };
            passages.spawn(passage(socket, peer, tell.clone(), tls.clone(), place));
        }
    });
    AbortOnDrop::new(&task)
}

async fn passage(
    socket: TcpStream,
    peer: SocketAddr,
    tell: Sender<Arrival>,
    tls: watch::Receiver<Tls>,
    _place: OwnedSemaphorePermit,
) {
    passage::pass(socket, peer, tell, tls).await;
}

/// What has become of connections so far.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    done: u64,
    failed: u64,
    passed: u64,
}

/// A connection that its primary serves through the agent, and that the gate has noted.
struct Noted {
    passage: task::Id,
    passing: Passing,
}

/// Carries out what becomes of each connection.
struct Attendant {
    syncs: Syncs,
    attendance: Attendance,
    passing: Option<Noted>,
    /// A connection that waits for the end of the sync, since it is to another primary.
    kept: Option<Arrival>,
    /// With Sentinels.
    guide: Option<Guide>,
    /// Connections that the primary serves through us.
    passages: JoinSet<()>,
    counts: Counts,
}

impl Attendant {
    async fn run(
        mut self,
        arrivals: &mut Receiver<Arrival>,
        signals: &mut Signals,
        scrapes: Scrapes,
    ) -> Result<(), Failure> {
        let outcome = self.attend(arrivals, signals, scrapes).await;
        self.syncs.stop_lending().await;
        outcome
    }

    async fn attend(
        &mut self,
        arrivals: &mut Receiver<Arrival>,
        signals: &mut Signals,
        mut scrapes: Scrapes,
    ) -> Result<(), Failure> {
        let [mut look, mut guided, mut stuck] = [LOOK_EVERY, GUIDE_EVERY, STUCK_EVERY].map(|every| {
            let mut due = interval(every);
            due.set_missed_tick_behavior(MissedTickBehavior::Delay);
            due
        });
        loop {
            let is_syncing = self.attendance.is_syncing();
            let (mut outcome, mut comes_again) = (Ok(()), false);
            let (event, arrival) = tokio::select! {
                biased;
                _ = signals.next(), if !self.attendance.is_stopping() => (Event::Signal, None),
                ended = self.syncs.ended() => {
                    self.note(&ended);
                    comes_again = ended.is_err() && self.syncs.converts();
                    outcome = ended;
                    (Event::SyncEnded, None)
                }
                Some(arrival) = arrivals.recv() => (self.arrived(&arrival), Some(arrival)),
                Some(ended) = self.passages.join_next_with_id() => {
                    let (Ok((id, ())) | Err(id)) = ended.map_err(|error| error.id());
                    if self.passing.take_if(|noted| noted.passage == id).is_none() {
                        continue;
                    }
                    (Event::PassageEnded { is_open: self.syncs.gate.is_open() }, None)
                }
                scrape = scrapes.next() => {
                    self.show(scrape);
                    continue;
                }
                _ = look.tick(), if self.attendance.looks() => (self.looked().await, None),
                _ = stuck.tick(), if is_syncing => {
                    if !self.syncs.is_stuck() {
                        continue;
                    }
                    (Event::Stuck, None)
                }
                _ = guided.tick(), if self.guide.is_some() && !is_syncing => {
                    if !self.guides().await {
                        continue;
                    }
                    (Event::Guided, None)
                }
            };
            if self.handle(event, arrival).await == Over::Yes {
                return outcome;
            }
            // It cannot load what its primary sends it.
            if comes_again && self.handle(Event::Guided, None).await == Over::Yes {
                return outcome;
            }
        }
    }

    /// Counts a sync that has ended, and says so.
    fn note(&mut self, ended: &Result<(), Failure>) {
        match ended {
            _ if self.attendance.is_stopping() => {}
            Ok(()) => {
                self.counts.done += 1;
                tracing::info!(event = events::COPY_DONE, "the server follows its primary by itself");
            }
            Err(failure) => {
                self.counts.failed += 1;
                tracing::warn!("{failure}");
            }
        }
    }

    fn arrived(&self, arrival: &Arrival) -> Event {
        let (asks, is_open) = (self.syncs.asks(arrival), self.syncs.gate.is_open());
        Event::Arrived { asks, is_of_another_server: false, is_open }
    }

    async fn looked(&mut self) -> Event {
        let Looked { link, history, offset } = self.syncs.look().await;
        let is_up = link == LinkState::Up && self.attendance.needs_cover();
        let is_covered = match &mut self.passing {
            Some(noted) if is_up => noted.passing.may_end(history, offset).await,
            _ => false,
        };
        Event::Looked { link, is_covered }
    }

    /// Takes the server along to another primary, where no Sentinel does.
    async fn guides(&mut self) -> bool {
        match &mut self.guide {
            Some(guide) => guide.look(&self.syncs.server).await,
            None => false,
        }
    }

    /// Has the attendance decide, and does what it says.
    async fn handle(&mut self, event: Event, mut arrival: Option<Arrival>) -> Over {
        let mut actions = VecDeque::from(self.attendance.handle(Instant::now(), event));
        while let Some(action) = actions.pop_front() {
            let follows = match action {
                Action::Begin => match &mut arrival {
                    Some(asking) => Some(self.begin(asking).await),
                    None => None,
                },
                Action::Give => {
                    arrival.take().into_iter().for_each(|arrival| self.syncs.give(arrival));
                    None
                }
                Action::Pass { why, is_noted } => {
                    arrival.take().into_iter().for_each(|arrival| self.pass(arrival, &why, is_noted));
                    None
                }
                Action::Keep => {
                    self.kept = arrival.take();
                    None
                }
                Action::TakeKept => {
                    arrival = self.kept.take();
                    match &mut arrival {
                        Some(kept) => {
                            kept.ask_again().await;
                            Some(self.arrived(kept))
                        }
                        None => None,
                    }
                }
                Action::EndSync => {
                    self.end(arrival.as_ref());
                    None
                }
                Action::Open => {
                    self.syncs.gate.open();
                    tracing::debug!("the server's new connections come here again");
                    None
                }
                Action::HandBack => {
                    self.syncs.gate.hand_back().await;
                    self.passing = None;
                    None
                }
                Action::End(_) => return Over::Yes,
                // These are for a run that serves one copy.
                Action::Drop | Action::Close => None,
            };
            actions.extend(follows.into_iter().flat_map(|event| self.attendance.handle(Instant::now(), event)));
        }
        Over::No
    }

    async fn begin(&mut self, arrival: &mut Arrival) -> Event {
        match self.syncs.begin(arrival).await {
            Ok(()) => {
                self.passing = None;
                Event::Begun
            }
            Err(failure) => {
                tracing::warn!("{failure}");
                Event::NotBegun
            }
        }
    }

    /// `arrival`: the connection for which the sync ends.
    fn end(&mut self, arrival: Option<&Arrival>) {
        // Without a connection the sync is stuck, as was said.
        if let Some(arrival) = arrival {
            tracing::info!(
                event = events::PRIMARY_CHANGED, primary = %arrival.address,
                "the server asks another primary: the sync that is under way ends"
            );
        }
        self.syncs.end();
    }

    /// Answers those who watch, or has the sync that is under way answer them.
    fn show(&self, mut scrape: Scrape) {
        let Counts { done, failed, passed } = self.counts;
        let has_rules = self.syncs.gate.renew();
        let families = &mut scrape.families;
        families.whether(&all::ATTEND_RULES, has_rules);
        families.whether(&all::ATTEND_OPEN, self.syncs.gate.is_open());
        families.whether(&all::ATTEND_SYNCING, self.syncs.is_running());
        families.counters(&all::ATTEND_SYNCS, [(["done"], done), (["failed"], failed)]);
        families.counter(&all::ATTEND_PASSED, passed);
        let without_rules = (!has_rules).then(|| "the rules of remora intercept are gone".to_owned());
        if let Some(scrape) = self.syncs.pass_on(scrape) {
            scrape.answer(without_rules);
        }
    }

    /// Whether the primary would send the server a copy that has to be converted.
    fn is_in_vain(&self, arrival: &Arrival, why: &Why) -> bool {
        let facts = self.syncs.server_facts();
        let cannot_load = |primary: &Facts| facts.is_some_and(|server| primary.unreadable_for(server).is_some());
        *why == Why::NoSource && self.syncs.converts() && arrival.facts.as_ref().is_ok_and(cannot_load)
    }

    fn pass(&mut self, arrival: Arrival, why: &Why, is_noted: bool) {
        if self.is_in_vain(&arrival, why) {
            tracing::warn!(primary = %arrival.address, "the server could not load a copy of this primary, so it is not asked for one: {why}");
            // Its end is told as that of a connection that was passed on.
            let (login, passage) = (arrival.login(), self.passages.spawn(async move { drop(arrival) }).id());
            if is_noted {
                self.passing = Some(Noted { passage, passing: Passing::new(login) });
            }
            return;
        }
        self.counts.passed += 1;
        tracing::info!(event = events::PASSED_ON, primary = %arrival.address, "the server's request goes to its primary: {why}");
        let login = arrival.login();
        let served = match is_noted.then(|| self.syncs.gate.came(arrival.server.socket())).transpose() {
            Ok(served) => served,
            Err(error) => {
                tracing::warn!(%error, "the connection is passed on until it ends");
                None
            }
        };
        let passage = self.passages.spawn(arrival.pass(served)).id();
        if is_noted {
            self.passing = Some(Noted { passage, passing: Passing::new(login) });
        }
    }
}

/// Whether the attendance is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Yes,
    No,
}
