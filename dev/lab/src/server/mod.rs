//! Real servers, one process each: started in a folder of their own on a free loopback port, and ended when dropped.
//!
//! Nothing is mocked: what the lab's tests find is true for Redis 7 and Valkey 9.1 as shipped.

mod builder;
mod program;

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use remora_redis::info::Info;
use rustix::process::Signal;
use tempfile::TempDir;

pub use self::builder::Builder;
pub use self::program::Program;

use self::builder::{LAB_USER, Ports};
use crate::client::{Address, Client};
use crate::error::{Doing, Error, Result};
use crate::net::Host;
use crate::process::{self, Process};

/// The servers that the set-up provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Redis 7, the distribution's own package.
    Redis7,
    /// Valkey 9.1, in the project's `.cache/servers`.
    Valkey9,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 2] = [Kind::Redis7, Kind::Valkey9];

    /// The server program. `REMORA_REDIS_SERVER` and `REMORA_VALKEY_SERVER` name another one.
    pub fn binary(self) -> Result<PathBuf> {
        let (variable, found) = match self {
            Kind::Redis7 => ("REMORA_REDIS_SERVER", in_path("redis-server")),
            Kind::Valkey9 => ("REMORA_VALKEY_SERVER", Some(project_root().join(VALKEY_IN_PROJECT))),
        };
        let named = std::env::var_os(variable).map(PathBuf::from);
        named.or(found).filter(|path| path.is_file()).ok_or_else(|| Error::Missing {
            what: format!("the server program of {self}"),
            how: format!("run `make setup`, or name one by {variable}"),
        })
    }

    /// Whether the program supports TLS (the Valkey binary of the set-up was built without).
    pub fn speaks_tls(self) -> bool {
        self == Kind::Redis7
    }

    /// Whether single fields of a hash can expire.
    pub fn expires_hash_fields(self) -> bool {
        self == Kind::Valkey9
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Redis7 => "Redis 7",
            Kind::Valkey9 => "Valkey 9.1",
        })
    }
}

/// A running server. Dropping it kills the process and removes its folder.
#[derive(Debug)]
pub struct Server {
    plan: Builder,
    folder: TempDir,
    process: Process,
    ports: Ports,
}

impl Server {
    /// A builder for a server of this kind.
    pub fn builder(kind: Kind) -> Builder {
        Builder::new(kind)
    }

    /// Starts a server of this kind with default settings, except: no persistence, DEBUG allowed.
    pub fn start(kind: Kind) -> Result<Server> {
        Builder::new(kind).start()
    }

    /// The kind of server.
    pub fn kind(&self) -> Kind {
        self.plan.kind
    }

    /// The host of a test network on which the server runs, if any.
    pub fn host(&self) -> Option<&Host> {
        self.plan.host.as_ref()
    }

    /// The plain TCP port.
    pub fn port(&self) -> u16 {
        self.ports.plain
    }

    /// The TLS port, if the server was built with [`Builder::tls`].
    pub fn tls_port(&self) -> Option<u16> {
        self.ports.tls
    }

    /// The address: loopback, or that of its host.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.plan.bind_address(), self.ports.plain)
    }

    /// `redis://address:port`, without credentials.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address())
    }

    /// `rediss://address:port`, if the server was built with [`Builder::tls`].
    pub fn tls_url(&self) -> Option<String> {
        self.ports.tls.map(|port| format!("rediss://{}", SocketAddr::new(self.plan.bind_address(), port)))
    }

    /// The unix socket, if the server was built with [`Builder::unix_socket`].
    pub fn socket(&self) -> Option<PathBuf> {
        self.plan.unix_socket.then(|| self.folder.path().join(SOCKET_FILE))
    }

    /// `unix:///path`, if the server was built with [`Builder::unix_socket`].
    pub fn unix_url(&self) -> Option<String> {
        self.socket().map(|path| format!("unix://{}", path.display()))
    }

    /// The folder of the configuration, the log, and everything that the server writes.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// A new connection, authenticated as the lab's own user if the server requires that.
    pub fn client(&self) -> Result<Client> {
        let address = Address::Tcp(self.address());
        let mut client = match &self.plan.host {
            Some(host) => host.within(move || Client::connect(&address))??,
            None => Client::connect(&address)?,
        };
        if self.plan.is_guarded() {
            client.auth(Some(LAB_USER), &self.plan.lab_password)?;
        }
        Ok(client)
    }

    /// INFO of one section.
    pub fn info(&self, section: &str) -> Result<Info> {
        self.client()?.info(section)
    }

    /// One line of INFO, whatever its section.
    pub fn fact(&self, name: &str) -> Result<String> {
        let info = self.info("everything")?;
        info.get(name).map(str::to_owned).ok_or_else(|| Error::Unexpected {
            command: "INFO everything".into(),
            reply: format!("no line {name}"),
            wanted: "INFO with it",
        })
    }

    /// The version, as `redis_version` or `valkey_version` reports it.
    pub fn version(&self) -> Result<String> {
        self.fact("valkey_version").or_else(|_| self.fact("redis_version"))
    }

    /// A text that is equal if all data are, except functions and times of expiry: DEBUG DIGEST, and a number for what
    /// it says nothing of (streams' groups, pending entries and counters, the values of modules' types).
    pub fn digest(&self) -> Result<String> {
        crate::beyond_digest::whole_digest(&mut self.client()?)
    }

    /// CONFIG SET of one parameter.
    pub fn configure(&self, name: &str, value: &str) -> Result<()> {
        self.client()?.ok(&["CONFIG", "SET", name, value])
    }

    /// CONFIG GET of one parameter.
    pub fn configured(&self, name: &str) -> Result<String> {
        let pair = self.client()?.list(&["CONFIG", "GET", name])?;
        Ok(pair.get(1).and_then(|value| value.as_str()).unwrap_or_default().to_owned())
    }

    /// Makes the server a replica of `primary` by the servers' own replication, and does not wait. A primary on another
    /// host is addressed by its host's address.
    pub fn replicate(&self, primary: &Server) -> Result<()> {
        let address = primary.address();
        self.client()?.ok(&["REPLICAOF", &address.ip().to_string(), &address.port().to_string()])
    }

    /// Waits until the server's link to a primary is up.
    pub fn wait_for_link(&self, within: Duration) -> Result<()> {
        let mut client = self.client()?;
        wait_until(&format!("the link of {self} to its primary"), within, || {
            let info = client.info("replication")?;
            let state = info.get("master_link_status").unwrap_or("no primary").to_owned();
            Ok(if state == "up" { Ok(()) } else { Err(state) })
        })
    }

    /// CPU seconds used, including ended fork children.
    pub fn cpu_seconds(&self) -> Result<f64> {
        self.process.cpu_seconds()
    }

    /// Peak resident memory, in bytes.
    pub fn peak_memory(&self) -> Result<u64> {
        process::peak_memory(self.pid()).doing(|| format!("read the memory of {self}"))
    }

    /// Stops the process with SIGSTOP: it keeps its connections and answers nothing.
    pub fn pause(&mut self) -> Result<()> {
        self.process.signal(Signal::STOP)
    }

    /// Continues the process after [`Server::pause`].
    pub fn resume(&mut self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// Kills the process with SIGKILL. Its folder stays until the server is dropped.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill().map(drop)
    }

    /// How the server ended, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.process.ended()
    }

    /// Ends the server as an operator would (SIGTERM) and waits. The server may first wait for its replicas.
    pub fn stop(&mut self, within: Duration) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        self.process.wait(within)?.map(drop).ok_or_else(|| self.too_late("its end after SIGTERM", within))
    }

    /// Adds lines to the configuration file, for the next start.
    pub fn configure_file(&self, lines: &str) -> Result<()> {
        self.plan.add_lines(self.folder.path(), lines)
    }

    /// Kills the server and starts it again in the same folder, on the same ports, with the configuration file as it is
    /// then.
    pub fn restart(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process = self.plan.launch(self.folder.path())?;
        let deadline = Instant::now() + self.plan.start_time;
        self.wait_until_ready(deadline)
    }

    /// Shuts the server down with its data saved (`SHUTDOWN SAVE`), and starts it again on these data, in the same
    /// folder on the same ports.
    ///
    /// Uses `NOW`, as the server would otherwise wait up to `shutdown-timeout` for replicas that have not acknowledged
    /// everything.
    pub fn restart_saved(&mut self, within: Duration) -> Result<()> {
        // The server closes the connection instead of answering; if it answers with an error, it keeps running.
        let refused = self.client()?.call(&["SHUTDOWN", "SAVE", "NOW"]).ok();
        if self.process.wait(within)?.is_none() {
            return Err(self.too_late(&format!("its end after SHUTDOWN SAVE (answer: {refused:?})"), within));
        }
        self.process = self.plan.launch(self.folder.path())?;
        let deadline = Instant::now() + self.plan.start_time;
        self.wait_until_ready(deadline)
    }

    /// Everything in the server's log.
    pub fn log(&self) -> String {
        fs::read(self.folder.path().join(LOG_FILE))
            .map(|log| String::from_utf8_lossy(&log).into_owned())
            .unwrap_or_default()
    }

    /// Waits until this process answers PING (another process may have taken the port meanwhile).
    fn wait_until_ready(&mut self, deadline: Instant) -> Result<()> {
        loop {
            if let Some(status) = self.process.ended()? {
                return Err(Error::Ended {
                    who: self.process.who(),
                    status: process::in_words(status),
                    tail: self.tail(),
                });
            }
            if self.answers() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self.too_late("its first PONG", self.plan.start_time));
            }
            thread::sleep(READY_POLL);
        }
    }

    fn answers(&self) -> bool {
        let Ok(mut client) = self.client() else { return false };
        client.text(&["PING"]).is_ok_and(|pong| pong == "PONG")
            && client.info("server").is_ok_and(|info| info.number::<u32>("process_id") == Some(self.pid()))
    }

    fn too_late(&self, what: &str, waited: Duration) -> Error {
        Error::TooLate { what: format!("{what} of {}", self.process.who()), waited, tail: self.tail() }
    }

    fn tail(&self) -> String {
        tail_of(&self.log(), TAIL_LINES)
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.kind(), self.address())
    }
}

/// The path of our server module, as cargo built it for this program: if the test's crate has `remora-module` among its
/// dependencies, cargo builds the library beside the test's program, in the folder `deps` below that of other programs.
///
/// # Errors
/// [`Error::Missing`] if it was not built.
pub fn module_library() -> Result<PathBuf> {
    let program = std::env::current_exe().doing(|| "find this program's own folder".to_owned())?;
    let folders = program.ancestors().skip(1).take(2);
    let mut places = folders.flat_map(|folder| [folder.join(MODULE_FILE), folder.join("deps").join(MODULE_FILE)]);
    places.find(|path| path.is_file()).ok_or_else(|| Error::Missing {
        what: format!("the module {MODULE_FILE} beside {}", program.display()),
        how: "run `cargo build -p remora-module` with the same profile".into(),
    })
}

const MODULE_FILE: &str = "libremora_module.so";

/// Calls `look` again and again until it returns Ok, or fails with the last state seen. `look` itself can fail for
/// good.
pub fn wait_until<T>(what: &str, within: Duration, mut look: impl FnMut() -> Result<Result<T, String>>) -> Result<T> {
    let start = Instant::now();
    loop {
        let state = match look()? {
            Ok(done) => return Ok(done),
            Err(state) => state,
        };
        if start.elapsed() >= within {
            return Err(Error::TooLate { what: what.into(), waited: within, tail: state });
        }
        thread::sleep(LOOK_POLL);
    }
}

/// The last lines of a text.
pub(crate) fn tail_of(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The project's folder: the workspace in which this crate was built.
pub fn project_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map(Path::to_owned).unwrap_or_default()
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|candidate| candidate.is_file())
}

/// Where `make setup` puts Valkey.
const VALKEY_IN_PROJECT: &str = ".cache/servers/valkey-9.1/valkey-server";

const LOG_FILE: &str = "server.log";
const SOCKET_FILE: &str = "server.sock";

/// Interval between two PINGs to a starting server.
const READY_POLL: Duration = Duration::from_millis(10);

/// Interval between two looks at a state.
const LOOK_POLL: Duration = Duration::from_millis(20);

/// Number of log lines in a message.
const TAIL_LINES: usize = 20;
