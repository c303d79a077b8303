//! The configuration of a server, and its start.

use std::fmt::{self, Write as _};
use std::fs::{self, OpenOptions};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::program::Program;
use super::{Kind, LOG_FILE, SOCKET_FILE, Server, module_library};
use crate::error::{Doing, Error, Result};
use crate::net::Host;
use crate::process::Process;
use crate::random::Random;
use crate::scratch;
use crate::tls::Tls;

/// The settings of a server to start.
#[derive(Clone, Debug)]
pub struct Builder {
    pub(super) kind: Kind,
    /// In place of the kind's own program.
    program: Option<Program>,
    lines: Vec<String>,
    pub(super) unix_socket: bool,
    cluster: bool,
    tls: Option<Tls>,
    guarded: bool,
    pub(super) lab_password: String,
    pub(super) host: Option<Host>,
    pub(super) start_time: Duration,
    user: Option<u32>,
}

impl Builder {
    pub(super) fn new(kind: Kind) -> Builder {
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
        let line = format!("{} {words}", module_library()?.display());
        Ok(self.config("loadmodule", line.trim_end()))
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

    pub(super) fn add_lines(&self, folder: &Path, lines: &str) -> Result<()> {
        let path = folder.join(CONFIG_FILE);
        let doing = || format!("write {}", path.display());
        let mut text = fs::read_to_string(&path).doing(doing)?;
        let _ = writeln!(text, "{lines}"); // a string takes everything
        fs::write(&path, text).doing(doing)
    }

    pub(super) fn launch(&self, folder: &Path) -> Result<Process> {
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

    pub(super) fn bind_address(&self) -> IpAddr {
        self.host.as_ref().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Host::address)
    }

    pub(super) fn is_guarded(&self) -> bool {
        self.guarded
    }
}

#[derive(Debug)]
pub(super) struct Ports {
    pub(super) plain: u16,
    pub(super) tls: Option<u16>,
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
pub(super) const LAB_USER: &str = "lab";

/// How long a server may take to answer. An empty one takes 50 ms; on two cores with twenty tests it takes longer.
const START_TIME: Duration = Duration::from_secs(30);

/// How many other ports are tried if a port was taken meanwhile: once is rare already.
const START_TRIES: u32 = 5;
