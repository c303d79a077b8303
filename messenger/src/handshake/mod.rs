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

pub mod error;
pub mod frame;

use std::fmt;
use std::ops::Deref;
use std::time::{Duration, Instant};

use remora_wire::codec::{Codec, Reader, TooLarge, cut};
use remora_wire::token::{PROOF_BYTES, proof, verify};
use remora_wire::{Token, printable, record};

use frame::{Decoder, Frame, MAX_HANDSHAKE_PAYLOAD_BYTES};

pub use error::{FrameError, HandshakeError};

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
            return Err(HandshakeError::NotRemora { looks_like: error::looks_like(&begun) });
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

#[cfg(test)]
mod tests;
