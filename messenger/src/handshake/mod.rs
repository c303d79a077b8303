//! How two ends prove themselves to each other, as a pure machine: bytes, random numbers and the time go in; bytes and decisions
//! come out. The worker feeds it from links, the tests from vectors. What follows is the message layer's ([`crate::frame`]).
//!
//! ```text
//!     client                                 server
//!   ┌───────────────┐  MAGIC + Hello      ┌────────────┐
//!   │ WantChallenge ├────────────────────▶│ WantHello  │    a stranger gets no further than this, and no answer
//!   └──────┬────────┘  MAGIC + Challenge  └─────┬──────┘
//!          │◀───────────────────────────────────┤
//!   ┌──────▼────────┐  Proof              ┌─────▼──────┐
//!   │ WantAnswer    ├────────────────────▶│ WantProof  │    who does not hold the token gets no further than this
//!   └──────┬────────┘  Proof              └─────┬──────┘
//!          │◀───────────────────────────────────┤
//!   ┌──────▼────────┐                     ┌─────▼──────┐
//!   │ Established   │◀══ the layer's ════▶│ Established│
//!   └───────────────┘                     └────────────┘
//! ```
//!
//! What holds:
//!
//! - Each proof is an HMAC over a role's label and *every* byte of both directions so far. So a changed version, feature,
//!   nonce or session number makes the proofs fail, a proof is good for one conversation only (both nonces are in it), and a
//!   proof sent back to its maker is worthless (the labels differ).
//! - The client proves itself first: a source says nothing that depends on the token to somebody who has not.
//! - The session's key depends on the token and the whole handshake, both proofs included. No part of it crosses the wire.
//! - What follows is sealed with keys made of the session's ([`crate::seal`]).
//! - A server that gives up says at most one word (`Refuse` and a code), and that word is not believed beyond an error's text.
//!
//! What this is not: encryption. See `docs/protocol.md`.

pub mod error;
pub mod frame;
mod unauthenticated;

use std::fmt;
use std::ops::Deref;
use std::time::{Duration, Instant};

use remora_wire::codec::{Codec, Reader, TooLarge, cut};
use remora_wire::proof::{PROOF_BYTES, proof, verify};
use remora_wire::{Token, record};

use frame::{Decoder, Frame, MAX_HANDSHAKE_PAYLOAD_BYTES};

pub use error::{FrameError, HandshakeError};

/// The first bytes of every control connection, in both directions. One port can so serve control and data lanes.
///
/// The line end is there for strangers: a Redis or an HTTP server that we were pointed at by mistake takes this for a line,
/// answers at once that it does not know it, and can be named in the error instead of a time-out.
pub const MAGIC: [u8; 8] = *b"REMORA\r\n";

/// Which end of the conversation.
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
    /// The oldest one spoken.
    pub oldest: u16,
    /// The newest one spoken.
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
    /// The versions it speaks.
    pub versions: Versions,
    /// Optional abilities, one bit each. Version 1 defines none; both ends may use those that both have.
    pub features: u64,
    /// Fresh random bytes: they make each handshake one of a kind.
    pub nonce: [u8; 32],
}

/// The handshake of either end. `T` is how it holds the token: by reference, or shared.
///
/// Feed it ([`Handshake::handle_input`]), send what it has to say ([`Handshake::take_output`], also after an error: it may
/// hold a last word), ask whether it is through ([`Handshake::poll_established`]), and tell it when its deadline has passed.
pub struct Handshake<T> {
    token: T,
    role: Role,
    opening: Opening,
    state: State,
    /// How many bytes of the peer's [`MAGIC`] have been seen, all of them right.
    negotiated: usize,
    decoder: Decoder,
    /// Every byte of both directions so far, in the order in which they were said.
    transcript: Vec<u8>,
    output: Vec<u8>,
    deadline: Instant,
    limit: Duration,
}

enum State {
    /// Client: has said hello.
    WantChallenge,
    /// Client: has proved itself.
    WantAnswer(Agreed),
    /// Server: knows nothing yet. The number is what the session will be called.
    WantHello(u64),
    /// Server: has challenged.
    WantProof(Agreed),
    Done(Box<Established>),
    /// Given out, or failed.
    Over,
}

/// What the two ends have settled.
#[derive(Clone, Copy)]
struct Agreed {
    version: u16,
    features: u64,
    session: u64,
}

impl<T: Deref<Target = Token>> Handshake<T> {
    /// The end that connects and speaks first.
    pub fn caller(token: T, opening: Opening, now: Instant, limit: Duration) -> Self {
        let mut this = Handshake::new(token, Role::Caller, opening, now, limit);
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

    /// The end that was connected to. It will call the session by that number.
    pub fn called(token: T, opening: Opening, session: u64, now: Instant, limit: Duration) -> Self {
        let mut this = Handshake::new(token, Role::Called, opening, now, limit);
        this.state = State::WantHello(session);
        this
    }

    fn new(token: T, role: Role, opening: Opening, now: Instant, limit: Duration) -> Handshake<T> {
        Handshake {
            token,
            role,
            opening,
            state: State::WantChallenge,
            negotiated: 0,
            decoder: Decoder::new(MAX_HANDSHAKE_PAYLOAD_BYTES),
            transcript: Vec::new(),
            output: Vec::new(),
            deadline: now + limit,
            limit,
        }
    }

    /// Takes received bytes.
    ///
    /// # Errors
    /// The handshake has failed: send what [`Handshake::take_output`] still gives, and close.
    pub fn handle_input(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let outcome = self.read(bytes);
        if let Err(fault) = &outcome {
            self.state = State::Over;
            self.say_last_word(fault);
        }
        outcome
    }

    /// Tells the time once [`Handshake::deadline`] may have passed.
    ///
    /// # Errors
    /// [`HandshakeError::TimedOut`]: it has, and the handshake is not through.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), HandshakeError> {
        if now < self.deadline || matches!(self.state, State::Done(_)) {
            return Ok(());
        }
        self.state = State::Over;
        Err(HandshakeError::TimedOut { limit: self.limit })
    }

    /// When the handshake must be through, however often the peer sends something.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What is to be sent now; empty if nothing.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// The session, once, as soon as both proofs hold. Send the output first: it may be the proof that the peer waits for.
    pub fn poll_established(&mut self) -> Option<Established> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Done(established) => Some(*established),
            state => {
                self.state = state;
                None
            }
        }
    }

    /// Received bytes held that belong to no frame yet.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn held(&self) -> usize {
        self.decoder.buffered()
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let rest = self.read_magic(bytes)?;
        self.decoder.feed(rest);
        // Once the session stands, what follows is sealed and is not ours to take.
        while !matches!(self.state, State::Done(_) | State::Over) {
            let Some(frame) = self.decoder.next_frame()? else {
                break;
            };
            self.read_frame(&frame)?;
        }
        Ok(())
    }

    /// Compares what has come with the magic, and gives what is behind it.
    fn read_magic<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], HandshakeError> {
        let wanted = &MAGIC[self.negotiated..];
        let length = wanted.len().min(bytes.len());
        if bytes[..length] != wanted[..length] {
            let begun = [&MAGIC[..self.negotiated], bytes].concat();
            return Err(HandshakeError::NotRemora { looks_like: unauthenticated::looks_like(&begun) });
        }
        self.negotiated += length;
        if length > 0 && self.negotiated == MAGIC.len() {
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
        let hello = Hello::take(&mut Reader::new(&frame.payload))?; // later versions may say more behind it
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
        if !verify(self.token.bytes(), &[proof_label(peer), &self.transcript], &frame.payload) {
            return Err(HandshakeError::WrongToken { said_by_peer: false });
        }
        self.heard(frame);
        Ok(())
    }

    fn say_proof(&mut self) {
        let proof = proof(self.token.bytes(), &[proof_label(self.role), &self.transcript]);
        self.say(PROOF, proof.to_vec());
    }

    fn establish(&mut self, agreed: Agreed) {
        let key = proof(self.token.bytes(), &[LABEL_SESSION_KEY, &self.transcript]);
        self.state = State::Done(Box::new(Established {
            role: self.role,
            session: agreed.session,
            version: agreed.version,
            features: agreed.features,
            key,
            rest: self.decoder.take_rest(),
        }));
    }

    /// The peer will not. Anybody could have sent this: it makes the error's text and decides nothing else.
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
            code => HandshakeError::Refused { code, text: text.replace(char::is_control, " ") },
        }
    }

    /// A server tells the client what its operator can mend, and meets anything else with silence. A client that fails just
    /// goes: by then the server has either refused it already or is not to be trusted.
    fn say_last_word(&mut self, fault: &HandshakeError) {
        let code = match (self.role, fault) {
            (Role::Called, HandshakeError::NoCommonVersion { .. }) => REFUSE_VERSION,
            (Role::Called, HandshakeError::WrongToken { .. }) => REFUSE_TOKEN,
            _ => return,
        };
        if code == REFUSE_VERSION {
            self.say_magic(); // the client has not been greeted yet
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

/// A session between two ends that have proved themselves.
pub struct Established {
    role: Role,
    session: u64,
    version: u16,
    features: u64,
    key: [u8; PROOF_BYTES],
    /// What came behind the handshake already.
    rest: Vec<u8>,
}

impl Established {
    /// Which end we are.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The session's number, the same at both ends.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The version that both ends speak from now on.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// The features that both ends have.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Bytes that came behind the handshake already.
    pub fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.rest)
    }

    /// The session's key, the same at both ends and known to nobody else. Hand on what [`remora_wire::derive()`] makes of it, never itself.
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
/// The code must be at least [`FIRST_OWNER_REFUSAL`]: the ones below belong to the handshake. The text is cut at what one frame
/// holds.
pub fn refuse(code: u8, text: &str, versions: Versions) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    Frame::plain(REFUSE, refusal(code, text, versions)).encode(&mut out);
    out
}

/// The client's first frame. Its layout is the same in all versions, but may grow at its end.
struct Hello {
    oldest: u16,
    newest: u16,
    features: u64,
    nonce: [u8; 32],
}

record!(Hello { oldest: u16, newest: u16, features: u64, nonce: [u8; 32] });

/// The server's first frame. Its layout is the same in all versions, but may grow at its end.
struct Challenge {
    version: u16,
    oldest: u16,
    newest: u16,
    features: u64,
    nonce: [u8; 32],
    session: u64,
}

record!(Challenge { version: u16, oldest: u16, newest: u16, features: u64, nonce: [u8; 32], session: u64 });

/// The last frame of an end that gives up, with the versions it speaks. A text may follow: the owner's explanation.
struct Refusal {
    code: u8,
    oldest: u16,
    newest: u16,
}

record!(Refusal { code: u8, oldest: u16, newest: u16 });

// What a handshake's frames hold, they can carry.
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

/// What the proof of that end begins with.
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

// What an HMAC is for, as its first bytes. Each ends with the only zero byte in it, so that none begins another, and no two
// purposes can ever be given the same input.
const LABEL_CLIENT_PROOF: &[u8] = b"remora control: client proof\0";
const LABEL_SERVER_PROOF: &[u8] = b"remora control: server proof\0";
const LABEL_SESSION_KEY: &[u8] = b"remora control: session key\0";

#[cfg(test)]
mod tests;
