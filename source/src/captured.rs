//! The server that a source captures: which one it is, its settings that the source changes or watches, and what it
//! does differently because the source's links are attached to it.
//!
//! ```text
//!   --server URL                        always that server
//!   --sentinel …        every second:   where is the primary?            announced to the replicas
//!                                       is our server still suitable?    no: another one of the group
//! ```
//!
//! All servers of a group have one history and the same offsets, so the stream goes on at another server where it broke
//! at the former one. After a promotion the history is another one, and the source does what it does for every such
//! change. What is captured *now* is written here, and read by the loop, by the questions to the server, and by a
//! capture when it begins or resumes the stream.
//!
//! Settings are changed for the moment of the fork (`--tune-server`); the limit of the output buffer is watched
//! ([`OutputWatch`]).
//!
//! ```text
//!   INFO server, replication, twice a second ──▶ shutdown_in_milliseconds: the links are closed, the server ends
//!                                            ──▶ neither that, nor a server: they may come back
//!                                            ──▶ master_failover_state, and no replica to take over: FAILOVER ABORT
//! ```
//!
//! A server of Redis 7.0 or later waits before it ends until each replica has acknowledged all that was written, for
//! `shutdown-timeout`. A source acknowledges nothing (docs/decisions/0002-acknowledge-nothing.md). So it closes its
//! links as soon as it has all bytes. They stay closed until the server has ended, or says that it goes on (`SHUTDOWN
//! ABORT`).
//!
//! A server refuses `FAILOVER` without a replica. It takes a source for one, pauses its clients' writes, and waits for
//! a replica that never comes. The source then ends the fail-over, if its user may do that.
//!
//! The questions go over the connection that the source has to the server anyway, one at a time, and only while a link
//! is attached or was closed for this reason.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_base::pace::Growth;
use remora_base::units::Size;
use remora_process::exit::{Code, Failure};
use remora_process::record::{REWRITE, Record, Rewrites};
use remora_process::{AbortOnDrop, events, record};
use remora_redis::info::Info;
use remora_server::sentinel::{Candidate, Sentinels};
use remora_server::{Client, Facts, HostPort, OutputLimit, RefusalKind, Role, Server, ServerError, sentinel};
use tokio::sync::mpsc::Sender;

use super::options::{Beside, Target, TuningOptions};
use super::{Incoming, Source};

/// How often the Sentinels and the server are asked. A fail-over takes some seconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a server may be away, load, or be without its primary before another one takes its place. A restart of a
/// small server, or a short break of the network, is over sooner.
const PATIENCE: Duration = Duration::from_secs(5);

/// The server that a source captures. It is cheap to clone.
#[derive(Clone)]
pub(crate) struct Captured {
    present: Arc<Mutex<Present>>,
    group: Option<Arc<Group>>,
}

/// What is captured now.
struct Present {
    server: Server,
    /// Where the primary is, as Sentinel writes it.
    primary: Option<HostPort>,
}

/// How to find another server.
struct Group {
    sentinels: Sentinels,
    beside: Beside,
    /// The login and the TLS options for each of its servers.
    like: Server,
}

impl Captured {
    /// Finds the server to capture.
    ///
    /// # Errors
    /// No Sentinel answers, or no server is suitable.
    pub(super) async fn find(target: &Target) -> Result<Captured, Failure> {
        let (sentinels, beside, open) = match target {
            Target::Server(server) => return Ok(Captured::always(server.clone())),
            Target::Group { sentinels, beside, open } => (sentinels.clone(), *beside, open),
        };
        let primary = sentinels.primary().await?;
        let group = Group { sentinels, beside, like: open(&primary)? };
        let server = match group.beside {
            Beside::Primary => group.like.clone(),
            Beside::Replica => sentinel::least_behind(&group.sentinels, &group.like).await?.server,
        };
        tracing::info!(server = %server.url(), %primary, name = group.sentinels.name(), "found by the Sentinels");
        let present = Present { server, primary: Some(primary) };
        Ok(Captured { present: Arc::new(Mutex::new(present)), group: Some(Arc::new(group)) })
    }

    /// This server and no other.
    pub(crate) fn always(server: Server) -> Captured {
        Captured { present: Arc::new(Mutex::new(Present { server, primary: None })), group: None }
    }

    /// The server that is captured now.
    pub(crate) fn server(&self) -> Server {
        self.present().server.clone()
    }

    /// Where the primary is, as Sentinel has written it last.
    pub(super) fn primary(&self) -> Option<HostPort> {
        self.present().primary.clone()
    }

    /// The server to begin a snapshot with: one that was promoted since the last look is left to its clients, if a
    /// replica can take its place.
    pub(super) async fn for_a_snapshot(&self) -> Server {
        if let Some(group) = &self.group
            && let Ok(facts) = sentinel::look(&self.server()).await
            && group.is_misplaced(&facts)
            && let Some(candidate) = group.another(None).await
        {
            self.present().server = candidate.server;
        }
        self.server()
    }

    /// Looks after the group until the handle is dropped, and tells the loop of each change. `None` without Sentinels.
    pub(super) fn watch(&self, tell: Sender<Incoming>) -> Option<AbortOnDrop> {
        let group = self.group.clone()?;
        let watch =
            GroupWatch { captured: self.clone(), group, told: self.server(), unwell_since: None, is_warned: false };
        Some(AbortOnDrop::new(&tokio::spawn(watch.run(tell))))
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    /// Whether the server has a role that the source is not to sit beside.
    fn is_misplaced(&self, facts: &Facts) -> bool {
        match self.beside {
            Beside::Replica => facts.role == Some(Role::Primary),
            Beside::Primary => facts.role == Some(Role::Replica),
        }
    }

    /// Another server to sit beside, if there is one. `primary`: where it is, if that was just asked.
    async fn another(&self, primary: Option<HostPort>) -> Option<Candidate> {
        let found = match self.beside {
            Beside::Replica => sentinel::least_behind(&self.sentinels, &self.like).await.map_err(Failure::from),
            Beside::Primary => self.at_the_primary(primary).await,
        };
        found.inspect_err(|failure| tracing::debug!("{failure}")).ok()
    }

    async fn at_the_primary(&self, primary: Option<HostPort>) -> Result<Candidate, Failure> {
        let address = match primary {
            Some(primary) => primary,
            None => self.sentinels.primary().await?,
        };
        let server = self.like.at(&address.host, address.port);
        let facts = sentinel::look(&server).await?;
        match self.is_misplaced(&facts) {
            true => Err(Failure::passing(Code::Server, format!("{address} is not a primary yet"))),
            false => Ok(Candidate { address, server, facts }),
        }
    }
}

/// Another server of the group is captured from now on.
pub(super) fn moved(source: &mut Source, facts: Facts) {
    source.facts = facts;
    // Questions under way keep the former connection.
    source.questions.client = Arc::default();
    source.questions.pins = Arc::default();
    source.learn();
}

/// The task that looks after a group.
struct GroupWatch {
    captured: Captured,
    group: Arc<Group>,
    /// The server that the loop knows of.
    told: Server,
    /// Since when the server is away or out of step.
    unwell_since: Option<Instant>,
    /// Whether a warning says that no other server can take its place.
    is_warned: bool,
}

impl GroupWatch {
    async fn run(mut self, tell: Sender<Incoming>) {
        let mut due = tokio::time::interval(LOOK_EVERY);
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            due.tick().await;
            let primary = self.ask_for_the_primary().await;
            let moved = self.look(primary).await;
            if let Some(facts) = moved
                && tell.send(Incoming::Moved(Box::new(facts))).await.is_err()
            {
                return;
            }
        }
    }

    async fn ask_for_the_primary(&self) -> Option<HostPort> {
        let primary = match self.group.sentinels.primary().await {
            Ok(primary) => primary,
            Err(error) => {
                tracing::debug!("{error}");
                return None;
            }
        };
        let former = self.captured.present().primary.replace(primary.clone());
        if let Some(former) = former.filter(|former| *former != primary) {
            tracing::warn!(%former, now = %primary, "Sentinel names another primary");
        }
        Some(primary)
    }

    /// Looks at the server. Returns the facts of another one that has taken its place.
    async fn look(&mut self, primary: Option<HostPort>) -> Option<Facts> {
        let server = self.captured.server();
        let facts = sentinel::look(&server).await;
        // A capture has found it out before.
        if server.url() != self.told.url()
            && let Ok(facts) = facts
        {
            self.say_moved(&server);
            return Some(facts);
        }
        let why = match &facts {
            Ok(facts) if self.group.is_misplaced(facts) => match self.group.beside {
                Beside::Replica => "it was promoted".to_owned(),
                Beside::Primary => "it is a replica now".to_owned(),
            },
            other => {
                let unwell = match (other, self.group.beside) {
                    (Err(error), _) => Some(error.to_string()),
                    (Ok(facts), Beside::Replica) => sentinel::suits(facts).err(),
                    (Ok(_), Beside::Primary) => None,
                };
                let Some(unwell) = unwell else {
                    (self.unwell_since, self.is_warned) = (None, false);
                    return None;
                };
                if self.unwell_since.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
                    return None;
                }
                unwell
            }
        };
        match self.group.another(primary).await {
            Some(found) if found.server.url() != server.url() => {
                tracing::warn!(server = %server.url(), "{why}");
                self.captured.present().server = found.server.clone();
                self.say_moved(&found.server);
                Some(found.facts)
            }
            _ => {
                if !std::mem::replace(&mut self.is_warned, true) {
                    let sits = server.url();
                    tracing::warn!(server = %sits, "{why}, and no other server of the group can take its place yet");
                }
                None
            }
        }
    }

    fn say_moved(&mut self, server: &Server) {
        tracing::warn!(event = events::SOURCE_MOVED, from = %self.told.url(), to = %server.url(), "the source captures another server of the group");
        (self.unwell_since, self.is_warned, self.told) = (None, false, server.clone());
    }
}

// Two settings of the server that make a snapshot slow, changed for the moment of the fork (`--tune-server`).
//
// A server with default settings waits before it forks for a replica, in case more of them come
// (`repl-diskless-sync-delay`, 5 s), and its child compresses the snapshot (`rdbcompression`). A source serves all
// replicas with one snapshot and sends it over a faster way, so it needs neither. The child has the settings of the
// moment of the fork: they are put back as soon as the server has announced the snapshot.
//
// ```text
//   values to the record file ──▶ CONFIG SET ──▶ PSYNC ──▶ +FULLRESYNC: forked ──▶ CONFIG SET back ──▶ file removed
//          └─ the source is killed: the next one for this server puts them back ────────────┘
// ```
//
// A setting that another client has changed meanwhile is left as it is ([`Record`] says why that is known). If another
// client has the server write its configuration file meanwhile, it is written again.

/// What the settings are changed to.
const SETTINGS: [(&str, &str); 2] = [(record::SYNC_DELAY, "0"), (record::COMPRESSION, "no")];

/// How long the source tries to put the settings back while it runs. A server answers within milliseconds after a fork;
/// one that is restarting takes longer, and then has the settings of its file.
const PUT_BACK_LIMIT: Duration = Duration::from_secs(60);

/// Pause before the next try.
const PUT_BACK_PAUSE: Duration = Duration::from_millis(500);

/// How long a source that ends waits for the server to take the settings back.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The settings of the server that the source changes for the moment of the fork.
pub(crate) struct Tuning {
    is_wanted: bool,
    state_dir: Option<PathBuf>,
    /// How long the server waits before it forks, in seconds; 0 if it does not, or does not say.
    delay: AtomicU64,
    /// What is changed at this moment.
    changed: tokio::sync::Mutex<Option<Changed>>,
    /// The task that puts it back.
    putting_back: Mutex<Option<AbortOnDrop>>,
}

/// Settings that a server has from the source, or may have if the source was interrupted.
struct Changed {
    server: Server,
    record: Record,
}

impl Tuning {
    pub(crate) fn new(options: &TuningOptions) -> Tuning {
        Tuning {
            is_wanted: options.is_wanted,
            state_dir: options.state_dir.clone(),
            delay: AtomicU64::new(0),
            changed: tokio::sync::Mutex::default(),
            putting_back: Mutex::default(),
        }
    }

    /// Asks the server how long it waits before it forks.
    pub(crate) async fn learn(&self, client: &mut Client) {
        let mut get = async |name| client.config_get(name).await.ok().flatten();
        let delay = match get("repl-diskless-sync").await.as_deref() {
            Some("yes") => get(record::SYNC_DELAY).await.and_then(|text| text.parse().ok()),
            _ => None,
        };
        self.delay.store(delay.unwrap_or(0), Relaxed);
    }

    /// How long the server waits before it forks, in seconds; 0 if it does not, or does not say.
    pub(crate) fn fork_delay(&self) -> u64 {
        self.delay.load(Relaxed)
    }

    /// Whether the source does without that wait.
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// What a replica is told that waits for the snapshot.
    pub(crate) fn explained(&self, text: String) -> String {
        match self.delay.load(Relaxed) {
            delay if delay > 0 && !self.is_wanted => format!(
                "{text}; the server waits {delay} s before it forks, in case more replicas come ({}): remora source \
                 --tune-server does without",
                record::SYNC_DELAY
            ),
            _ => text,
        }
    }

    /// Puts back what a source that was killed has left changed.
    ///
    /// # Errors
    /// The state folder cannot be used, and the settings are to be changed.
    pub(crate) async fn recover(&self, server: &Server) -> Result<(), Failure> {
        let url = server.url().to_string();
        if !self.is_wanted && !record::is_left_by_a_source(self.state_dir.as_deref(), &url) {
            return Ok(());
        }
        let mut changed = self.changed.lock().await;
        // Another source that runs beside this server puts them back by itself.
        let Some(record) = Record::of_a_source(self.state_dir.as_deref(), &url)? else { return Ok(()) };
        *changed = Some(Changed { server: server.clone(), record });
        if let Err(error) = put_back(&mut changed).await {
            tracing::warn!(%error, "the settings that a source which was killed has changed at the server can't be put back");
        }
        Ok(())
    }

    /// Changes the settings, before the server is asked for a snapshot. A snapshot with the server's own settings is
    /// better than none: a failure is logged only.
    pub(crate) async fn change(&self, server: &Server) {
        if !self.is_wanted {
            return;
        }
        // The task of an earlier snapshot must not put back what is changed now.
        drop(self.task(None));
        let mut changed = self.changed.lock().await;
        if let Err(error) = put_back(&mut changed).await {
            return tracing::warn!(%error, "the server's settings are not changed: those of an earlier snapshot can't be put back");
        }
        let record = match Record::of_a_source(self.state_dir.as_deref(), &server.url().to_string()) {
            Ok(Some(record)) => record,
            Ok(None) => {
                return tracing::info!("another source beside this server has changed its settings for a snapshot");
            }
            Err(error) => return tracing::warn!(%error, "the server's settings are not changed for the snapshot"),
        };
        // Kept before the first command: the caller may be interrupted between two of them.
        let change = changed.insert(Changed { server: server.clone(), record });
        let done = change.all().await;
        match done {
            Ok(()) => tracing::info!("the server neither waits nor compresses for this snapshot (--tune-server)"),
            Err(error) => {
                tracing::warn!(%error, "the server's settings are not changed for the snapshot");
                if let Err(error) = put_back(&mut changed).await {
                    tracing::warn!(%error, "settings of the server can't be put back yet");
                }
            }
        }
    }

    /// Begins to put the settings back: the server has forked, or will not.
    pub(crate) fn end(self: &Arc<Tuning>, runtime: &tokio::runtime::Handle) {
        if !self.is_wanted {
            return;
        }
        let tuning = Arc::clone(self);
        let task = runtime.spawn(async move { tuning.put_back_within(PUT_BACK_LIMIT).await });
        drop(self.task(Some(AbortOnDrop::new(&task))));
    }

    /// Puts the settings back before the source ends.
    pub(crate) async fn close(&self) {
        drop(self.task(None));
        if tokio::time::timeout(END_LIMIT, self.put_back_within(END_LIMIT)).await.is_err() {
            tracing::warn!(
                "the server did not take its settings back ({}, {}): the next source beside it will put them back",
                record::SYNC_DELAY,
                record::COMPRESSION
            );
        }
    }

    async fn put_back_within(&self, limit: Duration) {
        let began = Instant::now();
        loop {
            let error = match put_back(&mut *self.changed.lock().await).await {
                Ok(()) => return,
                Err(error) => error,
            };
            if began.elapsed() > limit {
                return tracing::warn!(
                    %error,
                    "the server's {} and {} can't be put back: the next snapshot, or the next source beside it, will try again",
                    record::SYNC_DELAY,
                    record::COMPRESSION
                );
            }
            tokio::time::sleep(PUT_BACK_PAUSE).await;
        }
    }

    /// Exchanges the task that puts the settings back.
    fn task(&self, task: Option<AbortOnDrop>) -> Option<AbortOnDrop> {
        let mut present = self.putting_back.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *present, task)
    }
}

impl Changed {
    async fn all(&mut self) -> Result<(), Failure> {
        let mut client = self.server.connect().await?;
        if self.record.rewrites().is_none()
            && let Some(calls) = Rewrites::calls(&mut client).await?
        {
            self.record.note_rewrites(Some(Rewrites { run_id: Facts::read(&mut client).await?.run_id, calls }));
        }
        for (name, value) in SETTINGS {
            let Some(present) = record::present(&mut client, name).await? else { continue };
            let before = self.record.original(name, &present);
            if !self.record.change(&mut client, name, &before, value.as_bytes()).await? {
                let text = format!(
                    "the server refuses CONFIG SET {name} {value}: --tune-server needs the rule +config|set, and a server \
                     that lets this setting be changed"
                );
                return Err(Failure::refused(text));
            }
        }
        Ok(())
    }
}

/// Puts back what is changed. Nothing is changed afterwards, unless this fails.
async fn put_back(changed: &mut Option<Changed>) -> Result<(), ServerError> {
    let Some(Changed { server, record }) = changed else { return Ok(()) };
    if record.has_settings() {
        let mut client = server.connect().await?;
        let is_in_the_file = is_in_the_file(&mut client, record).await?;
        record.put_back(&mut client).await?;
        if is_in_the_file {
            write_the_file_again(&mut client).await?;
        }
    }
    record.close();
    *changed = None;
    Ok(())
}

/// Whether another client has had the server write its configuration file while the settings were changed.
async fn is_in_the_file(client: &mut Client, record: &Record) -> Result<bool, ServerError> {
    let Some(noted) = record.rewrites() else { return Ok(false) };
    if Facts::read(client).await?.run_id == noted.run_id {
        return Ok(Rewrites::calls(client).await?.is_some_and(|calls| calls != noted.calls));
    }
    // A server that was restarted meanwhile has its settings from the file.
    for (name, _) in SETTINGS {
        let present = record::present(client, name).await?;
        if present.is_some_and(|present| record.original(name, &present) != present) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Has the server write its configuration file again.
async fn write_the_file_again(client: &mut Client) -> Result<(), ServerError> {
    let url = client.server().url().to_string();
    match client.command(&REWRITE).await {
        Ok(_) => tracing::info!(
            "another client had {url} write its configuration file while its settings were changed (--tune-server); it is written \
             again, with its own settings"
        ),
        Err(error) if error.refusal().is_some() => tracing::warn!(
            %error,
            "another client had {url} write its configuration file while {} and {} were changed (--tune-server), and it can't be \
             written again: send it CONFIG REWRITE",
            record::SYNC_DELAY,
            record::COMPRESSION
        ),
        Err(error) => return Err(error),
    }
    Ok(())
}

// The primary's output buffer for the source, and its limit.
//
// If snapshot and stream share one connection, the primary holds the stream back until the source has read the
// snapshot. It holds it in the output buffer of that connection. A windowed snapshot is read at the pace of the
// slowest replica, so the buffer grows for as long as that takes. When it reaches `client-output-buffer-limit`, the
// primary closes the connection and the snapshot has failed. Each further attempt ends in the same way.

/// What the server holds back for a source, and what limits it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputBuffer {
    limit: OutputLimit,
    /// Whether the server sends snapshot and stream over two connections, so that it holds nothing back.
    two_channels: bool,
}

impl OutputBuffer {
    /// Asks the server. `facts` must be fresh.
    pub(crate) async fn read(client: &mut Client, facts: &Facts) -> OutputBuffer {
        let limit = OutputLimit::read(client, facts).await;
        let two_channels = client.config_get("dual-channel-replication-enabled").await.ok().flatten();
        OutputBuffer { limit, two_channels: two_channels.is_some_and(|text| text == "yes") }
    }

    /// The limit, if a buffer that has grown to `held` bytes within `took` reaches it.
    pub(crate) fn reached(&self, held: u64, took: Duration) -> Option<OutputLimit> {
        self.limit.is_reached(held, took).then_some(self.limit)
    }

    /// A warning for the plan of a replica: a windowed snapshot of about `expected` bytes may reach the limit. Empty if
    /// it cannot.
    fn warning(&self, expected: u64, ring: u64, rate: u64) -> String {
        if self.two_channels || self.limit.is_none() {
            return String::new();
        }
        let bound = match self.limit.time_at(rate) {
            None => "a snapshot fails if more than that is written while the replicas read it".to_owned(),
            Some(time) => format!(
                "at the {}/s that clients write now it is reached after {} s, so the slowest replica must read {}/s or more",
                Size::bytes(rate),
                time.as_secs(),
                Size::bytes((expected as f64 / time.as_secs_f64().max(1e-3)) as u64)
            ),
        };
        format!(
            "the data set (about {}) does not fit in the source's memory for the snapshot ({}), so the primary holds back what clients \
             write until the replicas have read it; its client-output-buffer-limit for replicas is {}: {bound}; {REMEDY}",
            Size::bytes(expected),
            Size::bytes(ring),
            self.limit
        )
    }
}

/// What to do about the limit.
pub(crate) const REMEDY: &str = "raise the limit on the primary, give the source more --memory, or set \
    dual-channel-replication-enabled yes on a Valkey primary";

/// The source's last look at its primary: the output buffer, and how fast clients write.
#[derive(Default)]
pub(super) struct OutputWatch {
    buffer: Option<OutputBuffer>,
    growth: Growth,
    /// Bytes per second between the last two looks.
    rate: u64,
}

impl OutputWatch {
    /// Two looks that are less apart give no rate.
    const SPAN: Duration = Duration::from_millis(500);

    /// The server was asked.
    pub(super) fn learned(&mut self, now: Instant, facts: &Facts, buffer: OutputBuffer) {
        self.buffer = Some(buffer);
        if let Some(rate) = facts.offset.and_then(|offset| self.growth.look(now, offset, Self::SPAN)) {
            self.rate = rate as u64;
        }
    }

    /// A warning for the plan of a replica; empty if the plan needs no warning.
    pub(super) fn warning(&self, expected: u64, ring: u64) -> String {
        self.buffer.map_or_else(String::new, |buffer| buffer.warning(expected, ring, self.rate))
    }
}

/// How often the server is asked. A server looks ten times a second whether its replicas have caught up, and clients'
/// writes wait meanwhile.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// How long after its `shutdown-timeout` a server that answers nothing is taken to be ending: the time of its last
/// save.
const SAVE_LIMIT: Duration = Duration::from_secs(60);

/// Whether the links of the source are to leave the server. The capture threads read it, and the source's loop writes.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    leaves_at: Mutex<Option<u64>>,
    /// The offset that the server has named last, and when.
    offset: Mutex<Option<(Instant, u64)>>,
}

/// How long what a server has said of its offset is believed: some questions may be lost.
const OFFSET_LIMIT: Duration = Duration::from_secs(5);

impl Presence {
    /// The offset at which the stream's link is to leave; all other links leave at once. `None`: they stay.
    pub(crate) fn leaves_at(&self) -> Option<u64> {
        *self.leaves_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn leave_at(&self, offset: Option<u64>) {
        *self.leaves_at.lock().unwrap_or_else(PoisonError::into_inner) = offset;
    }

    /// Notes the offset of the server's last byte.
    pub(crate) fn note_offset(&self, now: Instant, offset: u64) {
        *self.offset.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, offset));
    }

    /// Whether the server has just said that it has written no byte behind this offset.
    pub(crate) fn has_no_more(&self, now: Instant, offset: u64) -> bool {
        let said = *self.offset.lock().unwrap_or_else(PoisonError::into_inner);
        said.is_some_and(|(when, last)| last <= offset && now.saturating_duration_since(when) < OFFSET_LIMIT)
    }
}

/// The looks at the server, and what followed from them.
#[derive(Debug, Default)]
pub(super) struct Lookout {
    shared: Arc<Presence>,
    is_open: bool,
    next: Option<Instant>,
    watch: PresenceWatch,
}

impl Lookout {
    /// What captures are given.
    pub(super) fn shared(&self) -> Arc<Presence> {
        self.shared.clone()
    }

    /// Whether the server is to be asked now.
    fn asks(&mut self, now: Instant) -> bool {
        let is_due = !self.is_open && self.next.is_none_or(|next| next <= now);
        if is_due {
            (self.is_open, self.next) = (true, Some(now + ASK_EVERY));
        }
        is_due
    }
}

/// What one look has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// The server's own words.
    Said(Said),
    /// There is no such server any more, or one that has just started.
    Gone,
    /// It is not known.
    Silent,
}

/// What a server says of its end and of fail-overs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    shutdown_in: Option<Duration>,
    offset: u64,
    /// `FAILOVER` waits for a replica that has caught up.
    fails_over: bool,
    /// `FAILOVER` has chosen a replica that does not listen. At offset 0 each replica has caught up.
    goes_nowhere: bool,
    /// Replicas that could take over: they have told a port at which they listen.
    promotable: usize,
    /// The others: sources, and links of agents.
    others: usize,
}

impl Said {
    fn of(info: &Info) -> Said {
        let facts = Facts::from_info(info);
        let is_promotable = |line: &str| !line.split(',').any(|pair| pair == "port=0");
        let is_replica = |name: &str| {
            let number = name.strip_prefix("slave").unwrap_or_default();
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        Said {
            shutdown_in: facts.shutdown_in,
            // A replica sends its own replicas what it has of its primary's stream.
            offset: info.number("master_repl_offset").unwrap_or(0),
            fails_over: info.get("master_failover_state") == Some("waiting-for-sync"),
            goes_nowhere: info.get("master_failover_state") == Some("failover-in-progress")
                && info.get("master_port") == Some("0"),
            promotable: info.iter().filter(|(name, line)| is_replica(name) && is_promotable(line)).count(),
            others: info.iter().filter(|(name, line)| is_replica(name) && !is_promotable(line)).count(),
        }
    }
}

/// What follows from the looks. No I/O and no clock.
#[derive(Debug, Default)]
struct PresenceWatch {
    /// Until when a server that says nothing is taken to be ending; `None` if it is not.
    ends_until: Option<Instant>,
    /// Whether a replica could have taken over before a fail-over was requested; `None` if it is not known.
    had_promotable: Option<bool>,
    /// The fail-over that is requested now was answered.
    is_answered: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The links leave, that of the stream when it has all up to this offset.
    Leave(u64),
    /// They may come back.
    Return,
    /// `FAILOVER ABORT`.
    EndFailover,
}

impl PresenceWatch {
    fn saw(&mut self, now: Instant, look: Look) -> Option<Order> {
        let said = match look {
            Look::Said(said) => said,
            Look::Silent if self.ends_until.is_none_or(|until| now < until) => return None,
            Look::Silent | Look::Gone => {
                Said { promotable: usize::from(self.had_promotable == Some(true)), ..Said::default() }
            }
        };
        if let Some(left) = said.shutdown_in {
            let is_known = self.ends_until.replace(now + left + SAVE_LIMIT).is_some();
            return (!is_known).then_some(Order::Leave(said.offset));
        }
        if self.ends_until.take().is_some() {
            return Some(Order::Return);
        }
        if said.goes_nowhere {
            return (!std::mem::replace(&mut self.is_answered, true)).then_some(Order::EndFailover);
        }
        if !said.fails_over {
            (self.had_promotable, self.is_answered) = (Some(said.promotable > 0), false);
            return None;
        }
        // A server that fails over accepts no new replica: the source was there before.
        let is_ours = self.had_promotable != Some(true) && said.promotable == 0 && said.others > 0;
        (is_ours && !std::mem::replace(&mut self.is_answered, true)).then_some(Order::EndFailover)
    }
}

/// Asks the server when that is due: while a link of the source is attached to it, or keeps away from it.
pub(super) fn look(source: &mut Source) {
    let is_away = source.questions.presence.shared.leaves_at().is_some();
    if (source.threads.hold_links() || is_away) && source.questions.presence.asks(Instant::now()) {
        ask(source);
    }
}

/// Asks in the background. The connection limits the time.
fn ask(source: &Source) {
    let (client, server) = (source.questions.client.clone(), source.captured.server());
    let sections: &[&str] =
        if source.facts.shares_its_buffer() { &["server", "replication"] } else { &["replication"] };
    let incoming = source.incoming.clone();
    tokio::spawn(async move {
        let mut client = client.lock().await;
        let said = match client.as_mut() {
            Some(open) => open.info_of(sections).await.ok(),
            None => None,
        };
        let asked = match said {
            Some(info) => Ok(info),
            // The answer of a new connection says whether there is a server.
            None => {
                *client = None;
                match server.connect().await {
                    Ok(fresh) => client.insert(fresh).info_of(sections).await,
                    Err(error) => Err(error),
                }
            }
        };
        drop(client);
        let look = match &asked {
            Ok(info) => Look::Said(Said::of(info)),
            Err(error) if is_gone(error) => Look::Gone,
            Err(_) => Look::Silent,
        };
        let _ = incoming.send(Incoming::Presence(look)).await;
    });
}

/// Whether the process that was asked before does not run any more.
fn is_gone(error: &ServerError) -> bool {
    match error {
        ServerError::Unreachable { cause, .. } => {
            matches!(cause.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
        }
        other => other.refusal() == Some(RefusalKind::Loading),
    }
}

/// The answer to a question has come.
pub(super) fn saw(source: &mut Source, look: Look) {
    let lookout = &mut source.questions.presence;
    let now = Instant::now();
    lookout.is_open = false;
    if let Look::Said(said) = look {
        lookout.shared.note_offset(now, said.offset);
    }
    match lookout.watch.saw(now, look) {
        None => {}
        Some(Order::Leave(offset)) => {
            tracing::info!(
                offset,
                "the server is being shut down, and waits for its replicas; the source closes its links"
            );
            lookout.shared.leave_at(Some(offset));
        }
        Some(Order::Return) => {
            tracing::info!("the server has ended, or goes on (SHUTDOWN ABORT); the source connects again");
            lookout.shared.leave_at(None);
        }
        Some(Order::EndFailover) => end_failover(source),
    }
}

/// Ends a fail-over that the server has accepted because it takes the source for a replica.
fn end_failover(source: &Source) {
    let client = source.questions.client.clone();
    tokio::spawn(async move {
        let mut client = client.lock().await;
        let Some(open) = client.as_mut() else { return };
        match open.command(&["FAILOVER", "ABORT"]).await {
            Ok(_) => tracing::warn!(
                event = events::FAILOVER_ENDED,
                "a client requested FAILOVER at the server, which has no replica that could take over. The server would have refused it \
                 without this source, and waited for ever with it, so the source has ended the fail-over (FAILOVER ABORT)"
            ),
            Err(error) => tracing::warn!(
                event = events::FAILOVER_WAITS,
                %error,
                "a client requested FAILOVER at the server, which has no replica that could take over: clients' writes wait until \
                 a client sends FAILOVER ABORT. The source does that if its user has +failover"
            ),
        }
    });
}

/// Warns of a setting that counts the source: writes are let through that no server but the primary has.
pub(super) async fn warn_of_min_replicas(client: &mut Client) {
    const SETTING: &str = "min-replicas-to-write";
    let least = match client.config_get(SETTING).await {
        Ok(value) => value.and_then(|text| text.parse::<u32>().ok()).unwrap_or(0),
        // Without CONFIG GET the server's INFO says that there is one: it counts good replicas only then.
        Err(_) => match client.info("replication").await {
            Ok(info) => u32::from(info.get("min_slaves_good_slaves").is_some()),
            Err(_) => 0,
        },
    };
    if least > 0 {
        tracing::warn!(
            least,
            "the server has {SETTING}, and counts a source among its replicas while one is attached: it then accepts writes with one \
             replica fewer. Raise the setting by one for that time if it matters"
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const SETTING: &str = "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60";

    #[test]
    fn a_warning_names_the_limit_the_time_and_the_pace_that_is_needed() {
        let limit = OutputLimit::parse(SETTING).unwrap();
        let buffer = OutputBuffer { limit, two_channels: false };
        let text = buffer.warning(10 << 30, 1 << 30, 32 << 20);
        for part in ["client-output-buffer-limit", "256 MiB, or 64 MiB for 60 s", "after 8 s", "1.25 GiB/s", "--memory"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(buffer.warning(10 << 30, 1 << 30, 0).contains("while the replicas read it"));
        assert_eq!(OutputBuffer { two_channels: true, ..buffer }.warning(1, 1, 1), "");
    }

    #[test]
    fn the_write_rate_follows_from_two_looks() {
        let (mut watch, start) = (OutputWatch::default(), Instant::now());
        let buffer = OutputBuffer { limit: OutputLimit::DEFAULT, two_channels: false };
        let at = |offset| Facts { offset: Some(offset), ..Facts::default() };
        watch.learned(start, &at(1000), buffer);
        watch.learned(start + Duration::from_secs(2), &at(5000), buffer);
        assert_eq!(watch.rate, 2000);
        watch.learned(start + Duration::from_secs(3), &at(0), buffer);
        assert_eq!(watch.rate, 0);
    }
}

#[cfg(test)]
mod presence_tests {
    use super::*;

    fn said(text: &str) -> Look {
        Look::Said(Said::of(&Info::parse(text.replace(' ', "\r\n").as_bytes())))
    }

    #[test]
    fn the_links_leave_a_server_that_ends_and_come_back_when_it_has_ended_or_goes_on() {
        let (now, ends) = (Instant::now(), said("shutdown_in_milliseconds:9000 master_repl_offset:70"));
        for over in [said("master_repl_offset:70"), Look::Gone] {
            let mut watch = PresenceWatch::default();
            assert_eq!(watch.saw(now, said("master_repl_offset:60")), None);
            assert_eq!(watch.saw(now, Look::Silent), None);
            assert_eq!(watch.saw(now, ends), Some(Order::Leave(70)));
            assert_eq!(watch.saw(now, ends), None, "once");
            assert_eq!(watch.saw(now, Look::Silent), None, "it saves");
            assert_eq!(watch.saw(now, over), Some(Order::Return));
            assert_eq!(watch.saw(now, over), None);
            assert_eq!(watch.saw(now, ends), Some(Order::Leave(70)), "the next one");
            let late = now + Duration::from_secs(9) + SAVE_LIMIT;
            assert_eq!(watch.saw(late, Look::Silent), Some(Order::Return), "nothing waits without end");
        }
        // The deadline has passed, and the server is not through yet.
        assert_eq!(
            PresenceWatch::default().saw(now, said("shutdown_in_milliseconds:-3 master_repl_offset:7")),
            Some(Order::Leave(7))
        );
    }

    #[test]
    fn a_failover_is_ended_if_only_a_source_made_it_possible() {
        let now = Instant::now();
        let (source, replica) =
            ("slave0:ip=::1,port=0,state=online,offset=0,lag=1", "slave1:ip=::1,port=7,state=online,offset=9,lag=0");
        let failing =
            |replicas: &str| said(&format!("master_failover_state:waiting-for-sync connected_slaves:2 {replicas}"));
        let calm = |replicas: &str| said(&format!("master_failover_state:no-failover {replicas}"));
        let both = format!("{source} {replica}");
        let mut watch = PresenceWatch::default();
        assert_eq!(watch.saw(now, failing("")), None, "no source is attached");
        for _ in 0..2 {
            assert_eq!(watch.saw(now, calm(source)), None);
            assert_eq!(watch.saw(now, failing(source)), Some(Order::EndFailover));
            assert_eq!(watch.saw(now, failing(source)), None, "once");
        }
        let nowhere = said("master_failover_state:failover-in-progress role:slave master_host:::1 master_port:0");
        assert_eq!(watch.saw(now, calm(source)), None);
        assert_eq!(watch.saw(now, nowhere), Some(Order::EndFailover));
        assert_eq!(watch.saw(now, nowhere), None, "once");
        assert_eq!(watch.saw(now, said("master_failover_state:failover-in-progress role:slave master_port:7")), None);
        assert_eq!(watch.saw(now, calm(source)), None);
        assert_eq!(watch.saw(now, failing(&both)), None, "a replica has come");
        assert_eq!(watch.saw(now, calm(&both)), None);
        assert_eq!(watch.saw(now, failing(source)), None, "the replica may come back, as without a source");
    }

    #[test]
    fn one_question_is_asked_at_a_time() {
        let (mut lookout, now) = (Lookout::default(), Instant::now());
        assert!(lookout.asks(now) && !lookout.asks(now + ASK_EVERY));
        lookout.is_open = false;
        assert!(!lookout.asks(now + ASK_EVERY / 2) && lookout.asks(now + ASK_EVERY));
    }
}
