//! The handshake of a lane over a TCP stream, both ends, each step against a deadline. What is said is
//! `lane_handshake`'s machine.

use std::net::TcpStream;

use super::socket::Deadline;
use super::wire::{Tcp, WELCOME_BYTES};
use crate::grants::{self, PROOF_BYTES};
use crate::lane_handshake::{Format, Hello, Proved, Proving, Reader, Refusal, Source};
use crate::{Denial, Error, Secret};

/// The reader's end, which has said hello. The steps are separate, so that the round trips of several lanes overlap.
pub(super) struct HelloSent<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
    reader: Reader<Tcp>,
}

impl<'a> HelloSent<'a> {
    /// Says hello.
    pub(super) fn hello(stream: &'a TcpStream, deadline: Deadline, hello: &Hello) -> Result<HelloSent<'a>, Error> {
        let (reader, bytes) = Reader::hello(hello);
        deadline.write(stream, &bytes)?;
        Ok(HelloSent { stream, deadline, reader })
    }

    /// Receives the challenge and sends the proof.
    pub(super) fn prove(self, secret: &'a Secret) -> Result<ProofSent<'a>, Error> {
        let HelloSent { stream, deadline, reader } = self;
        let mut bytes = [0; Tcp::CHALLENGE_BYTES];
        deadline.read(stream, &mut bytes)?;
        let (reader, proof) = reader.prove(&bytes, secret)?;
        deadline.write(stream, &proof)?;
        Ok(ProofSent { stream, deadline, reader })
    }
}

/// The reader's end, which has proved its session.
pub(super) struct ProofSent<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
    reader: Proving<'a, Tcp>,
}

impl ProofSent<'_> {
    /// Receives the welcome, checks the source's proof, and returns the length of the region in bytes.
    pub(super) fn finish(self) -> Result<u64, Error> {
        let mut bytes = [0; WELCOME_BYTES];
        self.deadline.read(self.stream, &mut bytes)?;
        self.reader.finish(&bytes)
    }
}

/// The source's end, which has received the hello and sent the challenge.
pub(super) struct Responder<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
    source: Source<Tcp>,
}

impl<'a> Responder<'a> {
    /// Receives the hello and sends the challenge, or says why not.
    pub(super) fn challenge(stream: &'a TcpStream, deadline: Deadline) -> Result<Responder<'a>, Error> {
        let mut bytes = [0; Tcp::HELLO_BYTES];
        deadline.read(stream, &mut bytes)?;
        match Source::challenge(&bytes, &grants::nonce()?) {
            Ok((source, challenge)) => {
                deadline.write(stream, &challenge)?;
                Ok(Responder { stream, deadline, source })
            }
            Err(rejected) => {
                if let Some(answer) = rejected.answer {
                    let _ = deadline.write(stream, &answer);
                }
                Err(rejected.error)
            }
        }
    }

    /// What the reader claims.
    pub(super) fn hello(&self) -> &Hello {
        self.source.hello()
    }

    /// Receives the proof and checks it. Without a secret (no such session) it fails as a wrong proof does, after the
    /// same work.
    pub(super) fn examine<'s>(&self, secret: Option<&'s Secret>) -> Result<Result<Proved<'_, 's, Tcp>, Denial>, Error> {
        let mut proof = [0; PROOF_BYTES];
        self.deadline.read(self.stream, &mut proof)?;
        Ok(self.source.examine(&proof, secret))
    }

    /// Lets the reader in.
    pub(super) fn welcome(&self, proved: &Proved<'_, '_, Tcp>, region_length: u64) -> Result<(), Error> {
        self.deadline.write(self.stream, &proved.welcome(&region_length))
    }

    /// Refuses the reader, and says why.
    pub(super) fn refuse(&self, denial: Denial) -> Result<(), Error> {
        self.deadline.write(self.stream, &Tcp::denial(denial))
    }
}

/// Refuses a connection before its hello, if the reader still listens.
pub(super) fn refuse_connection(stream: &TcpStream, denial: Denial, deadline: Deadline) {
    if let Some(refusal) = Tcp::refusal(Refusal::Denied(denial)) {
        let _ = deadline.write(stream, &refusal);
    }
}
