//! Mutual authentication, as a pure machine: bytes, random numbers and the time go in; bytes and decisions come out.
//! The worker feeds it from links, the tests from vectors. After it come the frames of the message layer
//! ([`crate::frame`]).
//!
//! ```text
//!     caller                                 called
//!   ┌───────────────┐  MAGIC + Hello      ┌────────────┐
//!   │ WantChallenge ├────────────────────▶│ WantHello  │    a peer of another protocol gets no further, and no answer
//!   └──────┬────────┘  MAGIC + Challenge  └─────┬──────┘
//!          │◀───────────────────────────────────┤
//!   ┌──────▼────────┐  Proof              ┌─────▼──────┐
//!   │ WantAnswer    ├────────────────────▶│ WantProof  │    a peer without the token gets no further
//!   └──────┬────────┘  Proof              └─────┬──────┘
//!          │◀───────────────────────────────────┤
//!   ┌──────▼────────┐                     ┌─────▼──────┐
//!   │ Established   │◀══ the layer's ════▶│ Established│
//!   └───────────────┘                     └────────────┘
//! ```
//!
//! Invariants:
//!
//! - Each proof is an HMAC over a role's label and *every* byte of both directions so far. So a changed version,
//!   feature, nonce or session number makes the proofs fail; a proof is valid for one connection only (both nonces are
//!   in it); and a proof sent back to its maker is invalid (the labels differ).
//! - The caller proves itself first. Until then the called end sends nothing that depends on the token.
//! - The session's key depends on the token and the whole handshake, both proofs included. No part of it crosses the
//!   wire.
//! - Everything after the handshake is sealed with keys derived from the session's key ([`crate::frame`]).
//! - On a link that is a secure channel, the proofs and the key also depend on the channel ([`Handshake::bind`]). An
//!   attacker in the middle who terminates the channel at both ends has two channels, so neither proof is valid.
//! - A called end that fails sends at most one `Refuse`. It is not authenticated: the caller only shows it in the
//!   error's text.
//!
//! The handshake encrypts nothing; the link below it may. See `protocol/README.md`.

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use remora_wire::codec::{Codec, Reader, TooLarge, cut};
use remora_wire::token::{PROOF_BYTES, proof, verify};
use remora_wire::{Malformed, Token, printable, record};

/// The first bytes of every connection, in both directions. They tell it from a data lane on the same port.
///
/// The line end is for servers of other protocols: a Redis or an HTTP server takes these bytes for a line and answers
/// at once that it does not know it. So the error can name the server, where it would otherwise be a timeout.
pub const MAGIC: [u8; 8] = *b"REMORA\r\n";

/// One of the two ends of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The end that connected.
    Caller,
    /// The end that listened.
    Called,
}

impl Role {
    /// The other end.
    pub fn peer(self) -> Role {
        match self {
            Role::Caller => Role::Called,
            Role::Called => Role::Caller,
        }
    }
}

/// A range of versions of the owner's protocol, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest version.
    pub oldest: u16,
    /// The newest version.
    pub newest: u16,
}

impl Versions {
    /// A single version.
    pub const fn only(version: u16) -> Versions {
        Versions { oldest: version, newest: version }
    }

    /// The newest version that both speak.
    pub fn common(self, other: Versions) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(to, "{}", self.newest),
            false => write!(to, "{} to {}", self.oldest, self.newest),
        }
    }
}

/// What an end brings into a handshake.
#[derive(Debug, Clone)]
pub struct Opening {
    /// The versions that it speaks.
    pub versions: Versions,
    /// What the end can do without, one bit each. Features that both ends have may be used.
    pub features: u64,
    /// Fresh random bytes, which make each handshake unique.
    pub nonce: [u8; 32],
}

/// The handshake of one end. `T` is how it holds its tokens: by reference, or shared.
///
/// Pass received bytes to [`Handshake::handle_input`]. Send what [`Handshake::take_output`] returns, also after an
/// error: it may be a refusal. [`Handshake::poll_established`] says when the handshake is complete. Call
/// [`Handshake::handle_timeout`] at the deadline.
pub struct Handshake<T> {
    /// The tokens of this end; at least one.
    tokens: Vec<T>,
    /// The token that this end proves. A called end learns from the caller's proof which one it is.
    chosen: usize,
    role: Role,
    opening: Opening,
    state: State,
    /// Number of bytes of the peer's [`MAGIC`] received so far.
    magic_received: usize,
    decoder: Decoder,
    /// The channel, if the link is one, then every byte of both directions so far, in order.
    transcript: Vec<u8>,
    is_bound: bool,
    output: Vec<u8>,
    deadline: Instant,
    limit: Duration,
}

enum State {
    /// Caller: has sent Hello.
    WantChallenge,
    /// Caller: has sent its proof.
    WantAnswer(Agreed),
    /// Called: has received nothing. The number is the session's.
    WantHello(u64),
    /// Called: has sent Challenge.
    WantProof(Agreed),
    Done(Box<Established>),
    /// Failed, or the session was taken.
    Over,
}

/// What the two ends have agreed on.
#[derive(Clone, Copy)]
struct Agreed {
    version: u16,
    features: u64,
    session: u64,
}

impl<T: Deref<Target = Token>> Handshake<T> {
    /// The end that connects and sends first. It proves the first of its tokens.
    ///
    /// # Panics
    /// If there is no token.
    pub fn caller(tokens: Vec<T>, opening: Opening, now: Instant, limit: Duration) -> Self {
        let mut this = Handshake::new(tokens, Role::Caller, opening, now, limit);
        let hello = Hello {
            oldest: this.opening.versions.oldest,
            newest: this.opening.versions.newest,
            features: this.opening.features,
            nonce: this.opening.nonce,
        };
        this.say_magic();
        this.say(HELLO, payload(|out| Hello::put(&hello, out)));
        this
    }

    /// The end that was connected to. It chooses the session's number, and accepts a proof of any of its tokens.
    ///
    /// # Panics
    /// If there is no token.
    pub fn called(tokens: Vec<T>, opening: Opening, session: u64, now: Instant, limit: Duration) -> Self {
        let mut this = Handshake::new(tokens, Role::Called, opening, now, limit);
        this.state = State::WantHello(session);
        this
    }

    fn new(tokens: Vec<T>, role: Role, opening: Opening, now: Instant, limit: Duration) -> Handshake<T> {
        assert!(!tokens.is_empty(), "a handshake needs a token");
        Handshake {
            tokens,
            chosen: 0,
            role,
            opening,
            state: State::WantChallenge,
            magic_received: 0,
            decoder: Decoder::new(MAX_HANDSHAKE_PAYLOAD_BYTES),
            transcript: Vec::new(),
            is_bound: false,
            output: Vec::new(),
            deadline: now + limit,
            limit,
        }
    }

    /// Makes the proofs and the key depend on the secure channel that carries the handshake. `binding` is a value that
    /// only the two ends of that channel share, such as the `tls-exporter` of RFC 9266. Both ends of a channel must
    /// call this before the first call of [`Handshake::handle_input`]. Further calls have no effect.
    pub fn bind(&mut self, binding: &[u8; BINDING_BYTES]) {
        if !std::mem::replace(&mut self.is_bound, true) {
            self.transcript.splice(0..0, LABEL_CHANNEL.iter().chain(binding).copied());
        }
    }

    /// Handles received bytes.
    ///
    /// # Errors
    /// The handshake has failed: send what [`Handshake::take_output`] returns, and close.
    pub fn handle_input(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let outcome = self.read(bytes);
        if let Err(error) = &outcome {
            self.state = State::Over;
            self.refuse_after(error);
        }
        outcome
    }

    /// Handles the time; call it once [`Handshake::deadline`] may have passed.
    ///
    /// # Errors
    /// [`HandshakeError::TimedOut`]: the deadline has passed, and the handshake is not complete.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), HandshakeError> {
        if now < self.deadline || matches!(self.state, State::Done(_)) {
            return Ok(());
        }
        self.state = State::Over;
        Err(HandshakeError::TimedOut { limit: self.limit })
    }

    /// When the handshake must be complete, whatever the peer sends.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns what is to be sent now; empty if there is nothing.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Returns the session, once, as soon as both proofs are valid. Send the output first: it may hold the proof that
    /// the peer waits for.
    pub fn poll_established(&mut self) -> Option<Established> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Done(established) => Some(*established),
            state => {
                self.state = state;
                None
            }
        }
    }

    /// The token that both ends proved, once the handshake is complete.
    pub fn proved(&self) -> &T {
        &self.tokens[self.chosen]
    }

    /// Bytes held that belong to no frame yet.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn held(&self) -> usize {
        self.decoder.buffered()
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let rest = self.read_magic(bytes)?;
        self.decoder.feed(rest);
        // After the handshake, the bytes belong to the message layer.
        while !matches!(self.state, State::Done(_) | State::Over) {
            let Some(frame) = self.decoder.next_frame()? else {
                break;
            };
            self.read_frame(&frame)?;
        }
        Ok(())
    }

    /// Compares received bytes with the magic, and returns the ones after it.
    fn read_magic<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], HandshakeError> {
        let wanted = &MAGIC[self.magic_received..];
        let length = wanted.len().min(bytes.len());
        if bytes[..length] != wanted[..length] {
            let begun = [&MAGIC[..self.magic_received], bytes].concat();
            return Err(HandshakeError::NotRemora { looks_like: looks_like(&begun) });
        }
        self.magic_received += length;
        if length > 0 && self.magic_received == MAGIC.len() {
            self.transcript.extend_from_slice(&MAGIC);
        }
        Ok(&bytes[length..])
    }

    fn read_frame(&mut self, frame: &Frame) -> Result<(), HandshakeError> {
        match (&self.state, frame.tag) {
            (State::WantHello(session), HELLO) => self.read_hello(frame, *session),
            (State::WantChallenge, CHALLENGE) => self.read_challenge(frame),
            (State::WantProof(agreed), PROOF) => self.read_client_proof(frame, *agreed),
            (State::WantAnswer(agreed), PROOF) => self.read_server_proof(frame, *agreed),
            (State::WantChallenge | State::WantAnswer(_), REFUSE) => Err(self.read_refusal(frame)),
            (_, tag) => Err(HandshakeError::OutOfTurn { tag }),
        }
    }

    fn read_hello(&mut self, frame: &Frame, session: u64) -> Result<(), HandshakeError> {
        let hello = Hello::take(&mut Reader::new(&frame.payload))?; // later versions may add fields
        let ours = self.opening.versions;
        let version = agree(ours, versions(hello.oldest, hello.newest)?)?;
        self.heard(frame);
        self.say_magic();
        let challenge = Challenge {
            version,
            oldest: ours.oldest,
            newest: ours.newest,
            features: self.opening.features,
            nonce: self.opening.nonce,
            session,
        };
        self.say(CHALLENGE, payload(|out| Challenge::put(&challenge, out)));
        self.state = State::WantProof(Agreed { version, features: hello.features & self.opening.features, session });
        Ok(())
    }

    fn read_challenge(&mut self, frame: &Frame) -> Result<(), HandshakeError> {
        let challenge = Challenge::take(&mut Reader::new(&frame.payload))?;
        let theirs = versions(challenge.oldest, challenge.newest)?;
        let version = agree(self.opening.versions, theirs)?;
        if version != challenge.version {
            let what = "a version that is not the newest common one";
            return Err(FrameError::Field { what }.into());
        }
        self.heard(frame);
        self.say_proof();
        self.state = State::WantAnswer(Agreed {
            version,
            features: challenge.features & self.opening.features,
            session: challenge.session,
        });
        Ok(())
    }

    fn read_client_proof(&mut self, frame: &Frame, agreed: Agreed) -> Result<(), HandshakeError> {
        self.check_proof(frame)?;
        self.say_proof();
        self.establish(agreed);
        Ok(())
    }

    fn read_server_proof(&mut self, frame: &Frame, agreed: Agreed) -> Result<(), HandshakeError> {
        self.check_proof(frame)?;
        self.establish(agreed);
        Ok(())
    }

    fn check_proof(&mut self, frame: &Frame) -> Result<(), HandshakeError> {
        let peer = self.role.peer();
        let proves = |token: &T| verify(token.bytes(), &[proof_label(peer), &self.transcript], &frame.payload);
        let proved = match self.role {
            Role::Caller => proves(&self.tokens[self.chosen]).then_some(self.chosen),
            Role::Called => self.tokens.iter().position(proves),
        };
        self.chosen = proved.ok_or(HandshakeError::WrongToken { said_by_peer: false })?;
        self.heard(frame);
        Ok(())
    }

    fn say_proof(&mut self) {
        let proof = proof(self.proved().bytes(), &[proof_label(self.role), &self.transcript]);
        self.say(PROOF, proof.to_vec());
    }

    fn establish(&mut self, agreed: Agreed) {
        let key = proof(self.proved().bytes(), &[LABEL_SESSION_KEY, &self.transcript]);
        self.state = State::Done(Box::new(Established {
            role: self.role,
            session: agreed.session,
            version: agreed.version,
            features: agreed.features,
            key,
            rest: self.decoder.take_rest(),
        }));
    }

    /// Reads a refusal. It is not authenticated: it only makes the error's text.
    fn read_refusal(&self, frame: &Frame) -> HandshakeError {
        let refusal = match Refusal::take(&mut Reader::new(&frame.payload)) {
            Ok(refusal) => refusal,
            Err(malformed) => return malformed.into(),
        };
        let text = String::from_utf8_lossy(&frame.payload[Refusal::MAX_BYTES..]);
        match refusal.code {
            REFUSE_VERSION => HandshakeError::NoCommonVersion {
                theirs: Versions { oldest: refusal.oldest, newest: refusal.newest },
                ours: self.opening.versions,
            },
            REFUSE_TOKEN => HandshakeError::WrongToken { said_by_peer: true },
            code => HandshakeError::Refused { code, text: printable(&text).into_owned() },
        }
    }

    /// Refuses the caller if its operator can fix the failure; any other failure gets no answer. A caller that fails
    /// closes without a refusal: the called end has either refused already, or is not to be trusted.
    fn refuse_after(&mut self, error: &HandshakeError) {
        let code = match (self.role, error) {
            (Role::Called, HandshakeError::NoCommonVersion { .. }) => REFUSE_VERSION,
            (Role::Called, HandshakeError::WrongToken { .. }) => REFUSE_TOKEN,
            _ => return,
        };
        if code == REFUSE_VERSION {
            self.say_magic(); // the caller has not received it yet
        }
        self.say(REFUSE, refusal(code, "", self.opening.versions));
    }

    fn say_magic(&mut self) {
        self.output.extend_from_slice(&MAGIC);
        self.transcript.extend_from_slice(&MAGIC);
    }

    fn say(&mut self, tag: u8, payload: Vec<u8>) {
        let start = self.output.len();
        Frame::plain(tag, payload).encode(&mut self.output);
        self.transcript.extend_from_slice(&self.output[start..]);
    }

    fn heard(&mut self, frame: &Frame) {
        frame.encode(&mut self.transcript);
    }
}

/// A session between two authenticated ends.
pub struct Established {
    role: Role,
    session: u64,
    version: u16,
    features: u64,
    key: [u8; PROOF_BYTES],
    /// Bytes received after the handshake.
    rest: Vec<u8>,
}

impl Established {
    /// This end.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The session's number, the same at both ends.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The version that both ends speak.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// The features that both ends have.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Takes the bytes that arrived after the handshake.
    pub fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.rest)
    }

    /// The session's key, known only to the two ends. Pass on what [`remora_wire::derive()`] makes of it, never the key
    /// itself.
    pub fn key(&self) -> [u8; PROOF_BYTES] {
        self.key
    }
}

impl fmt::Debug for Established {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Established")
            .field("role", &self.role)
            .field("session", &self.session)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Builds what the called end sends to a connection that its owner refuses without reading anything from it.
///
/// The code must be at least [`FIRST_OWNER_REFUSAL`]: the ones below belong to the handshake. The text is cut at what
/// one frame holds.
pub fn refuse(code: u8, text: &str, versions: Versions) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    Frame::plain(REFUSE, refusal(code, text, versions)).encode(&mut out);
    out
}

/// The caller's first frame. The layout is the same in all versions, but may grow at its end.
struct Hello {
    oldest: u16,
    newest: u16,
    features: u64,
    nonce: [u8; 32],
}

record!(Hello { oldest: u16, newest: u16, features: u64, nonce: [u8; 32] });

/// The called end's first frame. The layout is the same in all versions, but may grow at its end.
struct Challenge {
    version: u16,
    oldest: u16,
    newest: u16,
    features: u64,
    nonce: [u8; 32],
    session: u64,
}

record!(Challenge { version: u16, oldest: u16, newest: u16, features: u64, nonce: [u8; 32], session: u64 });

/// The last frame of a called end that refuses, with the versions it speaks. The owner's explanation may follow.
struct Refusal {
    code: u8,
    oldest: u16,
    newest: u16,
}

record!(Refusal { code: u8, oldest: u16, newest: u16 });

// The handshake's payloads fit into its frames.
const _: () = {
    let most = MAX_HANDSHAKE_PAYLOAD_BYTES as usize;
    assert!(Hello::MAX_BYTES <= most);
    assert!(Challenge::MAX_BYTES <= most);
    assert!(Refusal::MAX_BYTES <= most);
};

fn refusal(code: u8, text: &str, versions: Versions) -> Vec<u8> {
    let refusal = Refusal { code, oldest: versions.oldest, newest: versions.newest };
    let mut payload = payload(|out| Refusal::put(&refusal, out));
    payload.extend_from_slice(cut(text, MAX_HANDSHAKE_PAYLOAD_BYTES as usize - Refusal::MAX_BYTES).as_bytes());
    payload
}

fn payload(put: impl FnOnce(&mut Vec<u8>) -> Result<(), TooLarge>) -> Vec<u8> {
    let mut out = Vec::new();
    put(&mut out).expect("the handshake's frames have fixed sizes only, which fit");
    out
}

fn versions(oldest: u16, newest: u16) -> Result<Versions, FrameError> {
    if oldest > newest {
        let what = "an oldest version that is newer than the newest";
        return Err(FrameError::Field { what });
    }
    Ok(Versions { oldest, newest })
}

fn agree(ours: Versions, theirs: Versions) -> Result<u16, HandshakeError> {
    ours.common(theirs).ok_or(HandshakeError::NoCommonVersion { theirs, ours })
}

/// The label of that end's proof.
fn proof_label(of: Role) -> &'static [u8] {
    match of {
        Role::Caller => LABEL_CLIENT_PROOF,
        Role::Called => LABEL_SERVER_PROOF,
    }
}

const HELLO: u8 = 0x01;
const CHALLENGE: u8 = 0x02;
const PROOF: u8 = 0x03;
const REFUSE: u8 = 0x04;

const REFUSE_VERSION: u8 = 1;
const REFUSE_TOKEN: u8 = 2;

/// The lowest code of a refusal that belongs to the owner. The layer attaches no meaning to it.
pub const FIRST_OWNER_REFUSAL: u8 = 3;

// Labels: what an HMAC is for. Each ends with its only zero byte, so none is a prefix of another one, and no two
// purposes can be given the same input.
const LABEL_CLIENT_PROOF: &[u8] = b"remora control: client proof\0";
const LABEL_SERVER_PROOF: &[u8] = b"remora control: server proof\0";
const LABEL_SESSION_KEY: &[u8] = b"remora control: session key\0";

/// Comes before a channel's binding in the transcript. Without a channel the transcript begins with [`MAGIC`], so the
/// two cannot be confused.
const LABEL_CHANNEL: &[u8] = b"tls-exporter\0";

/// Length of a channel's binding.
pub const BINDING_BYTES: usize = 32;

/// Why a handshake failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    // The operator of the two ends can act. Another attempt fails in the same way.
    /// The peer speaks another protocol.
    #[error("the peer speaks another protocol: it {looks_like}")]
    NotRemora {
        /// What the peer seems to be, as the end of a sentence that begins with "it".
        looks_like: String,
    },
    /// The two ends have no version in common.
    #[error("the peer speaks version {theirs}, this end {ours}")]
    NoCommonVersion {
        /// What the peer speaks.
        theirs: Versions,
        /// What this end speaks.
        ours: Versions,
    },
    /// One end could not prove that it holds the other end's token.
    #[error("the peer does not hold the same token as this end{}", if *.said_by_peer { " (reported by the peer)" } else { "" })]
    WrongToken {
        /// The peer rejected our proof and said so. Otherwise its proof failed here, which an altered handshake also
        /// causes.
        said_by_peer: bool,
    },

    // The owner of the peer refused.
    /// The peer's owner refused the connection. The layer attaches no meaning to the code.
    #[error("the peer refused the connection with code {code}{}{text}", if .text.is_empty() { "" } else { ": " })]
    Refused {
        /// The owner's code, at least [`FIRST_OWNER_REFUSAL`] if the peer keeps to the protocol.
        code: u8,
        /// The owner's explanation; may be empty.
        text: String,
    },

    // The network or the peer's host: a later attempt may succeed.
    /// The handshake did not complete in time.
    #[error("the handshake took longer than {limit:?}")]
    TimedOut {
        /// The limit that was exceeded.
        limit: Duration,
    },

    // The peer is broken, or the bytes were altered on their way.
    /// Bytes that are not a frame of the handshake.
    #[error("the peer sent a malformed frame: {0}")]
    Frame(#[from] FrameError),
    /// A valid frame that the current state does not allow.
    #[error("the peer sent a frame with tag {tag:#04x} out of turn")]
    OutOfTurn {
        /// The frame's tag.
        tag: u8,
    },
}

impl From<Malformed> for HandshakeError {
    fn from(malformed: Malformed) -> HandshakeError {
        FrameError::Payload(malformed).into()
    }
}

/// Bytes that are not a frame of the handshake, or a field of one with a value that is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes do not begin with a frame's magic.
    #[error("bad frame magic")]
    Magic,
    /// The checksum of a preamble or a payload is wrong.
    #[error("the checksum of a frame's {part} does not match")]
    Checksum {
        /// "preamble" or "payload".
        part: &'static str,
    },
    /// Flags that this version does not define.
    #[error("frame uses flags {flags:#04x}, which are not defined")]
    Flags {
        /// The preamble's flag byte.
        flags: u8,
    },
    /// The preamble gives a length above the limit.
    #[error("frame payload of {length} bytes exceeds the limit of {limit}")]
    TooLong {
        /// The length that the preamble gives, in bytes.
        length: u32,
        /// The bound, in bytes.
        limit: u32,
    },
    /// A field has a value that is not allowed.
    #[error("the handshake contains {what}")]
    Field {
        /// The value, in words.
        what: &'static str,
    },
    /// The payload is not what its tag says.
    #[error(transparent)]
    Payload(#[from] Malformed),
}

// Guesses what a peer is that does not speak this protocol, so that the error can name the mistake: usually a wrong
// port.

/// What the first bytes look like, as the end of a sentence that begins with "it".
pub(crate) fn looks_like(bytes: &[u8]) -> String {
    let known = KNOWN.iter().find(|(start, _)| bytes.starts_with(start));
    if let Some((_, what)) = known {
        return (*what).to_owned();
    }
    format!("began with \"{}\"", bytes[..bytes.len().min(SHOWN_BYTES)].escape_ascii())
}

/// First bytes of known protocols, longer ones before their prefixes.
const KNOWN: &[(&[u8], &str)] = &[
    (b"HTTP/", "answered as an HTTP server"),
    (b"GET ", "spoke HTTP"),
    (b"HEAD ", "spoke HTTP"),
    (b"POST ", "spoke HTTP"),
    (b"PUT ", "spoke HTTP"),
    (b"OPTIONS ", "spoke HTTP"),
    (b"PRI * HTTP/2", "spoke HTTP"),
    (b"SSH-", "spoke SSH"),
    (b"\x16\x03", "spoke TLS"),
    (b"\x15\x03", "answered in TLS"),
    (b"-NOAUTH", "answered as a Redis or Valkey server (which wants a password)"),
    (b"-DENIED", "answered as a Redis or Valkey server (in protected mode)"),
    (b"-ERR", "answered as a Redis or Valkey server"),
    (b"-LOADING", "answered as a Redis or Valkey server (which is loading)"),
    (b"+", "answered in RESP, as a Redis or Valkey server does"),
    (b"-", "answered in RESP, as a Redis or Valkey server does"),
    (b"*", "spoke RESP, as a client or replica of Redis or Valkey does"),
    (b"PING", "spoke RESP, as a client or replica of Redis or Valkey does"),
];

/// Number of unknown bytes that are shown.
const SHOWN_BYTES: usize = 16;

// The tokens of an endpoint. They may change while it runs, so that tokens can be replaced without a restart.

/// The greatest number of tokens of an endpoint. Each one costs a called end an HMAC over the handshake's bytes for
/// every caller that proves an unknown token.
pub const MAX_KEYS: usize = 8;

/// A token, and the mark that its owner gave to it.
#[derive(Debug, Clone)]
pub struct Key {
    token: Arc<Token>,
    mark: u16,
}

impl Key {
    /// A key. The layer attaches no meaning to the mark; [`Negotiated::mark`](crate::Negotiated::mark) returns it for a
    /// peer that proved this token.
    pub fn new(token: Arc<Token>, mark: u16) -> Key {
        Key { token, mark }
    }

    /// The token.
    pub fn token(&self) -> Arc<Token> {
        self.token.clone()
    }

    /// The mark.
    pub fn mark(&self) -> u16 {
        self.mark
    }
}

impl Deref for Key {
    type Target = Token;

    fn deref(&self) -> &Token {
        &self.token
    }
}

/// The tokens of an endpoint: it proves the first one where it calls, and accepts all of them where it is called.
#[derive(Debug)]
pub struct Keyring(RwLock<Vec<Key>>);

impl Keyring {
    /// A keyring with these keys.
    ///
    /// # Errors
    /// [`WrongCount`].
    pub fn new(keys: Vec<Key>) -> Result<Keyring, WrongCount> {
        check(&keys)?;
        Ok(Keyring(RwLock::new(keys)))
    }

    /// A keyring with one token, whose mark is 0.
    pub fn only(token: Arc<Token>) -> Keyring {
        Keyring(RwLock::new(vec![Key::new(token, 0)]))
    }

    /// Replaces all keys. Handshakes that have begun are completed with the former keys, and sessions go on.
    ///
    /// # Errors
    /// [`WrongCount`]; the keys are unchanged.
    pub fn replace(&self, keys: Vec<Key>) -> Result<(), WrongCount> {
        check(&keys)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(())
    }

    /// The token that this endpoint proves where it calls.
    pub fn first(&self) -> Arc<Token> {
        // There is one: no keyring is made or changed without `check`.
        self.0.read().unwrap_or_else(PoisonError::into_inner)[0].token()
    }

    /// The present keys, in order.
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// An endpoint with no token, or with more than [`MAX_KEYS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} tokens: 1 to {MAX_KEYS} are possible")]
pub struct WrongCount(pub usize);

fn check(keys: &[Key]) -> Result<(), WrongCount> {
    if (1..=MAX_KEYS).contains(&keys.len()) { Ok(()) } else { Err(WrongCount(keys.len())) }
}

// A frame of the handshake: a fixed preamble, the payload, their checksums. Pure: bytes in, frames out.
//
// The meaning of the tags is in [`crate::handshake`]. After the handshake come the frames of the message layer
// ([`crate::frame`]), which have another layout. A checksum finds accidental changes.
//
// ```text
//   0      2    3      4            8                 12              12+n            16+n
//   ┌──────┬────┬──────┬────────────┬─────────────────┬───────────────┬───────────────┐
//   │ "Rm" │tag │flags │ length n   │ CRC-32C of 0..8 │ payload       │ CRC-32C of it │
//   │      │    │zero  │ u32        │ u32             │ n bytes       │ u32           │
//   └──────┴────┴──────┴────────────┴─────────────────┴───────────────┴───────────────┘
// ```
//
// The preamble has a checksum of its own, so that a damaged length is not believed. The length is compared with its
// bound before any byte of the payload is awaited.

/// A complete frame with valid checksums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The meaning of the payload.
    pub tag: u8,
    /// The content.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Makes a frame.
    pub fn plain(tag: u8, payload: Vec<u8>) -> Frame {
        Frame { tag, payload }
    }

    /// Appends the frame's bytes. They depend only on the fields: a received frame encodes to the bytes received.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&preamble(self.tag, &self.payload));
        out.extend_from_slice(&self.payload);
        out.extend_from_slice(&remora_memory::crc::crc32c(&self.payload).to_le_bytes());
    }
}

/// The twelve bytes before the payload.
fn preamble(tag: u8, payload: &[u8]) -> [u8; PREAMBLE_BYTES] {
    let length = u32::try_from(payload.len())
        .expect("the codec bounds every payload by MAX_HANDSHAKE_PAYLOAD_BYTES before it is framed");
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..2].copy_from_slice(&FRAME_MAGIC);
    bytes[2] = tag;
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    let checksum = remora_memory::crc::crc32c(&bytes[..8]);
    bytes[8..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Finds frames in bytes that arrive in pieces.
///
/// Its memory grows with the bytes received, never with the length in a preamble. If every frame is taken after each
/// [`Decoder::feed`], it holds less than one frame of the greatest length plus the last piece.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that belong to frames already taken. The next `feed` removes them.
    taken: usize,
    limit: u32,
}

impl Decoder {
    /// A decoder that accepts payloads of at most `limit` bytes.
    pub fn new(limit: u32) -> Decoder {
        Decoder { buffer: Vec::new(), taken: 0, limit }
    }

    /// Adds received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next complete frame, or `None` if it has not arrived completely.
    ///
    /// # Errors
    /// [`FrameError`]: the next frame cannot be found after this; close the connection.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        let Some((preamble, rest)) = rest.split_first_chunk::<PREAMBLE_BYTES>() else {
            return check_start(rest).map(|()| None);
        };
        let head = Head::parse(preamble, self.limit)?;
        let Some((payload, rest)) = rest.split_at_checked(head.length) else {
            return Ok(None);
        };
        let Some(checksum) = rest.first_chunk::<CHECKSUM_BYTES>() else {
            return Ok(None);
        };
        if remora_memory::crc::crc32c(payload) != u32::from_le_bytes(*checksum) {
            return Err(FrameError::Checksum { part: "payload" });
        }
        let frame = Frame { tag: head.tag, payload: payload.to_vec() };
        self.taken += PREAMBLE_BYTES + head.length + CHECKSUM_BYTES;
        Ok(Some(frame))
    }

    /// Stops finding frames, and returns the bytes that belong to none yet.
    pub fn take_rest(&mut self) -> Vec<u8> {
        let rest = self.buffer.split_off(self.taken.min(self.buffer.len()));
        (self.buffer, self.taken) = (Vec::new(), 0);
        rest
    }

    /// Number of bytes held that belong to no frame taken yet.
    pub fn buffered(&self) -> usize {
        self.buffer.len() - self.taken
    }
}

/// The content of a preamble.
struct Head {
    tag: u8,
    length: usize,
}

impl Head {
    fn parse(bytes: &[u8; PREAMBLE_BYTES], limit: u32) -> Result<Head, FrameError> {
        let [m0, m1, tag, flags, l0, l1, l2, l3, c0, c1, c2, c3] = *bytes;
        check_start(&[m0, m1])?;
        if remora_memory::crc::crc32c(&bytes[..8]) != u32::from_le_bytes([c0, c1, c2, c3]) {
            return Err(FrameError::Checksum { part: "preamble" });
        }
        if flags != 0 {
            return Err(FrameError::Flags { flags });
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        if length > limit {
            return Err(FrameError::TooLong { length, limit });
        }
        Ok(Head { tag, length: length as usize })
    }
}

/// Checks the magic as far as it has arrived: other protocols are recognised by their first byte.
fn check_start(bytes: &[u8]) -> Result<(), FrameError> {
    let length = bytes.len().min(FRAME_MAGIC.len());
    if bytes[..length] == FRAME_MAGIC[..length] {
        return Ok(());
    }
    Err(FrameError::Magic)
}

/// The longest payload of a frame, in bytes. The challenge has 54, and may grow in later versions. This bounds the
/// memory that an unauthenticated peer can take.
pub const MAX_HANDSHAKE_PAYLOAD_BYTES: u32 = 256;

/// Length of a preamble, in bytes.
pub const PREAMBLE_BYTES: usize = 12;

/// Length of the payload's checksum, in bytes.
const CHECKSUM_BYTES: usize = 4;

/// The first bytes of a frame.
const FRAME_MAGIC: [u8; 2] = *b"Rm";
