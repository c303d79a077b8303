//! Ways: in which type a value is written for a target, and how its parts are.
//!
//! Names and numbers of the types are those of the servers' `rdb.h`, as in [`grammar`].

use super::super::Magic;
use super::super::grammar::{self, Item};
use super::format::{Format, Obstacle};

/// A part of a value that is written in another type.
#[derive(Debug)]
pub(super) enum Part {
    /// The same in both types.
    Same(&'static [Item]),
    /// All of these.
    All(&'static [Part]),
    /// What only the old type has: a number, bytes, a string; a length, and these parts that many times.
    LeaveNumber,
    LeaveBytes(u8),
    LeaveString,
    LeaveTimes(&'static [Part]),
    /// A length, and these parts that many times.
    Times(&'static [Part]),
    /// A listpack, as one string, in another form.
    Rewrite(Form),
    /// What a list's node is: one long element, or a listpack. The node follows.
    NodeKind,
    Node,
    /// Redis: what times of fields count from. The target's own is written.
    Base,
    PutBase,
    /// Redis: the time of the field that follows; it is written behind it.
    FieldTime,
    PutFieldTime,
    /// Valkey: a field or its value, which are held until their time is known, and the time.
    Hold,
    HeldTime,
}

/// The form that a listpack is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A number of elements, and each as a string.
    Elements,
    /// The same of pairs.
    Pairs,
    /// Pairs of a member and a score in binary.
    Scores,
    /// Fields, values and times as Valkey writes them.
    TimedFields,
    /// Of the same, only fields and values.
    UntimedFields,
}

const SET_AS_TABLE: &[Part] = &[Part::Rewrite(Form::Elements)];
const HASH_AS_TABLE: &[Part] = &[Part::Rewrite(Form::Pairs)];
const SORTED_SET_AS_TABLE: &[Part] = &[Part::Rewrite(Form::Scores)];
const LIST_OF_ZIPLISTS: &[Part] = &[Part::Times(&[Part::NodeKind, Part::Node])];

/// Redis' hashes with times, as Valkey writes them, and without.
const TIMED_TABLE_FOR_VALKEY: &[Part] =
    &[Part::Base, Part::Times(&[Part::FieldTime, Part::Same(&[Item::String, Item::String]), Part::PutFieldTime])];
const TIMED_LISTPACK_FOR_VALKEY: &[Part] = &[Part::LeaveBytes(8), Part::Rewrite(Form::TimedFields)];
const UNTIMED_TABLE: &[Part] =
    &[Part::LeaveBytes(8), Part::Times(&[Part::LeaveNumber, Part::Same(&[Item::String, Item::String])])];
const UNTIMED_LISTPACK: &[Part] = &[Part::LeaveBytes(8), Part::Rewrite(Form::UntimedFields)];

/// Valkey's hashes with times, as Redis writes them, and without.
const TIMED_FOR_REDIS: &[Part] = &[Part::PutBase, Part::Times(&[Part::Hold, Part::Hold, Part::HeldTime])];
const UNTIMED_OF_VALKEY: &[Part] = &[Part::Times(&[Part::Same(&[Item::String, Item::String]), Part::LeaveBytes(8)])];

/// Streams without what later servers added. For 7.2 and Valkey without the ids of messages that producers gave; for
/// 7.0 also without the time at which a consumer was last active; for 6.2 also without the first id, the greatest
/// deleted id, the entries ever added, and each group's own count of them.
const STREAM_4_FOR_7_2: &[Part] = &[
    STREAM_FROM_7_0,
    Part::Same(&[Item::Times(&[
        Item::String,
        Item::Length,
        Item::Length,
        Item::Length,
        Item::Times(PENDING),
        Item::Times(&[Item::String, Item::Bytes(8), Item::Bytes(8), Item::Times(&[Item::Bytes(16)])]),
    ])]),
    LEAVE_MESSAGE_IDS,
];
const STREAM_3_FOR_7_0: &[Part] = &[STREAM_FROM_7_0, GROUPS_FOR_7_0];
const STREAM_4_FOR_7_0: &[Part] = &[STREAM_FROM_7_0, GROUPS_FOR_7_0, LEAVE_MESSAGE_IDS];
const STREAM_3_FOR_6_2: &[Part] = &[STREAM_OF_6_2, LEAVE_COUNTERS_OF_7_0, GROUPS_OF_7_2_FOR_6_2];
const STREAM_4_FOR_6_2: &[Part] = &[STREAM_OF_6_2, LEAVE_COUNTERS_OF_7_0, GROUPS_OF_7_2_FOR_6_2, LEAVE_MESSAGE_IDS];
const STREAM_2_FOR_6_2: &[Part] = &[
    STREAM_OF_6_2,
    LEAVE_COUNTERS_OF_7_0,
    Part::Times(&[
        Part::Same(&[Item::String, Item::Length, Item::Length]),
        Part::LeaveNumber,
        Part::Same(&[
            Item::Times(PENDING),
            Item::Times(&[Item::String, Item::Bytes(8), Item::Times(&[Item::Bytes(16)])]),
        ]),
    ]),
];

const STREAM_OF_6_2: Part = Part::Same(&[Item::Times(STREAM_NODE), Item::Length, Item::Length, Item::Length]);
const STREAM_FROM_7_0: Part = Part::Same(&[
    Item::Times(STREAM_NODE),
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
]);
const LEAVE_COUNTERS_OF_7_0: Part =
    Part::All(&[Part::LeaveNumber, Part::LeaveNumber, Part::LeaveNumber, Part::LeaveNumber, Part::LeaveNumber]);
const GROUPS_FOR_7_0: Part = Part::Times(&[
    Part::Same(&[Item::String, Item::Length, Item::Length, Item::Length, Item::Times(PENDING)]),
    Part::Times(CONSUMER_WITHOUT_ACTIVE_TIME),
]);
const GROUPS_OF_7_2_FOR_6_2: Part = Part::Times(&[
    Part::Same(&[Item::String, Item::Length, Item::Length]),
    Part::LeaveNumber,
    Part::Same(&[Item::Times(PENDING)]),
    Part::Times(CONSUMER_WITHOUT_ACTIVE_TIME),
]);
const LEAVE_MESSAGE_IDS: Part = Part::All(&[
    Part::LeaveNumber,
    Part::LeaveNumber,
    Part::LeaveTimes(&[
        Part::LeaveString,
        Part::LeaveTimes(&[Part::LeaveString, Part::LeaveNumber, Part::LeaveNumber]),
    ]),
    Part::LeaveNumber,
    Part::LeaveNumber,
]);
const CONSUMER_WITHOUT_ACTIVE_TIME: &[Part] =
    &[Part::Same(&[Item::String, Item::Bytes(8)]), Part::LeaveBytes(8), Part::Same(&[Item::Times(&[Item::Bytes(16)])])];
const STREAM_NODE: &[Item] = &[Item::String, Item::String];
const PENDING: &[Item] = &[Item::Bytes(16), Item::Bytes(8), Item::Length];

/// The type of a value at the target, and how it is written.
pub(super) enum Way {
    Same(&'static [Item]),
    Changed(u8, &'static [Part]),
    Without(Obstacle, u8, &'static [Part]),
}

/// How a value of this type is written for a target. `None`: the type is not known.
pub(super) fn way(kind: u8, from: Magic, to: Format) -> Option<Way> {
    let same = grammar::value(kind, from)?;
    // Numbers from 22 on mean other things in the other family.
    let is_other_family = kind >= 22 && from != to.family();
    if to.knows(kind) && !is_other_family {
        return Some(Way::Same(same));
    }
    Some(match (kind, to.family()) {
        (16, _) => Way::Changed(4, HASH_AS_TABLE),
        (17, _) => Way::Changed(5, SORTED_SET_AS_TABLE),
        (18, _) => Way::Changed(14, LIST_OF_ZIPLISTS),
        (19, _) => Way::Changed(15, STREAM_2_FOR_6_2),
        (20, _) => Way::Changed(2, SET_AS_TABLE),
        (21, _) if to.knows(19) => Way::Changed(19, STREAM_3_FOR_7_0),
        (21, _) => Way::Changed(15, STREAM_3_FOR_6_2),
        (26, _) if to.knows(21) => Way::Changed(21, STREAM_4_FOR_7_2),
        (26, _) if to.knows(19) => Way::Changed(19, STREAM_4_FOR_7_0),
        (26, _) => Way::Changed(15, STREAM_4_FOR_6_2),
        (22, _) if to.knows(24) => Way::Changed(24, TIMED_FOR_REDIS),
        (24, Magic::Valkey) => Way::Changed(22, TIMED_TABLE_FOR_VALKEY),
        (25, Magic::Valkey) => Way::Changed(22, TIMED_LISTPACK_FOR_VALKEY),
        (22, _) => Way::Without(Obstacle::FieldExpiry, 4, UNTIMED_OF_VALKEY),
        (24, _) => Way::Without(Obstacle::FieldExpiry, 4, UNTIMED_TABLE),
        (25, _) => Way::Without(Obstacle::FieldExpiry, 4, UNTIMED_LISTPACK),
        // Modules' values: what reads them at the target is not known.
        _ => Way::Same(same),
    })
}
