//! What systemd keeps while the source is started again: a snapshot ([`Keeper`]), and the source's port ([`Port`]).

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::memory::local::Inherited;
use remora_fabric::{Memory, Pages, RegionId, View};
use remora_table::{Expectation, Geometry, Kind, Origin, SealKey, journal_left, snapshot_left};
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{AddressFamily, SocketType, getsockname};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::Source;
use super::captures::plan as plan_of;
use super::machine::{self, Format, Stage};
use super::tables::{JOURNAL_REGION, RemoteTables, SNAPSHOT_REGION, Tables};
use crate::options::{Compress, Options};
use remora_conversation::{Security, listener};
use remora_process::blocking;
use remora_process::events;
use remora_process::exit::Failure;
use remora_process::service::Store;

// A snapshot that outlives this process, in the descriptor store of systemd.
//
// ```text
//   snapshot complete ──▶ its table, that of other hosts, the journal, a record ══ FDSTORE=1 ══▶ systemd   the source ends
//                                                                                             │       and starts again
//   whole, and of this generation? ◀── record, tables ◀══════════════════ LISTEN_FDS ═════════╯
//     └─▶ the journal's bytes into a new journal ──▶ does the server continue behind them?
//           └─▶ replicas come back and go on at their next slot. The primary takes no other snapshot.
// ```
//
// Only a snapshot that is whole, with all of its slots, is kept: the server's child has gone with the connection that
// an unfinished one came over. The journal is written anew, because a process that was killed may have left half a
// record in it; a sealed one also gets a new key, as no byte may be sealed twice under one.
//
// The record has the secret of the sealed table. It is in memory that only systemd and the source have.

/// The names of what systemd keeps.
const RECORD: &str = "remora-record";
const SNAPSHOT: &str = "remora-snapshot";
const REMOTE: &str = "remora-sealed";
const JOURNAL: &str = "remora-journal";
const NAMES: [&str; 4] = [RECORD, SNAPSHOT, REMOTE, JOURNAL];

/// The format of the record. A source drops what another version has kept.
const VERSION: u32 = 2;

/// The log's words about what was kept in vain.
const UNUSABLE: &str =
    "the snapshot that the service manager kept cannot be used; a new one is taken when a replica joins";

/// Bytes of the memory of a record, which has some hundreds.
const RECORD_BYTES: u64 = 4096;

/// What a source must know to go on with a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    generation: u64,
    history: String,
    offset: u64,
    bytes: u64,
    /// Whether it is in the newest format of its server, which others may not read.
    own_format: bool,
    /// When it was requested, in milliseconds since the system's start: its age counts on, and no clock that is set
    /// changes it. What systemd keeps does not outlive the system either.
    asked: u64,
    snapshot: Shape,
    journal: Shape,
    /// Where the journal's table begins: the generation with which it did, and the offset.
    stream: (u64, u64),
    /// Whether slots that other hosts read may be compressed.
    compressed: bool,
    /// That of the sealed snapshot.
    secret: Option<[u8; SealKey::SECRET_BYTES]>,
}

/// The shape of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Shape {
    slot_size: u32,
    slots: u32,
}

impl From<Geometry> for Shape {
    fn from(geometry: Geometry) -> Shape {
        Shape { slot_size: geometry.slot_size, slots: geometry.slots }
    }
}

impl Record {
    /// Writes it into memory of its own.
    fn keep(&self) -> Result<Memory, Failure> {
        let failed = |error: &dyn std::fmt::Display| Failure::local(format!("no record of the snapshot: {error}"));
        let bytes = serde_json::to_vec(self).map_err(|error| failed(&error))?;
        let memory = Memory::create(RECORD, RECORD_BYTES, Pages::Small).map_err(|error| failed(&error))?;
        memory.write(0, &bytes).map_err(|error| failed(&error))?;
        Ok(memory)
    }

    fn read(descriptor: OwnedFd) -> Result<Record, String> {
        let mut bytes = vec![0; RECORD_BYTES as usize];
        let view = View::open(descriptor, RECORD_BYTES).map_err(|error| error.to_string())?;
        view.read(0, &mut bytes).map_err(|error| error.to_string())?;
        let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let record: Record = serde_json::from_slice(bytes.get(..length).unwrap_or_default())
            .map_err(|error| format!("its record cannot be read: {error}"))?;
        if record.version != VERSION {
            return Err(format!("another release has kept it (version {}, not {VERSION})", record.version));
        }
        Ok(record)
    }

    /// Where the snapshot was taken.
    fn origin(&self) -> Result<Origin, String> {
        let history = self.history.parse().map_err(|_| format!("{} is not a replid", self.history))?;
        Ok(Origin { generation: self.generation, history, offset: self.offset })
    }
}

/// What a former process of this service has left, checked as far as that is possible without the server.
pub(super) struct Left {
    record: Record,
    origin: Origin,
    slots: u64,
    /// The former journal, and what is expected of it.
    journal: (Arc<View>, Expectation),
}

/// Takes what systemd has kept for this service out of what it has passed, with the tables in it. A new journal's
/// memory is empty.
///
/// `None`: nothing was kept, or the log says why it cannot be used.
pub(super) fn take(options: &Options, is_sealed: bool, inherited: Vec<Inherited>) -> Option<(Left, Tables)> {
    let mut kept: HashMap<String, OwnedFd> =
        inherited.into_iter().map(|inherited| (inherited.name, inherited.descriptor)).collect();
    tell_of_others(kept.keys().filter(|name| !NAMES.contains(&name.as_str())));
    let record = kept.remove(RECORD)?;
    match adopt(options, is_sealed, record, kept) {
        Ok(left) => Some(left),
        Err(why) => {
            tracing::warn!(event = events::SNAPSHOT_UNUSABLE, %why, "{UNUSABLE}");
            None
        }
    }
}

fn adopt(
    options: &Options,
    is_sealed: bool,
    record: OwnedFd,
    mut kept: HashMap<String, OwnedFd>,
) -> Result<(Left, Tables), String> {
    let record = Record::read(record)?;
    let origin = record.origin()?;
    let mut tables = Tables::empty(options, is_sealed).map_err(|failure| failure.message)?;
    if (Shape::from(tables.snapshot.1), Shape::from(tables.journal.1)) != (record.snapshot, record.journal) {
        return Err("its tables have other shapes than the options ask for now".into());
    }
    if record.secret.is_some() != is_sealed {
        return Err("the options that decide whether tables are encrypted have changed".into());
    }
    if record.compressed != (tables.compress() != Compress::Off) {
        return Err("the options that decide whether tables are compressed have changed".into());
    }
    let mut take = |name: &str| kept.remove(name).ok_or_else(|| format!("{name} is missing"));
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let geometry = tables.snapshot.1;
    let memory = |descriptor| Memory::adopt(descriptor, geometry.memory_len()).map_err(|error| said(&error));
    let slots_of = |memory: &Memory, expect: &Expectation| match snapshot_left(memory, expect) {
        Ok(Some(slots)) => Ok(slots),
        Ok(None) => Err("it is not complete".to_owned()),
        Err(error) => Err(said(&error)),
    };
    let plain = memory(take(SNAPSHOT)?)?;
    let slots = slots_of(&plain, &Expectation::plain(origin, geometry))?;
    tables.snapshot.0 = Arc::new(plain);
    let compressed = tables.compress() != Compress::Off;
    if let Some(remote) = &mut tables.remote {
        remote.snapshot = Arc::new(memory(take(REMOTE)?)?);
        if let (Some(seals), Some(secret)) = (&mut remote.seals, record.secret) {
            seals.set_snapshot_secret(secret);
        }
        let id = RegionId { generation: origin.generation, region: SNAPSHOT_REGION };
        let expect = match remote.key(id) {
            Some(key) => Expectation::sealed(Kind::Snapshot, origin, geometry, &key).map_err(|error| said(&error))?,
            None => Expectation::plain(origin, geometry),
        };
        slots_of(&remote.snapshot, &expect.with_compressed_slots(compressed))?;
    }
    let shape = tables.journal.1;
    let view = View::open(take(JOURNAL)?, shape.memory_len()).map_err(|error| said(&error))?;
    let (generation, offset) = record.stream;
    let stream = Origin { generation, history: origin.history, offset };
    tables.retained = true;
    Ok((Left { record, origin, slots, journal: (Arc::new(view), Expectation::plain(stream, shape)) }, tables))
}

/// Keeps the current snapshot, or does nothing outside of a service.
pub(super) struct Keeper {
    store: Option<Store>,
    /// The generation that is kept.
    kept: Option<u64>,
}

impl Keeper {
    pub(super) fn new() -> Keeper {
        Keeper { store: Store::open(), kept: None }
    }

    /// Frees what a former process has left.
    fn forget(&self) {
        if let Some(store) = &self.store {
            store.replace(&NAMES, Vec::new());
        }
    }
}

/// Goes on with what a former process has left, if it can, and forgets it otherwise.
pub(super) async fn go_on_with(source: &mut Source, left: Option<Left>) {
    let Some(left) = left else { return source.keeper.forget() };
    if let Err(why) = go_on(source, left).await {
        tracing::warn!(event = events::SNAPSHOT_UNUSABLE, %why, "{UNUSABLE}");
        source.keeper.forget();
    }
}

/// Offers the snapshot of a former process again, and follows its stream from the next byte on.
///
/// # Errors
/// It cannot be used; the text says why. The source is as it was.
async fn go_on(source: &mut Source, left: Left) -> Result<(), String> {
    let Left { record, origin, slots, journal: (view, expect) } = left;
    let plan = plan_of(source, origin.generation, true, record.own_format);
    source.gauge.snapshot_began(origin.history, origin.offset, true);
    let age = since_boot().saturating_sub(Duration::from_millis(record.asked));
    let (now, format) = (Instant::now(), if record.own_format { Format::Own } else { Format::Shared });
    let asked = now.checked_sub(age).unwrap_or(now);
    let prepared = plan.clone();
    let taken = blocking(move || {
        let mut journal = prepared.new_journal(origin).map_err(|error| Failure::local(error.to_string()))?;
        // When each command has arrived is not kept.
        journal.written_since(asked);
        let took = journal_left(&view, expect, origin.offset + 1, |bytes| journal.append(bytes, &prepared.gauge));
        took.map_err(|error: remora_table::Error| Failure::local(error.to_string()))?;
        Ok(journal)
    });
    let journal = taken.await.map_err(|failure| failure.message)?;
    // Asked by `INFO` first: a server that cannot continue would take a snapshot.
    source.facts.covers(origin.history, journal.end_offset() - 1, 0)?;
    for region in [SNAPSHOT_REGION, JOURNAL_REGION] {
        source.export(origin.generation, region).map_err(|failure| failure.message)?;
    }
    source.gauge.snapshot_left(record.bytes, slots);
    machine::go_on(&mut source.machine, now, origin, record.bytes, format, asked);
    let end = journal.end_offset() - 1;
    source.threads.go_on(plan, journal).map_err(|failure| failure.message)?;
    tracing::info!(
        event = events::SNAPSHOT_KEPT,
        generation = origin.generation,
        size = %remora_base::units::Size::bytes(record.bytes),
        offset = end,
        "going on with the snapshot that the service manager kept; no other one is taken"
    );
    Ok(())
}

/// Has the service manager keep the current snapshot if it is whole, and no other one. Called after each event.
pub(super) fn keep(source: &mut Source) {
    let Some(store) = &source.keeper.store else { return };
    let status = source.machine.status();
    let whole = status.snapshot.zip(status.stream).and_then(|(snapshot, stream)| match snapshot.stage {
        // A copy is made again from the first source.
        Stage::Sealed { origin, bytes }
            if source.tables.retained && source.tables.copied.is_none() && origin.history == stream.history =>
        {
            Some((snapshot, origin, bytes, stream))
        }
        _ => None,
    });
    let wanted = whole.map(|(_, origin, ..)| origin.generation);
    if wanted == source.keeper.kept {
        return;
    }
    source.keeper.kept = wanted;
    let Some((snapshot, origin, bytes, stream)) = whole else { return store.replace(&NAMES, Vec::new()) };
    let record = Record {
        version: VERSION,
        generation: origin.generation,
        history: origin.history.to_string(),
        offset: origin.offset,
        bytes,
        own_format: snapshot.format == Format::Own,
        asked: since_boot().saturating_sub(snapshot.taken().elapsed()).as_millis() as u64,
        snapshot: source.tables.snapshot.1.into(),
        journal: source.tables.journal.1.into(),
        stream: (stream.generation, stream.offset),
        compressed: source.tables.compress() != Compress::Off,
        secret: source.tables.remote.as_ref().and_then(RemoteTables::snapshot_secret),
    };
    match record.keep() {
        Ok(record) => {
            let (snapshot, journal) = (source.tables.snapshot.0.clone(), source.tables.journal.0.clone());
            let mut memories = vec![(SNAPSHOT, snapshot), (JOURNAL, journal)];
            memories.extend(source.tables.remote.as_ref().map(|remote| (REMOTE, remote.snapshot.clone())));
            // The last one: without it the others are not looked at.
            memories.push((RECORD, Arc::new(record)));
            store.replace(&NAMES, memories);
        }
        Err(failure) => {
            tracing::warn!(error = %failure.message, "a restart of this service would need another snapshot");
            store.replace(&NAMES, Vec::new());
        }
    }
}

fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

// The source's port, where the service manager keeps it open (`remora-source@.socket`).
//
// ```text
//   systemd opens the port ══ LISTEN_FDS ══▶ source ──▶ ends ──▶ starts again ══▶ accepts
//                                 replicas that connect meanwhile wait ──────────────╯
// ```
//
// A port of the source's own is closed while the source is started again: a replica that connects meanwhile is
// refused. The manager's port stays open, and the connection waits in the system's queue. The manager can also start
// the source for the first connection.
//
// A socket is known by its name. Without one of that name, the only socket that there is counts: a manager that passes
// one wants the source to listen there, and nowhere else.

/// The name of the socket: `FileDescriptorName=` of its unit.
const NAME: &str = "remora-listen";

/// The address without `--listen` and without a socket: this host only.
const DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 7379);

/// The source's port: one to open, or one that is open.
#[derive(Debug)]
pub(super) struct Port {
    address: SocketAddr,
    socket: Option<TcpListener>,
}

impl Port {
    /// Takes the socket out of what the service manager has passed. `listen` is the value of `--listen`.
    ///
    /// # Errors
    /// The socket is not one at which connections over TCP can be accepted, it has another address than `listen`, or
    /// there are several, of which none or more than one has the name.
    pub(super) fn take(inherited: &mut Vec<Inherited>, listen: Option<SocketAddr>) -> Result<Port, Failure> {
        let is_named = inherited.iter().any(|passed| passed.name == NAME);
        let is_meant = |passed: &Inherited| match is_named {
            true => passed.name == NAME,
            false => getsockname(&passed.descriptor).is_ok(),
        };
        let (mut sockets, others): (Vec<_>, Vec<_>) = std::mem::take(inherited).into_iter().partition(is_meant);
        *inherited = others;
        if sockets.len() > 1 {
            let text = format!(
                "the service manager passed {} sockets to listen on: leave one ListenStream= in the socket unit, or set \
                 FileDescriptorName={NAME} for the one that is meant",
                sockets.len()
            );
            return Err(Failure::refused(text));
        }
        let Some(socket) = sockets.pop() else {
            return Ok(Port { address: listen.unwrap_or(DEFAULT), socket: None });
        };
        let (address, socket) = checked(socket)?;
        if let Some(listen) = listen.filter(|listen| *listen != address) {
            let text = format!(
                "--listen is {listen}, and the service manager passed a socket that listens on {address}: \
                 omit --listen, or set ListenStream={listen} in the socket unit"
            );
            return Err(Failure::refused(text));
        }
        Ok(Port { address, socket: Some(socket) })
    }

    /// Its address. The port is 0 if any free one was requested.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Opens it, if it is not open. The address returned has the actual port.
    ///
    /// # Errors
    /// The address cannot be bound, or connections to it would not be protected.
    pub(super) async fn open(self, security: &Security) -> Result<(tokio::net::TcpListener, SocketAddr), Failure> {
        match self.socket {
            Some(socket) => listener::adopt(socket, self.address, security, "the source", "ListenStream="),
            None => listener::bind(self.address, security, "the source", "--listen").await,
        }
    }
}

/// The socket, if connections over TCP can be accepted at it, and its address.
fn checked(Inherited { name, descriptor: socket }: Inherited) -> Result<(SocketAddr, TcpListener), Failure> {
    let refused = |what: &str| {
        let text =
            format!("the socket {name:?} of the service manager {what}: it must be one of ListenStream=ADDRESS:PORT");
        Err(Failure::refused(text))
    };
    let family = getsockname(&socket).map(|address| address.address_family());
    if !matches!(family, Ok(AddressFamily::INET | AddressFamily::INET6)) {
        return refused("has no address of a network");
    }
    if socket_type(&socket) != Ok(SocketType::STREAM) || socket_acceptconn(&socket) != Ok(true) {
        return refused("accepts no connections (with Accept=yes, set Accept=no)");
    }
    let socket = TcpListener::from(socket);
    match socket.local_addr() {
        Ok(address) => Ok((address, socket)),
        Err(error) => refused(&format!("has no address ({error})")),
    }
}

/// Logs that sockets were passed to another process, such as a shell that has started this one.
pub(super) fn tell_of_another_process() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if let (Some(process), Some(1..)) = (number("LISTEN_PID"), number("LISTEN_FDS"))
        && process != std::process::id()
    {
        tracing::warn!(
            "the service manager passed sockets to process {process}, and this is another one: they are not used; start \
             remora itself, or by exec"
        );
    }
}

/// Logs what the service manager has passed and nothing has taken.
pub(super) fn tell_of_others<'a>(names: impl Iterator<Item = &'a String>) {
    for name in names {
        tracing::warn!(name, "the service manager passed a descriptor that the source does not know");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::UdpSocket;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn record() -> Record {
        Record {
            version: VERSION,
            generation: 7,
            history: "a".repeat(40),
            offset: 99,
            bytes: 1 << 30,
            own_format: true,
            asked: 1_700_000_000_000,
            snapshot: Shape { slot_size: 1 << 22, slots: 300 },
            journal: Shape { slot_size: 1 << 20, slots: 64 },
            stream: (5, 11),
            compressed: true,
            secret: Some([200; SealKey::SECRET_BYTES]),
        }
    }

    fn descriptor(memory: &Memory) -> OwnedFd {
        memory.as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn a_record_is_read_as_it_was_kept() {
        let memory = record().keep().unwrap();
        let read = Record::read(descriptor(&memory)).unwrap();
        assert_eq!(read, record());
        assert_eq!(read.origin().unwrap().offset, 99);
    }

    #[test]
    fn the_record_of_another_release_and_one_that_is_damaged_are_refused() {
        let other = Record { version: VERSION + 1, ..record() };
        let text = Record::read(descriptor(&other.keep().unwrap())).unwrap_err();
        assert!(text.contains("another release"), "{text}");
        let memory = record().keep().unwrap();
        memory.write(3, b"\xff").unwrap();
        let text = Record::read(descriptor(&memory)).unwrap_err();
        assert!(text.contains("cannot be read"), "{text}");
        assert!(Record { history: "short".into(), ..record() }.origin().is_err());
    }

    fn passed(name: &str, descriptor: impl Into<OwnedFd>) -> Inherited {
        Inherited { name: name.into(), descriptor: descriptor.into() }
    }

    fn listening() -> (TcpListener, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    #[test]
    fn the_socket_is_taken_and_what_else_was_passed_stays() {
        let ((socket, address), (other, _)) = (listening(), listening());
        let mut inherited = vec![passed("else", other), passed(NAME, socket)];
        let port = Port::take(&mut inherited, None).unwrap();
        assert_eq!(port.address(), address);
        assert_eq!(port.socket.unwrap().local_addr().unwrap(), address);
        assert_eq!(inherited.iter().map(|passed| &passed.name).collect::<Vec<_>>(), ["else"]);
    }

    #[test]
    fn without_a_socket_the_option_counts_and_without_both_this_host_is_served() {
        let listen: SocketAddr = "10.0.0.5:7".parse().unwrap();
        let port = Port::take(&mut Vec::new(), Some(listen)).unwrap();
        assert_eq!((port.address(), port.socket.is_none()), (listen, true));
        let port = Port::take(&mut Vec::new(), None).unwrap();
        assert_eq!(port.address().to_string(), "127.0.0.1:7379");
    }

    #[test]
    fn a_socket_elsewhere_than_the_option_says_is_refused_with_both_addresses() {
        let (socket, address) = listening();
        let same = socket.try_clone().unwrap();
        let listen = SocketAddr::new(address.ip(), address.port() ^ 1);
        let failure = Port::take(&mut vec![passed(NAME, socket)], Some(listen)).unwrap_err();
        for part in [listen.to_string(), address.to_string()] {
            assert!(failure.message.contains(&part), "{}", failure.message);
        }
        assert!(Port::take(&mut vec![passed(NAME, same)], Some(address)).is_ok());
    }

    #[test]
    fn a_socket_of_another_kind_and_a_second_one_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("socket")).unwrap();
        let refused = |inherited: Vec<Inherited>, why: &str| {
            let mut inherited = inherited;
            let failure = Port::take(&mut inherited, None).unwrap_err();
            assert!(failure.message.contains(why), "{}", failure.message);
        };
        refused(vec![passed(NAME, unix)], "no address of a network");
        refused(vec![passed(NAME, UdpSocket::bind("127.0.0.1:0").unwrap())], "accepts no connections");
        let (socket, address) = listening();
        refused(vec![passed(NAME, std::net::TcpStream::connect(address).unwrap())], "accepts no connections");
        refused(vec![passed(NAME, std::fs::File::open("/dev/null").unwrap())], "no address of a network");
        refused(vec![passed(NAME, socket), passed(NAME, listening().0)], "2 sockets");
    }

    #[test]
    fn a_socket_of_another_name_or_none_is_taken_if_it_is_the_only_one_and_never_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["", "unknown", "remora-source@6379.socket"] {
            let (socket, address) = listening();
            let file = std::fs::File::open("/dev/null").unwrap();
            let mut inherited = vec![passed("remora-journal", file), passed(name, socket)];
            let port = Port::take(&mut inherited, None).unwrap();
            assert_eq!((port.address(), port.socket.is_some(), inherited.len()), (address, true, 1), "{name:?}");

            let several = Port::take(&mut vec![passed(name, listening().0), passed("", listening().0)], None);
            let said = several.unwrap_err().message;
            assert!(said.contains("2 sockets") && said.contains("FileDescriptorName=remora-listen"), "{said}");
            let unix = UnixListener::bind(folder.path().join(format!("socket{name}"))).unwrap();
            let said = Port::take(&mut vec![passed(name, unix)], None).unwrap_err().message;
            assert!(said.contains("no address of a network"), "{said}");
        }
    }
}
