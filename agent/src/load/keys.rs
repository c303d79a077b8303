//! The commands that create a key of each type with an exact number of bytes.
//!
//! Collections are deleted first, because their commands add; `SET` replaces a string. Elements have about 64 bytes, so
//! that both compact and full encodings occur as sizes grow. They begin with their number, so that no two are the same.

use std::{ops::Range, time::Duration};

use super::content::Look;
use super::{Content, Writer};
use crate::{
    args::{LoadArgs, ValueType},
    progress::Meter,
    server::ServerError,
};

/// Elements in one command: enough that the cost of commands does not matter, few enough that no server stalls on one.
const ELEMENTS_PER_COMMAND: usize = 512;

/// Bytes of an element. The remaining bytes of a key are spread over all of its elements.
const ELEMENT_BYTES: usize = 64;

/// The types that `mixed` takes in turn.
const TURN: [ValueType; 6] =
    [ValueType::String, ValueType::List, ValueType::Set, ValueType::Zset, ValueType::Hash, ValueType::Stream];

/// The keys to create.
pub(super) struct Keys {
    prefix: String,
    seed: u64,
    size: usize,
    value_type: ValueType,
    expire: Option<Duration>,
    look: Look,
}

impl Keys {
    pub(super) fn new(args: &LoadArgs) -> Self {
        Self {
            prefix: args.prefix.clone(),
            seed: args.seed,
            // The command line accepts at most 512 MiB.
            size: usize::try_from(args.value_size.get()).unwrap_or(usize::MAX),
            value_type: args.value_type,
            expire: args.expire,
            look: match (args.compressible, args.json) {
                (true, _) => Look::Repeating,
                (_, true) => Look::Json,
                _ => Look::Random,
            },
        }
    }

    /// Writes key `number`.
    pub(super) async fn write(&self, number: u64, writer: &mut Writer, meter: &Meter) -> Result<(), ServerError> {
        let key = format!("{}:{number}", self.prefix);
        let mut content = Content::of(self.seed, number, self.look);
        match type_of(self.value_type, number) {
            ValueType::String => self.string(&key, &mut content, writer).await?,
            collection => self.collection(&key, collection, &mut content, writer).await?,
        }
        meter.add(self.size as u64);
        Ok(())
    }

    async fn string(&self, key: &str, content: &mut Content, writer: &mut Writer) -> Result<(), ServerError> {
        writer.begin(if self.expire.is_some() { 5 } else { 3 }).await?;
        writer.word(b"SET");
        writer.word(key.as_bytes());
        writer.content(b"", self.size, content).await?;
        if let Some(expire) = self.expire {
            writer.word(b"PX");
            writer.text(expire.as_millis());
        }
        Ok(())
    }

    async fn collection(
        &self,
        key: &str,
        kind: ValueType,
        content: &mut Content,
        writer: &mut Writer,
    ) -> Result<(), ServerError> {
        writer.begin(2).await?;
        writer.word(b"DEL");
        writer.word(key.as_bytes());
        let elements = elements_of(self.size);
        let step = if kind == ValueType::Stream { 1 } else { ELEMENTS_PER_COMMAND };
        for first in (0..elements).step_by(step) {
            let some = first..elements.min(first + step);
            self.add(key, kind, some, elements, content, writer).await?;
        }
        if let Some(expire) = self.expire {
            writer.begin(3).await?;
            writer.word(b"PEXPIRE");
            writer.word(key.as_bytes());
            writer.text(expire.as_millis());
        }
        Ok(())
    }

    /// Sends one command that adds some of the elements.
    async fn add(
        &self,
        key: &str,
        kind: ValueType,
        some: Range<usize>,
        elements: usize,
        content: &mut Content,
        writer: &mut Writer,
    ) -> Result<(), ServerError> {
        let (name, words_each): (&[u8], _) = match kind {
            ValueType::List => (b"RPUSH", 1),
            ValueType::Set => (b"SADD", 1),
            ValueType::Zset => (b"ZADD", 2),
            ValueType::Hash => (b"HSET", 2),
            // The entry's id is a word besides field and value.
            _ => (b"XADD", 3),
        };
        writer.begin(2 + words_each * some.len()).await?;
        writer.word(name);
        writer.word(key.as_bytes());
        for element in some {
            match kind {
                ValueType::Zset => writer.text(format_args!("{}.{:03}", content.next() % 1_000_000, element % 1000)),
                ValueType::Hash => writer.text(format_args!("field:{element}")),
                ValueType::Stream | ValueType::Mixed | ValueType::String => {
                    // Explicit ids, so that the same seed gives the same stream.
                    writer.text(format_args!("1-{}", element + 1));
                    writer.word(b"value");
                }
                ValueType::List | ValueType::Set => {}
            }
            let number = u32::try_from(element).unwrap_or(u32::MAX).to_le_bytes();
            writer.content(&number, length_of(element, elements, self.size), content).await?;
        }
        Ok(())
    }
}

fn type_of(wanted: ValueType, number: u64) -> ValueType {
    let turn = usize::try_from(number % TURN.len() as u64).unwrap_or_default();
    match wanted {
        ValueType::Mixed => TURN.get(turn).copied().unwrap_or(ValueType::String),
        single => single,
    }
}

fn elements_of(size: usize) -> usize {
    size.div_ceil(ELEMENT_BYTES).max(1)
}

/// The bytes of one element. All elements together have exactly `size` bytes.
fn length_of(element: usize, elements: usize, size: usize) -> usize {
    size / elements + usize::from(element < size % elements)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn mixed_takes_the_types_in_turn() {
        let turn = [0, 1, 5, 6].map(|number| type_of(ValueType::Mixed, number));
        assert_eq!(turn, [ValueType::String, ValueType::List, ValueType::Stream, ValueType::String]);
        assert_eq!(type_of(ValueType::Hash, 3), ValueType::Hash);
    }

    proptest! {
        #[test]
        fn the_elements_of_a_key_have_exactly_its_bytes_and_room_for_their_number(size in 1usize..100_000) {
            let elements = elements_of(size);
            let lengths: Vec<_> = (0..elements).map(|element| length_of(element, elements, size)).collect();
            prop_assert_eq!(lengths.iter().sum::<usize>(), size);
            prop_assert!(lengths.iter().all(|length| *length <= ELEMENT_BYTES));
            prop_assert!(elements == 1 || lengths.iter().all(|length| *length >= 4));
        }
    }
}
