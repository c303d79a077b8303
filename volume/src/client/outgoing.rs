//! Outgoing: this process's outbox, out of which servers pull the blocks of large writes (`crate::link`).
//!
//! A place is freed once every server that was told of it has applied the write, or was left out. A server that was
//! left out and reads late finds other blocks there, whose checksums are not the write's, or is cut off: its grant is
//! withdrawn with its connection.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, Pages, RegionId, Regions};
use remora_messenger::{Address, Connection};

use crate::link::{self, LEAST_PULLED_BYTES, Places, REGION_BYTES, Rdma};

/// How the blocks of large writes (64 KiB and more) get to the servers. Smaller ones are in the messages, and so is
/// what a server cannot pull.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Writes {
    /// In the messages.
    #[default]
    Inline,
    /// Servers on this host take them out of this process's memory.
    Here,
    /// Servers on other hosts as well, each for itself, by RDMA or over TCP. The blocks are neither encrypted nor
    /// authenticated on their way.
    Pulled,
    /// As `Pulled`, but each server takes them from the server before it, if that one permits it: they leave this host
    /// once.
    Chain,
}

/// A text that is not a [`Writes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a way to write: use inline, here, pulled or chain")]
pub struct NotAWay;

const WAYS: [(Writes, &str); 4] =
    [(Writes::Inline, "inline"), (Writes::Here, "here"), (Writes::Pulled, "pulled"), (Writes::Chain, "chain")];

impl Writes {
    /// Whether blocks cross the network without encryption if a server is on another host.
    pub fn is_plain(self) -> bool {
        matches!(self, Writes::Pulled | Writes::Chain)
    }
}

impl FromStr for Writes {
    type Err = NotAWay;

    fn from_str(text: &str) -> Result<Writes, NotAWay> {
        WAYS.iter().find(|(_, name)| *name == text).map(|(way, _)| *way).ok_or(NotAWay)
    }
}

impl fmt::Display for Writes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = WAYS.iter().find(|(way, _)| way == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// See the module's text.
pub(super) struct Outgoing {
    memory: Arc<Memory>,
    exporters: Vec<Box<dyn Exporter>>,
    places: Places,
}

/// The name of the outbox, which is the only region of its exporters.
const OUTBOX: RegionId = RegionId { generation: 0, region: 0 };

impl Outgoing {
    /// Makes an outbox. `None`: blocks go inline.
    pub(super) fn open(writes: Writes, rdma: &Rdma, servers: &[Address]) -> Option<Outgoing> {
        let [rdma, tcp] = match writes {
            Writes::Inline => return None,
            Writes::Here => [None, None],
            Writes::Pulled | Writes::Chain => [rdma.exporter().transpose(), Some(exporter_at(near(servers)))],
        };
        let shm = ShmExporter::bind(ShmOptions::default());
        let shm = shm.map(|shm| Box::new(shm) as Box<dyn Exporter>).map_err(|error| error.to_string());
        let memory = Memory::create("remora-volume-outbox", REGION_BYTES, Pages::Small);
        let memory = memory.map(Arc::new).map_err(|error| error.to_string()).or_warn()?;
        let opened = [Some(shm), rdma, tcp].into_iter().flatten();
        let exporters = opened.filter_map(|exporter| {
            let exporter = exporter.or_warn()?;
            exporter.export(OUTBOX, Arc::clone(&memory)).map_err(|error| error.to_string()).or_warn()?;
            Some(exporter)
        });
        let exporters: Vec<_> = exporters.collect();
        (!exporters.is_empty()).then(|| Outgoing { memory, exporters, places: Places::default() })
    }

    /// Lets a server read it. Returns the keys.
    pub(super) fn grant(&self, connection: &Connection) -> Option<Vec<Vec<u8>>> {
        let secret = link::region_secret(connection)?;
        self.exporters.iter().for_each(|exporter| exporter.grant(connection.id(), secret, Regions::only([OUTBOX])));
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(OUTBOX).ok());
        Some(keys.map(|key| key.as_bytes().to_vec()).collect())
    }

    /// A server must not read it any more. It may never have been permitted.
    pub(super) fn withdraw(&self, connection: &Connection) {
        self.exporters.iter().for_each(|exporter| exporter.withdraw(connection.id()));
    }

    /// Puts the blocks of a write there, if it is large and there is a place. Returns where.
    pub(super) fn put(&mut self, blocks: &[u8]) -> Option<u64> {
        if blocks.len() < LEAST_PULLED_BYTES {
            return None;
        }
        let at = self.places.take(blocks.len() as u64)?;
        let written = self.memory.write(at, blocks);
        debug_assert!(written.is_ok(), "a place in the outbox: {written:?}");
        Some(at)
    }

    /// The oldest write there is not needed any more.
    pub(super) fn free(&mut self) {
        self.places.free();
    }

    /// Bytes that have left over a network, except by RDMA: nothing here notices them.
    pub(super) fn served(&self) -> u64 {
        self.exporters.iter().map(|exporter| exporter.bytes_served()).sum()
    }
}

trait OrWarn<T> {
    /// The value; without one the log says why.
    fn or_warn(self) -> Option<T>;
}

impl<T> OrWarn<T> for Result<T, String> {
    fn or_warn(self) -> Option<T> {
        self.map_err(|error| tracing::warn!(error, "large writes cannot be pulled over each transport")).ok()
    }
}

/// An exporter at a port that the system chooses. Keys name no host: servers know where the writer is.
fn exporter_at(host: IpAddr) -> Result<Box<dyn Exporter>, String> {
    let exporter = TcpExporter::new(TcpOptions::default(), None).map_err(|error| error.to_string())?;
    exporter.listen(SocketAddr::new(host, 0)).map_err(|error| error.to_string())?;
    Ok(Box::new(exporter))
}

/// The address by which this host reaches all of the servers; unspecified if there are several. Nothing is sent.
fn near(servers: &[Address]) -> IpAddr {
    let local = |server: &Address| {
        let server = link::socket_address(server)?;
        let any = if server.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        let socket = UdpSocket::bind((any, 0)).and_then(|socket| socket.connect(server).map(|()| socket));
        socket.and_then(|socket| socket.local_addr()).ok().map(|address| address.ip())
    };
    let mut found: Vec<IpAddr> = servers.iter().filter_map(local).collect();
    found.sort_unstable();
    found.dedup();
    match found[..] {
        [] => Ipv4Addr::LOCALHOST.into(),
        [one] => one,
        _ if found.iter().all(IpAddr::is_ipv4) => Ipv4Addr::UNSPECIFIED.into(),
        _ => IpAddr::from([0; 16]), // of both families
    }
}

// Memory for long reads, which is used again. New memory costs the system more than the copy into it: every
// page of it is mapped and filled with zeros first.

/// Buffers that no read has. See the module's text.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: Mutex<Vec<Vec<u8>>>,
}

/// Shorter reads get new memory, which the allocator has at hand.
const LEAST_BYTES: usize = 64 << 10;

/// Bytes that are kept: a few of the longest reads.
const MOST_KEPT_BYTES: usize = 16 << 20;

impl Buffers {
    /// A buffer of this length. What is in it is left from an earlier read, or zeros.
    pub(super) fn take(self: &Arc<Buffers>, length: usize) -> Buffer {
        let mut free = self.free();
        let found = if length < LEAST_BYTES { None } else { free.iter().position(|data| data.len() >= length) };
        let found = found.map(|place| free.swap_remove(place));
        drop(free);
        Buffer { data: found.unwrap_or_else(|| vec![0; length]), length, buffers: Arc::clone(self) }
    }

    fn give_back(&self, data: Vec<u8>) {
        let mut free = self.free();
        let kept: usize = free.iter().map(Vec::len).sum();
        if data.len() >= LEAST_BYTES && kept + data.len() <= MOST_KEPT_BYTES {
            free.push(data);
        }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory of one read. It is free again when the last of its bytes is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    data: Vec<u8>,
    length: usize,
    buffers: Arc<Buffers>,
}

impl Buffer {
    /// What is read goes here.
    pub(super) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.data[..self.length]
    }

    /// It is read.
    pub(super) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.buffers.give_back(std::mem::take(&mut self.data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_read_and_shown() {
        for (way, name) in WAYS {
            assert_eq!((name.parse(), way.to_string().as_str()), (Ok(way), name));
        }
        assert_eq!("Chain".parse::<Writes>(), Err(NotAWay));
    }

    #[test]
    fn an_outbox_listens_where_its_servers_are() {
        let near_of =
            |servers: &[&str]| near(&servers.iter().filter_map(|server| server.parse().ok()).collect::<Vec<Address>>());
        assert_eq!(near_of(&["tcp:127.0.0.1:7480", "tcp:127.0.0.1:7481"]), IpAddr::from([127, 0, 0, 1]));
        assert_eq!(near_of(&["shm:/run/a"]), IpAddr::from([127, 0, 0, 1]));
    }

    #[test]
    fn long_buffers_are_used_again_once_their_last_byte_is_dropped() {
        let buffers = Arc::new(Buffers::default());
        let mut first = buffers.take(1 << 20);
        first.as_mut().fill(7);
        let at = first.as_ref().as_ptr();
        let bytes = first.into_bytes();
        let part = bytes.slice(5..9);
        drop(bytes);
        assert_ne!(buffers.take(1 << 20).as_ref().as_ptr(), at, "a part of it is still used");
        assert_eq!(part, [7; 4].as_slice());
        drop(part);
        // Two are free now; each is long enough for a shorter read.
        let again = [buffers.take(1 << 20), buffers.take(LEAST_BYTES)];
        assert!(again.iter().any(|buffer| buffer.as_ref().as_ptr() == at));
        assert_eq!(again.each_ref().map(|buffer| buffer.as_ref().len()), [1 << 20, LEAST_BYTES]);
    }

    #[test]
    fn what_is_kept_has_a_bound_and_short_buffers_are_not() {
        let buffers = Arc::new(Buffers::default());
        let many: Vec<Buffer> = (0..20).map(|_| buffers.take(1 << 20)).collect();
        drop(many);
        assert_eq!(buffers.free().iter().map(Vec::len).sum::<usize>(), MOST_KEPT_BYTES);
        let short = Arc::new(Buffers::default());
        drop(short.take(4096));
        assert!(short.free().is_empty());
    }
}
