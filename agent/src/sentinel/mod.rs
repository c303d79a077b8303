//! Sentinels: the processes that watch a primary with its replicas, and promote a replica when the primary fails.
//!
//! ```text
//!   SentinelArgs ──open()──▶ Sentinels ── primary() ──▶ where the primary is now, as Sentinel writes it
//!                               │        ── replicas() ─▶ what Sentinel knows of each replica
//!                               │        ── group() ────▶ its times and flags
//!                               └─ asks the listed Sentinels one after another, each for a bounded time
//! ```
//!
//! What a Sentinel answers comes from another process and is checked before it is used: [`answers`] reads it, without
//! I/O. [`choice`] picks the replica beside which a source sits. [`guard`] says whether Sentinel would take a replica
//! back in the middle of a sync.
//!
//! Sentinel compares addresses as texts. So an address goes to a server exactly as Sentinel writes it, and is never
//! resolved on the way.

mod answers;
pub(crate) mod choice;
pub(crate) mod guard;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use remora_redis::resp::Frame;

pub(crate) use self::answers::{Group, KnownReplica};
use crate::args::HostPort;
use crate::exit::{Code, Failure};
use crate::server::{Server, ServerError};

/// How long one Sentinel may take for one question, with the connection. Sentinels answer within milliseconds; one that
/// does not is overloaded or cut off, and the next one is asked.
const ASK_LIMIT: Duration = Duration::from_secs(2);

/// The most Sentinels in the list: a question to all of them in turn takes a minute at most.
pub(crate) const MOST_SENTINELS: usize = 32;

/// The Sentinels of one group. It is cheap to clone.
#[derive(Clone)]
pub(crate) struct Sentinels(Arc<Inner>);

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
pub(crate) struct SentinelError {
    text: String,
    /// Whether a Sentinel answered, and does not know the group.
    is_unknown: bool,
}

impl Sentinels {
    pub(crate) fn new(servers: Vec<Server>, name: String) -> Sentinels {
        Sentinels(Arc::new(Inner { servers, name, first: AtomicUsize::new(0) }))
    }

    /// The name of the group.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    /// Where the primary is now, exactly as Sentinel writes it.
    pub(crate) async fn primary(&self) -> Result<HostPort, SentinelError> {
        self.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.0.name], answers::address).await
    }

    /// The replicas that Sentinel knows.
    pub(crate) async fn replicas(&self) -> Result<Vec<KnownReplica>, SentinelError> {
        self.ask(&["SENTINEL", "REPLICAS", &self.0.name], answers::replicas).await
    }

    /// The group's times and flags.
    pub(crate) async fn group(&self) -> Result<Group, SentinelError> {
        self.ask(&["SENTINEL", "MASTER", &self.0.name], answers::group).await
    }

    /// All Sentinels of the list.
    pub(crate) fn each(&self) -> &[Server] {
        &self.0.servers
    }

    /// The group as this Sentinel sees it.
    pub(crate) async fn group_at(&self, server: &Server) -> Result<Group, SentinelError> {
        let answer = self.order(server, &["SENTINEL", "MASTER", &self.0.name]).await?;
        let read = answers::group(&answer).and_then(|group| group.ok_or_else(|| "it knows no such primary".to_owned()));
        read.map_err(|what| self.failed(server, &what))
    }

    /// Sets `failover-timeout` at this Sentinel, which writes it to its configuration file.
    pub(crate) async fn set_failover_timeout(&self, server: &Server, millis: u64) -> Result<(), SentinelError> {
        let order = ["SENTINEL", "SET", &self.0.name, "failover-timeout", &millis.to_string()];
        self.order(server, &order).await.map(drop)
    }

    async fn order(&self, server: &Server, order: &[&str]) -> Result<Frame, SentinelError> {
        match tokio::time::timeout(ASK_LIMIT, ask_one(server, order)).await {
            Ok(answer) => answer.map_err(|error| self.failed(server, &error.to_string())),
            Err(_) => Err(self.failed(server, &format!("no answer within {} s", ASK_LIMIT.as_secs()))),
        }
    }

    fn failed(&self, server: &Server, what: &str) -> SentinelError {
        let text = format!("the Sentinel {} of {}: {what}", server.url(), self.0.name);
        SentinelError { text, is_unknown: false }
    }

    /// Asks one Sentinel after another, and returns the first answer that can be read.
    async fn ask<T>(
        &self,
        question: &[&str],
        read: impl Fn(&Frame) -> Result<Option<T>, String>,
    ) -> Result<T, SentinelError> {
        let Inner { servers, name, first } = &*self.0;
        let begin = first.load(Ordering::Relaxed);
        let (mut causes, mut is_unknown) = (Vec::new(), false);
        for at in (0..servers.len()).map(|turn| (begin + turn) % servers.len()) {
            let server = &servers[at];
            let url = server.url();
            // The caller may give up before this one's time is over, and asks the next one first then.
            first.store((at + 1) % servers.len(), Ordering::Relaxed);
            let cause = match tokio::time::timeout(ASK_LIMIT, ask_one(server, question)).await {
                Ok(Ok(frame)) => match read(&frame) {
                    Ok(Some(answer)) => {
                        first.store(at, Ordering::Relaxed);
                        return Ok(answer);
                    }
                    Ok(None) => {
                        is_unknown = true;
                        format!("{url} knows no primary named {name}")
                    }
                    Err(what) => format!("{url} answered SENTINEL {}: {what}", question[1]),
                },
                Ok(Err(error)) => {
                    let is_unknown_here = says_no_such_primary(&error);
                    is_unknown |= is_unknown_here;
                    if is_unknown_here { format!("{url} knows no primary named {name}") } else { error.to_string() }
                }
                Err(_) => format!("{url} has not answered within {} s", ASK_LIMIT.as_secs()),
            };
            tracing::debug!(%cause, "a Sentinel did not answer");
            causes.push(cause);
        }
        let what = if is_unknown { "correct --sentinel-name" } else { "check --sentinel" };
        let text = format!("no Sentinel says where the primary {name} is ({}); {what}", causes.join("; "));
        Err(SentinelError { text, is_unknown })
    }
}

/// Prints the addresses only.
impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels").field("name", &self.0.name).field("servers", &self.0.servers).finish()
    }
}

impl From<SentinelError> for Failure {
    fn from(error: SentinelError) -> Failure {
        Failure::new(if error.is_unknown { Code::Refused } else { Code::Server }, error.text)
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
    use crate::server::{Credentials, ServerUrl, Task, TlsOptions};

    /// A Sentinel that answers PING, and each other command with these bytes; `None`: it says nothing to that.
    async fn sentinel(answer: Option<&'static [u8]>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = ServerUrl::tcp("127.0.0.1", listener.local_addr().unwrap().port());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut bytes = [0; 4096];
                    while let Ok(n) = stream.read(&mut bytes).await {
                        let is_ping = bytes[..n].ends_with(b"PING\r\n");
                        let answer = if is_ping { Some(&b"+PONG\r\n"[..]) } else { answer };
                        match answer {
                            _ if n == 0 => return,
                            Some(answer) => stream.write_all(answer).await.unwrap(),
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

    const ADDRESS: &[u8] = b"*2\r\n$7\r\nfd00::1\r\n$4\r\n6379\r\n";

    #[tokio::test]
    async fn the_next_one_is_asked_where_one_is_gone_or_silent_or_talks_nonsense_and_the_one_that_answered_first() {
        let list = vec![
            nothing().await,
            sentinel(None).await,
            sentinel(Some(b"*2\r\n$1\r\n \r\n$1\r\n0\r\n")).await,
            sentinel(Some(b"-ERR unknown command\r\n")).await,
            sentinel(Some(b"*-1\r\n")).await,
            sentinel(Some(ADDRESS)).await,
        ];
        let sentinels = Sentinels::new(list, "mymaster".into());
        let began = std::time::Instant::now();
        let address = sentinels.primary().await.unwrap();
        assert_eq!((address.host.as_str(), address.port), ("fd00::1", 6379));
        assert!(began.elapsed() >= ASK_LIMIT);
        let began = std::time::Instant::now();
        sentinels.primary().await.unwrap();
        assert!(began.elapsed() < ASK_LIMIT, "the one that answered is asked first");
    }

    #[tokio::test]
    async fn a_caller_with_less_time_reaches_the_next_one_in_the_end() {
        let list = vec![sentinel(None).await, sentinel(None).await, sentinel(Some(ADDRESS)).await];
        let sentinels = Sentinels::new(list, "mymaster".into());
        for is_answered in [false, false, true] {
            let asked = tokio::time::timeout(ASK_LIMIT / 4, sentinels.primary()).await;
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
        assert_eq!(Failure::from(error).code, Code::Refused);
        let error = Sentinels::new(vec![gone], "mymaster".into()).primary().await.unwrap_err();
        assert!(error.to_string().contains("check --sentinel"), "{error}");
        assert_eq!(Failure::from(error).code, Code::Server);
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
