//! Server: lends the memory of its host to volumes. It obeys the rules of [`crate::rules`], and knows no other server
//! until a writer names one from which a copy takes what it lacks.
//!
//! ```text
//!   messenger's workers ── Host: which connection is for which volume
//!                            │
//!                            ▼ one lock per volume
//!                          Slot: the copy's rules, its store, its connections ◀── Borrower: a thread per catch-up
//! ```
//!
//! - `host`: connections, the memory that volumes share, and what clients ask of a volume without opening it; and the
//!   threads that sync, make checkpoints, and scrub.
//! - `slot`: one volume. Every call of a connection is done here, in order, and answered; and the steps of its
//!   failures, reads, catch-up and scrub. At its end: its growth into a larger one.
//! - `exports`: the regions of copies, readable for their writers, also by RDMA.
//! - `kept`: a copy's store, who waits for it, and how far its scrub is.
//! - `borrower`: brings a copy up to date from another server.
//! - `puller`: takes large writes out of their writer's memory, or out of another server's, and what writers may have
//!   under way.
//!
//! Who ends what: the [`Server`] its messenger's workers, the threads of borrowers, pullers and growth, and the
//! keeper's; its exports the one that registers. A borrower ends by itself when its copy is whole, or when its writer's
//! connection is over; a puller with that connection; growth when the copy is the larger one.

mod borrower;
mod exports;
mod host;
mod kept;
mod puller;
#[cfg(test)]
mod question_tests;
mod slot;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use bytes::Bytes;
use remora_messenger::{Address, Connection, Messenger};

use crate::link::{self, Rdma, Security};
use crate::shape::VolumeId;
use crate::wire::{Cause, Reply, Status, Used};
use exports::Exports;
use host::Host;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Bytes of memory for copies.
    pub memory: u64,
    /// Bytes that all writers together may have under way here: at least 4 MiB for each.
    pub staging: u64,
    /// What protects connections, to clients and between servers.
    pub security: Security,
    /// Threads that serve connections.
    pub workers: usize,
    /// Whether clients on this host may read copies in place.
    pub shm: bool,
    /// The port at which clients on other hosts may read copies without asking, at the server's address; 0 is any port.
    /// `None`: they ask. These reads are neither encrypted nor authenticated, except that the reader proves its right.
    pub lanes: Option<u16>,
    /// By which devices copies may be read by RDMA. These reads are protected as those at `lanes`. All of `memory` that
    /// is used for copies stays in the host's memory then.
    pub rdma: Rdma,
    /// The folder for the copies' stores: what a server has there it has again after it was started again. `None`: the
    /// copies end with the server.
    pub store: Option<PathBuf>,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            memory: MEMORY_BYTES,
            staging: STAGING_BYTES,
            security: Security::default(),
            workers: WORKERS,
            shm: true,
            lanes: None,
            rdma: Rdma::default(),
            store: None,
        }
    }
}

/// A running server. Dropping it ends it, and with it the copies that have no store.
#[derive(Debug)]
pub struct Server {
    host: Arc<Host>,
    messenger: Option<Messenger>,
    address: Address,
    keepers: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// The address cannot be listened at, the system provides no thread, or the stores cannot be used.
    /// [`io::ErrorKind::Unsupported`]: RDMA cannot be offered as [`ServerOptions::rdma`] says.
    pub fn start(address: &Address, options: &ServerOptions) -> io::Result<Server> {
        let host = Host::new(options, Exports::open(address, options)?)?;
        let settings = link::options(&options.security, options.workers, MAX_SESSIONS);
        let messenger = Messenger::new(link::server_policy(), &settings, Arc::<Host>::clone(&host))?;
        let address = messenger.listen(address)?;
        let keepers = host::start(&host)?;
        Ok(Server { host, messenger: Some(messenger), address, keepers })
    }

    /// Where it listens, with the port that the system chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// How its copy of a volume stands; `None` if it holds none.
    pub fn standing(&self, volume: VolumeId) -> Option<crate::rules::Standing> {
        self.host.standing(volume)
    }

    /// Bytes that writers may have under way here at present, and the most that it ever was.
    pub fn staging(&self) -> (u64, u64) {
        self.host.staging()
    }

    /// How each of its copies stands. What is used of the server is in [`Server::used`], not here.
    pub fn statuses(&self) -> Vec<(VolumeId, Status)> {
        self.host.statuses()
    }

    /// What copies and writers use of its memory, and what writers may have under way.
    pub fn used(&self) -> (Used, Used) {
        self.host.used()
    }

    /// Ends all connections and threads.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.host.stop();
        drop(self.messenger.take()); // no call arrives after this, so no further borrower begins
        self.host.join();
        for keeper in self.keepers.drain(..) {
            let _ = keeper.join(); // a panic was reported where it happened
        }
        self.host.close_stores();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// A modest part of a server's memory. Operators give more.
const MEMORY_BYTES: u64 = 1 << 30;

/// Eight writers with all the room that one can have, or 64 with the least.
const STAGING_BYTES: u64 = 256 << 20;

/// One does checksums while another one receives.
const WORKERS: usize = 2;

/// A volume has one writer and at most four borrowers: enough for some hundred volumes.
const MAX_SESSIONS: usize = 1024;

/// Budget: the memory of a server that copies may take.
#[derive(Debug)]
struct Budget {
    left: Mutex<u64>,
    most: u64,
}

/// A part of the budget, until dropped.
#[derive(Debug)]
struct Grant {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    fn new(bytes: u64) -> Arc<Budget> {
        Arc::new(Budget { left: Mutex::new(bytes), most: bytes })
    }

    /// Takes a part, if so much is left.
    fn take(self: &Arc<Budget>, bytes: u64) -> Option<Grant> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(bytes)?;
        Some(Grant { budget: Arc::clone(self), bytes })
    }

    /// How much of it was taken.
    fn used(&self) -> Used {
        let left = *self.left.lock().unwrap_or_else(PoisonError::into_inner);
        Used { bytes: self.most - left, most: self.most }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        *self.budget.left.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
    }
}

// Answers: how a client is answered, and what happens to one that cannot be.

/// Answers. A client that does not read its answers is disconnected.
fn answer(connection: &Connection, reply: &Reply, data: Bytes) {
    let sent = match link::reply(reply, data) {
        Ok(message) => connection.send(message).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = sent {
        tracing::info!(peer = %connection.peer(), %error, "a client could not be answered: its connection is ended");
        connection.abort();
    }
}

/// Refuses, and ends the connection: what its client sends further builds on what was refused.
fn refuse(connection: &Connection, cause: Cause, text: &str) {
    tracing::debug!(peer = %connection.peer(), ?cause, text, "refused");
    answer(connection, &Reply::Refused { cause, text: text.into() }, Bytes::new());
    connection.close();
}

/// What a connection for reading is told that asks for anything else.
const ONLY_READS: &str = "this connection is for reading the copy's region";

/// What a connection for loans is told that asks for anything else.
const ONLY_LOANS: &str = "this connection is for loans";
