//! A volume's files as a mounted file system.
//!
//! [`Files`] keeps names and bytes, and [`remora_fuse`] speaks with the kernel. Here each request is said in the words
//! of the other side. The kernel walks paths, checks permissions and keeps locks. As this is the only way to the files,
//! the kernel may remember what it was told for as long as it likes.
//!
//! An inode is held once for each time that the kernel has looked it up. The kernel does not forget an inode that a
//! process has open, so a file without a name is there until its last descriptor is closed.
//!
//! What a process writes is answered when it has its space in the volume and is on its way there. So `write(2)` itself
//! says `ENOSPC`, and the kernel keeps no writes that the volume may refuse, but for those of mapped memory.
//!
//! When the volume has ended, requests fail with `EIO`. A process that is killed while its request waits for servers
//! ends at once; what it had asked for is carried out all the same.
//!
//! In reading order: the mount, what is mounted and how it ends, which files are open and what the kernel must forget,
//! and what both sides call things. `read_only`: the same files on a host that does not write. `image`: all of a volume
//! as one file.

mod image;
mod read_only;

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_fuse::answer::{
    Attributes, Created, Data, DirectoryEntry, Done, Entry, FileKind, KnownAttributes, Listing, ListingPlus, Opened,
    Position, Reply, Statistics, Target, Timestamp, Written, Xattr,
};
use remora_fuse::request::{
    Allocate, Caller, Close, Create, CreateUnnamed, Fsync, GetAttributes, GetXattr, Link, ListXattrs, Lookup,
    MakeDirectory, MakeNode, NewTime, Open, OpenFlags, Read, ReadDirectory, Remove, RemoveXattr, Rename, RenameHow,
    Seek, SetAttributes, SetXattr, SetXattrHow, Symlink, Write,
};
use remora_fuse::{
    Answer, EndError, Errno, FileSystem, MountOptions, Notifier, Session, SessionOptions, StartError, Transport,
    Waiter, Waits,
};
use remora_volume::client::Volume;
use remora_volume::shape::BLOCK_BYTES;

use crate::names::{self, Attr, Kind, New, NewKind, SetTime, Usage};
use crate::{Files, FilesError, Image};
use image::ServedImage;
pub use read_only::FollowedFiles;

/// Files of a volume that are mounted.
pub type MountedFiles = Mounted<Files>;

/// A volume that is mounted as one file.
pub type MountedImage = Mounted<Image>;

impl MountedFiles {
    /// Mounts the files of a volume. A write is answered before it is acknowledged, as long as no more than `ahead`
    /// bytes are.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn mount(
        volume: Arc<Volume>,
        directory: &Path,
        ahead: usize,
        options: &SessionOptions,
    ) -> Result<MountedFiles, MountError> {
        let files = Arc::new(Files::open_ahead(volume, ahead)?);
        let (stale, are_stale) = mpsc::channel();
        let (uses, waits) = (Uses::new(stale), Waits::new().map_err(MountError::Thread)?);
        let served = Arc::new(Served { files: Arc::downgrade(&files), answers_ahead: ahead > 0, uses, waits });
        let known = Arc::downgrade(&files);
        let options = SessionOptions { lists_attributes: true, write_back: false, xattrs: true, ..options.clone() };
        let mut mounted = Mounted { session: None, contents: Some(files), forgetting: None };
        let session = mounted.session.insert(Session::start(directory, served, &options)?);
        let notifier = session.notifier();
        let thread = std::thread::Builder::new().name("volume-forget".into());
        let forgetting = thread.spawn(move || set_right(&are_stale, &notifier, &known));
        mounted.forgetting = Some(forgetting.map_err(MountError::Thread)?);
        Ok(mounted)
    }
}

impl MountedImage {
    /// Mounts a volume as the file `image` in a directory.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn mount(volume: Arc<Volume>, directory: &Path, options: &SessionOptions) -> Result<MountedImage, MountError> {
        let image = Arc::new(Image::open(volume)?);
        let waits = Waits::new().map_err(MountError::Thread)?;
        let served = Arc::new(ServedImage::new(Arc::downgrade(&image), image.size(), waits));
        let session = Session::start(directory, served, options)?;
        Ok(Mounted { session: Some(session), contents: Some(image), forgetting: None })
    }
}

/// What the files of a volume are mounted as.
pub fn mount_options(source: &str, read_only: bool, other_users: bool) -> MountOptions {
    MountOptions { source: source.to_owned(), subtype: SUBTYPE.to_owned(), read_only, other_users }
}

/// Why files are not mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The volume's files cannot be opened.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// They cannot be mounted.
    #[error(transparent)]
    Session(#[from] StartError),
    /// The system provides no thread.
    #[error("starting a thread for the files of a volume: {0}")]
    Thread(std::io::Error),
}

/// The files, as the kernel asks for them. It holds them weakly: they are dropped by their owner alone.
struct Served {
    files: Weak<Files>,
    /// Writes are answered when they are on their way.
    answers_ahead: bool,
    uses: Uses,
    waits: Waits,
}

impl Served {
    fn files(&self) -> Result<Arc<Files>, Errno> {
        self.files.upgrade().ok_or(Errno::IO)
    }

    /// Answers at once.
    fn at_once<R: Reply>(&self, answer: Answer<'_, R>, ask: impl FnOnce(&Files) -> Result<R, FilesError>) {
        answer.result(self.files().and_then(|files| ask(&files).map_err(|error| error.errno())));
    }

    /// Answers when the volume does. If the process is killed before, it does not wait for that. The change is carried
    /// out all the same, and the kernel must ask again about what it does not know then.
    fn later<R: Reply + 'static>(
        &self,
        answer: Answer<'_, R>,
        unknown: impl IntoIterator<Item = Stale> + Send + 'static,
        ask: impl FnOnce(&Files, Waiter<R>),
    ) {
        match self.files() {
            Ok(files) => {
                let uses = self.uses.clone();
                let given_up = move || unknown.into_iter().for_each(|stale| uses.is_stale(stale));
                ask(&files, self.waits.wait(answer.later(), given_up));
            }
            Err(errno) => answer.fail(errno),
        }
    }

    /// What a change answers that says nothing more.
    fn change(
        &self,
        answer: Answer<'_, Done>,
        unknown: impl IntoIterator<Item = Stale> + Send + 'static,
        ask: impl FnOnce(&Files, Box<dyn FnOnce(Result<(), FilesError>) + Send>),
    ) {
        self.later(answer, unknown, |files, waiter| {
            ask(files, Box::new(|result| _ = say(waiter, result.map(|()| Done))));
        });
    }

    /// How a file is open. A close waits for what was answered early.
    fn opened(&self, flags: OpenFlags) -> Opened {
        Opened { without_flush: !(self.answers_ahead && flags.writes()), ..OPENED }
    }

    /// What is told of a file that was made or found, and is held and open.
    fn created(
        &self,
        flags: OpenFlags,
        waiter: Waiter<Created>,
    ) -> impl FnOnce(Result<Attr, FilesError>) + Send + 'static + use<> {
        let (how, uses) = (self.opened(flags), self.uses.clone());
        move |held: Result<Attr, FilesError>| {
            let opened = held.as_ref().ok().map(|attr| attr.ino);
            opened.into_iter().for_each(|ino| uses.opened(ino));
            if !say(waiter, held.map(|attr| Created { entry: entry(&attr, VALID), opened: how })) {
                opened.into_iter().for_each(|ino| uses.is_stale(Stale::Unopened(ino)));
            }
        }
    }

    /// Before a write of a process that may not leave the set-id bits of the file. The kernel asks for the attributes
    /// again.
    fn drop_set_id(&self, node: u64) {
        let Ok(files) = self.files() else { return };
        if has_set_id(&files, node) {
            let set = names::SetAttributes { drops_set_id: true, ..names::SetAttributes::default() };
            files.setattr(node, None, set, |_| {}); // the write is told what fails
            self.uses.is_stale(Stale::Attributes(node));
        }
    }

    fn make(&self, (parent, name): (u64, &[u8]), new: New, answer: Answer<'_, Entry>) {
        self.later(answer, [Stale::Attributes(parent)], |files, waiter| {
            files.create(parent, name, new, true, self.known(waiter));
        });
    }

    /// What is told of an inode that is held for it. The kernel does not know it if the process was killed meanwhile.
    fn known(&self, waiter: Waiter<Entry>) -> impl FnOnce(Result<Attr, FilesError>) + Send + 'static + use<> {
        let uses = self.uses.clone();
        move |held| {
            let made = held.as_ref().ok().map(|attr| attr.ino);
            let is_told = say(waiter, held.map(|attr| entry(&attr, VALID)));
            made.filter(|_| !is_told).into_iter().for_each(|ino| uses.is_stale(Stale::Unknown(ino)));
        }
    }

    /// Changes attributes, and then answers with all of them.
    fn set(
        &self,
        files: &Files,
        (node, size): (u64, Option<u64>),
        set: names::SetAttributes,
        then: impl FnOnce(Result<Attr, FilesError>) + Send + 'static,
    ) {
        files.setattr(node, size, set, self.afterwards(node, move |files, ()| files.getattr(node), then));
    }

    /// What is to be done after a change: something is asked of the files, and said. A completion must not keep them.
    fn afterwards<T, R, A, F>(
        &self,
        node: u64,
        ask: A,
        then: F,
    ) -> impl FnOnce(Result<T, FilesError>) + Send + 'static + use<T, R, A, F>
    where
        T: 'static,
        R: 'static,
        A: FnOnce(&Files, T) -> Result<R, FilesError> + Send + 'static,
        F: FnOnce(Result<R, FilesError>) + Send + 'static,
    {
        let weak = Weak::clone(&self.files);
        move |result| {
            let files = weak.upgrade().ok_or(FilesError::Names(names::NamesError::Stale(node)));
            then(result.and_then(|changed| ask(&*files?, changed)));
        }
    }
}

impl FileSystem for Served {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        self.at_once(answer, |files| {
            let found = files.lookup(asked.parent, asked.name)?;
            Ok(entry(&files.hold(found.ino)?, VALID))
        });
    }

    fn forget(&self, node: u64, mut lookups: u64) {
        let Ok(files) = self.files() else { return };
        while lookups > 0 {
            let some = u32::try_from(lookups).unwrap_or(u32::MAX);
            files.release(node, some);
            lookups -= u64::from(some);
        }
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        self.at_once(answer, |files| Ok(known(&files.getattr(asked.node)?, VALID)));
    }

    fn set_attributes(&self, asked: SetAttributes, answer: Answer<'_, KnownAttributes>) {
        let set = names::SetAttributes {
            mode: asked.permissions.map(mode),
            uid: asked.uid,
            gid: asked.gid,
            accessed: asked.accessed.map(time_to_set),
            modified: asked.modified.map(time_to_set),
            drops_set_id: asked.drops_set_id,
        };
        self.later(answer, NOTHING, |files, waiter| {
            let tell = |result: Result<Attr, FilesError>| _ = say(waiter, result.map(|attr| known(&attr, VALID)));
            self.set(files, (asked.node, asked.size), set, tell);
        });
    }

    fn read_link(&self, node: u64, answer: Answer<'_, Target>) {
        self.at_once(answer, |files| Ok(Target(files.readlink(node)?.into())));
    }

    fn symlink(&self, asked: Symlink<'_>, answer: Answer<'_, Entry>) {
        let kind = NewKind::Symlink(asked.target.to_vec());
        let new = new(kind, asked.caller, (0o777, 0));
        self.make((asked.parent, asked.name), new, answer);
    }

    fn make_node(&self, asked: MakeNode<'_>, answer: Answer<'_, Entry>) {
        let kind = match asked.kind {
            FileKind::File => NewKind::File,
            FileKind::Pipe => NewKind::Fifo,
            FileKind::Socket => NewKind::Socket,
            FileKind::CharacterDevice => NewKind::CharacterDevice(asked.device),
            FileKind::BlockDevice => NewKind::BlockDevice(asked.device),
            FileKind::Directory | FileKind::Symlink => return answer.fail(Errno::INVAL),
        };
        let new = new(kind, asked.caller, (asked.permissions, asked.umask));
        self.make((asked.parent, asked.name), new, answer);
    }

    fn make_directory(&self, asked: MakeDirectory<'_>, answer: Answer<'_, Entry>) {
        let MakeDirectory { parent, name, caller, permissions, umask } = asked;
        let new = new(NewKind::Directory, caller, (permissions, umask));
        self.make((parent, name), new, answer);
    }

    fn unlink(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let unknown = [Stale::Attributes(asked.parent)];
        self.change(answer, unknown, |files, done| files.unlink(asked.parent, asked.name, done));
    }

    fn remove_directory(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let unknown = [Stale::Attributes(asked.parent)];
        self.change(answer, unknown, |files, done| files.rmdir(asked.parent, asked.name, done));
    }

    fn rename(&self, asked: Rename<'_>, answer: Answer<'_, Done>) {
        let how = match asked.how {
            RenameHow::Replace => names::Rename::Replace,
            RenameHow::NoReplace => names::Rename::NoReplace,
            RenameHow::Exchange => names::Rename::Exchange,
        };
        let (from, to) = ((asked.parent, asked.name), (asked.new_parent, asked.new_name));
        let unknown = [Stale::Attributes(asked.parent), Stale::Attributes(asked.new_parent)];
        let owner = (asked.caller.uid, asked.caller.gid);
        self.change(answer, unknown, |files, done| match asked.leaves_whiteout {
            true => files.rename_to_whiteout(from, to, how, owner, done),
            false => files.rename(from, to, how, done),
        });
    }

    fn link(&self, asked: Link<'_>, answer: Answer<'_, Entry>) {
        self.later(answer, [Stale::Attributes(asked.parent)], |files, waiter| {
            // The kernel knows it once more.
            let hold = |files: &Files, attr: Attr| files.hold(attr.ino);
            files.link(asked.node, asked.parent, asked.name, self.afterwards(asked.node, hold, self.known(waiter)));
        });
    }

    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        let Create { parent, name, caller, permissions, umask, flags, drops_set_id } = asked;
        let new = new(NewKind::File, caller, (permissions, umask));
        self.later(answer, [Stale::Attributes(parent)], |files, waiter| {
            let tell = self.created(flags, waiter);
            // The kernel has looked before. Another name can have come since then only by this kernel itself.
            match files.lookup(parent, name).and_then(|found| files.hold(found.ino)) {
                Ok(found) if flags.is_exclusive() => {
                    files.release(found.ino, 1);
                    tell(Err(names::NamesError::Exists.into()));
                }
                Ok(found) if flags.truncates() => {
                    let set = names::SetAttributes { drops_set_id, ..names::SetAttributes::default() };
                    self.set(files, (found.ino, Some(0)), set, tell);
                }
                Ok(found) => tell(Ok(found)),
                Err(_) => files.create(parent, name, new, true, tell),
            }
        });
    }

    fn create_unnamed(&self, asked: CreateUnnamed, answer: Answer<'_, Created>) {
        let CreateUnnamed { parent, caller, permissions, umask, flags } = asked;
        let new = new(NewKind::File, caller, (permissions, umask));
        self.later(answer, NOTHING, |files, waiter| {
            files.create_unnamed(parent, new, !flags.is_exclusive(), self.created(flags, waiter));
        });
    }

    fn open(&self, asked: Open, answer: Answer<'_, Opened>) {
        let (how, uses) = (self.opened(asked.flags), self.uses.clone());
        if !asked.flags.truncates() {
            uses.opened(asked.node);
            return answer.give(how);
        }
        self.later(answer, [Stale::Content(asked.node)], |files, waiter| {
            let tell = move |result: Result<Attr, FilesError>| {
                let is_opened = result.is_ok();
                if is_opened {
                    uses.opened(asked.node);
                }
                if !say(waiter, result.map(|_| how)) && is_opened {
                    uses.closed(asked.node);
                }
            };
            let set = names::SetAttributes { drops_set_id: asked.drops_set_id, ..names::SetAttributes::default() };
            let has_lost = asked.drops_set_id && has_set_id(files, asked.node);
            self.set(files, (asked.node, Some(0)), set, tell);
            if has_lost {
                self.uses.is_stale(Stale::Attributes(asked.node));
            }
        });
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        let Ok(files) = self.files() else { return answer.fail(Errno::IO) };
        // What is in memory of this host is there when the call returns.
        let met = Arc::new(Mutex::new(Meeting::Neither));
        let meeting = Arc::clone(&met);
        files.read(asked.node, asked.offset, asked.size, move |read| {
            let mut meeting = meeting.lock().unwrap_or_else(PoisonError::into_inner);
            match std::mem::replace(&mut *meeting, Meeting::Neither) {
                Meeting::Asked(waiter) => _ = say(waiter, read.map(Data)),
                _ => *meeting = Meeting::Read(read),
            }
        });
        let mut met = met.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *met, Meeting::Neither) {
            Meeting::Read(read) => answer.result(read.map(Data).map_err(|error| error.errno())),
            _ => *met = Meeting::Asked(self.waits.wait(answer.later(), || {})),
        }
    }

    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        let Write { node, offset, data, is_from_cache, flags, drops_set_id, .. } = asked;
        if drops_set_id {
            self.drop_set_id(node);
        }
        let waits = !self.answers_ahead || flags.is_direct() || flags.is_synchronous();
        let data = data.into_bytes();
        let written = Written(u32::try_from(data.len()).unwrap_or(u32::MAX));
        if is_from_cache {
            // Of mapped memory, whose owner was answered before. What the kernel is told counts for all who map it.
            let (uses, later) = (self.uses.clone(), answer.later());
            let Ok(files) = self.files() else { return later.fail(Errno::IO) };
            return files.write_back(node, offset, data, move |result| {
                if result.is_err() {
                    uses.is_stale(Stale::Refused(node));
                }
                later.result(result.map(|()| written).map_err(|error| error.errno()));
            });
        }
        self.later(answer, [Stale::Content(node)], |files, waiter| {
            let done = move |result: Result<(), FilesError>| _ = say(waiter, result.map(|()| written));
            match waits {
                true => files.write(node, offset, data, done),
                false => files.write_ahead(node, offset, data, done),
            }
        });
    }

    fn flush(&self, asked: Close, answer: Answer<'_, Done>) {
        self.change(answer, NOTHING, |files, done| files.acknowledged(asked.node, done));
    }

    fn release(&self, asked: Close, answer: Answer<'_, Done>) {
        if self.uses.closed(asked.node)
            && let Ok(files) = self.files()
        {
            files.closed(asked.node);
        }
        answer.give(Done);
    }

    fn fsync(&self, asked: Fsync, answer: Answer<'_, Done>) {
        self.change(answer, NOTHING, |files, done| files.fsync(asked.node, asked.data_only, done));
    }

    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let mut listing = answer.listing();
        self.at_once(answer, |files| {
            files.readdir(asked.node, asked.offset, |listed| {
                let names::Listed { name, ino, kind, cookie } = listed;
                listing.push(&DirectoryEntry { node: ino, kind: file_kind(kind), name, offset: cookie })
            })?;
            Ok(listing)
        });
    }

    fn read_directory_plus(&self, asked: ReadDirectory, answer: Answer<'_, ListingPlus>) {
        let mut listing = answer.listing();
        self.at_once(answer, |files| {
            // Names first, and then what is known of them, which is not asked while names are listed.
            let mut found = Vec::new();
            files.readdir(asked.node, asked.offset, |listed| {
                let names::Listed { name, ino, kind, cookie } = listed;
                found.push((
                    name.to_vec(),
                    DirectoryEntry { node: ino, kind: file_kind(kind), name: &[], offset: cookie },
                ));
                found.len() < MOST_LISTED
            })?;
            for (name, listed) in &found {
                let is_dots = name == b"." || name == b"..";
                // One that is gone meanwhile is not listed.
                let held = if is_dots { None } else { Some(files.hold(listed.node)) };
                let known = match held {
                    None => None,
                    Some(Ok(attr)) => Some(entry(&attr, VALID)),
                    Some(Err(_)) => continue,
                };
                if !listing.push(&DirectoryEntry { name, ..*listed }, known.as_ref()) {
                    if known.is_some() {
                        files.release(listed.node, 1);
                    }
                    break;
                }
            }
            Ok(listing)
        });
    }

    fn fsync_directory(&self, asked: Fsync, answer: Answer<'_, Done>) {
        self.change(answer, NOTHING, |files, done| files.fsync(asked.node, asked.data_only, done));
    }

    fn statistics(&self, _: u64, answer: Answer<'_, Statistics>) {
        self.at_once(answer, |files| Ok(statistics(&files.statfs())));
    }

    fn allocate(&self, asked: Allocate, answer: Answer<'_, Done>) {
        let how = match asked.mode {
            0 => crate::Allocate::Grow,
            KEEP_SIZE => crate::Allocate::Keep,
            mode if mode == PUNCH_HOLE | KEEP_SIZE => crate::Allocate::Punch,
            ZERO_RANGE => crate::Allocate::ZeroGrow,
            mode if mode == ZERO_RANGE | KEEP_SIZE => crate::Allocate::ZeroKeep,
            _ => return answer.fail(Errno::OPNOTSUPP),
        };
        let unknown = [Stale::Content(asked.node)];
        self.change(answer, unknown, |files, done| {
            files.fallocate(asked.node, asked.offset, asked.length, how, done);
        });
    }

    /// What was written to mapped memory and not written back is not known here, and the kernel does not write it back
    /// before it asks. So it is told to take each file as data up to its end, as other file systems without holes do,
    /// unless all writes wait.
    fn seek(&self, asked: Seek, answer: Answer<'_, Position>) {
        if self.answers_ahead {
            return answer.fail(Errno::NOSYS);
        }
        let found = self.files().and_then(|files| {
            let found = files.seek(asked.node, asked.offset, !asked.for_data).map_err(|error| error.errno())?;
            found.map(Position).ok_or(Errno::NXIO)
        });
        answer.result(found);
    }

    fn get_xattr(&self, asked: GetXattr<'_>, answer: Answer<'_, Xattr>) {
        let found = self.files().and_then(|files| files.getxattr(asked.node, asked.name).map_err(|e| e.errno()));
        answer.result(found.and_then(|value| Xattr::of(&value, asked.size)));
    }

    fn set_xattr(&self, asked: SetXattr<'_>, answer: Answer<'_, Done>) {
        let set = names::SetXattr {
            name: asked.name.into(),
            value: asked.value.into(),
            how: match asked.how {
                SetXattrHow::Any => names::SetXattrHow::Any,
                SetXattrHow::Create => names::SetXattrHow::Create,
                SetXattrHow::Replace => names::SetXattrHow::Replace,
            },
            drops_set_group_id: asked.drops_set_group_id,
        };
        self.change(answer, [Stale::Attributes(asked.node)], |files, done| files.setxattr(asked.node, set, done));
    }

    fn list_xattrs(&self, asked: ListXattrs, answer: Answer<'_, Xattr>) {
        let is_root = asked.caller.uid == 0;
        let found = self.files().and_then(|files| files.listxattr(asked.node, is_root).map_err(|e| e.errno()));
        answer.result(found.and_then(|list| Xattr::of(&list, asked.size)));
    }

    fn remove_xattr(&self, asked: RemoveXattr<'_>, answer: Answer<'_, Done>) {
        let unknown = [Stale::Attributes(asked.node)];
        self.change(answer, unknown, |files, done| files.removexattr(asked.node, asked.name, done));
    }

    fn interrupt(&self, _: u64) {
        self.waits.interrupt();
    }
}

/// Which of the two comes first: the bytes, or the end of the call that asks for them.
enum Meeting {
    Neither,
    Read(Result<Vec<Bytes>, FilesError>),
    Asked(Waiter<Data>),
}

/// Returns whether the process still waits for it.
fn say<R: Reply>(waiter: Waiter<R>, result: Result<R, FilesError>) -> bool {
    waiter.result(result.map_err(|error| error.errno()))
}

/// How each file is open. What the page cache has of it stays right: nothing else changes it.
const OPENED: Opened = Opened {
    handle: 0,
    direct: false,
    keeps_cache: true,
    parallel_direct_writes: true,
    without_flush: true,
    caches_directory: false,
};

/// How long the kernel may use what it was told. Everything changes through it.
const VALID: Duration = Duration::from_secs(3600);

/// What the mounts are called.
const SUBTYPE: &str = "remora-volume";

/// Entries that are looked at for one listing: more than a kernel has room for in one, which is 4 KiB to 32 KiB.
const MOST_LISTED: usize = 1024;

// Of `fallocate(2)`.
const KEEP_SIZE: u32 = 1;

const PUNCH_HOLE: u32 = 2;

const ZERO_RANGE: u32 = 16;

// What of a volume is mounted, and how it ends.

/// What of a volume is mounted. When it is dropped, it is unmounted first; then the volume is closed, unless others
/// have it.
pub struct Mounted<T: Contents> {
    /// `None` once it has ended.
    session: Option<Session>,
    contents: Option<Arc<T>>,
    /// Has the kernel forget what the volume has refused. It ends after the session.
    forgetting: Option<JoinHandle<()>>,
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
    fn end(self, session: Session) -> Result<(), EndError> {
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
            join(forgetting);
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

/// Which files processes have open, and what the kernel must be told of them.
///
/// A page cache whose bytes the volume has refused (mapped memory, see [`crate::Files`]) still shows them. A thread has
/// the kernel drop them, so that a process reads what the volume has. It is not the thread that answers the kernel: the
/// kernel may wait for other answers first.
#[derive(Clone)]
struct Uses {
    /// How many times each file is open.
    open: Arc<Mutex<HashMap<u64, u32>>>,
    stale: Sender<Stale>,
}

/// What the kernel knows, or what is held for it, that is not so any more.
#[derive(Clone, Copy, Debug)]
enum Stale {
    /// The volume has refused what a process had written to a mapped file.
    Refused(u64),
    /// A process was killed while it changed what is in a file.
    Content(u64),
    /// A process was killed while it changed this directory.
    Attributes(u64),
    /// An inode is held for a kernel that was not told of it.
    Unknown(u64),
    /// The same, and it counts as open.
    Unopened(u64),
}

/// Of a change that the kernel asks about by itself, when its process is killed.
const NOTHING: [Stale; 0] = [];

impl Uses {
    /// What is stale is sent there.
    fn new(stale: Sender<Stale>) -> Uses {
        Uses { open: Arc::default(), stale }
    }

    /// A file is open once more.
    fn opened(&self, node: u64) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner).entry(node).or_default() += 1;
    }

    /// A file is open once less. Returns whether no process has it open now.
    fn closed(&self, node: u64) -> bool {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(uses) = open.get_mut(&node) else { return true };
        *uses -= 1;
        let is_last = *uses == 0;
        if is_last {
            open.remove(&node);
        }
        is_last
    }

    fn is_stale(&self, stale: Stale) {
        if let Stale::Unopened(node) = stale {
            self.closed(node);
        }
        let _ = self.stale.send(stale); // the session may be over
    }
}

/// The thread: ends when the session is dropped, and with it all senders.
fn set_right(stale: &Receiver<Stale>, notifier: &Notifier, files: &Weak<Files>) {
    while let Ok(stale) = stale.recv() {
        let told = match stale {
            Stale::Refused(node) => {
                tracing::error!(
                    node,
                    "the volume has refused bytes that a process had written to a mapped file: later writes and \
                     flushes of this inode fail until it is truncated or closed"
                );
                notifier.changed(node, 0, 0)
            }
            Stale::Content(node) => notifier.changed(node, 0, 0),
            Stale::Attributes(node) => notifier.changed_attributes(node),
            Stale::Unknown(node) | Stale::Unopened(node) => {
                files.upgrade().into_iter().for_each(|files| files.release(node, 1));
                continue;
            }
        };
        match told {
            Ok(_) | Err(Errno::NODEV | Errno::NOTCONN | Errno::CONNABORTED) => {}
            Err(errno) => tracing::warn!(?stale, "the kernel may still show what was before: {errno}"),
        }
    }
}

/// Waits for that thread, for a bounded time: a call of the file system that hangs keeps it.
fn join(thread: JoinHandle<()>) {
    let until = Instant::now() + LAST_COMPLETION_LIMIT;
    while !thread.is_finished() {
        if Instant::now() > until {
            return tracing::error!("a completion has kept the thread that has the kernel forget what is stale");
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    let _ = thread.join(); // a panic was reported where it happened
}

/// How long a completion may run.
const LAST_COMPLETION_LIMIT: Duration = Duration::from_secs(10);

const LOOK_AGAIN: Duration = Duration::from_millis(1);

// What the files say, as the kernel is told, and the other way round.

/// What a name stands for. The kernel may use it for as long as it is `valid`.
fn entry(attr: &Attr, valid: Duration) -> Entry {
    Entry { attributes: Some(attributes(attr)), generation: 0, name_valid: valid, attributes_valid: valid }
}

/// What is known of an inode. The kernel may use it for as long as it is `valid`.
fn known(attr: &Attr, valid: Duration) -> KnownAttributes {
    KnownAttributes { attributes: attributes(attr), valid }
}

fn attributes(attr: &Attr) -> Attributes {
    let names::Attributes { mode, uid, gid, accessed, modified, changed } = attr.attributes;
    Attributes {
        node: attr.ino,
        kind: file_kind(attr.kind),
        permissions: mode.into(),
        links: attr.links,
        uid,
        gid,
        size: attr.size,
        blocks: attr.blocks,
        block_bytes: BLOCK_BYTES as u32,
        device: attr.device,
        accessed: timestamp(accessed),
        modified: timestamp(modified),
        changed: timestamp(changed),
    }
}

/// The kernel's word for it.
fn file_kind(kind: Kind) -> FileKind {
    match kind {
        Kind::File => FileKind::File,
        Kind::Directory => FileKind::Directory,
        Kind::Symlink => FileKind::Symlink,
        Kind::Fifo => FileKind::Pipe,
        Kind::Socket => FileKind::Socket,
        Kind::CharacterDevice => FileKind::CharacterDevice,
        Kind::BlockDevice => FileKind::BlockDevice,
    }
}

fn has_set_id(files: &Files, node: u64) -> bool {
    files.getattr(node).is_ok_and(|attr| attr.attributes.mode & SET_ID != 0)
}

/// The bits for set-user-id and set-group-id.
const SET_ID: u16 = 0o6000;

/// What a process makes, with these permissions and this umask.
fn new(kind: NewKind, caller: Caller, (permissions, umask): (u32, u32)) -> New {
    New { kind, mode: mode(permissions), uid: caller.uid, gid: caller.gid, umask: mode(umask) }
}

/// Permissions, with the bits for set-user-id, set-group-id and sticky.
fn mode(permissions: u32) -> u16 {
    (permissions & 0o7777) as u16
}

fn timestamp(nanoseconds: i64) -> Timestamp {
    let second = NANOSECONDS;
    Timestamp { seconds: nanoseconds.div_euclid(second), nanoseconds: nanoseconds.rem_euclid(second) as u32 }
}

/// Times that do not fit are the first or the last that do, some 292 years from 1970.
fn time_to_set(time: NewTime) -> SetTime {
    match time {
        NewTime::Now => SetTime::Now,
        NewTime::At(Timestamp { seconds, nanoseconds }) => {
            SetTime::To(seconds.saturating_mul(NANOSECONDS).saturating_add(nanoseconds.into()))
        }
    }
}

/// How much is used.
fn statistics(usage: &Usage) -> Statistics {
    Statistics {
        block_bytes: BLOCK_BYTES as u32,
        blocks: usage.blocks,
        free_blocks: usage.free_blocks,
        available_blocks: usage.free_blocks,
        files: usage.inodes.saturating_add(usage.free_inodes),
        free_files: usage.free_inodes,
        name_bytes: u32::try_from(usage.name_bytes).unwrap_or(u32::MAX),
    }
}

const NANOSECONDS: i64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_beyond_what_is_kept_are_told_apart() {
        let back = |nanoseconds| time_to_set(NewTime::At(timestamp(nanoseconds)));
        for nanoseconds in [0, 1, -1, 1_700_000_000_123_456_789, -1_500_000_000, i64::MIN + NANOSECONDS, i64::MAX] {
            assert_eq!(back(nanoseconds), SetTime::To(nanoseconds), "{nanoseconds}");
        }
        assert_eq!(timestamp(-1), Timestamp { seconds: -1, nanoseconds: 999_999_999 });
        let far = NewTime::At(Timestamp { seconds: i64::MAX, nanoseconds: 5 });
        assert_eq!(time_to_set(far), SetTime::To(i64::MAX));
    }
}
