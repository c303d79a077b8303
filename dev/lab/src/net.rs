//! Test networks: hosts as network namespaces, with cables that can be cut, slowed down and made lossy. Linux, root.
//!
//! ```text
//!    host "a" 10.93.0.1        host "b" 10.93.0.2          each a network namespace with one cable, eth0
//!        eth0 │ ▲ rate, loss       eth0 │
//!   ══════════╪═════════════════════════╪═══════           the switch: a namespace with a bridge; port p1 is the
//!          p1 │ ▼ rate, loss         p2 │                   other end of the cable of host 1. Cut = port down.
//! ```
//!
//! A cable has its rate both ways (`tc`, a token bucket at each end for what it sends) and its loss both ways (`nft`,
//! at each end for what it receives). Nothing is created in this machine's own namespace, and no namespace has a name:
//! each exists only as long as the descriptors and processes that hold it, so the kernel removes it also after a test
//! that was killed. Addresses are private and exist only in the namespaces.
//!
//! A cable is not a wire. Packets on a veth are up to 64 KiB long. The kernel computes with smaller packets for the
//! rate only; a lost packet loses 64 KiB at once. All hosts share this machine's processors, unless they are limited to
//! some of them ([`Net::host_on`]).
//!
//! - [`Net`] and [`Host`] are here. **Start here.** Then come how code runs on a host; rates, delays and losses as
//!   arguments of `tc` and `nft`; a slow way to a server on any kernel; and iperf3.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{
    CpuSet, LinkNameSpaceType, UnshareFlags, move_into_link_name_space, sched_setaffinity, unshare_unsafe,
};

use crate::process::Process;
use crate::scratch;
use crate::{Doing, Error, Result};

/// One switch and the hosts connected to it. Removed when the last of them is dropped.
#[derive(Clone, Debug)]
pub struct Net {
    switch: Arc<Switch>,
}

#[derive(Debug)]
struct Switch {
    space: Namespace,
    hosts: AtomicU8,
}

impl Net {
    /// Creates a network without hosts. Needs root and the `ip` program.
    pub fn new() -> Result<Net> {
        let space = Namespace::new()?;
        space.ip(&["link", "add", BRIDGE, "type", "bridge"])?;
        space.ip(&["link", "set", BRIDGE, "up"])?;
        Ok(Net { switch: Arc::new(Switch { space, hosts: AtomicU8::new(0) }) })
    }

    /// Creates a host. `name` is used in messages.
    pub fn host(&self, name: &str) -> Result<Host> {
        self.host_with(name, Namespace::new()?)
    }

    /// Creates a host whose programs run only on these processors, so that other hosts' programs can run on others.
    pub fn host_on(&self, name: &str, processors: Range<usize>) -> Result<Host> {
        let mut set = CpuSet::new();
        processors.for_each(|processor| set.set(processor));
        self.host_with(name, Namespace::new()?.on(set))
    }

    fn host_with(&self, name: &str, space: Namespace) -> Result<Host> {
        let number = self.switch.hosts.fetch_add(1, Ordering::Relaxed) + 1;
        if number > MOST_HOSTS {
            return Err(Error::Missing {
                what: format!("room for host {name:?}: a test network has {MOST_HOSTS} hosts at most"),
                how: "make a second network".into(),
            });
        }
        let port = format!("p{number}");
        let address = Ipv4Addr::new(NETWORK[0], NETWORK[1], NETWORK[2], number);
        let switch = &self.switch.space;
        // `ip` gets a namespace without a name as a path to one of our descriptors.
        switch.ip(&["link", "add", &port, "type", "veth", "peer", "name", CABLE, "netns", &space.path()])?;
        switch.ip(&["link", "set", &port, "master", BRIDGE, "up"])?;
        space.ip(&["link", "set", "lo", "up"])?;
        space.ip(&["address", "add", &format!("{address}/24"), "dev", CABLE])?;
        space.ip(&["link", "set", CABLE, "up"])?;
        Ok(Host {
            inner: Arc::new(Inner { name: name.into(), address, port, space, switch: Arc::clone(&self.switch) }),
        })
    }
}

/// One host of a test network. A clone is the same host.
#[derive(Clone, Debug)]
pub struct Host {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    address: Ipv4Addr,
    /// The host's port at the switch.
    port: String,
    space: Namespace,
    switch: Arc<Switch>,
}

impl Host {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its address in the test network.
    pub fn address(&self) -> IpAddr {
        IpAddr::V4(self.inner.address)
    }

    /// A path by which other programs can enter the host as long as this process runs: `nsenter --net=PATH COMMAND`.
    pub fn namespace_path(&self) -> String {
        self.inner.space.path()
    }

    /// Makes `command` run on this host when it is started.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        self.inner.space.enter(command)
    }

    /// Runs `what` on this host, on a separate thread, and waits for it. Sockets and threads created in it stay on this
    /// host.
    pub fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T> {
        self.inner.space.within(what)
    }

    /// Limits the calling thread to this host's processors, if it has some of its own, for the rest of the thread's
    /// life.
    pub fn keep_to_processors(&self) -> Result<()> {
        self.inner.space.keep_to_processors()
    }

    /// Cuts the cable: packets vanish both ways, and neither end is notified.
    pub fn cut(&self) -> Result<()> {
        self.inner.switch.space.ip(&["link", "set", &self.inner.port, "down"])
    }

    /// Connects the cable again.
    pub fn heal(&self) -> Result<()> {
        self.inner.switch.space.ip(&["link", "set", &self.inner.port, "up"])
    }

    /// From now on nothing passes between this host and another one, both ways, and neither end is notified. Both still
    /// reach every other host.
    pub fn cut_from(&self, other: &Host) -> Result<()> {
        for (from, to) in [(self, other), (other, self)] {
            // A permanent neighbour whose address no host has: what is sent to it, no host takes.
            let neighbour = ["neigh", "replace", &to.inner.address.to_string(), "lladdr", NO_HOST];
            from.inner.space.ip(&[&neighbour[..], &["dev", CABLE, "nud", "permanent"]].concat())?;
        }
        Ok(())
    }

    /// Ends what [`Host::cut_from`] has begun.
    pub fn heal_from(&self, other: &Host) -> Result<()> {
        for (from, to) in [(self, other), (other, self)] {
            from.inner.space.ip(&["neigh", "del", &to.inner.address.to_string(), "dev", CABLE])?;
        }
        Ok(())
    }

    /// Limits the cable's rate, both ways. Each call replaces the one before; [`Shape::default`] removes the limit.
    pub fn shape(&self, shape: Shape) -> Result<()> {
        for (space, device) in self.ends() {
            // Without a limit there is nothing to delete, and `tc` fails.
            let _ = space.run("tc", &["qdisc", "del", "dev", device, "root"]);
            for arguments in shape.queues(device) {
                space.run("tc", &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
            }
        }
        Ok(())
    }

    /// Makes the cable lose packets, both ways, each with the same chance. Each call replaces the one before;
    /// `Loss::default()` ends the loss. Needs the `nft` program.
    pub fn lossy(&self, loss: Loss) -> Result<()> {
        self.ends().into_iter().try_for_each(|(space, device)| space.run("nft", &[&loss.rules(device)]))
    }

    /// What has crossed the cable since its creation, as its network interface counts.
    pub fn traffic(&self) -> Result<Traffic> {
        // Not /sys/class/net, which shows the namespace of the process that mounted it.
        let table = self.within(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
        let table = table.doing(|| "read what a test host has sent")?;
        Traffic::parse(&table).ok_or_else(|| Error::Garbled(format!("no {CABLE} in /proc/net/dev:\n{table}")))
    }

    /// Both ends of the cable, each a network namespace and a device.
    fn ends(&self) -> [(&Namespace, &str); 2] {
        [(&self.inner.space, CABLE), (&self.inner.switch.space, self.inner.port.as_str())]
    }
}

/// Bytes that have crossed a cable. A veth counts a packet of 64 KiB as one, with one header of 66 bytes: a wire would
/// carry 4 % more headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Into the host.
    pub received: u64,
    /// Out of the host.
    pub sent: u64,
}

impl Traffic {
    /// Parses `/proc/net/dev`: after the name eight figures about received packets, bytes first, then the same about
    /// sent ones.
    fn parse(table: &str) -> Option<Traffic> {
        let line = table.lines().find_map(|line| line.trim().strip_prefix(CABLE)?.strip_prefix(':'))?;
        let figures: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        Some(Traffic { received: *figures.first()?, sent: *figures.get(8)? })
    }

    /// The bytes since `before`.
    pub fn since(self, before: Traffic) -> Traffic {
        Traffic { received: self.received.saturating_sub(before.received), sent: self.sent.saturating_sub(before.sent) }
    }
}

/// The network 10.93.0.0/24: private, and rarely used by real networks.
const NETWORK: [u8; 3] = [10, 93, 0];

/// Limit on hosts: fewer than a /24 has addresses.
const MOST_HOSTS: u8 = 200;

/// The name of the bridge in its namespace.
const BRIDGE: &str = "switch";

/// A hardware address that no host has.
const NO_HOST: &str = "02:00:00:00:00:00";

/// The name of a host's end of its cable.
const CABLE: &str = "eth0";

// A network namespace without a name, and the code that runs in it: closures on a thread, child processes, iproute2's
// tools.
//
// A namespace with a name (`ip netns add`) is a mount that outlives its creator. This one is a descriptor: the kernel
// removes it when the last descriptor and the last process in it are gone, also after `kill -9`.

/// A network namespace that exists as long as this descriptor, or a process in it.
#[derive(Debug)]
struct Namespace {
    file: Arc<File>,
    /// The processors on which programs started in it run; `None` for any.
    processors: Option<CpuSet>,
}

impl Namespace {
    fn new() -> Result<Namespace> {
        // On a separate thread, which leaves the machine's namespace for good and ends.
        let made = on_a_thread(|| {
            // SAFETY: `unshare_unsafe` is unsafe because of flags that take file descriptors or memory away from this
            // thread alone (FILES, …). NEWNET is not one of these flags: it changes which network the thread sees.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net")
        });
        match made {
            Ok(file) => Ok(Namespace { file: Arc::new(file), processors: None }),
            Err(error) => Err(Error::Missing {
                what: format!("network namespaces ({error})"),
                how: "run as root, on a kernel and in a container that allow them".into(),
            }),
        }
    }

    /// Limits the programs that are started in it to these processors.
    fn on(mut self, processors: CpuSet) -> Namespace {
        self.processors = Some(processors);
        self
    }

    /// A path by which other processes can open it as long as this process runs: the argument of `ip … netns` and
    /// `nsenter --net=`.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    fn enter(&self, command: &mut Command) -> Result<()> {
        let (space, processors) = (Arc::clone(&self.file), self.processors);
        let enter = move || {
            if let Some(processors) = &processors {
                sched_setaffinity(None, processors)?;
            }
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).map_err(io::Error::from)
        };
        // SAFETY: what runs between fork and exec must be async-signal-safe. The closure makes two system calls
        // (sched_setaffinity on a set that it owns, setns on a descriptor that it holds open), takes no lock and
        // allocates nothing (an `io::Error` from a number).
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    fn keep_to_processors(&self) -> Result<()> {
        let Some(processors) = &self.processors else { return Ok(()) };
        sched_setaffinity(None, processors).map_err(io::Error::from).doing(|| "keep to a host's processors")
    }

    fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T> {
        on_a_thread(|| {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(what())
        })
        .doing(|| "enter a network namespace")
    }

    fn ip(&self, args: &[&str]) -> Result<()> {
        self.run("ip", args)
    }

    /// Runs a tool in the namespace and waits for its end.
    fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        let mut command = Command::new(program);
        command.args(args);
        self.enter(&mut command)?;
        let output = command.output().map_err(|error| Error::Missing {
            what: format!("the program {program} ({error})"),
            how: "run `make setup` (it installs iproute2 and nftables)".into(),
        })?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Error::Missing {
            what: format!("what `{program} {}` asks of the kernel ({stderr})", args.join(" ")),
            how: "run on a kernel with veth, bridge, tbf (rates), netem (delays) and nftables' netdev family (losses)"
                .into(),
        })
    }
}

fn on_a_thread<T: Send>(what: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let panicked = |_| io::Error::other("the thread in a network namespace panicked");
        scope.spawn(what).join().map_err(panicked)?
    })
}

// The properties of a cable, rate, delay and loss, as calls of `tc` and `nft`. [`super::Host`] makes the calls.

/// Rate and delay of a cable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Bytes per second each way, headers counted as on a wire. `None` for no limit.
    pub rate: Option<u64>,
    /// Delay of each packet, each way. Needs the kernel's `netem`, which small kernels lack.
    pub delay: Option<Duration>,
}

impl Shape {
    /// A shape with a rate only, in bytes per second.
    pub fn rate(bytes_per_second: u64) -> Shape {
        Shape { rate: Some(bytes_per_second), delay: None }
    }

    /// A shape with a rate only, in bits per second, the usual unit of networks: `Shape::bits(1_000_000_000)`.
    pub fn bits(bits_per_second: u64) -> Shape {
        Shape::rate(bits_per_second / 8)
    }

    /// The `tc` calls that create the shape: delay at the root, the rate below it. None for a cable without limits.
    fn queues(self, device: &str) -> Vec<Vec<String>> {
        let mut parent = vec!["root".to_owned()];
        let mut calls = Vec::new();
        let mut add = |parent: &[String], handle: &str, queue: String| {
            let mut call: Vec<String> = ["qdisc", "add", "dev", device].map(str::to_owned).to_vec();
            call.extend_from_slice(parent);
            call.extend(["handle".to_owned(), handle.to_owned()]);
            call.extend(queue.split(' ').map(str::to_owned));
            calls.push(call);
        };
        if let Some(delay) = self.delay {
            add(&parent, "1:", format!("netem delay {}us limit {DELAY_PACKETS}", delay.as_micros()));
            parent = vec!["parent".to_owned(), "1:1".to_owned()];
        }
        if let Some(rate) = self.rate {
            let queue = format!("tbf rate {}bit burst {BURST_BYTES} latency {QUEUE_MILLISECONDS}ms", rate * 8);
            add(&parent, "2:", queue);
        }
        calls
    }
}

/// The share of packets that a cable loses, each way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss(u32);

impl Loss {
    /// A loss in percent, with a precision of hundredths. `None` if it is not a percentage, or rounds to zero without
    /// being zero.
    pub fn percent(percent: f64) -> Option<Loss> {
        let parts = (percent * f64::from(LOSS_PARTS) / 100.0).round() as u32;
        ((0.0..=100.0).contains(&percent) && (percent == 0.0 || parts > 0)).then_some(Loss(parts))
    }

    /// The `nft` commands that create the loss where `device` receives. They remove an earlier loss first.
    fn rules(self, device: &str) -> String {
        let table = format!("table netdev loss-{device}");
        // "add" before "delete", because it is an error to delete a missing table.
        let forget = format!("add {table}; delete {table};");
        if self.0 == 0 {
            return forget;
        }
        let chain = format!("netdev loss-{device} in");
        format!(
            "{forget} add {table}; add chain {chain} {{ type filter hook ingress device \"{device}\" priority 0; }}; \
             add rule {chain} numgen random mod {LOSS_PARTS} <= {} drop",
            self.0 - 1
        )
    }
}

/// A rate in bits per second, written as usual for networks: `100mbit`, `1gbit`, `2.5gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRate(pub u64);

impl FromStr for BitRate {
    type Err = String;

    fn from_str(text: &str) -> Result<BitRate, String> {
        let wrong = || format!("{text:?} is not a rate: write 100mbit, 1gbit or 2.5gbit");
        let (number, unit) = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)]
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
            .ok_or_else(wrong)?;
        let bits = number.parse::<f64>().map_err(|_| wrong())? * unit;
        // Below a packet a second nothing works; above a terabit it is a typing error.
        if (1e4..=1e12).contains(&bits) { Ok(BitRate(bits as u64)) } else { Err(wrong()) }
    }
}

impl std::fmt::Display for BitRate {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 as f64 {
            bits if bits >= 1e9 => write!(to, "{} Gb/s", bits / 1e9),
            bits => write!(to, "{} Mb/s", bits / 1e6),
        }
    }
}

/// Bytes that may be sent at full speed before the rate is enforced: a few of a veth's 64 KiB packets. With a quarter
/// of this size, 10 Gb/s were 6 (measured on two processors): the bucket was empty before the kernel's timer fired.
const BURST_BYTES: u32 = 256 << 10;

/// How long a packet may wait in the queue before it is dropped: about 2.5 MB at 1 Gb/s, as a switch's port has.
const QUEUE_MILLISECONDS: u32 = 20;

/// How many packets may be in transit at once: 10 Gbit/s × 100 ms in packets of 1500 bytes.
const DELAY_PACKETS: u32 = 83_000;

/// Losses are stored in hundredths of a percent.
const LOSS_PARTS: u32 = 10_000;

// Link: a slow way to a server. What passes it arrives late, and not faster than its rate. A proxy in this process,
// since cables with delays ([`crate::net`]) need a kernel that has them.

/// A link towards a server. What the server answers arrives later.
#[derive(Debug)]
pub struct Link {
    at: SocketAddr,
    is_over: Arc<AtomicBool>,
    accepts: Option<JoinHandle<()>>,
}

impl Link {
    /// A link to `server` that carries `rate` bytes a second towards it. The server's answers arrive `delay` later.
    pub fn new(server: SocketAddr, delay: Duration, rate: f64) -> Result<Link> {
        let doing = || format!("make a slow link to {server}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).doing(doing)?;
        let at = listener.local_addr().doing(doing)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let accepts = std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                // A client whose connection cannot be passed on sees it end.
                let _ = connect(client, server, delay, rate);
            }
        });
        Ok(Link { at, is_over, accepts: Some(accepts) })
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.at
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.at); // wakes the thread that accepts
        if let Some(accepts) = self.accepts.take() {
            let _ = accepts.join(); // a panic was reported where it happened
        }
    }
}

/// Passes a connection on. The threads end with it, whichever end ends it.
fn connect(client: TcpStream, server: SocketAddr, delay: Duration, rate: f64) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    pass(client.try_clone()?, server.try_clone()?, Duration::ZERO, rate);
    pass(server, client, delay, f64::INFINITY);
    Ok(())
}

/// Passes bytes on in one direction.
fn pass(mut from: TcpStream, mut to: TcpStream, delay: Duration, rate: f64) {
    // As much as a router keeps: beyond it the sender waits.
    let (pieces, due) = mpsc::sync_channel::<(Instant, Vec<u8>)>(256);
    std::thread::spawn(move || {
        let mut free = Instant::now();
        let mut buffer = vec![0; 16 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            free = free.max(Instant::now()) + Duration::from_secs_f64(length as f64 / rate);
            if pieces.send((free + delay, buffer[..length].to_vec())).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Read);
    });
    std::thread::spawn(move || {
        for (at, bytes) in due {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}

// The speed of a network, measured by an independent program: iperf3.

/// Bytes per second that one TCP connection carries from one host to another; `None` for this machine's loopback.
///
/// # Errors
/// [`Error::Missing`] if iperf3 is not installed.
pub fn bandwidth(from_to: Option<(&Host, &Host)>, time: Duration) -> Result<f64> {
    let (from, to) = from_to.unzip();
    let address = to.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Host::address).to_string();
    let port = scratch::free_port()?.to_string();
    let mut server = iperf3(to, &["-s", "-1", "-p", &port])?;
    server.stdout(Stdio::null()).stderr(Stdio::null());
    let (_server, _) = Process::start("iperf3", server).map_err(|error| missing(&error))?;

    let seconds = time.as_secs().max(1).to_string();
    let deadline = Instant::now() + START_TIME;
    loop {
        // The server does not say when it listens, so the client tries until it does.
        thread::sleep(TRY_EVERY);
        let mut client = iperf3(from, &["-c", &address, "-p", &port, "-t", &seconds, "-J"])?;
        let output = client.output().map_err(|error| missing(&error))?;
        // With `-J` it ends with 0 also if it could not connect, and says so in the report.
        if let Ok(rate) = received(&output.stdout) {
            return Ok(rate);
        }
        if Instant::now() > deadline {
            let tail = String::from_utf8_lossy(&output.stdout).into_owned();
            return Err(Error::TooLate { what: format!("iperf3 to reach {address}"), waited: START_TIME, tail });
        }
    }
}

fn iperf3(on: Option<&Host>, args: &[&str]) -> Result<Command> {
    let mut command = Command::new("iperf3");
    command.args(args).stdin(Stdio::null());
    if let Some(host) = on {
        host.enter(&mut command)?;
    }
    Ok(command)
}

fn received(json: &[u8]) -> Result<f64> {
    let report: serde_json::Value =
        serde_json::from_slice(json).map_err(std::io::Error::from).doing(|| "read iperf3")?;
    let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
    bits.map(|bits| bits / 8.0).ok_or_else(|| Error::Garbled(String::from_utf8_lossy(json).into_owned()))
}

fn missing(error: &dyn std::fmt::Display) -> Error {
    Error::Missing { what: format!("the program iperf3 ({error})"), how: "run `make setup`".into() }
}

/// How long the server may take to listen.
const START_TIME: Duration = Duration::from_secs(5);

/// Interval between two tries.
const TRY_EVERY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_cable_is_distinguished_from_loopback() {
        let table = "Inter-|   Receive ...\n face |bytes ...\n    lo:     1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n  \
                     eth0: 500 6 0 0 0 0 0 0 700 8 0 0 0 0 0 0\n";
        let traffic = Traffic { received: 500, sent: 700 };
        assert_eq!(Traffic::parse(table), Some(traffic));
        assert_eq!(traffic.since(Traffic { received: 100, sent: 0 }), Traffic { received: 400, sent: 700 });
    }

    #[test]
    fn rates_are_parsed_in_the_units_of_networks() {
        assert_eq!("100mbit".parse(), Ok(BitRate(100_000_000)));
        assert_eq!("2.5gbit".parse::<BitRate>().unwrap().to_string(), "2.5 Gb/s");
        for wrong in ["", "fast", "100", "-1gbit", "0mbit", "9999999gbit", "NaNgbit"] {
            assert!(wrong.parse::<BitRate>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_loss_is_a_percentage() {
        assert_eq!(Loss::percent(1.5), Some(Loss(150)));
        for wrong in [-0.1, 100.1, f64::NAN] {
            assert_eq!(Loss::percent(wrong), None);
        }
    }

    #[test]
    fn an_unlimited_cable_has_no_queue() {
        assert!(Shape::default().queues("eth0").is_empty());
    }
}
