//! Prepared: what is known before the first change: the server, its source and its primary, found to suit each other.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::exact::lacking_commands;
use super::preflight::{self, Known, Primary, Target};
use super::record::Record;
use crate::options::Options;
use remora_base::units::Size;
use remora_conversation::Protection;
use remora_conversation::tokens::Credentials;
use remora_conversation::transports::{TransportChoice, not_offered};
use remora_delivery::payload::Conversion;
use remora_fabric::{Memory, Pages, RegionKey, TransportKind};
use remora_process::blocking;
use remora_process::exit::{Code, Failure, Patience, RETRY_FOR};
use remora_protocol::Offer;
use remora_reader::data_set::{DataSet, Finding};
use remora_reader::source::{Source, Way};
use remora_reader::{ReadOptions, parts};
use remora_server::own_changes::OwnChanges;
use remora_server::{Client, Facts, Server, ServerError, ServerUrl, Task, sentinel};

/// Pause between two looks meanwhile.
const FAIL_OVER_POLL: Duration = Duration::from_millis(500);

/// Which servers can get a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suits {
    /// Those that can follow a link.
    Link,
    /// Any.
    Any,
}

/// A server, its source and its primary, before the first change.
pub(super) struct Prepared {
    pub(super) server: Server,
    pub(super) client: Client,
    pub(super) record: Record,
    pub(super) target: Target,
    pub(super) source: Source,
    pub(super) plan: Offer,
    pub(super) primary: Primary,
    /// What the source and the primary were found to be about.
    pub(super) data_set: DataSet,
    /// How the source is read, if that was tried.
    pub(super) reading: Option<Reading>,
    /// What could not be checked.
    pub(super) unchecked: Vec<String>,
}

impl Prepared {
    /// Finds them, and puts back what an agent before us has left changed.
    ///
    /// # Errors
    /// One of them does not answer, or they do not suit each other.
    pub(super) async fn of(options: &Options, credentials: &Credentials, suits: Suits) -> Result<Prepared, Failure> {
        let server = options.server.open(Task::Replica)?;
        let mut patience = Patience::new(options.read.retry_for, RETRY_FOR);
        let mut client = patience.keep_trying(async || answering(&server).await).await?;
        let (state_dir, url) = (options.state_dir.as_deref(), server.url().to_string());
        let mut record = match options.dry_run {
            true => Record::open(state_dir, &url)?,
            false => Record::claim_after_a_guard(state_dir, &url).await?,
        };
        if !options.dry_run {
            record.put_back_but_the_login(&mut client).await?;
        }
        if options.rewrite_config {
            preflight::refuse_without_a_file(&mut client).await?;
        }
        let look = async || {
            if !client.is_usable() {
                client = server.connect().await?;
            }
            match suits {
                Suits::Link => preflight::target(&server, &mut client, &record, options.link_tls.cert.is_some()).await,
                Suits::Any => preflight::any_target(&server, &mut client, &record).await,
            }
        };
        let mut target = patience.keep_trying(look).await?;
        if options.convert {
            target.conversion = Some(Conversion::of(&mut client, &target.facts, &options.leave_out).await?);
        }
        if !options.dry_run && !target.unfinished {
            // A server that follows a dead link keeps the login for it until it gets another: its real password is not
            // for what may listen there now.
            record.put_back(&mut client).await?;
        }
        let asks_for = (options.name.as_deref(), &*target.name());
        let (mut source, mut plan) = Source::first(&options.read, credentials, &mut patience, asks_for).await?;
        let finding = match options.sentinels.clone() {
            Some(sentinels) => Some(patience.keep_trying(async || Finding::begin(sentinels.clone()).await).await?),
            None => None,
        };
        if !options.dry_run {
            // An agent before us may have been killed.
            let left = preflight::put_back(&mut record, finding.as_ref().map(Finding::sentinels)).await;
            if !left.is_empty() {
                tracing::warn!("an earlier agent has ended without its clean-up{left}");
            }
        }
        refuse_what_the_source_refuses(options, &plan)?;
        let known = preflight::known(options, target.followed(&record), source.address());
        let known = Known { primaries: known, finding, source: source.address() };
        let began = Instant::now();
        let primary = loop {
            let unfit = match preflight::primary(options, &server, &target, &plan, &known).await {
                Ok(primary) => break primary,
                Err(unfit) => unfit,
            };
            let pause = if began.elapsed() < unfit.passes_within.min(options.read.retry_for) {
                tracing::warn!("{}; looking again, as a fail-over may be just over", unfit.failure);
                FAIL_OVER_POLL
            } else {
                patience.after(std::time::Instant::now(), unfit.failure)?
            };
            tokio::time::sleep(pause).await;
            // What the source says of its server may be another thing now.
            plan = match source.plan(&options.read, asks_for.0, asks_for.1).await {
                Ok(plan) => plan,
                Err(_) => {
                    let again = Source::first(&options.read, credentials, &mut patience, asks_for).await?;
                    source = again.0;
                    again.1
                }
            };
        };
        if !client.is_usable() {
            client = server.connect().await?;
        }
        preflight::refuse_to_overwrite(options, &server, &target)?;
        refuse_what_would_not_stay_exact(&mut client, &target.facts, &primary).await?;
        let reach = async || {
            if !client.is_usable() {
                client = server.connect().await?;
            }
            preflight::check(&mut client, &target, &primary).await
        };
        let unchecked = patience.keep_trying(reach).await?;
        let reading = of_a_run(options, credentials, &plan, &source.way(&options.read), &mut patience).await?;
        let data_set = primary.data_set(&plan);
        Ok(Prepared { server, client, record, target, source, plan, primary, data_set, reading, unchecked })
    }
}

/// Refuses a source whose server sends it no snapshot until an administrator changes something there.
///
/// # Errors
/// As the sync would end.
pub(super) fn refuse_what_the_source_refuses(options: &Options, plan: &Offer) -> Result<(), Failure> {
    match &plan.terms {
        Some(terms) if terms.is_refused => {
            let source = &options.read.source;
            Err(Failure::new(Code::Source, format!("the source {source} cannot take a snapshot: {}", plan.obstacle)))
        }
        _ => Ok(()),
    }
}

/// A connection to a server that answers, and is not kept busy by a script.
async fn answering(server: &Server) -> Result<Client, Failure> {
    let mut client = server.connect().await?;
    Facts::read(&mut client).await?;
    Ok(client)
}

// Fitness: whether a server would become an exact replica, and stay one, as far as its settings tell before the sync.

/// Seconds of `repl-timeout` from which on pauses do no harm: twice the longest pause before an agent connects to its
/// source again.
const PATIENCE_SECONDS: u64 = 10;

/// Refuses a server that would remove keys of the primary's by itself, and warns of what may make it another one later.
pub(super) async fn refuse_what_would_not_stay_exact(
    client: &mut Client,
    facts: &Facts,
    primary: &Primary,
) -> Result<(), Failure> {
    let url = client.server().url().clone();
    warn_of_impatience(client, &url).await?;
    warn_of_lacking_commands(client, facts, primary, &url).await;
    let Some(own) = OwnChanges::read(client).await? else {
        tracing::debug!("the server {url} does not tell its settings (CONFIG GET)");
        return Ok(());
    };
    refuse_too_little_memory(&own, facts, primary.data(), &url)?;
    if own.is_writable {
        tracing::warn!(
            "the server {url} has replica-read-only no: what clients write to it while it is a replica makes it another one than \
             its primary; set it to yes there"
        );
    }
    Ok(())
}

/// Warns of a server that gives up a snapshot whose bytes pause for a short time.
async fn warn_of_impatience(client: &mut Client, url: &ServerUrl) -> Result<(), ServerError> {
    let seconds = client.config_get("repl-timeout").await?.and_then(|seconds| seconds.parse::<u64>().ok());
    if let Some(seconds) = seconds.filter(|seconds| *seconds < PATIENCE_SECONDS) {
        tracing::warn!(
            "the server {url} gives up a primary that sends nothing for {seconds} s (repl-timeout), and a snapshot over a slow link \
             may pause for longer: it would start to load again and again. Its default is 60"
        );
    }
    Ok(())
}

/// `data`: bytes of the primary's data.
fn refuse_too_little_memory(
    own: &OwnChanges,
    facts: &Facts,
    data: Option<u64>,
    url: &ServerUrl,
) -> Result<(), Failure> {
    let (Some((limit, _)), Some(what)) = (&own.limit, own.of_the_limit()) else { return Ok(()) };
    // What the server uses beside its data, which the sync replaces.
    let beside = facts.used_memory.unwrap_or(0).saturating_sub(facts.used_memory_dataset.unwrap_or(0));
    match data {
        Some(data) if data.saturating_add(beside) > *limit => Err(Failure::refused(format!(
            "the server {url} {what}, and the primary's data take {}: it would not stay an exact replica; set \
             replica-ignore-maxmemory yes there, or a larger maxmemory",
            Size::bytes(data)
        ))),
        _ => {
            tracing::warn!(
                "the server {url} {what}: from then on it is not an exact replica any more; set replica-ignore-maxmemory yes there"
            );
            Ok(())
        }
    }
}

/// A stream with one of these commands makes the sync fail. A newer primary has commands that clients may never send.
async fn warn_of_lacking_commands(client: &mut Client, facts: &Facts, primary: &Primary, url: &ServerUrl) {
    // Users with names have the rules that the help page lists, and this is not among them.
    let primary = primary.as_server();
    if primary.credentials().user.is_some() || client.server().credentials().user.is_some() {
        return;
    }
    let Ok(mut asked) = primary.connect().await else { return };
    let lacking: Vec<_> =
        lacking_commands(&mut asked, client).await.iter().map(|name| name.to_ascii_uppercase()).collect();
    if lacking.is_empty() {
        return;
    }
    let (names, own) = (lacking.join(", "), facts.name());
    tracing::warn!(
        "the server {url} ({own}) lacks commands that the primary has: {names}; a sync whose stream has one of them fails \
         (rename-command, modules, versions)"
    );
}

// Reading: by which transport the source's memory can be read, tried before anything is changed.
//
// The source exports memory without data (as for `remora probe`), and the agent connects to it as it will connect to
// the tables: the same choice, the same keys, the same refusals. A conversation of its own does it, so that the source
// lets go of that memory at once.

/// How the source is read.
pub(crate) struct Reading {
    pub(crate) transport: TransportKind,
    /// Why better transports are not used; empty if this is the best one.
    pub(crate) why: String,
    pub(crate) protection: Protection,
    /// Bytes per second, measured for a moment.
    pub(crate) rate: Option<u64>,
}

/// Tries the transports. `is_sealed`: the source's tables are, for other hosts.
///
/// # Errors
/// The source cannot be read over what `--transport` permits.
async fn try_out(options: &ReadOptions, credentials: &Credentials, is_sealed: bool) -> Result<Reading, Failure> {
    let mut source = Source::connect(options, credentials).await.map_err(remora_reader::source::failure)?;
    let way = source.way(options);
    refuse_what_this_host_lacks(options, &way, is_sealed)?;
    let keys = source.probe_keys(options).await?;
    let offered: Vec<_> = keys.iter().filter_map(|bytes| RegionKey::from_bytes(bytes.clone()).ok()).collect();
    let region = offered.iter().map(RegionKey::length).max().unwrap_or(0);
    let is_offered = offered.iter().any(|key| way.permits(key.transport()));
    let reading = blocking(move || {
        let sink = Memory::create("remora-trial", parts::MOMENT_SINK, Pages::Small).map(Arc::new);
        let sink = sink.map_err(|error| Failure::local(format!("no memory to try the transports with: {error}")))?;
        let (mut peer, transport, why) = way.try_out(keys, is_sealed, &sink)?;
        let rate = parts::in_a_moment(&mut *peer, region);
        let protection = way.protection(transport, is_sealed);
        Ok(Reading { transport, why, protection, rate })
    });
    // What the source does not offer, it will not offer in a moment.
    reading.await.map_err(|failure| {
        let passes = is_offered && failure.code == Code::Source;
        failure.that_passes(passes)
    })
}

/// Looks at the transports for a run with these options. A dry run tries and measures all. A sync with `--transport
/// shm` or `verbs` is told what this host or the source lacks, and connects to the tables themselves: memory to try it
/// with would be memory of the source beyond its `--memory`. `way`: of the conversation that `plan` comes from.
///
/// # Errors
/// As [`try_out`].
pub(super) async fn of_a_run(
    options: &Options,
    credentials: &Credentials,
    plan: &Offer,
    way: &Way,
    patience: &mut Patience,
) -> Result<Option<Reading>, Failure> {
    let (read, is_sealed) = (&options.read, plan.terms.as_ref().is_some_and(|terms| terms.sealed));
    if options.dry_run {
        return patience.keep_trying(async || try_out(read, credentials, is_sealed).await).await.map(Some);
    }
    let kind = match read.transport {
        TransportChoice::Shm => TransportKind::Shm,
        TransportChoice::Verbs => TransportKind::Verbs,
        _ => return Ok(None),
    };
    refuse_what_this_host_lacks(read, way, is_sealed)?;
    let is_offered = plan.terms.as_ref().is_none_or(|terms| match kind {
        TransportKind::Shm => terms.offers_shm,
        _ => terms.offers_verbs,
    });
    match is_offered {
        true => Ok(None),
        false => Err(Failure::new(Code::Source, format!("{}: {kind}: {}", unreadable(read), not_offered(kind)))),
    }
}

fn refuse_what_this_host_lacks(options: &ReadOptions, way: &Way, is_sealed: bool) -> Result<(), Failure> {
    match way.why_none(is_sealed) {
        Some(why) => Err(Failure::refused(format!("{}: {why}", unreadable(options)))),
        None => Ok(()),
    }
}

fn unreadable(options: &ReadOptions) -> String {
    format!("the source {} cannot be read as --transport asks", options.source)
}

// Way: by which way `--delivery auto` delivers, and why.

/// Why a delivery by the link would be refused or undone; `None` if nothing speaks against it.
///
/// # Errors
/// The server or the Sentinels do not answer.
pub(super) async fn why_not_by_the_link(options: &Options) -> Result<Option<String>, Failure> {
    let server = options.server.open(Task::Replica)?;
    let facts = Facts::read(&mut server.connect().await?).await?;
    if facts.cluster_enabled == Some(true) {
        return Ok(Some("the server runs in cluster mode, where servers refuse REPLICAOF".to_owned()));
    }
    let Some(sentinels) = options.sentinels.clone() else { return Ok(None) };
    let known = sentinel::known(&sentinels, &facts, server.url()).await?;
    Ok(known.map(|_| {
        format!("Sentinel knows the server as a replica of {}, and makes it follow its primary again", sentinels.name())
    }))
}

// Estimate: how long a sync will take, as far as that is known before it. Pure.
//
// `remora replica --dry-run` and `remora plan` use it. It is for people: what they do next depends on whether a sync
// takes seconds, minutes or hours.

/// Bytes of a snapshot that a server saves, or loads, in a second: what one processor does with values of some hundred
/// bytes. Long values are several times faster, and tiny ones slower.
pub const SERVER_RATE: u64 = 200 << 20;

/// Seconds of writes that a primary's backlog should hold: a hand-off takes less than one.
pub const BACKLOG_SECONDS: u64 = 10;

/// The time from the last byte to the end: the server follows its primary at the next turn of its clock, and the agent
/// looks for that.
const HAND_OFF: Duration = Duration::from_secs(1);

/// What a sync waits for, and how fast it is then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Course {
    /// Bytes of the snapshot.
    pub snapshot_bytes: u64,
    /// How long the primary waits before it forks; zero if there is a snapshot.
    pub delay: Duration,
    /// Bytes per second of the way to the source, or of the slowest part of it that is known.
    pub rate: Option<u64>,
}

/// The times of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    /// Until the primary forks.
    pub delay_seconds: f64,
    /// For the snapshot: saved, read and loaded at the same time.
    pub copy_seconds: f64,
    /// For the hand-off.
    pub hand_off_seconds: f64,
}

impl Course {
    /// The times of such a sync.
    pub fn times(&self) -> Times {
        let rate = self.rate.map_or(SERVER_RATE, |rate| rate.clamp(1, SERVER_RATE));
        Times {
            delay_seconds: self.delay.as_secs_f64(),
            copy_seconds: self.snapshot_bytes as f64 / rate as f64,
            hand_off_seconds: HAND_OFF.as_secs_f64(),
        }
    }

    /// Whether the servers are slower than the way to the source.
    pub fn is_bound_by_servers(&self) -> bool {
        self.rate.is_none_or(|rate| rate >= SERVER_RATE)
    }
}

impl Times {
    /// All of them together.
    pub fn total(&self) -> Duration {
        let seconds = self.delay_seconds + self.copy_seconds + self.hand_off_seconds;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_server_whose_limit_is_below_the_data_is_refused_whatever_its_policy() {
        let url: ServerUrl = "redis://h:1".parse().unwrap();
        let facts = Facts { used_memory: Some(3 << 20), used_memory_dataset: Some(1 << 20), ..Facts::default() };
        let refused = |limit: Option<u64>, policy: &str, data| {
            let own = OwnChanges { limit: limit.map(|bytes| (bytes, policy.to_owned())), is_writable: false };
            refuse_too_little_memory(&own, &facts, data, &url).err().map(|failure| failure.message)
        };
        let lru = refused(Some(10 << 20), "allkeys-lru", Some(9 << 20)).unwrap();
        assert!(lru.contains("removes keys by itself") && lru.contains("replica-ignore-maxmemory yes"), "{lru}");
        assert!(refused(Some(10 << 20), "noeviction", Some(9 << 20)).unwrap().contains("refuses its primary's writes"));
        assert_eq!(refused(Some(10 << 20), "allkeys-lru", Some(7 << 20)), None);
        assert_eq!(refused(Some(10 << 20), "allkeys-lru", None), None);
        assert_eq!(refused(None, "allkeys-lru", Some(9 << 30)), None);
    }

    #[test]
    fn the_slower_of_the_way_and_the_servers_counts() {
        let course = |rate| Course { snapshot_bytes: 1 << 30, delay: Duration::from_secs(5), rate };
        let slow = course(Some(100 << 20)).times();
        assert_eq!((slow.delay_seconds, slow.copy_seconds), (5.0, 10.24));
        assert_eq!(slow.total(), Duration::from_millis(16_240));
        let fast = course(Some(10 << 30));
        assert!(fast.is_bound_by_servers() && !course(Some(1)).is_bound_by_servers());
        assert_eq!(fast.times(), course(None).times());
        assert!(course(Some(0)).times().total() > Duration::from_secs(1 << 29), "and no division by zero");
    }
}
