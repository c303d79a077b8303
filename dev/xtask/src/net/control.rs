//! One line to the process that holds the hosts, and its answer. Both are JSON, over an abstract unix socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use remora_bench::sync::Result;
use serde::{Deserialize, Serialize};

/// A command to that process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Request {
    Hosts,
    Cut(String),
    Heal(String),
    /// Bits per second; `None` for no limit.
    Slow(String, Option<u64>),
    /// Percentage.
    Lossy(String, f64),
    /// Asks for the path of the host's network namespace.
    Where(String),
    Down,
}

/// The answer: text for the user, or the path that [`Request::Where`] asks for.
pub(super) type Answer = std::result::Result<String, String>;

/// Sends a command and waits for the answer.
pub(super) fn ask(request: &Request) -> Result<String> {
    let missing = |error| format!("no test network is running here ({error}); start one with `xtask net up`, as root");
    let mut line = UnixStream::connect_addr(&name()?).map_err(missing)?;
    line.set_read_timeout(Some(ANSWER_TIME))?;
    writeln!(line, "{}", serde_json::to_string(request)?)?;
    let mut answer = String::new();
    line.read_to_string(&mut answer).map_err(|error| {
        format!("no answer within {ANSWER_TIME:?} ({error}): the network may still be starting; the command may still be executed")
    })?;
    let answer: Answer =
        serde_json::from_str(&answer).map_err(|error| format!("invalid answer {answer:?}: {error}"))?;
    Ok(answer?)
}

/// Runs a command on the host, with this process's input and output.
pub(super) fn run_there(host: &str, command: &[String]) -> Result<()> {
    let path = ask(&Request::Where(host.into()))?;
    let status = Command::new("nsenter").arg(format!("--net={path}")).arg("--").args(command).status();
    let status = status.map_err(|error| format!("the program nsenter (package util-linux): {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{} on {host}: {status}", command.join(" ")).into()) }
}

/// Where commands are accepted.
pub(super) struct CommandListener(UnixListener);

impl CommandListener {
    /// Fails if a test network is already running on this machine.
    pub(super) fn open() -> Result<CommandListener> {
        let taken = |error| {
            format!("cannot accept commands ({error}): is another `xtask net up` running? `xtask net down` ends it")
        };
        let listener = UnixListener::bind_addr(&name()?).map_err(taken)?;
        listener.set_nonblocking(true)?;
        Ok(CommandListener(listener))
    }

    /// Answers the waiting commands of clients that are root. Waits at most [`ORDER_TIME`] for each.
    pub(super) fn serve(&self, mut answer: impl FnMut(Request) -> Answer) -> Result<()> {
        loop {
            let mut line = match self.0.accept() {
                Ok((line, _)) => line,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            // A malformed or aborted command harms only its own client.
            let _ = serve_one(&mut line, &mut answer);
        }
    }
}

fn serve_one(line: &mut UnixStream, answer: &mut impl FnMut(Request) -> Answer) -> Result<()> {
    line.set_nonblocking(false)?;
    line.set_read_timeout(Some(ORDER_TIME))?;
    let peer = rustix::net::sockopt::socket_peercred(&*line)?;
    let answer = if peer.uid == rustix::process::geteuid() {
        let mut text = String::new();
        BufReader::new((&*line).take(LONGEST_ORDER)).read_line(&mut text)?;
        serde_json::from_str(&text).map_err(|error| format!("invalid command: {error}")).and_then(answer)
    } else {
        Err("only root can send commands".into())
    };
    line.write_all(serde_json::to_string(&answer)?.as_bytes())?;
    Ok(())
}

/// In Linux's abstract namespace: the name disappears with the process.
fn name() -> Result<SocketAddr> {
    Ok(SocketAddr::from_abstract_name(b"remora-test-network")?)
}

/// Time limit for an answer, which calls `ip` and `tc`.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Time limit for the line once its sender has connected.
const ORDER_TIME: Duration = Duration::from_millis(500);

/// Limit on the bytes of a line: a host's name and a number.
const LONGEST_ORDER: u64 = 4096;
