//! Door: the one port that a source opens, or a replica that lends its slots to others, and who comes in by it.
//!
//! Control connections and data lanes never share a connection, but they share the port, so that a firewall needs one hole.
//! They say in their first eight bytes which they are; those are looked at, not taken, before either is given to its own.
//!
//! At most [`GREETINGS_LIMIT`] connections may be in their greeting at once; whoever says nothing is shut out after
//! [`FIRST_WORD_LIMIT`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use remora_fabric::tcp::{LANE_MAGIC, TcpExporter};
use remora_protocol::Message;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::{Connection, Endpoint, Error, Receiver};
use crate::exit::Failure;

/// Connections that may be in their greeting at once: a burst of replicas, but not a flood of strangers.
const GREETINGS_LIMIT: usize = 64;

/// How long a connection may take for its first eight bytes.
const FIRST_WORD_LIMIT: Duration = Duration::from_secs(5);

/// How long to wait after the system refused to accept (too many open files, as a rule).
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The listening port. Dropping it closes it.
pub(crate) struct Listener {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Listener {
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Takes the port. The address that it gives back has the true port where any free one was asked for. `who` listens, as told by
/// `option`.
pub(crate) async fn bind(listen: SocketAddr, who: &str, option: &str) -> Result<(TcpListener, SocketAddr), Failure> {
    let closed = |error: std::io::Error| {
        Failure::local(format!("{who} can't listen on {listen}: {error}; name another address with {option}"))
    };
    let listener = TcpListener::bind(listen).await.map_err(closed)?;
    let address = listener.local_addr().map_err(closed)?;
    Ok((listener, address))
}

/// Opens it. Whoever has proved to hold the token is given to `incoming`.
pub(crate) fn start<T>(
    (listener, address): (TcpListener, SocketAddr),
    conversations: Endpoint,
    lanes: Arc<TcpExporter>,
    incoming: mpsc::Sender<T>,
) -> Listener
where
    T: From<Connection> + Send + 'static,
{
    let conversations = Arc::new(conversations);
    let task = tokio::spawn(async move {
        let permits = Arc::new(Semaphore::new(GREETINGS_LIMIT));
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = permits.clone().try_acquire_owned() else {
                tokio::spawn(super::turn_away(stream));
                continue;
            };
            let (conversations, lanes, incoming) = (conversations.clone(), lanes.clone(), incoming.clone());
            tokio::spawn(async move {
                if let Err(text) = greet(stream, &conversations, &lanes, &incoming).await {
                    tracing::warn!(%peer, "a connection was turned away: {text}");
                }
                drop(permit);
            });
        }
    });
    Listener { address, task }
}

async fn greet<T: From<Connection>>(
    stream: TcpStream,
    conversations: &Endpoint,
    lanes: &TcpExporter,
    incoming: &mpsc::Sender<T>,
) -> Result<(), String> {
    if is_lane(&stream).await? {
        let stream = stream.into_std().map_err(|error| error.to_string())?;
        stream.set_nonblocking(false).map_err(|error| error.to_string())?;
        return lanes.adopt(stream).map_err(|error| error.to_string());
    }
    let connection = conversations.accept(stream).await.map_err(|error| error.to_string())?;
    incoming.send(connection.into()).await.map_err(|_| "this agent is stopping".to_string())
}

/// Passes on what is heard in a conversation, in the owner's words, until it is over or nobody listens any more. Its end, as an error, is
/// the last.
pub(crate) fn listen_to<T: Send + 'static>(
    mut receiver: Receiver,
    incoming: mpsc::Sender<T>,
    into_event: impl Fn(Result<Message, Error>) -> T + Send + 'static,
) {
    tokio::spawn(async move {
        loop {
            let received = receiver.receive().await;
            let last = received.is_err();
            if incoming.send(into_event(received)).await.is_err() || last {
                return;
            }
        }
    });
}

/// Whether a connection begins as data lanes do.
async fn is_lane(stream: &TcpStream) -> Result<bool, String> {
    let mut magic = [0; LANE_MAGIC.len()];
    let peek = async {
        loop {
            let n = stream.peek(&mut magic).await?;
            // A word that has already gone another way need not be whole to be told apart.
            if n == magic.len() || n == 0 || magic[..n] != LANE_MAGIC[..n] {
                return std::io::Result::Ok(n);
            }
            // The rest of the word is on its way; peeking again at once would only spin.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    match tokio::time::timeout(FIRST_WORD_LIMIT, peek).await {
        Ok(Ok(n)) => Ok(n == magic.len() && magic == LANE_MAGIC),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("it said nothing for {} s", FIRST_WORD_LIMIT.as_secs())),
    }
}
