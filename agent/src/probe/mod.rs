//! `remora probe`: measures how long a read of a source's memory takes, and how many bytes per second arrive, over each
//! transport.
//!
//! ```text
//!   probe ── ProbeQuery ──▶ source: exports a probe region        (no snapshot, no data)
//!         ◀─ ProbeOffer ──  its keys
//!         ══ reads ═══════▶ the region, by one transport after the other: `measure`
//!         the session ends: the source revokes the region
//! ```
//!
//! - [`measure`]: measures one transport at all sizes and depths, within a time limit. [`show`]: tables and JSON.
//!
//! This is not a benchmark of Remora: it compares with nothing, takes each figure once, and shares the hosts with other
//! work.

pub(crate) mod measure;
mod show;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::{Connector, Error, Memory, Pages, RegionKey, Secret, TransportKind};
use remora_protocol::Message;

use crate::args::{HostPort, ProbeArgs};
use crate::conversation::{Connection, derive};
use crate::exit::{Code, Failure};
use crate::lanes::LANES_LABEL;
use crate::progress;
use crate::transports::connectors::TransportChoices;

use self::measure::{Cell, Plan};

/// How long the source may take to create its region: it touches 64 MiB, and registers them with an RDMA device.
const OFFER_LIMIT: Duration = Duration::from_secs(20);

/// The region holds no data, so it may be read as if it were sealed.
const HOLDS_NO_DATA: bool = true;

/// Measures, and prints the result on stdout.
///
/// # Errors
/// The token file is not usable, the source cannot be reached or refuses the request, or no transport could be
/// measured.
pub async fn run(args: ProbeArgs) -> Result<(), Failure> {
    let (credentials, source) = (args.ask.credentials()?, &args.ask.source);
    let mut connection = credentials.connect(&source.host, source.port).await.map_err(denied)?;
    let keys = ask(&mut connection, source).await?;
    let way = Way {
        session: connection.session(),
        secret: derive(&connection.session_key(), LANES_LABEL),
        source: connection.peer_addr(),
        keys,
    };
    let (plan, json) = (Plan::new(&args), args.json);
    let wish =
        TransportChoices { choice: args.transport, lanes: args.lanes, rdma: args.rdma, security: credentials.security };
    let mut measuring = tokio::task::spawn_blocking(move || way.measure(&wish, &plan));
    let report = loop {
        tokio::select! {
            done = &mut measuring => {
                break done.map_err(|error| Failure::local(format!("the measurement failed: {error}")))??;
            }
            // No further message is expected. But the session must stay open, because the source revokes the region at
            // its end.
            heard = connection.receive() => drop(heard.map_err(denied)?),
        }
    };
    let told = match json {
        true => progress::print_line(&show::as_json(&report).to_string()),
        false => progress::print(&show::as_text(&report)),
    };
    report.verdict().and(told)
}

async fn ask(connection: &mut Connection, source: &HostPort) -> Result<Vec<RegionKey>, Failure> {
    connection.send(Message::ProbeQuery).await.map_err(denied)?;
    let answer = async {
        loop {
            if let Message::ProbeOffer { keys } = connection.receive().await.map_err(denied)? {
                return Ok(keys.into_iter().filter_map(|bytes| RegionKey::from_bytes(bytes).ok()).collect());
            }
        }
    };
    tokio::time::timeout(OFFER_LIMIT, answer).await.unwrap_or_else(|_| {
        let text =
            format!("the source {} exported no memory to measure with within {} s", source, OFFER_LIMIT.as_secs());
        Err(Failure::new(Code::Source, text))
    })
}

fn denied(error: crate::conversation::Error) -> Failure {
    error.of_source()
}

/// How to connect to the region.
struct Way {
    session: u64,
    secret: Secret,
    source: SocketAddr,
    keys: Vec<RegionKey>,
}

/// The result of all measurements.
struct Report {
    source: SocketAddr,
    /// Bytes of the probe region.
    region: u64,
    plan: Plan,
    /// The requested transports, best first.
    transports: Vec<(TransportKind, Outcome)>,
}

/// The result for one transport.
enum Outcome {
    /// It was measured. If it ended early, this says why.
    Measured { cells: Vec<Cell>, trouble: Option<String> },
    /// It cannot be used, for this reason.
    Unusable(String),
}

impl Way {
    /// Measures one transport after the other, so that they do not disturb each other. It blocks for at most the plan's
    /// limit and the time to connect.
    fn measure(&self, wish: &TransportChoices, plan: &Plan) -> Result<Report, Failure> {
        let sink = self.sink(plan)?;
        let deadline = Instant::now() + plan.limit;
        let transports = wish.each(self.source, HOLDS_NO_DATA).into_iter().map(|(kind, connector)| {
            let outcome = connector.and_then(|connector| self.transport(&*connector, &sink, plan, deadline));
            (kind, outcome.unwrap_or_else(|error| Outcome::Unusable(error.to_string())))
        });
        let transports = transports.collect();
        let region = self.keys.iter().map(RegionKey::length).max().unwrap_or(0);
        Ok(Report { source: self.source, region, plan: plan.clone(), transports })
    }

    fn transport(
        &self,
        connector: &dyn Connector,
        sink: &Arc<Memory>,
        plan: &Plan,
        deadline: Instant,
    ) -> Result<Outcome, Error> {
        let Some(key) = self.keys.iter().find(|key| key.transport() == connector.kind()) else {
            return Ok(Outcome::Unusable("the source does not offer it".into()));
        };
        let mut peer = connector.connect(key, self.session, &self.secret, sink.clone())?;
        Ok(measure::transport(&mut *peer, key.length(), plan, deadline))
    }

    /// Memory for the reads: a place for each that is in flight at once. The pages are touched, so that no read pays
    /// for that.
    fn sink(&self, plan: &Plan) -> Result<Arc<Memory>, Failure> {
        let length = plan.sink_bytes();
        let memory = Memory::create("remora-probe", length, Pages::Small)
            .and_then(|memory| memory.prefault(0..length).map(|()| memory));
        memory.map(Arc::new).map_err(|error| {
            let text = format!(
                "cannot allocate {length} bytes of memory to read into: {error}; give smaller --sizes or --depths"
            );
            Failure::local(text)
        })
    }
}

impl Report {
    /// A probe that could measure nothing has failed.
    fn verdict(&self) -> Result<(), Failure> {
        let is_measured = |(_, outcome): &(TransportKind, Outcome)| match outcome {
            Outcome::Measured { cells, .. } => !cells.is_empty(),
            Outcome::Unusable(_) => false,
        };
        if self.transports.iter().any(is_measured) {
            return Ok(());
        }
        Err(Failure::new(
            Code::Source,
            format!("no transport to the source {} could be measured: the report says why", self.source),
        ))
    }
}
