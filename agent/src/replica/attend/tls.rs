//! TLS: an intercepted connection that is encrypted. Towards the server the agent is its primary, with a certificate
//! that the server accepts; towards the primary it is the server, with the server's own certificate.
//!
//! A connection that cannot be opened so is passed on unread: the server is never cut off from its primary for long.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::server::{Credentials, Server, Stream, Task, TlsOptions};

/// How long connections are passed on unread after the server has refused our certificate. Each try costs it one
/// connection.
const REFUSED_FOR: Duration = Duration::from_secs(60);

/// What is known of the TLS between the server and its primary.
#[derive(Clone)]
pub(super) enum Tls {
    /// The server has not been asked yet.
    NotKnown,
    /// Its connections cannot be opened.
    Closed,
    Open(Between),
}

/// What the agent needs to stand between.
#[derive(Clone)]
pub(super) struct Between {
    acceptor: TlsAcceptor,
    /// With which the server speaks to its primary.
    primary: TlsOptions,
    /// When the server has refused our certificate.
    refused: Arc<Mutex<Option<Instant>>>,
}

impl Between {
    pub(super) fn new(link: Arc<ServerConfig>, primary: TlsOptions) -> Between {
        Between { acceptor: link.into(), primary, refused: Arc::default() }
    }

    /// Whether the server has just refused our certificate.
    pub(super) fn is_refused(&self) -> bool {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.is_some_and(|at| at.elapsed() < REFUSED_FOR)
    }

    /// Connects to the primary as the server would.
    pub(super) async fn connect(&self, address: SocketAddr) -> Result<Stream, String> {
        let url = format!("rediss://{address}").parse().map_err(|error| format!("{address}: {error}"))?;
        let primary = Server::new(url, Credentials::default(), &self.primary, Task::Attend);
        let primary = primary.map_err(|error| error.to_string())?;
        primary.open_stream().await.map_err(|error| error.to_string())
    }

    /// Is the primary towards the server. The server has said its first bytes.
    pub(super) async fn accept(&self, server: TcpStream) -> io::Result<End> {
        let accepted = self.acceptor.accept(server).await;
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        *refused = accepted.is_err().then(Instant::now);
        Ok(End::Tls(Box::new(accepted?)))
    }
}

/// The agent's end of a connection of the server.
pub(super) enum End {
    Plain(TcpStream),
    /// It is boxed because its state takes a kilobyte.
    Tls(Box<TlsStream<TcpStream>>),
}

impl End {
    pub(super) fn socket(&self) -> &TcpStream {
        match self {
            End::Plain(socket) => socket,
            End::Tls(stream) => stream.get_ref().0,
        }
    }

    /// The socket without tokio, and the TLS on it.
    pub(super) fn into_parts(self) -> io::Result<(std::net::TcpStream, Option<Box<ServerConnection>>)> {
        match self {
            End::Plain(socket) => Ok((socket.into_std()?, None)),
            End::Tls(stream) => {
                let (socket, tls) = stream.into_inner();
                Ok((socket.into_std()?, Some(Box::new(tls))))
            }
        }
    }
}

impl AsyncRead for End {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            End::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            End::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_flush(cx),
            End::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            End::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            End::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
