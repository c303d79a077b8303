//! Options: what a replica agent is asked to do. They have units, ranges and defaults, and no words of a command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use remora_base::units::Size;
use remora_conversation::SourceKey;
use remora_delivery::link::LinkTls;
use remora_delivery::payload::LeftOut;
use remora_process::exit::{Patience, RETRY_FOR};
use remora_reader::{ReadOptions, RelayOptions};
use remora_server::sentinel::Sentinels;
use remora_server::{HostPort, Login};

/// The port to which intercepted connections go: next to the source's.
pub const LISTEN_PORT: u16 = 7380;

/// The least memory: a few slots of the default size, so that reading and loading can overlap.
pub const LEAST_MEMORY: Size = Size::mebibytes(16);

/// The default memory.
const MEMORY: Size = Size::mebibytes(256);

/// What the agent of one sync is asked to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// The server that becomes a replica.
    pub server: Login,
    /// Where the source is, and how its memory is read.
    pub read: ReadOptions,
    /// The key that the source must hold. `None`: any.
    pub source_key: Option<SourceKey>,
    /// Whether each connection proves that it leads to the right source.
    pub is_source_proven: bool,
    /// The name in the source's status. `None`: the server's address.
    pub name: Option<String>,
    /// Know where the primary is.
    pub sentinels: Option<Sentinels>,
    /// The addresses at which the source may announce the primary. Without any: see [`crate::preflight`].
    pub expected_primaries: Vec<HostPort>,
    /// Keep sending the stream to the server, and never hand it over.
    pub stay: bool,
    /// Check everything, say what a sync will do, and change nothing.
    pub dry_run: bool,
    /// Convert the snapshot for a server of another family or version.
    pub convert: bool,
    /// What the conversion leaves out and counts, in place of refusing it.
    pub leave_out: Vec<LeftOut>,
    /// Replace the data that the server holds.
    pub replace: bool,
    /// Raise the time of a fail-over at all Sentinels until the sync ends.
    pub extend_failover_timeout: bool,
    /// Have the server write its configuration file when it follows the primary.
    pub rewrite_config: bool,
    /// By which way the server gets the snapshot.
    pub delivery: DeliveryOptions,
    /// In which state a failed sync leaves the server.
    pub on_failure: OnFailure,
    /// Memory for slots: at least [`LEAST_MEMORY`]. Three quarters of it hold slots.
    pub memory: Size,
    /// The folder for received slots, and for the record of what was changed at the server.
    pub state_dir: Option<PathBuf>,
    /// How slots pass between this replica and others.
    pub relay: RelayOptions,
    /// How long slots are served to others when the server has been handed over.
    pub linger: Duration,
    /// Let a module in the server load long strings from shared memory.
    pub module_load: bool,
    /// Let the module load small values by the server's own functions.
    pub fast_keys: bool,
    /// The local address that the server connects to. `None`: loopback, or that of the connection to the server.
    pub listen: Option<IpAddr>,
    /// With which certificate the agent plays a primary.
    pub link_tls: LinkTls,
    /// Print how each condition of an exact replica was checked.
    pub explain: bool,
    /// The file for the summary.
    pub json: Option<PathBuf>,
}

impl Options {
    /// The defaults, for this server and this source.
    pub fn new(server: Login, read: ReadOptions) -> Options {
        Options {
            server,
            read,
            source_key: None,
            is_source_proven: false,
            name: None,
            sentinels: None,
            expected_primaries: Vec::new(),
            stay: false,
            dry_run: false,
            convert: false,
            leave_out: Vec::new(),
            replace: false,
            extend_failover_timeout: false,
            rewrite_config: false,
            delivery: DeliveryOptions::default(),
            on_failure: OnFailure::Empty,
            memory: MEMORY,
            state_dir: None,
            relay: RelayOptions::default(),
            linger: Duration::from_secs(300),
            module_load: true,
            fast_keys: true,
            listen: None,
            link_tls: LinkTls::default(),
            explain: false,
            json: None,
        }
    }

    /// The sync of a server that is told to follow the agent's link.
    pub(crate) fn of_a_sync(&self) -> SyncOptions {
        let told = Told { stay: self.stay, replaces: self.replace, state_dir: self.state_dir.clone() };
        SyncOptions { told, ..self.of_an_intercepted_sync() }
    }

    /// The sync of a server whose own connection to its primary is intercepted.
    pub(crate) fn of_an_intercepted_sync(&self) -> SyncOptions {
        let (source, slots) = ((&self.read, self.source_key, &self.name), (self.memory, &self.relay, self.linger));
        SyncOptions { json: self.json.clone(), explain: self.explain, ..SyncOptions::intercepted(source, slots) }
    }
}

/// By which way a server gets the snapshot, and what that way needs.
#[derive(Clone, Debug)]
pub struct DeliveryOptions {
    /// The way.
    pub way: Delivery,
    /// The command that restarts the server on its RDB file: for `sh -c`. Code 0 means that the server was restarted.
    pub restart_command: Option<String>,
    /// How long that may take.
    pub restart_limit: Duration,
    /// The file that gets a line `replicaof HOST PORT` before the restart.
    pub write_replicaof: Option<PathBuf>,
    /// The port on loopback to which intercepted connections go.
    pub listen_port: u16,
}

impl Default for DeliveryOptions {
    fn default() -> DeliveryOptions {
        DeliveryOptions {
            way: Delivery::Link,
            restart_command: None,
            restart_limit: Duration::from_secs(600),
            write_replicaof: None,
            listen_port: LISTEN_PORT,
        }
    }
}

/// The ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// By interception where the link would be undone, otherwise by the link.
    Auto,
    /// The server follows the agent first.
    Link,
    /// The server is restarted on its RDB file.
    File,
    /// Its own connection to its primary is intercepted.
    Intercept,
}

/// The state in which a failed sync leaves the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// `REPLICAOF NO ONE`, with its data as they are, perhaps incomplete.
    Detached,
    /// `REPLICAOF NO ONE` and `FLUSHALL`, and then `REPLICAOF` its former primary if it had one.
    Empty,
}

/// What the agent that stays beside a server is asked to do.
#[derive(Clone, Debug)]
pub struct AttendOptions {
    /// The server.
    pub server: Login,
    /// Where the first source is, and how memory is read.
    pub read: ReadOptions,
    /// Further sources: one for each primary that the server may follow.
    pub sources: Vec<HostPort>,
    /// The key that the source must hold. `None`: any.
    pub source_key: Option<SourceKey>,
    /// The name in the source's status. `None`: the server's address.
    pub name: Option<String>,
    /// Know the servers that the server may follow.
    pub sentinels: Option<Sentinels>,
    /// With which certificate the agent plays a primary.
    pub link_tls: LinkTls,
    /// Memory for slots: at least [`LEAST_MEMORY`]. It is freed between syncs.
    pub memory: Size,
    /// How slots pass between this replica and others.
    pub relay: RelayOptions,
    /// How long slots are served to others after a sync.
    pub linger: Duration,
    /// How long the agent waits at its start for the server and the Sentinels. `None`: as long as for a source.
    pub wait_for_server: Option<Duration>,
    /// The port on loopback to which intercepted connections go.
    pub listen_port: u16,
    /// The ports at which the server's primaries listen.
    pub primary_ports: Vec<u16>,
    /// Convert copies, and leave this out of them. `None`: convert none.
    pub convert: Option<Vec<LeftOut>>,
}

impl AttendOptions {
    /// How long to wait at the start, and the option that says so.
    pub(crate) fn patience(&self) -> Patience {
        match self.wait_for_server {
            Some(limit) => Patience::new(limit, "--wait-for-server"),
            None => Patience::new(self.read.retry_for, RETRY_FOR),
        }
    }

    /// One sync, from the first source, without a summary.
    pub(crate) fn of_a_sync(&self) -> SyncOptions {
        let (source, slots) = ((&self.read, self.source_key, &self.name), (self.memory, &self.relay, self.linger));
        SyncOptions::intercepted(source, slots)
    }
}

/// What both say of one sync.
#[derive(Clone, Debug)]
pub(crate) struct SyncOptions {
    pub(crate) read: ReadOptions,
    pub(crate) source_key: Option<SourceKey>,
    pub(crate) name: Option<String>,
    pub(crate) memory: Size,
    pub(crate) relay: RelayOptions,
    pub(crate) linger: Duration,
    pub(crate) json: Option<PathBuf>,
    pub(crate) explain: bool,
    pub(crate) told: Told,
}

impl SyncOptions {
    /// The sync of a server whose own connection to its primary is intercepted, without a summary: how its source is
    /// read, with its key and under which name, and what slots get.
    fn intercepted(
        (read, source_key, name): (&ReadOptions, Option<SourceKey>, &Option<String>),
        (memory, relay, linger): (Size, &RelayOptions, Duration),
    ) -> SyncOptions {
        SyncOptions {
            read: read.clone(),
            source_key,
            name: name.clone(),
            memory,
            relay: relay.clone(),
            linger,
            json: None,
            explain: false,
            told: Told::default(),
        }
    }
}

/// What is said of a server that is told to follow the agent's link. The default is for one whose own connection to its
/// primary is intercepted.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) stay: bool,
    /// Whether the data that the server holds may be replaced.
    pub(crate) replaces: bool,
    pub(crate) state_dir: Option<PathBuf>,
}

impl Default for Told {
    fn default() -> Told {
        // The server has asked its primary for a full copy: it replaces its data whatever the agent does.
        Told { stay: false, replaces: true, state_dir: None }
    }
}
