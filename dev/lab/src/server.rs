//! Real servers, one process each: started in a folder of their own on a free loopback port, and ended when dropped.
//!
//! Nothing is mocked: what the lab's tests find is true for Redis 7 and Valkey 9.1 as shipped.

use std::fmt::{self, Write as _};
use std::fs::{self, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};
use std::{io, thread};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::client::{Address, Client};
use crate::net::Host;
use crate::process::{self, Process};
use crate::random::Random;
use crate::scratch;
use crate::{Doing, Error, Result};
use remora_redis::commands::{Access, Begin, Find, Key};
use remora_redis::info::Info;
use remora_redis::resp::Frame;

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

/// Our server module and its arguments, as `MODULE LOAD` and `loadmodule` take them. `REMORA_LAB_LAYOUTS` names a
/// folder with layouts of servers that the module's own list does not have.
///
/// # Errors
/// As for [`module_library`].
pub fn module_words(words: &str) -> Result<Vec<String>> {
    let mut all = vec![module_library()?.display().to_string()];
    all.extend(words.split_whitespace().map(str::to_owned));
    if let Ok(folder) = std::env::var("REMORA_LAB_LAYOUTS") {
        all.extend(["layouts".to_owned(), folder]);
    }
    Ok(all)
}

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

// The configuration of a server, and its start.

/// The settings of a server to start.
#[derive(Clone, Debug)]
pub struct Builder {
    kind: Kind,
    /// In place of the kind's own program.
    program: Option<Program>,
    lines: Vec<String>,
    unix_socket: bool,
    cluster: bool,
    tls: Option<Tls>,
    guarded: bool,
    lab_password: String,
    host: Option<Host>,
    start_time: Duration,
    user: Option<u32>,
}

impl Builder {
    fn new(kind: Kind) -> Builder {
        Builder {
            kind,
            program: None,
            lines: Vec::new(),
            unix_socket: false,
            cluster: false,
            tls: None,
            guarded: false,
            lab_password: String::new(),
            host: None,
            start_time: START_TIME,
            user: None,
        }
    }

    /// Uses this program instead of the kind's own: another version of the same family.
    pub fn program(self, program: &Program) -> Builder {
        Builder { program: Some(program.clone()), ..self }
    }

    /// Adds a line to the configuration file; `value` is written as it is (`""` for the empty value).
    pub fn config(mut self, name: &str, value: impl fmt::Display) -> Builder {
        self.lines.push(format!("{name} {value}"));
        self
    }

    /// Sets the number of databases.
    pub fn databases(self, count: u32) -> Builder {
        self.config("databases", count)
    }

    /// Limits the bytes of data.
    pub fn max_memory(self, bytes: u64) -> Builder {
        self.config("maxmemory", bytes)
    }

    /// Sets the log level: `debug`, `verbose`, `notice` or `warning`.
    pub fn log_level(self, level: &str) -> Builder {
        self.config("loglevel", level)
    }

    /// Sets the default user's password. The lab's own connections then use a separate user.
    pub fn require_pass(mut self, password: &str) -> Builder {
        self.guarded = true;
        self.config("requirepass", password)
    }

    /// Sets the credentials that the server sends to its primary.
    pub fn master_auth(self, user: Option<&str>, password: &str) -> Builder {
        let named = match user {
            Some(user) => self.config("masteruser", user),
            None => self,
        };
        named.config("masterauth", password)
    }

    /// Adds an ACL user with exactly these rules (`~* &* +@all`, `+ping +psync +replconf`, …).
    pub fn user(self, name: &str, password: &str, rules: &str) -> Builder {
        self.config("user", format!("{name} on >{password} {rules}"))
    }

    /// Turns the default user off: every client must log in with a name.
    pub fn without_default_user(mut self) -> Builder {
        self.guarded = true;
        self.config("user", "default off")
    }

    /// Adds a unix socket.
    pub fn unix_socket(mut self) -> Builder {
        self.unix_socket = true;
        self
    }

    /// Adds a TLS port. Clients need no certificate unless `tls-auth-clients` requires one.
    pub fn tls(mut self, files: Tls) -> Builder {
        self.tls = Some(files);
        self
    }

    /// Turns cluster mode on: one node, no slots.
    pub fn cluster(mut self) -> Builder {
        self.cluster = true;
        self
    }

    /// Runs the server on that host of a test network instead of this machine's loopback.
    pub fn on(mut self, host: &Host) -> Builder {
        self.host = Some(host.clone());
        self
    }

    /// Runs the server as the user and group with this number, which needs root rights. The program and the libraries
    /// that it loads must be readable for that user.
    pub fn as_user(mut self, user: u32) -> Builder {
        self.user = Some(user);
        self
    }

    /// Sets how long the server may take until it answers; needed if it first loads a large file.
    pub fn start_time(mut self, time: Duration) -> Builder {
        self.start_time = time;
        self
    }

    /// Loads our module, with these arguments (`""` for none).
    ///
    /// # Errors
    /// [`Error::Missing`] if the library was not built.
    pub fn module(self, words: &str) -> Result<Builder> {
        Ok(self.config("loadmodule", module_words(words)?.join(" ")))
    }

    /// Starts the server and waits until it answers.
    pub fn start(mut self) -> Result<Server> {
        self.lab_password = format!("{:016x}", Random::new(getrandom::u64().unwrap_or_default()).word());
        let mut tries = 1;
        loop {
            match self.try_start() {
                // Another process took the port between the search and the bind.
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
        for owned in self.user.into_iter().flat_map(|_| [folder.path(), &path]) {
            chown(owned, self.user, self.user).doing(|| format!("change the owner of {}", owned.display()))?;
        }
        let process = self.launch(folder.path())?;
        let mut server = Server { plan: self.clone(), folder, process, ports };
        server.wait_until_ready(Instant::now() + self.start_time)?;
        Ok(server)
    }

    fn add_lines(&self, folder: &Path, lines: &str) -> Result<()> {
        let path = folder.join(CONFIG_FILE);
        let doing = || format!("write {}", path.display());
        let mut text = fs::read_to_string(&path).doing(doing)?;
        let _ = writeln!(text, "{lines}"); // a string takes everything
        fs::write(&path, text).doing(doing)
    }

    fn launch(&self, folder: &Path) -> Result<Process> {
        let path = folder.join(LOG_FILE);
        let doing = || format!("open {}", path.display());
        let log = OpenOptions::new().create(true).append(true).open(&path).doing(doing)?;
        let errors = log.try_clone().doing(doing)?;
        let binary = match &self.program {
            Some(program) => program.path().to_owned(),
            None => self.kind.binary()?,
        };
        // A host is entered just before the program starts, which takes root's rights: they are given up after that.
        let user = self.user.map(|user| user.to_string());
        let mut command = match (&self.host, &user) {
            (Some(_), Some(user)) => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid", user, "--regid", user, "--clear-groups"]).arg(&binary);
                command
            }
            _ => Command::new(&binary),
        };
        command.arg(folder.join(CONFIG_FILE)).current_dir(folder).stdin(Stdio::null()).stdout(log).stderr(errors);
        if let Some(host) = &self.host {
            host.enter(&mut command)?;
        }
        if let (Some(user), None) = (self.user, &self.host) {
            command.uid(user).gid(user);
        }
        Process::start(self.kind.to_string(), command).map(|(process, _)| process)
    }

    /// The configuration file. Default lines come first, so that a test's own lines override them.
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
        // Before Redis 7.0 the command could not be refused, and this line is an error.
        if self.program.as_ref().is_none_or(Program::can_refuse_commands) {
            line("enable-debug-command", &"yes");
        }
        // Outside loopback, protected mode would refuse every client; a test network is isolated anyway.
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
        // In a separate namespace every port is free; a port that is free on loopback serves there as well.
        let find_if = |wanted: bool| wanted.then(scratch::free_port).transpose();
        Ok(Ports { plain: scratch::free_port()?, tls: find_if(plan.tls.is_some())?, cluster: find_if(plan.cluster)? })
    }
}

const CONFIG_FILE: &str = "server.conf";

/// The user of the lab's own connections, if the default user has a password or is off.
const LAB_USER: &str = "lab";

/// How long a server may take to answer. An empty one takes 50 ms; on two cores with twenty tests it takes longer.
const START_TIME: Duration = Duration::from_secs(30);

/// How many other ports are tried if a port was taken meanwhile: once is rare already.
const START_TRIES: u32 = 5;

// Program: a server of any version, as a file.

/// A server's program, and what it says of itself.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    kind: Kind,
    /// `Redis`, `Valkey`, or a fork's name.
    family: String,
    version: [u32; 3],
}

impl Program {
    /// Asks the program for its version.
    ///
    /// # Errors
    /// It does not run, or is not a server.
    pub fn at(path: impl Into<PathBuf>) -> Result<Program> {
        let path = path.into();
        let ran = Command::new(&path).arg("--version").output().doing(|| format!("run {}", path.display()))?;
        let said = String::from_utf8_lossy(&ran.stdout).into_owned();
        let Some((family, version)) = parse(&said) else {
            return Err(Error::Garbled(format!("{} --version: {said}", path.display())));
        };
        let kind = if family == "Valkey" { Kind::Valkey9 } else { Kind::Redis7 };
        Ok(Program { path, kind, family, version })
    }

    /// Every server program in a folder and the folders in it, or the program itself, by family and version.
    ///
    /// # Errors
    /// A folder cannot be read, or a program does not run.
    pub fn all(below: &Path) -> Result<Vec<Program>> {
        let mut found = Vec::new();
        if below.is_dir() {
            for entry in std::fs::read_dir(below).doing(|| format!("read {}", below.display()))? {
                let path = entry.doing(|| format!("read {}", below.display()))?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if path.is_dir() {
                    found.extend(Program::all(&path)?);
                } else if name.ends_with("-server") {
                    found.push(Program::at(path)?);
                }
            }
        } else {
            found.push(Program::at(below)?);
        }
        found.sort_by(|one, other| {
            (&one.family, one.version, &one.path).cmp(&(&other.family, other.version, &other.path))
        });
        Ok(found)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of server that it is most like.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its family.
    pub fn family(&self) -> &str {
        &self.family
    }

    /// Its version.
    pub fn version(&self) -> [u32; 3] {
        self.version
    }

    /// Whether it can refuse dangerous commands, and then has to be told to accept them: Redis from 7.0 on.
    pub fn can_refuse_commands(&self) -> bool {
        self.family != "Redis" || self.version >= [7, 0, 0]
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.version;
        write!(f, "{} {major}.{minor}.{patch}", self.family)
    }
}

/// Family and version of `Redis server v=7.0.15 sha=… malloc=…`.
fn parse(said: &str) -> Option<(String, [u32; 3])> {
    // Valkey 7.2 leaves its name out.
    let (family, rest) = match said.strip_prefix("Server v=") {
        Some(rest) => ("Valkey", rest),
        None => said.split_once(" server v=")?,
    };
    let version = rest.split_whitespace().next()?;
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some((family.trim().to_owned(), [numbers.next()??, numbers.next()??, numbers.next()??]))
}

// What a server says of its commands (`COMMAND`), in the form of `remora_redis::commands`.

/// A command or subcommand of a server.
#[derive(Clone, Debug)]
pub struct Described {
    /// Its name, in lower case; that of a subcommand as `xgroup|create`.
    pub name: String,
    /// Number of arguments with the name; negative: at least so many.
    pub arity: i64,
    /// The server's words about it, as `write`.
    pub flags: Vec<String>,
    /// Where its keys are.
    pub keys: Vec<Key>,
}

impl Described {
    /// Whether the server flags it as one that writes.
    pub fn writes(&self) -> bool {
        self.has("write")
    }

    /// Whether the server flags it so.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|known| known == flag)
    }
}

/// The words behind which servers have keys.
const WORDS: [&str; 4] = ["KEYS", "STORE", "STOREDIST", "STREAMS"];

/// Every command of a server, and every subcommand.
///
/// # Errors
/// The server cannot be asked, or answers in a form that is not known.
pub fn of(server: &Server) -> Result<Vec<Described>> {
    let answer = server.client()?.call(&["COMMAND"])?;
    let mut all = Vec::new();
    collect(&answer, &mut all).ok_or_else(|| Error::Garbled("the answer to COMMAND has another form".into()))?;
    all.sort_by(|one: &Described, other| one.name.cmp(&other.name));
    Ok(all)
}

fn collect(list: &Frame, all: &mut Vec<Described>) -> Option<()> {
    for command in list.as_array()? {
        let parts = command.as_array()?;
        let number = |at: usize| parts.get(at).and_then(Frame::as_int);
        let flags: Vec<String> =
            parts.get(2)?.as_array()?.iter().filter_map(Frame::as_str).map(str::to_owned).collect();
        let specifications = parts.get(8).and_then(Frame::as_array);
        let keys = match specifications {
            Some(all) => all.iter().map(key).collect::<Option<_>>()?,
            None => plain(number(3)?, number(4)?, number(5)?, flags.iter().any(|flag| flag == "movablekeys")),
        };
        let name = parts.first()?.as_str()?.to_ascii_lowercase();
        all.push(Described { name, arity: number(1)?, flags, keys });
        if let Some(below) = parts.get(9) {
            collect(below, all)?;
        }
    }
    Some(())
}

/// Of a server before key specifications (Redis 6.2).
fn plain(first: i64, last: i64, step: i64, is_incomplete: bool) -> Vec<Key> {
    let begin = u8::try_from(first).ok().filter(|first| *first > 0);
    let Some(begin) = begin else { return Vec::new() };
    let last = if last < 0 { last } else { last - first };
    let find = Find::Range { last: last as i8, step: step as u8, limit: 0 };
    vec![Key { access: Access::Unsaid, begin: Begin::At(begin), find, is_not_key: false, is_incomplete }]
}

/// A key specification.
fn key(frame: &Frame) -> Option<Key> {
    let flags: Vec<&str> = value(frame, "flags")?.as_array()?.iter().filter_map(Frame::as_str).collect();
    let has = |flag: &str| flags.contains(&flag);
    let access = match () {
        () if has("RO") => Access::Read,
        () if has("RW") => Access::Change,
        () if has("OW") => Access::Overwrite,
        () if has("RM") => Access::Remove,
        () => Access::Unsaid,
    };
    let (begin, at) = (value(frame, "begin_search")?, value(frame, "find_keys")?);
    let (begins, finds) = (value(begin, "spec"), value(at, "spec"));
    let number = |of: Option<&Frame>, name: &str| value(of?, name)?.as_int();
    let begin = match value(begin, "type")?.as_str()? {
        "index" => Begin::At(number(begins, "index")?.try_into().ok()?),
        "keyword" => {
            let word = value(begins?, "keyword")?.as_str()?;
            Begin::Behind(WORDS.iter().find(|known| **known == word)?, number(begins, "startfrom")?.try_into().ok()?)
        }
        _ => Begin::Anywhere,
    };
    let small = |name: &str| number(finds, name).and_then(|number| u8::try_from(number).ok());
    let find = match value(at, "type")?.as_str()? {
        "range" => Find::Range {
            last: number(finds, "lastkey")?.try_into().ok()?,
            step: small("keystep")?,
            limit: small("limit")?,
        },
        "keynum" => Find::Counted { number: small("keynumidx")?, first: small("firstkey")?, step: small("keystep")? },
        _ => Find::Anything,
    };
    Some(Key { access, begin, find, is_not_key: has("not_key"), is_incomplete: has("incomplete") })
}

/// The value of this name in a list of names and values.
fn value<'a>(frame: &'a Frame, wanted: &str) -> Option<&'a Frame> {
    let pairs = frame.as_array()?.chunks_exact(2);
    pairs.into_iter().find(|pair| pair[0].as_str() == Some(wanted)).map(|pair| &pair[1])
}

// Certificates for servers and clients, generated on demand.
//
// Each folder has one authority, which has signed one certificate for servers on this machine and one for clients.

/// A certificate, its key and its authority: PEM files.
#[derive(Clone, Debug)]
pub struct Tls {
    /// The certificate of the authority that signed this one, and the only authority that is trusted.
    pub ca: PathBuf,
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Tls {
    /// Makes a folder as libnbd's `tls-certificates` wants it, with the authority and, if it is wanted, the
    /// certificate. Returns its path.
    pub fn libnbd_folder(&self, folder: &Path, name: &str, with_certificate: bool) -> Result<String> {
        let own = folder.join(name);
        let make = || -> io::Result<()> {
            fs::create_dir(&own)?;
            fs::copy(&self.ca, own.join("ca-cert.pem"))?;
            if with_certificate {
                fs::copy(&self.certificate, own.join("client-cert.pem"))?;
                fs::copy(&self.key, own.join("client-key.pem"))?;
            }
            Ok(())
        };
        make().doing(|| format!("make the folder {}", own.display()))?;
        Ok(own.display().to_string())
    }
}

/// Generates an authority in `folder`, and two certificates signed by it: one for a server on `localhost`, `127.0.0.1`
/// or any of `addresses`, one for a client.
pub fn certificates(folder: &Path, addresses: &[IpAddr]) -> Result<(Tls, Tls)> {
    let authority = Authority::new(folder, "ca")?;
    let mut hosts = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    hosts.extend(addresses.iter().map(IpAddr::to_string));
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    Ok((authority.sign("server", &hosts)?, authority.sign("client", &["client.invalid"])?))
}

/// An authority of its own.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
    /// The authority's certificate: a PEM file.
    pub ca: PathBuf,
}

impl Authority {
    /// Generates one, whose files are in `folder`; `name` is that of its own.
    pub fn new(folder: &Path, name: &str) -> Result<Authority> {
        let make = || -> io::Result<Authority> {
            let mut params = named(&format!("remora lab authority {name}"), &[])?;
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            let issuer = CertifiedIssuer::self_signed(params, new_key()?).map_err(io::Error::other)?;
            let ca = folder.join(format!("{name}.pem"));
            fs::write(&ca, issuer.pem())?;
            Ok(Authority { issuer, folder: folder.to_owned(), ca })
        };
        make().doing(|| format!("make an authority in {}", folder.display()))
    }

    /// Generates a certificate for these host names and addresses, in files of this name.
    pub fn sign(&self, name: &str, hosts: &[&str]) -> Result<Tls> {
        let params = named(name, hosts).doing(|| format!("make the certificate {name}"))?;
        self.sign_params(name, params)
    }

    /// As [`Authority::sign`], for a certificate that was valid until then.
    pub fn sign_until(&self, name: &str, hosts: &[&str], end: SystemTime) -> Result<Tls> {
        let mut params = named(name, hosts).doing(|| format!("make the certificate {name}"))?;
        params.not_before = (end - A_DAY).into();
        params.not_after = end.into();
        self.sign_params(name, params)
    }

    fn sign_params(&self, name: &str, params: CertificateParams) -> Result<Tls> {
        let make = || -> io::Result<Tls> {
            let key = new_key()?;
            let certificate = params.signed_by(&key, &self.issuer).map_err(io::Error::other)?;
            let path = self.folder.join(format!("{name}.pem"));
            fs::write(&path, certificate.pem())?;
            let key_path = self.folder.join(format!("{name}.key"));
            scratch::secret_file(&key_path, &key.serialize_pem()).map_err(io::Error::other)?;
            Ok(Tls { ca: self.ca.clone(), certificate: path, key: key_path })
        };
        make().doing(|| format!("make the certificate {name}"))
    }
}

fn new_key() -> io::Result<KeyPair> {
    KeyPair::generate().map_err(io::Error::other)
}

fn named(name: &str, hosts: &[&str]) -> io::Result<CertificateParams> {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let mut params = CertificateParams::new(hosts).map_err(io::Error::other)?;
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}

const A_DAY: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_its_family_and_version() {
        let said = "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=2a\n";
        assert_eq!(parse(said), Some(("Redis".into(), [7, 0, 15])));
        assert_eq!(parse("Valkey server v=9.1.2 sha=0\n"), Some(("Valkey".into(), [9, 1, 2])));
        assert_eq!(parse("Server v=7.2.7 sha=0\n"), Some(("Valkey".into(), [7, 2, 7])));
        for wrong in ["", "bash 5", "Redis server v=", "Redis server v=7.0", "Redis server v=a.b.c d"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
