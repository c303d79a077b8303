//! One line to the process that holds the hosts, and its answer: JSON, by a unix socket whose name is in no file system.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use remora_bench::sync::Result;
use serde::{Deserialize, Serialize};

/// What can be asked of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Order {
    Hosts,
    Cut(String),
    Heal(String),
    /// Bits per second; `None`: free.
    Slow(String, Option<u64>),
    /// Percent.
    Lossy(String, f64),
    /// The path of the host's network namespace.
    Where(String),
    Down,
}

/// Its answer: words for people, or the path that [`Order::Where`] asks for.
pub(super) type Answer = std::result::Result<String, String>;

/// Asks, and waits for the answer.
pub(super) fn ask(order: &Order) -> Result<String> {
    let missing = |error| format!("nobody holds a test network here ({error}); start one by `xtask net up`, as root");
    let mut line = UnixStream::connect_addr(&name()?).map_err(missing)?;
    line.set_read_timeout(Some(ANSWER_TIME))?;
    writeln!(line, "{}", serde_json::to_string(order)?)?;
    let mut answer = String::new();
    line.read_to_string(&mut answer).map_err(|error| {
        format!("no answer within {ANSWER_TIME:?} ({error}): it may still be put up, and yet do as it was told")
    })?;
    let answer: Answer = serde_json::from_str(&answer).map_err(|error| format!("it answered {answer:?}: {error}"))?;
    Ok(answer?)
}

/// Runs a command there, as a shell would: its input and output are ours.
pub(super) fn run_there(host: &str, command: &[String]) -> Result<()> {
    let path = ask(&Order::Where(host.into()))?;
    let status = Command::new("nsenter").arg(format!("--net={path}")).arg("--").args(command).status();
    let status = status.map_err(|error| format!("the program nsenter (package util-linux): {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{} on {host}: {status}", command.join(" ")).into()) }
}

/// Where orders are taken.
pub(super) struct Desk(UnixListener);

impl Desk {
    /// Fails if there is one already on this machine.
    pub(super) fn open() -> Result<Desk> {
        let taken = |error| {
            format!("could not take orders ({error}): another `xtask net up` is running? `xtask net down` ends it")
        };
        let listener = UnixListener::bind_addr(&name()?).map_err(taken)?;
        listener.set_nonblocking(true)?;
        Ok(Desk(listener))
    }

    /// Answers whoever has asked meanwhile, if he is root as we are. Never waits longer than [`ORDER_TIME`] for one.
    pub(super) fn serve(&self, mut answer: impl FnMut(Order) -> Answer) -> Result<()> {
        loop {
            let mut line = match self.0.accept() {
                Ok((line, _)) => line,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            // One who asks badly, or goes away, harms himself alone.
            let _ = serve_one(&mut line, &mut answer);
        }
    }
}

fn serve_one(line: &mut UnixStream, answer: &mut impl FnMut(Order) -> Answer) -> Result<()> {
    line.set_nonblocking(false)?;
    line.set_read_timeout(Some(ORDER_TIME))?;
    let peer = rustix::net::sockopt::socket_peercred(&*line)?;
    let told = if peer.uid == rustix::process::geteuid() {
        let mut text = String::new();
        BufReader::new((&*line).take(LONGEST_ORDER)).read_line(&mut text)?;
        serde_json::from_str(&text).map_err(|error| format!("not understood: {error}")).and_then(answer)
    } else {
        Err("only root may ask that".into())
    };
    line.write_all(serde_json::to_string(&told)?.as_bytes())?;
    Ok(())
}

/// In Linux's abstract namespace: it goes with the process that holds it.
fn name() -> Result<SocketAddr> {
    Ok(SocketAddr::from_abstract_name(b"remora-test-network")?)
}

/// How long the answer may take: `ip` and `tc` are called for it.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// How long the line may take once its sender has connected.
const ORDER_TIME: Duration = Duration::from_millis(500);

/// Bytes of a line: a host's name and a number.
const LONGEST_ORDER: u64 = 4096;
