//! The arguments of `remora volume`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use remora_volume::client::{Reads, WindowSize, Writes};

use super::{HostPort, MetricsArgs, RdmaEndArgs, SecurityArgs, parse_listen};
use crate::exit::{self, Code};
use crate::units::{Size, parse_duration};

/// The arguments of `remora volume`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct VolumeArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: VolumeAction,
}

/// The subcommands of `remora volume`.
#[derive(Clone, Debug, Subcommand)]
pub enum VolumeAction {
    /// Lend memory of this host to volumes, until stopped. The copies end with it, unless it has a store.
    Serve(ServeArgs),
    /// Make a new volume on these servers, and write what a client must know into a new file.
    Create(CreateArgs),
    /// Show how the copies of a volume stand.
    Status(VolumeStatusArgs),
    /// Have every block of each copy read and checked, beside a writer's work.
    Scrub(ScrubArgs),
    /// Open a volume for writing until all of its copies are whole: copies that lack writes take them from one that has
    /// them. Nothing is served, and no server is replaced by another one.
    Repair(RepairArgs),
    /// Make a volume larger. What it holds stays, and zeros follow. No writer can have it open meanwhile.
    Grow(GrowArgs),
    /// Remove a volume: its copies at all servers, with their stores, and then its file. What it held is lost.
    Remove(RemoveArgs),
    /// Open a volume for writing, and serve it as a block device by NBD, until stopped. No earlier writer writes from
    /// then on; one that is still at work is replaced only with `--take-over`.
    Nbd(NbdArgs),
    /// Make an empty file system in a volume that holds nothing.
    Format(FormatArgs),
    /// Open a volume for writing, and mount its files at a directory, until stopped or unmounted. No earlier writer
    /// writes from then on; one that is still at work is replaced only with `--take-over`. With `--read-only` the
    /// writer goes on, and the files cannot be changed at this mount.
    Mount(MountArgs),
}

/// How a volume is opened for writing.
#[derive(Clone, Debug, Args)]
pub struct WriterArgs {
    /// The volume's file, as `remora volume create` wrote it.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Open the volume although another writer is at work. That one writes no more, and ends. Without this option the
    /// command ends with code 12 if a server has heard another writer within the last 10 seconds.
    #[arg(long)]
    pub take_over: bool,

    /// How long a server may leave a question unanswered before the volume goes on without it.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_copy_timeout)]
    pub copy_timeout: Duration,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub ways: WaysArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaEndArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume format`.
#[derive(Clone, Debug, Args)]
pub struct FormatArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub writer: WriterArgs,

    /// Make it although the volume's first blocks hold something. What the volume held is lost.
    #[arg(long)]
    pub force: bool,
}

/// The arguments of `remora volume mount`.
#[derive(Clone, Debug, Args)]
pub struct MountArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub writer: WriterArgs,

    /// The directory at which the files appear. What is in it is hidden meanwhile.
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,

    /// Mount the files read-only, beside a writer on another host, as many times as wanted. Neither the writer nor,
    /// beyond their memory, the servers take part in a read: `--reads` says how the memory of a server is read. What
    /// the writer has changed is seen about a second later at most.
    #[arg(long, conflicts_with_all = ["take_over", "write_through", "ahead"])]
    pub read_only: bool,

    /// Show all of the volume as one file, `image`. It is for a loop device (`losetup --direct-io=on`) and any file
    /// system of the system on it. The volume must not have files of its own.
    #[arg(long, conflicts_with_all = ["read_only", "write_through", "ahead"])]
    pub image: bool,

    /// Each write is answered when the servers have it. Without this option it is answered when it has its space in the
    /// volume and is on its way, and `fsync` and `close` wait for the servers.
    #[arg(long)]
    pub write_through: bool,

    /// How much of what was written may be on its way to the servers without holding up those who write. `fsync` and
    /// `close` wait for all of it, and its order is kept. 0: each write waits.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", conflicts_with = "write_through")]
    pub ahead: Size,

    /// Take the mount away however the command ends. Without this option it stays if the volume has ended, or if
    /// processes use it, and every use of it fails: a program that is started again must not write into the directory
    /// below. The command, started again, takes the place of such a mount; `umount` removes it.
    #[arg(long)]
    pub unmount_at_end: bool,

    /// Only this user can use the files. Without this option permissions decide, as on a disk.
    #[arg(long)]
    pub private: bool,

    /// The system asks by /dev/fuse. Without this option it asks by io_uring, which is faster, if this host permits it.
    #[arg(long)]
    pub no_ring: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics: MetricsArgs,
}

/// What protects the connections between a client and the servers of a volume.
#[derive(Clone, Debug, Args)]
pub struct VolumeSecurityArgs {
    /// File with the secret that clients and servers share. `remora token new` makes it. A holder can open every volume
    /// of a server.
    #[arg(long, value_name = "FILE", required_unless_present = "cert", help_heading = "Security")]
    pub token_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,
}

/// The arguments of `remora volume serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Where clients and other servers connect.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7480", value_parser = parse_listen)]
    pub listen: SocketAddr,

    /// Memory for copies. It is taken when a volume is made here.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", help_heading = "Memory")]
    pub memory: Size,

    /// Folder in which copies are kept, too: a server that is started again with it has them again. It is made if it is
    /// missing. Each copy takes its size there, and its journal up to a quarter more while it is written: 16 MiB at
    /// least, and usually 192 MiB at most. Without it, copies are in memory only.
    #[arg(long, value_name = "FOLDER", help_heading = "Memory")]
    pub store: Option<PathBuf>,

    /// What all clients together may have under way here, in bytes of writes.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", help_heading = "Memory")]
    pub staging: Size,

    /// The port, at the address of `--listen`, at which clients on other hosts read blocks without asking
    /// (`--reads anywhere`), and other servers take writes along a chain (`nbd --writes chain`); 0 is any port.
    /// What goes over it is not encrypted: unless `--listen` is loopback, it needs `--security none` and
    /// `--plaintext-network`. Without it, they ask.
    #[arg(long, value_name = "PORT", help_heading = "Ways")]
    pub lanes: Option<u16>,

    /// Share no memory with the clients on this host: writers ask for each block, and read-only mounts need another
    /// way.
    #[arg(long, help_heading = "Ways")]
    pub no_shm: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaEndArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics: MetricsArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume create`.
#[derive(Clone, Debug, Args)]
pub struct CreateArgs {
    /// The file to write, which must not exist: identity, size and servers of the volume. It holds no secret. Every
    /// host that shall open the volume needs a copy of it.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Size of the volume, a multiple of 4 KiB. Each server takes that much memory, and 1/256 of it.
    #[arg(long, value_name = "SIZE")]
    pub size: Size,

    /// The servers, one to five: each holds a copy.
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', required = true)]
    pub servers: Vec<HostPort>,

    /// How many copies must hold a write before it is acknowledged. Default: more than half of them.
    #[arg(long, value_name = "N")]
    pub acknowledge: Option<usize>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume status`.
#[derive(Clone, Debug, Args)]
pub struct VolumeStatusArgs {
    /// The volume's file, as `remora volume create` wrote it.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Print one JSON object instead of the table.
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume scrub`.
#[derive(Clone, Debug, Args)]
pub struct ScrubArgs {
    /// The volume's file, as `remora volume create` wrote it.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume repair`.
#[derive(Clone, Debug, Args)]
pub struct RepairArgs {
    /// The volume's file, as `remora volume create` wrote it.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Open the volume although another writer is at work. That one writes no more, and ends; it would have taken the
    /// copies back itself. Without this option the command ends with code 12 if a server has heard another writer
    /// within the last 10 seconds.
    #[arg(long)]
    pub take_over: bool,

    /// How long a server may leave a question unanswered before it is tried again.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_copy_timeout)]
    pub copy_timeout: Duration,

    /// How long no copy may get any further before the command gives up.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub wait: Duration,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume grow`.
#[derive(Clone, Debug, Args)]
pub struct GrowArgs {
    /// The volume's file, as `remora volume create` wrote it. It gets the new size. Each host that has a copy of the
    /// file needs the new one.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// The new size: a multiple of 4096 bytes, and not less than now. A volume does not become smaller.
    #[arg(long, value_name = "SIZE")]
    pub size: Size,

    /// Make the volume larger although a writer is at work. That one writes no more, and ends. Without this option the
    /// command ends with code 12, and changes nothing, if a server has heard a writer within the last 10 seconds.
    #[arg(long)]
    pub take_over: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume remove`.
#[derive(Clone, Debug, Args)]
pub struct RemoveArgs {
    /// The volume's file, as `remora volume create` wrote it. It is removed when no server has a copy any more.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Remove the volume although a writer is at work. That one writes no more, and ends. Without this option the
    /// command ends with code 12, and changes nothing, if a server has heard a writer within the last 10 seconds.
    #[arg(long)]
    pub take_over: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub protection: VolumeSecurityArgs,
}

/// The arguments of `remora volume nbd`.
#[derive(Clone, Debug, Args)]
pub struct NbdArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub writer: WriterArgs,

    /// The socket at which NBD clients connect. Only this user can open it. Default: `remora/NAME.nbd` in
    /// `$XDG_RUNTIME_DIR`, or in /run for root, where NAME is that of the volume's file without its ending.
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    pub socket: Option<PathBuf>,

    /// The address at which NBD clients connect instead. Without TLS it must be loopback, and every process of this
    /// host can then read and write the volume.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = parse_listen)]
    pub listen: Option<SocketAddr>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: NbdTlsArgs,

    /// The name by which NBD clients ask for the device. They find it without a name, too.
    #[arg(long, value_name = "NAME", default_value = "")]
    pub export: String,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics: MetricsArgs,
}

/// TLS for NBD clients.
#[derive(Clone, Debug, Args)]
pub struct NbdTlsArgs {
    /// TLS 1.3 at `--listen`, which may then be any address: the certificate of this end (PEM), then those between it
    /// and its authority. Clients without TLS are refused. All three files are read again on SIGHUP.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "socket",
        requires = "listen",
        requires = "tls_key",
        requires = "tls_ca",
        help_heading = "TLS for NBD clients"
    )]
    pub tls_cert: Option<PathBuf>,

    /// The private key (PEM) of that certificate, which other users may not read.
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = "TLS for NBD clients")]
    pub tls_key: Option<PathBuf>,

    /// The certificates (PEM) of the authorities that sign those of NBD clients: a client needs one.
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = "TLS for NBD clients")]
    pub tls_ca: Option<PathBuf>,
}

/// How blocks get to the servers, and back.
#[derive(Clone, Debug, Args)]
pub struct WaysArgs {
    /// How many writes may be under way at each server. As far as it has room, `adaptive` grows and shrinks with what
    /// is of use, and `fixed:N` is N writes.
    #[arg(long, value_name = "SIZE", default_value = "adaptive", help_heading = "Ways")]
    pub window: WindowSize,

    /// How blocks are read. `asked`: from a server. `here`: in the memory of a server on this host, if one runs here.
    /// `anywhere`: also in the memory of servers on other hosts, by RDMA if both ends have it, or over TCP where the
    /// server has `--lanes`. `far`: only there, for measurements. The last two are not encrypted: with servers on other
    /// hosts they need `--security none` and `--plaintext-network`.
    #[arg(long, value_name = "HOW", default_value = "here", help_heading = "Ways")]
    pub reads: Reads,

    /// How the blocks of writes of 64 KiB and more get to the servers. `inline`: in messages. `here`: servers on this
    /// host take them out of this process's memory. `pulled`: servers on other hosts as well. `chain`: each server
    /// takes them from the one before it, which needs `--lanes` or RDMA. The last two are not encrypted: with servers
    /// on other hosts they need `--security none` and `--plaintext-network`.
    #[arg(long, value_name = "HOW", default_value = "inline", help_heading = "Ways")]
    pub writes: Writes,
}

/// The least `--copy-timeout`: a server that answers sooner is not late, whatever else its host does meanwhile.
const LEAST_COPY_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a server may leave a question unanswered.
fn parse_copy_timeout(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text).map_err(|error| error.to_string())?;
    let is_long = time >= LEAST_COPY_TIMEOUT;
    is_long
        .then_some(time)
        .ok_or_else(|| format!("at least {LEAST_COPY_TIMEOUT:?}: no server answers sooner than that"))
}

const ABOUT: &str = "\
Block devices in the memory of other hosts.

A volume has one to five copies, each in the memory of one server, and one writer at a time. A write is acknowledged when enough copies \
hold it, so none is lost with a server. If the writer's host dies, another one opens the volume: the servers obey the newest writer only.";

fn more() -> String {
    format!(
        "\
Examples:
  Three servers on this host, for a try:
    remora token new token
    for port in 7480 7481 7482; do
      remora volume serve --listen 127.0.0.1:$port --token-file token &
    done
    remora volume create data.volume --size 512MiB --token-file token \\
      --servers 127.0.0.1:7480,127.0.0.1:7481,127.0.0.1:7482
    remora volume nbd data.volume --socket /run/user/0/data.nbd --token-file token &
    nbdinfo nbd+unix:///?socket=/run/user/0/data.nbd
  NBD clients on other hosts, with certificates:
    remora volume nbd data.volume --listen 10.0.0.1:10809 --token-file token \
      --tls-cert server.pem --tls-key server.key --tls-ca ca.pem
  Servers that have their copies again after a power cut:
    remora volume serve --listen 10.0.0.1:7480 --store /var/lib/remora --token-file token
  Servers whose copies are read by RDMA, in a network without strangers:
    remora volume serve --listen 10.0.0.1:7480 --rdma-device mlx5_0 --token-file token --security none --plaintext-network
    remora volume nbd data.volume --reads anywhere --token-file token --security none --plaintext-network
  Files, for this host alone to write, and for other hosts to read:
    remora volume format data.volume --token-file token
    remora volume mount data.volume /srv/data --token-file token
    remora volume mount data.volume /srv/data --read-only --reads anywhere --token-file token \
      --security none --plaintext-network
  Which copies are whole, and how far those are that catch up:
    remora volume status data.volume --token-file token
  Is any block damaged? If one is, and no writer takes the copy back:
    remora volume scrub data.volume --token-file token
    remora volume repair data.volume --token-file token
  More room; zeros follow what is there:
    remora volume grow data.volume --size 1GiB --token-file token

{}",
        exit::help_table(&[
            Code::Usage,
            Code::Refused,
            Code::Interrupted,
            Code::Local,
            Code::Volume,
            Code::Replaced,
            Code::InUse,
            Code::Damaged
        ])
    )
}
