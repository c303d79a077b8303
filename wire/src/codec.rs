//! Encodings of fields: little-endian numbers, and bounded names, texts, bytes and lists.
//!
//! Every encoding knows its greatest length ([`Codec::MAX_BYTES`]), so the compiler adds up the longest message. A
//! reader never trusts a count: it compares the count with its bound first, and allocates memory only for items that
//! are present. Text from a peer is printable, or it is refused; [`printable`] shows what is not.

use std::borrow::Cow;
use std::marker::PhantomData;

/// The encoding of one kind of value.
pub trait Codec {
    /// The type of the value.
    type Value;
    /// Length of the longest encoding, in bytes.
    const MAX_BYTES: usize;

    /// Appends a value's encoding.
    ///
    /// # Errors
    /// [`TooLarge`]: the value exceeds a bound.
    fn put(value: &Self::Value, out: &mut Vec<u8>) -> Result<(), TooLarge>;

    /// Reads one value.
    ///
    /// # Errors
    /// [`Malformed`]: the bytes are not an encoding of such a value.
    fn take(from: &mut Reader<'_>) -> Result<Self::Value, Malformed>;
}

/// The unread part of a payload.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Starts at the first byte of `payload`.
    pub fn new(payload: &'a [u8]) -> Reader<'a> {
        Reader(payload)
    }

    /// The next `count` bytes.
    ///
    /// # Errors
    /// [`Malformed::Short`].
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let Some((bytes, rest)) = self.0.split_at_checked(count) else {
            let missing = count - self.0.len();
            return Err(Malformed::Short { missing });
        };
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    /// Checks that the payload has been read to its last byte. Bytes left over are an error, not an extension.
    ///
    /// # Errors
    /// [`Malformed::Trailing`].
    pub fn finish(self) -> Result<(), Malformed> {
        match self.0.len() {
            0 => Ok(()),
            extra => Err(Malformed::Trailing { extra }),
        }
    }
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Codec for $number {
            type Value = $number;
            const MAX_BYTES: usize = size_of::<$number>();

            fn put(value: &$number, out: &mut Vec<u8>) -> Result<(), TooLarge> {
                out.extend_from_slice(&value.to_le_bytes());
                Ok(())
            }

            fn take(from: &mut Reader<'_>) -> Result<$number, Malformed> {
                Ok(<$number>::from_le_bytes(from.array()?))
            }
        }
    )*};
}

numbers!(u8 u16 u32 u64);

impl Codec for bool {
    type Value = bool;
    const MAX_BYTES: usize = 1;

    fn put(value: &bool, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        u8::put(&u8::from(*value), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<bool, Malformed> {
        match u8::take(from)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(Malformed::Code { what: "bool", value }),
        }
    }
}

/// Exactly `N` bytes, without a count.
impl<const N: usize> Codec for [u8; N] {
    type Value = [u8; N];
    const MAX_BYTES: usize = N;

    fn put(value: &[u8; N], out: &mut Vec<u8>) -> Result<(), TooLarge> {
        out.extend_from_slice(value);
        Ok(())
    }

    fn take(from: &mut Reader<'_>) -> Result<[u8; N], Malformed> {
        from.array()
    }
}

/// A bool, followed by the value if it is true.
pub struct Maybe<C>(PhantomData<C>);

impl<C: Codec> Codec for Maybe<C> {
    type Value = Option<C::Value>;
    const MAX_BYTES: usize = 1 + C::MAX_BYTES;

    fn put(value: &Self::Value, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        bool::put(&value.is_some(), out)?;
        value.as_ref().map_or(Ok(()), |value| C::put(value, out))
    }

    fn take(from: &mut Reader<'_>) -> Result<Self::Value, Malformed> {
        bool::take(from)?.then(|| C::take(from)).transpose()
    }
}

/// A u16 count and that many bytes, at most `MAX`.
pub struct Bytes<const MAX: usize>;

impl<const MAX: usize> Codec for Bytes<MAX> {
    type Value = Vec<u8>;
    const MAX_BYTES: usize = 2 + MAX;

    fn put(value: &Vec<u8>, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        put_counted::<MAX>(value, out)
    }

    fn take(from: &mut Reader<'_>) -> Result<Vec<u8>, Malformed> {
        Ok(take_counted::<MAX>(from)?.to_vec())
    }
}

/// A u16 count and that many bytes of UTF-8, at most `MAX`. For names and addresses, which must arrive whole or not at
/// all. Every character is [printable](is_printable), since names are shown in logs and on terminals.
pub struct Name<const MAX: usize>;

impl<const MAX: usize> Codec for Name<MAX> {
    type Value = String;
    const MAX_BYTES: usize = 2 + MAX;

    fn put(value: &String, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        put_counted::<MAX>(printable(value).as_bytes(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<String, Malformed> {
        let bytes = take_counted::<MAX>(from)?;
        let text = std::str::from_utf8(bytes).map_err(|_| Malformed::NotUtf8)?;
        match text.chars().find(|character| !is_printable(*character)) {
            Some(character) => Err(Malformed::NotPrintable { character }),
            None => Ok(text.to_owned()),
        }
    }
}

/// Like [`Name`], for explanations: a longer one is truncated, since its beginning is better than nothing.
pub struct Text<const MAX: usize>;

impl<const MAX: usize> Codec for Text<MAX> {
    type Value = String;
    const MAX_BYTES: usize = 2 + MAX;

    fn put(value: &String, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        put_counted::<MAX>(cut(&printable(value), MAX).as_bytes(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<String, Malformed> {
        Name::<MAX>::take(from)
    }
}

/// A u16 count and that many items, at most `MAX`.
pub struct List<C, const MAX: usize>(PhantomData<C>);

impl<C: Codec, const MAX: usize> Codec for List<C, MAX> {
    type Value = Vec<C::Value>;
    const MAX_BYTES: usize = 2 + MAX * C::MAX_BYTES;

    fn put(value: &Self::Value, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        put_count::<MAX>(value.len(), out)?;
        value.iter().try_for_each(|item| C::put(item, out))
    }

    fn take(from: &mut Reader<'_>) -> Result<Self::Value, Malformed> {
        let count = take_count::<MAX>(from)?;
        let mut items = Vec::new(); // grows with the items that are present: the count is only a claim
        for _ in 0..count {
            items.push(C::take(from)?);
        }
        Ok(items)
    }
}

/// Implements [`Codec`] for a struct: its fields, one after the other, in the order given.
#[macro_export]
macro_rules! record {
    ($record:ident { $($field:ident: $codec:ty),* $(,)? }) => {
        impl $crate::codec::Codec for $record {
            type Value = $record;
            const MAX_BYTES: usize = 0 $(+ <$codec as $crate::codec::Codec>::MAX_BYTES)*;

            fn put(value: &$record, out: &mut Vec<u8>) -> Result<(), $crate::codec::TooLarge> {
                $(<$codec as $crate::codec::Codec>::put(&value.$field, out)?;)*
                Ok(())
            }

            fn take(from: &mut $crate::codec::Reader<'_>) -> Result<$record, $crate::codec::Malformed> {
                Ok($record { $($field: <$codec as $crate::codec::Codec>::take(from)?,)* })
            }
        }
    };
}

/// Implements [`Codec`] for an enum without content: one byte.
#[macro_export]
macro_rules! codes {
    ($name:ident is $what:literal { $($code:literal => $variant:ident),* $(,)? }) => {
        impl $crate::codec::Codec for $name {
            type Value = $name;
            const MAX_BYTES: usize = 1;

            fn put(value: &$name, out: &mut Vec<u8>) -> Result<(), $crate::codec::TooLarge> {
                <u8 as $crate::codec::Codec>::put(&match value { $($name::$variant => $code,)* }, out)
            }

            fn take(from: &mut $crate::codec::Reader<'_>) -> Result<$name, $crate::codec::Malformed> {
                match <u8 as $crate::codec::Codec>::take(from)? {
                    $($code => Ok($name::$variant),)*
                    value => Err($crate::codec::Malformed::Code { what: $what, value }),
                }
            }
        }
    };
}

/// Bytes that are not the encoding of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The payload ends inside a field.
    #[error("the payload ends {missing} bytes too early")]
    Short {
        /// Bytes that the field still needs.
        missing: usize,
    },
    /// The payload goes on after its last field.
    #[error("the payload has {extra} bytes after its last field")]
    Trailing {
        /// Bytes after the last field.
        extra: usize,
    },
    /// A list, name or text is longer than the protocol allows.
    #[error("a field has {count} items or bytes; the limit is {limit}")]
    Excess {
        /// The count that was read.
        count: usize,
        /// The bound.
        limit: usize,
    },
    /// A text is not UTF-8.
    #[error("a text field is not UTF-8")]
    NotUtf8,
    /// A text has a character that could change what a terminal or a log shows.
    #[error("a text field contains {character:?}, which is not printable")]
    NotPrintable {
        /// The first such character.
        character: char,
    },
    /// The bytes of a field are not a value of its kind.
    #[error("a field is not a valid {what}")]
    Invalid {
        /// What the field should be.
        what: &'static str,
    },
    /// A number has no meaning.
    #[error("{value} is not a valid {what}")]
    Code {
        /// What the number should be.
        what: &'static str,
        /// The number that was read.
        value: u8,
    },
}

/// A value exceeds the protocol's bounds and cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a field has {count} items or bytes; the limit is {limit}")]
pub struct TooLarge {
    /// Its size, in items or bytes.
    pub count: usize,
    /// The bound.
    pub limit: usize,
}

fn put_counted<const MAX: usize>(bytes: &[u8], out: &mut Vec<u8>) -> Result<(), TooLarge> {
    put_count::<MAX>(bytes.len(), out)?;
    out.extend_from_slice(bytes);
    Ok(())
}

fn take_counted<'a, const MAX: usize>(from: &mut Reader<'a>) -> Result<&'a [u8], Malformed> {
    let count = take_count::<MAX>(from)?;
    from.bytes(count)
}

fn put_count<const MAX: usize>(count: usize, out: &mut Vec<u8>) -> Result<(), TooLarge> {
    match u16::try_from(count) {
        Ok(wire) if count <= MAX => u16::put(&wire, out),
        _ => Err(TooLarge { count, limit: MAX }),
    }
}

fn take_count<const MAX: usize>(from: &mut Reader<'_>) -> Result<usize, Malformed> {
    let count = usize::from(u16::take(from)?);
    if count > MAX {
        return Err(Malformed::Excess { count, limit: MAX });
    }
    Ok(count)
}

/// Returns the longest prefix of at most `max` bytes that ends at a character boundary.
pub fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

// Text from a peer that is safe to show on a terminal and in a log.
//
// A control character in a replica's name could move the cursor, hide a line, or begin a line that looks like another
// program's. Directional controls can make a line read differently from what it says.

/// The character that stands for one that is not printed.
const REPLACEMENT: char = '?';

/// Whether a terminal shows this character as itself, in its place.
pub fn is_printable(character: char) -> bool {
    !character.is_control()
        && !matches!(
            character,
            '\u{61c}' // Arabic letter mark
            | '\u{200b}'..='\u{200f}' // no width, and directional marks
            | '\u{2028}'..='\u{202e}' // line and paragraph separators, embeddings and overrides
            | '\u{2060}'..='\u{206f}' // no width, and directional isolates
            | '\u{feff}' // byte order mark
            | '\u{fff9}'..='\u{fffb}' // interlinear annotations
            | '\u{e0000}'..='\u{e007f}' // tags
        )
}

/// The text with a question mark for each character that is not printable. Never longer than `text`.
pub fn printable(text: &str) -> Cow<'_, str> {
    match text.chars().all(is_printable) {
        true => Cow::Borrowed(text),
        false => text.chars().map(|character| if is_printable(character) { character } else { REPLACEMENT }).collect(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_long_sentence_is_cut_between_characters() {
        let mut out = Vec::new();
        Text::<4>::put(&"abcé".to_owned(), &mut out).unwrap();
        assert_eq!(Text::<4>::take(&mut Reader::new(&out)).unwrap(), "abc");
    }

    #[test]
    fn a_long_name_is_an_error_not_another_name() {
        let error = Name::<4>::put(&"abcde".to_owned(), &mut Vec::new()).unwrap_err();
        assert_eq!(error, TooLarge { count: 5, limit: 4 });
    }

    #[test]
    fn a_name_that_could_change_what_a_terminal_shows_is_refused_and_never_sent() {
        let hostile = "evil\u{1b}[31m\nINFO forged".to_owned();
        let mut wire = u16::try_from(hostile.len()).unwrap().to_le_bytes().to_vec();
        wire.extend_from_slice(hostile.as_bytes());
        let refused = Malformed::NotPrintable { character: '\u{1b}' };
        assert_eq!(Name::<64>::take(&mut Reader::new(&wire)), Err(refused));
        assert_eq!(Text::<64>::take(&mut Reader::new(&wire)), Err(refused));
        let mut sent = Vec::new();
        Text::<64>::put(&hostile, &mut sent).unwrap();
        assert_eq!(Text::<64>::take(&mut Reader::new(&sent)).unwrap(), "evil?[31m?INFO forged");
    }

    #[test]
    fn a_count_is_a_claim_that_takes_no_memory() {
        let announced = u16::MAX.to_le_bytes();
        let found = List::<u64, 65535>::take(&mut Reader::new(&announced)).unwrap_err();
        assert_eq!(found, Malformed::Short { missing: 8 });
        let found = List::<u64, 3>::take(&mut Reader::new(&announced)).unwrap_err();
        assert_eq!(found, Malformed::Excess { count: 65535, limit: 3 });
    }

    #[test]
    fn yes_and_no_have_one_encoding_each() {
        let found = bool::take(&mut Reader::new(&[2])).unwrap_err();
        assert_eq!(found, Malformed::Code { what: "bool", value: 2 });
    }

    #[test]
    fn what_a_terminal_would_obey_is_replaced() {
        let hostile = "evil\u{1b}]0;title\u{7}\u{1b}[31m\n2026-01-01 INFO forged\u{85}\u{2028}\u{202e}\u{2066}\u{feff}";
        assert_eq!(printable(hostile), "evil?]0;title??[31m?2026-01-01 INFO forged?????");
        assert!(printable(hostile).len() <= hostile.len());
    }

    #[test]
    fn text_in_any_script_stays_as_it_is() {
        for text in ["db-1.example:6379", "réplique", "副本", "реплика", "🦈 1", ""] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text));
        }
    }
}
