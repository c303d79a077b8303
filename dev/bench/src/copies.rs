//! Servers of a volume's copies, as processes of their own: the measuring program, started again.

use std::io::{self, BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use remora_lab::{Host, process::Process};
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Volume, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{Copies, Shape};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A server of copies.
#[derive(Debug)]
pub struct CopyServer {
    /// Its process.
    pub process: Process,
    /// Where it listens.
    pub address: Address,
}

/// Where a server runs, and what it shares.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place<'a> {
    /// The host of a test network; `None`: this one.
    pub host: Option<&'a Host>,
    /// Whether it shares no memory with other processes, so that what is not in messages is read over TCP.
    pub is_far: bool,
}

impl CopyServer {
    /// Starts one, and waits until it listens at `address`. Port 0 is any port.
    ///
    /// # Errors
    /// The process cannot be started, or does not listen.
    pub fn start(address: &str, place: Place<'_>) -> Result<CopyServer, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([SERVE_COPY, address, if place.is_far { FAR } else { NEAR }]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(host) = place.host {
            host.enter(&mut command)?;
        }
        let (process, pipes) = Process::start("a copy's server", command)?;
        let stdout = pipes.stdout.ok_or("a copy's server without its standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?; // it ends without a line if it cannot listen
        let address = line.trim().parse().map_err(|_| format!("no server of copies at {address}; it said {line:?}"))?;
        Ok(CopyServer { process, address })
    }
}

/// Is such a server, if this program was started as one: until its standard input ends, and the process with it.
///
/// # Errors
/// It cannot listen.
pub fn be_one_if_asked() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [word, address, distance] = arguments.as_slice() else { return Ok(()) };
    if word != SERVE_COPY {
        return Ok(());
    }
    let near = ServerOptions { memory: MEMORY_BYTES, ..ServerOptions::default() };
    let options = if distance == FAR { ServerOptions { shm: false, lanes: Some(0), ..near } } else { near };
    let server = Server::start(&address.parse()?, &options)?;
    println!("{}", server.address());
    io::stdin().read_to_end(&mut Vec::new())?;
    drop(server);
    std::process::exit(0);
}

/// Makes a new volume of this many blocks on servers, of which `held` must hold a write before it is answered.
///
/// # Errors
/// There is no such volume, or a server refuses its copy.
pub fn new_volume(servers: &[Address], held: usize, blocks: u64) -> Result<Shape, Failure> {
    let copies = Copies::new(servers.len(), held).ok_or("no volume has copies like these")?;
    let shape = Shape::new(new_id()?, blocks, copies).ok_or("no volume has this many blocks")?;
    Volume::create(shape, servers, &ClientOptions::default())?;
    Ok(shape)
}

/// First argument of the server's process; then its address, and [`NEAR`] or [`FAR`].
const SERVE_COPY: &str = "--serve-copy";
const NEAR: &str = "near";
const FAR: &str = "far";

/// For the volumes of all cases, and what is pulled.
const MEMORY_BYTES: u64 = 2 << 30;
