//! Servers in this process and as processes of their own, volumes on them, and a checking writer: each block says which
//! write it is of, and the writer knows which of them were acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_lab::process::Process;
use remora_lab::{Host, Random};
use remora_messenger::{Address, Keyring, Token};
use remora_volume::Security;
use remora_volume::client::{ClientOptions, Error, Request, Volume, new_id};
use remora_volume::rules::{Standing, State};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
use remora_volume::wire::Run;

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

/// Of a command that makes a volume: nothing is tested yet, so it waits as long as users' do.
fn patient() -> ClientOptions {
    ClientOptions { security: security(), ..ClientOptions::default() }
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
        Volume::create(shape, &addresses, &patient()).unwrap();
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

    /// How the first server's copy stands once all of them have what any has: an acknowledged write is in as many as
    /// the volume holds for it, and may be on its way to the others.
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
        let create = || Volume::create(shape, &remotes.addresses(), &patient()).unwrap();
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

/// What block `block` holds after write `number`. Before the first one, zeros.
pub fn content(block: u64, number: u64) -> Vec<u8> {
    if number == 0 {
        return vec![0; BLOCK_BYTES];
    }
    let mut bytes = Random::new(number ^ block << 32).bytes(BLOCK_BYTES);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].copy_from_slice(&block.to_le_bytes());
    bytes
}

/// The write that a block is of. Panics if the block is not one that was written.
pub fn number_of(block: u64, bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes == content(block, number), "block {block} is not what write {number} has written");
    number
}

/// What a writer knows of each block.
#[derive(Default)]
pub struct Ledger {
    /// The last write that was submitted.
    submitted: BTreeMap<u64, u64>,
    /// The last write that was acknowledged.
    acknowledged: BTreeMap<u64, u64>,
    pub acknowledgements: u64,
    pub failures: Vec<Error>,
}

/// A writer of random blocks, and now and then of zeros.
pub struct Checker {
    pub ledger: Arc<Mutex<Ledger>>,
    random: Random,
    next: u64,
    /// Blocks that were written as zeros, with the numbers of these writes.
    zeros: BTreeSet<(u64, u64)>,
    /// The most blocks of a write.
    most: u64,
}

impl Checker {
    pub fn new(seed: u64) -> Checker {
        Checker::of(seed, 8)
    }

    /// A writer of up to `most` blocks at once.
    pub fn of(seed: u64, most: u64) -> Checker {
        Checker { ledger: Arc::default(), random: Random::new(seed), next: 1, zeros: BTreeSet::new(), most }
    }

    /// Submits a write. Returns whether the volume still took it.
    pub fn write(&mut self, volume: &Volume) -> bool {
        let number = self.next;
        self.next += 1;
        let blocks = volume.shape().blocks();
        let count = self.random.between(1, self.most.min(blocks));
        let first = self.random.below(blocks - count + 1);
        let request = if self.random.one_in(6) {
            self.zeros.extend((first..first + count).map(|block| (block, number)));
            Request::Zero(Run { first, count: count as u32 })
        } else {
            Request::write(first, (first..first + count).flat_map(|block| content(block, number)).collect::<Vec<u8>>())
        };
        for block in first..first + count {
            self.ledger.lock().unwrap().submitted.insert(block, number);
        }
        let ledger = Arc::clone(&self.ledger);
        let submitted = volume.submit(request, move |done| {
            let mut ledger = ledger.lock().unwrap();
            match done {
                Ok(_) => {
                    ledger.acknowledgements += 1;
                    for block in first..first + count {
                        let acknowledged = ledger.acknowledged.entry(block).or_default();
                        assert!(*acknowledged < number, "acknowledged in the order of the writes");
                        *acknowledged = number;
                    }
                }
                Err(error) => ledger.failures.push(error),
            }
        });
        submitted.is_ok()
    }

    /// The write that a block is of. Zeros do not say so: they are of the last such write up to `most`.
    fn number_of(&self, block: u64, bytes: &[u8], most: u64) -> u64 {
        match number_of(block, bytes) {
            0 => self.zeros.range((block, 0)..=(block, most)).next_back().map_or(0, |&(_, number)| number),
            number => number,
        }
    }

    /// Takes what the volume holds for acknowledged, once its writer was replaced: what was under way is now either
    /// there for good, or undone for good.
    pub fn settle(&self, volume: &Volume) {
        let mut ledger = self.ledger.lock().unwrap();
        for block in 0..volume.shape().blocks() {
            let most = ledger.submitted.get(&block).copied().unwrap_or_default();
            let number = self.number_of(block, &volume.read(block, 1).unwrap(), most);
            ledger.acknowledged.insert(block, number);
            ledger.submitted.insert(block, number);
        }
    }

    /// Reads every block. Each must be of the last write that was acknowledged, or of one submitted since. Returns
    /// how many were written.
    pub fn check(&self, volume: &Volume) -> usize {
        let blocks = volume.shape().blocks();
        let mut written = 0;
        for first in (0..blocks).step_by(64) {
            let count = 64.min(blocks - first) as u32;
            let (acknowledged, submitted) = {
                let ledger = self.ledger.lock().unwrap();
                (ledger.acknowledged.clone(), ledger.submitted.clone())
            };
            let data = volume.read(first, count).unwrap();
            for (block, bytes) in (first..).zip(data.chunks_exact(BLOCK_BYTES)) {
                let least = acknowledged.get(&block).copied().unwrap_or_default();
                let most = submitted.get(&block).copied().unwrap_or_default();
                let number = self.number_of(block, bytes, most);
                assert!((least..=most).contains(&number), "block {block} is of write {number}, not {least} to {most}");
                written += usize::from(number > 0);
            }
        }
        written
    }
}

/// How long a write took.
fn took(volume: &Volume, checker: &mut Checker) -> Duration {
    let began = Instant::now();
    assert!(checker.write(volume));
    volume.flush().unwrap();
    began.elapsed()
}

/// Writes for a while. Returns the longest time that an acknowledged write took.
pub fn write_for(volume: &Volume, checker: &mut Checker, time: Duration) -> Duration {
    let until = Instant::now() + time;
    let mut longest = Duration::ZERO;
    while Instant::now() < until {
        longest = longest.max(took(volume, checker));
    }
    longest
}

/// Waits until every copy is whole, while writes go on.
pub fn all_are_whole(volume: &Volume, checker: &mut Checker) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while volume.members().len() < 3 {
        assert!(Instant::now() < deadline, "a copy was not taken back within 30 s: {:?}", volume.members());
        took(volume, checker);
    }
}
