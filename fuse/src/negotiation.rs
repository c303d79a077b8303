//! Negotiation: the first request, INIT, in which both ends say what they can do.

use crate::abi::{Fields, INIT_BYTES, LEAST_MINOR, MAJOR, MINOR, OLD_INIT_BYTES, Put, init};
use crate::error::StartError;

/// What the kernel offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) readahead_bytes: u32,
    pub(crate) flags: u64,
}

/// What is wished of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) most_bytes: u32,
    pub(crate) write_back: bool,
    pub(crate) lists_attributes: bool,
    pub(crate) ring: bool,
    pub(crate) xattrs: bool,
}

/// What was agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub(crate) minor: u32,
    pub(crate) flags: u64,
    pub(crate) readahead_bytes: u32,
    pub(crate) most_bytes: u32,
}

impl Offer {
    /// Reads the request's body.
    pub(crate) fn decode(body: &[u8]) -> Option<Offer> {
        let mut fields = Fields(body.get(..OLD_INIT_BYTES)?);
        let (major, minor, readahead_bytes) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let low = u64::from(fields.u32()?);
        let has_more = low & init::INIT_EXT != 0 && body.len() >= INIT_BYTES;
        let high = if has_more { Fields(&body[OLD_INIT_BYTES..]).u32()? } else { 0 };
        Some(Offer { major, minor, readahead_bytes, flags: low | u64::from(high) << 32 })
    }

    /// Whether the kernel has its rings for us.
    pub(crate) fn has_ring(&self) -> bool {
        self.flags & init::OVER_IO_URING != 0
    }

    /// Takes as much of the wish as the kernel has.
    pub(crate) fn agree(&self, wish: &Wish) -> Result<Agreed, StartError> {
        let &Offer { major, minor, readahead_bytes, flags } = self;
        if major != MAJOR || minor < LEAST_MINOR {
            return Err(StartError::Version { major, minor });
        }
        let when = |wished: bool, flags: u64| if wished { flags } else { 0 };
        let wished = ALWAYS
            | when(wish.write_back, init::WRITEBACK_CACHE)
            | when(wish.lists_attributes, init::DO_READDIRPLUS | init::READDIRPLUS_AUTO)
            | when(wish.ring, init::OVER_IO_URING)
            | when(wish.xattrs && flags & XATTRS == XATTRS, XATTRS);
        let flags = flags & wished;
        // Without the flag a request has at most 32 pages.
        let most_bytes =
            if flags & init::MAX_PAGES != 0 { wish.most_bytes } else { wish.most_bytes.min(32 * page_bytes()) };
        Ok(Agreed { minor: minor.min(MINOR), flags, readahead_bytes, most_bytes })
    }
}

impl Agreed {
    /// Whether the file system is asked for extended attributes.
    pub(crate) fn has_xattrs(&self) -> bool {
        self.flags & XATTRS == XATTRS
    }

    /// The answer's body.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(INIT_BYTES);
        out.put_u32(MAJOR).put_u32(self.minor).put_u32(self.readahead_bytes).put_u32(self.flags as u32);
        out.put_u16(MOST_BACKGROUND).put_u16(CONGESTED).put_u32(self.most_bytes);
        // Times are kept to the nanosecond.
        out.put_u32(1).put_u16((self.most_bytes / page_bytes()) as u16).put_u16(0);
        out.put_u32((self.flags >> 32) as u32);
        out.resize(INIT_BYTES, 0);
        out
    }
}

/// What is always good to have.
const ALWAYS: u64 = init::ASYNC_READ
    | init::ATOMIC_O_TRUNC
    | init::BIG_WRITES
    | init::ASYNC_DIO
    | init::PARALLEL_DIROPS
    | init::MAX_PAGES
    | init::CACHE_SYMLINKS
    | init::INIT_EXT
    | init::DIRECT_IO_ALLOW_MMAP;

/// What extended attributes need, all of it or nothing: without a part of it ACLs would not be obeyed, or each write
/// would ask for the file's capabilities.
const XATTRS: u64 = init::DONT_MASK | init::POSIX_ACL | init::HANDLE_KILLPRIV_V2 | init::SETXATTR_EXT;

/// The unit in which the kernel counts.
pub(crate) fn page_bytes() -> u32 {
    rustix::param::page_size() as u32
}

/// Requests for which no process waits, such as readahead, that may be under way: five times the kernel's default,
/// as a volume answers over a network.
const MOST_BACKGROUND: u16 = 64;

/// At this number of requests, readahead pauses.
const CONGESTED: u16 = 48;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn body(flags: u64) -> Vec<u8> {
        let mut body = Vec::new();
        body.put_u32(7).put_u32(45).put_u32(1 << 17).put_u32(flags as u32).put_u32((flags >> 32) as u32);
        body.resize(INIT_BYTES, 0);
        body
    }

    const WISH: Wish = Wish { most_bytes: 1 << 20, write_back: true, lists_attributes: true, ring: true, xattrs: true };

    #[test]
    fn what_the_kernel_does_not_offer_is_not_agreed() {
        let offer = Offer::decode(&body(init::INIT_EXT | init::WRITEBACK_CACHE | init::OVER_IO_URING)).unwrap();
        let agreed = offer.agree(&WISH).unwrap();
        assert_eq!(agreed.flags, init::INIT_EXT | init::WRITEBACK_CACHE | init::OVER_IO_URING);
        assert_eq!((agreed.most_bytes, agreed.minor), (128 << 10, 45), "32 pages without MAX_PAGES");
        let agreed = offer.agree(&Wish { write_back: false, ring: false, ..WISH }).unwrap();
        assert_eq!(agreed.flags, init::INIT_EXT);
        assert_eq!(agreed.encode().len(), INIT_BYTES);
    }

    #[test]
    fn extended_attributes_are_agreed_with_all_that_they_need_or_not_at_all() {
        let agreed = |offered, xattrs| {
            let offer = Offer::decode(&body(init::INIT_EXT | offered)).unwrap();
            offer.agree(&Wish { xattrs, ..WISH }).unwrap()
        };
        assert!(agreed(XATTRS, true).has_xattrs() && !agreed(XATTRS, false).has_xattrs());
        assert_eq!(agreed(XATTRS, false).flags & XATTRS, 0);
        for missing in [init::DONT_MASK, init::POSIX_ACL, init::HANDLE_KILLPRIV_V2, init::SETXATTR_EXT] {
            assert_eq!(agreed(XATTRS & !missing, true).flags & XATTRS, 0);
        }
    }

    #[test]
    fn an_old_kernels_offer_is_read_without_its_second_word() {
        let old = &body(init::MAX_PAGES | init::OVER_IO_URING)[..OLD_INIT_BYTES];
        let offer = Offer::decode(old).unwrap();
        assert!(!offer.has_ring());
        assert_eq!(offer.agree(&WISH).unwrap().most_bytes, 1 << 20);
        let too_old = Offer { minor: LEAST_MINOR - 1, ..offer }.agree(&WISH);
        assert!(matches!(too_old, Err(StartError::Version { minor: 30, .. })), "{too_old:?}");
        assert_eq!(Offer::decode(&old[1..]), None);
    }
}
