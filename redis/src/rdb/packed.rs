//! Listpacks and ziplists: the elements of one, and the other written from them.
//!
//! ```text
//!   listpack   bytes 4 │ entries 2 │ entry, its length │ entry, its length … │ FF
//!   ziplist    bytes 4 │ offset of the last entry 4 │ entries 2 │ length of the entry before, entry … │ FF
//! ```
//!
//! Servers since 7.0 write listpacks. Redis 6.2 reads them only inside of streams, and ziplists elsewhere.

/// An element: text, or a number that was written in binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element<'a> {
    Text(&'a [u8]),
    Number(i64),
}

/// The bytes are not what their type says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Damaged;

/// Bytes of the head of a listpack.
const LISTPACK_HEAD: usize = 6;

/// Bytes of the head of a ziplist.
const ZIPLIST_HEAD: usize = 10;

/// The last byte of both.
const END: u8 = 0xFF;

/// Entries that a head can count; this number stands for "this many or more".
const COUNTED_MAX: usize = u16::MAX as usize;

/// The elements of a listpack.
pub(super) struct Listpack<'a> {
    rest: &'a [u8],
}

impl<'a> Listpack<'a> {
    /// Reads the head of a listpack.
    pub(super) fn open(bytes: &'a [u8]) -> Result<Listpack<'a>, Damaged> {
        let (head, entries) = bytes.split_at_checked(LISTPACK_HEAD).ok_or(Damaged)?;
        let length = head.first_chunk().map(|bytes| u32::from_le_bytes(*bytes) as usize);
        let (END, entries) = entries.split_last().map(|(end, entries)| (*end, entries)).ok_or(Damaged)? else {
            return Err(Damaged);
        };
        if length == Some(bytes.len()) { Ok(Listpack { rest: entries }) } else { Err(Damaged) }
    }

    fn entry(&mut self) -> Option<Element<'a>> {
        let before = self.rest.len();
        let [first] = self.array()?;
        let element = match first {
            0..0x80 => Element::Number(first.into()),
            0x80..0xC0 => Element::Text(self.take(usize::from(first & 0x3F))?),
            0xC0..0xE0 => {
                let [second] = self.array()?;
                // Thirteen bits, the highest for the sign.
                let number = i64::from(u16::from_be_bytes([first & 0x1F, second]));
                Element::Number(if number >= 1 << 12 { number - (1 << 13) } else { number })
            }
            0xE0..0xF0 => {
                let [second] = self.array()?;
                Element::Text(self.take(u16::from_be_bytes([first & 0x0F, second]).into())?)
            }
            0xF0 => {
                let length = u32::from_le_bytes(self.array()?);
                Element::Text(self.take(length as usize)?)
            }
            0xF1 => Element::Number(i16::from_le_bytes(self.array()?).into()),
            0xF2 => {
                let [low, middle, high] = self.array()?;
                Element::Number((i32::from_le_bytes([0, low, middle, high]) >> 8).into())
            }
            0xF3 => Element::Number(i32::from_le_bytes(self.array()?).into()),
            0xF4 => Element::Number(i64::from_le_bytes(self.array()?)),
            _ => return None,
        };
        // Behind it stands its length, by which servers walk backwards: seven bits a byte.
        let length = before - self.rest.len();
        self.take(match length {
            0..0x80 => 1,
            0x80..0x3FFF => 2,
            0x3FFF..0x1F_FFFF => 3,
            0x1F_FFFF..0xFFF_FFFF => 4,
            _ => 5,
        })?;
        Some(element)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*array)
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Listpack<'a> {
    type Item = Result<Element<'a>, Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let entry = self.entry();
        if entry.is_none() {
            self.rest = &[];
        }
        Some(entry.ok_or(Damaged))
    }
}

/// Writes a ziplist of these elements.
pub(super) fn ziplist<'a>(elements: impl Iterator<Item = Result<Element<'a>, Damaged>>) -> Result<Vec<u8>, Damaged> {
    let mut bytes = vec![0; ZIPLIST_HEAD];
    let (mut count, mut last, mut before) = (0_usize, ZIPLIST_HEAD, 0_usize);
    for element in elements {
        (count, last) = (count + 1, bytes.len());
        match u8::try_from(before) {
            Ok(before @ 0..0xFE) => bytes.push(before),
            _ => {
                bytes.push(0xFE);
                bytes.extend_from_slice(&u32::try_from(before).map_err(|_| Damaged)?.to_le_bytes());
            }
        }
        put_ziplist_entry(&mut bytes, element?)?;
        before = bytes.len() - last;
    }
    bytes.push(END);
    let (length, last) = (u32::try_from(bytes.len()), u32::try_from(last));
    let (Ok(length), Ok(last)) = (length, last) else { return Err(Damaged) };
    let head =
        [&length.to_le_bytes()[..], &last.to_le_bytes(), &(count.min(COUNTED_MAX) as u16).to_le_bytes()].concat();
    bytes.splice(..ZIPLIST_HEAD, head);
    Ok(bytes)
}

/// An entry without the length of the one before it.
fn put_ziplist_entry(bytes: &mut Vec<u8>, element: Element<'_>) -> Result<(), Damaged> {
    match element {
        Element::Text(text) => {
            let length = u32::try_from(text.len()).map_err(|_| Damaged)?;
            let [_, _, high, low] = length.to_be_bytes();
            match length {
                0..0x40 => bytes.push(low),
                0x40..0x4000 => bytes.extend_from_slice(&[0x40 | high, low]),
                _ => {
                    bytes.push(0x80);
                    bytes.extend_from_slice(&length.to_be_bytes());
                }
            }
            bytes.extend_from_slice(text);
        }
        Element::Number(number) => match number {
            0..=12 => bytes.push(0xF1 + number as u8),
            -0x80..0x80 => bytes.extend_from_slice(&[0xFE, number as u8]),
            -0x8000..0x8000 => put_number(bytes, 0xC0, number, 2),
            -0x80_0000..0x80_0000 => put_number(bytes, 0xF0, number, 3),
            -0x8000_0000..0x8000_0000 => put_number(bytes, 0xD0, number, 4),
            _ => put_number(bytes, 0xE0, number, 8),
        },
    }
    Ok(())
}

fn put_number(bytes: &mut Vec<u8>, encoding: u8, number: i64, width: usize) {
    bytes.push(encoding);
    bytes.extend(number.to_le_bytes().iter().take(width));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn elements(bytes: &[u8]) -> Result<Vec<Element<'_>>, Damaged> {
        Listpack::open(bytes)?.collect()
    }

    #[test]
    fn a_listpack_of_a_server_is_read() {
        // The first bytes of `OBJECT`'s listpack for: 1, -1, 4095, -4096, 300, -70000, 2^31 - 1, 2^40, "a", "".
        let entries: [&[u8]; 10] = [
            b"\x01\x01",
            b"\xDF\xFF\x02",
            b"\xCF\xFF\x02",
            b"\xD0\x00\x02",
            b"\xC1\x2C\x02",
            b"\xF2\x90\xEE\xFE\x04",
            b"\xF3\xFF\xFF\xFF\x7F\x05",
            b"\xF4\0\0\0\0\0\x01\0\0\x09",
            b"\x81a\x02",
            b"\x80\x01",
        ];
        let body = entries.concat();
        let bytes = [&(body.len() as u32 + 7).to_le_bytes()[..], &[10, 0], &body, &[END]].concat();
        let numbers = [1, -1, 4095, -4096, 300, -70_000, i64::from(i32::MAX), 1 << 40];
        let wanted: Vec<_> =
            numbers.into_iter().map(Element::Number).chain([Element::Text(b"a"), Element::Text(b"")]).collect();
        assert_eq!(elements(&bytes).unwrap(), wanted);
        for cut in 0..bytes.len() {
            assert!(elements(&bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn long_entries_have_long_lengths_behind_them() {
        for length in [63_usize, 64, 4095, 4096, 0x3FFF - 5, 0x3FFF - 4, 1 << 20, 3 << 20] {
            let text = vec![b'x'; length];
            let head = match length {
                0..64 => vec![0x80 | length as u8],
                64..4096 => vec![0xE0 | (length >> 8) as u8, length as u8],
                _ => [&[0xF0][..], &(length as u32).to_le_bytes()].concat(),
            };
            let size = head.len() + length;
            let back =
                [127, 16383, 2_097_151, 268_435_455].iter().position(|most| size < *most + usize::from(*most == 127));
            let body = [&head[..], &text, &vec![0; back.unwrap() + 1], b"\x07\x01"].concat();
            let bytes = [&(body.len() as u32 + 7).to_le_bytes()[..], &[2, 0], &body, &[END]].concat();
            assert_eq!(elements(&bytes).unwrap(), [Element::Text(&text), Element::Number(7)], "{length}");
        }
    }

    #[test]
    fn a_ziplist_is_written_as_servers_write_it() {
        let elements = [Element::Text(b"ab"), Element::Number(12), Element::Number(-1), Element::Number(1 << 20)];
        let bytes = ziplist(elements.into_iter().map(Ok)).unwrap();
        assert_eq!(bytes, b"\x19\0\0\0\x13\0\0\0\x04\0\x00\x02ab\x04\xFD\x02\xFE\xFF\x03\xF0\0\0\x10\xFF");
        let long = vec![b'x'; 300];
        let bytes = ziplist([Element::Text(&long), Element::Number(0)].into_iter().map(Ok)).unwrap();
        let (head, entries) = bytes.split_at(ZIPLIST_HEAD);
        assert_eq!(head[4..8], (ZIPLIST_HEAD as u32 + 303).to_le_bytes());
        assert_eq!((&entries[..3], &entries[303..]), (&b"\0\x41\x2C"[..], &b"\xFE\x2F\x01\0\0\xF1\xFF"[..]));
    }
}
