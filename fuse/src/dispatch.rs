//! Dispatch: each request to the file system's method for it.

use rustix::io::Errno;

use crate::abi::InHeader;
use crate::answer::{Answer, Asked, Replier};
use crate::file_system::FileSystem;
use crate::payload::Payload;
use crate::reply::Reply;
use crate::request::{MOST_TARGET_BYTES, Request, Write, WriteFields};

/// Has a request done, or refuses it. A write comes by [`write`].
pub(crate) fn request(
    file_system: &dyn FileSystem,
    header: &InHeader,
    parsed: Result<Request<'_>, Errno>,
    replier: &mut dyn Replier,
) {
    let unique = header.unique;
    let request = match parsed {
        Ok(request) => request,
        Err(errno) => {
            tracing::debug!(opcode = header.opcode, %errno, "a FUSE request is refused");
            return replier.reply(unique, Err(errno));
        }
    };
    match request {
        Request::Lookup(asked) => file_system.lookup(asked, short(unique, replier)),
        Request::Forget(all) => all.iter().for_each(|(node, lookups)| file_system.forget(*node, *lookups)),
        Request::GetAttributes(asked) => file_system.get_attributes(asked, short(unique, replier)),
        Request::SetAttributes(asked) => file_system.set_attributes(asked, short(unique, replier)),
        Request::ReadLink(node) => {
            let asked = Asked { unique, most: MOST_TARGET_BYTES - 1 };
            file_system.read_link(node, Answer::new(asked, replier));
        }
        Request::Symlink(asked) => file_system.symlink(asked, short(unique, replier)),
        Request::MakeNode(asked) => file_system.make_node(asked, short(unique, replier)),
        Request::MakeDirectory(asked) => file_system.make_directory(asked, short(unique, replier)),
        Request::Unlink(asked) => file_system.unlink(asked, short(unique, replier)),
        Request::RemoveDirectory(asked) => file_system.remove_directory(asked, short(unique, replier)),
        Request::Rename(asked) => file_system.rename(asked, short(unique, replier)),
        Request::Link(asked) => file_system.link(asked, short(unique, replier)),
        Request::Create(asked) => file_system.create(asked, short(unique, replier)),
        Request::Open(asked) => file_system.open(asked, short(unique, replier)),
        Request::Read(asked) => file_system.read(asked, long(unique, asked.size, replier)),
        Request::Write(_) => replier.reply(unique, Err(Errno::INVAL)),
        Request::Flush(asked) => file_system.flush(asked, short(unique, replier)),
        Request::Release(asked) => file_system.release(asked, short(unique, replier)),
        Request::Fsync(asked) => file_system.fsync(asked, short(unique, replier)),
        Request::OpenDirectory(asked) => file_system.open_directory(asked, short(unique, replier)),
        Request::ReadDirectory(asked) => file_system.read_directory(asked, long(unique, asked.size, replier)),
        Request::ReadDirectoryPlus(asked) => {
            file_system.read_directory_plus(asked, long(unique, asked.size, replier));
        }
        Request::ReleaseDirectory(asked) => file_system.release_directory(asked, short(unique, replier)),
        Request::FsyncDirectory(asked) => file_system.fsync_directory(asked, short(unique, replier)),
        Request::Statistics(node) => file_system.statistics(node, short(unique, replier)),
        Request::Allocate(asked) => file_system.allocate(asked, short(unique, replier)),
        Request::Seek(asked) => file_system.seek(asked, short(unique, replier)),
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
    let WriteFields { node, handle, offset, is_from_cache, flags, .. } = fields;
    let asked = Write { node, handle, offset, data, is_from_cache, flags };
    file_system.write(asked, short(header.unique, replier));
}

/// An answer of a length that its kind bounds.
fn short<R: Reply>(unique: u64, replier: &mut dyn Replier) -> Answer<'_, R> {
    Answer::new(Asked { unique, most: usize::MAX }, replier)
}

/// An answer of at most as many bytes as were asked for.
fn long<R: Reply>(unique: u64, size: u32, replier: &mut dyn Replier) -> Answer<'_, R> {
    Answer::new(Asked { unique, most: size as usize }, replier)
}
