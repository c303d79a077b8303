//! The structure of each type's value, as far as it is needed to find the end of the value. Nothing here interprets a
//! value.
//!
//! Names and numbers of the types are those of the servers' `rdb.h`; the structures are what their `rdbSaveObject`
//! writes.

use super::Magic;

/// A part of a value.
#[derive(Debug)]
pub(super) enum Item {
    /// A length, as a number.
    Length,
    /// A string in any encoding.
    String,
    /// This many bytes.
    Bytes(u8),
    /// A score as text: a length byte and that many bytes, or one of three special lengths that stand for a value.
    Score,
    /// A length, and this group that many times.
    Times(&'static [Item]),
    /// What a module wrote: pairs of kind and value, up to the kind 0.
    Module,
}

use Item::{Bytes, Length, Module, Score, String, Times};

/// The type of a string: the only one whose value is examined.
pub(super) const TYPE_STRING: u8 = 0;

/// What follows the key of a value of this type; `None` for an unknown type.
pub(super) fn value(kind: u8, magic: Magic) -> Option<&'static [Item]> {
    Some(match (kind, magic) {
        // Strings; and sets, hashes and sorted sets that are one string inside: zipmap, ziplist, intset, listpack.
        (TYPE_STRING | 9..=13 | 16 | 17 | 20, _) => &[String],
        (1 | 2, _) => &[Times(&[String])], // list, set
        (3, _) => &[Times(&[String, Score])],
        (4, _) => &[Times(&[String, String])],   // hash
        (5, _) => &[Times(&[String, Bytes(8)])], // sorted set, scores in binary
        (7, _) => &[Length, Module],
        (14, _) => &[Times(&[String])],         // quicklist of ziplists
        (15, _) => STREAM_1,                    // Redis 5
        (18, _) => &[Times(&[Length, String])], // quicklist of listpacks and plain nodes
        (19, _) => STREAM_2,                    // Redis 7.0
        (21, _) => STREAM_3,                    // Redis 7.2
        // From here on, each family numbers its own types.
        (22, Magic::Valkey) => &[Times(&[String, String, Bytes(8)])], // hash with expiring fields, Valkey 9.0
        (24, Magic::Redis) => &[Bytes(8), Times(&[Length, String, String])], // the same, Redis 7.4
        (25, Magic::Redis) => &[Bytes(8), String],                    // the same as one listpack
        (26, Magic::Redis) => STREAM_4,                               // Redis 8.6
        _ => return None,
    })
}

/// What follows an opcode that is located between keys and carries nothing about them; `None` for an unknown one.
pub(super) fn aside(opcode: u8) -> Option<&'static [Item]> {
    Some(match opcode {
        super::OPCODE_AUX => &[String, String],
        super::OPCODE_RESIZEDB => &[Length, Length],
        super::OPCODE_MODULE_AUX => &[Length, Length, Length, Module],
        super::OPCODE_FUNCTION => &[String],
        super::OPCODE_SLOT_INFO => &[Length, Length, Length],
        _ => return None,
    })
}

/// Nodes; number of entries; the last id; groups.
const STREAM_1: &[Item] =
    &[Times(NODE), Length, Length, Length, Times(&[String, Length, Length, Times(PENDING), Times(CONSUMER_1)])];

/// As `STREAM_1`, then the first id, the greatest deleted id, the number of entries ever added; and each group's own
/// count.
const STREAM_2: &[Item] = &[
    Times(NODE),
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Times(&[String, Length, Length, Length, Times(PENDING), Times(CONSUMER_1)]),
];

/// As `STREAM_2`, then the time at which each consumer was last active.
const STREAM_3: &[Item] = &[
    Times(NODE),
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Times(&[String, Length, Length, Length, Times(PENDING), Times(CONSUMER_3)]),
];

/// As `STREAM_3`, then how long and how many ids of messages are remembered, these ids by producer, and two counts.
const STREAM_4: &[Item] = &[
    Times(NODE),
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Times(&[String, Length, Length, Length, Times(PENDING), Times(CONSUMER_3)]),
    Length,
    Length,
    Times(&[String, Times(&[String, Length, Length])]),
    Length,
    Length,
];

/// An id and a listpack.
const NODE: &[Item] = &[String, String];

/// An id, the time of its delivery, and the number of deliveries.
const PENDING: &[Item] = &[Bytes(16), Bytes(8), Length];

/// A name, the time at which the consumer was last seen, and the ids that it has not acknowledged.
const CONSUMER_1: &[Item] = &[String, Bytes(8), Times(&[Bytes(16)])];
const CONSUMER_3: &[Item] = &[String, Bytes(8), Bytes(8), Times(&[Bytes(16)])];
