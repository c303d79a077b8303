//! Handshake: fixed newstyle negotiation, option by option. It takes bytes, and says what to answer and what comes
//! next.
//!
//! ```text
//!   greeting ─▶ client's flags ─▶ option ─▶ option ─▶ … ─▶ GO or EXPORT_NAME ─▶ transmission
//!                                   ╰─ STARTTLS: the same again, from the first option, inside TLS
//! ```
//!
//! - What was negotiated before TLS does not count inside it, and no byte that was sent in the clear is read after it
//!   (the fault of CVE-2021-3716).
//! - Whatever can be answered is answered, and the client goes on. The connection ends only if the client does not
//!   speak the protocol, exceeds a limit, or asks for what it cannot have by `EXPORT_NAME`, which cannot be refused.

use std::sync::Arc;

use crate::Export;
use crate::protocol::{
    BASE_ALLOCATION, INIT_MAGIC, MAX_PAYLOAD_BYTES, MAX_STRING_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    handshake_flags as flag, info, option as asked, option_reply as say,
};

/// One negotiation.
#[derive(Debug)]
pub struct Handshake {
    exports: Arc<[Export]>,
    tls: Tls,
    /// The client's flags; `None` before they have arrived.
    flags: Option<u32>,
    structured: bool,
    /// The export for which the client has chosen `base:allocation`.
    allocation: Option<usize>,
    options: usize,
}

/// Whether TLS is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// It is not.
    Off,
    /// It must be started before anything else.
    Required,
    /// It was.
    Started,
}

/// What comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// An option is not complete: call again with more bytes behind the same ones.
    More,
    /// Something was consumed: send the answer, and call again.
    Next,
    /// Send the answer, start TLS, and call again with what arrives inside. See [`Handshake::tls_started`].
    StartTls,
    /// Send the answer, and serve requests.
    Serve(Session),
    /// Send the answer, and close the connection.
    End,
}

/// What was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// The export, by its place among those of the server.
    pub export: usize,
    /// Replies may have chunks.
    pub structured: bool,
    /// Block status is answered with `base:allocation`.
    pub allocation: bool,
}

/// Why a connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The peer is not an NBD client, or one of the time before fixed newstyle.
    #[error("the peer does not speak fixed newstyle NBD: {what} is {found:#x}")]
    NotNbd {
        /// Which field.
        what: &'static str,
        /// Its value.
        found: u64,
    },
    /// An option is longer than any that is known.
    #[error("option {option} has {bytes} bytes, and the limit is {MAX_OPTION_BYTES}")]
    TooLong {
        /// The option.
        option: u32,
        /// Its length.
        bytes: u32,
    },
    /// The client negotiates for ever.
    #[error("the client sent more than {MAX_OPTIONS} options")]
    TooMany,
    /// `EXPORT_NAME` of an export that does not exist.
    #[error("the client asked for an export that does not exist: {name:?}")]
    NoSuchExport {
        /// Its name, printable.
        name: String,
    },
    /// `EXPORT_NAME` without TLS.
    #[error("the client did not start TLS, which this server requires")]
    NoTls,
    /// Bytes in the clear that would be taken for bytes inside TLS.
    #[error("the client sent {bytes} bytes between STARTTLS and its answer")]
    BeforeTls {
        /// How many.
        bytes: usize,
    },
}

impl Handshake {
    /// A negotiation about these exports. There is at least one.
    pub fn new(exports: Arc<[Export]>, tls: Tls) -> Handshake {
        Handshake { exports, tls, flags: None, structured: false, allocation: None, options: 0 }
    }

    /// What a server sends first.
    pub fn greeting(out: &mut Vec<u8>) {
        out.extend_from_slice(&INIT_MAGIC.to_be_bytes());
        out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        out.extend_from_slice(&((flag::FIXED_NEWSTYLE | flag::NO_ZEROES) as u16).to_be_bytes());
    }

    /// Takes one thing from the front of `input`, appends its answer to `out`, and returns how many bytes it had.
    ///
    /// # Errors
    /// The connection cannot go on. What `out` holds is still to be sent.
    pub fn receive(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, Step), Error> {
        if self.flags.is_none() {
            let Some((&flags, _)) = input.split_first_chunk() else { return Ok((0, Step::More)) };
            let flags = u32::from_be_bytes(flags);
            if flags & flag::FIXED_NEWSTYLE == 0 || flags & !(flag::FIXED_NEWSTYLE | flag::NO_ZEROES) != 0 {
                return Err(Error::NotNbd { what: "the word of flags", found: flags.into() });
            }
            self.flags = Some(flags);
            return Ok((4, Step::Next));
        }
        let Some((head, rest)) = input.split_first_chunk::<HEAD_BYTES>() else { return Ok((0, Step::More)) };
        let [magic, option_and_length] = [0, 8].map(|at| word(head, at));
        if magic != OPTION_MAGIC {
            return Err(Error::NotNbd { what: "the first word of an option", found: magic });
        }
        let (option, bytes) = ((option_and_length >> 32) as u32, option_and_length as u32);
        if bytes as usize > MAX_OPTION_BYTES {
            return Err(Error::TooLong { option, bytes });
        }
        let Some(data) = rest.get(..bytes as usize) else { return Ok((0, Step::More)) };
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Err(Error::TooMany);
        }
        let step = self.option(option, data, &mut Answers { option, out })?;
        let consumed = HEAD_BYTES + data.len();
        if step == Step::StartTls && input.len() > consumed {
            return Err(Error::BeforeTls { bytes: input.len() - consumed });
        }
        Ok((consumed, step))
    }

    /// TLS was started: what was negotiated before does not count.
    pub fn tls_started(&mut self) {
        self.tls = Tls::Started;
        self.structured = false;
        self.allocation = None;
    }

    fn option(&mut self, option: u32, data: &[u8], answers: &mut Answers<'_>) -> Result<Step, Error> {
        if self.tls == Tls::Required && !matches!(option, asked::STARTTLS | asked::ABORT) {
            if option == asked::EXPORT_NAME {
                return Err(Error::NoTls);
            }
            answers.refuse(say::ERR_TLS_REQD, "this server requires TLS");
            return Ok(Step::Next);
        }
        match option {
            asked::EXPORT_NAME => return self.export_name(data, answers),
            asked::ABORT => {
                answers.say(say::ACK, &[]);
                return Ok(Step::End);
            }
            asked::STARTTLS => return Ok(self.start_tls(data, answers)),
            asked::GO | asked::INFO => return Ok(self.choose(option == asked::GO, data, answers)),
            asked::LIST if data.is_empty() => self.list(answers),
            asked::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                answers.say(say::ACK, &[]);
            }
            asked::LIST | asked::STRUCTURED_REPLY => answers.refuse(say::ERR_INVALID, "this option has no data"),
            asked::LIST_META_CONTEXT | asked::SET_META_CONTEXT => {
                self.contexts(option == asked::SET_META_CONTEXT, data, answers);
            }
            _ => answers.refuse(say::ERR_UNSUP, "this server does not know the option"),
        }
        Ok(Step::Next)
    }

    /// The first export has no name, too.
    fn find(&self, name: &[u8]) -> Option<usize> {
        let named = self.exports.iter().position(|export| export.name.as_bytes() == name);
        named.or(if name.is_empty() { Some(0) } else { None })
    }

    fn session(&self, export: usize) -> Session {
        Session { export, structured: self.structured, allocation: self.allocation == Some(export) }
    }

    fn export_name(&mut self, name: &[u8], answers: &mut Answers<'_>) -> Result<Step, Error> {
        let Some(number) = self.find(name) else {
            return Err(Error::NoSuchExport { name: printable(name) });
        };
        let geometry = self.exports[number].geometry;
        answers.out.extend_from_slice(&geometry.size.to_be_bytes());
        answers.out.extend_from_slice(&geometry.flags(self.structured).to_be_bytes());
        if self.flags.is_none_or(|flags| flags & flag::NO_ZEROES == 0) {
            answers.out.extend_from_slice(&[0; 124]);
        }
        Ok(Step::Serve(self.session(number)))
    }

    fn start_tls(&mut self, data: &[u8], answers: &mut Answers<'_>) -> Step {
        match self.tls {
            _ if !data.is_empty() => answers.refuse(say::ERR_INVALID, "this option has no data"),
            Tls::Off => answers.refuse(say::ERR_POLICY, "this server has no certificate"),
            Tls::Started => answers.refuse(say::ERR_INVALID, "TLS was started before"),
            Tls::Required => {
                answers.say(say::ACK, &[]);
                return Step::StartTls;
            }
        }
        Step::Next
    }

    fn list(&self, answers: &mut Answers<'_>) {
        for export in self.exports.iter() {
            let mut data = (export.name.len() as u32).to_be_bytes().to_vec();
            data.extend_from_slice(export.name.as_bytes());
            data.extend_from_slice(export.description.as_bytes());
            answers.say(say::SERVER, &data);
        }
        answers.say(say::ACK, &[]);
    }

    /// INFO and GO. Size and block sizes are always said: a device that takes whole blocks only must not be used by a
    /// client that did not ask.
    fn choose(&mut self, for_good: bool, data: &[u8], answers: &mut Answers<'_>) -> Step {
        let choice = match Choice::parse(data) {
            Ok(choice) => choice,
            Err(Malformed) => {
                answers.refuse(say::ERR_INVALID, "the option's lengths do not agree");
                return Step::Next;
            }
        };
        let Some(number) = self.find(choice.name) else {
            answers.refuse(say::ERR_UNKNOWN, "there is no such export");
            return Step::Next;
        };
        let Export { name, description, geometry } = &self.exports[number];
        let about = |what: u16, rest: &[&[u8]]| [&what.to_be_bytes()[..], &rest.concat()].concat();
        let flags = geometry.flags(self.structured);
        answers.say(say::INFO, &about(info::EXPORT, &[&geometry.size.to_be_bytes(), &flags.to_be_bytes()]));
        let sizes = [geometry.minimum, geometry.preferred, MAX_PAYLOAD_BYTES].map(u32::to_be_bytes);
        answers.say(say::INFO, &about(info::BLOCK_SIZE, &[&sizes[0], &sizes[1], &sizes[2]]));
        if choice.wants(info::NAME) {
            answers.say(say::INFO, &about(info::NAME, &[name.as_bytes()]));
        }
        if choice.wants(info::DESCRIPTION) && !description.is_empty() {
            answers.say(say::INFO, &about(info::DESCRIPTION, &[description.as_bytes()]));
        }
        answers.say(say::ACK, &[]);
        if for_good { Step::Serve(self.session(number)) } else { Step::Next }
    }

    fn contexts(&mut self, for_good: bool, data: &[u8], answers: &mut Answers<'_>) {
        // An attempt to choose undoes the choice before it, whatever becomes of it.
        self.allocation = if for_good { None } else { self.allocation };
        if !self.structured {
            return answers.refuse(say::ERR_INVALID, "structured replies must be negotiated first");
        }
        let Ok(contexts) = Contexts::parse(data) else {
            return answers.refuse(say::ERR_INVALID, "the option's lengths do not agree");
        };
        let Some(number) = self.find(contexts.name) else {
            return answers.refuse(say::ERR_UNKNOWN, "there is no such export");
        };
        let (name, id) = BASE_ALLOCATION;
        let is_wanted = |query: &&[u8]| *query == name.as_bytes() || (!for_good && *query == b"base:");
        let lists_all = !for_good && contexts.queries.is_empty();
        let has_status = self.exports[number].geometry.has_status;
        if has_status && (lists_all || contexts.queries.iter().any(is_wanted)) {
            let id = if for_good { id } else { 0 };
            answers.say(say::META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()].concat());
            self.allocation = if for_good { Some(number) } else { self.allocation };
        }
        answers.say(say::ACK, &[]);
    }
}

/// Answers to one option.
struct Answers<'a> {
    option: u32,
    out: &'a mut Vec<u8>,
}

impl Answers<'_> {
    fn say(&mut self, kind: u32, data: &[u8]) {
        self.out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        for word in [self.option, kind, data.len() as u32] {
            self.out.extend_from_slice(&word.to_be_bytes());
        }
        self.out.extend_from_slice(data);
    }

    /// The text is for people.
    fn refuse(&mut self, why: u32, text: &str) {
        self.say(why, text.as_bytes());
    }
}

fn word(bytes: &[u8; HEAD_BYTES], at: usize) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

/// What a peer called something, as one line of printable characters.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_SHOWN_BYTES)]).into_owned();
    text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

/// Magic, option, length.
const HEAD_BYTES: usize = 16;

/// The longest data of an option: two names of the protocol's length and a dozen queries. The most that a connection
/// without a proof can make the server keep.
pub const MAX_OPTION_BYTES: usize = 64 << 10;

/// Clients send about five.
pub const MAX_OPTIONS: usize = 256;

/// Of a name, in a log.
const MAX_SHOWN_BYTES: usize = 100;

// The data of the options that have fields.

/// The data's lengths do not agree, or a string is longer than the protocol allows.
struct Malformed;

/// The data of INFO and GO.
struct Choice<'a> {
    name: &'a [u8],
    wanted: &'a [u8],
}

impl<'a> Choice<'a> {
    fn parse(data: &'a [u8]) -> Result<Choice<'a>, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let [high, low] = *fields.take()?;
        let wanted = fields.0;
        let is_whole = wanted.len() == 2 * usize::from(u16::from_be_bytes([high, low]));
        if is_whole { Ok(Choice { name, wanted }) } else { Err(Malformed) }
    }

    fn wants(&self, what: u16) -> bool {
        self.wanted.chunks_exact(2).any(|pair| pair == what.to_be_bytes())
    }
}

/// The data of LIST and SET of contexts.
struct Contexts<'a> {
    name: &'a [u8],
    queries: Vec<&'a [u8]>,
}

impl<'a> Contexts<'a> {
    fn parse(data: &'a [u8]) -> Result<Contexts<'a>, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = u32::from_be_bytes(*fields.take()?);
        // Each query has four bytes at least, so a false count ends with the data.
        let queries: Result<Vec<_>, _> = (0..count).map(|_| fields.string()).collect();
        let queries = queries?;
        if fields.0.is_empty() { Ok(Contexts { name, queries }) } else { Err(Malformed) }
    }
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<&'a [u8; N], Malformed> {
        let (field, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(field)
    }

    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let length = u32::from_be_bytes(*self.take()?) as usize;
        if length > MAX_STRING_BYTES {
            return Err(Malformed);
        }
        let (string, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(string)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Geometry;
    use crate::protocol::transmission_flags;

    /// A client's side of the bytes.
    struct Client {
        handshake: Handshake,
    }

    /// An answer: its kind, and its data.
    type Answer = (u32, Vec<u8>);

    impl Client {
        fn new(tls: Tls) -> Client {
            let first = Geometry { has_status: true, ..Geometry::of_blocks(1 << 30, 4096) };
            let export = |name: &str, geometry| Export { name: name.into(), description: "a disk".into(), geometry };
            let exports = [export("one", first), export("two", Geometry::of_blocks(8192, 1))];
            let mut client = Client { handshake: Handshake::new(exports.into(), tls) };
            assert_eq!(client.feed(&3u32.to_be_bytes()), Ok((4, Step::Next, vec![])));
            client
        }

        fn feed(&mut self, bytes: &[u8]) -> Result<(usize, Step, Vec<u8>), Error> {
            let mut out = Vec::new();
            self.handshake.receive(bytes, &mut out).map(|(consumed, step)| (consumed, step, out))
        }

        fn raw(&mut self, option: u32, data: &[u8]) -> Result<(Step, Vec<u8>), Error> {
            let bytes = bytes(option, data);
            self.feed(&bytes).map(|(consumed, step, out)| {
                assert_eq!(consumed, bytes.len());
                (step, out)
            })
        }

        fn ask(&mut self, option: u32, data: &[u8]) -> (Step, Vec<Answer>) {
            let (step, out) = self.raw(option, data).unwrap();
            let (mut answers, mut rest) = (Vec::new(), &out[..]);
            while let Some((head, data)) = rest.split_first_chunk::<20>() {
                let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
                assert_eq!(word(8), option);
                let (data, behind) = data.split_at(word(16) as usize);
                answers.push((word(12), data.to_vec()));
                rest = behind;
            }
            (step, answers)
        }

        /// The only answer.
        fn answer(&mut self, option: u32, data: &[u8]) -> u32 {
            let (step, answers) = self.ask(option, data);
            assert_eq!((step, answers.len()), (Step::Next, 1));
            answers[0].0
        }
    }

    fn bytes(option: u32, data: &[u8]) -> Vec<u8> {
        let head =
            [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()].concat();
        [&head, data].concat()
    }

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
    }

    /// The data of GO.
    fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
        let mut data = string(name);
        data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
        wanted.iter().for_each(|what| data.extend_from_slice(&what.to_be_bytes()));
        data
    }

    fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut data = string(name);
        data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
        queries.iter().for_each(|query| data.extend_from_slice(&string(query)));
        data
    }

    const NOTHING_MORE: Session = Session { export: 0, structured: false, allocation: false };

    #[test]
    fn an_export_is_chosen_by_its_name_or_without_one() {
        for (name, export) in [("one", 0), ("", 0), ("two", 1)] {
            let (step, answers) = Client::new(Tls::Off).ask(asked::GO, &go(name, &[]));
            assert_eq!(step, Step::Serve(Session { export, ..NOTHING_MORE }));
            let kinds: Vec<u32> = answers.iter().map(|answer| answer.0).collect();
            assert_eq!(kinds, [say::INFO, say::INFO, say::ACK]);
            let size = [1u64 << 30, 8192][export];
            assert_eq!(answers[0].1[..10], [&[0, 0], &size.to_be_bytes()[..]].concat());
            let minimum = [4096u32, 1][export];
            assert_eq!(answers[1].1[..6], [&[0, 3], &minimum.to_be_bytes()[..]].concat());
        }
        let mut client = Client::new(Tls::Off);
        assert_eq!(client.answer(asked::GO, &go("three", &[])), say::ERR_UNKNOWN);
        assert_eq!(client.answer(asked::INFO, &go("three", &[])), say::ERR_UNKNOWN);
        let (step, answers) = client.ask(asked::INFO, &go("one", &[info::NAME, info::DESCRIPTION, 77]));
        assert_eq!((step, answers.len()), (Step::Next, 5), "after a refusal and a description it goes on");
        assert_eq!((&answers[2].1[2..], &answers[3].1[2..]), (&b"one"[..], &b"a disk"[..]));
    }

    #[test]
    fn the_old_way_to_choose_has_zeros_behind_it_unless_both_leave_them_out() {
        let mut client = Client::new(Tls::Off);
        let (step, out) = client.raw(asked::EXPORT_NAME, b"two").unwrap();
        assert_eq!((step, out.len()), (Step::Serve(Session { export: 1, ..NOTHING_MORE }), 10));
        let mut handshake = Handshake::new(client.handshake.exports, Tls::Off);
        let mut out = Vec::new();
        assert_eq!(handshake.receive(&1u32.to_be_bytes(), &mut out), Ok((4, Step::Next)));
        assert!(matches!(handshake.receive(&bytes(asked::EXPORT_NAME, b""), &mut out), Ok((16, Step::Serve(_)))));
        assert_eq!(out.len(), 134);
        let ended = Client::new(Tls::Off).raw(asked::EXPORT_NAME, b"th\nree");
        assert_eq!(ended, Err(Error::NoSuchExport { name: "th?ree".into() }));
    }

    #[test]
    fn what_is_not_known_or_malformed_is_refused_and_the_client_goes_on() {
        let mut client = Client::new(Tls::Off);
        for option in [0, 4, 11, 99, u32::MAX] {
            assert_eq!(client.answer(option, b"data"), say::ERR_UNSUP);
        }
        assert_eq!(client.answer(asked::LIST, b"data"), say::ERR_INVALID);
        assert_eq!(client.answer(asked::STRUCTURED_REPLY, b"data"), say::ERR_INVALID);
        assert_eq!(client.answer(asked::STARTTLS, b""), say::ERR_POLICY);
        let whole = go("one", &[3]);
        for cut in 0..whole.len() {
            assert_eq!(client.answer(asked::GO, &whole[..cut]), say::ERR_INVALID, "{cut}");
        }
        assert_eq!(client.answer(asked::GO, &[&whole[..], b"x"].concat()), say::ERR_INVALID);
        let (step, answers) = client.ask(asked::LIST, b"");
        let data = [string("one"), b"a disk".to_vec()].concat();
        assert_eq!((step, answers.len(), &answers[0]), (Step::Next, 3, &(say::SERVER, data)));
        assert_eq!(client.ask(asked::ABORT, b""), (Step::End, vec![(say::ACK, vec![])]));
    }

    #[test]
    fn the_status_of_blocks_is_negotiated_for_one_export() {
        let mut client = Client::new(Tls::Off);
        let (list, set) = (asked::LIST_META_CONTEXT, asked::SET_META_CONTEXT);
        let base = contexts("one", &["base:allocation"]);
        assert_eq!(client.answer(set, &base), say::ERR_INVALID, "before structured replies");
        assert_eq!(client.answer(asked::STRUCTURED_REPLY, b""), say::ACK);
        for (name, queries, is_there) in [
            ("one", &[][..], true),
            ("one", &["base:"], true),
            ("one", &["qemu:dirty", "base:allocation"], true),
            ("one", &["qemu:"], false),
            ("two", &["base:allocation"], false),
        ] {
            let (_, answers) = client.ask(list, &contexts(name, queries));
            assert_eq!(answers.len(), 1 + usize::from(is_there), "{name} {queries:?}");
        }
        assert_eq!(client.answer(set, &contexts("one", &["base:"])), say::ACK, "a part of a name chooses nothing");
        assert_eq!(client.answer(set, &contexts("three", &["base:allocation"])), say::ERR_UNKNOWN);
        for cut in 0..base.len() {
            assert_eq!(client.answer(set, &base[..cut]), say::ERR_INVALID, "{cut}");
        }
        let (_, answers) = client.ask(set, &base);
        assert_eq!(answers[0], (say::META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec()));
        let (step, answers) = client.ask(asked::GO, &go("", &[]));
        assert_eq!(step, Step::Serve(Session { export: 0, structured: true, allocation: true }));
        assert_ne!(u16::from_be_bytes([answers[0].1[10], answers[0].1[11]]) & transmission_flags::SEND_DF, 0);

        // A choice for another export, and a later one that chooses nothing.
        for undoes in [contexts("one", &[]), contexts("two", &["base:allocation"]), b"x".to_vec()] {
            let mut client = Client::new(Tls::Off);
            client.ask(asked::STRUCTURED_REPLY, b"");
            client.ask(set, &base);
            client.ask(set, &undoes);
            let (step, _) = client.ask(asked::GO, &go("one", &[]));
            assert_eq!(step, Step::Serve(Session { export: 0, structured: true, allocation: false }));
        }
    }

    #[test]
    fn nothing_is_said_before_tls_and_nothing_negotiated_before_counts_inside() {
        let mut client = Client::new(Tls::Required);
        for option in [asked::GO, asked::LIST, asked::STRUCTURED_REPLY, asked::SET_META_CONTEXT, 77] {
            assert_eq!(client.answer(option, b""), say::ERR_TLS_REQD);
        }
        assert_eq!(client.raw(asked::EXPORT_NAME, b"one"), Err(Error::NoTls));
        assert_eq!(client.answer(asked::STARTTLS, b"data"), say::ERR_INVALID);
        let injected = [bytes(asked::STARTTLS, b""), bytes(asked::STRUCTURED_REPLY, b"")].concat();
        assert_eq!(client.feed(&injected), Err(Error::BeforeTls { bytes: 16 }));
        client.handshake.structured = true; // cannot be; if it were
        assert_eq!(client.ask(asked::STARTTLS, b""), (Step::StartTls, vec![(say::ACK, vec![])]));
        client.handshake.tls_started();
        assert_eq!(client.answer(asked::STARTTLS, b""), say::ERR_INVALID);
        assert_eq!(client.ask(asked::GO, &go("one", &[])).0, Step::Serve(NOTHING_MORE));
    }

    #[test]
    fn a_peer_that_does_not_speak_the_protocol_is_left_and_one_that_is_slow_is_not() {
        for flags in [0u32, 2, 4 | 1, u32::MAX] {
            let mut handshake = Handshake::new(Client::new(Tls::Off).handshake.exports, Tls::Off);
            assert!(matches!(handshake.receive(&flags.to_be_bytes(), &mut Vec::new()), Err(Error::NotNbd { .. })));
        }
        let mut client = Client::new(Tls::Off);
        assert!(matches!(client.feed(b"GET / HTTP/1.1\r\n\r\n"), Err(Error::NotNbd { .. })));
        let head = bytes(asked::GO, &[0; 200]);
        for cut in 0..head.len() {
            assert_eq!(client.feed(&head[..cut]), Ok((0, Step::More, vec![])), "{cut}");
        }
        let mut long = bytes(asked::LIST, b"");
        long[12..].copy_from_slice(&(MAX_OPTION_BYTES as u32 + 1).to_be_bytes());
        assert_eq!(client.feed(&long), Err(Error::TooLong { option: asked::LIST, bytes: MAX_OPTION_BYTES as u32 + 1 }));
        for _ in 0..MAX_OPTIONS {
            client.raw(asked::LIST, b"").unwrap();
        }
        assert_eq!(client.raw(asked::LIST, b""), Err(Error::TooMany));
    }
}
