//! Some servers in this process, and volumes on them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_messenger::{Address, Keyring, Token};
use remora_volume::Security;
use remora_volume::client::{ClientOptions, Error, Volume, new_id};
use remora_volume::message::{Standing, State};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{Copies, Shape};

pub fn keys() -> Option<Arc<Keyring>> {
    let token = Token::new(b"a token of these tests, 0123456789").unwrap();
    Some(Arc::new(Keyring::only(Arc::new(token))))
}

pub fn security() -> Security {
    Security { keys: keys(), ..Security::default() }
}

pub fn options() -> ClientOptions {
    ClientOptions { security: security(), copy_limit: Duration::from_secs(2), ..ClientOptions::default() }
}

pub fn server_options() -> ServerOptions {
    ServerOptions { security: security(), ..ServerOptions::default() }
}

/// Of a server that shares no memory with others, and can be read over TCP.
pub fn far_options() -> ServerOptions {
    ServerOptions { shm: false, lanes: Some(0), ..server_options() }
}

/// Longer than anything here takes on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Waits for a condition.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Servers of one volume.
pub struct Cluster {
    pub shape: Shape,
    pub servers: Vec<Option<Server>>,
    pub addresses: Vec<Address>,
}

impl Cluster {
    /// Starts servers, and creates the volume on them.
    pub fn new(number: usize, hold: usize, blocks: u64) -> Cluster {
        Cluster::with(number, hold, blocks, &server_options())
    }

    pub fn with(number: usize, hold: usize, blocks: u64, server_options: &ServerOptions) -> Cluster {
        let shape = Shape::new(new_id().unwrap(), blocks, Copies::new(number, hold).unwrap()).unwrap();
        let anywhere = format!("tcp:{}:0", crate::processes::own_loopback()).parse().unwrap();
        let servers: Vec<_> = (0..number).map(|_| Server::start(&anywhere, server_options).unwrap()).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
        Volume::create(shape, &addresses, &options()).unwrap();
        Cluster { shape, servers: servers.into_iter().map(Some).collect(), addresses }
    }

    pub fn open(&self) -> Result<Volume, Error> {
        Volume::open(self.shape, &self.addresses, &options())
    }

    /// Ends a server, and its memory with it.
    pub fn end(&mut self, number: usize) {
        self.servers[number].take().unwrap().stop();
    }

    /// Starts it again at the same address, without its memory.
    pub fn start(&mut self, number: usize) {
        self.start_with(number, &server_options());
    }

    pub fn start_with(&mut self, number: usize, options: &ServerOptions) {
        let server = Server::start(&self.addresses[number], options).unwrap();
        self.servers[number] = Some(server);
    }

    pub fn is_whole(&self, number: usize) -> bool {
        let standing = self.servers[number].as_ref().and_then(|server| server.standing(self.shape.volume()));
        standing.is_some_and(|standing| standing.state == State::Whole)
    }

    pub fn applied(&self, number: usize) -> remora_volume::version::Version {
        let standing = self.servers[number].as_ref().and_then(|server| server.standing(self.shape.volume()));
        standing.unwrap().applied
    }

    /// How the first server's copy stands once all of them have what any has: an acknowledged write is in as many as the
    /// volume holds for it, and may be on its way to the others.
    pub fn settled(&self) -> Standing {
        until("all copies have the last write", || {
            let all = 0..self.servers.len();
            all.clone().all(|number| self.is_whole(number) && self.applied(number) == self.applied(0))
        });
        self.servers[0].as_ref().unwrap().standing(self.shape.volume()).unwrap()
    }
}
