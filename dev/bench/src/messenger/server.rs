//! The server side as a separate process, so that its processor time can be measured: this program, started again. Or a
//! server that another command has started elsewhere, of which only the address is known.
//!
//! It prints its address on one line, and for each line of its input the processor time that it has used so far.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::options::Place;

/// A running server. Dropping it ends the process, if this program has started it.
pub struct Server {
    process: Option<Process>,
    /// Its address.
    pub address: String,
}

/// A child process that answers requests.
struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Process {
    /// Fails if the loader could not preload the library: the loader only prints a warning, and the figures would be
    /// those without it.
    fn has_loaded(&self, library: &str) -> io::Result<()> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id()))?;
        let name = Path::new(library).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !name.is_empty() && maps.contains(&name) {
            return Ok(());
        }
        Err(io::Error::other(format!("the library {library} could not be preloaded: is it installed?")))
    }
}

impl Server {
    /// Starts this program with these arguments, which make it call [`serve`]. `preload` is a library to preload.
    ///
    /// # Errors
    /// It cannot be started, or prints no address.
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

    /// Starts a program with the protocol of [`serve`].
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

    /// A server that already listens at this address.
    pub fn elsewhere(place: &Place) -> Server {
        Server { process: None, address: place.to_string() }
    }

    /// Whether another command has started it.
    pub fn is_elsewhere(&self) -> bool {
        self.process.is_none()
    }

    /// Processor time used so far; zero if it runs elsewhere.
    ///
    /// # Errors
    /// The process has ended.
    pub fn cpu(&mut self) -> io::Result<Duration> {
        Ok(Duration::from_secs_f64(self.ask()?.0))
    }

    /// Resident memory in bytes; zero if it runs elsewhere.
    ///
    /// # Errors
    /// The process has ended.
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

/// The child's side: prints the address, then answers until its input ends.
///
/// # Errors
/// The output is closed.
pub fn serve(address: &str) -> io::Result<()> {
    println!("{address}");
    for line in io::stdin().lines() {
        line?;
        println!("{} {}", crate::cpu::of_self()?.as_secs_f64(), resident()?);
    }
    Ok(())
}

/// Resident memory of this process, in bytes.
///
/// # Errors
/// `/proc` cannot be read.
pub fn resident() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| io::Error::other("/proc/self/status has no VmRSS"))
}
