//! The snapshot as the server sends it to its replicas, over one connection or two.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use remora_redis::psync::client::{Channel, Options};

use super::Capture;
use super::journal::Journal;
use super::plan::CaptureError;
use super::psync_link::{Announced, Opening, PsyncLink, is_same_history, out_of_place};
use super::socket::Socket;
use super::stream::{self, Follower, Following};

/// How the server sends a snapshot and the stream.
enum Opened {
    /// One after the other, over one connection.
    One(Announced),
    /// Both at once, over two connections.
    Two { snapshot: Announced, stream: Socket },
}

impl Capture {
    /// Takes the snapshot as the server sends it to its replicas.
    pub(super) fn take_plain_snapshot(&self) -> Result<Following, CaptureError> {
        match self.open()? {
            Opened::One(announced) => self.take_announced(announced),
            Opened::Two { snapshot, stream } => self.take_both(snapshot, stream),
        }
    }

    /// Takes the snapshot. The stream follows over the same connection.
    pub(super) fn take_announced(&self, announced: Announced) -> Result<Following, CaptureError> {
        let (taking, journal) = self.begin(&announced)?;
        let socket = taking.fill(announced).map_err(|error| self.explained(error))?;
        Ok(match journal {
            Some(journal) => Following::ThisThread(Box::new(Follower::new(self, socket, journal))),
            None => Following::AnotherCapture,
        })
    }

    /// Takes the snapshot, while another thread follows the stream. A stream without its snapshot is of no use, so that
    /// thread has ended when this fails.
    fn take_both(&self, announced: Announced, stream: Socket) -> Result<Following, CaptureError> {
        let (taking, journal) = self.begin(&announced)?;
        let Some(journal) = journal else { return Ok(Following::AnotherCapture) };
        self.beside_the_stream(stream, journal, || taking.fill(announced).map(drop))
    }

    /// Runs `fill` while another thread follows the stream. That thread has ended when this fails.
    pub(super) fn beside_the_stream(
        &self,
        stream: Socket,
        journal: Journal,
        fill: impl FnOnce() -> Result<(), CaptureError>,
    ) -> Result<Following, CaptureError> {
        let abandoned = Arc::new(AtomicBool::new(false));
        let follower = Follower::new(self, stream, journal).until(abandoned.clone());
        let capture = self.clone();
        let following = thread::Builder::new().name("stream".into()).spawn(move || capture.follow(|| follower.run()));
        let following = following.map_err(|cause| CaptureError::Link {
            during: stream::DURING,
            cause: format!("no thread for it: {cause}"),
        })?;
        if let Err(error) = fill() {
            abandoned.store(true, Ordering::Relaxed);
            let _ = following.join();
            return Err(error);
        }
        Ok(Following::OwnThread(following))
    }

    /// Requests a snapshot, and the stream if no other capture follows it.
    fn open(&self) -> Result<Opened, CaptureError> {
        if self.plan.journal.is_none() {
            return Ok(Opened::One(self.open_one()?));
        }
        let mut link = self.handshake(self.options(Channel::WholeOrStream))?;
        match link.opening()? {
            Opening::Full { replid, offset, payload } => Ok(Opened::One(link.announced(replid, offset, payload))),
            Opening::TwoChannels => match self.open_second(link) {
                // The user may lack the ACL rule for SYNC, which only the second channel needs.
                Err(error @ CaptureError::Psync(_)) if !error.is_transient() => {
                    tracing::info!(%error, "the server refused a second channel; using one connection for snapshot and stream");
                    Ok(Opened::One(self.open_one()?))
                }
                opened => opened,
            },
            Opening::Continue { .. } | Opening::Channel { .. } => Err(out_of_place("to continue")),
        }
    }

    /// Requests snapshot and stream over one connection.
    fn open_one(&self) -> Result<Announced, CaptureError> {
        let mut link = self.handshake_for_snapshot(self.options(Channel::Whole))?;
        match link.opening()? {
            Opening::Full { replid, offset, payload } => Ok(link.announced(replid, offset, payload)),
            _ => Err(out_of_place("to continue")),
        }
    }

    /// Requests the snapshot over a second connection, and the stream from the byte after it over the first one.
    fn open_second(&self, stream: PsyncLink) -> Result<Opened, CaptureError> {
        let mut link = self.handshake(self.options(Channel::Snapshot))?;
        let (snapshot, client) = match link.opening()? {
            Opening::Channel { replid, offset, payload, client } => (link.announced(replid, offset, payload), client),
            _ => return Err(out_of_place("something else than a channel")),
        };
        let (replid, offset) = (snapshot.replid, snapshot.offset);
        let channel = Channel::Stream { snapshot_client: client };
        let mut stream = stream.again(Options { resume: Some((replid, offset + 1)), channel, ..Options::default() });
        let now = stream.continued()?.ok_or_else(|| out_of_place("another snapshot"))?;
        is_same_history(replid, now, offset)?;
        Ok(Opened::Two { snapshot, stream: stream.into_socket() })
    }

    /// The options of a handshake for a snapshot.
    pub(super) fn options(&self, channel: Channel) -> Options {
        Options { rdb_version: self.plan.reader_version.clone(), channel, ..Options::default() }
    }
}
