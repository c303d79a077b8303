//! An endpoint of the layer: listens, connects, and owns its workers and through them its sessions.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use std::{fmt, io};

use remora_wire::Token;
use rustls::ServerConfig;

use crate::buffer::{Pool, Throttle};
use crate::connection::{Common, Connection, Dispatcher, HandshakeConfig, Mailbox, Name, Options};
use crate::frame::Entity;
use crate::handshake::Keyring;
use crate::policy::Policy;
use crate::stack::tls::TlsLink;
use crate::stack::{Address, Link, Stacks, TcpLink};
use crate::worker::{Command, Handle, LinkState};

/// An endpoint of the layer. Dropping it ends its sessions and its threads.
pub struct Messenger {
    common: Arc<Common>,
    workers: Vec<Handle>,
}

impl Messenger {
    /// Starts the workers. The messenger does not listen or connect yet.
    ///
    /// # Errors
    /// The system provides no thread, no descriptor or no random bytes.
    pub fn new(policy: Policy, options: &Options, dispatcher: Arc<dyn Dispatcher>) -> io::Result<Messenger> {
        let mut entity = [0; 8];
        getrandom::fill(&mut entity).map_err(|error| io::Error::other(error.to_string()))?;
        let open = || match Token::new(OPEN_TOKEN) {
            Ok(token) => Ok(Arc::new(Keyring::only(Arc::new(token)))),
            Err(error) => Err(io::Error::other(error.to_string())),
        };
        let sealed = options.sealed && options.keys.is_some();
        let keys = options.keys.clone().map_or_else(open, Ok)?;
        let common = Arc::new(Common {
            entity: Entity(u64::from_le_bytes(entity)),
            policy,
            handshake: HandshakeConfig { keys, versions: options.versions, summed: options.summed, sealed },
            polling: options.polling,
            stacks: Stacks::new(options.tls.clone(), options.rdma.clone()),
            dispatcher,
            pool: Pool::new(options.pool_bytes),
            max_sessions: options.max_sessions,
            max_unauthenticated: options.max_unauthenticated,
            serving: AtomicBool::new(false),
            address: Mutex::new(None),
            next_worker: AtomicUsize::new(0),
            registry: Mutex::default(),
        });
        let count = options.workers.clamp(1, MAX_WORKERS);
        let workers: io::Result<Vec<Handle>> = (0..count).map(|index| Handle::start(index, &common)).collect();
        let workers = workers?;
        let inboxes: Vec<_> = workers.iter().map(|worker| Arc::clone(worker.inbox())).collect();
        for worker in &workers {
            worker.inbox().post(Command::Workers(inboxes.clone()));
        }
        Ok(Messenger { common, workers })
    }

    /// Listens at an address. Returns it with the port that the system chose.
    ///
    /// # Errors
    /// The error of the system.
    pub fn listen(&self, address: &Address) -> io::Result<Address> {
        let listener = self.common.stacks.listen(address)?;
        let address = listener.address();
        *self.common.address.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
        self.common.serving.store(true, Ordering::Release);
        self.pick().inbox().post(Command::Listen(listener));
        Ok(address)
    }

    /// Serves a connection that the owner has accepted. No byte of it may have been read, but it may have been peeked
    /// at. For owners with one port for several protocols. [`crate::Dispatcher::connected`] or
    /// [`crate::Dispatcher::rejected`] follows.
    ///
    /// # Errors
    /// The error of the system.
    pub fn adopt(&self, stream: std::net::TcpStream) -> io::Result<()> {
        self.take(Box::new(TcpLink::adopt(stream)?))
    }

    /// As [`Messenger::adopt`], with TLS on the connection: this end is TLS's server.
    ///
    /// # Errors
    /// The error of the system, or of rustls.
    pub fn adopt_tls(&self, stream: std::net::TcpStream, config: &Arc<ServerConfig>) -> io::Result<()> {
        self.take(Box::new(TlsLink::accept(TcpLink::adopt(stream)?, config)?))
    }

    fn take(&self, link: Box<dyn Link>) -> io::Result<()> {
        self.common.serving.store(true, Ordering::Release);
        let called = LinkState::called(link, &self.common, Instant::now());
        let link = called.map_err(|broken| io::Error::other(broken.to_string()))?;
        self.pick().inbox().post(Command::Take(Box::new(link)));
        Ok(())
    }

    /// Begins a session with the messenger at an address. It is usable at once: messages are queued until the peer
    /// answers.
    ///
    /// Lossless peers have one session, whichever end connected first: connecting again returns the same one.
    pub fn connect(&self, address: &Address) -> Connection {
        let policy = &self.common.policy;
        let is_peer = policy.standby && !policy.server;
        let mut registry = self.common.registry();
        let name = address.socket_address().filter(|_| is_peer);
        if let Some(known) = name.and_then(|name| registry.with_peer_at(name)) {
            return known.clone();
        }
        let worker = self.pick();
        let budget = Throttle::new(policy.send_messages, policy.send_bytes);
        let connection = Connection::new(address.clone(), Arc::clone(worker.inbox()) as Arc<dyn Mailbox>, budget);
        if let Some(name) = name {
            registry.enter(Name::Address(name), &connection);
        }
        worker.inbox().post(Command::Connect(connection.clone()));
        connection
    }

    /// Ends all sessions at once and waits for the threads. Close connections first if queued messages must arrive:
    /// then this takes up to a second, until their peers have everything.
    pub fn stop(mut self) {
        self.end();
    }

    /// The pool of received data.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.common.pool
    }

    fn pick(&self) -> &Handle {
        let next = self.common.next_worker.fetch_add(1, Ordering::Relaxed);
        &self.workers[next % self.workers.len()]
    }

    fn end(&mut self) {
        self.common.serving.store(false, Ordering::Release);
        for worker in &self.workers {
            worker.inbox().post(Command::Stop);
        }
        self.workers.iter_mut().for_each(Handle::join);
    }
}

impl Drop for Messenger {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Messenger {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Messenger({:016x}, {} workers)", self.common.entity.0, self.workers.len())
    }
}

/// The token of messengers without one. It is public, and proves nothing.
const OPEN_TOKEN: &[u8] = b"remora: open to anybody";

/// More workers are of no use: there are fewer processors, and connections do not move between workers.
const MAX_WORKERS: usize = 256;
