//! The methods by which slots and records are compressed. Not here: compressing ([`encoding`](crate::encoding)).

// Stands alone: layout, encoding and files that keep slots name a method, and only the encoding compresses.

use std::fmt;

/// How a slot is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// An LZ4 block: fast.
    Lz4,
    /// A Zstandard frame: smaller.
    Zstd,
}

impl Method {
    /// All methods.
    pub const ALL: [Method; 2] = [Method::Lz4, Method::Zstd];

    /// Its name, as an option has it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Lz4 => "lz4",
            Method::Zstd => "zstd",
        }
    }

    /// Its number, for files that keep slots.
    pub fn code(self) -> u8 {
        match self {
            Method::Lz4 => 1,
            Method::Zstd => 2,
        }
    }

    /// The method with this number. 0 is a plain slot.
    pub fn from_code(code: u8) -> Option<Method> {
        Method::ALL.into_iter().find(|method| method.code() == code)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.name())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_methods_are_in_use_and_stay() {
        assert_eq!(Method::ALL.map(Method::code), [1, 2]);
        assert_eq!([0, 1, 2, 3].map(Method::from_code), [None, Some(Method::Lz4), Some(Method::Zstd), None]);
    }
}
