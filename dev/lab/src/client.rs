//! A small blocking client: one connection, commands and their answers in order.
//!
//! It is not a library for applications: it has no reconnecting, pool or TLS (a server of the lab always has a plain
//! port too).

use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use remora_redis::info::Info;
use remora_redis::resp::{self, Decoder, Frame, Limits};

use crate::{Doing, Error, Result};

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Host and port.
    Tcp(SocketAddr),
    /// The path of a unix socket.
    Unix(PathBuf),
}

/// One connection to a server.
pub struct Client {
    stream: Box<dyn Stream>,
    decoder: Decoder,
    chunk: Vec<u8>,
    /// Commands that are encoded and not yet sent.
    unsent: Vec<u8>,
    /// The last command, shortened, for messages.
    last: String,
}

impl Client {
    /// Connects. Every read and write is bounded by [`Client::TIMEOUT`] unless [`Client::timeout`] says otherwise.
    pub fn connect(address: &Address) -> Result<Client> {
        let stream: Box<dyn Stream> = match address {
            Address::Tcp(address) => Box::new(connect_tcp(*address).doing(|| format!("connect to {address}"))?),
            Address::Unix(path) => {
                Box::new(UnixStream::connect(path).doing(|| format!("connect to {}", path.display()))?)
            }
        };
        let mut client = Client {
            stream,
            decoder: Decoder::new(Limits::default()),
            chunk: vec![0; CHUNK_BYTES],
            unsent: Vec::new(),
            last: String::new(),
        };
        client.timeout(Client::TIMEOUT)?;
        Ok(client)
    }

    /// Default time limit of one read or write: a `DEBUG DIGEST` over a gigabyte on a busy machine must fit.
    pub const TIMEOUT: Duration = Duration::from_secs(120);

    /// Sets the time limit of one read or write from now on.
    pub fn timeout(&mut self, timeout: Duration) -> Result<()> {
        self.stream.timeouts(timeout).doing(|| "set a time-out")
    }

    /// Sends AUTH, as `user` or with the password alone.
    pub fn auth(&mut self, user: Option<&str>, password: &str) -> Result<()> {
        match user {
            Some(user) => self.ok(&["AUTH", user, password]),
            None => self.ok(&["AUTH", password]),
        }
    }

    /// Sends one command and returns its answer. An error of the server is an `Err`.
    pub fn call<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Frame> {
        self.send(args)?;
        match self.receive()? {
            Frame::Error(text) => {
                Err(Error::Refused { command: self.last.clone(), reply: String::from_utf8_lossy(&text).into_owned() })
            }
            frame => Ok(frame),
        }
    }

    /// Sends one command whose answer is a status, and ignores the text of the status.
    pub fn ok<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<()> {
        match self.call(args)? {
            Frame::Simple(_) => Ok(()),
            other => Err(self.unexpected(&other, "status")),
        }
    }

    /// Sends one command whose answer is text. A null answer is the empty text.
    pub fn text<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<String> {
        match self.call(args)? {
            Frame::Simple(text) | Frame::Bulk(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Frame::Null => Ok(String::new()),
            other => Err(self.unexpected(&other, "text")),
        }
    }

    /// Sends one command whose answer is bytes or null.
    pub fn bytes<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Option<Vec<u8>>> {
        match self.call(args)? {
            Frame::Simple(bytes) | Frame::Bulk(bytes) => Ok(Some(bytes)),
            Frame::Null => Ok(None),
            other => Err(self.unexpected(&other, "bytes")),
        }
    }

    /// Sends one command whose answer is a number.
    pub fn int<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<i64> {
        match self.call(args)? {
            Frame::Integer(number) => Ok(number),
            other => Err(self.unexpected(&other, "number")),
        }
    }

    /// Sends one command whose answer is a list.
    pub fn list<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Vec<Frame>> {
        match self.call(args)? {
            Frame::Array(items) => Ok(items),
            other => Err(self.unexpected(&other, "list")),
        }
    }

    /// INFO of one section.
    pub fn info(&mut self, section: &str) -> Result<Info> {
        let text = self.bytes(&["INFO", section])?.unwrap_or_default();
        Ok(Info::parse(&text))
    }

    /// Queues a command without waiting for its answer. The next [`Client::flush`] or [`Client::receive`] sends it.
    pub fn queue<A: AsRef<[u8]>>(&mut self, args: &[A]) {
        resp::command(&mut self.unsent, args);
        self.last = shortened(args);
    }

    /// Number of bytes queued and not yet sent.
    pub fn queued(&self) -> usize {
        self.unsent.len()
    }

    /// Sends the queued commands.
    pub fn flush(&mut self) -> Result<()> {
        let sent = self.stream.write_all(&self.unsent);
        self.unsent.clear();
        // A pipeline of big values should not keep its memory.
        self.unsent.shrink_to(CHUNK_BYTES);
        sent.doing(|| format!("send {:?}", self.last))
    }

    /// Sends one command now.
    pub fn send<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<()> {
        self.queue(args);
        self.flush()
    }

    /// Reads the next answer. Errors of the server are frames.
    pub fn receive(&mut self) -> Result<Frame> {
        if !self.unsent.is_empty() {
            self.flush()?;
        }
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|error| Error::Garbled(error.to_string()))? {
                return Ok(frame);
            }
            let read = self.stream.read(&mut self.chunk).doing(|| format!("read the answer to {:?}", self.last))?;
            if read == 0 {
                let closed: Result<(), io::Error> = Err(io::ErrorKind::UnexpectedEof.into());
                closed.doing(|| format!("read the answer to {:?}: the server closed", self.last))?;
            }
            self.decoder.feed(&self.chunk[..read]);
        }
    }

    /// Sends many commands at once and returns one answer for each. Errors of the server are frames.
    pub fn pipeline<A: AsRef<[u8]>>(&mut self, commands: &[Vec<A>]) -> Result<Vec<Frame>> {
        for command in commands {
            self.queue(command);
        }
        commands.iter().map(|_| self.receive()).collect()
    }

    fn unexpected(&self, frame: &Frame, wanted: &'static str) -> Error {
        Error::Unexpected { command: self.last.clone(), reply: shown_bytes(format!("{frame:?}").as_bytes()), wanted }
    }
}

impl Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("last", &self.last).finish_non_exhaustive()
    }
}

trait Stream: Read + Write + Send {
    fn timeouts(&self, timeout: Duration) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn timeouts(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

impl Stream for UnixStream {
    fn timeouts(&self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

fn connect_tcp(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, CONNECT_TIME)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A command as messages show it: a few short arguments, no password.
fn shortened<A: AsRef<[u8]>>(args: &[A]) -> String {
    let secret = args.first().is_some_and(|name| name.as_ref().eq_ignore_ascii_case(b"AUTH"));
    let shown = if secret { 1 } else { SHOWN_ARGS };
    let mut words: Vec<String> = args.iter().take(shown).map(|arg| shown_bytes(arg.as_ref())).collect();
    if args.len() > shown {
        words.push("…".into());
    }
    words.join(" ")
}

/// Any bytes, readable and shortened.
pub(crate) fn shown_bytes(bytes: &[u8]) -> String {
    let cut = bytes.len().min(SHOWN_BYTES);
    let dots = if cut < bytes.len() { "…" } else { "" };
    format!("{}{dots}", bytes[..cut].escape_ascii())
}

/// Size of one read: as much as a socket usually has available.
const CHUNK_BYTES: usize = 64 << 10;

/// Time limit for connecting. Within one machine it takes microseconds; the limit is for an overloaded machine.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Number of a command's arguments in a message.
const SHOWN_ARGS: usize = 4;

/// Number of bytes of an argument or of an answer in a message.
const SHOWN_BYTES: usize = 60;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_shows_neither_passwords_nor_long_values() {
        assert_eq!(shortened(&["AUTH", "user", "secret"]), "AUTH …");
        assert_eq!(shortened(&["GET", "a\r\nb"]), r"GET a\r\nb");
        assert!(shortened(&["SET", "a", &"x".repeat(1000)]).len() < 100);
    }
}
