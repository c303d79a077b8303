//! Real servers, one process each: started in a folder of their own on a free loopback port, gone when dropped.
//!
//! Not a mock: whatever the lab's tests find holds for Redis 7 and Valkey 9.1 as they are shipped.

use std::fmt::{self, Write as _};
use std::fs::{self, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use remora_redis::info::Info;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::client::{Address, Client};
use crate::error::{Doing, Error, Result};
use crate::net::Host;
use crate::process::{self, Process};
use crate::random::Random;
use crate::scratch;
use crate::tls::Tls;

/// The servers that the set-up provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Redis 7, the distribution's own package.
    Redis7,
    /// Valkey 9.1, in the project's `.cache/servers`.
    Valkey9,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 2] = [Kind::Redis7, Kind::Valkey9];

    /// Its program. `REMORA_REDIS_SERVER` and `REMORA_VALKEY_SERVER` name another one.
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

    /// Whether its program can speak TLS (the Valkey binary of the set-up was built without).
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
    /// A server of this kind, to be configured and started.
    pub fn builder(kind: Kind) -> Builder {
        Builder::new(kind)
    }

    /// A server of this kind as it comes: no persistence, DEBUG allowed, everything else its default.
    pub fn start(kind: Kind) -> Result<Server> {
        Builder::new(kind).start()
    }

    /// What it is.
    pub fn kind(&self) -> Kind {
        self.plan.kind
    }

    /// The host of a test network that it runs on, if any.
    pub fn host(&self) -> Option<&Host> {
        self.plan.host.as_ref()
    }

    /// Its plain TCP port.
    pub fn port(&self) -> u16 {
        self.ports.plain
    }

    /// Its TLS port, where it was built with [`Builder::tls`].
    pub fn tls_port(&self) -> Option<u16> {
        self.ports.tls
    }

    /// Its address: loopback, or that of the host it was started on.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.plan.bind_address(), self.ports.plain)
    }

    /// `redis://address:port`, without credentials.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address())
    }

    /// `rediss://address:port`, where it was built with [`Builder::tls`].
    pub fn tls_url(&self) -> Option<String> {
        self.ports.tls.map(|port| format!("rediss://{}", SocketAddr::new(self.plan.bind_address(), port)))
    }

    /// Its unix socket, where it was built with [`Builder::unix_socket`].
    pub fn socket(&self) -> Option<PathBuf> {
        self.plan.unix_socket.then(|| self.folder.path().join(SOCKET_FILE))
    }

    /// `unix:///path`, where it was built with [`Builder::unix_socket`].
    pub fn unix_url(&self) -> Option<String> {
        self.socket().map(|path| format!("unix://{}", path.display()))
    }

    /// Its folder: configuration, log, whatever it writes.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// A new connection, authenticated as the lab's own user where the server wants that.
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

    /// Its version, as `redis_version` or `valkey_version` has it.
    pub fn version(&self) -> Result<String> {
        self.fact("valkey_version").or_else(|_| self.fact("redis_version"))
    }

    /// DEBUG DIGEST: 40 hexadecimal digits over everything it holds, except functions and the times of expiry.
    pub fn digest(&self) -> Result<String> {
        self.client()?.text(&["DEBUG", "DIGEST"])
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

    /// Makes it a replica of `primary` by the servers' own replication; does not wait. On another host the primary is
    /// reached by its host's address.
    pub fn replicate(&self, primary: &Server) -> Result<()> {
        let address = primary.address();
        self.client()?.ok(&["REPLICAOF", &address.ip().to_string(), &address.port().to_string()])
    }

    /// Waits until its link to a primary is up.
    pub fn wait_for_link(&self, within: Duration) -> Result<()> {
        let mut client = self.client()?;
        wait_until(&format!("the link of {self} to its primary"), within, || {
            let info = client.info("replication")?;
            let state = info.get("master_link_status").unwrap_or("no primary").to_owned();
            Ok(if state == "up" { Ok(()) } else { Err(state) })
        })
    }

    /// CPU seconds it has spent, its ended fork children included.
    pub fn cpu_seconds(&self) -> Result<f64> {
        self.process.cpu_seconds()
    }

    /// The most memory it has had resident, in bytes.
    pub fn peak_memory(&self) -> Result<u64> {
        process::peak_memory(self.pid()).doing(|| format!("read the memory of {self}"))
    }

    /// Stops it in its tracks (SIGSTOP): it keeps its connections and answers nothing.
    pub fn pause(&mut self) -> Result<()> {
        self.process.signal(Signal::STOP)
    }

    /// Lets it go on after [`Server::pause`].
    pub fn resume(&mut self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// `kill -9`. Its folder stays until it is dropped.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill().map(drop)
    }

    /// Ends it as an operator would (SIGTERM) and waits; it may first wait for its replicas.
    pub fn stop(&mut self, within: Duration) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        self.process.wait(within)?.map(drop).ok_or_else(|| self.too_late("its end after SIGTERM", within))
    }

    /// Kills it and starts it again in the same folder on the same ports, with the configuration file as it then is.
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

    /// All it has logged.
    pub fn log(&self) -> String {
        fs::read(self.folder.path().join(LOG_FILE))
            .map(|log| String::from_utf8_lossy(&log).into_owned())
            .unwrap_or_default()
    }

    /// Waits until it answers PING as the process that we started (another may sit on the port since we picked it).
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

/// Our module for servers, as cargo built it for this very program: where a test's crate has `remora-module` among its dependencies, cargo
/// builds the library beside the test's program; for other programs it lies beside them.
///
/// # Errors
/// [`Error::Missing`] if it was not built.
pub fn module_library() -> Result<PathBuf> {
    let program = std::env::current_exe().doing(|| "find this program's own folder".to_owned())?;
    let folders = program.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join(MODULE_FILE)).find(|path| path.is_file()).ok_or_else(|| Error::Missing {
        what: format!("the module {MODULE_FILE} beside {}", program.display()),
        how: "run `cargo build -p remora-module` with the same profile".into(),
    })
}

const MODULE_FILE: &str = "libremora_module.so";

/// What a server shall be like.
#[derive(Clone, Debug)]
pub struct Builder {
    kind: Kind,
    lines: Vec<String>,
    unix_socket: bool,
    cluster: bool,
    tls: Option<Tls>,
    guarded: bool,
    lab_password: String,
    host: Option<Host>,
    start_time: Duration,
}

impl Builder {
    fn new(kind: Kind) -> Builder {
        Builder {
            kind,
            lines: Vec::new(),
            unix_socket: false,
            cluster: false,
            tls: None,
            guarded: false,
            lab_password: String::new(),
            host: None,
            start_time: START_TIME,
        }
    }

    /// One line of the configuration file; `value` stands in it as it is (`""` for the empty value).
    pub fn config(mut self, name: &str, value: impl fmt::Display) -> Builder {
        self.lines.push(format!("{name} {value}"));
        self
    }

    /// How many databases.
    pub fn databases(self, count: u32) -> Builder {
        self.config("databases", count)
    }

    /// How many bytes of data, at most.
    pub fn max_memory(self, bytes: u64) -> Builder {
        self.config("maxmemory", bytes)
    }

    /// `debug`, `verbose`, `notice` or `warning`.
    pub fn log_level(self, level: &str) -> Builder {
        self.config("loglevel", level)
    }

    /// The default user's password. The lab's own connections use a user of their own from then on.
    pub fn require_pass(mut self, password: &str) -> Builder {
        self.guarded = true;
        self.config("requirepass", password)
    }

    /// What it shall say to its primary.
    pub fn master_auth(self, user: Option<&str>, password: &str) -> Builder {
        let named = match user {
            Some(user) => self.config("masteruser", user),
            None => self,
        };
        named.config("masterauth", password)
    }

    /// An ACL user with exactly these rules (`~* &* +@all`, `+ping +psync +replconf`, …).
    pub fn user(self, name: &str, password: &str, rules: &str) -> Builder {
        self.config("user", format!("{name} on >{password} {rules}"))
    }

    /// Nobody gets in without a name: the default user is off.
    pub fn without_default_user(mut self) -> Builder {
        self.guarded = true;
        self.config("user", "default off")
    }

    /// A unix socket besides the port.
    pub fn unix_socket(mut self) -> Builder {
        self.unix_socket = true;
        self
    }

    /// A TLS port besides the plain one. Clients need no certificate unless `tls-auth-clients` says so.
    pub fn tls(mut self, files: Tls) -> Builder {
        self.tls = Some(files);
        self
    }

    /// Cluster mode: one node, no slots.
    pub fn cluster(mut self) -> Builder {
        self.cluster = true;
        self
    }

    /// On that host of a test network instead of this machine's loopback.
    pub fn on(mut self, host: &Host) -> Builder {
        self.host = Some(host.clone());
        self
    }

    /// How long it may take until it answers; more than the default where it first loads a file.
    pub fn start_time(mut self, time: Duration) -> Builder {
        self.start_time = time;
        self
    }

    /// With our module loaded, with these words after its path (`""` for none).
    ///
    /// # Errors
    /// [`Error::Missing`] if the library was not built.
    pub fn module(self, words: &str) -> Result<Builder> {
        let line = format!("{} {words}", module_library()?.display());
        Ok(self.config("loadmodule", line.trim_end()))
    }

    /// Starts it and waits until it answers.
    pub fn start(mut self) -> Result<Server> {
        self.lab_password = format!("{:016x}", Random::new(getrandom::u64().unwrap_or_default()).word());
        let mut tries = 1;
        loop {
            match self.try_start() {
                // Between finding a free port and binding it somebody else took it.
                Err(Error::Ended { tail, .. }) if tries < START_TRIES && tail.contains("in use") => tries += 1,
                done => return done,
            }
        }
    }

    fn try_start(&self) -> Result<Server> {
        let folder = scratch::folder("server")?;
        let ports = Ports::find(self)?;
        let path = folder.path().join(CONFIG_FILE);
        fs::write(&path, self.configuration(folder.path(), &ports)).doing(|| format!("write {}", path.display()))?;
        let process = self.launch(folder.path())?;
        let mut server = Server { plan: self.clone(), folder, process, ports };
        server.wait_until_ready(Instant::now() + self.start_time)?;
        Ok(server)
    }

    fn launch(&self, folder: &Path) -> Result<Process> {
        let path = folder.join(LOG_FILE);
        let doing = || format!("open {}", path.display());
        let log = OpenOptions::new().create(true).append(true).open(&path).doing(doing)?;
        let errors = log.try_clone().doing(doing)?;
        let binary = self.kind.binary()?;
        let mut command = Command::new(&binary);
        command.arg(folder.join(CONFIG_FILE)).current_dir(folder).stdin(Stdio::null()).stdout(log).stderr(errors);
        if let Some(host) = &self.host {
            host.enter(&mut command)?;
        }
        Process::start(self.kind.to_string(), command).map(|(process, _)| process)
    }

    /// The configuration file: ours first, so that a test's own lines win.
    fn configuration(&self, folder: &Path, ports: &Ports) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &dyn fmt::Display| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name} {value}");
        };
        line("bind", &self.bind_address());
        line("port", &ports.plain);
        line("dir", &folder.display());
        line("daemonize", &"no");
        line("save", &"\"\"");
        line("appendonly", &"no");
        line("enable-debug-command", &"yes");
        // Outside loopback protected mode would refuse everybody; a test network is closed by itself.
        line("protected-mode", &if self.host.is_some() { "no" } else { "yes" });
        if self.unix_socket {
            line("unixsocket", &folder.join(SOCKET_FILE).display());
        }
        if let (Some(files), Some(port)) = (&self.tls, ports.tls) {
            line("tls-port", &port);
            line("tls-ca-cert-file", &files.ca.display());
            line("tls-cert-file", &files.certificate.display());
            line("tls-key-file", &files.key.display());
            line("tls-auth-clients", &"optional");
        }
        if let Some(port) = ports.cluster {
            line("cluster-enabled", &"yes");
            line("cluster-port", &port);
        }
        if self.guarded {
            line("user", &format_args!("{LAB_USER} on >{} ~* &* +@all", self.lab_password));
        }
        for given in &self.lines {
            line(given, &"");
        }
        text
    }

    fn bind_address(&self) -> IpAddr {
        self.host.as_ref().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Host::address)
    }

    fn is_guarded(&self) -> bool {
        self.guarded
    }
}

#[derive(Debug)]
struct Ports {
    plain: u16,
    tls: Option<u16>,
    cluster: Option<u16>,
}

impl Ports {
    fn find(plan: &Builder) -> Result<Ports> {
        // In a namespace of its own every port is free; one free on loopback serves there as well.
        let find_if = |wanted: bool| wanted.then(scratch::free_port).transpose();
        Ok(Ports { plain: scratch::free_port()?, tls: find_if(plan.tls.is_some())?, cluster: find_if(plan.cluster)? })
    }
}

/// Looks again and again until `look` says Ok, or fails with the last state seen. `look` itself may fail for good.
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

/// The project's folder: the workspace that this crate was built in.
pub fn project_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|candidate| candidate.is_file())
}

/// Where `make setup` puts Valkey.
const VALKEY_IN_PROJECT: &str = ".cache/servers/valkey-9.1/valkey-server";

const CONFIG_FILE: &str = "server.conf";
const LOG_FILE: &str = "server.log";
const SOCKET_FILE: &str = "server.sock";

/// The user of the lab's own connections, where the default one is guarded or off.
const LAB_USER: &str = "lab";

/// How long a server may take to answer. An empty one takes 50 ms; a machine with two cores and twenty tests, longer.
const START_TIME: Duration = Duration::from_secs(30);

/// How often another port is tried when ours was taken in between: each time is rare already.
const START_TRIES: u32 = 5;

/// How often a starting server is asked.
const READY_POLL: Duration = Duration::from_millis(10);

/// How often a state is looked at while waited for.
const LOOK_POLL: Duration = Duration::from_millis(20);

/// How many lines of a log a message shows.
const TAIL_LINES: usize = 20;
