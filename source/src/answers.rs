//! What the source says about the primary: its address, its snapshot formats, whether it continues a replica's history,
//! and what a replica that joins now would get, of which base.
//!
//! The captures choose a base for themselves when they begin, by the same order (`capture::bases`).

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::TransportKind;
use remora_process::rdb_file::{Found, Stored};
use remora_process::{AbortOnDrop, blocking};
use remora_protocol::{Announce, Base, BaseKind, Former, Offer, TableOffer, Terms};
use remora_redis::ReplId;
use remora_server::own_changes::why_not_as_its_primary;
use remora_server::permission::{Permission, TO_REPLICATE};
use remora_server::{CONVERTED, Client, Facts, Place, Server, ServerError, ServerUrl};
use tokio::sync::Mutex;
use tokio::sync::mpsc::Sender;

use super::capture::{Candidate, Data, Known, Tried, World, candidate, of_the_server, order};
use super::machine::Format;
use super::tables::expected;
use super::{Incoming, Source};

/// An offer without tables, for a dry run.
pub fn plan_of(facts: &Facts, primary: Announce, write_rate: u64, process: u64) -> Offer {
    let nothing = || TableOffer {
        generation: 0,
        first_offset: 0,
        slot_size: 0,
        slots: 0,
        retained: false,
        keys: Vec::new(),
        seal: Vec::new(),
        compressed: false,
    };
    Offer {
        generation: 0,
        replid: facts.replid,
        former: facts.former.map(|(replid, end)| Former { replid, end }),
        offset: facts.offset.unwrap_or(0),
        snapshot: nothing(),
        journal: nothing(),
        primary,
        server: facts.name(),
        run_id: facts.run_id.clone().unwrap_or_default(),
        process,
        backlog_bytes: facts.backlog.map_or(0, |backlog| backlog.size),
        write_rate,
        upstream: None,
        warning: String::new(),
        obstacle: String::new(),
        terms: None,
    }
}

/// Why no snapshot of the server can be taken now, as the end of a sentence that begins with the server. A replica
/// without its primary refuses `PSYNC`.
pub(crate) fn obstacle(facts: &Facts) -> Option<String> {
    if facts.loading == Some(true) {
        return Some("is loading its data set".to_owned());
    }
    let link = facts.link.as_ref()?;
    let primary = format!("{}:{}", link.host, link.port);
    match (link.syncing, link.up) {
        (Some(true), _) => Some(format!("is taking a full copy of its primary {primary}")),
        (_, Some(false)) => Some(format!("has no link to its primary {primary}")),
        _ => None,
    }
}

/// The address at which a replica's server reaches the primary: `told`, or else the server's own address. The host is
/// empty if that address is valid on this host only.
pub(crate) fn announce(told: Option<&remora_server::HostPort>, url: &ServerUrl, facts: &Facts) -> Announce {
    let source_sees_as = url.to_string();
    if let Some(told) = told {
        let tls = url.is_tls();
        return Announce { host: told.host.clone(), port: told.port, tls, source_sees_as };
    }
    match url.place() {
        Place::Tcp { host, port, tls } => {
            let host = if url.is_local_only() { String::new() } else { host.clone() };
            Announce { host, port: *port, tls: *tls, source_sees_as }
        }
        Place::Unix(_) => {
            let port = facts.tcp_port.or(facts.tls_port).unwrap_or(0);
            let tls = facts.tcp_port.is_none();
            Announce { host: String::new(), port, tls, source_sees_as }
        }
    }
}

/// The primary's format that a server with this name and version (`Valkey 9.1.2`) reads.
pub(crate) fn format_for(facts: &Facts, server: &str) -> Format {
    if server.ends_with(CONVERTED) {
        return Format::Own;
    }
    let major = server.strip_prefix("Valkey ").and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    match facts.own_format() {
        Some(own) if major.is_none_or(|major| major < own.major) => Format::Shared,
        _ => Format::Own,
    }
}

/// Replaces an unspecified host (0.0.0.0 or ::), at which a replica lends its slots, by the host from which it
/// connected.
pub(crate) fn as_others_reach_it(serves_at: &str, seen: std::net::SocketAddr) -> String {
    match serves_at.parse::<std::net::SocketAddr>() {
        Ok(address) if address.ip().is_unspecified() => {
            std::net::SocketAddr::new(seen.ip(), address.port()).to_string()
        }
        Ok(address) => address.to_string(),
        // Not a valid address: other replicas cannot reach it.
        Err(_) => String::new(),
    }
}

/// What a reader is called: as it says. If it says only a port, it is a server on the host from which it connected. If
/// it says nothing, it has no name but that of its connection.
pub(crate) fn name_of(said: String, seen: std::net::SocketAddr) -> String {
    if said.is_empty() {
        return seen.to_string();
    }
    match said.strip_prefix(':').and_then(|port| port.parse().ok()) {
        Some(port) => std::net::SocketAddr::new(seen.ip(), port).to_string(),
        None => said,
    }
}

/// The history that a replica has executed, as far as this source has given it any.
pub fn known_history(history: Option<ReplId>) -> Result<ReplId, String> {
    history.ok_or_else(|| "this source has given the replica no snapshot and no stream".to_owned())
}

/// Reads the server's facts over a connection that is opened when first needed and again after a failure.
pub(crate) async fn ask(client: &Mutex<Option<Client>>, server: &Server) -> Result<Facts, remora_server::ServerError> {
    let mut client = client.lock().await;
    if let Some(open) = client.as_mut() {
        if let Ok(facts) = Facts::read(open).await {
            return Ok(facts);
        }
        *client = None;
    }
    let mut fresh = server.connect().await?;
    let facts = Facts::read(&mut fresh).await?;
    *client = Some(fresh);
    Ok(facts)
}

// What a replica that joins now would get, and whether the server would send this source a snapshot at all.
//
// A source's user may lack `+psync`, and a replica that the source captures may have begun to evict. Both are found
// before a replica asks, when the source starts and with the facts for each plan, so that a dry run hears of them.

/// How long the server is believed to permit what it has permitted: the question can leave a line in its log.
const BELIEVED_FOR: Duration = Duration::from_secs(60);

/// What the server has permitted.
#[derive(Debug, Default)]
pub(super) struct Rights(std::sync::Mutex<Option<Instant>>);

impl Rights {
    /// Why the server sends this source no snapshot until an administrator changes something there; `None` if nothing
    /// is known to speak against it.
    ///
    /// # Errors
    /// The connection failed.
    pub(super) async fn why_refused(&self, client: &mut Client, facts: &Facts) -> Result<Option<String>, ServerError> {
        if !self.are_believed() {
            for needed in TO_REPLICATE {
                if let Permission::Refused(error) = needed.ask(client, facts).await? {
                    return Ok(Some(error.to_string()));
                }
            }
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        why_not_as_its_primary(client).await
    }

    fn are_believed(&self) -> bool {
        let asked = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        asked.is_some_and(|asked| asked.elapsed() < BELIEVED_FOR)
    }
}

/// What a replica that joins now gets. `refusal`: why there will be no further snapshot.
pub(super) fn terms(source: &Source, refusal: Option<&str>) -> Terms {
    let windowed = source.tables.is_windowed_for(&source.facts);
    let held = !needs_fork(source);
    let (geometry, tuning) = (source.tables.snapshot.1, &source.methods.tuning);
    let snapshot_bytes = match held && !source.gauge.is_capturing() {
        true => source.gauge.received(),
        false => expected(&source.facts, geometry),
    };
    Terms {
        snapshot_bytes,
        ring_bytes: source.tables.ring(),
        windowed,
        held,
        sealed: source.tables.is_sealed(),
        fork_delay_seconds: if source.methods.takes_from_the_server() { tuning.fork_delay() } else { 0 },
        tunes_server: tuning.is_wanted(),
        is_refused: refusal.is_some(),
        offers_shm: source.exports.offer(TransportKind::Shm),
        offers_verbs: source.exports.offer(TransportKind::Verbs),
        base: base(source),
    }
}

/// Whether a replica that joins now makes the server fork: there is no snapshot, or its slots are reused.
pub(super) fn needs_fork(source: &Source) -> bool {
    source.machine.status().snapshot.is_none() || source.tables.is_windowed_for(&source.facts)
}

/// What the loop knows.
#[derive(Default)]
pub(super) struct Choice {
    found: Vec<Found>,
    /// Which ones were tried lately.
    pub(super) tried: Tried,
    /// What the present snapshot was made of, if it was stored.
    from: Option<From>,
    _looking: Option<AbortOnDrop>,
}

/// A snapshot was made of what was stored.
struct From {
    generation: u64,
    place: String,
    /// How old the data were when it began.
    age: Duration,
}

impl Choice {
    /// Begins to look at what is stored, if anything is named.
    pub(super) fn begin(stored: Option<&Arc<dyn Stored>>, tell: Sender<Incoming>) -> Choice {
        let looking = stored.map(|stored| AbortOnDrop::new(&tokio::spawn(look(stored.clone(), tell))));
        Choice { _looking: looking, ..Choice::default() }
    }

    /// A look has ended.
    pub(super) fn found(&mut self, found: Vec<Found>) {
        self.found = found;
    }

    /// A snapshot begins that is made of what is stored.
    pub(super) fn begins(&mut self, generation: u64, place: &str, age: Duration) {
        let place = place.to_owned();
        self.from = Some(From { generation, place, age });
    }
}

async fn look(stored: Arc<dyn Stored>, tell: Sender<Incoming>) {
    loop {
        let asked = stored.clone();
        let Ok(found) = blocking(move || Ok(asked.look())).await else { return };
        if tell.send(Incoming::Stored(found)).await.is_err() {
            return;
        }
        tokio::time::sleep(stored.holds()).await;
    }
}

/// From what a replica is made that joins now.
pub(super) fn base(source: &Source) -> Base {
    let candidates = candidates(source);
    let stream = source.machine.status().stream;
    let journal = stream.map(|stream| {
        let (first, end) = source.gauge.journal();
        (stream.history, first, end)
    });
    let world = World {
        facts: &source.facts,
        journal,
        journal_bytes: source.tables.journal_ring(),
        max_age: source.options.max_age,
        no_fork: source.options.no_fork,
    };
    let told = order(&candidates, &world).told(&candidates);
    match made_of(source).filter(|_| told.kind == BaseKind::Snapshot) {
        None => told,
        // It serves by its age here. Its data are older.
        Some(from) => Base { age_seconds: told.age_seconds.saturating_add(from.age.as_secs()), ..told },
    }
}

/// What there is.
fn candidates(source: &Source) -> Vec<Candidate> {
    let (options, methods, now) = (&source.options, &source.methods, Instant::now());
    let mut all: Vec<Candidate> = held(source, now).into_iter().collect();
    if options.first.is_some() {
        all.push(Candidate::new(BaseKind::Copy));
    }
    if let Some(file) = methods.file() {
        all.push(file);
        return all;
    }
    let is_shared = source.machine.status().snapshot.is_some_and(|snapshot| snapshot.format == Format::Shared);
    all.extend(source.choice.found.iter().map(|found| candidate(found, is_shared, &source.choice.tried)));
    all.extend(of_the_server(options.module.capture, options.no_fork, methods.sweep_failed_lately(now)));
    all
}

/// What the present snapshot was made of, if it was stored.
fn made_of(source: &Source) -> Option<&From> {
    let generation = source.machine.status().snapshot?.generation;
    source.choice.from.as_ref().filter(|from| from.generation == generation)
}

/// The snapshot that is here, or is being taken.
fn held(source: &Source, now: Instant) -> Option<Candidate> {
    let snapshot = source.machine.status().snapshot?;
    let place =
        made_of(source).map_or(String::new(), |from| format!("{}, from {}", BaseKind::Snapshot.words(), from.place));
    let known = match snapshot.origin() {
        _ if source.tables.is_windowed_for(&source.facts) => Known::Unusable("its slots are reused".to_owned()),
        None => Known::New,
        Some(_) if let Some(why) = source.machine.why_late(now) => Known::Unusable(why.to_owned()),
        Some(origin) => {
            let age = now.saturating_duration_since(snapshot.taken());
            Known::There(Data { history: origin.history, offset: origin.offset, reaches: origin.offset, age })
        }
    };
    Some(Candidate { kind: BaseKind::Snapshot, place, known })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_server::{Backlog, Link};

    fn replid(digit: &str) -> ReplId {
        digit.repeat(40).parse().unwrap()
    }

    /// A primary with the history `a`, which was `b` up to offset 100, and a backlog from 50 to 149.
    fn primary() -> Facts {
        let backlog = Backlog { active: true, size: 1 << 20, first: 50, held: 100 };
        let former = Some((replid("b"), 101));
        Facts { replid: Some(replid("a")), former, backlog: Some(backlog), ..Facts::default() }
    }

    fn answer(facts: &Facts, history: Option<ReplId>, offset: u64) -> (bool, String) {
        let answer = known_history(history).and_then(|history| facts.covers(history, offset, 0));
        (answer.is_ok(), answer.err().unwrap_or_default())
    }

    #[test]
    fn a_reader_is_called_as_it_says_or_by_the_port_of_its_server() {
        let name = |said: &str, seen: &str| name_of(said.to_owned(), seen.parse().unwrap());
        assert_eq!(name(":7002", "10.0.0.7:40001"), "10.0.0.7:7002");
        assert_eq!(name(":7002", "[fd00::1]:40001"), "[fd00::1]:7002");
        assert_eq!(name("", "10.0.0.7:40001"), "10.0.0.7:40001");
        for other in ["orders", "db1:6379", ":", ":70000", ":-1"] {
            assert_eq!(name(other, "10.0.0.7:40001"), other);
        }
    }

    #[test]
    fn a_server_without_its_primary_says_so() {
        let replica = |up, syncing| {
            let link = Link { host: "10.0.0.1".into(), port: 6379, up, syncing };
            obstacle(&Facts { link: Some(link), ..Facts::default() })
        };
        assert_eq!(replica(Some(true), Some(false)), None);
        assert_eq!(replica(None, None), None, "what a server does not report is no obstacle");
        assert!(
            replica(Some(false), Some(false)).is_some_and(|text| text.contains("no link to its primary 10.0.0.1:6379"))
        );
        assert!(replica(Some(false), Some(true)).is_some_and(|text| text.contains("a full copy")));
        assert_eq!(obstacle(&primary()), None);
        assert!(obstacle(&Facts { loading: Some(true), ..primary() }).is_some_and(|text| text.contains("loading")));
    }

    #[test]
    fn a_hand_off_is_covered_only_in_a_history_that_the_primary_continues() {
        let covered = |digit, offset| answer(&primary(), Some(replid(digit)), offset).0;
        assert!(covered("a", 149) && covered("b", 100) && covered("b", 60));
        assert!(!covered("a", 20), "the backlog does not reach back");
        assert!(!covered("b", 101), "beyond the end of the former history");
        assert!(!covered("c", 100));
    }

    #[test]
    fn no_offset_of_a_replica_and_no_figure_of_the_server_overflows() {
        assert!(!answer(&primary(), Some(replid("a")), u64::MAX).0);
        assert!(!answer(&primary(), Some(replid("b")), u64::MAX).0);
        let backlog = Backlog { active: true, size: u64::MAX, first: u64::MAX, held: u64::MAX };
        let facts = Facts { backlog: Some(backlog), ..primary() };
        assert!(!answer(&facts, Some(replid("a")), 7).0);
        assert!(primary().covers(replid("a"), 120, u64::MAX).is_err());
    }

    #[test]
    fn a_hand_off_at_an_offset_that_no_server_reaches_is_not_covered() {
        for history in ["a", "b"] {
            for offset in [u64::MAX, u64::MAX - 1, i64::MAX as u64] {
                let (covered, text) = answer(&primary(), Some(replid(history)), offset);
                assert!(!covered && text.contains(&offset.to_string()), "{text}");
            }
        }
    }

    #[test]
    fn a_hand_off_that_is_not_covered_for_its_history_says_so() {
        let (_, text) = answer(&primary(), Some(replid("b")), 120);
        assert!(text.contains(&replid("a").to_string()) && text.contains("offset 120 of the former one"), "{text}");
        let (_, text) = answer(&primary(), Some(replid("c")), 120);
        assert!(text.contains("the replica has another one") && text.contains(&replid("c").to_string()), "{text}");
        let (covered, text) = answer(&primary(), None, 120);
        assert!(!covered && text.contains("no snapshot"), "{text}");
        let (covered, text) = answer(&Facts { replid: None, former: None, ..primary() }, Some(replid("a")), 120);
        assert!(!covered && text.contains("does not name"), "{text}");
    }
}
