//! Device: requests and answers by `/dev/fuse`.
//!
//! Each thread has a descriptor of its own and reads one request at a time. It has it done, and writes the answer
//! to the same descriptor. An answer that is given later is written by the thread that gives it.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, opcode};

use crate::abi::{IN_HEADER_BYTES, InHeader, OUT_HEADER_BYTES, Put, notify, op, out_header};
use crate::answer::{Asked, Buffer, Buffers, LaterReplier, Payload, Replier, Sink, SinkPlace, WRONG_LENGTH};
use crate::error::DEVICE;
use crate::file_system::{self, FileSystem};
use crate::request::{Request, is_of_xattrs, operation_bytes, parse};

/// A descriptor of the device.
pub(crate) struct Channel(OwnedFd);

/// What a read of the device has brought.
pub(crate) enum Received {
    /// A request of this number of bytes.
    Request(usize),
    /// Nothing this time.
    Nothing,
    /// The file system is not mounted any more, or its connection was aborted.
    Over,
}

impl Channel {
    pub(crate) fn new(device: OwnedFd) -> Channel {
        Channel(device)
    }

    pub(crate) fn device(&self) -> &OwnedFd {
        &self.0
    }

    /// Waits for a request. Ends when the file system is unmounted or aborted.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Received {
        match rustix::io::read(&self.0, into) {
            Ok(length) => Received::Request(length),
            // ENOENT: the request was withdrawn while it was read.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => Received::Nothing,
            Err(Errno::NODEV | Errno::CONNABORTED) => Received::Over,
            Err(errno) => {
                tracing::error!("a request of the kernel cannot be read: {errno}");
                Received::Over
            }
        }
    }

    /// Gives an answer.
    pub(crate) fn send(&self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        let (pieces, error) = match answer {
            Ok(pieces) => (pieces, 0),
            Err(errno) => (&[][..], -errno.raw_os_error()),
        };
        match self.write(unique, error, pieces) {
            Ok(()) => {}
            // The process was killed meanwhile, or the file system is not mounted any more.
            Err(Errno::NOENT | Errno::NODEV | Errno::PERM | Errno::CONNABORTED) => {}
            Err(errno) => tracing::warn!(unique, "the kernel does not take an answer: {errno}"),
        }
    }

    /// Writes one message: an answer, or with `unique` 0 a notification.
    pub(crate) fn write(&self, unique: u64, error: i32, pieces: &[&[u8]]) -> Result<(), Errno> {
        let length = OUT_HEADER_BYTES + pieces.iter().map(|piece| piece.len()).sum::<usize>();
        let head = out_header(length, error, unique);
        let result = match pieces {
            [] => rustix::io::write(&self.0, &head),
            [one] => rustix::io::writev(&self.0, &[IoSlice::new(&head), IoSlice::new(one)]),
            several if several.len() < MOST_PIECES => {
                let all = std::iter::once(&head[..]).chain(several.iter().copied());
                rustix::io::writev(&self.0, &all.map(IoSlice::new).collect::<Vec<_>>())
            }
            several => rustix::io::writev(&self.0, &[IoSlice::new(&head), IoSlice::new(&several.concat())]),
        };
        result.map(|_| ())
    }
}

/// Pieces that one call of the system can write: `UIO_MAXIOV`.
const MOST_PIECES: usize = 1024;

/// Serves requests until the file system is not mounted any more.
pub(crate) fn serve(channel: &Arc<Channel>, file_system: &dyn FileSystem, buffers: &Arc<Buffers>, has_xattrs: bool) {
    let mut buffer = buffers.take();
    let mut replier = DeviceReplier { channel: Arc::clone(channel), filled: Vec::new() };
    loop {
        match channel.receive(buffer.as_mut()) {
            Received::Request(length) => one(&mut buffer, length, file_system, has_xattrs, &mut replier),
            Received::Nothing => {}
            Received::Over => return,
        }
    }
}

/// One request.
fn one(
    buffer: &mut Buffer,
    length: usize,
    file_system: &dyn FileSystem,
    has_xattrs: bool,
    replier: &mut DeviceReplier,
) {
    let received = &buffer.as_slice()[..length];
    let Some(header) = InHeader::decode(received) else {
        return tracing::error!(length, "the kernel has sent a request without a whole head");
    };
    let body = &received[IN_HEADER_BYTES..];
    let split = operation_bytes(header.opcode).min(body.len());
    let (operation, payload) = body.split_at(split);
    if header.length as usize != length {
        return file_system::request(file_system, &header, Err(Errno::INVAL), replier);
    }
    if !has_xattrs && is_of_xattrs(header.opcode) {
        // They may have another form then.
        return file_system::request(file_system, &header, Err(Errno::NOSYS), replier);
    }
    match parse(&header, operation, payload) {
        Ok(Request::Write(fields)) => {
            let start = IN_HEADER_BYTES + split;
            let data = Payload::in_buffer(buffer, start..start + fields.size as usize);
            file_system::write(file_system, &header, fields, data, replier);
        }
        // These have no answer, not even that they are wrong.
        Err(_) if matches!(header.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT) => {}
        parsed => file_system::request(file_system, &header, parsed, replier),
    }
}

/// Answers in the thread that has received the request.
struct DeviceReplier {
    channel: Arc<Channel>,
    /// Where bytes of reads are put, as long as the longest.
    filled: Vec<u8>,
}

impl Replier for DeviceReplier {
    fn reply(&mut self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        self.channel.send(unique, answer);
    }

    fn fill(&mut self, asked: Asked, fill: &mut dyn FnMut(&mut Sink<'_>)) {
        let most = asked.most.min(MOST_FILLED_BYTES);
        if self.filled.len() < most {
            self.filled.resize(most, 0);
        }
        let mut sink = Sink::new(SinkPlace::Slice(&mut self.filled[..most]), most);
        fill(&mut sink);
        match sink.finish() {
            Some(length) => self.channel.send(asked.unique, Ok(&[&self.filled[..length]])),
            None => self.channel.send(asked.unique, Err(WRONG_LENGTH)),
        }
    }

    fn later(&mut self) -> Box<dyn LaterReplier> {
        Box::new(DeviceLater(Arc::clone(&self.channel)))
    }
}

/// Bytes that one read may want: 16 MiB, more than any kernel asks for.
const MOST_FILLED_BYTES: usize = 16 << 20;

/// Answers in any thread.
struct DeviceLater(Arc<Channel>);

impl LaterReplier for DeviceLater {
    fn reply(self: Box<Self>, unique: u64, answer: Result<&[&[u8]], Errno>) {
        self.0.send(unique, answer);
    }
}

// One `ioctl(2)`: another descriptor of a mounted file system, with requests under way of its own.

/// Opens the device for the connection that `first` has.
#[allow(unsafe_code)] // one ioctl
pub(crate) fn clone(first: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let device = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let number = first.as_raw_fd().cast_unsigned();
    // SAFETY: The code is that of FUSE_DEV_IOC_CLONE. The kernel reads a u32 behind the pointer and writes nothing;
    // `Setter` gives it a pointer to `number`, which is a u32 and lives through the call.
    let setter = unsafe { Setter::<CLONE, u32>::new(number) };
    // SAFETY: The device is open. For a descriptor that is not of the device, the kernel says ENOTTY and touches
    // nothing.
    unsafe { rustix::ioctl::ioctl(&device, setter) }?;
    Ok(device)
}

/// `FUSE_DEV_IOC_CLONE`, which is `_IOR(229, 0, uint32_t)`.
const CLONE: Opcode = opcode::read::<u32>(229, 0);

// The kernel is told what has changed without it, and asks again.
//
// For file systems that others change too. Not to be called while a request about the same inode waits for its
// answer in the same thread: the kernel may wait for that answer first.

/// Tells the kernel what has changed. Can be used from any thread. After the session the kernel
/// knows nothing.
#[derive(Clone)]
pub struct Notifier(Arc<Channel>);

impl Notifier {
    pub(crate) fn new(channel: Arc<Channel>) -> Notifier {
        Notifier(channel)
    }

    /// The inode has other attributes, and from `offset` on other content; with a `length` of 0 up to its end.
    /// Returns whether the kernel knew the inode.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn changed(&self, node: u64, offset: u64, length: u64) -> Result<bool, Errno> {
        let mut body = Vec::with_capacity(24);
        body.put_u64(node).put_u64(offset).put_u64(length);
        self.tell(notify::INVAL_INODE, &body)
    }

    /// The inode has other attributes. Returns whether the kernel knew the inode.
    ///
    /// # Errors
    /// As for [`Notifier::changed`].
    pub fn changed_attributes(&self, node: u64) -> Result<bool, Errno> {
        let mut body = Vec::with_capacity(24);
        body.put_u64(node).put_u64(u64::MAX).put_u64(0);
        self.tell(notify::INVAL_INODE, &body)
    }

    /// The name in this directory means something else, or nothing. Returns whether the kernel knew the name.
    ///
    /// # Errors
    /// As for [`Notifier::changed`].
    pub fn renamed(&self, parent: u64, name: &[u8]) -> Result<bool, Errno> {
        let mut body = Vec::with_capacity(17 + name.len());
        body.put_u64(parent).put_u32(name.len() as u32).put_u32(0).put(name).put(&[0]);
        self.tell(notify::INVAL_ENTRY, &body)
    }

    fn tell(&self, code: i32, body: &[u8]) -> Result<bool, Errno> {
        match self.0.write(0, code, &[body]) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}
