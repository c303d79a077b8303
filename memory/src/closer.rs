//! Closes descriptors on a thread of its own.
//!
//! `close(2)` can block: the last descriptor of a TCP connection with `SO_LINGER` waits for unsent data, and a file of
//! a FUSE file system waits for its server. A process can attach such a descriptor to a packet and close its own copy.
//! The receiver's `close` is then the last one. Closing a socket with unread packets closes their descriptors too.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        OnceLock,
        mpsc::{self, Sender},
    },
    thread,
};

use rustix::net::Shutdown;

/// Closes a descriptor later, on another thread. The call never blocks.
///
/// The queue has no limit of its own: each entry is an open descriptor, and the process has a limit of these.
pub fn close_elsewhere(descriptor: OwnedFd) {
    static CLOSER: OnceLock<Option<Sender<OwnedFd>>> = OnceLock::new();
    // Without a thread the descriptor is closed here.
    if let Some(closer) = CLOSER.get_or_init(start) {
        let _ = closer.send(descriptor);
    }
}

fn start() -> Option<Sender<OwnedFd>> {
    let (sender, descriptors) = mpsc::channel::<OwnedFd>();
    let closer =
        thread::Builder::new().name("remora-close".into()).spawn(move || descriptors.into_iter().for_each(drop));
    match closer {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::warn!(%error, "cannot start the thread that closes descriptors of other processes");
            None
        }
    }
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
