//! Real Sentinels that watch a group of real servers.
//!
//! Their times are short, so that a fail-over takes a second or two.

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::client::{Address, Client};
use crate::error::{Doing, Result};
use crate::net::Host;
use crate::process::Process;
use crate::scratch;
use crate::server::{Kind, Server, wait_until};

/// The name of the primary at the Sentinels.
pub const NAME: &str = "mymaster";

/// How many Sentinels agree on a fail-over, of three.
const QUORUM: usize = 2;

/// How long Sentinels may take to find each other and all replicas. It takes some seconds.
const FIND_TIME: Duration = Duration::from_secs(60);

/// Three Sentinels.
#[derive(Debug)]
pub struct Sentinels {
    each: Vec<Sentinel>,
}

#[derive(Debug)]
struct Sentinel {
    folder: TempDir,
    address: SocketAddr,
    host: Option<Host>,
    password: String,
    process: Process,
}

impl Sentinels {
    /// Starts three Sentinels of this kind that watch `primary`, with further lines for their configuration
    /// (`sentinel failover-timeout mymaster 20000`). Returns when each knows the two others and all of `replicas`.
    pub fn start(kind: Kind, primary: &Server, replicas: &[&Server], lines: &[&str]) -> Result<Sentinels> {
        Sentinels::guarded(kind, primary, replicas, lines, "")
    }

    /// Starts one Sentinel alone.
    pub fn one(kind: Kind, primary: &Server, lines: &[&str]) -> Result<Sentinels> {
        Ok(Sentinels { each: vec![Sentinel::start(kind, primary, lines, "")?] })
    }

    /// The same as [`Sentinels::start`], for Sentinels whose default user has this password.
    pub fn guarded(
        kind: Kind,
        primary: &Server,
        replicas: &[&Server],
        lines: &[&str],
        password: &str,
    ) -> Result<Sentinels> {
        let each = (0..3).map(|_| Sentinel::start(kind, primary, lines, password)).collect::<Result<_>>()?;
        let sentinels = Sentinels { each };
        for sentinel in &sentinels.each {
            wait_until("the Sentinels to know each other and the replicas", FIND_TIME, || {
                let info = sentinel.client()?.text(&["INFO", "sentinel"])?;
                let known = format!("slaves={},sentinels=3", replicas.len());
                Ok(if info.contains(&known) { Ok(()) } else { Err(info) })
            })?;
        }
        Ok(sentinels)
    }

    /// The addresses, as `--sentinel` takes them.
    pub fn list(&self) -> String {
        self.each.iter().map(|sentinel| sentinel.address.to_string()).collect::<Vec<_>>().join(",")
    }

    /// The address of the primary, as the Sentinel of this number says.
    pub fn primary(&self, number: usize) -> Result<String> {
        let pair = self.client(number)?.list(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME])?;
        let text = |at: usize| pair.get(at).and_then(|text| text.as_str()).unwrap_or_default().to_owned();
        Ok(format!("{}:{}", text(0), text(1)))
    }

    /// Starts a fail-over, as an operator does.
    pub fn fail_over(&self) -> Result<()> {
        self.client(0)?.ok(&["SENTINEL", "FAILOVER", NAME])
    }

    /// Waits until each Sentinel names another primary than `former`, and returns it.
    pub fn wait_for_another(&self, former: &str, within: Duration) -> Result<String> {
        let mut now = String::new();
        for number in 0..self.each.len() {
            now = wait_until("a fail-over", within, || {
                let now = self.primary(number)?;
                Ok(if now == former { Err(now) } else { Ok(now) })
            })?;
        }
        Ok(now)
    }

    /// A connection to the Sentinel of this number.
    pub fn client(&self, number: usize) -> Result<Client> {
        self.each[number].client()
    }

    /// Kills the Sentinel of this number.
    pub fn kill(&mut self, number: usize) -> Result<()> {
        self.each[number].process.kill().map(drop)
    }

    /// What the Sentinel of this number has logged.
    pub fn log(&self, number: usize) -> String {
        fs::read_to_string(self.each[number].folder.path().join(LOG)).unwrap_or_default()
    }
}

impl Sentinel {
    fn start(kind: Kind, primary: &Server, lines: &[&str], password: &str) -> Result<Sentinel> {
        let folder = scratch::folder("sentinel")?;
        let host = primary.host().cloned();
        let ip = host.as_ref().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Host::address);
        let address = SocketAddr::new(ip, scratch::free_port()?);
        let watched = primary.address();
        let mut text = String::new();
        let own = [
            format!("bind {ip}"),
            format!("port {}", address.port()),
            "protected-mode no".to_owned(),
            format!("sentinel monitor {NAME} {} {} {QUORUM}", watched.ip(), watched.port()),
            format!("sentinel down-after-milliseconds {NAME} 1000"),
        ];
        for line in own.iter().map(String::as_str).chain(lines.iter().copied()) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{line}");
        }
        let path = folder.path().join("sentinel.conf");
        fs::write(&path, text).doing(|| format!("write {}", path.display()))?;
        let log = folder.path().join(LOG);
        let doing = || format!("open {}", log.display());
        let out = OpenOptions::new().create(true).append(true).open(&log).doing(doing)?;
        let errors = out.try_clone().doing(doing)?;
        let mut command = Command::new(kind.binary()?);
        command.arg(&path).arg("--sentinel").current_dir(folder.path()).stdin(Stdio::null()).stdout(out).stderr(errors);
        if let Some(host) = &host {
            host.enter(&mut command)?;
        }
        let (process, _) = Process::start(format!("a Sentinel of {kind}"), command)?;
        let password = password.to_owned();
        let sentinel = Sentinel { folder, address, host, password, process };
        wait_until("a Sentinel to answer", FIND_TIME, || {
            let answer = sentinel.client().and_then(|mut client| client.text(&["PING"]));
            Ok(answer.map_err(|error| error.to_string()))
        })?;
        // They ask the servers every half second instead of every ten.
        let quick = ["SENTINEL", "DEBUG", "info-period", "500", "publish-period", "300", "ask-period", "200"];
        sentinel.client()?.ok(&quick)?;
        Ok(sentinel)
    }

    fn client(&self) -> Result<Client> {
        let address = Address::Tcp(self.address);
        let mut client = match &self.host {
            Some(host) => host.within(move || Client::connect(&address))??,
            None => Client::connect(&address)?,
        };
        if !self.password.is_empty() {
            client.auth(None, &self.password)?;
        }
        Ok(client)
    }
}

const LOG: &str = "sentinel.log";
