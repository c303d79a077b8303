//! Resources that are removed with their test: folders, ports, token files.

// Stands alone: every kind of test begins with it.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::{Doing, Result};

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
