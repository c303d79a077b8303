//! Where the keys of a command are, as the servers tell it (key specifications).

/// Keys of a command, of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// What becomes of their values.
    pub access: Access,
    /// Where to begin.
    pub begin: Begin,
    /// Which arguments they are from there on.
    pub find: Find,
    /// They are names of something else, as a shard's channel is.
    pub is_not_key: bool,
    /// Not all keys are found so.
    pub is_incomplete: bool,
}

/// What becomes of the value of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read.
    Read,
    /// It is changed: what becomes of it depends on what it was.
    Change,
    /// It is overwritten: what it was plays no part.
    Overwrite,
    /// It is removed.
    Remove,
    /// The server does not say.
    Unsaid,
}

/// Where a search begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// At this argument; the name is argument 0.
    At(u8),
    /// Behind this word, which is searched from this argument on; from the end, if it is negative.
    Behind(&'static str, i8),
    /// The server does not say.
    Anywhere,
}

/// Which arguments are keys, from the beginning on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Find {
    /// Every `step`th up to `last`, which counts from the beginning; from the end of the command, if it is negative.
    Range {
        /// The last one.
        last: i8,
        /// From one key to the next.
        step: u8,
        /// 0, or the part of the rest that has keys: a half for 2.
        limit: u8,
    },
    /// As many as an argument says.
    Counted {
        /// This argument, which counts from the beginning.
        number: u8,
        /// The first key, which counts from the beginning too.
        first: u8,
        /// From one key to the next.
        step: u8,
    },
    /// The server does not say.
    Anything,
}
