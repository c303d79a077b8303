//! Slices that are yet to be sent, cut into messages and large pieces. Pure.

use std::io::IoSlice;

/// Slices that are yet to be sent.
pub(super) struct Rest<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    /// Bytes of the first slice that are sent.
    gone: usize,
}

impl<'a, 'b> Rest<'a, 'b> {
    pub(super) fn new(slices: &'a [IoSlice<'b>]) -> Rest<'a, 'b> {
        let mut rest = Rest { slices, gone: 0 };
        rest.advance(0);
        rest
    }

    /// The first piece, if anything is left.
    pub(super) fn front(&self) -> Option<&'a [u8]> {
        self.slices.first().map(|slice| &slice[self.gone..])
    }

    pub(super) fn advance(&mut self, mut count: usize) {
        while let Some(slice) = self.slices.first() {
            let left = slice.len() - self.gone;
            if count < left {
                self.gone += count;
                return;
            }
            count -= left;
            self.gone = 0;
            self.slices = &self.slices[1..];
        }
    }

    /// Number of bytes, at most `most`, before the next large piece. At least one, and so part of a large piece if it
    /// is the first.
    pub(super) fn small(&self, most: usize, large_from: usize) -> usize {
        let mut count = 0;
        for (at, piece) in self.all().enumerate() {
            if at > 0 && piece.len() >= large_from {
                break;
            }
            count += piece.len();
            if count >= most {
                return most;
            }
        }
        count
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &'a [u8]> {
        let gone = self.gone;
        self.slices.iter().enumerate().map(move |(at, slice)| &slice[if at == 0 { gone } else { 0 }..])
    }

    /// The first `count` bytes, in pieces.
    pub(super) fn pieces(&self, count: usize) -> impl Iterator<Item = &'a [u8]> {
        let mut left = count;
        self.all().map_while(move |piece| {
            let piece = &piece[..piece.len().min(left)];
            left -= piece.len();
            (!piece.is_empty() || left > 0).then_some(piece)
        })
    }

    /// Copies as many bytes from the front as `into` has.
    pub(super) fn copy(&self, into: &mut [u8]) {
        let mut at = 0;
        for piece in self.pieces(into.len()) {
            into[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_rest_is_cut_without_losing_a_byte(
            slices in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..8),
            most in 1usize..50,
            large_from in 1usize..50,
        ) {
            let whole: Vec<u8> = slices.concat();
            let slices: Vec<IoSlice<'_>> = slices.iter().map(|slice| IoSlice::new(slice)).collect();
            let (mut rest, mut cut) = (Rest::new(&slices), Vec::new());
            while let Some(front) = rest.front() {
                prop_assert!(!front.is_empty());
                let count = rest.small(most, large_from);
                prop_assert!((1..=most).contains(&count));
                let mut message = vec![0; count];
                rest.copy(&mut message);
                cut.extend(message);
                rest.advance(count);
            }
            prop_assert_eq!(cut, whole);
        }
    }
}
