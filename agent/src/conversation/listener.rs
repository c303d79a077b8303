//! The one port that a source opens, or a replica that serves its slots to others.
//!
//! Control connections and data lanes are separate connections that share the port, so a firewall needs one rule. Their
//! first eight bytes tell them apart; the listener peeks at these bytes and leaves them in the socket.
//!
//! At most [`GREETINGS_LIMIT`] connections may be in their handshake at once. A connection that sends nothing is closed
//! after [`FIRST_WORD_LIMIT`].

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

/// Connections that may be in their handshake at once: enough for a burst of replicas, and a bound for a flood of other
/// connections.
const GREETINGS_LIMIT: usize = 64;

/// Time limit for the first eight bytes of a connection.
const FIRST_WORD_LIMIT: Duration = Duration::from_secs(5);

/// Pause after the system failed to accept a connection, usually because too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// A listening port. Dropping it closes the port.
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

/// Binds the port. The address returned has the actual port if any free one was requested. `who` listens, as `option`
/// says: both are for the error's text.
pub(crate) async fn bind(listen: SocketAddr, who: &str, option: &str) -> Result<(TcpListener, SocketAddr), Failure> {
    let closed = |error: std::io::Error| {
        Failure::local(format!("{who} cannot listen on {listen}: {error}; set another address with {option}"))
    };
    let listener = TcpListener::bind(listen).await.map_err(closed)?;
    let address = listener.local_addr().map_err(closed)?;
    Ok((listener, address))
}

/// Starts listening. Authenticated connections are sent to `incoming`.
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
                    tracing::warn!(%error, "cannot accept a connection");
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
                    tracing::warn!(%peer, "connection rejected: {text}");
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

/// Forwards everything a conversation receives, as the owner's events, until it ends or `incoming` is closed. The last
/// event is the error that ended it.
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

/// Whether a connection is a data lane.
async fn is_lane(stream: &TcpStream) -> Result<bool, String> {
    let mut magic = [0; LANE_MAGIC.len()];
    let peek = async {
        loop {
            let n = stream.peek(&mut magic).await?;
            // A magic that differs already need not be complete.
            if n == magic.len() || n == 0 || magic[..n] != LANE_MAGIC[..n] {
                return std::io::Result::Ok(n);
            }
            // The rest of the magic is under way. Peeking again at once would only spin.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    match tokio::time::timeout(FIRST_WORD_LIMIT, peek).await {
        Ok(Ok(n)) => Ok(n == magic.len() && magic == LANE_MAGIC),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("it sent nothing for {} s", FIRST_WORD_LIMIT.as_secs())),
    }
}
