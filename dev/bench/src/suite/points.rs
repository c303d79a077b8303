//! The kept measurements: the rows of the tables and the points of the plots. The suites create them, the report shows
//! them.

use serde::{Deserialize, Serialize};

use super::load::ClientLatency;
use crate::Spread;
use crate::sync::Method;

/// One sync.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SyncPoint {
    /// Name and version of the server.
    pub server: String,
    /// Name of the network.
    pub network: String,
    /// Bytes of all values.
    pub bytes: u64,
    /// What the values are, if they are not the large random ones, which do not compress.
    #[serde(default)]
    pub content: String,
    /// The method.
    pub method: Method,
    /// Number of replicas.
    pub replicas: usize,
    /// The round, from 0.
    pub round: usize,
    /// Wall seconds until the last replica had caught up.
    pub seconds: f64,
    /// Wall seconds until the first replica had caught up.
    pub first_seconds: f64,
    /// Phase of the last replica, in seconds; see [`crate::sync::Phases`].
    pub snapshot: f64,
    /// Phase of the last replica, in seconds.
    pub transfer: f64,
    /// Phase of the last replica, in seconds.
    pub load: f64,
    /// Phase of the last replica, in seconds.
    pub catch_up: f64,
    /// Bytes out of the primary's host; on loopback, out of the primary.
    pub sent: u64,
    /// Full copies that the primary was asked for and gave (`sync_full`); `None` in runs before 2026-11-26.
    #[serde(default)]
    pub full_copies: Option<u64>,
    /// Processor seconds of the primary with its child.
    pub primary_cpu: f64,
    /// Processor seconds of all replicas' servers.
    pub replicas_cpu: f64,
    /// Processor seconds of all agents, or of the copier.
    pub agents_cpu: f64,
    /// Processor seconds of the source agent, which are part of those; `None` in runs before 2026-11-24.
    #[serde(default)]
    pub source_cpu: Option<f64>,
    /// The part of it that the source had used when it was ready: nearly all of it the first touch of its memory.
    /// `None` in runs that did not record it.
    #[serde(default)]
    pub source_ready_cpu: Option<f64>,
    /// Peak of the primary's private memory, including what its child copied, in bytes.
    pub peak_memory: u64,
    /// Peak memory of the source agent, in bytes.
    pub source_memory: u64,
    /// Peak memory of each replica agent, in bytes. Empty in runs before 2026-11-23, in which agents with relay had
    /// memory for the whole data set.
    #[serde(default)]
    pub agent_memory: Vec<u64>,
    /// Whether the replicas equal the primary; `None` if that was not checked.
    pub equal: Option<bool>,
}

/// What one group of clients noticed during one sync.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FeelPoint {
    /// Name and version of the server.
    pub server: String,
    /// Name of the network.
    pub network: String,
    /// Bytes of all values.
    pub bytes: u64,
    /// `near` or `far`.
    pub clients: String,
    /// Commands per second that this group sent.
    pub asked: u64,
    /// The method by which replicas were made; `None` without replicas.
    pub method: Option<Method>,
    /// Number of replicas.
    pub replicas: usize,
    /// The round, from 0.
    pub round: usize,
    /// Seconds of the sync.
    pub seconds: f64,
    /// What the clients noticed in that time.
    #[serde(flatten)]
    pub felt: ClientLatency,
    /// Peak memory of the source agent, in bytes; `None` without one, and in runs that did not record it.
    #[serde(default)]
    pub source_memory: Option<u64>,
    /// Peak memory of each replica agent, in bytes; empty in runs before 2026-11-23.
    #[serde(default)]
    pub agent_memory: Vec<u64>,
    /// Whether the replicas equal the primary; `None` if that was not checked.
    #[serde(default)]
    pub equal: Option<bool>,
}

/// One sync of `scaling`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScalingPoint {
    /// Name and version of the server.
    pub server: String,
    /// What grows: `size` or `value`.
    pub grows: String,
    /// The method.
    pub method: Method,
    /// Bytes of all values.
    pub bytes: u64,
    /// Bytes of each value.
    pub value_bytes: u64,
    /// The round, from 0.
    pub round: usize,
    /// Wall seconds.
    pub seconds: f64,
    /// Processor seconds of the primary with its child.
    pub primary_cpu: f64,
    /// Processor seconds of the replica's server and all agents.
    pub others_cpu: f64,
    /// Peak of the primary's private memory, including what its child copied, in bytes.
    pub peak_memory: u64,
    /// Peak memory of the source agent, in bytes.
    pub source_memory: u64,
    /// Peak memory of the replica agent, in bytes; empty in runs before 2026-11-23.
    #[serde(default)]
    pub agent_memory: Vec<u64>,
    /// Whether the replica equals the primary; `None` if that was not checked.
    #[serde(default)]
    pub equal: Option<bool>,
}

/// One round of `conversations` with one number of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ConversationsPoint {
    /// Name and version of the server.
    pub server: String,
    /// Number of conversations.
    pub replicas: u32,
    /// The round, from 0.
    pub round: usize,
    /// Seconds from the first connect until the last conversation had the source's offer.
    pub join_seconds: f64,
    /// While every conversation reports progress 20 times a second.
    pub receiving: ConversationsLoad,
    /// While every conversation has nothing new to report.
    pub staying: ConversationsLoad,
    /// Open descriptors of the source.
    pub descriptors: u64,
    /// Threads of the source.
    pub threads: u64,
    /// Resident memory of the source, including its table, in bytes.
    pub resident: u64,
    /// Private memory of the source, in bytes.
    pub private: u64,
    /// The same before the first conversation.
    pub private_before: u64,
    /// Peak of the source's resident memory, in bytes.
    pub peak: u64,
    /// Wall seconds of the command `remora status --json`.
    pub status_seconds: f64,
    /// Wall seconds of a real replica without conversations.
    pub alone_seconds: f64,
    /// The same while every conversation reports progress 20 times a second.
    pub beside_seconds: f64,
    /// The same while every conversation has nothing new to report.
    pub beside_staying_seconds: f64,
    /// Wall seconds until the source lists no replica after all have left.
    pub leave_seconds: f64,
    /// Whether the real replicas equal the primary; `None` if that was not checked, which older runs did not.
    #[serde(default)]
    pub equal: Option<bool>,
}

/// The source under conversations, per second.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ConversationsLoad {
    /// Processor seconds of the source.
    pub cpu: f64,
    /// Processor seconds of the process that holds the conversations.
    pub crowd_cpu: f64,
    /// Reports that the source received.
    pub reports: f64,
    /// Messages that the source sent.
    pub answers: f64,
}

/// One figure of `devices`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DevicePoint {
    /// The subject.
    pub device: String,
    /// The tool.
    pub tool: String,
    /// The round, from 0.
    pub round: usize,
    /// Bytes per second.
    pub bytes_per_second: f64,
}

/// A method in the words of a table.
pub(super) fn name_of(method: Option<Method>) -> &'static str {
    method.map_or("no sync", Method::name)
}

/// The summary of several rounds, in MB/s.
pub(super) fn spread(points: &[&DevicePoint]) -> Option<Spread> {
    Spread::of(points.iter().map(|point| point.bytes_per_second / 1e6))
}
