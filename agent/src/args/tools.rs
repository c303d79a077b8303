//! The arguments of the commands around the job: `remora load`, `token`, `config`, `module` and `generate`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::Shell;

use super::server::ServerArgs;
use crate::exit::{self, Code};
use crate::server::Task;
use crate::units::{Size, UnitError, parse_duration};

/// The arguments of `remora load`.
#[derive(Clone, Debug, Args)]
#[command(long_about = LOAD_ABOUT, after_long_help = load_help())]
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

const LOAD_ABOUT: &str = "\
Fills a server with test data, pipelined: exactly N keys with exactly SIZE bytes each. The same seed gives the same data. Keys of \
the same names are replaced; no other key is changed.";

fn load_help() -> String {
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

/// The arguments of `remora token`.
#[derive(Clone, Debug, Args)]
#[command(long_about = TOKEN_ABOUT, after_long_help = token_help())]
pub struct TokenCommandArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: TokenAction,
}

/// The subcommands of `remora token`.
#[derive(Clone, Debug, Subcommand)]
pub enum TokenAction {
    /// Write a new random token into a file that only its owner can read.
    New {
        /// The file, which must not exist yet; `-` for stdout.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Write a new key of a source into a file that only its owner can read, and print the public half, which replicas
    /// are given by --source-key.
    Identity {
        /// The file, which must not exist yet.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

const TOKEN_ABOUT: &str = "\
Makes the secret that a source and its replicas share.

The token has 256 random bits from the system, as 64 hexadecimal digits. Copy the file to the other hosts over a channel that you \
trust, such as ssh. The agents refuse a token file that other users can read or change, and a token that is short or repeats few bytes.";

fn token_help() -> String {
    format!(
        "\
Examples:
  remora token new token
  A key by which replicas know their source, though others hold the token too:
    remora token identity source.key
  As a secret of another system:
    remora token new - | kubectl create secret generic remora --from-file=token=/dev/stdin

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local])
    )
}

/// The arguments of `remora config`.
#[derive(Clone, Debug, Args)]
#[command(long_about = CONFIG_ABOUT, after_long_help = config_help())]
pub struct ConfigArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: ConfigAction,
}

/// What to do with a file.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigAction {
    /// Check the options of every command in a file. Nothing is opened or started.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Explain the options of a command that are for rare days, which --help leaves out. The file is their place; the
    /// command line takes them too.
    Rare {
        /// The command, such as `replica`.
        #[arg(value_name = "COMMAND")]
        of: String,
    },
}

const CONFIG_ABOUT: &str = "\
The configuration file of every command: --config FILE, or REMORA_CONFIG.

It is TOML. The options of a command stand in a table with its name, under their long names; those of every command stand \
above. An option may also be in the environment: --token-file is REMORA_TOKEN_FILE. The command line wins over the environment, and the \
environment over the file.";

fn config_help() -> String {
    format!(
        "\
A file:
  log-level = \"info\"

  [source]
  server = \"redis://127.0.0.1:6379\"
  listen = \"10.0.0.5:7379\"
  token-file = [\"/etc/remora/token\"]
  tune-server = true

  [volume.serve]
  memory = \"64GiB\"

Examples:
  remora config check /etc/remora/remora.toml
  remora config rare source
  remora source --config /etc/remora/remora.toml --max-replicas 8

{}",
        exit::help_table(&[Code::Usage])
    )
}

/// The arguments of `remora module`.
#[derive(Clone, Debug, Args)]
#[command(long_about = MODULE_ABOUT, after_long_help = module_help())]
pub struct ModuleArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub question: ModuleQuestion,
}

/// The subcommands of `remora module`.
#[derive(Clone, Debug, Subcommand)]
pub enum ModuleQuestion {
    /// Print the path of the library, for `loadmodule` in a server's configuration, or `MODULE LOAD`.
    Path,
    /// Find out where a build of a server keeps its tables, and keep it for the module, which then loads small values
    /// fast in that build too.
    #[command(long_about = LAYOUT_ABOUT, after_long_help = layout_help())]
    Layout(LayoutArgs),
}

/// The arguments of `remora module layout`.
#[derive(Clone, Debug, Args)]
pub struct LayoutArgs {
    /// The server's program, or a script that becomes it by `exec`.
    #[arg(long, value_name = "PATH", required_unless_present = "pid", conflicts_with = "pid")]
    pub program: Option<PathBuf>,

    /// A running server, for its program. Its data are not looked at, and it does not notice.
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,

    /// The file with the debug information of that program, as distributions offer it, where the program itself does
    /// not name its functions.
    #[arg(long, value_name = "FILE")]
    pub debug_file: Option<PathBuf>,

    /// The folder in which the result is kept. The module looks there, or in the folder that its argument `layouts`
    /// names.
    #[arg(long, value_name = "FOLDER", default_value = remora_layout::folder::DEFAULT)]
    pub layouts: PathBuf,
}

const LAYOUT_ABOUT: &str = "\
Find out where a build of a server keeps its tables, for the module's fast keys.

Remora knows some builds by heart. For another one of a version that it knows, this command starts the program twice by itself, at a \
socket in a folder of its own, fills it with a few thousand keys, and searches its memory for them. The result is kept by the program's \
build id. The module finds it there: a server that has loaded the module already needs no restart. It tries what was found in a forked \
child, and checks the first load, before it relies on it.

What the file says becomes code of the server. The module refuses a file that others than root and the server's user can change, by \
itself or by a folder above it.";

fn layout_help() -> String {
    format!(
        "\
Examples:
  The servers' program of this host:
    remora module layout --program /usr/local/bin/redis-server
  The program of a running server, whatever has become of the file:
    remora module layout --pid \"$(pidof valkey-server)\"
  A program without names, with the file of its package for debugging:
    remora module layout --program /usr/bin/valkey-server --debug-file /usr/lib/debug/.build-id/a5/0d68.debug

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local, Code::Interrupted])
    )
}

const MODULE_ABOUT: &str = "\
Print the path of the module for servers, or prepare it for a build of a server.

A server with libremora_module.so writes its snapshot at a fraction of the cost, and loads one without a socket in between. Without \
the module everything works too, but slower. Remora looks for the library beside this program, and then in ../lib/remora.";

fn module_help() -> String {
    format!(
        "\
Examples:
  In the server's configuration:
    loadmodule /usr/lib/remora/libremora_module.so
  Into a running server that allows it (enable-module-command):
    redis-cli MODULE LOAD \"$(remora module path)\"
  For fast keys in a build that Remora does not know by heart:
    remora module layout --program /usr/local/bin/redis-server

{}",
        exit::help_table(&[Code::Usage, Code::Local])
    )
}

/// The arguments of `remora generate`.
#[derive(Clone, Debug, Args)]
#[command(long_about = "Writes shell completions or man pages, made from the same definitions as the help pages.", after_long_help = generate_help())]
pub struct GenerateArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub what: Generated,
}

/// What to generate.
#[derive(Clone, Debug, Subcommand)]
pub enum Generated {
    /// Print the completions of a shell to stdout.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write one man page per command into a folder, which is created if it does not exist.
    Man {
        /// The folder.
        directory: PathBuf,
    },
}

fn generate_help() -> String {
    format!(
        "\
Examples:
  remora generate completions bash > /etc/bash_completion.d/remora
  remora generate completions zsh > ~/.zfunc/_remora
  remora generate man /usr/local/share/man/man1

{}",
        exit::help_table(&[Code::Usage, Code::Local])
    )
}
