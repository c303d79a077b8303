//! What is asked of a file system, and the method that each request calls.

use rustix::io::Errno;

use crate::abi::InHeader;
use crate::answer::{
    Answer, Asked, Created, Data, Done, Entry, KnownAttributes, Listing, ListingPlus, Opened, Payload, Position,
    Replier, Reply, Statistics, Target, Written, XATTR_LENGTH_BYTES, Xattr,
};
use crate::request::{
    Allocate, Close, Create, CreateUnnamed, Fsync, GetAttributes, GetXattr, Link, ListXattrs, Lookup,
    MOST_TARGET_BYTES, MakeDirectory, MakeNode, Open, Read, ReadDirectory, Remove, RemoveXattr, Rename, Request, Seek,
    SetAttributes, SetXattr, Symlink, Write, WriteFields,
};

/// A file system. Requests are checked as [`crate::request`] says. Many are under way at once, from many threads.
///
/// What it does not have it need not mention: the methods answer `ENOSYS`, which the kernel remembers for most of
/// them. It then does without, as the method's text says. The kernel checks permissions by the attributes, and
/// keeps locks.
pub trait FileSystem: Send + Sync {
    /// Finds a name. The kernel knows the inode once more.
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// The kernel forgets this number of lookups. When it does not know it at all, it does not ask about it
    /// before it has looked it up again. Not said of inodes that it knew when the file system was unmounted.
    fn forget(&self, node: u64, lookups: u64) {
        let _ = (node, lookups);
    }

    /// Says what is known of a file.
    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Changes attributes, and says all of them.
    fn set_attributes(&self, asked: SetAttributes, answer: Answer<'_, KnownAttributes>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Says what a symbolic link says.
    fn read_link(&self, node: u64, answer: Answer<'_, Target>) {
        let _ = node;
        answer.fail(Errno::NOSYS);
    }

    /// Makes a symbolic link. The kernel knows it once.
    fn symlink(&self, asked: Symlink<'_>, answer: Answer<'_, Entry>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Makes a file that is not opened. The kernel knows it once.
    fn make_node(&self, asked: MakeNode<'_>, answer: Answer<'_, Entry>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Makes a directory. The kernel knows it once.
    fn make_directory(&self, asked: MakeDirectory<'_>, answer: Answer<'_, Entry>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Removes a name. A file without names is there until its last handle is released and the kernel has forgotten
    /// it.
    fn unlink(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Removes an empty directory.
    fn remove_directory(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Renames.
    fn rename(&self, asked: Rename<'_>, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Gives an inode another name. The kernel knows it once more.
    fn link(&self, asked: Link<'_>, answer: Answer<'_, Entry>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Makes a regular file and opens it. The kernel knows it once. Without it, it is made by
    /// [`FileSystem::make_node`] and then opened.
    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Makes a regular file without a name and opens it. The kernel knows it once. [`FileSystem::link`] gives it a
    /// name. Without it, `O_TMPFILE` is not supported.
    fn create_unnamed(&self, asked: CreateUnnamed, answer: Answer<'_, Created>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Opens a file; with [`crate::request::OpenFlags::truncates`] its content is thrown away. Without it, handles
    /// are 0 and no file is released.
    fn open(&self, asked: Open, answer: Answer<'_, Opened>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Reads.
    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Writes.
    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// A descriptor of the handle is closed; what this answers is what `close(2)` returns. A handle may have several
    /// descriptors. Without it, closing says nothing.
    fn flush(&self, asked: Close, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// The handle is not used any more. No process waits for the answer.
    fn release(&self, asked: Close, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.give(Done);
    }

    /// Makes a file safe. Without it, `fsync(2)` succeeds.
    fn fsync(&self, asked: Fsync, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Opens a directory. Without it, handles are 0 and no directory is released.
    fn open_directory(&self, asked: Open, answer: Answer<'_, Opened>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Lists a directory, with `.` and `..` if that is wished.
    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Lists a directory, and says what a lookup of each entry would say. Asked instead of
    /// [`FileSystem::read_directory`] when the kernel believes that it will need it, if the session's options allow
    /// it.
    fn read_directory_plus(&self, asked: ReadDirectory, answer: Answer<'_, ListingPlus>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// The handle is not used any more.
    fn release_directory(&self, asked: Close, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.give(Done);
    }

    /// Makes a directory's names safe. Without it, `fsync(2)` succeeds.
    fn fsync_directory(&self, asked: Fsync, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Says what the file system has. The kernel may ask about any inode.
    fn statistics(&self, node: u64, answer: Answer<'_, Statistics>) {
        let _ = node;
        answer.fail(Errno::NOSYS);
    }

    /// Allocates room, or gives it back. Without it, `fallocate(2)` fails with `EOPNOTSUPP`.
    fn allocate(&self, asked: Allocate, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Finds data or a hole. Without it, a file is all data.
    fn seek(&self, asked: Seek, answer: Answer<'_, Position>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    // Extended attributes are asked for if the session's options say so and the kernel has what they need. The kernel
    // checks who may do it by the name's beginning, but lists all names. ACLs are such attributes. The kernel obeys
    // them, and the file system keeps them and the permission bits alike: see the README.

    /// Says what an extended attribute says; `ENODATA` if there is none.
    fn get_xattr(&self, asked: GetXattr<'_>, answer: Answer<'_, Xattr>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Sets an extended attribute.
    fn set_xattr(&self, asked: SetXattr<'_>, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Says the names of all extended attributes, each with a NUL behind it.
    fn list_xattrs(&self, asked: ListXattrs, answer: Answer<'_, Xattr>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// Removes an extended attribute; `ENODATA` if there is none.
    fn remove_xattr(&self, asked: RemoveXattr<'_>, answer: Answer<'_, Done>) {
        let _ = asked;
        answer.fail(Errno::NOSYS);
    }

    /// A signal waits for the process that made the request of this number. The file system may fail it with
    /// `EINTR`, or answer it as ever. It may have been answered already, or come only now. [`crate::Waits`] tells
    /// signals that end the process from others.
    fn interrupt(&self, unique: u64) {
        let _ = unique;
    }

    /// The session is over: no request follows. Called once, by the thread that ends the session.
    fn destroy(&self) {}
}

// Each request to the file system's method for it.

/// Has a request done, or refuses it. A write comes by [`write()`].
pub(crate) fn request(
    file_system: &dyn FileSystem,
    header: &InHeader,
    parsed: Result<Request<'_>, Errno>,
    replier: &mut dyn Replier,
) {
    let (unique, of) = (header.unique, asked_by(header));
    let request = match parsed {
        Ok(request) => request,
        Err(errno) => {
            tracing::debug!(opcode = header.opcode, %errno, "a FUSE request is refused");
            return replier.reply(unique, Err(errno));
        }
    };
    match request {
        Request::Lookup(asked) => file_system.lookup(asked, short(of, replier)),
        Request::Forget(all) => all.iter().for_each(|(node, lookups)| file_system.forget(*node, *lookups)),
        Request::GetAttributes(asked) => file_system.get_attributes(asked, short(of, replier)),
        Request::SetAttributes(asked) => file_system.set_attributes(asked, short(of, replier)),
        Request::ReadLink(node) => {
            let asked = Asked { most: MOST_TARGET_BYTES - 1, ..of };
            file_system.read_link(node, Answer::new(asked, replier));
        }
        Request::Symlink(asked) => file_system.symlink(asked, short(of, replier)),
        Request::MakeNode(asked) => file_system.make_node(asked, short(of, replier)),
        Request::MakeDirectory(asked) => file_system.make_directory(asked, short(of, replier)),
        Request::Unlink(asked) => file_system.unlink(asked, short(of, replier)),
        Request::RemoveDirectory(asked) => file_system.remove_directory(asked, short(of, replier)),
        Request::Rename(asked) => file_system.rename(asked, short(of, replier)),
        Request::Link(asked) => file_system.link(asked, short(of, replier)),
        Request::Create(asked) => file_system.create(asked, short(of, replier)),
        Request::CreateUnnamed(asked) => file_system.create_unnamed(asked, short(of, replier)),
        Request::Open(asked) => file_system.open(asked, short(of, replier)),
        Request::Read(asked) => file_system.read(asked, long(of, asked.size, replier)),
        Request::Write(_) => replier.reply(unique, Err(Errno::INVAL)),
        Request::Flush(asked) => file_system.flush(asked, short(of, replier)),
        Request::Release(asked) => file_system.release(asked, short(of, replier)),
        Request::Fsync(asked) => file_system.fsync(asked, short(of, replier)),
        Request::OpenDirectory(asked) => file_system.open_directory(asked, short(of, replier)),
        Request::ReadDirectory(asked) => file_system.read_directory(asked, long(of, asked.size, replier)),
        Request::ReadDirectoryPlus(asked) => {
            file_system.read_directory_plus(asked, long(of, asked.size, replier));
        }
        Request::ReleaseDirectory(asked) => file_system.release_directory(asked, short(of, replier)),
        Request::FsyncDirectory(asked) => file_system.fsync_directory(asked, short(of, replier)),
        Request::Statistics(node) => file_system.statistics(node, short(of, replier)),
        Request::Allocate(asked) => file_system.allocate(asked, short(of, replier)),
        Request::Seek(asked) => file_system.seek(asked, short(of, replier)),
        Request::GetXattr(asked) => file_system.get_xattr(asked, xattr(of, asked.size, replier)),
        Request::SetXattr(asked) => file_system.set_xattr(asked, short(of, replier)),
        Request::ListXattrs(asked) => file_system.list_xattrs(asked, xattr(of, asked.size, replier)),
        Request::RemoveXattr(asked) => file_system.remove_xattr(asked, short(of, replier)),
        Request::Interrupt(unique) => file_system.interrupt(unique),
        // The session says it when it ends, which is always.
        Request::Destroy => replier.reply(unique, Ok(&[])),
    }
}

/// Has a write done.
pub(crate) fn write(
    file_system: &dyn FileSystem,
    header: &InHeader,
    fields: WriteFields,
    data: Payload<'_>,
    replier: &mut dyn Replier,
) {
    let WriteFields { node, handle, offset, is_from_cache, flags, drops_set_id, .. } = fields;
    let asked = Write { node, handle, offset, data, is_from_cache, flags, drops_set_id };
    file_system.write(asked, short(asked_by(header), replier));
}

fn asked_by(header: &InHeader) -> Asked {
    Asked { unique: header.unique, process: header.pid, most: usize::MAX }
}

/// An answer of a length that its kind bounds.
fn short<R: Reply>(asked: Asked, replier: &mut dyn Replier) -> Answer<'_, R> {
    Answer::new(asked, replier)
}

/// An answer of at most as many bytes as there is room for, or how many there would be.
fn xattr(asked: Asked, size: u32, replier: &mut dyn Replier) -> Answer<'_, Xattr> {
    let most = if size == 0 { XATTR_LENGTH_BYTES } else { size as usize };
    Answer::new(Asked { most, ..asked }, replier)
}

/// An answer of at most as many bytes as were asked for.
fn long<R: Reply>(asked: Asked, size: u32, replier: &mut dyn Replier) -> Answer<'_, R> {
    Answer::new(Asked { most: size as usize, ..asked }, replier)
}
