//! Watch: which commands of a stream must not be applied late, as its bytes arrive.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Found, Verb, WalkError, Walker};
use crate::commands::{Late, Release};

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

// Foreign: commands of a stream that a server does not know, as the bytes arrive.

/// Watches the stream of a primary for commands, and options of commands, that the server which is to apply it does not
/// know. Such a command fails there, and the two part without a word.
#[derive(Debug)]
pub struct Foreign {
    walker: Walker,
    known: Arc<Known>,
    /// The end of the last command before the present one, outside of a transaction.
    border: u64,
}

/// What a server knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Its commands in lower case, without subcommands.
    pub commands: BTreeSet<String>,
    /// Its version, by which its options are known.
    pub release: Release,
}

/// An option that not every server with the command knows. Servers write it into their stream as it was given.
struct NewOption {
    command: &'static str,
    word: &'static str,
    /// The first release of each family that knows it; `None`: none does.
    redis: (u32, u32),
    valkey: Option<(u32, u32)>,
}

/// By the servers' documentation, and tried on those that docs/how-to/migrate.md names.
const NEW_OPTIONS: [NewOption; 12] = [
    NewOption { command: "set", word: "IFEQ", redis: (8, 4), valkey: Some((8, 1)) },
    NewOption { command: "set", word: "IFNE", redis: (8, 4), valkey: None },
    NewOption { command: "set", word: "IFDEQ", redis: (8, 4), valkey: None },
    NewOption { command: "set", word: "IFDNE", redis: (8, 4), valkey: None },
    NewOption { command: "xadd", word: "KEEPREF", redis: (8, 2), valkey: None },
    NewOption { command: "xadd", word: "DELREF", redis: (8, 2), valkey: None },
    NewOption { command: "xadd", word: "ACKED", redis: (8, 2), valkey: None },
    NewOption { command: "xadd", word: "IDMP", redis: (8, 6), valkey: None },
    NewOption { command: "xgroup", word: "ENTRIESREAD", redis: (7, 0), valkey: Some((7, 2)) },
    NewOption { command: "xtrim", word: "KEEPREF", redis: (8, 2), valkey: None },
    NewOption { command: "xtrim", word: "DELREF", redis: (8, 2), valkey: None },
    NewOption { command: "xtrim", word: "ACKED", redis: (8, 2), valkey: None },
];

impl NewOption {
    fn is_known_to(&self, release: Release) -> bool {
        let since = if release.family == "Valkey" { self.valkey } else { Some(self.redis) };
        since.is_some_and(|since| (release.major, release.minor) >= since)
    }
}

/// The options among the words of a command, as far as they can be new ones.
fn options(words: &[Vec<u8>]) -> impl Iterator<Item = &[u8]> {
    let (name, rest) = words.split_first().map_or((&[][..], &[][..]), |(name, rest)| (&name[..], rest));
    // SET key value options; XTRIM key options; XADD key options id field value …; XGROUP SETID key group id options
    let is = |wanted: &str| name.eq_ignore_ascii_case(wanted.as_bytes());
    let from = if is("SET") {
        2
    } else if is("XGROUP") {
        4
    } else {
        1
    };
    let options = rest.get(from..).unwrap_or_default();
    let is_threshold = |at: usize| {
        let before = at.checked_sub(1).and_then(|at| options.get(at));
        before.is_some_and(|word| [&b"MINID"[..], b"=", b"~"].iter().any(|known| word.eq_ignore_ascii_case(known)))
    };
    let is_end = |(at, word): &(usize, &Vec<u8>)| is_entry_id(word) && !is_threshold(*at);
    let end = match is("XADD") {
        true => options.iter().enumerate().find(is_end).map(|(at, _)| at),
        false => None,
    };
    options.get(..end.unwrap_or(options.len())).unwrap_or_default().iter().map(Vec::as_slice)
}

/// Whether this word is the id of an entry, as servers write it into their stream: `1764114301000-0`.
fn is_entry_id(word: &[u8]) -> bool {
    word == b"*" || (word.first().is_some_and(u8::is_ascii_digit) && word.contains(&b'-'))
}

/// Where a stream must end for a server, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// A command that the server does not know.
    #[error("the command {name} at offset {at}, which the server does not know")]
    Unknown {
        /// Its name in upper case, with the option if it is that which is not known. Empty for a very long name.
        name: String,
        /// Position of its first byte.
        at: u64,
        /// The end of what may be applied: the beginning of the transaction, if the command is in one.
        border: u64,
    },
    /// The bytes are no commands.
    #[error("{0}")]
    Damaged(WalkError),
}

impl Unfit {
    /// Bytes up to this position may be applied.
    pub fn border(&self) -> u64 {
        match self {
            Unfit::Unknown { border, .. } => *border,
            Unfit::Damaged(error) => error.at,
        }
    }
}

impl Foreign {
    /// At the byte `at` of a stream, between two commands.
    pub fn new(at: u64, known: Arc<Known>) -> Foreign {
        Foreign { walker: walker(at), known, border: at }
    }

    /// Position of the next byte.
    pub fn position(&self) -> u64 {
        self.walker.position()
    }

    /// Goes to another byte of the stream, between two commands.
    pub fn go_to(&mut self, at: u64) {
        (self.walker, self.border) = (walker(at), at);
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// [`Unfit`]; nothing can be read after it.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Unfit> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (taken, found) = self.walker.feed(rest).map_err(Unfit::Damaged)?;
            rest = rest.get(taken..).unwrap_or_default();
            match found {
                // Every server knows the commands of the link, and how a transaction begins and ends.
                Some(Found::Verb(Verb::Other | Verb::Publish | Verb::Cluster)) => {
                    let name = String::from_utf8_lossy(self.walker.name()).to_ascii_lowercase();
                    if !self.known.commands.contains(&name) {
                        let (at, border) = (self.walker.begins(), self.border);
                        return Err(Unfit::Unknown { name: name.to_ascii_uppercase(), at, border });
                    }
                }
                Some(Found::Command { bytes, .. }) => {
                    if let Some(name) = self.new_option() {
                        return Err(Unfit::Unknown { name, at: bytes.start, border: self.border });
                    }
                    self.border = self.walker.border();
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The command that has just ended and its option, if the server does not know that.
    fn new_option(&self) -> Option<String> {
        let words = self.walker.words();
        let name = words.first()?;
        let of_it = |option: &&NewOption| option.command.as_bytes().eq_ignore_ascii_case(name);
        let new = NEW_OPTIONS.iter().filter(of_it).filter(|option| !option.is_known_to(self.known.release));
        let is_there =
            |option: &&NewOption| options(words).any(|word| word.eq_ignore_ascii_case(option.word.as_bytes()));
        new.clone().find(is_there).map(|option| format!("{} … {}", option.command.to_uppercase(), option.word))
    }
}

fn walker(at: u64) -> Walker {
    Walker::of_stream(at, 0).keeping_words()
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

    const OLD: Release = Release { family: "Valkey", major: 8, minor: 0 };

    fn known(release: Release) -> Arc<Known> {
        let commands = ["set", "xadd", "xtrim", "xgroup", "cluster", "publish"].map(str::to_owned).into();
        Arc::new(Known { commands, release })
    }

    /// What is found in these commands, however their bytes are cut, and where each command begins.
    fn fed(all: &[&str]) -> (Result<(), Unfit>, Vec<u64>) {
        fed_to(OLD, all)
    }

    fn fed_to(release: Release, all: &[&str]) -> (Result<(), Unfit>, Vec<u64>) {
        let (mut bytes, mut begins) = (Vec::new(), Vec::new());
        for words in all {
            begins.push(100 + bytes.len() as u64);
            command(&mut bytes, &words.split(' ').collect::<Vec<_>>());
        }
        let mut results = (1..=bytes.len()).map(|piece| {
            let mut foreign = Foreign::new(100, known(release));
            bytes.chunks(piece).try_for_each(|piece| foreign.feed(piece))
        });
        let first = results.next().unwrap();
        assert!(results.all(|result| result == first));
        (first, begins)
    }

    #[test]
    fn a_command_that_is_not_known_is_named_with_its_place() {
        let words =
            ["SELECT 3", "set k v", "PING", "REPLCONF GETACK *", "XGROUP CREATE s g 0", "CLUSTER SETSLOT 1 NODE x"];
        assert_eq!(fed(&words).0, Ok(()));
        assert_eq!(fed(&["MULTI", "SET k v", "EXEC", "PUBLISH c m"]).0, Ok(()));
        for name in ["XACKDEL", "vadd", "a.command.with.a.name.of.many.letters"] {
            let call = format!("{name} k v");
            let (found, begins) = fed(&["SET k v", &call, "SET k w"]);
            let Err(Unfit::Unknown { name: said, at, border }) = found else { panic!("{found:?}") };
            assert!(said == name.to_ascii_uppercase() || said.is_empty(), "{said}");
            assert_eq!((at, border), (begins[1], begins[1]), "{name}");
        }
    }

    #[test]
    fn an_option_that_is_not_known_is_found_where_it_is_one() {
        let redis = |major, minor| Release { family: "Redis", major, minor };
        let valkey = |major, minor| Release { family: "Valkey", major, minor };
        for (call, knows, lacks) in [
            ("SET k v IFEQ w", &[redis(8, 4), valkey(9, 1)][..], &[redis(8, 2), valkey(8, 0), redis(7, 0)][..]),
            ("set k v PX 5 ifne w", &[redis(8, 6)], &[valkey(9, 1)]),
            ("XADD s KEEPREF 1-1 f v", &[redis(8, 2)], &[redis(8, 0), valkey(9, 1)]),
            ("XADD s NOMKSTREAM KEEPREF MAXLEN ~ 5 LIMIT 7 1-1 f v", &[redis(8, 2)], &[valkey(9, 1)]),
            ("XADD s MINID ~ 5-1 KEEPREF 1-1 f v", &[redis(8, 2)], &[valkey(9, 1)]),
            ("XADD s IDMP producer id 1-1 f v", &[redis(8, 6)], &[redis(8, 2)]),
            ("XGROUP SETID s g 1-1 ENTRIESREAD 5", &[redis(7, 0), valkey(7, 2)], &[redis(6, 2)]),
            ("XTRIM s MAXLEN = 5 ACKED", &[redis(8, 2)], &[redis(7, 4)]),
        ] {
            for release in knows {
                assert_eq!(fed_to(*release, &["SET a b", call, "SET a c"]).0, Ok(()), "{call} {release}");
            }
            for release in lacks {
                let (found, begins) = fed_to(*release, &["SET a b", call, "SET a c"]);
                let found = found.unwrap_err();
                assert_eq!(found.border(), begins[1], "{call} {release}: {found}");
                let word = found.to_string();
                assert!(word.contains(" … "), "{word}");
            }
        }
        // Values and fields of that name.
        for fine in [
            "SET IFEQ IFEQ",
            "XADD KEEPREF 1-1 KEEPREF ACKED",
            "XADD s MAXLEN ~ 5 1-1 IDMP v",
            "XTRIM ACKED MAXLEN 5",
            "XGROUP SETID ENTRIESREAD g 1-1",
        ] {
            assert_eq!(fed(&[fine]).0, Ok(()), "{fine}");
        }
        let (found, begins) = fed(&["MULTI", "SET a b", "SET k v IFEQ w", "EXEC"]);
        assert_eq!(found.unwrap_err().border(), begins[0]);
    }

    #[test]
    fn a_transaction_is_cut_as_a_whole() {
        let (found, begins) = fed(&["SET k v", "MULTI", "SET k v", "VADD k v", "EXEC"]);
        let name = "VADD".to_owned();
        assert_eq!(found, Err(Unfit::Unknown { name, at: begins[3], border: begins[1] }));
    }

    #[test]
    fn what_is_no_stream_is_said_and_another_place_can_follow() {
        let mut foreign = Foreign::new(100, known(OLD));
        assert_eq!(foreign.feed(b"GET k\r\n").unwrap_err().border(), 100);
        foreign.go_to(500);
        foreign.feed(b"*1\r\n$4\r\nPING\r\n").unwrap();
        assert_eq!(foreign.position(), 514);
    }
}
