//! The handshake of a data connection (a *lane*): one machine for all transports. No I/O, no clock, no randomness.
//!
//! ```text
//!   reader                                                       source
//!   Reader::hello   ── hello {session, region, nonce} ─────────▶ Source::challenge     or a refusal, and the end
//!   Reader::prove   ◀───────────────────── challenge {nonce} ──
//!                   ── HMAC(secret, READER, transcript) ───────▶ Source::examine
//!   Proving::finish ◀── welcome {grant, HMAC(secret, SOURCE, transcript)} ── Proved::welcome     or a denial
//! ```
//!
//! The transcript is hello ‖ challenge, byte for byte as they were sent. The secret never travels. Each end contributes
//! a nonce, so that a recorded handshake opens nothing later. Each end signs under its own label, so that neither can
//! be made to sign its own question. The source's proof is there because a reader must not take memory, or a data set,
//! from an unknown process at the source's address.
//!
//! What the types enforce: a source tells nothing about its regions before [`Source::examine`] has accepted the proof,
//! since only a [`Proved`] makes a welcome. A [`Format`] is a transport's byte layout, and the labels that its two
//! proofs are made under.

use std::marker::PhantomData;

use crate::error::{Denial, Error};
use crate::grants::{self, NONCE_BYTES, PROOF_BYTES};
use crate::region::{RegionId, Secret};

/// The reader's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Number of the lane among those of its peer, from 0. For the source's log only; not part of every format.
    pub(crate) lane: u8,
    /// The session that the reader claims.
    pub(crate) session: u64,
    /// The region to read.
    pub(crate) id: RegionId,
    /// Makes the proofs of this lane unlike those of any other. A format may send fewer bytes of it.
    pub(crate) nonce: [u8; NONCE_BYTES],
}

/// Why a source answers a hello with something other than a challenge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The source has no room, or will not serve this reader.
    Denied(Denial),
    /// The hello has another version.
    Version,
    /// The hello is malformed.
    Malformed,
}

/// A transport's byte layout of the handshake.
pub(crate) trait Format {
    /// The label of the reader's proof.
    const READER: &'static [u8];
    /// The label of the source's proof.
    const SOURCE: &'static [u8];
    /// Bytes of a hello. What the transport appends to it is ignored.
    const HELLO_BYTES: usize;
    /// Bytes of a challenge. What the transport appends to it is ignored.
    const CHALLENGE_BYTES: usize;
    /// What a reader is told of the region once it is let in.
    type Grant: Copy;

    /// Encodes a hello.
    fn hello(hello: &Hello) -> Vec<u8>;
    /// Decodes a hello.
    fn parse_hello(bytes: &[u8]) -> Result<Hello, Error>;
    /// Encodes a challenge.
    fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8>;
    /// Checks a challenge; [`Error::Refused`] if it is a refusal.
    fn parse_challenge(bytes: &[u8]) -> Result<(), Error>;
    /// Encodes a refusal; `None` if this format has no message for it, and the source only hangs up.
    fn refusal(why: Refusal) -> Option<Vec<u8>>;
    /// Encodes a welcome.
    fn welcome(grant: &Self::Grant, proof: &[u8; PROOF_BYTES]) -> Vec<u8>;
    /// Encodes a denial in place of a welcome.
    fn denial(denial: Denial) -> Vec<u8>;
    /// Decodes a welcome; [`Error::Refused`] if it is a denial.
    fn parse_welcome(bytes: &[u8]) -> Result<(Self::Grant, [u8; PROOF_BYTES]), Error>;
}

/// The reader's end, which has said hello.
pub(crate) struct Reader<F> {
    transcript: Transcript,
    format: PhantomData<F>,
}

impl<F: Format> Reader<F> {
    /// Begins; the bytes are for the source.
    pub(crate) fn hello(hello: &Hello) -> (Reader<F>, Vec<u8>) {
        let bytes = F::hello(hello);
        (Reader { transcript: Transcript(bytes.clone()), format: PhantomData }, bytes)
    }

    /// Answers the source's challenge; the proof is for the source.
    ///
    /// # Errors
    /// [`Error::Refused`] if the source refuses; [`Error::Protocol`], [`Error::Version`].
    pub(crate) fn prove<'s>(
        mut self,
        challenge: &[u8],
        secret: &'s Secret,
    ) -> Result<(Proving<'s, F>, [u8; PROOF_BYTES]), Error> {
        F::parse_challenge(challenge)?;
        self.transcript.add(challenge, F::CHALLENGE_BYTES)?;
        let proof = grants::prove(secret, F::READER, &self.transcript.0);
        Ok((Proving { transcript: self.transcript, secret, format: PhantomData }, proof))
    }
}

/// The reader's end, which has proved its session.
pub(crate) struct Proving<'s, F> {
    transcript: Transcript,
    secret: &'s Secret,
    format: PhantomData<F>,
}

impl<F: Format> Proving<'_, F> {
    /// Checks the source's proof, and returns what it tells of the region.
    ///
    /// # Errors
    /// [`Error::Refused`] if the source refuses, [`Error::Impostor`] if its proof is wrong, [`Error::Protocol`].
    pub(crate) fn finish(self, welcome: &[u8]) -> Result<F::Grant, Error> {
        let (grant, proof) = F::parse_welcome(welcome)?;
        if grants::verify(self.secret, F::SOURCE, &self.transcript.0, &proof) {
            Ok(grant)
        } else {
            Err(Error::Impostor)
        }
    }
}

/// The source's end, which has received a hello and answered it by a challenge.
pub(crate) struct Source<F> {
    hello: Hello,
    transcript: Transcript,
    format: PhantomData<F>,
}

/// A hello that gets no challenge.
#[derive(Debug)]
pub(crate) struct Rejected {
    /// What is wrong with the hello.
    pub(crate) error: Error,
    /// The message for the reader, if there is one.
    pub(crate) answer: Option<Vec<u8>>,
}

impl<F: Format> Source<F> {
    /// Begins with a reader's hello; the bytes are for the reader. `nonce` is fresh.
    pub(crate) fn challenge(hello: &[u8], nonce: &[u8; NONCE_BYTES]) -> Result<(Source<F>, Vec<u8>), Rejected> {
        let rejected = |error: Error| {
            let why = if matches!(error, Error::Version { .. }) { Refusal::Version } else { Refusal::Malformed };
            Rejected { error, answer: F::refusal(why) }
        };
        let parsed = F::parse_hello(hello).map_err(rejected)?;
        let mut transcript = Transcript(Vec::with_capacity(F::HELLO_BYTES + F::CHALLENGE_BYTES));
        transcript.add(hello, F::HELLO_BYTES).map_err(rejected)?;
        let challenge = F::challenge(nonce);
        transcript.0.extend_from_slice(&challenge);
        Ok((Source { hello: parsed, transcript, format: PhantomData }, challenge))
    }

    /// What the reader claims. Nothing of it is proved.
    pub(crate) fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Checks the reader's proof. Without a secret (no such session) the answer is the same, and takes as long, as for
    /// a wrong proof.
    ///
    /// # Errors
    /// [`Denial::NotGranted`].
    pub(crate) fn examine<'s>(
        &self,
        proof: &[u8; PROOF_BYTES],
        secret: Option<&'s Secret>,
    ) -> Result<Proved<'_, 's, F>, Denial> {
        let fits = grants::verify_known(secret, F::READER, &self.transcript.0, proof);
        match secret {
            Some(secret) if fits => Ok(Proved { transcript: &self.transcript, secret, format: PhantomData }),
            _ => Err(Denial::NotGranted),
        }
    }
}

/// The source's end, whose reader has proved its session.
pub(crate) struct Proved<'h, 's, F> {
    transcript: &'h Transcript,
    secret: &'s Secret,
    format: PhantomData<F>,
}

impl<F: Format> Proved<'_, '_, F> {
    /// The welcome, with the source's own proof.
    pub(crate) fn welcome(&self, grant: &F::Grant) -> Vec<u8> {
        F::welcome(grant, &grants::prove(self.secret, F::SOURCE, &self.transcript.0))
    }
}

/// What both ends have sent so far, which is what they sign.
struct Transcript(Vec<u8>);

impl Transcript {
    /// Adds the first `length` bytes of a message, which is at least that long.
    fn add(&mut self, message: &[u8], length: usize) -> Result<(), Error> {
        let bytes = message.get(..length).ok_or(Error::Protocol("a message of the handshake is too short"))?;
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

/// For the fuzz targets: what these parsers accept survives encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_parsers<F: Format>(bytes: &[u8]) {
    if let Ok(hello) = F::parse_hello(bytes) {
        assert_eq!(F::parse_hello(&F::hello(&hello)).ok(), Some(hello));
    }
    let _ = F::parse_challenge(bytes);
    if let Ok((grant, proof)) = F::parse_welcome(bytes) {
        let wire = F::welcome(&grant, &proof);
        let again = F::parse_welcome(&wire).map(|(grant, proof)| F::welcome(&grant, &proof));
        assert_eq!(again.ok(), Some(wire));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The smallest layout there can be: every field behind the other.
    struct Plain;

    /// The same layout under other labels.
    struct Relabelled;

    const ID: RegionId = RegionId { generation: 3, region: 1 };
    const SECRET: Secret = [7; 32];
    const NONCE: [u8; NONCE_BYTES] = [5; NONCE_BYTES];
    const HELLO: Hello = Hello { lane: 0, session: 9, id: ID, nonce: [4; NONCE_BYTES] };

    const SHORT: Error = Error::Protocol("short");

    macro_rules! plain {
        ($format:ty, $reader:literal, $source:literal) => {
            impl Format for $format {
                const READER: &'static [u8] = $reader;
                const SOURCE: &'static [u8] = $source;
                const HELLO_BYTES: usize = 41;
                const CHALLENGE_BYTES: usize = 33;
                type Grant = u64;

                fn hello(hello: &Hello) -> Vec<u8> {
                    [&[1][..], &hello.session.to_le_bytes(), &hello.nonce].concat()
                }

                fn parse_hello(bytes: &[u8]) -> Result<Hello, Error> {
                    match bytes.first() {
                        Some(1) => {
                            let session =
                                u64::from_le_bytes(*bytes.get(1..9).and_then(|b| b.first_chunk()).ok_or(SHORT)?);
                            let nonce = *bytes.get(9..).and_then(|rest| rest.first_chunk()).ok_or(SHORT)?;
                            Ok(Hello { lane: 0, session, id: ID, nonce })
                        }
                        _ => Err(Error::Protocol("not a hello")),
                    }
                }

                fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
                    [&[2][..], nonce].concat()
                }

                fn parse_challenge(bytes: &[u8]) -> Result<(), Error> {
                    match bytes.first() {
                        Some(2) => Ok(()),
                        Some(0x80) => Err(Error::Refused(Denial::Busy)),
                        _ => Err(Error::Protocol("not a challenge")),
                    }
                }

                fn refusal(why: Refusal) -> Option<Vec<u8>> {
                    (why != Refusal::Malformed).then(|| vec![0x80])
                }

                fn welcome(grant: &u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
                    [&[3][..], &grant.to_le_bytes(), proof].concat()
                }

                fn denial(_: Denial) -> Vec<u8> {
                    vec![0x80]
                }

                fn parse_welcome(bytes: &[u8]) -> Result<(u64, [u8; PROOF_BYTES]), Error> {
                    match bytes.first() {
                        Some(3) => {
                            let grant =
                                u64::from_le_bytes(*bytes.get(1..9).and_then(|b| b.first_chunk()).ok_or(SHORT)?);
                            Ok((grant, *bytes.get(9..).and_then(|rest| rest.first_chunk()).ok_or(SHORT)?))
                        }
                        Some(0x80) => Err(Error::Refused(Denial::NotGranted)),
                        _ => Err(Error::Protocol("not a welcome")),
                    }
                }
            }
        };
    }

    plain!(Plain, b"plain reader", b"plain source");
    plain!(Relabelled, b"other reader", b"other source");

    /// A whole handshake: what the source says of the proof, and what the reader makes of the welcome.
    fn handshake<R: Format, S: Format<Grant = u64>>(
        readers: &Secret,
        sources: Option<&Secret>,
        change: impl Fn(&mut Vec<u8>, &mut Vec<u8>, &mut [u8; PROOF_BYTES]),
    ) -> Result<R::Grant, Error> {
        let (reader, mut hello) = Reader::<R>::hello(&HELLO);
        let (source, mut challenge) = Source::<S>::challenge(&hello, &NONCE).map_err(|rejected| rejected.error)?;
        let mut ignored = [0; PROOF_BYTES];
        change(&mut hello, &mut challenge, &mut ignored);
        let (reader, mut proof) = reader.prove(&challenge, readers)?;
        change(&mut hello, &mut challenge, &mut proof);
        let proved = source.examine(&proof, sources).map_err(Error::Refused)?;
        reader.finish(&proved.welcome(&77))
    }

    #[test]
    fn two_ends_that_share_the_secret_agree() {
        assert_eq!(handshake::<Plain, Plain>(&SECRET, Some(&SECRET), |_, _, _| ()).unwrap(), 77);
        let (_, hello) = Reader::<Plain>::hello(&HELLO);
        let (source, _) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        assert_eq!(*source.hello(), HELLO);
    }

    #[test]
    fn a_wrong_secret_and_an_unknown_session_are_denied_alike() {
        for sources in [Some(&[8; 32]), None] {
            let denied = handshake::<Plain, Plain>(&SECRET, sources, |_, _, _| ());
            assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
        }
        // Not even if the reader signs with the secret of no bytes.
        let denied = handshake::<Plain, Plain>(&[0; 32], None, |_, _, _| ());
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
    }

    #[test]
    fn proofs_under_another_label_are_refused_by_both_ends() {
        let denied = handshake::<Relabelled, Plain>(&SECRET, Some(&SECRET), |_, _, _| ());
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (_, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (reader, _) = reader.prove(&challenge, &SECRET).unwrap();
        let transcript = [hello, challenge].concat();
        let welcome = Plain::welcome(&77, &grants::prove(&SECRET, b"other source", &transcript));
        assert!(matches!(reader.finish(&welcome), Err(Error::Impostor)));
    }

    #[test]
    fn a_source_without_the_secret_is_an_impostor() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (_, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (reader, _) = reader.prove(&challenge, &SECRET).unwrap();
        let transcript = [hello, challenge].concat();
        let welcome = Plain::welcome(&77, &grants::prove(&[9; 32], Plain::SOURCE, &transcript));
        assert!(matches!(reader.finish(&welcome), Err(Error::Impostor)));
    }

    #[test]
    fn a_proof_that_is_reflected_proves_nothing() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (source, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (reader, proof) = reader.prove(&challenge, &SECRET).unwrap();
        // An impostor at the source's address returns the reader's own proof.
        assert!(matches!(reader.finish(&Plain::welcome(&77, &proof)), Err(Error::Impostor)));
        // A reader without the secret returns a proof that a source has made.
        let transcript = [hello, challenge].concat();
        let of_source = grants::prove(&SECRET, Plain::SOURCE, &transcript);
        assert!(matches!(source.examine(&of_source, Some(&SECRET)), Err(Denial::NotGranted)));
    }

    #[test]
    fn a_proof_of_another_handshake_proves_nothing() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        let (_, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        let (_, recorded) = reader.prove(&challenge, &SECRET).unwrap();
        let (source, _) = Source::<Plain>::challenge(&hello, &[6; NONCE_BYTES]).unwrap();
        assert!(matches!(source.examine(&recorded, Some(&SECRET)), Err(Denial::NotGranted)));
    }

    #[test]
    fn a_message_changed_on_the_way_spoils_the_proof() {
        let denied = handshake::<Plain, Plain>(&SECRET, Some(&SECRET), |_, challenge, _| challenge[20] ^= 1);
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
        let denied = handshake::<Plain, Plain>(&SECRET, Some(&SECRET), |_, _, proof| proof[31] ^= 1);
        assert!(matches!(denied, Err(Error::Refused(Denial::NotGranted))), "{denied:?}");
    }

    #[test]
    fn truncated_messages_are_errors_at_every_length() {
        let (reader, hello) = Reader::<Plain>::hello(&HELLO);
        for length in 0..hello.len() {
            let rejected = Source::<Plain>::challenge(&hello[..length], &NONCE).err().unwrap();
            assert!(matches!(rejected.error, Error::Protocol(_)), "{length}");
            assert_eq!(rejected.answer, None);
        }
        let (source, challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        for length in 0..challenge.len() {
            let (reader, _) = Reader::<Plain>::hello(&HELLO);
            assert!(matches!(reader.prove(&challenge[..length], &SECRET), Err(Error::Protocol(_))), "{length}");
        }
        let (_, proof) = reader.prove(&challenge, &SECRET).unwrap();
        let welcome = source.examine(&proof, Some(&SECRET)).unwrap().welcome(&77);
        for length in 0..welcome.len() {
            let (reader, _) = Reader::<Plain>::hello(&HELLO).0.prove(&challenge, &SECRET).unwrap();
            assert!(matches!(reader.finish(&welcome[..length]), Err(Error::Protocol(_))), "{length}");
        }
    }

    #[test]
    fn what_a_transport_appends_to_a_message_is_not_signed() {
        let pad = |bytes: &mut Vec<u8>| bytes.resize(196, 0);
        let (reader, mut hello) = Reader::<Plain>::hello(&HELLO);
        pad(&mut hello);
        let (source, mut challenge) = Source::<Plain>::challenge(&hello, &NONCE).unwrap();
        pad(&mut challenge);
        let (reader, proof) = reader.prove(&challenge, &SECRET).unwrap();
        let welcome = source.examine(&proof, Some(&SECRET)).unwrap().welcome(&77);
        assert_eq!(reader.finish(&welcome).unwrap(), 77);
    }

    #[test]
    fn a_refusal_is_the_sources_reason_at_both_steps() {
        let (reader, _) = Reader::<Plain>::hello(&HELLO);
        let refusal = Plain::refusal(Refusal::Denied(Denial::Busy)).unwrap();
        assert!(matches!(reader.prove(&refusal, &SECRET), Err(Error::Refused(Denial::Busy))));
        let (reader, _) = Reader::<Plain>::hello(&HELLO).0.prove(&Plain::challenge(&NONCE), &SECRET).unwrap();
        let denial = Plain::denial(Denial::NotGranted);
        assert!(matches!(reader.finish(&denial), Err(Error::Refused(Denial::NotGranted))));
    }
}
