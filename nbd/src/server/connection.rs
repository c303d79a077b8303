//! Connection: one client, and the thread that serves it.
//!
//! The thread receives as many requests as have arrived, has them all done, and sends the answers that it got at once.
//! One that answers later needs a second thread, which is started with the first of these answers.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{Answer, Device, Payload};
use crate::export::{Export, Geometry};
use crate::handshake::{self, Handshake, Session, Step, Tls};
use crate::outbox::Outbox;
use crate::protocol::Asked;
use crate::request::{Broken, Op, Request};
use crate::stream::{Stream, TlsConfig};

/// What all connections of a server serve.
pub(super) struct Served {
    pub(super) exports: Arc<[Export]>,
    pub(super) devices: Vec<Arc<dyn Device>>,
    pub(super) tls: Option<TlsConfig>,
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error(transparent)]
    Handshake(#[from] handshake::Error),
    #[error(transparent)]
    Requests(#[from] Broken),
    #[error("negotiation took more than {HANDSHAKE_LIMIT:?}")]
    TooSlow,
    #[error("the client does not take its answers, or is gone: {0}")]
    Io(#[from] io::Error),
    #[error("starting TLS: {0}")]
    Tls(io::Error),
}

/// Serves a client until it ends the connection, or cannot be followed any more. `published` is how the server ends it.
pub(super) fn serve(socket: Arc<OwnedFd>, served: &Served, published: &OnceLock<Arc<Outbox>>) -> Result<(), Ended> {
    let Some((stream, session, early)) = negotiate(socket, served)? else { return Ok(()) };
    let Some(device) = served.devices.get(session.export) else { return Ok(()) };
    let outbox = Arc::clone(published.get_or_init(|| Arc::new(Outbox::new(stream))));
    let mut connection = Connection {
        device: &**device,
        geometry: device.geometry(),
        session,
        outbox: Arc::clone(&outbox),
        writer: None,
        batch: Vec::with_capacity(BATCH_BYTES),
        buffer: vec![0; BUFFER_BYTES].into(),
        start: 0,
        end: early.len(),
        is_busy: false,
    };
    connection.buffer[..early.len()].copy_from_slice(&early);
    let result = connection.run();
    if matches!(result, Ok(End::Asked)) {
        outbox.drain(DRAIN_LIMIT);
    }
    outbox.end();
    if let Some(writer) = connection.writer.take() {
        let _ = writer.join(); // a panic was reported where it happened
    }
    result.map(drop)
}

/// Negotiates, and returns what a hasty client has sent behind its choice. `None`: the client wants nothing more.
fn negotiate(socket: Arc<OwnedFd>, served: &Served) -> Result<Option<(Stream, Session, Vec<u8>)>, Ended> {
    let until = Instant::now() + HANDSHAKE_LIMIT;
    let tls = if served.tls.is_some() { Tls::Required } else { Tls::Off };
    let mut handshake = Handshake::new(Arc::clone(&served.exports), tls);
    let mut stream = Stream::plain(Arc::clone(&socket));
    let (mut input, mut out) = (Vec::new(), Vec::new());
    Handshake::greeting(&mut out);
    loop {
        let received = handshake.receive(&input, &mut out);
        // A client that does not send the next option before it has this answer must not wait for it.
        if !out.is_empty() {
            stream.send(&[&out])?;
            out.clear();
        }
        let (consumed, step) = received?;
        input.drain(..consumed);
        match step {
            Step::Next => {}
            Step::More => {
                let mut more = [0; 4096];
                stream.receive_until(Some(until)).map_err(too_slow)?;
                match stream.receive(&mut more).map_err(too_slow)? {
                    0 => return Ok(None),
                    count => input.extend_from_slice(&more[..count]),
                }
            }
            Step::StartTls => {
                let Some(config) = served.tls.as_ref().map(TlsConfig::current) else { return Ok(None) };
                stream = Stream::encrypted(Arc::clone(&socket), config, until).map_err(Ended::Tls)?;
                handshake.tls_started();
            }
            Step::Serve(session) => {
                stream.receive_until(None)?;
                return Ok(Some((stream, session, input)));
            }
            Step::End => return Ok(None),
        }
    }
}

fn too_slow(error: io::Error) -> Ended {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ended::TooSlow,
        _ => Ended::Io(error),
    }
}

struct Connection<'a> {
    device: &'a dyn Device,
    geometry: Geometry,
    session: Session,
    outbox: Arc<Outbox>,
    /// Sends what is answered later.
    writer: Option<JoinHandle<()>>,
    /// What was answered at once.
    batch: Vec<u8>,
    /// What was received and not yet used is `buffer[start..end]`.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The client sends its requests one soon after the other.
    is_busy: bool,
}

enum End {
    /// The client asked for it, and waits until all is done.
    Asked,
    /// The client is gone.
    Gone,
}

impl Connection<'_> {
    fn run(&mut self) -> Result<End, Ended> {
        loop {
            while let Some(request) = self.next()? {
                if let Some(end) = self.request(request)? {
                    self.send()?;
                    return Ok(end);
                }
                if self.batch.len() >= BATCH_BYTES {
                    self.send()?;
                }
            }
            self.send()?;
            if !self.receive()? {
                return Ok(End::Gone);
            }
        }
    }

    /// The next head in the buffer.
    fn next(&mut self) -> Result<Option<Request>, Ended> {
        let Some(head) = self.buffer[self.start..self.end].first_chunk() else { return Ok(None) };
        let request = Request::decode(head)?;
        let here = self.end - self.start - Request::BYTES;
        // A short write waits in the buffer until it is complete. A long one gets memory of its own.
        if here < request.payload() && request.payload() <= SHORT_BYTES {
            return Ok(None);
        }
        self.start += Request::BYTES;
        Ok(Some(request))
    }

    /// Has one request done.
    fn request(&mut self, request: Request) -> Result<Option<End>, Ended> {
        let long = self.long_payload(&request)?;
        let checked = request.check(&self.geometry, &self.session);
        if checked == Ok(Op::Disconnect) {
            return Ok(Some(End::Asked));
        }
        let moves = if matches!(checked, Ok(Op::Read | Op::Write { .. })) { request.length as usize } else { 0 };
        if self.outbox.has_under_way() && !self.outbox.wait_for_room(moves) {
            return Ok(Some(End::Gone));
        }
        let Request { cookie, offset, length, .. } = request;
        let asked = Asked { cookie, offset, length, structured: self.session.structured };
        let answer = Answer::new(asked, moves, &mut self.batch, &self.outbox);
        let device = self.device;
        let short = if long.is_some() { 0 } else { request.payload() };
        let bytes = &self.buffer[self.start..self.start + short];
        self.start += short;
        match checked {
            Ok(Op::Read) => device.read(offset, length, answer),
            Ok(Op::Write { fua }) => {
                let data = long.map_or(Payload::Borrowed(bytes), Payload::Owned);
                device.write(offset, data, fua, answer);
            }
            Ok(Op::Zero(how)) => device.zero(offset, length, how, answer),
            Ok(Op::Trim { fua }) => device.trim(offset, length, fua, answer),
            Ok(Op::Flush) => device.flush(answer),
            Ok(Op::Status { one }) => device.status(offset, length, answer.of_one_extent(one)),
            Ok(Op::Nothing | Op::Disconnect) => answer.done(),
            Err(failure) => answer.fail(&failure),
        }
        if self.writer.is_none() && self.outbox.has_under_way() {
            self.start_writer()?;
        }
        Ok(None)
    }

    /// The bytes of a write that are not all in the buffer.
    fn long_payload(&mut self, request: &Request) -> Result<Option<Vec<u8>>, Ended> {
        let length = request.payload();
        if length <= self.end - self.start {
            return Ok(None);
        }
        self.send()?; // this may take a while
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(&self.buffer[self.start..self.end]);
        (self.start, self.end) = (0, 0);
        while bytes.len() < length {
            if self.outbox.stream().receive_behind(&mut bytes)? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        // A vector may have more capacity than was asked for: then the next request has begun in it.
        let behind = bytes.split_off(length);
        self.buffer[..behind.len()].copy_from_slice(&behind);
        self.end = behind.len();
        Ok(Some(bytes))
    }

    /// Receives more, and waits for it. `false`: the client has closed the connection.
    ///
    /// A client that has just got an answer often has its next request ready within microseconds. To sleep and be woken
    /// costs both ends more than that. So the thread looks a few times, and lets others run meanwhile: on a busy
    /// processor that is the client, which then sends several requests before this thread runs again. With 32 requests
    /// under way this halved the processor time of a request.
    fn receive(&mut self) -> Result<bool, Ended> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.start < Request::BYTES + SHORT_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let (stream, room) = (self.outbox.stream(), &mut self.buffer[self.end..]);
        let began = Instant::now();
        // A client that waits for an answer sends nothing.
        while self.is_busy && !self.outbox.has_under_way() && began.elapsed() < LOOK_FOR {
            if let Some(received) = stream.receive_now(room)? {
                self.end += received;
                return Ok(received > 0);
            }
            std::thread::yield_now();
        }
        let received = stream.receive(room)?;
        self.is_busy = stream.is_plain() && began.elapsed() < BUSY;
        self.end += received;
        Ok(received > 0)
    }

    fn send(&mut self) -> Result<(), Ended> {
        self.outbox.send(&mut self.batch)?;
        if self.batch.capacity() > KEPT_BYTES {
            self.batch = Vec::with_capacity(BATCH_BYTES);
        }
        Ok(())
    }

    fn start_writer(&mut self) -> Result<(), Ended> {
        let outbox = Arc::clone(&self.outbox);
        self.writer = Some(std::thread::Builder::new().name("nbd-writer".into()).spawn(move || outbox.write())?);
        Ok(())
    }
}

/// Time for the whole negotiation, TLS included. A client that has not chosen by then uses up a connection.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// How long a client that says good-bye waits for its last requests.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// Received at once: 60 writes of 4 KiB.
const BUFFER_BYTES: usize = 256 << 10;

// What is left of the negotiation fits.
const _: () = assert!(BUFFER_BYTES > 2 * handshake::MAX_OPTION_BYTES);

/// The longest write that waits in the buffer until it is complete: it is then copied once, and needs no memory.
const SHORT_BYTES: usize = 64 << 10;

/// Answers that are sent without waiting for the next request's.
const BATCH_BYTES: usize = 64 << 10;

/// How long a thread looks for the next request of a busy client before it sleeps: as long as sleeping and being woken
/// take. An idle client costs nothing, since it is not busy.
const LOOK_FOR: Duration = Duration::from_micros(20);

/// A client is busy if the next request came within this time. Then looking costs a tenth of a processor at most.
const BUSY: Duration = Duration::from_micros(200);

/// Memory for answers that is kept. Reads of 32 MiB are rare.
const KEPT_BYTES: usize = 4 << 20;
