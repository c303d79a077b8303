//! Sentinels: the processes that watch a primary with its replicas, and promote a replica when the primary fails.
//!
//! ```text
//!   the list, a name ──new()──▶ Sentinels ── primary() ──▶ where the primary is now, as Sentinel writes it
//!                               │        ── replicas() ─▶ what Sentinel knows of each replica
//!                               │        ── group() ────▶ its times and flags
//!                               └─ asks the listed Sentinels one after another, each for a bounded time; where the primary
//!                                  is, all of them, since some may not have heard of a fail-over yet ([`answers`])
//! ```
//!
//! What a Sentinel answers comes from another process and is checked before it is used: `answers.rs` reads it, without
//! I/O. [`choice`] picks the replica beside which a source sits. [`guard`] says whether Sentinel would take a replica
//! back in the middle of a sync.
//!
//! Sentinel compares addresses as texts. So an address goes to a server exactly as Sentinel writes it, and is never
//! resolved on the way.

mod answers;
pub mod choice;
pub mod guard;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use remora_redis::resp::Frame;
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::answers::Told;
pub use self::answers::{Group, KnownReplica};
use crate::HostPort;
use crate::{RefusalKind, Server, ServerError};

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
        match answers::latest(&told) {
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
        self.ask(&["SENTINEL", "REPLICAS", &self.0.name], answers::replicas).await
    }

    /// The group's times and flags.
    pub async fn group(&self) -> Result<Group, SentinelError> {
        self.ask(&["SENTINEL", "MASTER", &self.0.name], answers::group).await
    }

    /// All Sentinels of the list.
    pub fn each(&self) -> &[Server] {
        &self.0.servers
    }

    /// The group as this Sentinel sees it.
    pub async fn group_at(&self, server: &Server) -> Result<Group, SentinelError> {
        let answer = self.order(server, &["SENTINEL", "MASTER", &self.0.name]).await?;
        let read = answers::group(&answer).and_then(|group| group.ok_or_else(|| "it knows no such primary".to_owned()));
        read.map_err(|what| self.failed(server, &what, false))
    }

    /// The replicas that this Sentinel knows.
    pub async fn replicas_at(&self, server: &Server) -> Result<Vec<KnownReplica>, SentinelError> {
        let answer = self.order(server, &["SENTINEL", "REPLICAS", &self.0.name]).await?;
        let read = answers::replicas(&answer).map(Option::unwrap_or_default);
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
    let mut address = Cause::read(server, name, &where_is, &answer, answers::address)?;
    loop {
        let epoch = match client.command(&group).await {
            Ok(answer) => Some(Cause::read(server, name, &group, &answer, answers::epoch)?),
            // Its user may not ask that, and the address is as good as ever.
            Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => None,
            Err(error) => return Err(failed(error)),
        };
        let answer = client.command(&where_is).await.map_err(failed)?;
        let again = Cause::read(server, name, &where_is, &answer, answers::address)?;
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::{Credentials, ServerUrl, Task, TlsOptions};

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
}
