//! A whole cluster: primaries that share the slots, and their replicas.

use std::time::Duration;

use remora_redis::resp::Frame;

use crate::client::Client;
use crate::error::{Error, Result};
use crate::random::Random;
use crate::server::{Server, wait_until};

/// Slots of a cluster.
const SLOTS: usize = 16_384;

/// How long nodes may take to find each other, and replicas their primaries. It takes seconds.
const FIND_TIME: Duration = Duration::from_secs(90);

/// Primaries that share the slots evenly, each with the same number of replicas.
#[derive(Debug)]
pub struct Cluster {
    /// In the order of their slots.
    pub shards: Vec<Shard>,
}

/// A primary and its replicas.
#[derive(Debug)]
pub struct Shard {
    /// The primary.
    pub primary: Server,
    /// Its replicas.
    pub replicas: Vec<Server>,
}

impl Cluster {
    /// Starts the servers, and waits until all know all of them and the cluster is well. `start` is told the number of
    /// the shard, and that of the node in it: 0 is its primary.
    ///
    /// # Errors
    /// A server does not start, or the nodes do not find each other.
    pub fn start(shards: usize, replicas: usize, start: impl Fn(usize, usize) -> Result<Server>) -> Result<Cluster> {
        let shard = |number| -> Result<Shard> {
            let replicas = (1..=replicas).map(|node| start(number, node)).collect::<Result<_>>()?;
            Ok(Shard { primary: start(number, 0)?, replicas })
        };
        let cluster = Cluster { shards: (0..shards).map(shard).collect::<Result<_>>()? };
        for (number, shard) in cluster.shards.iter().enumerate() {
            let [first, next] = [number, number + 1].map(|number| number * SLOTS / shards);
            let slots = [first, next - 1].map(|slot| slot.to_string());
            let mut client = shard.primary.client()?;
            client.ok(&["CLUSTER", "ADDSLOTSRANGE", &slots[0], &slots[1]])?;
            // Nodes that claim slots with the same epoch would argue about it.
            client.ok(&["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()])?;
        }
        cluster.nodes().skip(1).try_for_each(|node| cluster.meet(node))?;
        cluster.wait_for_nodes(shards * (1 + replicas))?;
        for shard in &cluster.shards {
            let id = id(&shard.primary)?;
            for replica in &shard.replicas {
                replica.client()?.ok(&["CLUSTER", "REPLICATE", &id])?;
            }
        }
        cluster.replicas().try_for_each(|replica| replica.wait_for_link(FIND_TIME))?;
        cluster.wait_for_roles()?;
        Ok(cluster)
    }

    /// All nodes, shard by shard, each primary before its replicas.
    pub fn nodes(&self) -> impl Iterator<Item = &Server> {
        self.shards.iter().flat_map(|shard| std::iter::once(&shard.primary).chain(&shard.replicas))
    }

    /// All replicas, shard by shard.
    pub fn replicas(&self) -> impl Iterator<Item = &Server> {
        self.shards.iter().flat_map(|shard| &shard.replicas)
    }

    /// Makes a node known to the first one, which tells the others.
    ///
    /// # Errors
    /// One of the two does not answer.
    pub fn meet(&self, node: &Server) -> Result<()> {
        let (host, port) = (node.address().ip().to_string(), node.port().to_string());
        let bus = node.configured("cluster-port")?;
        self.shards[0].primary.client()?.ok(&["CLUSTER", "MEET", &host, &port, &bus])
    }

    /// Waits until every node knows this number of nodes, and finds the cluster well.
    ///
    /// # Errors
    /// They do not within the time for that.
    pub fn wait_for_nodes(&self, count: usize) -> Result<()> {
        self.nodes().try_for_each(|server| wait_for_nodes(server, count))
    }

    /// Waits until every node knows which nodes are replicas.
    fn wait_for_roles(&self) -> Result<()> {
        let replicas = self.replicas().count();
        self.nodes().try_for_each(|server| {
            wait_until("all replicas to be known", FIND_TIME, || {
                let nodes = server.client()?.text(&["CLUSTER", "NODES"])?;
                let known = nodes.lines().filter(|line| line.contains("slave")).count();
                Ok(if known == replicas { Ok(()) } else { Err(nodes) })
            })
        })
    }

    /// Sets keys with this many bytes of random data, each at the primary of its slot.
    ///
    /// # Errors
    /// No primary takes a key, or more than one does.
    pub fn fill(&self, keys: usize, bytes: usize, seed: u64) -> Result<()> {
        let mut clients: Vec<Client> = self.shards.iter().map(|shard| shard.primary.client()).collect::<Result<_>>()?;
        let mut random = Random::new(seed);
        for number in 0..keys {
            let (key, value) = (format!("key {seed} {number}"), random.bytes(bytes));
            let mut taken = 0;
            // Those that do not have the slot say so.
            for client in &mut clients {
                client.queue(&[b"SET".as_slice(), key.as_bytes(), &value]);
                client.flush()?;
                taken += usize::from(matches!(client.receive()?, Frame::Simple(_)));
            }
            if taken != 1 {
                return Err(Error::Garbled(format!("{key} was taken by {taken} primaries")));
            }
        }
        Ok(())
    }
}

/// Waits until this node knows this number of nodes, by the names that they gave it, and finds the cluster well.
///
/// # Errors
/// It does not within the time for that.
pub fn wait_for_nodes(server: &Server, count: usize) -> Result<()> {
    wait_until("the cluster to be well", FIND_TIME, || {
        let mut client = server.client()?;
        let (info, nodes) = (client.text(&["CLUSTER", "INFO"])?, client.text(&["CLUSTER", "NODES"])?);
        // `cluster_known_nodes` counts those that have not yet answered, too: they have invented names.
        let known = nodes.lines().filter(|line| !line.contains("handshake")).count();
        let is_well = info.contains("cluster_state:ok") && known == count;
        Ok(if is_well { Ok(()) } else { Err(format!("{info}{nodes}")) })
    })
}

/// A node's name in its cluster.
///
/// # Errors
/// It does not answer.
pub fn id(server: &Server) -> Result<String> {
    server.client()?.text(&["CLUSTER", "MYID"])
}
