//! Regions: the copies that this process can read without asking their servers.
//!
//! ```text
//!   server: Attached ──▶ Opening, a thread: connects by the nearest transport
//!                            │ on this host                     │ over a network
//!                            ▼                                  ▼
//!                     Region::Here, and it ends          Region::Far: it reads, several runs together,
//!                     (the driver reads in place)        until the driver drops its end of the channel
//! ```
//!
//! A thread waits for its server for [`CONNECT_LIMIT`] or [`READ_LIMIT`] at most, and so does the driver's end.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use remora_fabric::{Memory, Peer};
use remora_messenger::Connection;

use super::{Bring, Event, Reads};
use crate::lane::{Laid, Lane};
use crate::layout::Layout;
use crate::rdma::Rdma;
use crate::reader::{Found, InPlace, OneSided, ReaderError, Wanted};
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, Run};

/// A region that can be read.
pub(super) enum Region {
    /// In place. The peer keeps the server's grant.
    Here(Arc<InPlace>, #[allow(dead_code)] Box<dyn Peer>),
    /// By the thread at the other end.
    Far(Sender<Job>),
}

/// Blocks that a thread is to read.
pub(super) struct Job {
    /// The number of the read.
    pub(super) number: u64,
    pub(super) run: Run,
}

/// What a thread has to say of its region.
pub(super) enum News {
    /// It can be read.
    Open(Region),
    /// The blocks of a read; `None`: they were being written each time, or the volume has no such blocks.
    Looked { number: u64, found: Option<(Vec<u8>, Found)> },
    /// It cannot be read any more. This is the last of its news: what is still to be read there must be asked for.
    Closed,
}

/// A region that is about to be opened.
pub(super) struct Opening {
    pub(super) layout: Layout,
    pub(super) reads: Reads,
    pub(super) rdma: Rdma,
    pub(super) session: u64,
    pub(super) keys: Vec<Vec<u8>>,
    /// The connection to its server.
    pub(super) connection: Connection,
    pub(super) bring: Bring,
}

impl Opening {
    /// The thread.
    pub(super) fn run(self) {
        let Some((Laid { peer, transport, .. }, sink)) = self.open() else { return };
        if let Some(view) = peer.view() {
            let reader = Arc::new(InPlace::new(view, self.layout));
            return self.say(News::Open(Region::Here(reader, peer)));
        }
        let (jobs, due) = mpsc::channel();
        self.say(News::Open(Region::Far(jobs)));
        self.read(OneSided::new(peer, transport, sink, self.layout), &due);
    }

    fn say(&self, news: News) {
        (self.bring)(Event::Region(self.connection.clone(), news));
    }

    /// Connects by the nearest transport that both ends have.
    fn open(&self) -> Option<(Laid, Arc<Memory>)> {
        let lane = Lane {
            transports: self.reads.transports(),
            rdma: &self.rdma,
            length: self.layout.length(),
            depth: DEPTH,
            connect_limit: CONNECT_LIMIT,
            read_limit: READ_LIMIT,
        };
        // A server that answers in place needs no sink, and a memory without touched pages costs nothing.
        let opened = OneSided::sink(MOST_BLOCKS as u64).map_err(|error| error.to_string()).and_then(|sink| {
            let laid = lane.connect(&self.connection, (self.session, &self.keys), &sink)?;
            Ok((laid, sink))
        });
        let server = self.connection.peer();
        match &opened {
            Ok((Laid { transport, why, took, .. }, _)) => {
                tracing::info!(%server, %transport, connected_in = ?took, why, "a copy is read without asking");
            }
            Err(error) => tracing::debug!(%server, error, "a copy cannot be read without asking"),
        }
        opened.ok()
    }

    /// Reads what the driver wants, until it wants no more or the region cannot be read.
    fn read(&self, mut reader: OneSided, due: &Receiver<Job>) {
        let mut next = None;
        while let Some(first) = next.take().or_else(|| due.recv().ok()) {
            let mut jobs = vec![first];
            let mut blocks = jobs.iter().map(|job: &Job| job.run.count as usize).sum::<usize>();
            while jobs.len() < AT_ONCE
                && let Ok(job) = due.try_recv()
            {
                blocks += job.run.count as usize;
                if blocks > MOST_BLOCKS_AT_ONCE {
                    next = Some(job);
                    break;
                }
                jobs.push(job);
            }
            if let Err(error) = self.read_several(&mut reader, &jobs) {
                tracing::info!(server = %self.connection.peer(), %error, "a copy cannot be read without asking any more");
                return self.say(News::Closed);
            }
        }
    }

    fn read_several(&self, reader: &mut OneSided, jobs: &[Job]) -> Result<(), ReaderError> {
        let mut data: Vec<Vec<u8>> = jobs.iter().map(|job| vec![0; job.run.count as usize * BLOCK_BYTES]).collect();
        let blocks = jobs.iter().zip(&mut data);
        let mut wanted: Vec<_> = blocks.map(|(job, into)| Wanted { first: job.run.first, into }).collect();
        let results = reader.several(&mut wanted, READ_LIMIT)?;
        for ((job, data), result) in jobs.iter().zip(data).zip(results) {
            let found = result.ok().map(|found| (data, found));
            self.say(News::Looked { number: job.number, found });
        }
        Ok(())
    }
}

/// Longest time for a connection to a server's exporter. Meanwhile the server is asked.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Longest time for a read without asking. Then its server is asked, and has the time that each answer has.
const READ_LIMIT: Duration = Duration::from_secs(1);

/// Runs that are read together. Each has two reads, blocks and entries, and all have the line.
const AT_ONCE: usize = 32;

/// Reads under way at a peer.
const DEPTH: usize = AT_ONCE * 2 + 1;

/// Blocks that are read together: what the sink takes, whose lines are as long as some entries.
const MOST_BLOCKS_AT_ONCE: usize = MOST_BLOCKS - AT_ONCE;
