//! The replica's choice: which connectors to try, in which order, and why the others were rejected.

use std::collections::VecDeque;
use std::net::SocketAddr;

use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::verbs::{CompletionMode, VerbsConnector, VerbsOptions};
use remora_fabric::{Connector, Error, KeyError, TransportKind};

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

    /// The same to a replica that lends slots at the address `lender`, in a conversation with this host's address
    /// `own`. The source has assigned that address, and the replica's keys may lead nowhere else: TCP connects to that
    /// address and port only, and sockets of this host are taken from a replica on this host only. Those of RDMA name
    /// addresses of devices, of which the conversation says nothing.
    pub(crate) fn connectors_to_lender(&self, lender: SocketAddr, own: SocketAddr, is_sealed: bool) -> Connectors {
        let is_here = lender.ip() == own.ip() || (lender.ip().is_loopback() && own.ip().is_loopback());
        let connector = |kind| match kind {
            TransportKind::Shm if !is_here => Err(Error::Key(KeyError::Body(NOT_OF_THIS_HOST))),
            TransportKind::Tcp => {
                let connector: Box<dyn Connector> = Box::new(self.tcp(lender, Some(lender), is_sealed)?);
                Ok(connector)
            }
            kind => self.connector(kind, lender, is_sealed),
        };
        let candidates = self.kinds().into_iter().map(|kind| (kind, connector(kind))).collect();
        Connectors { candidates, passed_over: Vec::new() }
    }

    /// The connector of each transport to a source at the address `source`, or why there is none.
    pub(crate) fn each(&self, source: SocketAddr, is_sealed: bool) -> Vec<Candidate> {
        self.kinds().into_iter().map(|kind| (kind, self.connector(kind, source, is_sealed))).collect()
    }

    fn connector(&self, kind: TransportKind, source: SocketAddr, is_sealed: bool) -> Result<Box<dyn Connector>, Error> {
        Ok(match kind {
            TransportKind::Shm => Box::new(ShmConnector::new()),
            TransportKind::Verbs => Box::new(self.verbs(source, is_sealed)?),
            _ => Box::new(self.tcp(source, None, is_sealed)?),
        })
    }

    /// A connector to the end that was reached at `source`. `only`: the one address to which its keys may lead.
    fn tcp(&self, source: SocketAddr, only: Option<SocketAddr>, is_sealed: bool) -> Result<TcpConnector, Error> {
        let connector = TcpConnector::new(TcpOptions { lanes: self.lanes, ..TcpOptions::default() }, Some(source))?;
        // The region's key names the address, which need not be that of the conversation.
        let security = self.security.clone();
        Ok(connector.with_check(move |address| {
            let same = |only: SocketAddr| {
                (only.ip().to_canonical(), only.port()) == (address.ip().to_canonical(), address.port())
            };
            match is_sealed || security.permits_plain_data(address.ip()) {
                _ if !only.is_none_or(same) => Err(Error::Key(KeyError::Body(ELSEWHERE))),
                true => Ok(()),
                false => Err(Error::Misuse(NOT_SEALED)),
            }
        }))
    }

    fn verbs(&self, source: SocketAddr, is_sealed: bool) -> Result<VerbsConnector, Error> {
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
        // A host without a device is the better reason.
        let connector = VerbsConnector::new(options, Some(source), rdma.end.addresses()?)?;
        match is_sealed || self.security.permits_plain_network() {
            true => Ok(connector),
            false => Err(Error::Misuse(NOT_SEALED)),
        }
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

/// Why a transport is not used for which the other end has no key.
pub(crate) fn not_offered(kind: TransportKind) -> &'static str {
    match kind {
        TransportKind::Verbs => {
            "the source does not offer it: its host has no RDMA device, or it was started with --no-rdma or with --security none"
        }
        TransportKind::Shm => "the source does not offer it: it was started with --no-shm",
        _ => "the source does not offer it",
    }
}

/// Why a lender's key is not used.
const ELSEWHERE: &str = "it leads to another address than that of the replica that the source has assigned";
const NOT_OF_THIS_HOST: &str = "a replica on another host has no sockets of this one";

/// Why a transport is not used.
const NOT_SEALED: &str = "the data would not be encrypted: start the source with --security token, or both ends with \
    --security none --plaintext-network";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use clap::Parser;
    use remora_fabric::shm::{ShmExporter, ShmOptions};
    use remora_fabric::{Exporter, Memory, Pages, RegionId, Regions};

    use super::*;

    #[derive(Parser)]
    struct Options {
        #[command(flatten)]
        rdma: RdmaRead,
    }

    #[test]
    fn a_socket_of_this_host_is_taken_from_a_lender_on_this_host_only() {
        let rdma = Options::parse_from(["remora"]).rdma;
        let choices = TransportChoices { choice: TransportChoice::Shm, lanes: 1, rdma, security: Security::default() };
        let memory = || Arc::new(Memory::create("lent", 4096, Pages::Small).unwrap());
        let exporter = ShmExporter::bind(ShmOptions::default()).unwrap();
        let id = RegionId { generation: 1, region: 16 };
        exporter.export(id, memory()).unwrap();
        exporter.grant(1, [7; 32], Regions::All);
        let key = exporter.key(id).unwrap();
        let address = |text: &str| text.parse().unwrap();
        let reach = |lender: &str, own: &str| {
            let mut connectors = choices.connectors_to_lender(address(lender), address(own), true);
            let is_read = connectors.best().is_some_and(|best| best.connect(&key, 1, &[7; 32], memory()).is_ok());
            (is_read, connectors.why())
        };
        for (lender, own) in [("192.0.2.1:7", "192.0.2.1:9"), ("127.0.0.2:7", "127.0.0.1:9")] {
            assert_eq!(reach(lender, own), (true, String::new()));
        }
        let (is_read, why) = reach("192.0.2.2:7", "192.0.2.1:9");
        assert!(!is_read && why.contains("a replica on another host"), "{why}");
    }
}
