//! An endpoint: listens, calls, owns its workers and through them its sessions.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_wire::Token;

use crate::buffer::Pool;
use crate::connection::Connection;
use crate::dispatcher::Dispatcher;
use crate::handshake::Versions;
use crate::policy::Policy;
use crate::registry::{Name, Registry};
use crate::signal::Entity;
use crate::stack::posix::TcpLink;
use crate::stack::rdma::RdmaOptions;
use crate::stack::tls::TlsOptions;
use crate::stack::{Address, Stacks};
use crate::throttle::Throttle;
use crate::worker::{Command, Handle, HandshakeConfig, LinkState, Spin};

/// How a messenger works, apart from what becomes of its sessions ([`Policy`]).
#[derive(Debug, Clone)]
pub struct Options {
    /// Threads. A connection lives on one of them.
    pub workers: usize,
    /// Checksums over bodies. They are left out only where both ends say so.
    pub summed: bool,
    /// The secret by which both ends know each other; frames are sealed then, unless `sealed` is false at both ends. Without
    /// one anybody may join.
    pub token: Option<Arc<Token>>,
    /// The versions of the owner's protocol that this end speaks: both ends settle on the newest that both have.
    pub versions: Versions,
    /// Whether frames bear seals where there is a token.
    pub sealed: bool,
    /// How long a worker looks around before it sleeps.
    pub polling: Polling,
    /// Bytes that the pool of received data may keep for the next.
    pub pool_bytes: usize,
    /// Sessions at once.
    pub max_sessions: usize,
    /// What `tls:` addresses need.
    pub tls: TlsOptions,
    /// How RDMA links work, if any are made.
    pub rdma: RdmaOptions,
    /// Links per worker that have not yet opened a session: what strangers can make us hold.
    pub max_unauthenticated: usize,
}

/// What a worker does when there is nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polling {
    /// Sleeps at once: least processor time.
    Event,
    /// Never sleeps: least latency, a processor of its own.
    Spin,
    /// Looks around for up to so long, and for less where looking has not paid lately.
    Adaptive(Duration),
}

impl Default for Options {
    fn default() -> Options {
        Options {
            workers: 1,
            summed: true,
            token: None,
            versions: Versions::only(1),
            sealed: true,
            polling: Polling::Event,
            pool_bytes: POOL_BYTES,
            max_sessions: MAX_SESSIONS,
            tls: TlsOptions::default(),
            rdma: RdmaOptions::default(),
            max_unauthenticated: MAX_UNAUTHENTICATED,
        }
    }
}

/// An endpoint. Dropping it ends its sessions and its threads.
pub struct Messenger {
    common: Arc<Common>,
    workers: Vec<Handle>,
}

/// What all workers of a messenger share.
pub(crate) struct Common {
    pub(crate) entity: Entity,
    pub(crate) policy: Policy,
    pub(crate) handshake: HandshakeConfig,
    pub(crate) polling: Polling,
    pub(crate) stacks: Stacks,
    pub(crate) dispatcher: Arc<dyn Dispatcher>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) max_sessions: usize,
    pub(crate) max_unauthenticated: usize,
    pub(crate) serving: AtomicBool,
    /// Where peers can call us, once we listen.
    pub(crate) address: Mutex<Option<Address>>,
    pub(crate) next_worker: AtomicUsize,
    registry: Mutex<Registry>,
}

impl Messenger {
    /// Starts the workers. Nobody is listened to or called yet.
    ///
    /// # Errors
    /// The system gives no thread, no descriptor or no random bytes.
    pub fn new(policy: Policy, options: &Options, dispatcher: Arc<dyn Dispatcher>) -> io::Result<Messenger> {
        let mut entity = [0; 8];
        getrandom::fill(&mut entity).map_err(|error| io::Error::other(error.to_string()))?;
        let open = || Token::new(OPEN_TOKEN).map(Arc::new).map_err(|error| io::Error::other(error.to_string()));
        let sealed = options.sealed && options.token.is_some();
        let token = options.token.clone().map_or_else(open, Ok)?;
        let common = Arc::new(Common {
            entity: Entity(u64::from_le_bytes(entity)),
            policy,
            handshake: HandshakeConfig { token, versions: options.versions, summed: options.summed, sealed },
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

    /// Listens there, and gives the address with the port that the system chose.
    ///
    /// # Errors
    /// What the system says.
    pub fn listen(&self, address: &Address) -> io::Result<Address> {
        let listener = self.common.stacks.listen(address)?;
        let address = listener.address();
        *self.common.address.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
        self.common.serving.store(true, Ordering::Release);
        self.pick().inbox().post(Command::Listen(listener));
        Ok(address)
    }

    /// Serves a caller that somebody else has accepted, of whom nothing has been read yet (but peeked at): for owners with one
    /// port for several protocols. [`crate::Dispatcher::connected`] or [`crate::Dispatcher::rejected`] follows.
    ///
    /// # Errors
    /// What the system says of the socket.
    pub fn adopt(&self, stream: std::net::TcpStream) -> io::Result<()> {
        let link = Box::new(TcpLink::adopt(stream)?);
        self.common.serving.store(true, Ordering::Release);
        let called = LinkState::called(link, &self.common, Instant::now());
        let link = called.map_err(|broken| io::Error::other(broken.to_string()))?;
        self.pick().inbox().post(Command::Take(Box::new(link)));
        Ok(())
    }

    /// A session with whoever listens there. It is usable at once: what is sent before the peer answers is queued.
    ///
    /// Between lossless peers there is one session, whoever called first: calling again gives the same one.
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
        let connection = Connection::new(address.clone(), Arc::clone(worker.inbox()), budget);
        if let Some(name) = name {
            registry.enter(Name::Address(name), &connection);
        }
        worker.inbox().post(Command::Connect(connection.clone()));
        connection
    }

    /// Ends all sessions at once and waits for the threads. Close connections first where words must arrive: for those that were
    /// closed it takes up to a second until the peer has everything.
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

impl Common {
    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn spin(&self) -> Spin {
        Spin::new(self.polling)
    }
}

/// The token of those who have none: it proves nothing and is meant to.
const OPEN_TOKEN: &[u8] = b"remora: open to anybody";

/// Two generations of what a fast link brings in a hundredth of a second.
const POOL_BYTES: usize = 64 << 20;

/// Each costs a descriptor and a few kilobytes.
const MAX_SESSIONS: usize = 65_536;

/// As many as are called at once when a server with very many clients comes back.
const MAX_UNAUTHENTICATED: usize = 16_384;

/// More workers than this serve nobody: connections do not move, and processors are fewer.
const MAX_WORKERS: usize = 256;
