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
//! - [`Net`] and [`Host`] are here. **Start here.** [`shape`]: rates, delays and losses as arguments of `tc` and `nft`.
//! - `namespace`: how code runs on a host.

mod namespace;
pub mod shape;

use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::thread::CpuSet;

use crate::error::{Doing, Error, Result};
use namespace::Namespace;
pub use shape::{BitRate, Loss, Shape};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cable_is_distinguished_from_loopback() {
        let table = "Inter-|   Receive ...\n face |bytes ...\n    lo:     1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n  \
                     eth0: 500 6 0 0 0 0 0 0 700 8 0 0 0 0 0 0\n";
        let traffic = Traffic { received: 500, sent: 700 };
        assert_eq!(Traffic::parse(table), Some(traffic));
        assert_eq!(traffic.since(Traffic { received: 100, sent: 0 }), Traffic { received: 400, sent: 700 });
    }
}
