//! A whole cluster on this machine: primaries with slots, and replicas.

use remora_lab::server::wait_until;
use remora_lab::{Client, Host, Kind, Random, Server};
use remora_redis::resp::Frame;

use super::{LONG, primary};

/// Slots of a cluster.
const SLOTS: usize = 16_384;

/// Primaries that share the slots evenly, each with the same number of replicas.
pub(crate) struct Cluster {
    pub(crate) shards: Vec<Shard>,
}

/// A primary and its replicas.
pub(crate) struct Shard {
    pub(crate) primary: Server,
    pub(crate) replicas: Vec<Server>,
}

impl Cluster {
    /// Starts the servers, and waits until all know all of them and the cluster is well.
    pub(crate) fn start(kind: Kind, shards: usize, replicas: usize) -> Cluster {
        Cluster::with(shards, replicas, || primary(kind).cluster().start().unwrap())
    }

    /// The same, on a host of a test network.
    pub(crate) fn start_on(host: &Host, kind: Kind, shards: usize, replicas: usize) -> Cluster {
        Cluster::with(shards, replicas, || primary(kind).cluster().on(host).start().unwrap())
    }

    fn with(shards: usize, replicas: usize, start: impl Fn() -> Server) -> Cluster {
        let shard = |_| Shard { primary: start(), replicas: (0..replicas).map(|_| start()).collect() };
        let cluster = Cluster { shards: (0..shards).map(shard).collect() };
        for (number, shard) in cluster.shards.iter().enumerate() {
            let [first, next] = [number, number + 1].map(|number| number * SLOTS / shards);
            let slots = [first, next - 1].map(|slot| slot.to_string());
            shard.primary.client().unwrap().ok(&["CLUSTER", "ADDSLOTSRANGE", &slots[0], &slots[1]]).unwrap();
            // Nodes that claim slots with the same epoch would argue about it.
            let epoch = (number + 1).to_string();
            shard.primary.client().unwrap().ok(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch]).unwrap();
        }
        cluster.nodes().skip(1).for_each(|node| cluster.meet(node));
        cluster.wait_for_nodes(shards * (1 + replicas));
        for shard in &cluster.shards {
            let id = id(&shard.primary);
            for replica in &shard.replicas {
                replica.client().unwrap().ok(&["CLUSTER", "REPLICATE", &id]).unwrap();
            }
        }
        for replica in cluster.shards.iter().flat_map(|shard| &shard.replicas) {
            replica.wait_for_link(LONG).unwrap();
        }
        cluster.wait_for_roles();
        cluster
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Server> {
        self.shards.iter().flat_map(|shard| std::iter::once(&shard.primary).chain(&shard.replicas))
    }

    /// Makes a node known to the first one, which tells the others.
    pub(crate) fn meet(&self, node: &Server) {
        let (host, port) = (node.address().ip().to_string(), node.port().to_string());
        let bus = node.configured("cluster-port").unwrap();
        self.shards[0].primary.client().unwrap().ok(&["CLUSTER", "MEET", &host, &port, &bus]).unwrap();
    }

    /// Waits until every node knows this number of nodes, and finds the cluster well.
    pub(crate) fn wait_for_nodes(&self, count: usize) {
        for server in self.nodes() {
            wait_until("the cluster to be well", LONG, || {
                let info = server.client()?.text(&["CLUSTER", "INFO"])?;
                let is_well =
                    info.contains("cluster_state:ok") && info.contains(&format!("cluster_known_nodes:{count}\r"));
                Ok(if is_well { Ok(()) } else { Err(info) })
            })
            .unwrap();
        }
    }

    /// Waits until every node knows which nodes are replicas.
    fn wait_for_roles(&self) {
        let replicas: usize = self.shards.iter().map(|shard| shard.replicas.len()).sum();
        for server in self.nodes() {
            wait_until("all replicas to be known", LONG, || {
                let nodes = server.client()?.text(&["CLUSTER", "NODES"])?;
                let known = nodes.lines().filter(|line| line.contains("slave")).count();
                Ok(if known == replicas { Ok(()) } else { Err(nodes) })
            })
            .unwrap();
        }
    }

    /// Sets keys with half a KiB of random data, each at the primary of its slot.
    pub(crate) fn fill(&self, keys: usize, seed: u64) {
        let mut clients: Vec<Client> = self.shards.iter().map(|shard| shard.primary.client().unwrap()).collect();
        let mut random = Random::new(seed);
        for number in 0..keys {
            let (key, value) = (format!("key {seed} {number}"), random.bytes(512));
            let mut taken = 0;
            // Those that do not have the slot say so.
            for client in &mut clients {
                client.queue(&[b"SET".to_vec(), key.clone().into_bytes(), value.clone()]);
                client.flush().unwrap();
                taken += usize::from(matches!(client.receive().unwrap(), Frame::Simple(_)));
            }
            assert_eq!(taken, 1, "{key}");
        }
    }
}

/// A node's name in its cluster.
pub(crate) fn id(server: &Server) -> String {
    server.client().unwrap().text(&["CLUSTER", "MYID"]).unwrap()
}
