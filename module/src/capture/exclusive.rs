//! Checks that this fork child works for one replica, and that nothing else relies on what it saves. Only then may
//! anything be deleted from its memory.
//!
//! The evidence is spread over two processes, and each of them checks only what it knows for certain:
//!
//! ```text
//!   the child, of the moment of the fork                     the agent, of its own connection
//!   ─ it does not write a file                               ─ +FULLRESYNC has come, with this very replid and offset
//!   ─ syncs go to sockets (repl-diskless-sync yes)         ─ it is still open when the child asks
//!   ─ one replica, and no more, is waiting for a snapshot
//! ```
//!
//! A server has one child at a time, and sends `+FULLRESYNC` to a replica just before it forks for it; if the fork
//! fails, it closes the connection. So if the agent got the line, and its connection is open while this child lives,
//! the child belongs to that sync. Since syncs go to sockets, no replica can join it later; since one replica is
//! waiting, that replica is the agent. A child for a file (`BGSAVE`), or for another replica, waits in vain for its
//! permission, up to three seconds, and then saves everything, uncompressed.

use std::ffi::CString;

use super::error::{CaptureError, SharedWith};
use crate::api::{Context, OwnedStr, ServerInfo};

/// Checks that one replica is waiting, and that its snapshot does not go through a file. `info`: INFO replication.
pub(super) fn check(context: &Context<'_>, info: &ServerInfo<'_>) -> Result<(), CaptureError> {
    if !syncs_go_to_sockets(context)? {
        return Err(CaptureError::NotExclusive(SharedWith::File));
    }
    let connected = info.number(c"connected_slaves").ok_or(CaptureError::NotReported("number of replicas"))?;
    let lines = (0..connected).map(|number| {
        let name = CString::new(format!("slave{number}")).unwrap_or_default();
        info.get(&name).map(str::to_owned)
    });
    match busy(lines) {
        1 => Ok(()),
        count => Err(CaptureError::NotExclusive(SharedWith::Replicas(count))),
    }
}

/// Counts the replicas that are not up to date. A replica that the server counts but does not describe is counted too.
fn busy(lines: impl Iterator<Item = Option<String>>) -> usize {
    lines.filter(|line| !line.as_ref().is_some_and(|line| line.split(',').any(|pair| pair == "state=online"))).count()
}

/// Whether the server sends the snapshot of a sync straight to its replicas.
pub(super) fn syncs_go_to_sockets(context: &Context<'_>) -> Result<bool, CaptureError> {
    let words = ["GET", "repl-diskless-sync"].map(|word| OwnedStr::new(context, word.as_bytes()));
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"CONFIG", &arguments).ok_or(CaptureError::NoAnswer("CONFIG GET"))?;
    Ok(reply.element(1).is_some_and(|value| value.as_bytes() == Some(b"yes".as_slice())))
}

/// Whether this child was forked to write a file (`BGSAVE`, a save point). Servers set the process title of their
/// children by their task, and name the file after the process that writes it.
pub(super) fn saves_to_disk() -> bool {
    let title = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    title.windows(BGSAVE.len()).any(|part| part == BGSAVE) || holds_a_dump()
}

fn holds_a_dump() -> bool {
    let name = format!("temp-{}.rdb", std::process::id());
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else { return false };
    descriptors
        .flatten()
        .any(|descriptor| std::fs::read_link(descriptor.path()).is_ok_and(|file| file.ends_with(&name)))
}

const BGSAVE: &[u8] = b"rdb-bgsave";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn line(state: &str) -> Option<String> {
        Some(format!("ip=127.0.0.1,port=0,state={state},offset=0,lag=0"))
    }

    #[test]
    fn a_replica_that_is_not_up_to_date_is_busy() {
        assert_eq!(busy([line("online"), line("wait_bgsave"), line("online")].into_iter()), 1);
        assert_eq!(busy([line("wait_bgsave"), line("send_bulk")].into_iter()), 2);
        assert_eq!(busy([line("wait_bgsave"), None].into_iter()), 2, "the server counts one that it does not describe");
        assert_eq!(busy([line("online")].into_iter()), 0);
    }

    #[test]
    fn a_process_that_holds_its_own_dump_file_saves_to_disk() {
        assert!(!saves_to_disk());
        let folder = tempfile::tempdir().unwrap();
        let _file = std::fs::File::create(folder.path().join(format!("temp-{}.rdb", std::process::id()))).unwrap();
        assert!(saves_to_disk());
    }
}
