//! Who may send how much: the credits of both directions of one link. Pure; the link asks before it posts and tells what came.
//!
//! A *credit* is a receive that the other end has posted for us. A letter of bytes and an offer spend one; a *word*, which is a head
//! alone, spends none, as each end keeps [`WORD_ROOM`] receives for the words of the other.
//!
//! ```text
//!   sender                                          receiver
//!   available = given − spent − back                out = given − taken − back: receives posted for the sender
//!      │ spends the last: "short" ───────────────▶  window grows, if there is memory: given += more
//!      │ ◀─────────────────── "ease" ───────────────  somebody else is short of memory
//!      └ gives back what it does not need: back += n ▶ out falls: n receives are anybody's
//! ```
//!
//! What holds, whatever is said and in whichever order letters are written:
//!
//! - Letters under way never exceed the receives that were posted for them: nobody is told "receiver not ready".
//! - At most [`WORDS_UNHEARD`] words of one end are unheard by the other, and one more that only says what was heard. So words are
//!   bounded, and yet two ends that wait for each other's hearing both get to know.
//! - At most [`OFFERS_AT_ONCE`] offers are unread: an offer's credit comes back at once, so that this bounds what a peer makes us keep.
//! - A count that runs backwards or too far ahead, and a letter, offer or word that is one too many, is a broken peer ([`Wrong`]).

use super::letter::{Head, Kind, MOST_CREDITS, Wrong};

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Flow {
    // As a sender: what we have of the peer.
    given_to_us: u32,
    spent: u32,
    gave_back: u32,
    words_sent: u16,
    words_they_heard: u16,
    offers_made: u32,
    offers_they_read: u32,
    // As a receiver: what the peer has of us.
    given: u32,
    taken: u32,
    they_gave_back: u32,
    words_heard: u16,
    offers_heard: u32,
    offers_read: u32,
    wants_ease: bool,
    // What of it the peer has been told.
    told_given: u32,
    told_back: u32,
    told_read: u32,
    told_heard: u16,
    told_ease: bool,
    /// The peer had no credit left when it wrote.
    they_are_short: bool,
}

/// What a letter of the peer's means for the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct News {
    /// The peer would send more than it may: give it more, if there is memory.
    pub(super) short: bool,
    /// So many receives that were posted for the peer are free.
    pub(super) freed: u32,
    /// So many of our offers, the oldest first, have been read.
    pub(super) read: u32,
}

impl Flow {
    /// At the beginning: the credits that each end has told the other in its hello.
    pub(super) fn new(given_to_us: u32, given: u32) -> Flow {
        Flow {
            given_to_us,
            spent: 0,
            gave_back: 0,
            words_sent: 0,
            words_they_heard: 0,
            offers_made: 0,
            offers_they_read: 0,
            given,
            taken: 0,
            they_gave_back: 0,
            words_heard: 0,
            offers_heard: 0,
            offers_read: 0,
            wants_ease: false,
            told_given: given,
            told_back: 0,
            told_read: 0,
            told_heard: 0,
            told_ease: false,
            they_are_short: false,
        }
    }

    /// Letters that we may send.
    pub(super) fn available(&self) -> u32 {
        self.given_to_us.wrapping_sub(self.spent).wrapping_sub(self.gave_back)
    }

    /// Receives that are posted for the peer's letters and not used.
    pub(super) fn out(&self) -> u32 {
        self.given.wrapping_sub(self.taken).wrapping_sub(self.they_gave_back)
    }

    /// Offers of ours that are not read yet.
    pub(super) fn offers(&self) -> u32 {
        self.offers_made.wrapping_sub(self.offers_they_read)
    }

    /// Spends a credit for a letter of that kind; there must be one.
    pub(super) fn spend(&mut self, kind: Kind) -> Head {
        debug_assert!(self.available() > 0 && kind != Kind::Word, "asked before");
        self.spent = self.spent.wrapping_add(1);
        self.offers_made = self.offers_made.wrapping_add(u32::from(kind == Kind::Offer));
        self.head(kind)
    }

    /// A word, if something has to be said that no letter has said, and a word may be.
    pub(super) fn word(&mut self) -> Option<Head> {
        let unheard = self.words_sent.wrapping_sub(self.words_they_heard);
        let must_hear = self.words_heard.wrapping_sub(self.told_heard) >= HEAR_AFTER;
        let is_due = must_hear || self.must_speak();
        let may = unheard < WORDS_UNHEARD || (must_hear && unheard == WORDS_UNHEARD);
        if !is_due || !may {
            return None;
        }
        self.words_sent = self.words_sent.wrapping_add(1);
        Some(self.head(Kind::Word))
    }

    /// Whether the peer may wait for what it has not been told.
    fn must_speak(&self) -> bool {
        let untold = self.given.wrapping_sub(self.told_given);
        let has = self.out().wrapping_sub(untold);
        let is_much = untold > 0 && (self.they_are_short || has <= untold);
        is_much
            || self.told_read != self.offers_read
            || self.told_back != self.gave_back
            || self.told_ease != self.wants_ease
    }

    fn head(&mut self, kind: Kind) -> Head {
        if self.told_given != self.given {
            self.they_are_short = false;
        }
        self.told_given = self.given;
        self.told_back = self.gave_back;
        self.told_read = self.offers_read;
        self.told_heard = self.words_heard;
        self.told_ease = self.wants_ease;
        Head {
            kind,
            short: self.available() == 0,
            ease: self.wants_ease,
            words_heard: self.words_heard,
            given: self.given,
            back: self.gave_back,
            read: self.offers_read,
        }
    }

    /// A letter has come. One that is wrong changes nothing.
    pub(super) fn hear(&mut self, head: &Head) -> Result<News, Wrong> {
        let more = head.given.wrapping_sub(self.given_to_us);
        let back = head.back.wrapping_sub(self.they_gave_back);
        let read = head.read.wrapping_sub(self.offers_they_read);
        let heard = head.words_heard.wrapping_sub(self.words_they_heard);
        let is_word = head.kind == Kind::Word;
        let is_offer = head.kind == Kind::Offer;
        let (available, offers) = (self.available(), self.offers());
        let unheard = self.words_sent.wrapping_sub(self.words_they_heard);
        // What the peer knows of our hearing and reading is at most what we have told.
        let words_untold = self.words_heard.wrapping_sub(self.told_heard);
        let offers_untold = self.offers_heard.wrapping_sub(self.told_read);
        let out = self.out().checked_sub(u32::from(!is_word)).ok_or(Wrong::NoCredit)?;
        let sound = |is_sound: bool, wrong: Wrong| if is_sound { Ok(()) } else { Err(wrong) };
        sound(more <= MOST_CREDITS && available + more <= MOST_CREDITS, Wrong::Given(more, available))?;
        sound(back <= out, Wrong::Back(back, out))?;
        sound(read <= offers, Wrong::Read(read, offers))?;
        sound(heard <= unheard, Wrong::Heard(heard, unheard))?;
        sound(!is_word || words_untold < WORD_ROOM as u16, Wrong::OneWordTooMany(words_untold))?;
        sound(!is_offer || offers_untold < OFFERS_AT_ONCE, Wrong::OneOfferTooMany(offers_untold))?;
        self.given_to_us = head.given;
        self.they_gave_back = head.back;
        self.offers_they_read = head.read;
        self.words_they_heard = head.words_heard;
        self.taken = self.taken.wrapping_add(u32::from(!is_word));
        self.words_heard = self.words_heard.wrapping_add(u16::from(is_word));
        self.offers_heard = self.offers_heard.wrapping_add(u32::from(is_offer));
        self.they_are_short |= head.short;
        if head.ease {
            self.give_back();
        }
        Ok(News { short: head.short, freed: back, read })
    }

    /// So many receives more are posted for the peer's letters.
    pub(super) fn give(&mut self, more: u32) {
        self.given = self.given.wrapping_add(more);
    }

    /// An offer of the peer's has been read.
    pub(super) fn has_read(&mut self) {
        self.offers_read = self.offers_read.wrapping_add(1);
    }

    /// Whether we would rather have credits back.
    pub(super) fn ease(&mut self, wanted: bool) {
        self.wants_ease = wanted;
    }

    fn give_back(&mut self) {
        let unneeded = self.available().saturating_sub(KEPT_CREDITS);
        self.gave_back = self.gave_back.wrapping_add(unneeded);
    }
}

/// Words of one end that the other may not have heard.
const WORDS_UNHEARD: u16 = 4;

/// So many words heard are told by a word, if no letter has told them.
const HEAR_AFTER: u16 = 2;

/// Receives that each end keeps posted for the other's words: those unheard, and one that tells of hearing.
pub(super) const WORD_ROOM: u32 = WORDS_UNHEARD as u32 + 1;

/// Offers of one end that the other may not have read, part of the protocol: a megabyte under way.
pub(super) const OFFERS_AT_ONCE: u32 = 4;

/// Credits that an end keeps when it is asked to give back: enough to say something at once.
const KEPT_CREDITS: u32 = 2;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// One end of a simulated link: its flow, what is on its way to it, and what it holds.
    struct End {
        flow: Flow,
        coming: VecDeque<Head>,
        /// Receives posted for letters and for words; a letter under way uses one of them when it arrives.
        letter_room: u32,
        word_room: u32,
        held: u32,
        to_send: u32,
        arrived: u32,
        window: u32,
    }

    impl End {
        fn new(window: u32) -> End {
            End {
                flow: Flow::new(window, window),
                coming: VecDeque::new(),
                letter_room: window,
                word_room: WORD_ROOM,
                held: 0,
                to_send: 0,
                arrived: 0,
                window,
            }
        }

        fn send(&mut self, to: &mut End) {
            while self.to_send > 0 && self.flow.available() > 0 {
                self.to_send -= 1;
                to.coming.push_back(self.flow.spend(Kind::Bytes));
            }
            while let Some(word) = self.flow.word() {
                to.coming.push_back(word);
            }
        }

        fn receive(&mut self) {
            let Some(head) = self.coming.pop_front() else { return };
            // A receive is used when the letter arrives; there must be one, whichever it was meant for.
            assert!(self.letter_room + self.word_room > 0, "receiver not ready");
            if head.kind == Kind::Word {
                self.word_room = self.word_room.checked_sub(1).expect("more words than room");
            } else {
                self.letter_room = self.letter_room.checked_sub(1).expect("more letters than credits");
                self.held += 1;
                self.arrived += 1;
            }
            let news = self.flow.hear(&head).unwrap();
            if head.kind == Kind::Word {
                self.word_room += 1; // read and posted again at once
            }
            self.letter_room -= news.freed;
            self.window -= news.freed;
            if news.short && self.window < 32 {
                self.window += 1;
                self.letter_room += 1;
                self.flow.give(1);
            }
        }

        fn consume(&mut self, count: u32) {
            let count = count.min(self.held);
            self.held -= count;
            self.letter_room += count;
            self.flow.give(count);
        }
    }

    #[derive(Debug, Clone)]
    enum Event {
        Send { end: usize, count: u32 },
        Deliver { end: usize, count: u32 },
        Consume { end: usize, count: u32 },
        Ease { end: usize, wanted: bool },
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            (0usize..2, 0u32..20).prop_map(|(end, count)| Event::Send { end, count }),
            (0usize..2, 0u32..20).prop_map(|(end, count)| Event::Deliver { end, count }),
            (0usize..2, 0u32..20).prop_map(|(end, count)| Event::Consume { end, count }),
            (0usize..2, any::<bool>()).prop_map(|(end, wanted)| Event::Ease { end, wanted }),
        ];
        proptest::collection::vec(event, 0..200)
    }

    fn speak(ends: &mut [End; 2]) {
        let [one, other] = ends;
        one.send(other);
        other.send(one);
    }

    proptest! {
        #[test]
        fn whatever_happens_no_receiver_is_overrun_and_in_the_end_everything_has_arrived(
            windows in (1u32..12, 1u32..12),
            events in events(),
        ) {
            let mut ends = [End::new(windows.0), End::new(windows.1)];
            ends[0].flow = Flow::new(windows.1, windows.0);
            ends[1].flow = Flow::new(windows.0, windows.1);
            let mut sent = [0, 0];
            for event in events {
                match event {
                    Event::Send { end, count } => {
                        ends[end].to_send += count;
                        sent[end] += count;
                    }
                    Event::Deliver { end, count } => (0..count).for_each(|_| ends[end].receive()),
                    Event::Consume { end, count } => ends[end].consume(count),
                    Event::Ease { end, wanted } => ends[end].flow.ease(wanted),
                }
                speak(&mut ends);
            }
            // Everybody reads on: it comes to an end, and everything has arrived.
            for _ in 0..10_000 {
                for end in &mut ends {
                    (0..8).for_each(|_| end.receive());
                    end.consume(u32::MAX);
                }
                speak(&mut ends);
            }
            prop_assert_eq!(ends[0].arrived, sent[1]);
            prop_assert_eq!(ends[1].arrived, sent[0]);
            prop_assert!(ends.iter().all(|end| end.coming.is_empty()), "words without end");
        }

        #[test]
        fn no_head_makes_us_count_beyond_all_bounds(heads in proptest::collection::vec(any::<[u8; 16]>(), 1..50)) {
            let mut flow = Flow::new(8, 8);
            for bytes in heads {
                if let Ok(head) = Head::decode(&bytes)
                    && flow.hear(&head).is_err()
                {
                    break;
                }
                prop_assert!(flow.available() <= MOST_CREDITS && flow.out() <= 8);
            }
        }
    }

    #[test]
    fn nobody_gives_back_more_than_he_was_given() {
        for (kind, back) in [(Kind::Bytes, u32::MAX), (Kind::Bytes, 8), (Kind::Word, 9), (Kind::Word, u32::MAX)] {
            let head = |back| Head { kind, back, given: 8, ..Head::default() };
            assert!(Flow::new(8, 8).hear(&head(back)).is_err(), "{kind:?} that gives back {back} of 8");
            assert!(Flow::new(8, 8).hear(&head(7)).is_ok(), "{kind:?} that gives back 7 of 8");
        }
    }

    #[test]
    fn an_end_that_is_asked_gives_back_all_but_a_few() {
        let (mut sender, mut receiver) = (Flow::new(20, 4), Flow::new(4, 20));
        receiver.ease(true);
        let asks = receiver.word().unwrap();
        assert!(asks.ease);
        sender.hear(&asks).unwrap();
        assert_eq!(sender.available(), KEPT_CREDITS);
        let answer = sender.word().unwrap();
        assert_eq!(receiver.hear(&answer).unwrap().freed, 20 - KEPT_CREDITS);
        assert_eq!(receiver.out(), KEPT_CREDITS);
    }

    #[test]
    fn an_offer_counts_as_read_when_the_peer_says_so_and_not_before() {
        let (mut sender, mut receiver) = (Flow::new(4, 4), Flow::new(4, 4));
        let offer = sender.spend(Kind::Offer);
        receiver.hear(&offer).unwrap();
        assert_eq!(sender.offers(), 1);
        receiver.has_read();
        let word = receiver.word().unwrap();
        assert_eq!(sender.hear(&word).unwrap().read, 1);
        assert_eq!(sender.offers(), 0);
        assert!(sender.hear(&Head { read: 2, ..word }).is_err());
    }

    #[test]
    fn a_letter_that_no_peer_of_ours_would_write_is_named_and_changes_nothing() {
        let mut flow = Flow::new(8, 2);
        let head = |kind, given| Head { kind, given, ..Head::default() };
        let wrong = |flow: &mut Flow, head: Head| {
            let (available, out) = (flow.available(), flow.out());
            let wrong = flow.hear(&head).unwrap_err();
            assert_eq!((flow.available(), flow.out()), (available, out), "{wrong}");
            wrong
        };
        assert_eq!(wrong(&mut flow, head(Kind::Word, 7)), Wrong::Given(u32::MAX, 8));
        assert_eq!(wrong(&mut flow, head(Kind::Word, MOST_CREDITS + 1)), Wrong::Given(MOST_CREDITS - 7, 8));
        assert_eq!(wrong(&mut flow, Head { back: 2, ..head(Kind::Bytes, 8) }), Wrong::Back(2, 1));
        assert_eq!(wrong(&mut flow, Head { read: 1, ..head(Kind::Word, 8) }), Wrong::Read(1, 0));
        assert_eq!(wrong(&mut flow, Head { words_heard: 1, ..head(Kind::Word, 8) }), Wrong::Heard(1, 0));
        (0..2).for_each(|_| assert!(flow.hear(&head(Kind::Bytes, 8)).is_ok()));
        assert_eq!(wrong(&mut flow, head(Kind::Bytes, 8)), Wrong::NoCredit);
    }

    /// Words cost no credit, and the credit of an offer comes back at once: without a bound of their own both would be endless.
    #[test]
    fn words_and_offers_beyond_their_bounds_are_refused() {
        let mut flow = Flow::new(8, 8);
        let head = |kind| Head { kind, given: 8, ..Head::default() };
        (0..WORD_ROOM).for_each(|_| assert!(flow.hear(&head(Kind::Word)).is_ok()));
        assert_eq!(flow.hear(&head(Kind::Word)), Err(Wrong::OneWordTooMany(5)));
        assert_eq!(flow.word().unwrap().words_heard, 5);
        assert!(flow.hear(&head(Kind::Word)).is_ok());
        for _ in 0..OFFERS_AT_ONCE {
            assert!(flow.hear(&head(Kind::Offer)).is_ok());
            flow.give(1);
        }
        assert_eq!(flow.hear(&head(Kind::Offer)), Err(Wrong::OneOfferTooMany(4)));
        flow.has_read();
        assert!(flow.hear(&head(Kind::Offer)).is_err(), "read, but the peer can't know");
        flow.spend(Kind::Bytes);
        assert!(flow.hear(&head(Kind::Offer)).is_ok());
    }
}
