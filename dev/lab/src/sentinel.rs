//! Real Sentinels that watch a group of real servers.
//!
//! Their times are short, so that a fail-over takes a second or two.

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::client::{Address, Client};
use crate::net::Host;
use crate::process::Process;
use crate::random::Random;
use crate::scratch;
use crate::server::{Kind, Server, wait_until};
use crate::{Doing, Error, Result};
use remora_redis::resp::Frame;

/// The name of the primary at the Sentinels.
pub const NAME: &str = "mymaster";

/// How many Sentinels agree on a fail-over, of three.
const QUORUM: usize = 2;

/// How long Sentinels may take to find each other and all replicas. It takes some seconds.
const FIND_TIME: Duration = Duration::from_secs(60);

/// Three Sentinels.
#[derive(Debug)]
pub struct Sentinels {
    each: Vec<Sentinel>,
}

#[derive(Debug)]
struct Sentinel {
    folder: TempDir,
    address: SocketAddr,
    host: Option<Host>,
    password: String,
    process: Process,
}

impl Sentinels {
    /// Starts three Sentinels of this kind that watch `primary`, with further lines for their configuration
    /// (`sentinel failover-timeout mymaster 20000`). Returns when each knows the two others and all of `replicas`.
    pub fn start(kind: Kind, primary: &Server, replicas: &[&Server], lines: &[&str]) -> Result<Sentinels> {
        Sentinels::guarded(kind, primary, replicas, lines, "")
    }

    /// Starts one Sentinel alone.
    pub fn one(kind: Kind, primary: &Server, lines: &[&str]) -> Result<Sentinels> {
        Ok(Sentinels { each: vec![Sentinel::start(kind, primary, lines, "")?] })
    }

    /// The same as [`Sentinels::start`], for Sentinels whose default user has this password.
    pub fn guarded(
        kind: Kind,
        primary: &Server,
        replicas: &[&Server],
        lines: &[&str],
        password: &str,
    ) -> Result<Sentinels> {
        let each = (0..3).map(|_| Sentinel::start(kind, primary, lines, password)).collect::<Result<_>>()?;
        let sentinels = Sentinels { each };
        for sentinel in &sentinels.each {
            wait_until("the Sentinels to know each other and the replicas", FIND_TIME, || {
                let info = sentinel.client()?.text(&["INFO", "sentinel"])?;
                let known = format!("slaves={},sentinels=3", replicas.len());
                Ok(if info.contains(&known) { Ok(()) } else { Err(info) })
            })?;
        }
        Ok(sentinels)
    }

    /// The addresses, as `--sentinel` takes them.
    pub fn list(&self) -> String {
        self.each.iter().map(|sentinel| sentinel.address.to_string()).collect::<Vec<_>>().join(",")
    }

    /// The address of the primary, as the Sentinel of this number says.
    pub fn primary(&self, number: usize) -> Result<String> {
        let pair = self.client(number)?.list(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME])?;
        let text = |at: usize| pair.get(at).and_then(|text| text.as_str()).unwrap_or_default().to_owned();
        Ok(format!("{}:{}", text(0), text(1)))
    }

    /// Starts a fail-over, as an operator does.
    pub fn fail_over(&self) -> Result<()> {
        self.client(0)?.ok(&["SENTINEL", "FAILOVER", NAME])
    }

    /// Waits until each Sentinel names another primary than `former`, and returns it.
    pub fn wait_for_another(&self, former: &str, within: Duration) -> Result<String> {
        let mut now = String::new();
        for number in 0..self.each.len() {
            now = wait_until("a fail-over", within, || {
                let now = self.primary(number)?;
                Ok(if now == former { Err(now) } else { Ok(now) })
            })?;
        }
        Ok(now)
    }

    /// A connection to the Sentinel of this number.
    pub fn client(&self, number: usize) -> Result<Client> {
        self.each[number].client()
    }

    /// Kills the Sentinel of this number.
    pub fn kill(&mut self, number: usize) -> Result<()> {
        self.each[number].process.kill().map(drop)
    }

    /// What the Sentinel of this number has logged.
    pub fn log(&self, number: usize) -> String {
        fs::read_to_string(self.each[number].folder.path().join(LOG)).unwrap_or_default()
    }
}

impl Sentinel {
    fn start(kind: Kind, primary: &Server, lines: &[&str], password: &str) -> Result<Sentinel> {
        let folder = scratch::folder("sentinel")?;
        let host = primary.host().cloned();
        let ip = host.as_ref().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Host::address);
        let address = SocketAddr::new(ip, scratch::free_port()?);
        let watched = primary.address();
        let mut text = String::new();
        let own = [
            format!("bind {ip}"),
            format!("port {}", address.port()),
            "protected-mode no".to_owned(),
            format!("sentinel monitor {NAME} {} {} {QUORUM}", watched.ip(), watched.port()),
            format!("sentinel down-after-milliseconds {NAME} 1000"),
        ];
        for line in own.iter().map(String::as_str).chain(lines.iter().copied()) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{line}");
        }
        let path = folder.path().join("sentinel.conf");
        fs::write(&path, text).doing(|| format!("write {}", path.display()))?;
        let log = folder.path().join(LOG);
        let doing = || format!("open {}", log.display());
        let out = OpenOptions::new().create(true).append(true).open(&log).doing(doing)?;
        let errors = out.try_clone().doing(doing)?;
        let mut command = Command::new(kind.binary()?);
        command.arg(&path).arg("--sentinel").current_dir(folder.path()).stdin(Stdio::null()).stdout(out).stderr(errors);
        if let Some(host) = &host {
            host.enter(&mut command)?;
        }
        let (process, _) = Process::start(format!("a Sentinel of {kind}"), command)?;
        let password = password.to_owned();
        let sentinel = Sentinel { folder, address, host, password, process };
        wait_until("a Sentinel to answer", FIND_TIME, || {
            let answer = sentinel.client().and_then(|mut client| client.text(&["PING"]));
            Ok(answer.map_err(|error| error.to_string()))
        })?;
        // They ask the servers every half second instead of every ten.
        let quick = ["SENTINEL", "DEBUG", "info-period", "500", "publish-period", "300", "ask-period", "200"];
        sentinel.client()?.ok(&quick)?;
        Ok(sentinel)
    }

    fn client(&self) -> Result<Client> {
        let address = Address::Tcp(self.address);
        let mut client = match &self.host {
            Some(host) => host.within(move || Client::connect(&address))??,
            None => Client::connect(&address)?,
        };
        if !self.password.is_empty() {
            client.auth(None, &self.password)?;
        }
        Ok(client)
    }
}

const LOG: &str = "sentinel.log";

// A whole cluster: primaries that share the slots, and their replicas.

/// Slots of a cluster.
const SLOTS: usize = 16_384;

/// How long nodes may take to find each other, and replicas their primaries. It takes seconds.
const CLUSTER_TIME: Duration = Duration::from_secs(90);

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
        cluster.replicas().try_for_each(|replica| replica.wait_for_link(CLUSTER_TIME))?;
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
            wait_until("all replicas to be known", CLUSTER_TIME, || {
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
    wait_until("the cluster to be well", CLUSTER_TIME, || {
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
