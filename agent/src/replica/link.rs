//! Link: one connection from the replica's server to the agent, which acts as its primary. Never blocks; plain or TLS.
//!
//! It moves bytes. The [delivery](super::delivery) gives them their meaning.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use remora_fabric::View;
use rustls::{ServerConfig, ServerConnection};

use super::attend::gate::Served;
use super::unread::Unread;

/// One connection from the replica's server, plain or TLS.
pub(super) struct Link {
    socket: TcpStream,
    tls: Option<Box<ServerConnection>>,
    /// One piece of plain text on its way into TLS.
    piece: Vec<u8>,
    /// Bytes given to the socket since it was accepted.
    written: u64,
    /// How many of them the server has not read, if the kernel can tell.
    unread: Option<Unread>,
    /// What ends the connection with this link although another descriptor of it exists.
    _served: Option<Served>,
}

/// Plain text that is given to TLS at once: a few records of 16 KiB. More would only wait in its buffer.
const TLS_PIECE: usize = 64 * 1024;

impl Link {
    /// Of a connection that was accepted.
    pub(super) fn new(socket: TcpStream, peer: SocketAddr, tls: Option<&Arc<ServerConfig>>) -> io::Result<Link> {
        let tls = tls.map(|config| ServerConnection::new(config.clone()).map(Box::new));
        Link::of(socket, peer, tls.transpose().map_err(io::Error::other)?)
    }

    /// Of a connection with what TLS knows of it, if it has any.
    fn of(socket: TcpStream, peer: SocketAddr, mut tls: Option<Box<ServerConnection>>) -> io::Result<Link> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        if peer.ip().is_loopback() {
            without_pacing(&socket);
        }
        if let Some(tls) = &mut tls {
            tls.set_buffer_limit(Some(2 * TLS_PIECE));
        }
        Ok(Link { socket, tls, piece: Vec::new(), written: 0, unread: None, _served: None })
    }

    /// Of a connection that the gate of an attending agent looks at too.
    pub(super) fn intercepted(
        socket: TcpStream,
        peer: SocketAddr,
        tls: Option<Box<ServerConnection>>,
        served: Served,
    ) -> io::Result<Link> {
        Ok(Link { _served: Some(served), ..Link::of(socket, peer, tls)? })
    }

    /// Watches from now on what the server has not read, if the kernel can tell. Memory can be lent to the link then.
    pub(super) fn look_at_what_is_unread(&mut self) {
        if self.tls.is_none() {
            self.unread = Unread::of(&self.socket).ok();
        }
    }

    /// Reads what is there: `None` if nothing is yet, 0 at the end of the stream.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(tls) = &mut self.tls else { return not_yet(self.socket.read(buffer)) };
        match tls.read_tls(&mut self.socket) {
            Ok(0) => return Ok(Some(0)),
            Ok(_) => {
                tls.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            }
            Err(error) if is_not_yet(&error) => {}
            Err(error) => return Err(error),
        }
        not_yet(tls.reader().read(buffer))
    }

    /// Writes some of `bytes`: `None` if there is no room.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        let Some(tls) = &mut self.tls else {
            let wrote = self.socket.write(bytes);
            return self.count(wrote);
        };
        let taken = tls.writer().write(&bytes[..bytes.len().min(TLS_PIECE)])?;
        self.flush()?;
        Ok((taken > 0).then_some(taken))
    }

    /// Writes what waits in `out` behind `written`, and empties it at the end. `false`: some still waits.
    pub(super) fn write_out(&mut self, out: &mut Vec<u8>, written: &mut usize) -> io::Result<bool> {
        while *written < out.len() {
            match self.write(&out[*written..])? {
                Some(n) => *written += n,
                None => return Ok(false),
            }
        }
        out.clear();
        *written = 0;
        self.flush()?;
        Ok(!self.wants_write())
    }

    /// Writes some of `length` bytes directly from a table's memory.
    pub(super) fn write_view(&mut self, view: &View, offset: u64, length: usize) -> io::Result<Option<usize>> {
        if self.tls.is_none() {
            let wrote = view.send(&self.socket, offset, length);
            return self.count(wrote);
        }
        self.piece.resize(length.min(TLS_PIECE), 0);
        view.read(offset, &mut self.piece).map_err(io::Error::other)?;
        self.write_piece()
    }

    /// Whether memory can be lent to this link: it is plain, and the kernel tells what the server has read.
    pub(super) fn borrows(&self) -> bool {
        self.unread.is_some()
    }

    /// Lends some of `length` bytes of a table's memory: no byte is copied before the server reads it. The bytes must
    /// not change until [`taken`](Self::taken) has passed the value of [`written`](Self::written) after this call.
    pub(super) fn lend_view(&mut self, view: &View, offset: u64, length: usize) -> io::Result<Option<usize>> {
        let lent = view.send_file(&self.socket, offset, length);
        self.count(lent)
    }

    /// Bytes that went into the socket since the link was accepted.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// How many of them are certainly not read from our memory any more: the server has read them, or they were copied.
    pub(super) fn taken(&mut self) -> io::Result<u64> {
        match &mut self.unread {
            Some(unread) => Ok(self.written.saturating_sub(unread.bytes()?)),
            None => Ok(self.written),
        }
    }

    /// Bytes that the socket holds and the server has not read; `None` if the kernel cannot tell.
    pub(super) fn held(&mut self) -> Option<u64> {
        self.unread.as_mut()?.bytes().ok()
    }

    fn count(&mut self, wrote: io::Result<usize>) -> io::Result<Option<usize>> {
        let wrote = not_yet(wrote)?;
        self.written += wrote.unwrap_or(0) as u64;
        Ok(wrote)
    }

    /// Writes some of `length` bytes of a file.
    pub(super) fn write_file(&mut self, file: &File, offset: u64, length: usize) -> io::Result<Option<usize>> {
        if self.tls.is_none() {
            let mut at = offset;
            let wrote = rustix::fs::sendfile(&self.socket, file, Some(&mut at), length);
            return self.count(wrote.map_err(io::Error::from));
        }
        self.piece.resize(length.min(TLS_PIECE), 0);
        rustix::io::pread(file, &mut self.piece[..], offset)?;
        self.write_piece()
    }

    fn write_piece(&mut self) -> io::Result<Option<usize>> {
        let piece = std::mem::take(&mut self.piece);
        let taken = self.write(&piece);
        self.piece = piece;
        taken
    }

    /// Sends what TLS still holds.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        while tls.wants_write() {
            match tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if is_not_yet(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether TLS still holds bytes that only a flush sends.
    pub(super) fn wants_write(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// The socket, for poll(2).
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Selects a congestion control without pacing for a server on this host. There is no network in between, and pacing
/// (bbr, the default of some systems) costs timers and a part of the throughput.
fn without_pacing(socket: &TcpStream) {
    let taken = UNPACED.iter().any(|name| rustix::net::sockopt::set_tcp_congestion(socket, name).is_ok());
    if !taken {
        tracing::debug!("the link keeps the system's congestion control");
    }
}

/// Congestion controls that do not pace; at least one of them is in every kernel and open to every user.
const UNPACED: [&str; 2] = ["cubic", "reno"];

fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn not_yet(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(error) if is_not_yet(&error) => Ok(None),
        Err(error) => Err(error),
    }
}
