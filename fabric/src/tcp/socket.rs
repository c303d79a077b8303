//! Options of a lane's connection, and reads and writes with a deadline.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    num::NonZeroU64,
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use socket2::{SockRef, TcpKeepalive};

use super::{TcpOptions, UploadRate};
use crate::Error;

/// Sets the options of both ends. SO_RCVBUF and SO_SNDBUF are not set: either disables the system's own tuning, and
/// with buffers of 4 MiB a lane was seen to stall at 60 reads per second.
pub(super) fn prepare(stream: &TcpStream, options: &TcpOptions) -> Result<(), Error> {
    stream.set_nonblocking(false).map_err(Error::system("making a lane blocking"))?;
    stream.set_nodelay(true).map_err(Error::system("setting TCP_NODELAY"))?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive()).map_err(Error::system("setting keep-alive"))?;
    if let Some(name) = &options.congestion {
        choose_congestion(&socket, name);
    }
    let smoothed = match options.upload {
        UploadRate::Unlimited => Ok(()),
        UploadRate::Fixed(rate) => smooth(stream, rate),
        // The lane's thread sets the rate. What waits in the socket is not spaced by it, and must not be long.
        UploadRate::Background if is_within_host(stream) => Ok(()),
        UploadRate::Background => socket.set_tcp_notsent_lowat(MOST_UNSENT_BYTES),
    };
    if let Err(error) = smoothed {
        // The rate is still limited, but with bursts.
        tracing::debug!(%error, "cannot set SO_MAX_PACING_RATE or TCP_NOTSENT_LOWAT on a lane");
    }
    Ok(())
}

/// Whether both ends of a connection are on this host, as far as their addresses tell.
pub(super) fn is_within_host(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(local), Ok(peer)) => local.ip() == peer.ip(),
        _ => false,
    }
}

/// Makes the system space the packets of a connection by this rate (`SO_MAX_PACING_RATE`). Without it, bytes that were
/// written in time leave in a burst when the reader has delayed them, and queue before all other traffic of the link.
/// For clients of a primary on the same 1 Gb/s link, the 99th percentile of the delay was 5 to 28 ms without and 0.2 to
/// 0.5 ms with it.
#[allow(unsafe_code)] // no crate wraps this option
pub(super) fn smooth(stream: &TcpStream, rate: NonZeroU64) -> io::Result<()> {
    let rate = rate.get();
    let length = size_of_val(&rate) as libc::socklen_t;
    // SAFETY: The socket is open, as it is borrowed. The value is a local variable of exactly that length, which
    // outlives the call. (Linux before 4.20 reads only its lower half, which is all of it below 34 Gb/s.)
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

/// What TCP says of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// The least round-trip time of the last minutes (`net.ipv4.tcp_min_rtt_wlen`).
    pub(super) least: Duration,
    /// The present round-trip time, smoothed.
    pub(super) present: Duration,
    /// Bytes that the other end has acknowledged.
    pub(super) acknowledged: u64,
    /// Segments that were sent again.
    pub(super) sent_again: u32,
}

/// Asks TCP about a connection (`TCP_INFO`).
///
/// # Errors
/// The system does not answer, or is older than Linux 4.6, which has no least round-trip time.
#[allow(unsafe_code)] // libc has the structure of Linux 2.4, and no other crate has the option
pub(super) fn told(stream: &TcpStream) -> io::Result<Told> {
    let mut info = [0_u8; TCP_INFO_BYTES];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: The socket is open, as it is borrowed. `info` is a local array of exactly `length` bytes, which the
    // kernel may fill in part, and any bytes are valid there. It stores in `length`, another local variable, how many
    // it has filled. Both outlive the call.
    let got = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    read_info(info.get(..length as usize).unwrap_or_default())
        .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "TCP_INFO has no least round-trip time"))
}

/// Reads the fields of Linux's `struct tcp_info`, whose places never change: it only grows at its end.
fn read_info(info: &[u8]) -> Option<Told> {
    let word = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    let micros = |at: usize| Some(Duration::from_micros(word(at)?.into()));
    Some(Told {
        present: micros(TCPI_RTT)?,
        sent_again: word(TCPI_TOTAL_RETRANS)?,
        acknowledged: long(TCPI_BYTES_ACKED)?,
        least: micros(TCPI_MIN_RTT)?,
    })
}

/// Bytes of Linux's `struct tcp_info` up to `tcpi_min_rtt`, and the places of its fields.
const TCP_INFO_BYTES: usize = 152;
const TCPI_RTT: usize = 68;
const TCPI_TOTAL_RETRANS: usize = 100;
const TCPI_BYTES_ACKED: usize = 120;
const TCPI_MIN_RTT: usize = 148;

/// Bytes that wait in the socket of a background transfer before they are sent for the first time. Its thread sleeps
/// while more wait, and cannot ask TCP how the lane is: 40 ms at 100 Mb/s. At 10 Gb/s, half of it would cost a tenth of
/// a processor in wake-ups.
const MOST_UNSENT_BYTES: u32 = 512 << 10;

/// The congestion control of this connection.
pub(super) fn congestion(stream: &TcpStream) -> io::Result<String> {
    let name = SockRef::from(stream).tcp_congestion()?;
    // The kernel returns a buffer of fixed size, padded with zeros.
    Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
}

/// The deadline of a handshake, and the time limit that it came from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    pub(super) fn after(after: Duration) -> Deadline {
        Deadline { at: Instant::now() + after, after }
    }

    /// Fills `into`, however slowly bytes arrive.
    pub(super) fn read(self, mut stream: &TcpStream, mut into: &mut [u8]) -> Result<(), Error> {
        while !into.is_empty() {
            stream.set_read_timeout(Some(self.left()?)).map_err(Error::system("setting a time-out"))?;
            match stream.read(into) {
                Ok(0) => return Err(Error::Protocol("it closed the connection during the handshake")),
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

    /// The remaining time; never zero, which would mean no limit to a socket.
    pub(super) fn left(self) -> Result<Duration, Error> {
        let left = self.at.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(Error::TimedOut { what: "the other end of a data lane", after: self.after }),
            false => Ok(left),
        }
    }
}

/// Shuts both directions down, which wakes threads that wait on the connection. It is not an error if the connection
/// has already ended.
pub(super) fn cut(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

/// Interrupted, or the socket's own time-out: the deadline decides whether to retry.
fn is_try_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A lane may be idle for hours, and a vanished host must still be detected: after 30 s without traffic, four probes at
/// intervals of 10 s.
fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10)).with_retries(4)
}

/// Failure is not an error: a lane with the system's own congestion control may be slower.
fn choose_congestion(socket: &SockRef<'_>, name: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if let Err(error) = socket.set_tcp_congestion(name.as_bytes())
        && !WARNED.swap(true, Ordering::Relaxed)
    {
        tracing::warn!(
            congestion = name, %error,
            "the system refused this congestion control for data lanes and uses its own: load it, or add it to \
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
    fn tcp_says_what_was_acknowledged_and_how_long_that_took() {
        const BYTES: usize = 1 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        let before = told(&sender).unwrap();
        let reader = std::thread::spawn(move || receiver.read_exact(&mut vec![0; BYTES]));
        sender.write_all(&vec![7; BYTES]).unwrap();
        reader.join().unwrap().unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        let after = loop {
            let after = told(&sender).unwrap();
            if after.acknowledged - before.acknowledged == BYTES as u64 {
                break after;
            }
            assert!(Instant::now() < deadline, "{before:?} {after:?}");
        };
        assert!(after.least > Duration::ZERO && after.least <= after.present, "{after:?}");
        assert!(after.present < Duration::from_secs(1), "{after:?}");
        assert!(is_within_host(&sender));
        assert_eq!(read_info(&[0; TCP_INFO_BYTES - 1]), None, "an old kernel's");
    }

    #[test]
    fn what_was_written_at_once_leaves_at_the_rate() {
        const BYTES: usize = 4 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        smooth(&sender, NonZeroU64::new(8 << 20).unwrap()).unwrap();
        let began = Instant::now();
        let reader = std::thread::spawn(move || receiver.read_exact(&mut vec![0; BYTES]).map(|()| began.elapsed()));
        sender.write_all(&vec![7; BYTES]).unwrap();
        let took = reader.join().unwrap().unwrap();
        // Half a second, less the first burst, which the system does not pace: up to ten segments of 64 KiB on
        // loopback. Without pacing it takes a few milliseconds.
        assert!(took > Duration::from_millis(300), "{took:?}");
    }
}
