//! Where a scene runs: on this machine's loopback, or on the hosts of a test network with cables of a given rate.

use remora_lab::{BitRate, Builder, Host, Net, Shape};

use super::Result;

/// One host for the primary, one for each replica, one for the primary's clients; or loopback without hosts.
#[derive(Clone, Debug, Default)]
pub struct Place {
    hosts: Option<Hosts>,
}

#[derive(Clone, Debug)]
struct Hosts {
    primary: Host,
    client: Host,
    replicas: Vec<Host>,
    rate: BitRate,
}

impl Place {
    /// Everything on this machine's loopback.
    pub fn loopback() -> Place {
        Place::default()
    }

    /// A network with a cable of this rate for every host, with room for `replicas` replicas.
    ///
    /// # Errors
    /// The process is not root, or the kernel lacks a feature; the error names it.
    pub fn network(rate: BitRate, replicas: usize) -> Result<Place> {
        let net = Net::new()?;
        Place::hosts(rate, replicas, |name, _| net.host(name))
    }

    /// The same, with half of the machine's processors for the primary's host and its clients', and the other half for
    /// all replicas, so that a replica's work takes no processor time from the primary, as with separate machines.
    ///
    /// # Errors
    /// As for [`Place::network`]; or the machine has only one processor.
    pub fn network_apart(rate: BitRate, replicas: usize) -> Result<Place> {
        let all = std::thread::available_parallelism()?.get();
        let (net, half) = (Net::new()?, all / 2);
        if half == 0 {
            return Err("one processor can't be shared out among hosts: give --shared-processors".into());
        }
        Place::hosts(rate, replicas, |name, is_replica| net.host_on(name, if is_replica { half..all } else { 0..half }))
    }

    /// Makes all hosts use this congestion control, by its kernel name. Nothing on loopback.
    ///
    /// # Errors
    /// The kernel does not have it.
    pub fn congestion(&self, name: &str) -> Result<()> {
        let Some(Hosts { primary, client, replicas, .. }) = &self.hosts else { return Ok(()) };
        for host in [primary, client].into_iter().chain(replicas) {
            host.within(|| std::fs::write(CONGESTION, name))??;
        }
        Ok(())
    }

    /// Creates the hosts with `host`, which gets a name and whether it is a replica's host.
    fn hosts(rate: BitRate, replicas: usize, make: impl Fn(&str, bool) -> remora_lab::Result<Host>) -> Result<Place> {
        let host = |name: &str, is_replica| -> Result<Host> {
            let host = make(name, is_replica)?;
            host.shape(Shape::bits(rate.0))?;
            Ok(host)
        };
        let (primary, client) = (host("primary", false)?, host("client", false)?);
        let replicas = (1..=replicas).map(|number| host(&format!("replica-{number}"), true)).collect::<Result<_>>()?;
        Ok(Place { hosts: Some(Hosts { primary, client, replicas, rate }) })
    }

    /// Bytes per second that each host's cable carries, including all headers; `None` on loopback.
    pub fn cable(&self) -> Option<u64> {
        self.hosts.as_ref().map(|hosts| hosts.rate.0 / 8)
    }

    /// The primary's host.
    pub fn primary(&self) -> Option<&Host> {
        self.hosts.as_ref().map(|hosts| &hosts.primary)
    }

    /// The host of the primary's clients.
    pub fn client(&self) -> Option<&Host> {
        self.hosts.as_ref().map(|hosts| &hosts.client)
    }

    /// The host of a replica, counted from 0.
    pub fn replica(&self, number: usize) -> Option<&Host> {
        self.hosts.as_ref().and_then(|hosts| hosts.replicas.get(number))
    }

    /// The number of replicas for which it has room.
    pub fn room(&self) -> usize {
        self.hosts.as_ref().map_or(usize::MAX, |hosts| hosts.replicas.len())
    }
}

/// The congestion control of new connections in the network namespace of the thread that opens it.
const CONGESTION: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// Makes a server run on that host.
pub(super) fn on(builder: Builder, host: Option<&Host>) -> Builder {
    match host {
        Some(host) => builder.on(host),
        None => builder,
    }
}
