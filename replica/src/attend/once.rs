//! Once: one full copy by interception (`remora replica --delivery intercept`), and then the agent ends.
//!
//! ```text
//!   preflight ──▶ rules ──▶ gate opens ──▶ CLIENT KILL TYPE master ──▶ the server connects again, and asks
//!   in step?      made if                   (a server whose link is      │
//!   done          missing                    down comes by itself)       ├─ a full copy: the sync of remora attend ──▶ done
//!                                                                        └─ the primary can continue it: let through ──▶ done
//! ```
//!
//! What must hold: whatever fails, the gate closes before the server's connection does, so the server goes to its
//! primary by itself. Rules that this run has made go with it.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Instant;

use remora_redis::resp::Frame;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::attendance::{Action, Asks, Attendance, DIRECT_LIMIT, End, Event, LinkState, Rules};
use super::guide::Guide;
use super::passage::{Arrival, Gate, Tls};
use super::syncs::{Looked, Syncs, ask_source};
use super::{Entrance, LOOK_EVERY, STUCK_EVERY, check, no_rules};
use crate::intercept::{self, Temporary};
use crate::options::Options;
use crate::preflight::{self, CUT, REWRITE, refuse_without_a_file};
use crate::{prepared, report};
use remora_conversation::tokens::TokenFiles;
use remora_delivery::link::candidates::Locality;
use remora_process::exit::{Code, Failure, Patience, RETRY_FOR};
use remora_process::signals::Signals;
use remora_process::{blocking, progress};
use remora_server::{Client, Facts, Link, RefusalKind, Server, ServerError, Task};

/// What can be found out about a server whose connection is to be intercepted.
struct Found {
    server: Server,
    client: Client,
    facts: Facts,
    link: Link,
    tls: Tls,
    /// The ports that it may announce to its primary.
    ports: Vec<u16>,
}

/// Examines the server.
///
/// # Errors
/// Its connection to a primary cannot be intercepted.
async fn examine(options: &Options) -> Result<Found, Failure> {
    let server = options.server.open(Task::Replica)?;
    let tls = check(&server, &options.link_tls, options.server.tls.clone()).await?;
    let mut client = server.connect().await?;
    let (facts, url) = (Facts::read(&mut client).await?, server.url());
    if facts.loading == Some(true) {
        return Err(Failure::passing(Code::Server, format!("the server {url} is loading its data set (-LOADING)")));
    }
    let Some(link) = facts.link.clone() else {
        return Err(Failure::refused(format!(
            "the server {url} follows no primary, so it has no connection that could be intercepted: give it one by REPLICAOF or \
             CLUSTER REPLICATE while remora attend is beside it, or use --delivery link"
        )));
    };
    let announced = client.config_number("replica-announce-port").await?;
    let ports = [facts.tcp_port, facts.tls_port, announced].into_iter().flatten().collect();
    Ok(Found { server, client, facts, link, tls, ports })
}

/// A run for one full copy, whose gate is open.
pub(crate) struct Ready {
    once: Once,
    entrance: Entrance,
    /// For the server whose link is up, and has to be cut.
    cut: Option<Client>,
}

/// Does everything that comes before the server notices; `None` if there is nothing to do.
///
/// # Errors
/// The server, the source or the rules are not suitable.
pub(crate) async fn prepare(options: Options, tokens: TokenFiles) -> Result<Option<Ready>, Failure> {
    if options.stay {
        return Err(Failure::new(Code::Usage, "--stay goes with --delivery link only"));
    }
    let mut patience = Patience::new(options.read.retry_for, RETRY_FOR);
    let found = patience.keep_trying(async || examine(&options).await).await?;
    let Found { server, mut client, facts, link, tls, ports: own } = found;
    if options.rewrite_config {
        refuse_without_a_file(&mut client).await?;
    }
    let (url, primary) = (server.url().clone(), format!("{}:{}", link.host, link.port));
    let is_in_step = link.up == Some(true) && link.syncing != Some(true);
    if is_in_step && !options.replace {
        progress::say(&format!(
            "{url} is in step with its primary {primary}: it needs no full copy, and nothing was touched (--replace takes one)"
        ));
        return Ok(None);
    }
    let (port, anew, rewrites) = (options.delivery.listen_port, options.replace, options.rewrite_config);
    if is_in_step {
        preflight::refuse_without_cutting(&mut client, &facts).await?;
    }
    let (sentinels, wanted) = (options.sentinels.clone(), options);
    let options = wanted.of_an_intercepted_sync();
    // The source is asked before anything is changed, and again when the primary's history is known.
    let ask = async || {
        let answered = ask_source(options.clone(), tokens.credentials(options.source_key), &facts.name()).await?;
        answered.obstacle()?;
        Ok((answered.source.way(&answered.options.read), answered.plan))
    };
    let (way, plan) = patience.keep_trying(ask).await?;
    let credentials = tokens.credentials(options.source_key);
    let reading = prepared::of_a_run(&wanted, &credentials, &plan, &way, &mut patience).await?;
    if !client.is_usable() {
        client = server.connect().await?;
    }
    let entrance = Entrance::open(port, BTreeSet::from([link.port]), sentinels, &mut patience).await?;
    entrance.tls.send_replace(tls);
    let (gate, rules) = open_the_gate(&entrance, &client, &facts, port).await?;
    if wanted.dry_run {
        gate.close();
        let verdict = format!(
            "{url} ({}) can take a full copy by interception of its connection to {primary}; nothing was touched",
            facts.name()
        );
        return report::tell(&wanted, verdict, &plan, None, (reading, Vec::new())).map(|()| None);
    }
    let watcher = entrance.guide.as_ref().map(Guide::watcher);
    let syncs = Syncs::new(options, Vec::new(), tokens, server, gate, watcher);
    let attends = Rules::Once { anew, copy_limit: syncs.options.read.retry_for };
    let attendance = Attendance::new(Instant::now(), attends);
    let once = Once { syncs, attendance, own, others: JoinSet::new(), primary, rewrites, _rules: rules };
    Ok(Some(Ready { once, entrance, cut: is_in_step.then_some(client) }))
}

impl Ready {
    /// Runs to the end.
    ///
    /// # Errors
    /// Why the server is not in step. The server goes to its primary by itself then.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let Ready { mut once, mut entrance, cut } = self;
        let mut signals = Signals::catch()?;
        let mut outcome = match cut {
            Some(mut client) => once.cut(&mut client).await,
            None => Ok(()),
        };
        if outcome.is_ok() {
            outcome = once.run(&mut entrance, &mut signals).await;
        }
        once.syncs.gate.hand_back().await;
        if let (Err(failure), Some(guide)) = (&mut outcome, &mut entrance.guide)
            && !matches!(failure.code, Code::Interrupted | Code::TakenOver)
            && guide.look_to_the_end(&once.syncs.server).await
        {
            *failure = failure.clone().and("its primary was replaced meanwhile, and it follows the new one now");
        }
        if outcome.is_ok() && once.rewrites {
            once.write_the_file().await?;
        }
        once.syncs.lend_to_the_end().await;
        outcome
    }
}

/// Opens the gate, and makes rules for it if there are none.
async fn open_the_gate(
    entrance: &Entrance,
    client: &Client,
    facts: &Facts,
    port: u16,
) -> Result<(Gate, Option<Temporary>), Failure> {
    let gate = entrance.gate.clone();
    if gate.open() {
        return Ok((gate, None));
    }
    gate.close();
    let rules = make_rules(client, facts, port).await.map_err(|failure| no_rules(port).and(&failure.to_string()))?;
    match gate.open() {
        true => Ok((gate, Some(rules))),
        false => {
            gate.close();
            Err(no_rules(port).and("rules that were made just now are not heeded"))
        }
    }
}

/// Makes rules for the server's user.
async fn make_rules(client: &Client, facts: &Facts, port: u16) -> Result<Temporary, Failure> {
    let us = rustix::process::geteuid().as_raw();
    let user = Locality::of(client, facts.process_id).uid;
    let user = user.ok_or_else(|| {
        Failure::refused("and they cannot be made here, as it is not known as which user of this host the server runs")
    })?;
    let rules = blocking(move || intercept::Temporary::add(port, user, us)).await?;
    tracing::info!(port, "rules for the connections of user {user} were made, and go with this run");
    Ok(rules)
}

/// A run for one full copy.
struct Once {
    syncs: Syncs,
    attendance: Attendance,
    /// The ports that it may announce.
    own: Vec<u16>,
    /// Connections of other servers of its user, which are passed on.
    others: JoinSet<()>,
    /// The primary that the server follows.
    primary: String,
    /// It writes its configuration file at the end.
    rewrites: bool,
    _rules: Option<Temporary>,
}

impl Once {
    async fn run(&mut self, entrance: &mut Entrance, signals: &mut Signals) -> Result<(), Failure> {
        let [mut look, mut stuck] = [LOOK_EVERY, STUCK_EVERY].map(|every| {
            let mut due = interval(every);
            due.set_missed_tick_behavior(MissedTickBehavior::Delay);
            due
        });
        loop {
            let is_syncing = self.attendance.is_syncing();
            let (event, arrival, ended) = tokio::select! {
                biased;
                signal = signals.next(), if !self.attendance.is_stopping() => {
                    let text = format!("stopped by {signal}; the server goes to its primary by itself");
                    (Event::Signal, None, Err(Failure::new(Code::Interrupted, text)))
                }
                outcome = self.syncs.ended() => (Event::SyncEnded, None, outcome),
                Some(arrival) = entrance.arrivals.recv() => (self.arrived(&arrival), Some(arrival), Ok(())),
                _ = stuck.tick(), if is_syncing => {
                    if !self.syncs.is_stuck() {
                        continue;
                    }
                    (Event::Stuck, None, Ok(()))
                }
                _ = look.tick(), if self.attendance.looks() => {
                    let Looked { link, .. } = self.syncs.look().await;
                    (Event::Looked { link, is_covered: false }, None, Ok(()))
                }
            };
            if let Some(outcome) = self.handle(event, arrival, ended).await {
                return outcome;
            }
        }
    }

    fn arrived(&self, arrival: &Arrival) -> Event {
        let is_of_another_server = arrival.announced_port().is_some_and(|port| !self.own.contains(&port));
        // What a connection of another server asks for is nobody's question.
        let asks = if is_of_another_server { Asks::Continues } else { self.syncs.asks(arrival) };
        Event::Arrived { asks, is_of_another_server, is_open: self.syncs.gate.is_open() }
    }

    /// Has the attendance decide, and does what it says. `ended`: how the run ends with the sync, or with a signal.
    async fn handle(
        &mut self,
        event: Event,
        mut arrival: Option<Arrival>,
        ended: Result<(), Failure>,
    ) -> Option<Result<(), Failure>> {
        let saw_a_copy = self.attendance.saw_a_copy();
        let mut actions = VecDeque::from(self.attendance.handle(Instant::now(), event));
        if self.attendance.saw_a_copy() && !saw_a_copy {
            tracing::warn!("the server is taking a full copy of its primary by itself; waiting for its end");
        }
        let address = arrival.as_ref().map(|arrival| arrival.address);
        let (mut refused, mut is_closed) = (None, false);
        while let Some(action) = actions.pop_front() {
            let follows = match action {
                Action::Begin => match &mut arrival {
                    Some(asking) => Some(match self.syncs.begin(asking).await {
                        Ok(()) => Event::Begun,
                        Err(failure) => {
                            refused = Some(failure);
                            Event::NotBegun
                        }
                    }),
                    None => None,
                },
                Action::Give => {
                    arrival.take().into_iter().for_each(|arrival| self.syncs.give(arrival));
                    None
                }
                Action::Pass { .. } => {
                    arrival.take().into_iter().for_each(|arrival| self.pass(arrival));
                    None
                }
                Action::EndSync => {
                    self.syncs.end();
                    None
                }
                Action::Close => {
                    self.syncs.gate.close();
                    is_closed = true;
                    None
                }
                Action::Drop => {
                    // One that was on its way when the gate was closed comes again without us.
                    if is_closed && let Some(arrival) = arrival.take() {
                        tracing::info!(primary = %arrival.address, "the primary can continue the server: it is let through");
                    }
                    None
                }
                Action::End(end) => return Some(self.outcome(end, address, refused, ended)),
                // These are for a server that is attended on.
                Action::Keep | Action::TakeKept | Action::Open | Action::HandBack => None,
            };
            actions.extend(follows.into_iter().flat_map(|event| self.attendance.handle(Instant::now(), event)));
        }
        None
    }

    fn pass(&mut self, arrival: Arrival) {
        tracing::debug!(primary = %arrival.address, "a connection of another server of this user is passed on");
        self.others.spawn(arrival.pass(None));
    }

    /// What the end of the attendance means for the run.
    fn outcome(
        &self,
        end: End,
        asked: Option<SocketAddr>,
        refused: Option<Failure>,
        ended: Result<(), Failure>,
    ) -> Result<(), Failure> {
        let primary = &self.primary;
        let failure = match end {
            End::Stopped | End::AsTheSync => return ended,
            End::InStep => {
                progress::say(&format!("the server goes on at its primary {primary}, without a full copy through us"));
                return Ok(());
            }
            End::Unknown(why) => {
                Failure::new(Code::Server, format!("{why}, so the server goes to its primary {primary} by itself"))
            }
            End::Another => {
                let asked = asked.map_or_else(String::new, |address| format!(", {address}"));
                let text = format!(
                    "the server asks another primary now{asked}: another client has told it to follow that one; it is left as it is"
                );
                Failure::new(Code::TakenOver, text)
            }
            End::NoSource => {
                let failure = refused.unwrap_or_else(|| Failure::new(Code::Source, "no source serves the server"));
                failure.and("the server goes to its primary by itself, which sends it what it lacks")
            }
            End::Detached => Failure::new(
                Code::TakenOver,
                "another client has detached the server from its primary; it is left as it is",
            ),
            End::CopiedAfterAll => Failure::new(
                Code::SyncFailed,
                format!(
                    "the server is taking a full copy of its primary {primary} by itself, which had said that it can continue the server"
                ),
            ),
            End::TooLate { was_let_through, link } => {
                Failure::new(Code::SyncFailed, self.too_late(was_let_through, link))
            }
        };
        Err(failure)
    }

    fn too_late(&self, was_let_through: bool, link: LinkState) -> String {
        let primary = &self.primary;
        match (was_let_through, link) {
            (_, LinkState::Copying) => {
                format!("the server is taking a full copy of its primary {primary} by itself, which has not ended")
            }
            (false, _) => format!(
                "the server has not connected to its primary {primary} through us: do the rules that remora intercept shows name its                  user, and are the agent and the server in one network namespace?"
            ),
            (true, _) => format!(
                "the server does not get in step with its primary {primary} within {} s; its log says why",
                DIRECT_LIMIT.as_secs()
            ),
        }
    }

    /// Ends the server's connection to its primary. It connects again at once.
    async fn cut(&self, client: &mut Client) -> Result<(), Failure> {
        match client.command(&CUT).await {
            Ok(Frame::Integer(count)) => {
                tracing::info!(count, primary = self.primary, "the server's connection to its primary was ended");
                Ok(())
            }
            Err(error @ ServerError::Refused { kind: RefusalKind::NoPerm, .. }) => {
                Err(Failure::from(error).and("--delivery intercept with --replace needs +client|kill there"))
            }
            Ok(other) => Err(client.unexpected("CLIENT KILL", &other).into()),
            Err(error) => Err(error.into()),
        }
    }

    async fn write_the_file(&self) -> Result<(), Failure> {
        let written = async { self.syncs.server.connect().await?.command(&REWRITE).await };
        let advice = "its configuration file was not written (--rewrite-config needs +config|rewrite, and a file and a folder that \
                      the server may write)";
        written.await.map(drop).map_err(|error| Failure::from(error).and(advice))
    }
}
