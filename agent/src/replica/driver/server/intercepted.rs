//! Intercepted: the jobs on a server whose own connections to its primary come to this agent. The server is told
//! nothing: it follows its primary all the time, and no setting of it changes.

use std::sync::Arc;

use super::{ask_anew, no_answer, state_of_its_link};
use crate::exit::{Code, Failure};
use crate::replica::attend::gate::Gate;
use crate::replica::attend::guide::Watcher;
use crate::replica::control::{Control, Expected};
use crate::replica::exact;
use crate::replica::machine::{Follows, Introduced, Job, Lapse, Leaving, Left, Look, NoAnswer, PrimaryLink, Report};
use crate::replica::meter::Meter;
use crate::server::own_changes::Counted;
use crate::server::{Facts, ServerError};

/// Owns the connection to the server and the gate.
pub(in crate::replica::driver) struct Intercepted {
    control: Control,
    /// The primary that the server followed when the sync began.
    primary: (String, u16),
    gate: Gate,
    /// What the Sentinels say of the group, if they are asked.
    watcher: Option<Watcher>,
    /// What the server had counted before the sync.
    counted: Option<Counted>,
    meter: Arc<Meter>,
}

impl Intercepted {
    pub(in crate::replica::driver) fn new(
        control: Control,
        primary: (String, u16),
        gate: Gate,
        watcher: Option<Watcher>,
        meter: Arc<Meter>,
    ) -> Intercepted {
        Intercepted { control, primary, gate, watcher, counted: None, meter }
    }

    pub(super) async fn perform(&mut self, job: Job) -> Report {
        match job {
            // The module would empty the server first, which makes it lose its position, and that needs REPLICAOF.
            Job::Prepare { .. } => Report::Prepared(self.count().await.map(|()| false)),
            Job::Follow { .. } => Report::Followed(Ok(())),
            Job::Introduce { number } => Report::Introduced { number, outcome: Introduced::Cancelled },
            Job::PutSettingsBack => Report::SettingsPutBack(Ok(())),
            Job::AskOffset => Report::Offset(self.offset().await.map_err(Failure::from)),
            Job::Look => Report::Looked(self.look().await),
            Job::GiveLogin => Report::LoginGiven(Ok(())),
            Job::Verify(_) => Report::Verified(self.verify().await),
            Job::Settle => Report::Settled(self.control.settle().await.map_err(Failure::from)),
            Job::PointAtPrimary => Report::PointedAtPrimary(self.point_at_primary().await),
            Job::AskPrimaryLink => Report::PrimaryLink(self.primary_link().await),
            Job::ReturnToLink => Report::ReturnedToLink(Err(Lapse::Failed(self.out_of_step()))),
            Job::Finish => Report::Finished(self.judge().await),
            Job::Leave(how) => Report::Left(self.leave(how).await),
        }
    }

    /// Notes what the server has counted so far.
    async fn count(&mut self) -> Result<(), Lapse> {
        self.counted = Some(Counted::read(self.control.client().await?).await?);
        Ok(())
    }

    /// Whether the server is an exact replica. The primary is asked by the server's own login only, which is not known
    /// here.
    async fn judge(&mut self) -> Result<(), Failure> {
        let server = self.control.server().url().to_string();
        let found = exact::judge(self.control.client().await?, self.counted.as_ref(), None).await?;
        let outcome = found.outcome(&server);
        self.meter.set_exactness(found);
        outcome
    }

    async fn offset(&mut self) -> Result<u64, ServerError> {
        Ok(self.control.replication().await?.offset.unwrap_or(0))
    }

    fn is_followed(&self, facts: &Facts) -> bool {
        facts.link.as_ref().is_some_and(|link| (&link.host, link.port) == (&self.primary.0, self.primary.1))
    }

    /// Asks the server about itself.
    async fn look(&mut self) -> Result<Look, Failure> {
        let (mut client, facts) = ask_anew(self.control.server()).await?;
        let follows = match &facts.link {
            None => Follows::Nothing,
            Some(_) if self.is_followed(&facts) => Follows::Link,
            Some(_) => Follows::Another,
        };
        let state = state_of_its_link(&mut client).await.unwrap_or_else(|| "down".into());
        self.control.replace(client);
        let trouble = format!("it shows its link to its primary as \"{state}\"; its log says why");
        let loading = facts.loading == Some(true);
        Ok(Look { run_id: facts.run_id.clone(), follows, loading, keys: facts.keys(), trouble })
    }

    /// Fails unless the server follows the same primary still.
    async fn verify(&mut self) -> Result<(), Lapse> {
        let primary = [(self.primary.0.as_str(), self.primary.1)];
        self.control.still_ours(Expected::OneOf(&primary)).await?;
        Ok(())
    }

    /// Lets the server connect to its primary by itself.
    async fn point_at_primary(&mut self) -> Result<(), Lapse> {
        self.verify().await?;
        self.gate.hand_back().await;
        Ok(())
    }

    async fn primary_link(&mut self) -> Result<PrimaryLink, NoAnswer> {
        let facts = self.control.replication().await.map_err(no_answer)?;
        let is_followed = self.is_followed(&facts);
        if is_followed && self.is_astray(&facts).await {
            let (host, port) = &self.primary;
            let text = format!("the server's primary {host}:{port} was replaced before the server was in step with it");
            return Err(NoAnswer { passes: false, failure: Failure::new(Code::SyncFailed, text) });
        }
        let link = facts.link.as_ref().filter(|_| is_followed);
        Ok(PrimaryLink {
            is_followed,
            up: link.is_some_and(|link| link.up == Some(true)),
            syncing: link.is_some_and(|link| link.syncing == Some(true)),
            offset: facts.offset.unwrap_or(0),
        })
    }

    /// Whether the server waits for a primary that was replaced, and no Sentinel looks after it. Who attends it does.
    async fn is_astray(&mut self, replication: &Facts) -> bool {
        let Some(watcher) = self.watcher.clone() else { return false };
        let is_down = replication.link.as_ref().is_some_and(|link| link.up == Some(false));
        match if is_down { self.control.facts().await.ok() } else { None } {
            Some(facts) => watcher.is_astray(&facts, self.control.server().url()).await,
            None => false,
        }
    }

    fn out_of_step(&self) -> Failure {
        let (host, port) = &self.primary;
        let text =
            format!("the server does not get in step with its primary {host}:{port} by itself; its log says why");
        Failure::new(Code::SyncFailed, text)
    }

    async fn leave(&mut self, how: Leaving) -> Left {
        self.gate.hand_back().await;
        let (host, port) = &self.primary;
        match how {
            Leaving::AsItIs => Left::as_it_is("the server is left as it is"),
            Leaving::ToPrimary | Leaving::Alone => Left::in_order(format!(
                "the server holds a whole data set, and goes on at its primary {host}:{port} by itself"
            )),
            Leaving::Untouched | Leaving::Detached => Left::in_order(format!(
                "the server goes to its primary {host}:{port} by itself, which sends it what it lacks"
            )),
        }
    }
}
