//! Closes descriptors on a thread of its own.
//!
//! `close(2)` can block: the last descriptor of a TCP connection with `SO_LINGER` waits for unsent data, and a file of
//! a FUSE file system waits for its server. A process can attach such a descriptor to a packet and close its own copy.
//! The receiver's `close` is then the last one. Closing a socket with unread packets closes their descriptors too.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use rustix::net::Shutdown;

/// Descriptors to be closed, and whether a thread closes them now.
static CLOSER: Mutex<Closer> = Mutex::new(Closer { waiting: VecDeque::new(), is_running: false });

struct Closer {
    waiting: VecDeque<OwnedFd>,
    is_running: bool,
}

/// Closes a descriptor later, on another thread, which ends when no descriptor waits. The call never blocks.
///
/// The queue has no limit of its own: each entry is an open descriptor, and the process has a limit of these.
pub fn close_elsewhere(descriptor: OwnedFd) {
    let mut closer = closer();
    closer.waiting.push_back(descriptor);
    if closer.is_running {
        return;
    }
    match thread::Builder::new().name("remora-close".into()).spawn(close_all) {
        Ok(_) => closer.is_running = true,
        Err(error) => {
            tracing::warn!(%error, "cannot start the thread that closes descriptors of other processes");
            let waiting = std::mem::take(&mut closer.waiting);
            // Closing may block, so the lock is free meanwhile.
            drop(closer);
            drop(waiting);
        }
    }
}

fn close_all() {
    while let Some(descriptor) = next() {
        drop(descriptor);
    }
}

/// The next descriptor to close. `None` ends the thread.
fn next() -> Option<OwnedFd> {
    let mut closer = closer();
    let next = closer.waiting.pop_front();
    closer.is_running = next.is_some();
    next
}

fn closer() -> MutexGuard<'static, Closer> {
    CLOSER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection to a process that may be hostile. Dropping it ends the connection at once, and closes the descriptor on
/// another thread.
#[derive(Debug)]
pub struct PeerSocket(Option<OwnedFd>);

impl From<OwnedFd> for PeerSocket {
    fn from(socket: OwnedFd) -> PeerSocket {
        PeerSocket(Some(socket))
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        #[expect(clippy::expect_used, reason = "only drop takes it out")]
        self.0.as_ref().expect("the socket is there until the drop").as_fd()
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        let Some(socket) = self.0.take() else { return };
        // The peer notices the end now. Unlike `close`, this leaves unread packets alone. It fails if the connection
        // has ended already.
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        close_elsewhere(socket);
    }
}
