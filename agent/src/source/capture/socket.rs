//! A connection to the primary as a capture thread uses it: blocking, with a bound on every wait.
//!
//! Header, payload, mark and stream follow each other on one connection, and the kernel delivers them in any pieces. A
//! reader that looks for the end of its part reads ahead, and what it does not use belongs to the next reader. So the
//! connection itself owns what was read ahead ([`Socket::ahead`]): a reader takes its part from there, and no reader
//! can keep or drop the rest.
//!
//! From a plain socket (TCP or Unix) the kernel copies the bytes straight into the table's memory. Under TLS the bytes
//! must be decrypted first, which takes one copy more.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::psync::client::{self, Client};
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::plan::CaptureError;
use crate::server::{Raw, Stream, TlsConnection};

/// The result of one read.
#[derive(Debug)]
pub(crate) enum Received {
    /// This many bytes were read.
    Bytes(usize),
    /// Nothing arrived within the connection's tick.
    Idle,
    /// The server closed the connection.
    End,
}

/// How long the server has been silent, and how long it may be.
pub(super) struct Silence {
    pub(super) since: Instant,
    pub(super) limit: Duration,
    /// The phase of the capture, for the error's text.
    pub(super) during: &'static str,
}

impl Silence {
    /// Measures from now on.
    pub(super) fn restart(&mut self) {
        self.since = Instant::now();
    }

    /// The number of bytes that a read returned, which ends the silence. `None` while the server may still be silent.
    ///
    /// # Errors
    /// The server has been silent for too long or has closed the connection, or the read failed.
    pub(super) fn check(&mut self, received: io::Result<Received>) -> Result<Option<usize>, CaptureError> {
        self.check_unless(received, || false)
    }

    /// As [`Silence::check`]. A silence that is too long begins again if it `is_excused`.
    ///
    /// # Errors
    /// As [`Silence::check`].
    pub(super) fn check_unless(
        &mut self,
        received: io::Result<Received>,
        is_excused: impl FnOnce() -> bool,
    ) -> Result<Option<usize>, CaptureError> {
        let cause = match received {
            Ok(Received::Bytes(n)) => {
                self.restart();
                return Ok(Some(n));
            }
            Ok(Received::Idle) if self.since.elapsed() < self.limit => return Ok(None),
            Ok(Received::Idle) if is_excused() => {
                self.restart();
                return Ok(None);
            }
            Ok(Received::Idle) => format!("no byte arrived within {} s", self.limit.as_secs()),
            Ok(Received::End) => "the server closed the connection; its log says why".to_owned(),
            Err(error) => error.to_string(),
        };
        Err(CaptureError::Link { during: self.during, cause })
    }
}

/// A connection to the primary. Every wait has a bound.
pub(crate) struct Socket {
    link: Link,
    tick: Duration,
    /// Bytes that were read and that nobody has taken yet. Every read returns them first.
    ahead: Vec<u8>,
}

enum Link {
    Plain(OwnedFd),
    Tls(Box<TlsConnection>, tokio::runtime::Handle),
    #[cfg(any(test, feature = "simulation"))]
    Pieces(super::pieces::Pieces),
}

/// The longest time that a write of a few bytes may take. It waits only while the server reads nothing and its socket
/// buffer is full.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

impl Socket {
    /// Takes a connected stream and the bytes that its client has read from it and not used. Each read waits for at
    /// most `tick`.
    pub(crate) fn new(
        (stream, ahead): (Stream, Vec<u8>),
        runtime: tokio::runtime::Handle,
        tick: Duration,
    ) -> io::Result<Socket> {
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
        Ok(Socket { link, tick, ahead })
    }

    /// A connection whose other end says which bytes each read returns. What is written to it is not looked at.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn of_pieces(pieces: super::pieces::Pieces) -> Socket {
        Socket { link: Link::Pieces(pieces), tick: Duration::ZERO, ahead: Vec::new() }
    }

    /// The bytes that were read and not taken yet.
    pub(crate) fn ahead(&self) -> &[u8] {
        &self.ahead
    }

    /// Takes the first `count` of the bytes that were read ahead.
    pub(crate) fn take(&mut self, count: usize) {
        self.ahead.drain(..count.min(self.ahead.len()));
    }

    /// Hands a handshake what was read ahead. What the handshake does not use stays.
    pub(crate) fn give(&mut self, machine: &mut Client) -> Result<(), client::Error> {
        let used = machine.handle_input(&self.ahead)?;
        self.take(used);
        Ok(())
    }

    /// Reads once from the connection, behind what was read ahead, and waits for at most one tick.
    pub(crate) fn read_ahead(&mut self) -> io::Result<Received> {
        self.read_further(self.tick, RecvFlags::empty())
    }

    /// Reads ahead what has already arrived, without waiting.
    pub(crate) fn read_ahead_at_once(&mut self) -> io::Result<Received> {
        self.read_further(Duration::ZERO, RecvFlags::DONTWAIT)
    }

    fn read_further(&mut self, limit: Duration, flags: RecvFlags) -> io::Result<Received> {
        let room = AHEAD_BYTES_MAX.saturating_sub(self.ahead.len());
        if room == 0 {
            let text = format!("the server sent {AHEAD_BYTES_MAX} bytes where a line was due");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let mut buffer = [0; AHEAD_BYTES_MAX];
        let received = self.read_from_link(limit, flags, &mut buffer[..room])?;
        if let Received::Bytes(n) = received {
            self.ahead.extend_from_slice(&buffer[..n]);
        }
        Ok(received)
    }

    /// Reads once into `memory` at `offset`: straight from a plain socket, by a copy under TLS.
    pub(crate) fn receive_into(&mut self, memory: &Memory, offset: u64, length: usize) -> io::Result<Received> {
        match &mut self.link {
            Link::Plain(socket) if self.ahead.is_empty() => received(memory.receive(&*socket, offset, length)),
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

    /// Reads once into a buffer: what was read ahead, or else from the connection.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Received> {
        if !self.ahead.is_empty() {
            let n = self.ahead.len().min(buffer.len());
            buffer[..n].copy_from_slice(&self.ahead[..n]);
            self.take(n);
            return Ok(Received::Bytes(n));
        }
        self.read_from_link(self.tick, RecvFlags::empty(), buffer)
    }

    /// Reads once and waits for at most `limit`. A plain socket ignores `limit`: its time-out is the tick, unless
    /// `flags` say that it must not wait.
    fn read_from_link(&mut self, limit: Duration, flags: RecvFlags, buffer: &mut [u8]) -> io::Result<Received> {
        match &mut self.link {
            Link::Plain(socket) => received(recv(&*socket, buffer, flags).map(|(n, _)| n).map_err(Into::into)),
            Link::Tls(stream, runtime) => runtime.block_on(async {
                match tokio::time::timeout(limit, stream.read(buffer)).await {
                    Ok(result) => received(result),
                    Err(_) => Ok(Received::Idle),
                }
            }),
            #[cfg(any(test, feature = "simulation"))]
            Link::Pieces(pieces) => Ok(pieces.read(buffer)),
        }
    }

    /// Ends our direction of the connection. The server then closes it, after what it has sent.
    pub(crate) fn end_writing(&mut self) -> io::Result<()> {
        match &mut self.link {
            Link::Plain(socket) => Ok(rustix::net::shutdown(&*socket, rustix::net::Shutdown::Write)?),
            Link::Tls(stream, runtime) => runtime.block_on(async {
                tokio::time::timeout(WRITE_LIMIT, stream.shutdown())
                    .await
                    .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            }),
            #[cfg(any(test, feature = "simulation"))]
            Link::Pieces(_) => Ok(()),
        }
    }

    /// Writes all bytes. A write that makes no progress fails after [`WRITE_LIMIT`].
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
            #[cfg(any(test, feature = "simulation"))]
            Link::Pieces(_) => Ok(()),
        }
    }
}

/// The most bytes that wait to be taken. Who reads ahead looks for the end of a line of a few dozen bytes, and takes
/// the lines and keep-alives before it reads further.
const AHEAD_BYTES_MAX: usize = 16 * 1024;

/// The most bytes that one read under TLS takes: a few records of 16 KiB.
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
