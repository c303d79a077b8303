//! Watch: which commands of a stream must not be applied late, as its bytes arrive.

use super::walk::{Found, WalkError, Walker};
use crate::commands::Late;

/// Watches a stream.
#[derive(Debug)]
pub struct Watch {
    walker: Walker,
    is_lost: bool,
}

/// What must not be applied late in the bytes that have just arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Position of the last byte of the last command that changes more than data: see [`Late::State`].
    pub state: Option<u64>,
    /// The same of the last message: [`Late::Message`].
    pub message: Option<u64>,
}

impl Watch {
    /// At the byte `at` of a stream, between two commands.
    pub fn new(at: u64) -> Watch {
        Watch { walker: Walker::of_stream(at, 0), is_lost: false }
    }

    /// Takes the next bytes. What is no stream of commands must not be applied late, as it is not known what it does.
    ///
    /// # Errors
    /// The bytes are not commands, said once. The position is counted on all the same.
    pub fn feed(&mut self, bytes: &[u8]) -> (Seen, Result<(), WalkError>) {
        let (mut seen, mut rest) = (Seen::default(), bytes);
        let end = self.walker.position() + bytes.len() as u64;
        while !rest.is_empty() && !self.is_lost {
            match self.walker.feed(rest) {
                Ok((taken, found)) => {
                    rest = rest.get(taken..).unwrap_or_default();
                    let Some(Found::Command { bytes, .. }) = found else { continue };
                    match self.walker.late() {
                        Some(Late::State) => seen.state = Some(bytes.end - 1),
                        Some(Late::Message) => seen.message = Some(bytes.end - 1),
                        None => {}
                    }
                }
                Err(error) => {
                    self.is_lost = true;
                    self.walker = Walker::of_stream(end, 0);
                    return (Seen { state: Some(end - 1), ..seen }, Err(error));
                }
            }
        }
        if self.is_lost && !bytes.is_empty() {
            self.walker = Walker::of_stream(end, 0);
            seen.state = Some(end - 1);
        }
        (seen, Ok(()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::resp::command;

    /// The bytes of commands, and where each one ends.
    fn stream(all: &[&str]) -> (Vec<u8>, Vec<u64>) {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for words in all {
            command(&mut bytes, &words.split(' ').collect::<Vec<_>>());
            ends.push(bytes.len() as u64 - 1);
        }
        (bytes, ends)
    }

    fn watch(bytes: &[u8], piece: usize) -> Seen {
        let (mut watch, mut all) = (Watch::new(0), Seen::default());
        for piece in bytes.chunks(piece) {
            let (seen, fed) = watch.feed(piece);
            fed.unwrap();
            all = Seen { state: seen.state.or(all.state), message: seen.message.or(all.message) };
        }
        all
    }

    #[test]
    fn what_must_not_be_applied_late_is_found_wherever_the_bytes_are_cut() {
        for late in [
            "set k v PX 100000",
            "expire k 10",
            "PEXPIRE k 10",
            "SETEX k 10 v",
            "getex k ex 10",
            "restore k 100000 payload replace",
            "eval script 0",
            "CLUSTER SETSLOT 1 NODE x",
            "cluster syncslots establish",
            "cluster something-longer-than-twenty-bytes",
            "cluster",
        ] {
            let (bytes, ends) = stream(&["SELECT 0", "MULTI", late, "EXEC", "set k v PXAT 1764208000000", "ping"]);
            for piece in 1..=bytes.len() {
                assert_eq!(watch(&bytes, piece), Seen { state: Some(ends[2]), message: None }, "{late}, by {piece}");
            }
        }
        for late in ["publish c m", "SPUBLISH channel-that-is-longer-than-twenty-bytes m", "publish", "publish c"] {
            let (bytes, ends) = stream(&["SELECT 0", late, "del k"]);
            for piece in 1..=bytes.len() {
                assert_eq!(watch(&bytes, piece), Seen { state: None, message: Some(ends[1]) }, "{late}, by {piece}");
            }
        }
    }

    #[test]
    fn what_servers_since_7_0_and_sentinels_write_all_the_time_may_be_late() {
        let (bytes, _) = stream(&[
            "SELECT 3",
            "SET k v PXAT 1764208000000",
            "set k v",
            "PEXPIREAT k 1764208000000",
            "restore k 1764208000000 payload ABSTTL",
            "restore k 0 payload",
            "restore k 100000 payload replace absttl",
            "hsetex h PXAT 1764208000000 fields 1 ex 5",
            "cluster flushslot 1",
            "XCLAIM s g c 0 1-1 TIME 1764208000000 RETRYCOUNT 1 FORCE JUSTID LASTID 1-1",
            "PUBLISH __sentinel__:hello 127.0.0.1,26379,x,1,main,127.0.0.1,6379,0",
            "REPLCONF GETACK *",
            "bf.add f EX",
        ]);
        for piece in 1..=bytes.len() {
            assert_eq!(watch(&bytes, piece), Seen::default(), "by {piece}");
        }
    }

    #[test]
    fn what_is_no_stream_is_said_once_and_is_never_applied_late() {
        let mut watch = Watch::new(101);
        let (seen, fed) = watch.feed(b"*1\r\n$4\r\nPING\r\nnonsense");
        assert_eq!((seen.state, fed.is_err()), (Some(122), true));
        let (seen, fed) = watch.feed(b"*1\r\n$4\r\nPING\r\n");
        assert_eq!((seen.state, fed), (Some(136), Ok(())));
        assert_eq!(watch.feed(b""), (Seen::default(), Ok(())));
    }

    proptest! {
        #[test]
        fn any_commands_are_seen_the_same_however_they_are_cut(
            all in proptest::collection::vec(
                proptest::collection::vec(
                    prop_oneof![
                        proptest::collection::vec(any::<u8>(), 0..30),
                        Just(b"set".to_vec()), Just(b"EX".to_vec()), Just(b"px".to_vec()), Just(b"expire".to_vec()),
                        Just(b"5".to_vec()), Just(b"cluster".to_vec()), Just(b"publish".to_vec()), Just(b"restore".to_vec()),
                    ], 1..7), 0..8),
            piece in 1_usize..40,
        ) {
            let mut bytes = Vec::new();
            all.iter().filter(|words| !words[0].eq_ignore_ascii_case(b"select")).for_each(|words| command(&mut bytes, words));
            prop_assert_eq!(watch(&bytes, piece), watch(&bytes, bytes.len().max(1)));
        }
    }
}
