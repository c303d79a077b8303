//! Pulling: large writes whose blocks servers take out of this process's outbox, or out of each other's stagings.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use remora_messenger::Message;

use super::Driver;
use crate::client::Writes;
use crate::link;
use crate::message::{Holder, ServerId};
use crate::version::Version;
use crate::wire::Call;

impl Driver {
    /// Offers the outbox to the members, each connection once.
    pub(super) fn offer(&mut self) {
        if self.outgoing.is_none() || !self.writer.is_serving() {
            return;
        }
        let members: Vec<ServerId> = self.writer.members().collect();
        for server in members {
            let connection = self.remotes.get_mut(server.0).and_then(|remote| remote.offer());
            let Some((connection, outgoing)) = connection.zip(self.outgoing.as_ref()) else { continue };
            let Some(keys) = outgoing.grant(&connection) else { continue };
            let call = Call::Offer { session: connection.id(), keys };
            if let Ok(message) = link::call(&call, Bytes::new()) {
                let is_sent = self.remote(server, |remote, now| remote.send(message, now));
                self.unless(is_sent, server);
            }
        }
    }

    /// A server's connection is about to be given up.
    pub(super) fn withdraw(&self, server: ServerId) {
        let connection = self.remotes.get(server.0).and_then(|remote| remote.connection());
        if let (Some(connection), Some(outgoing)) = (connection, &self.outgoing) {
            outgoing.withdraw(connection);
        }
    }

    /// The message by which a server gets a write, and the bytes of its blocks.
    pub(super) fn message_of(&mut self, server: ServerId, holder: Holder, version: Version) -> Option<(Message, u64)> {
        let pulls = self.remotes.get(server.0).is_some_and(|remote| remote.outbox.pulls);
        let source = self.source_of(server, version);
        let write = self.writes.get_mut(&version)?;
        let runs = write.runs.clone();
        let place = write.place.filter(|_| pulls);
        let message = match (&write.blocks, place) {
            (Some(blocks), Some(at)) => {
                let call = Call::Pull { holder, version, runs, sums: blocks.sums.clone(), at, source };
                link::call(&call, Bytes::new()).ok()?
            }
            // The same for each server.
            _ if write.inline.is_some() => write.inline.clone()?,
            (Some(blocks), None) => {
                let call = Call::Write { holder, version, runs, sums: blocks.sums.clone() };
                let message = link::call(&call, blocks.data.clone()).ok()?;
                write.inline.insert(message).clone()
            }
            (None, _) => {
                let call = Call::Zero { holder, version, run: *runs.first()? };
                write.inline.insert(link::call(&call, Bytes::new()).ok()?).clone()
            }
        };
        let bytes = write.blocks.as_ref().map_or(0, |blocks| blocks.data.len() as u64);
        let counts = &self.shared.counts;
        let count = if place.is_some() { &counts.pulled } else { &counts.inline };
        count.fetch_add(1, Ordering::Relaxed);
        counts.sent.fetch_add((message.front.len() + message.data.len()) as u64, Ordering::Relaxed);
        Some((message, bytes))
    }

    /// The server before this one that pulls this write as well; empty if there is none, or it shall pull from here.
    fn source_of(&self, server: ServerId, version: Version) -> String {
        if self.writes_by != Writes::Chain {
            return String::new();
        }
        let mut before = self.remotes.iter().take(server.0).rev();
        let source = before.find(|remote| remote.outbox.lends && remote.last_sent() == Some(version));
        source.map(|source| source.address().to_string()).unwrap_or_default()
    }

    /// Frees a place of the outbox.
    pub(super) fn free_place(&mut self) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.free();
        }
    }

    pub(super) fn count_served(&self) {
        if let Some(outgoing) = &self.outgoing {
            self.shared.counts.served.store(outgoing.served(), Ordering::Relaxed);
        }
    }
}
