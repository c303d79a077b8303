//! Option: the data of the options that have fields.

use crate::protocol::MAX_STRING_BYTES;

/// The data's lengths do not agree, or a string is longer than the protocol allows.
pub(super) struct Malformed;

/// The data of INFO and GO.
pub(super) struct Choice<'a> {
    pub(super) name: &'a [u8],
    wanted: &'a [u8],
}

impl<'a> Choice<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<Choice<'a>, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let [high, low] = *fields.take()?;
        let wanted = fields.0;
        let is_whole = wanted.len() == 2 * usize::from(u16::from_be_bytes([high, low]));
        if is_whole { Ok(Choice { name, wanted }) } else { Err(Malformed) }
    }

    pub(super) fn wants(&self, what: u16) -> bool {
        self.wanted.chunks_exact(2).any(|pair| pair == what.to_be_bytes())
    }
}

/// The data of LIST and SET of contexts.
pub(super) struct Contexts<'a> {
    pub(super) name: &'a [u8],
    pub(super) queries: Vec<&'a [u8]>,
}

impl<'a> Contexts<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<Contexts<'a>, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = u32::from_be_bytes(*fields.take()?);
        // Each query has four bytes at least, so a false count ends with the data.
        let queries: Result<Vec<_>, _> = (0..count).map(|_| fields.string()).collect();
        let queries = queries?;
        if fields.0.is_empty() { Ok(Contexts { name, queries }) } else { Err(Malformed) }
    }
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<&'a [u8; N], Malformed> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(field)
    }

    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let length = u32::from_be_bytes(*self.take()?) as usize;
        if length > MAX_STRING_BYTES {
            return Err(Malformed);
        }
        let (string, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(string)
    }
}
