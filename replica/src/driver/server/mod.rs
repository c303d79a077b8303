//! The server's task: the one owner of the right to change the replica's server.
//!
//! It holds the connection ([`Control`]) and the record of what was changed, and does one [`Job`] at a time, each of
//! which is bounded by the time limits of its commands. What it finds goes back as a [`Report`]; what follows from that
//! is decided by the [machine](crate::machine). Before each command that changes the server, the job looks
//! which primary the server follows, and leaves a server alone that another client has changed.
//!
//! Only an introduction can take long (the module empties the server first), so only that can be cancelled.

mod leave;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use crate::attend::guide::Watcher;
use crate::attend::passage::Gate;
use crate::control::{Control, Expected, NotOurs};
use crate::exact::{self, Judgement};
use crate::machine::{
    Followed, Follows, Introduced, Job, Lapse, Leaving, Left, Look, NoAnswer, NotFollowed, PrimaryLink, Report,
};
use crate::options::Options;
use crate::preflight::{self, FOLLOW, Primary, Target};
use crate::record::{REWRITE, Record, Rewrites};
use remora_delivery::link::candidates::{LinkFailure, LinkPort};
use remora_delivery::payload::{Answer, Introduction};
use remora_process::exit::{Code, Failure};
use remora_process::{AbortOnDrop, events};
use remora_reader::data_set::Trust;
use remora_reader::parts::Meter;
use remora_redis::ReplId;
use remora_redis::resp::Frame;
use remora_server::module::{field, speaks_our_protocol};
use remora_server::own_changes::Counted;
use remora_server::{Client, Facts, RefusalKind, SETTLE_LIMIT, SETTLE_POLL, Server, ServerError};

/// How long a server may take to answer over a new connection.
const LOOK_LIMIT: Duration = Duration::from_secs(3);

/// The driver's end of the task.
pub(super) struct ServerTask {
    work: UnboundedSender<Work>,
    done: UnboundedReceiver<Done>,
    cancel: Arc<Notify>,
    hurry: Arc<Notify>,
    _task: AbortOnDrop,
}

/// An order to the task.
pub(super) enum Work {
    Job(Job),
    Introduce(Introduction),
}

/// A report of the task.
pub(super) struct Done {
    pub(super) report: Report,
    /// For the delivery: the module's answer to the introduction of this number.
    pub(super) answer: Option<(u64, Result<Answer, String>)>,
}

impl From<Report> for Done {
    fn from(report: Report) -> Done {
        Done { report, answer: None }
    }
}

impl ServerTask {
    /// `hurry`: what the hands watch while they wait for other programs.
    pub(super) fn start(hands: Hands, hurry: Arc<Notify>) -> ServerTask {
        let (work, orders) = unbounded_channel();
        let (tell, done) = unbounded_channel();
        let cancel = Arc::new(Notify::new());
        let task = tokio::spawn(run(hands, orders, tell, cancel.clone()));
        ServerTask { work, done, cancel, hurry, _task: AbortOnDrop::new(&task) }
    }

    /// Sends the task a job. If the task has ended, [`ServerTask::done`] reports it.
    pub(super) fn give(&self, work: Work) {
        let _ = self.work.send(work);
    }

    /// Cancels the task's present introduction.
    pub(super) fn cancel(&self) {
        self.cancel.notify_one();
    }

    /// Ends what the task waits for at the end of a sync.
    pub(super) fn hurry(&self) {
        self.hurry.notify_one();
    }

    /// The next report. Cancel-safe.
    pub(super) async fn done(&mut self) -> Done {
        match self.done.recv().await {
            Some(done) => done,
            None => Report::Ended.into(),
        }
    }
}

async fn run(mut hands: Hands, mut work: UnboundedReceiver<Work>, tell: UnboundedSender<Done>, cancel: Arc<Notify>) {
    while let Some(work) = work.recv().await {
        let done = match work {
            Work::Job(job) => hands.perform(job).await.into(),
            Work::Introduce(introduction) => {
                let number = introduction.number;
                tokio::select! {
                    biased;
                    (outcome, answer) = hands.introduce(introduction) => Done {
                        report: Report::Introduced { number, outcome },
                        answer: answer.map(|answer| (number, answer)),
                    },
                    () = cancel.notified() => Report::Introduced { number, outcome: Introduced::Cancelled }.into(),
                }
            }
        };
        if tell.send(done).is_err() {
            return;
        }
    }
}

/// By which means the server is brought to the link and to the primary.
pub(super) enum Hands {
    /// It is told to follow them.
    Commands(Box<Keeper>),
    /// Its own connections are intercepted.
    Interception(Box<Intercepted>),
}

impl Hands {
    async fn perform(&mut self, job: Job) -> Report {
        match self {
            Hands::Commands(keeper) => keeper.perform(job).await,
            Hands::Interception(intercepted) => intercepted.perform(job).await,
        }
    }

    async fn introduce(&mut self, introduction: Introduction) -> (Introduced, Option<Result<Answer, String>>) {
        match self {
            Hands::Commands(keeper) => keeper.introduce(introduction).await,
            // The delivery is never told to use the module.
            Hands::Interception(_) => (Introduced::NotUsed, None),
        }
    }
}

/// Owns the server's connection and record. Nothing else changes the server.
pub(super) struct Keeper {
    options: Arc<Options>,
    control: Control,
    record: Record,
    target: Target,
    primary: Primary,
    link: LinkPort,
    /// The replication id that the server got when its position was made worthless.
    worthless: Option<ReplId>,
    /// What the last [`Job::Look`] saw.
    looked: Option<Facts>,
    /// What the server was before the sync.
    before: Before,
    watched: Watched,
}

/// What others show to the server's task.
pub(super) struct Watched {
    pub(super) meter: Arc<Meter>,
    /// Where it notes what it has found of the conditions of an exact replica.
    pub(super) judgement: Judgement,
    pub(super) link_failure: LinkFailure,
    /// A signal has come, and nothing more is waited for.
    pub(super) hurry: Arc<Notify>,
}

/// What a server was before the sync, and what becomes of its data.
#[derive(Debug, Default)]
struct Before {
    /// The primary that it followed.
    primary: Option<(String, u16)>,
    /// Its run. In another one it holds other data.
    run_id: Option<String>,
    /// It keeps its data until it has received the whole snapshot.
    loads_aside: bool,
    /// The module was told to remove its keys.
    emptied: bool,
    /// What it had counted of errors and of keys that it removed by itself.
    counted: Option<Counted>,
}

impl Keeper {
    pub(super) fn new(
        options: Arc<Options>,
        control: Control,
        record: Record,
        target: Target,
        primary: Primary,
        link: LinkPort,
        watched: Watched,
    ) -> Keeper {
        let before = Before::default();
        Keeper { options, control, record, target, primary, link, worthless: None, looked: None, before, watched }
    }

    async fn perform(&mut self, job: Job) -> Report {
        match job {
            Job::Prepare { after_restart } => Report::Prepared(self.prepare(after_restart).await),
            Job::Follow { from_nothing } => Report::Followed(self.follow_the_link(from_nothing).await),
            // This job arrives as Work::Introduce, with its memory.
            Job::Introduce { number } => Report::Introduced { number, outcome: Introduced::Cancelled },
            Job::PutSettingsBack => Report::SettingsPutBack(self.put_settings_back_but_the_login().await),
            Job::AskOffset => Report::Offset(self.offset().await.map_err(Failure::from)),
            Job::Look => Report::Looked(self.look().await),
            Job::GiveLogin => Report::LoginGiven(self.give_login().await),
            Job::Verify(followed) => Report::Verified(self.verify(followed).await.map(drop)),
            Job::Settle => Report::Settled(self.control.settle().await.map_err(Failure::from)),
            Job::PointAtPrimary => Report::PointedAtPrimary(self.point_at_primary().await),
            Job::AskPrimaryLink => Report::PrimaryLink(self.primary_link().await.map_err(no_answer)),
            Job::ReturnToLink => Report::ReturnedToLink(self.return_to_link().await),
            Job::Finish => Report::Finished(self.finish().await),
            Job::Leave(how) => Report::Left(self.leave(how).await),
        }
    }

    /// The link's host and port, as commands take them.
    fn link(&self) -> (String, u16) {
        let address = self.link.address();
        (address.ip().to_string(), address.port())
    }

    // ---- from the preflight to the link ----

    /// Whether the server's module can load the snapshot.
    async fn prepare(&mut self, after_restart: bool) -> Result<bool, Lapse> {
        if after_restart && let Some(facts) = self.looked.take() {
            self.target.facts = facts;
        }
        self.look_again().await?;
        self.primary.compare_again(&self.target, self.control.server().url()).await?;
        if !after_restart {
            self.note_what_it_was();
        }
        self.note_counts().await?;
        self.note_rewrites(after_restart).await?;
        if let (Some(to), Some(finding), None) =
            (self.primary.raise_to, self.primary.finding.clone(), self.record.raised())
        {
            preflight::raise(&mut self.record, finding.sentinels(), to).await?;
        }
        let mut way = self.target.diskless_load.clone();
        if let Some(before) = self.target.diskless_load.clone() {
            // Straight from the link, without a file, where there is nothing to lose by it.
            let empty = self.target.facts.keys() == 0 || self.target.unfinished;
            let wanted = match (empty, &self.target.conversion) {
                (true, _) => "on-empty-db",
                (false, None) => "flush-before-load",
                // A conversion may be refused in its middle. From a file the server loads all or nothing.
                (false, Some(_)) => "disabled",
            };
            if before != "swapdb" {
                if self
                    .record
                    .change(self.control.client().await?, "repl-diskless-load", before.as_bytes(), wanted.as_bytes())
                    .await?
                {
                    way = Some(wanted.into());
                } else {
                    tracing::debug!(wanted, "the server has no such way of loading: left as it is");
                }
            }
        }
        let by_module = self.look_for_the_module().await?;
        self.before.loads_aside = !by_module && !after_restart && self.loads_aside(way.as_deref());
        self.give_login().await?;
        let (host, port) = self.link();
        self.record.note_link(&host, port)?;
        self.link.open()?;
        tracing::info!(event = events::LINK_LISTENING, link = %self.link, "listening for the link of {}", self.control.server().url());
        Ok(by_module)
    }

    /// Notes what the server has counted so far. What an agent before us noted for a server that still follows its link
    /// stays: the server has had a stream since.
    async fn note_counts(&mut self) -> Result<(), Failure> {
        if self.before.counted.is_some() {
            return Ok(());
        }
        let noted = self.record.counted().filter(|_| self.target.unfinished).cloned();
        let counted = match noted {
            Some(noted) => noted,
            None => Counted::read(self.control.client().await?).await?,
        };
        self.record.note_counted(counted.clone());
        self.before.counted = Some(counted);
        Ok(())
    }

    /// Notes what a failed sync gives back to the server.
    fn note_what_it_was(&mut self) {
        self.before.run_id = self.target.facts.run_id.clone();
        if self.target.unfinished {
            // It follows the link of an agent before us, which has noted more.
            self.before.primary = self.record.former();
            return;
        }
        let primary = self.target.facts.link.as_ref().map(|link| (link.host.clone(), link.port));
        self.record.note_former(primary.as_ref().map(|(host, port)| (host.as_str(), *port)));
        self.before.primary = primary;
    }

    /// Whether the server keeps its data until it has received the whole snapshot, if it loads in this way: into a file
    /// first, or into other memory.
    fn loads_aside(&self, way: Option<&str>) -> bool {
        match way {
            _ if self.target.unfinished => false,
            Some("swapdb" | "disabled") => true,
            Some("on-empty-db") => self.target.facts.keys() > 0,
            _ => false,
        }
    }

    /// Looks at the server just before it is changed. The preflight may be long ago, and the server may have been
    /// written to, promoted or pointed elsewhere since.
    async fn look_again(&mut self) -> Result<(), Failure> {
        self.still_as_found().await?;
        preflight::refuse_to_overwrite(&self.options, self.control.server(), &self.target)
    }

    async fn still_as_found(&mut self) -> Result<(), Failure> {
        let url = self.control.server().url().to_string();
        match self.control.still_ours(Expected::AsFound(&self.target.facts)).await {
            Ok(facts) => self.target.facts = facts,
            Err(NotOurs::Unknown(error)) => return Err(error.into()),
            Err(NotOurs::TakenOver(how)) => {
                let text = format!(
                    "the server {url} {how}, while the agent waited for a snapshot; start it again if it is still wanted"
                );
                return Err(Failure::new(Code::TakenOver, text));
            }
        }
        Ok(())
    }

    async fn follow_the_link(&mut self, from_nothing: bool) -> Result<(), NotFollowed> {
        let failed = |told: bool| move |failure: Failure| NotFollowed::Failed { lapse: failure.into(), told };
        // The settings took round trips of their own, and a server that loads lets them wait.
        self.look_again().await.map_err(failed(false))?;
        let (host, port) = self.link();
        if from_nothing {
            return self.give_up_the_position(Standing::AsFound).await;
        }
        let (port, began) = (port.to_string(), Instant::now());
        loop {
            match self.control.command_after_look(&[FOLLOW, &host, &port]).await {
                Ok(_) => return Ok(()),
                Err(error) if error.refusal() == Some(RefusalKind::Loading) && began.elapsed() < SETTLE_LIMIT => {}
                Err(error) => {
                    let told = !matches!(error, ServerError::Refused { .. });
                    return Err(failed(told)(error.into()));
                }
            }
            tokio::time::sleep(SETTLE_POLL).await;
            self.still_as_found().await.map_err(failed(false))?;
        }
    }

    /// Sets the link's login on the server. A restart or an operator may have changed it.
    async fn give_login(&mut self) -> Result<(), Failure> {
        self.target.link_login.give(&mut self.record, self.control.client().await?).await
    }

    // ---- looks ----

    /// Asks the server about itself.
    async fn look(&mut self) -> Result<Look, Failure> {
        let (mut client, facts) = ask_anew(self.control.server()).await?;
        let (host, port) = self.link();
        let follows = match &facts.link {
            None => Follows::Nothing,
            Some(link) if link.host == host && link.port == port => Follows::Link,
            Some(_) => Follows::Another,
        };
        let trouble = match follows {
            Follows::Link => self.trouble(state_of_its_link(&mut client).await),
            Follows::Nothing | Follows::Another => String::new(),
        };
        self.control.replace(client);
        let loading = facts.loading == Some(true);
        let look = Look { run_id: facts.run_id.clone(), follows, loading, keys: facts.keys(), trouble };
        self.looked = Some(facts);
        Ok(look)
    }

    /// What keeps the server from completing its link, and what to do about it.
    fn trouble(&self, state: Option<String>) -> String {
        let state = state.unwrap_or_else(|| "down".into());
        let (cause, remedy) = match self.watched.link_failure.last() {
            Some(failure) if self.target.tls_replication => {
                (format!("the last {failure}"), "its tls-ca-cert-file must contain the authority of --link-cert")
            }
            Some(failure) => (format!("the last {failure}"), "the logs of both may say more"),
            None => (
                "no connection has arrived there".into(),
                "if the server cannot reach that address (a container, another network namespace, a firewall), name one \
                 that it can reach with --listen",
            ),
        };
        format!("the server shows its link to {} as \"{state}\"; {cause}; {remedy}", self.link)
    }

    /// Fails unless the server follows this address now.
    async fn verify(&mut self, followed: Followed) -> Result<Facts, Lapse> {
        let (host, port) = match followed {
            Followed::Link => self.link(),
            Followed::Primary => self.primary.address(),
        };
        match self.control.still_ours(Expected::OneOf(&[(&host, port)])).await {
            Err(NotOurs::TakenOver(how)) if followed == Followed::Primary => self.taken_along(how).await,
            checked => Ok(checked?),
        }
    }

    async fn offset(&mut self) -> Result<u64, ServerError> {
        Ok(self.control.replication().await?.offset.unwrap_or(0))
    }

    // ---- to the primary, and back ----

    async fn point_at_primary(&mut self) -> Result<(), Lapse> {
        self.verify(Followed::Link).await?;
        self.find_the_primary().await?;
        self.check_the_password().await?;
        self.record.put_the_login_back(self.control.client().await?).await?;
        let (link, primary) = (self.link(), &self.primary);
        self.control.follow((&primary.host, primary.port), Expected::OneOf(&[(&link.0, link.1)])).await?;
        Ok(())
    }

    /// Fails if the server has got a password for its primary since the preflight, and the primary is not one that may
    /// be given it.
    async fn check_the_password(&mut self) -> Result<(), Failure> {
        let Trust::NoPassword(why) = &self.primary.trust else { return Ok(()) };
        match preflight::login(self.control.client().await?, &self.record).await?.password {
            None => Ok(()),
            Some(_) => {
                Err(Failure::new(Code::SyncFailed, format!("{why}; the server had no password before the sync")))
            }
        }
    }

    async fn primary_link(&mut self) -> Result<PrimaryLink, ServerError> {
        let facts = self.control.replication().await?;
        let link = facts.link.filter(|link| link.host == self.primary.host && link.port == self.primary.port);
        Ok(PrimaryLink {
            is_followed: link.is_some(),
            up: link.as_ref().is_some_and(|link| link.up == Some(true)),
            syncing: link.as_ref().is_some_and(|link| link.syncing == Some(true)),
            offset: facts.offset.unwrap_or(0),
        })
    }

    async fn return_to_link(&mut self) -> Result<(), Lapse> {
        // A copy that began since the server was last looked at: to point the server elsewhere would abort it.
        let facts = self.verify(Followed::Primary).await?;
        if !may_leave_primary(&facts) {
            return Err(self.copies_by_itself());
        }
        self.give_login().await?;
        let (link, primary) = (self.link(), Expected::OneOf(&[(&self.primary.host, self.primary.port)]));
        if !self.control.follow_if((&link.0, link.1), primary, may_leave_primary).await? {
            // The primary must be logged in to again.
            self.record.put_the_login_back(self.control.client().await?).await?;
            return Err(self.copies_by_itself());
        }
        Ok(())
    }

    /// The server has found out by itself that it needs a full copy of the primary.
    fn copies_by_itself(&self) -> Lapse {
        let (host, port) = (&self.primary.host, self.primary.port);
        let text = format!("the server does not go on where it was at the primary {host}:{port}; its log says why");
        Lapse::Failed(Failure::new(Code::SyncFailed, text))
    }
}

/// Asks a server about itself over a new connection, with a short time limit.
async fn ask_anew(server: &Server) -> Result<(Client, Facts), Failure> {
    let answer = async {
        let mut client = server.connect().await?;
        let facts = Facts::read(&mut client).await?;
        Ok::<_, ServerError>((client, facts))
    };
    let Ok(answer) = tokio::time::timeout(LOOK_LIMIT, answer).await else {
        let text = format!("the server {} does not answer for {} s", server.url(), LOOK_LIMIT.as_secs());
        return Err(Failure::new(Code::Server, text));
    };
    Ok(answer?)
}

/// How far a server's link to its primary is, in the server's own word for it.
async fn state_of_its_link(client: &mut Client) -> Option<String> {
    match client.command(&["ROLE"]).await {
        Ok(Frame::Array(role)) => match role.into_iter().nth(3) {
            Some(Frame::Bulk(state)) => Some(String::from_utf8_lossy(&state).into_owned()),
            _ => None,
        },
        _ => None,
    }
}

/// Whether a server is taking a full copy of the primary that it follows: receiving or loading it.
fn is_copying(facts: &Facts) -> bool {
    facts.loading == Some(true) || facts.link.as_ref().is_some_and(|link| link.syncing == Some(true))
}

/// Whether a server that follows its primary can be pointed elsewhere.
fn may_leave_primary(facts: &Facts) -> bool {
    if remora_base::mutation::Mutation::FullCopyAborted.is_active() {
        return true;
    }
    !is_copying(facts)
}

impl From<NotOurs> for Lapse {
    fn from(not_ours: NotOurs) -> Lapse {
        match not_ours {
            NotOurs::TakenOver(how) => Lapse::TakenOver(how),
            NotOurs::Unknown(error) => Lapse::Failed(error.into()),
        }
    }
}

impl From<ServerError> for Lapse {
    fn from(error: ServerError) -> Lapse {
        Lapse::Failed(error.into())
    }
}

impl From<Failure> for Lapse {
    fn from(failure: Failure) -> Lapse {
        Lapse::Failed(failure)
    }
}

fn no_answer(error: ServerError) -> NoAnswer {
    NoAnswer { passes: error.is_passing(), failure: error.into() }
}

// Configuration file: written again if another client wrote it while the settings of the sync were in force.
//
// `CONFIG REWRITE`, which Sentinel sends too, writes the link and the link's password into the server's configuration
// file. They would come back with the server's next start, long after the agent has put the settings back. The servers
// count the calls of `CONFIG REWRITE` since their start (`INFO commandstats`, from Redis 7 on).

impl Keeper {
    /// Notes how often the file has been written, before the first change. What an agent before us noted for a server
    /// that still follows its link stays: the file may have been written since.
    async fn note_rewrites(&mut self, after_restart: bool) -> Result<(), Failure> {
        if self.target.unfinished && !after_restart && self.record.rewrites().is_some() {
            return Ok(());
        }
        let run_id = self.target.facts.run_id.clone();
        let calls = self.rewrite_calls().await?;
        self.record.note_rewrites(calls.map(|calls| Rewrites { run_id, calls }));
        Ok(())
    }

    /// Writes the file again if another client wrote it since. To be called when the server is as it is to stay. The
    /// text goes on behind the state of the server; it is empty unless something is to be done by hand.
    async fn write_the_file_again(&mut self) -> String {
        let Some(noted) = self.record.rewrites().cloned() else { return String::new() };
        let (Ok(facts), Ok(calls)) = (self.control.facts().await, self.rewrite_calls().await) else {
            return String::new();
        };
        // A server that restarted into the link has read it from the file.
        if facts.run_id == noted.run_id && calls.is_none_or(|calls| calls == noted.calls) {
            return String::new();
        }
        match self.control.command(&REWRITE).await {
            Ok(_) => {
                tracing::info!(
                    "another client wrote the server's configuration file during the sync; it is written again, without the \
                     settings of the sync"
                );
                String::new()
            }
            Err(error) => format!(
                "; another client wrote the server's configuration file during the sync, with the link and its password, and \
                 it can't be written again ({error}): send CONFIG REWRITE, or start the server with another file"
            ),
        }
    }

    /// Writes the file with the primary that the server follows now (`--rewrite-config`): a restarted server without
    /// `replicaof` in its file would be a primary.
    async fn write_the_file(&mut self) -> Result<(), Failure> {
        match self.control.command(&REWRITE).await {
            Ok(_) => {
                tracing::info!("the server has written its configuration file, with the primary that it follows");
                Ok(())
            }
            Err(error) => {
                let advice = "its configuration file was not written (--rewrite-config needs +config|rewrite, and a file and \
                              a folder that the server may write): it would not follow the primary after a restart";
                Err(Failure::from(error).and(advice))
            }
        }
    }

    /// How often the file was written since the server's start; `None` if the server does not count that.
    async fn rewrite_calls(&mut self) -> Result<Option<u64>, ServerError> {
        Rewrites::calls(self.control.client().await?).await
    }
}

// Intercepted: the jobs on a server whose own connections to its primary come to this agent. The server is told
// nothing: it follows its primary all the time, and no setting of it changes.

/// Owns the connection to the server and the gate.
pub(super) struct Intercepted {
    control: Control,
    /// The primary that the server followed when the sync began.
    primary: (String, u16),
    gate: Gate,
    /// What the Sentinels say of the group, if they are asked.
    watcher: Option<Watcher>,
    /// What the server had counted before the sync.
    counted: Option<Counted>,
    judgement: Judgement,
}

impl Intercepted {
    pub(super) fn new(
        control: Control,
        primary: (String, u16),
        gate: Gate,
        watcher: Option<Watcher>,
        judgement: Judgement,
    ) -> Intercepted {
        Intercepted { control, primary, gate, watcher, counted: None, judgement }
    }

    async fn perform(&mut self, job: Job) -> Report {
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
        self.judgement.set(found);
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

// The server's module: whether it can be used, and how it receives memory.

/// Whether the module can be used.
enum Usable {
    Yes,
    /// There is no module.
    Absent,
    No(String),
}

/// Which primary a server follows while it is about to be changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// The one that the preflight found, or none.
    AsFound,
    /// The agent's link.
    AtTheLink,
}

impl Keeper {
    /// Checks whether the server has our module, and if so makes the server load from its link.
    async fn look_for_the_module(&mut self) -> Result<bool, Failure> {
        if !self.options.module_load {
            self.watched.meter.set_no_fast_keys("--module-load is off");
            return Ok(false);
        }
        match self.module_is_usable().await? {
            Usable::Yes => return Ok(true),
            Usable::Absent => self.watched.meter.set_no_fast_keys("the server does not have the module"),
            Usable::No(why) => {
                tracing::info!("the server has the module, but it is not used: {why}");
                self.watched.meter.set_no_fast_keys(&why);
            }
        }
        Ok(false)
    }

    async fn module_is_usable(&mut self) -> Result<Usable, Failure> {
        let no = |why: &str| Ok(Usable::No(why.to_string()));
        let status = match self.control.command(&["REMORA.STATUS"]).await {
            Ok(status) => status,
            Err(error) if error.refusal() == Some(RefusalKind::Unknown) => return Ok(Usable::Absent),
            Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => {
                return no("our user may not ask it: +remora.status +remora.load");
            }
            Err(ServerError::Refused { text, .. }) => return Ok(Usable::No(text)),
            Err(error) => return Err(error.into()),
        };
        if !speaks_our_protocol(&status) {
            return no("it is of another version; upgrade the older of the two");
        }
        if field(&status, b"load").as_deref() != Some("yes") {
            return no("it was loaded for capture only");
        }
        // A module's own SetAbsExpire makes a writable replica take the key for one that its clients wrote
        // (rememberSlaveKeyWithExpire in db.c). It would remove the key by itself when the time is over, also where the
        // stream takes the expiry away again.
        let setting = "replica-read-only";
        match self.control.client().await?.config_get(setting).await?.as_deref() {
            Some("yes") => {}
            Some(_) => {
                return no(
                    "the server accepts writes of clients (replica-read-only no), and would remove expired keys by itself",
                );
            }
            None => return no("we may not read replica-read-only"),
        }
        if self.target.conversion.is_some() {
            return no("the snapshot is converted for it");
        }
        if self.options.state_dir.is_some() {
            return no("with --state-dir the snapshot comes from files");
        }
        self.load_from_the_link().await
    }

    /// Has the server load from its link into its own data, also where it is not empty: the module empties it then.
    async fn load_from_the_link(&mut self) -> Result<Usable, Failure> {
        let Some(before) = self.target.diskless_load.clone() else {
            return Ok(Usable::No("we may not read repl-diskless-load".into()));
        };
        if before == "swapdb" {
            let why = "with repl-diskless-load swapdb the server goes on serving its old data, and loads beside them";
            return Ok(Usable::No(why.into()));
        }
        for wanted in ["flush-before-load", "on-empty-db"] {
            if self
                .record
                .change(self.control.client().await?, "repl-diskless-load", before.as_bytes(), wanted.as_bytes())
                .await?
            {
                return Ok(Usable::Yes);
            }
        }
        Ok(Usable::No("the server has no way to load from its link".into()))
    }

    /// Points the server at our link and makes its replication position worthless, which must be so before the module
    /// empties it. A server that does not permit that was not changed. The caller has just asked the server that it
    /// stands as `standing` says; it is asked again before each further try.
    async fn give_up_the_position(&mut self, standing: Standing) -> Result<(), NotFollowed> {
        let (host, port) = self.link();
        if remora_base::mutation::Mutation::PositionKept.is_active() {
            let client = self.control.client().await;
            let client = client.map_err(|error| NotFollowed::Failed { lapse: error.into(), told: false })?;
            let followed = client.command(&[FOLLOW, &host, &port.to_string()]).await;
            return followed.map(drop).map_err(|error| NotFollowed::Failed { lapse: error.into(), told: true });
        }
        let began = Instant::now();
        loop {
            match self.control.follow_from_nothing((&host, port)).await {
                Ok(replid) => {
                    self.worthless = Some(replid);
                    tracing::info!("the server has the module: long strings are loaded out of shared memory");
                    return Ok(());
                }
                // The server still loads from the link of an earlier agent, which is gone.
                Err(error) if error.refusal() == Some(RefusalKind::Loading) && began.elapsed() < SETTLE_LIMIT => {}
                Err(ServerError::Refused { text, .. }) => return Err(NotFollowed::NoTransaction(text)),
                Err(error) => return Err(NotFollowed::Failed { lapse: error.into(), told: true }),
            }
            tokio::time::sleep(SETTLE_POLL).await;
            let asked = match standing {
                Standing::AsFound => self.still_as_found().await.map_err(Lapse::from),
                Standing::AtTheLink => self.verify(Followed::Link).await.map(drop),
            };
            asked.map_err(|lapse| NotFollowed::Failed { lapse, told: standing == Standing::AtTheLink })?;
        }
    }

    /// Gives the module memory, as the delivery wishes. The module empties the server then: so the server must follow
    /// our link, and have a position that no primary continues.
    async fn introduce(&mut self, introduction: Introduction) -> (Introduced, Option<Result<Answer, String>>) {
        let facts = match self.verify(Followed::Link).await {
            Ok(facts) => facts,
            Err(lapse) => return (Introduced::Failed(lapse), None),
        };
        let is_worthless = self.worthless.is_some() && facts.replid == self.worthless;
        let is_worthless = is_worthless || remora_base::mutation::Mutation::PositionKept.is_active();
        if !is_worthless {
            // The server has been in step since, with us or with its primary.
            return match self.give_up_the_position(Standing::AtTheLink).await {
                Ok(()) => (Introduced::AgainFromNothing, None),
                Err(NotFollowed::NoTransaction(text)) => {
                    let why = format!("its replication position can't be made worthless: {text}");
                    (Introduced::NotUsed, Some(Err(why)))
                }
                Err(NotFollowed::Failed { lapse, .. }) => (Introduced::Failed(lapse), None),
            };
        }
        let client = match self.control.client().await {
            Ok(client) => client,
            Err(error) => return (Introduced::Failed(Lapse::from(error)), None),
        };
        // Also where the answer does not come, or the introduction is cancelled.
        let was_emptied = std::mem::replace(&mut self.before.emptied, true);
        let answer = introduction.perform(client).await;
        let answer = answer.map(|answer| match self.options.fast_keys {
            true => answer,
            false => Answer { fast_keys: Err("--fast-keys is off".into()), verify: false, ..answer },
        });
        let why = match &answer {
            Ok(answer) => answer.fast_keys.as_ref().err(),
            Err(text) => Some(text),
        };
        self.watched.meter.set_no_fast_keys(why.map_or("", String::as_str));
        // A module that refused before it removed anything has left the keys.
        let kept = answer.is_err() && self.control.facts().await.is_ok_and(|facts| facts.keys() > 0);
        self.before.emptied = was_emptied || !kept;
        (Introduced::Done { emptied: !kept }, Some(answer))
    }
}
