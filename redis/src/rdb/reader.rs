//! Reads lengths and strings of whole records in place, and copies nothing. `input` reads those of which only a part
//! may have arrived.

/// A key or a string: servers write short decimal numbers in binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// The bytes.
    Bytes(&'a [u8]),
    /// A number, which stands for its decimal digits.
    Number(i32),
}

/// What is left to read of records.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*array)
    }

    /// A length where nothing else is allowed.
    pub(super) fn number(&mut self) -> Option<u64> {
        let first = self.byte()?;
        self.length(first)
    }

    /// The length that begins with `first`; `None` if it is cut off, or if it is something else.
    fn length(&mut self, first: u8) -> Option<u64> {
        match (first >> 6, first) {
            (0, _) => Some(u64::from(first)),
            (1, _) => Some(u64::from(u16::from_be_bytes([first & 0x3F, self.byte()?]))),
            (2, 0x80) => Some(u64::from(u32::from_be_bytes(self.array()?))),
            (2, 0x81) => Some(u64::from_be_bytes(self.array()?)),
            _ => None,
        }
    }

    pub(super) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(bytes)
    }

    /// A string that is neither compressed nor a number.
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()?;
        self.take(usize::try_from(length).ok()?)
    }

    /// A string that is not compressed, of fewer than `below` bytes.
    pub(super) fn content(&mut self, below: usize) -> Option<Content<'a>> {
        let number = match self.byte()? {
            0xC0 => i32::from(i8::from_le_bytes(self.array()?)),
            0xC1 => i32::from(i16::from_le_bytes(self.array()?)),
            0xC2 => i32::from_le_bytes(self.array()?),
            first => {
                let length = usize::try_from(self.length(first)?).ok().filter(|length| *length < below)?;
                return self.take(length).map(Content::Bytes);
            }
        };
        Some(Content::Number(number))
    }
}
