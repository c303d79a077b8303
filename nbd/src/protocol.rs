//! The NBD protocol: its numbers, as its specification (`doc/proto.md` of the `nbd` project) names them, and what a
//! client is told. Integers are big-endian.

use std::borrow::Cow;

/// The first word of a server.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"

/// The second word of a server, and the first of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"

/// The first word of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// The first word of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

/// The first word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// The first word of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Flags of the handshake. The server's and the client's have the same values.
pub mod handshake_flags {
    /// Unknown options are answered.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// The 124 zeros after `EXPORT_NAME` are left out.
    pub const NO_ZEROES: u32 = 1 << 1;
}

/// Options.
pub mod option {
    /// Choose an export, without an answer that says why not.
    pub const EXPORT_NAME: u32 = 1;
    /// End.
    pub const ABORT: u32 = 2;
    /// Name the exports.
    pub const LIST: u32 = 3;
    /// Go on in TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Choose an export.
    pub const GO: u32 = 7;
    /// Replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name what block status can say.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose what block status says.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export's name.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// Something that block status can say.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    /// The server's owner does not allow it.
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    /// The option is malformed, or comes at the wrong time.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// TLS must be started first.
    pub const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
}

/// What [`option_reply::INFO`] is about.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The name under which the server knows the export.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes: the least, the preferred, the most.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod transmission_flags {
    /// The other flags mean something.
    pub const HAS_FLAGS: u16 = 1;
    /// It cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The flag FUA is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The flag DF is understood. Said only with structured replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The flag `FAST_ZERO` is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// End, without an answer.
    pub const DISC: u16 = 2;
    /// Make safe what was completed.
    pub const FLUSH: u16 = 3;
    /// The content is not needed any more.
    pub const TRIM: u16 = 4;
    /// It will be read soon.
    pub const CACHE: u16 = 5;
    /// Write zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Say what is a hole, and what reads as zeros.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod command_flags {
    /// Complete when it is safe.
    pub const FUA: u16 = 1;
    /// `WRITE_ZEROES` must not make holes.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Answer a read in one chunk.
    pub const DF: u16 = 1 << 2;
    /// Describe one extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail if zeros are not faster than a write.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of structured replies.
pub mod chunk {
    /// The last chunk of its reply.
    pub const DONE: u16 = 1;
    /// Offset, and bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// Offset, and how many bytes are zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error, and a text.
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// What an extent is, in `base:allocation`.
pub mod extent_flags {
    /// Nothing is allocated.
    pub const HOLE: u32 = 1;
    /// It reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// The only thing that block status says here, and its number.
pub const BASE_ALLOCATION: (&str, u32) = ("base:allocation", 1);

/// The longest string of the protocol: a name, a description, a text.
pub const MAX_STRING_BYTES: usize = 4096;

/// The most bytes of one read or write: what clients assume if a server says nothing, and what QEMU takes at most.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

// What a client is told, as bytes.
//
// Without structured replies every answer is a head of sixteen bytes, and the bytes that were read. With them, reads
// and block status are one chunk each, and errors have a text. One chunk is what the flag DF asks for, so DF needs no
// code.

/// Errors of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errno {
    /// `EPERM`.
    NotPermitted = 1,
    /// `EIO`.
    Io = 5,
    /// `ENOMEM`.
    NoMemory = 12,
    /// `EINVAL`.
    Invalid = 22,
    /// `ENOSPC`.
    NoSpace = 28,
    /// `EOVERFLOW`.
    Overflow = 75,
    /// `ENOTSUP`.
    NotSupported = 95,
    /// `ESHUTDOWN`.
    Shutdown = 108,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What programs act on.
    pub errno: Errno,
    /// What people read: the first [`MAX_TEXT_BYTES`] of it, where structured replies were negotiated.
    pub text: Cow<'static, str>,
}

impl Failure {
    /// A failure.
    pub fn new(errno: Errno, text: impl Into<Cow<'static, str>>) -> Failure {
        Failure { errno, text: text.into() }
    }
}

/// Neighbouring bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How many.
    pub length: u32,
    /// [`extent_flags`].
    pub flags: u32,
}

/// What a reply must know of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The client's name for it.
    pub cookie: u64,
    /// Where.
    pub offset: u64,
    /// How many bytes.
    pub length: u32,
    /// Whether replies may have chunks.
    pub structured: bool,
}

impl Asked {
    /// It is done, and there is nothing else to say.
    pub fn done(&self, out: &mut Vec<u8>) {
        self.simple(0, out);
    }

    /// It failed.
    pub fn fail(&self, failure: &Failure, out: &mut Vec<u8>) {
        let errno = failure.errno as u32;
        if !self.structured {
            return self.simple(errno, out);
        }
        let text = &failure.text[..failure.text.floor_boundary(MAX_TEXT_BYTES)];
        self.chunk(chunk::ERROR, 6 + text.len(), out);
        out.extend_from_slice(&errno.to_be_bytes());
        out.extend_from_slice(&(text.len() as u16).to_be_bytes());
        out.extend_from_slice(text.as_bytes());
    }

    /// The head of the bytes that were read, which follow: `length` of them.
    pub fn data(&self, out: &mut Vec<u8>) {
        if !self.structured {
            return self.simple(0, out);
        }
        self.chunk(chunk::OFFSET_DATA, 8 + self.length as usize, out);
        out.extend_from_slice(&self.offset.to_be_bytes());
    }

    /// All bytes that were to be read are zeros.
    pub fn hole(&self, out: &mut Vec<u8>) {
        if !self.structured {
            self.simple(0, out);
            return out.resize(out.len() + self.length as usize, 0);
        }
        self.chunk(chunk::OFFSET_HOLE, 12, out);
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
    }

    /// Block status: extents from the request's offset on, of `base:allocation`.
    pub fn extents(&self, extents: &[Extent], out: &mut Vec<u8>) {
        self.chunk(chunk::BLOCK_STATUS, 4 + 8 * extents.len(), out);
        out.extend_from_slice(&BASE_ALLOCATION.1.to_be_bytes());
        for extent in extents {
            out.extend_from_slice(&extent.length.to_be_bytes());
            out.extend_from_slice(&extent.flags.to_be_bytes());
        }
    }

    fn simple(&self, errno: u32, out: &mut Vec<u8>) {
        let mut head = [0; SIMPLE_BYTES];
        head[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        head[4..8].copy_from_slice(&errno.to_be_bytes());
        head[8..].copy_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&head);
    }

    /// The head of a chunk that is the only one of its reply.
    fn chunk(&self, kind: u16, bytes: usize, out: &mut Vec<u8>) {
        let mut head = [0; CHUNK_BYTES];
        head[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        head[4..6].copy_from_slice(&chunk::DONE.to_be_bytes());
        head[6..8].copy_from_slice(&kind.to_be_bytes());
        head[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        head[16..].copy_from_slice(&(bytes as u32).to_be_bytes());
        out.extend_from_slice(&head);
    }
}

/// `str::floor_char_boundary`, which is not stable in the oldest compiler that this is built with.
trait FloorBoundary {
    fn floor_boundary(&self, most: usize) -> usize;
}

impl FloorBoundary for str {
    fn floor_boundary(&self, most: usize) -> usize {
        if most >= self.len() {
            return self.len();
        }
        (0..=most).rev().find(|&at| self.is_char_boundary(at)).unwrap_or(0)
    }
}

/// Of a failure's text: a sentence.
pub const MAX_TEXT_BYTES: usize = 400;

/// The head of a simple reply.
pub const SIMPLE_BYTES: usize = 16;

/// The head of a chunk.
pub const CHUNK_BYTES: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(structured: bool) -> Asked {
        Asked { cookie: 0x0102_0304_0506_0708, offset: 0x1000, length: 4, structured }
    }

    fn bytes(say: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        say(&mut out);
        out
    }

    const COOKIE: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    /// As the specification draws them.
    #[test]
    fn replies_have_their_bytes_in_order() {
        let simple = |errno: u8| [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, errno][..], &COOKIE].concat();
        let chunk = |kind: u16, length: u8, data: &[u8]| {
            let head = [&[0x66, 0x8e, 0x33, 0xef, 0, 1][..], &kind.to_be_bytes(), &COOKIE, &[0, 0, 0, length]].concat();
            [&head, data].concat()
        };
        let failure = Failure::new(Errno::NoSpace, "full");
        for structured in [false, true] {
            assert_eq!(bytes(|out| asked(structured).done(out)), simple(0));
        }
        assert_eq!(bytes(|out| asked(false).fail(&failure, out)), simple(28));
        assert_eq!(bytes(|out| asked(false).data(out)), simple(0));
        assert_eq!(bytes(|out| asked(false).hole(out)), [simple(0), vec![0; 4]].concat());
        assert_eq!(bytes(|out| asked(true).fail(&failure, out)), chunk(0x8001, 10, b"\0\0\0\x1c\0\x04full"));
        assert_eq!(bytes(|out| asked(true).data(out)), chunk(1, 12, &[0, 0, 0, 0, 0, 0, 0x10, 0]));
        assert_eq!(bytes(|out| asked(true).hole(out)), chunk(2, 12, &[0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 4]));
        let extents = [Extent { length: 1, flags: 0 }, Extent { length: 3, flags: 3 }];
        let data = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 3];
        assert_eq!(bytes(|out| asked(true).extents(&extents, out)), chunk(5, 20, &data));
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let failure = Failure::new(Errno::Io, "é".repeat(300));
        let out = bytes(|out| asked(true).fail(&failure, out));
        assert_eq!(out.len(), CHUNK_BYTES + 6 + MAX_TEXT_BYTES);
        let odd = Failure::new(Errno::Io, format!("x{}", "é".repeat(300)));
        assert_eq!(bytes(|out| asked(true).fail(&odd, out)).len(), CHUNK_BYTES + 6 + MAX_TEXT_BYTES - 1);
    }
}
