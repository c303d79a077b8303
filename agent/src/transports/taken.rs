//! The replica's choice: the connectors to try, in their order, and what speaks against those that are passed over.

use std::collections::VecDeque;
use std::net::SocketAddr;

use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::verbs::{CompletionMode, VerbsConnector, VerbsOptions};
use remora_fabric::{Connector, Error, TransportKind};

use crate::args::{CompletionChoice, RdmaRead, TransportChoice};

/// The transports that may be used, and how.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) choice: TransportChoice,
    pub(crate) lanes: u8,
    pub(crate) rdma: RdmaRead,
}

impl Wish {
    /// What the source is told: the kinds that this end may use, best first.
    pub(crate) fn kinds(&self) -> Vec<TransportKind> {
        match self.choice {
            TransportChoice::Auto => vec![TransportKind::Shm, TransportKind::Verbs, TransportKind::Tcp],
            TransportChoice::Shm => vec![TransportKind::Shm],
            TransportChoice::Verbs => vec![TransportKind::Verbs],
            TransportChoice::Tcp => vec![TransportKind::Tcp],
        }
    }

    /// The connectors, best first, to a source that was reached at `source`.
    pub(crate) fn connectors(&self, source: SocketAddr) -> Connectors {
        Connectors { candidates: self.each(source).into(), passed_over: Vec::new() }
    }

    /// Each transport's connector to a source that was reached at `source`, or why there is none.
    pub(crate) fn each(&self, source: SocketAddr) -> Vec<Candidate> {
        self.kinds().into_iter().map(|kind| (kind, self.connector(kind, source))).collect()
    }

    fn connector(&self, kind: TransportKind, source: SocketAddr) -> Result<Box<dyn Connector>, Error> {
        Ok(match kind {
            TransportKind::Shm => Box::new(ShmConnector::new()),
            TransportKind::Verbs => Box::new(self.verbs(source)?),
            _ => Box::new(TcpConnector::new(TcpOptions { lanes: self.lanes, ..TcpOptions::default() }, Some(source))?),
        })
    }

    fn verbs(&self, source: SocketAddr) -> Result<VerbsConnector, Error> {
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

/// What is left to be tried, best first, and what is not and why.
pub(crate) struct Connectors {
    candidates: VecDeque<Candidate>,
    passed_over: Vec<String>,
}

impl Connectors {
    /// The best that is left, once those that can't be had here are passed over.
    pub(crate) fn best(&mut self) -> Option<&dyn Connector> {
        while let Some((_, Err(error))) = self.candidates.front() {
            let why = error.to_string();
            self.pass_over(&why);
        }
        self.candidates.front().and_then(|(_, connector)| connector.as_deref().ok())
    }

    /// The best that is left can't be used, for this reason.
    pub(crate) fn pass_over(&mut self, why: &str) {
        if let Some((kind, _)) = self.candidates.pop_front() {
            self.passed_over.push(format!("{kind}: {why}"));
        }
    }

    /// What spoke against those that were passed over, in a sentence.
    pub(crate) fn why(&self) -> String {
        self.passed_over.join("; ")
    }
}

/// How long RDMA may take to connect before the next transport is tried: a lost request is repeated once, after some 4 s.
const CONNECT_LIMIT: std::time::Duration = std::time::Duration::from_secs(6);
