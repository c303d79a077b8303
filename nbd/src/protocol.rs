//! Protocol: the numbers of the NBD protocol, as its specification (`doc/proto.md` of the `nbd` project) names them.
//! Integers are big-endian.

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
