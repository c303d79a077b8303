//! How many bytes of inline data a device allows. No device reports this in advance: it answers when a queue pair is
//! made, or refuses to make one. So smaller sizes are tried until one succeeds, and the result is kept for later pairs.
//! Pure.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Error;

/// The size that a device is known to allow.
pub(super) struct Inline(AtomicU32);

impl Inline {
    /// Starts with the wanted size.
    pub(super) fn new(wanted: u32) -> Inline {
        Inline(AtomicU32::new(wanted))
    }

    /// Calls `make` with a size until it succeeds, and returns its result and the allowed size. `make` returns the size
    /// that the device reports.
    ///
    /// # Errors
    /// The first refusal, if `make` fails without inline data too; any error that does not concern the size.
    pub(super) fn settle<T>(
        &self,
        device: &str,
        mut make: impl FnMut(u32) -> Result<(T, u32), Error>,
    ) -> Result<(T, u32), Error> {
        let known = self.0.load(Ordering::Relaxed);
        let (mut asked, mut first) = (known, None);
        loop {
            match make(asked) {
                // Some devices round up. More than the wanted size is not used.
                Ok((made, answered)) => {
                    let allowed = answered.min(known);
                    if self.0.fetch_min(allowed, Ordering::Relaxed) > allowed {
                        let text = "an RDMA device allows less inline data than was asked for";
                        tracing::info!(device, asked = known, allowed, "{text}");
                    }
                    return Ok((made, allowed));
                }
                Err(error) if asked > 0 && is_too_much(&error) => {
                    asked = lower(asked);
                    first.get_or_insert(error);
                }
                // The size was not the reason: report the first refusal.
                Err(error) => return Err(first.filter(|_| is_too_much(&error)).unwrap_or(error)),
            }
        }
    }
}

/// The error that devices return for too much inline data, and for some other reasons.
fn is_too_much(error: &Error) -> bool {
    matches!(error, Error::System { source, .. } if source.kind() == io::ErrorKind::InvalidInput)
}

fn lower(asked: u32) -> u32 {
    if asked > LEAST_BYTES { (asked / 2).max(LEAST_BYTES) } else { 0 }
}

/// Below this size, 0 is tried next: few messages are shorter.
const LEAST_BYTES: u32 = 32;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn refused(code: i32) -> Error {
        Error::System { what: "creating a queue pair", source: io::Error::from_raw_os_error(code) }
    }

    proptest! {
        #[test]
        fn a_card_that_refuses_too_much_gets_as_much_as_it_takes_and_is_asked_once_by_those_who_follow(
            wanted in 0u32..1025,
            most in 0u32..1025,
            rounds_to in prop::sample::select(vec![1u32, 16, 64]),
        ) {
            let inline = Inline::new(wanted);
            let mut calls = 0;
            let mut card = |asked: u32| {
                calls += 1;
                if asked > most { Err(refused(libc::EINVAL)) } else { Ok(((), asked.next_multiple_of(rounds_to).min(most))) }
            };
            let (_, allowed) = inline.settle("card", &mut card).unwrap();
            prop_assert!(allowed <= wanted.min(most));
            prop_assert!(2 * allowed + 1 >= wanted.min(most) || most < LEAST_BYTES);
            let again = inline.settle("card", &mut card).unwrap();
            prop_assert_eq!(again.1, allowed);
            prop_assert!(calls <= 8);
        }
    }

    #[test]
    fn a_card_that_answers_with_less_is_believed() {
        let inline = Inline::new(220);
        assert_eq!(inline.settle("card", |asked| Ok((asked, 64))).unwrap(), (220, 64));
        assert_eq!(inline.settle("card", |asked| Ok((asked, asked))).unwrap(), (64, 64));
    }

    #[test]
    fn what_fails_for_another_reason_fails_with_it_and_nothing_is_remembered() {
        let inline = Inline::new(220);
        let mut asked = Vec::new();
        let always = inline.settle::<()>("card", |bytes| {
            asked.push(bytes);
            Err(refused(libc::EINVAL))
        });
        assert!(always.unwrap_err().to_string().contains("creating a queue pair"));
        assert_eq!(asked, [220, 110, 55, 32, 0]);
        assert!(inline.settle::<()>("card", |_| Err(refused(libc::ENOMEM))).is_err());
        assert_eq!(inline.settle("card", |bytes| Ok(((), bytes))).unwrap().1, 220);
    }
}
