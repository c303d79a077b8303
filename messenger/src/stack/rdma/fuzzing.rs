//! A hostile peer on an RDMA link: the body of a fuzz target, which `cargo test` runs on every seed; see
//! `crate::fuzzing`.

use super::credits::{
    self, Body, CONTROL_RECEIVES, Credits, HEAD_BYTES, HELLO_BYTES, Head, Hello, Kind, MAX_CREDITS, MAX_RENDEZVOUS,
    START_BYTES, Violation,
};

/// A Hello, then steps of two bytes: one that chooses what this end does ([`End::act`]) or announces a message, and one
/// for the message's length. Nothing panics, this end holds only what it gave credit for, and every violation is named.
pub(crate) fn messages(bytes: &[u8]) {
    if let Err(violation) = run(bytes) {
        assert!(violation.to_string().starts_with(char::is_lowercase)); // it continues an error's sentence
    }
}

fn run(bytes: &[u8]) -> Result<(), Violation> {
    let Some((hello, mut rest)) = bytes.split_first_chunk::<HELLO_BYTES>() else { return Ok(()) };
    let peer = Hello::decode(hello)?;
    assert_eq!(peer.encode(), *hello);
    let mut end = End::new(peer);
    while let Some((&[what, length], after)) = rest.split_first_chunk::<2>() {
        rest = after;
        let heard = if what < MESSAGE {
            end.act(what, length);
            Ok(())
        } else {
            let (said, after) = after.split_at(usize::from(length).min(after.len()));
            rest = after;
            end.receive_message(said)
        };
        end.check();
        heard?;
    }
    Ok(())
}

/// Steps from this one on are messages of the peer.
pub(super) const MESSAGE: u8 = 7;

/// Messages that the peer has credit for at the beginning, and at most, as `RdmaOptions` sets them.
const INITIAL_CREDITS: u32 = 8;
const MAX_GIVEN: u32 = 32;

/// The part of a link that counts, without a card.
struct End {
    credits: Credits,
    /// Receives for the peer's messages, and messages in them that the owner has not received.
    window: u32,
    held: u32,
    /// Rendezvous that are not read: the peer's, and this end's.
    unread: u32,
    exported: u32,
    /// Control messages that this end has sent, and how many of them the peer has acknowledged.
    said: u16,
    they_heard: u16,
    /// Control messages of the peer since this end has last sent anything.
    unreported: u32,
}

impl End {
    fn new(peer: Hello) -> End {
        let credits = Credits::new(peer.credits, INITIAL_CREDITS);
        End { credits, window: INITIAL_CREDITS, held: 0, unread: 0, exported: 0, said: 0, they_heard: 0, unreported: 0 }
    }

    /// An action of a link or its owner, if it is allowed.
    fn act(&mut self, what: u8, how: u8) {
        match what {
            0 if self.credits.available() > 0 => self.say(Kind::Bytes),
            1 if self.credits.available() > 0 && self.credits.pending_rendezvous() < MAX_RENDEZVOUS => {
                self.say(Kind::Rendezvous)
            }
            2 if self.unread > 0 => {
                self.unread -= 1;
                self.credits.finish_read();
            }
            3 if self.held > 0 => {
                self.held -= 1;
                self.credits.give(1);
            }
            4 => self.credits.request_credits(how & 1 != 0),
            5 => {
                while let Some(control) = self.credits.control() {
                    assert_eq!(control.kind, Kind::Control);
                    self.said = self.said.wrapping_add(1);
                    self.unreported = 0;
                    self.check();
                }
            }
            _ => {}
        }
    }

    fn say(&mut self, kind: Kind) {
        assert_eq!(self.credits.spend(kind).kind, kind);
        self.exported += u32::from(kind == Kind::Rendezvous);
        self.unreported = 0;
    }

    fn receive_message(&mut self, said: &[u8]) -> Result<(), Violation> {
        let mut start = [0; START_BYTES];
        let count = said.len().min(START_BYTES);
        start[..count].copy_from_slice(&said[..count]);
        let (head, body) = credits::open(&start, said.len() as u32)?;
        assert_eq!(head.encode(), start[..HEAD_BYTES]);
        let update = self.credits.receive_message(&head)?;
        self.count(&head);
        assert!(update.read <= self.exported && update.freed <= self.window);
        self.exported -= update.read;
        self.window -= update.freed;
        match body {
            Body::Control => self.unreported += 1,
            Body::Rendezvous(rendezvous) => {
                assert!((1..=credits::MAX_RENDEZVOUS_BYTES).contains(&rendezvous.length) && said.len() == START_BYTES);
                self.unread += 1;
                self.credits.give(1);
            }
            Body::Bytes if said.len() == HEAD_BYTES => self.credits.give(1),
            Body::Bytes => self.held += 1,
        }
        if update.short {
            let more = self.window.max(1).min(MAX_GIVEN.saturating_sub(self.window));
            self.window += more;
            self.credits.give(more);
        }
        Ok(())
    }

    fn count(&mut self, head: &Head) {
        assert!(head.controls_received.wrapping_sub(self.they_heard) <= self.said.wrapping_sub(self.they_heard));
        self.they_heard = head.controls_received;
    }

    /// Invariants after every step.
    fn check(&self) {
        assert!(self.credits.available() <= MAX_CREDITS);
        assert_eq!(self.credits.out() + self.held, self.window);
        assert!(self.window <= MAX_GIVEN);
        assert!(self.unread <= MAX_RENDEZVOUS);
        assert!(self.exported <= MAX_RENDEZVOUS && self.exported == self.credits.pending_rendezvous());
        assert!(u32::from(self.said.wrapping_sub(self.they_heard)) <= CONTROL_RECEIVES);
        assert!(self.unreported <= CONTROL_RECEIVES);
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
        // Counts that increase or decrease by a little: random counts would hardly ever be allowed.
        let message = (0u8..4, 0u8..5, 0u16..3, 0u32..12, 0u32..3, 0u32..3, 0u8..4);
        let message = message.prop_map(|(kind, flags, controls_received, given, back, read, tail)| {
            let mut said = vec![kind, flags];
            said.extend(controls_received.to_le_bytes());
            [given + 4, back, read].iter().for_each(|count| said.extend(count.to_le_bytes()));
            if kind == 1 {
                said.extend([[1; 4], u32::from(tail).to_le_bytes(), [3; 4], [4; 4]].concat());
            } else if kind == 0 {
                said.extend(vec![5; usize::from(tail)]);
            }
            let mut step = vec![MESSAGE, said.len() as u8];
            step.extend(said);
            step
        });
        prop_oneof![2 => (0..MESSAGE, any::<u8>()).prop_map(|(what, how)| vec![what, how]), 3 => message]
    }

    proptest! {
        #[test]
        fn any_bytes_are_handled_or_a_named_violation(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            messages(&bytes);
            let mut after_a_hello = Hello { message_bytes: 8192, credits: 8 }.encode().to_vec();
            after_a_hello.extend(bytes);
            messages(&after_a_hello);
        }

        #[test]
        fn plausible_messages_are_handled_or_a_named_violation(
            credits in 0u32..10,
            steps in proptest::collection::vec(step(), 0..60),
        ) {
            let mut bytes = Hello { message_bytes: 8192, credits }.encode().to_vec();
            steps.into_iter().for_each(|step| bytes.extend(step));
            messages(&bytes);
        }
    }

    /// Every violation occurs in the seeds, and some seeds have none.
    #[test]
    fn the_seeds_are_refused_for_every_reason() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/messenger_rdma_messages");
        let seeds = fs::read_dir(folder).unwrap().map(|seed| fs::read(seed.unwrap().path()).unwrap());
        let outcomes: Vec<_> = seeds.map(|seed| run(&seed)).collect();
        let reasons: HashSet<_> =
            outcomes.iter().filter_map(|outcome| outcome.err()).map(|violation| discriminant(&violation)).collect();
        assert_eq!(reasons.len(), 16, "{outcomes:?}");
        assert!(outcomes.iter().filter(|outcome| outcome.is_ok()).count() >= 4, "{outcomes:?}");
    }
}
