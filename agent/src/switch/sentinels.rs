//! Sentinels: the name by which clients find the primary moves with the switch.
//!
//! ```text
//!   before ── the new one becomes the best replica (replica-priority), and every Sentinel has seen that
//!   switch ── in its own order, which waits for writes
//!   after ─── SENTINEL FAILOVER: the Sentinels promote the best replica, which is the primary already, make the others
//!             follow it, and name it to clients; the priority is set back
//! ```
//!
//! A Sentinel's own fail-over does not wait for writes, and this one has none to wait for. A Sentinel that sees its
//! primary as a replica, and is told nothing, begins a fail-over by itself some 20 seconds after
//! `down-after-milliseconds`. So the priority stands before the switch begins: whatever ends this command, the
//! Sentinels promote the new one, and no third server.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::orders::{Ready, Told};
use crate::args::HostPort;
use crate::exit::{Code, Failure};
use crate::sentinel::{KnownReplica, Sentinels};
use crate::server::ServerError;

/// How long the Sentinels may take to see a priority: each of them asks its servers every ten seconds.
const SEEN_LIMIT: Duration = Duration::from_secs(40);

/// How long they may take to move the name. They need a few seconds, and one that has heard nothing is told by the
/// others every two seconds.
const MOVE_LIMIT: Duration = Duration::from_secs(60);

/// Pause between two looks at the Sentinels.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The priority of the best replica. A replica of priority 0 is never promoted.
const BEST: u64 = 1;

/// The setting.
const PRIORITY: &str = "replica-priority";

/// A primary's name at its Sentinels, which is to move.
pub(super) struct Name {
    sentinels: Sentinels,
    /// The runs of both servers, by which Sentinels tell of them whatever their addresses are.
    old_run: String,
    new_run: String,
    /// The priority that the new one has by its configuration.
    priority: u64,
    /// The priority that it needs to be the best, if that is another.
    needed: Option<u64>,
    is_moved: bool,
}

/// What one Sentinel says.
enum Sees {
    /// The new one is a replica.
    Replica { priority: u64, flags: String, others: Vec<(HostPort, u64)> },
    /// The old one is a replica, and the new one is not.
    Moved,
    /// Neither is.
    Neither,
}

impl Name {
    /// Looks at the Sentinels, and changes nothing.
    ///
    /// # Errors
    /// None answers, or one does not know the servers, or another replica must stay as good as the new one can be.
    pub(super) async fn look(sentinels: Sentinels, ready: &mut Ready) -> Result<Name, Failure> {
        let (old_run, new_run) = (run_of(&mut ready.old).await?, run_of(&mut ready.new).await?);
        let priority = priority_of(&mut ready.new).await?.ok_or_else(|| {
            Failure::refused(format!("{} does not tell its {PRIORITY} (CONFIG GET)", ready.new.url()))
        })?;
        let mut name = Name { sentinels, old_run, new_run, priority, needed: None, is_moved: false };
        let (mut least, mut is_moved) = (None::<(u64, HostPort)>, true);
        for (sentinel, sees) in name.ask().await? {
            match sees {
                Sees::Moved => {}
                Sees::Neither => {
                    return Err(Failure::refused(format!(
                        "the Sentinel {sentinel} knows neither {} nor {} as a replica of {}: it finds them in the primary's INFO within ten \
                         seconds; --sentinel-name must be the name of this primary",
                        ready.new.url(),
                        ready.old.url(),
                        name.sentinels.name()
                    )));
                }
                Sees::Replica { flags, others, .. } => {
                    is_moved = false;
                    if flags.split(',').any(|flag| matches!(flag, "s_down" | "o_down" | "disconnected")) {
                        let text = format!("the Sentinel {sentinel} does not reach {} ({flags})", ready.new.url());
                        return Err(Failure::new(Code::NotSwitched, format!("{text}; nothing was changed")));
                    }
                    let others = others.into_iter().filter(|(_, priority)| *priority > 0);
                    least =
                        others.map(|(at, priority)| (priority, at)).chain(least).min_by_key(|(priority, _)| *priority);
                }
            }
        }
        name.is_moved = is_moved;
        name.needed = match least {
            _ if is_moved => None,
            None if priority > 0 => None,
            Some((least, _)) if priority > 0 && priority < least => None,
            Some((BEST, other)) => {
                return Err(Failure::refused(format!(
                    "the replica {other} has {PRIORITY} {BEST}, and the Sentinels would promote it as soon as {}: set a higher one there, \
                     or 0",
                    ready.new.url()
                )));
            }
            _ => Some(BEST),
        };
        Ok(name)
    }

    /// Whether the Sentinels name the new one.
    pub(super) fn is_moved(&self) -> bool {
        self.is_moved
    }

    /// The name.
    pub(super) fn name(&self) -> &str {
        self.sentinels.name()
    }

    /// Makes the new one the best replica. Ends when all Sentinels that answer have seen it.
    ///
    /// # Errors
    /// They have not, in time. The priority is as before.
    pub(super) async fn make_best(&mut self, new: &mut Told) -> Result<(), Failure> {
        let Some(needed) = self.needed else { return Ok(()) };
        tracing::info!("{} gets {PRIORITY} {needed} until {} has moved", new.url(), self.name());
        new.command(&["CONFIG", "SET", PRIORITY, &needed.to_string()]).await?;
        let until = Instant::now() + SEEN_LIMIT;
        let mut late = String::new();
        while Instant::now() < until {
            let sees = self.ask().await;
            late.clear();
            for (sentinel, sees) in sees? {
                if !matches!(sees, Sees::Replica { priority, .. } if priority == needed) {
                    late = sentinel;
                }
            }
            if late.is_empty() {
                return Ok(());
            }
            sleep(LOOK_EVERY).await;
        }
        Err(Failure::new(
            Code::NotSwitched,
            format!(
                "the Sentinel {late} has not seen the new {PRIORITY} of {} within {} s; nothing else was changed",
                new.url(),
                SEEN_LIMIT.as_secs()
            ),
        ))
    }

    /// Sets the priority back, unless somebody has set another one meanwhile. Where the Sentinels had the server note
    /// its role, it notes this too.
    pub(super) async fn set_back(&mut self, new: &mut Told, notes_it: bool) {
        let Some(needed) = self.needed else { return };
        // A Sentinel closes the connections of clients at the server that it promotes: the first one may be lost.
        let mut now = priority_of(new).await;
        if now.is_err() {
            now = priority_of(new).await;
        }
        if now.as_ref().is_ok_and(|now| *now != Some(needed)) {
            tracing::info!("{} has another {PRIORITY} by now, which stays", new.url());
            return;
        }
        let before = self.priority.to_string();
        let set = [&["CONFIG", "SET", PRIORITY, &before][..], &["CONFIG", "REWRITE"]];
        for words in &set[..if notes_it { 2 } else { 1 }] {
            match new.command(words).await {
                Err(error) if words[1] == "SET" => {
                    tracing::warn!("{} still has {PRIORITY} {BEST} in place of {before}: {error}", new.url());
                }
                Err(error) => tracing::debug!(%error, "the server has not written its configuration file"),
                Ok(_) => {}
            }
        }
    }

    /// Has the Sentinels name the new one, which is the primary by now.
    ///
    /// # Errors
    /// Why clients may still be sent to the old one.
    pub(super) async fn follow(&mut self) -> Result<(), String> {
        if self.is_moved {
            return Ok(());
        }
        let mut refusals = Vec::new();
        for sentinel in self.sentinels.each() {
            match self.sentinels.fail_over(sentinel).await {
                Ok(()) => {
                    refusals.clear();
                    break;
                }
                Err(error) => refusals.push(error.to_string()),
            }
        }
        // Every Sentinel may have refused because one has begun a fail-over by itself: the name moves then, too.
        let until = Instant::now() + MOVE_LIMIT;
        loop {
            let sees = self.ask().await;
            match &sees {
                Ok(sees) if sees.iter().all(|(_, sees)| matches!(sees, Sees::Moved)) => {
                    self.is_moved = true;
                    return Ok(());
                }
                _ if Instant::now() < until => sleep(LOOK_EVERY).await,
                _ => {
                    let late = sees.into_iter().flatten().find(|(_, sees)| !matches!(sees, Sees::Moved));
                    let late =
                        late.map_or_else(|| "none answers".into(), |(sentinel, _)| format!("{sentinel} does not"));
                    refusals.push(late);
                    return Err(format!(
                        "the Sentinels do not name it as {} ({}); send SENTINEL FAILOVER {0} to one of them",
                        self.name(),
                        refusals.join("; ")
                    ));
                }
            }
        }
    }

    /// What each Sentinel says that answers.
    async fn ask(&self) -> Result<Vec<(String, Sees)>, Failure> {
        let (mut all, mut last) = (Vec::new(), None);
        for sentinel in self.sentinels.each() {
            match self.sentinels.replicas_at(sentinel).await {
                Ok(replicas) => all.push((sentinel.url().to_string(), self.seen(replicas))),
                Err(error) => last = Some(error),
            }
        }
        match last {
            Some(error) if all.is_empty() => Err(Failure::new(Code::Server, error.to_string())),
            Some(error) => {
                tracing::debug!(%error, "a Sentinel does not answer");
                Ok(all)
            }
            None => Ok(all),
        }
    }

    fn seen(&self, replicas: Vec<KnownReplica>) -> Sees {
        let (new, others): (Vec<_>, Vec<_>) = replicas.into_iter().partition(|replica| replica.run_id == self.new_run);
        match new.into_iter().next() {
            None if others.iter().any(|replica| replica.run_id == self.old_run) => Sees::Moved,
            None => Sees::Neither,
            Some(new) => Sees::Replica {
                priority: new.priority,
                flags: new.flags,
                others: others
                    .into_iter()
                    // The old one is listed too where a Sentinel has seen its new role.
                    .filter(|replica| replica.run_id != self.old_run)
                    .filter_map(|replica| Some((replica.address?, replica.priority)))
                    .collect(),
            },
        }
    }
}

/// The priority that a server has now. `None`: it does not tell it.
async fn priority_of(told: &mut Told) -> Result<Option<u64>, ServerError> {
    let pair = told.command(&["CONFIG", "GET", PRIORITY]).await?;
    Ok(pair.as_array().and_then(|pair| pair.get(1)?.as_str()?.parse().ok()))
}

async fn run_of(told: &mut Told) -> Result<String, Failure> {
    let url = told.url().to_string();
    let run = told.info("server").await?.get("run_id").map(str::to_owned);
    run.ok_or_else(|| Failure::new(Code::Server, format!("{url} does not tell its run_id (INFO server)")))
}
