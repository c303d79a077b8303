//! `remora probe`: measures how long a read of a source's memory takes, and how many bytes per second arrive, over each
//! transport.
//!
//! ```text
//!   probe ── ProbeQuery ──▶ source: exports a probe region        (no snapshot, no data)
//!         ◀─ ProbeOffer ──  its keys
//!         ══ reads ═══════▶ the region, by one transport after the other
//!         the session ends: the source revokes the region
//! ```
//!
//! This is not a benchmark of Remora: it compares with nothing, takes each figure once, and shares the hosts with other
//! work.
//!
//! Here is also `remora ready`, which asks a server and reads no memory.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::args::{HostPort, ProbeArgs, ReadyArgs};
use crate::conversation::{Connection, derive};
use crate::exit::{Code, Failure};
use crate::reader::parts::{Cell, Pump, Stopped, WARM_BYTES, WARM_DEPTH, place_bytes};
use crate::server::{Facts, Role, Server, ServerError, Task};
use crate::transports::{LANES_LABEL, TransportChoices};
use crate::units::{Size, readable};
use crate::{events, progress, signals};
use remora_fabric::{Connector, Error, Memory, Pages, Peer, RegionKey, Secret, TransportKind};
use remora_protocol::Message;

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
    let wish = TransportChoices {
        choice: args.transport,
        lanes: args.lanes,
        rdma: args.rdma.options(),
        security: credentials.security,
    };
    let mut measuring = tokio::task::spawn_blocking(move || way.measure(&wish, &plan));
    let report = loop {
        tokio::select! {
            done = &mut measuring => {
                break done.map_err(|error| Failure::local(format!("the thread that measures failed: {error}; this is a bug of remora, please report it")))??;
            }
            // No further message is expected. But the session must stay open, because the source revokes the region at
            // its end.
            heard = connection.receive() => drop(heard.map_err(denied)?),
        }
    };
    let told = match json {
        true => progress::print_line(&as_json(&report).to_string()),
        false => progress::print(&as_text(&report)),
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
        Ok(transport(&mut *peer, key.length(), plan, deadline))
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

// Measures one transport by a [`Pump`]. Before the first figure the region is read once (for no longer than some
// figures take), so that no figure includes first-time costs.

/// How many times the time of a figure that may take.
const WARM_TIMES: u32 = 5;

/// What to measure.
#[derive(Clone, Debug)]
struct Plan {
    /// Bytes of one read, ascending.
    sizes: Vec<u32>,
    /// Reads in flight at once, ascending.
    depths: Vec<usize>,
    /// How long each size is read at each depth.
    time: Duration,
    /// The time limit of the whole measurement.
    limit: Duration,
}

impl Plan {
    fn new(args: &ProbeArgs) -> Plan {
        let mut sizes: Vec<u32> = args.sizes.iter().map(|size| u32::try_from(size.get()).unwrap_or(u32::MAX)).collect();
        let mut depths: Vec<usize> = args.depths.iter().map(|depth| usize::from(*depth)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        depths.sort_unstable();
        depths.dedup();
        Plan { sizes, depths, time: args.time, limit: args.limit }
    }

    /// Bytes of memory that all reads in flight at once need.
    fn sink_bytes(&self) -> u64 {
        let largest = self.sizes.last().copied().unwrap_or(1).max(WARM_BYTES);
        place_bytes(largest) * self.depths.last().copied().unwrap_or(1).max(WARM_DEPTH) as u64
    }

    /// The number of figures per transport.
    fn cells(&self) -> usize {
        self.sizes.len() * self.depths.len()
    }
}

/// Measures all sizes at all depths, small sizes first, until `deadline`.
fn transport(peer: &mut dyn Peer, region: u64, plan: &Plan, deadline: Instant) -> Outcome {
    let mut cells = Vec::new();
    let measured = (|| {
        let warm = Pump::new(WARM_BYTES, WARM_DEPTH, region, WARM_TIMES * plan.time, deadline);
        warm.once_around().run(peer)?;
        for (size, depth) in plan.sizes.iter().flat_map(|size| plan.depths.iter().map(move |depth| (*size, *depth))) {
            cells.push(Pump::new(size, depth, region, plan.time, deadline).run(peer)?);
        }
        Ok(())
    })();
    let trouble = measured.err().map(|why: Stopped| why.to_string());
    Outcome::Measured { cells, trouble }
}

// Formats the figures as tables and as JSON.

fn as_text(report: &Report) -> String {
    let mut text = format!(
        "source {}: a probe region of {}, {} ms per figure\n",
        report.source,
        Size::bytes(report.region),
        report.plan.time.as_millis()
    );
    for (kind, outcome) in &report.transports {
        match outcome {
            Outcome::Unusable(why) => text.push_str(&format!("\n{kind}: cannot be used: {why}\n")),
            Outcome::Measured { cells, trouble } => {
                text.push_str(&table(kind.name(), cells, &report.plan.depths));
                if let Some(why) = trouble {
                    let missing = report.plan.cells() - cells.len();
                    text.push_str(&format!("{missing} of {} figures are missing: {why}\n", report.plan.cells()));
                }
            }
        }
    }
    text
}

/// A row for each size: how long one read takes with few in flight, and the rate at each depth.
fn table(kind: &str, cells: &[Cell], depths: &[usize]) -> String {
    let few = depths.first().copied().unwrap_or(1);
    let at_once = if few == 1 { "one read at a time".to_owned() } else { format!("{few} reads at a time") };
    let mut text = format!("\n{kind:<9} {at_once:>25}   MB/s, by reads at a time:\n");
    text.push_str(&format!("{:>9} {:>12} {:>12}  ", "size", "median", "99 of 100"));
    depths.iter().for_each(|depth| text.push_str(&format!(" {depth:>10}")));
    text.push('\n');
    for row in cells.chunk_by(|one, other| one.size == other.size) {
        let Some(first) = row.first() else { continue };
        let size = Size::bytes(first.size.into()).to_string();
        text.push_str(&format!("{size:>9} {:>12} {:>12}  ", micros(first.median), micros(first.p99)));
        row.iter().for_each(|cell| text.push_str(&format!(" {:>10}", megabytes(cell.bytes_per_second()))));
        text.push('\n');
    }
    text
}

fn micros(time: Duration) -> String {
    match time {
        time if time >= Duration::from_secs(1) => readable(time),
        time => format!("{:.1} µs", time.as_nanos() as f64 / 1e3),
    }
}

/// At least three significant digits.
fn megabytes(bytes_per_second: f64) -> String {
    match bytes_per_second / 1e6 {
        rate if rate < 10.0 => format!("{rate:.2}"),
        rate if rate < 100.0 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

fn as_json(report: &Report) -> Value {
    let transports = report.transports.iter().map(|(kind, outcome)| match outcome {
        Outcome::Unusable(why) => json!({ "transport": kind.name(), "usable": false, "trouble": why, "figures": [] }),
        Outcome::Measured { cells, trouble } => json!({
            "transport": kind.name(),
            "usable": true,
            "trouble": trouble,
            "figures": cells.iter().map(cell_as_json).collect::<Vec<_>>(),
        }),
    });
    json!({
        "source": report.source.to_string(),
        "region_bytes": report.region,
        "figure_millis": report.plan.time.as_millis() as u64,
        "transports": transports.collect::<Vec<_>>(),
    })
}

fn cell_as_json(cell: &Cell) -> Value {
    json!({
        "read_bytes": cell.size,
        "depth": cell.depth,
        "reads": cell.reads,
        "seconds": cell.elapsed.as_secs_f64(),
        "bytes_per_second": cell.bytes_per_second(),
        "reads_per_second": cell.reads_per_second(),
        "median_micros": cell.median.as_nanos() as f64 / 1e3,
        "p99_micros": cell.p99.as_nanos() as f64 / 1e3,
    })
}

// `remora ready`: whether a server can be given work, for probes and scripts.
//
// [`judge`] decides by the facts of the server and of its primary, and does no I/O.

/// Looks at the server until it is ready, or the time is over.
///
/// # Errors
/// [`Code::NotReady`] with the reason, or the server cannot be asked.
pub async fn run_ready(args: ReadyArgs) -> Result<(), Failure> {
    let server = args.server.open(Task::Ready)?;
    match args.watch {
        Some(pause) => watch(server, &args, pause).await,
        None => wait(&server, &args).await,
    }
}

async fn wait(server: &Server, args: &ReadyArgs) -> Result<(), Failure> {
    let until = Instant::now() + args.timeout;
    loop {
        let why = match judged(server, args).await? {
            Ok(state) => {
                progress::say(&format!("{} is ready: {state}", server.url()));
                return Ok(());
            }
            Err(why) => why,
        };
        if Instant::now() + LOOK_AGAIN >= until {
            return Err(why);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Prints each change until it is stopped. At a SIGHUP it reads its files again.
async fn watch(mut server: Server, args: &ReadyArgs, pause: Duration) -> Result<(), Failure> {
    let mut hangups = signals::hangups()?;
    let mut said = None;
    loop {
        // The state of one that is ready contains its lag, which always changes.
        let (is_ready, text) = match judged(&server, args).await? {
            Ok(state) => (true, format!("{} is ready: {state}", server.url())),
            Err(why) => (false, why.message),
        };
        let change = if is_ready { String::new() } else { text.clone() };
        if said.as_ref() != Some(&change) {
            progress::say(&text);
            said = Some(change);
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Some(()) = hangups.recv() => match args.server.open(Task::Ready) {
                Ok(again) => {
                    tracing::info!(event = events::CERTIFICATES_REREAD, "password and certificate files read again");
                    server = again;
                }
                Err(error) => tracing::error!(event = events::CERTIFICATES_KEPT, %error, "what was read before stays valid"),
            }
        }
    }
}

/// How the server stands, or why it is not ready, or cannot be reached at the moment.
async fn judged(server: &Server, args: &ReadyArgs) -> Result<Result<String, Failure>, Failure> {
    match look(server, args).await {
        Ok(Ok(state)) => Ok(Ok(state)),
        Ok(Err(why)) => Ok(Err(Failure::new(Code::NotReady, format!("{} is not ready: {why}", server.url())))),
        // A server that starts refuses connections at first.
        Err(error) if error.is_passing() => Ok(Err(error.into())),
        Err(error) => Err(error.into()),
    }
}

/// How the server stands, or why it is not ready.
async fn look(server: &Server, args: &ReadyArgs) -> Result<Result<String, String>, ServerError> {
    let facts = Facts::read(&mut server.connect().await?).await?;
    let primary = match &facts.link {
        Some(link) if facts.role == Some(Role::Replica) && !args.link_only => {
            let primary = server.at(&link.host, link.port);
            // Read after the replica's facts: the primary's offset is not older than the replica's.
            let read = async { Facts::read(&mut primary.connect().await?).await };
            match read.await {
                Ok(primary) => Some(primary),
                Err(error) => {
                    return Ok(Err(format!("its primary cannot be asked: {error} (--link-only asks it nothing)")));
                }
            }
        }
        _ => None,
    };
    Ok(judge(&facts, primary.as_ref(), args.max_lag))
}

/// Decides by the facts. A replica's primary is `None` if it was not asked.
fn judge(facts: &Facts, primary: Option<&Facts>, max_lag: Option<Size>) -> Result<String, String> {
    if facts.loading != Some(false) {
        return Err("it is loading its data set".into());
    }
    let link = match (facts.role, &facts.link) {
        (Some(Role::Replica), Some(link)) => link,
        (Some(Role::Primary), _) => return Ok("a primary".into()),
        _ => return Err("its INFO names neither a role nor a primary".into()),
    };
    let at = format!("{}:{}", link.host, link.port);
    if link.syncing == Some(true) {
        return Err(format!("it is taking a full copy from {at}"));
    }
    if link.up != Some(true) {
        return Err(format!("its link to {at} is down"));
    }
    let Some(primary) = primary else { return Ok(format!("a replica of {at} with its link up")) };
    if primary.replid.is_none() || primary.replid != facts.replid {
        return Err(format!("it has another history than {at}"));
    }
    let lag = primary.offset.unwrap_or(u64::MAX).saturating_sub(facts.offset.unwrap_or(0));
    match max_lag {
        Some(most) if lag > most.get() => Err(format!("it is {} behind {at}", Size::bytes(lag))),
        _ => Ok(format!("a replica of {at}, {lag} bytes behind")),
    }
}

/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use super::*;
    use crate::server::Link;
    use remora_fabric::shm::{ShmConnector, ShmExporter, ShmOptions};
    use remora_fabric::{Connector, Exporter, Memory, Pages, RegionId, Regions, TransportKind};
    use remora_redis::ReplId;

    const REGION: u64 = 4 << 20;

    fn plan(time: Duration) -> Plan {
        Plan { sizes: vec![8, 5000], depths: vec![1, 3], time, limit: Duration::from_secs(60) }
    }

    fn peer() -> (ShmExporter, Box<dyn Peer>) {
        let exporter = ShmExporter::bind(ShmOptions::default()).unwrap();
        let id = RegionId { generation: 1, region: 2 };
        exporter.export(id, Arc::new(Memory::create("region", REGION, Pages::Small).unwrap())).unwrap();
        exporter.grant(1, [1; 32], Regions::All);
        let sink = Memory::create("sink", plan(Duration::ZERO).sink_bytes(), Pages::Small).unwrap();
        let peer = ShmConnector::new().connect(&exporter.key(id).unwrap(), 1, &[1; 32], Arc::new(sink)).unwrap();
        (exporter, peer)
    }

    #[test]
    fn each_size_is_measured_at_each_depth_and_the_figures_fit_one_another() {
        let (_exporter, mut peer) = peer();
        let plan = plan(Duration::from_millis(5));
        let Outcome::Measured { cells, trouble } = transport(&mut *peer, REGION, &plan, Instant::now() + plan.limit)
        else {
            panic!("not measured")
        };
        assert!(trouble.is_none(), "{trouble:?}");
        let shapes: Vec<(u32, usize)> = cells.iter().map(|cell| (cell.size, cell.depth)).collect();
        assert_eq!(shapes, [(8, 1), (8, 3), (5000, 1), (5000, 3)]);
        for cell in &cells {
            assert!(cell.reads > 0 && cell.elapsed >= plan.time, "{cell:?}");
            assert!(cell.median > Duration::ZERO && cell.median <= cell.p99 && cell.p99 <= cell.elapsed, "{cell:?}");
        }
    }

    #[test]
    fn when_the_time_is_over_the_rest_is_left_out_and_said_to_be() {
        let (_exporter, mut peer) = peer();
        let Outcome::Measured { cells, trouble } =
            transport(&mut *peer, REGION, &plan(Duration::from_secs(5)), Instant::now())
        else {
            panic!("not measured")
        };
        assert!(cells.is_empty(), "{cells:?}");
        assert!(trouble.unwrap().contains("--limit"));
    }

    fn report() -> Report {
        let cell = |size, depth, micros| Cell {
            size,
            depth,
            reads: 1000,
            elapsed: Duration::from_millis(100),
            median: Duration::from_micros(micros),
            p99: Duration::from_micros(2 * micros),
        };
        let cells = vec![cell(8, 1, 3), cell(8, 16, 10), cell(1 << 20, 1, 90)];
        Report {
            source: "10.0.0.5:7379".parse().unwrap(),
            region: 64 << 20,
            plan: Plan {
                sizes: vec![8, 1 << 20],
                depths: vec![1, 16],
                time: Duration::from_millis(100),
                limit: Duration::from_secs(1),
            },
            transports: vec![
                (TransportKind::Shm, Outcome::Unusable("another host".into())),
                (TransportKind::Tcp, Outcome::Measured { cells, trouble: Some("too late".into()) }),
            ],
        }
    }

    #[test]
    fn the_table_has_a_row_for_each_size_and_says_what_is_missing() {
        let text = as_text(&report());
        let row = |begin: &str| text.lines().find(|line| line.trim_start().starts_with(begin)).unwrap().to_owned();
        assert_eq!(
            row("8 B").split_whitespace().collect::<Vec<_>>(),
            ["8", "B", "3.0", "µs", "6.0", "µs", "0.08", "0.08"]
        );
        assert_eq!(row("1 MiB").split_whitespace().last(), Some("10486"));
        assert!(text.contains("shm: cannot be used: another host"), "{text}");
        assert!(text.contains("1 of 4 figures are missing: too late"), "{text}");
    }

    #[test]
    fn programs_get_the_same_figures() {
        let value = as_json(&report());
        assert_eq!(value["transports"][0]["usable"], false);
        let figures = &value["transports"][1]["figures"];
        assert_eq!((&figures[0]["median_micros"], &figures[2]["read_bytes"]), (&json!(3.0), &json!(1 << 20)));
        assert_eq!(figures[2]["bytes_per_second"], 1000.0 * f64::from(1 << 20) / 0.1);
    }

    fn primary(offset: u64) -> Facts {
        let replid = "a".repeat(40).parse::<ReplId>().ok();
        Facts { role: Some(Role::Primary), loading: Some(false), offset: Some(offset), replid, ..Facts::default() }
    }

    fn replica(offset: u64) -> Facts {
        let link = Link { host: "h".into(), port: 6379, up: Some(true), syncing: Some(false) };
        Facts { role: Some(Role::Replica), link: Some(link), ..primary(offset) }
    }

    fn with_link(change: impl FnOnce(&mut Link)) -> Facts {
        let mut facts = replica(10);
        facts.link.as_mut().map(change);
        facts
    }

    #[test]
    fn only_a_replica_in_step_with_the_history_of_its_primary_is_ready() {
        assert_eq!(judge(&replica(10), Some(&primary(12)), None).as_deref(), Ok("a replica of h:6379, 2 bytes behind"));
        assert!(judge(&replica(10), None, None).is_ok());
        assert!(judge(&with_link(|link| link.up = Some(false)), None, None).is_err());
        assert!(judge(&with_link(|link| link.up = None), None, None).is_err(), "what is not known is not ready");
        assert!(judge(&with_link(|link| link.syncing = Some(true)), None, None).is_err());
        let other = Facts { replid: "b".repeat(40).parse().ok(), ..primary(12) };
        assert!(judge(&replica(10), Some(&other), None).is_err());
        assert!(judge(&Facts { replid: None, ..replica(10) }, Some(&Facts { replid: None, ..other }), None).is_err());
    }

    #[test]
    fn the_lag_counts_if_it_has_a_limit() {
        let judge = |lag: u64| judge(&replica(10), Some(&primary(10 + lag)), Some(Size::bytes(100)));
        assert!(judge(100).is_ok());
        assert!(judge(101).is_err());
    }

    #[test]
    fn a_primary_is_ready_when_it_has_loaded() {
        assert!(judge(&primary(0), None, None).is_ok());
        for loading in [Some(true), None] {
            assert!(judge(&Facts { loading, ..primary(0) }, None, None).is_err());
        }
        assert!(judge(&Facts { loading: Some(false), ..Facts::default() }, None, None).is_err());
    }
}
