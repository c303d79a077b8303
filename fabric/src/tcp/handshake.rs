//! The first four messages of a lane, both ends, each against a deadline. What comes after them is not known here.
//!
//! Each end proves that it holds the session's secret by an HMAC over everything both have said, both nonces included: what is
//! recorded once opens nothing later, and neither end can be made to answer its own question, because the two proofs are
//! made under different labels. Order of business at the source: the form of the hello first, then the proof, and only to
//! who has proved himself is told whether the region exists.

use std::net::TcpStream;

use super::{
    socket::Deadline,
    wire::{Challenge, Garbled, Hello, Status, VERSION, Welcome},
};
use crate::{
    Denial, Error, RegionId, Secret, TransportKind,
    auth::{self, NONCE_BYTES, PROOF_BYTES},
};

/// The reader's end of one lane's handshake. Its three steps are apart, so that several lanes can wait side by side.
pub(super) struct Reaching<'a> {
    stream: &'a TcpStream,
    secret: &'a Secret,
    deadline: Deadline,
    transcript: Transcript,
}

impl<'a> Reaching<'a> {
    /// Says hello.
    pub(super) fn hello(
        stream: &'a TcpStream,
        secret: &'a Secret,
        deadline: Deadline,
        (lane, session, id): (u8, u64, RegionId),
    ) -> Result<Reaching<'a>, Error> {
        let hello = Hello { lane, session, id, nonce: auth::nonce()? }.encode();
        deadline.write(stream, &hello)?;
        Ok(Reaching { stream, secret, deadline, transcript: Transcript::new(&hello) })
    }

    /// Takes the challenge and answers it.
    pub(super) fn prove(mut self) -> Result<Reaching<'a>, Error> {
        let mut bytes = [0; Challenge::BYTES];
        self.deadline.read(self.stream, &mut bytes)?;
        accept(Challenge::decode(&bytes)?.status)?;
        self.transcript.add(&bytes);
        let proof = self.transcript.prove(self.secret, READER);
        self.deadline.write(self.stream, &proof)?;
        Ok(self)
    }

    /// Takes the welcome, makes sure of the source, and says how long the region is, in bytes.
    pub(super) fn finish(self) -> Result<u64, Error> {
        let mut bytes = [0; Welcome::BYTES];
        self.deadline.read(self.stream, &mut bytes)?;
        let welcome = Welcome::decode(&bytes)?;
        accept(welcome.status)?;
        if !auth::verify(self.secret, SOURCE, &self.transcript.0, &welcome.proof) {
            return Err(Error::Impostor);
        }
        Ok(welcome.region_length)
    }
}

/// The source's end of one lane's handshake, once the hello is in and the challenge is out.
pub(super) struct Asked<'a> {
    /// What the reader claims.
    pub(super) hello: Hello,
    stream: &'a TcpStream,
    deadline: Deadline,
    transcript: Transcript,
}

impl<'a> Asked<'a> {
    /// Reads the hello and sends the challenge.
    pub(super) fn challenge(stream: &'a TcpStream, deadline: Deadline) -> Result<Asked<'a>, Error> {
        let mut bytes = [0; Hello::BYTES];
        deadline.read(stream, &mut bytes)?;
        let hello = match Hello::decode(&bytes) {
            Ok(hello) => hello,
            Err(garbled) => {
                refuse_hello(stream, Status::Malformed, deadline);
                return Err(garbled.into());
            }
        };
        let challenge = Challenge { status: Status::Good, nonce: auth::nonce()? }.encode();
        deadline.write(stream, &challenge)?;
        let mut transcript = Transcript::new(&bytes);
        transcript.add(&challenge);
        Ok(Asked { hello, stream, deadline, transcript })
    }

    /// Reads the proof. `None` as secret (no such session) fails as a wrong proof does, and after the same work.
    pub(super) fn is_proved(&self, secret: Option<&Secret>) -> Result<bool, Error> {
        let mut proof = [0; PROOF_BYTES];
        self.deadline.read(self.stream, &mut proof)?;
        Ok(auth::verify_known(secret, READER, &self.transcript.0, &proof))
    }

    /// Lets the reader in.
    pub(super) fn welcome(&self, secret: &Secret, region_length: u64) -> Result<(), Error> {
        let proof = self.transcript.prove(secret, SOURCE);
        self.answer(Welcome { status: Status::Good, region_length, proof })
    }

    /// Shows the reader the door, and says why.
    pub(super) fn refuse(&self, denial: Denial) -> Result<(), Error> {
        self.answer(Welcome { status: Status::Denied(denial), region_length: 0, proof: [0; PROOF_BYTES] })
    }

    fn answer(&self, welcome: Welcome) -> Result<(), Error> {
        self.deadline.write(self.stream, &welcome.encode())
    }
}

/// Says why there will be no handshake, as far as the other end cares to listen.
pub(super) fn refuse_hello(stream: &TcpStream, status: Status, deadline: Deadline) {
    let challenge = Challenge { status, nonce: [0; NONCE_BYTES] };
    let _ = deadline.write(stream, &challenge.encode());
}

/// What both ends have said so far, which is what they sign.
struct Transcript(Vec<u8>);

impl Transcript {
    fn new(hello: &[u8; Hello::BYTES]) -> Transcript {
        Transcript(hello.to_vec())
    }

    fn add(&mut self, challenge: &[u8; Challenge::BYTES]) {
        self.0.extend_from_slice(challenge);
    }

    fn prove(&self, secret: &Secret, label: &[u8]) -> [u8; PROOF_BYTES] {
        auth::prove(secret, label, &self.0)
    }
}

/// Under which label who signs.
const READER: &[u8] = b"remora tcp lane 1 reader";
const SOURCE: &[u8] = b"remora tcp lane 1 source";

fn accept(status: Status) -> Result<(), Error> {
    match status {
        Status::Good => Ok(()),
        Status::Denied(denial) => Err(Error::Refused(denial)),
        Status::Malformed => Err(Error::Protocol("the source could not make sense of our hello")),
    }
}

impl From<Garbled> for Error {
    fn from(garbled: Garbled) -> Error {
        Error::Protocol(match garbled {
            Garbled::Version(theirs) => {
                return Error::Version { kind: TransportKind::Tcp, theirs, ours: VERSION };
            }
            Garbled::Magic => "its first bytes are not those of a Remora data lane",
            Garbled::Status(_) => "a status without meaning",
            Garbled::Reserved => "bytes that must be zero are not",
        })
    }
}
