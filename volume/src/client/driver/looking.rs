//! Looking: reads that are answered out of regions, without a message. The rules say which ones
//! ([`crate::writer`]).

use std::sync::Arc;

use remora_messenger::Connection;

use super::{Driver, Ordering, Read};
use crate::client::Reads;
use crate::client::regions::{Job, News, Opening, Region};
use crate::layout::Layout;
use crate::link;
use crate::message::ServerId;
use crate::overlap::last_write_of;
use crate::reader::Found;
use crate::shape::BLOCK_BYTES;
use crate::version::Version;
use crate::wire::{Call, Run};
use crate::writer::{Nearness, Seen};

impl Driver {
    /// Asks the members for their regions, each connection once.
    pub(super) fn attach(&mut self) {
        let Some(holder) = self.writer.holder().filter(|_| self.reads_by != Reads::Asked && self.writer.is_serving())
        else {
            return;
        };
        let members: Vec<ServerId> = self.writer.members().collect();
        for server in members {
            let is_due = self.remotes.get_mut(server.0).is_some_and(|remote| remote.attach());
            if let (true, Ok(message)) = (is_due, link::call(&Call::Attach(holder), bytes::Bytes::new())) {
                let is_sent = self.remote(server, |remote, now| remote.send(message, now));
                self.unless(is_sent, server);
            }
        }
    }

    /// A server permits to read its copy.
    pub(super) fn open_region(&mut self, connection: &Connection, session: u64, keys: Vec<Vec<u8>>) {
        self.readers.retain(|reader| !reader.is_finished());
        let (layout, reads, bring) = (Layout::of(self.shape), self.reads_by, Arc::clone(&self.bring));
        let rdma = self.rdma.clone();
        let opening = Opening { layout, reads, rdma, session, keys, connection: connection.clone(), bring };
        match std::thread::Builder::new().name("volume-reader".into()).spawn(|| opening.run()) {
            Ok(thread) => self.readers.push(thread),
            Err(error) => tracing::warn!(%error, "no thread to read a copy: its server is asked"),
        }
    }

    /// A thread has something to say of its region. It does not count if the connection was given up meanwhile.
    pub(super) fn region(&mut self, connection: &Connection, news: News) {
        let Some(server) = self.server_at(connection) else { return };
        match news {
            News::Open(region) => {
                let nearness = match (&region, self.writer.holder()) {
                    (Region::Here(reader, _), Some(holder)) => {
                        self.shared.regions.open(server, holder, Arc::clone(reader));
                        Nearness::Here
                    }
                    _ => Nearness::Far,
                };
                self.remotes[server.0].open_region(Some(region));
                self.writer.region_opened(server, nearness);
            }
            News::Looked { number, found } => {
                self.shared.counts.far.fetch_add(found.is_some().into(), Ordering::Relaxed);
                self.looked(server, number, found);
            }
            News::Closed => {
                self.remotes[server.0].open_region(None);
                self.writer.region_closed(server);
            }
        }
    }

    /// Reads blocks out of a region: now if it is here, or by its thread.
    pub(super) fn look(&mut self, server: ServerId, number: u64) {
        let Some(&Read { run, is_map, .. }) = self.reads.get(&number) else { return };
        if is_map {
            return self.looked(server, number, None); // few ask for it: the server answers
        }
        match self.remotes.get(server.0).and_then(|remote| remote.region()) {
            Some(Region::Here(reader, _)) => {
                let mut data = vec![0; run.count as usize * BLOCK_BYTES];
                let found = reader.blocks(run.first, &mut data).ok().map(|found| (data, found));
                self.shared.counts.here.fetch_add(found.is_some().into(), Ordering::Relaxed);
                self.looked(server, number, found);
            }
            Some(Region::Far(jobs)) if jobs.send(Job { number, run }).is_ok() => {}
            _ => self.looked(server, number, None),
        }
    }

    fn looked(&mut self, server: ServerId, number: u64, found: Option<(Vec<u8>, Found)>) {
        let seen = found.as_ref().map(|(_, found)| Seen { newest: found.newest(), line: found.line });
        let counts = self.writer.looked(server, number, seen);
        if let (true, Some((data, _)), Some(read)) = (counts, found, self.reads.get_mut(&number)) {
            read.data = data.into();
        }
    }

    /// The last write of any of these blocks that some server has not applied yet.
    pub(super) fn last_write_of(&self, run: Run) -> Version {
        let writes = self.unapplied.iter().map(|write| (write.version, &write.runs[..]));
        last_write_of(run, writes).unwrap_or_default()
    }
}
