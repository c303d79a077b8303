//! One byte stream to a server, over TCP, a Unix socket or TLS.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll},
};

use rustix::net::RecvFlags;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::client::TlsStream;

use crate::simulated::SimulatedStream;

/// TLS over TCP, as a client.
pub type TlsConnection = TlsStream<TcpStream>;

/// A connection to a server.
#[derive(Debug)]
pub enum Stream {
    /// Plain TCP.
    Tcp(TcpStream),
    /// A Unix socket.
    Unix(UnixStream),
    /// TLS over TCP. It is boxed because its state takes a kilobyte; the others are a descriptor.
    Tls(Box<TlsConnection>),
    /// A connection of a simulation.
    Simulated(SimulatedStream),
}

/// A [`Stream`] without tokio.
#[derive(Debug)]
pub enum Raw {
    /// A socket in blocking mode, so that a thread can receive bytes straight into shared memory.
    Socket(OwnedFd),
    /// TLS has to decrypt into private memory first, so the stream stays as it was.
    Tls(Box<TlsConnection>),
}

impl Stream {
    /// Returns the plain socket in blocking mode, if the stream has one.
    pub fn raw(self) -> io::Result<Raw> {
        match self {
            Self::Tcp(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Ok(Raw::Socket(stream.into()))
            }
            Self::Unix(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Ok(Raw::Socket(stream.into()))
            }
            Self::Tls(stream) => Ok(Raw::Tls(stream)),
            Self::Simulated(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Whether the stream is open and nothing can be read from it: no byte, no end, no error. It takes nothing from the
    /// socket.
    pub(super) fn is_silent(&self) -> bool {
        let socket = match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
            Self::Tls(stream) => stream.get_ref().0.as_fd(),
            Self::Simulated(stream) => return stream.is_silent(),
        };
        let looked = rustix::net::recv(socket, &mut [0_u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        looked.is_err_and(|error| error == rustix::io::Errno::AGAIN)
    }

    /// The TCP socket, with TLS or without.
    pub fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(stream) => Some(stream),
            Self::Tls(stream) => Some(stream.get_ref().0),
            Self::Unix(_) => None,
            Self::Simulated(_) => None,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Simulated(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Simulated(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Self::Simulated(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Simulated(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
