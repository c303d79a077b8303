//! Clusters whose nodes take snapshots at once.

use remora_lab::{Cluster, Host, Kind, Server, cluster};

use super::primary;

/// Bytes of a key's value.
const VALUE: usize = 512;

/// Starts a cluster on this machine's loopback, or on that host.
pub(crate) fn start_cluster(host: Option<&Host>, kind: Kind, shards: usize, replicas: usize) -> Cluster {
    let builder = || match host {
        Some(host) => primary(kind).cluster().on(host),
        None => primary(kind).cluster(),
    };
    Cluster::start(shards, replicas, |_, _| builder().start()).unwrap()
}

/// Sets keys of half a KiB of random data.
pub(crate) fn fill_cluster(cluster: &Cluster, keys: usize, seed: u64) {
    cluster.fill(keys, VALUE, seed).unwrap();
}

/// A node's name in its cluster.
pub(crate) fn id(server: &Server) -> String {
    cluster::id(server).unwrap()
}
