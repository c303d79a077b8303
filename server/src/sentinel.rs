//! Sentinels: the processes that watch a primary with its replicas, and promote a replica when the primary fails.
//!
//! ```text
//!   the list, a name ──new()──▶ Sentinels ── primary() ──▶ where the primary is now, as Sentinel writes it
//!                               │        ── replicas() ─▶ what Sentinel knows of each replica
//!                               │        ── group() ────▶ its times and flags
//!                               └─ asks the listed Sentinels one after another, each for a bounded time; where the primary
//!                                  is, all of them, since some may not have heard of a fail-over yet
//! ```
//!
//! What a Sentinel answers comes from another process and is checked before it is used: it is read without I/O. Then
//! come the choice of the replica beside which a source sits, and whether Sentinel would take a replica back in the
//! middle of a sync.
//!
//! Sentinel compares addresses as texts. So an address goes to a server exactly as Sentinel writes it, and is never
//! resolved on the way.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{Facts, HostPort, RefusalKind, Role, Server, ServerError, ServerUrl};
use remora_base::units::{Size, readable};
use remora_redis::resp::Frame;

/// How long one Sentinel may take for one question, with the connection. Sentinels answer within milliseconds; one that
/// does not is overloaded or cut off, and the next one is asked.
const ASK_LIMIT: Duration = Duration::from_secs(2);

/// How long the others may take when one has said where the primary is. Sentinels answer within milliseconds, and one
/// that is cut off must not hold up each question.
const OTHERS_LIMIT: Duration = Duration::from_millis(300);

/// The most Sentinels in the list: a question to all of them in turn takes a minute at most.
pub const MOST_SENTINELS: usize = 32;

/// The Sentinels of one group. It is cheap to clone.
#[derive(Clone)]
pub struct Sentinels(Arc<Inner>);

struct Inner {
    /// Every Sentinel of the list, with its login.
    servers: Vec<Server>,
    /// The name of the group there.
    name: String,
    /// The one to ask first: that which answered last, or the one behind those that did not.
    first: AtomicUsize,
}

/// Why no Sentinel answered a question.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct SentinelError {
    text: String,
    /// Whether the Sentinels may answer later by themselves.
    passes: bool,
}

impl Sentinels {
    /// The Sentinels of the group of this name, each with its login. It sends nothing.
    pub fn new(servers: Vec<Server>, name: String) -> Sentinels {
        Sentinels(Arc::new(Inner { servers, name, first: AtomicUsize::new(0) }))
    }

    /// The name of the group.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Where the primary is now, exactly as Sentinel writes it. All Sentinels are asked, and of those that answer in
    /// time the one with the latest configuration counts.
    pub async fn primary(&self) -> Result<HostPort, SentinelError> {
        let mut asked = JoinSet::new();
        for (at, server) in self.0.servers.iter().cloned().enumerate() {
            let name = self.0.name.clone();
            asked.spawn(async move {
                let told = tokio::time::timeout(ASK_LIMIT, told_by(&server, &name)).await;
                (at, told.unwrap_or_else(|_| Err(Cause::late(&server))))
            });
        }
        let (mut told, mut causes) = (Vec::new(), Vec::new());
        let mut until = Instant::now() + ASK_LIMIT * 2; // each has a limit of its own
        while let Ok(Some(answered)) = tokio::time::timeout_at(until, asked.join_next()).await {
            match answered {
                Ok((at, Ok(answer))) => {
                    until = until.min(Instant::now() + OTHERS_LIMIT);
                    told.push((at, answer));
                }
                Ok((at, Err(cause))) => causes.push((at, cause)),
                Err(error) => tracing::debug!(%error, "a Sentinel was not asked"),
            }
        }
        match latest(&told) {
            Some((at, address)) => {
                self.0.first.store(at, Ordering::Relaxed);
                Ok(address)
            }
            None => {
                causes.sort_by_key(|(at, _)| *at);
                Err(self.unanswered(causes.into_iter().map(|(_, cause)| cause).collect()))
            }
        }
    }

    /// The replicas that Sentinel knows.
    pub async fn replicas(&self) -> Result<Vec<KnownReplica>, SentinelError> {
        self.ask(&["SENTINEL", "REPLICAS", &self.0.name], replicas).await
    }

    /// The group's times and flags.
    pub async fn group(&self) -> Result<Group, SentinelError> {
        self.ask(&["SENTINEL", "MASTER", &self.0.name], group).await
    }

    /// All Sentinels of the list.
    pub fn each(&self) -> &[Server] {
        &self.0.servers
    }

    /// The group as this Sentinel sees it.
    pub async fn group_at(&self, server: &Server) -> Result<Group, SentinelError> {
        let answer = self.order(server, &["SENTINEL", "MASTER", &self.0.name]).await?;
        let read = group(&answer).and_then(|group| group.ok_or_else(|| "it knows no such primary".to_owned()));
        read.map_err(|what| self.failed(server, &what, false))
    }

    /// The replicas that this Sentinel knows.
    pub async fn replicas_at(&self, server: &Server) -> Result<Vec<KnownReplica>, SentinelError> {
        let answer = self.order(server, &["SENTINEL", "REPLICAS", &self.0.name]).await?;
        let read = replicas(&answer).map(Option::unwrap_or_default);
        read.map_err(|what| self.failed(server, &what, false))
    }

    /// Has this Sentinel begin a fail-over, without the consent of the others.
    pub async fn fail_over(&self, server: &Server) -> Result<(), SentinelError> {
        self.order(server, &["SENTINEL", "FAILOVER", &self.0.name]).await.map(drop)
    }

    /// Sets `failover-timeout` at this Sentinel, which writes it to its configuration file.
    pub async fn set_failover_timeout(&self, server: &Server, millis: u64) -> Result<(), SentinelError> {
        let order = ["SENTINEL", "SET", &self.0.name, "failover-timeout", &millis.to_string()];
        self.order(server, &order).await.map(drop)
    }

    async fn order(&self, server: &Server, order: &[&str]) -> Result<Frame, SentinelError> {
        match tokio::time::timeout(ASK_LIMIT, ask_one(server, order)).await {
            Ok(answer) => answer.map_err(|error| self.failed(server, &error.to_string(), error.is_passing())),
            Err(_) => Err(self.failed(server, &format!("no answer within {} s", ASK_LIMIT.as_secs()), true)),
        }
    }

    fn failed(&self, server: &Server, what: &str, passes: bool) -> SentinelError {
        let text = format!("the Sentinel {} of {}: {what}", server.url(), self.0.name);
        SentinelError { text, passes }
    }

    /// Asks one Sentinel after another, and returns the first answer that can be read.
    async fn ask<T>(
        &self,
        question: &[&str],
        read: impl Fn(&Frame) -> Result<Option<T>, String>,
    ) -> Result<T, SentinelError> {
        let Inner { servers, name, first } = &*self.0;
        let begin = first.load(Ordering::Relaxed);
        let mut causes = Vec::new();
        for at in (0..servers.len()).map(|turn| (begin + turn) % servers.len()) {
            let server = &servers[at];
            // The caller may give up before this one's time is over, and asks the next one first then.
            first.store((at + 1) % servers.len(), Ordering::Relaxed);
            let asked = async {
                let answer = ask_one(server, question).await.map_err(|error| Cause::of(server, name, &error))?;
                Cause::read(server, name, question, &answer, &read)
            };
            match tokio::time::timeout(ASK_LIMIT, asked).await.unwrap_or_else(|_| Err(Cause::late(server))) {
                Ok(answer) => {
                    first.store(at, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(cause) => causes.push(cause),
            }
        }
        Err(self.unanswered(causes))
    }

    /// None of them has answered.
    fn unanswered(&self, causes: Vec<Cause>) -> SentinelError {
        let is_unknown = causes.iter().any(|cause| cause.is_unknown);
        let passes = causes.is_empty() || causes.iter().any(|cause| cause.passes);
        let what = if is_unknown { "correct --sentinel-name" } else { "check --sentinel" };
        let texts: Vec<String> = causes.into_iter().map(|cause| cause.text).collect();
        let text = format!("no Sentinel says where the primary {} is ({}); {what}", self.0.name, texts.join("; "));
        SentinelError { text, passes }
    }
}

/// Why one Sentinel has not answered a question.
struct Cause {
    text: String,
    /// It does not know the group.
    is_unknown: bool,
    /// It may answer later.
    passes: bool,
}

impl Cause {
    fn of(server: &Server, name: &str, error: &ServerError) -> Cause {
        if says_no_such_primary(error) {
            Cause::unknown(server, name)
        } else {
            Cause::other(error.to_string(), error.is_passing())
        }
    }

    fn unknown(server: &Server, name: &str) -> Cause {
        // A Sentinel that has just started may be given the group later (SENTINEL MONITOR).
        let text = format!("{} knows no primary named {name}", server.url());
        Cause { is_unknown: true, ..Cause::other(text, true) }
    }

    fn late(server: &Server) -> Cause {
        Cause::other(format!("{} has not answered within {} s", server.url(), ASK_LIMIT.as_secs()), true)
    }

    fn other(text: String, passes: bool) -> Cause {
        tracing::debug!(cause = %text, "a Sentinel did not answer");
        Cause { text, is_unknown: false, passes }
    }

    /// Reads an answer.
    fn read<T>(
        server: &Server,
        name: &str,
        question: &[&str],
        answer: &Frame,
        read: impl Fn(&Frame) -> Result<Option<T>, String>,
    ) -> Result<T, Cause> {
        match read(answer) {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(Cause::unknown(server, name)),
            Err(what) => {
                Err(Cause::other(format!("{} answered SENTINEL {}: {what}", server.url(), question[1]), false))
            }
        }
    }
}

/// Asks one Sentinel where the primary is, and how new that is.
async fn told_by(server: &Server, name: &str) -> Result<Told, Cause> {
    let failed = |error: ServerError| Cause::of(server, name, &error);
    let where_is = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", name];
    let group = ["SENTINEL", "MASTER", name];
    let mut client = server.connect().await.map_err(failed)?;
    let answer = client.command(&where_is).await.map_err(failed)?;
    let mut address = Cause::read(server, name, &where_is, &answer, read_address)?;
    loop {
        let epoch = match client.command(&group).await {
            Ok(answer) => Some(Cause::read(server, name, &group, &answer, read_epoch)?),
            // Its user may not ask that, and the address is as good as ever.
            Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => None,
            Err(error) => return Err(failed(error)),
        };
        let answer = client.command(&where_is).await.map_err(failed)?;
        let again = Cause::read(server, name, &where_is, &answer, read_address)?;
        if again == address {
            return Ok(Told { address, epoch });
        }
        // A fail-over has come between: the epoch may belong to either address.
        address = again;
    }
}

/// Prints the addresses only.
impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels").field("name", &self.0.name).field("servers", &self.0.servers).finish()
    }
}

impl SentinelError {
    /// Whether the Sentinels may answer later by themselves.
    pub fn is_passing(&self) -> bool {
        self.passes
    }
}

async fn ask_one(server: &Server, question: &[&str]) -> Result<Frame, ServerError> {
    server.connect().await?.command(question).await
}

/// `SENTINEL MASTER` and `SENTINEL REPLICAS` answer so about a name that they do not know.
fn says_no_such_primary(error: &ServerError) -> bool {
    matches!(error, ServerError::Refused { text, .. } if text.contains("No such master") || text.contains("No such primary"))
}

// Answers of a Sentinel, read without I/O. What is not as Sentinel documents it is an error, and never guessed.

/// The longest host: that of a name in DNS.
const HOST_CHARS: usize = 253;

/// What Sentinel says about a primary and its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The time after which a Sentinel makes a replica that follows another server follow the primary again, and after
    /// which a fail-over is tried again.
    pub failover_timeout: Duration,
    /// How many other Sentinels this one knows.
    pub others: u64,
}

/// What Sentinel knows of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownReplica {
    /// Where it is. `None` where Sentinel has no address that a server can have, such as port 0 of a source.
    pub address: Option<HostPort>,
    /// The server's run. Empty until Sentinel has asked the server.
    pub run_id: String,
    /// `slave`, and `s_down`, `disconnected`, …
    pub flags: String,
    /// Its `replica-priority`: of several replicas, one with the lowest is promoted, and none with 0.
    pub priority: u64,
}

/// Reads `SENTINEL GET-MASTER-ADDR-BY-NAME`. `None`: Sentinel does not know the name.
fn read_address(answer: &Frame) -> Result<Option<HostPort>, String> {
    match answer {
        Frame::Null => Ok(None),
        Frame::Array(pair) => match pair.as_slice() {
            [host, port] => host_and_port(text(host)?, text(port)?).map(Some),
            _ => Err(format!("an array of {} elements is not an address", pair.len())),
        },
        other => Err(not_a("an address", other)),
    }
}

/// Reads the epoch of the configuration that a Sentinel has, out of `SENTINEL MASTER`. Each fail-over has a higher one.
fn read_epoch(answer: &Frame) -> Result<Option<u64>, String> {
    Fields::of(answer)?.number("config-epoch").map(Some)
}

/// Reads `SENTINEL MASTER`.
fn group(answer: &Frame) -> Result<Option<Group>, String> {
    let fields = Fields::of(answer)?;
    Ok(Some(Group {
        failover_timeout: Duration::from_millis(fields.number("failover-timeout")?),
        others: fields.number("num-other-sentinels")?,
    }))
}

/// Reads `SENTINEL REPLICAS`.
fn replicas(answer: &Frame) -> Result<Option<Vec<KnownReplica>>, String> {
    let Frame::Array(list) = answer else { return Err(not_a("a list of replicas", answer)) };
    let replica = |entry| {
        let fields = Fields::of(entry)?;
        let address = host_and_port(fields.get("ip")?, fields.get("port")?).ok();
        let priority = fields.number("slave-priority")?;
        Ok(KnownReplica {
            address,
            run_id: fields.get("runid")?.to_owned(),
            flags: fields.get("flags")?.to_owned(),
            priority,
        })
    };
    list.iter().map(replica).collect::<Result<_, String>>().map(Some)
}

/// Names and values in turn.
struct Fields<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Fields<'a> {
    fn of(answer: &'a Frame) -> Result<Fields<'a>, String> {
        let Frame::Array(items) = answer else { return Err(not_a("a list of fields", answer)) };
        let pair = |pair: &'a [Frame]| match pair {
            [name, value] => Ok((text(name)?, text(value)?)),
            _ => Err("a field has no value".to_owned()),
        };
        items.chunks(2).map(pair).collect::<Result<_, String>>().map(Fields)
    }

    fn get(&self, name: &str) -> Result<&'a str, String> {
        let field = self.0.iter().find(|(field, _)| *field == name);
        field.map(|(_, value)| *value).ok_or_else(|| format!("there is no field {name}"))
    }

    fn number(&self, name: &str) -> Result<u64, String> {
        let value = self.get(name)?;
        value.parse().map_err(|_| format!("the field {name} is not a number: {value:?}"))
    }
}

fn text(frame: &Frame) -> Result<&str, String> {
    match frame {
        Frame::Bulk(bytes) | Frame::Simple(bytes) => {
            std::str::from_utf8(bytes).map_err(|_| "a text is not UTF-8".to_owned())
        }
        other => Err(not_a("a text", other)),
    }
}

/// Checks an address, and keeps its host as it is.
fn host_and_port(host: &str, port: &str) -> Result<HostPort, String> {
    let wrong = || format!("{host:?}, port {port:?}, is not the address of a server");
    if host.len() > HOST_CHARS {
        return Err(format!("a host of {} characters", host.len()));
    }
    let shown = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let read: HostPort = shown.parse().map_err(|_| wrong())?;
    if read.host == host { Ok(read) } else { Err(wrong()) }
}

fn not_a(what: &str, frame: &Frame) -> String {
    let found = match frame {
        Frame::Simple(_) | Frame::Bulk(_) => "a text",
        Frame::Error(_) => "an error",
        Frame::Integer(_) => "a number",
        Frame::Null => "a null reply",
        Frame::Array(_) => "a list",
    };
    format!("{found} is not {what}")
}

/// What a Sentinel says about the primary.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    address: HostPort,
    /// The epoch of its configuration. `None` where the user may not ask for it.
    epoch: Option<u64>,
}

/// The address in the latest configuration, and the place in the list of the Sentinel that has named it: of several
/// with the same configuration, the first in the list.
///
/// A Sentinel that was cut off, or has just started, names the primary of before a fail-over until another Sentinel
/// tells it. Each fail-over has a higher configuration epoch than the one before, and a majority of the Sentinels
/// agrees on it: the Sentinels themselves follow the highest that they hear of.
fn latest(told: &[(usize, Told)]) -> Option<(usize, HostPort)> {
    let (at, latest) = told.iter().max_by_key(|(at, told)| (told.epoch, std::cmp::Reverse(*at)))?;
    let late = told.iter().filter(|(_, told)| told.address != latest.address).count();
    if late > 0 {
        tracing::info!(primary = %latest.address, late, "the Sentinels disagree; the latest configuration counts");
    }
    Some((*at, latest.address.clone()))
}

// Choice: the replica of a group beside which a source sits.

/// How long a server may take to say how it stands. One that needs longer is not one to take a snapshot of.
pub const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// Replicas that are asked at a time: more than a group has in practice.
const MOST_ASKED: usize = 32;

/// A server of the group, and what it says of itself.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Where Sentinel says it is.
    pub address: HostPort,
    /// The same with a login.
    pub server: Server,
    /// What it says of itself.
    pub facts: Facts,
}

/// Asks the replicas that Sentinel reaches, all at once, and returns the one with the least lag.
///
/// # Errors
/// No Sentinel answers, or no replica is up and in step.
pub async fn least_behind(sentinels: &Sentinels, like: &Server) -> Result<Candidate, SentinelError> {
    let known = sentinels.replicas().await?;
    let mut asked = JoinSet::new();
    let mut causes = Vec::new();
    for KnownReplica { address, flags, .. } in known.iter().filter(|replica| replica.address.is_some()).take(MOST_ASKED)
    {
        let Some(address) = address.clone() else { continue };
        // Sentinel's flags are some seconds old: they are for the message, and the server itself is asked.
        let (server, flags) = (like.at(&address.host, address.port), flags.clone());
        asked.spawn(async move {
            let facts = look(&server).await;
            (address, server, flags, facts)
        });
    }
    let mut candidates = Vec::new();
    while let Some(answered) = asked.join_next().await {
        let Ok((address, server, flags, facts)) = answered else { continue };
        match facts.map_err(|error| error.to_string()).and_then(|facts| suits(&facts).map(|offset| (offset, facts))) {
            Ok((offset, facts)) => candidates.push((offset, Candidate { address, server, facts })),
            Err(why) => causes.push(format!("{address} ({flags}): {why}")),
        }
    }
    let best = candidates.into_iter().max_by_key(|(offset, candidate)| (*offset, candidate.address.to_string()));
    best.map(|(_, candidate)| candidate).ok_or_else(|| {
        let why = if causes.is_empty() { "Sentinel knows none that listens".to_owned() } else { causes.join("; ") };
        let text = format!(
            "the group {} has no replica that is up and in step ({why}); repair one, or give --from primary",
            sentinels.name()
        );
        SentinelError { text, passes: true }
    })
}

/// Asks a server how it stands, within [`LOOK_LIMIT`].
pub async fn look(server: &Server) -> Result<Facts, ServerError> {
    let asked = async { Facts::read(&mut server.connect().await?).await };
    match tokio::time::timeout(LOOK_LIMIT, asked).await {
        Ok(answer) => answer,
        Err(_) => {
            Err(ServerError::TimedOut { server: server.url().to_string(), command: "INFO".into(), limit: LOOK_LIMIT })
        }
    }
}

/// The offset of a replica beside which a source can sit. The error says why it cannot.
pub fn suits(facts: &Facts) -> Result<u64, String> {
    let link = match (facts.role, &facts.link) {
        (Some(Role::Replica), Some(link)) => link,
        _ => return Err("it is not a replica".to_owned()),
    };
    match facts.offset {
        _ if facts.loading != Some(false) => Err("it is loading its data set".to_owned()),
        _ if link.syncing == Some(true) => Err("it is taking a full copy".to_owned()),
        _ if link.up != Some(true) => Err(format!("its link to {}:{} is down", link.host, link.port)),
        Some(offset) => Ok(offset),
        None => Err("it does not say its offset".to_owned()),
    }
}

// Guard: whether Sentinel would take a replica back in the middle of its sync.
//
// A Sentinel that knows a replica makes it follow the primary again when the replica has shown another one, such as
// our link, for `failover-timeout` (`+fix-slave-config` in the servers' sentinel.c). It makes a replica that follows
// none follow the primary within seconds (`+convert-to-slave`). A server that no Sentinel knows is left alone:
// Sentinel finds replicas in the primary's `INFO`, and a new one is there after the hand-off only.

/// Data per second that a sync surely takes: a fifth to a tenth of what was measured, since the values may be small and
/// the machine busy.
const SURE_RATE: u64 = 32 << 20;

/// The part of `failover-timeout` that a sync may take: Sentinels see the server's change some seconds late, and their
/// clocks are not ours.
const PART: f64 = 0.8;

/// What stands in the way of a sync of a server that Sentinel knows.
pub struct Known {
    /// The group.
    pub group: Group,
}

/// Whether the Sentinels know this server as a replica.
pub async fn known(sentinels: &Sentinels, facts: &Facts, url: &ServerUrl) -> Result<Option<Known>, SentinelError> {
    let replicas = sentinels.replicas().await?;
    match replicas.iter().any(|replica| is_it(replica, facts, url)) {
        true => Ok(Some(Known { group: sentinels.group().await? })),
        false => Ok(None),
    }
}

/// Whether Sentinel means this server by that replica.
pub fn is_it(replica: &KnownReplica, facts: &Facts, url: &ServerUrl) -> bool {
    let is_same_run = !replica.run_id.is_empty() && facts.run_id.as_deref() == Some(replica.run_id.as_str());
    let at = replica.address.as_ref().map(|at| (at.host.as_str(), at.port));
    is_same_run || (at.is_some() && at == url.host_and_port())
}

/// How long a sync of this much data by our link takes at most, if the agent reads at most `limit` bytes per second.
pub fn longest(data: u64, limit: Option<Size>) -> Duration {
    let rate = limit.map_or(SURE_RATE, |limit| limit.get().clamp(1, SURE_RATE));
    Duration::from_secs(data / rate + 1)
}

impl Known {
    /// Whether Sentinel would take the server back before a sync of this length ends.
    pub fn is_too_late(&self, longest: Duration) -> bool {
        longest > self.group.failover_timeout.mul_f64(PART)
    }

    /// The `failover-timeout` with which a sync of this length is not taken back.
    pub fn timeout_for(&self, longest: Duration) -> Duration {
        longest.div_f64(PART).max(self.group.failover_timeout) + Duration::from_secs(1)
    }

    /// Why the server is refused.
    pub fn refusal(&self, name: &str, data: u64, longest: Duration) -> String {
        format!(
            "Sentinel knows it as a replica of {name}, and makes it follow the primary again after failover-timeout ({}), while a \
             sync of {} by the link may take {}: let remora attend intercept its connections, which changes nothing that \
             Sentinel sees; or give --extend-failover-timeout; or raise the time by SENTINEL SET {name} failover-timeout {} at \
             every Sentinel",
            readable(self.group.failover_timeout),
            Size::bytes(data),
            readable(longest),
            self.timeout_for(longest).as_millis()
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::{Credentials, Link, ServerUrl, Task, TlsOptions};
    use remora_redis::resp::{Decoder, Limits};

    /// A Sentinel that answers PING, and each other command with these bytes; `None`: it says nothing to that.
    async fn sentinel(answer: Option<&'static [u8]>) -> Server {
        answering(move |_| answer.map(<[u8]>::to_vec)).await
    }

    /// A Sentinel that answers PING, and each other command as this says.
    async fn answering(answer: impl Fn(&[u8]) -> Option<Vec<u8>> + Clone + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = ServerUrl::tcp("127.0.0.1", listener.local_addr().unwrap().port());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let answer = answer.clone();
                tokio::spawn(async move {
                    let mut bytes = [0; 4096];
                    while let Ok(n) = stream.read(&mut bytes).await {
                        let is_ping = bytes[..n].ends_with(b"PING\r\n");
                        let answer = if is_ping { Some(b"+PONG\r\n".to_vec()) } else { answer(&bytes[..n]) };
                        match answer {
                            _ if n == 0 => return,
                            Some(answer) => stream.write_all(&answer).await.unwrap(),
                            None => {}
                        }
                    }
                });
            }
        });
        Server::new(url, Credentials::default(), &TlsOptions::default(), Task::Sentinel).unwrap()
    }

    /// A port where nothing listens.
    async fn nothing() -> Server {
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let url = ServerUrl::tcp("127.0.0.1", port);
        Server::new(url, Credentials::default(), &TlsOptions::default(), Task::Sentinel).unwrap()
    }

    /// A Sentinel that names a primary at this port, in the configuration of this epoch; without one it does not say.
    async fn naming(port: u16, epoch: Option<u64>) -> Server {
        let address = format!("*2\r\n$7\r\nfd00::1\r\n$4\r\n{port:04}\r\n");
        let group = match epoch {
            Some(epoch) => format!("*2\r\n$12\r\nconfig-epoch\r\n${}\r\n{epoch}\r\n", epoch.to_string().len()),
            None => "-NOPERM this user has no permissions\r\n".to_owned(),
        };
        answering(move |command| {
            let is_address = command.windows(4).any(|word| word == b"ADDR");
            Some(if is_address { address.clone() } else { group.clone() }.into_bytes())
        })
        .await
    }

    #[tokio::test]
    async fn the_sentinel_with_the_latest_configuration_says_where_the_primary_is() {
        let port = |sentinels: Sentinels| async move { sentinels.primary().await.unwrap().port };
        let all = |list: Vec<Server>| Sentinels::new(list, "mymaster".into());
        let (old, new, unsure) = (naming(6379, Some(9)).await, naming(6380, Some(10)).await, naming(6381, None).await);
        assert_eq!(port(all(vec![old.clone(), new.clone(), unsure.clone()])).await, 6380);
        assert_eq!(port(all(vec![unsure.clone(), new.clone(), old.clone()])).await, 6380);
        assert_eq!(port(all(vec![unsure.clone(), old.clone()])).await, 6379);
        assert_eq!(port(all(vec![nothing().await, unsure])).await, 6381, "it is better than nothing");
        // One that says nothing holds the question up for a moment, and not for its whole time.
        let began = std::time::Instant::now();
        assert_eq!(port(all(vec![sentinel(None).await, old, new])).await, 6380);
        assert!(began.elapsed() < ASK_LIMIT, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn the_next_one_is_asked_where_one_is_gone_or_silent_or_talks_nonsense_and_the_one_that_answered_first() {
        let list = vec![
            nothing().await,
            sentinel(None).await,
            sentinel(Some(b"*2\r\n$1\r\n \r\n$1\r\n0\r\n")).await,
            sentinel(Some(b"-ERR unknown command\r\n")).await,
            sentinel(Some(b"*-1\r\n")).await,
            sentinel(Some(b"*0\r\n")).await,
        ];
        let sentinels = Sentinels::new(list, "mymaster".into());
        let began = std::time::Instant::now();
        assert!(sentinels.replicas().await.unwrap().is_empty());
        assert!(began.elapsed() >= ASK_LIMIT);
        let began = std::time::Instant::now();
        sentinels.replicas().await.unwrap();
        assert!(began.elapsed() < ASK_LIMIT, "the one that answered is asked first");
    }

    #[tokio::test]
    async fn a_caller_with_less_time_reaches_the_next_one_in_the_end() {
        let list = vec![sentinel(None).await, sentinel(None).await, sentinel(Some(b"*0\r\n")).await];
        let sentinels = Sentinels::new(list, "mymaster".into());
        for is_answered in [false, false, true] {
            let asked = tokio::time::timeout(ASK_LIMIT / 4, sentinels.replicas()).await;
            assert_eq!(asked.is_ok(), is_answered);
        }
    }

    #[tokio::test]
    async fn an_error_names_each_sentinel_and_what_it_said() {
        let (gone, other) = (nothing().await, sentinel(Some(b"-ERR No such master with that name\r\n")).await);
        let sentinels = Sentinels::new(vec![gone.clone(), other.clone()], "nope".into());
        let error = sentinels.group().await.unwrap_err();
        let text = error.to_string();
        for word in [gone.url().to_string(), other.url().to_string(), "nope".into(), "--sentinel-name".into()] {
            assert!(text.contains(&word), "{text}");
        }
        assert!(error.is_passing(), "it may be given the group later");
        let error = Sentinels::new(vec![gone], "mymaster".into()).primary().await.unwrap_err();
        assert!(error.to_string().contains("check --sentinel"), "{error}");
    }

    #[tokio::test]
    async fn an_answer_without_end_is_refused_before_it_fills_the_memory() {
        let huge: &'static [u8] = Box::leak(b"*1000000\r\n".repeat(100).into_boxed_slice());
        let long: &'static [u8] = Box::leak([b"*2\r\n$1000000\r\n".to_vec(), vec![b'x'; 100_000]].concat().into());
        for answer in [huge, long] {
            let sentinels = Sentinels::new(vec![sentinel(Some(answer)).await], "mymaster".into());
            let text = sentinels.replicas().await.unwrap_err().to_string();
            assert!(text.contains("is not a Redis or Valkey server"), "{text}");
        }
    }

    fn bulk(text: &str) -> Frame {
        Frame::Bulk(text.as_bytes().to_vec())
    }

    fn list(words: &[&str]) -> Frame {
        Frame::Array(words.iter().map(|word| bulk(word)).collect())
    }

    #[test]
    fn an_address_stays_as_sentinel_writes_it() {
        for host in ["10.0.0.1", "fd00::1", "FD00:0::1", "db-1.example.net", "DB1"] {
            let read = read_address(&list(&[host, "6379"])).unwrap().unwrap();
            assert_eq!((read.host.as_str(), read.port), (host, 6379));
        }
        assert_eq!(read_address(&Frame::Null), Ok(None));
    }

    #[test]
    fn what_is_not_an_address_is_an_error() {
        let long = "a".repeat(300);
        for (host, port) in [
            ("", "6379"),
            ("10.0.0.1", "0"),
            ("10.0.0.1", "65536"),
            ("10.0.0.1", "+1"),
            ("a b", "1"),
            ("a\r\nREPLICAOF", "1"),
            ("[::1]", "1"),
            ("user@db1", "1"),
            ("::1/0", "1"),
            (long.as_str(), "1"),
        ] {
            assert!(read_address(&list(&[host, port])).is_err(), "{host} {port}");
        }
        for other in [list(&["h"]), list(&["h", "1", "2"]), Frame::Integer(1), bulk("h:1"), Frame::Array(vec![])] {
            assert!(read_address(&other).is_err(), "{other:?}");
        }
        assert!(read_address(&Frame::Array(vec![Frame::Bulk(vec![0xff]), bulk("1")])).is_err());
    }

    #[test]
    fn a_group_and_its_replicas_are_read_by_the_names_of_their_fields() {
        let fields = ["name", "m", "flags", "master,s_down", "config-epoch", "7", "num-other-sentinels", "2"];
        let read = group(&list(&[&fields[..], &["failover-timeout", "180000"]].concat())).unwrap().unwrap();
        assert_eq!(read.failover_timeout, Duration::from_secs(180));
        assert_eq!(read.others, 2);
        assert_eq!(read_epoch(&list(&fields)), Ok(Some(7)));
        assert!(read_epoch(&list(&["config-epoch", "-1"])).is_err() && read_epoch(&list(&fields[..4])).is_err());
        assert!(group(&list(&fields)).unwrap_err().contains("failover-timeout"));
        assert!(group(&list(&["flags"])).is_err() && group(&Frame::Null).is_err());

        let priority = ["slave-priority", "7"];
        let one =
            list(&[&["ip", "10.0.0.2", "port", "6380", "runid", "abc", "flags", "slave"][..], &priority].concat());
        let source = ["ip", "10.0.0.3", "port", "0", "runid", "", "flags", "s_down,slave,disconnected"];
        let source = list(&[&source[..], &priority].concat());
        let read = replicas(&Frame::Array(vec![one, source])).unwrap().unwrap();
        assert_eq!(read[0].address.as_ref().unwrap().to_string(), "10.0.0.2:6380");
        assert_eq!((read[0].run_id.as_str(), read[0].flags.as_str(), read[0].priority), ("abc", "slave", 7));
        assert!(read[1].address.is_none());
    }

    fn told(at: usize, port: u16, epoch: Option<u64>) -> (usize, Told) {
        let address = format!("10.0.0.1:{port}").parse().unwrap();
        (at, Told { address, epoch })
    }

    #[test]
    fn the_highest_epoch_wins_wherever_it_stands_and_whatever_comes_first() {
        let (old, new, unsure) = (told(0, 1, Some(9)), told(1, 2, Some(10)), told(2, 3, None));
        for list in [[&old, &new, &unsure], [&unsure, &new, &old], [&new, &unsure, &old]] {
            let list: Vec<_> = list.into_iter().cloned().collect();
            assert_eq!(latest(&list).unwrap().0, 1);
            assert_eq!(latest(&list).unwrap().1.port, 2);
        }
        // Epochs are numbers: the highest is not the one that a text would put last.
        assert_eq!(latest(&[told(0, 1, Some(99)), told(1, 2, Some(100))]).unwrap().0, 1);
    }

    #[test]
    fn of_equal_ones_the_first_in_the_list_counts_and_one_without_an_epoch_last() {
        assert_eq!(latest(&[told(2, 3, Some(4)), told(1, 2, Some(4))]).unwrap().0, 1);
        assert_eq!(latest(&[told(0, 1, None), told(1, 2, Some(0))]).unwrap().0, 1);
        assert_eq!(latest(&[told(1, 2, None), told(0, 1, None)]).unwrap().0, 0);
        assert_eq!(latest(&[]), None);
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::new(Limits::default());
            decoder.feed(&bytes);
            while let Ok(Some(frame)) = decoder.next_frame() {
                let _ = (read_address(&frame), group(&frame), read_epoch(&frame), replicas(&frame));
            }
        }

        #[test]
        fn no_field_makes_it_panic(words in proptest::collection::vec("(flags|ip|port|runid|config-epoch|[a-z0-9]{0,5})", 0..12)) {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let _ = (read_address(&list(&words)), group(&list(&words)), replicas(&Frame::Array(vec![list(&words)])));
        }
    }

    #[test]
    fn a_replica_suits_if_it_is_in_step() {
        let link = Link { host: "p".into(), port: 1, up: Some(true), syncing: Some(false) };
        let good = Facts {
            role: Some(Role::Replica),
            link: Some(link.clone()),
            loading: Some(false),
            offset: Some(7),
            ..Facts::default()
        };
        assert_eq!(suits(&good), Ok(7));
        let with = |change: fn(&mut Facts)| {
            let mut facts = good.clone();
            change(&mut facts);
            suits(&facts).is_err()
        };
        assert!(with(|facts| facts.role = Some(Role::Primary)));
        assert!(with(|facts| facts.link = None));
        assert!(with(|facts| facts.loading = Some(true)));
        assert!(with(|facts| facts.loading = None), "what is not known does not count");
        assert!(with(|facts| facts.offset = None));
        for link in [Link { up: Some(false), ..link.clone() }, Link { syncing: Some(true), ..link }] {
            assert!(suits(&Facts { link: Some(link), ..good.clone() }).is_err());
        }
    }

    fn known(seconds: u64) -> Known {
        Known { group: Group { failover_timeout: Duration::from_secs(seconds), others: 2 } }
    }

    #[test]
    fn a_sync_may_take_four_fifths_of_the_failover_timeout() {
        let size = |seconds: u64| longest(SURE_RATE * seconds, None);
        assert!(!known(180).is_too_late(size(143)) && known(180).is_too_late(size(144)));
        assert!(known(180).is_too_late(longest(1 << 30, Some(Size::mebibytes(4)))), "slower by --download-limit");
        assert_eq!(longest(SURE_RATE, Some(Size::mebibytes(1000))), size(1), "never faster than what is sure");
        let text = known(180).refusal("mymaster", 10 << 30, longest(10 << 30, None));
        for word in ["mymaster", "10 GiB", "remora attend", "--extend-failover-timeout"] {
            assert!(text.contains(word), "{text}");
        }
        let raised = known(180).timeout_for(size(500));
        assert!(size(500) < raised.mul_f64(PART));
    }

    #[test]
    fn a_server_is_known_by_its_run_or_by_its_address() {
        let url = "redis://10.0.0.2:6380".parse().unwrap();
        let facts = Facts { run_id: Some("a".into()), ..Facts::default() };
        let replica = |address: Option<&str>, run_id: &str| KnownReplica {
            address: address.map(|address| address.parse().unwrap()),
            run_id: run_id.into(),
            flags: String::new(),
            priority: 100,
        };
        assert!(is_it(&replica(None, "a"), &facts, &url) && is_it(&replica(Some("10.0.0.2:6380"), ""), &facts, &url));
        assert!(!is_it(&replica(Some("10.0.0.2:6381"), ""), &facts, &url));
        assert!(!is_it(&replica(None, ""), &Facts::default(), &"unix:///s".parse().unwrap()));
    }
}
