//! The table of refusals: what follows from each error reply of a server. Then the errors themselves, and the ACL rules
//! that each task needs.
//!
//! [`TABLE`] has the replies of Redis (6.0 to 8) and Valkey (7.2 to 9) to the commands that Remora sends, from their
//! sources: `server.c`, `networking.c`, `replication.c`, `config.c`, `acl.c`, `cluster*.c` and `sentinel.c`. Each line
//! says whether the cause passes by itself, who can act, and what to say to a person. The first line that fits counts.
//! A reply that no line fits ends the attempt with the server's own words.
//!
//! It is data: nothing here waits or asks. [`ServerError::is_passing`](super::ServerError::is_passing) reads the
//! verdict, and the commands wait within their time limit.

use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, io};

use self::Actor::{Administrator, Itself, Remora, User};
use self::RefusalKind as Kind;
use self::Verdict::{End, TryAgain, Wait};
use remora_base::x509;
use remora_redis::resp::Limits;

/// The kinds of error replies, for code that treats some of them in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// The server requires a password.
    NoAuth,
    /// The password or the user is wrong.
    WrongPass,
    /// The user may not run this command or access these keys.
    NoPerm,
    /// Protected mode: the server accepts connections from its own host only.
    ProtectedMode,
    /// The server is loading its data set.
    Loading,
    /// The server is a replica whose link to its own primary is down.
    NoMasterLink,
    /// The server is a replica and accepts no writes.
    ReadOnly,
    /// The server accepts no writes at present: it cannot save, or has too few replicas.
    NoWrites,
    /// A script, a function or a module blocks the server.
    Busy,
    /// The server has as many clients as it allows.
    TooManyClients,
    /// The server could not start the process that writes a snapshot.
    ForkFailed,
    /// A fail-over is under way, or a cluster or a group of Sentinels does not agree yet.
    InMotion,
    /// The server has reached its maxmemory.
    OutOfMemory,
    /// The server does not know the command or the subcommand.
    Unknown,
    /// The server does not know the option or the setting.
    UnknownOption,
    /// The server's state or settings do not allow the command.
    NotAllowed,
    /// Remora sent what no server accepts.
    OwnMistake,
    /// Any other error.
    Other,
}

/// What a command does after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The server is at work on something. It is asked again within the time limit.
    Wait,
    /// This attempt has failed, and another one may succeed within the time limit.
    TryAgain,
    /// Another attempt fails in the same way.
    End,
}

impl Verdict {
    /// Whether the cause may pass by itself.
    pub fn passes(self) -> bool {
        matches!(self, Verdict::Wait | Verdict::TryAgain)
    }
}

/// Who can change something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// It passes by itself.
    Itself,
    /// The administrator of the server.
    Administrator,
    /// The user of the command, with another option, file or address.
    User,
    /// The authors of Remora.
    Remora,
}

/// One line of the table.
#[derive(Debug)]
pub struct Line {
    /// The reply's code, or, with a blank in it, the beginning of its text.
    pub begins: &'static str,
    /// The commands that are answered so; none: any command.
    pub commands: &'static [&'static str],
    /// The kind by which callers decide.
    pub kind: RefusalKind,
    /// Whether it passes by itself.
    pub verdict: Verdict,
    /// Who can do something about it.
    pub who: Actor,
    /// What to say behind the server's own words.
    pub say: &'static str,
}

impl Line {
    /// Whether it fits this reply to this command.
    fn fits(&self, command: &str, text: &str) -> bool {
        let begins = match self.begins.contains(' ') {
            true => text.get(..self.begins.len()).is_some_and(|head| head.eq_ignore_ascii_case(self.begins)),
            false => text.split(' ').next() == Some(self.begins),
        };
        let name = command.split(' ').next().unwrap_or_default();
        begins && (self.commands.is_empty() || self.commands.iter().any(|known| name.eq_ignore_ascii_case(known)))
    }
}

/// The line for an error reply, without its leading `-`, to `command`.
pub fn line_for(command: &str, text: &str) -> &'static Line {
    TABLE.iter().find(|line| line.fits(command, text)).unwrap_or(&OTHER)
}

/// What to do about an error reply.
pub fn advice(command: &str, text: &str, task: Task) -> String {
    let line = line_for(command, text);
    match line.kind {
        RefusalKind::NoAuth | RefusalKind::WrongPass if task == Task::Sentinel => {
            "check --sentinel-user and --sentinel-password-file".into()
        }
        RefusalKind::NoPerm => format!("{} needs these ACL rules: {}", task.command(), task.rules()),
        _ => match line.who {
            Actor::Itself if line.verdict.passes() => format!("{}; nothing has to be done", line.say),
            Actor::Remora => "this is a bug of remora; please report it, with the server's version".to_owned(),
            _ => line.say.to_owned(),
        },
    }
}

/// What a reply that no line fits is.
static OTHER: Line =
    line("ERR", ANY, RefusalKind::Other, Verdict::End, Actor::Administrator, "see the server's log for more");

const fn line(
    begins: &'static str,
    commands: &'static [&'static str],
    kind: RefusalKind,
    verdict: Verdict,
    who: Actor,
    say: &'static str,
) -> Line {
    Line { begins, commands, kind, verdict, who, say }
}

/// A reply to what no server accepts.
const fn own_mistake(begins: &'static str, commands: &'static [&'static str]) -> Line {
    line(begins, commands, Kind::OwnMistake, End, Remora, "a command that no server accepts")
}

const ANY: &[&str] = &[];

const AUTH: &[&str] = &["AUTH", "HELLO"];

const SYNC: &[&str] = &["PSYNC", "SYNC"];

const CLIENT: &[&str] = &["CLIENT"];

const CONFIG: &[&str] = &["CONFIG"];

const CLUSTER: &[&str] = &["CLUSTER"];

const REPLCONF: &[&str] = &["REPLCONF"];

const REPLICAOF: &[&str] = &["REPLICAOF", "SLAVEOF"];

const SENTINEL: &[&str] = &["SENTINEL"];

const ACL: &[&str] = &["ACL"];

/// All lines, in the order in which they are compared.
#[rustfmt::skip]
pub static TABLE: &[Line] = &[
    // Connections and logins.
    line("ERR max number of clients", ANY, Kind::TooManyClients, TryAgain, Administrator,
        "the server has reached its maxclients: close clients there, or raise maxclients"),
    line("DENIED", ANY, Kind::ProtectedMode, End, Administrator,
        "the server is in protected mode and accepts its own host only: set a password on it, or run this command on its host"),
    line("NOAUTH", ANY, Kind::NoAuth, End, User,
        "the server requires a password: give --password-file (and --user), or set REMORA_PASSWORD"),
    line("ERR operation not permitted", ANY, Kind::NoAuth, End, User,
        "the server requires a password: give --password-file (and --user), or set REMORA_PASSWORD"),
    line("WRONGPASS", ANY, Kind::WrongPass, End, User, "check --user and the password file"),
    line("ERR invalid password", AUTH, Kind::WrongPass, End, User, "check --user and the password file"),
    line("ERR AUTH <password> called", AUTH, Kind::WrongPass, End, User,
        "the server has no password: check --user and the password file, or give none"),
    line("ERR Client sent AUTH", AUTH, Kind::WrongPass, End, User,
        "the server has no password: check --user and the password file, or give none"),
    own_mistake("NOPROTO", ANY),
    line("NOPERM", ANY, Kind::NoPerm, End, Administrator, "the server's user lacks a right: grant it by ACL SETUSER"),

    // States of a server.
    line("LOADING", ANY, Kind::Loading, Wait, Itself, "the server is loading its data set"),
    line("BUSY", ANY, Kind::Busy, Wait, Administrator,
        "a script, a function or a module keeps the server busy: wait for its end, or end it (SCRIPT KILL, FUNCTION KILL)"),
    line("MASTERDOWN", ANY, Kind::NoMasterLink, Wait, Administrator,
        "the server is a replica whose link to its own primary is down, and replica-serve-stale-data is no: repair that link"),
    line("NOMASTERLINK Can't SYNC while failing over", SYNC, Kind::InMotion, Wait, Itself,
        "a fail-over is under way (FAILOVER)"),
    line("NOMASTERLINK", ANY, Kind::NoMasterLink, Wait, Administrator,
        "the server is a replica whose link to its own primary is down: repair that link"),
    line("READONLY", ANY, Kind::ReadOnly, End, User, "the server is a replica and accepts no writes: give its primary"),
    line("MISCONF", ANY, Kind::NoWrites, TryAgain, Administrator,
        "the server cannot save to its disk and so accepts no writes: its log says why"),
    line("NOREPLICAS", ANY, Kind::NoWrites, TryAgain, Administrator,
        "the server has fewer replicas than min-replicas-to-write and so accepts no writes"),
    line("OOM", ANY, Kind::OutOfMemory, End, Administrator,
        "the server has reached its maxmemory: raise it, or store less data"),

    // Snapshots and the stream.
    line("ERR BGSAVE failed, replication can't continue", ANY, Kind::ForkFailed, TryAgain, Administrator,
        "the server could not start the process that writes the snapshot; its log names the cause (\"Can't save in background: \
         fork\"): too little memory (set vm.overcommit_memory=1 there, or raise the memory limit of its container), or a limit of \
         processes (ulimit -u, pids.max)"),
    own_mistake("ERR SYNC and PSYNC are invalid with pending output", SYNC),
    own_mistake("ERR Command is not valid when client is a replica", ANY),
    own_mistake("ERR PSYNC FAILOVER", SYNC),
    own_mistake("ERR Filtered replica requires EOF capability", ANY),
    line("ERR Unrecognized RDB client id", REPLCONF, Kind::InMotion, TryAgain, Itself,
        "the server has given up the snapshot that this stream belongs to"),
    line("ERR Unrecognized REPLCONF option", REPLCONF, Kind::UnknownOption, End, Administrator,
        "the server is too old for this option"),
    own_mistake("ERR Unrecognized version format", REPLCONF),
    own_mistake("ERR REPLCONF ip-address", REPLCONF),
    own_mistake("ERR Missing rdb-filter-only", REPLCONF),
    line("ERR Unsupported rdb-filter-only", REPLCONF, Kind::UnknownOption, End, Administrator,
        "the server is too old for this option"),
    line("ERR REPLICAOF not allowed in cluster mode", REPLICAOF, Kind::NotAllowed, End, User,
        "the server is in cluster mode: use remora cluster sync, remora attend, or --delivery intercept"),
    line("ERR SLAVEOF not allowed in cluster mode", REPLICAOF, Kind::NotAllowed, End, User,
        "the server is in cluster mode: use remora cluster sync, remora attend, or --delivery intercept"),
    line("ERR REPLICAOF not allowed while failing over", REPLICAOF, Kind::InMotion, TryAgain, Itself,
        "a fail-over is under way (FAILOVER)"),
    own_mistake("ERR Invalid master port", REPLICAOF),
    own_mistake("ERR Invalid primary port", REPLICAOF),

    // Settings.
    line("ERR CONFIG SET failed", CONFIG, Kind::NotAllowed, End, Administrator,
        "the server does not accept this value, or protects the setting (enable-protected-configs)"),
    line("ERR Unknown option or number of arguments for CONFIG SET", CONFIG, Kind::UnknownOption, End, Administrator,
        "the server does not know this setting"),
    line("ERR Unsupported CONFIG parameter", CONFIG, Kind::UnknownOption, End, Administrator,
        "the server does not know this setting"),
    line("ERR Invalid argument", CONFIG, Kind::NotAllowed, End, Administrator, "the server does not accept this value"),
    line("ERR The server is running without a config file", CONFIG, Kind::NotAllowed, End, Administrator,
        "start the server with a configuration file, or omit --rewrite-config"),
    line("ERR Rewriting config file", CONFIG, Kind::NotAllowed, End, Administrator,
        "the server cannot write its configuration file: check its rights and its disk"),

    // Users.
    line("ERR User '", ACL, Kind::NotAllowed, End, Administrator, "the server does not have this user"),
    line("ERR Command '", ACL, Kind::Unknown, End, Administrator, "the server does not have this command, or it was renamed"),
    line("ERR Unknown category", ACL, Kind::UnknownOption, End, Administrator, "the server is too old for this question"),
    own_mistake("ERR Error in ACL SETUSER", ACL),
    line("ERR There was an error trying to save the ACLs", ACL, Kind::NotAllowed, End, Administrator,
        "the server cannot write its ACL file: check its rights and its disk"),
    line("ERR This Redis instance is not configured to use an ACL file", ACL, Kind::NotAllowed, End, Administrator,
        "the server has no ACL file"),
    line("ERR This instance is not configured to use an ACL file", ACL, Kind::NotAllowed, End, Administrator,
        "the server has no ACL file"),
    line("ERR No such client", CLIENT, Kind::Other, End, Itself, "the client has gone already"),
    line("ERR No such user", CLIENT, Kind::NotAllowed, End, Administrator, "the server does not have this user"),
    line("ERR Unknown client type", CLIENT, Kind::UnknownOption, End, Administrator, "the server is too old for this question"),
    line("ERR Unrecognized option", CLIENT, Kind::UnknownOption, End, Administrator, "the server is too old for this option"),

    // Clusters.
    line("ERR This instance has cluster support disabled", CLUSTER, Kind::NotAllowed, End, User,
        "the server is not in cluster mode (cluster-enabled no): give a node of the cluster"),
    line("CLUSTERDOWN", ANY, Kind::InMotion, Wait, Administrator,
        "the cluster lacks a slot or a majority: see CLUSTER INFO there"),
    line("TRYAGAIN", ANY, Kind::InMotion, TryAgain, Itself, "slots of the cluster are being moved"),
    line("MOVED", ANY, Kind::NotAllowed, End, User, "the server is a node of a cluster that does not hold these keys"),
    line("ASK", ANY, Kind::InMotion, TryAgain, Itself, "slots of the cluster are being moved"),
    line("CROSSSLOT", ANY, Kind::NotAllowed, End, User, "the server is in cluster mode, and the keys are in several slots"),
    line("REDIRECT", ANY, Kind::NotAllowed, End, User, "the server is a replica: give its primary"),
    line("ERR Unknown node", CLUSTER, Kind::InMotion, TryAgain, Itself, "the node has not yet heard of the other one"),
    line("ERR I don't know about node", CLUSTER, Kind::InMotion, TryAgain, Itself,
        "the node has not yet heard of the other one"),
    line("ERR I'm a replica but my master is unknown to me", CLUSTER, Kind::InMotion, TryAgain, Itself,
        "the node has not yet heard of its primary"),
    line("ERR Master is down or failed", CLUSTER, Kind::InMotion, TryAgain, Itself, "a fail-over is under way"),
    line("ERR Can't replicate myself", CLUSTER, Kind::NotAllowed, End, User, "name another node"),
    line("ERR I can only replicate a master", CLUSTER, Kind::NotAllowed, End, User,
        "the node was demoted meanwhile: run the command again"),
    line("ERR To set a master the node must be empty", CLUSTER, Kind::NotAllowed, End, Administrator,
        "the node holds keys or slots: empty it first"),
    line("ERR CLUSTER RESET can't be called with", CLUSTER, Kind::NotAllowed, End, Administrator,
        "the node is a primary with keys: empty it first"),
    line("ERR You should send CLUSTER FAILOVER to a replica", CLUSTER, Kind::NotAllowed, End, User, "name a replica"),
    line("ERR Invalid node address", CLUSTER, Kind::NotAllowed, End, User,
        "the servers take addresses of numbers only, and ports up to 55535"),
    line("ERR error saving the cluster node config", CLUSTER, Kind::NotAllowed, End, Administrator,
        "the server cannot write its nodes.conf: check its rights and its disk"),

    // Sentinels. A group may be given to a Sentinel while it runs (SENTINEL MONITOR).
    line("ERR No such master", SENTINEL, Kind::InMotion, TryAgain, User,
        "the Sentinel does not know this group: correct --sentinel-name, or give the group to it (SENTINEL MONITOR)"),
    line("ERR No such primary", SENTINEL, Kind::InMotion, TryAgain, User,
        "the Sentinel does not know this group: correct --sentinel-name, or give the group to it (SENTINEL MONITOR)"),
    line("INPROG", SENTINEL, Kind::InMotion, TryAgain, Itself, "a fail-over is under way"),
    line("NOGOODSLAVE", SENTINEL, Kind::InMotion, TryAgain, Administrator, "the group has no replica that could be promoted"),
    line("NOQUORUM", SENTINEL, Kind::InMotion, TryAgain, Administrator, "too few Sentinels reach each other"),
    line("ERR Failed to save config file", SENTINEL, Kind::NotAllowed, End, Administrator,
        "the Sentinel cannot write its configuration file: check its rights and its disk"),
    line("ERR Invalid argument", SENTINEL, Kind::NotAllowed, End, Administrator, "the Sentinel does not accept this value"),

    // Commands that a server does not have.
    line("ERR unknown command", ANY, Kind::Unknown, End, Administrator,
        "the server is too old for this command, or the command was renamed"),
    line("ERR unknown subcommand", ANY, Kind::Unknown, End, Administrator, "the server is too old for this command"),
    line("ERR unknown option", ANY, Kind::UnknownOption, End, Administrator, "the server is too old for this option"),
    line("ERR syntax error", CLIENT, Kind::UnknownOption, End, Administrator, "the server is too old for this option"),
    own_mistake("ERR wrong number of arguments", ANY),
    own_mistake("ERR Protocol error", ANY),
    own_mistake("EXECABORT", ANY),
    line("WRONGTYPE", ANY, Kind::NotAllowed, End, User, "the server holds another kind of value under this key"),
];

// Errors of a server, by who can do something about them.
//
// - [`SetupError`]: an option, or a file that it names, is wrong. It is found before a connection is made.
// - [`ServerError`]: the server cannot be reached, is not a Redis or Valkey server, or refused a command. A refusal
//   has a [`RefusalKind`], so that callers can wait for a loading server and fail at once on a wrong password. What
//   follows from each is in the table of [`refusals`].

/// An option or a file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read.
    #[error("cannot read the {what} {path}: {cause}", path = path.display())]
    File {
        /// What the file is for.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// Users other than the owner can read a file with a secret.
    #[error("other users can read the {what} {path} (mode {mode:03o}): run chmod 600 on it", path = path.display())]
    OpenToAll {
        /// What the file is for.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file has no usable content.
    #[error("the {what} {path} is empty, or holds nothing of that kind", path = path.display())]
    Empty {
        /// What the file is for.
        what: &'static str,
        /// Its path as given.
        path: PathBuf,
    },
    /// There is a user and no password, so no login would take place.
    #[error("the user {user} needs a password: give --password-file or set REMORA_PASSWORD")]
    UserWithoutPassword {
        /// The user as given.
        user: String,
    },
    /// The certificates or keys cannot be used.
    #[error("cannot set up TLS to the server: {0}")]
    Tls(String),
    /// There are TLS options, and the address has no TLS.
    #[error("{option} is given, but {url} does not use TLS: write rediss:// instead of redis://")]
    TlsUnused {
        /// The option as typed.
        option: String,
        /// The address as given.
        url: String,
    },
}

/// The server cannot be reached, is not a Redis or Valkey server, or refused a command.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No connection was established.
    #[error("cannot connect to the server {server}: {cause}; {}", hint(cause))]
    Unreachable {
        /// Its address.
        server: String,
        /// The system's error.
        cause: io::Error,
    },
    /// The TLS handshake failed.
    #[error("TLS with the server {server} failed: {}", x509::with_server(cause, task.tls_prefix()))]
    Tls {
        /// Its address.
        server: String,
        /// What the connection is for.
        task: Task,
        /// The error of rustls.
        cause: io::Error,
    },
    /// The connection broke.
    #[error("the server {server} closed the connection during {command}: {cause}")]
    Lost {
        /// Its address.
        server: String,
        /// The command at that time.
        command: String,
        /// The system's error.
        cause: io::Error,
    },
    /// The server did not answer in time.
    #[error("the server {server} did not answer {command} within {seconds} s: it is overloaded, stopped or not a Redis server", seconds = limit.as_secs())]
    TimedOut {
        /// Its address.
        server: String,
        /// The command at that time.
        command: String,
        /// The time limit.
        limit: Duration,
    },
    /// The answer is not RESP.
    #[error("{server} is not a Redis or Valkey server: {found}")]
    NotRedis {
        /// Its address.
        server: String,
        /// The beginning of the answer.
        found: String,
    },
    /// The answer does not fit the command.
    #[error("the server {server} gave an unexpected answer to {command}: {found}")]
    Unexpected {
        /// Its address.
        server: String,
        /// The command's name.
        command: String,
        /// The answer, shortened.
        found: String,
    },
    /// The server answered with an error.
    #[error("{}", refusal_sentence(server, command, text, *task))]
    Refused {
        /// Its address.
        server: String,
        /// The command's name, never its arguments.
        command: String,
        /// The kind of the error.
        kind: RefusalKind,
        /// The server's text.
        text: String,
        /// What the connection is for.
        task: Task,
    },
}

impl ServerError {
    /// The kind of the refusal, if this is one.
    pub fn refusal(&self) -> Option<RefusalKind> {
        match self {
            Self::Refused { kind, .. } => Some(*kind),
            _ => None,
        }
    }

    /// Whether the same attempt may succeed a little later without anyone changing anything.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { cause, .. } => cause.kind() != io::ErrorKind::PermissionDenied,
            Self::Lost { .. } | Self::TimedOut { .. } => true,
            Self::Refused { command, text, .. } => line_for(command, text).verdict.passes(),
            // The server has closed the connection: it is stopping, or has as many clients as it allows.
            Self::Tls { cause, .. } => matches!(
                cause.kind(),
                io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::BrokenPipe
            ),
            Self::NotRedis { .. } | Self::Unexpected { .. } => false,
        }
    }
}

/// What to check if no connection was established.
fn hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::ConnectionRefused => "check that it is running, and on this port",
        io::ErrorKind::NotFound => "check the path of its socket (`CONFIG GET unixsocket`)",
        io::ErrorKind::PermissionDenied => "check that this user may open the socket (`unixsocketperm`)",
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "check that the host is up and that no firewall blocks the port"
        }
        _ => "check the address",
    }
}

fn refusal_sentence(server: &str, command: &str, text: &str, task: Task) -> String {
    format!("the server {server} refused {command}: {}; {}", Shortened(text.as_bytes()), advice(command, text, task))
}

/// Bytes from outside as text for one line of a message: printable, and shortened.
pub(crate) struct Shortened<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, more) = match self.0.split_at_checked(SHOWN_BYTES) {
            Some((head, rest)) if !rest.is_empty() => (head, "…"),
            _ => (self.0, ""),
        };
        for byte in head {
            match byte {
                b' '..=b'~' => fmt::Write::write_char(f, char::from(*byte))?,
                other => write!(f, "{}", other.escape_ascii())?,
            }
        }
        f.write_str(more)
    }
}

/// The most bytes shown: enough for every error text of the servers.
const SHOWN_BYTES: usize = 200;

// The ACL rules that allow the commands of each task.
//
// The help pages, `docs/reference/acl.md` and the message for `-NOPERM` use this one list.

/// What a connection is for. It decides which ACL rules the message for a refusal names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// `remora source` on the server it copies from.
    Source,
    /// `remora replica` on the server it fills.
    Replica,
    /// `remora attend` on the server that it attends.
    Attend,
    /// `remora verify`, on either server.
    Verify,
    /// `remora load`.
    Load,
    /// `remora ready`, on a server and its primary.
    Ready,
    /// `remora plan`, on the primary.
    Plan,
    /// `remora cluster`, on every node.
    Cluster,
    /// `remora switch`, on both servers.
    Switch,
    /// Any command with `--sentinel`, at the Sentinels.
    Sentinel,
}

impl Task {
    /// All tasks.
    pub const ALL: [Self; 10] = [
        Self::Source,
        Self::Replica,
        Self::Attend,
        Self::Verify,
        Self::Load,
        Self::Ready,
        Self::Plan,
        Self::Cluster,
        Self::Switch,
        Self::Sentinel,
    ];

    /// The command that does the task.
    pub const fn command(self) -> &'static str {
        match self {
            Self::Source => "remora source",
            Self::Replica => "remora replica",
            Self::Attend => "remora attend",
            Self::Verify => "remora verify",
            Self::Load => "remora load",
            Self::Ready => "remora ready",
            Self::Plan => "remora plan",
            Self::Cluster => "remora cluster",
            Self::Switch => "remora switch",
            Self::Sentinel => "--sentinel",
        }
    }

    /// The rules, in the syntax of `ACL SETUSER <user>`. `+select` is needed for every database but 0, so the rules of
    /// commands that take a database have it.
    pub const fn rules(self) -> &'static str {
        match self {
            Self::Source => "+ping +info +replconf +psync +config|get",
            Self::Replica => "+ping +info +replicaof +config|get +config|set +flushall",
            Self::Attend => "+ping +info",
            Self::Verify => "~* +@read +ping +info +select +scan +memory|usage +function|list +debug",
            Self::Load => "~* +@write +ping +info +select",
            Self::Ready => "+ping +info",
            Self::Plan => "+ping +info",
            Self::Cluster => "+ping +info +cluster|info +cluster|nodes",
            Self::Switch => {
                "+ping +info +replicaof +multi +exec +client|pause +client|unpause +client|list +client|kill \
                 +client|setname +client|id +config|get +pubsub|numsub"
            }
            Self::Sentinel => "+ping +sentinel|get-master-addr-by-name +sentinel|replicas +sentinel|master",
        }
    }

    /// Which of the rules are optional, and what happens without them. Empty if all are needed.
    pub const fn optional(self) -> &'static str {
        match self {
            Self::Source => {
                "without +config|get settings that would get in the way are found out only when they do; with the module in the \
                 server: +remora.status +remora.arm +remora.disarm, and +remora.sweep for --module-capture sweep, +module|load for --load-module; beside Valkey 9 in cluster mode: +cluster|getslotmigrations; for --tune-server: +config|set, and +config|rewrite where others write its configuration file; +failover ends a \
                 FAILOVER that waits for ever because only the source is attached"
            }
            Self::Replica => {
                "+flushall is not needed with --on-failure detached; +config|set is not needed where the server has a masterauth, which \
                 our link then asks for; with the module in the server: +remora.status +remora.load +multi +exec \
                 +discard; with --convert: +command; with --delivery intercept and --replace: +client|kill"
            }
            Self::Attend => {
                "without +config|get TLS to the primary is noticed only when the server connects; with --sentinel: +replicaof, for a \
                 server that no Sentinel knows yet; the user of the server's masteruser needs +info on the primary, besides +psync +replconf +ping"
            }
            Self::Verify => {
                "without +debug it reads and compares every value; without +memory|usage it reads each value in pieces"
            }
            Self::Load => "",
            Self::Cluster => {
                "on every node; +cluster|getslotmigrations on Valkey 9; for --write-nodes-conf: +cluster|myshardid where \
                 the server has it; for remora cluster sync: +cluster|meet +cluster|replicate +cluster|reset on the nodes that it \
                 names; for remora cluster migrate: these, what remora verify needs, +config|get +config|set +cluster|failover \
                 +cluster|forget +readonly on all nodes"
            }
            Self::Switch => {
                "on both servers; +multi +exec +client|pause +client|unpause at the old primary only; without +client|list \
                 +client|kill +client|setname +client|id what a switch that was ended has sent may be carried out late; without \
                 +pubsub|numsub it is not known whether Sentinels watch it; for --rewrite-config: +config|rewrite +multi +exec on both"
            }
            Self::Sentinel => "at the Sentinels; +sentinel|set for --extend-failover-timeout",
            Self::Ready => "on a replica's primary too, unless --link-only is given",
            Self::Plan => {
                "without +config|get it is not known how long the primary waits before it forks, and without ~* +randomkey \
                 +memory|usage +dump +strlen +select how much smaller the snapshot is than the data"
            }
        }
    }

    /// What an answer may be. A server may return a value of any length; a Sentinel lists replicas, of which each has
    /// some fifty short fields.
    pub(super) const fn limits(self) -> Limits {
        match self {
            Self::Sentinel => Limits { bulk_bytes: 1024, array_items: 256, depth: 2, line_bytes: 1024 },
            _ => Limits {
                bulk_bytes: Limits::BULK_BYTES,
                array_items: Limits::ARRAY_ITEMS,
                depth: Limits::DEPTH,
                line_bytes: Limits::LINE_BYTES,
            },
        }
    }

    /// What the names of the TLS options begin with, between `--` and `tls-`.
    pub(super) const fn tls_prefix(self) -> &'static str {
        match self {
            Self::Sentinel => "sentinel-",
            _ => "",
        }
    }

    /// A line below the paragraph of another task.
    pub fn help_beside(self) -> String {
        format!("With {}: {}\n  ({})\n", self.command(), self.rules(), self.optional())
    }

    /// The paragraph at the end of a help page.
    pub fn help(self) -> String {
        let mut text = format!(
            "ACL rules that the user needs on the server (ACL SETUSER <user> on ><password> …):\n  {}\n",
            self.rules()
        );
        if !self.optional().is_empty() {
            text.push_str(&format!("  ({})\n", self.optional()));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::super::{Credentials, Server, TlsOptions};
    use super::*;

    /// A whole reply that this line is for.
    fn example(line: &Line) -> String {
        format!("{} and more of the server's words", line.begins)
    }

    fn command(line: &Line) -> &'static str {
        line.commands.first().copied().unwrap_or("INFO")
    }

    #[test]
    fn each_line_is_reached_by_its_own_reply() {
        for line in TABLE {
            let found = line_for(command(line), &example(line));
            assert!(std::ptr::eq(found, line), "{} is taken for {}", line.begins, found.begins);
        }
    }

    #[test]
    fn each_line_says_what_to_do_and_what_passes_needs_nobody_to_change_the_command() {
        for line in TABLE {
            assert!(!line.say.is_empty() && !line.say.ends_with('.'), "{}", line.begins);
            match line.who {
                Actor::Itself => assert!(line.verdict.passes() || line.kind == RefusalKind::Other, "{}", line.begins),
                Actor::Remora => assert_eq!(line.verdict, Verdict::End, "{}", line.begins),
                Actor::User => assert!(line.verdict == Verdict::End || line.commands == SENTINEL, "{}", line.begins),
                Actor::Administrator => {}
            }
        }
    }

    /// A server that refuses one command so, and then grants all. At its maxclients it says so at once, and closes.
    async fn refusing(line: &'static Line) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let mut refusals = 1;
            loop {
                let mut stream = listener.accept().await.unwrap().0;
                if line.kind == RefusalKind::TooManyClients && refusals > 0 {
                    refusals -= 1;
                    stream.write_all(format!("-{}\r\n", example(line)).as_bytes()).await.unwrap();
                    continue;
                }
                let mut received = [0; 1024];
                while let Ok(length @ 1..) = stream.read(&mut received).await {
                    let is_ping = received[..length].ends_with(b"PING\r\n");
                    let answer = match (is_ping, refusals) {
                        (true, _) => "+PONG\r\n".to_owned(),
                        (false, 0) => "+OK\r\n".to_owned(),
                        (false, _) => {
                            refusals -= 1;
                            format!("-{}\r\n", example(line))
                        }
                    };
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            }
        });
        let url = format!("redis://127.0.0.1:{port}").parse().unwrap();
        Server::new(url, Credentials::default(), &TlsOptions::default(), Task::Source).unwrap()
    }

    #[tokio::test]
    async fn each_line_is_played_by_a_server_and_a_command_waits_or_ends_as_it_says() {
        for line in TABLE {
            let server = refusing(line).await;
            let mut attempts = 0;
            let outcome = loop {
                attempts += 1;
                let asked = async { server.connect().await?.command(&[command(line), "x"]).await };
                match asked.await {
                    Err(error) if error.is_passing() => {}
                    outcome => break outcome,
                }
            };
            match line.verdict {
                Verdict::Wait | Verdict::TryAgain => {
                    assert!(outcome.is_ok() && attempts == 2, "{}: {attempts}, {outcome:?}", line.begins);
                }
                Verdict::End => {
                    assert_eq!(attempts, 1, "{}", line.begins);
                    let text = outcome.unwrap_err().to_string();
                    assert!(text.contains(line.begins), "{text}");
                    assert!(text.ends_with(&advice(command(line), &example(line), Task::Source)), "{text}");
                }
            }
        }
    }

    #[test]
    fn a_code_is_compared_as_a_whole_and_a_text_by_its_beginning() {
        assert_eq!(line_for("RESTORE", "BUSYKEY Target key name already exists.").kind, RefusalKind::Other);
        assert_eq!(line_for("INFO", "BUSY Valkey is busy running a script.").kind, RefusalKind::Busy);
        assert_eq!(line_for("PING", "ERR MAX NUMBER OF CLIENTS + cluster").kind, RefusalKind::TooManyClients);
        assert_eq!(line_for("GET", "ERR invalid password").kind, RefusalKind::Other, "not an answer to AUTH");
        assert_eq!(line_for("CONFIG GET", "ERR Unsupported CONFIG parameter: x").kind, RefusalKind::UnknownOption);
        assert_eq!(line_for("", "").kind, RefusalKind::Other);
    }

    #[test]
    fn the_servers_own_words_are_sorted() {
        let table = [
            ("NOAUTH Authentication required.", RefusalKind::NoAuth),
            ("WRONGPASS invalid username-password pair or user is disabled.", RefusalKind::WrongPass),
            ("ERR invalid password", RefusalKind::WrongPass),
            (
                "ERR AUTH <password> called without any password configured for the default user.",
                RefusalKind::WrongPass,
            ),
            ("NOPERM this user has no permissions to run the 'psync' command", RefusalKind::NoPerm),
            ("LOADING Redis is loading the dataset in memory", RefusalKind::Loading),
            ("NOMASTERLINK Can't SYNC while not connected with my master", RefusalKind::NoMasterLink),
            ("READONLY You can't write against a read only replica.", RefusalKind::ReadOnly),
            ("BUSY Redis is busy running a script.", RefusalKind::Busy),
            ("OOM command not allowed when used memory > 'maxmemory'.", RefusalKind::OutOfMemory),
            ("ERR unknown command 'FUNCTION', with args beginning with: ", RefusalKind::Unknown),
            ("ERR wrong number of arguments for 'get' command", RefusalKind::OwnMistake),
            ("ERR value is not an integer or out of range", RefusalKind::Other),
            ("", RefusalKind::Other),
        ];
        for (text, kind) in table {
            assert_eq!(line_for("AUTH", text).kind, kind, "{text}");
        }
    }

    #[test]
    fn a_missing_permission_names_the_rules_of_the_task() {
        let error = ServerError::Refused {
            server: "redis://a:1".into(),
            command: "PSYNC".into(),
            kind: RefusalKind::NoPerm,
            text: "NOPERM no".into(),
            task: Task::Source,
        };
        assert!(error.to_string().contains("+replconf +psync"), "{error}");
    }

    #[test]
    fn foreign_bytes_are_shown_on_one_short_line() {
        assert_eq!(Shortened(b"can't\r\nb\xff").to_string(), "can't\\r\\nb\\xff");
        assert!(Shortened(&[b'x'; 1000]).to_string().ends_with("x…"));
        assert_eq!(Shortened(&[b'x'; SHOWN_BYTES]).to_string().len(), SHOWN_BYTES);
    }

    #[test]
    fn the_manual_lists_the_rules_of_every_task() {
        let manual = include_str!("../../docs/reference/acl.md");
        for task in Task::ALL {
            // A bar in a table cell is escaped there.
            let row = format!("| `{}` | `{}` |", task.command(), task.rules().replace('|', "\\|"));
            assert!(manual.contains(&row), "docs/reference/acl.md lacks {row}");
        }
    }
}
