//! Checks that a range is inside a memory, without overflow. No other module decides this.

use std::ops::Range;

use crate::Error;

/// Fails unless `length` bytes at `offset` are inside `size` bytes. An empty range at the very end is inside.
///
/// # Errors
/// [`Error::OutOfBounds`] with these three numbers.
#[inline]
pub fn check(offset: u64, length: u64, size: u64) -> Result<(), Error> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfBounds { offset, length, size }),
    }
}

/// Length of a range; an error for a range whose end is before its start.
pub(crate) fn length(range: &Range<u64>, size: u64) -> Result<u64, Error> {
    match range.end.checked_sub(range.start) {
        Some(length) => Ok(length),
        None => Err(Error::OutOfBounds { offset: range.start, length: 0, size }),
    }
}

/// The part of a range that is inside `size` bytes. For hints, which accept any range.
pub(crate) fn clamp(range: &Range<u64>, size: u64) -> Range<u64> {
    let end = range.end.min(size);
    range.start.min(end)..end
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_is_inside_exactly_if_arithmetic_without_limits_says_so(
            offset in prop_oneof![0u64..100, u64::MAX - 100..=u64::MAX],
            length in prop_oneof![0u64..100, u64::MAX - 100..=u64::MAX],
            size in prop_oneof![0u64..100, u64::MAX - 100..=u64::MAX],
        ) {
            let inside = u128::from(offset) + u128::from(length) <= u128::from(size);
            prop_assert_eq!(check(offset, length, size).is_ok(), inside);
        }

        #[test]
        fn a_clamped_range_is_always_inside(start: u64, end: u64, size: u64) {
            let range = clamp(&(start..end), size);
            prop_assert!(range.start <= range.end && range.end <= size);
        }
    }
}
