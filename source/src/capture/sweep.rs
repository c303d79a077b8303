//! A snapshot without a fork: the module in the server's own process sweeps through the keys and sends their records.
//!
//! ```text
//!   a primary without a backlog ─── PSYNC ? -1, and away before the server forks for it ──▶ it has one
//!   REMORA.SWEEP, a socket ──▶ replid, offset                                  refused: its fork takes the snapshot
//!   PSYNC replid offset+1 ──▶ +CONTINUE ──────────────────────────────▶ journal
//!   the socket: records … the mark of the end ────────────────────────▶ slots of the table
//! ```
//!
//! `module/src/sweep/` has the other end, and says when a server is not swept. A sweep that fails after the snapshot
//! was offered to replicas fails that snapshot; the next one is taken by a fork.

use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::Handover;
use remora_protocol::sweep::Frames;
use remora_redis::ReplId;
use remora_redis::psync::client::Options;
use remora_redis::resp::{self, Frame};
use remora_table::{Kind, SnapshotWriter};

use super::method::Method;
use super::psync_link::{Socket, broken, is_same_history};
use super::snapshot::{Begun, DURING, Taking};
use super::stream::Following;
use super::with_module::{HANDOVER_LIMIT, ModuleError, before};
use super::{Capture, CaptureError, SILENCE_LIMIT, TICK};
use remora_server::module::{self, field};
use remora_server::{Client, Facts};

/// What a sweep's snapshot is of.
struct Moment {
    replid: ReplId,
    offset: u64,
    /// It was not earlier than this.
    began: Instant,
    /// What the module sends comes here.
    records: UnixStream,
}

impl Capture {
    /// Takes the snapshot by a sweep.
    pub(super) fn sweep(&self) -> Result<Following, ModuleError> {
        let moment = self.begin_sweep().map_err(untouched)?;
        let stream = self.stream_behind(&moment).map_err(untouched)?;
        let Moment { replid, offset, began, records } = moment;
        tracing::info!(%replid, offset, "the module sweeps the server, without a fork (experimental)");
        self.plan.gauge.set_method(Method::Swept);
        let (memory, geometry) = &self.plan.snapshot;
        let writer =
            SnapshotWriter::create(memory.clone(), *geometry, self.identity(Kind::Snapshot, replid, offset), 0)
                .map_err(CaptureError::from)?;
        let Begun { journal, sealing } = self.begun(replid, offset)?;
        let mut taking = Taking::new(self, writer, sealing);
        let fill = || {
            let keys = self.receive_records(records, &mut taking)?;
            tracing::debug!(keys, micros = began.elapsed().as_micros(), "the module has swept the server");
            taking.complete(0)
        };
        match (stream, journal) {
            (Some(socket), Some(mut journal)) => {
                journal.written_since(began);
                Ok(self.beside_the_stream(socket, journal, fill)?)
            }
            _ => {
                fill()?;
                Ok(Following::AnotherCapture)
            }
        }
    }

    /// Sees to a backlog, and has the module begin.
    fn begin_sweep(&self) -> Result<Moment, CaptureError> {
        let (mut client, facts) = self.wait_for(async {
            let mut client = self.plan.server.connect().await?;
            let found = module::find(&mut client, self.plan.module.load.as_deref()).await?;
            let facts = Facts::read(&mut client).await?;
            Ok((found.map(|_| client), facts))
        })?;
        let client = client.as_mut().ok_or_else(|| refused("the server has no module of this version"))?;
        if facts.own_format().is_some() && self.plan.reader_version.is_none() {
            return Err(refused("readers wait that do not know the server's newest format"));
        }
        if facts.backlog.is_none_or(|backlog| !backlog.active) {
            self.make_backlog(client)?;
        }
        let (ours, theirs) = UnixStream::pair().map_err(broken)?;
        ours.set_read_timeout(Some(TICK)).map_err(broken)?;
        let asked = Instant::now();
        loop {
            let began = Instant::now();
            match self.ask(client, &theirs) {
                Ok((replid, offset)) => return Ok(Moment { replid, offset, began, records: ours }),
                // What is in the way passes by itself.
                Err(error) if error.to_string().contains("BUSY") && asked.elapsed() < BUSY_LIMIT => {
                    self.stop.check()?;
                    thread::sleep(BUSY_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Offers the socket once.
    fn ask(&self, client: &mut Client, theirs: &UnixStream) -> Result<(ReplId, u64), CaptureError> {
        let handover = Handover::bind(&self.plan.module.place).map_err(broken)?;
        let command = ["REMORA.SWEEP", &handover.address(), &handover.secret()];
        let descriptors = [theirs.as_fd()];
        let reply = thread::scope(|scope| {
            // A server that refuses does not take it.
            scope.spawn(|| handover.give(&descriptors, HANDOVER_LIMIT));
            let reply = self.plan.runtime.block_on(client.command_within(SWEEP_LIMIT, &command));
            if reply.is_err() {
                // Its thread need not wait for the rest of the time.
                let _ = remora_fabric::handover::take_socket(&handover.address(), &handover.secret(), HANDOVER_LIMIT);
            }
            reply
        })?;
        moment(&reply).ok_or_else(|| refused("the module's answer to REMORA.SWEEP has no replid and offset"))
    }

    /// A primary that never had a replica has no backlog. It makes one for a replica that asks for everything, and
    /// forks for it only after a delay. This one is gone by then.
    fn make_backlog(&self, client: &mut Client) -> Result<(), CaptureError> {
        let setting = |client: &mut Client, name| self.plan.runtime.block_on(client.config_get(name));
        let is_diskless = setting(client, "repl-diskless-sync")?.is_some_and(|value| value == "yes");
        let delays = setting(client, "repl-diskless-sync-delay")?.is_some_and(|value| value != "0");
        let waits = setting(client, "repl-diskless-sync-max-replicas")?.is_none_or(|value| value == "0");
        if !(is_diskless && delays && waits) {
            return Err(refused(
                "the server has no backlog, and would fork to get one (repl-diskless-sync no, a repl-diskless-sync-delay of 0, or \
                 repl-diskless-sync-max-replicas)",
            ));
        }
        let _asking = self.wait_for(async {
            let mut replica = self.plan.server.connect().await?;
            // Its answer must have gone before the server takes the next command.
            replica.command(&["REPLCONF", "capa", "eof", "capa", "psync2"]).await?;
            let mut request = Vec::new();
            resp::command(&mut request, &["PSYNC", "?", "-1"]);
            replica.send(&request).await?;
            Ok(replica)
        })?;
        let asked = Instant::now();
        loop {
            let facts = self.wait_for(async { Facts::read(client).await })?;
            if facts.backlog.is_some_and(|backlog| backlog.active) {
                return Ok(());
            }
            if asked.elapsed() > BACKLOG_LIMIT {
                return Err(refused("the server made no backlog"));
            }
            thread::sleep(BUSY_PAUSE);
        }
    }

    /// The stream from the moment on, unless another capture follows it.
    fn stream_behind(&self, moment: &Moment) -> Result<Option<Socket>, CaptureError> {
        if self.plan.journal.is_none() {
            return Ok(None);
        }
        let resume = Some((moment.replid, moment.offset + 1));
        let mut link = self.handshake(Options { resume, ..Options::default() })?;
        let now = link.continued()?.ok_or(CaptureError::HistoryGone)?;
        is_same_history(moment.replid, now, moment.offset)?;
        Ok(Some(link.into_socket()))
    }

    /// Appends what the module sends to the snapshot, until the mark of its end. Returns the number of keys.
    fn receive_records(&self, mut socket: UnixStream, taking: &mut Taking<'_>) -> Result<u64, CaptureError> {
        let (mut frames, mut buffer, mut records) = (Frames::default(), vec![0; READ_BYTES], Vec::new());
        let mut heard = Instant::now();
        loop {
            self.stop.check()?;
            let read = match socket.read(&mut buffer) {
                Ok(0) => return Err(CaptureError::Module(self.why_it_ended())),
                Ok(read) => read,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if heard.elapsed() > SILENCE_LIMIT {
                        return Err(CaptureError::Module("a sweep was silent for too long".into()));
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(CaptureError::Link { during: DURING, cause: error.to_string() }),
            };
            let end = frames.take(buffer.get(..read).unwrap_or_default(), |bytes| records.extend_from_slice(bytes));
            let end = end.map_err(|error| CaptureError::Module(format!("what it sends is no sweep: {error}")))?;
            taking.append(&records)?;
            records.clear();
            heard = Instant::now();
            if let Some(keys) = end {
                return Ok(keys);
            }
        }
    }

    /// Why the module has ended its sweep.
    fn why_it_ended(&self) -> String {
        let asked = self.wait_for(async { self.plan.server.connect().await?.info("remora").await });
        let why = asked.ok().and_then(|info| info.get("remora_sweep_error").map(str::to_owned));
        format!("the sweep ended before its end: {}", why.unwrap_or_else(|| "the server does not say why".into()))
    }
}

/// The sweep has not begun. A fork can take the snapshot, unless the capture is to stop.
fn untouched(error: CaptureError) -> ModuleError {
    match error {
        CaptureError::Stopped | CaptureError::ServerEnds => ModuleError::Final(error),
        CaptureError::Module(why) => before(why),
        error => before(error),
    }
}

fn refused(why: &str) -> CaptureError {
    CaptureError::Module(why.to_owned())
}

/// Replid and offset in the answer to `REMORA.SWEEP`.
fn moment(reply: &Frame) -> Option<(ReplId, u64)> {
    Some((field(reply, b"replid")?.parse().ok()?, field(reply, b"offset")?.parse().ok()?))
}

/// How long the server may take to begin: it looks at its commands and clients, and a pause of its clients (`CLIENT
/// PAUSE`) makes it wait.
const SWEEP_LIMIT: Duration = Duration::from_secs(5);

/// How long transactions and waiting clients may keep a sweep from beginning. Most transactions take a round trip.
const BUSY_LIMIT: Duration = Duration::from_secs(5);

/// How often the server is asked again.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// How long the server may take to make a backlog: it does that when it reads the request.
const BACKLOG_LIMIT: Duration = Duration::from_secs(2);

/// Bytes that are read at a time, as from the server.
const READ_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_read_from_names_and_values() {
        let bulk = |text: &str| Frame::Bulk(text.into());
        let replid = "0123456789abcdef0123456789abcdef01234567";
        let reply = Frame::Array(vec![bulk("replid"), bulk(replid), bulk("offset"), bulk("77")]);
        assert_eq!(moment(&reply), Some((replid.parse().unwrap_or_else(|_| panic!("a replid")), 77)));
        assert_eq!(moment(&Frame::Array(vec![bulk("replid"), bulk(replid)])), None);
    }
}
