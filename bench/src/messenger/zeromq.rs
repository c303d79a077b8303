//! ZeroMQ, by a small program of its own (`bench/rivals/zeromq.c`), which is built here where libzmq's header and a C compiler are.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::server::Server;
use super::{Case, Outcome};

/// The program, built; it goes with this.
pub struct ZeroMq {
    program: PathBuf,
    _folder: TempDir,
}

impl ZeroMq {
    /// Builds it. `None` where it cannot be.
    ///
    /// # Errors
    /// The system gives no folder.
    pub fn build() -> io::Result<Option<ZeroMq>> {
        let folder = tempfile::tempdir()?;
        let program = folder.path().join("zeromq");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("rivals/zeromq.c");
        let built = Command::new("cc").args(["-O2", "-o"]).arg(&program).arg(source).arg("-lzmq").output();
        let is_built = built.is_ok_and(|output| output.status.success());
        Ok(is_built.then_some(ZeroMq { program, _folder: folder }))
    }

    /// Measures one case, with one thread that asks and one that answers, besides each side's thread of the library.
    ///
    /// # Errors
    /// It fails, or says what nobody understands.
    pub fn measure(&self, case: &Case, time: Duration) -> io::Result<Outcome> {
        let mut server = Server::start_program(Command::new(&self.program).args(["serve", &case.reply.to_string()]))?;
        let numbers = [case.connections, case.depth, case.request, time.as_millis() as usize].map(|n| n.to_string());
        let before = server.cpu()?;
        let asked = Command::new(&self.program).args(["ask", &server.address]).args(numbers).output()?;
        let server_cpu = server.cpu()? - before;
        let said = String::from_utf8_lossy(&asked.stdout);
        let figures: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [requests, seconds, mean, p50, p99, p999, client_cpu] = figures[..] else {
            let text = format!("the ZeroMQ rival says {said:?} and {:?}", String::from_utf8_lossy(&asked.stderr));
            return Err(io::Error::other(text));
        };
        let latency = [mean, p50, p99, p999];
        Ok(Outcome { requests: requests as u64, seconds, latency, client_cpu, server_cpu: server_cpu.as_secs_f64() })
    }
}
