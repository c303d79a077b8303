//! Mounted: what of a volume is mounted, and how it ends.

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_fuse::{EndError, Session, Transport};

use super::uses::{self, LAST_COMPLETION_LIMIT, LOOK_AGAIN};
use crate::files::{Files, FilesError, Image};

/// What of a volume is mounted. When it is dropped, it is unmounted first; then the volume is closed, unless others
/// have it.
pub struct Mounted<T: Contents> {
    /// `None` once it has ended.
    pub(super) session: Option<Session>,
    pub(super) contents: Option<Arc<T>>,
    /// Has the kernel forget what the volume has refused. It ends after the session.
    pub(super) forgetting: Option<JoinHandle<()>>,
}

/// What becomes of the mount when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtEnd {
    /// It stays if processes use it, or if the volume has ended, and every use of it fails: a service manager that
    /// starts these processes again must not have them write into the directory below.
    Leave,
    /// It is taken out of the tree.
    Unmount,
}

impl AtEnd {
    pub(super) fn end(self, session: Session) -> Result<(), EndError> {
        match self {
            AtEnd::Leave => session.end_or_leave(),
            AtEnd::Unmount => session.end(),
        }
    }
}

/// What can be mounted of a volume.
pub trait Contents: Send + Sync + 'static {
    /// Calls this when everything that was written is as safe as the volume makes it.
    fn sync(&self, done: Box<dyn FnOnce(Result<(), FilesError>) + Send>);
}

impl Contents for Files {
    fn sync(&self, done: Box<dyn FnOnce(Result<(), FilesError>) + Send>) {
        Files::sync(self, done);
    }
}

impl Contents for Image {
    fn sync(&self, done: Box<dyn FnOnce(Result<(), FilesError>) + Send>) {
        self.flush(done);
    }
}

impl<T: Contents> Mounted<T> {
    /// Waits until it is not mounted any more, because another process has unmounted it, but not longer than `limit`.
    /// Returns whether it is so.
    pub fn wait(&self, limit: Duration) -> bool {
        self.session.as_ref().is_none_or(|session| session.wait(limit))
    }

    /// How the kernel's requests come.
    pub fn transport(&self) -> Transport {
        self.session.as_ref().map_or(Transport::Device, Session::transport)
    }

    /// Whether it is in the tree. What is over and is still there was not unmounted: its connection has failed.
    pub fn is_mounted(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_mounted)
    }

    /// Ends it when the volume has ended: nothing can be written any more.
    ///
    /// # Errors
    /// [`EndError`].
    pub fn abandon(mut self, at_end: AtEnd) -> Result<(), EndError> {
        let end = match at_end {
            AtEnd::Leave => Session::leave,
            AtEnd::Unmount => Session::end,
        };
        self.session.take().map_or(Ok(()), end)
    }

    /// Unmounts it, and waits until everything that was written is as safe as the volume makes it.
    ///
    /// # Errors
    /// [`EndError`].
    pub fn end(mut self, at_end: AtEnd) -> Result<(), EndError> {
        let ended = self.session.take().map_or(Ok(()), |session| at_end.end(session));
        if let Some(contents) = &self.contents {
            let (done, is_done) = mpsc::sync_channel(1);
            contents.sync(Box::new(move |result| _ = done.send(result))); // the other end may have given up
            match is_done.recv_timeout(SYNC_LIMIT) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!("what was written may not be safe: {error}"),
                Err(_) => tracing::error!("what was written may not be safe: no answer within {SYNC_LIMIT:?}"),
            }
        }
        ended
    }
}

impl<T: Contents> Drop for Mounted<T> {
    fn drop(&mut self) {
        drop(self.session.take());
        if let Some(forgetting) = self.forgetting.take() {
            uses::join(forgetting);
        }
        // A completion may have it for a moment. It must not be the last one: it runs in the volume's own threads.
        let (mut contents, until) = (self.contents.take(), Instant::now() + LAST_COMPLETION_LIMIT);
        while let Some(shared) = contents.take() {
            match Arc::try_unwrap(shared) {
                Ok(last) => drop(last),
                Err(_) if Instant::now() > until => tracing::error!("a completion has kept what was mounted"),
                Err(shared) => {
                    contents = Some(shared);
                    std::thread::sleep(LOOK_AGAIN);
                }
            }
        }
    }
}

/// How long the last flush may take: longer than the volume waits for a server.
const SYNC_LIMIT: Duration = Duration::from_secs(30);
