//! Wire: a connection to the primary as a capture thread uses it: blocking, with a bound on every wait.
//!
//! A plain socket (TCP or unix) is read by the kernel straight into the table's memory. Under TLS the bytes must be
//! decrypted first, so they take one copy more.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use remora_fabric::Memory;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::server::{Raw, Stream, TlsConnection};

/// What a read gave.
pub(crate) enum Received {
    /// That many bytes.
    Bytes(usize),
    /// Nothing within the wire's tick.
    Idle,
    /// The server closed the connection.
    End,
}

/// See the module's text.
pub(crate) struct Wire {
    link: Link,
    tick: Duration,
    /// Bytes that were read beyond what their reader could use; they come first.
    pushed_back: Vec<u8>,
}

enum Link {
    Plain(OwnedFd),
    Tls(Box<TlsConnection>, tokio::runtime::Handle),
}

/// The longest that a write of a few bytes may take: the server's socket buffer is full and it reads nothing.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

impl Wire {
    /// Reads wait at most `tick`.
    pub(crate) fn new(stream: Stream, runtime: tokio::runtime::Handle, tick: Duration) -> io::Result<Wire> {
        let link = match stream.raw()? {
            Raw::Socket(socket) => {
                use rustix::net::sockopt::{Timeout, set_socket_timeout};
                rustix::io::ioctl_fionbio(&socket, false)?;
                set_socket_timeout(&socket, Timeout::Recv, Some(tick))?;
                set_socket_timeout(&socket, Timeout::Send, Some(WRITE_LIMIT))?;
                Link::Plain(socket)
            }
            Raw::Tls(stream) => Link::Tls(stream, runtime),
        };
        Ok(Wire { link, tick, pushed_back: Vec::new() })
    }

    /// One read, straight into `memory` at `offset` where that is possible.
    pub(crate) fn receive_into(&mut self, memory: &Memory, offset: u64, length: usize) -> io::Result<Received> {
        match &mut self.link {
            Link::Plain(socket) if self.pushed_back.is_empty() => received(memory.receive(&*socket, offset, length)),
            _ => {
                let mut buffer = vec![0; length.min(TLS_READ)];
                let received = self.read(&mut buffer)?;
                if let Received::Bytes(n) = received {
                    memory.write(offset, &buffer[..n]).map_err(io::Error::other)?;
                }
                Ok(received)
            }
        }
    }

    /// One read into a buffer.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Received> {
        self.read_within(self.tick, RecvFlags::empty(), buffer)
    }

    /// ... of what is there already.
    pub(crate) fn read_at_once(&mut self, buffer: &mut [u8]) -> io::Result<Received> {
        self.read_within(Duration::ZERO, RecvFlags::DONTWAIT, buffer)
    }

    /// A plain socket has the wire's tick for itself, unless `flags` say otherwise.
    fn read_within(&mut self, limit: Duration, flags: RecvFlags, buffer: &mut [u8]) -> io::Result<Received> {
        if !self.pushed_back.is_empty() {
            let n = self.pushed_back.len().min(buffer.len());
            buffer[..n].copy_from_slice(&self.pushed_back[..n]);
            self.pushed_back.drain(..n);
            return Ok(Received::Bytes(n));
        }
        match &mut self.link {
            Link::Plain(socket) => received(recv(&*socket, buffer, flags).map(|(n, _)| n).map_err(Into::into)),
            Link::Tls(stream, runtime) => runtime.block_on(async {
                match tokio::time::timeout(limit, stream.read(buffer)).await {
                    Ok(result) => received(result),
                    Err(_) => Ok(Received::Idle),
                }
            }),
        }
    }

    /// Writes all, or fails within [`WRITE_LIMIT`].
    pub(crate) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.link {
            Link::Plain(socket) => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    use rustix::net::{SendFlags, send};
                    match send(&*socket, rest, SendFlags::NOSIGNAL) {
                        Ok(n) => rest = &rest[n..],
                        Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(())
            }
            Link::Tls(stream, runtime) => runtime.block_on(async {
                let write = async {
                    stream.write_all(bytes).await?;
                    stream.flush().await
                };
                tokio::time::timeout(WRITE_LIMIT, write).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            }),
        }
    }

    /// Puts bytes back, to be read first.
    pub(crate) fn push_back(&mut self, bytes: Vec<u8>) {
        self.pushed_back = bytes;
    }
}

/// The most that one read under TLS takes: some records of 16 KiB.
const TLS_READ: usize = 256 * 1024;

fn received(result: io::Result<usize>) -> io::Result<Received> {
    match result {
        Ok(0) => Ok(Received::End),
        Ok(n) => Ok(Received::Bytes(n)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(Received::Idle),
            _ => Err(error),
        },
    }
}
