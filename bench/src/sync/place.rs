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
        Place::hosts(rate, replicas, |name, _| net.host(name))
    }

    /// The same, with half of the machine's processors for the primary's host and its clients', and the other half for all replicas' together,
    /// so that what a replica does takes no turn from the primary, as it can't where each host is a machine.
    ///
    /// # Errors
    /// As for [`Place::network`]; or there is one processor only.
    pub fn network_apart(rate: BitRate, replicas: usize) -> Result<Place> {
        let all = std::thread::available_parallelism()?.get();
        let (net, half) = (Net::new()?, all / 2);
        if half == 0 {
            return Err("one processor can't be shared out among hosts: give --shared-processors".into());
        }
        Place::hosts(rate, replicas, |name, is_replica| net.host_on(name, if is_replica { half..all } else { 0..half }))
    }

    /// With hosts that are made by name, and by whether it is a replica's.
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
