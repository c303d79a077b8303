//! Sync: the loop that leads one server from joining to the hand-off. One owner, one loop: [`Sync::next`] says what
//! happened, [`Sync::apply`] does what follows from it.
//!
//! ```text
//!   Waiting ── offer ──▶ Transfer ── last slot ──▶ Load ── first ACK ──▶ CatchUp ── covered ──▶ HandOff ──▶ Done
//!                           ▲                       │                      │   ▲                  │
//!                           └── link or feed lost ──┘                      │   └── refused ───────┘
//!                                                                          └──▶ Stay (--stay), until stopped: then HandOff
//! ```
//!
//! [`module`], [`relay`], [`hand_off`] and [`ends`] hold the parts of `apply` that those names say.
//!
//! Whatever goes wrong before the server holds the whole snapshot ends in [`Sync::clean_up`]; afterwards the best end is always
//! the hand-off: the server's own replication then makes good whatever is missing.

mod ends;
mod hand_off;
mod module;
mod relay;

use std::net::{SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_protocol::{Message, Offer, Phase, Progress as ProgressMessage, RefusalCode, WaitCause};
use remora_redis::ReplId;
use rustls::ServerConfig;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{self, UnboundedReceiver};

use crate::args::ReplicaArgs;
use crate::backoff::Backoff;
use crate::conversation::{Fault, Token};
use crate::exit::{Code, Failure};
use crate::progress;
use crate::replica::candidates::Candidates;
use crate::replica::control::{Control, Expected, NotOurs};
use crate::replica::delivery::{self, Handle, News, Order};
use crate::replica::locality::Locality;
use crate::replica::meter::Meter;
use crate::replica::once_settled;
use crate::replica::preflight::{self, Primary, Target};
use crate::replica::record::Record;
use crate::replica::report::{Moments, PROGRESS_EVERY};
use crate::replica::source::{Chosen, Sinks, Source};
use crate::replica::spool::Spool;
use crate::replica::sync::relay::Relay;
use crate::replica::upstream::Said;
use crate::server::{Facts, ServerError};

/// See the module's text.
pub(super) struct Sync {
    args: ReplicaArgs,
    token: Arc<Token>,
    control: Control,
    record: Record,
    target: Target,
    primary: Primary,
    source: Option<Source>,
    /// What we have to do with other replicas.
    relay: Relay,
    delivery: Handle,
    news: UnboundedReceiver<News>,
    meter: Arc<Meter>,
    sinks: Sinks,
    link: SocketAddr,
    /// The server has been told to follow our link.
    redirected: bool,
    phase: Phase,
    moments: Moments,
    offer: Option<Offer>,
    transport: Option<remora_fabric::TransportKind>,
    /// What spoke against a better one.
    transport_why: String,
    /// When to try the source again, and since when it has been away.
    retry: Option<Instant>,
    away_since: Option<Instant>,
    /// Since when the source has had nothing to offer, and why.
    waiting: Option<(Instant, WaitCause, String)>,
    backoff: Backoff,
    /// Since when the server should have come to our link and has not.
    missed: Option<Instant>,
    /// Since when it has not answered when it was looked for.
    silent_since: Option<Instant>,
    /// Another client has taken the server over: it is not ours to put in order.
    taken_away: bool,
    /// The replication id that the server got when its position was made worthless.
    worthless: Option<ReplId>,
    /// The module was told to empty the server.
    emptied: bool,
    /// Payloads that the server broke off.
    broken_loads: u32,
    /// The source has put us out because nothing was taken: before it is asked again, the server must answer.
    stalled: bool,
    interruptions: u32,
    progress_due: Instant,
    question_due: Instant,
    asked_at: Option<u64>,
    told_uncovered: bool,
    failed_hand_offs: u32,
    bar: Option<progress::Meter>,
    signals: (Signal, Signal),
}

/// What happened.
enum Happening {
    Said(Box<Result<Message, crate::conversation::Error>>),
    News(News),
    Peer(Said),
    Retry,
    Tick,
    Signal(&'static str),
}

/// How a sync that went well ended.
enum End {
    HandedOver,
    /// Stopped by a signal, after a hand-off.
    Stopped(&'static str),
}

type Flow = Result<ControlFlow<End>, Failure>;

const GO_ON: Flow = Ok(ControlFlow::Continue(()));

/// How often the loop looks at the clock. Short while something is awaited by the millisecond.
const TICK: Duration = Duration::from_millis(50);
const QUICK_TICK: Duration = Duration::from_millis(5);

/// Payloads that the server may break off before we believe that it always will.
const BROKEN_LOADS_LIMIT: u32 = 3;

/// How long the source may have nothing to offer, should `--retry-for` be shorter: a primary may be busy with another snapshot
/// of its own first. One that fails is borne for `--retry-for` only.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// How long a server may stay away from our link before we look what it is doing: servers try again each second.
const MISSED_LIMIT: Duration = Duration::from_secs(2);

/// How often the source is asked whether the primary's backlog suffices.
const QUESTION_EVERY: Duration = Duration::from_millis(250);

/// How long a server that is fed may be without its source. Short: it hears nothing of the primary meanwhile, and a source that
/// was started again does not know the old stream.
const STAY_WITHOUT_SOURCE: Duration = Duration::from_secs(2);

/// How long a server may take to answer when it is asked whether it lives.
const SIGN_OF_LIFE: Duration = Duration::from_secs(3);

impl Sync {
    /// Opens the link and asks the source for a snapshot. Nothing of the server is touched yet.
    #[allow(clippy::too_many_arguments)] // called once, with all that the preflight has found
    pub(super) async fn begin(
        args: ReplicaArgs,
        token: Arc<Token>,
        control: Control,
        record: Record,
        target: Target,
        primary: Primary,
        source: Source,
        link_tls: Option<Arc<ServerConfig>>,
    ) -> Result<Sync, Failure> {
        let no_handler = |error| Failure::local(format!("signals can't be caught: {error}"));
        let signals = (
            signal(SignalKind::interrupt()).map_err(no_handler)?,
            signal(SignalKind::terminate()).map_err(no_handler)?,
        );
        let locality = Locality::of(control.present(), target.facts.process_id).or_listen(args.listen);
        let host = locality.link_host;
        let no_port =
            |error| Failure::local(format!("the link for the server can't listen on {host}: {error}; see --listen"));
        let listener = TcpListener::bind((host, 0)).map_err(no_port)?;
        listener.set_nonblocking(true).map_err(no_port)?;
        let link = listener.local_addr().map_err(no_port)?;
        tracing::info!(%link, "listening for the link of {}", control.server().url());
        let meter = Arc::new(Meter::default());
        let sinks = Sinks::new(args.memory.get());
        let (tell, news) = mpsc::unbounded_channel();
        let setup = delivery::Setup {
            candidates: Candidates::new(
                listener,
                link_tls.filter(|_| target.tls_replication),
                target.link_login.access(),
                locality,
            ),
            spool: args.state_dir.clone(),
            backlog_limit: sinks.backlog_limit(),
            meter: meter.clone(),
            news: tell,
        };
        let delivery =
            delivery::spawn(setup).map_err(|error| Failure::local(format!("no thread for the delivery: {error}")))?;
        let relay = Relay::open(&args, &token, &source).await?;
        let now = Instant::now();
        let mut sync = Sync {
            args,
            token,
            control,
            record,
            target,
            primary,
            source: Some(source),
            relay,
            delivery,
            news,
            meter,
            sinks,
            link,
            redirected: false,
            phase: Phase::Waiting,
            moments: Moments::begin(now),
            offer: None,
            transport: None,
            transport_why: String::new(),
            retry: None,
            away_since: None,
            waiting: None,
            backoff: Backoff::from_system(),
            missed: None,
            silent_since: None,
            taken_away: false,
            worthless: None,
            emptied: false,
            broken_loads: 0,
            stalled: false,
            interruptions: 0,
            progress_due: now,
            question_due: now,
            asked_at: None,
            told_uncovered: false,
            failed_hand_offs: 0,
            bar: None,
            signals,
        };
        sync.join().await;
        Ok(sync)
    }

    /// Runs to the end, and leaves the server in the state that the outcome names.
    pub(super) async fn run(mut self) -> Result<(), Failure> {
        let outcome = loop {
            let happening = self.next().await;
            match self.apply(happening).await {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(end)) => break Ok(end),
                Err(failure) => break Err(failure),
            }
        };
        if let Some(bar) = self.bar.take() {
            bar.finish();
        }
        match outcome {
            Ok(end) => self.end_well(end).await,
            Err(failure) => Err(self.clean_up(failure).await),
        }
    }

    async fn next(&mut self) -> Happening {
        let quick = matches!(self.phase, Phase::CatchUp | Phase::Load);
        let tick = tokio::time::sleep(if quick { QUICK_TICK } else { TICK });
        let retry = self.retry.map(tokio::time::Instant::from_std);
        let said = async {
            match &mut self.source {
                Some(source) => source.receive().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = self.signals.0.recv() => Happening::Signal("SIGINT"),
            _ = self.signals.1.recv() => Happening::Signal("SIGTERM"),
            said = said => Happening::Said(Box::new(said)),
            news = self.news.recv() => Happening::News(news.unwrap_or_else(|| News::Fatal {
                text: "the delivery ended unexpectedly; this is a bug of remora".into(),
            })),
            said = self.relay.said() => Happening::Peer(said),
            () = async { match retry {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            } } => Happening::Retry,
            () = tick => Happening::Tick,
        }
    }

    async fn apply(&mut self, happening: Happening) -> Flow {
        match happening {
            Happening::Said(said) => match *said {
                Ok(message) => self.said(message).await,
                Err(error) => self.source_lost(error).await,
            },
            Happening::News(news) => self.delivery_says(news).await,
            Happening::Peer(said) => self.peer_said(said).await,
            Happening::Retry => self.try_source_again().await,
            Happening::Tick => self.tick().await,
            Happening::Signal(name) => self.stopped(name).await,
        }
    }

    // ---- the source ----

    /// Asks for what is still needed. A failure shows when the answer is awaited.
    async fn join(&mut self) {
        let mut progress = self.delivery.progress();
        let mut held = progress.next_slot;
        if let (None, Some(folder)) = (&progress.origin, &self.args.state_dir) {
            // What an agent before us left behind.
            if let Some((origin, below)) = Spool::look(folder) {
                progress.origin = Some(origin);
                held = below;
            }
        } else if self.args.state_dir.is_some() {
            held = held.max(self.meter.slots_below.get().min(self.meter.slots_held.get()));
        } else if progress.copy.is_some() {
            held = held.max(self.meter.slots_held.get());
        }
        let relays = self.relay.introduction(&self.args);
        if let Some(source) = &mut self.source {
            let _ = source.join(&self.args, &self.target, &progress, held, relays).await;
        }
    }

    async fn said(&mut self, message: Message) -> Flow {
        match message {
            Message::Waiting { cause, text } => {
                tracing::info!("waiting: {text}");
                let since = self.waiting.take().map_or_else(Instant::now, |(since, ..)| since);
                self.waiting = Some((since, cause, text));
                GO_ON
            }
            Message::Offer(offer) => self.offered(offer).await,
            Message::ReadFrom { generation, upstream } => self.sent_to(generation, upstream),
            Message::GenerationGone { generation, text } => {
                tracing::warn!(generation, "the source has given up its snapshot: {text}");
                self.interruptions += 1;
                if self.delivery.progress().loaded {
                    self.hand_off("its stream through the source has ended").await
                } else {
                    GO_ON
                }
            }
            Message::HandOffAnswer { covered: true, .. } if !self.delivery.progress().loaded => {
                self.asked_at = None; // it restarted since we asked
                GO_ON
            }
            Message::HandOffAnswer { covered: true, .. } => self.hand_off("caught up").await,
            Message::HandOffAnswer { covered: false, text, .. } => {
                if !self.told_uncovered {
                    tracing::warn!(
                        "the primary would not take the server over without a full copy: {text}; following until it would"
                    );
                    self.told_uncovered = true;
                }
                self.asked_at = None;
                GO_ON
            }
            other => {
                tracing::debug!(message = other.name(), "not expected here");
                GO_ON
            }
        }
    }

    /// A snapshot, or the rest of one: connect to its tables and have the delivery read them.
    async fn offered(&mut self, offer: Offer) -> Flow {
        let Some(source) = &self.source else { return GO_ON };
        let progress = self.delivery.progress();
        let way = source.way(&self.args);
        let (asked, sinks, loaded) = (offer.clone(), self.sinks, progress.loaded);
        let is_same = progress.origin.as_ref().is_some_and(|origin| origin.generation == offer.generation);
        let relay = self.relay.wish(&self.args, progress.copy.filter(|_| is_same));
        let connecting = tokio::task::spawn_blocking(move || way.feed(&asked, sinks, loaded, relay.as_ref()));
        let result = connecting.await.map_err(|error| Failure::local(format!("connecting failed: {error}")))?;
        let (feed, mut chosen) = match result {
            Ok(connected) => connected,
            Err(failure) => return self.feed_lost(failure).await,
        };
        self.waiting = None;
        self.moments.offered.get_or_insert_with(Instant::now);
        self.away_since = None;
        self.delivery.order(Order::Attach(Box::new(feed)));
        self.begin_relaying(&offer, &mut chosen);
        self.reads_by(chosen, &offer);
        self.offer = Some(offer);
        if self.phase == Phase::Waiting {
            self.phase = Phase::Transfer;
        }
        if !self.redirected {
            self.redirect().await?;
        }
        GO_ON
    }

    /// Remembers the transport, and says it where it is news.
    fn reads_by(&mut self, chosen: Chosen, offer: &Offer) {
        let Chosen { kind, why, .. } = chosen;
        if self.transport != Some(kind) || self.transport_why != why {
            if self.transport == Some(remora_fabric::TransportKind::Verbs) {
                tracing::warn!(now = kind.name(), why, "RDMA to the source has ended; going on by another transport");
            }
            tracing::info!(
                transport = kind.name(),
                why,
                generation = offer.generation,
                offset = offer.offset,
                "reading the source's tables"
            );
        }
        (self.transport, self.transport_why) = (Some(kind), why);
    }

    async fn source_lost(&mut self, error: crate::conversation::Error) -> Flow {
        self.source = None;
        if matches!(error.fault, Fault::Refused { code: RefusalCode::Stalled, .. }) {
            self.stalled = true;
            self.delivery.order(Order::GiveUp);
        }
        let passes = match &error.fault {
            Fault::Refused { code, .. } => code.may_pass(),
            fault => fault.may_pass(),
        };
        let failure = super::source::failure(error);
        self.come_again(passes, failure).await
    }

    /// Sets the next attempt, or fails where another would not help or the time for them is over.
    async fn come_again(&mut self, passes: bool, failure: Failure) -> Flow {
        let since = *self.away_since.get_or_insert_with(Instant::now);
        let enough = !passes || (self.args.stay && since.elapsed() > STAY_WITHOUT_SOURCE);
        if enough && self.delivery.progress().loaded {
            // The server has all that the snapshot held: the primary itself can make good the rest.
            tracing::warn!("{failure}; going to the primary without the source");
            return self.hand_off("the source can't feed it any more").await;
        }
        if !passes {
            return Err(failure);
        }
        if since.elapsed() > self.args.retry_for {
            return Err(failure.and(&format!("tried for {} s (--retry-for)", self.args.retry_for.as_secs())));
        }
        let pause = self.backoff.next();
        tracing::warn!("{failure}; trying again in {} ms", pause.as_millis());
        self.interruptions += 1;
        self.retry = Some(Instant::now() + pause);
        GO_ON
    }

    async fn try_source_again(&mut self) -> Flow {
        self.retry = None;
        if self.delivery.progress().loaded && !self.args.stay {
            // The stream may come from the primary itself, and that is where the server is going anyway.
            let why =
                if self.source.is_none() { "the source is away" } else { "the source no longer holds what it needs" };
            return self.hand_off(why).await;
        }
        if let Err(failure) = self.sign_of_life().await {
            // Another snapshot for a server that takes nothing would cost the primary a fork for nothing.
            return self.come_again(true, failure).await;
        }
        if self.source.is_some() {
            self.join().await;
            return GO_ON;
        }
        match Source::connect(&self.args, &self.token).await {
            Ok(source) => {
                self.source = Some(source);
                self.backoff = Backoff::from_system();
                self.join().await;
                GO_ON
            }
            Err(error) => {
                let passes = error.fault.may_pass();
                self.come_again(passes, super::source::failure(error)).await
            }
        }
    }

    /// After a stall: whether the server answers at all.
    async fn sign_of_life(&mut self) -> Result<(), Failure> {
        if !self.stalled {
            return Ok(());
        }
        self.fresh_facts().await?;
        self.stalled = false;
        Ok(())
    }

    /// What the server says of itself on a new connection, within a time that does not keep us from everything else.
    async fn fresh_facts(&mut self) -> Result<Facts, Failure> {
        let server = self.control.server().clone();
        let answer = async {
            let mut client = server.connect().await?;
            let facts = Facts::read(&mut client).await?;
            Ok::<_, ServerError>((client, facts))
        };
        let Ok(answer) = tokio::time::timeout(SIGN_OF_LIFE, answer).await else {
            let text = format!("the server {} does not answer for {} s", server.url(), SIGN_OF_LIFE.as_secs());
            return Err(Failure::new(Code::Server, text));
        };
        let (client, facts) = answer?;
        self.control.replace(client);
        Ok(facts)
    }

    /// The tables can't be read at present: ask for them again, after a pause.
    async fn feed_lost(&mut self, failure: Failure) -> Flow {
        if self.source.is_none() {
            return GO_ON; // reconnecting to the source is under way and brings another feed
        }
        self.come_again(true, failure).await
    }

    // ---- the delivery ----

    async fn delivery_says(&mut self, news: News) -> Flow {
        match news {
            News::Asked => {
                self.missed = None;
                GO_ON
            }
            News::Introduce(introduction) => self.introduce(introduction).await,
            News::Fetched => {
                self.moments.fetched = Some(Instant::now());
                self.relay.leave_upstream();
                // From here on nothing more of the snapshot is wanted from the source.
                self.phase = self.phase.max(Phase::Load);
                GO_ON
            }
            News::PayloadSent => {
                self.phase = self.phase.max(Phase::Load);
                GO_ON
            }
            News::Loaded => self.loaded().await,
            News::LinkLost { text, loading } => self.link_lost(&text, loading),
            News::FeedLost { error } => {
                self.interruptions += 1;
                // Whether this or the end of the session is seen first is chance: both say which source it is.
                self.feed_lost(Failure::new(Code::Source, format!("the source {}: {error}", self.args.source))).await
            }
            News::PeerLost(lost) => self.peer_lost(lost).await,
            News::FeedWanted => {
                if !self.delivery.progress().loaded {
                    self.phase = Phase::Waiting;
                }
                self.join().await;
                GO_ON
            }
            News::Fatal { text } => Err(Failure::local(text)),
        }
    }

    fn link_lost(&mut self, text: &str, loading: bool) -> Flow {
        self.missed.get_or_insert_with(Instant::now);
        if !loading {
            tracing::debug!("the server's link ended: {text}");
            return GO_ON;
        }
        self.broken_loads += 1;
        self.interruptions += 1;
        self.phase = Phase::Transfer;
        self.moments.fetched = None;
        if self.broken_loads >= BROKEN_LOADS_LIMIT {
            let text = format!(
                "the server {} broke off loading the snapshot {} times ({text}); its log says why",
                self.control.server().url(),
                self.broken_loads
            );
            return Err(Failure::new(Code::SyncFailed, text));
        }
        tracing::warn!("the server's link ended while it was loading: {text}; it will ask again");
        GO_ON
    }

    async fn loaded(&mut self) -> Flow {
        self.moments.loaded = Some(Instant::now());
        self.moments.fetched.get_or_insert_with(Instant::now);
        self.phase = Phase::CatchUp;
        let (host, port) = (self.link.ip().to_string(), self.link.port());
        let put_back = match self.control.still_ours(Expected::OneOf(&[(&host, port)])).await {
            Ok(_) => self.try_to_put_settings_back_but_the_login().await,
            Err(NotOurs::Unknown(error)) => Err(error),
            Err(NotOurs::TakenOver(how)) => return Err(self.lost_to(&how)),
        };
        if let Err(error) = put_back {
            tracing::warn!(%error, "a setting could not be put back yet");
        }
        self.tell_progress().await;
        self.tick().await
    }

    // ---- the server ----

    /// Tells the server to follow our link, with its loading set to the quickest safe way.
    async fn redirect(&mut self) -> Result<(), Failure> {
        self.look_again().await?;
        if let Some(before) = self.target.diskless_load.clone() {
            // Straight from the link, without a file, where there is nothing to lose by it.
            let empty = self.target.facts.keys() == 0 || self.target.unfinished;
            let wanted = if empty { "on-empty-db" } else { "flush-before-load" };
            if before != "swapdb"
                && !self.record.change(self.control.client().await?, "repl-diskless-load", &before, wanted).await?
            {
                tracing::debug!(wanted, "the server has no such way of loading: left as it is");
            }
        }
        let by_module = self.look_for_the_module().await?;
        let (host, port) = (self.link.ip().to_string(), self.link.port());
        self.target.link_login.give(&mut self.record, self.control.client().await?).await?;
        self.record.note_link(&host, port)?;
        // The settings took round trips of their own, and as long as a server loads they wait for it.
        self.look_again().await?;
        if !(by_module && self.give_up_the_position().await?) {
            once_settled(self.control.client().await?, &["REPLICAOF", &host, &port.to_string()]).await?;
        }
        self.redirected = true;
        self.missed = Some(Instant::now());
        tracing::info!(link = %self.link, "the server follows our link");
        self.bar =
            Some(progress::Meter::start(format!("{}", self.control.server().url()), progress::Unit::Bytes, None));
        Ok(())
    }

    /// Looks once more, just before the first word that changes the server: the preflight may be long ago, and the server may have
    /// been written to, promoted or pointed elsewhere since.
    async fn look_again(&mut self) -> Result<(), Failure> {
        let url = self.control.server().url().to_string();
        match self.control.still_ours(Expected::AsFound(&self.target.facts)).await {
            Ok(facts) => self.target.facts = facts,
            Err(NotOurs::Unknown(error)) => return Err(error.into()),
            Err(NotOurs::TakenOver(how)) => {
                let text = format!(
                    "the server {url} {how}, while the agent waited for a snapshot; start it again if it is still wanted"
                );
                return Err(Failure::refused(text));
            }
        }
        preflight::refuse_to_overwrite(&self.args, self.control.server(), &self.target)
    }

    async fn tick(&mut self) -> Flow {
        if let Some(bar) = &self.bar {
            let known = self.meter.bytes_known.get();
            if known > 0 && self.meter.slots_total.get() > 0 {
                bar.set_total(known);
            }
            bar.set(self.meter.bytes_delivered.get());
        }
        self.tell_progress_when_due().await;
        let retry_for = self.args.retry_for;
        if let Some((since, cause, reason)) = &self.waiting
            && since.elapsed()
                > if *cause == WaitCause::LastAttemptFailed { retry_for } else { retry_for.max(WAIT_LIMIT) }
        {
            let text = format!(
                "the source {} has had no snapshot to offer for {} s: {reason}",
                self.args.source,
                since.elapsed().as_secs()
            );
            return Err(Failure::new(Code::Source, text));
        }
        if self.missed.is_some_and(|since| since.elapsed() > MISSED_LIMIT) {
            return self.look_for_the_server().await;
        }
        match self.phase {
            // It asked for the snapshot once more, as servers do that restarted.
            Phase::CatchUp | Phase::Stay if !self.delivery.progress().loaded => {
                self.phase = Phase::Transfer;
                GO_ON
            }
            Phase::CatchUp => self.catch_up().await,
            _ => GO_ON,
        }
    }

    /// The server does not come to our link. It may have restarted, and then follows nobody; or it has been told otherwise.
    async fn look_for_the_server(&mut self) -> Flow {
        let looked = self.fresh_facts().await;
        self.missed = Some(Instant::now());
        let facts = match looked {
            Ok(facts) => facts,
            Err(failure) if self.silent_since.get_or_insert_with(Instant::now).elapsed() > self.args.retry_for => {
                return Err(failure);
            }
            Err(failure) => {
                tracing::debug!("{failure}; looking again");
                return GO_ON;
            }
        };
        self.silent_since = None;
        let (host, port) = (self.link.ip().to_string(), self.link.port());
        if facts.loading == Some(true) {
            return GO_ON;
        }
        if facts.link.as_ref().is_some_and(|link| link.host == host && link.port == port) {
            // It may have lost the login by a restart, or by an operator who set another.
            // The facts came by a connection made just now.
            let client = self.control.client().await?;
            if let Err(failure) = self.target.link_login.give(&mut self.record, client).await {
                tracing::debug!("{failure}; trying again");
            }
            return GO_ON;
        }
        let restarted = facts.run_id != self.target.facts.run_id;
        if facts.link.is_none() && restarted {
            if facts.keys() > 0 && !self.args.replace {
                return Err(self.lost_to(&format!(
                    "restarted and holds {} keys now; give --replace if they may go",
                    facts.keys()
                )));
            }
            tracing::warn!(
                "the server {} restarted and follows no primary: it is redirected again",
                self.control.server().url()
            );
            self.target.facts = facts;
            self.redirect().await?;
            return GO_ON;
        }
        // Between the two looks it may have come back to us.
        self.still_follows(&[(&host, port)]).await?;
        GO_ON
    }

    /// Points the server at one address if it follows the other one at this moment.
    async fn point_at(&mut self, to: (&str, u16), from: (&str, u16)) -> Result<(), Failure> {
        match self.control.follow(to, Expected::OneOf(&[from])).await {
            Ok(()) => Ok(()),
            Err(NotOurs::Unknown(error)) => Err(error.into()),
            Err(NotOurs::TakenOver(how)) => Err(self.lost_to(&how)),
        }
    }

    /// Fails unless the server follows one of these addresses now. Asked before each word that changes it.
    async fn still_follows(&mut self, addresses: &[(&str, u16)]) -> Result<Facts, Failure> {
        match self.control.still_ours(Expected::OneOf(addresses)).await {
            Ok(facts) => Ok(facts),
            Err(NotOurs::Unknown(error)) => Err(error.into()),
            Err(NotOurs::TakenOver(how)) => Err(self.lost_to(&how)),
        }
    }

    /// Another client has changed the server, which from now on is not ours to change.
    fn lost_to(&mut self, how: &str) -> Failure {
        self.taken_away = true;
        Failure::new(Code::SyncFailed, format!("the server {} {how}", self.control.server().url()))
    }

    /// Also while something else is waited for: who says nothing for long is taken for dead by those who read from it.
    async fn tell_progress_when_due(&mut self) {
        if Instant::now() >= self.progress_due {
            self.progress_due = Instant::now() + PROGRESS_EVERY;
            self.tell_progress().await;
        }
    }

    async fn tell_progress(&mut self) {
        let Some(offer) = &self.offer else { return };
        let progress = self.delivery.progress();
        let counts_this = progress.origin.is_some_and(|origin| origin.generation == offer.generation);
        if !counts_this && !progress.loaded {
            // The meter still counts slots of an earlier snapshot: said of this one, they would be retired unread.
            return;
        }
        let message = Message::Progress(ProgressMessage {
            generation: offer.generation,
            phase: self.phase,
            transport: self.transport.map(remora_fabric::TransportKind::code),
            transport_why: self.transport_why.clone(),
            slots_below: self.slots_below(),
            slots_held: self.meter.slots_held.get(),
            bytes: self.meter.bytes_fetched.get().max(self.meter.bytes_delivered.get()),
            applied_offset: self.meter.acknowledged.get(),
            relaying: self.relaying(),
        });
        if let Some(source) = &mut self.source {
            // A source that is gone shows itself when it is listened to.
            let _ = source.send(message).await;
        }
    }

    /// Looks whether the server has applied all that there is, and asks for the hand-off then.
    async fn catch_up(&mut self) -> Flow {
        if self.asked_at.is_some() || Instant::now() < self.question_due {
            return GO_ON;
        }
        let facts = match self.control.replication().await {
            Ok(facts) => facts,
            Err(error) => return self.server_away(error).await,
        };
        let applied = facts.offset.unwrap_or(0);
        let fetched = self.meter.stream_fetched.get();
        // Under writes the present runs ahead of every question: near enough is where the primary can take over.
        let near = applied + self.near_enough() >= fetched
            && self.meter.stream_delivered.get() + self.near_enough() >= fetched;
        if !near {
            return GO_ON;
        }
        if self.args.stay {
            self.moments.caught_up = Some(Instant::now());
            self.phase = Phase::Stay;
            tracing::info!(offset = applied, "in step; staying as its feed until stopped");
            return GO_ON;
        }
        self.question_due = Instant::now() + QUESTION_EVERY;
        let Some(offer) = &self.offer else { return GO_ON };
        let question = Message::HandOffQuery { generation: offer.generation, offset: applied };
        if let Some(source) = &mut self.source {
            self.asked_at = Some(applied);
            let _ = source.send(question).await;
        }
        GO_ON
    }

    /// Bytes of the stream that a server may lag behind at the hand-off: a tenth of the primary's backlog.
    fn near_enough(&self) -> u64 {
        self.offer.as_ref().map_or(0, |offer| offer.backlog_bytes / 10)
    }

    /// The server we serve does not answer: it may be restarting.
    async fn server_away(&mut self, error: ServerError) -> Flow {
        let failure = Failure::from(error);
        let since = *self.away_since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.args.retry_for {
            return Err(failure);
        }
        tokio::time::sleep(self.backoff.next()).await;
        if self.control.client().await.is_ok() {
            self.away_since = None;
        }
        GO_ON
    }
}
