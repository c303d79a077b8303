//! The replica's choice: which connectors to try, in which order, and why the others were rejected.

use std::collections::VecDeque;
use std::net::SocketAddr;

use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::verbs::{CompletionMode, VerbsConnector, VerbsOptions};
use remora_fabric::{Connector, Error, TransportKind};

use crate::args::{CompletionChoice, RdmaRead, TransportChoice};
use crate::conversation::Security;

/// The transports that the replica may use, and their settings.
#[derive(Clone, Debug)]
pub(crate) struct TransportChoices {
    pub(crate) choice: TransportChoice,
    pub(crate) lanes: u8,
    pub(crate) rdma: RdmaRead,
    /// What protects the control connections, and whether tables must be sealed.
    pub(crate) security: Security,
}

impl TransportChoices {
    /// The kinds that this end may use, best first, for the source.
    pub(crate) fn kinds(&self) -> Vec<TransportKind> {
        match self.choice {
            TransportChoice::Auto => vec![TransportKind::Shm, TransportKind::Verbs, TransportKind::Tcp],
            TransportChoice::Shm => vec![TransportKind::Shm],
            TransportChoice::Verbs => vec![TransportKind::Verbs],
            TransportChoice::Tcp => vec![TransportKind::Tcp],
        }
    }

    /// The connectors to a source at the address `source`, best first. `is_sealed`: what they read is ciphertext.
    pub(crate) fn connectors(&self, source: SocketAddr, is_sealed: bool) -> Connectors {
        Connectors { candidates: self.each(source, is_sealed).into(), passed_over: Vec::new() }
    }

    /// The connector of each transport to a source at the address `source`, or why there is none.
    pub(crate) fn each(&self, source: SocketAddr, is_sealed: bool) -> Vec<Candidate> {
        self.kinds().into_iter().map(|kind| (kind, self.connector(kind, source, is_sealed))).collect()
    }

    fn connector(&self, kind: TransportKind, source: SocketAddr, is_sealed: bool) -> Result<Box<dyn Connector>, Error> {
        Ok(match kind {
            TransportKind::Shm => Box::new(ShmConnector::new()),
            TransportKind::Verbs => Box::new(self.verbs(source, is_sealed)?),
            _ => Box::new(self.tcp(source, is_sealed)?),
        })
    }

    fn tcp(&self, source: SocketAddr, is_sealed: bool) -> Result<TcpConnector, Error> {
        let connector = TcpConnector::new(TcpOptions { lanes: self.lanes, ..TcpOptions::default() }, Some(source))?;
        // The region's key names the address, which need not be that of the conversation.
        let security = self.security.clone();
        Ok(connector.with_check(move |address| match is_sealed || security.permits_plain_data(address) {
            true => Ok(()),
            false => Err(Error::Misuse(NOT_SEALED)),
        }))
    }

    fn verbs(&self, source: SocketAddr, is_sealed: bool) -> Result<VerbsConnector, Error> {
        if !is_sealed && !self.security.permits_plain_network() {
            return Err(Error::Misuse(NOT_SEALED));
        }
        let rdma = &self.rdma;
        let options = VerbsOptions {
            queue_pairs: rdma.rdma_queue_pairs,
            queue_depth: rdma.rdma_queue_depth,
            reads_in_flight: rdma.rdma_reads,
            piece_bytes: u32::try_from(rdma.rdma_piece.get()).unwrap_or(u32::MAX),
            completion: match rdma.rdma_completion {
                CompletionChoice::Polling => CompletionMode::Polling,
                CompletionChoice::Event => CompletionMode::Event,
                CompletionChoice::PollThenArm => CompletionMode::PollThenArm,
            },
            poll_time: std::time::Duration::from_micros(rdma.rdma_poll_us),
            traffic_class: rdma.end.rdma_traffic_class,
            service_level: rdma.end.rdma_service_level,
            connect_timeout: CONNECT_LIMIT,
            ..VerbsOptions::default()
        };
        VerbsConnector::new(options, Some(source), rdma.end.addresses()?)
    }
}

/// A transport, and its connector or why there is none.
pub(crate) type Candidate = (TransportKind, Result<Box<dyn Connector>, Error>);

/// The connectors that are still to be tried, best first, and why others were rejected.
pub(crate) struct Connectors {
    candidates: VecDeque<Candidate>,
    passed_over: Vec<String>,
}

impl Connectors {
    /// The best remaining connector. It rejects those that are not available on this host.
    pub(crate) fn best(&mut self) -> Option<&dyn Connector> {
        while let Some((_, Err(error))) = self.candidates.front() {
            let why = error.to_string();
            self.pass_over(&why);
        }
        self.candidates.front().and_then(|(_, connector)| connector.as_deref().ok())
    }

    /// Rejects the best remaining connector, for this reason.
    pub(crate) fn pass_over(&mut self, why: &str) {
        if let Some((kind, _)) = self.candidates.pop_front() {
            self.passed_over.push(format!("{kind}: {why}"));
        }
    }

    /// Why the rejected ones were rejected, as one text.
    pub(crate) fn why(&self) -> String {
        self.passed_over.join("; ")
    }
}

/// How long RDMA may take to connect before the next transport is tried. A lost request is repeated once, after about 4
/// s.
const CONNECT_LIMIT: std::time::Duration = std::time::Duration::from_secs(6);

/// Why a transport is not used.
const NOT_SEALED: &str = "the data would not be encrypted: start the source with --security token, or both ends with \
    --security none --plaintext-network";
