//! ZeroMQ as a rival: a small program (`dev/bench/rivals/zeromq.c`), built here if libzmq's header and a C compiler are
//! installed.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::server::Server;
use super::{Case, Outcome};

/// The built program; dropping it removes the file.
pub struct ZeroMq {
    program: PathBuf,
    _folder: TempDir,
}

impl ZeroMq {
    /// Builds the program. `None` if that is not possible.
    ///
    /// # Errors
    /// No temporary folder can be created.
    pub fn build() -> io::Result<Option<ZeroMq>> {
        let folder = tempfile::tempdir()?;
        let program = folder.path().join("zeromq");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("rivals/zeromq.c");
        let built = Command::new("cc").args(["-O2", "-o"]).arg(&program).arg(source).arg("-lzmq").output();
        let is_built = built.is_ok_and(|output| output.status.success());
        Ok(is_built.then_some(ZeroMq { program, _folder: folder }))
    }

    /// Measures one case, with one thread for the client and one for the server, besides the library's thread on each
    /// side.
    ///
    /// # Errors
    /// The program fails, or its output cannot be parsed.
    pub fn measure(&self, case: &Case, time: Duration) -> io::Result<Outcome> {
        let mut server = Server::start_program(Command::new(&self.program).args(["serve", &case.reply.to_string()]))?;
        let numbers = [case.connections, case.depth, case.request, time.as_millis() as usize].map(|n| n.to_string());
        let before = server.cpu()?;
        let asked = Command::new(&self.program).args(["ask", &server.address]).args(numbers).output()?;
        let server_cpu = server.cpu()? - before;
        let said = String::from_utf8_lossy(&asked.stdout);
        let figures: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [requests, seconds, mean, p50, p99, p999, client_cpu] = figures[..] else {
            let text = format!("the ZeroMQ rival printed {said:?} and {:?}", String::from_utf8_lossy(&asked.stderr));
            return Err(io::Error::other(text));
        };
        let latency = [mean, p50, p99, p999];
        Ok(Outcome { requests: requests as u64, seconds, latency, client_cpu, server_cpu: server_cpu.as_secs_f64() })
    }
}
