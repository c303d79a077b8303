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

use std::collections::BTreeSet;
use std::time::Duration;

use remora_redis::resp::Frame;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::gate::Gate;
use super::guide::Guide;
use super::passage::Arrival;
use super::sources::ask_source;
use super::syncs::{Asks, LinkState, Looked, Syncs};
use super::tls::Tls;
use super::{DIRECT_LIMIT, Entrance, LOOK_EVERY, STUCK_EVERY, check, no_rules};
use crate::args::ReplicaArgs;
use crate::conversation::tokens::TokenFiles;
use crate::exit::{Code, Failure};
use crate::intercept::{self, Temporary};
use crate::patience::{Patience, RETRY_FOR};
use crate::progress;
use crate::replica::forecast;
use crate::replica::locality::Locality;
use crate::replica::needs::{self, CUT, REWRITE};
use crate::replica::preflight::refuse_without_a_file;
use crate::replica::reading;
use crate::server::{Client, Facts, Link, RefusalKind, Server, ServerError, Task};
use crate::signals::Signals;
use crate::tasks::blocking;

/// How long a server may take to connect again. It does so each second.
const ASK_LIMIT: Duration = Duration::from_secs(60);

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
async fn examine(args: &ReplicaArgs) -> Result<Found, Failure> {
    let server = args.server.open(Task::Replica)?;
    let tls = check(&server, &args.link_tls, args.server.tls.options()).await?;
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
    let announced = match client.config_get("replica-announce-port").await {
        Ok(announced) => announced.and_then(|port| port.parse().ok()),
        Err(error) if error.refusal().is_some() => None,
        Err(error) => return Err(error.into()),
    };
    let ports = [facts.tcp_port, facts.tls_port, announced].into_iter().flatten().collect();
    Ok(Found { server, client, facts, link, tls, ports })
}

/// A run for one full copy, whose gate is open.
pub(in crate::replica) struct Ready {
    once: Once,
    entrance: Entrance,
    /// For the server whose link is up, and has to be cut.
    cut: Option<Client>,
}

/// Does everything that comes before the server notices; `None` if there is nothing to do.
///
/// # Errors
/// The server, the source or the rules are not suitable.
pub(in crate::replica) async fn prepare(args: ReplicaArgs, tokens: TokenFiles) -> Result<Option<Ready>, Failure> {
    if args.stay {
        return Err(Failure::new(Code::Usage, "--stay goes with --delivery link only"));
    }
    let mut patience = Patience::new(args.read.retry_for, RETRY_FOR);
    let found = patience.keep_trying(async || examine(&args).await).await?;
    let Found { server, mut client, facts, link, tls, ports: own } = found;
    if args.rewrite_config {
        refuse_without_a_file(&mut client).await?;
    }
    let (url, primary) = (server.url().clone(), format!("{}:{}", link.host, link.port));
    let is_in_step = link.up == Some(true) && link.syncing != Some(true);
    if is_in_step && !args.replace {
        progress::say(&format!(
            "{url} is in step with its primary {primary}: it needs no full copy, and nothing was touched (--replace takes one)"
        ));
        return Ok(None);
    }
    let (port, anew, rewrites) = (args.by.listen_port, args.replace, args.rewrite_config);
    if is_in_step {
        needs::refuse_without_cutting(&mut client, &facts).await?;
    }
    let (sentinels, wanted) = (args.peers.sentinel.open()?, args);
    let args = wanted.of_an_intercepted_sync();
    // The source is asked before anything is changed, and again when the primary's history is known.
    let ask = async || {
        let answered = ask_source(args.clone(), tokens.credentials(args.source_key), &facts.name()).await?;
        answered.obstacle()?;
        Ok((answered.source.way(&answered.args.read), answered.plan))
    };
    let (way, plan) = patience.keep_trying(ask).await?;
    let credentials = tokens.credentials(args.source_key);
    let reading = reading::of_a_run(&wanted, &credentials, &plan, &way, &mut patience).await?;
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
        return forecast::tell(&wanted, verdict, &plan, None, (reading, Vec::new())).map(|()| None);
    }
    let watcher = entrance.guide.as_ref().map(Guide::watcher);
    let syncs = Syncs::new(args, Vec::new(), tokens, server, gate, watcher);
    let awaited = Awaited::Asking { until: Instant::now() + ASK_LIMIT };
    let once = Once {
        syncs,
        awaited,
        own,
        others: JoinSet::new(),
        primary,
        anew,
        rewrites,
        told_of_copy: false,
        _rules: rules,
    };
    Ok(Some(Ready { once, entrance, cut: is_in_step.then_some(client) }))
}

impl Ready {
    /// Runs to the end.
    ///
    /// # Errors
    /// Why the server is not in step. The server goes to its primary by itself then.
    pub(in crate::replica) async fn run(self) -> Result<(), Failure> {
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

/// What the server's link must show before the next step.
enum Awaited {
    /// It asks for a sync.
    Asking { until: Instant },
    /// It was let through, and gets in step at its primary.
    Through { until: Instant },
}

/// A run for one full copy.
struct Once {
    syncs: Syncs,
    awaited: Awaited,
    /// The ports that it may announce.
    own: Vec<u16>,
    /// Connections of other servers of its user, which are passed on.
    others: JoinSet<()>,
    /// The primary that the server follows.
    primary: String,
    /// It takes a full copy although its primary could continue it.
    anew: bool,
    /// It writes its configuration file at the end.
    rewrites: bool,
    told_of_copy: bool,
    _rules: Option<Temporary>,
}

impl Once {
    async fn run(&mut self, entrance: &mut Entrance, signals: &mut Signals) -> Result<(), Failure> {
        let mut is_stopping = false;
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stuck = interval(STUCK_EVERY);
        stuck.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_running = self.syncs.is_running();
            let over = tokio::select! {
                biased;
                signal = signals.next(), if !is_stopping => {
                    is_stopping = true;
                    // A sync hears of the signal too, and leaves the server with its primary.
                    (!is_running).then(|| {
                        let text = format!("stopped by {signal}; the server goes to its primary by itself");
                        Err(Failure::new(Code::Interrupted, text))
                    })
                }
                outcome = self.syncs.ended() => Some(outcome),
                Some(arrival) = entrance.arrivals.recv() => self.arrived(arrival).await.err().map(Err),
                _ = stuck.tick(), if is_running => {
                    self.syncs.end_if_stuck();
                    None
                }
                _ = look.tick(), if !is_running => {
                    let Looked { link, .. } = self.syncs.look().await;
                    self.saw(link).transpose()
                }
            };
            if let Some(outcome) = over {
                return outcome;
            }
        }
    }

    /// Decides on a connection that asks for a sync. The error ends the run.
    async fn arrived(&mut self, mut arrival: Arrival) -> Result<(), Failure> {
        if !self.syncs.gate.is_open() {
            // It was on its way here when the gate was closed, and comes again without us.
            return Ok(());
        }
        if arrival.announced_port().is_some_and(|port| !self.own.contains(&port)) {
            tracing::debug!(primary = %arrival.address, "a connection of another server of this user is passed on");
            self.others.spawn(arrival.pass(None));
            return Ok(());
        }
        match self.syncs.asks(&arrival) {
            Asks::Continues if !self.anew => {
                tracing::info!(primary = %arrival.address, "the primary can continue the server: it is let through");
                self.syncs.gate.close();
                self.awaited = Awaited::Through { until: Instant::now() + DIRECT_LIMIT };
                return Ok(());
            }
            Asks::Unknown(why) => {
                self.syncs.gate.close();
                let text = format!("{why}, so the server goes to its primary {} by itself", self.primary);
                return Err(Failure::new(Code::Server, text));
            }
            Asks::Another => {
                self.syncs.gate.close();
                let text = format!(
                    "the server asks another primary now, {}: another client has told it to follow that one; it is left as it is",
                    arrival.address
                );
                return Err(Failure::new(Code::TakenOver, text));
            }
            Asks::Continues | Asks::Copy => {}
        }
        if !self.syncs.is_running()
            && let Err(failure) = self.syncs.begin(&mut arrival).await
        {
            self.syncs.gate.close();
            let goes = "the server goes to its primary by itself, which sends it what it lacks";
            return Err(failure.and(goes));
        }
        self.syncs.give(arrival);
        Ok(())
    }

    /// What follows from a look at the server's link while no sync is under way. `Some`: the run ends well.
    fn saw(&mut self, link: LinkState) -> Result<Option<()>, Failure> {
        let now = Instant::now();
        match (&mut self.awaited, link) {
            (Awaited::Asking { .. }, LinkState::Up) if self.anew && !self.told_of_copy => {
                return Err(self.too_late(link));
            }
            (_, LinkState::Up) => {
                progress::say(&format!(
                    "the server goes on at its primary {}, without a full copy through us",
                    self.primary
                ));
                return Ok(Some(()));
            }
            (_, LinkState::Nothing) => {
                let text = "another client has detached the server from its primary; it is left as it is";
                return Err(Failure::new(Code::TakenOver, text));
            }
            (Awaited::Asking { until }, LinkState::Copying) if !self.told_of_copy => {
                // One that began before us, and that nothing but its end lets go.
                self.told_of_copy = true;
                *until = now + self.syncs.args.read.retry_for.max(ASK_LIMIT);
                tracing::warn!("the server is taking a full copy of its primary by itself; waiting for its end");
            }
            (Awaited::Through { .. }, LinkState::Copying) => {
                let text = format!(
                    "the server is taking a full copy of its primary {} by itself, which had said that it can continue the server",
                    self.primary
                );
                return Err(Failure::new(Code::SyncFailed, text));
            }
            (Awaited::Asking { until } | Awaited::Through { until }, _) if now >= *until => {
                return Err(self.too_late(link));
            }
            _ => {}
        }
        Ok(None)
    }

    fn too_late(&self, link: LinkState) -> Failure {
        let text = match (&self.awaited, link) {
            (_, LinkState::Copying) => {
                format!(
                    "the server is taking a full copy of its primary {} by itself, which has not ended",
                    self.primary
                )
            }
            (Awaited::Asking { .. }, _) => format!(
                "the server has not connected to its primary {} through us: do the rules that remora intercept shows name its user, \
                 and are the agent and the server in one network namespace?",
                self.primary
            ),
            (Awaited::Through { .. }, _) => format!(
                "the server does not get in step with its primary {} within {} s; its log says why",
                self.primary,
                DIRECT_LIMIT.as_secs()
            ),
        };
        Failure::new(Code::SyncFailed, text)
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
