//! What is kept of each measurement: the rows of the tables and the points of the plots. The suites make them, the report shows them.

use serde::{Deserialize, Serialize};

use super::load::Felt;
use crate::Spread;
use crate::sync::Method;

/// One sync.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SyncPoint {
    /// Name and version.
    pub server: String,
    /// Name of the network.
    pub network: String,
    /// Bytes of all values.
    pub bytes: u64,
    /// How.
    pub method: Method,
    /// How many replicas.
    pub replicas: usize,
    /// From 0.
    pub round: usize,
    /// Wall seconds until the last replica was in step.
    pub seconds: f64,
    /// ... the first.
    pub first_seconds: f64,
    /// Of the last replica, in seconds, as [`crate::sync::Phases`] has them.
    pub snapshot: f64,
    /// ...
    pub transfer: f64,
    /// ...
    pub load: f64,
    /// ...
    pub catch_up: f64,
    /// Bytes out of the primary's host; on loopback, out of the primary.
    pub sent: u64,
    /// Processor seconds of the primary with its child.
    pub primary_cpu: f64,
    /// ... of all replicas' servers.
    pub replicas_cpu: f64,
    /// ... of all agents, or of the copier.
    pub agents_cpu: f64,
    /// The most memory of the primary's own, what its child copied included, in bytes.
    pub peak_memory: u64,
    /// The most memory of the source agent, in bytes.
    pub source_memory: u64,
    /// Whether the replicas held what the primary holds; `None` where it was not looked at.
    pub equal: Option<bool>,
}

/// What one group of clients felt during one sync.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FeelPoint {
    /// Name and version.
    pub server: String,
    /// Name of the network.
    pub network: String,
    /// Bytes of all values.
    pub bytes: u64,
    /// `near` or `far`.
    pub clients: String,
    /// Commands per second that this group asked for.
    pub asked: u64,
    /// How the replicas were made; `None` where none was.
    pub method: Option<Method>,
    /// How many.
    pub replicas: usize,
    /// From 0.
    pub round: usize,
    /// How long the sync took.
    pub seconds: f64,
    /// What was felt in that time.
    #[serde(flatten)]
    pub felt: Felt,
}

/// One sync.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScalingPoint {
    /// Name and version.
    pub server: String,
    /// What grows: `size` or `value`.
    pub grows: String,
    /// How.
    pub method: Method,
    /// Bytes of all values.
    pub bytes: u64,
    /// ... of each.
    pub value_bytes: u64,
    /// From 0.
    pub round: usize,
    /// Wall seconds.
    pub seconds: f64,
    /// Processor seconds of the primary with its child.
    pub primary_cpu: f64,
    /// ... of the replica's server and all agents.
    pub others_cpu: f64,
    /// The most memory of the primary's own, what its child copied included, in bytes.
    pub peak_memory: u64,
    /// The most memory of the source agent, in bytes.
    pub source_memory: u64,
}

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DevicePoint {
    /// What was measured.
    pub device: String,
    /// By what.
    pub tool: String,
    /// From 0.
    pub round: usize,
    /// Bytes per second.
    pub bytes_per_second: f64,
}

/// What is done, in a table's words.
pub(super) fn name_of(method: Option<Method>) -> &'static str {
    method.map_or("no sync", Method::name)
}

/// What several rounds come to, in MB/s.
pub(super) fn spread(points: &[&DevicePoint]) -> Option<Spread> {
    Spread::of(points.iter().map(|point| point.bytes_per_second / 1e6))
}
