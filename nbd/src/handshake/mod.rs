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

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::export::Export;
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
