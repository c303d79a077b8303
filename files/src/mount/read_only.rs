//! A volume's files as a file system that is mounted read-only, on a host that does not write.
//!
//! Names are those that a [`Follower`] has read. A thread of the mount has it look at the log every [`LOOK_EVERY`], and
//! the kernel asks again after [`VALID`]. Bytes are read when a process reads them, past the page cache: so no read has
//! a page of before beside one of after. The kernel refuses changes with `EROFS`.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use remora_fuse::answer::{
    Data, DirectoryEntry, Entry, KnownAttributes, Listing, Opened, Reply, Statistics, Target, Xattr,
};
use remora_fuse::request::{GetAttributes, GetXattr, ListXattrs, Lookup, Open, Read, ReadDirectory};
use remora_fuse::{Answer, EndError, FileSystem, Session, SessionOptions, Transport};
use remora_volume::reader::Blocks;

use super::{AtEnd, MountError, entry, file_kind, known, statistics};
use crate::names;
use crate::{FilesError, Follower};

/// Files of a volume that are mounted read-only. When it is dropped, they are unmounted first.
pub struct FollowedFiles {
    /// `None` once it has ended.
    session: Option<Session>,
    followed: Arc<Followed>,
    watch: Option<JoinHandle<()>>,
}

impl FollowedFiles {
    /// Reads all names, and mounts the files.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn mount(
        blocks: Box<dyn Blocks>,
        directory: &Path,
        options: &SessionOptions,
    ) -> Result<FollowedFiles, MountError> {
        let followed = Arc::new(Followed {
            follower: Follower::open(blocks)?,
            is_stopping: Mutex::new(false),
            stops: Condvar::new(),
        });
        let watched = Arc::clone(&followed);
        let watch = std::thread::Builder::new().name("volume-follower".into()).spawn(move || watched.watch());
        let mut files = FollowedFiles { session: None, watch: Some(watch.map_err(MountError::Thread)?), followed };
        let options = SessionOptions { xattrs: true, ..options.clone() };
        let session = Session::start(directory, Arc::clone(&files.followed) as Arc<dyn FileSystem>, &options)?;
        files.session = Some(session);
        Ok(files)
    }

    /// As [`super::MountedFiles::wait`].
    pub fn wait(&self, limit: Duration) -> bool {
        self.session.as_ref().is_none_or(|session| session.wait(limit))
    }

    /// How the kernel's requests come.
    pub fn transport(&self) -> Transport {
        self.session.as_ref().map_or(Transport::Device, Session::transport)
    }

    /// As [`super::Mounted::is_mounted`].
    pub fn is_mounted(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_mounted)
    }

    /// Unmounts them.
    ///
    /// # Errors
    /// [`EndError`].
    pub fn end(mut self, at_end: AtEnd) -> Result<(), EndError> {
        self.session.take().map_or(Ok(()), |session| at_end.end(session))
    }

    /// Leaves them mounted, or unmounts them, when their connection has failed.
    ///
    /// # Errors
    /// [`EndError`].
    pub fn abandon(mut self, at_end: AtEnd) -> Result<(), EndError> {
        let end = if at_end == AtEnd::Leave { Session::leave } else { Session::end };
        self.session.take().map_or(Ok(()), end)
    }
}

impl Drop for FollowedFiles {
    fn drop(&mut self) {
        drop(self.session.take());
        self.followed.stop();
        if let Some(watch) = self.watch.take() {
            let _ = watch.join(); // a panic was reported where it happened
        }
    }
}

/// The files, as the kernel asks for them.
struct Followed {
    follower: Follower,
    is_stopping: Mutex<bool>,
    stops: Condvar,
}

impl Followed {
    /// The thread: looks at the log until the mount ends.
    fn watch(&self) {
        let (mut pause, mut said) = (LOOK_EVERY, None);
        while !self.pause(pause) {
            let looked = self.follower.poll().map_err(|error| error.to_string());
            pause = if looked.is_ok() { LOOK_EVERY } else { LOOK_AGAIN };
            match looked.err() {
                Some(error) if said.as_ref() != Some(&error) => {
                    tracing::error!(error, "the files cannot be read at present: names are as they were");
                    said = Some(error);
                }
                None if said.take().is_some() => tracing::info!("the files can be read again"),
                _ => {}
            }
        }
    }

    /// Waits. Returns whether the mount ends.
    fn pause(&self, time: Duration) -> bool {
        let is_stopping = self.is_stopping.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.stops.wait_timeout_while(is_stopping, time, |is_stopping| !*is_stopping);
        waited.map_or_else(|error| *error.into_inner().0, |(is_stopping, _)| *is_stopping)
    }

    fn stop(&self) {
        *self.is_stopping.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stops.notify_all();
    }

    fn answer<R: Reply>(&self, answer: Answer<'_, R>, ask: impl FnOnce(&Follower) -> Result<R, FilesError>) {
        let asked = ask(&self.follower);
        if let Err(FilesError::Blocks(error)) = &asked {
            tracing::warn!(error, "a read failed");
        }
        answer.result(asked.map_err(|error| error.errno()));
    }
}

impl FileSystem for Followed {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        self.answer(answer, |follower| Ok(entry(&follower.lookup(asked.parent, asked.name)?, VALID)));
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        self.answer(answer, |follower| Ok(known(&follower.getattr(asked.node)?, VALID)));
    }

    fn read_link(&self, node: u64, answer: Answer<'_, Target>) {
        self.answer(answer, |follower| Ok(Target(follower.readlink(node)?.into())));
    }

    fn get_xattr(&self, asked: GetXattr<'_>, answer: Answer<'_, Xattr>) {
        let found = self.follower.getxattr(asked.node, asked.name).map_err(|error| error.errno());
        answer.result(found.and_then(|value| Xattr::of(&value, asked.size)));
    }

    fn list_xattrs(&self, asked: ListXattrs, answer: Answer<'_, Xattr>) {
        let found = self.follower.listxattr(asked.node, asked.caller.uid == 0).map_err(|error| error.errno());
        answer.result(found.and_then(|list| Xattr::of(&list, asked.size)));
    }

    /// If the name stands for another file now, the kernel asks for it again.
    fn open(&self, asked: Open, answer: Answer<'_, Opened>) {
        self.answer(answer, |follower| follower.getattr(asked.node).map(|_| OPENED));
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        self.answer(answer, |follower| {
            let data = follower.read(asked.node, asked.offset, asked.size)?;
            Ok(Data(vec![Bytes::from(data)]))
        });
    }

    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let mut listing = answer.listing();
        self.answer(answer, |follower| {
            follower.readdir(asked.node, asked.offset, |listed| {
                let names::Listed { name, ino, kind, cookie } = listed;
                listing.push(&DirectoryEntry { node: ino, kind: file_kind(kind), name, offset: cookie })
            })?;
            Ok(listing)
        });
    }

    fn statistics(&self, _: u64, answer: Answer<'_, Statistics>) {
        self.answer(answer, |follower| Ok(statistics(&follower.statfs())));
    }
}

/// How each file is open: see the module's text.
const OPENED: Opened = Opened {
    handle: 0,
    direct: true,
    keeps_cache: false,
    parallel_direct_writes: false,
    without_flush: true,
    caches_directory: false,
};

/// How often the end of the log is looked at. With [`VALID`], and the time after which a copy is left that gets no
/// writes, what the writer has changed is seen within about a second.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The same after a look that failed: it has waited for a copy.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How long the kernel may use what it was told of a name or an inode.
const VALID: Duration = Duration::from_millis(100);
