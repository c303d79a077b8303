//! The arguments of `remora verify`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::server::{TlsArgs, UrlParser};
use crate::{
    exit::{self, Code},
    server::{Server, ServerUrl, SetupError, Task},
    units::parse_duration,
};

/// The arguments of `remora verify`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
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

const ABOUT: &str = "\
Compares the data of two servers completely: all databases, every key of every type with its expiry, and the functions.

If both servers allow DEBUG DIGEST and the digests are equal, strings, lists, sets, sorted sets and hashes are the same, and what \
digests do not cover is compared by itself: when keys expire, streams with their groups, consumers, pending entries and counters, \
and the types of modules. That takes a pass over the names of all keys, and reads those values. Otherwise, and where fields of \
hashes expire, every key of both is compared by DUMP; values whose DUMP differs only by version or encoding are compared by content. Clients \
may write to both servers meanwhile: keys that differ are compared again when the replica has caught up. Nothing is changed on \
either server; the memory used does not grow with the data.";

fn more() -> String {
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
