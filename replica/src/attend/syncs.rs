//! Syncs: what becomes of a connection that asks for a sync, and the sync that serves it.
//!
//! ```text
//!   begin ──▶ under way ── the server goes on by itself ──▶ over, if no other replica reads its copy
//!                                                      └──▶ lending, until none does, --linger is over, or the next sync begins
//! ```

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{Sender, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::attendance::{Asks, LinkState};
use super::guide::Watcher;
use super::passage::{Arrival, Gate};
use crate::control::Control;
use crate::driver::{self, Attending, Driver};
use crate::options::SyncOptions;
use remora_conversation::tokens::{Credentials, TokenFiles};
use remora_delivery::link::candidates::Newcomer;
use remora_delivery::payload::{Conversion, LeftOut};
use remora_metrics::{Scrape, Scrapes};
use remora_process::events;
use remora_process::exit::{Code, Failure};
use remora_protocol::Offer;
use remora_reader::data_set::DataSet;
use remora_reader::parts::Meter;
use remora_reader::source::{self, Source};
use remora_redis::ReplId;
use remora_server::{CONVERTED, Client, Facts, HostPort, Server, ServerError};

/// How long the source may take to say what it serves, before the primary serves the server. The server waits for
/// `repl-timeout`, 60 s by default.
const SOURCE_LIMIT: Duration = Duration::from_secs(10);

/// How long the source may give nothing of a snapshot whose server asks another primary by now. A primary forks within
/// that; one that hangs does not.
const MOVED_LIMIT: Duration = Duration::from_secs(5);

/// How long the end of what is lent may take: a word to the source, and the closing of a port.
const LENDING_END_LIMIT: Duration = Duration::from_secs(5);

/// The syncs of one server, one at a time.
pub(super) struct Syncs {
    /// The arguments of a sync from the first source.
    pub(super) options: SyncOptions,
    /// Further sources.
    pub(super) sources: Vec<HostPort>,
    pub(super) tokens: TokenFiles,
    pub(super) server: Server,
    pub(super) gate: Gate,
    /// With Sentinels.
    watcher: Option<Watcher>,
    /// What is left out where a copy is converted; `None`: none is.
    converts: Option<Vec<LeftOut>>,
    /// What the server said of itself when it last asked for a copy.
    known: Option<Facts>,
    sync: Option<Sync>,
    /// A sync that its server needs no more.
    lending: Option<Lending>,
    /// For looks at the server's link.
    client: Option<Client>,
}

/// The work of a sync.
type Running = Pin<Box<dyn Future<Output = Result<(), Failure>>>>;

/// A sync under way.
struct Sync {
    running: Running,
    /// `None`: it was told to end.
    newcomers: Option<UnboundedSender<Newcomer>>,
    /// What it is about.
    data_set: DataSet,
    /// The sync adds its values to those of the attendant.
    scrapes: Sender<Scrape>,
    /// Told when the server needs it no more, and other replicas still read its copy.
    lingers: oneshot::Receiver<()>,
    /// The primary that the server asked when it began.
    primary: SocketAddr,
    meter: Arc<Meter>,
    /// Set once the server asks another primary of the same history.
    moved: Option<Stall>,
}

/// A sync whose server goes on by itself, and whose copy other replicas still read.
struct Lending {
    running: Running,
    /// Its end ends the lending.
    _newcomers: Option<UnboundedSender<Newcomer>>,
}

/// How a sync goes on.
enum Step {
    Over(Result<(), Failure>),
    /// Its server needs it no more.
    Lends,
}

/// How long a server that waits for more of a snapshot has got nothing.
#[derive(Debug)]
struct Stall {
    since: Instant,
    /// Bytes of the snapshot that had come by then.
    fetched: u64,
}

impl Stall {
    /// Whether nothing has come for [`MOVED_LIMIT`], although the server has taken all that did. A server that is slow
    /// to load keeps nobody waiting but itself.
    fn is_long(&mut self, now: Instant, fetched: u64, waits_for_more: bool) -> bool {
        if fetched != self.fetched || !waits_for_more {
            *self = Stall { since: now, fetched };
        }
        now.duration_since(self.since) > MOVED_LIMIT
    }
}

impl Sync {
    /// Whether the server asks another primary now, and the source gives nothing more of its snapshot. The source may
    /// be beside the primary before, and hang with it.
    fn is_stuck(&mut self, now: Instant) -> bool {
        let (fetched, delivered) = (self.meter.bytes_fetched.get(), self.meter.bytes_delivered.get());
        let waits_for_more = delivered >= fetched && self.meter.end_given.get() == 0;
        self.moved.as_mut().is_some_and(|stall| stall.is_long(now, fetched, waits_for_more))
    }

    async fn next(&mut self) -> Step {
        tokio::select! {
            biased;
            outcome = self.running.as_mut() => Step::Over(outcome),
            Ok(()) = &mut self.lingers => Step::Lends,
        }
    }
}

/// What a look at the server shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Looked {
    pub(super) link: LinkState,
    /// The history that it executes, and up to where.
    pub(super) history: Option<ReplId>,
    pub(super) offset: u64,
}

impl Syncs {
    pub(super) fn new(
        options: SyncOptions,
        sources: Vec<HostPort>,
        tokens: TokenFiles,
        server: Server,
        gate: Gate,
        watcher: Option<Watcher>,
    ) -> Syncs {
        let (converts, known, sync, lending, client) = (None, None, None, None, None);
        Syncs { options, sources, tokens, server, gate, watcher, converts, known, sync, lending, client }
    }

    /// Has copies of other families and versions converted, without these.
    pub(super) fn converting(self, converts: Option<Vec<LeftOut>>) -> Syncs {
        Syncs { converts, ..self }
    }

    /// What the server said of itself when it last asked for a copy.
    pub(super) fn server_facts(&self) -> Option<&Facts> {
        self.known.as_ref()
    }

    /// Whether copies are converted.
    pub(super) fn converts(&self) -> bool {
        self.converts.is_some()
    }

    pub(super) fn is_running(&self) -> bool {
        self.sync.is_some()
    }

    /// Whether the server asks another primary by now, and the source of the sync gives it nothing more. The server's
    /// connection is closed then, and it comes again: a source of the new primary serves it, or the primary itself.
    pub(super) fn is_stuck(&mut self) -> bool {
        let is_stuck = self.sync.as_mut().is_some_and(|sync| sync.newcomers.is_some() && sync.is_stuck(Instant::now()));
        if is_stuck {
            let seconds = MOVED_LIMIT.as_secs();
            tracing::warn!(
                "the server asks another primary, and the source has given nothing for {seconds} s: the sync ends"
            );
        }
        is_stuck
    }

    /// Tells the sync that is under way to end.
    pub(super) fn end(&mut self) {
        if let Some(sync) = &mut self.sync {
            sync.newcomers = None;
        }
    }

    /// The end of the sync that is under way: its server goes on by itself, or is left to its primary. Pending while no
    /// sync is under way. What is lent to other replicas goes on meanwhile. Cancel-safe.
    pub(super) async fn ended(&mut self) -> Result<(), Failure> {
        loop {
            let step = tokio::select! {
                step = next(&mut self.sync) => step,
                () = lent(&mut self.lending) => {
                    self.lending = None;
                    continue;
                }
            };
            let sync = self.sync.take();
            if let Step::Over(outcome) = step {
                return outcome;
            }
            self.lending = sync.map(|Sync { running, newcomers, .. }| Lending { running, _newcomers: newcomers });
            return Ok(());
        }
    }

    /// Lends until no replica reads any more, or `--linger` is over. A signal ends it too.
    pub(super) async fn lend_to_the_end(&mut self) {
        if self.lending.is_some() {
            lent(&mut self.lending).await;
            self.lending = None;
        }
    }

    /// Ends what is lent: its readers go on elsewhere.
    pub(super) async fn stop_lending(&mut self) {
        let Some(Lending { running, _newcomers: newcomers }) = self.lending.take() else { return };
        drop(newcomers);
        if tokio::time::timeout(LENDING_END_LIMIT, running).await.is_err() {
            tracing::warn!("serving slots to other replicas has not ended within {} s", LENDING_END_LIMIT.as_secs());
        }
    }

    /// Has the sync that is under way answer those who watch; gives the question back if no sync is. A sync that is
    /// just ending, or that is asked too often, adds nothing.
    pub(super) fn pass_on(&self, scrape: Scrape) -> Option<Scrape> {
        let Some(sync) = &self.sync else { return Some(scrape) };
        if let Err(error) = sync.scrapes.try_send(scrape) {
            error.into_inner().answer(None);
        }
        None
    }

    /// How far the server and its link are.
    pub(super) async fn look(&mut self) -> Looked {
        let (client, server) = (&mut self.client, &self.server);
        let facts = async {
            let client = match client {
                Some(client) if client.is_usable() => client,
                other => other.insert(server.connect().await?),
            };
            Ok::<_, ServerError>(Facts::from_info(&client.info("replication").await?))
        };
        let facts = match facts.await {
            Ok(facts) => facts,
            Err(error) => {
                tracing::debug!("{error}; asking again");
                return Looked { link: LinkState::Down, history: None, offset: 0 };
            }
        };
        let link = match &facts.link {
            Some(link) if link.syncing == Some(true) => LinkState::Copying,
            Some(link) if link.up == Some(true) => LinkState::Up,
            Some(_) => LinkState::Down,
            None => LinkState::Nothing,
        };
        Looked { link, history: facts.replid, offset: facts.offset.unwrap_or(0) }
    }

    /// What a connection asks for.
    pub(super) fn asks(&self, arrival: &Arrival) -> Asks {
        let facts = match &arrival.facts {
            Ok(facts) => facts,
            Err(why) => {
                tracing::warn!(primary = %arrival.address, "the primary does not say how it stands: {why}");
                return Asks::Unknown("it is not known whether the primary can continue it".to_owned());
            }
        };
        if let Some(sync) = &self.sync {
            return if sync.data_set.is_of(facts) { Asks::Copy } else { Asks::Another };
        }
        // The primary is asked before it gets PSYNC: its answer +FULLRESYNC would begin the very copy that is to be
        // spared, with a fork, and cannot be taken back. It says the same in INFO: its history, the former one with
        // its end, and what its backlog holds.
        match arrival.asked {
            Some((history, next)) if facts.covers(history, next.saturating_sub(1), 0).is_ok() => Asks::Continues,
            _ if facts.replid.is_none() => Asks::Unknown("the primary does not name its history".to_owned()),
            _ => Asks::Copy,
        }
    }

    /// Gives a connection to the sync that is under way.
    pub(super) fn give(&mut self, arrival: Arrival) {
        if let Some(sync) = self.sync.as_mut().filter(|sync| sync.primary != arrival.address) {
            let fetched = sync.meter.bytes_fetched.get();
            sync.moved.get_or_insert(Stall { since: Instant::now(), fetched });
        }
        let Some(newcomers) = self.sync.as_ref().and_then(|sync| sync.newcomers.as_ref()) else { return };
        let Arrival { server, peer, heard, .. } = arrival;
        let taken = server.into_parts().and_then(|(server, tls)| match self.gate.came_in_time(&server)? {
            Some(served) => Newcomer::intercepted(server, tls, peer, &heard, served).map(Some),
            None => Ok(None),
        });
        match taken {
            Ok(Some(newcomer)) => _ = newcomers.send(newcomer),
            Ok(None) => tracing::debug!("the server is on its way to its primary: this connection of it is closed"),
            Err(error) => tracing::warn!(%error, "the server's connection could not be taken; it will come again"),
        }
    }

    /// Begins a sync, if a source serves the primary's history.
    pub(super) async fn begin(&mut self, arrival: &mut Arrival) -> Result<(), Failure> {
        // The memory and the port are the next one's.
        self.stop_lending().await;
        let begun = async {
            let mut client = self.server.connect().await?;
            let server = Facts::read(&mut client).await?;
            self.known = Some(server.clone());
            let Some(link) = &server.link else {
                return Err(Failure::refused("the server has a connection to a primary, and follows none"));
            };
            let primary = (link.host.clone(), link.port);
            let conversion = self.conversion(&mut client, &server, arrival).await?;
            let (options, source, data_set) = match self.find_source(arrival, &server, conversion.as_ref()).await {
                Ok(found) => found,
                Err(failure) => {
                    // It may have begun another history since it was asked: with its first replica, or by a promotion.
                    let asked_by = arrival.facts.as_ref().ok().and_then(|facts| facts.replid);
                    arrival.ask_again().await;
                    if arrival.facts.as_ref().is_ok_and(|facts| facts.replid == asked_by) {
                        return Err(failure);
                    }
                    self.find_source(arrival, &server, conversion.as_ref()).await?
                }
            };
            let (newcomers, arrivals) = unbounded_channel();
            let (tell, lingers) = oneshot::channel();
            let (tokens, gate) = (self.tokens.clone(), self.gate.clone());
            let control = Control::new(self.server.clone(), client);
            let (watcher, about) = (self.watcher.clone(), data_set.clone());
            let is_captured = arrival.facts.as_ref().is_ok_and(|primary| data_set.captures(primary));
            let attending = Attending {
                options,
                tokens,
                control,
                server,
                primary,
                login: arrival.login(),
                source,
                data_set,
                conversion,
                gate,
                asks_primary: !is_captured,
                watcher,
                arrivals,
                lingers: tell,
            };
            Ok((Driver::begin_attending(attending).await?, newcomers, lingers, about))
        };
        let (mut driver, newcomers, lingers, data_set) =
            tokio::time::timeout(SOURCE_LIMIT, begun).await.unwrap_or_else(|_| {
                let seconds = SOURCE_LIMIT.as_secs();
                Err(Failure::new(Code::Source, format!("no suitable source has answered for {seconds} s")))
            })?;
        tracing::info!(event = events::COPY_SERVED, primary = %arrival.address, "the server asks for a full copy: the source serves it");
        let (passed_on, scrapes) = Scrapes::passed_on();
        driver::watch(&mut driver, scrapes);
        let (primary, meter) = (arrival.address, driver.meter());
        let (running, newcomers) = (Box::pin(driver.run()), Some(newcomers));
        self.sync =
            Some(Sync { running, newcomers, data_set, scrapes: passed_on, lingers, primary, meter, moved: None });
        Ok(())
    }

    /// How the copy is converted: where the primary is of another family or version, and that is wanted.
    async fn conversion(
        &self,
        client: &mut Client,
        server: &Facts,
        arrival: &Arrival,
    ) -> Result<Option<Conversion>, Failure> {
        let (Some(left_out), Ok(primary)) = (&self.converts, &arrival.facts) else { return Ok(None) };
        if server.is_of_one_release_with(primary) {
            return Ok(None);
        }
        let conversion = Conversion::of(client, server, left_out).await?;
        conversion.check_contents(primary, server, self.server.url())?;
        Ok(Some(conversion))
    }

    async fn find_source(
        &self,
        arrival: &Arrival,
        server: &Facts,
        conversion: Option<&Conversion>,
    ) -> Result<(SyncOptions, Source, DataSet), Failure> {
        let kind = server.name() + conversion.map_or("", |_| CONVERTED);
        let found = find(&self.options, &self.sources, &self.tokens, arrival, (server, &kind)).await?;
        Ok((found.options, found.source, DataSet::of_an_attended_server(&found.plan)))
    }
}

/// How the sync that is under way goes on. Pending without one.
async fn next(sync: &mut Option<Sync>) -> Step {
    match sync {
        Some(sync) => sync.next().await,
        None => std::future::pending().await,
    }
}

/// The end of what is lent. Pending where nothing is.
async fn lent(lending: &mut Option<Lending>) {
    let Some(lending) = lending else { return std::future::pending().await };
    if let Err(failure) = lending.running.as_mut().await {
        tracing::debug!("{failure}");
    }
}

// Sources: which source serves a full copy of the attended server, and which cannot.
//
// ```text
//   all sources are asked at once ── answers ──▶ fit for it? ── the first that is ──▶ the sync
//   (those of --source in turn)                      └─ none ──▶ the primary serves the copy at once
// ```
//
// A source is of no use beside a server that waits for the attended one, or for the same primary: beside the attended
// server itself, beside a replica of it, or beside one that lost its link in the same moment. It says so in its answer
// if its server's link is down. A replica of the attended server has a link, and stands still.

/// How long a source's server that is behind the primary's backlog has to show that it follows: longer than a source's
/// facts of it are fresh.
const MOVES_WITHIN: Duration = Duration::from_millis(250);

/// What a source has answered.
pub(super) struct Answered {
    /// The arguments of a sync from it.
    pub(super) options: SyncOptions,
    pub(super) source: Source,
    pub(super) plan: Offer,
}

/// Asks a source what it would serve.
pub(super) async fn ask_source(
    options: SyncOptions,
    credentials: Credentials,
    server: &str,
) -> Result<Answered, Failure> {
    let mut source = Source::connect_first(&options.read, &credentials).await.map_err(source::failure)?;
    let plan = source.plan(&options.read, options.name.as_deref(), server).await?;
    Ok(Answered { options, source, plan })
}

impl Answered {
    /// Why this source has nothing for any server now.
    pub(super) fn obstacle(&self) -> Result<(), Failure> {
        match self.plan.obstacle.as_str() {
            "" => Ok(()),
            why => {
                let text = format!("the source {} cannot serve: {why}", self.options.read.source);
                let is_refused = self.plan.terms.as_ref().is_some_and(|terms| terms.is_refused);
                Err(Failure::new(Code::Source, text).that_passes(!is_refused))
            }
        }
    }
}

/// Asks all sources at once, and returns the first that can serve the attended server. `attended`: what the server says
/// of itself; `kind`: what the sources are told of it.
///
/// # Errors
/// None of them can, and why.
pub(super) async fn find(
    options: &SyncOptions,
    others: &[HostPort],
    tokens: &TokenFiles,
    arrival: &Arrival,
    (attended, kind): (&Facts, &str),
) -> Result<Answered, Failure> {
    let needs = Needs { primary: arrival.facts.clone().unwrap_or_default(), attended: attended.clone() };
    let mut asked = JoinSet::new();
    let (mut first, credentials) = (options.clone(), tokens.credentials(options.source_key));
    first.read.source = options.read.source.from_the_first();
    asked.spawn(ask_in_turn(first, credentials.clone(), needs.clone(), kind.to_owned()));
    for at in others {
        let mut options = options.clone();
        options.read.source = at.clone().into();
        asked.spawn(ask_one(options, credentials.clone(), needs.clone(), kind.to_owned()));
    }
    let mut causes = Vec::new();
    while let Some(answered) = asked.join_next().await {
        match answered {
            Ok(Ok(answered)) => return Ok(answered),
            Ok(Err(failure)) => causes.push(failure.message),
            Err(error) => causes.push(error.to_string()),
        }
    }
    let text = format!(
        "no source can serve a copy of the server's primary {} now ({}); have a remora source beside it or one of its replicas",
        arrival.address,
        causes.join("; ")
    );
    Err(Failure::new(Code::Source, text))
}

/// Asks the sources of one data set, one after the other, so that all servers beside them choose the same one.
async fn ask_in_turn(
    options: SyncOptions,
    credentials: Credentials,
    needs: Needs,
    kind: String,
) -> Result<Answered, Failure> {
    let read = options.read.clone();
    if read.source.is_one() {
        return ask_one(options, credentials, needs, kind).await;
    }
    let mut round = read.source.round();
    loop {
        let mut options = options.clone();
        // One that is busy is not waited for: there is another one.
        (options.read.source, options.read.retry_for) = (round.at().into(), Duration::ZERO);
        let attempt = ask_one(options, credentials.clone(), needs.clone(), kind.clone()).await;
        if let Some(answered) = round.outcome(attempt, |failure: &Failure| failure.passes) {
            let answered = answered?;
            return Ok(Answered { options: SyncOptions { read, ..answered.options }, ..answered });
        }
    }
}

async fn ask_one(
    options: SyncOptions,
    credentials: Credentials,
    needs: Needs,
    kind: String,
) -> Result<Answered, Failure> {
    let mut answered = ask_source(options, credentials, &kind).await?;
    let at = answered.options.read.source.clone();
    let of = |unfit: String| Failure::new(Code::Source, format!("the source {at}: {unfit}"));
    let before = answered.plan.offset;
    match needs.fit(&answered.plan) {
        Fit::Yes => return Ok(answered),
        Fit::No(why) => return Err(of(why)),
        Fit::IfItMoves => tokio::time::sleep(MOVES_WITHIN).await,
    }
    let Answered { options, source, plan } = &mut answered;
    *plan = source.plan(&options.read, options.name.as_deref(), &kind).await?;
    match needs.fit(plan) {
        Fit::Yes => Ok(answered),
        Fit::IfItMoves if plan.offset > before => Ok(answered),
        Fit::IfItMoves => Err(of(format!(
            "its server stands still at offset {}, which the primary's backlog does not reach any more: it waits for its own primary, or \
             for this server",
            plan.offset
        ))),
        Fit::No(why) => Err(of(why)),
    }
}

/// What a source must have.
#[derive(Clone)]
pub(crate) struct Needs {
    /// What the primary of the attended server says of itself.
    pub(crate) primary: Facts,
    pub(crate) attended: Facts,
}

/// Whether a source can serve the attended server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    Yes,
    /// If its server is seen to follow: it is behind what the primary's backlog holds.
    IfItMoves,
    No(String),
}

impl Needs {
    pub(crate) fn fit(&self, plan: &Offer) -> Fit {
        if !plan.obstacle.is_empty() {
            return Fit::No(plan.obstacle.clone());
        }
        // The two were asked one after the other, and a primary begins its first history when its first replica comes.
        let is_of_the_primary = !plan.run_id.is_empty() && self.primary.run_id.as_deref() == Some(plan.run_id.as_str());
        if plan.replid.is_none() || (plan.replid != self.primary.replid && !is_of_the_primary) {
            return Fit::No("it has another history".to_owned());
        }
        if !plan.run_id.is_empty() && self.attended.run_id.as_deref() == Some(plan.run_id.as_str()) {
            return Fit::No("it is beside the very server that asks".to_owned());
        }
        if remora_base::mutation::Mutation::FirstSourceKept.is_active() {
            return Fit::Yes;
        }
        match self.primary.backlog {
            Some(backlog) if backlog.active && plan.offset.saturating_add(1) < backlog.first => Fit::IfItMoves,
            _ => Fit::Yes,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_protocol::Announce;
    use remora_server::Backlog;
    use remora_source::parts::plan_of;

    #[test]
    fn only_a_server_that_waits_for_more_of_a_source_that_gives_nothing_is_stuck() {
        let began = Instant::now();
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        let mut stall = Stall { since: began, fetched: 0 };
        assert!(!stall.is_long(at(5), 0, true));
        assert!(stall.is_long(at(6), 0, true));
        // The source goes on, and then nothing comes any more.
        assert!(!stall.is_long(at(7), 100, true) && !stall.is_long(at(12), 100, true));
        assert!(stall.is_long(at(13), 100, true));
        // The server is slow: it has not taken what has come.
        assert!(!stall.is_long(at(14), 100, false) && !stall.is_long(at(60), 100, false));
        assert!(!stall.is_long(at(64), 100, true) && stall.is_long(at(66), 100, true));
    }

    fn server(run_id: &str, offset: u64) -> Facts {
        Facts {
            replid: Some("a".repeat(40).parse().unwrap()),
            run_id: Some(run_id.to_owned()),
            offset: Some(offset),
            ..Facts::default()
        }
    }

    fn needs() -> Needs {
        let backlog = Backlog { active: true, size: 1000, first: 501, held: 1000 };
        Needs {
            primary: Facts { backlog: Some(backlog), ..server("primary", 1500) },
            attended: server("attended", 100),
        }
    }

    fn plan(of: &Facts) -> Offer {
        let primary = Announce { host: String::new(), port: 1, tls: false, source_sees_as: String::new() };
        plan_of(of, primary, 0, 1)
    }

    #[test]
    fn a_source_that_cannot_serve_the_server_is_passed_over() {
        let fit = |of: Facts| needs().fit(&plan(&of));
        assert_eq!(fit(server("primary", 1500)), Fit::Yes);
        assert_eq!(fit(server("replica", 1490)), Fit::Yes);
        assert_eq!(fit(server("newer than the question", 9000)), Fit::Yes);
        assert_eq!(fit(server("the last that the backlog holds", 500)), Fit::Yes);
        assert_eq!(fit(server("a replica of the attended one", 100)), Fit::IfItMoves);
        assert_eq!(fit(server("the first that it does not hold", 499)), Fit::IfItMoves);
        assert!(matches!(fit(server("attended", 1500)), Fit::No(why) if why.contains("the very server")));
        let other = Facts { replid: Some("b".repeat(40).parse().unwrap()), ..server("other", 1500) };
        assert!(matches!(fit(other), Fit::No(why) if why.contains("history")));
        // The primary itself, which has begun another history since it was asked.
        let since = Facts { replid: Some("b".repeat(40).parse().unwrap()), ..server("primary", 1500) };
        assert_eq!(fit(since), Fit::Yes);
        assert!(matches!(fit(Facts { replid: None, ..server("primary", 0) }), Fit::No(_)));
        assert!(matches!(fit(Facts::default()), Fit::No(_)), "a server without a history");
        let cut_off = Offer { obstacle: "its server has no link".into(), ..plan(&server("replica", 1500)) };
        assert!(matches!(needs().fit(&cut_off), Fit::No(why) if why.contains("no link")));
    }

    #[test]
    fn without_a_backlog_the_primary_leaves_it_open() {
        let backlog = Backlog { active: false, size: 1000, first: 501, held: 0 };
        let needs = Needs { primary: Facts { backlog: Some(backlog), ..server("primary", 1500) }, ..needs() };
        assert_eq!(needs.fit(&plan(&server("replica", 100))), Fit::Yes);
    }
}
