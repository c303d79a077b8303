//! Networks of our own: hosts as network namespaces, cables that can be cut and slowed down. Linux, root.
//!
//! ```text
//!    host "a" 10.93.0.1        host "b" 10.93.0.2          each a network namespace with one cable, eth0
//!        eth0 │                    eth0 │
//!   ══════════╪════════════════════════╪═══════            the switch: a namespace with a bridge; port p1 is the
//!          p1 │                     p2 │                    other end of the cable of host 1. Cut = port down.
//! ```
//!
//! Nothing of it is ever in this machine's own namespace, and no namespace has a name: each lives by the descriptors and
//! processes that hold it, so the kernel clears up also after a test that was killed. Addresses are private ones and end
//! in the namespaces.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::error::{Doing, Error, Result};

/// One switch and the hosts plugged into it. Gone when the last of it is dropped.
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
    /// A network without hosts. Needs root and the `ip` program.
    pub fn new() -> Result<Net> {
        let space = Namespace::new()?;
        space.ip(&["link", "add", BRIDGE, "type", "bridge"])?;
        space.ip(&["link", "set", BRIDGE, "up"])?;
        Ok(Net { switch: Arc::new(Switch { space, hosts: AtomicU8::new(0) }) })
    }

    /// A new host. `name` is for messages.
    pub fn host(&self, name: &str) -> Result<Host> {
        let number = self.switch.hosts.fetch_add(1, Ordering::Relaxed) + 1;
        if number > MOST_HOSTS {
            return Err(Error::Missing {
                what: format!("room for host {name:?}: a test network has {MOST_HOSTS} hosts at most"),
                how: "make a second network".into(),
            });
        }
        let space = Namespace::new()?;
        let port = format!("p{number}");
        let address = Ipv4Addr::new(NETWORK[0], NETWORK[1], NETWORK[2], number);
        let switch = &self.switch.space;
        // A namespace without a name is told to `ip` by a descriptor of ours that stands for it.
        let other_end = format!("/proc/{}/fd/{}", std::process::id(), space.file.as_raw_fd());
        switch.ip(&["link", "add", &port, "type", "veth", "peer", "name", CABLE, "netns", &other_end])?;
        switch.ip(&["link", "set", &port, "master", BRIDGE, "up"])?;
        space.ip(&["link", "set", "lo", "up"])?;
        space.ip(&["address", "add", &format!("{address}/24"), "dev", CABLE])?;
        space.ip(&["link", "set", CABLE, "up"])?;
        Ok(Host {
            inner: Arc::new(Inner { name: name.into(), address, port, space, switch: Arc::clone(&self.switch) }),
        })
    }
}

/// One host of a test network. Clones are the same host.
#[derive(Clone, Debug)]
pub struct Host {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    address: Ipv4Addr,
    /// Its port at the switch.
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

    /// Makes `command` run on this host when it is started.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        self.inner.space.enter(command)
    }

    /// Runs `what` on this host, on a thread of its own, and waits for it. Sockets made in it stay on this host.
    pub fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T> {
        self.inner.space.within(what)
    }

    /// Pulls its cable: packets vanish both ways, nobody is told.
    pub fn cut(&self) -> Result<()> {
        self.inner.switch.space.ip(&["link", "set", &self.inner.port, "down"])
    }

    /// Plugs it in again.
    pub fn heal(&self) -> Result<()> {
        self.inner.switch.space.ip(&["link", "set", &self.inner.port, "up"])
    }

    /// Slows its cable down, both ways. A second call replaces the first.
    pub fn shape(&self, shape: Shape) -> Result<()> {
        for (space, device) in [(&self.inner.space, CABLE), (&self.inner.switch.space, self.inner.port.as_str())] {
            for arguments in shape.queues(device) {
                space.run("tc", &arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
            }
        }
        Ok(())
    }
}

/// How slow a cable is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    /// Bytes per second each way. `None`: as fast as the machine.
    pub rate: Option<u64>,
    /// Added to each packet's way, each way. Needs the kernel's `netem`, which small kernels lack.
    pub delay: Option<Duration>,
}

impl Shape {
    /// A rate alone, in bytes per second.
    pub fn rate(bytes_per_second: u64) -> Shape {
        Shape { rate: Some(bytes_per_second), delay: None }
    }

    /// The `tc` calls that bring it about: delay at the root, the rate below it.
    fn queues(self, device: &str) -> Vec<Vec<String>> {
        let mut parent = vec!["root".to_owned()];
        let mut calls = Vec::new();
        let mut add = |parent: &[String], handle: &str, queue: String| {
            let mut call: Vec<String> = ["qdisc", "replace", "dev", device].map(str::to_owned).to_vec();
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

/// A network namespace that lives as long as this descriptor, or a process in it.
#[derive(Debug)]
struct Namespace {
    file: Arc<File>,
}

impl Namespace {
    fn new() -> Result<Namespace> {
        // On a thread of its own, which leaves the machine's namespace for good and ends.
        let made = on_a_thread(|| {
            // SAFETY: `unshare_unsafe` is unsafe because of flags that take file descriptors or memory away from this
            // thread alone (FILES, …). NEWNET is none of them: it changes which network the thread sees.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net")
        });
        match made {
            Ok(file) => Ok(Namespace { file: Arc::new(file) }),
            Err(error) => Err(Error::Missing {
                what: format!("network namespaces ({error})"),
                how: "run as root, on a kernel and in a container that allow them".into(),
            }),
        }
    }

    fn enter(&self, command: &mut Command) -> Result<()> {
        let space = Arc::clone(&self.file);
        let enter =
            move || move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).map_err(io::Error::from);
        // SAFETY: what runs between fork and exec must be async-signal-safe. The closure makes one system call (setns)
        // on a descriptor that it holds open, takes no lock and allocates nothing (an `io::Error` from a number).
        unsafe { command.pre_exec(enter) };
        Ok(())
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

    /// Runs a program of iproute2 in here to its end.
    fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        let mut command = Command::new(program);
        command.args(args);
        self.enter(&mut command)?;
        let output = command.output().map_err(|error| Error::Missing {
            what: format!("the program {program} ({error})"),
            how: "run `make setup` (it installs iproute2)".into(),
        })?;
        if output.status.success() {
            return Ok(());
        }
        let told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Error::Missing {
            what: format!("what `{program} {}` asks of the kernel ({told})", args.join(" ")),
            how: "run on a kernel with veth, bridge, tbf and netem".into(),
        })
    }
}

fn on_a_thread<T: Send>(what: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let panicked = |_| io::Error::other("the thread in a network namespace panicked");
        scope.spawn(what).join().map_err(panicked)?
    })
}

/// The network 10.93.0.0/24: private, and not the first that a real network takes.
const NETWORK: [u8; 3] = [10, 93, 0];

/// As many as a /24 has room for, with some left.
const MOST_HOSTS: u8 = 200;

/// The name of the bridge in its namespace.
const BRIDGE: &str = "switch";

/// The name of a host's end of its cable.
const CABLE: &str = "eth0";

/// What may go at full speed before the rate is enforced: a few of the 64 KiB packets that a veth carries.
const BURST_BYTES: u32 = 256 << 10;

/// How long a packet may wait for its turn before it is dropped: about that of a home router's queue.
const QUEUE_MILLISECONDS: u32 = 100;

/// How many packets may be on their way at once: 10 Gbit/s × 100 ms in packets of 1500 bytes.
const DELAY_PACKETS: u32 = 83_000;
