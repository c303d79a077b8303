//! What a hostile peer may say by letters: the body of a fuzz target, which `cargo test` replays; see `crate::fuzzing`.

use super::flow::{Flow, OFFERS_AT_ONCE, WORD_ROOM};
use super::letter::{self, Body, HEAD_BYTES, HELLO_BYTES, Head, Hello, Kind, MOST_CREDITS, START_BYTES, Wrong};

/// A hello, and then steps of two bytes: one that chooses what we do ([`End::act`]) or says that a letter comes, one for its length,
/// which the letter follows. Nothing panics, what we hold is only what we gave credit for, and who breaks the rules is told which.
pub(crate) fn letters(bytes: &[u8]) {
    if let Err(wrong) = converse(bytes) {
        assert!(wrong.to_string().starts_with(char::is_lowercase)); // the sentence that an owner is told goes on with it
    }
}

fn converse(bytes: &[u8]) -> Result<(), Wrong> {
    let Some((hello, mut rest)) = bytes.split_first_chunk::<HELLO_BYTES>() else { return Ok(()) };
    let peer = Hello::decode(hello)?;
    assert_eq!(peer.encode(), *hello);
    let mut end = End::new(peer);
    while let Some((&[what, length], after)) = rest.split_first_chunk::<2>() {
        rest = after;
        let heard = if what < LETTER {
            end.act(what, length);
            Ok(())
        } else {
            let (said, after) = after.split_at(usize::from(length).min(after.len()));
            rest = after;
            end.hear(said)
        };
        end.check();
        heard?;
    }
    Ok(())
}

/// A step from this on is a letter of the peer's.
pub(super) const LETTER: u8 = 7;

/// Letters that the peer has credit for at the beginning, and at most, as `RdmaOptions` would have it.
const FIRST_CREDITS: u32 = 8;
const MOST_GIVEN: u32 = 32;

/// The half of a link that keeps count, without a card.
struct End {
    flow: Flow,
    /// Receives that stand for the peer's letters, and letters in them that nobody has received.
    window: u32,
    held: u32,
    /// Offers of the peer's that are not read, and of ours.
    unread: u32,
    lent: u32,
    /// Words that we have said, and how many of them the peer has heard.
    said: u16,
    they_heard: u16,
    /// Words of the peer's since we have last said anything.
    untold: u32,
}

impl End {
    fn new(peer: Hello) -> End {
        let flow = Flow::new(peer.credits, FIRST_CREDITS);
        End { flow, window: FIRST_CREDITS, held: 0, unread: 0, lent: 0, said: 0, they_heard: 0, untold: 0 }
    }

    /// One thing that a link does by itself or for its owner, as far as it may.
    fn act(&mut self, what: u8, how: u8) {
        match what {
            0 if self.flow.available() > 0 => self.say(Kind::Bytes),
            1 if self.flow.available() > 0 && self.flow.offers() < OFFERS_AT_ONCE => self.say(Kind::Offer),
            2 if self.unread > 0 => {
                self.unread -= 1;
                self.flow.has_read();
            }
            3 if self.held > 0 => {
                self.held -= 1;
                self.flow.give(1);
            }
            4 => self.flow.ease(how & 1 != 0),
            5 => {
                while let Some(word) = self.flow.word() {
                    assert_eq!(word.kind, Kind::Word);
                    self.said = self.said.wrapping_add(1);
                    self.untold = 0;
                    self.check();
                }
            }
            _ => {}
        }
    }

    fn say(&mut self, kind: Kind) {
        assert_eq!(self.flow.spend(kind).kind, kind);
        self.lent += u32::from(kind == Kind::Offer);
        self.untold = 0;
    }

    fn hear(&mut self, said: &[u8]) -> Result<(), Wrong> {
        let mut start = [0; START_BYTES];
        let count = said.len().min(START_BYTES);
        start[..count].copy_from_slice(&said[..count]);
        let (head, body) = letter::open(&start, said.len() as u32)?;
        assert_eq!(head.encode(), start[..HEAD_BYTES]);
        let news = self.flow.hear(&head)?;
        self.count(&head);
        assert!(news.read <= self.lent && news.freed <= self.window);
        self.lent -= news.read;
        self.window -= news.freed;
        match body {
            Body::Word => self.untold += 1,
            Body::Offer(offer) => {
                assert!((1..=letter::BULK_BYTES).contains(&offer.length) && said.len() == START_BYTES);
                self.unread += 1;
                self.flow.give(1);
            }
            Body::Bytes if said.len() == HEAD_BYTES => self.flow.give(1),
            Body::Bytes => self.held += 1,
        }
        if news.short {
            let more = self.window.max(1).min(MOST_GIVEN.saturating_sub(self.window));
            self.window += more;
            self.flow.give(more);
        }
        Ok(())
    }

    fn count(&mut self, head: &Head) {
        assert!(head.words_heard.wrapping_sub(self.they_heard) <= self.said.wrapping_sub(self.they_heard));
        self.they_heard = head.words_heard;
    }

    /// What holds after every step.
    fn check(&self) {
        assert!(self.flow.available() <= MOST_CREDITS);
        assert_eq!(self.flow.out() + self.held, self.window);
        assert!(self.window <= MOST_GIVEN);
        assert!(self.unread <= OFFERS_AT_ONCE);
        assert!(self.lent <= OFFERS_AT_ONCE && self.lent == self.flow.offers());
        assert!(u32::from(self.said.wrapping_sub(self.they_heard)) <= WORD_ROOM);
        assert!(self.untold <= WORD_ROOM);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashSet;
    use std::fs;
    use std::mem::discriminant;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn step() -> impl Strategy<Value = Vec<u8>> {
        // Counts that go on by a little, or backwards, where chance would never hit what is allowed.
        let letter = (0u8..4, 0u8..5, 0u16..3, 0u32..12, 0u32..3, 0u32..3, 0u8..4);
        let letter = letter.prop_map(|(kind, flags, words_heard, given, back, read, tail)| {
            let mut said = vec![kind, flags];
            said.extend(words_heard.to_le_bytes());
            [given + 4, back, read].iter().for_each(|count| said.extend(count.to_le_bytes()));
            if kind == 1 {
                said.extend([[1; 4], u32::from(tail).to_le_bytes(), [3; 4], [4; 4]].concat());
            } else if kind == 0 {
                said.extend(vec![5; usize::from(tail)]);
            }
            let mut step = vec![LETTER, said.len() as u8];
            step.extend(said);
            step
        });
        prop_oneof![2 => (0..LETTER, any::<u8>()).prop_map(|(what, how)| vec![what, how]), 3 => letter]
    }

    proptest! {
        #[test]
        fn any_bytes_are_heard_or_refused_by_name(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            letters(&bytes);
            let mut after_a_hello = Hello { letter_bytes: 8192, credits: 8 }.encode().to_vec();
            after_a_hello.extend(bytes);
            letters(&after_a_hello);
        }

        #[test]
        fn plausible_letters_are_heard_or_refused_by_name(
            credits in 0u32..10,
            steps in proptest::collection::vec(step(), 0..60),
        ) {
            let mut bytes = Hello { letter_bytes: 8192, credits }.encode().to_vec();
            steps.into_iter().for_each(|step| bytes.extend(step));
            letters(&bytes);
        }
    }

    /// Each way to be wrong is there, and some that are not.
    #[test]
    fn the_seeds_are_refused_for_every_reason() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/messenger_rdma_letters");
        let seeds = fs::read_dir(folder).unwrap().map(|seed| fs::read(seed.unwrap().path()).unwrap());
        let outcomes: Vec<_> = seeds.map(|seed| converse(&seed)).collect();
        let reasons: HashSet<_> =
            outcomes.iter().filter_map(|outcome| outcome.err()).map(|wrong| discriminant(&wrong)).collect();
        assert_eq!(reasons.len(), 16, "{outcomes:?}");
        assert!(outcomes.iter().filter(|outcome| outcome.is_ok()).count() >= 4, "{outcomes:?}");
    }
}
