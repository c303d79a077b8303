//! The source's end: which regions there are, and who reads them.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    Shared,
    peer::{Admission, Lane},
};
use crate::{
    auth,
    error::{Denial, Error, ReadError},
    grants::{Grants, Regions},
    memory::Memory,
    region::{RegionId, RegionKey, Secret, TransportKind},
    transport::Exporter,
};

/// A source on a simulated network. Dropping it ends all its peers.
pub struct SimExporter {
    shared: Arc<Shared>,
    /// Its index among the network's sources.
    number: usize,
    served: Arc<AtomicU64>,
}

/// A source as the network sees it.
pub(super) struct Source {
    regions: HashMap<RegionId, Arc<Memory>>,
    grants: Grants,
    readers: Vec<ReaderConnection>,
    served: Arc<AtomicU64>,
}

struct ReaderConnection {
    session: u64,
    id: RegionId,
    lane: Weak<Mutex<Lane>>,
}

impl SimExporter {
    pub(super) fn new(shared: Arc<Shared>) -> SimExporter {
        let served = Arc::new(AtomicU64::new(0));
        let source =
            Source { regions: HashMap::new(), grants: Grants::default(), readers: Vec::new(), served: served.clone() };
        let mut state = shared.state();
        let number = state.sources.len();
        state.sources.push(Some(source));
        drop(state);
        SimExporter { shared, number, served }
    }

    /// Calls `action` with this source, which exists as long as the exporter.
    fn with<T: Default>(&self, action: impl FnOnce(&mut Source) -> T) -> T {
        let mut state = self.shared.state();
        state.sources.get_mut(self.number).and_then(Option::as_mut).map(action).unwrap_or_default()
    }
}

impl Exporter for SimExporter {
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }

    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error> {
        let taken = self.with(|source| {
            let taken = source.regions.contains_key(&id);
            source.regions.entry(id).or_insert(memory);
            taken
        });
        if taken { Err(Error::AlreadyExported(id)) } else { Ok(()) }
    }

    fn revoke(&self, id: RegionId) {
        self.with(|source| {
            source.regions.remove(&id);
            source.cut(Denial::Revoked, |reader| reader.id == id);
        });
    }

    fn grant(&self, session: u64, secret: Secret, regions: Regions) {
        self.with(|source| {
            let closes = source.grants.insert(session, secret, regions);
            source.cut(Denial::NotGranted, |reader| reader.session == session && closes(reader.id));
        });
    }

    fn withdraw(&self, session: u64) {
        self.with(|source| {
            source.grants.remove(session);
            source.cut(Denial::NotGranted, |reader| reader.session == session);
        });
    }

    fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
        let memory = self.with(|source| source.regions.get(&id).cloned()).ok_or(Error::NotExported(id))?;
        let body = [self.shared.number.to_le_bytes(), (self.number as u64).to_le_bytes()].concat();
        Ok(RegionKey::new(TransportKind::Sim, id, memory.length(), &body)?)
    }

    fn bytes_served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }
}

impl Drop for SimExporter {
    fn drop(&mut self) {
        let source = self.shared.state().sources.get_mut(self.number).and_then(Option::take);
        for reader in source.into_iter().flat_map(|source| source.readers) {
            reader.end(ReadError::PeerGone);
        }
    }
}

impl Source {
    /// Admits or refuses a reader. The proof is made and checked as on a real transport.
    pub(super) fn admit(&self, session: u64, secret: &Secret, id: RegionId) -> Result<Admission, Denial> {
        let proof = auth::prove(secret, b"sim", &session.to_le_bytes());
        if !auth::verify_known(self.grants.secret(session), b"sim", &session.to_le_bytes(), &proof) {
            return Err(Denial::NotGranted);
        }
        self.grants.permit(session, id)?;
        match self.regions.get(&id) {
            Some(memory) => Ok(Admission { memory: memory.clone(), served: self.served.clone() }),
            None if self.regions.keys().any(|known| known.region == id.region) => Err(Denial::Stale),
            None => Err(Denial::Unknown),
        }
    }

    /// Records a peer, so that it can be ended; removes those that are dropped.
    pub(super) fn note(&mut self, session: u64, id: RegionId, lane: &Arc<Mutex<Lane>>) {
        self.readers.retain(|reader| reader.lane.strong_count() > 0);
        self.readers.push(ReaderConnection { session, id, lane: Arc::downgrade(lane) });
    }

    fn cut(&mut self, denial: Denial, chosen: impl Fn(&ReaderConnection) -> bool) {
        for reader in self.readers.extract_if(.., |reader| chosen(reader)) {
            reader.end(ReadError::Denied(denial));
        }
    }
}

impl ReaderConnection {
    fn end(&self, why: ReadError) {
        if let Some(lane) = self.lane.upgrade() {
            lane.lock().unwrap_or_else(PoisonError::into_inner).retire(why);
        }
    }
}
