//! References: strings of a snapshot whose bytes are not in the snapshot but in memory that the loading server was
//! given.
//!
//! A snapshot may contain fields of modules between its records. Our field consists of words: "here begins a string
//! with this key and length", and "its next bytes are at this offset". The agent that forwards a snapshot writes the
//! words ([`field`]); the module in the server reads them ([`words`]). Not here: the memory, and whether its bytes are
//! right.
//!
//! ```text
//!   F7 │ id of the module's type │ 02 01 │ 05 <string: words> │ 00
//!                                           └─ Hello ticket │ Text key, length … │ Piece place, length │ Piece … │ Text …
//! ```
//!
//! All numbers in the words are little endian. A word is its kind and its fields, without gaps:
//!
//! | kind | fields |
//! |---|---|
//! | 1 Hello | version 2, ticket 16 |
//! | 2 Text | database 4, expires 8 (-1: never), usage kind 1 (0 none, 1 idle, 2 frequency) and value 8, length of the value 8, of the key 2, key |
//! | 3 Piece | offset 8, length 4 |
//! | 4 Run | database 4, offset 8, length 4 |
//! | 5 Verify | |

use super::{OPCODE_MODULE_AUX, Text, Usage};

/// The name of the module's type, nine characters. The server looks the type up when it meets such a field.
pub const TYPE_NAME: &str = "RemoraRef";

/// Version of the words.
pub const VERSION: u16 = 1;

/// Maximum size of the words of one field, in bytes: the server reads them into one string.
pub const FIELD_BYTES_MAX: usize = 64 * 1024;

/// Longest string that servers let a module create, in bytes.
pub const VALUE_BYTES_MAX: u64 = 512 << 20;

/// Maximum size of a run, in bytes: the module copies a run before it reads it, so a run should fit in a second-level
/// cache.
pub const RUN_BYTES_MAX: u32 = 64 << 10;

/// Values of the records in a run have fewer bytes than this. Longer ones go from their place to the server in one
/// copy, which then costs more than finding the key's place does.
pub const RUN_VALUES_BELOW: u64 = 4 << 10;

/// Bytes of a ticket.
pub const TICKET_BYTES: usize = 16;

/// One word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word<'a> {
    /// The first word: which memory the references are about.
    Hello {
        /// The ticket that the server was given beforehand, together with the memory.
        ticket: [u8; TICKET_BYTES],
    },
    /// A string begins. Its bytes come in the pieces that follow, before the next string.
    Text {
        /// Its database.
        database: u32,
        /// Its key.
        key: &'a [u8],
        /// Bytes of its value, never 0.
        length: u64,
        /// When it expires, in milliseconds since 1970.
        expires_ms: Option<u64>,
        /// Idle time or use counter, if known.
        usage: Option<Usage>,
    },
    /// The next bytes of the string.
    Piece {
        /// Offset of the bytes in the memory.
        offset: u64,
        /// Number of bytes.
        length: u32,
    },
    /// Whole records of small values are in the memory, as they were in the snapshot ([`super::Records`]). Only for a
    /// server whose module says that it takes them.
    Run {
        /// Their database.
        database: u32,
        /// Offset of the first byte in the memory.
        offset: u64,
        /// Number of bytes, from 1 to [`RUN_BYTES_MAX`].
        length: u32,
    },
    /// Everything was referred to. The module compares a sample with what the server has, and counts the field only if
    /// they agree. Only for a server whose module wants that.
    Verify,
}

impl Word<'_> {
    /// The word for the beginning of this string. `None` if it can't be referenced: the string is empty, longer than
    /// servers let a module create, or something about it does not fit into a word.
    pub fn text(text: &Text) -> Option<Word<'_>> {
        let length = text.value.end - text.value.start;
        let fits = (1..=VALUE_BYTES_MAX).contains(&length) && text.key.len() <= usize::from(u16::MAX);
        let expires_ms = text.expires_ms.map(u64::try_from).transpose().ok()?;
        let database = u32::try_from(text.database).ok()?;
        fits.then_some(Word::Text { database, key: &text.key, length, expires_ms, usage: text.usage })
    }

    /// Appends the word.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Word::Hello { ticket } => {
                out.push(HELLO);
                out.extend_from_slice(&VERSION.to_le_bytes());
                out.extend_from_slice(ticket);
            }
            Word::Text { database, key, length, expires_ms, usage } => {
                out.push(TEXT);
                out.extend_from_slice(&database.to_le_bytes());
                out.extend_from_slice(&expires_ms.map_or(u64::MAX, |at| at).to_le_bytes());
                let (kind, value) = match usage {
                    None => (0, 0),
                    Some(Usage::Idle(seconds)) => (1, *seconds),
                    Some(Usage::Frequency(count)) => (2, u64::from(*count)),
                };
                out.push(kind);
                out.extend_from_slice(&value.to_le_bytes());
                out.extend_from_slice(&length.to_le_bytes());
                out.extend_from_slice(&(key.len() as u16).to_le_bytes());
                out.extend_from_slice(key);
            }
            Word::Piece { offset, length } => {
                out.push(PIECE);
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(&length.to_le_bytes());
            }
            Word::Run { database, offset, length } => {
                out.push(RUN);
                out.extend_from_slice(&database.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(&length.to_le_bytes());
            }
            Word::Verify => out.push(VERIFY),
        }
    }
}

/// Why words can't be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WordError {
    /// Agent and module have different versions.
    #[error("the agent speaks version {found} of the references, this module {VERSION}: upgrade the older of the two")]
    Version {
        /// The agent's version.
        found: u16,
    },
    /// No agent writes this.
    #[error("the field of references is damaged: {0}")]
    Damaged(&'static str),
}

/// The words of a field, in order. Ends after the first error.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = Result<Word<'_>, WordError>> {
    let mut reader = Some(Reader(bytes));
    std::iter::from_fn(move || {
        let bytes = reader.as_mut().filter(|reader| !reader.0.is_empty())?;
        let word = bytes.word();
        if word.is_err() {
            reader = None;
        }
        Some(word)
    })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn word(&mut self) -> Result<Word<'a>, WordError> {
        let [kind] = self.array()?;
        match kind {
            HELLO => {
                let found = u16::from_le_bytes(self.array()?);
                if found != VERSION {
                    return Err(WordError::Version { found });
                }
                Ok(Word::Hello { ticket: self.array()? })
            }
            TEXT => self.text(),
            PIECE => Ok(Word::Piece { offset: self.u64()?, length: u32::from_le_bytes(self.array()?) }),
            RUN => self.run(),
            VERIFY => Ok(Word::Verify),
            _ => Err(WordError::Damaged("a word of an unknown kind")),
        }
    }

    fn run(&mut self) -> Result<Word<'a>, WordError> {
        let (database, offset) = (u32::from_le_bytes(self.array()?), self.u64()?);
        let length = u32::from_le_bytes(self.array()?);
        if !(1..=RUN_BYTES_MAX).contains(&length) {
            return Err(WordError::Damaged("a run of no bytes, or of more than agents write"));
        }
        Ok(Word::Run { database, offset, length })
    }

    fn text(&mut self) -> Result<Word<'a>, WordError> {
        let database = u32::from_le_bytes(self.array()?);
        let expires_ms = Some(self.u64()?).filter(|at| *at != u64::MAX);
        let [kind] = self.array()?;
        let value = self.u64()?;
        let usage = match kind {
            0 => None,
            1 => Some(Usage::Idle(value)),
            2 => Some(Usage::Frequency(u8::try_from(value).map_err(|_| WordError::Damaged("a frequency above 255"))?)),
            _ => return Err(WordError::Damaged("a usage of an unknown kind")),
        };
        let length = self.u64()?;
        if !(1..=VALUE_BYTES_MAX).contains(&length) {
            return Err(WordError::Damaged("a string of no bytes, or of more than servers allow"));
        }
        let key_bytes = u16::from_le_bytes(self.array()?);
        let key = self.take(usize::from(key_bytes))?;
        Ok(Word::Text { database, key, length, expires_ms, usage })
    }

    fn u64(&mut self) -> Result<u64, WordError> {
        self.array().map(u64::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WordError> {
        let (array, rest) = self.0.split_first_chunk().ok_or(CUT_OFF)?;
        self.0 = rest;
        Ok(*array)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], WordError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(CUT_OFF)?;
        self.0 = rest;
        Ok(taken)
    }
}

/// A complete field with these words, as it is written into a snapshot.
pub fn field(words: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(words.len() + 24);
    out.push(OPCODE_MODULE_AUX);
    put_length(&mut out, type_id());
    // The number 1: one of the fields before the keys. Servers accept such a field anywhere.
    out.extend_from_slice(&[2, 1, 5]);
    put_length(&mut out, words.len() as u64);
    out.extend_from_slice(words);
    out.push(0);
    out
}

/// The name of the module's type as servers encode it: six bits for each character, and ten for the version.
fn type_id() -> u64 {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let place = |byte: u8| LETTERS.iter().position(|letter| *letter == byte).unwrap_or(0) as u64;
    TYPE_NAME.bytes().fold(0, |id, byte| id << 6 | place(byte)) << 10 | u64::from(VERSION)
}

/// A length in its longest form, which every reader understands.
fn put_length(out: &mut Vec<u8>, length: u64) {
    out.push(0x81);
    out.extend_from_slice(&length.to_be_bytes());
}

const CUT_OFF: WordError = WordError::Damaged("a word that is cut off");

const HELLO: u8 = 1;
const TEXT: u8 = 2;
const PIECE: u8 = 3;
const RUN: u8 = 4;
const VERIFY: u8 = 5;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::super::{Found, Scanner};
    use super::*;

    #[allow(clippy::type_complexity)]
    fn any_word() -> impl Strategy<Value = (u8, [u8; 16], Vec<u8>, u32, u64, Option<u32>, Option<(bool, u8)>)> {
        let key = proptest::collection::vec(any::<u8>(), 0..50);
        (
            0..5_u8,
            any::<[u8; 16]>(),
            key,
            any::<u32>(),
            1..=VALUE_BYTES_MAX,
            any::<Option<u32>>(),
            any::<Option<(bool, u8)>>(),
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(drawn in proptest::collection::vec(any_word(), 0..20)) {
            let drawn: Vec<_> = drawn.iter().map(|(kind, ticket, key, number, length, expires, usage)| match kind {
                0 => Word::Hello { ticket: *ticket },
                1 => Word::Text {
                    database: *number,
                    key,
                    length: *length,
                    expires_ms: expires.map(u64::from),
                    usage: usage.map(|(idle, n)| if idle { Usage::Idle(n.into()) } else { Usage::Frequency(n) }),
                },
                2 => Word::Piece { offset: *length, length: *number },
                3 => Word::Run { database: *number, offset: *length, length: *number % RUN_BYTES_MAX + 1 },
                _ => Word::Verify,
            }).collect();
            let mut bytes = Vec::new();
            drawn.iter().for_each(|word| word.encode(&mut bytes));
            prop_assert_eq!(words(&bytes).collect::<Result<Vec<_>, _>>(), Ok(drawn));
        }

        #[test]
        fn any_bytes_are_words_or_one_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let all: Vec<_> = words(&bytes).collect();
            prop_assert!(all.iter().rev().skip(1).all(Result::is_ok));
        }
    }

    #[test]
    fn a_field_is_one_that_stands_in_a_snapshot() {
        let snapshot = [b"REDIS0011", &field(b"any words")[..], b"\xFF\0\0\0\0\0\0\0\0"].concat();
        let mut scanner = Scanner::new(0);
        let found = scanner.feed(&snapshot).unwrap().1;
        assert_eq!(found, Some(Found::End { at: snapshot.len() as u64 - 9 }));
    }

    #[test]
    fn what_has_no_place_in_a_word_is_not_referred_to() {
        let text = |length: u64, expires_ms, database| Text {
            begins: 0,
            value: 10..10 + length,
            database,
            key: b"key".to_vec(),
            expires_ms,
            usage: None,
        };
        assert!(Word::text(&text(1, Some(1), 0)).is_some());
        for text in [text(0, None, 0), text(VALUE_BYTES_MAX + 1, None, 0), text(1, Some(-1), 0), text(1, None, 1 << 32)]
        {
            assert_eq!(Word::text(&text), None);
        }
    }

    #[test]
    fn another_version_is_named() {
        let bytes = [&[HELLO, 9, 0][..], &[0; 16]].concat();
        assert_eq!(words(&bytes).next(), Some(Err(WordError::Version { found: 9 })));
    }
}
