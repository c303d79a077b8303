//! Where a scene is played: on this machine's loopback, or on the hosts of a test network with cables of a given rate.

use remora_lab::{BitRate, Builder, Host, Net, Shape};

use super::Result;

/// One host for the primary, one for each replica, one for the primary's clients; or none of that.
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
    /// All on this machine's loopback.
    pub fn loopback() -> Place {
        Place::default()
    }

    /// A network in which every host hangs on a cable of this rate. Room for so many replicas.
    ///
    /// # Errors
    /// Not root, or the kernel lacks something; the error names it.
    pub fn network(rate: BitRate, replicas: usize) -> Result<Place> {
        let net = Net::new()?;
        let host = |name: &str| -> Result<Host> {
            let host = net.host(name)?;
            host.shape(Shape::bits(rate.0))?;
            Ok(host)
        };
        let replicas = (1..=replicas).map(|number| host(&format!("replica-{number}"))).collect::<Result<_>>()?;
        Ok(Place { hosts: Some(Hosts { primary: host("primary")?, client: host("client")?, replicas, rate }) })
    }

    /// Bytes per second that each host's cable carries, with all headers; `None` on loopback.
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

    /// How many replicas it has room for.
    pub fn room(&self) -> usize {
        self.hosts.as_ref().map_or(usize::MAX, |hosts| hosts.replicas.len())
    }
}

/// Puts a server there.
pub(super) fn on(builder: Builder, host: Option<&Host>) -> Builder {
    match host {
        Some(host) => builder.on(host),
        None => builder,
    }
}
