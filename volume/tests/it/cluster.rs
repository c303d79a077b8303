//! Servers in this process and as processes of their own, and volumes on them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_lab::Host;
use remora_lab::process::Process;
use remora_messenger::{Address, Keyring, Token};
use remora_volume::Security;
use remora_volume::client::{ClientOptions, Error, Volume, new_id};
use remora_volume::rules::{Standing, State};
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
        let anywhere = format!("tcp:{}:0", own_loopback()).parse().unwrap();
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

    pub fn applied(&self, number: usize) -> remora_volume::rules::Version {
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

// Servers as processes of their own.

/// Tells a process of this test's program that it is a server, and where it listens.
const LISTEN: &str = "REMORA_VOLUME_TEST_LISTEN";

/// And where its stores are, if it has some.
const STORE: &str = "REMORA_VOLUME_TEST_STORE";

/// Tells it that no memory is shared with it: what is not in messages is read over TCP.
const FAR: &str = "REMORA_VOLUME_TEST_FAR";

/// Not a test: the server of [`Remotes`], which start this program again. Without their variable it does nothing.
#[test]
fn a_server_for_the_other_tests() {
    let Ok(address) = std::env::var(LISTEN) else { return };
    let is_far = std::env::var(FAR).is_ok();
    let options = if is_far { far_options() } else { server_options() };
    let options = ServerOptions { store: std::env::var_os(STORE).map(Into::into), ..options };
    let server = Server::start(&address.parse().unwrap(), &options).unwrap();
    println!("\nlistening {}", server.address());
    let _ = std::io::stdin().read(&mut [0]); // until it is killed, or the test ends
}

/// An address of this host that is no other test's: while a server is down, no other process takes its port.
pub fn own_loopback() -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{high}.{low}", 64 + (std::process::id() >> 16) % 64)
}

pub struct Remote {
    pub process: Process,
    address: Address,
}

impl Remote {
    fn start(address: &str, is_far: bool, store: Option<&Path>, host: Option<&Host>) -> Remote {
        let mut command = Command::new(std::env::current_exe().unwrap());
        host.iter().for_each(|host| host.enter(&mut command).unwrap());
        command.args(["--exact", "cluster::a_server_for_the_other_tests", "--nocapture", "--test-threads=1"]);
        command
            .envs(store.map(|store| (STORE, store)))
            .envs(is_far.then_some((FAR, "")))
            .env(LISTEN, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let (process, pipes) = Process::start("a volume's server", command).unwrap();
        let mut lines = BufReader::new(pipes.stdout.unwrap()).lines();
        let address = lines.find_map(|line| line.unwrap().strip_prefix("listening ").map(str::to_owned)).unwrap();
        std::thread::spawn(move || lines.for_each(drop)); // ends with the process
        Remote { process, address: address.parse().unwrap() }
    }
}

pub struct Remotes {
    pub shape: Shape,
    is_far: bool,
    pub servers: Vec<Remote>,
    /// The folder in which each has its stores.
    stores: Option<PathBuf>,
    /// The host of each, if it has one of its own.
    hosts: Vec<Host>,
}

impl Remotes {
    pub fn new(blocks: u64) -> Remotes {
        Remotes::start(blocks, false, None, &[])
    }

    /// Servers that share no memory with the writer and with each other.
    pub fn far(blocks: u64) -> Remotes {
        Remotes::start(blocks, true, None, &[])
    }

    pub fn with(blocks: u64, stores: Option<&Path>) -> Remotes {
        Remotes::start(blocks, false, stores, &[])
    }

    /// Servers on hosts of a test network, and the volume made by another one.
    pub fn on(hosts: &[Host], stores: Option<&Path>, blocks: u64) -> Remotes {
        Remotes::start(blocks, true, stores, hosts)
    }

    fn start(blocks: u64, is_far: bool, stores: Option<&Path>, hosts: &[Host]) -> Remotes {
        let shape = Shape::new(new_id().unwrap(), blocks, Copies::new(3, 2).unwrap()).unwrap();
        let (stores, hosts) = (stores.map(Into::into), hosts.to_vec());
        let mut remotes = Remotes { shape, is_far, servers: Vec::new(), stores, hosts };
        for number in 0..3 {
            let host = remotes.hosts.get(number);
            let ip = host.map_or_else(own_loopback, |host| host.address().to_string());
            let server = Remote::start(&format!("tcp:{ip}:0"), is_far, remotes.store(number).as_deref(), host);
            remotes.servers.push(server);
        }
        let create = || Volume::create(shape, &remotes.addresses(), &options()).unwrap();
        remotes.hosts.first().map_or_else(create, |host| host.within(create).unwrap());
        remotes
    }

    fn store(&self, number: usize) -> Option<PathBuf> {
        self.stores.as_ref().map(|stores| stores.join(number.to_string()))
    }

    pub fn addresses(&self) -> Vec<Address> {
        self.servers.iter().map(|server| server.address.clone()).collect()
    }

    /// Opens the volume. On a busy machine servers that are there may answer later than the limits of the tests.
    pub fn open(&self, options: &ClientOptions) -> Volume {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            match Volume::open(self.shape, &self.addresses(), options) {
                Err(error) if format!("{error:?}").contains("TooFew") && Instant::now() < until => {
                    eprintln!("opened again: {error}");
                }
                opened => return opened.unwrap(),
            }
        }
    }

    pub fn kill(&mut self, number: usize) {
        self.servers[number].process.kill().unwrap();
    }

    pub fn restart(&mut self, number: usize) {
        let address = self.servers[number].address.to_string();
        let (store, host) = (self.store(number), self.hosts.get(number));
        self.servers[number] = Remote::start(&address, self.is_far, store.as_deref(), host);
    }
}
