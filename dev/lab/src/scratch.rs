//! Resources that are removed with their test: folders, ports, token files.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::{Doing, Result};

/// A new empty folder, removed when dropped. Its name contains `what`.
pub fn folder(what: &str) -> Result<TempDir> {
    tempfile::Builder::new().prefix(&format!("remora-{what}-")).tempdir().doing(|| "make a temporary folder")
}

/// A loopback port on which no process listens at this moment. Another process may bind it before the caller does. A
/// caller that cannot accept that binds port 0, or tries again as [`crate::Server`] does.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).doing(|| "find a free port")?;
    Ok(listener.local_addr().doing(|| "find a free port")?.port())
}

/// Writes a new random token of 64 hexadecimal digits into `folder`, readable by its owner only.
pub fn token_file(folder: &Path) -> Result<PathBuf> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).map_err(std::io::Error::from).doing(|| "ask for random bytes")?;
    let token: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    secret_file(&folder.join("token"), &token)
}

/// Writes a file that only its owner can read: tokens, passwords.
pub fn secret_file(path: &Path, content: &str) -> Result<PathBuf> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| writeln!(file, "{content}"))
        .doing(|| format!("write {}", path.display()))?;
    Ok(path.to_owned())
}

// Lines about a test that appear although it passes. A runner hides what a test prints that passes, so each line is
// also added to the file that `REMORA_TEST_NOTES` names, which `make test` and continuous integration print at their
// end.

/// Reports that this test has passed with less proof than usual.
pub fn note(what: &str) {
    add(&format!("NOTE: {}: {what}", this_test()));
}

/// Prints a line, and adds it to the file of notes.
pub(crate) fn add(line: &str) {
    // Directly to the terminal: the harness hides `eprintln!` of a test that passes.
    let _ = std::io::stderr().lock().write_all(format!("\n{line}\n").as_bytes());
    let Some(file) = std::env::var_os("REMORA_TEST_NOTES") else { return };
    let opened = std::fs::OpenOptions::new().create(true).append(true).open(&file);
    let written = opened.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("cannot add a line to {}: {error}", file.display()));
}

pub(crate) fn this_test() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}
