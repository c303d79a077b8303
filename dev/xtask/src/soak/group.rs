//! The servers of a group, and the writer.
//!
//! ```text
//!   left host                                            right host
//!     A   primary or standby ◀──servers' replication──▶    B   standby or primary
//!     C   replica by Remora                                D   replica by Remora
//!     N   another primary, to which keys are moved
//! ```

use std::time::Duration;

use remora_bench::sync::Result;
use remora_lab::workload::Options;
use remora_lab::{Host, Kind, Net, Random, Server, Workload, fill_every_type, process};

use super::agents::{Captured, tail};
use super::script::{Plan, Seat, Who};

/// The servers and the writer.
pub(super) struct Group {
    hosts: Option<[Host; 2]>,
    /// A and B.
    pair: [Server; 2],
    /// Which of the two is the primary.
    primary: usize,
    /// C and D.
    replicas: [Server; 2],
    neighbor: Server,
    writer: Option<Workload>,
    writes_per_second: u64,
    /// Commands of the writers that have ended.
    commands: u64,
}

/// What a server says about its replication.
#[derive(Debug)]
pub(super) struct Standing {
    /// It is a replica.
    pub(super) is_replica: bool,
    /// `host:port` of the primary that it follows; empty if it follows none.
    pub(super) follows: String,
    /// Its link is up.
    pub(super) is_up: bool,
}

impl Group {
    /// Starts the servers, B as a replica of A. Without rights to make network namespaces, all of them are on this
    /// machine's loopback.
    pub(super) fn start(kind: Kind, plan: &Plan, writes_per_second: u64) -> Result<Group> {
        let hosts = Net::new()
            .ok()
            .map(|net| Ok::<_, remora_lab::Error>([net.host("left")?, net.host("right")?]))
            .transpose()?;
        // With `load`: a server that Remora makes a replica of, and how it loads.
        let server = |side: usize, module: bool, load: Option<&str>| -> Result<Server> {
            let mut builder = Server::builder(kind)
                .config("repl-diskless-sync-delay", 0)
                .config("repl-backlog-size", plan.backlog)
                .config("repl-timeout", plan.repl_timeout)
                .config("repl-ping-replica-period", 2)
                .config("repl-diskless-load", load.unwrap_or("disabled"))
                .config("key-load-delay", load.map_or(0, |_| plan.load_delay))
                .config("loading-process-events-interval-bytes", 64 << 10);
            // Not C and D: they can follow a server that is a replica, and a Valkey that takes a full copy of a replica
            // over two channels differs from it (dev/testing.md, at its end).
            if plan.dual_channel && load.is_none() {
                builder = builder.config("dual-channel-replication-enabled", "yes");
            }
            if let Some(hosts) = &hosts {
                builder = builder.on(&hosts[side]);
            }
            if module {
                builder = builder.module("")?;
            }
            Ok(builder.start()?)
        };
        let ([a, b, c, d], [load_c, load_d]) = (plan.modules, plan.diskless_load);
        let pair = [server(0, a, None)?, server(1, b, None)?];
        let replicas = [server(0, c, Some(load_c))?, server(1, d, Some(load_d))?];
        let neighbor = server(0, false, None)?;
        pair[1].replicate(&pair[0])?;
        Ok(Group { hosts, pair, primary: 0, replicas, neighbor, writer: None, writes_per_second, commands: 0 })
    }

    /// Whether the two hosts have a network between them that can be cut.
    pub(super) fn has_network(&self) -> bool {
        self.hosts.is_some()
    }

    /// Cuts the cable of the right host, or connects it again.
    pub(super) fn cut(&self, cut: bool) -> Result<()> {
        let Some([_, right]) = &self.hosts else { return Ok(()) };
        Ok(if cut { right.cut() } else { right.heal() }?)
    }

    /// The server that is this at the moment.
    pub(super) fn server(&self, who: Who) -> &Server {
        match who {
            Who::Primary => &self.pair[self.primary],
            Who::Standby => &self.pair[1 - self.primary],
            Who::Seat(seat) => &self.replicas[seat.index()],
        }
    }

    /// The same, to end, start or freeze it.
    pub(super) fn server_mut(&mut self, who: Who) -> &mut Server {
        match who {
            Who::Primary => &mut self.pair[self.primary],
            Who::Standby => &mut self.pair[1 - self.primary],
            Who::Seat(seat) => &mut self.replicas[seat.index()],
        }
    }

    /// The standby is the primary from now on.
    pub(super) fn swap_roles(&mut self) {
        self.primary = 1 - self.primary;
    }

    /// The name of the server that is this at the moment.
    pub(super) fn name(&self, who: Who) -> &'static str {
        match (who, self.primary) {
            (Who::Primary, 0) | (Who::Standby, 1) => "A",
            (Who::Primary | Who::Standby, _) => "B",
            (Who::Seat(Seat::C), _) => "C",
            (Who::Seat(Seat::D), _) => "D",
        }
    }

    /// What a source beside the primary, or beside the standby, captures.
    pub(super) fn captured(&self, standby: bool) -> Captured<'_> {
        if standby {
            let announced = Some(self.server(Who::Primary));
            Captured { server: self.server(Who::Standby), side: 1 - self.primary, announced }
        } else {
            Captured { server: self.server(Who::Primary), side: self.primary, announced: None }
        }
    }

    /// What the server says about its replication.
    pub(super) fn standing(&self, who: Who) -> Result<Standing> {
        let info = self.server(who).info("replication")?;
        let of = |name: &str| info.get(name).unwrap_or_default().to_owned();
        let is_replica = of("role") == "slave";
        let follows = if is_replica { format!("{}:{}", of("master_host"), of("master_port")) } else { String::new() };
        Ok(Standing { is_replica, follows, is_up: of("master_link_status") == "up" })
    }

    /// Whether this is the address of one of the group's servers, and so not of an agent.
    pub(super) fn is_server(&self, address: &str) -> bool {
        self.pair.iter().chain(&self.replicas).any(|server| server.address().to_string() == address)
    }

    /// Sends a command. `false` if the server is loading and refuses it.
    pub(super) fn tell(&self, who: Who, command: &[&str]) -> Result<bool> {
        match self.server(who).client()?.call(command) {
            Ok(_) => Ok(true),
            Err(remora_lab::Error::Refused { reply, .. }) if reply.starts_with("LOADING") => Ok(false),
            Err(error) => Err(format!("{} ({who}): {error}", self.name(who)).into()),
        }
    }

    /// Makes a server follow the primary by the servers' own replication. `false` as for [`Group::tell`].
    pub(super) fn follow_primary(&self, who: Who) -> Result<bool> {
        let address = self.server(Who::Primary).address();
        self.tell(who, &["REPLICAOF", &address.ip().to_string(), &address.port().to_string()])
    }

    /// Fails if a server has ended by itself.
    pub(super) fn check_servers(&mut self) -> Result<()> {
        let Group { pair: [a, b], replicas: [c, d], neighbor, .. } = self;
        for (name, server) in [("A", a), ("B", b), ("C", c), ("D", d), ("N", neighbor)] {
            if let Some(status) = server.ended()? {
                let log = tail(&server.log());
                return Err(format!("{name}, {server}, ended by itself ({}):\n{log}", process::in_words(status)).into());
            }
        }
        Ok(())
    }

    /// Logs of the servers, with their names.
    pub(super) fn logs(&self) -> Vec<(&'static str, String)> {
        let [a, b] = &self.pair;
        let [c, d] = &self.replicas;
        [("A.log", a), ("B.log", b), ("C.log", c), ("D.log", d)]
            .into_iter()
            .map(|(name, server)| (name, server.log()))
            .collect()
    }

    /// Starts a writer on the primary, unless one is at work.
    pub(super) fn write(&mut self, random: &mut Random) -> Result<()> {
        // Drawn in any case, so that the script does not depend on whether a writer has ended.
        let seed = random.word();
        if self.writer.as_ref().is_some_and(|writer| !writer.is_over()) {
            return Ok(());
        }
        self.stop_writing();
        let options = Options { big_bytes: BIG_BYTES, ..Options::seeded(seed).rate(self.writes_per_second) };
        self.writer = Some(Workload::start(self.server(Who::Primary).client()?, options)?);
        Ok(())
    }

    /// Stops the writer. Its connection may have been broken by an event.
    pub(super) fn stop_writing(&mut self) {
        if let Some(writer) = self.writer.take() {
            self.commands += writer.commands();
            let _ = writer.stop();
        }
    }

    /// Commands written so far.
    pub(super) fn commands(&self) -> u64 {
        self.commands + self.writer.as_ref().map_or(0, Workload::commands)
    }

    /// Writes every type and long strings to the primary: enough that a snapshot takes a while, and that the module has
    /// work.
    pub(super) fn fill(&self, random: &mut Random) -> Result<()> {
        let mut client = self.server(Who::Primary).client()?;
        match fill_every_type(&mut client, random.word()) {
            // Streams do not take the same entries twice. What could be written has been.
            Ok(_) | Err(remora_lab::Error::Refused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        for number in 0..LONG_STRINGS {
            let length = random.between(16 << 10, 1 << 20);
            let value = random.bytes(length as usize);
            client.ok(&[b"SET".as_slice(), format!("long:{number}").as_bytes(), &value])?;
        }
        Ok(())
    }

    /// Whether the primary lacks what [`Group::fill`] writes: it was killed or emptied since.
    pub(super) fn lacks_long_strings(&self) -> Result<bool> {
        let mut client = self.server(Who::Primary).client()?;
        Ok(client.int(&["EXISTS", "long:0"])? == 0)
    }

    /// Moves keys from the neighbor to the primary, and others back. Returns how many were moved.
    ///
    /// A key that is missing where it was expected is ignored: a primary that was killed has lost it.
    pub(super) fn reshard(&self, random: &mut Random) -> Result<u64> {
        let mut client = self.neighbor.client()?;
        for number in 0..MOVED_KEYS {
            let length = random.between(1, 32 << 10);
            let value = random.bytes(length as usize);
            client.call(&[b"SET".as_slice(), format!("moved:{number}").as_bytes(), &value, b"NX"])?;
        }
        let primary = self.server(Who::Primary);
        let there = self.migrate(&self.neighbor, primary, random)?;
        Ok(there + self.migrate(primary, &self.neighbor, random)?)
    }

    fn migrate(&self, from: &Server, to: &Server, random: &mut Random) -> Result<u64> {
        let mut client = from.client()?;
        client.timeout(MIGRATE_TIME)?;
        let (host, port) = (to.address().ip().to_string(), to.address().port().to_string());
        let mut moved = 0;
        for batch in 0..MOVED_KEYS / KEYS_PER_MOVE {
            // Half of the keys stay where they are.
            if random.one_in(2) {
                continue;
            }
            let keys = (batch * KEYS_PER_MOVE..(batch + 1) * KEYS_PER_MOVE).map(|number| format!("moved:{number}"));
            let head = ["MIGRATE", &host, &port, "", "0", MIGRATE_MILLISECONDS, "REPLACE", "KEYS"];
            let command: Vec<String> = head.into_iter().map(str::to_owned).chain(keys).collect();
            match client.call(&command) {
                Ok(_) => moved += KEYS_PER_MOVE,
                // The other server did not answer in time; both still run.
                Err(remora_lab::Error::Refused { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(moved)
    }
}

/// Length of the longest of the writer's big values: the writer must not fill a journal while a reader is frozen.
const BIG_BYTES: u64 = 1 << 20;

/// Strings that [`Group::fill`] writes, of half a MiB on average: a snapshot of some 30 MB.
const LONG_STRINGS: u64 = 48;

/// Keys that are moved between two primaries, and how many at once.
const MOVED_KEYS: u64 = 400;
const KEYS_PER_MOVE: u64 = 20;

/// The time that `MIGRATE` may take between two bytes.
const MIGRATE_MILLISECONDS: &str = "3000";

/// Time limit for the answer to a `MIGRATE`: one move and its time-out.
const MIGRATE_TIME: Duration = Duration::from_secs(30);
