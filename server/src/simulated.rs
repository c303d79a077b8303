//! Simulated: connections to the servers of a simulation, in the place of sockets.
//!
//! A thread that has [`open`]ed a simulated network reaches no real server: each connection that it makes is reported
//! to the simulation, which answers it. The product opens none, and then no thread has one.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

thread_local! {
    static NETWORK: RefCell<Option<UnboundedSender<Wanted>>> = const { RefCell::new(None) };
}

/// What the simulation has to see to.
#[derive(Debug)]
pub enum Wanted {
    /// A connection to this host and port. An answer that is dropped refuses it.
    Connection {
        /// The host as the product names it.
        host: String,
        /// The port.
        port: u16,
        /// Takes the client's end.
        answer: oneshot::Sender<SimulatedStream>,
    },
    /// Something was written on a connection, or its client is gone.
    Attention,
}

/// Makes this thread's connections simulated ones, until the next call.
pub fn open() -> UnboundedReceiver<Wanted> {
    let (sender, receiver) = unbounded_channel();
    NETWORK.set(Some(sender));
    receiver
}

/// This thread's connections are real ones again.
pub fn close() {
    NETWORK.set(None);
}

/// Connects within the simulation; `None` if this thread has none.
pub(super) async fn connect(host: &str, port: u16) -> Option<io::Result<SimulatedStream>> {
    let network = NETWORK.with_borrow(Clone::clone)?;
    let (answer, answered) = oneshot::channel();
    let _ = network.send(Wanted::Connection { host: host.to_string(), port, answer });
    Some(answered.await.map_err(|_| io::ErrorKind::ConnectionRefused.into()))
}

/// The bytes that are under way, in both directions.
#[derive(Default)]
struct Pipe {
    to_server: Vec<u8>,
    to_client: Vec<u8>,
    client_is_gone: bool,
    server_is_gone: bool,
    reader: Option<Waker>,
}

/// The client's end.
pub struct SimulatedStream(Arc<Mutex<Pipe>>, UnboundedSender<Wanted>);

/// The simulated server's end.
pub struct ServerEnd(Arc<Mutex<Pipe>>);

/// Both ends of a new connection; `None` outside of a simulation.
pub fn pipe() -> Option<(SimulatedStream, ServerEnd)> {
    let network = NETWORK.with_borrow(Clone::clone)?;
    let pipe = Arc::new(Mutex::new(Pipe::default()));
    Some((SimulatedStream(pipe.clone(), network), ServerEnd(pipe)))
}

fn locked(pipe: &Mutex<Pipe>) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerEnd {
    /// Takes what the client has written.
    pub fn take(&self) -> Vec<u8> {
        std::mem::take(&mut locked(&self.0).to_server)
    }

    /// Sends these bytes to the client.
    pub fn give(&self, bytes: &[u8]) {
        let mut pipe = locked(&self.0);
        pipe.to_client.extend_from_slice(bytes);
        if let Some(waker) = pipe.reader.take() {
            waker.wake();
        }
    }

    /// Whether the client has dropped its end.
    pub fn client_is_gone(&self) -> bool {
        locked(&self.0).client_is_gone
    }
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        let mut pipe = locked(&self.0);
        pipe.server_is_gone = true;
        if let Some(waker) = pipe.reader.take() {
            waker.wake();
        }
    }
}

impl SimulatedStream {
    /// Whether the stream is open and nothing can be read from it.
    pub(super) fn is_silent(&self) -> bool {
        let pipe = locked(&self.0);
        pipe.to_client.is_empty() && !pipe.server_is_gone
    }
}

impl std::fmt::Debug for SimulatedStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimulatedStream")
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        locked(&self.0).client_is_gone = true;
        let _ = self.1.send(Wanted::Attention);
    }
}

impl AsyncRead for SimulatedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut pipe = locked(&self.0);
        if pipe.to_client.is_empty() && !pipe.server_is_gone {
            pipe.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let taken = pipe.to_client.len().min(buffer.remaining());
        buffer.put_slice(&pipe.to_client[..taken]);
        pipe.to_client.drain(..taken);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SimulatedStream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut pipe = locked(&self.0);
        if pipe.server_is_gone {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        pipe.to_server.extend_from_slice(bytes);
        let _ = self.1.send(Wanted::Attention);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
