//! The arguments of the commands on two servers: `remora migrate`, `switch` and `verify`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use remora_replica::LeftOut;

use super::replica::LEFT_OUT;
use super::server::{TlsArgs, UrlParser};
use super::{HostPort, SentinelArgs, one_of};
use crate::exit::{self, Code};
use crate::server::{Server, ServerUrl, SetupError, Task};
use crate::units::{Size, parse_duration};

/// The arguments of `remora migrate`.
#[derive(Clone, Debug, Args)]
#[command(long_about = MIGRATE_ABOUT, after_long_help = migrate_help())]
pub struct MigrateArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ends: EndsArgs,

    /// Replace the data that the new server holds. Without this option a server with keys is refused.
    #[arg(long, help_heading = "What to do")]
    pub replace: bool,

    /// What to leave out where the new server cannot hold it, instead of refusing it (`remora replica --help`).
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_parser = one_of(LEFT_OUT), help_heading = "What to do")]
    pub leave_out: Vec<LeftOut>,

    /// Check both servers, say what differs and what a sync would do, and change nothing.
    #[arg(long, help_heading = "What to do")]
    pub dry_run: bool,

    /// Do not compare the two servers at the end. `remora verify` does it later.
    #[arg(long, help_heading = "What to do")]
    pub no_verify: bool,

    /// A source that runs beside the old primary already. Without it, one is started on this host for the time of the
    /// sync; then all data pass this host.
    #[arg(long, value_name = "HOST:PORT", requires = "token_file", help_heading = "Source")]
    pub source: Option<HostPort>,

    /// File with the secret of that source.
    #[arg(long, value_name = "FILE", requires = "source", help_heading = "Source")]
    pub token_file: Option<PathBuf>,

    /// Memory of the source that is started here: as `--memory` of `remora source`.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", conflicts_with = "source", help_heading = "Resources")]
    pub source_memory: Size,

    /// Memory of the replica agent: as `--memory` of `remora replica`.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", help_heading = "Resources")]
    pub memory: Size,
}

const MIGRATE_ABOUT: &str = "\
Makes a server of another family or version an exact replica, and compares the two.

It says what differs between the two servers, starts a source for the old primary and a replica agent for the new server, which \
converts the snapshot where that is needed, hands the new server over to native replication, and compares all data. The new server \
then follows the old one until remora switch changes their roles, at a moment of your choice. The old primary is not changed, and \
clients notice nothing. What the new server cannot hold is refused before it is touched. Called again, it goes on where it was. Both \
agents also take the options of their sections in the file that --config names, and the replica agent logs as this command is told to.";

fn migrate_help() -> String {
    format!(
        "\
Examples:
  What would happen:
    remora migrate --dry-run --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
  The migration, and the switch:
    remora migrate --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
    remora switch --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
  Large data, with a source beside the old primary (there: remora source …), and this command beside the new server:
    remora migrate --from redis://10.0.0.5:6379 --to redis://127.0.0.1:6379 \\
      --source 10.0.0.5:7379 --token-file token

At the old primary as remora source and remora verify, at the new server as remora replica and remora verify. \
{}
{}
{}
{}",
        Task::Source.help(),
        Task::Replica.help(),
        Task::Verify.help(),
        exit::help_table(&[
            Code::Differs,
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Source,
            Code::SyncFailed,
            Code::Interrupted,
            Code::Local,
            Code::Undecided,
            Code::TakenOver
        ])
    )
}

/// The arguments of `remora switch`.
#[derive(Clone, Debug, Args)]
#[command(long_about = SWITCH_ABOUT, after_long_help = switch_help())]
pub struct SwitchArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ends: EndsArgs,

    /// The new primary as the old one lists it among its replicas (`INFO replication`). Needed if several of them have
    /// its port.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Servers")]
    pub to_address: Option<HostPort>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub sentinel: SentinelArgs,

    /// How long writes may wait at the old primary. If the new one has not come up to it by then, nothing is changed
    /// and writes go on.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration, help_heading = "What to do")]
    pub max_pause: Duration,

    /// A program that leads clients to the new primary: DNS, a proxy, a Service. It is run after the promotion, with
    /// two arguments: the old primary's address and the new one's.
    #[arg(long, value_name = "PROGRAM", help_heading = "What to do")]
    pub hook: Option<PathBuf>,

    /// How long the hook may take. It is killed then.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration, requires = "hook", help_heading = "What to do")]
    pub hook_timeout: Duration,

    /// Close the connections of clients at the old primary once the hook has ended, so that they connect anew. Without
    /// it they stay: they may read there, and writes are refused with -READONLY.
    #[arg(long, help_heading = "What to do")]
    pub close_clients: bool,

    /// Make both servers write their configuration files (CONFIG REWRITE), so that a restart does not undo the switch.
    #[arg(long, help_heading = "What to do")]
    pub rewrite_config: bool,

    /// Check both servers, say what a switch would do, and change nothing.
    #[arg(long, help_heading = "What to do")]
    pub dry_run: bool,

    /// Print the report as one JSON object.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

const SWITCH_ABOUT: &str = "\
Promotes a replica, and makes its primary follow it.

Writes wait at the old primary until the replica has all of them. Then the old primary becomes a replica, and says in the same step \
which writes it holds; the other one is promoted if it holds exactly these. So there are never two primaries, and no acknowledged \
write is lost. The old primary continues at the exact offset, without a full copy: the same command with --from and --to exchanged is \
the way back. Until the promotion, a failure is undone, and writes go on at the old primary. A command that was killed is finished or \
undone by the same command. The families and versions of the two may differ (remora migrate).";

fn switch_help() -> String {
    format!(
        "\
Examples:
  Whether it would work:
    remora switch --dry-run --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
  A switch that tells a proxy:
    remora switch --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379 \\
      --hook /usr/local/bin/move-clients --close-clients
  A switch that the Sentinels of the primary learn of:
    remora switch --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379 \\
      --sentinel 10.0.0.1:26379,10.0.0.2:26379,10.0.0.3:26379 --sentinel-name mymaster
  And back:
    remora switch --from redis://10.0.0.6:6379 --to redis://10.0.0.5:6379

{}
{}",
        Task::Switch.help(),
        exit::help_table(&[
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Interrupted,
            Code::NotSwitched,
            Code::HookFailed
        ])
    )
}

// The options that name the two ends of a move: the server that clients leave, and the one that they come to.

/// `--from`, `--to`, and the login of each.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Servers")]
pub struct EndsArgs {
    /// The old primary: redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub from: ServerUrl,

    /// ACL user on the old primary.
    #[arg(long, value_name = "NAME")]
    pub from_user: Option<String>,

    /// File whose first line is the password on the old primary. Without it, the environment variable REMORA_PASSWORD
    /// is used.
    #[arg(long, value_name = "FILE")]
    pub from_password_file: Option<PathBuf>,

    /// The server that is to take its place.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub to: ServerUrl,

    /// ACL user on that server.
    #[arg(long, value_name = "NAME")]
    pub to_user: Option<String>,

    /// File whose first line is the password on that server. Without it, the environment variable REMORA_PASSWORD is
    /// used.
    #[arg(long, value_name = "FILE")]
    pub to_password_file: Option<PathBuf>,

    /// The TLS options are for each of the two that has a rediss:// address.
    #[command(flatten)]
    pub tls: TlsArgs,
}

impl EndsArgs {
    /// The old primary.
    pub fn open_from(&self, task: Task) -> Result<Server, SetupError> {
        self.tls.open(&self.from, self.from_user.as_deref(), self.from_password_file.as_deref(), task)
    }

    /// The comparison of the two, by `remora verify`. `retry_for`: how long it waits for a server that does not answer.
    pub(crate) fn comparison(&self, retry_for: Duration) -> VerifyArgs {
        let ends = self.clone();
        VerifyArgs {
            primary: ends.from,
            primary_user: ends.from_user,
            primary_password_file: ends.from_password_file,
            replica: ends.to,
            replica_user: ends.to_user,
            replica_password_file: ends.to_password_file,
            tls: ends.tls,
            // A digest would keep the old primary from its clients.
            digest: DigestUse::Never,
            recheck: ROUNDS,
            limit: SHOWN,
            retry_for,
            json: false,
        }
    }

    /// The server that is to take its place.
    pub fn open_to(&self, task: Task) -> Result<Server, SetupError> {
        self.tls.open(&self.to, self.to_user.as_deref(), self.to_password_file.as_deref(), task)
    }
}

/// How often a comparison at the end looks at a key that differs again: as the default of `remora verify`.
const ROUNDS: u32 = 5;

/// Differences that such a comparison lists.
const SHOWN: u32 = 20;

/// The arguments of `remora verify`.
#[derive(Clone, Debug, Args)]
#[command(long_about = VERIFY_ABOUT, after_long_help = verify_help())]
pub struct VerifyArgs {
    /// The server to compare with: redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH.
    #[arg(long, value_name = "URL", value_parser = UrlParser, help_heading = "Servers")]
    pub primary: ServerUrl,

    /// ACL user on the primary.
    #[arg(long, value_name = "NAME", help_heading = "Servers")]
    pub primary_user: Option<String>,

    /// File whose first line is the password on the primary. Without it, the environment variable REMORA_PASSWORD is
    /// used.
    #[arg(long, value_name = "FILE", help_heading = "Servers")]
    pub primary_password_file: Option<PathBuf>,

    /// The server to check.
    #[arg(long, value_name = "URL", value_parser = UrlParser, help_heading = "Servers")]
    pub replica: ServerUrl,

    /// ACL user on the replica.
    #[arg(long, value_name = "NAME", help_heading = "Servers")]
    pub replica_user: Option<String>,

    /// File whose first line is the password on the replica. Without it, the environment variable REMORA_PASSWORD is
    /// used.
    #[arg(long, value_name = "FILE", help_heading = "Servers")]
    pub replica_password_file: Option<PathBuf>,

    /// The TLS options are for each of the two that has a rediss:// address.
    #[command(flatten)]
    pub tls: TlsArgs,

    /// Whether to compare `DEBUG DIGEST` of both servers first, if they allow it. It is fast, but a server answers no
    /// other client while it computes the digest: seconds per gigabyte, or per million elements.
    #[arg(long, value_name = "WHEN", default_value = "auto", help_heading = "Comparison")]
    pub digest: DigestUse,

    /// How often to compare keys and function libraries that differ again, each time after the replica has caught up
    /// with the primary. Those that changed every time are reported as undecided.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Comparison")]
    pub recheck: u32,

    /// How many differences to list. All are counted.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=100_000), help_heading = "Comparison")]
    pub limit: u32,

    /// How long to retry while a server does not answer, loads, is busy or has too many clients, with growing pauses.
    /// The comparison then begins anew. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Servers")]
    pub retry_for: Duration,

    /// Print the report as one JSON object.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// When to use `DEBUG DIGEST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DigestUse {
    /// If both servers allow it.
    Auto,
    /// Never: read and compare every value.
    Never,
}

impl VerifyArgs {
    /// The primary.
    pub fn open_primary(&self) -> Result<Server, SetupError> {
        self.tls.open(&self.primary, self.primary_user.as_deref(), self.primary_password_file.as_deref(), Task::Verify)
    }

    /// The replica.
    pub fn open_replica(&self) -> Result<Server, SetupError> {
        self.tls.open(&self.replica, self.replica_user.as_deref(), self.replica_password_file.as_deref(), Task::Verify)
    }
}

const VERIFY_ABOUT: &str = "\
Compares the data of two servers completely: all databases, every key of every type with its expiry, and the functions.

If both servers allow DEBUG DIGEST and the digests are equal, strings, lists, sets, sorted sets and hashes are the same, and what \
digests do not cover is compared by itself: when keys expire, streams with their groups, consumers, pending entries and counters, \
and the types of modules. That takes a pass over the names of all keys, and reads those values. Otherwise, and where fields of \
hashes expire, every key of both is compared by DUMP; values whose DUMP differs only by version or encoding are compared by content. Clients \
may write to both servers meanwhile: keys that differ are compared again when the replica has caught up. Nothing is changed on \
either server; the memory used does not grow with the data.";

fn verify_help() -> String {
    format!(
        "\
Examples:
  Two servers:
    remora verify --primary redis://10.0.0.5:6379 --replica redis://127.0.0.1:6380
  A busy primary that DEBUG DIGEST must not block, for a script:
    remora verify --digest never --json \\
      --primary redis://10.0.0.5:6379 --replica redis://127.0.0.1:6380
  Different users:
    remora verify --tls-ca ca.pem \\
      --primary rediss://db1:6390 --primary-user check --primary-password-file p1 \\
      --replica redis://127.0.0.1:6380 --replica-user check --replica-password-file p2

{}
{}",
        Task::Verify.help(),
        exit::help_table(&[
            Code::Differs,
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Interrupted,
            Code::Undecided
        ])
    )
}
