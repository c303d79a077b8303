//! The answering side in a process of its own, so that its processor time is its own: this very program, called again. Or one that
//! somebody has started elsewhere, of which nothing is known but where it listens.
//!
//! It says where it listens on one line, and on each line that it is told, the processor time that it has spent so far.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::options::Place;

/// A running server; dropping it ends it, if we have started it.
pub struct Server {
    process: Option<Process>,
    /// Where it listens.
    pub address: String,
}

/// A child that answers what it is asked.
struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Process {
    /// A library that can't be put before others is only grumbled about by the loader, and its figures would be those without it.
    fn has_loaded(&self, library: &str) -> io::Result<()> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id()))?;
        let name = Path::new(library).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !name.is_empty() && maps.contains(&name) {
            return Ok(());
        }
        Err(io::Error::other(format!("the library {library} could not be put before others: is it installed?")))
    }
}

impl Server {
    /// Starts this program with these arguments, which make it call [`serve`]. `preload` is a library to be put before others.
    ///
    /// # Errors
    /// It cannot be started, or says no address.
    pub fn start(arguments: &[String], preload: Option<&str>) -> io::Result<Server> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments);
        if let Some(library) = preload {
            command.env("LD_PRELOAD", library);
        }
        let server = Server::start_program(&mut command)?;
        if let (Some(library), Some(process)) = (preload, &server.process) {
            process.has_loaded(library)?;
        }
        Ok(server)
    }

    /// Starts a program that talks as [`serve`] does.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_program(command: &mut Command) -> io::Result<Server> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let lost = || io::Error::other("a pipe of the server is missing");
        let to = child.stdin.take().ok_or_else(lost)?;
        let from = BufReader::new(child.stdout.take().ok_or_else(lost)?);
        let mut process = Process { child, to, from };
        let mut address = String::new();
        process.from.read_line(&mut address)?;
        let address = address.trim().to_owned();
        if address.is_empty() {
            return Err(io::Error::other("the server has ended before it listened"));
        }
        Ok(Server { process: Some(process), address })
    }

    /// One that listens there already.
    pub fn elsewhere(place: &Place) -> Server {
        Server { process: None, address: place.to_string() }
    }

    /// Whether somebody else has started it.
    pub fn is_elsewhere(&self) -> bool {
        self.process.is_none()
    }

    /// Processor time that it has spent so far; none where it is elsewhere.
    ///
    /// # Errors
    /// It is gone.
    pub fn cpu(&mut self) -> io::Result<Duration> {
        Ok(Duration::from_secs_f64(self.ask()?.0))
    }

    /// Memory that it holds, in bytes; none where it is elsewhere.
    ///
    /// # Errors
    /// It is gone.
    pub fn resident(&mut self) -> io::Result<u64> {
        Ok(self.ask()?.1)
    }

    fn ask(&mut self) -> io::Result<(f64, u64)> {
        self.process.as_mut().map_or(Ok((0.0, 0)), Process::ask)
    }
}

impl Process {
    fn ask(&mut self) -> io::Result<(f64, u64)> {
        writeln!(self.to)?;
        self.to.flush()?;
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let wrong = || io::Error::other(format!("the server answers {line:?}"));
        let cpu = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
        let resident = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
        Ok((cpu, resident))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended by itself
        let _ = self.child.wait();
    }
}

/// The other end of it: says the address, then answers until nobody asks.
///
/// # Errors
/// Nobody listens.
pub fn serve(address: &str) -> io::Result<()> {
    println!("{address}");
    for line in io::stdin().lines() {
        line?;
        println!("{} {}", crate::cpu::of_self()?.as_secs_f64(), resident()?);
    }
    Ok(())
}

/// Memory that this process holds, in bytes.
///
/// # Errors
/// `/proc` cannot be read.
pub fn resident() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| io::Error::other("/proc/self/status has no VmRSS"))
}
