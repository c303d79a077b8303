//! The arguments of `remora load`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::server::ServerArgs;
use crate::{
    exit::{self, Code},
    server::Task,
    units::{Size, UnitError, parse_duration},
};

/// The arguments of `remora load`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct LoadArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    /// Keys to write.
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub keys: u64,

    /// Bytes of content of each key: of the string, or of all members, elements, field values or entries together. At
    /// most 512MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_value_size, help_heading = "Data")]
    pub value_size: Size,

    /// What the keys hold; `mixed` takes the types in turn.
    #[arg(long = "type", value_name = "TYPE", default_value = "string", help_heading = "Data")]
    pub value_type: ValueType,

    /// The same seed gives the same data.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Data")]
    pub seed: u64,

    /// Keys are named PREFIX:0, PREFIX:1 and so on.
    #[arg(long, value_name = "PREFIX", default_value = "key", help_heading = "Data")]
    pub prefix: String,

    /// Database to write to. Default: the one in the address, else 0.
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub db: Option<u32>,

    /// Let every key expire this long after it was written.
    #[arg(long, value_name = "TIME", value_parser = parse_expire, help_heading = "Data")]
    pub expire: Option<Duration>,

    /// Content that cannot be compressed (the default).
    #[arg(long, conflicts_with_all = ["compressible", "json"], help_heading = "Data")]
    pub random: bool,

    /// Content that compresses to about a quarter.
    #[arg(long, help_heading = "Data")]
    pub compressible: bool,

    /// Content that is made of records in JSON, as applications store them.
    #[arg(long, conflicts_with = "compressible", help_heading = "Data")]
    pub json: bool,

    /// How long to retry at the start while the server does not answer, loads, is busy or has too many clients, with
    /// growing pauses. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Server")]
    pub retry_for: Duration,

    /// Commands in flight at once.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = "Data")]
    pub pipeline: u32,
}

/// The type of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[allow(missing_docs)]
pub enum ValueType {
    String,
    List,
    Set,
    Zset,
    Hash,
    Stream,
    Mixed,
}

/// The longest string: the servers' default `proto-max-bulk-len`.
const LARGEST_VALUE: Size = Size::mebibytes(512);

fn parse_value_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    if size.get() == 0 || size > LARGEST_VALUE {
        return Err(format!("a value has 1 byte to {LARGEST_VALUE}"));
    }
    Ok(size)
}

fn parse_expire(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(time) if time.is_zero() => Err("the time must not be 0".into()),
        Ok(time) => Ok(time),
        Err(error) => Err(error.to_string()),
    }
}

const ABOUT: &str = "\
Fills a server with test data, pipelined: exactly N keys with exactly SIZE bytes each. The same seed gives the same data. Keys of \
the same names are replaced; no other key is changed.";

fn more() -> String {
    format!(
        "\
Examples:
  937 MiB in 256 large values:
    remora load --server redis://127.0.0.1:6379 --keys 256 --value-size 3748KiB
  A million small ones of all types that expire tomorrow, in database 3:
    remora load --server redis://127.0.0.1:6379 --keys 1000000 --value-size 100 \\
      --type mixed --db 3 --expire 1d

{}
{}",
        Task::Load.help(),
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Interrupted])
    )
}
