//! A network as an argument of the command line: this machine's loopback, or hosts with cables of a rate.

use std::str::FromStr;
use std::time::Duration;

use remora_lab::{BitRate, Kind, iperf};
use serde::{Deserialize, Serialize};

use crate::sync::{Method, Place, Program, Result};

/// The network over which something is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// This machine's loopback: limited only by its processors.
    Loopback,
    /// Hosts of a test network, each on a cable of this rate.
    Shaped(BitRate),
}

impl Network {
    /// Whether this program can run a method over it, and whether the method differs from others for that number of
    /// replicas.
    pub(super) fn suits(self, method: Method, kind: Kind, replicas: usize, program: &Program) -> bool {
        method.applies(kind, replicas)
            && (self == Network::Loopback || method.crosses_hosts())
            && (method.serves_peers() != Some(true) || program.serves_peers())
    }

    /// A place on it, with room for `replicas` replicas.
    ///
    /// # Errors
    /// Hosts need root and a kernel that can shape; the error says what is missing.
    pub fn place(self, replicas: usize) -> Result<Place> {
        match self {
            Network::Loopback => Ok(Place::loopback()),
            Network::Shaped(rate) => Place::network(rate, replicas),
        }
    }

    /// The same with reserved processors for the primary's host, if there are hosts.
    ///
    /// # Errors
    /// As for [`Network::place`].
    pub fn place_apart(self, replicas: usize) -> Result<Place> {
        match self {
            Network::Loopback => Ok(Place::loopback()),
            Network::Shaped(rate) => Place::network_apart(rate, replicas),
        }
    }

    /// The rate that iperf3 measures, from the primary's host to the first replica's.
    ///
    /// # Errors
    /// iperf3 is not installed or cannot connect.
    pub fn measure(self, place: &Place) -> Result<Link> {
        let hosts = place.primary().zip(place.replica(0));
        let bytes_per_second = iperf::bandwidth(hosts, IPERF_TIME)?;
        Ok(Link { network: self.to_string(), bytes_per_second })
    }
}

/// The measured speed of a network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Link {
    /// Its name.
    pub network: String,
    /// By iperf3, on one connection.
    pub bytes_per_second: f64,
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Network, String> {
        match text {
            "loopback" => Ok(Network::Loopback),
            rate => rate.parse().map(Network::Shaped).map_err(|error: String| format!("{error}, or loopback")),
        }
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Network::Loopback => to.write_str("loopback"),
            Network::Shaped(rate) => rate.fmt(to),
        }
    }
}

/// Long beside the start of a connection.
const IPERF_TIME: Duration = Duration::from_secs(3);
