//! Options of a lane's connection, and its reads and writes with a deadline. No protocol here.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    num::NonZeroU64,
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use socket2::{SockRef, TcpKeepalive};

use super::TcpOptions;
use crate::Error;

/// Sets what both ends set. Never SO_RCVBUF or SO_SNDBUF: either switches the system's own tuning off, and with 4 MiB buffers
/// a lane has been seen to stall at 60 reads a second.
pub(super) fn prepare(stream: &TcpStream, options: &TcpOptions) -> Result<(), Error> {
    stream.set_nonblocking(false).map_err(Error::system("making a lane blocking"))?;
    stream.set_nodelay(true).map_err(Error::system("setting TCP_NODELAY"))?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive()).map_err(Error::system("setting keep-alive"))?;
    if let Some(name) = &options.congestion {
        choose_congestion(&socket, name);
    }
    if let Some(rate) = options.upload_rate
        && let Err(error) = smooth(stream, rate)
    {
        // The limit is kept all the same, with bursts in between.
        tracing::debug!(%error, "the system does not space a lane's packets");
    }
    Ok(())
}

/// Has the system space the packets of a connection by this rate (`SO_MAX_PACING_RATE`). What was written in time leaves in a burst
/// otherwise, whenever the reader has held it up, and comes to stand in a queue before everybody else's on the cable: for the clients of a
/// primary beside it, on 1 Gb/s, the 99th percentile of what they waited was 5 to 28 ms without and 0.2 to 0.5 with it.
#[allow(unsafe_code)] // no crate wraps this option
fn smooth(stream: &TcpStream, rate: NonZeroU64) -> io::Result<()> {
    let rate = rate.get();
    let length = size_of_val(&rate) as libc::socklen_t;
    // SAFETY: an open socket, borrowed for the call; the value is a local that outlives it, of just that length. (A system before Linux 4.20
    // reads its lower half only, which is all of it below 34 Gb/s.)
    let set = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const rate).cast(),
            length,
        )
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The congestion control in use on this connection.
pub(super) fn congestion(stream: &TcpStream) -> io::Result<String> {
    let name = SockRef::from(stream).tcp_congestion()?;
    // The kernel gives a buffer of fixed size, padded with zeros.
    Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
}

/// The moment at which a handshake has taken too long, and how long that is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    pub(super) fn after(after: Duration) -> Deadline {
        Deadline { at: Instant::now() + after, after }
    }

    /// Reads exactly `into`, however slowly the bytes trickle.
    pub(super) fn read(self, mut stream: &TcpStream, mut into: &mut [u8]) -> Result<(), Error> {
        while !into.is_empty() {
            stream.set_read_timeout(Some(self.left()?)).map_err(Error::system("setting a time-out"))?;
            match stream.read(into) {
                Ok(0) => return Err(Error::Protocol("it hung up in the middle of the handshake")),
                Ok(count) => into = into.get_mut(count..).unwrap_or_default(),
                Err(error) if is_try_again(&error) => continue,
                Err(error) => return Err(Error::system("reading the handshake of a data lane")(error)),
            }
        }
        Ok(())
    }

    /// Writes all of `bytes`.
    pub(super) fn write(self, mut stream: &TcpStream, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            stream.set_write_timeout(Some(self.left()?)).map_err(Error::system("setting a time-out"))?;
            match stream.write(bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(error) if is_try_again(&error) => continue,
                Err(error) => return Err(Error::system("writing the handshake of a data lane")(error)),
            }
        }
        Ok(())
    }

    /// Time that is left; never zero, which to a socket would mean for ever.
    pub(super) fn left(self) -> Result<Duration, Error> {
        let left = self.at.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(Error::TimedOut { what: "the other end of a data lane", after: self.after }),
            false => Ok(left),
        }
    }
}

/// Ends both directions at once and wakes whoever sleeps on the connection. That it has ended already is no error.
pub(super) fn cut(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

/// Interrupted, or the socket's own time-out: the caller's clock decides whether there is another try.
fn is_try_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A lane may be idle for hours, a host that vanished in that time must still be found out: after half a minute of silence,
/// four questions at intervals of ten seconds.
fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10)).with_retries(4)
}

/// A wish, not a condition: a lane under the system's own congestion control is slower at worst.
fn choose_congestion(socket: &SockRef<'_>, name: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if let Err(error) = socket.set_tcp_congestion(name.as_bytes())
        && !WARNED.swap(true, Ordering::Relaxed)
    {
        tracing::warn!(
            congestion = name, %error,
            "the system refused this congestion control for data lanes and keeps its own: load it, or add it to \
             net.ipv4.tcp_allowed_congestion_control"
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_was_written_at_once_leaves_at_the_rate() {
        const BYTES: usize = 1 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        smooth(&sender, NonZeroU64::new(4 << 20).unwrap()).unwrap();
        let began = Instant::now();
        let reader = std::thread::spawn(move || receiver.read_exact(&mut vec![0; BYTES]).map(|()| began.elapsed()));
        sender.write_all(&vec![7; BYTES]).unwrap();
        let took = reader.join().unwrap().unwrap();
        // A quarter of a second, less what leaves before the system counts; without, it is a few milliseconds.
        assert!(took > Duration::from_millis(150), "{took:?}");
    }
}
