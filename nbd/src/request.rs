//! Request: one request of a client, and whether it may take place.

use crate::Geometry;
use crate::handshake::Session;
use crate::protocol::{Errno, Failure, MAX_PAYLOAD_BYTES, REQUEST_MAGIC, command, command_flags as flag};

/// The head of a request. A write's bytes follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Flags, of which each command knows some.
    pub flags: u16,
    /// What to do.
    pub command: u16,
    /// The client's name for it, which the reply repeats.
    pub cookie: u64,
    /// Where.
    pub offset: u64,
    /// How many bytes.
    pub length: u32,
}

/// What a checked request wants of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read.
    Read,
    /// Write.
    Write {
        /// Complete when it is safe.
        fua: bool,
    },
    /// Write zeros.
    Zero(Zero),
    /// Forget the content.
    Trim {
        /// Complete when it is safe.
        fua: bool,
    },
    /// Make safe what was completed.
    Flush,
    /// Describe extents.
    Status {
        /// Only one.
        one: bool,
    },
    /// Nothing: what is asked is the case already.
    Nothing,
    /// Close the connection when everything else is answered.
    Disconnect,
}

/// How to write zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zero {
    /// Complete when it is safe.
    pub fua: bool,
    /// The memory or storage stays allocated.
    pub keep: bool,
}

/// The stream of requests cannot be followed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// This is not a request.
    #[error("the client sent {0:#010x} instead of a request")]
    Magic(u32),
    /// A write is longer than the server said that it may be.
    #[error("the client writes {0} bytes in one request, and the limit is {MAX_PAYLOAD_BYTES}")]
    TooLong(u32),
}

impl Request {
    /// Bytes of the head.
    pub const BYTES: usize = 28;

    /// Reads a head.
    ///
    /// # Errors
    /// [`Broken`]: where the next request begins is not known.
    pub fn decode(bytes: &[u8; Request::BYTES]) -> Result<Request, Broken> {
        fn field<const N: usize>(bytes: &[u8; Request::BYTES], at: usize) -> [u8; N] {
            std::array::from_fn(|byte| bytes[at + byte])
        }
        let magic = u32::from_be_bytes(field(bytes, 0));
        if magic != REQUEST_MAGIC {
            return Err(Broken::Magic(magic));
        }
        let request = Request {
            flags: u16::from_be_bytes(field(bytes, 4)),
            command: u16::from_be_bytes(field(bytes, 6)),
            cookie: u64::from_be_bytes(field(bytes, 8)),
            offset: u64::from_be_bytes(field(bytes, 16)),
            length: u32::from_be_bytes(field(bytes, 24)),
        };
        let is_too_long = request.payload() > MAX_PAYLOAD_BYTES as usize;
        if is_too_long { Err(Broken::TooLong(request.length)) } else { Ok(request) }
    }

    /// The head as bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&self.command.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
    }

    /// How many bytes follow the head. They do so too if the request is refused.
    pub fn payload(&self) -> usize {
        if self.command == command::WRITE { self.length as usize } else { 0 }
    }

    /// What the request wants of a device.
    ///
    /// # Errors
    /// What the client is to be told instead.
    pub fn check(&self, geometry: &Geometry, session: &Session) -> Result<Op, Failure> {
        if self.command == command::DISC {
            return Ok(Op::Disconnect);
        }
        let invalid = |text: &'static str| Err(Failure::new(Errno::Invalid, text));
        let known = match self.command {
            command::READ if session.structured => flag::DF,
            command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS => flag::REQ_ONE,
            command::READ | command::WRITE | command::FLUSH | command::TRIM | command::CACHE => 0,
            _ => return invalid("this server does not know the command"),
        };
        // FUA is allowed with every command, and means something with those that change something.
        if self.flags & !(known | flag::FUA) != 0 {
            return invalid("this command does not take these flags");
        }
        let fua = self.flags & flag::FUA != 0;
        if self.command == command::FLUSH {
            return if self.offset == 0 && self.length == 0 {
                Ok(Op::Flush)
            } else {
                invalid("a flush is of everything")
            };
        }
        let changes = matches!(self.command, command::WRITE | command::WRITE_ZEROES | command::TRIM);
        if changes && geometry.read_only {
            return Err(Failure::new(Errno::NotPermitted, "the export is read-only"));
        }
        self.check_place(geometry)?;
        match self.command {
            command::READ => Ok(Op::Read),
            command::WRITE => Ok(Op::Write { fua }),
            command::TRIM => Ok(Op::Trim { fua }),
            command::CACHE => Ok(Op::Nothing),
            command::BLOCK_STATUS if !session.allocation => invalid("base:allocation was not negotiated"),
            command::BLOCK_STATUS => Ok(Op::Status { one: self.flags & flag::REQ_ONE != 0 }),
            _ if self.flags & flag::FAST_ZERO != 0 && !geometry.fast_zero => {
                Err(Failure::new(Errno::NotSupported, "zeros are as slow as a write here"))
            }
            _ => Ok(Op::Zero(Zero { fua, keep: self.flags & flag::NO_HOLE != 0 })),
        }
    }

    fn check_place(&self, geometry: &Geometry) -> Result<(), Failure> {
        let (length, mask) = (u64::from(self.length), u64::from(geometry.accepted) - 1);
        let refuse = |errno, text: &'static str| Err(Failure::new(errno, text));
        if self.length == 0 {
            return refuse(Errno::Invalid, "the request is of no bytes");
        }
        if self.offset.checked_add(length).is_none_or(|end| end > geometry.size) {
            let is_write = matches!(self.command, command::WRITE | command::WRITE_ZEROES);
            let errno = if is_write { Errno::NoSpace } else { Errno::Invalid };
            return refuse(errno, "the request reaches beyond the end of the export");
        }
        if (self.offset | length) & mask != 0 {
            return refuse(Errno::Invalid, "the request is not of whole blocks of this export");
        }
        if self.command == command::READ && self.length > MAX_PAYLOAD_BYTES {
            return refuse(Errno::Overflow, "the request is longer than the most that this server takes");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;

    fn judge(
        geometry: Geometry,
        structured: bool,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
    ) -> Result<Op, Errno> {
        let session = Session { export: 0, structured, allocation: structured };
        let request = Request { flags, command, cookie: 7, offset, length };
        request.check(&geometry, &session).map_err(|failure| failure.errno)
    }

    #[test]
    fn what_may_take_place_and_what_not() {
        let blocks = Geometry::of_blocks(SIZE, 4096);
        let fine = Geometry { fast_zero: true, ..Geometry::of_blocks(SIZE, 1) };
        let read_only = Geometry { read_only: true, ..blocks };
        let sectors = Geometry { accepted: 512, ..blocks };
        use command::{BLOCK_STATUS, CACHE, DISC, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
        use flag::{DF, FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
        for (geometry, structured, command, flags, offset, length, expected) in [
            (blocks, true, READ, 0, 4096, 8192, Ok(Op::Read)),
            (blocks, true, READ, DF | FUA, 0, 4096, Ok(Op::Read)),
            (blocks, false, READ, DF, 0, 4096, Err(Errno::Invalid)),
            (blocks, true, READ, REQ_ONE, 0, 4096, Err(Errno::Invalid)),
            (blocks, true, READ, 0, 0, 512, Err(Errno::Invalid)),
            (blocks, true, READ, 0, 512, 4096, Err(Errno::Invalid)),
            (fine, true, READ, 0, 511, 1, Ok(Op::Read)),
            (sectors, true, READ, 0, 512, 1024, Ok(Op::Read)),
            (sectors, false, WRITE, 0, SIZE - 512, 512, Ok(Op::Write { fua: false })),
            (sectors, true, TRIM, 0, 512, 100, Err(Errno::Invalid)),
            (blocks, true, READ, 0, 0, 0, Err(Errno::Invalid)),
            (blocks, true, READ, 0, SIZE - 4096, 4096, Ok(Op::Read)),
            (blocks, true, READ, 0, SIZE, 4096, Err(Errno::Invalid)),
            (blocks, true, READ, 0, u64::MAX - 4095, 4096, Err(Errno::Invalid)),
            (blocks, true, WRITE, 0, SIZE, 4096, Err(Errno::NoSpace)),
            (blocks, true, WRITE, FUA, 0, 4096, Ok(Op::Write { fua: true })),
            (blocks, true, WRITE, DF, 0, 4096, Err(Errno::Invalid)),
            (blocks, true, TRIM, 0, 0, 4096, Ok(Op::Trim { fua: false })),
            (blocks, true, TRIM, NO_HOLE, 0, 4096, Err(Errno::Invalid)),
            (blocks, true, WRITE_ZEROES, NO_HOLE | FUA, 0, 4096, Ok(Op::Zero(Zero { fua: true, keep: true }))),
            (blocks, true, WRITE_ZEROES, FAST_ZERO, 0, 4096, Err(Errno::NotSupported)),
            (fine, true, WRITE_ZEROES, FAST_ZERO, 0, 4096, Ok(Op::Zero(Zero { fua: false, keep: false }))),
            (blocks, true, FLUSH, 0, 0, 0, Ok(Op::Flush)),
            (blocks, true, FLUSH, 0, 0, 4096, Err(Errno::Invalid)),
            (blocks, true, CACHE, 0, 0, 4096, Ok(Op::Nothing)),
            (blocks, true, BLOCK_STATUS, REQ_ONE, 0, 4096, Ok(Op::Status { one: true })),
            (blocks, false, BLOCK_STATUS, 0, 0, 4096, Err(Errno::Invalid)),
            (blocks, true, 8, 0, 0, 4096, Err(Errno::Invalid)),
            (blocks, true, DISC, 0, 0, 0, Ok(Op::Disconnect)),
            (read_only, true, READ, 0, 0, 4096, Ok(Op::Read)),
            (read_only, true, WRITE, 0, 0, 4096, Err(Errno::NotPermitted)),
            (read_only, true, WRITE_ZEROES, 0, 0, 4096, Err(Errno::NotPermitted)),
            (read_only, true, TRIM, 0, 0, 4096, Err(Errno::NotPermitted)),
            (read_only, true, FLUSH, 0, 0, 0, Ok(Op::Flush)),
        ] {
            let judged = judge(geometry, structured, command, flags, offset, length);
            assert_eq!(judged, expected, "command {command}, flags {flags:#x}, {offset} + {length}");
        }
        let big = Geometry::of_blocks(1 << 40, 1);
        assert_eq!(judge(big, true, READ, 0, 0, MAX_PAYLOAD_BYTES + 1), Err(Errno::Overflow));
        assert_eq!(judge(big, true, TRIM, 0, 0, u32::MAX), Ok(Op::Trim { fua: false }));
    }

    #[test]
    fn a_stream_that_cannot_be_followed_is_left() {
        let mut bytes = Vec::new();
        Request { flags: 0, command: command::WRITE, cookie: 0, offset: 0, length: MAX_PAYLOAD_BYTES + 1 }
            .encode(&mut bytes);
        let mut head: [u8; Request::BYTES] = std::array::from_fn(|at| bytes[at]);
        assert_eq!(Request::decode(&head), Err(Broken::TooLong(MAX_PAYLOAD_BYTES + 1)));
        head[7] = command::READ as u8;
        assert!(Request::decode(&head).is_ok(), "it has no bytes behind it, so it can be refused");
        head[0] ^= 1;
        assert!(matches!(Request::decode(&head), Err(Broken::Magic(_))));
    }
}
