//! The reader's end: makes connections.

use std::{io, sync::Arc};

use super::{
    Shared,
    peer::{Lane, SimPeer},
    random::Random,
};
use crate::{
    error::Error,
    memory::Memory,
    region::{KeyError, RegionKey, Secret, TransportKind},
    transport::{Connector, Peer},
};

/// Connects to the exporters of one simulated network.
pub struct SimConnector {
    shared: Arc<Shared>,
}

impl SimConnector {
    pub(super) fn new(shared: Arc<Shared>) -> SimConnector {
        SimConnector { shared }
    }

    /// The number of the source that the key leads to.
    fn source_number(&self, key: &RegionKey) -> Result<usize, Error> {
        key.expect(TransportKind::Sim)?;
        let body: [u8; 16] = key.body().try_into().map_err(|_| KeyError::Body("its length is wrong"))?;
        let (network, source) = body.split_at(8);
        if network != self.shared.number.to_le_bytes() {
            return Err(KeyError::Body("it belongs to another simulated network").into());
        }
        let source = source.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        usize::try_from(source).map_err(|_| KeyError::Body("its source does not exist").into())
    }
}

impl Connector for SimConnector {
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }

    fn connect(
        &self,
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        sink: Arc<Memory>,
    ) -> Result<Box<dyn Peer>, Error> {
        let number = self.source_number(key)?;
        let mut state = self.shared.state();
        state.peers += 1;
        let mut random = Random::split(self.shared.seed, state.peers);
        let faults = &self.shared.faults;
        let faults = if state.is_calm { faults.lossless() } else { faults.clone() };
        let lost = random.happens(faults.failed_connect);
        let source = state.sources.get_mut(number).and_then(Option::as_mut).filter(|_| !lost);
        let source = source.ok_or_else(|| Error::Unreachable {
            what: format!("simulated source {number}"),
            source: io::ErrorKind::ConnectionRefused.into(),
        })?;
        let admission = source.admit(session, secret, key.id()).map_err(Error::Refused)?;
        let lane = Lane::new(admission, sink.clone(), faults, random)?;
        let (peer, lane) = SimPeer::new(lane, sink)?;
        source.note(session, key.id(), &lane);
        Ok(Box::new(peer))
    }
}
