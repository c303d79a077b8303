//! [`Server`]: an address and a login. [`Client`]: one connection, which answers commands in order.
//! [`Stream`]: its bytes.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::RecvFlags;
use rustls::pki_types::ServerName;
use socket2::{Domain, Protocol, Type};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::time;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::refusals::{self, Shortened};
use super::tls::TlsSetup;
use super::{Credentials, Place, RefusalKind, ServerError, ServerUrl, SetupError, Task, TlsOptions};
use crate::simulated::SimulatedStream;
use remora_redis::info::Info;
use remora_redis::resp::{self, Decoder, Frame};

/// Time limit for name look-up, TCP, TLS, AUTH and SELECT together. A server that needs longer is too slow to begin a
/// copy with.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for one command. It is generous: a server that executes a slow command answers no other client meanwhile.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a server may take to notice that the link from which it loads is gone.
pub const SETTLE_LIMIT: Duration = Duration::from_secs(15);

/// The pause before that server is asked again.
pub const SETTLE_POLL: Duration = Duration::from_millis(50);

/// How long the last words of a server that has closed the connection may take: they have arrived already.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The most bytes that one read takes from the socket. Larger reads gained nothing, and this fits in the L2 cache.
const READ_BYTES: usize = 64 * 1024;

/// A server, and where its login is: nothing has been read or connected yet.
#[derive(Clone, Debug)]
pub struct Login {
    /// The server's address.
    pub url: ServerUrl,
    /// The ACL user. `None`: a password belongs to the user `default`.
    pub user: Option<String>,
    /// The file whose first line is the password. `None`: [`PASSWORD_VARIABLE`](super::PASSWORD_VARIABLE) counts.
    pub password_file: Option<PathBuf>,
    /// How to connect to a `rediss://` server.
    pub tls: TlsOptions,
}

impl Login {
    /// Reads the named files and prepares connections to the server. It sends nothing.
    ///
    /// # Errors
    /// A file cannot be used, or the options contradict each other.
    pub fn open(&self, task: Task) -> Result<Server, SetupError> {
        let credentials = Credentials::gather(self.user.as_deref(), self.password_file.as_deref())?;
        Server::new(self.url.clone(), credentials, &self.tls, task)
    }
}

/// A server to which any number of connections can be opened. It is cheap to clone.
#[derive(Clone)]
pub struct Server(Arc<Inner>);

struct Inner {
    url: ServerUrl,
    credentials: Credentials,
    tls: Option<TlsSetup>,
    task: Task,
}

impl Server {
    /// Describes a server. Fails if TLS cannot be set up with these files, or if there are TLS options for an address
    /// without TLS.
    pub fn new(url: ServerUrl, credentials: Credentials, tls: &TlsOptions, task: Task) -> Result<Self, SetupError> {
        let tls = match (url.place(), tls.first_given()) {
            (Place::Tcp { host, tls: true, .. }, _) => Some(tls.prepare(host)?),
            (_, None) => None,
            (_, Some(option)) => {
                return Err(SetupError::TlsUnused { option, url: url.to_string() });
            }
        };
        Ok(Self(Arc::new(Inner { url, credentials, tls, task })))
    }

    /// The server's address. It contains no secret.
    pub fn url(&self) -> &ServerUrl {
        &self.0.url
    }

    /// The login.
    pub fn credentials(&self) -> &Credentials {
        &self.0.credentials
    }

    /// What the connections are for.
    pub fn task(&self) -> Task {
        self.0.task
    }

    /// The same server with another login.
    pub fn with_login(&self, credentials: Credentials) -> Self {
        let Inner { url, tls, task, .. } = &*self.0;
        Self(Arc::new(Inner { url: url.clone(), credentials, tls: tls.clone(), task: *task }))
    }

    /// A server at another host and port with the same login and TLS options, such as the primary that a replica names.
    pub fn at(&self, host: &str, port: u16) -> Self {
        let url = ServerUrl::tcp_like(&self.0.url, host, port);
        let tls = self.0.tls.clone().map(|setup| match ServerName::try_from(host.to_owned()) {
            Ok(name) => TlsSetup { name, ..setup },
            Err(_) => setup,
        });
        Self(Arc::new(Inner { url, credentials: self.0.credentials.clone(), tls, task: self.0.task }))
    }

    /// Connects, logs in and selects the address's database.
    pub async fn connect(&self) -> Result<Client, ServerError> {
        self.connect_with(Sockets::Usual).await
    }

    /// Connects from this address of this host. If nothing can be reached from it, connects as usual, as servers do
    /// with their `bind-source-addr`.
    pub async fn connect_from(&self, address: IpAddr) -> Result<Client, ServerError> {
        self.connect_with(Sockets::From(address)).await
    }

    /// Connects over sockets of this kind.
    pub(super) async fn connect_with(&self, sockets: Sockets) -> Result<Client, ServerError> {
        match time::timeout(CONNECT_TIMEOUT, self.connect_unhurried(sockets)).await {
            Ok(result) => result,
            Err(_) => {
                // A port without TLS waits for the end of a line that never comes.
                let tls =
                    if self.0.tls.is_some() { " with TLS: check that the port is the server's tls-port" } else { "" };
                let text = format!("no connection within {} s{tls}", CONNECT_TIMEOUT.as_secs());
                Err(self.unreachable(io::Error::new(io::ErrorKind::TimedOut, text)))
            }
        }
    }

    async fn connect_unhurried(&self, sockets: Sockets) -> Result<Client, ServerError> {
        let stream = self.open_stream_with(sockets).await?;
        let mut client = Client {
            server: self.clone(),
            stream,
            decoder: Decoder::new(self.0.task.limits()),
            scratch: Vec::new(),
            timeout: COMMAND_TIMEOUT,
            answer_owed: false,
        };
        client.log_in().await?;
        Ok(client)
    }

    /// Opens a connection, with TLS if the address says so, and logs in nowhere.
    pub async fn open_stream(&self) -> Result<Stream, ServerError> {
        self.open_stream_with(Sockets::Usual).await
    }

    async fn open_stream_with(&self, sockets: Sockets) -> Result<Stream, ServerError> {
        let (host, port) = match self.0.url.place() {
            Place::Unix(path) => {
                return UnixStream::connect(path).await.map(Stream::Unix).map_err(|cause| self.unreachable(cause));
            }
            Place::Tcp { host, port, .. } => (host.as_str(), *port),
        };
        if let Some(connected) = crate::simulated::connect(host, port).await {
            return connected.map(Stream::Simulated).map_err(|cause| self.unreachable(cause));
        }
        let tcp = match sockets {
            Sockets::Usual => TcpStream::connect((host, port)).await,
            Sockets::Small => connect_small(host, port).await,
            Sockets::From(own) => connect_from(own, host, port).await,
        };
        let tcp = tcp.map_err(|cause| self.unreachable(cause))?;
        // Commands are small, and each waits for its answer. To hold them back until a packet is full would only add
        // delay.
        tcp.set_nodelay(true).map_err(|cause| self.unreachable(cause))?;
        let Some(setup) = &self.0.tls else {
            return Ok(Stream::Tcp(tcp));
        };
        let connecting = TlsConnector::from(setup.config.clone()).connect(setup.name.clone(), tcp);
        let stream = connecting.await.map_err(|cause| ServerError::Tls {
            server: self.0.url.to_string(),
            task: self.0.task,
            cause,
        })?;
        Ok(Stream::Tls(Box::new(stream)))
    }

    fn unreachable(&self, cause: io::Error) -> ServerError {
        ServerError::Unreachable { server: self.0.url.to_string(), cause }
    }
}

/// The sockets of a connection: how many bytes they hold, and at which address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sockets {
    /// What the kernel thinks right.
    Usual,
    /// As few as possible, at both ends.
    Small,
    /// At this address of this host.
    From(IpAddr),
}

/// Whether the kernel refuses a connection because of the address that it would come from.
fn is_unusable(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, InvalidInput, NetworkUnreachable};
    matches!(error.kind(), AddrNotAvailable | InvalidInput | NetworkUnreachable)
}

/// Connects from this address to the first one of the host that answers, as the servers do: as usual if nothing can be
/// reached from there.
async fn connect_from(own: IpAddr, host: &str, port: u16) -> io::Result<TcpStream> {
    let mut failed = None;
    for address in tokio::net::lookup_host((host, port)).await? {
        if address.is_ipv4() != own.is_ipv4() {
            continue;
        }
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        if socket.bind(SocketAddr::new(own, 0)).is_err() {
            continue;
        }
        match socket.connect(address).await {
            Ok(tcp) => return Ok(tcp),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        // From an address such as this one, there is no way to any of them.
        Some(error) if !is_unusable(&error) => Err(error),
        _ => TcpStream::connect((host, port)).await,
    }
}

/// Connects to the first address of the host that answers, with small sockets.
async fn connect_small(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in tokio::net::lookup_host((host, port)).await? {
        let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        make_small(&socket)?;
        socket.set_nonblocking(true)?;
        match TcpSocket::from_std_stream(socket.into()).connect(address).await {
            Ok(tcp) => return Ok(tcp),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Gives a socket a small receive buffer, and asks for small segments.
fn make_small(socket: &socket2::Socket) -> io::Result<()> {
    /// The kernel doubles it, and takes no less than 2304 bytes in all.
    const RECEIVE_BYTES: usize = 2048;
    /// In bytes. Every TCP must take segments of this size (RFC 9293).
    const SEGMENT: u32 = 536;
    socket.set_recv_buffer_size(RECEIVE_BYTES)?;
    socket.set_tcp_mss(SEGMENT)
}

/// Prints the address only: credentials must not get into logs.
impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Server").field(&self.0.url.to_string()).finish()
    }
}

/// One connection to a server. After any error except [`ServerError::Refused`] it must be dropped, because the next
/// answer may belong to an earlier command. [`Client::is_usable`] tells whether it can be used.
// Larger than the bound: a method for each way to ask, and for each error of an answer.
#[derive(Debug)]
pub struct Client {
    server: Server,
    stream: Stream,
    decoder: Decoder,
    /// Holds the encoded command, then the bytes that were read. It is kept so that neither allocates each time.
    scratch: Vec<u8>,
    timeout: Duration,
    /// A command was sent, at least in part, and its answer was not received: it failed, or the caller dropped the
    /// future.
    answer_owed: bool,
}

impl Client {
    /// Sends one command and waits for its answer. An error reply becomes [`ServerError::Refused`].
    pub async fn command<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Frame, ServerError> {
        self.command_within(self.timeout, args).await
    }

    /// Sends one command as soon as the server takes it. A server that still loads from the link of an agent that is
    /// gone refuses most commands until it notices that; it is asked again for [`SETTLE_LIMIT`].
    pub async fn command_once_settled<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Frame, ServerError> {
        let began = time::Instant::now();
        loop {
            match self.command(args).await {
                Err(error) if error.refusal() == Some(RefusalKind::Loading) && began.elapsed() < SETTLE_LIMIT => {}
                done => return done,
            }
            time::sleep(SETTLE_POLL).await;
        }
    }

    /// Sends one command with its own time limit, for commands that take long.
    pub async fn command_within<A: AsRef<[u8]>>(&mut self, limit: Duration, args: &[A]) -> Result<Frame, ServerError> {
        let name = command_name(args);
        let mut encoded = std::mem::take(&mut self.scratch);
        encoded.clear();
        resp::command(&mut encoded, args);
        self.answer_owed = true;
        let sent = self.send_within(limit, &encoded, &name).await;
        self.scratch = encoded;
        sent?;
        let frame = self.receive_within(limit, &name).await?;
        self.answer_owed = false;
        self.no_error(frame, &name)
    }

    /// Sends all commands at once and returns all answers. Error replies are among them as [`Frame::Error`]. The
    /// pipeline is empty afterwards and can be filled again.
    pub async fn pipeline(&mut self, pipeline: &mut Pipeline) -> Result<Vec<Frame>, ServerError> {
        self.answer_owed = true;
        self.send(&pipeline.bytes).await?;
        let mut frames = Vec::with_capacity(pipeline.count);
        for _ in 0..pipeline.count {
            frames.push(self.receive().await?);
        }
        self.answer_owed = false;
        pipeline.clear();
        Ok(frames)
    }

    /// Has the server carry out these commands as one transaction, and returns the answer to each.
    ///
    /// # Errors
    /// The server has carried out none of them; or the connection failed, and it is not known whether it has.
    pub async fn transaction(&mut self, commands: &[&[&str]]) -> Result<Vec<Result<Frame, ServerError>>, ServerError> {
        let mut pipeline = Pipeline::default();
        let all = [&[&["MULTI"][..]], commands, &[&["EXEC"][..]]].concat();
        all.iter().for_each(|command| pipeline.push(command));
        let names = || all.iter().map(|command| command_name(command));
        let mut done = None;
        // The first error of several is the cause of the others.
        for (frame, name) in self.pipeline(&mut pipeline).await?.into_iter().zip(names()) {
            done = Some(self.no_error(frame, &name)?);
        }
        let answers = match done {
            Some(Frame::Array(answers)) => answers,
            other => return Err(self.unexpected("EXEC", &other.unwrap_or(Frame::Null))),
        };
        let names = names().skip(1);
        Ok(answers.into_iter().zip(names).map(|(answer, name)| self.no_error(answer, &name)).collect())
    }

    /// Sends bytes that are encoded commands or a part of one. The caller must call [`Client::receive`] once for each
    /// whole command.
    pub async fn send(&mut self, bytes: &[u8]) -> Result<(), ServerError> {
        self.send_within(self.timeout, bytes, "a pipeline").await
    }

    /// Waits for the next answer. An error reply is returned as a frame.
    pub async fn receive(&mut self) -> Result<Frame, ServerError> {
        self.receive_within(self.timeout, "a pipeline").await
    }

    /// Sends `INFO`, or `INFO` with a section.
    pub async fn info(&mut self, section: &str) -> Result<Info, ServerError> {
        let sections = if section.is_empty() { &[][..] } else { &[section] };
        self.info_of(sections).await
    }

    /// Sends `INFO` with these sections. Servers before Redis 7.0 take one at most.
    pub async fn info_of(&mut self, sections: &[&str]) -> Result<Info, ServerError> {
        match self.command(&[&["INFO"], sections].concat()).await? {
            Frame::Bulk(text) => Ok(Info::parse(&text)),
            other => Err(self.unexpected("INFO", &other)),
        }
    }

    /// The value of a setting that is text; `None` if the server does not know it.
    pub async fn config_get(&mut self, name: &str) -> Result<Option<String>, ServerError> {
        let value = self.config_bytes(name).await?;
        Ok(value.map(|value| String::from_utf8_lossy(&value).into_owned()))
    }

    /// The value of a setting that is a number; `None` if the server does not know it, or refuses to tell.
    pub async fn config_number<N: std::str::FromStr>(&mut self, name: &str) -> Result<Option<N>, ServerError> {
        match self.config_get(name).await {
            Err(error) if error.refusal().is_some() => Ok(None),
            value => Ok(value?.and_then(|value| value.parse().ok())),
        }
    }

    /// The value of a setting that may be any bytes: a name, a path or a password. `None` if the server does not know
    /// it.
    pub async fn config_bytes(&mut self, name: &str) -> Result<Option<Vec<u8>>, ServerError> {
        match self.command(&["CONFIG", "GET", name]).await? {
            Frame::Array(pair) => match pair.into_iter().nth(1) {
                Some(Frame::Bulk(value)) => Ok(Some(value)),
                _ => Ok(None),
            },
            other => Err(self.unexpected("CONFIG GET", &other)),
        }
    }

    /// Changes a setting of the running server.
    pub async fn config_set(&mut self, name: &str, value: &str) -> Result<(), ServerError> {
        self.command(&["CONFIG", "SET", name, value]).await.map(drop)
    }

    /// Selects the database for later commands.
    pub async fn select(&mut self, database: u32) -> Result<(), ServerError> {
        self.command(&["SELECT", &database.to_string()]).await.map(drop)
    }

    /// Sets the time limit of each later command.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The server at the other end of this connection.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Whether the next command can be sent on this connection: no answer is owed, and the server has not closed it.
    ///
    /// A server closes idle connections after its `timeout`. It sends nothing without a request. So anything to be read
    /// here, including the end of the stream, means that the connection is of no further use.
    pub fn is_usable(&self) -> bool {
        !self.answer_owed && self.stream.is_silent()
    }

    /// The local address, unless the connection is a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.stream.tcp().and_then(|tcp| tcp.local_addr().ok())
    }

    /// The server's address, unless the connection is a Unix socket.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.stream.tcp().and_then(|tcp| tcp.peer_addr().ok())
    }

    /// The process at the other end, if the connection is a Unix socket and the kernel tells.
    pub fn peer_process(&self) -> Option<u32> {
        let Stream::Unix(stream) = &self.stream else { return None };
        stream.peer_cred().ok()?.pid()?.try_into().ok()
    }

    /// Ends the use as a client. Returns the stream, and the bytes that were received and not used.
    pub fn into_stream(mut self) -> (Stream, Vec<u8>) {
        let rest = self.decoder.take_rest();
        (self.stream, rest)
    }

    /// The error for an answer of the wrong type, for callers that know what a command answers.
    pub fn unexpected(&self, command: &str, found: &Frame) -> ServerError {
        let found = match found {
            Frame::Simple(text) | Frame::Error(text) | Frame::Bulk(text) => Shortened(text).to_string(),
            Frame::Integer(number) => number.to_string(),
            Frame::Null => "a null reply".into(),
            Frame::Array(items) => format!("an array of {} elements", items.len()),
        };
        ServerError::Unexpected { server: self.server.url().to_string(), command: command.to_owned(), found }
    }

    /// The error for an error reply from [`Client::receive`] or [`Client::pipeline`].
    pub fn refused(&self, command: &str, text: &[u8]) -> ServerError {
        let text = String::from_utf8_lossy(text).into_owned();
        ServerError::Refused {
            server: self.server.url().to_string(),
            command: command.to_owned(),
            kind: refusals::line_for(command, &text).kind,
            text,
            task: self.server.task(),
        }
    }

    /// Sends AUTH if there is a password, and in any case a PING: its answer shows that this is a Redis or Valkey
    /// server.
    async fn log_in(&mut self) -> Result<(), ServerError> {
        let Credentials { user, password } = self.server.credentials().clone();
        match (&user, &password) {
            (_, None) => {}
            (None, Some(password)) => self.command(&[b"AUTH".as_slice(), password.expose()]).await.map(drop)?,
            (Some(user), Some(password)) => {
                self.command(&[b"AUTH".as_slice(), user, password.expose()]).await.map(drop)?
            }
        }
        self.check_alive().await?;
        match self.server.url().database() {
            0 => Ok(()),
            database => self.select(database).await,
        }
    }

    /// Accepts a server that is loading. The caller decides what to ask it meanwhile, so that it can wait until the
    /// server has loaded.
    async fn check_alive(&mut self) -> Result<(), ServerError> {
        match self.command(&["PING"]).await {
            Ok(Frame::Simple(text)) if text == b"PONG" => Ok(()),
            Ok(other) => Err(ServerError::NotRedis {
                server: self.server.url().to_string(),
                found: self.unexpected("PING", &other).to_string(),
            }),
            Err(error)
                if matches!(
                    error.refusal(),
                    Some(RefusalKind::Loading | RefusalKind::NoMasterLink | RefusalKind::Busy)
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn send_within(&mut self, limit: Duration, bytes: &[u8], command: &str) -> Result<(), ServerError> {
        let stream = &mut self.stream;
        let sending = async {
            stream.write_all(bytes).await?;
            stream.flush().await
        };
        match within(limit, sending).await {
            Ok(()) => Ok(()),
            Err(Trouble::TimedOut) => Err(self.trouble(Trouble::TimedOut, limit, command)),
            Err(trouble) => Err(self.last_words(trouble, limit, command).await),
        }
    }

    /// Why the server has closed the connection. One that accepts no more clients says so before, and what it has said
    /// can still be read.
    async fn last_words(&mut self, trouble: Trouble, limit: Duration, command: &str) -> ServerError {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(Frame::Error(text))) => return self.refused(command, &text),
                // An answer to an earlier command.
                Ok(Some(_)) => {}
                Ok(None) if within(LAST_WORDS, self.read_more()).await.is_ok() => {}
                Ok(None) | Err(_) => return self.trouble(trouble, limit, command),
            }
        }
    }

    async fn receive_within(&mut self, limit: Duration, command: &str) -> Result<Frame, ServerError> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(error) => {
                    return Err(ServerError::NotRedis {
                        server: self.server.url().to_string(),
                        found: error.to_string(),
                    });
                }
            }
            // The limit is on silence and not on the whole answer: a large value over a slow link makes progress.
            if let Err(trouble) = within(limit, self.read_more()).await {
                return Err(self.trouble(trouble, limit, command));
            }
        }
    }

    async fn read_more(&mut self) -> io::Result<()> {
        self.scratch.clear();
        self.scratch.reserve(READ_BYTES);
        let count = (&mut self.stream).take(READ_BYTES as u64).read_buf(&mut self.scratch).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.decoder.feed(&self.scratch);
        Ok(())
    }

    fn no_error(&self, frame: Frame, command: &str) -> Result<Frame, ServerError> {
        match frame {
            Frame::Error(text) => Err(self.refused(command, &text)),
            frame => Ok(frame),
        }
    }

    fn trouble(&self, trouble: Trouble, limit: Duration, command: &str) -> ServerError {
        let (server, command) = (self.server.url().to_string(), command.to_owned());
        match trouble {
            Trouble::TimedOut => ServerError::TimedOut { server, command, limit },
            // TLS 1.3 refuses a client's certificate only after the handshake, in answer to the first bytes.
            Trouble::Io(cause) if is_tls_error(&cause) => ServerError::Tls { server, task: self.server.task(), cause },
            Trouble::Io(cause) => ServerError::Lost { server, command, cause },
        }
    }
}

/// Commands to be sent together.
#[derive(Clone, Debug, Default)]
pub struct Pipeline {
    bytes: Vec<u8>,
    count: usize,
}

impl Pipeline {
    /// Adds one command.
    pub fn push<A: AsRef<[u8]>>(&mut self, args: &[A]) {
        resp::command(&mut self.bytes, args);
        self.count += 1;
    }

    /// The number of commands, which is the number of answers.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether the pipeline is empty.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The encoded commands, for [`Client::send`].
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Removes the commands and keeps the allocated memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.count = 0;
    }
}

enum Trouble {
    TimedOut,
    Io(io::Error),
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> Result<T, Trouble> {
    match time::timeout(limit, work).await {
        Ok(result) => result.map_err(Trouble::Io),
        Err(_) => Err(Trouble::TimedOut),
    }
}

fn is_tls_error(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}

/// The command's name for messages, with its subcommand if it has one. It never contains another argument.
fn command_name<A: AsRef<[u8]>>(args: &[A]) -> String {
    let mut words = args.iter().map(|word| String::from_utf8_lossy(word.as_ref()).to_ascii_uppercase());
    let name = words.next().unwrap_or_default();
    match (name.as_str(), words.next()) {
        (
            "CONFIG" | "DEBUG" | "FUNCTION" | "MEMORY" | "XINFO" | "CLIENT" | "REPLCONF" | "SENTINEL",
            Some(subcommand),
        ) => {
            format!("{name} {subcommand}")
        }
        _ => name,
    }
}

// One byte stream to a server, over TCP, a Unix socket or TLS.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_command_and_never_its_arguments() {
        assert_eq!(command_name(&["auth", "user", "secret"]), "AUTH");
        assert_eq!(command_name(&["config", "get", "masterauth"]), "CONFIG GET");
        assert_eq!(command_name::<&str>(&[]), "");
    }

    #[test]
    fn a_pipeline_counts_what_it_owes() {
        let mut pipeline = Pipeline::default();
        pipeline.push(&["PING"]);
        pipeline.push(&["GET", "a"]);
        assert_eq!((pipeline.len(), pipeline.is_empty()), (2, false));
        assert_eq!(pipeline.as_bytes(), b"*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$1\r\na\r\n");
        pipeline.clear();
        assert!(pipeline.is_empty());
    }
}
