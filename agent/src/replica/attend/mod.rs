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
//! - [`gate`]: whether connections come here; [`passage`](mod@passage): one connection until it asks for a sync.
//! - The sync is that of `remora replica`, with other hands: see `driver/server/intercepted.rs`.
//!
//! What must hold:
//! - `PSYNC` reaches the primary, or the delivery, and never both.
//! - While a sync lasts, every connection of the server that asks goes to its delivery, until the gate is closed.
//! - A failure of ours leaves the server with its primary: the gate is closed before the connection is.
//! - The gate opens again when the server's own connection stands: rules change no connection that is established.

pub(in crate::replica) mod gate;
mod passage;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use remora_redis::ReplId;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, UnboundedSender, channel, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use self::gate::{Gate, RENEW_EVERY};
use self::passage::Arrival;
use super::candidates::Newcomer;
use super::control::Control;
use super::driver::{self, Attending, Driver};
use super::source::{self, Source};
use crate::args::{AttendArgs, MetricsFileArgs, ReplicaArgs};
use crate::conversation::certificate_roles::CertificateRoles;
use crate::conversation::tokens::{Credentials, TokenFiles};
use crate::exit::{Code, Failure};
use crate::metrics::register as all;
use crate::metrics::{Agent, Scrape, Scrapes, Watch};
use crate::sentinel::Sentinels;
use crate::server::{Client, Facts, Server, ServerError, Task};
use crate::service::Service;
use crate::signals::Signals;
use crate::tasks::AbortOnDrop;

/// Connections that are passed on at a time: a server makes one to its primary, and some to move slots.
const PASSAGES: usize = 256;

/// Connections that may wait for a decision.
const ARRIVALS: usize = 16;

/// Interval at which the server is asked for its link while something depends on it.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Interval at which the Sentinels are asked which servers there are.
const GROUP_EVERY: Duration = Duration::from_secs(2);

/// How long the source may take to say what it serves, before the primary serves the server. The server waits for
/// `repl-timeout`, 60 s by default.
const SOURCE_LIMIT: Duration = Duration::from_secs(10);

/// How long the gate stays closed for a server that does not reach its primary. Later its connections come here again.
const DIRECT_LIMIT: Duration = Duration::from_secs(30);

/// Runs `remora attend` until it is stopped.
///
/// # Errors
/// The server or the rules are not suitable, a port is taken, or a signal came in the middle of a sync.
pub async fn run(args: AttendArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let (_watch, mut scrapes) = Watch::begin(Agent::Attend, &args.metrics, &MetricsFileArgs::default()).await?;
    let security = args.security.open_for(&args.expected, CertificateRoles::default())?;
    let tokens = TokenFiles::read(&args.token_files, &[], security)?;
    let _rereading = tokens.read_again_on_hangup()?;
    let server = args.server.open(Task::Attend)?;
    let port = args.listen_port;
    let listener = listen((Ipv4Addr::LOCALHOST, port).into()).await?;
    // A host without IPv6 has no such connections either.
    let listener6 = listen((Ipv6Addr::LOCALHOST, port).into()).await.ok();
    let sentinels = args.sentinel.open()?;
    let ports = match &sentinels {
        Some(sentinels) => group_ports(sentinels).await?,
        None => args.primary_ports.iter().copied().collect(),
    };
    let gate = Gate::new(port, ports.clone())?;
    if !gate.open() {
        return Err(Failure::refused(format!(
            "no rules send connections to port {port}: run remora intercept add --server-uid … --agent-uid {} --listen-port \
             {port} in this network namespace first",
            rustix::process::geteuid().as_raw()
        )));
    }
    let (tell, arrivals) = channel(ARRIVALS);
    let _renewing = renew(gate.clone());
    let _following = sentinels.map(|sentinels| follow(sentinels, gate.clone()));
    let _accepting = [Some(listener), listener6].map(|listener| Some(accept(listener?, tell.clone())));
    tracing::info!(server = %server.url(), port, ?ports, "attending");
    // A server that starts after the agent comes here with its first connection, which waits for this.
    let why = format!("the server {} does not answer yet", server.url());
    let suits = tokio::select! {
        suits = scrapes.meanwhile(&why, check(&server, args.wait_for_server)) => suits,
        _ = signals.next() => {
            gate.close();
            return Ok(());
        }
    };
    suits.inspect_err(|_| gate.close())?;
    let _service = Service::ready(&format!("attending {}", server.url()));
    let attendant = Attendant {
        args,
        tokens,
        server,
        gate: gate.clone(),
        sync: None,
        awaited: Awaited::Nothing,
        passages: JoinSet::new(),
        counts: Counts::default(),
    };
    let outcome = attendant.run(arrivals, &mut signals, scrapes).await;
    gate.close();
    outcome
}

/// Waits for the server to answer, and looks whether its connections can be attended.
async fn check(server: &Server, limit: Duration) -> Result<(), Failure> {
    let mut client = server.connect_within(limit).await?;
    match client.config_get("tls-replication").await {
        Ok(Some(setting)) if setting == "yes" => Err(Failure::refused(format!(
            "the server {} speaks TLS to its primary (tls-replication yes), and such connections cannot be attended; use \
             remora replica with --link-cert",
            server.url()
        ))),
        _ => Ok(()),
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    let taken = |error| Failure::local(format!("the port {address} cannot be used: {error}; see --listen-port"));
    TcpListener::bind(address).await.map_err(taken)
}

/// The ports of all servers that Sentinel knows: each of them can be the server's primary in a moment.
async fn group_ports(sentinels: &Sentinels) -> Result<BTreeSet<u16>, Failure> {
    let mut ports = BTreeSet::from([sentinels.primary().await?.port]);
    let replicas = sentinels.replicas().await?;
    ports.extend(replicas.into_iter().filter_map(|replica| Some(replica.address?.port)));
    Ok(ports)
}

/// Keeps the gate's ports those of the group.
fn follow(sentinels: Sentinels, gate: Gate) -> AbortOnDrop {
    let task = tokio::spawn(async move {
        let mut due = interval(GROUP_EVERY);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            match group_ports(&sentinels).await {
                Ok(ports) => gate.set_ports(ports),
                Err(failure) => tracing::debug!("{failure}"),
            }
        }
    });
    AbortOnDrop::new(&task)
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
fn accept(listener: TcpListener, tell: Sender<Arrival>) -> AbortOnDrop {
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
            passages.spawn(passage(socket, peer, tell.clone(), place));
        }
    });
    AbortOnDrop::new(&task)
}

async fn passage(socket: TcpStream, peer: SocketAddr, tell: Sender<Arrival>, _place: OwnedSemaphorePermit) {
    passage::pass(socket, peer, tell).await;
}

/// A sync under way.
struct Sync {
    running: Pin<Box<dyn Future<Output = Result<(), Failure>>>>,
    newcomers: UnboundedSender<Newcomer>,
    /// The sync adds its values to those of the attendant.
    scrapes: Sender<Scrape>,
}

/// What has become of connections so far.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    done: u64,
    failed: u64,
    passed: u64,
}

/// What the server's link must show before the next step.
enum Awaited {
    Nothing,
    /// The link through us is up: it is handed back then.
    Passed,
    /// The server's own connection to its primary, or this moment: the gate opens then.
    Direct(Instant),
}

impl Awaited {
    fn direct() -> Awaited {
        Awaited::Direct(Instant::now() + DIRECT_LIMIT)
    }
}

/// How far the server's link to its primary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkState {
    Down,
    Copying,
    Up,
    /// It follows no primary.
    Nothing,
}

/// Decides what becomes of each connection.
struct Attendant {
    args: AttendArgs,
    tokens: TokenFiles,
    server: Server,
    gate: Gate,
    sync: Option<Sync>,
    awaited: Awaited,
    /// Connections that the primary serves through us.
    passages: JoinSet<()>,
    counts: Counts,
}

impl Attendant {
    async fn run(
        mut self,
        mut arrivals: Receiver<Arrival>,
        signals: &mut Signals,
        mut scrapes: Scrapes,
    ) -> Result<(), Failure> {
        let mut client: Option<Client> = None;
        let mut stopping = None;
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_looked_at = self.sync.is_none() && !matches!(self.awaited, Awaited::Nothing);
            let ended = async {
                match &mut self.sync {
                    Some(sync) => sync.running.as_mut().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                signal = signals.next(), if stopping.is_none() => {
                    // A sync hears of the signal too, and leaves the server with its primary.
                    if self.sync.is_none() {
                        return Ok(());
                    }
                    stopping = Some(signal);
                }
                outcome = ended => {
                    self.sync = None;
                    if stopping.is_some() {
                        return outcome;
                    }
                    match outcome {
                        Ok(()) => {
                            self.counts.done += 1;
                            tracing::info!("the server follows its primary by itself");
                        }
                        Err(failure) => {
                            self.counts.failed += 1;
                            tracing::warn!("{failure}");
                        }
                    }
                    self.gate.hand_back().await;
                    self.awaited = Awaited::direct();
                }
                Some(arrival) = arrivals.recv() => self.arrived(arrival).await,
                scrape = scrapes.next() => self.show(scrape),
                _ = look.tick(), if is_looked_at => {
                    let link = self.link(&mut client).await;
                    self.saw(link).await;
                }
            }
            while self.passages.try_join_next().is_some() {}
        }
    }

    async fn link(&self, client: &mut Option<Client>) -> LinkState {
        let facts = async {
            let client = match client {
                Some(client) if client.is_usable() => client,
                other => other.insert(self.server.connect().await?),
            };
            Ok::<_, ServerError>(Facts::from_info(&client.info("replication").await?))
        };
        match facts.await.map(|facts| facts.link) {
            Ok(Some(link)) if link.syncing == Some(true) => LinkState::Copying,
            Ok(Some(link)) if link.up == Some(true) => LinkState::Up,
            Ok(Some(_)) => LinkState::Down,
            Ok(None) => LinkState::Nothing,
            Err(error) => {
                tracing::debug!("{error}; asking again");
                LinkState::Down
            }
        }
    }

    async fn saw(&mut self, link: LinkState) {
        match self.awaited {
            // The stream through us began: the server goes on at once where it is, without us.
            Awaited::Passed if link == LinkState::Up => {
                self.gate.hand_back().await;
                self.awaited = Awaited::direct();
            }
            Awaited::Direct(until) if link != LinkState::Down || Instant::now() >= until => {
                self.awaited = Awaited::Nothing;
                self.gate.open();
                tracing::debug!(?link, "the server's new connections come here again");
            }
            _ => {}
        }
    }

    /// Decides on a connection that asks for a sync.
    async fn arrived(&mut self, mut arrival: Arrival) {
        if let Some(why) = self.is_the_primarys(&arrival) {
            return self.pass(arrival, &why);
        }
        if self.sync.is_none()
            && let Err(failure) = self.begin(&mut arrival).await
        {
            tracing::warn!("{failure}");
            return self.pass(arrival, "the source cannot serve it");
        }
        let Some(sync) = &self.sync else { return };
        let Arrival { server, peer, heard, .. } = arrival;
        let taken = server.into_std().and_then(|server| {
            self.gate.came(server.try_clone()?);
            Newcomer::intercepted(server, peer, &heard)
        });
        match taken {
            Ok(newcomer) => _ = sync.newcomers.send(newcomer),
            Err(error) => tracing::warn!(%error, "the server's connection could not be taken; it will come again"),
        }
    }

    /// Why the primary is to answer this connection; `None` if a full copy would follow, which we can serve.
    fn is_the_primarys(&self, arrival: &Arrival) -> Option<String> {
        if !self.gate.is_open() {
            return Some("the server is on its way to its primary".to_owned());
        }
        let facts = match &arrival.facts {
            Ok(facts) => facts,
            Err(why) => {
                tracing::warn!(primary = %arrival.address, "the primary does not say how it stands: {why}");
                return Some("it is not known whether the primary can continue it".to_owned());
            }
        };
        if self.sync.is_some() {
            return None;
        }
        // The primary is asked before it gets PSYNC: its answer +FULLRESYNC would begin the very copy that is to be
        // spared, with a fork, and cannot be taken back. It says the same in INFO: its history, the former one with
        // its end, and what its backlog holds.
        match arrival.asked {
            Some((history, next)) if facts.covers(history, next.saturating_sub(1), 0).is_ok() => {
                Some("the primary can continue it".to_owned())
            }
            _ if facts.replid.is_none() => Some("the primary does not name its history".to_owned()),
            _ => None,
        }
    }

    /// Answers those who watch, or has the sync that is under way answer them.
    fn show(&self, mut scrape: Scrape) {
        let Counts { done, failed, passed } = self.counts;
        let has_rules = self.gate.renew();
        let families = &mut scrape.families;
        families.whether(&all::ATTEND_RULES, has_rules);
        families.whether(&all::ATTEND_OPEN, self.gate.is_open());
        families.whether(&all::ATTEND_SYNCING, self.sync.is_some());
        families.counters(&all::ATTEND_SYNCS, [(["done"], done), (["failed"], failed)]);
        families.counter(&all::ATTEND_PASSED, passed);
        match &self.sync {
            Some(sync) => {
                // One that is just ending, or that is asked too often, adds nothing.
                if let Err(error) = sync.scrapes.try_send(scrape) {
                    error.into_inner().answer(None);
                }
            }
            None if has_rules => scrape.answer(None),
            None => scrape.answer(Some("the rules of remora intercept are gone".to_owned())),
        }
    }

    fn pass(&mut self, arrival: Arrival, why: &str) {
        self.counts.passed += 1;
        tracing::info!(primary = %arrival.address, "the server's request goes to its primary: {why}");
        if self.sync.is_none() {
            match duplicate(&arrival.server) {
                Ok(link) => {
                    self.gate.came(link);
                    self.awaited = Awaited::Passed;
                }
                Err(error) => tracing::warn!(%error, "the connection is passed on until it ends"),
            }
        }
        self.passages.spawn(arrival.pass());
    }

    /// Asks all sources at once, and returns the first that serves the history of the server's primary, with the
    /// arguments of a sync from it.
    async fn find_source(&self, arrival: &Arrival, server: &str) -> Result<(ReplicaArgs, Source), Failure> {
        let history = arrival.facts.as_ref().ok().and_then(|facts| facts.replid);
        let mut asked = JoinSet::new();
        for at in std::iter::once(&self.args.read.source).chain(&self.args.sources) {
            let mut args = self.args.of_a_sync();
            args.read.source = at.clone();
            let credentials = self.tokens.credentials(args.expected.source_key);
            asked.spawn(ask_source(args, credentials, server.to_owned()));
        }
        let mut causes = Vec::new();
        while let Some(answered) = asked.join_next().await {
            match answered {
                Ok(Ok((Some(found), args, source))) if Some(found) == history => return Ok((args, source)),
                Ok(Ok((_, args, _))) => causes.push(format!("{} has another history", args.read.source)),
                Ok(Err(failure)) => causes.push(failure.to_string()),
                Err(error) => causes.push(error.to_string()),
            }
        }
        let text = format!(
            "no source serves the history of the server's primary {} ({}); start remora source beside it or one of its replicas",
            arrival.address,
            causes.join("; ")
        );
        Err(Failure::new(Code::Source, text))
    }

    /// Begins a sync, if a source serves the primary's history.
    async fn begin(&mut self, arrival: &mut Arrival) -> Result<(), Failure> {
        let begun = async {
            let mut client = self.server.connect().await?;
            let server = Facts::read(&mut client).await?;
            let Some(link) = &server.link else {
                return Err(Failure::refused("the server has a connection to a primary, and follows none"));
            };
            let primary = (link.host.clone(), link.port);
            let (args, source) = match self.find_source(arrival, &server.name()).await {
                Ok(found) => found,
                // It may have begun another history since it was asked: with its first replica, or by a promotion.
                Err(_) => {
                    arrival.ask_again().await;
                    self.find_source(arrival, &server.name()).await?
                }
            };
            let (newcomers, arrivals) = unbounded_channel();
            let (tokens, gate) = (self.tokens.clone(), self.gate.clone());
            let control = Control::new(self.server.clone(), client);
            let attending = Attending { args, tokens, control, server, primary, source, gate, arrivals };
            Ok((Driver::begin_attending(attending).await?, newcomers))
        };
        let (mut driver, newcomers) = tokio::time::timeout(SOURCE_LIMIT, begun).await.unwrap_or_else(|_| {
            let seconds = SOURCE_LIMIT.as_secs();
            Err(Failure::new(Code::Source, format!("no suitable source has answered for {seconds} s")))
        })?;
        tracing::info!(primary = %arrival.address, "the server asks for a full copy: the source serves it");
        self.awaited = Awaited::Nothing;
        let (passed_on, scrapes) = Scrapes::passed_on();
        driver::metrics::watch(&mut driver, scrapes);
        self.sync = Some(Sync { running: Box::pin(driver.run()), newcomers, scrapes: passed_on });
        Ok(())
    }
}

/// Asks a source which history it serves. Returns the arguments of a sync from it.
async fn ask_source(
    args: ReplicaArgs,
    credentials: Credentials,
    server: String,
) -> Result<(Option<ReplId>, ReplicaArgs, Source), Failure> {
    let mut source = Source::connect_first(&args.read, &credentials).await.map_err(source::failure)?;
    let plan = source.plan(&args.read, args.name.as_deref(), &server).await?;
    Ok((plan.replid, args, source))
}

/// Another descriptor of the same connection.
fn duplicate(socket: &TcpStream) -> std::io::Result<std::net::TcpStream> {
    let socket = rustix::io::fcntl_dupfd_cloexec(socket, 0)?;
    Ok(socket.into())
}
