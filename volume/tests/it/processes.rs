//! Servers as processes of their own: killed, stopped and continued, while a checking writer goes on.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use remora_lab::Host;
use remora_lab::process::Process;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Volume, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{Copies, Shape};
use rustix::process::Signal;

use crate::cluster::{far_options, options, server_options, until};
use crate::pattern::Checker;

/// Tells a process of this test's program that it is a server, and where it listens.
const LISTEN: &str = "REMORA_VOLUME_TEST_LISTEN";

/// And where its stores are, if it has some.
const STORE: &str = "REMORA_VOLUME_TEST_STORE";

/// Tells it that no memory is shared with it: what is not in messages is read over TCP.
const FAR: &str = "REMORA_VOLUME_TEST_FAR";

/// Not a test: the server of the tests below, which start this program again. Without their variable it does nothing.
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
        command.args(["--exact", "processes::a_server_for_the_other_tests", "--nocapture", "--test-threads=1"]);
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

#[test]
#[ignore = "long: make test-all"]
fn a_killed_server_is_hardly_noticed_and_taken_back_without_its_memory() {
    let mut servers = Remotes::new(2000);
    let mut checker = Checker::new(11);
    let volume = servers.open(&options());
    for number in [0, 1, 2] {
        write_for(&volume, &mut checker, Duration::from_millis(300));
        let longest = std::thread::scope(|scope| {
            let (volume, checker) = (&volume, &mut checker);
            let writer = scope.spawn(move || write_for(volume, checker, Duration::from_millis(600)));
            std::thread::sleep(Duration::from_millis(200));
            servers.kill(number);
            writer.join().unwrap()
        });
        println!("longest write while server {number} was killed: {longest:?}");
        assert!(longest < Duration::from_secs(1), "{longest:?}");
        checker.check(&volume);
        servers.restart(number);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    let ledger = checker.ledger.lock().unwrap();
    println!("{} writes acknowledged", ledger.acknowledgements);
    assert!(ledger.failures.is_empty());
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_hangs_is_left_out_in_time_and_taken_back() {
    let mut servers = Remotes::new(2000);
    let mut checker = Checker::new(12);
    let options = options();
    let volume = servers.open(&options);
    write_for(&volume, &mut checker, Duration::from_millis(300));
    assert_eq!(volume.members().len(), 3);
    servers.servers[0].process.signal(Signal::STOP).unwrap();
    // The other two hold each write, until as much is under way at the one that hangs as it has room for. From then on
    // writes wait until it is left out.
    let longest = write_for(&volume, &mut checker, options.copy_limit + Duration::from_secs(1));
    println!("longest write while a server hung: {longest:?}");
    assert!(longest < options.copy_limit + Duration::from_millis(500), "{longest:?}");
    assert_eq!(volume.members().len(), 2);
    checker.check(&volume);
    servers.servers[0].process.signal(Signal::CONT).unwrap();
    all_are_whole(&volume, &mut checker);
    checker.check(&volume);
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
}

/// A read that was sent to a server that hangs is answered by another one.
#[test]
fn a_read_at_a_server_that_hangs_takes_the_time_limit_and_not_longer() {
    let mut servers = Remotes::new(100);
    let mut checker = Checker::new(13);
    let options = options();
    let volume = servers.open(&options);
    write_for(&volume, &mut checker, Duration::from_millis(100));
    for number in [0, 1, 2] {
        servers.servers[number].process.signal(Signal::STOP).unwrap();
        let began = Instant::now();
        checker.check(&volume);
        // Without the limit it would wait until the server goes on, which is later.
        assert!(began.elapsed() < options.copy_limit + BUSY, "{:?}", began.elapsed());
        servers.servers[number].process.signal(Signal::CONT).unwrap();
        all_are_whole(&volume, &mut checker);
    }
}

/// How much later than its limit a call may end on a busy machine.
const BUSY: Duration = Duration::from_secs(30);

/// The replaced writer is cut off from nothing: it still reaches every server.
#[test]
fn a_writer_that_hangs_while_it_is_replaced_acknowledges_nothing_more() {
    let servers = Remotes::new(500);
    let mut checker = Checker::new(14);
    let first = servers.open(&options());
    (0..500).for_each(|_| assert!(checker.write(&first)));
    let second = servers.open(&options());
    let acknowledged = checker.ledger.lock().unwrap().acknowledgements;
    (0..50).for_each(|_| {
        checker.write(&first);
    });
    until("the first writer has ended", || first.end().is_some());
    drop(first);
    let ledger = checker.ledger.lock().unwrap();
    // Between the promise and this count some of the first 500 may have been acknowledged, and none after.
    assert!(ledger.acknowledgements <= 500 && ledger.acknowledgements >= acknowledged);
    drop(ledger);
    checker.check(&second);
}
